"""Tables that do not keep all keys: who gets a row, and who loses it again."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.kv import Adagrad, Admission, Constant, Eviction, Sgd, SparseTable, Uniform
from prpc_engine.kv.table import admission, eviction
from prpc_engine.kv.table.admission import Doorkeeper


def table_with(**bounds: object) -> SparseTable:
    return SparseTable(1, Sgd(1.0), Constant(), **bounds)  # type: ignore[arg-type]


def push(table: SparseTable, *keys: int) -> None:
    table.push(np.array(keys, np.int64), np.ones((len(keys), 1), np.float32))


def there(table: SparseTable) -> list[int]:
    return sorted(table.keys().tolist())


def test_a_key_gets_its_row_with_the_push_that_is_its_third() -> None:
    table = table_with(admission=Admission(3))
    for _ in range(2):
        push(table, 5, 5, 6)
    assert len(table) == 0
    assert table.pull(np.array([5])).tolist() == [[0]]
    push(table, 5)
    assert there(table) == [5]
    assert table.pull(np.array([5])).tolist() == [[-1]]
    statistics = table.statistics()
    assert (statistics.keys_admitted, statistics.keys_refused, statistics.keys_evicted) == (1, 4, 0)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(-30, 30), max_size=40, unique=True), max_size=20))
def test_counts_are_never_too_low_before_they_age(batches: list[list[int]]) -> None:
    doorkeeper, exact = Doorkeeper(Admission(3, width_bits=8)), Counter[int]()
    for batch in batches:
        exact.update(batch)
        admitted = doorkeeper.admit(np.array(batch, np.int64))
        assert all(admitted[i] for i, key in enumerate(batch) if exact[key] >= 3)


def test_few_keys_that_came_once_get_in_with_a_million_seen() -> None:
    doorkeeper = Doorkeeper(Admission(2))
    admitted = [
        doorkeeper.admit(np.arange(begin, begin + 100_000)).mean()
        for begin in range(0, 1_000_000, 100_000)
    ]
    assert admitted[0] == 0
    assert max(admitted) < 0.15
    assert doorkeeper.admit(np.arange(100_000)).all()


def test_counts_age_so_that_keys_of_long_ago_do_not_fill_the_sketch() -> None:
    doorkeeper = Doorkeeper(Admission(2, width_bits=10))
    for begin in range(0, 1_000_000, 1000):
        doorkeeper.admit(np.arange(begin, begin + 1000))
    assert doorkeeper.admit(np.arange(-1000, 0)).mean() < 1


def test_a_full_table_makes_room_for_new_keys_with_those_unused_for_longest() -> None:
    table = table_with(eviction=Eviction(rows_max=4))
    for key in (1, 2, 3, 4):
        push(table, key)
    table.pull(np.array([1]))
    push(table, 2)
    push(table, 7, 8)
    assert there(table) == [1, 2, 7, 8]
    assert table.pull(np.array([1, 2, 3, 4, 7, 8]))[:, 0].tolist() == [-1, -2, 0, 0, -1, -1]
    assert table.statistics().keys_evicted == 2


def test_an_evicted_key_comes_back_as_a_fresh_one() -> None:
    table, fresh = (
        SparseTable(2, Adagrad(0.1), Uniform(0.1), eviction=Eviction(rows_max=1)) for _ in range(2)
    )
    ones = np.ones((1, 2), np.float32)
    for key in (5, 5, 6, 5):
        table.push(np.array([key]), ones)
    fresh.push(np.array([5]), ones)
    np.testing.assert_array_equal(table.pull(np.array([5])), fresh.pull(np.array([5])))


def test_admission_goes_on_from_its_count_when_a_key_was_evicted() -> None:
    table = table_with(admission=Admission(3), eviction=Eviction(rows_max=1))
    for key in (5, 5, 5, 6, 6, 6):
        push(table, key)
    assert there(table) == [6]
    push(table, 5)
    assert there(table) == [5]
    assert table.pull(np.array([5])).tolist() == [[-1]]


def test_a_full_table_makes_room_for_a_sixteenth_at_once() -> None:
    table = table_with(eviction=Eviction(rows_max=1000))
    push(table, *range(1000))
    push(table, 1000)
    assert len(table) == 1000 - 1000 // 16 + 1
    push(table, *range(2000, 2061))
    assert table.statistics().keys_evicted == 1000 // 16


def test_a_push_never_evicts_its_own_rows_and_refuses_what_does_not_fit() -> None:
    table = table_with(eviction=Eviction(rows_max=3))
    push(table, 1, 2, 3)
    push(table, 3, 2, 9, 8, 7)
    assert {2, 3} < set(there(table))
    assert len(table) == 3
    assert table.statistics().keys_refused == 2
    assert table.pull(np.array([2, 3]))[:, 0].tolist() == [-2, -2]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True), max_size=40))
def test_it_behaves_as_a_dict_that_drops_its_oldest(pushes: list[list[int]]) -> None:
    """rows_max below 32: then no more rows go than must, and which is told by the stamps, equal
    ones apart.
    """
    table, model = table_with(eviction=Eviction(rows_max=15)), dict[int, float]()
    for keys in pushes:
        push(table, *keys)
        now = set(there(table))
        assert now <= model.keys() | set(keys)
        assert len(now) == min(15, len(model.keys() | set(keys)))
        assert set(keys) <= now
        model = {key: model.get(key, 0.0) - (key in keys) for key in now}
        everything = np.arange(41)
        assert table.pull(np.array(sorted(now)))[:, 0].tolist() == [
            model[key] for key in sorted(now)
        ]
        absent = np.setdiff1d(everything, sorted(now))
        assert not table.pull(absent).any()


def test_rows_unused_for_so_many_steps_go() -> None:
    table = table_with(eviction=Eviction(ttl_steps=8))
    push(table, 1, 2)
    for _ in range(8):
        push(table, 2)
    assert there(table) == [1, 2]
    for _ in range(2):
        push(table, 3)
    assert there(table) == [2, 3]


def test_rows_unused_for_so_many_seconds_go_and_pulls_are_use() -> None:
    now = 1000.0
    table = table_with(eviction=Eviction(ttl_s=10.0), clock=lambda: now)
    push(table, 1, 2)
    now += 9
    table.pull(np.array([2]))
    now += 3
    push(table, 3)
    assert there(table) == [2, 3]


def test_an_idle_table_keeps_its_rows_and_a_pull_makes_an_expired_one_young() -> None:
    now = 1000.0
    table = table_with(eviction=Eviction(ttl_s=10.0), clock=lambda: now)
    push(table, 1, 2)
    now += 100
    assert there(table) == [1, 2]
    assert table.pull(np.array([2])).tolist() == [[-1]]
    push(table, 3)
    assert there(table) == [2, 3]


def test_before_rows_go_or_move_their_numbers_are_told() -> None:
    """What a checkpoint rests on: what it is told to keep, laid over what is there, are the rows as
    they were.
    """
    table = table_with(eviction=Eviction(rows_max=100))
    for key in range(100):
        table.push(np.array([key]), np.full((1, 1), key, np.float32))
    table.pull(np.arange(50, 100))
    was = table.columns()["values"][:, 0].copy()
    kept: dict[int, float] = {}

    def keep(rows: np.ndarray | None) -> None:
        assert rows is not None
        now = table.columns()["values"][:, 0]
        for row in set(rows.tolist()) - kept.keys():
            kept[row] = now[row]

    table.before_change = keep
    for key in range(1000, 1010):
        push(table, key)
    now = table.columns()["values"][:, 0].copy()
    for row, value in kept.items():
        if row < len(now):
            now[row] = value
    restored = np.concatenate([now, np.zeros(100 - len(now), np.float32)])
    for row in range(len(now), 100):
        restored[row] = kept[row]
    np.testing.assert_array_equal(restored, was)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: admission.from_spec({"min_count": 0}),
            "admission: min_count is 0; a whole number from 1 to 127",
        ),
        (
            lambda: admission.from_spec({"least": 3}),
            "admission has no setting 'least'; allowed: min_count, width_bits",
        ),
        (
            lambda: admission.from_spec(3),
            "admission is 3; a dict of its settings is allowed: min_count, width_bits",
        ),
        (lambda: eviction.from_spec({}), "none of rows_max, ttl_steps, ttl_s is given"),
        (
            lambda: eviction.from_spec({"ttl_s": 1, "ttl_steps": 1}),
            "ttl_steps and ttl_s are both given",
        ),
        (lambda: eviction.from_spec({"ttl_s": 0}), "ttl_s is 0; a finite number above 0"),
        (lambda: eviction.from_spec({"rows_max": 1.5}), "rows_max is 1.5; a whole number"),
    ],
)
def test_bad_bounds_are_refused_with_what_is_allowed(made: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made()  # type: ignore[operator]
    assert said in str(caught.value)


def test_no_bounds_are_no_bounds() -> None:
    assert admission.from_spec(None) is None
    assert eviction.from_spec(None) is None
    assert eviction.from_spec(Eviction(7).to_spec()) == Eviction(7)
    assert admission.from_spec(Admission(7).to_spec()) == Admission(7)
