"""Streams: items of one call, in either direction, no faster than the other side takes them (halves.py).

The server's REPLY or FAILURE is the end of both directions, the caller's END that of its own.

    for row in client.stream("scan", table):          # the server's method is a generator, or an async one
        ...

    with client.stream("total") as stream:            # ... iterates over prpc_engine.incoming()
        for batch in batches:
            stream.send(batch)
        stream.end()
        total = stream.result(timeout_s=5)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

from prpc_engine import errors
from prpc_engine.call import Call
from prpc_engine.halves import Inbox, Window
from prpc_engine.job import Job
from shard import CONTEXT, Future


class Incoming:
    """What the caller streams to a handler, which iterates over it: `async for item in prpc_engine.incoming()`."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                there, item = self._inbox.take()
            except StopIteration:
                raise StopAsyncIteration from None
            if there:
                return item
            await item


def incoming() -> Incoming:
    """Inside an `async def` handler: the items that the caller sends. Raises LookupError where the call is no stream."""
    job = CONTEXT.value
    if not isinstance(job, Job) or job.inbox is None:
        raise LookupError("this call is no stream: incoming() works in methods that are called by client.stream()")
    return Incoming(job.inbox)


class Stream:
    """The caller's side. Iterate for what the server yields; send() and end() for what it takes; result() for what it returns.

    One thread or task iterates, one sends. Leaving its `with` cancels what has not ended.
    """

    def __init__(self, call: Call, inbox: Inbox, window: Window, send: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._call = call
        self._inbox = inbox
        self._window = window
        self._send = send
        self._end = end
        call.add_done_callback(self._finished)

    def _finished(self, call: Future) -> None:
        error = call.error()
        self._inbox.finish(error)
        self._window.close(error or errors.Closed("the stream is over: the server has answered"))

    # -- what the server yields ------------------------------------------------------------------------------------------

    def next_item(self, timeout_s: float | None = None) -> Any:
        """The next item. Raises StopIteration at the end, TimeoutError, and what ended the stream."""
        while True:
            there, item = self._inbox.take()
            if there:
                return item
            item.result(timeout_s)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.next_item()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await Incoming(self._inbox).__anext__()

    # -- what the server takes -------------------------------------------------------------------------------------------

    def send(self, item: Any, timeout_s: float | None = None) -> None:
        """Send one item; waits while WINDOW_ITEMS of them are not taken. Raises TimeoutError, and what ended the stream."""
        while (credit := self._window.take()) is not None:
            credit.result(timeout_s)
        self._send(item)

    async def asend(self, item: Any) -> None:
        """send() for a task or an asyncio coroutine."""
        while (credit := self._window.take()) is not None:
            await credit
        self._send(item)

    def end(self) -> None:
        """Nothing more will be sent: the server's iteration ends."""
        self._end()

    # -- how it ends -----------------------------------------------------------------------------------------------------

    def result(self, timeout_s: float | None = None) -> Any:
        """What the server's method returns at its end; None for a generator. Raises TimeoutError, and what ended the stream."""
        return self._call.result(timeout_s)

    def done(self) -> bool:
        """Whether the server has answered, or the stream was given up."""
        return self._call.done()

    def cancel(self) -> bool:
        """Give it up; the server's method is ended. False when it was over before."""
        return self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
