"""Dealers: requests and responses as messages, for those who come from pRPC.

    client.create_dealer()   sends requests and receives their responses, in any order; one a thread
    server.create_dealer()   receives requests, and answers them whenever, from whichever dealer; several share one queue
    service.create_dealer(name)   both at once: peers of one name that address each other by rank

    who waits             what ends the wait
    recv_request          a request; timeout_s passed: TimeoutError; terminate(): Terminated
    recv_response         a response, also one that says what went wrong (error_code); TimeoutError; Terminated

Unlike in pRPC a response belongs to its request by number: one that comes late is never taken for another's. A request that a
dealer received and dropped unanswered is answered with an error.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from prpc_engine import errors
from prpc_engine.call import TIMEOUT_S
from prpc_engine.context import caller_name
from prpc_engine.deferred import Deferred
from prpc_engine.halves import Waits
from shard import Future

REQUEST, ONE_WAY = "request", "one_way"
QUEUE_REQUESTS_MAX = 65536  # received by nobody yet: beyond it callers are told to slow down
REQUESTS_MAX = 65536  # of one dealer, in flight or answered: what a caller that never receives may hold of our memory


class Terminated(errors.RpcError):
    """The dealer, or its server, was terminated; restart() lets it go on."""


class ErrorCode(enum.IntEnum):
    """What became of a request, by pRPC's numbers."""

    SUCC = 0
    ENOSUCHSERVER = 101
    ENOSUCHRANK = 102
    ENOSUCHSERVICE = 103
    ELOGICERROR = 104
    EILLEGALMSG = 105
    ETIMEOUT = 106
    ENOTFOUND = 107
    ECONNECTION = 108


_CODES: tuple[tuple[type[BaseException], ErrorCode], ...] = (
    (errors.NoServer, ErrorCode.ENOSUCHSERVER),
    (errors.UnknownService, ErrorCode.ENOSUCHSERVICE),
    (errors.UnknownMethod, ErrorCode.ENOSUCHSERVICE),
    (errors.BadArguments, ErrorCode.EILLEGALMSG),
    (errors.DeadlineExceeded, ErrorCode.ETIMEOUT),
    (errors.NotSent, ErrorCode.ECONNECTION),
    (errors.MaybeExecuted, ErrorCode.ECONNECTION),
    (BaseException, ErrorCode.ELOGICERROR),
)


class _Values:
    """What a request or response carries: `message << value` appends one, read() takes the next out."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def __lshift__(self, value: Any) -> Any:
        self.values.append(value)
        return self

    def read(self) -> Any:
        """The next value. Raises LookupError when all were read."""
        if not self.values:
            raise LookupError("every value of this message has been read")
        return self.values.pop(0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class RpcRequest(_Values):
    """A request: `sid` or `dest_rank` says who shall get it, None leaves it to the client."""

    def __init__(self, *values: Any, sid: int | None = None, dest_rank: int | None = None) -> None:
        super().__init__(*values)
        self.sid = sid
        self.dest_rank = dest_rank
        self.sender = ""  # as received: who sent it
        self._answer: Deferred | None = None  # as received: None for a one-way request

    @property
    def is_one_way(self) -> bool:
        """Whether nobody waits for a response."""
        return self._answer is None


class RpcResponse(_Values):
    """A response: made from the request it answers, or received for the one it belongs to."""

    def __init__(self, request: RpcRequest, *values: Any) -> None:
        super().__init__(*values)
        self.request = request
        self.error: BaseException | None = None

    @property
    def error_code(self) -> ErrorCode:
        """SUCC, or what `error` comes to."""
        if self.error is None:
            return ErrorCode.SUCC
        return next(code for kind, code in _CODES if isinstance(self.error, kind))

    def set_error(self, text: str) -> None:
        """Tell the other side that it failed: it gets ELOGICERROR, and RemoteError as `error`."""
        self.error = errors.RpcError(text)


class Client(Protocol):
    """What a dealer needs of an RpcClient."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def server_of_rank(self, rank: int) -> int | None: ...

    def submit(self, method: str, *args: Any, timeout_s: float | None) -> Future: ...

    def submit_to(self, server_id: int, method: str, *args: Any, timeout_s: float | None) -> Future: ...

    def notify(self, method: str, *args: Any) -> None: ...

    def notify_to(self, server_id: int, method: str, *args: Any) -> None: ...


