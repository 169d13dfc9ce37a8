"""A result to come: waited for by a thread, awaited by a task of the reactor, or awaited in an
asyncio loop.

States: pending -> done (value or error), once. set_result and set_error after that answer False and
change nothing, so a late reply and a deadline can race without harm. What follows a future in the
engine runs in the thread that completes it; callbacks of the application run in an engine thread
(callback.py).

Which of two threads completes it is decided by `del self._open`: deleting an attribute is one step
of the interpreter, and fails for the second one. To look at `finished` and then set it would be two
steps, and Python 3.10 switches threads between any two. It costs 20 ns and allocates nothing; a
lock takes 50, and a fork, a signal handler or a destructor may find it held.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shard.checks import is_finite
from shard.errors import CancelledError, ShardError
from shard.loop.callback import DoneCallback

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("shard")
PENDING, VALUE, ERROR = 0, 1, 2  # `finished`: falsy while there is nothing
# Two threads must not each make the list of one future. Held as a list is made, when garbage may be
# collected: a destructor that completes a future finds it held by its own thread.
_making_callbacks = threading.RLock()


class Waiter(Protocol):
    """Who can make progress while a thread waits: the driver of the reactor that will complete the
    future.
    """

    def wait(self, future: Future, timeout_s: float | None) -> bool:
        """Return True once the future is done, False when the time is over."""

    def wait_until(self, future: Future, deadline: float | None) -> bool:
        """The same, until a time of the monotonic clock."""

    def await_in(
        self, future: Future, loop: asyncio.AbstractEventLoop
    ) -> Generator[Any, None, None]:
        """What a coroutine of `loop`, which runs here, yields until the future is done."""

    def expect(self, future: Future) -> None:
        """Make progress until the future is done: somebody awaits it who cannot. From any thread,
        at once.
        """

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        """Run work() in a thread that may run the application's, soon; False where nobody turns the
        reactor any more. From any thread, at once.
        """


class Future(msgspec.Struct, eq=False):
    """A future is a result to come, for a thread, a task of the reactor or an asyncio loop.

    Any thread may complete it, once. `waiter`: who makes progress while a thread waits, and has the
    engine threads that callbacks run in; None where only tasks of one reactor ever wait for it: a
    thread that would have to wait gets a ShardError.

    A msgspec.Struct because its constructor is in C: 90 ns instead of 210, on a path that makes one
    for every call.
    """

    waiter: Waiter | None = None
    finished: int = PENDING  # or VALUE, or ERROR: what `_outcome` is
    _callbacks: list[Callable[[Future], object]] | None = None
    _outcome: Any = None
    _open: None = None  # there until somebody completes it

    # msgspec's own reads every field, and `_open` is gone once it is done
    def __repr__(self) -> str:
        if self.finished == PENDING:
            return f"<{type(self).__name__} pending>"
        return (
            f"<{type(self).__name__} {'error' if self.finished == ERROR else 'value'} "
            f"{self._outcome!r:.200}>"
        )

    # a Struct can be pickled: the copy in another process would never be completed
    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} is no value: send what it brings, its result()")

    def done(self) -> bool:
        """Whether there is a value or an error."""
        return self.finished != PENDING

    def set_result(self, value: Any) -> bool:
        """Complete with a value; False when it was complete before."""
        if self.finished:
            return False
        try:
            del self._open
        except AttributeError:
            return False  # another thread is completing it
        self._outcome = value
        self.finished = VALUE
        if self._callbacks is not None:
            self._run_callbacks()
        return True

    def set_error(self, error: BaseException) -> bool:
        """Complete with an error; False when it was complete before."""
        if self.finished:
            return False
        try:
            del self._open
        except AttributeError:
            return False  # another thread is completing it
        self._outcome = error
        self.finished = ERROR
        if self._callbacks is not None:
            self._run_callbacks()
        return True

    def cancel(self, error: BaseException | None = None) -> bool:
        """Give the result up: complete with `error`, a CancelledError by default; False when it was
        complete before.
        """
        return self.set_error(error or CancelledError("cancelled here"))

    def _run_callbacks(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)  # atomic: whoever pops it runs it
            except IndexError:
                return  # another thread popped the last one
            try:
                callback(self)
            except (Exception, CancelledError):
                logger.exception("a future's callback %r raised", callback)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have callback(self) called once it is done: in a thread of the engine, as handlers are,
        with a context of its own and never in here, so it may make calls and wait for them. While
        it blocks otherwise, its process takes no answers.

        Those of one future begin in their order. What one raises is logged. Where no engine runs (a
        future without one, or whose owner was closed), it is called in the thread that completes
        the future, or at once where that has been.
        """
        self.when_done(DoneCallback(callback))

    def when_done(self, callback: Callable[[Future], object]) -> None:
        """The same for the engine's own functions: callback(self) runs in the thread that completes
        the future, or at once where that has been. It must be short, and run nothing of the
        application's. What it raises is logged.
        """
        with _making_callbacks:
            if self._callbacks is None:
                self._callbacks = []
        self._callbacks.append(callback)
        if self.finished:  # perhaps after the completing thread had looked at the list
            self._run_callbacks()

    def remove_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Take back one that was added, while the future is not done."""
        callbacks = self._callbacks
        if callbacks:
            wrapped = [
                each
                for each in list(callbacks)
                if type(each) is DoneCallback and each.function == callback
            ]
            with contextlib.suppress(ValueError):
                callbacks.remove(wrapped[0] if wrapped else callback)

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        """Run work() where the application's callbacks of this future run, soon; False where that
        is nowhere in particular, or nobody runs them any more.
        """
        return self.waiter is not None and self.waiter.call_in_engine(work)

    def result(self, timeout_s: float | None = None) -> Any:
        """The value, once there; raises the error it was completed with, or TimeoutError after
        `timeout_s` seconds.
        """
        if timeout_s is not None:
            _check_seconds(timeout_s)  # though it need not wait: whether it must is chance
        if not self.finished and not self._wait(timeout_s):
            raise TimeoutError(f"no result within {timeout_s} s; the work goes on")
        if self.finished == ERROR:
            try:
                raise self._outcome
            finally:
                # else error, traceback, this frame and the future hold each other until a
                # collection of garbage
                del self
        return self._outcome

    def error(self, timeout_s: float | None = None) -> BaseException | None:
        """The error it was completed with, or None for a value; TimeoutError as result()."""
        if timeout_s is not None:
            _check_seconds(timeout_s)
        if not self.finished and not self._wait(timeout_s):
            raise TimeoutError(f"no result within {timeout_s} s; the work goes on")
        return self._outcome if self.finished == ERROR else None

    def _wait(self, timeout_s: float | None) -> bool:
        if self.waiter is None:
            raise ShardError(
                "this future can be awaited by a task of its reactor, but no thread may block on it"
            )
        return self.waiter.wait(self, timeout_s)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.finished:
            loop = running_asyncio_loop()
            # None for loops that are no reactor's guest, True where its Task runs, and no other
            runs_our_task = getattr(loop, "runs_our_task", None)
            if loop is None or runs_our_task:
                yield self  # to the Task that drives this coroutine
            elif self.waiter is None or runs_our_task is not None:
                yield from await_in_asyncio(self, loop)
            else:
                yield from self.waiter.await_in(self, loop)
        try:
            return self.result()
        finally:
            del self  # as in result()

    def abandon(self, error: BaseException | None = None) -> bool:
        """Who awaits it is cancelled, for that reason: cancel() it, if it has work behind it;
        whether it was. A plain future goes on: others may wait for it.
        """
        return self.has_work() and self.cancel(error)

    def has_work(self) -> bool:
        """Whether something is done for it, that cancel() ends: its class has its own."""
        return type(self).cancel is not Future.cancel


def _check_seconds(timeout_s: object) -> None:
    """Raise ValueError for what is no number of seconds from 0 on."""
    if not is_finite(timeout_s, 0.0) and not (
        isinstance(timeout_s, float) and timeout_s == math.inf
    ):
        raise ValueError(
            f"timeout_s={timeout_s!r:.100}: seconds from 0 on are allowed, or None for no limit"
        )


class Gathered(Future, kw_only=True):
    """What gather() answers. Cancelled, it cancels its members that have work behind them, and is
    complete when these have ended.
    """

    workers: Sequence[Future]  # those members
    cancelled: BaseException | None = None

    def cancel(self, error: BaseException | None = None) -> bool:
        """Cancel its members. It completes with `error`, a CancelledError by default; False when it
        was complete before.
        """
        if self.finished:
            return False
        self.cancelled = error or CancelledError("cancelled here")
        for worker in self.workers:
            worker.cancel(error)
        self.end_if_cancelled()
        return True

    def end_if_cancelled(self) -> None:
        """One of its members may have been the last to end."""
        if self.cancelled is not None and all(worker.finished for worker in self.workers):
            self.set_error(self.cancelled)


def gather(futures: Collection[Future], waiter: Waiter | None = None) -> Gathered:
    """A future done when all of them are: with the list of their values in order, or the first
    error in that order. Its cancel() cancels those that have work behind them.

    futures: in one list; what else can be awaited (a coroutine, shard.sleep()) is awaited in a task
    of a TaskGroup.
    waiter: who makes progress while a thread waits for it; by default that of the first of them
    that has one.

    Raises TypeError for what are no futures.
    """
    if not isinstance(futures, Collection):
        raise TypeError(
            f"gather({futures!r:.100}): futures in one list are allowed, such as "
            "gather([first, second])"
        )
    for each in futures:
        if not isinstance(each, Future):
            raise TypeError(
                f"gather() of {each!r:.100}: futures are allowed; a coroutine is run by spawn() of "
                "a shard.TaskGroup, or by asyncio.gather()"
            )
    if waiter is None:
        waiter = next((each.waiter for each in futures if each.waiter is not None), None)
    # the others are held by nobody here: one that is dropped may end by that
    whole = Gathered(waiter, workers=[each for each in futures if each.has_work()])
    missing = len(futures)

    def count(_: Future) -> None:
        nonlocal missing
        with _making_callbacks:  # they may complete in two threads
            missing -= 1
            last = not missing
        if whole.cancelled is not None:
            whole.end_if_cancelled()
        elif last:
            errors = [each._outcome for each in futures if each.finished == ERROR]
            if errors:
                whole.set_error(errors[0])
            else:
                whole.set_result([each._outcome for each in futures])

    if not futures:
        whole.set_result([])
    for future in futures:
        future.when_done(count)
    return whole


def shield(future: Future) -> Future:
    """A future done as that one is. A task that awaits it and is cancelled leaves that one to go
    on, and so does cancel().
    """
    shielded = Future(future.waiter)

    def pass_on(done: Future) -> None:
        if done.finished == ERROR:
            shielded.set_error(done._outcome)
        else:
            shielded.set_result(done._outcome)

    future.when_done(pass_on)
    return shielded


def is_asyncio_imported() -> bool:
    """Whether asyncio is there, whole: another thread may be importing it."""
    return hasattr(sys.modules.get("asyncio"), "SelectorEventLoop")


def running_asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """The loop of this thread, or None; asyncio is not imported for the question: it would cost
    every start 50 ms.
    """
    module = sys.modules.get("asyncio")
    if module is None:
        return None
    try:
        loop: asyncio.AbstractEventLoop | None = module._get_running_loop()
    except AttributeError:  # another thread imports it: this one has no loop yet
        return None
    return loop


def is_in_asyncio_task() -> bool:
    """Whether what runs is a task of asyncio's, and no task of a reactor."""
    loop = running_asyncio_loop()
    return loop is not None and not getattr(loop, "runs_our_task", False)


def set_running_asyncio_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """What running_asyncio_loop() of this thread answers from now on."""
    sys.modules["asyncio"]._set_running_loop(loop)


def call_outside_asyncio(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value, called as if no loop ran in this thread: a plain function that is run
    in a step of a task may run one of its own.
    """
    loop = running_asyncio_loop()
    if loop is None:
        return function(*arguments)
    set_running_asyncio_loop(None)
    try:
        return function(*arguments)
    finally:
        set_running_asyncio_loop(loop)


def await_in_asyncio(future: Future, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
    """What a coroutine of `loop` yields until the future is done; whoever completes it tells the
    loop.
    """
    theirs: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not theirs.done():
            theirs.set_result(None)

    def tell(_: Future) -> None:
        if running_asyncio_loop() is loop:
            finish()  # completed by the loop itself: no other thread has to be woken
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
            loop.call_soon_threadsafe(finish)

    future.when_done(tell)
    try:
        yield from theirs
    except sys.modules["asyncio"].CancelledError:
        future.abandon()
        raise
