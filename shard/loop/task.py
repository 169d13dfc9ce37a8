"""A coroutine driven by the reactor: it runs until it awaits a Future, and goes on in the turn
after that is done.

There is no event loop object and no context switch: a task is its coroutine's `send`, queued in the
reactor (queues.py).

What a step does on whose behalf stands in CONTEXT.value while it runs: a task carries the value
from the moment it was spawned. Its context variables are a copy of those at that moment, as those
of a task of asyncio are.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, Protocol

import msgspec

from shard.errors import CancelledError, ShardError
from shard.loop.future import Future, running_asyncio_loop, set_running_asyncio_loop
from shard.loop.timers import Timer
from shard.loop.waits import Wait

logger = logging.getLogger("shard")


class _Context(threading.local):
    """Set by whoever calls a handler; read by whatever that calls. One a thread: others call
    meanwhile, on nobody's behalf.
    """

    value: Any = None


CONTEXT = _Context()


class Later(Protocol):
    """What a task asks of its reactor."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call it, in so many seconds."""


class Task(Future, kw_only=True):
    """The result to come of a coroutine. `schedule(step)` queues a step for the reactor's next
    turn.
    """

    coroutine: Coroutine[Any, Any, Any]
    schedule: Callable[[Callable[[], object]], None]
    reactor: Later
    context: Any = None
    variables: Context = msgspec.field(default_factory=copy_context)

    def step(self) -> None:
        """Run the coroutine to its next await, or to its end."""
        if self.finished:  # cancelled meanwhile
            return
        # Whoever drives us may be inside an asyncio loop (a notebook always is): our coroutine is
        # no task of that.
        loop = running_asyncio_loop()
        if loop is not None:
            set_running_asyncio_loop(None)
        outer, CONTEXT.value = CONTEXT.value, self.context
        try:
            awaited = self.variables.run(self.coroutine.send, None)
        except StopIteration as stop:
            self.set_result(stop.value)
        except BaseException as error:
            # a handler that exits, or lets asyncio's cancellation out, must not end the reactor
            self.set_error(error)
            if (
                issubclass(type(error), KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise  # Ctrl-C: it was meant for whoever turns the reactor
        else:
            if isinstance(awaited, Future):
                self._follow(awaited)
            elif isinstance(awaited, Wait):
                awaited.begin(self)
            else:
                self.cancel(
                    ShardError(
                        f"a task may await this engine's futures, shard.sleep(), yield_now() and "
                        f"run_blocking(), not {type(awaited).__name__}"
                    )
                )
        finally:
            CONTEXT.value = outer
            if loop is not None:
                set_running_asyncio_loop(loop)

    def _follow(self, awaited: Future) -> None:
        """Go on when that is done."""
        awaited.add_done_callback(self._wake)

    def _wake(self, _: Future) -> None:
        self.schedule(self.step)

    def wake(self) -> None:
        """Go on in the next turn. From any thread."""
        self.schedule(self.step)

    def wake_later(self, delay_s: float) -> Timer:
        """The same, in so many seconds. In the reactor's thread."""
        return self.reactor.call_later(delay_s, self.wake)

    def cancel(self, error: BaseException | None = None) -> bool:
        """End the coroutine (its `finally` blocks run) and complete with `error`, a CancelledError
        by default; False when it was complete before."""
        if self.finished:
            return False
        try:
            self.variables.run(self.coroutine.close)
        except BaseException:
            # it awaits or raises in a `finally`, or cancels itself: given up all the same
            logger.exception("a cancelled task did not end cleanly")
        return self.set_error(error or CancelledError("cancelled here"))

    def drop(self) -> None:
        """Its reactor ends: a coroutine that never ran is closed here, or Python would complain
        that nobody awaited it.
        """
        if inspect.getcoroutinestate(self.coroutine) == inspect.CORO_CREATED:
            self.coroutine.close()
