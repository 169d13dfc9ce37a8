"""The master: the registry behind a server, at an address that everybody knows.

    with Master("127.0.0.1:0") as master:
        print(master.address)

With a journal it remembers: killed and started again at the same address, its clients go on where
they were. The data plane never passes through here, and does not notice. `prpc master` is this as a
process of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from types import TracebackType

from prpc_engine import errors
from prpc_engine.descriptors import names_shortage
from prpc_engine.dropped import close_dropped
from prpc_engine.master.journal import Journal
from prpc_engine.master.methods import MasterMethods, MasterStatistics
from prpc_engine.master.protocol import MASTER_TARGET
from prpc_engine.master.registry import FIRST_TARGET, Registry
from prpc_engine.node.node import Node
from prpc_engine.rpc.method import ENGINE
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import TlsSettings, check_environment, check_seconds
from prpc_engine.settings.node_config import NodeConfig
from shard import Driver, Future, Limits, Slab, gather, runtime

# Without a journal targets begin anywhere below this: whoever still asks for one that an earlier
# master gave reaches nobody.
FIRST_TARGET_MAX = 1 << 31
logger = logging.getLogger("prpc")


def first_number() -> int:
    """Where a master begins to count that knows nothing of those before it: microseconds since
    1970.

    No master gives a number a microsecond, so all that one gives are below those of the next, as
    long as the host's clock is not set back between the two by more than the first one lived. Below
    2**53 until the year 2255: a float holds them.
    """
    return runtime.time_ns() // 1000


class Master:
    """A master in this process, served by a thread of its own. A context manager.

    address  "host:port" to listen at; port 0 takes any free one, and `.address` says which
    secret   the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET, else this user's on this
             host; or NO_SECRET
    journal  a folder to remember in; None: what it knows ends with it, and its clients join the
             next one anew. Tokens of locks and generated ids grow over restarts all the same:
             without a journal they begin with the microseconds since 1970
    sync     see Journal
    stall_budget_s  a request that keeps the master from others for more seconds is named in the
                    log; math.inf: none is

    Raises AddressInUse, JournalError, and ConfigError for a bad address or one that other hosts
    reach without a secret.
    """

    @names_shortage("a Master")
    def __init__(
        self,
        address: str = "127.0.0.1:0",
        secret: bytes | str | None = None,
        limits: Limits | None = None,
        journal: str | os.PathLike[str] | None = None,
        sync: bool = True,
        tls: TlsSettings | None = None,
        stall_budget_s: float | None = None,
    ) -> None:
        check_environment()
        config = NodeConfig.load(
            secret=secret, limits=limits, tls=tls, stall_budget_s=stall_budget_s
        ).listening_at(Address.parse(address, port_min=0), ("tcp",))
        self._closed = True  # until there is something to close
        self._journal = None if journal is None else Journal(journal, sync)
        try:
            self._serve(config)
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise
        self._closed = False

    def _serve(self, config: NodeConfig) -> None:
        first = first_number()
        if self._journal is None:
            registry = Registry(FIRST_TARGET + runtime.randbelow(FIRST_TARGET_MAX), first, first)
        else:
            registry = Registry(first_token=first)
            self._journal.load(registry.tree)
        self._driver = Driver(False, "prpc-master", config.node.stall_budget_s, ENGINE)
        self._driver.prompt = True
        self._slab = Slab()
        try:
            self._methods = MasterMethods(self._driver.reactor, registry, self._journal)
            served = ServedObject(
                "master",
                0,
                MASTER_TARGET,
                self._methods.served,
                allow=config.allow,
                inline=True,
            )
            self._node = Node(
                self._driver.reactor,
                self._driver,
                self._slab,
                config,
                servers=(served,),
                on_peer_lost=self._methods.peer_lost,
            )
            # failpoint: master.listening
        except BaseException:
            self._driver.close()
            raise
        self._driver.take_over()

    def statistics(self) -> MasterStatistics:
        """A snapshot."""
        return self._methods.statistics()

    @property
    def address(self) -> str:
        """host:port for RpcService(master=...). Raises Closed after close()."""
        return self._node.address("tcp")

    def serve_forever(self, timeout_s: float | None = None) -> None:
        """Serve from the calling thread, for `timeout_s` seconds or until close()."""
        check_seconds("timeout_s", timeout_s, math.inf, or_none=True)
        self._driver.run(timeout_s)

    def stop_serving(self) -> None:
        """Let serve_forever() return. From any thread or signal handler."""
        self._driver.stop_running()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            close_dropped(self, f"Master at {self.address}", self.close, self._node.pid)

    def close(self) -> None:
        """Hang up on all nodes. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        close_in_reactor(self._driver, self._node)
        self._slab.close()
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> Master:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Master:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


CLOSE_TIMEOUT_S = 5.0  # for the reactor to reach the end of its turn: a handler may be running


def close_in_reactor(driver: Driver, node: Node, timeout_s: float | None = None) -> None:
    """Close a node in its reactor's thread, then the driver. What its handlers have begun is
    cancelled in between, and may clean up; one that blocks is waited for, for `timeout_s` seconds
    in all, by default CLOSE_TIMEOUT_S. Again, or in a fork: does nothing.
    """
    if driver.closing or node.pid != os.getpid():
        return
    give_up_at = runtime.monotonic() + (CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)

    def left_s() -> float:
        return max(0.0, give_up_at - runtime.monotonic())

    done, closed_by_handler = Future(driver), driver.leads_here()

    def close_node() -> None:
        node.close()  # first: whoever called finds a server that is lost, and may ask another
        begun = [server for server in dict.fromkeys(node.servers.values()) if server.jobs.inside]
        ended = gather([server.stop() for server in begun])
        for server in begun:
            server.cut(again=False)
        if closed_by_handler:  # which would wait for itself
            done.set_result(None)
        else:
            ended.when_done(lambda _: done.set_result(None))

    driver.reactor.call_soon(close_node)
    try:
        done.result(left_s())
    except TimeoutError:
        logger.warning("a handler outlasts close(): its peers find out when it returns")
    except BaseException:  # Ctrl-C: the node is closed all the same
        with contextlib.suppress(TimeoutError):
            done.result(left_s())
        raise
    finally:
        driver.close(left_s())


def master_error(address: str, error: errors.RpcError, started: float) -> errors.RpcError:
    """What to tell a user whose master cannot be reached."""
    refused = isinstance(error, errors.AuthenticationFailed | errors.Rejected)
    if refused and not isinstance(error, errors.Stopping):
        return error
    return errors.MasterUnreachable(
        f"no master answers at {address} ({runtime.monotonic() - started:.1f} s): {error}; "
        f"start one with Master({address!r}), or mend the address"
    )
