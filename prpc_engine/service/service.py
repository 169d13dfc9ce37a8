"""RpcService: this process as a member of a job. It has a rank, serves objects under names, and
calls other members.

Inline mode (shards=0): this process runs the reactor itself; whoever waits for a result drives it,
serve_forever() drives it for good, and a progress thread does when nobody else. shards=N starts N
more processes, each with a reactor, slab, address and connections of its own; a server made with
sharded=True lives in them, one instance each, and clients talk to each directly.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from prpc_engine import errors
from prpc_engine.client.client import ClientStatistics, RpcClient
from prpc_engine.client.dealer import Dealer
from prpc_engine.client.hedge import HedgePolicy
from prpc_engine.client.hedging import HedgingClient
from prpc_engine.client.retry import RetryPolicy
from prpc_engine.descriptors import names_shortage
from prpc_engine.dropped import close_dropped
from prpc_engine.master.client import MasterClient, SessionBackend
from prpc_engine.master.master import close_in_reactor, master_error
from prpc_engine.master.protocol import host_and_port
from prpc_engine.master.registry import ServerEntry
from prpc_engine.master.session import MasterSession
from prpc_engine.master.watch import TreeEvent
from prpc_engine.node import slab
from prpc_engine.node.held_values import HeldValues
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import TIMEOUT_S
from prpc_engine.rpc.job import pass_on_interrupt
from prpc_engine.rpc.method import ENGINE
from prpc_engine.rpc.server import Bounds
from prpc_engine.rpc.timing import Timing
from prpc_engine.service.cores import take_cores
from prpc_engine.service.in_shard import open_shard
from prpc_engine.service.lost_leases import LostLeases
from prpc_engine.service.serving import RpcServer, Servers
from prpc_engine.service.shard_statistics import TIMEOUT_S as FIGURES_TIMEOUT_S
from prpc_engine.service.shard_statistics import NodeFigures, ShardFigures
from prpc_engine.service.starting import asked_for_shards, refuse_in_import
from prpc_engine.settings import layers
from prpc_engine.settings.config import (
    IPV4_WILDCARD,
    WILDCARDS,
    address_facing,
    check_environment,
    check_made_of,
    check_name,
    check_number,
    check_seconds,
    check_timeout,
)
from prpc_engine.settings.network import DEFAULT
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.sections import NodeArguments
from shard import CoreLocks, Driver, Future, ShardGroup, pin, restore, runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack

# in the master's tree: a node for each service, and below it one for each server
SERVERS_PATH = "/_rpc_/RpcService"
# for all shards to import this package and to join, on a machine that is starting a whole job
SHARDS_TIMEOUT_S = 60.0
REFRESH_TIMEOUT_S = 2.0  # for a master that is there to say who serves now
# at close(), for peers to drop arrays that we lent them: they do at once, unless a handler keeps
# one
LINGER_S = 0.2

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class ServiceStatistics(NodeFigures):
    """What one asks first when it is stuck: who waits for whom, what has gone where."""

    rank: int
    # by "service/number", counted from 1 in the order they were made here
    clients: dict[str, ClientStatistics]


class RpcService:
    """Makes this process a member of a job: it has a rank, serves objects under names, and calls
    other members. A context manager.

    master      "host:port" of the job's Master
    config      all settings, as NodeConfig.load() made them; None: made here, of the file that
                PRPC_CONFIG names, the environment, and `arguments`
    pin         core for the calling thread, None: leave it; shards are pinned to cores of their own
    arguments   settings by name, each of them before what the environment and the file say:

    shards      0: inline mode; N: also start N shard processes (under `if __name__ ==
                "__main__":`); "auto": one for each physical core, less one; else PRPC_SHARDS
    polling     never sleep while waiting: lowest latency for a whole core; else PRPC_ENABLE_POLLING
    pin_cores   True: shards, else the thread that serves, stay on cores that no other node of this
                host takes which is told the same; False: nobody is pinned; else PRPC_PIN_CORES,
                else each shard stays on one core, which another service may take as well
    restart     what becomes of a shard that dies: "on-failure", "never", or a RestartPolicy. One
                that is started again gets new instances of the servers made with sharded=True,
                under their ids
    bind        "host:port" to listen at, port 0 for any free one
    advertise   "host" or "host:port" where others reach this node, if not at what it binds (for
                every address: the one that faces the master); its shards have ports of their own
    transports  which may be used, in order of preference, else PRPC_TRANSPORTS ("tcp,shm"), else
                shm, unix, tcp
    secret      the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET, else this user's on this
                host; or NO_SECRET
    limits      of every connection
    timeout_s   for the master to answer
    tls         TLS for tcp, else PRPC_TLS_CERT, PRPC_TLS_KEY and PRPC_TLS_CA, else [tls]
    allow       who may call which methods of servers made here, else [[allow]], else whoever is in
                the job

    allow_pickle    send, and accept from members of this job who say so too, any object as a
                    pickle; needs a secret
    compression     of what is sent: "zlib", "zstd", "lz4"; for slow networks only
    lease_s         how long this node's rank and servers outlive its silence, in seconds: a host
                    that vanished, or a process that was stopped, is noticed after so many; a
                    process that ended on the master's host at once. Shards have the same
    root            which job of those that share the master: its ranks, services and tree are its
                    own
    stall_budget_s  a handler that keeps the reactor, or a shard, for more seconds is named in the
                    log; math.inf: none is
    timing          measure how long each handler takes, for statistics() and prpc_engine.metrics:
                    0.3 us a call, `async def` 2 us
    slow_call_s     as timing, and handlers that take so many seconds are named in the log

    Raises MasterUnreachable, AuthenticationFailed, AddressInUse, ConfigError, and TypeError for an
    argument that is unknown.
    """

    @names_shortage("an RpcService")
    def __init__(
        self,
        master: str,
        config: NodeConfig | None = None,
        *,
        pin: int | None = None,
        **arguments: Unpack[NodeArguments],
    ) -> None:
        check_environment()
        host_and_port(master)
        self._arguments = arguments if config is None else None  # to read them again with a role
        config = NodeConfig.load(**arguments) if config is None else _changed(config, arguments)
        self.config = config
        self._log(config.notes)
        self.shards = config.shards.count
        self._role = ""
        # by "service/number"
        self._clients: weakref.WeakValueDictionary[str, RpcClient] = weakref.WeakValueDictionary()
        self._client_numbers = itertools.count(1)
        # of what there is one of: the watch for servers, the client of the master, what is held
        self._making = runtime.RLock()
        self._watching = False  # for servers that come and go
        self._news = object()  # another one whenever we hear that some have
        self._cores_before = None if pin is None else _pin_thread(pin)
        self._master = master
        self._closed = False
        self._closings = itertools.count()  # calls of close(): the first one counts
        self._pid = os.getpid()
        self._group: ShardGroup | None = None
        self._locks: CoreLocks | None = None  # of cores that nodes like this one leave to us
        self._core: int | None = None  # of the thread that serves, where there are no shards
        self._master_backend: SessionBackend | None = None
        self._master_client: MasterClient | None = None
        self._held_values: HeldValues | None = None
        try:
            self._driver = Driver(
                config.shards.polling, stall_budget_s=config.node.stall_budget_s, engine=ENGINE
            )
            self._node = Node(self._driver.reactor, self._driver, slab.default_slab(), config)
            self._session = MasterSession(
                self._node,
                master,
                config.node.lease_s,
                root=config.node.root,
                open_timeout_s=config.node.timeout_s,
            )
            self._lost_leases = LostLeases(self._node, self._session)
            timing = Timing.of(config.node)
            self._servers = Servers(self._node, self._driver, self._session, config.allow, timing)
            self._join(config.node.timeout_s)
            self._start_shards()
        except BaseException:
            self._closed = True
            self._shut()
            raise

    def _join(self, timeout_s: float) -> None:
        started = runtime.monotonic()
        try:
            self._session.opened.result()
            self._advertise_what_faces_the_master()
            self._session.join(self._node.addresses, timeout_s=timeout_s).result()
        except errors.RpcError as error:
            raise master_error(self._master, error, started) from error

    def _advertise_what_faces_the_master(self) -> None:
        """Where this node listens at every address. Once the master is reached: its name may have
        been unknown before.
        """
        bind = self.config.node.bind
        if self.config.node.advertise is not None or bind.host not in WILDCARDS:
            return
        facing = address_facing(*host_and_port(self._master), bind.host)
        if facing is None:
            self._log(
                [
                    f"bind={str(bind)!r}: no such address of this host faces the master at "
                    f"{self._master}, so others cannot be told where to connect; say advertise="
                    + (", or bind='[::]:0' for IPv6" if bind.host == IPV4_WILDCARD else "")
                ]
            )
        self.config = self.config.listening_at(bind, advertise=facing)
        self._node.advertise = facing

    @staticmethod
    def _log(lines: Iterable[str]) -> None:
        for line in lines:
            logger.warning("%s", line)

    @property
    def rank(self) -> int:
        """This node's number in the job. It changes only when the master was away for longer than
        the lease and gave it away.
        """
        return self._session.rank

    @property
    def master_client(self) -> MasterClient:
        """The master's other verbs (locks, barriers, the tree, ...), over this node's session.
        Raises Closed.
        """
        with self._making:
            backend = self._backend_of_master()
            if self._master_client is None:
                # failpoint: service.making_master_client
                self._master_client = MasterClient(backend=backend)
            return self._master_client

    def _backend_of_master(self) -> SessionBackend:
        # two would both take what the session tells their watches, and one get it
        with self._making:
            if self._master_backend is None:
                self._check_open()  # or nobody would end it
                self._master_backend = SessionBackend(self._session, self)
            return self._master_backend

    def _start_shards(self) -> None:
        """As many as the settings ask for, each on a core where they ask for that."""
        shards = self.config.shards
        if shards.count:
            refuse_in_import("RpcService is made")
        if shards.pin_cores:
            self._locks = take_cores(shards.count)
        cores = self._locks.cores if self._locks is not None else ()
        if not shards.count:
            for self._core in cores:
                self._driver.pin(self._core)
            return
        with asked_for_shards(self.config):
            self._group = ShardGroup(
                shards.count,
                polling=shards.polling,
                pin=shards.pin_cores is None,
                driver=self._driver,
                stall_budget_s=self.config.node.stall_budget_s,
                restart=shards.restart,
                on_change=self._servers.shard_changed,
            )
            # and in each that is started again
            self._group.at_start(
                open_shard, self._master, self.rank, self.config, cores, timeout_s=SHARDS_TIMEOUT_S
            )
        self._servers.use_shards(self._group)

    def take_role(self, role: str, without_shards: str = "") -> None:
        """Let the variables of a role count for this service from now on, as "ps" for a server of
        tables: its core number, polling and pinning (settings/node_config.py). Arguments go before
        them. The first role counts; where the program passed a NodeConfig, that says all.

        without_shards  why servers of this role cannot live in shards, for the log: those that a
                        variable or the file asked for, and that serve nothing, end. "": they can

        Raises ConfigError for a variable that makes no sense, and what starting shards may raise.
        """
        with self._making:
            self._check_open()
            if self._role or self._arguments is None:
                return
            self._role = role
            found = NodeConfig.load(role, **self._arguments)
            if without_shards:
                self._end_unused_shards()
            asked, running = found.shards, self.config.shards
            notes = [note for note in found.notes if note not in self.config.notes]
            if running.count:
                self._log(self._late(role, found))
                return
            if asked.count and without_shards:
                notes = [
                    f"{found.origins['shards.count']}: {asked.count} shards are asked for, and "
                    f"there are none: {without_shards}"
                ]
                asked = replace(asked, count=0)
            self._log(notes)
            origins = {name: by for name, by in found.origins.items() if name.startswith("shards.")}
            origins = {**self.config.origins, **origins}
            self.config = replace(self.config, shards=asked, origins=origins)
            self._driver.polling = asked.polling
            if asked.count or (asked.pin_cores and self._locks is None):
                self._start_shards()
            self.shards = asked.count

    def _end_unused_shards(self) -> None:
        """End shards that the program did not ask for and that serve nothing."""
        by = self.config.origins["shards.count"]
        if self._group is None or by == f"argument {layers.ARGUMENT_OF_COUNT}":
            return
        if not self._servers.leave_shards():
            return
        self._group.close()
        if self._locks is not None:
            self._locks.close()
        self._group = self._locks = None
        self.config = replace(self.config, shards=replace(self.config.shards, count=0))
        self.shards = 0

    def _late(self, role: str, found: NodeConfig) -> Iterator[str]:
        """A line for each setting of the role that differs from that of shards that run already."""
        for name in ("count", "polling", "pin_cores"):
            has, asked = getattr(self.config.shards, name), getattr(found.shards, name)
            if has != asked and found.origins[f"shards.{name}"] != DEFAULT:
                yield (
                    f"{found.origins[f'shards.{name}']}: this service has shards already, with "
                    f"{name} = {has}: pass RpcService(config=NodeConfig.load({role!r}, ...)) to "
                    "have them started so"
                )

    def _ask_master(self, verb: str, *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        self._check_open()
        return self._session.ask(verb, *args, timeout_s=timeout_s)

    @property
    def lease_s(self) -> float:
        """How long this node's rank and servers outlive its silence, in seconds."""
        return self.config.node.lease_s

    def in_reactor(self, function: Callable[[Future], object]) -> Future:
        """Call function(done) in the reactor's thread, where handlers run; it completes `done`,
        then or later. An error of its own completes it too."""
        self._check_open()
        done = Future(self._driver)

        def run() -> None:
            try:
                function(done)
            except BaseException as error:  # whatever it is, somebody waits
                done.set_error(error)
                pass_on_interrupt(error, self._driver.reactor)

        self._driver.reactor.call_in_engine(run)
        return done

    # -- servers -----------------------------------------------------------------------------------

    def create_server(
        self,
        name: str,
        served: object = None,
        server_id: int = -1,
        sharded: bool = False,
        bounds: Bounds | None = None,
        inline: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> RpcServer:
        """Serve an object's public methods, or a dict of functions, under `name`; without any,
        requests go to its dealers.

        server_id  which server of that service this is; -1 takes the smallest free
        sharded    `served` is then a factory without arguments (a class, say): each shard makes an
                   instance and serves it as a server of its own, with server ids in order of the
                   shards
        bounds     how many tasks run at a time, and how many calls and bytes wait for one to end
        inline     plain functions may run in whatever thread turns the reactor when a request
                   comes, also one of yours that waits for a call of its own: no thread is switched,
                   and they must take no locks, wait for nothing, and rest on no context
        timeout_s  for the master to answer, and for the factories in all shards to return

        Raises ConfigError, NodeExists for a server id that is taken, Rejected for what else the
        master refuses, MasterUnreachable, MaybeExecuted or DeadlineExceeded where there is no
        answer in time.
        """
        server = self._servers.create(name, served, server_id, sharded, bounds, inline, timeout_s)
        server.service = self
        return server

    def create_dealer(self, name: str, timeout_s: float = 10.0) -> Dealer:
        """A peer among those of `name`: it receives their requests, and sends to them by
        `dest_rank`.
        """
        check_timeout(timeout_s)  # before there is a server
        server = self.create_server(name, server_id=self.rank)
        client = self.create_client(name, 1, timeout_s)
        return client.create_dealer(server.queue)

    def serve_forever(self, timeout_s: float | None = None) -> None:
        """Drive the reactor from the calling thread, for `timeout_s` seconds or until
        stop_serving() or close().

        Not needed for serving: without it a progress thread does. With it requests cost no thread
        switch.
        """
        check_seconds("timeout_s", timeout_s, math.inf, or_none=True)
        self._check_open()
        before = None if self._core is None else _pin_thread(self._core)
        try:
            self._driver.run(timeout_s)
        finally:
            if before is not None:
                restore(before)

    def stop_serving(self) -> None:
        """Let serve_forever() return, or the next one when none is under way; the service stays
        open.

        From any thread or signal handler."""
        self._driver.stop_running()

    # -- clients -----------------------------------------------------------------------------------

    def create_client(
        self,
        name: str,
        expected_servers: int = 1,
        timeout_s: float = 10.0,
        balance: str = "least_outstanding",
        retry: RetryPolicy | None = None,
        idempotent: Iterable[str] = (),
        hedge: HedgePolicy | None = None,
    ) -> RpcClient:
        """A client of service `name`, as soon as it has `expected_servers` servers. Raises NoServer
        after `timeout_s` seconds.

        balance     who gets a call: "least_outstanding" of two chosen at random, "random",
                    "round_robin", "local_first"
        retry       how often and how soon a failed call is tried again (retry.py)
        idempotent  methods that may be run twice, beside those that the server registered so
        hedge       when an idempotent method is asked of a second server, because the first is slow
                    (hedge.py); None: never
        """
        check_number("expected_servers", expected_servers, 0, 1 << 20)
        check_name(name)
        check_timeout(timeout_s)
        check_made_of("retry", retry, RetryPolicy)
        check_made_of("hedge", hedge, HedgePolicy)
        self._check_open()
        news = self._news
        entries = self._lookup(name, expected_servers, timeout_s)
        # failpoint: service.found
        if len(entries) < expected_servers:
            services = self._ask_master("services")
            raise errors.NoServer(
                f"service {name!r} has {len(entries)} of {expected_servers} servers after "
                f"{timeout_s} s; the master at "
                f"{self._master} knows these services: {', '.join(services) or 'none'}"
            )
        settings = (
            name,
            self._node,
            entries,
            lambda: self._look_again(name),
            balance,
            retry,
            idempotent,
        )
        gone = self._lost_leases.server_gone
        client = (
            RpcClient(*settings, on_gone=gone)
            if hedge is None
            else HedgingClient(*settings, hedge=hedge, on_gone=gone)
        )
        self._clients[f"{name}/{next(self._client_numbers)}"] = client
        with self._making:
            is_first, self._watching = not self._watching, True
        if is_first:
            self._watch_servers()
        # between the lookup and here, where only clients that were there already were told
        if self._news is not news:
            try:
                client.refresh()
            except errors.RpcError:  # the master is away, or slow
                client.servers_changed()
        return client

    def _watch_servers(self) -> None:
        """Hear of servers that come and go, soon: who makes a client does not wait for that."""
        # a watch must not keep a service that is dropped
        changed, tell = weakref.WeakMethod(self._servers_changed), weakref.WeakMethod(self._tell)
        # closed meanwhile, or too many wait: a failing call asks again
        with contextlib.suppress(errors.RpcError):
            # failpoint: service.watching
            begun = self._backend_of_master().watch_soon(
                SERVERS_PATH, lambda event: (method := changed()) and method(event)
            )
            # of what happened before the watch began
            begun.when_done(lambda _: (method := tell()) and method(None))

    async def _look_again(self, name: str) -> list[ServerEntry]:
        """Who serves now, for coroutines of the control loop. Raises MasterUnreachable, at once
        where the master is known to be away: those known must do then.
        """
        # failpoint: service.looking
        self._check_open()
        if not self._session.connected:
            raise errors.MasterUnreachable(
                f"the master at {self._master} is away: servers of {name!r} cannot be looked up"
            )
        try:
            found = await self._session.submit("lookup", name, 0, timeout_s=REFRESH_TIMEOUT_S)
        except (errors.DeadlineExceeded, errors.MaybeExecuted) as error:
            # what became of the look: a call that waits for it was not sent, and goes on waiting
            raise errors.MasterUnreachable(str(error)) from None
        # failpoint: service.looked
        return _entries(name, found)

    def _servers_changed(self, event: TreeEvent) -> None:
        """A server of some service came or went."""
        # failpoint: service.servers_changed
        self._tell(event.path.removeprefix(SERVERS_PATH).strip("/").partition("/")[0])

    def _tell(self, name: str | None) -> None:
        """Let the clients of that service, or all, ask who serves now."""
        self._news = object()
        for _, client in self._living_clients():
            if name in (None, client.name):
                client.servers_changed()

    def _lookup(self, name: str, expected: int, timeout_s: float) -> list[ServerEntry]:
        return _entries(name, self._ask_master("lookup", name, expected, timeout_s=timeout_s))

    @property
    def address(self) -> str:
        """host:port that this node listens at over tcp. Raises ConfigError where tcp is not among
        its transports, Closed.
        """
        return self._node.address("tcp")

    @property
    def addresses(self) -> list[str]:
        """Where other nodes reach this one, by each of its transports, most preferred first."""
        return self._node.addresses

    @property
    def transports(self) -> dict[str, str]:
        """For each node that this one has connected to: the transport that was taken, and why those
        before it were not.
        """
        return self._node.choices

    def statistics(self) -> ServiceStatistics:
        """A snapshot of this process's side: its peers, servers and slab."""
        return ServiceStatistics(
            **vars(NodeFigures.of(self._node)),
            rank=self.rank,
            clients={key: client.statistics() for key, client in self._living_clients()},
        )

    def figures_of_shards(self, timeout_s: float = FIGURES_TIMEOUT_S) -> tuple[ShardFigures, ...]:
        """The same of each shard, in order: they are asked, for `timeout_s` seconds at most. None
        without any.
        """
        check_timeout(timeout_s)
        self._check_open()
        return self._servers.figures_of_shards(timeout_s)

    def _living_clients(self) -> list[tuple[str, RpcClient]]:
        # copied at once: other threads make clients meanwhile
        references = self._clients.valuerefs()
        return [
            (reference.key, client)
            for reference in references
            if (client := reference()) is not None
        ]

    # -- the end -----------------------------------------------------------------------------------

    @property
    def held_values(self) -> HeldValues:
        """What this process holds for others to fetch, under names. Raises Closed."""
        with self._making:
            self._check_open()
            if self._held_values is None:
                self._held_values = HeldValues(self._node, "held", self.config.allow)
            return self._held_values

    @property
    def driver(self) -> Driver:
        """Who turns this process's reactor while threads wait:
        for what makes futures of its own.
        """
        return self._driver

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed("this RpcService was closed here")

    def _shut(self) -> None:
        """Each step is taken, in this order, though Ctrl-C comes out of one before it."""
        # failpoint: service.shutting
        with contextlib.ExitStack() as steps:
            if self._cores_before is not None:
                steps.callback(restore, self._cores_before)
            if self._locks is not None:
                steps.callback(self._locks.close)
            if hasattr(self, "_node"):
                steps.callback(self._node.slab.wait_for_readers, LINGER_S)
                steps.callback(close_in_reactor, self._driver, self._node)
            elif hasattr(self, "_driver"):
                steps.callback(self._driver.close)
            if hasattr(self, "_session"):
                steps.callback(self._session.close)
            with self._making:
                backend = self._master_backend
            if backend is not None:
                steps.callback(backend.close)
            if self._group is not None:
                steps.callback(self._group.close)
            for _, client in self._living_clients():
                steps.callback(client.close)
            if hasattr(self, "_servers"):
                steps.callback(self._servers.end_dealers)

    def close(self) -> None:
        """Stop the shards, hang up on everybody, cancel what handlers have begun; calls in flight
        end with Closed. A second close, or one in a fork, does nothing. It waits for cancelled
        handlers to clean up, for some seconds at most.

        A fork has none of the threads that may have held our locks when it was made: to wait for
        one of these would be for ever.
        """
        self._closed = self._servers.closed = True
        # failpoint: service.closing
        if not next(self._closings) and self._pid == os.getpid():
            self._shut()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            close_dropped(self, f"RpcService of rank {self.rank}", self.close, self._pid)

    def __enter__(self) -> RpcService:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> RpcService:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _entries(name: str, found: Iterable[Any]) -> list[ServerEntry]:
    """What the master says of a service's servers."""
    return [
        ServerEntry(name, server_id, target, rank, tuple(addresses), marks)
        for server_id, target, rank, addresses, marks in found
    ]


def _changed(config: object, arguments: NodeArguments) -> NodeConfig:
    if not isinstance(config, NodeConfig):
        raise errors.ConfigError(
            f"config={config!r:.100}: a NodeConfig is expected, such as NodeConfig.load(shards=2); "
            "settings are passed by name"
        )
    return config.override(**arguments)


def _pin_thread(core: int) -> set[int]:
    try:
        return pin(core)
    except ValueError as error:
        raise errors.ConfigError(f"pin={core!r}: {error}") from error
