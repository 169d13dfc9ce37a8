"""RpcService: this process as a member of a job. It has a rank, serves objects under names, and calls other members.

Inline mode (shards=0): this process runs the reactor itself; whoever waits for a result drives it, serve_forever() drives
it for good, and a progress thread does when nobody else. shards=N starts N more processes, each with a reactor, slab, address
and connections of its own; a server made with sharded=True lives in them, one instance each, and clients talk to each directly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from prpc_engine import errors, slab
from prpc_engine.client import CONNECT_TIMEOUT_S, TIMEOUT_S, RpcClient
from prpc_engine.config import SERVER_ID_MAX, check_name, check_number, check_timeout, limits_from, secret_from, transports_from
from prpc_engine.master import MASTER_ROUTE, close_in_reactor, host_and_port, master_error
from prpc_engine.message import method_key
from prpc_engine.node import Node
from prpc_engine.peer import PeerStatistics
from prpc_engine.registry import ServerEntry
from prpc_engine.server import Server, ServerStatistics
from prpc_engine.sharded import ShardSettings, open_shard, serve_in_shard, stop_serving_in_shard
from shard import Driver, Limits, ShardGroup, SlabStatistics, pin, restore

SHARDS_MAX = 64
LINGER_S = 0.2  # at close(), for peers to drop arrays that we lent them: they do at once, unless a handler keeps one


@dataclass(frozen=True)
class ServiceStatistics:
    """What one asks first when it is stuck: who waits for whom, what has gone where."""

    rank: int
    peers: tuple[PeerStatistics, ...]
    servers: dict[str, ServerStatistics]  # by "service/server id"
    slab: SlabStatistics


class RpcServer:
    """A server made here. close() takes it back."""

    def __init__(self, service: RpcService, name: str, server_ids: tuple[int, ...], targets: tuple[int, ...]) -> None:
        self._service = service
        self.name = name
        self.server_ids = server_ids  # one, or one for each shard
        self._targets = targets
        self._closed = False

    @property
    def server_id(self) -> int:
        """Of the only server; of the first when there is one in every shard."""
        return self.server_ids[0]

    def statistics(self) -> ServerStatistics:
        """What it did, when it lives in this process."""
        server = self._service._node.servers.get(self._targets[0])
        return server.statistics() if server is not None else ServerStatistics()

    def close(self) -> None:
        """Serve no more: later requests are answered with UnknownService. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self._service._remove_server(self._targets)


