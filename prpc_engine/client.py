"""A client: one service by name, the servers that answer to it, and what it does when one does not.

    attempt      the Balancer picks a server; its Peer sends the request
    failure      the Balancer hears of it; RetryState decides (retry.py): again, elsewhere or later, or the error

Failures are looked at by one thread of the client, its mender: deciding may mean to ask a server whether the method is
idempotent, to connect, or to ask the master who serves now, and none of that may hold up the reactor. The call keeps its future
and its deadline.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sized
from functools import partial
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.balance import Balancer, BalancerStatistics, Outcome, outcome_of
from prpc_engine.call import NEVER, TIMEOUT_S, Call
from prpc_engine.dealer import Dealer
from prpc_engine.master.registry import ServerEntry
from prpc_engine.message import method_key
from prpc_engine.node import Node
from prpc_engine.peer import Peer, wait_in_ms
from prpc_engine.retry import GiveUp, RetryBudget, RetryPolicy, RetryState, is_retriable
from prpc_engine.server import DESCRIBE, HEALTH
from prpc_engine.stream import Stream
from prpc_engine.stub import P, bind
from shard import VALUE, Future, ShmFull

CONNECT_TIMEOUT_S = 5.0  # for one attempt at one address
REFRESH_S_MIN = 0.05  # between two looks at the master, as long as the servers known here may do
DESCRIBE_SERVERS_MAX = 3  # that are asked, one after the other
DESCRIBE_TIMEOUT_S = 1.0  # for a server to say whether a method is idempotent, before a failed call of it is given up


class Route:
    """The way to one server: its entry at the master, and the peer once connected."""

    __slots__ = ("entry", "is_local", "peer", "rank", "server_id", "target", "text")

    def __init__(self, entry: ServerEntry, is_local: bool) -> None:
        self.entry = entry
        self.server_id = entry.server_id
        self.rank = entry.rank
        self.is_local = is_local
        self.target = entry.target
        self.peer: Peer | None = None
        self.text = f"server {entry.server_id} of {entry.service!r} (rank {entry.rank})"

    @property
    def in_flight(self) -> Sized:
        """Calls that wait for the node it lives on."""
        return self.peer.calls.in_flight if self.peer is not None else ()

    def __str__(self) -> str:
        return self.text


class RpcClient:
    """Calls to one service. Made by RpcService.create_client(); thread-safe. A context manager.

    The balance policy picks a server for each call; `..._to` forms name it, `..._by` forms choose it by a key. A call that did
    not reach a server goes to another one by itself; what may have run is repeated only when the method is idempotent: registered
    so by the server (prpc_engine.idempotent), or named in create_client(). Calls of a named server are never repeated.

    Every verb raises the errors of prpc_engine.errors; `timeout_s` is in seconds, None waits as long as the connection lasts.
    """

    def __init__(
        self,
        name: str,
        node: Node,
        entries: list[ServerEntry],
        lookup: Callable[[], list[ServerEntry]],
        balance: str = "least_outstanding",
        retry: RetryPolicy | None = None,
        idempotent: Iterable[str] = (),
    ) -> None:
        self.name = name
        self._node = node
        self._wait = node.wait
        self._lookup = lookup
        self._keys: dict[str, int] = {}
        self._refreshing = threading.Lock()
        self._closed = False
        self._random = random.Random()
        self._policy = retry or RetryPolicy()
        self._budget = RetryBudget(guard=threading.Lock())
        self._count_call = self._budget.count_call
        self._idempotent: dict[str, bool] = dict.fromkeys(idempotent, True)
        self._described = False
        self._routes: dict[int, Route] = {}
        self._only: Route | None = None
        self._balancer: Balancer[Route] = Balancer((), self._random, balance, guard=threading.Lock())
        self._ailing = self._balancer.ailing
        self._refreshed = 0.0  # when the master was last asked
        self._failures: queue.SimpleQueue[tuple[Call, Callable[[], None]] | None] = queue.SimpleQueue()
        self._mender: threading.Thread | None = None
        self._set_routes(entries)

    def __str__(self) -> str:
        return repr(self.name)

    @property
    def server_ids(self) -> tuple[int, ...]:
        """Of the servers known here, sorted."""
        return tuple(sorted(self._routes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the nodes that those servers live on, sorted."""
        return tuple(sorted({route.rank for route in self._routes.values()}))

    def server_of_rank(self, rank: int) -> int | None:
        """The id of the first server on that node, or None."""
        return min((route.server_id for route in self._routes.values() if route.rank == rank), default=None)

    def statistics(self) -> BalancerStatistics:
        """Which servers get no calls at present, and why."""
        return self._balancer.statistics(time.monotonic())

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """The method's result. Blocks; this thread drives the reactor meanwhile."""
        call = self._request(method, args, timeout_s, True)
        if not call.finished:
            self._wait(call, None)  # the call ends by its own deadline
        return call._outcome if call.finished == VALUE else call.result()

    def submit(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Call:
        """The future of the method's result: .result(timeout_s), .done(), .cancel(), or await."""
        return self._request(method, args, timeout_s, False)

    def notify(self, method: str, *args: Any) -> None:
        """Send and do not ask for an answer: at most once, and nobody says when it failed there (the server logs it)."""
        route = self._only or self._pick()
        self._connected(route).notify(route, method, self._key(method), args)

    def notify_to(self, server_id: int, method: str, *args: Any) -> None:
        """As notify(), of one server."""
        route = self._route_to(server_id)
        self._connected(route).notify(route, method, self._key(method), args)

    def broadcast(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> list[Any]:
        """The method's result from every server known here, in order of server id. Raises the first error."""
        self._check_open()
        calls = [self.submit_to(server_id, method, *args, timeout_s=timeout_s) for server_id in self.server_ids]
        return [call.result() for call in calls]

    def call_to(self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """As call(), of one server."""
        return self._request_to(self._route_to(server_id), method, args, timeout_s, True).result()

    def submit_to(self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Call:
        """As submit(), of one server."""
        return self._request_to(self._route_to(server_id), method, args, timeout_s, False)

    def call_by(self, key: int | str | bytes, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """As call(), of the server that owns `key` among those known here: equal keys go to one server as long as all stay."""
        return self._request_to(self._route_by(key), method, args, timeout_s, True).result()

    def submit_by(self, key: int | str | bytes, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Call:
        """As submit(), of the server that owns `key`."""
        return self._request_to(self._route_by(key), method, args, timeout_s, False)

    def stream(self, method: str, *args: Any, timeout_s: float | None = None) -> Stream:
        """Begin a stream: iterate over what the method yields, send() what it takes (stream.py). `timeout_s` is for all of it."""
        route = self._only or self._pick()
        return self._connected(route).open(route, method, self._key(method), args, timeout_s)

    def stream_to(self, server_id: int, method: str, *args: Any, timeout_s: float | None = None) -> Stream:
        """As stream(), of one server."""
        route = self._route_to(server_id)
        return self._connected(route).open(route, method, self._key(method), args, timeout_s)

    def bind(
        self,
        protocol: Callable[..., P],
        timeout_s: float | None = TIMEOUT_S,
        stream_timeout_s: float | None = None,
        check: bool = False,
    ) -> P:
        """This service behind the methods of a typing.Protocol, for type checkers to see (stub.py)."""
        return bind(self, protocol, timeout_s, stream_timeout_s, check)

    def create_dealer(self) -> Dealer:
        """A dealer that sends requests to this service and receives their responses."""
        return Dealer(self.name, self._node.waiter, self)

    def health(self, timeout_s: float | None = TIMEOUT_S) -> list[dict[str, Any]]:
        """What every server says of itself: service, server_id, state ("serving", "stopping"), tasks, queued."""
        return self.broadcast(HEALTH, timeout_s=timeout_s)

    def describe(self, timeout_s: float | None = TIMEOUT_S) -> dict[str, dict[str, Any]]:
        """The methods by name: signature, kind ("plain", "task", "stream"), idempotent, text."""
        found: dict[str, dict[str, Any]] = self.call(DESCRIBE, timeout_s=timeout_s)
        return found

    def refresh(self) -> None:
        """Ask the master who serves now. By itself a client is told of servers that come and go, and asks when a call fails."""
        self._check_open()
        self._refresh()

    def close(self) -> None:
        """Call no more; connections stay, they belong to the service."""
        self._closed = True
        self._routes = {}
        self._only = None
        self._balancer.set_routes(())
        self._failures.put(None)

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> RpcClient:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _request(self, method: str, args: tuple[Any, ...], timeout_s: float | None, stable: bool) -> Call:
        """To whichever server; it comes back here by failed() when that fails."""
        self._count_call()
        route = self._only or self._pick()
        peer = route.peer
        if peer is not None and not peer.lost and not self._ailing:
            try:
                return peer.request(route, method, self._keys.get(method) or self._key(method), args, timeout_s, stable, self)
            except (errors.NotSent, errors.Backpressure) as error:
                return self._request_again(route, error, method, args, timeout_s, stable)
        return self._request_again(route, None, method, args, timeout_s, stable)

    def _request_to(self, route: Route, method: str, args: tuple[Any, ...], timeout_s: float | None, stable: bool) -> Call:
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._connected(route)
        return peer.request(route, method, self._keys.get(method) or self._key(method), args, timeout_s, stable, None)

    def _request_again(
        self,
        route: Route,
        error: errors.RpcError | None,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
        stable: bool,
    ) -> Call:
        """A request that has not left yet, by the thread that calls: connect, or go to another server."""
        wait_in_ms(timeout_s)  # refuse what no attempt could have
        started = time.monotonic()
        deadline = NEVER if timeout_s is None else started + timeout_s
        state: RetryState[Route] | None = None
        while True:
            if error is None:
                try:
                    left_s = self._policy.timeout_s(time.monotonic(), deadline)
                    call = self._connected(route).request(route, method, self._key(method), args, left_s, stable, self)
                    call.overall = deadline
                    if self._ailing:
                        call.add_done_callback(self._answered)
                    return call
                except (errors.NotSent, errors.Backpressure) as raised:
                    error = raised
            now = time.monotonic()
            self._report(route, error, now)
            state = state or RetryState(self._policy, self._budget, self._random, method, started)
            decided = state.decide(error, route, now, deadline, False)
            if isinstance(decided, GiveUp):
                raise state.final_error(error, decided, now)
            time.sleep(decided.delay_s)
            self._refresh_quietly()
            route = self._pick(decided.avoid)
            error = None

    def _key(self, method: str) -> int:
        if not isinstance(method, str):
            raise errors.BadArguments(f"a method's name is a str, not {type(method).__name__} ({method!r})")
        key = self._keys[method] = method_key(method)
        return key

    # -- failures ------------------------------------------------------------------------------------------------------

    def failed(self, call: Call, error: BaseException) -> bool:
        """Told by a call instead of its end; True: it is seen to, and the call stays pending. In the reactor's thread."""
        if self._closed or not is_retriable(error):
            return False
        if isinstance(error, errors.DeadlineExceeded) and call.state is None:
            now = time.monotonic()
            if now >= call.overall or call.overall == NEVER:  # the usual end of a call that takes too long
                self._report(call.asked[1], error, now)
                return False
        if self._mender is None:
            self._mender = threading.Thread(target=self._mend, name=f"prpc-mender-{self.name}", daemon=True)
            self._mender.start()
        self._failures.put((call, partial(self._decide, call, error)))
        return True

    def _mend(self) -> None:
        """The mender's thread: one failure after the other."""
        while (failure := self._failures.get()) is not None:
            call, work = failure
            try:
                work()
            except Exception as error:  # NoServer, Closed; or a bug, which the caller must hear of rather than wait for ever
                call.end(error)
            del call, work, failure
        while True:  # closed meanwhile
            try:
                left = self._failures.get_nowait()
            except queue.Empty:
                return
            if left is not None:
                left[0].end(errors.Closed(f"the client of {self.name!r} was closed here while a call of it was tried again"))

    def _decide(self, call: Call, error: BaseException) -> None:
        method, route = call.asked
        now = time.monotonic()
        self._report(route, error, now)
        if call.state is None:
            call.state = RetryState(self._policy, self._budget, self._random, method, call.sent or now)
        state: RetryState[Route] = call.state
        is_idempotent = isinstance(error, errors.MaybeExecuted | errors.DeadlineExceeded) and self._is_idempotent(method)
        decided = state.decide(error, route, now, call.overall, is_idempotent)
        if isinstance(decided, GiveUp):
            call.end(state.final_error(error, decided, now))
        elif decided.delay_s:
            again = call, partial(self._resend, call, decided.avoid)
            reactor, delay_s = self._node.reactor, decided.delay_s
            reactor.call_soon(lambda: reactor.call_later(delay_s, lambda: self._failures.put(again)))
        else:
            self._resend(call, decided.avoid)

    def _resend(self, call: Call, avoid: tuple[Route, ...]) -> None:
        if call.finished:
            return  # given up meanwhile
        self._refresh_quietly()
        try:
            route = self._pick(avoid)
            timeout_s = self._policy.timeout_s(time.monotonic(), call.overall)
            self._connected(route).resend(call, route, timeout_s)
        except (errors.RpcError, ShmFull) as raised:
            call.set_error(raised)  # which comes back here as far as it can be retried

    def _is_idempotent(self, method: str) -> bool:
        """Whether the server registered it so; asked once, of the first server that answers. Nobody answers: then it is not."""
        if method not in self._idempotent and not self._described:
            self._refresh_quietly()
            routes = sorted(self._balancer.routes, key=lambda route: route.peer is None or route.peer.lost)
            for route in routes[:DESCRIBE_SERVERS_MAX]:
                try:
                    described = self._request_to(route, DESCRIBE, (), DESCRIBE_TIMEOUT_S, True).result()
                except errors.RpcError:
                    continue
                self._described = True
                for name, each in described.items():
                    self._idempotent.setdefault(name, bool(each["idempotent"]))
                break
        return self._idempotent.get(method, False)

    def _report(self, route: Route | None, error: BaseException, now: float) -> None:
        outcome = outcome_of(error)
        if outcome is not None and route is not None:
            self._balancer.report(route, outcome, now)

    def _answered(self, done: Future) -> None:
        """A call ended that was sent while some server was not well."""
        assert isinstance(done, Call)
        if done.finished == VALUE:
            self._balancer.report(done.asked[1], Outcome.OK, time.monotonic())
        else:
            self._report(done.asked[1], done._outcome, time.monotonic())

    # -- servers -------------------------------------------------------------------------------------------------------

    def _set_routes(self, entries: list[ServerEntry]) -> None:
        old = self._routes
        routes = {}
        for entry in entries:
            known = old.get(entry.server_id)
            is_same = known is not None and known.target == entry.target
            routes[entry.server_id] = (
                known if known is not None and is_same else Route(entry, self._node.is_local(entry.addresses))
            )
        self._routes = routes
        self._only = next(iter(routes.values())) if len(routes) == 1 else None
        self._balancer.set_routes(routes.values())

    def _route_to(self, server_id: int) -> Route:
        route = self._routes.get(server_id)
        if route is None:
            self._check_open()
            self._refresh()
            route = self._routes.get(server_id)
            if route is None:
                raise errors.NoServer(f"{self.name!r} has no server {server_id}; it has: {list(self.server_ids)}")
        return route

    def _route_by(self, key: int | str | bytes) -> Route:
        ids = self.server_ids
        if not ids:
            return self._pick()  # which asks the master, and says that there is none
        number = key if isinstance(key, int) else zlib.crc32(key.encode() if isinstance(key, str) else key)
        return self._route_to(ids[number % len(ids)])

    def _pick(self, avoid: tuple[Route, ...] = ()) -> Route:
        route = self._balancer.pick(time.monotonic() if self._ailing else 0.0, avoid)
        if route is None:
            self._check_open()
            self._refresh()
            route = self._balancer.pick(time.monotonic(), avoid)
            if route is None:
                raise errors.NoServer(
                    f"{self.name!r} has no live server at present: start one, or wait for it with create_client()"
                )
        return route

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed(f"the client of {self.name!r} was closed here")

    def _refresh(self) -> None:
        """Ask the master who serves now; one thread at a time."""
        with self._refreshing:
            self._set_routes(self._lookup())

    def _refresh_quietly(self) -> None:
        """The same, but not for every call of many that fail at once; where the master is away, those known will do."""
        now = time.monotonic()
        if now - self._refreshed < REFRESH_S_MIN:
            return
        self._refreshed = now
        try:
            self._refresh()
        except errors.RpcError:
            return

    def _connected(self, route: Route) -> Peer:
        """The route's peer, connecting if need be."""
        self._check_open()
        if route.peer is not None and not route.peer.lost:
            return route.peer
        started = time.monotonic()
        try:
            route.peer = self._node.peer_at(route.entry.addresses, CONNECT_TIMEOUT_S, route.text)
        except errors.NotSent as error:
            raise errors.NotSent(f"{error} (tried for {time.monotonic() - started:.1f} s)") from error
        return route.peer
