"""A client: one service by name, the servers that answer to it, and what it does when one does not.

    fast path  the server is connected and takes the request: the Balancer picks, its Peer sends, in
               the calling thread
    slow path  everything else: a pending call is handed to the Dispatcher (dispatcher.py), which
               connects, asks the master, waits and sends; the calling thread has its future at once
    failure    the Dispatcher hears of it, and RetryState decides (retry.py): again, elsewhere or
               later, or the error

Whatever happens to a call, it keeps its future and its deadline.
"""

from __future__ import annotations

import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.client.balance import BalancerStatistics
from prpc_engine.client.call_figures import SAMPLE_EVERY
from prpc_engine.client.dealer import Dealer, ServerQueue
from prpc_engine.client.directory import Directory, Lookup
from prpc_engine.client.dispatcher import Dispatcher, Named, Notice
from prpc_engine.client.retry import RetryPolicy
from prpc_engine.client.route import Route
from prpc_engine.client.shared_message import SharedMessage, shared_message
from prpc_engine.client.stub import P, bind
from prpc_engine.master.registry import ServerEntry
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import LATE_S, TIMEOUT_S, Call, CallOwner
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import DESCRIBE, HEALTH
from prpc_engine.rpc.stream import Stream, StreamCall, stream_call
from prpc_engine.rpc.timing import BUCKETS, MethodTiming
from shard import VALUE, ClosedError, Future, runtime

logger = logging.getLogger("prpc")
SAMPLE_MASK = SAMPLE_EVERY - 1
NO_TIMING = MethodTiming(0.0, 0, (0,) * BUCKETS)


@dataclass(frozen=True)
class ClientStatistics(BalancerStatistics):
    """Who gets no calls and why; what was sent more than once, and what waits; how calls ended."""

    # calls that wait for a connection, or for another attempt, before they leave for the first time
    waiting: int
    retries: int  # attempts after one that may have reached a server
    retries_refused: int  # for the budget
    hedges: int = 0  # sent
    hedges_won: int = 0  # of those, how many answered first
    hedges_refused: int = 0  # for the budget
    calls: int = 0  # and streams that were begun, whatever became of them
    # calls, streams and notifications that ended so, by error
    errors: Mapping[str, int] = field(default_factory=dict)
    # of one answered call in SAMPLE_EVERY, until its answer was here
    latency: MethodTiming = NO_TIMING

    @property
    def timeouts(self) -> int:
        """Of the errors, how many were deadlines that passed."""
        return self.errors.get(errors.DeadlineExceeded.__name__, 0)


