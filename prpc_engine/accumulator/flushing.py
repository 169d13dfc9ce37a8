"""When a client pushes to a server, when again after a failure, how long it rests, and when it is
over. No I/O and no clock; the outbox says what is pushed.

    a server       event               next
    at rest        something is there  a push is under way
    under way      answered            at rest, and the failures are forgotten
    under way      no answer           waits for RETRY.first_s, each time twice as long, at
                                       most RETRY.max_s; then the same push again
    under way      refused for good    at rest; the push is dropped, or split

    the client     event               next
    open           nothing to push     rests until a counter or a server is due, or it is woken
    closing        nothing waits       over
    closing        its time is over    over, whatever waits
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prpc_engine.accumulator.outbox import WriteBatch, WriteOutbox
from prpc_engine.rpc.backoff import Backoff

RETRY = Backoff(first_s=0.05, max_s=2.0)
IDLE_S_MAX = 3600.0  # without counters there is nothing to wake for


@dataclass
class PushTarget:
    """One server as the client that pushes sees it. Times are seconds of one clock."""

    server_id: int
    outbox: WriteOutbox = field(default_factory=WriteOutbox)
    epoch: int = 0  # 0: never heard of
    retry_at_s: float = 0.0
    failures: int = 0  # in a row
    failure: str | None = None

    def batch(self, now_s: float) -> WriteBatch | None:
        """What to push now."""
        return self.outbox.head() if self.retry_at_s <= now_s else None

    def answered(self, epoch: int) -> None:
        """It lives."""
        self.epoch, self.retry_at_s, self.failures, self.failure = epoch, 0.0, 0, None

    def failed(self, why: str, now_s: float) -> None:
        """It did not answer."""
        self.failure = why
        self.failures += 1
        self.retry_at_s = now_s + RETRY.bound_s(self.failures)


def rest_s(
    now_s: float, close_by_s: float | None, due_s: float | None, targets: Iterable[PushTarget]
) -> float | None:
    """Seconds to rest when there is nothing to push; None: it is over. close_by_s: once it is being
    closed. due_s: when the next counter is.
    """
    retry_s = min((each.retry_at_s for each in targets if each.outbox.waiting), default=None)
    if close_by_s is not None:
        if retry_s is None or now_s >= close_by_s:
            return None
        return max(0.0, min(close_by_s, retry_s) - now_s)
    dues_s = [each for each in (due_s, retry_s) if each is not None]
    return max(0.0, min(dues_s, default=now_s + IDLE_S_MAX) - now_s)
