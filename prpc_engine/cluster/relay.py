"""Communication shards of a task: processes that answer other tasks' receives over tcp, each with
its own connections and slab, all behind the task's one data port.

    what                                         runs in
    the table, send(), recv(), hello             the application
    a receive that comes over shared memory      the application: a hop would gain nothing
    a receive that comes over tcp, and whatever  a shard: it greets, decodes, asks the application
      else a task may ask here                   over shared memory, and answers
    a tcp connection, until its hello            the application, which hands it to the shard with
                                                 the fewest (shard/transport/shared_port.py);
                                                 while none lives, it stays there
    what this task receives from others          the application, over connections of its own

A shard writes a large tensor to its socket out of the application's slab, which lends it.

    a shard died                its connections end: who waits there gets TaskLost, which
                                names what was asked; what the application had ready for
                                them is ready again, unless it was on its way
    meanwhile                   who connects, those tasks among them, gets one of the others
    it is started again         it gets the next connections, as it has the fewest
      (shard/group/restart.py)
    it stays down               the task's log says so, and who answers in its place

A shard is a spawned process: who asks for some makes the Server under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prpc_engine.cluster.control import DATA_TARGET, RECEIVE
from prpc_engine.errors import Cancelled, ConfigError, DeadlineExceeded, RemoteError
from prpc_engine.node import slab
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import PASSED, Call
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.job import Expired
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.service.cores import take_cores
from prpc_engine.service.shard_statistics import NodeFigures, ShardFigures, ShardReader
from prpc_engine.settings.address import Address
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.sections import ShardsSection
from shard import (
    VALUE,
    CoreLocks,
    DistributedPort,
    Driver,
    Future,
    ShardError,
    ShardGroup,
    SocketDistributor,
    bind_memory,
    pin,
    this_shard,
)

# for a shard to reach its application, on a machine that is starting a whole job
OPEN_TIMEOUT_S = 30.0

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class RelaySettings:
    """The settings of a task's shards: where the application's node is, which port they serve, and
    the distributor's address and key.
    """

    task: str
    application: tuple[str, ...]  # addresses of the task's data node
    methods: tuple[str, ...]  # of its server
    dealer: str
    key: bytes = field(repr=False)  # of the dealer
    config: NodeConfig
    port: Address  # the task's data port
    cores: tuple[int, ...]  # where each shard is bound; none: they are not


class Relays:
    """The communication shards of one task, on the application's side. Owned by its Server. Raises
    ConfigError, ShardError.
    """

    def __init__(self, shards: ShardsSection, driver: Driver) -> None:
        self._locks = take_cores(shards.count) if shards.pin_cores else CoreLocks((), ())
        self._driver = driver
        self._dealer: SocketDistributor | None = None
        self._task = "this task"
        # shards that live, or will again; the supervisor's thread changes it
        self._staying = set(range(shards.count))
        try:
            self._group = ShardGroup(
                shards.count,
                polling=shards.polling,
                pin=False,
                driver=driver,
                restart=shards.restart,
                on_change=self._shard_changed,
            )
            self._reader = ShardReader(self._group, figures_of_relay)
        except ValueError as error:
            self._locks.close()
            raise ConfigError(f"communication shards: {error}") from error
        except BaseException:
            self._locks.close()
            raise

    def serve(
        self,
        task: str,
        data: Node,
        methods: Iterable[str],
        config: NodeConfig,
        port: Address,
    ) -> None:
        """Have every shard, and each that is started again, answer what comes to the tcp port of
        the task's data node.
        """
        self._task = task
        dealer = self._dealer = SocketDistributor(self._driver.reactor)
        settings = RelaySettings(
            task,
            tuple(data.addresses),
            tuple(methods),
            dealer.name,
            dealer.key,
            config,
            port,
            self._locks.cores,
        )
        self._group.at_start(open_relay, settings)
        data.deal_out(dealer)

    def _shard_changed(self, index: int, state: str, text: str) -> None:
        """What the group says of a shard, in the supervisor's thread."""
        if state == "gone":
            self._staying.discard(index)
            others = ", ".join(map(str, sorted(self._staying)))
            logger.error(
                "%s: communication shard %d stays down: requests through it ended with "
                "TaskLost, and %s in its place (%s)",
                self._task,
                index,
                f"shard {others} answers" if others else "the task's own process answers",
                text,
            )

    @property
    def living(self) -> int:
        """How many shards live."""
        return sum(one.alive for one in self._group.statistics().shards)

    def connections(self) -> tuple[int, ...]:
        """How many connections each shard has that takes any, in the order they were started."""
        return self._dealer.connections() if self._dealer is not None else ()

    def figures(self, timeout_s: float) -> tuple[ShardFigures, ...]:
        """What each shard did, in order;
        waits for `timeout_s` seconds at most, for all together.
        """
        return self._reader.read(timeout_s)

    def close(self) -> None:
        """End the shards, and let others have their cores."""
        self._group.close()
        if self._dealer is not None:
            self._driver.reactor.call_soon(self._dealer.close)
        self._locks.close()


