"""When a worker sends lost requests again, and when it says so. No I/O and no clock.

after a round                          next
the first ones                         another one soon, each time after twice the pause, up to
                                       ROUND_PAUSE.max_s
TOLD_AFTER_S after the loss, then      a line in the log
  every TOLD_EVERY_S, while some wait
"""

from __future__ import annotations

from prpc_engine.rpc.backoff import Backoff

# Of a connection that was cut, the first attempt mostly succeeds; of a server that died, a replica
# is promoted within some of the longest.
ROUND_PAUSE = Backoff(first_s=0.005, max_s=0.5, certain=0.5)
# requests that wait are told of in the log: a replica has been promoted by then
TOLD_AFTER_S, TOLD_EVERY_S = 2.0, 10.0


class RecoveryPace:
    """Of one time that requests were lost, from `began` on. Times are seconds of one clock."""

    def __init__(self, began: float) -> None:
        self._rounds = 0
        self._tell_at = began + TOLD_AFTER_S

    def pause_s(self, chance: float) -> float:
        """Seconds until the next round. chance: from 0 to 1, so that not all workers come at the
        same time.
        """
        self._rounds += 1
        return ROUND_PAUSE.delay_s(self._rounds, chance)

    def tells(self, now: float) -> bool:
        """Whether to say now that requests wait."""
        if now < self._tell_at:
            return False
        self._tell_at = now + TOLD_EVERY_S
        return True
