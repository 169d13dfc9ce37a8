"""What a coroutine of the engine awaits beside results: time, its next turn, a function that
blocks.

    await sleep(0.5)                     seconds; others run meanwhile
    await yield_now()                    its next turn: what else is due runs before
    await run_blocking(function, *args)  the function's result; it runs in another thread

The task that awaits one begins it (task.py) in its own reactor, so none of them is told where it
runs. It is `finished` once it has woken its task. A task that is cancelled meanwhile takes back
what it can: a timer, and a function that has not begun; one that has runs to its end, and nobody
hears of it. Tasks of asyncio's that a handler made do what asyncio has for it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from concurrent.futures import Future as ThreadFuture
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from shard import runtime
from shard.checks import is_finite
from shard.loop.future import running_asyncio_loop
from shard.loop.timers import Timer

# Of the threads of run_blocking(), for the whole process. Where all of them block, functions wait
# in the order in which they came.
BLOCKING_THREADS_MAX = 32

P = ParamSpec("P")
T = TypeVar("T")


class Resumable(Protocol):
    """The task that awaits."""

    def wake(self, wait: Wait) -> None:
        """That is over: go on in a turn of the reactor. From any thread."""

    def wake_later(self, delay_s: float, wait: Wait) -> Timer:
        """The same, in so many seconds. In the reactor's thread."""


class Wait(ABC):
    """Something that a task begins when it comes to await it, and that wakes it."""

    finished = False  # it has woken the task

    @abstractmethod
    def begin(self, task: Resumable) -> None:
        """In the task's reactor."""

    def abandon(self, error: BaseException | None = None) -> bool:
        """The task is cancelled: whether this ends by it, and so wakes the task."""
        return False


class sleep(Wait):  # noqa: N801 - a verb: `await sleep(1.0)`
    """Awaiting it takes `delay_s` seconds, from 0 on. Raises ValueError for what is no number of
    seconds.
    """

    def __init__(self, delay_s: float) -> None:
        if not is_finite(delay_s, 0.0):
            raise ValueError(f"sleep({delay_s!r:.100}): seconds from 0 on are allowed")
        self._delay_s = delay_s
        self._timer: Timer | None = None

    def __repr__(self) -> str:
        return f"shard.sleep({self._delay_s})"

    def begin(self, task: Resumable) -> None:
        self._timer = task.wake_later(self._delay_s, self)

    def __await__(self) -> Generator[Any, None, None]:
        self.finished = False  # it may be awaited again
        if is_in_asyncio():
            yield from sys.modules["asyncio"].sleep(self._delay_s).__await__()
            return
        try:
            yield self
        finally:
            if self._timer is not None:
                self._timer.cancel()


class yield_now(Wait):  # noqa: N801 - a verb, too
    """Awaiting it lets run what else is due, once: for a computation in pieces."""

    def __repr__(self) -> str:
        return "shard.yield_now()"

    def begin(self, task: Resumable) -> None:
        task.wake(self)

    def __await__(self) -> Generator[Any, None, None]:
        self.finished = False
        if is_in_asyncio():
            yield from sys.modules["asyncio"].sleep(0).__await__()
        else:
            yield self


class run_blocking(Wait):  # noqa: N801 - a verb, too
    """Awaiting it calls function(*args, **kwargs) in one of BLOCKING_THREADS_MAX threads of the
    process, in a copy of the context, and has what it returns or raises. For what blocks in a
    handler, or computes for long there: it would hold up all others.

    The process ends when the functions that have begun have ended, as with every pool of threads.
    Raises RuntimeError where no more threads are to be had.
    """

    def __init__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        self._function = partial(copy_context().run, partial(function, *args, **kwargs))
        self._name = getattr(function, "__qualname__", repr(function))
        self._run: ThreadFuture[Any] | None = None

    def __repr__(self) -> str:
        return f"shard.run_blocking({self._name})"

    def begin(self, task: Resumable) -> None:
        try:
            self._run = _threads().submit(self._function)
        except RuntimeError as error:  # no more threads, or the interpreter ends
            self._run = ThreadFuture()
            self._run.set_exception(error)
        self._run.add_done_callback(lambda _: task.wake(self))

    def __await__(self) -> Generator[Any, None, Any]:
        self.finished = False
        if is_in_asyncio():
            self._run = _threads().submit(self._function)
            return (yield from sys.modules["asyncio"].wrap_future(self._run))
        try:
            yield self
        finally:
            if self._run is not None:
                self._run.cancel()
        assert self._run is not None, "it was begun by the task that it woke"
        return self._run.result()


def is_in_asyncio() -> bool:
    """Whether a task of asyncio's awaits, in a loop that is a reactor's guest (guest_loop.py)."""
    return getattr(running_asyncio_loop(), "runs_our_task", None) is False


def _threads() -> Executor:
    return runtime.own(
        "blocking threads",
        lambda: runtime.Threads(BLOCKING_THREADS_MAX, thread_name_prefix="blocking"),
    )