class RpcService:
    """See the file's head. A context manager.

    master      "host:port" of the job's Master
    shards      0: inline mode; N: also start N shard processes (under `if __name__ == "__main__":`)
    polling     never sleep while waiting: lowest latency for a whole core
    pin         core for the calling thread, None: leave it; shards are pinned to cores of their own
    bind        "host:port" to listen at, port 0 for any free one
    transports  which may be used, in order of preference; None: shared memory, then tcp
    secret      the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET
    timeout_s   for the master to answer

    Raises MasterUnreachable, AuthenticationFailed, AddressInUse, ConfigError.
    """

    def __init__(
        self,
        master: str,
        shards: int = 0,
        polling: bool = False,
        pin: int | None = None,
        bind: str = "127.0.0.1:0",
        transports: Sequence[str] | None = None,
        secret: bytes | str | None = None,
        limits: Limits | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.shards = check_number("shards", shards, 0, SHARDS_MAX)
        chosen = transports_from(transports)
        host, port = host_and_port(bind)
        host_and_port(master)
        self._secret = secret_from(secret)
        self._limits = limits_from(limits)
        self._cores_before = None if pin is None else _pin_thread(pin)
        self._master = master
        self._closed = False
        self._driver = Driver(polling)
        self._group: ShardGroup | None = None
        try:
            self._node = Node(
                self._driver.reactor, self._driver, slab.default_slab(), self._secret, self._limits, chosen, host, port
            )
            self.rank = self._join(timeout_s)
            if shards:
                self._start_shards(shards, polling, chosen, host)
        except BaseException:
            self._shut()
            raise

    def _join(self, timeout_s: float) -> int:
        started = time.monotonic()
        try:
            rank = self._ask_master("join", self._node.addresses, -1, timeout_s=timeout_s)
        except (errors.NotSent, errors.MaybeExecuted, errors.DeadlineExceeded, errors.AuthenticationFailed) as error:
            raise master_error(self._master, error, started) from error
        assert isinstance(rank, int)
        return rank

    def _start_shards(self, shards: int, polling: bool, transports: tuple[str, ...], host: str) -> None:
        self._group = ShardGroup(shards, polling=polling, driver=self._driver)
        settings = ShardSettings(
            master=self._master, rank=self.rank, secret=self._secret, limits=self._limits, transports=transports, host=host
        )
        self._group.map(open_shard, settings, timeout_s=CONNECT_TIMEOUT_S)

    def _ask_master(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        self._check_open()
        peer = self._node.master_peer(self._master, min(timeout_s or CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S))
        return peer.request(MASTER_ROUTE, method, method_key(method), args, timeout_s, False).result()

    # -- servers -------------------------------------------------------------------------------------------------------

    def create_server(self, name: str, served: object, server_id: int = -1, sharded: bool = False) -> RpcServer:
        """Serve an object's public methods, or a dict of functions, under `name`.

        server_id   which server of that service this is; -1 takes the smallest free
        sharded     `served` is then a factory without arguments (a class, say): each shard makes an instance and serves it
                    as a server of its own, with server ids in order of the shards

        Raises ConfigError, and Rejected when the master refuses (a server id that is taken).
        """
        check_name(name)
        check_number("server_id", server_id, -1, SERVER_ID_MAX)
        if sharded:
            return self._create_sharded(name, served, server_id)
        Server(name, server_id, 0, served)  # refuse a bad object before the master hears of it
        server_id, target = self._register(name, server_id)
        # The master tells clients of it first; a request that is faster than the next line is told to come again.
        self._node.servers[target] = Server(name, server_id, target, served)
        self._driver.take_over()
        return RpcServer(self, name, (server_id,), (target,))

    def _register(self, name: str, server_id: int) -> tuple[int, int]:
        try:
            registered, target = self._ask_master("register_server", name, server_id)
        except errors.RemoteError as error:
            raise errors.Rejected(f"the master refused to register a server of {name!r}: {error.remote_message}") from error
        return registered, target

    def _create_sharded(self, name: str, factory: object, server_id: int) -> RpcServer:
        if self._group is None:
            raise errors.ConfigError("sharded=True needs shards: RpcService(shards=N)")
        if not callable(factory):
            raise errors.ConfigError(f"sharded=True needs a factory to call in each shard, not {factory!r}")
        entries = []
        for index in range(self.shards):  # one after the other: their ids are in order of the shards
            wanted = server_id if server_id < 0 else server_id + index
            entries.append(self._group.submit_to(index, serve_in_shard, name, factory, wanted).result(TIMEOUT_S))
        ids, targets = zip(*entries, strict=True)
        return RpcServer(self, name, ids, targets)

    def _remove_server(self, targets: tuple[int, ...]) -> None:
        for target in targets:
            if self._node.servers.pop(target, None) is not None and not self._closed:
                self._ask_master("deregister_server", target)
        if self._group is not None and not self._closed:
            self._group.map(stop_serving_in_shard, targets, timeout_s=TIMEOUT_S)

    def serve_forever(self, timeout_s: float | None = None) -> None:
        """Drive the reactor from the calling thread, for `timeout_s` seconds or until stop_serving() or close().

        Not needed for serving: without it a progress thread does. With it requests cost no thread switch.
        """
        self._check_open()
        self._driver.run(timeout_s)

    def stop_serving(self) -> None:
        """Let serve_forever() return, or the next one when none is under way; the service stays open.

        From any thread or signal handler."""
        self._driver.stop_running()

    # -- clients -------------------------------------------------------------------------------------------------------

    def create_client(self, name: str, expected_servers: int = 1, timeout_s: float = 10.0) -> RpcClient:
        """A client of service `name`, as soon as it has `expected_servers` servers. Raises NoServer after `timeout_s` seconds."""
        check_number("expected_servers", expected_servers, 0, 1 << 20)
        check_name(name)
        check_timeout(timeout_s)
        self._check_open()
        entries = self._lookup(name, expected_servers, timeout_s)
        if len(entries) < expected_servers:
            services = self._ask_master("services")
            raise errors.NoServer(
                f"service {name!r} has {len(entries)} of {expected_servers} servers after {timeout_s} s; the master at "
                f"{self._master} knows these services: {', '.join(services) or 'none'}"
            )
        return RpcClient(name, self._node, entries, lambda: self._lookup(name, 0, 0.0))

    def _lookup(self, name: str, expected: int, timeout_s: float) -> list[ServerEntry]:
        # The master answers within timeout_s; what comes on top is the way there and back.
        found = self._ask_master("lookup", name, expected, timeout_s, timeout_s=timeout_s + TIMEOUT_S)
        return [ServerEntry(name, server_id, target, rank, tuple(addresses)) for server_id, target, rank, addresses in found]

    @property
    def address(self) -> str:
        """host:port that this node listens at over tcp. Raises StopIteration where tcp is not among its transports."""
        return self._node.address("tcp")

    @property
    def transports(self) -> dict[str, str]:
        """For each node we are connected to: the transport that was taken, and why those before it were not."""
        return dict(self._node.choices)

    def statistics(self) -> ServiceStatistics:
        """A snapshot of this process's side: its peers, servers and slab."""
        return ServiceStatistics(
            rank=self.rank,
            peers=tuple(peer.statistics() for peer in self._node.peers()),
            servers={f"{one.service}/{one.server_id}": one.statistics() for one in list(self._node.servers.values())},
            slab=self._node.slab.statistics(),
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed("this RpcService was closed here")

    def _shut(self) -> None:
        if self._group is not None:
            self._group.close()
        if hasattr(self, "_node"):
            close_in_reactor(self._driver, self._node)
            self._node.slab.wait_for_readers(LINGER_S)
        else:
            self._driver.close()
        if self._cores_before is not None:
            restore(self._cores_before)

    def close(self) -> None:
        """Stop the shards, hang up on everybody; calls in flight end with Closed. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self._shut()

    def __enter__(self) -> RpcService:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _pin_thread(core: int) -> set[int]:
    try:
        return pin(core)
    except ValueError as error:
        raise errors.ConfigError(f"pin={core!r}: {error}") from error
