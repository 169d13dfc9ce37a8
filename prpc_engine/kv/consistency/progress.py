"""How far the workers of one table are behind in one partition, since when, and for how long others
have waited for them.

    worker  event                                             becomes
    level   another one makes a push that it has not made     behind, since now
    behind  its pushes are as many as those of the farthest   level
    any     a verb waits, and nobody is slower than this one  holds others up, until a push of it or
                                                              the wait's end

Each figure is of a present worker (consistency.py); one that is gone takes its figures along. Who
is only awaited has none: WorkersBehind counts these. Decides only: told of each change, with the
time.
"""

from __future__ import annotations

from typing import NamedTuple

from prpc_engine.kv.consistency.consistency import Clocks


class Lag(NamedTuple):
    """Of one worker. steps: pushes that it is behind the one farthest ahead; since_s: for how long
    it has been behind by now; held_up_s: seconds in all in which verbs of others waited while
    nobody was slower."""

    steps: int
    since_s: float
    held_up_s: float


class Lags:
    """Lags measure how far workers are behind in one partition, and how long others waited.

    Owned by the table's BarrierScheduler, which tells of each change, with the time in seconds.
    clocks: of those workers. A push costs a look at all workers where it is the first of its step,
    or lets others go on; else none. States of a worker: the table at the file's head.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._farthest = 0
        self._behind: dict[int, float] = {}  # since when
        self._holding: dict[int, float] = {}  # others up, since when
        self._held_up_s: dict[int, float] = {}  # before that

    def pushed(self, worker: int, now: float) -> None:
        """The clock of a present worker has gone on."""
        clock = self._clocks.present[worker]
        if clock >= self._farthest:
            self._behind.pop(worker, None)
        if clock > self._farthest:
            self._farthest = clock
            for each, its_clock in self._clocks.present.items():
                if its_clock < clock:
                    self._behind.setdefault(each, now)
        self._let_go(worker, now)

    def look(self, now: float, somebody_waits: bool) -> None:
        """A wait may have begun or ended."""
        if not somebody_waits:
            for worker in list(self._holding):
                self._let_go(worker, now)
        elif not self._holding:
            slowest = self._clocks.slowest
            self._holding = {
                worker: now for worker, clock in self._clocks.present.items() if clock == slowest
            }

    def look_again(self, now: float, somebody_waits: bool) -> None:
        """The same, when a worker has come, is gone, or has taken a push back."""
        present = self._clocks.present
        self._farthest = max(present.values(), default=0)
        self._behind = {
            each: self._behind.get(each, now)
            for each, clock in present.items()
            if clock < self._farthest
        }
        self.look(now, False)
        self._held_up_s = {
            each: held_up_s for each, held_up_s in self._held_up_s.items() if each in present
        }
        self.look(now, somebody_waits)

    def _let_go(self, worker: int, now: float) -> None:
        if worker in self._holding:
            self._held_up_s[worker] = self._held_up(worker, now)
            del self._holding[worker]

    def _held_up(self, worker: int, now: float) -> float:
        return self._held_up_s.get(worker, 0.0) + now - self._holding.get(worker, now)

    def lags(self, now: float) -> dict[int, tuple[str, Lag]]:
        """{present worker: its name, its lag}."""
        return {
            worker: (
                self._clocks.names[worker],
                Lag(
                    self._farthest - clock,
                    now - self._behind.get(worker, now),
                    self._held_up(worker, now),
                ),
            )
            for worker, clock in self._clocks.present.items()
        }
