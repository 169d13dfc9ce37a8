"""Tasks that live no longer than the block that began them, and blocks that can be cancelled.

    async with shard.TaskGroup() as group:      # ends when all of them have ended
        for server in servers:
            group.spawn(ask(server))

    async with shard.CancelScope(timeout_s=0.5) as scope:
        await client.submit("mean", values)
    if scope.cancelled: ...                     # the time was over

    a group's                  event                        then
    block runs                 a task fails                 the other tasks and the block are
                                                            cancelled
    block has ended            a task fails                 the other tasks are cancelled
    block                      raises, or is cancelled      the tasks are cancelled
    block and tasks            have ended                   the block's own error is raised, else
                                                            the first task's
    block                      cancel()                     the tasks and the block are cancelled;
                                                            nothing is raised

Whoever is cancelled sees CancelledError at its await (task.py), and is waited for: what a group
began has ended when it is left, however it is left. Of several errors one is raised; the others are
logged.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from shard.checks import is_finite
from shard.errors import CancelledError, ShardError
from shard.loop.future import ERROR, Future, is_in_asyncio_task
from shard.loop.task import Task, is_cancellation
from shard.loop.timers import Timer
from shard.loop.waits import Resumable, Wait

logger = logging.getLogger("shard")


class _ScopeEnds(Exception):
    """The cause of the CancelledError that ends a scope's block."""


class _Me(Wait):
    """Awaited, it gives the task that awaits it."""

    task: Task

    def begin(self, task: Resumable) -> None:
        assert isinstance(task, Task)
        self.task = task
        task.wake(self)

    def __await__(self) -> Generator[Wait, None, Task]:
        if is_in_asyncio_task():
            raise ShardError(
                "a task of asyncio's awaits this: scopes and groups of the engine are for its own "
                "tasks; use asyncio.timeout() and asyncio.TaskGroup() here"
            )
        yield self
        return self.task


class CancelScope:
    """A block of a task that can be cancelled by itself: what it awaits is, and the task goes on
    behind the block.

    timeout_s  seconds until it is cancelled; None: only cancel() does that

    `cancelled`: whether the block was ended so. Raises ValueError.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None and not is_finite(timeout_s, 0.0):
            raise ValueError(
                f"CancelScope(timeout_s={timeout_s!r:.100}): seconds from 0 on, or None"
            )
        self.cancelled = False
        self._timeout_s = timeout_s
        self._task: Task | None = None  # whose block it is, while that runs
        self._ends: _ScopeEnds | None = None  # cancel() was called
        self._outer: CancelScope | None = None
        self._token: Token[CancelScope | None] | None = None
        self._timer: Timer | None = None

    def cancel(self) -> None:
        """Have the block end: CancelledError is raised at its await. From any thread. Nothing to do
        where it has ended.
        """
        if self._ends is None:
            self._ends = _ScopeEnds("its scope was cancelled")
            self._cancel_task()

    def _cancel_task(self) -> None:
        task, ends = self._task, self._ends
        # what cancels the whole task, or a scope further out, ends this block as well
        if task is not None and ends is not None and not task.is_being_cancelled:
            task.cancel(ends)

    async def __aenter__(self) -> CancelScope:
        await self._enter()
        return self

    async def _enter(self) -> Task:
        if self._token is not None:
            raise ShardError("a scope is one block: make another one")
        self._task = task = await _Me()
        self._outer = _scope.get()
        self._token = _scope.set(self)
        if self._timeout_s is not None:
            self._timer = task.reactor.call_later(self._timeout_s, self.cancel)
        self._cancel_task()  # it may have been called before
        return task

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._leave(error)

    def _leave(self, error: BaseException | None) -> bool:
        """The block has ended with that error; whether it was this scope that ended it."""
        task, self._task = self._task, None
        assert task is not None and self._token is not None
        if self._timer is not None:
            self._timer.cancel()
        _scope.reset(self._token)
        self.cancelled = self._is_own(error, task)
        if self._ends is not None:
            # also one that was about to be raised: its block is over
            task.went_on(self._ends)
            outer = self._outer
            while outer is not None and outer._task is task:
                outer._cancel_task()  # it may have waited for this one
                outer = outer._outer
        return self.cancelled

    def _is_own(self, error: BaseException | None, task: Task) -> bool:
        """Whether it is what cancel() had raised."""
        if self._ends is None or error is None or not is_cancellation(error):
            return False
        if isinstance(error, CancelledError):
            return error.__cause__ is self._ends
        # asyncio's names no cause: it is the outermost one's of all scopes that are cancelled
        reasons = task.reasons
        if not all(isinstance(each, _ScopeEnds) for each in reasons):
            return False  # the whole task is
        outer = self._outer
        while outer is not None and outer._task is task:
            if any(each is outer._ends for each in reasons):
                return False
            outer = outer._outer
        return any(each is self._ends for each in reasons)


_scope: ContextVar[CancelScope | None] = ContextVar("scope", default=None)


class TaskGroup(CancelScope):
    """Tasks that have all ended when its block is left. What each does when another one or the
    block fails: the table at the file's head.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[Task, None] = {}
        self._ending = False  # they are cancelled, and so is who comes yet
        self._failure: BaseException | None = None
        self._all_ended: Future | None = None  # while the end of the tasks is awaited

    async def __aenter__(self) -> TaskGroup:
        await self._enter()
        return self

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Task:
        """Drive a coroutine beside the block, in its class of work; the future of its result. From
        tasks of the same reactor. Raises ShardError where the group has ended.
        """
        host = self._task
        if host is None:
            coroutine.close()
            raise ShardError("this group has ended, or not begun: no task can be spawned in it")
        task = host.beside(coroutine)
        self._tasks[task] = None
        task.when_done(self._has_ended)
        if self._ending:
            task.cancel()
        return task

    def cancel(self) -> None:
        """End the block and all tasks. From tasks of the same reactor."""
        super().cancel()
        self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        """Once each: they may be cleaning up."""
        if not self._ending:
            self._ending = True
            for task in list(self._tasks):
                task.cancel()

    def _has_ended(self, task: Future) -> None:
        assert isinstance(task, Task)
        self._tasks.pop(task, None)
        error = task.error() if task.finished == ERROR else None
        if error is not None and not is_cancellation(error):
            self._failed(error)
        if not self._tasks and self._all_ended is not None:
            self._all_ended.set_result(None)

    def _failed(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._cancel_tasks()
            if self._all_ended is None:
                CancelScope.cancel(self)
        else:
            logger.error("one more task of a group failed", exc_info=error)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._cancel_tasks()
        interrupt: BaseException | None = None
        while self._tasks:
            self._all_ended = Future()
            try:
                await self._all_ended
            except BaseException as cancelled:  # who waits is cancelled: so are they, and awaited
                assert self._task is not None, "its block has not been left"
                if not self._is_own(cancelled, self._task):
                    interrupt = cancelled
                self._cancel_tasks()
        ended = interrupt or error
        is_own = self._leave(ended)
        if ended is not None and not is_own:
            self._log_failure()
            if interrupt is not None:
                raise interrupt
            return False
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # its traceback holds this frame
        return is_own

    def _log_failure(self) -> None:
        if self._failure is not None:
            logger.error("a task of a group failed, too", exc_info=self._failure)
