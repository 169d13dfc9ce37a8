"""When a worker sends lost requests again, and when it says so. No I/O and no clock.

after a round                          next
the first ones                         another one soon, each time after twice the pause, up to
                                       BACKOFF_S_MAX
a request's deadline before that       another one then: it is settled in time
TOLD_AFTER_S after the loss, then      a line in the log
  every TOLD_EVERY_S, while some wait
"""

from __future__ import annotations

BACKOFF_S_MIN = 0.005  # of a connection that was cut, the first attempt mostly succeeds
BACKOFF_S_MAX = 0.5  # of a server that died: its replica is promoted within some of these
# requests that wait are told of in the log: a replica has been promoted by then
TOLD_AFTER_S, TOLD_EVERY_S = 2.0, 10.0


class RecoveryPace:
    """Of one time that requests were lost, from `began` on. Times are seconds of one clock."""

    def __init__(self, began: float) -> None:
        self._backoff_s = BACKOFF_S_MIN
        self._tell_at = began + TOLD_AFTER_S

    def pause_s(self, now: float, chance: float, deadline: float) -> float:
        """Seconds until the next round. chance: from 0 to 1, so that not all workers come at the
        same time. deadline: the first one of what waits.
        """
        pause_s = (0.5 + 0.5 * chance) * self._backoff_s
        self._backoff_s = min(BACKOFF_S_MAX, 2 * self._backoff_s)
        return max(0.0, min(pause_s, deadline - now))

    def tells(self, now: float) -> bool:
        """Whether to say now that requests wait."""
        if now < self._tell_at:
            return False
        self._tell_at = now + TOLD_EVERY_S
        return True
