"""What many tests need."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from shard import Future


class ManualClock:
    """A clock that stands still until it is told: call it where a clock is wanted, or pass `.now`
    on.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on; the new time."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: advance({seconds})")
        self.now += seconds
        return self.now


class ManualWaiter:
    """In the place of a driver, for a thread that waits: it does something instead, and the time is
    over.
    """

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def wait(self, future: Future, timeout_s: float | None) -> bool:
        """Whether it is done."""
        self.meanwhile()
        return bool(future.finished)

    def wait_until(self, future: Future, deadline: float | None) -> bool:
        """The same."""
        return self.wait(future, None)

    def await_in(self, future: Future, loop: object) -> Generator[Any, None, None]:
        """Threads wait here, no coroutines."""
        raise AssertionError(f"{future} is awaited in {loop}, where a thread was to wait for it")

    def expect(self, future: Future) -> None:
        """The test makes the progress."""

    def call_in_engine(self, work: Callable[[], object]) -> bool:
        """There is no engine."""
        return False
