import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import BadArguments
from prpc_engine.kv import Adagrad, Constant, DenseTable, Sgd, SparseTable, Uniform
from prpc_engine.kv.duplicates import sum_duplicates, unique
from prpc_engine.kv.rows import GrowingRows


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


# Sparse


def test_a_key_never_pushed_has_its_initial_row_and_takes_no_memory() -> None:
    table = SparseTable(3, Sgd(1.0), Uniform(0.1))
    keys = np.array([9, -4, 9])
    np.testing.assert_array_equal(table.pull(keys), Uniform(0.1).rows(keys, 3))
    assert len(table) == 0


def test_a_push_starts_from_the_initial_row() -> None:
    table = SparseTable(2, Sgd(1.0), Uniform(0.1))
    keys = np.array([5, 6])
    before = table.pull(keys)
    table.push(keys, floats([1, 2], [3, 4]))
    np.testing.assert_allclose(table.pull(keys), before - floats([1, 2], [3, 4]))
    assert sorted(table.keys()) == [5, 6]


def test_fresh_rows_are_equal_on_different_servers_whatever_came_before() -> None:
    one, other = SparseTable(4, Sgd(1.0), Uniform(0.1)), SparseTable(4, Sgd(1.0), Uniform(0.1))
    other.push(np.arange(5000), np.ones((5000, 4), np.float32))
    one.push(np.array([77777]), np.zeros((1, 4), np.float32))
    keys = np.array([77777, 88888])
    np.testing.assert_array_equal(one.pull(keys), other.pull(keys))


def test_the_gradients_of_one_key_are_summed_and_then_applied_once() -> None:
    together, apart = (SparseTable(2, Adagrad(0.1), Constant()) for _ in range(2))
    together.push(read_only(np.array([8, 3, 8])), read_only(floats([1, 0], [5, 5], [2, 1])))
    apart.push(np.array([3, 8]), floats([5, 5], [3, 1]))
    keys = np.array([3, 8])
    np.testing.assert_allclose(together.pull(keys), apart.pull(keys))


keys_and_grads = st.lists(st.tuples(st.integers(-20, 20), st.integers(-3, 3)), max_size=30)


@given(st.lists(keys_and_grads, max_size=6))
def test_it_behaves_as_a_dict_of_rows_under_sgd(pushes: list[list[tuple[int, int]]]) -> None:
    table, model = SparseTable(1, Sgd(1.0), Constant(0.5)), dict[int, float]()
    for push in pushes:
        keys = np.array([key for key, _ in push], np.int64)
        table.push(keys, np.array([[grad] for _, grad in push], np.float32).reshape(-1, 1))
        for key, grad in push:
            model[key] = model.get(key, 0.5) - grad
    assert set(table.keys().tolist()) == set(model)
    everything = np.arange(-20, 21)
    assert table.pull(everything)[:, 0].tolist() == [model.get(key, 0.5) for key in everything.tolist()]


def test_rows_and_their_state_survive_growth() -> None:
    grown, fresh = (SparseTable(2, Adagrad(0.1), Uniform(0.1)) for _ in range(2))
    grads = np.full((10, 2), 0.5, np.float32)
    for table in (grown, fresh):
        table.push(np.arange(10), grads)
    grown.push(np.arange(100, 50_100), np.ones((50_000, 2), np.float32))
    for table in (grown, fresh):
        table.push(np.arange(10), grads)
    np.testing.assert_array_equal(grown.pull(np.arange(10)), fresh.pull(np.arange(10)))
    assert len(grown) == 50_010


def test_push_pull_answers_with_the_new_rows_in_the_order_asked() -> None:
    table = SparseTable(1, Sgd(1.0), Constant())
    assert table.push_pull(np.array([4, 2, 4]), floats([1], [5], [1])).tolist() == [[-2], [-5], [-2]]


