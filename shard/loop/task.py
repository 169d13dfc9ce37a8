"""A coroutine driven by the reactor: it runs until it awaits something, and goes on in the turn
after that is done.

There is no event loop object and no context switch: a task is its coroutine's `send`, queued in the
reactor (queues.py).

    state      event                          next
    waiting    what it awaits is done         runs its next step, in a turn of its reactor
    waiting    cancel(), it awaits a future   waiting: that is cancelled in its turn, and its end is
               with work of its own           the CancelledError at the await
    waiting    cancel(), it awaits anything   runs a step: CancelledError is raised at the await
               else
    running    cancel(), by itself or by      running; as above when it comes to await
               another thread
    running    it returns, or raises          done
    done       any                            done

So a cancelled coroutine goes on in its `finally` and `async with` blocks, which may await, and is
done when it has ended. It may catch the CancelledError, and then its value counts. A further
cancel() raises another one. One that is not done GOES_ON_S after it was cancelled is named in the
log.

What a step does on whose behalf stands in CONTEXT.value while it runs: a task carries the value
from the moment it was spawned. Its context variables are a copy of those at that moment, as those
of a task of asyncio are.
"""

from __future__ import annotations

import builtins
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from shard.errors import CancelledError, ShardError
from shard.loop.callback import DoneCallback
from shard.loop.future import Future, is_asyncio_imported
from shard.loop.per_thread import PerThread
from shard.loop.timers import Timer
from shard.loop.waits import Wait

# Cleaning up takes a few messages. One that takes longer hangs, or has swallowed its cancellation.
GOES_ON_S = 5.0

logger = logging.getLogger("shard")
T = TypeVar("T")
_modules = sys.modules
_GROUP = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on


# Set by whoever calls a handler; read by whatever that calls. Others call meanwhile, in other
# threads, on nobody's behalf.
CONTEXT: PerThread[Any] = PerThread(None)
IN_ASYNCIO = object()  # CONTEXT.value in a turn of the guest: each of its tasks has its own
_BEHALF: ContextVar[Any] = ContextVar("_BEHALF", default=None)


def behalf() -> Any:
    """On whose behalf this runs: CONTEXT.value of the step, or of that which made this task of
    asyncio's.
    """
    value = CONTEXT.value
    return _BEHALF.get() if value is IN_ASYNCIO else value


def pass_behalf_on(make: Callable[[], T]) -> T:
    """make(), which copies the context variables: what runs in the copy is on the same behalf."""
    token = _BEHALF.set(behalf())
    try:
        return make()
    finally:
        _BEHALF.reset(token)


class GuestOfTasks(Protocol):
    """The asyncio loop of a reactor (guest_loop.py)."""

    def enter(self, task: Task) -> Any:
        """A step of that task begins."""

    def leave(self, task: Task, ran: Any) -> None:
        """It has ended; `ran` is what enter() said."""

    def wait_for(self, awaited: object) -> Wait | None:
        """What to wait for where a step yields that; None: it is nothing of asyncio's."""

    def cancellation(self, error: BaseException | None, made: CancelledError) -> BaseException:
        """What is raised in a task that is cancelled for that reason, instead of `made`."""


class TaskHost(Protocol):
    """What a task asks of its reactor."""

    # read only, for the types: a reactor's own is a GuestLoop
    @property
    def guest(self) -> GuestOfTasks | None:
        """The asyncio loop that its steps run in."""

    def invite_asyncio(self) -> GuestOfTasks | None:
        """The asyncio loop that its steps run in, made when there is none; None: in no such."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call it, in so many seconds."""

    def call_in_engine(self, callback: Callable[[], object]) -> bool:
        """Call it in a turn of a thread that may run the application's work; False: it is
        closed.
        """


