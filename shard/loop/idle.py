"""What to do when a turn found no work: the reactor counts, a strategy decides.

    Spin      polling on: never parks; now and then offers the core to others, so that more pollers
              than cores still move
    Adaptive  polling off: spins for a window learnt from recent gaps between pieces of work, then
              parks
    Park      parks at once: for one that works seldom, and for tests of parking itself

`idle(now)` answers how long to park in seconds: 0.0 means poll again at once. `work(now)` says that
a turn did something. Parking itself is the driver's: it owns the epoll and the sleep handshake.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

# One offer of the core per so many empty turns of some 10 us: 0.3 us in 80, and what keeps 2
# pollers on 1 core from waiting for each other's whole time slice.
YIELD_EVERY_TURNS = 8

# A gap that was longer than this is never worth spinning for: waking a parked process costs some
# 30-50 us.
SPIN_WINDOW_S_MAX = 100e-6
SPIN_WINDOW_S_MIN = 2e-6
# Of a gap that ended a park, so much is our own waking up, at least: the work was there earlier
# than we saw it. Without this two sides that both park see gaps of two wake-ups, and on a slow
# machine would never learn that spinning bridges them.
WAKE_UP_S = 30e-6

# Nobody sleeps longer in one go, so that clocks, signals and lost peers are looked at now and then.
PARK_S_MAX = 1.0


# Empty looks at the rings alone (0.09 us each) before a look at everything, and before the strategy
# is asked at all: some 20 us, longer than most answers take.
SPIN_TURNS = 256


class Idle(Protocol):
    """An idle strategy decides what a loop does after an empty turn: poll again, or park and for
    how long. One object for each reactor; it neither sleeps nor reads a clock: `now` is in
    seconds.
    """

    spin_turns: int  # what to hand to Reactor.spin() before asking here

    def work(self, now: float) -> None:
        """A turn found something to do."""

    def idle(self, now: float) -> float:
        """A turn found nothing: seconds to park, 0.0 to poll again at once."""


class Spin:
    """Never park. Offer the core every `yield_turns` empty turns: 1 where there are more pollers
    than cores.
    """

    spin_turns = SPIN_TURNS

    def __init__(
        self,
        yield_turns: int = YIELD_EVERY_TURNS,
        offer: Callable[[], object] = os.sched_yield,
    ) -> None:
        """`offer`: gives the core to whoever waits for one."""
        if yield_turns < 1:
            raise ValueError(f"Spin(yield_turns={yield_turns}): 1 (every empty turn) or more")
        self._yield_turns = yield_turns
        self._offer = offer
        self._turns = 0

    def work(self, now: float) -> None:
        self._turns = 0

    def idle(self, now: float) -> float:
        self._turns += 1
        if self._turns >= self._yield_turns:
            self._turns = 0
            self._offer()
        return 0.0


class Adaptive:
    """Spin while the next piece of work is likely near, park when it is not.

    The window follows the gaps between pieces of work: a gap that a longer window would have
    bridged doubles it up to SPIN_WINDOW_S_MAX, one that was longer than any window halves it. So an
    idle peer soon costs no spinning at all, and a hot exchange never parks.
    """

    spin_turns = SPIN_TURNS

    def __init__(self) -> None:
        self._window = SPIN_WINDOW_S_MAX
        self._idle_since = 0.0  # 0.0: the last turn worked
        self._parked = False  # since then

    @property
    def window_s(self) -> float:
        """How long an empty reactor spins at present before it parks."""
        return self._window

    def work(self, now: float) -> None:
        if self._idle_since:
            gap = now - self._idle_since
            self._idle_since = 0.0
            if self._parked:
                self._parked = False
                gap = max(0.0, gap - WAKE_UP_S)
            if gap <= SPIN_WINDOW_S_MAX:
                self._window = min(SPIN_WINDOW_S_MAX, max(self._window, 2 * gap))
            else:
                self._window = max(SPIN_WINDOW_S_MIN, self._window / 2)

    def idle(self, now: float) -> float:
        if not self._idle_since:
            self._idle_since = now
            return 0.0
        if now - self._idle_since >= self._window:
            self._parked = True
            return PARK_S_MAX
        os.sched_yield()  # the one we wait for may be waiting for this very core
        return 0.0


class Park:
    """The idle strategy that never spins: it parks in the first turn that finds nothing. For a
    process that works seldom, and for tests of parking.
    """

    spin_turns = 0

    def work(self, now: float) -> None:
        """Nothing to learn."""

    def idle(self, now: float) -> float:
        return PARK_S_MAX


def strategy(
    name: str, oversubscribed: bool = False, offer: Callable[[], object] = os.sched_yield
) -> Idle:
    """A new strategy by name; `oversubscribed`: there are more pollers than cores, so a spinning
    one offers its core every turn. offer: as of Spin.
    """
    if name == "spin":
        return Spin(1 if oversubscribed else YIELD_EVERY_TURNS, offer)
    if name == "adaptive":
        return Adaptive()
    if name == "park":
        return Park()
    raise ValueError(
        f"idle strategy {name!r}: there are 'spin' (polls on, a core for each process), "
        "'adaptive' (spins briefly, then sleeps; "
        "the usual choice) and 'park' (sleeps at once)"
    )


_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def polling_enabled(variable: str, value: str | None, default: bool) -> bool:
    """Whether to poll, as the environment says it: `value` of PS_ENABLE_POLLING and its like,
    `default` for None (unset).

    Raises ValueError for anything that is no switch, an empty text too: a typing error must not
    cost a core, or the speed.
    """
    if value is None:
        return default
    try:
        return _SWITCH[value.strip().lower()]
    except KeyError:
        raise ValueError(
            f"{variable}={value!r}: 1, true or on make the engine poll, 0, "
            "false or off let it sleep when idle; unset it for the default"
        ) from None
