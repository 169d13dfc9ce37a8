import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import BadArguments
from prpc_engine.kv import (
    Adagrad,
    Adam,
    Assign,
    Constant,
    DenseTable,
    Ftrl,
    Momentum,
    Sgd,
    SparseTable,
    Uniform,
)
from prpc_engine.kv.table.optimizer import Optimizer
from prpc_engine.kv.table.schedule import Polynomial
from prpc_engine.kv.table.storage import storage_dtype


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
    assert table.pull(everything)[:, 0].tolist() == [
        model.get(key, 0.5) for key in everything.tolist()
    ]


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
    assert table.push_pull(np.array([4, 2, 4]), floats([1], [5], [1])).tolist() == [
        [-2],
        [-5],
        [-2],
    ]


def test_what_was_pulled_does_not_change_with_later_pushes() -> None:
    table = SparseTable(1, Sgd(1.0), Constant())
    pulled = table.push_pull(np.array([1]), floats([1]))
    table.push(np.array([1]), floats([1]))
    assert pulled.tolist() == [[-1]]


@pytest.mark.parametrize(
    ("keys", "grads", "said"),
    [
        (
            np.array([1], np.int32),
            floats([1, 2]),
            "keys are int32[1]; a numpy array int64[n] is allowed",
        ),
        (np.array([[1]]), floats([1, 2]), "keys are int64[1, 1]"),
        ([1], floats([1, 2]), "keys are a list"),
        (
            np.array([1]),
            np.zeros((1, 2)),
            "grads are float64[1, 2]; a numpy array float32[1, 2] is allowed",
        ),
        (np.array([1]), floats([1]), "grads are float32[1, 1]"),
        (np.array([1]), None, "grads are a NoneType"),
    ],
)
def test_arrays_of_another_dtype_or_shape_are_refused_by_name(
    keys: object, grads: object, said: str
) -> None:
    table = SparseTable(2, Sgd(1.0), Constant())
    with pytest.raises(BadArguments) as caught:
        table.push(keys, grads)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert len(table) == 0


@pytest.mark.parametrize("keys", [50_000, 65_536, 65_537, 131_073])
def test_a_table_takes_little_more_memory_than_its_rows_and_keys(keys: int) -> None:
    table = SparseTable(64, Sgd(1.0), Constant())
    table.push(np.arange(keys), np.ones((keys, 64), np.float32))
    assert table.statistics().bytes <= 1.3 * keys * (4 * 64 + 8)


def test_statistics_count_keys_and_bytes() -> None:
    table = SparseTable(4, Adagrad(0.1), Constant())
    table.push_pull(np.array([1, 2, 2]), np.ones((3, 4), np.float32))
    statistics = table.statistics()
    assert (statistics.rows, statistics.pulls, statistics.pushes) == (2, 1, 1)
    assert (statistics.keys_pulled, statistics.keys_pushed) == (3, 3)
    assert statistics.bytes > 2 * 4 * 4 * 2


OPTIMIZERS = [
    Assign(),
    Sgd(Polynomial(0.5, steps=4)),
    Momentum(0.1),
    Adagrad(0.1),
    Adam(0.1),
    Ftrl(0.1, l1=0.1),
]


