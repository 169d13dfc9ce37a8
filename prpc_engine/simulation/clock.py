"""The monotonic clock of a simulated host: it runs at a rate of its own beside virtual time.

    shows     of the host: what its processes read, and what their timeouts are measured in
    virtual   of the simulation: Scheduler.now

A new rate goes on from what the clock shows; it never goes back.
"""

from __future__ import annotations

import math

RATE_MIN, RATE_MAX = 0.5, 2.0  # seconds of the host in one of the simulation


class HostClock:
    """`rate` seconds pass on it in each second of the simulation. Processes of a host share it."""

    __slots__ = ("_shown_s", "_since_s", "rate")

    def __init__(self) -> None:
        self.rate = 1.0
        self._since_s = self._shown_s = 0.0  # when the rate was set, and what it showed then

    def shows(self, virtual_s: float) -> float:
        """What it shows at that time, which is not before the rate was set."""
        return self._shown_s + (virtual_s - self._since_s) * self.rate

    def when(self, shown_s: float) -> float:
        """The time at which it shows that, or a little more."""
        virtual_s = self._since_s + (shown_s - self._shown_s) / self.rate
        while self.shows(virtual_s) < shown_s:  # rounded down
            virtual_s = math.nextafter(virtual_s, math.inf)
        return virtual_s

    def virtual(self, seconds: float) -> float:
        """How many seconds of the simulation so many of this clock are."""
        return seconds / self.rate

    def set_rate(self, rate: float, virtual_s: float) -> None:
        """From that time on it runs so fast."""
        self._shown_s, self._since_s = self.shows(virtual_s), virtual_s
        self.rate = rate
