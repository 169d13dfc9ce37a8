"""Histogram, AUC and TopK against the plain definitions of what they estimate, within the errors
they state.
"""

from __future__ import annotations

import math
import random as random_module
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prpc_engine.accumulator import AUC, Histogram, TopK
from prpc_engine.accumulator.aggregator import restored
from prpc_engine.errors import BadArguments, ConfigError

QUANTILES = [0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0]


def quantile(values: np.ndarray, q: float) -> float:
    return float(np.sort(values)[int(q * (len(values) - 1))])


@pytest.mark.parametrize("relative_error", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("shape", ["uniform", "lognormal", "pareto", "normal", "small ints"])
def test_every_quantile_is_within_the_relative_error(
    relative_error: float, shape: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = {
        "uniform": random.uniform(0, 1e6, 5000),
        "lognormal": random.lognormal(0, 3, 5000),
        "pareto": random.pareto(0.8, 5000) + 1,
        "normal": random.normal(0, 1, 5000),
        "small ints": random.integers(-3, 4, 5000).astype(float),
    }[shape]
    parts = [Histogram(relative_error, buckets_max=1 << 16) for _ in range(3)]
    for part, some in zip(parts, np.array_split(values, 3), strict=True):
        part.merge_values(some.tolist())
    one = parts[0]
    one.merge_aggregator(parts[1])
    one.merge_aggregator(parts[2])
    assert not one.collapsed
    for q in QUANTILES:
        true = quantile(values, q)
        assert abs(one.quantile(q) - true) <= relative_error * abs(true) * (1 + 1e-9), q
    assert one.count == 5000
    assert one.mean == pytest.approx(values.mean())


@settings(max_examples=200)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_single_value_of_any_size_is_its_own_quantile(value: float) -> None:
    one = Histogram(1e-4)
    one.merge_value(one.check(value))
    assert one.quantile(0.5) == value


def test_too_many_buckets_collapse_at_the_small_end_and_the_large_end_stays_right() -> None:
    values = np.logspace(-30, 30, 3000)
    one = Histogram(0.01, buckets_max=500)
    one.merge_value(one.check(values))
    assert len(one.positive) == 500
    assert one.collapsed == 2500  # each has a bucket of its own, and 500 of those are exact
    assert one.count == 3000
    for q in (0.95, 0.99, 1.0):
        assert one.quantile(q) == pytest.approx(quantile(values, q), rel=0.01)


@pytest.mark.parametrize("relative_error", [1e-4, 1e-3, 1e-2, 1e-1])
def test_one_value_far_away_takes_nothing_from_the_error_of_the_others(
    relative_error: float, seed: int
) -> None:
    latencies_s = np.append(
        np.random.default_rng(seed).lognormal(math.log(0.0009), 1, 50_000), 3600.0
    )
    one = Histogram(relative_error)
    for some in np.array_split(latencies_s, 7):
        one.merge_values(some.tolist())
    assert not one.collapsed
    for q in QUANTILES:
        true = float(np.quantile(latencies_s, q, method="lower"))
        assert one.quantile(q) == pytest.approx(true, rel=relative_error * (1 + 1e-9)), q


@pytest.mark.slow
@pytest.mark.parametrize("relative_error", [1e-4, 1e-3, 1e-2, 1e-1, 0.5])
def test_36_powers_of_ten_without_a_gap_have_the_error_asked_for(relative_error: float) -> None:
    values = np.logspace(-18, 18, 1_000_000)
    one = Histogram(relative_error)
    one.merge_value(one.check(values))
    assert not one.collapsed
    for q in QUANTILES:
        true = float(np.quantile(values, q, method="lower"))
        assert one.quantile(q) == pytest.approx(true, rel=relative_error * (1 + 1e-9)), q


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(-60, 60), max_size=30), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_what_has_collapsed_is_counted_the_same_in_any_order(
    parts: list[list[int]], random: random_module.Random
) -> None:
    def merged(of: list[list[int]]) -> Histogram:
        one = Histogram(0.3, buckets_max=16)
        for part in of:
            other = Histogram(0.3, buckets_max=16)
            other.merge_values([math.copysign(2.0 ** abs(number), number) for number in part])
            one.merge_aggregator(restored("histogram", other.parameters(), other.serialize()))
        return one

    one, two = (
        merged([[number for part in parts for number in part]]),
        merged(random.sample(parts, len(parts))),
    )
    assert (one.buckets(), one.collapsed) == (two.buckets(), two.collapsed)
    # By definition: per sign, the values below the 16th largest bucket.
    beyond = 0
    for sign in (1, -1):
        numbers = Counter(
            abs(number) for part in parts for number in part if math.copysign(1, number) == sign
        )
        beyond += sum(count for _, count in sorted(numbers.items())[: max(0, len(numbers) - 16)])
    assert one.collapsed == beyond


def test_a_histogram_says_in_every_text_how_many_values_have_collapsed() -> None:
    one = Histogram(0.01, buckets_max=16)
    one.merge_values([2.0**exponent for exponent in range(20)])
    assert one.collapsed == 4
    for text in (str(one), repr(one), one.try_to_string()):
        assert "COLLAPSED=4 (quantiles of these are not within 0.01: raise buckets_max)" in str(
            text
        )
    assert "COLLAPSED" not in str(Histogram(0.01))


def test_a_quantile_outside_of_0_to_1_is_refused() -> None:
    with pytest.raises(BadArguments, match=r"quantile\(99\): a number from 0 to 1"):
        Histogram().quantile(99)
    with pytest.raises(ConfigError, match="relative_error=0"):
        Histogram(0)


# -- AUC -------------------------------------------------------------------------------------------


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """By its definition, over all pairs."""
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.floats(-2, 2).map(lambda score: round(score, 1))),
        max_size=60,
    )
)
def test_the_auc_of_few_scores_is_exact(pairs: list[tuple[int, float]]) -> None:
    one = AUC()
    if pairs:
        one.merge_values([one.check(pair) for pair in pairs])
    labels, scores = (
        np.array([label for label, _ in pairs]),
        np.array([score for _, score in pairs]),
    )
    if not 0 < labels.sum() < len(labels):
        assert math.isnan(one.value)
        assert str(one) == "N/A"
    else:
        assert one.value == pytest.approx(auc(labels, scores), abs=1e-12)
        assert one.error_bound == 0


