"""Where functions of users run in the worker that is asked.

    a function                          runs in
    any, at first                       the engine's thread, at once: no thread is switched. While
                                        it runs for long, others run beside it: it is in a
                                        section (shard/loop/sections.py)
    that has taken so long before       one of `threads_max` threads, where one is free; else as
                                        at first
    that was quick there QUICK_MAX      the engine's thread again
      times on end

So functions of users may run at the same time, as with torch.distributed.rpc, and guard what they
share by locks: one that waits for a lock, or for another call to come, stops nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from typing import Any

from shard import CONTEXT, Driver, Future, behalf, runtime

QUICK_S, QUICK_MAX = 0.002, 8


class Runner:
    """Runs functions of users. Owned by a Worker; close() at its end.

    slow       functions that block or compute for long, by name: how often each was quick on end
    overtaken  how many functions there were beside which others ran
    """

    def __init__(self, driver: Driver, threads_max: int) -> None:
        self._sections = driver.sections
        self._section = driver.sections.enter, driver.sections.leave
        self._reactor = driver.reactor
        self._threads_max = threads_max
        self._threads: Any = None  # a pool, once it is needed
        self._busy = 0
        self._awaited: set[object] = set()  # a mark of each function that is a coroutine
        # of the two above and the next: threads of the pool and the engine's count here
        self._guard = runtime.Lock()
        self.slow: dict[str, int] = {}
        self.overtaken = 0

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        """What it returns or raises, of one that runs here and now."""
        enter, leave = self._section
        section = enter()
        try:
            return function(*arguments, **keywords)
        finally:
            if leave(section):
                with self._guard:
                    self.slow[name] = 0
                    self.overtaken += 1

    @property
    def running(self) -> int:
        """Functions that have not ended, whether or not their callers still wait; but for those
        that wait for calls of their own.
        """
        return self._sections.under_way + self._busy + len(self._awaited)

    async def awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What a function that is a coroutine returns or raises."""
        mark = object()
        self._awaited.add(mark)
        try:
            return await coroutine
        finally:
            self._awaited.discard(mark)

    def is_slow(self, name: str) -> bool:
        """Whether begin() is better than run(), and there is a thread for it."""
        return name in self.slow and self._busy < self._threads_max

    def begin(self, name: str, work: Callable[[], object]) -> bool:
        """Have work(), which raises nothing, run in a thread of its own; False where none is to be
        had.
        """
        on_behalf = behalf()

        def run() -> None:
            began = runtime.monotonic()
            CONTEXT.value = on_behalf
            try:
                Context().run(work)
            finally:
                CONTEXT.value = None
                self._ended(name, runtime.monotonic() - began)

        with self._guard:
            if self._threads is None:
                self._threads = runtime.Threads(self._threads_max, thread_name_prefix="prpc-remote")
            self._busy += 1
        try:
            self._threads.submit(run)
        except RuntimeError:  # no more threads, or it is closed
            with self._guard:
                self._busy -= 1
            return False
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Run it as a task. In the reactor's thread."""
        return self._reactor.spawn(self.awaited(coroutine))

    def _ended(self, name: str, took_s: float) -> None:
        with self._guard:
            self._busy -= 1
            quick = self.slow.get(name, 0) + 1 if took_s < QUICK_S else 0
            if quick >= QUICK_MAX:
                self.slow.pop(name, None)
            elif name in self.slow:
                self.slow[name] = quick

    def close(self) -> None:
        """What runs goes on; nothing new begins."""
        with self._guard:
            threads = self._threads
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
