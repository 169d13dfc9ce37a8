"""Tensors of a call as what is sent, and back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

DTYPES = ("float32", "float64", "int64", "int8", "bool", "complex64", "uint16")


@pytest.fixture(scope="module")
def tensors() -> Any:
    """The module; it imports TensorFlow."""
    pytest.importorskip("tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'")
    from prpc_engine.tensorflow import tensors

    return tensors


def some() -> Any:
    """What TensorFlow gives to Python: arrays, numpy's scalars, and bytes."""
    of_numbers = st.sampled_from(DTYPES).flatmap(
        lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))
    )
    large = st.sampled_from([np.arange(5000.0), np.ones((70, 300), np.int8)])
    texts = st.just(np.array([b"one", b"\0"], object)) | st.binary(max_size=9)
    return of_numbers | of_numbers.map(lambda array: array[()]) | large | texts


@given(values=st.lists(some(), max_size=12))
def test_all_come_back_as_they_were_in_their_places(tensors: Any, values: list[Any]) -> None:
    for _ in range(2):  # what is kept of a layout says the same
        found = tensors.unpack_all(tensors.pack_all(values))
        assert len(found) == len(values)
        for before, after in zip(values, found, strict=True):
            expected = np.array(before, object) if isinstance(before, bytes) else before
            np.testing.assert_array_equal(expected, after)
            assert np.shape(expected) == after.shape
            assert np.asarray(expected).dtype == after.dtype
            assert after.flags.aligned


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 2)])
@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "int4"])
def test_types_that_numpy_lacks_keep_their_shape(tensors: Any, name: str, shape: Any) -> None:
    kind = tensors.dtypes.as_dtype(name).as_numpy_dtype
    before = np.full(shape, 1.0).astype(kind)
    for after in (
        *tensors.unpack_all(tensors.pack_all([before])),
        tensors.from_array(tensors.to_array(before), name),
    ):
        assert after.shape == shape
        assert after.dtype == kind
        assert (after == before).all()


def test_small_ones_are_one_block_and_large_ones_stay_what_they_are(tensors: Any) -> None:
    large = np.ones(100_000)
    packed = tensors.pack_all([np.arange(3), large, np.float32(1.0), np.arange(4, dtype=np.int8)])
    layout, block, other = packed
    assert layout
    assert block.nbytes == 24 + 4 + 4
    assert other is large
    assert tensors.pack_all([large, np.arange(3)])[0] == b"", "one small array needs no block"


def test_layouts_that_change_in_each_call_are_not_kept_for_ever(tensors: Any) -> None:
    for count in range(3 * tensors.LAYOUTS_MAX):
        values = [np.zeros(count % 4000, np.int8), np.zeros(3, np.int8)]
        assert [one.shape for one in tensors.unpack_all(tensors.pack_all(values))] == [
            (count % 4000,),
            (3,),
        ]
    assert len(tensors.JOINED) <= tensors.LAYOUTS_MAX
    assert len(tensors.CUTS) <= tensors.LAYOUTS_MAX


@pytest.mark.parametrize(
    "named",
    [
        [[0, "<f4", [2]], [0, "<f4", [1]]],  # twice the same place
        [[2, "<f4", [3]]],
        [[-1, "<f4", [3]]],
        [[0, "|O", [1]]],
        [[0, "nothing", [3]]],
        [[0, "<f4", [-3]]],
        [[0, "<f4", [1 << 40, 1 << 40]]],
        [[0, "<f4", [2]]],  # less than there is
        [[0, "<f4", [3]]],  # and one tensor is missing
        "no list",
    ],
)
def test_a_layout_that_lies_is_refused(tensors: Any, named: Any) -> None:
    packed = [msgspec.msgpack.encode([2, named]), np.zeros(12, np.uint8)]
    with pytest.raises(ValueError, match="layout"):
        tensors.unpack_all(packed)
