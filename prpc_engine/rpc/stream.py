"""Streams: items of one call, in either direction, no faster than the other side takes them
(flow_control.py).

The server's REPLY or FAILURE is the end of both directions, the caller's END that of its own.

    for row in client.stream("scan", table):  # the server's method is a generator, or an async one
        ...

    with client.stream("total") as stream:            # ... iterates over prpc_engine.incoming()
        for batch in batches:
            stream.send(batch)
        stream.end()
        total = stream.result(timeout_s=5)

A stream is there at once, like the future of a call, and waits for its connection where that is
still to be made (dispatcher.py):

    state    event                                     next
    waiting  OPEN has left                             open      items may be sent; END follows if
                                                                 end() was called meanwhile
    waiting  OPEN could not be sent                    waiting, or over: as any call that reached
                                                       nobody (retry.py)
    open     REPLY, FAILURE, the connection is lost    over      nothing is sent again: items may
                                                                 have been taken
    any      deadline, cancel(), the client is closed  over
    any      nobody holds the Stream any more          over, as by cancel(): a loop that was left,
                                                       an error on its way up

Only its user holds a Stream: connections and tables know its StreamCall. So a dropped one is
finalized at once, and needs no collection of garbage for that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, Protocol

from prpc_engine import errors
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.context import wait_in_ms
from prpc_engine.rpc.flow_control import WINDOW_ITEMS, Inbox, Window
from prpc_engine.rpc.job import Job
from prpc_engine.rpc.message import CREDIT, END, FROM_CALLER
from shard import Future, Waiter, behalf


class Incoming:
    """What the caller streams to a handler, which iterates over it:
    `async for item in prpc_engine.incoming()`.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "incoming() is read by `async for item in incoming()`, in a method that is `async def`"
        )

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            while True:
                try:
                    there, item = self._inbox.take()
                except StopIteration:
                    raise StopAsyncIteration from None
                if there:
                    return item
                await item
        finally:
            # else an error that ended it, its traceback and this frame hold the inbox, which holds
            # the error
            del self


def incoming() -> Incoming:
    """Inside an `async def` handler: the items that the caller sends. Raises LookupError where the
    call is no stream.
    """
    job = behalf()
    if not isinstance(job, Job) or job.inbox is None:
        raise LookupError(
            "this call is no stream: incoming() works in methods that are called by client.stream()"
        )
    return Incoming(job.inbox)


class Carrier(Protocol):
    """What a stream sends items and notes over: a Peer."""

    def send_item(self, call_id: int, side: int, item: Any) -> None:
        """One item of a stream, whose window has let it through. Raises NotSent, Backpressure,
        BadArguments, Closed.
        """

    def send_note(self, kind: int, call_id: int, side: int, count: int = 0) -> None:
        """CREDIT, END or CANCEL, of that call; sent later where the outbox is full, dropped where
        the peer is gone.
        """


class StreamLine:
    """The caller's way to the server: what a stream sends apart from OPEN goes through here."""

    def __init__(self) -> None:
        self.is_open = False  # OPEN has left: nothing may overtake it
        self._carrier: Carrier | None = None
        self._call_id = 0
        self._ended_after: int | None = None  # items; None: more may come

    def lead_over(self, carrier: Carrier, call_id: int) -> None:
        """OPEN is about to leave over it under that number. Again, when that failed."""
        self._carrier, self._call_id = carrier, call_id

    def opened(self) -> None:
        """OPEN has left."""
        self.is_open = True
        self._tell_end()

    def end(self, items: int) -> None:
        """The caller will send no more than so many. The server may be told twice, when another
        thread opens it meanwhile.
        """
        self._ended_after = items
        self._tell_end()

    def _tell_end(self) -> None:
        if self.is_open and self._ended_after is not None:
            self._over().send_note(END, self._call_id, FROM_CALLER, self._ended_after)

    def grant(self, items: int) -> None:
        """So many items of the server were taken."""
        self._over().send_note(CREDIT, self._call_id, FROM_CALLER, items)

    def send_item(self, item: Any) -> None:
        """One item, for which there is credit. Raises as Peer.send_item()."""
        self._over().send_item(self._call_id, FROM_CALLER, item)

    def _over(self) -> Carrier:
        assert self._carrier is not None, "neither credit nor items before OPEN"
        return self._carrier


class StreamCall(Call, kw_only=True):
    """The call of a stream, with its two halves: it waits for a connection, ends and is given up as
    any other call.
    """

    inbox: Inbox
    window: Window
    line: StreamLine
    ready: Future  # done when it is open, or over

    def opened(self, has_credit: bool) -> None:
        """OPEN has left; `has_credit`: no item can overtake it, so that the first may follow at
        once.
        """
        self.body, self.blocks = b"", ()
        self.line.opened()
        if has_credit:
            self.window.grant(WINDOW_ITEMS)
        self.ready.set_result(None)


