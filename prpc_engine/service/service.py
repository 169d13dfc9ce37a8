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
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from prpc_engine import errors
from prpc_engine.client.client import ClientStatistics, RpcClient
from prpc_engine.client.dealer import Dealer
from prpc_engine.client.hedge import HedgePolicy
from prpc_engine.client.hedging import HedgingClient
from prpc_engine.client.retry import RetryPolicy
from prpc_engine.dropped import close_dropped
from prpc_engine.master.client import MasterClient, SessionBackend
from prpc_engine.master.master import close_in_reactor, master_error
from prpc_engine.master.namespace import DEFAULT_ROOT, check_root
from prpc_engine.master.protocol import host_and_port
from prpc_engine.master.registry import ServerEntry
from prpc_engine.master.session import LEASE_S, MasterSession, check_lease
from prpc_engine.master.watch import TreeEvent
from prpc_engine.node import slab
from prpc_engine.node.node import Node, Values
from prpc_engine.rpc.call import TIMEOUT_S
from prpc_engine.rpc.job import pass_on_interrupt
from prpc_engine.rpc.method import ENGINE
from prpc_engine.rpc.server import Bounds
from prpc_engine.rpc.timing import Timing
from prpc_engine.service.in_shard import ShardSettings, open_shard
from prpc_engine.service.serving import RpcServer, Servers
from prpc_engine.service.shard_statistics import TIMEOUT_S as FIGURES_TIMEOUT_S
from prpc_engine.service.shard_statistics import NodeFigures, ShardFigures
from prpc_engine.settings.allow import AllowList
from prpc_engine.settings.config import (
    WILDCARDS,
    TlsSettings,
    address_facing,
    advertise_from,
    allow_from,
    check_environment,
    check_name,
    check_number,
    check_seconds,
    check_stall_budget,
    check_timeout,
    limits_from,
    secret_from,
    transports_from,
)
from shard import (
    STALL_BUDGET_S,
    Driver,
    Future,
    Limits,
    RestartPolicy,
    ShardGroup,
    auto_shards,
    pin,
    restore,
)

