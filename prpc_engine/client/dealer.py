"""Dealers: requests and responses as messages, for those who come from pRPC.

    client.create_dealer()       sends requests and receives their responses, in any order; one a
                                 thread
    server.create_dealer()       receives requests, and answers them whenever, from whichever
                                 dealer; several share one queue
    service.create_dealer(name)  both at once: peers of one name that address each other by rank

    who waits      what ends the wait
    recv_request   a request; timeout_s passed: TimeoutError
    recv_response  a response, also one that says what went wrong (error_code); timeout_s passed:
                   TimeoutError
    sync_rpc_call  the response of its request
    all of them    terminate(), close(), and the end of the client, server or service: Terminated,
                   which is a Closed

    a request that waits for a dealer   what becomes of it
    a dealer receives it                it is answered by whoever has it; dropped unanswered: with
                                        an error
    its deadline passes                 taken out of the queue: no dealer gets it, and it has no
                                        part in QUEUE_REQUESTS_MAX
    its caller gives it up, or is lost  the same; a one-way request stays, as nobody waits for it

Unlike in pRPC a response belongs to its request by number: one that comes late is never taken for
another's.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from prpc_engine import errors
from prpc_engine.client.mailbox import Ending, Mailbox, Terminated
from prpc_engine.rpc.call import NEVER, TIMEOUT_S
from prpc_engine.rpc.context import caller_name, remaining_s, wait_in_ms
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.job import Expired
from shard import ClosedError, Future, Waiter, runtime

REQUEST, ONE_WAY = "request", "one_way"
QUEUE_REQUESTS_MAX = 65536  # received by nobody yet: beyond it callers are told to slow down
# of one dealer, in flight or answered: what a caller that never receives may hold of our memory
REQUESTS_MAX = 65536


class ErrorCode(enum.IntEnum):
    """How a dealer's request ended, by pRPC's names and numbers. RpcResponse.error_code is one."""

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
    """What a request or response carries: `message << value` appends one, read() takes the next
    out.
    """

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
    """A request that a dealer sends or has received, with its values.

    sid: the server id that shall get it; dest_rank: the rank whose server shall; None, both: the
    client's balance policy chooses.
    """

    def __init__(self, *values: Any, sid: int | None = None, dest_rank: int | None = None) -> None:
        super().__init__(*values)
        self.sid = sid
        self.dest_rank = dest_rank
        self.sender = ""  # as received: who sent it
        self._answer: Deferred | None = None  # as received: None for a one-way request
        self._deadline = NEVER  # as received: on runtime.monotonic()

    def _is_over(self) -> bool:
        """As received: whether nobody waits for its response any more."""
        answer = self._answer
        if answer is None:
            return False
        if runtime.monotonic() >= self._deadline:  # perhaps the reactor's timer is late
            answer.fail(Expired("the deadline had passed before a dealer answered it"))
        return answer.done()

    @property
    def is_one_way(self) -> bool:
        """Whether nobody waits for a response."""
        return self._answer is None


class RpcResponse(_Values):
    """The response to a request of a dealer, with its values. Who answers makes it from the
    request; who asked receives it, with `error` set when it failed.
    """

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


class DealerClient(Protocol):
    """What a Dealer needs of an RpcClient: servers by rank, and verbs that do not wait."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def server_of_rank(self, rank: int) -> int | None: ...

    def submit(self, method: str, *args: Any, timeout_s: float | None) -> Future: ...

    def submit_to(
        self, server_id: int, method: str, *args: Any, timeout_s: float | None
    ) -> Future: ...

    def notify(self, method: str, *args: Any, wait: bool) -> None: ...

    def notify_to(self, server_id: int, method: str, *args: Any, wait: bool) -> None: ...


