"""Functions that run again and again, each under a name, all in one thread.

    state    event                           next
    waiting  its time comes                  running
    running  it returns, or raises (logged)  waiting for the next point of its grid; gone when it
                                             was destroyed
    waiting  destroy                         gone
    running  destroy                         gone when it ends, which destroy() waits for
    either   destroy_with_additional_run     runs once more at once, then gone; the caller waits for
                                             that

The grid of a task is submission + delay_s + n * period_s: a late run does not move those after it.
Points that pass while functions run are skipped and counted: two runs of one task are never caught
up in a row.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

from prpc_engine.errors import Closed, ConfigError, is_number
from prpc_engine.settings.config import WAIT_S_MAX, check_seconds

PERIOD_S_MIN = 0.001  # below that the one thread would do nothing else
PERIOD_S_MAX = 366 * 86400.0  # what is further away than a year is a mistake in the unit
DESTROY_TIMEOUT_S = 30.0  # for a run in progress to end

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class TaskStatistics:
    """A snapshot of one periodic function of a Monitor. Times are in seconds."""

    runs: int  # that have ended
    failures: int  # of those, that raised
    skipped: int  # points of its grid that passed while functions ran
    is_running: bool
    next_in_s: float  # until its next run; 0.0 when that is due


class _Task:
    """Guarded by the monitor's lock."""

    def __init__(
        self, name: str, function: Callable[[], object], due: float, period_s: float
    ) -> None:
        self.name = name
        self.function = function
        self.due = due  # on the monotonic clock
        self.period_s = period_s
        self.is_running = False
        # that have yet to end before it is gone; None: nobody destroys it
        self.runs_left: int | None = None
        self.runs_more = 0  # of those, that were asked for by who destroys it
        self.runs = self.failures = self.skipped = 0


def next_due(due: float, period_s: float, now: float) -> tuple[float, int]:
    """The first point of the grid after `now`, and how many were skipped for that."""
    skipped = max(0, int((now - due) / period_s))
    return due + (skipped + 1) * period_s, skipped


class Monitor:
    """A monitor runs functions again and again, each under a name, all in one thread.

    Thread-safe; owns its thread, which the first task starts. A context manager. name: of the
    thread, and for texts. What a function raises is logged, and ends that run only. Verbs raise
    ConfigError, Closed and TimeoutError. States of a task: the table at the file's head.
    """

    def __init__(self, name: str = "prpc-monitor") -> None:
        self.name = name
        # of the tasks: its thread sleeps in it, any may add and remove
        self._changed = threading.Condition()
        self._tasks: dict[str, _Task] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self, name: str, delay_s: float, period_s: float, function: Callable[[], object]
    ) -> None:
        """Run function() in `delay_s` seconds, then every `period_s`. Raises ConfigError (a name
        that is taken), Closed.
        """
        for what, value, least in (("delay_s", delay_s, 0.0), ("period_s", period_s, PERIOD_S_MIN)):
            if not is_number(value) or not least <= value <= PERIOD_S_MAX:
                raise ConfigError(
                    f"{what}={value!r:.100} of task {name!r}: {least} to {PERIOD_S_MAX:.0f} "
                    "seconds are allowed"
                )
        with self._changed:
            if self._closed:
                raise Closed(f"{self.name} was closed here")
            if name in self._tasks:
                raise ConfigError(
                    f"{self.name} has a task {name!r} already: destroy that first, "
                    "or choose another name"
                )
            self._tasks[name] = _Task(name, function, monotonic() + delay_s, period_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def query(self, name: str) -> TaskStatistics | None:
        """What the task did so far; None when there is none of that name."""
        with self._changed:
            task = self._tasks.get(name)
            if task is None:
                return None
            wait_s = 0.0 if task.is_running else max(0.0, task.due - monotonic())
            return TaskStatistics(task.runs, task.failures, task.skipped, task.is_running, wait_s)

    def destroy(self, name: str, timeout_s: float = DESTROY_TIMEOUT_S) -> bool:
        """End a task: when this returns, its function does not run and will not again. False when
        there is none of that name.

        Within a task it does not wait, and a run that destroys its own task is the last. Raises
        TimeoutError when a run does not end.
        """
        return self._end(name, 0, timeout_s)

    def destroy_with_additional_run(self, name: str, timeout_s: float = DESTROY_TIMEOUT_S) -> bool:
        """As destroy(), after one whole run more, which begins now: for what the function would do
        at its next time.

        Raises TimeoutError, and Closed when the monitor is closed before that run.
        """
        return self._end(name, 1, timeout_s)

    def _end(self, name: str, runs_more: int, timeout_s: float) -> bool:
        check_seconds("timeout_s", timeout_s, WAIT_S_MAX)
        with self._changed:
            task = self._tasks.get(name)
            if task is None:
                return False
            # else somebody else does the same, and we wait with them
            if task.runs_left is None or runs_more > task.runs_more:
                task.runs_left, task.runs_more = task.is_running + runs_more, runs_more
                task.due = monotonic()
                if not task.runs_left:
                    del self._tasks[name]
                self._changed.notify_all()
            if threading.current_thread() is self._thread:
                return True
            if not self._changed.wait_for(lambda: self._tasks.get(name) is not task, timeout_s):
                raise TimeoutError(
                    f"task {name!r} of {self.name} still runs {timeout_s} s after it was destroyed"
                )
            if runs_more and task.runs_left:
                raise Closed(f"{self.name} was closed before the last run of task {name!r}")
            return True

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._wait_for_task()) is not None:
            failed = False
            try:
                task.function()
            except (Exception, SystemExit) as error:  # one that exits must not end the others
                failed = True
                logger.error(
                    "task %r of %s raised, which ends this run only",
                    task.name,
                    self.name,
                    exc_info=error,
                )
            with self._changed:
                self._ended(task, failed)

    def _wait_for_task(self) -> _Task | None:
        """The task whose time has come; None at the end."""
        with self._changed:
            while not self._closed:
                task = min(self._tasks.values(), key=lambda one: one.due, default=None)
                wait_s = None if task is None else task.due - monotonic()
                if task is not None and wait_s is not None and wait_s <= 0:
                    task.is_running = True
                    return task
                self._changed.wait(wait_s)
            self._tasks.clear()
            self._changed.notify_all()
            return None

    def _ended(self, task: _Task, failed: bool) -> None:
        task.is_running = False
        task.runs += 1
        task.failures += failed
        if task.runs_left is None:
            task.due, skipped = next_due(task.due, task.period_s, monotonic())
            task.skipped += skipped
        else:
            task.runs_left -= 1
            if not task.runs_left:
                del self._tasks[task.name]
        self._changed.notify_all()

    # -- the end -----------------------------------------------------------------------------------

    def close(self, timeout_s: float = DESTROY_TIMEOUT_S) -> None:
        """Destroy all tasks, and wait for the one that runs. Raises TimeoutError when it does not
        end, ConfigError. Again: does nothing."""
        check_seconds("timeout_s", timeout_s, WAIT_S_MAX)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            raise TimeoutError(
                f"a task of {self.name} still runs {timeout_s} s after it was closed"
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