@pytest.mark.parametrize("bins", [4, 64, 4096])
def test_the_auc_of_many_scores_is_within_the_bound_it_states(bins: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, 3000)
    scores = random.normal(0.5 + 0.1 * labels, 0.3)  # some lie outside of 0 to 1
    one = AUC(distinct_max=100, bins=bins)
    for some in np.array_split(np.arange(3000), 7):
        part = AUC(distinct_max=100, bins=bins)
        part.merge_value(part.check((labels[some], scores[some])))
        one.merge_aggregator(part)
    assert one.binned
    assert one.error_bound > 0
    assert abs(one.value - auc(labels, scores)) <= one.error_bound + 1e-12
    assert (one.negatives, one.positives) == ((labels == 0).sum(), labels.sum())
    assert "+-" in str(one)


def test_what_is_no_example_is_refused() -> None:
    for bad in (
        0.5,
        (2, 0.5),
        (1, math.nan),
        (1, "x"),
        (np.array([0, 1]), np.array([0.5])),
        (np.array([0, 3]), np.zeros(2)),
    ):
        with pytest.raises(BadArguments, match="an auc counter"):
            AUC().check(bad)
    with pytest.raises(ConfigError, match="low below high"):
        AUC(low=1.0, high=0.0)


# -- TopK ------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.integers(1, 6), st.lists(st.lists(st.integers(0, 12), max_size=40), min_size=1, max_size=6)
)
def test_every_true_count_is_within_the_range_told_and_heavy_keys_are_never_missed(
    capacity: int, parts: list[list[int]]
) -> None:
    one = TopK(capacity)
    for part in parts:
        other = TopK(capacity)
        other.merge_values([other.check(key) for key in part])
        one.merge_aggregator(other)
    true = Counter(key for part in parts for key in part)
    total = sum(true.values())
    assert one.total == total
    assert one.error_bound <= total / (capacity + 1)
    assert len(one.counts) <= capacity
    kept = {hit.key: hit for hit in one.top(capacity)}
    for key, count in true.items():
        if key in kept:
            assert kept[key].count_min <= count <= kept[key].count_max
        else:
            assert count <= one.error_bound


def test_the_top_of_a_long_tail(seed: int) -> None:
    random = np.random.default_rng(seed)
    keys = random.zipf(1.5, 20_000).tolist()
    one = TopK(100)
    for at in range(0, len(keys), 1000):
        one.merge_values([one.check(key) for key in keys[at : at + 1000]])
    best = [key for key, _ in Counter(keys).most_common(3)]
    assert [hit.key for hit in one.top(3)] == best


def test_pairs_count_for_many() -> None:
    one = TopK()
    one.merge_values([one.check(("a", 5)), one.check("b"), one.check("a")])
    assert one.top(2) == [("a", 6, 6), ("b", 1, 1)]
    assert str(one) == "a: 6, b: 1"
    for bad in (("a", 0), ("a", 1.5), 2.5, None, "x" * 2000):
        with pytest.raises(BadArguments, match="a topk counter"):
            one.check(bad)
