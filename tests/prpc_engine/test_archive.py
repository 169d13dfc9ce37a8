"""Values to bytes and blocks, and back: equal, of the same types; what cannot be sent is named with
its place.
"""

from __future__ import annotations

import collections
import datetime
import fractions
import zoneinfo
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prpc_engine.archive import Decoder, encode, encode_arguments
from prpc_engine.archive.wire import BYTES_INLINE_MAX, DEPTH_MAX, INTEGER_BYTES_MAX
from prpc_engine.errors import BadArguments
from tests.examples import examples
from tests.prpc_engine.archives import (
    ONE_OF_EACH,
    arrive,
    deep,
    hashable,
    same,
    there_and_back,
    values,
)


@given(values)
@settings(max_examples=examples(300))
def test_nested_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(st.lists(values, max_size=5))
def test_arguments_come_back_as_a_list(arguments: list[Any]) -> None:
    assert same(arrive(*encode_arguments(tuple(arguments))), arguments)


@pytest.mark.parametrize("value", ONE_OF_EACH, ids=lambda value: type(value).__name__)
def test_one_of_each_kind_comes_back_alone_and_inside_of_others(value: Any) -> None:
    for wrapped in (value, [value], (value, value), {"k": value}, {(1, 2): [value]}):
        assert same(there_and_back(wrapped), wrapped)
    assert same(arrive(*encode_arguments((value, 1))), [value, 1])


@given(st.dictionaries(hashable, st.integers(), min_size=1, max_size=8))
def test_dicts_keep_their_keys_and_their_order_whatever_hashable_type_the_keys_have(
    value: dict[Any, int],
) -> None:
    assert same(there_and_back(value), value)


def test_keys_that_are_equal_but_for_their_type_stay_apart_from_what_they_are_not() -> None:
    back = there_and_back(
        {1: "int", (1,): "tuple", "1": "str", b"1": "bytes", frozenset({1}): "set"}
    )
    assert list(back.values()) == ["int", "tuple", "str", "bytes", "set"]


def test_one_value_in_many_places_comes_back_in_each() -> None:
    inner = (1, [2, np.arange(3)])
    assert same(there_and_back([inner, inner, {"k": inner}]), [inner, inner, {"k": inner}])


@pytest.mark.parametrize(
    "size", [0, BYTES_INLINE_MAX - 10, BYTES_INLINE_MAX, BYTES_INLINE_MAX + 1, 1_000_000]
)
def test_bytes_of_every_size_and_kind_arrive_as_bytes(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    for value in (data, bytearray(data), memoryview(data)):
        assert there_and_back(value) == data
        assert there_and_back([value, value]) == [data, data]
    _, blocks = encode(data)
    assert bool(blocks) == (size > BYTES_INLINE_MAX), "long ones are not copied through the encoder"


@pytest.mark.parametrize(
    "number",
    [
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63),
        -(1 << 63) - 1,
        1 << 8000,
        -(1 << 8000),
    ],
)
def test_integers_of_any_size_come_back_wherever_they_stand(number: int) -> None:
    for value in (
        number,
        [1, number],
        {"n": number},
        (number,),
        {number: 1},
        {number},
        [{"a": (1, [number, "x"])}],
    ):
        assert same(there_and_back(value), value)
    assert arrive(*encode_arguments((1, [number]))) == [1, [number]]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {"k": inner},
        lambda inner: frozenset([inner]),
        lambda inner: {(1,): inner},
    ],
    ids=["list", "tuple", "dict", "frozenset", "dict of other keys"],
)
def test_depth_up_to_the_bound_is_fine_and_no_further(wrap: Any) -> None:
    assert same(there_and_back(deep(wrap)), deep(wrap))
    for further in (2, 100):
        with pytest.raises(BadArguments, match="is nested deeper than 64 containers"):
            encode(deep(wrap, DEPTH_MAX + further))


# -- what cannot be sent ---------------------------------------------------------------------------


class Odd:
    """Of no type that a message holds."""


class OddInt(int):
    """A subclass would come back as its base: refused rather than changed."""


@pytest.mark.parametrize(
    "value",
    [
        Odd(),
        Odd,
        print,
        OddInt(3),
        collections.OrderedDict(a=1),
        fractions.Fraction(1, 3),
        iter([]),
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_with_their_name_and_place(value: Any) -> None:
    for wrapped, place in (
        (value, "the value"),
        ([0, value], r"the value\[1\]"),
        ({(1,): {"a": value}}, r"the value\[\(1,\)\]\['a'\]"),
        ({"k": (value,)}, r"the value\['k'\]\[0\]"),
    ):
        with pytest.raises(
            BadArguments,
            match=f"{place} is of type .*{type(value).__qualname__}.* cannot be sent; "
            "allowed are None.*register.*allow_pickle",
        ):
            encode(wrapped)
    with pytest.raises(BadArguments, match=r"argument 1 is of type"):
        encode_arguments((1, value))


def test_loops_too_long_integers_and_odd_keys_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadArguments, match="is nested deeper than 64 containers"):
        encode(loop)
    with pytest.raises(BadArguments, match="an integer of 1025 bytes, at most 1024 allowed"):
        encode(1 << 8 * INTEGER_BYTES_MAX)
    with pytest.raises(BadArguments, match=r"a key of the value is of type .*Odd"):
        encode({Odd(): 2})
    with pytest.raises(BadArguments, match=r"an item of the value is of type .*Odd"):
        encode({Odd()})
    with pytest.raises(BadArguments, match="not contiguous"):
        encode([memoryview(bytes(100))[::2]])
    for surrogate in ("\ud800", ["\ud800"], {"\ud800": 1}):
        with pytest.raises(BadArguments, match="cannot be put into a message"):
            encode(surrogate)


def test_a_time_zone_with_rules_of_its_own_is_refused_with_the_way_out() -> None:
    zone = zoneinfo.ZoneInfo("UTC")
    with pytest.raises(
        BadArguments,
        match=r"the value\[0\] cannot be sent as 'datetime': .*zoneinfo.ZoneInfo.*astimezone",
    ):
        encode([datetime.datetime(2013, 1, 1, tzinfo=zone)])


def test_a_decoder_forgets_its_blocks_and_goes_on_after_an_error() -> None:
    decoder = Decoder()
    body, blocks = encode(np.arange(3))
    with pytest.raises(ValueError, match="block 0 of 0"):
        decoder.decode(body, [])
    assert decoder.decode(body, list(blocks)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="block 0 of 0"):
        decoder.decode(body, [])


@pytest.mark.parametrize(
    "view",
    [
        memoryview(np.zeros((2, 3), np.uint8)),
        memoryview(np.zeros(3)),
        memoryview(np.zeros(())),
        memoryview(bytes(4)).cast("B", (2, 2)),
    ],
    ids=["2-D", "of floats", "0-D", "2-D bytes"],
)
def test_a_memoryview_that_would_arrive_flat_is_refused_with_what_to_send(view: memoryview) -> None:
    for value in (view, [1, view]):
        with pytest.raises(
            BadArguments, match=r"memoryview of shape \(.*flat bytes: send np.asarray"
        ) as caught:
            encode(value)
        assert ("the value[1]" in str(caught.value)) == (value is not view)
    assert same(there_and_back(np.asarray(view)), np.asarray(view))