class Mailbox:
    """Messages that arrived and were not received, and who waits for one. put() from any thread."""

    def __init__(self, name: str, waiter: Waits | None) -> None:
        self.name = name
        self.is_terminated = False
        self._waiter = waiter
        self._messages: deque[Any] = deque()
        self._waiting: deque[Future] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Any) -> None:
        """A message arrived."""
        self._messages.append(message)
        self._wake_one()

    def _wake_one(self) -> None:
        with contextlib.suppress(IndexError):  # nobody waits
            while not self._waiting.popleft().set_result(None):
                pass

    def get(self, timeout_s: float | None) -> Any:
        """The next message. Raises TimeoutError, Terminated."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self.is_terminated:
                raise self._terminated()
            try:
                return self._messages.popleft()
            except IndexError:
                pass
            arrived = Future(self._waiter)
            self._waiting.append(arrived)
            if self._messages or self.is_terminated:  # after our look
                arrived.set_result(None)
            try:
                arrived.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                if self._give_up(arrived):
                    raise TimeoutError(f"{self.name} received nothing within {timeout_s} s") from None
            except BaseException:  # terminated or closed meanwhile, or Ctrl-C
                if not self._give_up(arrived):
                    self._wake_one()  # in our place
                raise

    def _give_up(self, arrived: Future) -> bool:
        """Wait for it no longer; False when it was woken at the last moment."""
        with contextlib.suppress(ValueError):  # who woke it took it out
            self._waiting.remove(arrived)
        return arrived.set_result(None)

    def _terminated(self) -> Terminated:
        return Terminated(f"{self.name} was terminated; restart() lets it go on")

    def terminate(self) -> None:
        """End every wait with Terminated, now and from now on; what has arrived is kept."""
        self.is_terminated = True
        with contextlib.suppress(IndexError):  # nobody waits any more
            while True:
                self._waiting.popleft().set_error(self._terminated())  # which restart() does not take back

    def restart(self) -> None:
        """Wait again."""
        self.is_terminated = False


class ServerQueue:
    """What a server of dealers serves: it takes every request in, for whichever dealer asks next."""

    def __init__(self, name: str, waiter: Waits | None) -> None:
        self.mailbox = Mailbox(f"the server of {name!r}", waiter)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """To be served."""
        return {REQUEST: self._take, ONE_WAY: self._take_one_way}

    def _take(self, *values: Any) -> Deferred:
        self._check_room()
        request = RpcRequest(*values)
        request.sender = caller_name()
        answer = request._answer = Deferred()
        self.mailbox.put(request)
        return answer

    def _take_one_way(self, *values: Any) -> None:
        self._check_room()
        request = RpcRequest(*values)
        request.sender = caller_name()
        self.mailbox.put(request)

    def _check_room(self) -> None:
        if len(self.mailbox) >= QUEUE_REQUESTS_MAX:
            raise errors.Backpressure(f"{QUEUE_REQUESTS_MAX} requests wait for a dealer")


class Dealer:
    """See the file's head. One thread at a time; a client's needs the client, a server's the queue, a peer's both."""

    def __init__(
        self,
        name: str,
        waiter: Waits | None,
        client: Client | None = None,
        queue: ServerQueue | None = None,
        by_rank: bool = False,
    ) -> None:
        self.name = name
        self._client = client
        self._queue = queue
        self._by_rank = by_rank  # server ids are ranks
        self._responses = Mailbox(f"a dealer of {name!r}", waiter)
        self._pending: set[RpcRequest] = set()  # changed by this thread and the one that completes: single steps, so no lock

    # -- who asks --------------------------------------------------------------------------------------------------------

    def _asking(self) -> Client:
        if self._client is None:
            raise errors.ConfigError("this dealer answers requests; one that sends them comes from client.create_dealer()")
        return self._client

    def _server_id(self, request: RpcRequest) -> int | None:
        if request.sid is not None:
            return request.sid
        if request.dest_rank is None or self._by_rank:
            return request.dest_rank
        client = self._asking()
        server_id = client.server_of_rank(request.dest_rank)
        if server_id is None:
            raise errors.NoServer(f"no server of {self.name!r} has rank {request.dest_rank}; there are ranks {client.ranks}")
        return server_id

    def send_request(self, request: RpcRequest, timeout_s: float | None = TIMEOUT_S) -> None:
        """Send it; its response comes by recv_response(), also when it is that the request failed or `timeout_s` passed.

        Raises Backpressure while REQUESTS_MAX of this dealer are in flight or answered and not received."""
        self._asking()
        if len(self._pending) + len(self._responses) >= REQUESTS_MAX:
            raise errors.Backpressure(
                f"{len(self._pending)} requests of this dealer are in flight and {len(self._responses)} responses wait to be "
                f"received, {REQUESTS_MAX} in all are allowed: call recv_response()"
            )
        self._pending.add(request)
        try:
            call = self._submit(request, timeout_s)
        except errors.RpcError as error:
            self._finish(request, error, None)
            return
        except BaseException:  # ShmFull, or a bug
            self._pending.discard(request)
            raise
        call.add_done_callback(lambda done: self._answered(request, done))

    def _submit(self, request: RpcRequest, timeout_s: float | None) -> Future:
        client = self._asking()
        server_id = self._server_id(request)
        if server_id is None:
            return client.submit(REQUEST, *request.values, timeout_s=timeout_s)
        return client.submit_to(server_id, REQUEST, *request.values, timeout_s=timeout_s)

    def _answered(self, request: RpcRequest, done: Future) -> None:
        error = done.error()
        self._finish(request, error, done.result() if error is None else None)

    def _finish(self, request: RpcRequest, error: BaseException | None, values: Any) -> None:
        response = RpcResponse(request, *(values or ()))
        response.error = error
        self._pending.discard(request)
        self._responses.put(response)

    def send_request_one_way(self, request: RpcRequest) -> None:
        """Send it and expect nothing. Raises what kept it from being sent."""
        client = self._asking()
        server_id = self._server_id(request)
        if server_id is None:
            client.notify(ONE_WAY, *request.values)
        else:
            client.notify_to(server_id, ONE_WAY, *request.values)

    def recv_response(self, timeout_s: float | None = None) -> RpcResponse:
        """The next response to arrive, to whichever request. Raises TimeoutError, Terminated."""
        response: RpcResponse = self._responses.get(timeout_s)
        return response

    def sync_rpc_call(self, request: RpcRequest, timeout_s: float | None = TIMEOUT_S) -> RpcResponse:
        """Send it and wait for its own response, whatever else arrives. Its error_code says how it went."""
        self._asking()
        response = RpcResponse(request)
        try:
            response.values = list(self._submit(request, timeout_s).result() or ())
        except errors.RpcError as error:
            response.error = error
        return response

    @property
    def in_flight(self) -> int:
        """Requests whose response has not arrived."""
        return len(self._pending)

    # -- who answers -----------------------------------------------------------------------------------------------------

    def recv_request(self, timeout_s: float | None = None) -> RpcRequest:
        """The next request that no other dealer of this server has received. Raises TimeoutError, Terminated."""
        if self._queue is None:
            raise errors.ConfigError("this dealer sends requests; one that receives them comes from server.create_dealer()")
        request: RpcRequest = self._queue.mailbox.get(timeout_s)
        return request

    def send_response(self, response: RpcResponse) -> bool:
        """Answer the response's request, received by this dealer or another. False when it was answered, or its caller is gone.

        A response to a one-way request is dropped: nobody waits for it."""
        answer = response.request._answer
        if answer is None:
            return False
        if response.error is not None:
            return answer.fail(response.error)
        return answer.reply(response.values)

    # -- both ------------------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """End this dealer's waits with Terminated; of its server's too, as far as they wait for requests."""
        self._responses.terminate()
        if self._queue is not None:
            self._queue.mailbox.terminate()

    def restart(self) -> None:
        """Go on after terminate()."""
        self._responses.restart()
        if self._queue is not None:
            self._queue.mailbox.restart()

    @property
    def is_terminated(self) -> bool:
        """Whether terminate() came last."""
        return self._responses.is_terminated

    def close(self) -> None:
        """Wait for nothing more."""
        self._responses.terminate()

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
