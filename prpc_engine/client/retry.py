"""What follows an attempt that failed: another one, elsewhere or later, or the error. Decides only:
no clock, no I/O.

    error                             again?           when                         costs the budget
    NotSent (also NoServer)           yes              at once at a new server (1)  no: it put load
                                                                                    on nobody
    NoPath at every server, where     no
      our transports lead nowhere else
    Stopping, UnknownService          yes              at once at a new server (1)  yes
    Backpressure                      yes              after a backoff              yes
    MaybeExecuted                     idempotent only  after a backoff              yes
    MaybeExecuted of a `once` method  there only (3)   after a backoff              yes
    DeadlineExceeded, ours left (2)   idempotent only  after a backoff              yes
    every other Rejected, ShmFull     no: every server would refuse it; or so do we
    RemoteError and all others        no: that is the answer

(1) While each attempt met a server that this call had not tried before; after that with a backoff.
(2) An attempt's own time (RetryPolicy.attempt_s) is over, or the server cut it, and the call's
    deadline has not come.
(3) Only that server process can tell whether it ran. From then on every attempt goes there,
    whatever else happens to them; Stopping and UnknownService end the call.

Whatever the table says, there is no other attempt after the call's deadline (or UNSENT_S_MAX where
it has none), after `attempts_max` that may have reached a server, or after `unsent_max` that did
not; and the budget holds for all calls of a client together, so that retries never multiply an
overload. Each attempt avoids the servers tried before, where there are others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from prpc_engine.errors import (
    Backpressure,
    ConfigError,
    DeadlineExceeded,
    MaybeExecuted,
    NoPath,
    NotSent,
    Rejected,
    RpcError,
    ShmFull,
    Stopping,
    UnknownService,
)
from prpc_engine.rpc.backoff import Backoff
from prpc_engine.rpc.call import NEVER, TIMEOUT_S
from shard import is_count, is_finite

# Attempts of one call that may each reach a server. Beyond three, one more rarely helps, and waits
# longer each time.
ATTEMPTS_MAX = 3
# How long a call without a deadline is tried while it reaches nobody: what others have that were
# given none of their own. With a deadline it is tried until then: a server that is started again,
# or later than its clients, is waited for.
UNSENT_S_MAX = TIMEOUT_S
# Kinds of failures that the error of a call names, in the order they came; how many there were, it
# says of all.
FAILURES_TOLD_MAX = 8
# The first wait is what a full queue needs to empty and less than a person notices, the last leaves
# room for several in 30 s.
RETRY_BACKOFF = Backoff(first_s=0.01, max_s=1.0)

# of all calls: in an overload where everything is refused, servers see a fifth more, not three
# times as much
BUDGET_SHARE = 0.2
# extra requests saved up at most: for the calls in flight at one server that dies; they overload
# nobody
BUDGET_RESERVE = 100.0
BUDGET_PER_S = 1.0  # extra requests a second, so that a client of few calls may send some at all

# Who says so takes on nothing, however long one waits: another server may.
ELSEWHERE_AT_ONCE = (NotSent, Stopping, UnknownService)
# what says of an attempt that it did not run: at the server, or here, as it was sent
DID_NOT_RUN = (Rejected, ShmFull)
RETRIABLE = (*ELSEWHERE_AT_ONCE, Backpressure, MaybeExecuted, DeadlineExceeded)

ONLY_THERE = "only that server process could tell whether it ran"

R = TypeVar("R")


class RetryBudget:
    """How many extra requests a client may send: at most `reserve` + `share` x its calls + `per_s`
    x the seconds, over any time.

    A call costs one count_call(), which is in C; the rest is worked out when an extra request is
    asked for.

    guard   held while it is: a threading.Lock where several threads call, who else needs none

    Raises ConfigError for numbers below zero.
    """

    def __init__(
        self,
        share: float = BUDGET_SHARE,
        reserve: float = BUDGET_RESERVE,
        per_s: float = BUDGET_PER_S,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        if share < 0.0 or reserve < 0.0 or per_s < 0.0:
            raise ConfigError(
                f"a retry budget of share={share}, reserve={reserve}, per_s={per_s}: "
                "none may be below zero"
            )
        self.share, self.reserve, self.per_s = share, reserve, per_s
        self.taken = self.refused = 0
        self._calls = itertools.count()
        self.count_call: Callable[[], int] = self._calls.__next__
        self._guard = guard if guard is not None else nullcontext()
        self._saved = reserve
        self._calls_seen = 0
        self._seen: float | None = None  # when was looked last

    @property
    def calls(self) -> int:
        """How many there have been."""
        # the count's next number, without taking it
        return int(repr(self._calls)[len("count(") : -1])

    def try_take(self, now: float) -> bool:
        """Whether one extra request may go now; if so, it is taken from the budget."""
        with self._guard:
            calls = self.calls
            elapsed_s = 0.0 if self._seen is None else max(0.0, now - self._seen)
            self._saved = min(
                self.reserve,
                self._saved + self.share * (calls - self._calls_seen) + self.per_s * elapsed_s,
            )
            self._calls_seen = calls
            self._seen = now if self._seen is None else max(now, self._seen)
            if self._saved < 1.0:
                self.refused += 1
                return False
            self._saved -= 1.0
            self.taken += 1
            return True

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of the calls and {self.per_s:g} a second, "
            f"{self.taken} taken and {self.refused} refused so far"
        )


@dataclass(frozen=True)
class RetryPolicy:
    """When a call is tried again. See the file's head.

    attempts_max  attempts that may have reached a server, the first included; 1: no retry of those
    unsent_max    attempts that reached nobody, the first included; 1: no failover at all, and calls
                  of a named server do not wait for it; None: as many as the deadline allows
    attempt_s     how long one attempt may take, where that is less than what the call has left;
                  None: all of it
    backoff       between attempts

    Raises ConfigError for bounds that allow no attempt.
    """

    attempts_max: int = ATTEMPTS_MAX
    unsent_max: int | None = None
    attempt_s: float | None = None
    backoff: Backoff = RETRY_BACKOFF

    def __post_init__(self) -> None:
        if not is_count(self.attempts_max, 1) or not (
            self.unsent_max is None or is_count(self.unsent_max, 1)
        ):
            raise ConfigError(
                f"attempts_max={self.attempts_max!r}, unsent_max={self.unsent_max!r}: "
                "whole numbers from 1 on are allowed, "
                "where 1 means no retry; unsent_max may be None for as many as the deadline allows"
            )
        if self.attempt_s is not None and not (is_finite(self.attempt_s, 0.0) and self.attempt_s):
            raise ConfigError(
                f"attempt_s={self.attempt_s!r}: seconds above zero are allowed, "
                "or None for all that the call has"
            )

    def timeout_s(self, now: float, deadline: float) -> float | None:
        """For an attempt that begins now, of a call with that deadline (NEVER: none): in seconds,
        None for no limit.
        """
        left_s = max(0.0, deadline - now)
        if self.attempt_s is not None:
            left_s = min(left_s, self.attempt_s)
        return None if left_s == NEVER else left_s


# Of clients that look for what they ask elsewhere themselves: the first failure to reach a server
# is the end of a call.
AT_ONCE = RetryPolicy(unsent_max=1)


@dataclass(frozen=True)
class Retry(Generic[R]):
    """Try again, `delay_s` seconds from now, elsewhere than at `avoid` if possible; or at `only`,
    and nowhere else.
    """

    delay_s: float
    avoid: tuple[R, ...]
    only: R | None = None


@dataclass(frozen=True)
class GiveUp:
    """The error stands; the reason is for its text, "" where the error says it all."""

    reason: str


@dataclass(frozen=True)
class Attempt:
    """One failed attempt of a call, for the text of its final error."""

    where: str
    error: str  # the type's name


class RetryState(Generic[R]):
    """One call that has failed at least once: made at its first failure, so that the others pay
    nothing.

    `method` is for texts; `started` is when the call began.
    """

    def __init__(
        self, policy: RetryPolicy, budget: RetryBudget, random: Random, method: str, started: float
    ) -> None:
        # whose repeat it is: a call of a `once` method that may have run there
        self.only: R | None = None
        self.failures = 0
        self.waits = 0  # before another attempt
        self._lasting = 0  # failures that other attempts must end with, too
        # FAILURES_TOLD_MAX kinds of them, in the order they came first, and how many of each
        self._told: dict[Attempt, int] = {}
        self._policy = policy
        self._budget = budget
        self._random = random
        self._method = method
        self._started = started
        self._tried: tuple[R, ...] = ()
        self._sent = self._unsent = 0
        self.may_have_run = False  # in one of the attempts
        self.last_reason = ""  # what the last attempt failed with: the first line

    def decide(
        self,
        error: BaseException,
        route: R | None,
        now: float,
        deadline: float,
        is_idempotent: bool,
        is_once: bool = False,
    ) -> Retry[R] | GiveUp:
        """What follows this failure. `route` is where it happened, None where none was found;
        `deadline` NEVER: there is none.
        """
        is_new = route is not None and route not in self._tried
        self.record(error, route)
        if not is_retriable(error):
            return GiveUp("")
        if isinstance(error, MaybeExecuted | DeadlineExceeded) and not is_idempotent:
            if not is_once or isinstance(error, DeadlineExceeded):
                return GiveUp(
                    f"not retried: {self._method!r} may have run, and is not registered as "
                    "idempotent"
                )
            self.only = route
        if self.only is not None and isinstance(error, Stopping | UnknownService):
            return GiveUp(ONLY_THERE)
        if now >= deadline:
            return GiveUp("the deadline is over")
        if self._policy.unsent_max is not None and self._unsent >= self._policy.unsent_max:
            return GiveUp(
                f"given up after unsent_max={self._policy.unsent_max} attempts that reached nobody"
            )
        if self._lasting == self.failures and not is_new:
            return GiveUp("")  # no transport leads to any server there is, and the error says why
        if deadline == NEVER and isinstance(error, NotSent) and now - self._started >= UNSENT_S_MAX:
            return GiveUp(
                f"given up after {UNSENT_S_MAX:.0f} s: the call has no deadline of its own"
            )
        if self._sent >= self._policy.attempts_max:
            return GiveUp(f"given up after attempts_max={self._policy.attempts_max} attempts")
        delay_s = 0.0
        if not (is_new and isinstance(error, ELSEWHERE_AT_ONCE)):
            delay_s = self._policy.backoff.delay_s(self.waits + 1, self._random.random())
            if now + delay_s >= deadline:
                return GiveUp(
                    f"the deadline comes before the next attempt, which was due in {delay_s:.3f} s"
                )
            self.waits += 1
        if not isinstance(error, NotSent) and not self._budget.try_take(now):
            return GiveUp(f"not retried: the budget for retries is spent ({self._budget})")
        return Retry(delay_s, self._tried, self.only)

    def record(self, error: BaseException, route: R | None) -> None:
        """Remember a failure about which nothing is to be decided: of an attempt in a race that
        others go on with.
        """
        self.failures += 1
        self._lasting += isinstance(error, NoPath) and error.is_lasting
        failed = Attempt(str(route) if route is not None else "no server", type(error).__name__)
        if failed in self._told or len(self._told) < FAILURES_TOLD_MAX:
            self._told[failed] = self._told.get(failed, 0) + 1
        if route is not None and route not in self._tried:
            self._tried = (*self._tried, route)
        self.last_reason = str(error).partition("\n")[0]
        if isinstance(error, NotSent):
            self._unsent += 1
        else:
            self._sent += 1
            if not isinstance(error, DID_NOT_RUN):
                self.may_have_run = True

    def final_error(self, error: BaseException, gave_up: GiveUp, now: float) -> BaseException:
        """What the caller gets: the last error, whose first line now says how often, where and for
        how long it was tried.

        When an earlier attempt may have run, the last error may not claim the opposite: it becomes
        MaybeExecuted then.
        """
        if self.failures < 2 and not gave_up.reason:
            return error
        if self.may_have_run and isinstance(error, (NotSent, *DID_NOT_RUN)):
            final: BaseException = MaybeExecuted(self._text(str(error), gave_up, now))
            final.__cause__ = error
            return final
        if isinstance(error, RpcError):
            error.args = (self._text(str(error), gave_up, now), *error.args[1:])
        return error

    def _text(self, text: str, gave_up: GiveUp, now: float) -> str:
        places = [
            f"{one.error} at {one.where}" + (f" {count} times" if count > 1 else "")
            for one, count in self._told.items()
        ]
        others = self.failures - sum(self._told.values())
        if others:
            places.append(f"{others} more")
        times = "once" if self.failures == 1 else f"{self.failures} times"
        reason = f"; {gave_up.reason}" if gave_up.reason else ""
        first, newline, rest = text.partition("\n")
        return (
            f"{first} (tried {times} in {now - self._started:.3f} s: "
            f"{', '.join(places)}{reason}){newline}{rest}"
        )


def is_retriable(error: BaseException) -> bool:
    """Whether another attempt could end otherwise; False: the error is the answer."""
    return isinstance(error, RETRIABLE)