class Task(Future, kw_only=True, weakref=True):
    """The result to come of a coroutine. `schedule(step)` queues a step for the reactor's next
    turn.

    To asyncio it is the current task while it runs: it has what asyncio's timeouts and task groups
    ask of one.
    """

    coroutine: Coroutine[Any, Any, Any]
    schedule: Callable[[Callable[[], object]], None]
    reactor: TaskHost
    context: Any = None
    variables: Context = msgspec.field(default_factory=copy_context)
    _awaited: Any = None  # the Future or Wait that its last step came to
    _running: bool = False  # in a step, in whatever thread
    _thrown: BaseException | None = None  # to be raised at its await, by its next step
    _reason: BaseException | None = None  # what cancel() was given
    _passed_on: bool = False  # what it awaits is being cancelled for it
    # what cancel() was given, each time, less what was seen to
    _reasons: tuple[BaseException | None, ...] = ()
    _watch: Timer | None = None  # for the log, of one that goes on after that
    _late: Any = None  # what enter() said to its step under way, in which asyncio was imported

    def step(self) -> None:
        """Run the coroutine to its next await, or to its end. Nothing to do for one that is woken
        by what it does not await any longer, or that runs at this moment.
        """
        if self.finished or self._running:
            return
        thrown = self._thrown
        if thrown is not None:
            if not self._comes_out(thrown):
                return
        elif self._awaited is not None and not self._awaited.finished:
            return
        # Whoever drives us may be inside an asyncio loop (a notebook always is): our coroutine is
        # no task of that, but of the guest's.
        guest = self.reactor.guest
        if guest is None and "asyncio" in _modules:
            guest = self.reactor.invite_asyncio()
        ran = guest.enter(self) if guest is not None else None
        self._running = True
        outer, CONTEXT.value = CONTEXT.value, self.context
        try:
            if thrown is None:
                awaited = self.variables.run(self.coroutine.send, None)
            else:
                awaited = self.variables.run(self.coroutine.throw, thrown)
        except StopIteration as stop:
            if self._thrown is None:
                self.set_result(stop.value)
            else:  # cancelled in its last step
                self.set_error(self._reason or self._thrown)
        except BaseException as error:
            # a handler that exits, or lets asyncio's cancellation out, must not end the reactor
            reason = self._reason
            self.set_error(reason if reason is not None and is_cancellation(error) else error)
            if (
                issubclass(type(error), KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise  # Ctrl-C: it was meant for whoever turns the reactor
        else:
            self._awaited = awaited
            if isinstance(awaited, Future):
                self._follow(awaited)
            elif isinstance(awaited, Wait):
                self._begin(awaited)
            elif (
                there := guest or self.reactor.guest  # which may have come in this very step
            ) is not None and (wait := there.wait_for(awaited)) is not None:
                self._awaited = wait
                self._begin(wait)
            else:
                self._throw(
                    ShardError(
                        f"a task may await this engine's futures, shard.sleep(), yield_now(), "
                        "run_blocking() and what asyncio has, of the loop that it runs in, "
                        f"not {type(awaited).__name__}"
                    )
                )
        finally:
            self._running = False
            CONTEXT.value = outer
            if guest is not None:
                guest.leave(self, ran)
            elif self._late is not None:
                self._leave_late()
            if self._reasons:
                self._passed_on = False
                self._see_to_its_end()

    def asyncio_came(self) -> None:
        """asyncio was imported in the step under way: the rest of it runs in the guest. Raises
        OSError where that is not to be had.
        """
        if self.reactor.guest is None:
            guest = self.reactor.invite_asyncio()
            if guest is not None:
                self._late = guest.enter(self)

    def _leave_late(self) -> None:
        ran, self._late = self._late, None
        guest = self.reactor.guest
        assert guest is not None, "it was entered, and a reactor keeps it"
        guest.leave(self, ran)

    def _begin(self, wait: Wait) -> None:
        try:
            wait.begin(self)
        except BaseException as error:  # nothing would wake it
            self._throw(error)

    def _throw(self, error: BaseException) -> None:
        """Have it raised at the await, in the next step."""
        self._awaited = None
        self._thrown = error
        self.schedule(self.step)

    def _comes_out(self, thrown: BaseException) -> bool:
        """Whether the error is to be raised at the await now; else what is awaited ends by it, and
        so wakes the task.
        """
        self._thrown = None
        awaited = self._awaited
        if awaited is not None and not awaited.finished:
            if awaited.abandon(thrown):
                if not awaited.finished:
                    self._passed_on = True
                    self._see_to_its_end()
                return False
            if isinstance(awaited, Future):
                awaited.remove_done_callback(self._wake)
        return True

    def _see_to_its_end(self) -> None:
        """It was cancelled, and has run a step, or what it awaits has."""
        if self.finished:
            if self._watch is not None:
                self._watch.cancel()
        elif self._thrown is not None:  # cancelled while it ran
            self.schedule(self.step)
        elif self._watch is None:
            self._watch = self.reactor.call_later(GOES_ON_S, self._tell_that_it_goes_on)

    def _tell_that_it_goes_on(self) -> None:
        if not self.finished and self._reasons:
            logger.warning(
                "%s goes on %s s after it was cancelled, %s: what it awaits in its `finally` does "
                "not end, or it swallows CancelledError",
                self.get_name(),
                GOES_ON_S,
                self.place(),
            )

    def place(self) -> str:
        """The line of its coroutine at which it is."""
        frame = getattr(self.coroutine, "cr_frame", None)
        return f"at line {frame.f_lineno} of {frame.f_code.co_filename}" if frame else "at its end"

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        # its own step completes it, and nothing else may run inside that
        return (self.waiter or self.reactor).call_in_engine(work)

    def _follow(self, awaited: Future) -> None:
        """Go on when that is done."""
        awaited.when_done(self._wake)

    def _wake(self, _: Future) -> None:
        self.schedule(self.step)

    def wake(self, wait: Wait) -> None:
        """That is over: go on in the next turn. From any thread."""
        wait.finished = True
        self.schedule(self.step)

    def wake_later(self, delay_s: float, wait: Wait) -> Timer:
        """The same, in so many seconds. In the reactor's thread."""
        return self.reactor.call_later(delay_s, partial(self.wake, wait))

    def cancel(self, error: BaseException | str | None = None, msg: object | None = None) -> bool:
        """Have CancelledError raised in the coroutine, at its await, in the next turn; False when
        it was complete before. From any thread, and from the coroutine itself.

        The task is complete once the coroutine has ended: with `error` if that lets the
        CancelledError out, whose cause it is there, else with what it returns or raises.
        error: why; by default the CancelledError itself. Of a text, as asyncio has it (`msg`), one
        is made.
        """
        if self.finished:
            return False
        if msg is not None or isinstance(error, str):
            error = CancelledError(error if msg is None else msg)
        if error is not None:
            self._reason = error
        thrown, guest = cancellation(error), self.reactor.guest
        self._thrown = thrown if guest is None else guest.cancellation(error, thrown)
        self._reasons = (*self._reasons, error)
        self.schedule(self.step)
        return True

    @property
    def is_being_cancelled(self) -> bool:
        """Whether CancelledError is on its way to its await."""
        return self._thrown is not None or self._passed_on

    @property
    def reasons(self) -> tuple[BaseException | None, ...]:
        """Why it is cancelled: what cancel() was given each time, but what was seen to."""
        return self._reasons

    def went_on(self, error: BaseException) -> None:
        """Its coroutine has seen to the cancellation for that reason: a scope's block has ended."""
        if self._thrown is not None and self._thrown.__cause__ is error:
            self._thrown = None
        self._take_back([each for each in self._reasons if each is not error])

    def _take_back(self, left: Sequence[BaseException | None]) -> None:
        """Those reasons are left."""
        self._reasons = tuple(left)
        self._reason = next((each for each in reversed(left) if each is not None), None)
        if not left:
            self._thrown = None
            self._passed_on = False
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def beside(self, coroutine: Coroutine[Any, Any, Any]) -> Task:
        """Drive another coroutine where this one runs, from the next turn on."""
        task = type(self)(
            coroutine=coroutine,
            schedule=self.schedule,
            reactor=self.reactor,
            waiter=self.waiter,
            context=self.context,
        )
        self.schedule(task.step)
        return task

    # -- what asyncio asks of its current task -----------------------------------------------------

    def cancelling(self) -> int:
        """How often it was cancelled, less what uncancel() took back."""
        return len(self._reasons)

    def uncancel(self) -> int:
        """One cancellation was seen to, as a timeout does with its own: the task goes on. How many
        are left.
        """
        if self._reasons:
            backwards = list(self._reasons[::-1])
            del backwards[backwards.index(None) if None in backwards else 0]  # it gives no reason
            self._take_back(backwards[::-1])
        return len(self._reasons)

    def cancelled(self) -> bool:
        """Whether it ended by a cancellation."""
        error = self.error() if self.finished else None
        return error is not None and is_cancellation(error)

    def exception(self) -> BaseException | None:
        """error(), as asyncio calls it."""
        return self.error()

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        """As a Future's; callback(self) runs in a context of its own, if none is given."""
        self.when_done(DoneCallback(callback, context))

    def get_loop(self) -> GuestOfTasks | None:
        """That of asyncio that it runs in."""
        return self.reactor.guest

    def get_coro(self) -> Coroutine[Any, Any, Any]:
        """Its coroutine."""
        return self.coroutine

    def get_name(self) -> str:
        """That of its coroutine."""
        return str(getattr(self.coroutine, "__qualname__", self.coroutine))

    # -- its end -----------------------------------------------------------------------------------

    def tell_unheard(self) -> None:
        """After its end, where whoever asked for it was answered before: an error that is not the
        cancellation's is for the log. Nor is that of a wait of its own, where a deadline ended
        both.
        """
        error, reason = self.error(), self._reason
        if isinstance(error, TimeoutError) and isinstance(reason, TimeoutError):
            return
        if error is not None and error is not reason and not is_cancellation(error):
            logger.error("a cancelled task did not end cleanly", exc_info=error)

    def drop(self) -> None:
        """Its reactor ends: a coroutine that never ran is closed here, or Python would complain
        that nobody awaited it; and one that was cancelled, for its `finally` blocks.
        """
        if self._running:
            return
        if (
            self._thrown is not None
            or inspect.getcoroutinestate(self.coroutine) == inspect.CORO_CREATED
        ):
            try:
                self.variables.run(self.coroutine.close)
            except BaseException:  # it awaits or raises in a `finally`
                logger.exception("a cancelled task did not end cleanly")


def is_cancellation(error: BaseException) -> bool:
    """Whether it is what cancel() raises in a coroutine, by the name that asyncio has for it, too;
    or a group of such: task groups make one, before Python 3.13, of what they were left by.
    """
    kind = type(error)
    if issubclass(kind, CancelledError):
        return True
    if is_asyncio_imported() and issubclass(kind, sys.modules["asyncio"].CancelledError):
        return True
    members = error.exceptions if kind is _GROUP else ()  # type: ignore[attr-defined]
    return bool(members) and all(map(is_cancellation, members))


def cancellation(error: BaseException | None) -> CancelledError:
    """What is raised in a coroutine that is cancelled because of that error: its cause, unless it
    is a CancelledError itself. A new one for each, as each gains the traceback of where it is
    raised.
    """
    if error is None:
        return CancelledError("cancelled here")
    made = CancelledError(*error.args)
    made.__cause__ = error.__cause__ if isinstance(error, CancelledError) else error
    return made