@pytest.mark.parametrize("made", OPTIMIZERS, ids=str)
def test_a_row_goes_its_own_way_whatever_else_is_in_its_batches(made: Optimizer) -> None:
    """Against each key's own formula run alone: a row sees its own gradients, its own state and its
    own count of steps.
    """
    random, keys_there = np.random.default_rng(5), 30_000  # more than one block of rows
    table = SparseTable(3, made, Uniform(0.1))
    values = Uniform(0.1).rows(np.arange(keys_there), 3)
    state = [
        np.full((keys_there, 3), initial, np.float32) for initial in made.state_initial.values()
    ]
    counts = np.zeros((keys_there, 1), np.float32)
    for step in range(6):
        keys = np.sort(random.choice(keys_there, 20_000, replace=False))
        grads = random.normal(size=(len(keys), 3)).astype(np.float32)
        counts[keys] += 1
        changed, changed_state = values[keys], [each[keys] for each in state]
        made.apply(changed, grads, changed_state, made.rate_at(step), counts[keys])
        values[keys] = changed
        for each, now in zip(state, changed_state, strict=True):
            each[keys] = now
        mixed = random.permutation(len(keys))
        table.push(keys[mixed], grads[mixed])
    np.testing.assert_allclose(table.pull(np.arange(keys_there)), values, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_goes_by_the_pushes_to_the_table() -> None:
    rate = Polynomial(1.0, steps=2)
    sparse, dense = SparseTable(1, Sgd(rate), Constant()), DenseTable((1,), Sgd(rate), Constant())
    for key in (7, 8, 9):
        sparse.push(np.array([key]), floats([1]))
        dense.push(floats(1))
    assert sparse.pull(np.array([7, 8, 9]))[:, 0].tolist() == [-1.0, -0.5, 0.0]
    assert dense.pull().tolist() == [-1.5]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_values_are_rounded_at_rest_and_computed_in_float32(name: str) -> None:
    dtype = storage_dtype(name)
    sparse, dense = (
        SparseTable(4, Adagrad(0.3), Uniform(1.0), dtype),
        DenseTable((50, 4), Adagrad(0.3), Uniform(1.0), 0, dtype),
    )
    random, keys = np.random.default_rng(2), np.arange(50)
    for pull, push in (
        (lambda: sparse.pull(keys), lambda grads: sparse.push(keys, grads)),
        (dense.pull, dense.push),
    ):
        values, accumulator = (
            pull().astype(dtype).astype(np.float32),
            np.full((50, 4), 0.1, np.float32),
        )
        for _ in range(5):
            grads = random.normal(size=(50, 4)).astype(np.float32)
            push(grads)
            Adagrad(0.3).apply(values, grads, [accumulator], 0.3, 1)
            values = values.astype(dtype).astype(np.float32)
            assert pull().dtype == np.float32
            np.testing.assert_array_equal(pull(), values)
    assert sparse.columns()["values"].dtype == dense.columns()["values"].dtype == dtype
    assert sparse.columns()["accumulator"].dtype == np.float32


def test_a_key_that_has_no_row_is_rounded_when_it_gets_one() -> None:
    table = SparseTable(1, Sgd(1.0), Constant(1 + 2**-10), np.float16)
    table.push(np.array([1]), floats([0]))
    assert table.pull(np.array([1, 2]))[:, 0].tolist() == [1 + 2**-10, 1 + 2**-10]


@pytest.mark.parametrize("made", [Adagrad(0.1), Adam(0.1)], ids=str)
def test_columns_and_scalars_carry_all_of_a_table_to_another(made: Optimizer) -> None:
    table, other = (SparseTable(2, made, Uniform(0.1)) for _ in range(2))
    keys, grads = np.arange(0, 3000, 3), np.full((1000, 2), 0.5, np.float32)
    for _ in range(3):
        table.push(keys, grads)
    for begin in (0, 600):
        other.load(
            {name: array[begin : begin + 600].copy() for name, array in table.columns().items()}
        )
    other.load_scalars(table.scalars())
    other.load_counters(table.scalars())
    for each in (table, other):
        each.push(keys[:10], grads[:10])
    np.testing.assert_array_equal(other.pull(keys), table.pull(keys))
    assert other.scalars() == table.scalars()
    assert (other.version, other.statistics().keys_admitted) == (4, 1000)

    dense, later = (DenseTable((4, 2), made, Constant()) for _ in range(2))
    dense.push(grads[:4])
    for begin in (0, 2):
        for name, array in later.columns().items():
            array[begin : begin + 2] = dense.columns()[name][begin : begin + 2]
    later.load_scalars(dense.scalars())
    np.testing.assert_array_equal(later.push_pull(grads[:4]), dense.push_pull(grads[:4]))


def test_before_rows_change_their_numbers_are_told() -> None:
    told: list[list[int] | None] = []
    before_it: list[tuple[float, float]] = []
    sparse, dense = SparseTable(1, Sgd(1.0), Constant()), DenseTable((2,), Sgd(1.0), Constant())
    sparse.push(np.array([5, 6]), floats([1], [1]))

    def before(rows: np.ndarray | None) -> None:
        told.append(None if rows is None else rows.tolist())
        before_it.append(
            (sparse.columns()["values"][1, 0].item(), dense.columns()["values"][0].item())
        )

    sparse.before_change = dense.before_change = before
    sparse.push(np.array([6]), floats([1]))
    dense.push(floats(1, 1))
    assert told == [[1], None]
    assert before_it == [(-1, 0), (-2, 0)]


# Dense


def test_a_dense_table_applies_its_optimizer_to_every_element() -> None:
    table = DenseTable((2, 2), Sgd(0.5), Constant(1.0))
    assert table.push_pull(read_only(floats([2, 0], [0, 4]))).tolist() == [[0, 1], [1, -1]]


def test_a_tensor_starts_the_same_however_it_is_cut() -> None:
    whole = DenseTable((10, 7), Sgd(1.0), Uniform(0.1)).pull()
    parts = [
        DenseTable((end - begin, 7), Sgd(1.0), Uniform(0.1), begin).pull()
        for begin, end in [(0, 4), (4, 10)]
    ]
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
    with pytest.raises(
        BadArguments, match=r"grads are float32\[3\]; a numpy array float32\[2\] is allowed"
    ):
        DenseTable((2,), Sgd(1.0), Constant()).push(floats(1, 2, 3))


# What checkpoints and replicas have of a dense table


def test_assigned_values_are_what_pushes_go_on_from() -> None:
    table = DenseTable((2,), Sgd(1.0), Constant(0.0), 0, "float32", is_assigned_first=True)
    with pytest.raises(BadArguments, match="it has no values yet"):
        table.push(floats(1, 1))
    version = table.assign(floats(5, 6))
    assert table.push(floats(1, 2)) > version
    assert table.pull().tolist() == [4, 4]
    with pytest.raises(BadArguments, match="assign"):
        table.assign(floats(1, 2, 3))
    assert table.assign(floats(0, 1)) > version
    assert table.push_pull(floats(0, 1)).tolist() == [0, 0]


def test_a_dense_table_goes_on_where_a_saved_one_was() -> None:
    table, later = (DenseTable((2,), Adam(0.1), Constant(1.0)) for _ in range(2))
    for _ in range(3):
        table.push(floats(1, -1))
    table.pull()
    for name, column in table.columns().items():
        later.columns()[name][...] = column
    later.load_scalars(table.scalars())
    later.load_counters(table.scalars())
    later.load_counters({})  # of before counters were saved
    assert later.version == table.version
    assert later.statistics() == table.statistics()
    np.testing.assert_array_equal(later.push_pull(floats(1, 1)), table.push_pull(floats(1, 1)))


def test_a_dense_tables_replica_counts_the_pulls_that_it_was_told_of() -> None:
    primary, replica = (DenseTable((1,), Sgd(1.0), Constant()) for _ in range(2))
    primary.begin_telling(lambda: None)
    primary.push(floats(1))
    replica.replay(primary.take_decision(with_push=True), floats(1))
    assert not primary.has_news
    primary.pull()
    assert primary.has_news
    decision = primary.take_decision()
    assert decision is not None
    replica.catch_up(decision)
    assert not primary.has_news
    assert replica.statistics() == primary.statistics()
    primary.pull()
    primary.take_back()
    assert replica.statistics() == primary.statistics(), "who was not told of it is the primary now"
    primary.stop_telling()
    primary.pull()
    assert not primary.has_news


def test_a_removed_key_has_its_initial_row_again() -> None:
    table = SparseTable(1, Sgd(1.0), Constant(2.0))
    table.push(np.array([1, 2, 3]), floats([1], [1], [1]))
    table.remove(np.array([2, 9]))
    assert sorted(table.keys()) == [1, 3]
    assert table.pull(np.array([1, 2, 3])).ravel().tolist() == [1, 2, 1]


def test_a_sparse_table_goes_on_where_a_saved_one_was() -> None:
    table, later = (SparseTable(2, Adam(0.1), Constant(1.0)) for _ in range(2))
    keys = np.array([7, -7])
    for _ in range(3):
        table.push(keys, floats([1, -1], [2, 0]))
    columns = table.columns()
    later.load({**columns, "keys": columns["keys"].ravel()})
    later.load_scalars(table.scalars())
    later.load_counters(table.scalars())
    assert later.version == table.version
    grads = floats([1, 1], [1, 1])
    np.testing.assert_array_equal(later.push_pull(keys, grads), table.push_pull(keys, grads))