class ServerQueue:
    """What a server of dealers serves:
    it takes every request in, for whichever dealer asks next.
    """

    def __init__(self, name: str, waiter: Waiter | None) -> None:
        self.name = name
        self.mailbox = Mailbox(f"the server of {name!r}", waiter, RpcRequest._is_over)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """To be served."""
        return {REQUEST: self._take, ONE_WAY: self._take_one_way}

    def close(self, what: str) -> None:
        """End the waits of all dealers; `what` was closed."""
        self.mailbox.close(f"{self.mailbox.name} receives no more: {what} was closed here")

    def _take(self, *values: Any) -> Deferred:
        self._check_room()
        request = RpcRequest(*values)
        request.sender = caller_name()
        now = runtime.monotonic()
        left_s = remaining_s(lambda: now)
        if left_s is not None:
            request._deadline = now + left_s
        answer = request._answer = Deferred(ends_with_caller=True)
        mailbox = self.mailbox
        ticket = mailbox.put(request)
        answer.when_done(lambda _: mailbox.remove(ticket))
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
    """Sends requests and receives their responses, or receives requests and answers them, or both:
    by messages.

    name          of the service, for texts
    waiter        who turns the reactor while a thread waits
    client        sends its requests; None: what sends raises ConfigError
    queue         has the server's requests; None: recv_request() raises ConfigError
    by_rank       a request's `dest_rank` is taken for a server id
    requests_max  how many may be in flight or answered, and not received

    Made by create_dealer() of a client (has the client), a server (the queue), or a service (both).
    One thread at a time uses it; terminate() and close() may come from any, and end its waits with
    Terminated. What ends a wait, and what becomes of requests: the tables at the file's head.
    """

    def __init__(
        self,
        name: str,
        waiter: Waiter | None,
        client: DealerClient | None = None,
        queue: ServerQueue | None = None,
        by_rank: bool = False,
        requests_max: int = REQUESTS_MAX,
    ) -> None:
        self.name = name
        self._requests_max = requests_max
        self._client = client
        self._queue = queue
        self._by_rank = by_rank  # server ids are ranks
        self._responses = Mailbox(f"a dealer of {name!r}", waiter)
        # Changed by this thread and the one that completes: single steps, so no lock. None: it is
        # being sent.
        self._pending: dict[RpcRequest, Future | None] = {}
        # of recv_request() and sync_rpc_call(); the mailbox has its own of recv_response()
        self._ending = Ending()

    # -- who asks ----------------------------------------------------------------------------------

    def _asking(self) -> DealerClient:
        if self._client is None:
            raise errors.ConfigError(
                "this dealer answers requests; one that sends them comes from "
                "client.create_dealer()"
            )
        return self._client

    def _server_id(self, request: RpcRequest) -> int | None:
        if request.sid is not None:
            return request.sid
        if request.dest_rank is None or self._by_rank:
            return request.dest_rank
        client = self._asking()
        server_id = client.server_of_rank(request.dest_rank)
        if server_id is None:
            raise errors.NoServer(
                f"no server of {self.name!r} has rank {request.dest_rank}; "
                f"there are ranks {client.ranks}"
            )
        return server_id

    def send_request(self, request: RpcRequest, timeout_s: float | None = TIMEOUT_S) -> None:
        """Send it; its response comes by recv_response(), also when it is that the request failed
        or `timeout_s` passed.

        Raises Backpressure while as many as may of this dealer are in flight or answered and not
        received; Closed; BadArguments for seconds that are none."""
        wait_in_ms(timeout_s)
        self._asking()
        self._ending.check()
        if len(self._pending) + len(self._responses) >= self._requests_max:
            raise errors.Backpressure(
                f"{len(self._pending)} requests of this dealer are in flight and "
                f"{len(self._responses)} responses wait to be "
                f"received, {self._requests_max} in all are allowed: call recv_response()"
            )
        self._pending[request] = None
        try:
            call = self._pending[request] = self._submit(request, timeout_s)
        except BaseException as error:
            if isinstance(error, errors.RpcError) and not isinstance(
                error, errors.Closed | errors.ShmFull
            ):
                self._finish(request, error, None)
                return
            # ShmFull, or a bug; or nobody could receive the response
            self._pending.pop(request, None)
            raise
        call.when_done(lambda done: self._answered(request, done))
        if self._ending.error is not None:  # closed meanwhile
            call.cancel(copy.copy(self._ending.error))

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
        self._pending.pop(request, None)
        self._responses.put(response)

    def send_request_one_way(self, request: RpcRequest) -> None:
        """Send it and expect nothing. Where its server is not connected yet, waits until it has
        left, TIMEOUT_S seconds at most.

        Raises what kept it from being sent: NoServer, NotSent, Backpressure, DeadlineExceeded,
        Closed."""
        client = self._asking()
        self._ending.check()
        server_id = self._server_id(request)
        if server_id is None:
            client.notify(ONE_WAY, *request.values, wait=True)
        else:
            client.notify_to(server_id, ONE_WAY, *request.values, wait=True)

    def recv_response(self, timeout_s: float | None = None) -> RpcResponse:
        """The next response to arrive, to whichever request.

        Raises TimeoutError after `timeout_s` seconds, Terminated (a Closed), ConfigError."""
        response: RpcResponse = self._responses.get(timeout_s)
        return response

    def sync_rpc_call(
        self, request: RpcRequest, timeout_s: float | None = TIMEOUT_S
    ) -> RpcResponse:
        """Send it and wait for its own response, whatever else arrives. Its error_code says how it
        went.

        Raises Closed (Terminated is one) where this dealer, its client or its service is closed or
        terminated; BadArguments for seconds that are none."""
        wait_in_ms(timeout_s)
        self._asking()
        self._ending.check()
        if self.is_terminated:
            raise self._responses.terminated()
        response = RpcResponse(request)
        try:
            call = self._submit(request, timeout_s)
            with self._ending.may_end(call):
                if self.is_terminated:  # since the look above
                    call.cancel(self._responses.terminated())
                response.values = list(call.result() or ())
        except ClosedError as error:  # of the driver
            raise errors.Closed(
                f"a dealer of {self.name!r} waits no longer: its service was closed here"
            ) from error
        except errors.Closed:
            raise
        except errors.RpcError as error:
            response.error = error
        return response

    @property
    def in_flight(self) -> int:
        """Requests whose response has not arrived."""
        return len(self._pending)

    # -- who answers -------------------------------------------------------------------------------

    def recv_request(self, timeout_s: float | None = None) -> RpcRequest:
        """The next request that no other dealer of this server has received, and whose caller still
        waits.

        Raises TimeoutError after `timeout_s` seconds, Terminated (a Closed), ConfigError."""
        if self._queue is None:
            raise errors.ConfigError(
                "this dealer sends requests; one that receives them comes from "
                "server.create_dealer()"
            )
        request: RpcRequest = self._queue.mailbox.get(timeout_s, self._ending)
        return request

    def send_response(self, response: RpcResponse) -> bool:
        """Answer the response's request, received by this dealer or another. False when nobody
        waits for it: it was answered, its deadline has passed, or its caller has given it up or is
        gone.

        A response to a one-way request is dropped: nobody waits for it."""
        answer = response.request._answer
        if answer is None or response.request._is_over():
            return False
        if response.error is not None:
            return answer.fail(response.error)
        return answer.reply(response.values)

    # -- both --------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """End this dealer's waits with Terminated; of its server's too, as far as they wait for
        requests. What is in flight goes on, but for the request of sync_rpc_call()."""
        self._responses.terminate()
        self._ending.end_waits(self._responses.terminated())
        if self._queue is not None:
            self._queue.mailbox.terminate()

    def restart(self) -> None:
        """Go on after terminate()."""
        self._responses.restart()
        if self._queue is not None:
            self._queue.mailbox.restart()

    @property
    def is_terminated(self) -> bool:
        """Whether terminate() came last, or close() at any time."""
        return self._responses.is_terminated

    def close(self) -> None:
        """Wait for nothing more: its waits end with Terminated, now and from now on, and its
        requests in flight are cancelled.
        """
        self.end("this dealer")

    def end(self, what: str) -> None:
        """The same, because `what` was closed."""
        error = Terminated(f"a dealer of {self.name!r} waits no longer: {what} was closed here")
        self._responses.close(str(error))
        self._ending.end(error)
        for call in list(self._pending.values()):
            if call is not None:
                call.cancel(copy.copy(error))

    def __enter__(self) -> Dealer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
