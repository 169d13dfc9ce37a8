"""Threads for what TensorFlow runs, which may wait for a queue for as long as it takes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("prpc")


class StageThreads(Protocol):
    """Runs functions in other threads: a DaemonThreads, or an Executor."""

    def submit(self, function: Callable[..., object], /, *args: Any) -> object:
        """Run function(*args) in one of them."""

    def shutdown(self, wait: bool = ...) -> None:
        """Take no more."""


class DaemonThreads:
    """As many threads as are busy at a time, `most` at most, and those are kept. At its end the
    interpreter does not wait for them, as it does for those of a ThreadPoolExecutor: a process
    whose queue nobody fills any more has to be able to end.

    Thread-safe. name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._idle = threading.Semaphore(0)  # who submits finds one of them, or starts another
        self._starting = threading.Lock()  # of the next one: any thread submits
        self._count = 0

    def submit(self, function: Callable[..., object], /, *args: Any) -> None:
        """Run function(*args) in one of them; what it raises is logged."""
        self._work.put((function, args))
        if self._idle.acquire(blocking=False):
            return
        with self._starting:
            if self._count == self._most:
                return  # the first that is free takes it
            self._count += 1
            name = f"{self._name}-{self._count}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                self._work.put(None)  # for the next one
                return
            function, args = work
            try:
                function(*args)
            except Exception:
                logger.exception("unexpected error in a thread of %s", self._name)
            del work, function, args  # while it waits for more
            self._idle.release()

    def shutdown(self, wait: bool = False) -> None:
        """They end with what they have. Nobody waits for them."""
        self._work.put(None)