def test_what_was_pulled_does_not_change_with_later_pushes() -> None:
    table = SparseTable(1, Sgd(1.0), Constant())
    pulled = table.push_pull(np.array([1]), floats([1]))
    table.push(np.array([1]), floats([1]))
    assert pulled.tolist() == [[-1]]


@pytest.mark.parametrize(
    ("keys", "grads", "said"),
    [
        (np.array([1], np.int32), floats([1, 2]), "keys are int32[1]; a numpy array int64[n] is allowed"),
        (np.array([[1]]), floats([1, 2]), "keys are int64[1, 1]"),
        ([1], floats([1, 2]), "keys are a list"),
        (np.array([1]), np.zeros((1, 2)), "grads are float64[1, 2]; a numpy array float32[1, 2] is allowed"),
        (np.array([1]), floats([1]), "grads are float32[1, 1]"),
        (np.array([1]), None, "grads are a NoneType"),
    ],
)
def test_arrays_of_another_dtype_or_shape_are_refused_by_name(keys: object, grads: object, said: str) -> None:
    table = SparseTable(2, Sgd(1.0), Constant())
    with pytest.raises(BadArguments) as caught:
        table.push(keys, grads)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert len(table) == 0


def test_statistics_count_keys_and_bytes() -> None:
    table = SparseTable(4, Adagrad(0.1), Constant())
    table.push_pull(np.array([1, 2, 2]), np.ones((3, 4), np.float32))
    statistics = table.statistics()
    assert (statistics.rows, statistics.pulls, statistics.pushes) == (2, 1, 1)
    assert (statistics.keys_pulled, statistics.keys_pushed) == (3, 3)
    assert statistics.bytes > 2 * 4 * 4 * 2


# Dense


def test_a_dense_table_applies_its_optimizer_to_every_element() -> None:
    table = DenseTable((2, 2), Sgd(0.5), Constant(1.0))
    assert table.push_pull(read_only(floats([2, 0], [0, 4]))).tolist() == [[0, 1], [1, -1]]


def test_a_tensor_starts_the_same_however_it_is_cut() -> None:
    whole = DenseTable((10, 7), Sgd(1.0), Uniform(0.1)).pull()
    parts = [DenseTable((end - begin, 7), Sgd(1.0), Uniform(0.1), begin).pull() for begin, end in [(0, 4), (4, 10)]]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_large_tensor_is_filled_to_its_end() -> None:
    values = DenseTable((200_001,), Sgd(1.0), Uniform(1.0)).pull()
    np.testing.assert_array_equal(values, Uniform(1.0).rows(np.arange(200_001), 1)[:, 0])


def test_a_pulled_tensor_is_a_copy() -> None:
    table = DenseTable((1,), Sgd(1.0), Constant())
    pulled = table.pull()
    table.push(floats(1))
    assert pulled.tolist() == [0]


def test_a_gradient_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(BadArguments, match=r"grads are float32\[3\]; a numpy array float32\[2\] is allowed"):
        DenseTable((2,), Sgd(1.0), Constant()).push(floats(1, 2, 3))


# What tables stand on


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_summing_duplicates_keeps_each_keys_total(keys: list[int]) -> None:
    grads = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    different, sums = sum_duplicates(np.array(keys, np.int64), grads)
    assert different.tolist() == sorted(set(keys))
    for key, total in zip(different.tolist(), sums, strict=True):
        np.testing.assert_array_equal(total, sum(grads[i] for i, each in enumerate(keys) if each == key))


def test_sorted_keys_without_repeats_are_passed_on_untouched() -> None:
    keys, grads = np.array([1, 5, 9]), np.ones((3, 2), np.float32)
    assert sum_duplicates(keys, grads)[1] is grads
    assert unique(keys) == (keys, None)


def test_growing_rows_keep_what_was_in_them() -> None:
    rows = GrowingRows(2)
    for i in range(100):
        rows.extend(50)[:] = i
    assert len(rows) == 5000
    np.testing.assert_array_equal(rows.array[:, 1], np.repeat(np.arange(100, dtype=np.float32), 50))
