"""A coroutine awaits that a descriptor is ready, or the end of its time: what connects step by step
awaits this between two steps.

    state    event                        what follows
    begun    the descriptor is ready      the reactor lets go of both; the task goes on
    begun    the deadline passes          the same; TimeoutError
    begun    the task is cancelled        the reactor lets go of both
    refused  epoll takes no more (limit)  the task goes on at once; that OSError
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from shard.loop.reactor import Reactor
from shard.loop.task import Task
from shard.loop.timers import Timer
from shard.loop.waits import Resumable, Wait


class HasDescriptor(Protocol):
    """A socket, say."""

    def fileno(self) -> int:
        """The number of its descriptor."""


class until_ready(Wait):  # noqa: N801 - a verb, as in waits.py
    """Awaiting it takes until one of `events` (select.EPOLLIN, EPOLLOUT), an error or a hang-up is
    there to be seen at `what`, which only this task may watch meanwhile.

    deadline  by the clock of the task's reactor: runtime.monotonic() in the control loop

    Raises TimeoutError after it, and OSError where the system watches no more descriptors.
    """

    def __init__(self, what: HasDescriptor, events: int, deadline: float) -> None:
        self._fd = what.fileno()
        self._events = events
        self._deadline = deadline
        self._task: Resumable | None = None  # while it is awaited
        self._reactor: Reactor | None = None
        self._timer: Timer | None = None
        self._error: OSError | None = None

    def __repr__(self) -> str:
        return f"until_ready({self._fd}, {self._events:#x}, {self._deadline})"

    def begin(self, task: Resumable) -> None:
        assert isinstance(task, Task), "tasks begin what they await"
        reactor = task.reactor
        assert isinstance(reactor, Reactor), "descriptors are watched by reactors"
        try:
            reactor.watch(self._fd, self._on_ready, self._events)
        except OSError as error:  # of fs.epoll.max_user_watches, say
            self._error = error
            task.wake(self)
            return
        self._task, self._reactor = task, reactor
        self._timer = reactor.timers.call_at(self._deadline, self._on_timeout)

    def _on_ready(self, events: int) -> None:
        self._go_on()

    def _on_timeout(self) -> None:
        self._error = TimeoutError("not ready in time")
        self._go_on()

    def _go_on(self) -> None:
        task = self._task
        self._let_go()
        if task is not None:
            task.wake(self)

    def _let_go(self) -> None:
        self._task = None
        if self._timer is not None:
            self._timer.cancel()
        reactor, self._reactor = self._reactor, None
        if reactor is not None:
            reactor.unwatch(self._fd)

    def __await__(self) -> Generator[Wait, None, None]:
        self.finished = False  # it may be awaited again
        try:
            yield self
        finally:
            self._let_go()
        if self._error is not None:
            raise self._error
