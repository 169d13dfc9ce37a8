"""The servers that one RpcService makes and takes back: in this process, or one instance in each of
its shards.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from prpc_engine import errors
from prpc_engine.client.dealer import QUEUE_REQUESTS_MAX, Dealer, ServerQueue
from prpc_engine.master.session import MasterSession
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import TIMEOUT_S
from prpc_engine.rpc.server import Bounds, ServedObject, ServedStatistics
from prpc_engine.rpc.timing import Timing
from prpc_engine.service.in_shard import figures_of_shard
from prpc_engine.service.shard_statistics import TIMEOUT_S as FIGURES_TIMEOUT_S
from prpc_engine.service.shard_statistics import ShardFigures, ShardReader, total_of
from prpc_engine.service.sharded_servers import ShardedServer, ShardedServers
from prpc_engine.settings.allow import AllowList
from prpc_engine.settings.config import (
    SERVER_ID_MAX,
    check_flag,
    check_made_of,
    check_name,
    check_number,
    check_seconds,
    check_timeout,
)
from shard import ClosedError, Driver, Future, ShardGroup, runtime

# for the reactor's turn under way, at the end of a drain; and for the `finally` blocks of what is
# cancelled then
CUT_TIMEOUT_S = 5.0
# for a master that is away to come back and hear that a server goes; a restart from its journal
# takes less
ABSENT_S = 2.0
DEREGISTER_TIMEOUT_S = 8.0  # a handler may keep the reactor, which is what answers come by
logger = logging.getLogger("prpc")


class RpcServer:
    """A server of this process, made by RpcService.create_server(), or one instance of it in every
    shard. close() takes it back: nothing new is taken on, and what has begun may go on for as
    long as close() is told.
    """

    def __init__(
        self,
        owner: Servers,
        name: str,
        server_ids: tuple[int, ...],
        target: int = 0,
        queue: ServerQueue | None = None,
        sharded: ShardedServer | None = None,
    ) -> None:
        self._owner = owner
        self.queue = queue
        self.name = name
        self.server_ids = server_ids  # one, or one for each shard
        self._target = target
        self._sharded = sharded
        self.service: object = None  # whose server it is: not dropped while somebody holds this
        self._closed = False

    @property
    def server_id(self) -> int:
        """Of the only server; of the first when there is one in every shard."""
        return self.server_ids[0]

    def statistics(self) -> ServedStatistics:
        """What it did. One in shards: the sum of its instances, which are asked; of one that does
        not answer within shard_figures.TIMEOUT_S, what it said last; of those that were started
        again, what each life said last as well."""
        server = self._owner.node.servers.get(self._target) if self._sharded is None else None
        if server is not None:
            return server.statistics()
        names = {f"{self.name}/{server_id}" for server_id in self.server_ids}
        said = [
            figures.servers
            for shard in self._owner.figures_of_shards()
            for figures in (shard.last, shard.past)
            if figures
        ]
        return total_of(one for servers in said for name, one in servers.items() if name in names)

    def create_dealer(self) -> Dealer:
        """One more dealer that receives this server's requests. Raises ConfigError for a server of
        methods.
        """
        if self.queue is None:
            raise errors.ConfigError(
                f"the server of {self.name!r} has methods; one without an object to serve has "
                "dealers"
            )
        return Dealer(self.name, self._owner.driver, queue=self.queue)

    def terminate(self) -> None:
        """End the waits of all its dealers with Terminated."""
        if self.queue is not None:
            self.queue.mailbox.terminate()

    def restart(self) -> None:
        """Let its dealers wait again."""
        if self.queue is not None:
            self.queue.mailbox.restart()

    def close(self, drain_s: float = 0.0) -> None:
        """Serve no more: take nothing new, let what has begun go on for up to `drain_s` seconds,
        and then end it.

        What is ended so raises Cancelled at its caller, what had not begun by then Stopping. A
        master that is away is waited for ABSENT_S seconds, and hears of it when it is back. Again:
        does nothing. Raises ConfigError for a `drain_s` that is none.
        """
        check_seconds("drain_s", drain_s)
        if not self._closed:
            self._closed = True
            if self.queue is not None:
                self.queue.close("it")
            self._owner.remove(self._target if self._sharded is None else self._sharded, drain_s)


@dataclass
class Servers:
    """Makes the servers of one RpcService and takes them back, in this process or in each of its
    shards.

    allow     who may call what of the servers made here
    timing    None: handlers are not timed
    sharded   servers in the shards, and `reader`, what shards did; None: there are no shards

    Owned by an RpcService, which calls use_shards() once it has any, and sets `closed` at its end.
    create() raises Closed after that, ConfigError, and what the master refuses.
    """

    node: Node
    driver: Driver
    session: MasterSession
    allow: AllowList
    timing: Timing | None
    sharded: ShardedServers | None = None
    reader: ShardReader | None = None
    closed: bool = False
    # of dealers, by target
    queues: WeakValueDictionary[int, ServerQueue] = field(default_factory=WeakValueDictionary)

    def use_shards(self, group: ShardGroup) -> None:
        """From now on servers may live in these, too."""
        self.sharded, self.reader = ShardedServers(group), ShardReader(group, figures_of_shard)

    def leave_shards(self) -> bool:
        """Use them no longer; False: servers live in them, and all stays as it is."""
        if self.sharded is not None and self.sharded.has_servers:
            return False
        self.sharded = self.reader = None
        return True

    def shard_changed(self, index: int, state: str, text: str) -> None:
        """What the group says of a shard: it died, or is up again. In a thread of the group's."""
        if self.sharded is not None and not self.closed:
            self.sharded.shard_changed(index, state, text)

    def figures_of_shards(self, timeout_s: float = FIGURES_TIMEOUT_S) -> tuple[ShardFigures, ...]:
        """What each shard did, in order; () without shards, and once closed. Waits for `timeout_s`
        seconds at most, for all of them.
        """
        return self.reader.read(timeout_s) if self.reader is not None and not self.closed else ()

    def create(
        self,
        name: str,
        served: object,
        server_id: int,
        sharded: bool,
        bounds: Bounds | None,
        inline: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> RpcServer:
        """Make a server and register it at the master: `served` is the object, the factory where
        sharded, None for dealers.

        server_id  -1: the smallest free one
        bounds     of tasks, and of calls that wait for one to end; None: the usual ones

        Raises as RpcService.create_server(), and Closed; where sharded, as ShardedServers.create().
        """
        check_name(name)
        check_number("server_id", server_id, -1, SERVER_ID_MAX)
        check_flag("sharded", sharded)
        check_made_of("bounds", bounds, Bounds)
        check_flag("inline", inline)
        check_timeout(timeout_s)
        if sharded:
            return self._create_sharded(name, served, server_id, bounds, timeout_s)
        queue = None
        if served is None:
            queue = ServerQueue(name, self.driver)
            served, bounds = queue.methods(), bounds or Bounds(tasks_max=QUEUE_REQUESTS_MAX)
            inline = True  # they put a request into a queue
        # refuse a bad object before the master hears of it
        ServedObject(name, server_id, 0, served)
        self._check_open()
        until = runtime.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - runtime.monotonic())
            given, target = self.session.prepare_server(name, server_id, left_s).result()
            # failpoint: serving.prepared
            # Before the master tells clients of it: none of them is faster than this line.
            self.node.servers[target] = ServedObject(
                name, given, target, served, bounds, self.allow, self.timing, inline
            )
            self.driver.take_over()
            try:
                left_s = max(0.0, until - runtime.monotonic())
                self.session.register_server(name, given, target, left_s).result()
            except BaseException as error:
                self.node.servers.pop(target, None)
                # failpoint: serving.refused
                # NodeExists: another one has got that id meanwhile
                if not isinstance(error, errors.NodeExists):
                    raise
            else:
                if queue is not None:
                    self.queues[target] = queue
                return RpcServer(self, name, (given,), target, queue)

    def _create_sharded(
        self, name: str, factory: object, server_id: int, bounds: Bounds | None, timeout_s: float
    ) -> RpcServer:
        if self.sharded is None:
            raise errors.ConfigError("sharded=True needs shards: RpcService(shards=N)")
        if not callable(factory):
            raise errors.ConfigError(
                f"sharded=True needs a factory to call in each shard, not {factory!r}"
            )
        try:
            server = self.sharded.create(name, factory, server_id, bounds, timeout_s)
        except ClosedError:
            self._check_open()
            raise
        return RpcServer(self, name, tuple(server.server_ids.values()), sharded=server)

    def end_dealers(self) -> None:
        """The service is closed: those that wait for requests wait no longer."""
        # copied at once: other threads make servers meanwhile
        for reference in self.queues.valuerefs():
            queue = reference()
            if queue is not None:
                queue.close("its service")

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed("this RpcService was closed here")

    def remove(self, server: int | ShardedServer, drain_s: float) -> None:
        """Take a server back, that with this target or one in the shards; what has begun goes on
        for up to `drain_s` seconds.
        """
        try:
            if isinstance(server, int):
                self._remove(server, drain_s)
            elif self.sharded is not None and not self.closed:
                self.sharded.remove(server, drain_s)
        except (errors.Closed, ClosedError):
            if not self.closed:  # else they went with the service, meanwhile
                raise

    def _remove(self, target: int, drain_s: float) -> None:
        server = self.node.servers.get(target)
        if server is not None:
            if not self.closed:
                # failpoint: serving.deregistering
                self._deregister(server, target)
                # failpoint: serving.draining
                self._drain(server, drain_s)
            self.node.servers.pop(target, None)

    def _deregister(self, server: ServedObject, target: int) -> None:
        """Have the master tell clients, before they are refused here."""
        told = self.session.deregister_server(target)
        give_up_at = runtime.monotonic() + DEREGISTER_TIMEOUT_S
        while True:
            try:
                told.result(ABSENT_S)
                return
            except errors.DeadlineExceeded as error:
                # it is asked no longer, and knows when the session ends
                logger.warning(
                    "server %d of %r is closed without the master: %s",
                    server.server_id,
                    server.service,
                    str(error),
                )
                return
            except TimeoutError:
                # what was asked goes on waiting for it in the session
                if not self.session.connected:
                    logger.warning(
                        "server %d of %r is closed; the master at %s is away, and is told when "
                        "it is back",
                        server.server_id,
                        server.service,
                        self.session.address,
                    )
                    return
                if runtime.monotonic() >= give_up_at:
                    logger.warning(
                        "server %d of %r is closed, and the master's answer to that cannot be "
                        "taken: a handler keeps the reactor",
                        server.server_id,
                        server.service,
                    )
                    return

    def _drain(self, server: ServedObject, drain_s: float) -> None:
        """Let what has begun go on for so long, then end it."""
        stopped, cut = Future(self.driver), Future(self.driver)
        in_reactor = self.driver.reactor.call_in_engine
        in_reactor(lambda: server.stop().when_done(lambda _: stopped.set_result(None)))
        try:
            stopped.result(drain_s)
        except TimeoutError:
            in_reactor(lambda: cut.set_result(server.cut()))
            # a handler keeps the reactor, so that it is cut when that returns; or one that was
            # cancelled does not end: the log names both
            with contextlib.suppress(TimeoutError):
                cut.result(CUT_TIMEOUT_S)
                stopped.result(CUT_TIMEOUT_S)