SHARDS_MAX = 64
# in the master's tree: a node for each service, and below it one for each server
SERVERS_PATH = "/_rpc_/RpcService"
# for all shards to import this package and to join, on a machine that is starting a whole job
SHARDS_TIMEOUT_S = 60.0
REFRESH_TIMEOUT_S = 2.0  # for a master that is there to say who serves now
# at close(), for peers to drop arrays that we lent them: they do at once, unless a handler keeps
# one
LINGER_S = 0.2


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
    shards      0: inline mode; N: also start N shard processes (under `if __name__ ==
                "__main__":`); "auto": one for each physical core, less one
    polling     never sleep while waiting: lowest latency for a whole core
    pin         core for the calling thread, None: leave it; shards are pinned to cores of their own
    bind        "host:port" to listen at, port 0 for any free one
    advertise   "host" or "host:port" where others reach this node, if not at what it binds (for
                every address: the one that faces the master); its shards have ports of their own
    transports  which may be used, in order of preference, else PRPC_TRANSPORTS ("tcp,shm"), else
                shm, unix, tcp
    secret      the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET, else this user's on this
                host; or NO_SECRET
    timeout_s   for the master to answer
    tls         TLS for tcp, else PRPC_TLS_CERT, PRPC_TLS_KEY and PRPC_TLS_CA, else [tls] of
                PRPC_CONFIG, else none
    allow       who may call which methods of servers made here, else [[allow]] of PRPC_CONFIG, else
                whoever is in the job

    allow_pickle  send, and accept from members of this job who say so too, any object as a pickle;
                  needs a secret
    compression   of what is sent: "zlib", "zstd", "lz4"; for slow networks only

    lease_s  how long this node's rank and servers outlive its silence, in seconds: a host that
             vanished, or a process that was stopped, is noticed after so many; a process that ended
             on the master's host at once. None: 5; shards have the same
    root     which job of those that share the master: its ranks, services and tree are its own.
             None: the usual one
    stall_budget_s  a handler that keeps the reactor, or a shard, for more seconds is named in the
                    log; math.inf: none is
    restart      what becomes of a shard that dies: "on-failure", "never", or a RestartPolicy. One
                 that is started again gets new instances of the servers made with sharded=True,
                 under their ids
    timing       measure how long each handler takes, for statistics() and prpc_engine.metrics: 0.3
                 us a call, `async def` 2 us
    slow_call_s  as timing, and handlers that take so many seconds are named in the log

    Raises MasterUnreachable, AuthenticationFailed, AddressInUse, ConfigError.
    """

    def __init__(
        self,
        master: str,
        shards: int | Literal["auto"] = 0,
        polling: bool = False,
        pin: int | None = None,
        bind: str = "127.0.0.1:0",
        transports: Sequence[str] | None = None,
        secret: bytes | str | None = None,
        limits: Limits | None = None,
        timeout_s: float = 10.0,
        tls: TlsSettings | None = None,
        allow: AllowList | None = None,
        allow_pickle: bool = False,
        compression: str | None = None,
        lease_s: float | None = None,
        root: str | None = None,
        stall_budget_s: float = STALL_BUDGET_S,
        timing: bool = False,
        slow_call_s: float | None = None,
        advertise: str | None = None,
        restart: str | RestartPolicy = "on-failure",
    ) -> None:
        check_environment()
        check_timeout(timeout_s)
        self.shards = (
            auto_shards() if shards == "auto" else check_number("shards", shards, 0, SHARDS_MAX)
        )
        chosen = transports_from(transports)
        host, port = host_and_port(bind)
        master_host, master_port = host_and_port(master)
        self._lease_s = LEASE_S if lease_s is None else lease_s
        check_lease(self._lease_s, None)
        self._root = DEFAULT_ROOT if root is None else root
        check_root(self._root)
        check_stall_budget(stall_budget_s)
        try:
            policy = restart if isinstance(restart, RestartPolicy) else RestartPolicy(restart)
        except ValueError as error:
            raise errors.ConfigError(str(error)) from None
        self._secret = secret_from(secret)
        self._limits = limits_from(limits)
        self._tls, self._allow, self._advertise = (
            tls,
            allow_from(allow),
            (None if advertise is None else advertise_from(advertise, f"advertise={advertise!r}")),
        )
        if self._advertise is None and host in WILDCARDS:
            self._advertise = address_facing(master_host, master_port)
        self._values = Values(allow_pickle, compression)
        self._timing = Timing(slow_call_s) if timing or slow_call_s is not None else None
        # by "service/number"
        self._clients: weakref.WeakValueDictionary[str, RpcClient] = weakref.WeakValueDictionary()
        self._client_numbers = itertools.count(1)
        # of what there is one of: the watch for servers, the client of the master
        self._making = threading.RLock()
        self._watching = False  # for servers that come and go
        self._news = object()  # another one whenever we hear that some have
        self._cores_before = None if pin is None else _pin_thread(pin)
        self._master = master
        self._closed = False
        self._closings = itertools.count()  # calls of close(): the first one counts
        self._pid = os.getpid()
        self._driver = Driver(polling, stall_budget_s=stall_budget_s, engine=ENGINE)
        self._group: ShardGroup | None = None
        self._master_client: MasterClient | None = None
        try:
            self._node = Node(
                self._driver.reactor,
                self._driver,
                slab.default_slab(),
                self._secret,
                self._limits,
                chosen,
                host,
                port,
                tls,
                self._values,
                self._advertise,
            )
            self._session = MasterSession(
                self._node, master, self._lease_s, root=self._root, open_timeout_s=timeout_s
            )
            self._servers = Servers(
                self._node, self._driver, self._session, self._allow, self._timing
            )
            self._join(timeout_s)
            if self.shards:
                self._start_shards(self.shards, polling, chosen, host, stall_budget_s, policy)
        except BaseException:
            self._closed = True
            self._shut()
            raise

    def _join(self, timeout_s: float) -> None:
        started = time.monotonic()
        try:
            self._session.opened.result()
            self._session.join(self._node.addresses, timeout_s=timeout_s).result()
        except errors.RpcError as error:
            raise master_error(self._master, error, started) from error

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
        # two would both take what the session tells their watches, and one get it
        with self._making:
            if self._master_client is None:
                self._check_open()  # or nobody would end it
                self._master_client = MasterClient(backend=SessionBackend(self._session, self))
            return self._master_client

    def _start_shards(
        self,
        shards: int,
        polling: bool,
        transports: tuple[str, ...],
        host: str,
        stall_budget_s: float,
        policy: RestartPolicy,
    ) -> None:
        self._group = ShardGroup(
            shards,
            polling=polling,
            driver=self._driver,
            stall_budget_s=stall_budget_s,
            restart=policy,
            on_change=self._servers.shard_changed,
        )
        settings = ShardSettings(
            master=self._master,
            rank=self.rank,
            secret=self._secret,
            limits=self._limits,
            transports=transports,
            host=host,
            tls=self._tls,
            allow=self._allow,
            values=self._values,
            lease_s=self._lease_s,
            root=self._root,
            timing=self._timing,
            advertise=self._advertise,
        )
        # and in each that is started again
        self._group.at_start(open_shard, settings, timeout_s=SHARDS_TIMEOUT_S)
        self._servers.use_shards(self._group)

    def _ask_master(self, verb: str, *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        self._check_open()
        return self._session.ask(verb, *args, timeout_s=timeout_s)

    @property
    def lease_s(self) -> float:
        """How long this node's rank and servers outlive its silence, in seconds."""
        return self._lease_s

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

        self._driver.reactor.call_soon(run)
        return done

    # -- servers -----------------------------------------------------------------------------------

    def create_server(
        self,
        name: str,
        served: object = None,
        server_id: int = -1,
        sharded: bool = False,
        bounds: Bounds | None = None,
    ) -> RpcServer:
        """Serve an object's public methods, or a dict of functions, under `name`; without any,
        requests go to its dealers.

        server_id  which server of that service this is; -1 takes the smallest free
        sharded    `served` is then a factory without arguments (a class, say): each shard makes an
                   instance and serves it as a server of its own, with server ids in order of the
                   shards
        bounds     how many tasks run at a time, and how many calls and bytes wait for one to end

        Raises ConfigError, NodeExists for a server id that is taken, and Rejected for what else the
        master refuses.
        """
        server = self._servers.create(name, served, server_id, sharded, bounds)
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
        self._driver.run(timeout_s)

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
        self._check_open()
        news = self._news
        entries = self._lookup(name, expected_servers, timeout_s)
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
        client = RpcClient(*settings) if hedge is None else HedgingClient(*settings, hedge=hedge)
        self._clients[f"{name}/{next(self._client_numbers)}"] = client
        with self._making:
            is_first, self._watching = not self._watching, True
        if is_first:
            # Not here: a handler may be what makes the client, and must not wait for the master.
            threading.Thread(
                target=self._watch_servers, name="prpc-watch-servers", daemon=True
            ).start()
        # between the lookup and here, where only clients that were there already were told
        if self._news is not news:
            try:
                client.refresh()
            except errors.RpcError:  # the master is away, or slow
                client.servers_changed()
        return client

    def _watch_servers(self) -> None:
        # closed meanwhile, or the master is away: a failing call asks again
        with contextlib.suppress(errors.RpcError):
            # the watch's thread must not keep a service that is dropped
            changed = weakref.WeakMethod(self._servers_changed)
            self.master_client.tree_watch(
                SERVERS_PATH, lambda event: (method := changed()) and method(event)
            )
        self._tell_clients(None)  # of what happened before the watch began

    def _look_again(self, name: str) -> list[ServerEntry]:
        """Who serves now. Raises MasterUnreachable, at once where the master is known to be away:
        those known must do then.
        """
        if not self._session.connected:
            raise errors.MasterUnreachable(
                f"the master at {self._master} is away: servers of {name!r} cannot be looked up"
            )
        try:
            return self._lookup(name, 0, REFRESH_TIMEOUT_S)
        except errors.DeadlineExceeded as error:
            # that of the look: a call that waits for it was not sent, and goes on waiting
            raise errors.MasterUnreachable(str(error)) from None

    def _servers_changed(self, event: TreeEvent) -> None:
        """A server of some service came or went. In the watch's own thread."""
        self._tell_clients(event.path.removeprefix(SERVERS_PATH).strip("/").partition("/")[0])

    def _tell_clients(self, name: str | None) -> None:
        """Let the clients of that service, or all, ask who serves now."""
        self._news = object()
        for _, client in self._living_clients():
            if name in (None, client.name):
                client.servers_changed()

    def _lookup(self, name: str, expected: int, timeout_s: float) -> list[ServerEntry]:
        found = self._ask_master("lookup", name, expected, timeout_s=timeout_s)
        return [
            ServerEntry(name, server_id, target, rank, tuple(addresses), marks)
            for server_id, target, rank, addresses, marks in found
        ]

    @property
    def address(self) -> str:
        """host:port that this node listens at over tcp. Raises ConfigError where tcp is not among
        its transports, Closed.
        """
        return self._node.address("tcp")

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
        if hasattr(self, "_servers"):
            self._servers.end_dealers()
        for _, client in self._living_clients():
            client.close()
        if self._group is not None:
            self._group.close()
        with self._making:
            master_client = self._master_client
        if master_client is not None:
            master_client.close()
        if hasattr(self, "_session"):
            self._session.close()
        if hasattr(self, "_node"):
            close_in_reactor(self._driver, self._node)
            self._node.slab.wait_for_readers(LINGER_S)
        else:
            self._driver.close()
        if self._cores_before is not None:
            restore(self._cores_before)

    def close(self) -> None:
        """Stop the shards, hang up on everybody; calls in flight end with Closed. A second close,
        or one in a fork, does nothing.

        A fork has none of the threads that may have held our locks when it was made: to wait for
        one of these would be for ever.
        """
        self._closed = self._servers.closed = True
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


def _pin_thread(core: int) -> set[int]:
    try:
        return pin(core)
    except ValueError as error:
        raise errors.ConfigError(f"pin={core!r}: {error}") from error