# -- in a shard ------------------------------------------------------------------------------------


class _Relay:
    """Asks the application what others ask here. Lives as long as its shard."""

    def __init__(self, settings: RelaySettings) -> None:
        shard = this_shard()
        if settings.cores:
            pin(settings.cores[shard.index])
            bind_memory(settings.cores[shard.index])
        slab.use_slab(shard.slab)
        self.node = Node(
            shard.reactor,
            None,
            shard.slab,
            settings.config.listening_at(replace(settings.port, port=0), ("shm",)),
        )
        shard.at_stop(self.node.close)
        self._application = self.node.peer_at(settings.application, OPEN_TIMEOUT_S, settings.task)
        self._route = FixedRoute(DATA_TARGET, settings.task)
        self._under_way: defaultdict[Peer | None, set[Call]] = defaultdict(set)
        self.node.on_peer_lost = self._peer_lost
        methods: dict[str, Callable[..., Any]] = {
            name: self._forwarder(name) for name in settings.methods
        }
        methods[RECEIVE] = self._receive
        self.node.servers[DATA_TARGET] = ServedObject(
            "data", shard.index, DATA_TARGET, methods, allow=settings.config.allow, inline=True
        )
        # last: it is ready now
        self.node.take(
            DistributedPort(settings.dealer, settings.key, (settings.port.host, settings.port.port))
        )

    def _forwarder(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def forward(*arguments: Any) -> Any:
            return await self._ask(method, arguments)

        return forward

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        asker = calling_peer()
        # Its deadline is that of who asks us (context.py).
        call = self._application.request(
            self._route, method, method_key(method), arguments, None, True
        )
        under_way = self._under_way[asker]
        under_way.add(call)
        try:
            return await call
        except (RemoteError, DeadlineExceeded) as error:
            raise _raised_again(error) from None
        finally:
            call.cancel()  # when we are cancelled ourselves
            under_way.discard(call)  # not by the asker's name: it may be forgotten already

    def _receive(self, *arguments: Any) -> Deferred:
        """A tensor may be on its way here as its receiver gives up: the application is told so, and
        its word is passed on.
        """
        asker, client = calling_peer(), _Outliving()
        call = self._application.request(
            self._route, RECEIVE, method_key(RECEIVE), arguments, None, True, client
        )
        under_way = self._under_way[asker]
        under_way.add(call)

        withdrawn: list[BaseException] = []

        def withdraw(error: BaseException) -> bool:
            withdrawn.append(error)
            if call.table is not None:
                call.table.send_cancel(call.call_id)
            return True

        answer = Deferred(on_cancel=withdraw)

        def pass_on(_: Future) -> None:
            under_way.discard(call)
            if call.finished == VALUE:
                answer.reply(call._outcome)
            else:
                answer.fail(why_failed(call._outcome, withdrawn, client.is_late))

        call.when_done(pass_on)
        return answer

    def _peer_lost(self, peer: Peer) -> None:
        for call in list(self._under_way.pop(peer, ())):
            call.withdraw()
            call.set_result([])  # nobody is there to hear it


class _Outliving:
    """The client of a receive: it keeps the call in flight after its deadline, so that the asker is
    sent the outcome however late that comes.
    """

    is_late = False  # its deadline has passed

    def failed(self, call: Call, error: BaseException) -> bool:
        """True where the call's deadline has passed: it stays under way until its answer comes."""
        if call.deadline != PASSED:
            return False
        self.is_late = True
        call.outlive()
        return True


def why_failed(
    error: BaseException, withdrawn: Sequence[BaseException], is_late: bool
) -> BaseException:
    """The error that the asker of a receive is sent, where the application answered with `error`.

    withdrawn  the reason for which the asker cancelled it; empty: it did not
    is_late    the deadline has passed at this shard; the asker's and the application's own timers
               may not have fired yet
    """
    if isinstance(error, Cancelled):  # by us, for one of these reasons
        if withdrawn:
            return withdrawn[0]
        if is_late:
            return Expired("its caller's time is over")
    return _raised_again(error)


def _raised_again(error: BaseException) -> BaseException:
    """What the application raised, under its name: who asked knows errors by that. Its deadline is
    the asker's, who is told that this is over though our own timer may not have seen it yet.
    """
    if isinstance(error, DeadlineExceeded):
        return Expired(str(error))
    if not isinstance(error, RemoteError):
        return error
    module, _, name = error.type_name.rpartition(".")
    kind = type(name, (Exception,), {"__module__": module or "builtins"})
    raised: Exception = kind(error.remote_message)
    return raised


_relay: _Relay | None = None


def open_relay(settings: RelaySettings) -> None:
    """Make this shard's relay."""
    global _relay
    _relay = _Relay(settings)


def figures_of_relay() -> NodeFigures:
    """What this shard did so far."""
    if _relay is None:
        raise ShardError("open_relay() comes first")
    return NodeFigures.of(_relay.node)
