"""Which rows of a sparse table have to go: the oldest above a bound on their number, and those
unused for too long.

A row carries a stamp: when it was last pulled or pushed, in the table's time. That counts pushes of
the table; with `ttl_s`, milliseconds since the table was made. It is no machine's clock: it goes on
where a replica is promoted (which is told the time with each change), stands still while the table
is in a checkpoint only, and nobody who sets a clock makes rows expire. So stamps mean the same on
all servers, and in checkpoints.

What a push is about to change is stamped PINNED meanwhile, so that it never evicts its own rows.
Choosing the oldest looks at all stamps, so a full table makes room for a sixteenth of its rows at
once: of 10 million rows of 64 floats 625 thousand go in 0.25 s (numpy 2.4, one EPYC core), and then
none for as many new keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table.spec import checked_count, checked_number, configured

ROWS_MAX_MAX = 2**40
PINNED = np.iinfo(np.int64).max  # no row in use is older
SWEEPS_PER_TTL = 8  # a row goes at the earliest after ttl, and with the first push after 9/8 of it
ROOM_FRACTION = 16
Stamps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Eviction:
    """At least one bound: rows kept, and the time a row may be unused, in pushes of its table
    (ttl_steps) or in seconds (ttl_s).

    rows_max is that of each partition. Rows go with pushes only: those unused for too long with the
    first push after 9/8 of that time at the latest, and of a full table a sixteenth of rows_max at
    once. New keys for which a push leaves no room get no row. An evicted key has its initial row
    again, and may come again; what admission has counted of it stays.
    """

    rows_max: int | None = None
    ttl_steps: int | None = None
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if self.rows_max is not None:
            checked_count("eviction: rows_max", self.rows_max, at_least=1, at_most=ROWS_MAX_MAX)
        if self.ttl_steps is not None:
            checked_count("eviction: ttl_steps", self.ttl_steps, at_least=1, at_most=ROWS_MAX_MAX)
        if self.ttl_s is not None:
            checked_number("eviction: ttl_s", self.ttl_s, above=0)
        if self.ttl_steps is not None and self.ttl_s is not None:
            raise ConfigError(
                "eviction: ttl_steps and ttl_s are both given; one of them is allowed"
            )
        if self.rows_max is None and self.ttl_steps is None and self.ttl_s is None:
            raise ConfigError(
                "eviction: none of rows_max, ttl_steps, ttl_s is given; give at least one, "
                "or no eviction"
            )

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal one."""
        return asdict(self)


def from_spec(spec: object) -> Eviction | None:
    """{"rows_max": 1000} -> Eviction(1000), None -> None; ConfigError lists what is allowed."""
    return None if spec is None else configured("eviction", Eviction, spec)


class Evictor:
    """Decides for one table. `clock` gives seconds, and is needed and asked only with ttl_s."""

    def __init__(self, eviction: Eviction, clock: Callable[[], float] | None) -> None:
        assert clock is not None or eviction.ttl_s is None, (
            "a time to live in seconds needs a clock"
        )
        self._clock = clock if eviction.ttl_s is not None else None
        self.rows_max = eviction.rows_max if eviction.rows_max is not None else ROWS_MAX_MAX
        self._ttl = eviction.ttl_steps if eviction.ttl_s is None else int(1000 * eviction.ttl_s)
        self._sweep_at = 0
        # of the table's time, by the clock
        self._begin_ms = int(1000 * self._clock()) if self._clock is not None else 0

    def stamp(self, step: int) -> int:
        """The present moment, where `step` pushes came before."""
        return step if self._clock is None else int(1000 * self._clock()) - self._begin_ms

    def catch_up(self, moment: int) -> None:
        """The table's time is that moment now, or later."""
        if self._clock is not None:
            self._begin_ms = min(self._begin_ms, int(1000 * self._clock()) - moment)

    def expired(self, stamps: Stamps, now: int) -> npt.NDArray[np.int64]:
        """The rows unused for longer than the time to live; looked for a few times in it, else none
        are named.
        """
        if self._ttl is None or now < self._sweep_at:
            return np.empty(0, np.int64)
        self._sweep_at = now + 1 + self._ttl // SWEEPS_PER_TTL
        return np.flatnonzero(stamps < now - self._ttl)

    def oldest(self, stamps: Stamps, excess: int) -> npt.NDArray[np.int64]:
        """The rows that go when `excess` of them have to, and some more for the next time; none
        that is PINNED.
        """
        candidates = np.flatnonzero(stamps != PINNED)
        count = max(excess, self.rows_max // ROOM_FRACTION)
        if count >= len(candidates):
            return candidates
        return candidates[np.argpartition(stamps[candidates], count - 1)[:count]]
