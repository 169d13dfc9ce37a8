"""The laws that all aggregators keep, and what each of the simple ones answers."""

from __future__ import annotations

import math
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
from prpc_engine.accumulator.aggregator import make, restored
from prpc_engine.archive import Decoder, encode
from prpc_engine.errors import BadArguments, ConfigError

whole = st.integers(-1000, 1000)
# Sixteenths add up exactly, in any order.
sixteenths = whole.map(lambda number: number / 16)
LAWS: dict[str, tuple[Callable[[], Aggregator], st.SearchStrategy[Any]]] = {
    "sum": (Sum, whole | sixteenths),
    "sum of large ints": (Sum, st.integers()),
    "sum of arrays": (Sum, st.lists(whole, min_size=3, max_size=3).map(np.array)),
    "avg": (Avg, whole | sixteenths),
    "max": (Max, whole | sixteenths),
    "min": (Min, whole | sixteenths),
    "max of arrays": (Max, st.lists(sixteenths, min_size=2, max_size=2).map(np.array)),
    "keyed_avg": (KeyedAvg, st.tuples(st.sampled_from(["a", b"a", 3, ""]), whole)),
    "histogram": (Histogram, sixteenths),
    "collapsing histogram": (lambda: Histogram(buckets_max=16), sixteenths),
    "exact auc": (AUC, st.tuples(st.integers(0, 1), sixteenths)),
    "binned auc": (lambda: AUC(distinct_max=3, bins=8), st.tuples(st.integers(0, 1), sixteenths)),
    "topk": (TopK, st.sampled_from("abcdef")),
}


