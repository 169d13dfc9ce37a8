"""asyncio inside a reactor: a loop of asyncio that the reactor turns, so that what a task runs may
await whatever asyncio has.

Imported by the first task that runs after asyncio was (Reactor.invite_asyncio()), or in the middle
of the step that imports asyncio (asyncio_import.py): a process without asyncio pays for none of it.
The loop is a real one, with its own selector, and makes one iteration that never waits, by the
documented `call_soon(stop); run_forever()`, when

    its selector has something           the reactor watches the selector's descriptor
    its earliest timer is due            call_at() arms a timer of the reactor
    somebody called call_soon()          that queues a step of the reactor

It is turned as handlers are run: by threads that may run the application's work, one at a time, and
never inside itself. A callback that waits in the middle of an iteration lends the lead (driver.py):
until it comes back the loop stands still, and others' handlers go on.

    who runs in the loop          running loop   current task    awaits our futures by
    a step of a task of ours      this loop      that task       its reactor's wake-up
    a task of asyncio's, made     this loop      itself          a callback (await_in_asyncio)
     by such a step, or another
     callback

A task of ours that awaits a future of asyncio's is woken by its callback. Cancelled meanwhile, it
cancels that future, and asyncio.CancelledError arrives, as in asyncio. At an await of ours it gets
an error that is both asyncio's CancelledError and ours; only where asyncio itself cancels it
(timeouts, task groups) it is exactly asyncio's, as these look for no subclass before Python 3.13.
"""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
import sys
from asyncio import _get_running_loop, _set_running_loop
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from shard import runtime
from shard.errors import CancelledError
from shard.loop.task import CONTEXT, IN_ASYNCIO, pass_behalf_on
from shard.loop.timers import Timers
from shard.loop.waits import Resumable, Wait

# At the reactor's end, for tasks of asyncio's that were left: to end after they were cancelled.
CLOSE_TIMEOUT_S = 1.0
THREADS_SIMULATED = 8  # that run_in_executor() has in a simulation, at most

logger = logging.getLogger("shard")
Running = tuple[Any, bool]  # the current task, and whether it is a task of ours
# of a thread: its running loop, what ran in ours, and who ends its async generators
Outer = tuple[asyncio.AbstractEventLoop | None, Running | None, Any]


