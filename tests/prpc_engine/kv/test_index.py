import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prpc_engine.errors import BadArguments
from prpc_engine.kv import Constant, Sgd, SparseTable
from prpc_engine.kv.table.index import (
    CAPACITY_MIN,
    FULL_MAX,
    LOAD_MAX,
    SEGMENT_SHIFT,
    SEGMENT_SLOTS,
    KeyIndex,
)
from prpc_engine.kv.table.mix import mix64

INT64 = np.iinfo(np.int64)
key = st.one_of(st.integers(-5, 5), st.integers(INT64.min, INT64.max))
batch = st.lists(key, max_size=60).map(lambda keys: np.array(keys, np.int64))


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["look up", "insert", "remove"]), batch), max_size=12))
def test_it_behaves_as_a_dict_that_numbers_its_keys(steps: list[tuple[str, np.ndarray]]) -> None:
    index, model = KeyIndex(), dict[int, int]()
    for verb, keys in steps:
        if verb == "insert":
            fresh = np.setdiff1d(keys, np.fromiter(model, np.int64, len(model)))
            rows = np.arange(len(fresh)) + 1000 * len(model)
            index.insert(fresh, rows)
            model |= dict(zip(fresh.tolist(), rows.tolist(), strict=True))
        elif verb == "remove":
            there = np.array([each for each in set(keys.tolist()) if each in model], np.int64)
            index.remove(there)
            for each in there.tolist():
                del model[each]
        everything = np.concatenate([keys, np.fromiter(model, np.int64, len(model))])
        assert index.lookup(everything).tolist() == [
            model.get(each, -1) for each in everything.tolist()
        ]
        assert len(index) == len(model)


def test_keys_that_come_and_go_for_long_neither_grow_it_nor_slow_its_walks() -> None:
    index, step = KeyIndex(), 2000
    for begin in range(0, 100 * step, step):
        index.insert(np.arange(begin, begin + step), np.arange(step))
        if begin:
            index.remove(np.arange(begin - step, begin))
    assert len(index) == step
    assert index.capacity <= 16384
    assert index.lookup(np.arange(100 * step)).tolist() == [-1] * 99 * step + list(range(step))


def test_a_key_can_be_told_another_row() -> None:
    index = KeyIndex()
    index.insert(np.arange(500), np.arange(500))
    index.renumber(np.array([499, 7]), np.array([0, 1]))
    assert index.lookup(np.array([7, 8, 499])).tolist() == [1, 8, 0]


def test_a_key_that_comes_twice_in_a_batch_gets_one_row() -> None:
    index = KeyIndex()
    assert index.lookup_or_insert(np.array([7, 3, 7, 7, 3])).tolist() == [1, 0, 1, 1, 0]
    assert len(index) == 2


def test_zero_is_a_key_like_any_other_although_free_slots_hold_it() -> None:
    index = KeyIndex()
    assert index.lookup(np.array([0])).tolist() == [-1]
    assert index.lookup_or_insert(np.array([5, 0])).tolist() == [1, 0]
    assert index.lookup(np.array([0, 5, 1])).tolist() == [0, 1, -1]


def test_rows_stay_while_the_table_grows_and_the_load_stays_bounded() -> None:
    index = KeyIndex()
    keys = np.random.default_rng(3).permutation(100_000) * 4096 - 7
    rows = np.concatenate([index.lookup_or_insert(part) for part in np.array_split(keys, 37)])
    assert index.capacity > CAPACITY_MIN
    assert len(index) == 100_000 <= LOAD_MAX * index.capacity
    assert index.capacity <= 4 * len(index)
    np.testing.assert_array_equal(index.lookup(keys), rows)
    np.testing.assert_array_equal(np.sort(rows), np.arange(100_000))
    assert (index.lookup(keys + 1) == -1).all()