def plain(value: Any) -> Any:
    """A state that can be compared: arrays as lists, columns in order."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def same(one: Aggregator, two: Aggregator) -> bool:
    if isinstance(one, Histogram) and isinstance(two, Histogram):
        return (one.buckets(), one.collapsed, one.count, one.total) == (
            two.buckets(),
            two.collapsed,
            two.count,
            two.total,
        )
    if isinstance(one, KeyedAvg) and isinstance(two, KeyedAvg):
        return one.sums == two.sums and one.overflow == two.overflow
    if isinstance(one, TopK) and isinstance(two, TopK):
        return one.counts == two.counts and one.total == two.total
    return bool(plain(one.serialize()) == plain(two.serialize()))


def of(law: Aggregator, values: list[Any]) -> Aggregator:
    one = law.fresh()
    checked = [one.check(value) for value in values]
    if checked:
        one.merge_values(checked)
    return one


@pytest.mark.parametrize("name", LAWS)
def test_merging_in_any_grouping_and_order_gives_what_one_alone_would_have(name: str) -> None:
    make_law, values = LAWS[name]

    @settings(max_examples=60)
    @given(
        st.lists(st.lists(values, max_size=8), min_size=1, max_size=5),
        st.randoms(use_true_random=False),
    )
    def check(parts: list[list[Any]], random: Any) -> None:
        alone = of(make_law(), [value for part in parts for value in part])
        shuffled = list(parts)
        random.shuffle(shuffled)
        merged = make_law()
        for part in shuffled:
            merged.merge_aggregator(of(make_law(), part))
        assert same(alone, merged)
        assert alone.try_to_string() == merged.try_to_string() or isinstance(alone, KeyedAvg)

    check()


@pytest.mark.parametrize("name", LAWS)
def test_a_state_comes_back_from_the_wire_as_it_was(name: str) -> None:
    make_law, values = LAWS[name]

    @settings(max_examples=30)
    @given(st.lists(values, max_size=20))
    def check(given_values: list[Any]) -> None:
        one = of(make_law(), given_values)
        two = restored(one.kind, one.parameters(), Decoder().decode(*encode(one.serialize())))
        assert same(one, two)
        assert str(one) == str(two)

    check()


@pytest.mark.parametrize("name", LAWS)
def test_one_that_saw_nothing_says_so_and_changes_nothing(name: str) -> None:
    make_law, _ = LAWS[name]
    one = make_law()
    one.merge_aggregator(make_law())
    assert str(one) == ("0" if name.startswith("sum") else "N/A")


@settings(max_examples=300)
@given(
    st.sampled_from(["sum", "avg", "max", "min", "keyed_avg", "timer", "histogram", "auc", "topk"]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=3)
        | st.just(np.arange(3))
        | st.just(np.zeros(2)),
        lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple),
        max_leaves=12,
    ),
)
def test_a_state_that_is_none_is_refused_or_harmless(kind: str, state: Any) -> None:
    try:
        one = restored(kind, {}, state)
    except BadArguments:
        return
    assert isinstance(str(one), str)


# -- numbers ---------------------------------------------------------------------------------------


def test_a_sum_of_ints_is_exact_however_large() -> None:
    one = of(Sum(), [1 << 100, 1, -(1 << 99)])
    assert one.value == (1 << 100) + 1 - (1 << 99)  # type: ignore[attr-defined]


def test_max_knows_negative_numbers() -> None:
    assert of(Max(), [-5.0, -2.5]).value == -2.5  # type: ignore[attr-defined]
    assert of(Min(), [-5.0, -2.5]).value == -5.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("law", [Max(), Min(), Timer(), Histogram()], ids=lambda law: law.kind)
def test_nan_is_refused_where_it_would_make_the_answer_depend_on_the_order(law: Aggregator) -> None:
    with pytest.raises(BadArguments, match=r"NaN|finite"):
        law.check(math.nan)
    with pytest.raises(BadArguments, match=r"NaN|finite"):
        law.check(np.float32("nan"))


def test_numpy_numbers_and_bools_are_numbers_and_text_is_not() -> None:
    assert of(Sum(), [np.int8(100), np.int8(100), True, np.float32(0.5)]).value == 201.5  # type: ignore[attr-defined]
    for bad in ("1", None, 1j, [1], np.array(["a"])):
        with pytest.raises(BadArguments, match="a sum counter takes"):
            Sum().check(bad)


def test_arrays_are_added_in_wide_types_and_element_by_element() -> None:
    one = of(Sum(), [np.array([100, 1], np.int8)] * 2)
    assert one.value.tolist() == [200, 2]  # type: ignore[attr-defined]
    assert of(Avg(), [np.array([1.0, 3.0]), np.array([2.0, 5.0])]).value.tolist() == [1.5, 4.0]  # type: ignore[attr-defined]
    assert of(Max(), [np.array([1, 3]), np.array([2, 0])]).value.tolist() == [2, 3]  # type: ignore[attr-defined]


def test_an_array_that_was_written_may_be_changed_by_its_owner() -> None:
    one, array = Sum(), np.zeros(2)
    one.merge_value(one.check(array))
    array += 7
    assert one.value.tolist() == [0, 0]


@pytest.mark.parametrize("law", [Sum, Avg, Max, Min])
def test_the_first_value_decides_the_shape_and_fresh_ones_keep_it(law: type[Any]) -> None:
    one = of(law(), [np.zeros(3)])
    for bad in (1.0, np.zeros(4), np.zeros((3, 1))):
        with pytest.raises(BadArguments, match=r"counter of arrays of shape \(3,\) cannot take"):
            one.fresh().check(bad)
    with pytest.raises(BadArguments, match="counter of numbers cannot take an array of shape"):
        of(law(), [1]).check(np.zeros(3))


def test_a_keyed_average_has_a_mean_for_each_key_and_a_bound_on_their_number() -> None:
    one = KeyedAvg(keys_max=2)
    one.merge_values([("a", 1), ("b", 2.0), ("a", 3), ("c", 10), ("d", 20)])
    assert one.value == {"a": 2.0, "b": 2.0}
    assert one.overflow == (30, 2)
    assert str(one) == '{"a": 2.0, "b": 2.0} (and 2 values under further keys)'
    for bad in (("a", "b"), 3, (1.5, 1), (1 << 64, 1), ("a", 1, 2)):
        with pytest.raises(BadArguments, match="keyed_avg"):
            one.check(bad)


@settings(max_examples=100)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=1, max_size=6))
def test_a_timer_has_the_moments_of_all_values(parts: list[list[float]]) -> None:
    values = np.array([value for part in parts for value in part])
    one = Timer()
    for part in parts:
        one.merge_aggregator(of(Timer(), part))
    scale = float(np.abs(values).max()) + 1e-300
    tiny = 1e-300  # squares of what is below 1e-150 have lost bits, or all
    assert one.count == len(values)
    assert (one.minimum, one.maximum) == (values.min(), values.max())
    assert one.mean == pytest.approx(values.mean(), abs=1e-9 * scale)
    assert one.variance == pytest.approx(values.var(), abs=1e-9 * scale**2 + tiny)
    assert one.sum_of_squares == pytest.approx(
        float((values**2).sum()), rel=1e-9, abs=1e-9 * scale**2 + tiny
    )


def test_the_variance_of_a_timer_survives_values_that_hardly_differ() -> None:
    values = [1e6 + microseconds * 1e-6 for microseconds in range(8)]
    one = Timer()
    for value in values:
        one.merge_value(value)
    assert one.variance == pytest.approx(5.25e-12, rel=1e-3)


def test_a_timer_is_told_as_it_always_was() -> None:
    assert str(of(Timer(), [1.0, 3.0])) == "TOTAL=4 COUNT=2 MEAN=2 VARIANCE=1 MIN=1 MAX=3"


# -- kinds -----------------------------------------------------------------------------------------


class Product(Aggregator, kind="product"):
    """The example of aggregator.py."""

    def __init__(self) -> None:
        self.value = 1

    def merge_value(self, value: int) -> None:
        self.value *= value

    def merge_aggregator(self, other: Product) -> None:
        self.value *= other.value

    def serialize(self) -> int:
        return self.value

    def deserialize(self, state: Any) -> None:
        self.value = int(state)

    def try_to_string(self) -> str:
        return str(self.value)


def test_a_class_of_ones_own_is_known_by_its_name() -> None:
    assert isinstance(make("product", {}), Product)
    assert of(Product(), [2, 3]).serialize() == 6


def test_a_kind_that_nobody_defined_here_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        BadArguments,
        match=r"no aggregator of kind 'os\.system' is known .* product, .*sum, "
        r".*no code comes over the wire",
    ):
        make("os.system", {})
    with pytest.raises(BadArguments, match="cannot be made with"):
        make("topk", {"capacity": -1})
    with pytest.raises(BadArguments, match="cannot be made with"):
        make("topk", {"size": 1})


def test_two_classes_cannot_have_one_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'sum' is prpc_engine\.accumulator\.numeric\.Sum already"
    ):
        type("Other", (Product,), {}, kind="sum")


@pytest.mark.parametrize("parameters", [None, [], "window"])
def test_parameters_from_a_peer_that_are_no_dict_are_refused(parameters: Any) -> None:
    with pytest.raises(BadArguments, match=f"'sum' are a {type(parameters).__name__}, a dict"):
        make("sum", parameters)


def test_a_base_of_several_kinds_has_none_itself() -> None:
    class Base(Sum):
        pass

    class Derived(Base, kind="derived of a base"):
        pass

    assert isinstance(make("derived of a base", {}), Derived)
    assert type(make("sum", {})) is Sum
