"""A coroutine runs others beside each other, and has what they return: none of them outlives it.

event                        what follows
all have returned            their results, in the order given
one raises                   the others are cancelled; its error
the deadline passes          all are cancelled; TimeoutError
the task itself is cancelled all are cancelled
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

from shard.loop.future import VALUE, Future
from shard.loop.reactor import Reactor
from shard.loop.task import Task
from shard.loop.timers import Timer
from shard.loop.waits import Resumable, Wait


class together(Wait):  # noqa: N801 - a verb, as in waits.py
    """Awaiting it runs the coroutines, each as a task of the same kind in the same reactor, and has
    the list of their results.

    deadline  by the clock of the reactor; None: no limit

    Raises what one of them raised first, and TimeoutError after the deadline.
    """

    def __init__(
        self, *coroutines: Coroutine[Any, Any, Any], deadline: float | None = None
    ) -> None:
        self._coroutines = coroutines
        self._deadline = deadline
        self._tasks: list[Task] = []
        self._missing = len(coroutines)
        self._error: BaseException | None = None
        self._awaiting: Resumable | None = None  # until it is woken, which is once
        self._timer: Timer | None = None

    def begin(self, task: Resumable) -> None:
        assert isinstance(task, Task), "tasks begin what they await"
        self._awaiting = task
        if self._deadline is not None:
            reactor = task.reactor
            assert isinstance(reactor, Reactor), "deadlines are those of a reactor's clock"
            self._timer = reactor.timers.call_at(self._deadline, self._on_timeout)
        for coroutine in self._coroutines:
            one = type(task)(
                coroutine=coroutine,
                schedule=task.schedule,
                reactor=task.reactor,
                context=task.context,
                variables=task.variables.copy(),
            )
            self._tasks.append(one)
            one.add_done_callback(self._on_end)
            task.schedule(one.step)

    def _on_end(self, one: Future) -> None:
        self._missing -= 1
        if one.finished != VALUE:
            self._go_on(one.error())
        elif not self._missing:
            self._go_on(None)

    def _on_timeout(self) -> None:
        self._go_on(TimeoutError("not done in time"))

    def _go_on(self, error: BaseException | None) -> None:
        task, self._awaiting = self._awaiting, None
        if task is not None:
            self._error = error
            task.wake(self)

    def __await__(self) -> Generator[Wait, None, list[Any]]:
        try:
            if self._coroutines:
                yield self
        finally:
            self._awaiting = None
            if self._timer is not None:
                self._timer.cancel()
            for one in self._tasks:
                one.cancel()  # does nothing to those that are done
        if self._error is not None:
            raise self._error
        return [one.result() for one in self._tasks]
