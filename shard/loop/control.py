"""The control loop of a process: one thread that runs, as coroutines, what connects, asks, watches,
keeps leases and tries again, so that no component of the engine needs a thread of its own.

    spawn(coroutine)   from any thread; its first step runs in the loop's next turn
    awaited there      futures of any reactor, shard.sleep(), yield_now(), run_blocking()
    its thread         begins with the first task, and ends when there is none

A coroutine here never blocks and runs no code of the application: all others stand still meanwhile.
What it awaits from the process's own reactor (an answer, say) is fetched by that one's engine
threads: Waiter.expect().

There is one for a process, and none in its fork before something is spawned there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any

from shard import runtime
from shard.errors import ShardError
from shard.loop.future import Future, Waiter, await_in_asyncio
from shard.loop.idle import PARK_S_MAX
from shard.loop.reactor import Reactor
from shard.loop.task import Task

if TYPE_CHECKING:
    import asyncio

# Between tries of a reactor whose turns fail, so that a bug fills no disk with its traces.
AFTER_BUG_S = 0.01

logger = logging.getLogger("shard")


class ControlTask(Task, kw_only=True):
    """A coroutine of the control loop. Whatever reactor completes what it awaits is told that
    somebody waits who does not turn it.
    """

    def _follow(self, awaited: Future) -> None:
        if awaited.waiter is not None:
            awaited.waiter.expect(awaited)
        Task._follow(self, awaited)


class ControlLoop:
    """Runs coroutines in a thread of its own, which lives as long as they do. Thread-safe.

    name  of the thread
    """

    def __init__(self, name: str = "prpc-control") -> None:
        self._name = name
        self._guard = runtime.Lock()  # of what follows
        self._tasks: set[Future] = set()
        self._thread: threading.Thread | None = None
        self._reactor: Reactor | None = None  # of that thread

    def spawn(self, coroutine: Coroutine[Any, Any, Any], waiter: Waiter | None = None) -> Task:
        """Drive a coroutine; the future of its result. `waiter`: who makes progress while a thread
        waits for it; by default the thread sleeps until it is done.

        Raises RuntimeError where no more threads are to be had, and OSError without descriptors for
        the loop.
        """
        with self._guard:
            reactor = self._reactor or self._begin(coroutine)
            task = ControlTask(
                coroutine=coroutine,
                schedule=reactor.call_soon,
                reactor=reactor,
                waiter=waiter or _SLEEPING,
                # none of the application's, which it would keep for as long as it runs
                variables=Context(),
            )
            self._tasks.add(task)
        task.when_done(self._ended)
        reactor.call_soon(task.step)
        return task

    def future(self) -> Future:
        """One that coroutines await and threads wait for, which sleep meanwhile; a thread of the
        loop that would wait for it gets a ShardError.
        """
        return Future(_SLEEPING)

    def is_here(self) -> bool:
        """Whether this very thread runs the loop: it must not wait for it."""
        return self._thread is threading.current_thread()

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> Reactor:
        with contextlib.ExitStack() as undoing:
            undoing.callback(coroutine.close)
            reactor = Reactor(runtime.monotonic, hosts_asyncio=False)
            undoing.callback(reactor.close)
            thread = runtime.Thread(target=self._run, args=(reactor,), name=self._name, daemon=True)
            thread.start()
            undoing.pop_all()
        self._thread, self._reactor = thread, reactor
        return reactor

    def _ended(self, task: Future) -> None:
        with self._guard:
            self._tasks.discard(task)
            reactor = self._reactor
        if reactor is not None:
            reactor.wake()

    def _run(self, reactor: Reactor) -> None:
        while True:
            try:
                if not reactor.poll(runtime.monotonic()):
                    if self._is_over(reactor):
                        return
                    reactor.park(PARK_S_MAX)
            except BaseException:  # a bug in a callback: said, and survived by the other tasks
                logger.exception("a turn of the control loop failed; it goes on")
                runtime.sleep(AFTER_BUG_S)

    def _is_over(self, reactor: Reactor) -> bool:
        """Whether no task is left. The next has another thread, and another reactor."""
        with self._guard:
            if self._tasks:
                return False
            self._thread = self._reactor = None
        reactor.close()
        return True


class _SleepingWaiter:
    """For threads that wait for what the control loop does: they sleep meanwhile."""

    def wait(self, future: Future, timeout_s: float | None) -> bool:
        return self.wait_until(
            future, None if timeout_s is None else runtime.monotonic() + timeout_s
        )

    def wait_until(self, future: Future, deadline: float | None) -> bool:
        if control_loop().is_here():
            raise ShardError("a coroutine of the control loop awaits; it must not wait for itself")
        done = runtime.Semaphore(0)  # the thread sleeps, and the loop's completes the future

        def tell(_: Future) -> None:
            done.release()

        future.when_done(tell)
        try:
            done.acquire(timeout=None if deadline is None else deadline - runtime.monotonic())
        finally:
            future.remove_done_callback(tell)
        return future.done()

    def await_in(
        self, future: Future, loop: asyncio.AbstractEventLoop
    ) -> Generator[Any, None, None]:
        return await_in_asyncio(future, loop)

    def expect(self, future: Future) -> None:
        """The loop's own thread makes the progress."""

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        """No application has a future of the loop's."""
        return False


_SLEEPING = _SleepingWaiter()


def control_loop() -> ControlLoop:
    """That of this process. A child made by fork() has none of its parent's threads: it gets its
    own.
    """
    return runtime.own("control loop", ControlLoop)
