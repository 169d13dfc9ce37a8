"""Threads for what TensorFlow runs, which may wait for a queue for as long as it takes."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("prpc")
_Work = tuple[Callable[..., object], tuple[Any, ...]]


class StageThreads(Protocol):
    """Runs functions in other threads: a DaemonThreads, or an Executor."""

    def submit(self, function: Callable[..., object], /, *args: Any) -> object:
        """Run function(*args) in one of them."""

    def shutdown(self, wait: bool = ...) -> None:
        """Take no more."""


_made: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()
os.register_at_fork(after_in_child=_made.clear)  # none of their threads is there


class DaemonThreads:
    """As many threads as are busy at a time, `most` at most, and those are kept; what comes beyond
    that waits for a free one. The interpreter does not join them at its end, as it joins those of a
    ThreadPoolExecutor: a process must be able to end while a stage waits for a queue that stays
    empty.

    Thread-safe. name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        # a count and no guard: free threads that no submit() has counted on yet
        self._free = threading.Semaphore(0)
        self._starting = threading.Lock()  # of the next one: any thread submits
        self._threads: list[threading.Thread] = []
        self._is_over = False  # nothing is run any more
        _made.add(self)

    def submit(self, function: Callable[..., object], /, *args: Any) -> None:
        """Run function(*args) in one of them; what it raises is logged. Raises RuntimeError where
        the system has no more threads: nothing runs then.
        """
        # Taken for good, and given back by the thread that runs it. If an interrupt comes before
        # put(), one thread is not counted as free any more, and another one is started in time.
        if not self._free.acquire(blocking=False):
            self._start_another()
        self._work.put((function, args))

    def _start_another(self) -> None:
        with self._starting:
            if len(self._threads) == self._most:
                return
            name = f"{self._name}-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None or self._is_over:
                self._work.put(None)  # for the next one
                return
            function, args = work
            try:
                function(*args)
            except Exception:
                logger.exception("unexpected error in a thread of %s", self._name)
            del work, function, args  # while it waits for more
            self._free.release()

    def shutdown(self, wait: bool = False) -> None:
        """Each thread ends after what was submitted before. This does not wait for them."""
        self._work.put(None)

    def end(self, until: float) -> None:
        """Run nothing any more, and wait for what runs, until then by time.monotonic() at most."""
        self._is_over = True
        self._work.put(None)
        for thread in self._threads.copy():
            thread.join(max(0.0, until - time.monotonic()))


def end_threads(until: float) -> None:
    """All of them, at the end of the process, as DaemonThreads.end()."""
    for threads in list(_made):
        threads.end(until)
