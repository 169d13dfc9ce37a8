"""Values at the edges of what numbers can hold: each is counted exactly, or refused by a named
error that changes nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prpc_engine.accumulator import (
    AUC,
    Aggregator,
    Avg,
    Histogram,
    KeyedAvg,
    Max,
    Min,
    Sum,
    Timer,
    TopK,
)
from prpc_engine.accumulator.aggregator import restored
from prpc_engine.archive import Decoder, encode
from prpc_engine.errors import BadArguments

FLOAT_MAX = sys.float_info.max
NUMBERS: list[Any] = [
    *(
        0,
        1,
        -1,
        2**53 + 1,
        2**62,
        -(2**63),
        2**63,
        2**64 - 1,
        2**1000,
        10**308,
        10**400,
        -(10**400),
        1 << 8 * 1025,
    ),
    *(
        0.0,
        -0.0,
        1.5,
        5e-324,
        FLOAT_MAX,
        -FLOAT_MAX,
        FLOAT_MAX / 1.5,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *(
        np.uint64(2**64 - 1),
        np.float32("inf"),
        np.float16(1.5),
        np.longdouble(FLOAT_MAX) * 4,
        True,
        "1",
        None,
        1j,
    ),
    *(np.array(2**64 - 1, np.uint64), np.array(1.5), np.array(2**63 - 1), np.array(math.nan)),
]
ARRAYS: list[Any] = [
    *(np.array(pair, np.int64) for pair in ([2**62, 1], [2**63 - 1, -(2**63)], [2**53 + 1, 0])),
    *(np.array(pair) for pair in ([FLOAT_MAX, 1.0], [math.nan, math.inf], [2.0**53, -FLOAT_MAX])),
    *(
        np.array([2**63, 1], np.uint64),
        np.array([1, 2], np.uint64),
        np.array([np.longdouble(FLOAT_MAX) * 4, 1]),
    ),
    *(np.zeros(3), np.array(["a", "b"])),
]
KEYS: list[Any] = [
    "a",
    b"a",
    "\ud800",
    "\u00e9",
    "x" * 1024,
    "x" * 1025,
    b"x" * 1025,
    2**63 - 1,
    2**63,
    -(2**63),
    None,
    1.5,
]
number, key = st.sampled_from(NUMBERS), st.sampled_from(KEYS)
element = number | st.sampled_from(ARRAYS)
EXTREMES: dict[str, tuple[Callable[[], Aggregator], st.SearchStrategy[Any]]] = {
    "sum": (Sum, element),
    "avg": (Avg, element),
    "max": (Max, element),
    "min": (Min, element),
    "keyed_avg": (KeyedAvg, st.tuples(key, number)),
    "small keyed_avg": (lambda: KeyedAvg(1), st.tuples(key, number)),
    "timer": (Timer, number),
    "histogram": (Histogram, element),
    "small histogram": (lambda: Histogram(0.5, 16), element),
    "auc": (AUC, st.tuples(number, number)),
    "binned auc": (lambda: AUC(0, 2, -FLOAT_MAX / 2, FLOAT_MAX / 2), st.tuples(number, number)),
    "topk": (TopK, key | st.tuples(key, number)),
    "small topk": (lambda: TopK(1), key | st.tuples(key, number)),
}


def wire(one: Aggregator) -> Aggregator:
    """As it comes out of a message or a snapshot."""
    return restored(one.kind, one.parameters(), Decoder().decode(*encode(one.serialize())))


def told(one: Aggregator) -> tuple[Any, ...]:
    """All that it says."""
    return str(one), repr(one), str(one.serialize())


def accepted(one: Aggregator, value: Any) -> bool:
    """Whether it was counted; else it is as it was."""
    before = told(one)
    try:
        checked = value if type(value) in one.plain else one.check(value)
        one.merge_values([checked])
    except BadArguments:
        assert told(one) == before
        return False
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", EXTREMES)
def test_whatever_was_counted_and_merged_comes_back_from_the_wire(name: str) -> None:
    make_law, values = EXTREMES[name]

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.lists(values, max_size=4), min_size=1, max_size=4))
    def check(parts: list[list[Any]]) -> None:
        merged = make_law()
        for part in parts:
            one = make_law()
            for value in part:
                accepted(one, value)
            before = told(merged)
            try:
                merged.merge_aggregator(wire(one))
            except BadArguments:
                assert told(merged) == before
            assert told(wire(merged)) == told(merged)

    check()


COUNTS = st.sampled_from([0, 1, 2**62, 2**63 - 1, 2**63])
COLUMN = st.lists(
    st.sampled_from([-(2**63), -1, 0, 1, 800, 1 << 22, 2**62, 2**63 - 1]), max_size=3
).map(lambda numbers: np.array(numbers, np.int64))
SCORES = st.lists(st.sampled_from([0.0, 1.0, FLOAT_MAX]), max_size=3).map(
    lambda scores: np.array(scores, np.float64)
)
HOSTILE: dict[str, tuple[Callable[[], Aggregator], st.SearchStrategy[Any]]] = {
    "avg": (Avg, st.tuples(element, COUNTS)),
    "keyed_avg": (
        KeyedAvg,
        st.tuples(
            st.lists(key, min_size=1, max_size=1),
            st.lists(number, min_size=1, max_size=1),
            st.lists(COUNTS, min_size=1, max_size=1),
            st.tuples(number, COUNTS),
        ),
    ),
    "timer": (Timer, st.tuples(COUNTS, number, number, number, number)),
    "histogram": (
        lambda: Histogram(0.5),
        st.tuples(
            st.tuples(COLUMN, COLUMN),
            st.tuples(COLUMN, COLUMN),
            COUNTS,
            st.tuples(COUNTS, COUNTS),
            st.tuples(COUNTS, *[number] * 3),
        ),
    ),
    "auc": (AUC, st.tuples(st.booleans(), SCORES, COLUMN, COLUMN)),
    "topk": (
        lambda: TopK(2),
        st.tuples(st.lists(key, max_size=2), st.lists(COUNTS, max_size=2), COUNTS, COUNTS),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HOSTILE)
def test_states_that_a_lying_peer_sends_are_refused_or_merge_into_what_comes_back(
    name: str,
) -> None:
    make_law, states = HOSTILE[name]

    @settings(max_examples=300, deadline=None)
    @given(st.lists(states, min_size=2, max_size=3))
    def check(given_states: list[Any]) -> None:
        merged = make_law()
        for state in given_states:
            before = told(merged)
            try:
                merged.merge_aggregator(restored(merged.kind, merged.parameters(), state))
            except BadArguments:
                assert told(merged) == before
            assert told(wire(merged)) == told(merged)

    check()


@pytest.mark.parametrize(
    ("law", "value", "times"),
    [
        (Timer, FLOAT_MAX / 1.5, 2),
        (Histogram, FLOAT_MAX / 1.5, 2),
        (Sum, FLOAT_MAX / 1.5, 2),
        (Avg, FLOAT_MAX / 1.5, 2),
        (TopK, ("a", 2**62), 2),
        (KeyedAvg, ("a", FLOAT_MAX / 1.5), 2),
        (Avg, 10**400, 1),
        (Sum, 1 << 8 * 1025, 1),
        (Sum, np.array([2**62, 0]), 2),
        (Avg, np.array([FLOAT_MAX]), 2),
    ],
)
def test_the_write_that_would_overflow_is_refused_by_name(
    law: Callable[[], Aggregator], value: Any, times: int
) -> None:
    one = law()
    for _ in range(times - 1):
        assert accepted(one, value)
    before = told(one)
    with pytest.raises(BadArguments, match="would overflow"):
        one.merge_values([value if type(value) in one.plain else one.check(value)])
    assert told(wire(one)) == before


@pytest.mark.parametrize("law", [Sum, Max, Min, Avg])
def test_elements_that_int64_cannot_hold_are_refused_and_others_of_uint64_are_exact(
    law: Any,
) -> None:
    one = law()
    with pytest.raises(
        BadArguments, match=r"takes elements up to 2\*\*63 - 1, not 9223372036854775808"
    ):
        one.check(np.array([1, 2**63], np.uint64))
    one.merge_values([one.check(np.array([1, 2**63 - 1], np.uint64))])
    if law is not Avg:
        assert one.value.tolist() == [1, 2**63 - 1]


@pytest.mark.parametrize("law", [Sum, Max])
def test_an_array_without_dimensions_is_a_number_and_ints_after_it_are_exact(law: Any) -> None:
    one = law()
    one.merge_values([one.check(np.array(2**64 - 1, np.uint64))])
    assert one.value == 2**64 - 1
    one.merge_values([2**70])
    assert one.value == (2**70 + 2**64 - 1 if law is Sum else 2**70)


def test_floats_and_whole_numbers_that_no_float_holds_are_not_compared() -> None:
    one = Max()
    one.merge_value(one.check(np.array([2**53 + 1])))
    with pytest.raises(
        BadArguments, match="compares floats with whole numbers of more than 53 bits"
    ):
        one.merge_value(one.check(np.array([2.0**53])))
    assert one.value.tolist() == [2**53 + 1]


def test_a_sum_of_arrays_that_was_begun_anew_takes_arrays() -> None:
    one = Sum()
    one.merge_value(one.check(np.array([1, 2])))
    again = one.fresh()
    one.merge_aggregator(again)
    assert one.value.tolist() == [1, 2]
    back = wire(again)
    back.merge_aggregator(one)
    assert told(back) == told(one)