def stream_call(waiter: Waiter | None, **fields: Any) -> StreamCall:
    """A new one; `fields` are those of Call."""
    line = StreamLine()
    inbox, window = Inbox(waiter, line.grant), Window(waiter, 0)
    call = StreamCall(waiter, inbox=inbox, window=window, line=line, ready=Future(waiter), **fields)
    call.when_done(_finish)
    return call


def _finish(call: Future) -> None:
    assert isinstance(call, StreamCall)
    error = call.error()
    call.inbox.finish(error)
    call.window.close(error or errors.Closed("the stream is over: the server has answered"))
    call.ready.set_result(None)


class Stream:
    """The caller's side. Iterate for what the server yields; send() and end() for what it takes;
    result() for what it returns.

    One thread or task iterates, one sends. What has not ended is cancelled when its `with` is left,
    by close(), and when the last reference to the stream goes: after `break`, or an error, in a
    loop over it. What kept it from being opened is raised by whichever of these comes first; `async
    with` waits until it is open, and raises that itself.
    """

    def __init__(
        self, call: StreamCall, soon: Callable[[Callable[[], object]], object] | None = None
    ) -> None:
        """`soon` runs a callback in the reactor; None: nobody cancels the call when the stream is
        dropped.
        """
        self.call = call
        self._soon = soon
        self._inbox = call.inbox
        self._window = call.window
        self._line = call.line
        self._ended = False  # end() was called

    def __del__(self) -> None:
        # In the reactor: the collector of garbage calls this in any thread, which may hold the
        # locks that cancel() takes.
        if not self.call.finished and self._soon is not None:
            self._soon(self.call.cancel)

    # -- what the server yields --------------------------------------------------------------------

    def next_item(self, timeout_s: float | None = None) -> Any:
        """The next item. Raises StopIteration at the end, TimeoutError, BadArguments for seconds
        that are none, and what ended the stream."""
        if timeout_s is not None:
            wait_in_ms(timeout_s)
        try:
            while True:
                there, item = self._inbox.take()
                if there:
                    return item
                item.result(timeout_s)
        finally:
            # else an error that ended it, its traceback, this frame and the stream hold each other
            del self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.next_item()
        finally:
            del self  # as there

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await Incoming(self._inbox).__anext__()
        finally:
            del self  # as in next_item()

    # -- what the server takes ---------------------------------------------------------------------

    def send(self, item: Any, timeout_s: float | None = None) -> None:
        """Send one item; waits while WINDOW_ITEMS of them are not taken. Raises TimeoutError,
        Closed after end(), BadArguments for seconds that are none, and what ended the stream."""
        if timeout_s is not None:
            wait_in_ms(timeout_s)
        self._check_not_ended()
        while (credit := self._window.take()) is not None:
            try:
                credit.result(timeout_s)
            except TimeoutError:
                self._window.give_up(credit)
                raise
        self._send(item)

    async def asend(self, item: Any) -> None:
        """send() for a task or an asyncio coroutine."""
        self._check_not_ended()
        while (credit := self._window.take()) is not None:
            await credit
        self._send(item)

    def _send(self, item: Any) -> None:
        # again: another thread may have called end() while this one waited for credit
        self._check_not_ended()
        try:
            self._line.send_item(item)
        except errors.Closed as error:  # it ended after the look at the window, which has heard how
            raise self._window.ended_by or error from None
        except errors.NotSent as error:
            # The connection is lost, and that ends the stream, if it has not heard of it yet. The
            # item was not sent, but the stream was: repeating it may run it twice.
            lost = errors.MaybeExecuted(f"the stream of {self.call.asked[0]!r} is over: {error}")
            raise self._window.ended_by or lost from error

    def _check_not_ended(self) -> None:
        if self._ended:
            raise errors.Closed(
                f"the item was not sent: end() of this stream of {self.call.asked[0]!r} was "
                "called before it"
            )

    def end(self) -> None:
        """Nothing more will be sent: the server's iteration ends. Again: does nothing."""
        if not self._ended:
            self._ended = True
            self._line.end(self._window.sent)

    # -- how it ends -------------------------------------------------------------------------------

    def result(self, timeout_s: float | None = None) -> Any:
        """What the server's method returns at its end; None for a generator. Raises TimeoutError,
        BadArguments for seconds that are none, and what ended the stream."""
        if timeout_s is not None:
            wait_in_ms(timeout_s)
        self.call.error(timeout_s)  # waits; the stream is held until it is over
        call = [self.call]
        del self  # as in next_item()
        return call.pop().result()

    def done(self) -> bool:
        """Whether the server has answered, or the stream was given up."""
        return self.call.done()

    def cancel(self) -> bool:
        """Give it up; the server's method is ended. False when it was over before."""
        return self.call.cancel()

    def close(self) -> None:
        """cancel(), under the name that generators have for it."""
        self.cancel()

    async def aclose(self) -> None:
        """cancel(), under the name that async generators have for it."""
        self.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def __aenter__(self) -> Stream:
        try:
            await self.call.ready
            if not self._line.is_open:
                await self.call  # which raises why
        except BaseException:  # a cancelled task will not come to __aexit__()
            self.cancel()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