class RpcClient:
    """Calls to one service. Made by RpcService.create_client(); thread-safe. A context manager.

    The balance policy picks a server for each call; `..._to` forms name it, `..._by` forms choose
    it by a key. A call that did not reach a server goes to another one by itself; what may have run
    is repeated only when the method is idempotent: registered so by the server
    (prpc_engine.idempotent), or named in create_client().

    Calls of a named server go to no other one and are never repeated. While the master lists that
    server and it cannot be reached, they wait for it until their deadline, as other calls do; when
    it is not listed they end with NoServer. With RetryPolicy(unsent_max=1) they end with the first
    failure instead.

    Every verb raises the errors of prpc_engine.errors; `timeout_s` is in seconds, None waits as
    long as the connection lasts. submit(), stream() and notify() never wait, not for a connection
    either. What is wrong with the arguments, and that the client is closed, they raise themselves;
    everything else is the outcome of the future, or of the stream.
    """

    def __init__(
        self,
        name: str,
        node: Node,
        entries: list[ServerEntry],
        lookup: Lookup,
        balance: str = "least_outstanding",
        retry: RetryPolicy | None = None,
        idempotent: Iterable[str] = (),
        chance: random.Random | None = None,
        on_gone: Callable[[Route], None] | None = None,
    ) -> None:
        self.name = name
        self._node = node
        self._wait_until = node.wait_until
        self._keys: dict[str, int] = {}
        self._closed = False
        self._dealers: weakref.WeakValueDictionary[int, Dealer] = weakref.WeakValueDictionary()
        self._dealer_numbers = itertools.count()
        self._routes: dict[int, Route] = {}
        self._only: Route | None = None
        source = chance or runtime.Random()
        self._directory = Directory(name, node, lookup, balance, source)
        self._directory.on_change = self._set_routes
        if on_gone is not None:
            self._directory.on_gone = on_gone
        self._pick, self._to, self._by = (
            self._directory.pick,
            self._directory.to,
            self._directory.by,
        )
        self._ailing = self._directory.balancer.ailing
        self._dispatcher = Dispatcher(
            self, self._directory, node, retry or RetryPolicy(), source, idempotent
        )
        self._named = Named(self._dispatcher, self._directory)
        self._count_call = self._dispatcher.budget.count_call
        self._figures = self._directory.figures
        # of a named server, and streams: those get no retries
        self._named_calls = itertools.count()
        self._count_named = self._named_calls.__next__
        self._unsent = itertools.count(1)  # notifications
        self._directory.set_entries(entries)

    def __str__(self) -> str:
        return repr(self.name)

    @property
    def server_ids(self) -> tuple[int, ...]:
        """Of the servers known here, sorted."""
        return self._directory.server_ids

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the nodes that those servers live on, sorted."""
        return tuple(sorted({route.rank for route in self._routes.values()}))

    def server_of_rank(self, rank: int) -> int | None:
        """The id of the first server on that node, or None."""
        return min(
            (route.server_id for route in self._routes.values() if route.rank == rank), default=None
        )

    def statistics(self) -> ClientStatistics:
        """A snapshot."""
        budget = self._dispatcher.budget
        return ClientStatistics(
            **vars(self._directory.balancer.statistics(self._node.reactor.clock())),
            waiting=self._dispatcher.waiting,
            retries=budget.taken,
            retries_refused=budget.refused,
            # its next number, without taking it
            calls=budget.calls + int(repr(self._named_calls)[len("count(") : -1]),
            errors=self._figures.errors,
            latency=self._figures.latency,
        )

    # -- verbs -------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """The method's result. Blocks; this thread drives the reactor meanwhile."""
        call = self._request(method, args, timeout_s, True)
        try:
            # As everywhere on this path, a function that is an attribute of the object is fetched
            # before it is called: Python 3.11 looks one up anew, for 25 ns, where it is called as a
            # method.
            wait_until = self._wait_until
            if not call.finished and not wait_until(call, call.overall + LATE_S):
                call.wait()  # which ends it: the reactor has not
        except ClosedError as error:
            call.cancel()
            raise errors.Closed(f"{method!r}: this side was closed meanwhile") from error
        except BaseException:  # a signal handler raised it: nobody waits for this call any more
            call.cancel()
            raise
        if call.finished == VALUE:
            return call._outcome
        failed = [call]
        # else error, traceback, this frame and the call hold each other until a collection of
        # garbage
        del call
        return failed.pop().result()

    def submit(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Call:
        """The future of the method's result: .result(timeout_s), .done(), .cancel(), or await."""
        return self._request(method, args, timeout_s, False)

    def notify(self, method: str, *args: Any, wait: bool = False) -> None:
        """Send and do not ask for an answer: at most once, and nobody says when it failed there
        (the server logs it).

        Where the server is not connected yet, it leaves later: that it could not is logged then; or
        `wait` for it here, for TIMEOUT_S seconds at most, and it is raised. Order is kept among
        messages below 256 KiB; over tcp a small one may overtake a larger one: call() where order
        matters."""
        self._notify(self._only or self._pick(), method, args, self, wait)

    def notify_to(self, server_id: int, method: str, *args: Any, wait: bool = False) -> None:
        """As notify(), of one server."""
        self._notify(self._to(server_id), method, args, self._named, wait)

    def broadcast(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> list[Any]:
        """The method's result from every server known here, in order of server id. Raises the first
        error.

        Arguments are encoded once, and a large array is copied once, for all (shared_message.py).
        """
        self._check_open()
        server_ids = self.server_ids
        message = self._shared(args) if len(server_ids) > 1 else None
        if message is None:
            calls = [
                self.submit_to(server_id, method, *args, timeout_s=timeout_s)
                for server_id in server_ids
            ]
        else:
            self._check_method(method)
            calls = []
            for server_id in server_ids:
                self._count_named()
                route = self._to(server_id)
                calls.append(
                    self._dispatcher.begin_shared(route, method, message, timeout_s, self._named)
                )
            del message  # a copy is freed with the last lease on it
        results = []
        calls.reverse()
        try:
            while calls:
                results.append(calls.pop().result())
        finally:
            # else an error, its traceback, this frame and the calls hold each other, and with them
            # what was sent, until a collection of garbage
            calls.clear()
        return results

    def _shared(self, arguments: tuple[Any, ...]) -> SharedMessage | None:
        node = self._node
        may_lend = any(
            address.startswith("shm://")
            for route in self._routes.values()
            for address in route.addresses
        )
        return shared_message(node.archive.encode_arguments, node.slab, arguments, may_lend)

    def call_to(
        self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Any:
        """As call(), of one server."""
        return self._request_to(
            self._to(server_id), method, args, timeout_s, True, self._named
        ).result()

    def submit_to(
        self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Call:
        """As submit(), of one server."""
        return self._request_to(self._to(server_id), method, args, timeout_s, False, self._named)

    def begin_to(
        self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Call:
        """As submit_to(), for a caller that leaves its arrays as they are until the call is done:
        call_to() in two steps.
        """
        return self._request_to(self._to(server_id), method, args, timeout_s, True, self._named)

    def call_by(
        self, key: int | str | bytes, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Any:
        """As call(), of the server that owns `key` among those known here: equal keys go to one
        server as long as all stay.
        """
        return self._request_to(
            self._by(key), method, args, timeout_s, True, self._owner_of(key)
        ).result()

    def submit_by(
        self, key: int | str | bytes, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S
    ) -> Call:
        """As submit(), of the server that owns `key`."""
        return self._request_to(self._by(key), method, args, timeout_s, False, self._owner_of(key))

    def stream(self, method: str, *args: Any, timeout_s: float | None = None) -> Stream:
        """Begin a stream: iterate over what the method yields, send() what it takes (stream.py).
        `timeout_s` is for all of it.

        As submit() this never waits: what keeps the stream from being opened is raised by its first
        use, or by `async with`."""
        return self._stream(self._only or self._pick(), method, args, timeout_s, self)

    def stream_to(
        self, server_id: int, method: str, *args: Any, timeout_s: float | None = None
    ) -> Stream:
        """As stream(), of one server."""
        return self._stream(self._to(server_id), method, args, timeout_s, self._named)

    def bind(
        self,
        protocol: Callable[..., P],
        timeout_s: float | None = TIMEOUT_S,
        stream_timeout_s: float | None = None,
        check: bool = False,
    ) -> P:
        """This service behind the methods of a typing.Protocol, for type checkers to see
        (stub.py).
        """
        return bind(self, protocol, timeout_s, stream_timeout_s, check)

    def create_dealer(self, queue: ServerQueue | None = None) -> Dealer:
        """A dealer that sends requests to this service and receives their responses; it ends with
        this client.

        With a queue it is a peer: it receives the requests of that too, and takes server ids for
        ranks."""
        dealer = Dealer(self.name, self._node.waiter, self, queue, by_rank=queue is not None)
        self._dealers[next(self._dealer_numbers)] = dealer
        if self._closed:
            dealer.end(f"the client of {self.name!r}")
        return dealer

    def health(self, timeout_s: float | None = TIMEOUT_S) -> list[dict[str, Any]]:
        """What every server says of itself: service, server_id, state ("serving", "stopping"),
        tasks, queued.
        """
        return self.broadcast(HEALTH, timeout_s=timeout_s)

    def describe(self, timeout_s: float | None = TIMEOUT_S) -> dict[str, dict[str, Any]]:
        """The methods by name: signature, kind ("plain", "task", "stream"), idempotent, text."""
        found: dict[str, dict[str, Any]] = self.call(DESCRIBE, timeout_s=timeout_s)
        return found

    def refresh(self) -> None:
        """Ask the master who serves now. By itself a client is told of servers that come and go,
        and asks when a call fails.
        """
        self._check_open()
        self._directory.refresh()

    def servers_changed(self) -> None:
        """Told by the service, that watches them: refresh() soon, and without waiting for it."""
        self._directory.changed()

    def close(self) -> None:
        """Call no more: calls and streams of this client that are under way end with Closed, and at
        their servers as cancelled ones do. Connections stay, they belong to the service."""
        self._closed = True
        # copied at once: other threads make dealers meanwhile
        for reference in self._dealers.valuerefs():
            dealer = reference()
            if dealer is not None:
                dealer.end(f"the client of {self.name!r}")
        self._directory.close()
        self._dispatcher.close()

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> RpcClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- one request -------------------------------------------------------------------------------

    def _request(
        self, method: str, args: tuple[Any, ...], timeout_s: float | None, stable: bool
    ) -> Call:
        """To whichever server; it comes back here by failed() when that fails."""
        route = self._only or self._pick()
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._dispatcher.peer_at_once(route)
            if peer is None:
                self._check_method(method)
                self._count_call()
                return self._dispatcher.begin(route, method, args, timeout_s, stable, self)
        # failpoint: client.sending
        try:
            # who leaves the arrays unchanged, waits
            call = (peer.request_at_once if stable else peer.request)(
                route,
                method,
                self._keys.get(method) or self._key(method),
                args,
                timeout_s,
                stable,
                self,
            )
        except (errors.NotSent, errors.Backpressure) as error:
            return self._dispatcher.begin(route, method, args, timeout_s, stable, self, error)
        except errors.RpcError as error:
            self._figures.failed(error)
            raise
        finally:
            # once the request is on its way: it costs the caller nothing
            count_call = self._count_call
            number = count_call()
        if self._ailing or not number & SAMPLE_MASK:
            self._watch(call, number)
        return call

    def _watch(self, call: Call, number: int) -> None:
        """See how it ends: each one while a server is not well, else one now and then."""
        if self._ailing:
            call.when_done(self._dispatcher.answered)
        if not number & SAMPLE_MASK:
            self._figures.time(call)

    def _owner_of(self, key: int | str | bytes) -> Named:
        return Named(self._dispatcher, self._directory, key)

    def _request_to(
        self,
        route: Route,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
        stable: bool,
        named: Named,
    ) -> Call:
        number = self._count_named()
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._dispatcher.peer_at_once(route)
            if peer is None:
                self._check_method(method)
                return self._dispatcher.begin(route, method, args, timeout_s, stable, named)
        # failpoint: client.sending
        try:
            call = (peer.request_at_once if stable else peer.request)(
                route,
                method,
                self._keys.get(method) or self._key(method),
                args,
                timeout_s,
                stable,
                named,
            )
        except errors.NotSent as error:
            return self._dispatcher.begin(route, method, args, timeout_s, stable, named, error)
        except errors.RpcError as error:
            self._figures.failed(error)
            raise
        if not number & SAMPLE_MASK:
            self._figures.time(call)
        return call

    def _notify(
        self, route: Route, method: str, args: tuple[Any, ...], client: CallOwner, wait: bool
    ) -> None:
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._dispatcher.peer_at_once(route)
        if peer is not None:
            peer.notify(route, method, self._keys.get(method) or self._key(method), args)
            return
        self._check_method(method)
        call = self._dispatcher.begin(route, method, args, TIMEOUT_S, False, client, kind=Notice)
        if wait:
            call.result()
        else:
            call.when_done(self._log_unsent)

    def _stream(
        self,
        route: Route,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
        client: CallOwner,
    ) -> Stream:
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._dispatcher.peer_at_once(route)
        key = self._key(method)
        self._count_named()
        if peer is None:
            return self._stream_later(route, method, args, timeout_s, client)
        try:
            stream = peer.open(route, method, key, args, timeout_s)
        except (errors.NotSent, errors.Backpressure) as error:
            if client is not self and isinstance(error, errors.Backpressure):
                raise
            return self._stream_later(route, method, args, timeout_s, client, error)
        if self._ailing and client is self:
            stream.call.when_done(self._dispatcher.answered)
        return stream

    def _stream_later(
        self,
        route: Route,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
        client: CallOwner,
        error: errors.RpcError | None = None,
    ) -> Stream:
        call = self._dispatcher.begin(
            route, method, args, timeout_s, False, client, error, kind=stream_call
        )
        assert isinstance(call, StreamCall)
        return Stream(call, self._node.reactor.call_soon)

    def _key(self, method: str) -> int:
        self._check_method(method)
        key = self._keys[method] = method_key(method)
        return key

    def _check_method(self, method: str) -> None:
        if not isinstance(method, str):
            raise errors.BadArguments(
                f"a method's name is a str, not {type(method).__name__} ({method!r})"
            )

    def failed(self, call: Call, error: BaseException) -> bool:
        """Told by a call instead of its end; True: it is seen to, and the call stays pending."""
        return self._dispatcher.failed(call, error)

    def _set_routes(self, routes: dict[int, Route]) -> None:
        self._routes = routes
        self._dispatcher.marks.learn(route.marks for route in routes.values())
        self._only = next(iter(routes.values())) if len(routes) == 1 else None

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed(f"the client of {self.name!r} was closed here")

    def _log_unsent(self, notice: Future) -> None:
        """Of a client whose server has gone, thousands may be: the first, the tenth, the hundredth
        and so on is logged, and all are counted.
        """
        error = notice.error()
        if error is None:
            return
        number = next(self._unsent)
        if number == 10 ** (len(str(number)) - 1):
            logger.warning(
                "a notification was lost, number %d of this client: %s", number, str(error)
            )
