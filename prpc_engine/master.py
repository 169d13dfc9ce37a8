"""The master: the registry behind a server, at an address that everybody knows.

    with Master("127.0.0.1:0") as master:
        print(master.address)

A node's session is its connection: when that ends, what it had registered is gone. The data plane never passes through here.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from functools import partial
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.config import TIMEOUT_S_MAX, limits_from, secret_from
from prpc_engine.node import Node
from prpc_engine.peer import Peer
from prpc_engine.registry import Registry, RegistryError, ServerEntry
from prpc_engine.server import Server, calling_peer
from shard import Driver, Future, Limits, Slab

MASTER_TARGET = 1
logger = logging.getLogger("prpc")


class MasterRoute:
    """The way to the master itself."""

    target = MASTER_TARGET

    def __str__(self) -> str:
        return "the master"


MASTER_ROUTE = MasterRoute()


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port"; raises ConfigError with what is allowed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise errors.ConfigError(f"{address!r} is no address: host:port expected, such as 127.0.0.1:0")
    return host.removeprefix("[").removesuffix("]"), int(port)


def entry_to_wire(entry: ServerEntry) -> list[Any]:
    """A server as it travels: [server id, target, rank, addresses]."""
    return [entry.server_id, entry.target, entry.rank, list(entry.addresses)]


class _MasterMethods:
    """What the master answers. Each method's caller is its session."""

    def __init__(self, node: Node) -> None:
        self._registry = Registry()
        self._reactor = node.reactor
        self._watching: defaultdict[str, list[Future]] = defaultdict(list)

    def join(self, addresses: list[str], rank: int) -> int:
        """A rank for the calling node; `rank` is that of its node when a shard calls, else -1."""
        if rank >= 0:
            return self._registry.join_as_shard(calling_peer(), addresses, rank)
        return self._registry.join(calling_peer(), addresses)

    def register_server(self, service: str, server_id: int) -> list[int]:
        """[server id, target] for a server of the calling node."""
        entry = self._registry.register(calling_peer(), service, server_id)
        self._changed(service)
        return [entry.server_id, entry.target]

    def deregister_server(self, target: int) -> bool:
        """Forget one server of the calling node; whether there was one."""
        service = self._registry.deregister(calling_peer(), target)
        if service is not None:
            self._changed(service)
        return service is not None

    async def lookup(self, service: str, expected: int, timeout_s: float) -> list[list[Any]]:
        """The servers of a service, as soon as there are `expected`, or those there are after `timeout_s`."""
        if not 0 <= timeout_s <= TIMEOUT_S_MAX:
            raise RegistryError(f"a look-up waits for 0 to {TIMEOUT_S_MAX} s, not {timeout_s}")
        deadline = self._reactor.clock() + timeout_s
        while True:
            servers = self._registry.servers(service)
            if len(servers) >= expected or self._reactor.clock() >= deadline:
                return [entry_to_wire(entry) for entry in servers]
            change = Future()
            watching = self._watching[service]
            watching.append(change)
            timer = self._reactor.timers.call_at(deadline, partial(change.set_result, None))
            try:
                await change
            finally:
                timer.cancel()
                if change in watching:
                    watching.remove(change)
                if not watching and self._watching.get(service) is watching:
                    del self._watching[service]

    def services(self) -> list[str]:
        """Names of all services that have a server."""
        return self._registry.services()

    def ranks(self) -> list[int]:
        """Of all living nodes."""
        return self._registry.ranks()

    def generate_id(self, key: str) -> int:
        """0, 1, 2, ... for each key."""
        return self._registry.generate_id(key)

    def _changed(self, service: str) -> None:
        for change in self._watching.pop(service, ()):
            change.set_result(None)

    def _session_ended(self, peer: Peer) -> None:
        for service in self._registry.leave(peer):
            self._changed(service)


class Master:
    """A master in this process, served by a thread of its own. A context manager.

    address  "host:port" to listen at; port 0 takes any free one, and `.address` says which
    secret   the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET

    Raises AddressInUse, and ConfigError for a bad address or one that other hosts reach without a secret.
    """

    def __init__(self, address: str = "127.0.0.1:0", secret: bytes | str | None = None, limits: Limits | None = None) -> None:
        host, port = host_and_port(address)
        self._driver = Driver(polling=False, name="prpc-master")
        self._driver.prompt = True
        self._slab = Slab()
        try:
            self._node = Node(
                self._driver.reactor, self._driver, self._slab, secret_from(secret), limits_from(limits), ("tcp",), host, port
            )
        except BaseException:
            self._driver.close()
            raise
        methods = _MasterMethods(self._node)
        self._node.on_peer_lost = methods._session_ended
        self._node.servers[MASTER_TARGET] = Server("master", 0, MASTER_TARGET, methods)
        self._driver.take_over()
        self._closed = False

    @property
    def address(self) -> str:
        """host:port for RpcService(master=...)."""
        return self._node.address("tcp")

    def serve_forever(self, timeout_s: float | None = None) -> None:
        """Serve from the calling thread, for `timeout_s` seconds or until close()."""
        self._driver.run(timeout_s)

    def close(self) -> None:
        """Hang up on all nodes. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        close_in_reactor(self._driver, self._node)
        self._slab.close()

    def __enter__(self) -> Master:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


CLOSE_TIMEOUT_S = 5.0  # for the reactor to reach the end of its turn: a handler may be running


def close_in_reactor(driver: Driver, node: Node) -> None:
    """Close a node in its reactor's thread, then the driver. Again, or in a fork: does nothing."""
    if driver.closing or node.pid != os.getpid():
        return
    done = Future(driver)

    def close_node() -> None:
        node.close()
        done.set_result(None)

    driver.reactor.call_soon(close_node)
    try:
        done.result(CLOSE_TIMEOUT_S)
    except TimeoutError:
        logger.warning("a handler is still running %s s after close(): its peers find out when it returns", CLOSE_TIMEOUT_S)
    finally:
        driver.close()


def master_error(address: str, error: errors.RpcError, started: float) -> errors.RpcError:
    """What to tell a user whose master cannot be reached."""
    if isinstance(error, errors.AuthenticationFailed):
        return error
    return errors.MasterUnreachable(
        f"no master answers at {address} ({time.monotonic() - started:.1f} s): {error}; start one with Master({address!r}), or "
        "mend the address"
    )
