"""A second request where the answer is slow: within its budget and the deadline, and the first
answer wins.
"""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine import errors
from prpc_engine.client.hedge import (
    BUCKETS_PER_DOUBLING,
    HEDGE_DELAY_S_MIN,
    HEDGE_SHARE,
    SAMPLES_EVERY,
    SAMPLES_MAX,
    SAMPLES_MIN,
    HedgePolicy,
    Hedger,
    LatencyQuantile,
    Race,
)
from prpc_engine.client.retry import RetryBudget
from prpc_engine.rpc.call import NEVER
from tests.helpers import ManualClock

REMOTE = errors.RemoteError(
    "boom", type_name="ValueError", remote_message="boom", remote_traceback=""
)
UNLIMITED = 1e9


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_the_quantile_of_latencies_is_found_to_within_a_fifth(quantile: float, seed: int) -> None:
    random = Random(seed)
    samples = [random.lognormvariate(-7.0, 1.0) for _ in range(SAMPLES_MAX - 1)]
    tracker = LatencyQuantile(quantile)
    for sample in samples:
        tracker.observe(sample)
    # what the last look saw
    known = sorted(samples[: len(samples) // SAMPLES_EVERY * SAMPLES_EVERY])
    exact = known[math.ceil(quantile * len(known)) - 1]
    assert tracker.value_s is not None
    assert exact <= tracker.value_s <= exact * 2 ** (1 / BUCKETS_PER_DOUBLING) * 1.000001


def test_before_enough_answers_no_quantile_is_claimed() -> None:
    tracker = LatencyQuantile(0.95)
    for _ in range(SAMPLES_MIN - 1):
        tracker.observe(0.001)
    assert tracker.value_s is None
    tracker.observe(0.001)
    assert tracker.value_s is not None


def test_the_quantile_follows_when_all_becomes_slower() -> None:
    tracker = LatencyQuantile(0.95)
    for _ in range(100_000):
        tracker.observe(0.001)
    for _ in range(SAMPLES_MAX):
        tracker.observe(0.1)
    assert tracker.value_s is not None and 0.1 <= tracker.value_s <= 0.12


@given(latency_s=st.floats(0.0, 1e9))
def test_any_latency_is_counted(latency_s: float) -> None:
    tracker = LatencyQuantile(0.95)
    for _ in range(SAMPLES_MIN):
        tracker.observe(latency_s)
    assert tracker.value_s is not None
    assert tracker.value_s >= min(latency_s * 0.999999, 4096.0)


def hedger_of(
    delay_s: float | None = 0.05, hedges_max: int = 1, reserve: float = UNLIMITED
) -> Hedger:
    return Hedger(
        HedgePolicy(delay_s=delay_s, hedges_max=hedges_max), RetryBudget(HEDGE_SHARE, reserve, 0.0)
    )


def test_a_slow_answer_is_asked_for_elsewhere_and_the_first_answer_wins(clock: ManualClock) -> None:
    hedger = hedger_of(0.05)
    race: Race[str, str] = Race(hedger, NEVER)
    race.sent("call 1", "a", clock())
    assert race.next_at == clock() + 0.05
    clock.advance(0.04)
    assert race.hedge(clock()) is None
    clock.advance(0.02)
    assert race.hedge(clock()) == ("a",)
    race.sent("call 2", "b", clock())
    assert race.next_at == NEVER
    assert race.ended("call 2", None, clock.advance(0.01)) == ("call 1",)
    assert race.is_over
    assert race.ended("call 1", None, clock()) is None  # its late answer changes nothing
    assert (hedger.statistics().hedges, hedger.statistics().won) == (1, 1)


def test_a_quick_answer_needs_no_hedge(clock: ManualClock) -> None:
    hedger = hedger_of()
    race: Race[str, str] = Race(hedger, NEVER)
    race.sent("call 1", "a", clock())
    assert race.ended("call 1", None, clock()) == ()
    assert race.hedge(clock.advance(1.0)) is None
    assert (hedger.statistics().hedges, hedger.statistics().won) == (0, 0)


@pytest.mark.parametrize("error", [REMOTE, errors.BadArguments("x"), errors.Cancelled("x")])
def test_an_error_that_is_the_answer_ends_the_race(
    error: errors.RpcError, clock: ManualClock
) -> None:
    race: Race[str, str] = Race(hedger_of(0.0), NEVER)
    race.sent("call 1", "a", clock())
    assert race.hedge(clock()) == ("a",)
    race.sent("call 2", "b", clock())
    assert race.ended("call 1", error, clock()) == ("call 2",)


def test_one_attempt_failing_leaves_the_other_in_the_race_and_the_last_failure_ends_it(
    clock: ManualClock,
) -> None:
    race: Race[str, str] = Race(hedger_of(0.0), NEVER)
    race.sent("call 1", "a", clock())
    assert race.hedge(clock()) == ("a",)
    race.sent("call 2", "b", clock())
    assert race.ended("call 1", errors.MaybeExecuted("x"), clock()) is None
    assert not race.is_over
    assert race.ended("call 2", errors.MaybeExecuted("x"), clock()) == ()
    assert race.is_over


def test_a_call_has_at_most_so_many_hedges(clock: ManualClock) -> None:
    race: Race[str, str] = Race(hedger_of(0.1, hedges_max=2), NEVER)
    race.sent("call 1", "a", clock())
    assert race.hedge(clock.advance(0.1)) == ("a",)
    race.sent("call 2", "b", clock())
    assert race.hedge(clock.advance(0.1)) == ("a", "b")
    race.sent("call 3", "c", clock())
    assert race.hedge(clock.advance(9.0)) is None
    assert set(race.ended("call 1", None, clock()) or ()) == {"call 2", "call 3"}


def test_a_hedge_that_could_not_be_sent_leaves_the_race_as_it_was(clock: ManualClock) -> None:
    race: Race[str, str] = Race(hedger_of(0.1), NEVER)
    race.sent("call 1", "a", clock())
    assert race.hedge(clock.advance(0.1)) == ("a",)
    assert race.hedge(clock.advance(0.1)) is None
    assert race.ended("call 1", None, clock()) == ()


def test_no_hedge_is_sent_at_or_after_the_deadline(clock: ManualClock) -> None:
    race: Race[str, str] = Race(hedger_of(0.1), clock() + 0.1)
    race.sent("call 1", "a", clock())
    assert race.next_at == NEVER
    race = Race(hedger_of(0.1), clock() + 0.2)
    race.sent("call 1", "a", clock())
    assert race.hedge(clock.advance(0.2)) is None


def test_hedges_are_within_their_budget(clock: ManualClock) -> None:
    hedger = hedger_of(0.0, reserve=1.0)
    for _ in range(1000):
        hedger.budget.count_call()
        race: Race[str, str] = Race(hedger, NEVER)
        race.sent("call 1", "a", clock())
        if race.hedge(clock()) is not None:
            race.sent("call 2", "b", clock())
    assert hedger.hedges <= 1 + 1000 * HEDGE_SHARE
    assert hedger.hedges + hedger.refused == 1000


def test_without_a_fixed_delay_hedging_waits_for_the_quantile_and_hedges_about_its_share(
    seed: int, clock: ManualClock
) -> None:
    random = Random(seed)
    hedger = hedger_of(None)
    for _ in range(10_000):
        race: Race[str, str] = Race(hedger, NEVER)
        start = clock()
        race.sent("slow or not", "a", start)
        done = start + 0.004 * random.expovariate(1.0)
        if race.next_at < done:
            clock.now = race.next_at
            assert race.hedge(clock()) == ("a",)
            race.sent("hedge", "b", clock())
            clock.now = min(done, clock() + 0.004 * random.expovariate(1.0))
            race.ended("slow or not" if clock.now == done else "hedge", None, clock())
        else:
            clock.now = done
            race.ended("slow or not", None, clock())
    # The share stays near 5 %: what was cancelled is counted for as long as it took, or ever more
    # would be hedged.
    assert 0.01 <= hedger.hedges / 10_000 <= 0.09
    assert hedger.won > 0


def test_no_hedge_comes_sooner_than_it_is_worth(clock: ManualClock) -> None:
    hedger = hedger_of(None)
    assert hedger.delay_s is None
    for _ in range(SAMPLES_MIN):
        hedger.latencies.observe(1e-5)
    assert hedger.delay_s == HEDGE_DELAY_S_MIN


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"delay_s": -1.0}, "delay_s=-1"),
        ({"quantile": 1.0}, "quantile=1"),
        ({"hedges_max": 0}, "hedges_max=0"),
    ],
)
def test_a_hedge_policy_that_cannot_be_is_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        HedgePolicy(**settings)  # type: ignore[arg-type]
