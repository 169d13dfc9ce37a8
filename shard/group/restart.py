"""Whether, and when, a shard that died is started again. Decides only: no clock, no process in this
file.

    exit code          never  on-failure
    0: it was stopped  stays  stays down
    any other          stays  after backoff_s, twice that the next time, up to backoff_s_max;
                              restarts_max times in a row

A shard that was up for FORGIVEN_S starts a new row.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from shard.checks import is_count, is_finite

NEVER, ON_FAILURE = "never", "on-failure"
FORGIVEN_S = 60.0
# of a microsecond, even: half a million years; and 2.0**1024 is an OverflowError
DOUBLINGS_MAX = 64


@dataclass(frozen=True)
class RestartPolicy:
    """What to do about a shard that died. Raises ValueError for a kind that is not there, and for
    bounds that are no numbers or below zero."""

    kind: str = NEVER
    restarts_max: int = 5  # in a row: what dies at once each time will not live by a sixth start
    backoff_s: float = 0.1  # before the first of a row
    backoff_s_max: float = 10.0

    def __post_init__(self) -> None:
        if self.kind not in (NEVER, ON_FAILURE):
            raise ValueError(f"restart={self.kind!r}: {NEVER!r} and {ON_FAILURE!r} are possible")
        if not is_count(self.restarts_max, 0):
            raise ValueError(
                f"restarts_max={self.restarts_max!r}: a whole number from 0 on is allowed"
            )
        for name in ("backoff_s", "backoff_s_max"):
            if not is_finite(getattr(self, name), 0.0):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: a number of seconds from 0 on is allowed"
                )

    def delay_s(self, exit_code: int | None, restarts: int) -> float | None:
        """Seconds until the next start of a shard that ended so and was restarted `restarts` times
        in a row; None: never.
        """
        if self.kind == NEVER or exit_code == 0 or restarts >= self.restarts_max:
            return None
        return min(self.backoff_s_max, self.backoff_s * 2.0 ** min(restarts, DOUBLINGS_MAX))

    def outlook(self, exit_code: int | None, restarts: int) -> str:
        """For an error's text: what becomes of it."""
        delay_s = self.delay_s(exit_code, restarts)
        if delay_s is not None:
            return f"restart {restarts + 1} of {self.restarts_max} follows in {delay_s:.1f} s"
        if self.kind == NEVER or exit_code == 0:
            return f"it stays down (restart={self.kind!r})"
        return f"it stays down after {restarts} restarts in a row"


def ending(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None:
        return "its connection broke"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
