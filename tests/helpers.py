"""What many tests need."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until it is told: call it where a clock is wanted, or pass `.now` on."""

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
