"""So many threads that run functions for others: concurrent.futures, with a bound on what waits and
no error lost.

    group = ThreadGroup(4)
    answer = group.async_exec(parse, line)       # -> AsyncReturn
    answer.wait(timeout_s=1)                     # whether it has ended
    answer.result()                              # its value, or raises what it raised

A function that waits for another one of its own group may wait for ever when all threads do so:
give such work two groups.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

# the TimeoutError of Python 3.10 is another one
from concurrent.futures import TimeoutError as FutureTimeoutError
from time import monotonic
from types import TracebackType
from typing import Any, Generic, TypeVar

from prpc_engine.errors import Backpressure, Closed
from prpc_engine.settings.config import check_number, check_wait

THREADS_MAX = 4096
# functions that run or wait for a thread: beyond that the caller is told to slow down
PENDING_MAX = 65536

R = TypeVar("R")
logger = logging.getLogger("prpc")


class AsyncReturn(Generic[R]):
    """What becomes of a function. Dropped without a result() call, it logs the error that nobody
    would see otherwise.
    """

    def __init__(self, future: Future[R], name: str) -> None:
        self._future = future
        self._name = name
        self._asked = False
        # Its end and our own, in either order and in any threads: who counts the second one logs
        # the error, so it is logged once.
        ends = self._ends = itertools.count()
        future.add_done_callback(lambda ended: _log_error(ended, name) if next(ends) else None)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, `timeout_s` seconds at most: whether it has come. Raises ConfigError
        for seconds that are none.
        """
        check_wait(timeout_s)
        return _has_ended(self._future, timeout_s)

    def result(self, timeout_s: float | None = None) -> R:
        """Its value. Raises what it raised, Closed when its group was closed before its turn,
        TimeoutError.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"{self._name} has not ended after {timeout_s} s")
        self._asked = True
        if self._future.cancelled():
            raise Closed(f"{self._name} did not run: its ThreadGroup was closed here")
        return self._future.result()

    def __del__(self) -> None:
        if not self._asked and next(self._ends):
            _log_error(self._future, self._name)


def _has_ended(future: Future[Any], timeout_s: float | None) -> bool:
    # futures.wait() would miss those that closing the group cancels.
    with contextlib.suppress(CancelledError, FutureTimeoutError):
        future.exception(timeout_s)
    return future.done()


def _log_error(ended: Future[Any], name: str) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        logger.error("%s raised, and nobody asked for its result", name, exc_info=error)


class ThreadGroup:
    """A thread group runs functions in so many threads, and keeps their results and errors.

    Thread-safe; a context manager that waits for all, and when it is left by an error for what
    runs. name: of the threads, and for texts. pending_max: how many functions may run or wait;
    beyond that async_exec() raises Backpressure. Raises ConfigError for a number of threads that is
    not possible.
    """

    def __init__(
        self, threads: int, name: str = "prpc-group", pending_max: int = PENDING_MAX
    ) -> None:
        check_number("threads", threads, 1, THREADS_MAX)
        self._pending_max = check_number("pending_max", pending_max, 1, PENDING_MAX)
        self.name = name
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._pending: set[Future[Any]] = set()
        self._closed = False

    def async_exec(self, function: Callable[..., R], *args: Any, **keywords: Any) -> AsyncReturn[R]:
        """Run the function in one of the threads. Raises Backpressure when `pending_max` have not
        ended, Closed.
        """
        if len(self._pending) >= self._pending_max:
            raise Backpressure(
                f"{len(self._pending)} functions of {self.name} have not ended, "
                "which is the most allowed"
            )
        try:
            future = self._executor.submit(function, *args, **keywords)
        except RuntimeError as error:
            if self._closed:
                raise Closed(f"the ThreadGroup {self.name} was closed here") from error
            raise  # the system has no thread left, or Python is ending
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return AsyncReturn(
            future, f"{getattr(function, '__qualname__', function)!s} of {self.name}"
        )

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until everything given to it so far has ended; more may follow. Raises TimeoutError,
        ConfigError.
        """
        check_wait(timeout_s)
        deadline = None if timeout_s is None else monotonic() + timeout_s
        for future in self._pending.copy():
            if not _has_ended(
                future, None if deadline is None else max(0.0, deadline - monotonic())
            ):
                raise TimeoutError(
                    f"{len(self._pending)} functions of {self.name} have not ended after "
                    f"{timeout_s} s"
                )

    def close(self, cancel: bool = False) -> None:
        """Take on nothing new and wait for what there is; with `cancel`, only for what runs. Again:
        does nothing.
        """
        self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=cancel)

    def __enter__(self) -> ThreadGroup:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(cancel=exc_type is not None)
