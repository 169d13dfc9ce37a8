"""What an application has called when a future is done.

    the future                                 its callbacks run
    has a waiter (a driver), or is a task      in an engine thread of that reactor, as handlers do
      of a reactor
    the same, whose reactor was closed, or in  at once, in the thread that completes it
      a fork of the process that has it
    has neither: `Future()`, or in a shard,    the same
      whose one thread is an engine's

Those of one future begin in the order in which they were added. One that was added when the future
was done already is no exception: else it would run under the locks of whoever adds it now and then,
by chance, and before those that wait for their turn.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

logger = logging.getLogger("shard")


class Done(Protocol):
    """A future that is done."""

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        """Run work() where its callbacks run, soon; False: nowhere in particular."""


class DoneCallback:
    """A function of the application that is called with a future when that is done, in a context of
    its own, or in `context`. What it raises is logged. Raises TypeError for what cannot be called.
    """

    __slots__ = ("_context", "_future", "function")

    def __init__(self, function: Callable[[Any], object], context: Context | None = None) -> None:
        if not callable(function):
            raise TypeError(
                f"the callback of a future, {function!r:.100}, cannot be called: a function of the "
                "future is allowed"
            )
        self.function = function
        self._context = context
        self._future: Done | None = None

    def __call__(self, future: Done) -> None:
        """The future is done, in this thread."""
        self._future = future
        if not future.call_in_engine(self.run):
            self.run()

    def run(self) -> None:
        """Call it, where that is allowed."""
        context = self._context
        try:
            (Context() if context is None else context).run(self.function, self._future)
        except BaseException as error:  # one that exits ends neither the engine nor the others
            logger.exception("a future's callback %r raised", self.function)
            if (
                issubclass(type(error), KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise  # Ctrl-C: it was meant for whoever turns the reactor
