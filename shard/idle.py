"""What to do when a turn found no work: the reactor counts, a strategy decides.

    Spin       polling on: never parks; now and then offers the core to others, so that more pollers than cores still move
    Adaptive   polling off: spins for a window learnt from recent gaps between pieces of work, then parks

`idle(now)` answers how long to park in seconds: 0.0 means poll again at once. `work(now)` says that a turn did something.
Parking itself is the driver's: it owns the epoll and the sleep handshake.
"""

from __future__ import annotations

import os
from typing import Protocol

# One offer of the core per so many empty turns of some 10 us: 0.3 us in 80, and what keeps 2 pollers on 1 core from
# waiting for each other's whole time slice.
YIELD_EVERY_TURNS = 8

# A gap that was longer than this is never worth spinning for: waking a parked process costs some 30-50 us.
SPIN_WINDOW_S_MAX = 100e-6
SPIN_WINDOW_S_MIN = 2e-6

# Nobody sleeps longer in one go, so that clocks, signals and lost peers are looked at now and then.
PARK_S_MAX = 1.0


class Idle(Protocol):
    """The face of a strategy; one object per reactor."""

    def work(self, now: float) -> None:
        """A turn found something to do."""

    def idle(self, now: float) -> float:
        """A turn found nothing: seconds to park, 0.0 to poll again at once."""


class Spin:
    """Never park."""

    def __init__(self) -> None:
        self._turns = 0

    def work(self, now: float) -> None:
        self._turns = 0

    def idle(self, now: float) -> float:
        self._turns += 1
        if self._turns >= YIELD_EVERY_TURNS:
            self._turns = 0
            os.sched_yield()
        return 0.0


class Adaptive:
    """Spin while the next piece of work is likely near, park when it is not.

    The window follows the gaps between pieces of work: a gap that a longer window would have bridged doubles it up to
    SPIN_WINDOW_S_MAX, one that was longer than any window halves it. So an idle peer soon costs no spinning at all, and a
    hot exchange never parks.
    """

    def __init__(self) -> None:
        self._window = SPIN_WINDOW_S_MAX
        self._idle_since = 0.0  # 0.0: the last turn worked

    @property
    def window_s(self) -> float:
        """How long an empty reactor spins at present before it parks."""
        return self._window

    def work(self, now: float) -> None:
        if self._idle_since:
            gap = now - self._idle_since
            self._idle_since = 0.0
            if gap <= SPIN_WINDOW_S_MAX:
                self._window = min(SPIN_WINDOW_S_MAX, max(self._window, 2 * gap))
            else:
                self._window = max(SPIN_WINDOW_S_MIN, self._window / 2)

    def idle(self, now: float) -> float:
        if not self._idle_since:
            self._idle_since = now
            return 0.0
        if now - self._idle_since >= self._window:
            return PARK_S_MAX
        os.sched_yield()  # the one we wait for may be waiting for this very core
        return 0.0
