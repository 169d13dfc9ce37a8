"""How long to go on with a task that does not come up, and how often to look. No I/O and no clock.

an attempt fails            next
before the patience is over another attempt, after a pause: each time twice as long, at most
                            PAUSE.max_s, and none that ends after the patience
after it                    given up
"""

from __future__ import annotations

from prpc_engine.rpc.backoff import Backoff

# between attempts: a task that comes up is found soon, one that does not costs little
PAUSE = Backoff(first_s=0.05, max_s=1.0)


class Patience:
    """The attempts at one task, since `started`, of which there are more for `patience_s`
    seconds.
    """

    def __init__(self, started: float, patience_s: float) -> None:
        self._started = started
        self._patience_s = patience_s
        self.failed = 0

    def waited_s(self, now: float) -> float:
        """Seconds since the first one began."""
        return now - self._started

    def pause_s(self, now: float) -> float | None:
        """One more has failed: seconds until the next; None: give up."""
        self.failed += 1
        left_s = self._patience_s - self.waited_s(now)
        if left_s <= 0.0:
            return None
        return min(PAUSE.bound_s(self.failed), left_s)
