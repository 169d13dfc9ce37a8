import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from prpc_engine.kv.table import partition

INT64 = np.iinfo(np.int64)
keys_of_any_kind = st_numpy.arrays(
    np.int64, st.integers(0, 200), elements=st.integers(INT64.min, INT64.max)
)


@given(keys_of_any_kind, st.integers(1, 300))
def test_every_key_belongs_to_exactly_one_partition(keys: np.ndarray, partitions: int) -> None:
    positions = partition.split(keys, partitions)
    assert len(positions) == partitions
    assert sorted(np.concatenate(positions)) == list(range(len(keys)))


@given(keys_of_any_kind, st.integers(1, 300))
def test_a_part_holds_its_owners_keys_in_the_order_they_came(
    keys: np.ndarray, partitions: int
) -> None:
    owners = partition.owner_of(keys, partitions)
    for owner, positions in enumerate(partition.split(keys, partitions)):
        assert (owners[positions] == owner).all()
        assert (np.diff(positions) > 0).all()


@given(keys_of_any_kind, st.integers(1, 20))
def test_merging_what_was_split_gives_it_back(keys: np.ndarray, partitions: int) -> None:
    rows = np.arange(3 * len(keys), dtype=np.float32).reshape(-1, 3)
    positions = partition.split(keys, partitions)
    merged = partition.merge(positions, [rows[each] for each in positions], len(keys), 3)
    np.testing.assert_array_equal(merged, rows)


def test_a_key_has_the_same_owner_alone_and_in_company() -> None:
    keys = np.arange(-50, 50)
    together = partition.owner_of(keys, 7)
    assert [partition.owner_of(keys[i : i + 1], 7)[0] for i in range(len(keys))] == list(together)


@pytest.mark.parametrize("partitions", [2, 3, 8])
@pytest.mark.parametrize("step", [1, 8, 1 << 40])
def test_regular_keys_spread_evenly(partitions: int, step: int) -> None:
    counts = [len(each) for each in partition.split(np.arange(30_000) * step, partitions)]
    expected = 30_000 / partitions
    # five standard deviations
    assert max(abs(count - expected) for count in counts) < 5 * expected**0.5


@given(st.integers(0, 1000), st.integers(1, 50))
def test_dense_ranges_cover_every_row_once_and_in_order(rows: int, partitions: int) -> None:
    ranges = partition.dense_ranges(rows, partitions)
    assert len(ranges) == partitions
    assert [row for begin, end in ranges for row in range(begin, end)] == list(range(rows))
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_small_dense_tensors_find_homes_on_all_partitions() -> None:
    assert {partition.dense_home(f"bias{i}", 4) for i in range(100)} == {0, 1, 2, 3}
