"""Weights as what has changed: exact, whatever the bits are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prpc_engine.errors import BadArguments
from prpc_engine.topics.deltas import Weights, apply


def nbytes(changes: dict[str, list[Any]]) -> int:
    return sum(
        part.nbytes for parts in changes.values() for part in parts if isinstance(part, np.ndarray)
    )


def test_of_weights_of_which_two_percent_change_a_tenth_goes() -> None:
    generator = np.random.default_rng(3)
    weights = {"dense": generator.standard_normal((1000, 500)).astype(np.float32)}
    published, there = Weights(weights), {"dense": weights["dense"].copy()}
    weights["dense"].flat[::50] += 1.0
    changes = published.changes(weights)
    published.advance(changes)
    assert nbytes(changes) * 10 < weights["dense"].nbytes
    apply(changes, there)
    np.testing.assert_array_equal(there["dense"], weights["dense"])
    assert published.changes(weights) == {}


def test_when_most_has_changed_the_whole_array_goes() -> None:
    published = Weights({"a": np.zeros(100, np.float16), "b": np.zeros(3)})
    changes = published.changes({"a": np.ones(100, np.float16), "b": np.zeros(3)})
    assert list(changes) == ["a"]
    assert nbytes(changes) == 200


@given(
    st.sampled_from(["f4", "f8", "f2", "i1", "u2", "c16", "?"]).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=3, max_side=6)).flatmap(
            lambda first: st.tuples(
                st.just(first), hnp.arrays(dtype, first.shape), hnp.arrays("?", first.shape)
            )
        )
    )
)
def test_any_array_becomes_the_other_bit_by_bit(arrays: tuple[Any, Any, Any]) -> None:
    first, second, mask = arrays
    second = np.where(mask, second, first)
    published, there = Weights({"w": first}), {"w": first.copy()}
    changes = published.changes({"w": second})
    published.advance(changes)
    apply(changes, there)
    for found in (there["w"], published.whole()["w"]):
        assert found.dtype == second.dtype
        assert found.tobytes() == second.tobytes()


def test_strides_do_not_matter_and_nan_that_stays_is_no_change() -> None:
    base = np.arange(12.0).reshape(3, 4)
    base[0, 0] = np.nan
    published = Weights({"w": base.T})
    assert published.changes({"w": base.T.copy()}) == {}
    changed = base.copy()
    changed[2, 3] = -1.0
    there = {"w": np.array(base.T, order="C")}
    apply(published.changes({"w": changed.T}), there)
    np.testing.assert_array_equal(there["w"], changed.T)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ([1], "dict of arrays"),
        ({"w": [1.0]}, r"weights\['w'\] is of type list: numpy arrays by names"),
        ({5: np.zeros(3)}, "the key 5 of type int: names"),
        ({"w\udc80": np.zeros(3)}, r"the key 'w\\udc80', which is no valid Unicode"),
        ({"other": np.zeros(3)}, "changed_since=0"),
        ({"w": np.zeros(4)}, "changed_since=0"),
        ({"w": np.zeros(3, np.float32)}, "changed_since=0"),
        ({"w": np.array([object()] * 3)}, "is an array of Python objects"),
    ],
)
def test_other_weights_are_refused_by_name(state: Any, text: str) -> None:
    with pytest.raises(BadArguments, match=text):
        Weights({"w": np.zeros(3)}).changes(state)


def test_changes_that_were_damaged_or_are_of_other_weights_change_nothing() -> None:
    published = Weights({"w": np.zeros(100)})
    new = np.zeros(100)
    new[[3, 7]] = 1.0
    changes = published.changes({"w": new})
    indices, bits, checksum = changes["w"]
    for bad in (
        {"w": [indices, bits, checksum + 1]},
        {"w": [indices + np.uint32(1000), bits, checksum]},
        {"w": [indices, bits.astype(np.uint32), checksum]},
        {"other": changes["w"]},
        {"w": [np.zeros(5)]},
        [1],
    ):
        there = {"w": np.zeros(100)}
        with pytest.raises(ValueError, match=r"weights"):
            apply(bad, there)
        assert not there["w"].any()
