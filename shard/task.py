"""A coroutine driven by the reactor: it runs until it awaits a Future, and goes on in the turn after that is done.

There is no event loop object and no context switch: a task is its coroutine's `send`, queued in the reactor's ready list.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from shard.errors import ShardError
from shard.future import Future, running_asyncio_loop, set_running_asyncio_loop


class Task(Future, kw_only=True):
    """The result to come of a coroutine. `schedule(step)` queues a step for the reactor's next turn."""

    coroutine: Coroutine[Any, Any, Any]
    schedule: Callable[[Callable[[], object]], None]

    def step(self) -> None:
        """Run the coroutine to its next await, or to its end."""
        if self.finished:  # cancelled meanwhile
            return
        # Whoever drives us may be inside an asyncio loop (a notebook always is): our coroutine is no task of that.
        loop = running_asyncio_loop()
        if loop is not None:
            set_running_asyncio_loop(None)
        try:
            awaited = self.coroutine.send(None)
        except StopIteration as stop:
            self.set_result(stop.value)
        except (Exception, SystemExit) as error:  # a handler that exits must not end the reactor
            self.set_error(error)
        else:
            if not isinstance(awaited, Future):
                self.cancel(ShardError(f"a task may await this engine's futures only, not {type(awaited).__name__}"))
                return
            awaited.add_done_callback(self._wake)
        finally:
            if loop is not None:
                set_running_asyncio_loop(loop)

    def _wake(self, _: Future) -> None:
        self.schedule(self.step)

    def cancel(self, error: BaseException) -> bool:
        """End the coroutine (its `finally` blocks run) and complete with `error`; False when it was complete before."""
        if self.finished:
            return False
        self.coroutine.close()
        return self.set_error(error)