def test_a_large_index_grows_by_a_segment_at_a_time_and_loses_nobody_meanwhile() -> None:
    index, step = KeyIndex(), 3000
    keys = np.random.default_rng(5).permutation(400_000)
    for begin in range(0, len(keys), step):
        before = index.capacity
        index.insert(keys[begin : begin + step], np.arange(begin, min(begin + step, len(keys))))
        if before >= SEGMENT_SLOTS:
            assert index.capacity - before in (0, SEGMENT_SLOTS)
        some = keys[: begin + step : 97]
        assert index.lookup(some).tolist() == list(range(0, min(begin + step, len(keys)), 97))
    assert index.capacity >= 32 * SEGMENT_SLOTS
    np.testing.assert_array_equal(index.lookup(keys), np.arange(len(keys)))
    assert (index.lookup(keys + 400_000) == -1).all()


def test_removed_keys_of_many_segments_are_cleaned_away_while_others_come() -> None:
    index, step, present = KeyIndex(), 20_000, 100_000
    index.insert(np.arange(present), np.arange(present))
    capacity = index.capacity
    for begin in range(present, 12 * present, step):
        index.remove(np.arange(begin - present, begin - present + step))
        index.insert(np.arange(begin, begin + step), np.arange(step))
    assert index.capacity <= capacity + SEGMENT_SLOTS
    free = np.count_nonzero(index._table.array[:, 1] == -1)
    assert free > index.capacity * (1 - LOAD_MAX / 2 - 0.25)
    assert np.count_nonzero(index.lookup(np.arange(12 * present)) >= 0) == present


@pytest.fixture(scope="module")
def made_to_meet() -> np.ndarray:
    candidates = np.arange(1_200_000)
    numbers = mix64(candidates) >> np.uint64(SEGMENT_SHIFT)
    crowd = candidates[numbers & np.uint64(31) == 7]
    assert len(crowd) > SEGMENT_SLOTS
    return crowd


def test_keys_made_to_meet_in_one_segment_are_refused_and_the_others_stay(
    made_to_meet: np.ndarray,
) -> None:
    index, some = KeyIndex(), int(FULL_MAX * SEGMENT_SLOTS) - 100
    index.insert(made_to_meet[:some], np.arange(some))
    with pytest.raises(BadArguments, match="no chance"):
        index.insert(made_to_meet[some:], np.arange(some, len(made_to_meet)))
    assert index.lookup(made_to_meet).tolist() == list(range(some)) + [-1] * (
        len(made_to_meet) - some
    )
    index.insert(-np.arange(1, 100), np.arange(some, some + 99))
    assert len(index) == some + 99


def test_a_table_that_refuses_keys_is_as_it_was(made_to_meet: np.ndarray) -> None:
    table = SparseTable(1, Sgd(1.0), Constant())
    table.push(np.arange(-10, 0), np.ones((10, 1), np.float32))
    with pytest.raises(BadArguments, match="no chance"):
        table.push(made_to_meet, np.ones((len(made_to_meet), 1), np.float32))
    assert len(table) == len(table.columns()["values"]) == 10
    assert (table.pull(np.arange(-10, 0)) == -1).all()
    assert (table.push_pull(made_to_meet[:100], np.ones((100, 1), np.float32)) == -1).all()


def test_asking_for_present_keys_never_grows_it() -> None:
    index = KeyIndex()
    index.lookup_or_insert(np.arange(10))
    index.lookup_or_insert(np.tile(np.arange(10), 10_000))
    assert index.capacity == CAPACITY_MIN


def test_keys_that_share_their_slots_all_find_their_own() -> None:
    """The keys whose mixed value begins with the same bits:
    all start at one slot and have to walk.
    """
    candidates = np.arange(400_000)
    # of 1024 slots all want number 123
    crowd = candidates[mix64(candidates) >> np.uint64(54) == 123]
    assert 300 < len(crowd) < 500
    index = KeyIndex()
    rows = index.lookup_or_insert(crowd)
    assert rows.tolist() == list(range(len(crowd)))
    assert index.lookup(crowd).tolist() == rows.tolist()


def test_an_empty_batch_is_no_trouble() -> None:
    index = KeyIndex()
    assert index.lookup(np.array([], np.int64)).tolist() == []
    assert index.lookup_or_insert(np.array([], np.int64)).tolist() == []
