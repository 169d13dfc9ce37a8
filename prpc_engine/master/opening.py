"""Whether and when a session is tried again to be opened (session_states.py). No clock in this
file: `now` is handed in.

One that was never open is tried within its time, and while the master may come; one that was, for
ever. An attempt has a part of that time, twice as much after one that had used its part up: a host
that loses its power in the middle of one never says a word about it. The last one is as late as may
be: a master that came just before the end is found.

The master may come after what it says to nobody there: NotSent, MaybeExecuted, DeadlineExceeded, or
after Stopping: the next one is started in its place. It will not after another secret, or another
protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from prpc_engine import errors
from prpc_engine.rpc.backoff import Backoff

# nobody answers yet, or has answered to the end, or will answer as it goes
MAY_COME = (errors.NotSent, errors.MaybeExecuted, errors.DeadlineExceeded, errors.Stopping)
CONNECT_TIMEOUT_S = 5.0  # for one attempt; the first, where there has been no session yet
# Between attempts: a master that restarts is found at once, and a thousand clients do not all come
# in the same moment.
BACKOFF = Backoff(first_s=0.02, max_s=2.0)
LAST_S = 0.1  # for the last attempt of a session that was never open


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
        self._part_s = CONNECT_TIMEOUT_S
        self.attempt_s = min(self._part_s, open_timeout_s)
        self._began_at = now  # the attempt
        self._give_up_at = now + open_timeout_s
        self._failures = 0  # in a row

    def opened(self) -> None:
        """An attempt succeeded."""
        self._failures = 0
        self.attempt_s = CONNECT_TIMEOUT_S

    def failed(self, error: Exception, now: float, chance: float, is_new: bool) -> Again | None:
        """What follows an attempt's failure; None: nothing does. `chance`: from 0.0 to 1.0, where
        the delay lies in what it may be; `is_new`: the session was never open.
        """
        self._failures += 1
        delay_s = BACKOFF.delay_s(self._failures, chance)
        is_first = is_new and self._failures == 1
        if is_new:
            left_s = self._give_up_at - now
            will_come = isinstance(error, MAY_COME) and not isinstance(error, errors.NotAPeer)
            if left_s <= min(delay_s, LAST_S) or not will_come:
                return None
            if delay_s >= left_s:
                delay_s = left_s - LAST_S
            left_s -= delay_s
            if now - self._began_at >= self._part_s:
                self._part_s *= 2
            self._began_at = now + delay_s
            self.attempt_s = min(self._part_s, left_s)
        return Again(delay_s, is_first)
