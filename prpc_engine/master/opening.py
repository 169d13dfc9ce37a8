"""Whether and when a session is tried again to be opened. No clock in this file: `now` is handed
in.

    state  event                                     next
    new    an attempt failed, the master may come    new: again, within what is left of the time
    new    the time is over, or no master will come  given up
    new    opened                                    known
    known  an attempt failed                         known: again, for ever
    known  opened                                    known, with the shortest delay again

The master may come after what it says to nobody there: NotSent, MaybeExecuted, DeadlineExceeded. It
will not after another secret, or another protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from prpc_engine import errors

# nobody answers yet, or has answered to the end
MAY_COME = (errors.NotSent, errors.MaybeExecuted, errors.DeadlineExceeded)
CONNECT_TIMEOUT_S = 5.0  # for one attempt, once there has been a session
# Between attempts: a master that restarts is found at once, and a thousand clients do not all come
# in the same moment.
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.02, 2.0


@dataclass(frozen=True)
class Again:
    """Another attempt, in `delay_s` seconds. `is_first`: of a session that was never open."""

    delay_s: float
    is_first: bool


class Opening:
    """Decides about the next attempt to open a session.

    now             when the first attempt begins, in seconds of any clock
    open_timeout_s  until when a session that was never open is tried

    `attempt_s`: what the next attempt may take, in seconds.
    """

    def __init__(self, now: float, open_timeout_s: float) -> None:
        self.attempt_s = open_timeout_s
        self._give_up_at = now + open_timeout_s
        self._has_opened = False
        self._backoff_s = BACKOFF_S_MIN

    def opened(self) -> None:
        """An attempt succeeded."""
        self._has_opened = True
        self._backoff_s = BACKOFF_S_MIN
        self.attempt_s = CONNECT_TIMEOUT_S

    def failed(self, error: Exception, now: float, chance: float) -> Again | None:
        """What follows an attempt's failure; None: nothing does. `chance`: from 0.0 to 1.0, where
        the delay lies in what it may be.
        """
        delay_s = chance * self._backoff_s
        is_first = not self._has_opened and self._backoff_s == BACKOFF_S_MIN
        if not self._has_opened:
            left_s = self._give_up_at - now - delay_s
            will_come = isinstance(error, MAY_COME) and not isinstance(error, errors.NotAPeer)
            if left_s <= 0.0 or not will_come:
                return None
            self.attempt_s = left_s
        self._backoff_s = min(BACKOFF_S_MAX, 2 * self._backoff_s)
        return Again(delay_s, is_first)
