"""A second request where the answer is slow: when it goes, and which answer counts. Decides only:
no clock, no I/O.

    race      event                                          next    done by the caller
    on        next_at comes, and hedge() allows one          on      send one more, elsewhere
    on        an attempt answers (a value, or RemoteError)   over    cancel the others
    on        an attempt fails, others are out               on      wait for those
    on        the last attempt fails                         over    ask RetryState about that error

Only calls of idempotent methods may be hedged: more than one server may run them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from prpc_engine.client.retry import RetryBudget, is_retriable
from prpc_engine.errors import ConfigError
from prpc_engine.rpc.call import NEVER
from shard import is_count, is_finite

# of all calls: what a quantile of 0.95 asks for, and no more when all answers become slow together
HEDGE_SHARE = 0.05
# an earlier hedge costs more than the wait for an answer that takes so short
HEDGE_DELAY_S_MIN = 0.001
SAMPLES_MIN = 64  # answers before a quantile is believed: 3 above that of 0.95
SAMPLES_EVERY = 64  # answers from one look at all buckets to the next
SAMPLES_MAX = 2048  # then every bucket is halved: what was long ago counts for less and less
# a bucket's upper bound is 19 % above its lower one: the error of the quantile, at most
BUCKETS_PER_DOUBLING = 4
BUCKET_OF_1_S = 20 * BUCKETS_PER_DOUBLING  # bucket 0 holds all below 1 us
BUCKETS = BUCKET_OF_1_S + 12 * BUCKETS_PER_DOUBLING  # the last holds all above an hour

R = TypeVar("R")


@dataclass(frozen=True)
class HedgePolicy:
    """When the same is asked of a second server. Only for idempotent methods.

    delay_s     seconds without an answer before a hedge; None: as long as `quantile` of the answers
                take
    quantile    of the latencies: 0.95 hedges the slowest 5 %
    hedges_max  a call, besides its first request

    Raises ConfigError.
    """

    delay_s: float | None = None
    quantile: float = 0.95
    hedges_max: int = 1

    def __post_init__(self) -> None:
        if self.delay_s is not None and not is_finite(self.delay_s, 0.0):
            raise ConfigError(
                f"delay_s={self.delay_s!r}: seconds from 0.0 are allowed, or None for a quantile"
            )
        if not is_finite(self.quantile, 0.0) or not 0.0 < self.quantile < 1.0:
            raise ConfigError(
                f"quantile={self.quantile!r}: more than 0 and less than 1 is allowed, as 0.95"
            )
        if not is_count(self.hedges_max, 1):
            raise ConfigError(
                f"hedges_max={self.hedges_max!r}: 1 or more are allowed; for none, "
                "leave hedging out"
            )


class LatencyQuantile:
    """A quantile of recent latencies: one log2 and one list entry an answer, an upper bound at most
    19 % too high.

    Two threads that observe at once may lose a sample, which changes nothing.
    """

    def __init__(self, quantile: float) -> None:
        self.value_s: float | None = None  # None: too few samples yet
        self._quantile = quantile
        self._counts = [0] * BUCKETS
        self._samples = 0
        self._look_at = SAMPLES_MIN

    def observe(self, latency_s: float) -> None:
        """One more answer."""
        bucket = (
            int(math.log2(latency_s) * BUCKETS_PER_DOUBLING + BUCKET_OF_1_S)
            if latency_s > 1e-6
            else 0
        )
        self._counts[bucket if bucket < BUCKETS else BUCKETS - 1] += 1
        self._samples += 1
        if self._samples >= self._look_at:
            self._look()

    def _look(self) -> None:
        counts = self._counts
        wanted, seen = self._quantile * sum(counts), 0
        for bucket, count in enumerate(counts):
            seen += count
            if seen >= wanted:
                self.value_s = 2.0 ** ((bucket + 1 - BUCKET_OF_1_S) / BUCKETS_PER_DOUBLING)
                break
        if self._samples >= SAMPLES_MAX:
            self._counts = [count // 2 for count in counts]
            self._samples = sum(self._counts)
        self._look_at = self._samples + SAMPLES_EVERY


@dataclass(frozen=True)
class HedgeStatistics:
    """A snapshot of a hedging client: how many hedges it sent, and how many of them answered first,
    which is what they are for.
    """

    delay_s: float | None  # before a hedge; None: not known yet, so none is sent
    hedges: int  # sent
    won: int  # of those, how many answered first
    refused: int  # for the budget


class Hedger:
    """Hedging of one method. The budget is shared by all hedged methods of a client:
    RetryBudget(HEDGE_SHARE).
    """

    def __init__(self, policy: HedgePolicy, budget: RetryBudget) -> None:
        self.policy = policy
        self.budget = budget
        self.latencies = LatencyQuantile(policy.quantile)
        self.hedges = self.won = self.refused = 0

    @property
    def delay_s(self) -> float | None:
        """How long to wait for an answer before a hedge, in seconds; None: not known yet."""
        if self.policy.delay_s is not None:
            return self.policy.delay_s
        value_s = self.latencies.value_s
        return value_s if value_s is None else max(value_s, HEDGE_DELAY_S_MIN)

    def statistics(self) -> HedgeStatistics:
        """A snapshot."""
        return HedgeStatistics(self.delay_s, self.hedges, self.won, self.refused)


A = TypeVar("A", bound=Hashable)


class Race(Generic[A, R]):
    """Decides for one hedged call when one more request goes, and which attempt's answer counts.

    hedger    has the policy, the budget and the latencies of all hedged calls of the method
    deadline  of the call, by the clock of `now`; NEVER: there is none

    Attempts are whatever the caller has for them (a Call), routes what str() names. Owned by one
    call;
    not thread-safe. States: the table at the file's head.
    """

    def __init__(self, hedger: Hedger, deadline: float) -> None:
        self.next_at = NEVER  # when hedge() should be asked next
        self.is_over = False
        self._hedger = hedger
        self._deadline = deadline
        self._out: dict[A, float] = {}  # those without an answer, and when they were sent
        self._first: A | None = None
        self._routes: tuple[R, ...] = ()

    @property
    def routes(self) -> tuple[R, ...]:
        """Where attempts were sent."""
        return self._routes

    def sent(self, attempt: A, route: R, now: float) -> None:
        """An attempt is on its way: the first, or one that hedge() allowed."""
        if self._routes:
            self._hedger.hedges += 1
        else:
            self._first = attempt
        self._out[attempt] = now
        self._routes = (*self._routes, route)
        delay_s = self._hedger.delay_s
        may_hedge = delay_s is not None and len(self._routes) <= self._hedger.policy.hedges_max
        at = now + delay_s if may_hedge and delay_s is not None else NEVER
        self.next_at = at if at < self._deadline else NEVER

    def hedge(self, now: float) -> tuple[R, ...] | None:
        """The routes to avoid when one more request is to be sent now; None: send none, wait until
        next_at.

        Where no other route is there, or sending fails, forget it: the race goes on with those that
        are out.
        """
        if self.is_over or now < self.next_at or now >= self._deadline:
            return None
        self.next_at = NEVER  # set again by sent(); a refusal holds for this call
        if not self._hedger.budget.try_take(now):
            self._hedger.refused += 1
            return None
        return self._routes

    def ended(self, attempt: A, error: BaseException | None, now: float) -> tuple[A, ...] | None:
        """An attempt answered (error None, or one that is the answer) or failed. None: the race
        goes on, or was over before.

        Else it is over with this attempt's outcome, and those returned are to be cancelled.
        """
        sent = self._out.pop(attempt, None)
        if self.is_over or sent is None:
            return None
        is_answer = error is None or not is_retriable(error)
        if self._out and not is_answer:
            return None
        self.is_over = True
        self.next_at = NEVER
        losers = tuple(self._out)
        if is_answer:
            self._hedger.won += attempt is not self._first
            # A loser took at least so long. Left out, the quantile would see quick answers only,
            # fall, and hedge ever more.
            for since in (sent, *self._out.values()):
                self._hedger.latencies.observe(now - since)
        self._out.clear()
        return losers