class GuestHost(Protocol):
    """What a guest needs of its reactor."""

    clock: Callable[[], float]
    timers: Timers
    serves: bool

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run it in the next turn. From any thread."""

    def call_in_engine(self, callback: Callable[[], object]) -> object:
        """Run it in a turn of a thread that may run the application's work."""

    def watch(self, fd: int, callback: Callable[[int], None]) -> None:
        """Call it when the descriptor is readable."""

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor."""


class BothCancelledError(CancelledError, asyncio.CancelledError):
    """A task of ours was cancelled, in a process that uses asyncio: `except` finds it by both
    names.
    """


class GuestLoop(asyncio.SelectorEventLoop):
    """The asyncio loop of one reactor, which owns it. In the thread that turns that, but for
    call_soon_threadsafe().
    """

    def __init__(self, reactor: GuestHost) -> None:
        self._reactor = reactor
        self._guest_selector = selectors.EpollSelector()
        self.runs_our_task = False  # a step of ours runs, and nothing of asyncio's
        self._turning = False  # an iteration is under way
        self._due = False  # a turn is queued
        self._watched = False
        self._armed = math.inf  # when the reactor's timer for us fires
        self._ends = False  # close it after this iteration
        self._threads: Any = None  # of a simulation: those of run_in_executor()
        super().__init__(self._guest_selector)
        if runtime.shares_process:
            self.set_debug(False)  # it looks at the clock more often: equal seeds, other runs
        # async generators that are dropped in a step are ended in an iteration of this loop
        self._firstiter = self._asyncgen_firstiter_hook  # type: ignore[attr-defined]
        self._finalizer = self._asyncgen_finalizer_hook  # type: ignore[attr-defined]
        self._watch()
        runtime.close_with_simulation(self.close)

    # -- what asyncio asks of a loop ---------------------------------------------------------------

    def time(self) -> float:
        """On the reactor's clock."""
        return self._reactor.clock()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, and the reactor comes to turn us."""
        handle = super().call_soon(callback, *args, context=context)
        self._ask_for_turn()
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's, and the reactor has a timer for it."""
        handle = super().call_at(when, callback, *args, context=context)
        self._arm()
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, which has the selector say so."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if runtime.shares_process:
            self._ask_for_turn()
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """As asyncio's; in a simulation threads of the process are the default."""
        if executor is None and runtime.shares_process:
            if self._threads is None:
                self._threads = runtime.Threads(THREADS_SIMULATED, thread_name_prefix="asyncio")
            executor = self._threads
        return super().run_in_executor(executor, func, *args)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """As asyncio's; what it does is done on behalf of whoever asked for it."""
        make = super().create_task
        return pass_behalf_on(lambda: make(coro, **options))

    # -- turns -------------------------------------------------------------------------------------

    def _ask_for_turn(self) -> None:
        if not self._due:
            self._due = True
            self._reactor.call_soon(self._turn)

    def _turn(self) -> None:
        """One iteration, unless this one is under way already: then it asks for another."""
        self._due = False
        if self._turning or self.is_closed():
            return
        if not self._reactor.serves:
            self._due = True
            self._reactor.call_in_engine(self._turn)
            return
        outer = _get_running_loop()  # of whoever turns the reactor
        _set_running_loop(None)
        self._turning = True
        behalf, CONTEXT.value = CONTEXT.value, IN_ASYNCIO
        try:
            super().call_soon(self.stop)
            self.run_forever()
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit of a callback must not end the reactor
            logger.exception("a callback of asyncio raised")
        finally:
            self._turning = False
            CONTEXT.value = behalf
            _set_running_loop(outer)
            if self._ends:
                self.shut()
            else:
                self._watch()
                self._arm()
                if self._ready:  # type: ignore[attr-defined]
                    self._ask_for_turn()

    def _on_readable(self, _: int) -> None:
        if self._turning or not self._reactor.serves:
            # readable until the iteration that is under way, or one of another thread, is over:
            # that watches again
            self._unwatch()
        if not self._turning:
            self._turn()

    def _watch(self) -> None:
        # in a simulation nothing real comes: no sockets of asyncio's, and no threads beside ours
        if not self._watched and not runtime.shares_process:
            self._watched = True
            self._reactor.watch(self._guest_selector.fileno(), self._on_readable)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._reactor.unwatch(self._guest_selector.fileno())

    def _arm(self) -> None:
        """Have the reactor turn us when the earliest timer is due."""
        heap = self._scheduled  # type: ignore[attr-defined]
        if heap and heap[0].when() < self._armed:
            self._armed = heap[0].when()
            self._reactor.timers.call_at(self._armed, self._on_timer)

    def _on_timer(self) -> None:
        self._armed = math.inf
        self._ask_for_turn()  # which arms the next

    # -- steps of ours -----------------------------------------------------------------------------

    def enter(self, task: Any) -> Outer:
        """A step of that task begins: it runs in this loop. What ran before, for leave(): such a
        step may begin others.
        """
        loop = _get_running_loop()
        running = self.suspend() if self.runs_our_task or self._turning else None
        _set_running_loop(self)
        _enter_task(self, task)
        self.runs_our_task = True
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._firstiter, self._finalizer)
        return loop, running, hooks

    def leave(self, task: Any, outer: Outer | None) -> None:
        """It has ended."""
        assert outer is not None, "it was entered"
        sys.set_asyncgen_hooks(*outer[2])
        _leave_task(self, task)
        self.runs_our_task = False
        if outer[1] is not None:
            self.resume(outer[1])
        _set_running_loop(outer[0])

    def is_calling_back(self) -> bool:
        """Whether it is asyncio that runs in this thread now, and no step of ours."""
        return _get_running_loop() is self and not self.runs_our_task

    def suspend(self) -> Running:
        """Others' steps run now: what runs begins one, or waits and lends the lead. It is for
        resume().
        """
        task: Any = asyncio.current_task(self)
        if task is not None:
            _leave_task(self, task)
        ours, self.runs_our_task = self.runs_our_task, False
        return task, ours

    def resume(self, running: Running) -> None:
        """It goes on."""
        task, self.runs_our_task = running
        if task is not None:
            _enter_task(self, task)

    def cancellation(self, error: BaseException | None, made: CancelledError) -> BaseException:
        """What is raised in a task of ours that is cancelled for that reason, instead of `made`."""
        if error is None and self.is_calling_back():
            return asyncio.CancelledError()
        both = BothCancelledError(*made.args)
        both.__cause__ = made.__cause__
        return both

    def wait_for(self, awaited: Any) -> Wait | None:
        """What a task of ours waits for that came to yield that: a future of asyncio's, or None for
        one turn; None: it is neither, or of another loop.
        """
        if awaited is None:
            return NextTurn()
        is_ours = asyncio.isfuture(awaited) and awaited.get_loop() is self
        return AsyncioWait(awaited) if is_ours else None

    # -- the end -----------------------------------------------------------------------------------

    def shut(self) -> None:
        """The reactor ends: cancel the tasks that are left, end its generators, close it."""
        if self.is_closed():
            return
        if self._turning:
            self._ends = True
            return
        outer = _get_running_loop()
        _set_running_loop(None)
        try:
            # in a simulation a killed process is taken down in the middle of a step: asyncio begins
            # no other one then, and this would have no end
            if asyncio.current_task(self) is None:
                self.run_until_complete(self._end_all())
        except BaseException:
            logger.exception("the tasks of asyncio in a reactor did not end cleanly")
        finally:
            _set_running_loop(outer)
            self._unwatch()
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            self.close()

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks(self) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        await self.shutdown_asyncgens()


class NextTurn(Wait):
    """asyncio.sleep(0)."""

    def begin(self, task: Resumable) -> None:
        task.wake(self)


class AsyncioWait(Wait):
    """A future of asyncio's that a task of ours awaits."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def begin(self, task: Resumable) -> None:
        self._future._asyncio_future_blocking = False
        self._future.add_done_callback(lambda _: task.wake(self))

    def abandon(self, error: BaseException | None = None) -> bool:
        return self._future.cancel(str(error) if error is not None else None)
