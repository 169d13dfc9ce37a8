"""A request that is not answered in the turn it arrived in: queued, then a task, then its answer.
Its states are a table that runs: job_state.py.

The loss of its peer ends a job that waits in the queue, a stream, and a unary call without a
deadline that is not `once`. Any other runs to its end, unless its Deferred says `ends_with_caller`;
a `once` job whose caller asks again answers the newer peer (repeats.py).

A job that becomes over is answered at once. If it is a coroutine, CancelledError is raised at its
await, and its `finally` blocks may await: until it has ended it counts among the server's tasks,
and keeps the server from being stopped. What is no coroutine has ended then.

So many tasks run at a time, so many calls and bytes wait (server.Bounds); what is over that is
refused, and the caller told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import AsyncGeneratorType
from typing import Any, Protocol, TypeGuard, TypeVar

import msgspec

from prpc_engine.archive import Archive, Handover
from prpc_engine.errors import DeadlineExceeded
from prpc_engine.rpc.flow_control import Inbox, Window
from prpc_engine.rpc.job_state import JobEvent, JobState
from prpc_engine.rpc.message import END, TO_CALLER, Status
from shard import Connection, Future, Reactor, Task, Timer


class Caller(Protocol):
    """Who asked, as its server sees it: one connection, and how answers go back over it. A Peer is
    one.
    """

    decoder: Archive
    number: int  # of the connection: larger than those of the node's connections before it
    reactor: Reactor
    running: dict[int, Job]  # its requests that are not answered yet, by its call id
    decode_plain: Callable[[memoryview | bytes], Any]

    @property
    def connection(self) -> Connection[Any]:
        """What it asks over."""

    def reply(self, call_id: int, value: Any) -> bool:
        """Answer with a value; False when it cannot be sent, which the caller is told."""

    def fail(self, call_id: int, status: Status, name: str, text: str, more: str) -> None:
        """Answer that there is no value, and why."""

    def send_item(self, call_id: int, side: int, item: Any) -> None:
        """One item of a stream, for which there is credit."""

    def send_note(self, kind: int, call_id: int, side: int, count: int = 0) -> None:
        """CREDIT or END of a stream."""


class Expired(DeadlineExceeded):
    """The caller's deadline came first: raised by a server for its handlers. One of their own is
    told as any error of theirs.
    """


class Job(msgspec.Struct, eq=False):
    """A request that is not answered in the turn it arrived in: queued, then running, then
    answered. Made and changed in the reactor's thread.
    """

    peer: Caller  # who gets the answer
    call_id: int  # 0: a notification
    timeout_ms: int  # 0: the caller waits as long as the connection lasts
    deadline: float  # on the reactor's clock; meaningless when timeout_ms is 0
    key: int  # the method
    arguments: Sequence[Any]
    nbytes: int  # as it arrived
    # while it is queued: what its callers get back when it is dropped
    handovers: Sequence[Handover] = ()
    state: JobState = JobState.TAKEN_ON
    # its Deferred says so: a lost peer ends it, though it is no stream
    ends_with_caller: bool = False
    is_once: bool = False  # its answer is kept (repeats.py)
    inbox: Inbox | None = None  # of a stream
    window: Window | None = None
    # set by the server until nothing of it is left: what is told that something has happened to it,
    # and what may decide not to end it: the holder of a Deferred
    follow: Callable[[Job, JobEvent], object] | None = None
    cancel: Callable[[BaseException], object] | None = None
    task: Task | None = None  # of its coroutine, once that waits
    # what it was told to end with: by its deadline, its caller or its server's end
    ended_by: BaseException | None = None
    timer: Timer | None = None

    @property
    def is_queued(self) -> bool:
        """Whether its handler is still to be called."""
        return self.state is JobState.QUEUED

    @property
    def is_over(self) -> bool:
        """Whether it is answered, or nobody waits for an answer."""
        return self.state is JobState.OVER or self.state is JobState.ENDED

    def end(self, error: BaseException, again: bool = True) -> None:
        """Have it end before its handler is done, if it can be: what it ends with then is not its
        handler's own. `again`: also where it is over, and cleans up.
        """
        if not self.peer.reactor.serves:
            # who ends it meanwhile, for another reason, has done so
            self.peer.reactor.call_in_engine(partial(self.end, error, again and self.is_over))
        elif self.follow is not None and (again or not self.is_over):
            self.ended_by = error
            if self.cancel is not None:
                self.cancel(error)
            else:
                self.follow(self, JobEvent.ENDED_EARLY)

    def late(self) -> None:
        """Its deadline has passed."""
        self.timer = None
        if self.is_queued and self.follow is not None:
            self.follow(self, JobEvent.TOO_LATE)
        else:
            self.end(Expired(f"the caller's {self.timeout_ms} ms are over"))

    def was_ended(self, error: BaseException) -> bool:
        """Whether it ended with that error because of end(), or of its deadline; else the error is
        its handler's own.
        """
        return is_a(error, Expired) or (
            self.ended_by is not None and is_a(error, type(self.ended_by))
        )


def discard(value: Any) -> None:
    """Let go of what a handler returned to be waited for, and nobody will."""
    if isinstance(value, Future):
        value.cancel()
    elif not isinstance(value, AsyncGeneratorType):  # which has nothing to end before it began
        value.close()


Kind = TypeVar("Kind", bound=BaseException)


def is_a(error: BaseException, kind: type[Kind]) -> TypeGuard[Kind]:
    """As isinstance(), which asks a `__class__` of the user's, too: that may raise."""
    return issubclass(type(error), kind)


def pass_on_interrupt(error: BaseException, reactor: Reactor) -> None:
    """Ctrl-C in the main thread ends what turns the reactor there, and not only the handler that it
    met: afterwards, so that the call is answered first and nothing is left half done."""
    if is_a(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        reactor.interrupt_soon(error)


class _Next(Generator[Any, Any, Any]):
    """The next item of an async generator. Closing a task that awaits it closes the generator too;
    closing one that awaits __anext__() leaves that generator "running" for ever, before Python
    3.13."""

    def __init__(self, items: AsyncGeneratorType[Any, None]) -> None:
        self._step = items.__anext__()

    def __await__(self) -> _Next:
        return self

    def send(self, value: Any) -> Any:
        return self._step.send(value)

    def throw(self, *raised: Any) -> Any:
        return self._step.throw(*raised)


async def pump(job: Job, items: Generator[Any, None, Any] | AsyncGeneratorType[Any, None]) -> None:
    """Send what a handler yields, as far as its caller takes it."""
    window, peer, call_id = job.window, job.peer, job.call_id
    assert window is not None
    try:
        if not isinstance(items, AsyncGeneratorType):
            for item in items:
                while (credit := window.take()) is not None:
                    await credit
                peer.send_item(call_id, TO_CALLER, item)
        else:
            while True:
                try:
                    item = await _Next(items)
                except StopAsyncIteration:
                    return
                while (credit := window.take()) is not None:
                    await credit
                peer.send_item(call_id, TO_CALLER, item)
    finally:
        # ahead of the answer, which may overtake items
        if not job.is_over:
            peer.send_note(END, call_id, TO_CALLER, window.sent)
        if not isinstance(items, AsyncGeneratorType):
            items.close()
        else:
            await items.aclose()
