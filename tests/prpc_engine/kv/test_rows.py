import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.kv.table.duplicates import sum_duplicates, unique
from prpc_engine.kv.table.rows import HUGE_PAGE_BYTES, GrowingRows
from prpc_engine.kv.table.storage import storage_dtype


def test_growing_rows_keep_what_was_in_them() -> None:
    rows = GrowingRows(2)
    for i in range(1000):
        rows.extend(1000)[:] = i
    assert len(rows) == 1_000_000
    assert rows.nbytes == 8_000_000 > HUGE_PAGE_BYTES
    np.testing.assert_array_equal(
        rows.array[:, 1], np.repeat(np.arange(1000, dtype=np.float32), 1000)
    )


def test_who_kept_a_view_has_the_rows_as_they_were() -> None:
    rows = GrowingRows(1)
    rows.extend(1000)[:] = 1
    kept = rows.array
    rows.extend(HUGE_PAGE_BYTES)
    rows.array[:] = 2
    del rows
    gc.collect()
    assert kept.tolist() == [[1]] * 1000


def test_rows_that_find_no_room_leave_all_as_it_was() -> None:
    rows = GrowingRows(1)
    rows.extend(3)[:] = 7
    with pytest.raises(MemoryError, match="no room for"):
        rows.extend(2**46)  # more than there are addresses, whatever the kernel promises
    assert rows.array.tolist() == [[7]] * 3
    assert len(rows.extend(1)) == 1


def test_truncated_rows_are_room_again() -> None:
    rows = GrowingRows(1, np.int64)
    rows.extend(5)[:] = 1
    rows.truncate(2)
    rows.extend(1)[:] = 3
    assert rows.array[:, 0].tolist() == [1, 1, 3]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_what_is_scattered_is_gathered_rounded_to_the_dtype(name: str) -> None:
    rows, dtype = GrowingRows(3, storage_dtype(name)), storage_dtype(name)
    rows.extend(100)[:] = 0
    values = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)
    where = np.arange(90, 0, -9)
    rows.scatter(where, values)
    gathered = rows.gather(where)
    assert gathered.dtype == np.float32
    np.testing.assert_array_equal(gathered, values.astype(dtype).astype(np.float32))
    assert not rows.gather(where - 1).any()


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_summing_duplicates_keeps_each_keys_total(keys: list[int]) -> None:
    grads = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    different, sums = sum_duplicates(np.array(keys, np.int64), grads)
    assert sorted(different.tolist()) == sorted(set(keys))
    for key, total in zip(different.tolist(), sums, strict=True):
        np.testing.assert_array_equal(
            total, sum(grads[i] for i, each in enumerate(keys) if each == key)
        )


@pytest.mark.parametrize("keys", [[1, 5, 9], [9, 1, 5], []])
def test_keys_without_repeats_are_passed_on_untouched(keys: list[int]) -> None:
    array, grads = np.array(keys, np.int64), np.ones((len(keys), 2), np.float32)
    assert sum_duplicates(array, grads) == (array, grads)
    assert unique(array) == (array, None)


def test_repeated_keys_can_be_found_again() -> None:
    keys, which = unique(np.array([5, 9, 5]))
    assert which is not None
    assert keys[which].tolist() == [5, 9, 5]
    assert keys.tolist() == [5, 9]
