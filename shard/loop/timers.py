"""Deadlines in order: no clock in this file, `now` is handed in by the reactor.

A heap of (when, sequence, timer); a cancelled timer stays in the heap until its time comes, or
until half of the heap is cancelled, then the heap is rebuilt without them: so cancelling is O(1)
and the heap stays in proportion to what is live.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timer:
    """One callback to come. cancel() it when it is no longer wanted."""

    __slots__ = ("_timers", "callback", "when")

    def __init__(self, timers: Timers, when: float, callback: Callable[[], object]) -> None:
        self._timers = timers
        self.when = when
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Never fire. Cancelling twice, or after it fired, does nothing."""
        if self.callback is not None:
            self.callback = None
            self._timers._note_cancelled()


class Timers:
    """All timers of one reactor. `when` and `now` are seconds on the reactor's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Run callback() in the first turn whose `now` is not before `when`."""
        timer = Timer(self, when, callback)
        heapq.heappush(self._heap, (when, next(self._sequence), timer))
        return timer

    def next_deadline(self) -> float | None:
        """When the earliest timer fires, or None."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def fire(self, now: float, limit: int | None = None) -> int:
        """Run what is due, `limit` of them at most; how many there were. Timers added meanwhile
        wait for the next turn.

        Each leaves the heap only to run: one that raises, or that waits and so turns the reactor
        deeper, keeps no other from firing.
        """
        newest = next(self._sequence)
        heap = self._heap
        fired = 0
        while heap and heap[0][0] <= now and heap[0][1] < newest and fired != limit:
            timer = heapq.heappop(heap)[2]
            callback = timer.callback
            if callback is None:
                self._cancelled -= 1
                continue
            timer.callback = None
            fired += 1
            callback()
        return fired

    def _note_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > 32 and self._cancelled * 2 > len(self._heap):
            # in place: fire() may look at it
            self._heap[:] = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0
