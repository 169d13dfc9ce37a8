"""Gradients that are NaN, infinite or huge never poison a table: they are refused, skipped or
bounded, as the table says.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv import (
    Adagrad,
    Adam,
    Add,
    Constant,
    Cosine,
    DenseTable,
    Ftrl,
    Momentum,
    Optimizer,
    Sgd,
    SparseTable,
    TableServer,
    TableShard,
    TableWorker,
)
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.table.gradients import GRADIENT_MAX, are_ordinary

GREATEST = float(np.finfo(np.float32).max)
HUGE = [2e19, -2e19, 1e25, -1e25, GREATEST, -GREATEST, 1.0, GREATEST, GREATEST, -GREATEST, 1e-3]
SQUARING: list[Optimizer] = [
    Ftrl(0.05),
    Ftrl(0.05, l1=1.0, l2=0.1),
    Ftrl(Cosine(0.5, steps=20)),
    Adagrad(0.05),
    Adam(0.001),
    Adam(0.001, beta_2=0.9999999),
    Momentum(0.1),
    Momentum(0.1, momentum=0.99, nesterov=True),
]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def floats(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("optimizer", SQUARING, ids=repr)
def test_huge_gradients_leave_every_value_and_state_finite(optimizer: Optimizer) -> None:
    sparse, dense = (
        SparseTable(1, optimizer, Constant(0.5)),
        DenseTable((3,), optimizer, Constant(0.5)),
    )
    for _ in range(30):
        for gradient in HUGE:
            sparse.push(np.arange(3), np.full((3, 1), gradient, np.float32))
            dense.push(np.full(3, gradient, np.float32))
    for table in (sparse, dense):
        for name, column in table.columns().items():
            assert np.isfinite(column).all(), name


def test_a_gradient_whose_square_overflows_counts_as_the_greatest_that_does_not() -> None:
    tables = [SparseTable(1, Ftrl(0.05), Constant(0.0)) for _ in range(2)]
    for table, gradient in zip(tables, (2e19, GRADIENT_MAX), strict=True):
        table.push(np.arange(1), floats([gradient]))
        table.push(np.arange(1), floats([1.0]))
    assert tables[0].pull(np.arange(1)) == tables[1].pull(np.arange(1)) != 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_push_with_a_gradient_that_is_no_number_is_refused_whole(bad: float) -> None:
    sparse, dense = (
        SparseTable(2, Adam(0.1), Constant(0.0), name="clicks"),
        DenseTable((2, 2), Adam(0.1), Constant(0.0), name="w"),
    )
    sparse.push(np.array([7]), floats([1, 1]).reshape(1, 2))
    dense.push(np.ones((2, 2), np.float32))
    before = [
        {name: column.tobytes() for name, column in table.columns().items()}
        | {"statistics": table.statistics()}
        for table in (sparse, dense)
    ]
    with pytest.raises(
        BadArguments,
        match=rf"table 'clicks': the gradient of key 9, column 1 is {bad}; 1 of 6 elements",
    ):
        sparse.push(np.array([7, 9, 11]), floats([1, 1], [1, bad], [1, 1]))
    with pytest.raises(BadArguments, match=rf"table 'w': the gradient of index \[1, 0\] is {bad}"):
        dense.push(floats([1, 1], [bad, 1]))
    assert before == [
        {name: column.tobytes() for name, column in table.columns().items()}
        | {"statistics": table.statistics()}
        for table in (sparse, dense)
    ]
    assert sparse.version == dense.version == 1


def test_gradients_of_one_key_whose_sum_is_infinite_are_refused() -> None:
    table = SparseTable(1, Add(), Constant(0.0))
    with warnings.catch_warnings(), pytest.raises(BadArguments, match="key 3"):
        warnings.simplefilter("ignore")
        table.push(np.array([3, 3]), floats([GREATEST], [GREATEST]))
    assert len(table) == 0


@pytest.mark.parametrize("optimizer", [Sgd(1.0), *SQUARING], ids=repr)
def test_skipped_rows_stay_and_count_and_the_others_change(optimizer: Optimizer) -> None:
    plain = SparseTable(2, optimizer, Constant(0.5))
    sparse = SparseTable(2, optimizer, Constant(0.5), nonfinite="skip")
    keys, good, ones = np.arange(4), np.array([0, 3]), np.ones((4, 2), np.float32)
    grads = floats([1, 2], [np.nan, 1], [-np.inf, np.inf], [3, 4])
    for table in (plain, sparse):
        table.push(keys, ones)
    sparse.push(keys, grads)
    plain.push(good, grads[good])
    assert sparse.pull(keys).tolist() == plain.pull(keys).tolist()
    assert sparse.statistics().rows_skipped == 2
    dense, whole = (
        DenseTable((4, 2), optimizer, Constant(0.5), nonfinite="skip"),
        DenseTable((4, 2), optimizer, Constant(0.5)),
    )
    for each in (dense, whole):
        each.push(ones)
    before = {name: column.copy() for name, column in dense.columns().items()}
    dense.push(grads)
    whole.push(np.nan_to_num(grads, nan=0.0, posinf=0.0, neginf=0.0))
    for name, column in dense.columns().items():
        assert column[1:3].tolist() == before[name][1:3].tolist()
        assert column[[0, 3]].tolist() == whole.columns()[name][[0, 3]].tolist()
    assert (dense.statistics().rows_skipped, dense.version) == (2, 2)


def test_a_tensor_without_axes_is_skipped_as_one_row() -> None:
    dense = DenseTable((1,), Sgd(1.0), Constant(0.5), nonfinite="skip")
    dense.push(floats(np.nan))
    assert (dense.pull().tolist(), dense.statistics().rows_skipped) == ([0.5], 1)


def test_a_table_may_take_what_is_no_number() -> None:
    table = SparseTable(1, Add(), Constant(0.0), nonfinite="apply")
    table.push(np.arange(1), floats([np.inf]))
    assert table.pull(np.arange(1)) == np.inf


def make(servers: int = 3) -> tuple[list[TableShard], TableWorker]:
    service = LocalService()
    for _ in range(servers):
        TableServer(service)
    return service.servers["kv"], TableWorker(service, expected_servers=servers)  # type: ignore[return-value]


@pytest.mark.parametrize("verb", ["push", "push_pull"])
def test_no_server_has_applied_a_part_of_a_refused_push(verb: str) -> None:
    shards, worker = make()
    worker.create_sparse("clicks", 1, {"name": "add"})
    worker.create_dense("w", (6,), {"name": "add"}, split_bytes_min=0)
    keys, grads = np.arange(60), np.ones((60, 1), np.float32)
    grads[59] = np.nan
    with pytest.raises(
        BadArguments,
        match=f"{verb} to sparse table 'clicks': the gradient of key 59, column 0 is nan",
    ):
        getattr(worker, verb)("clicks", keys, grads)
    with pytest.raises(
        BadArguments, match=rf"{verb} to dense table 'w': the gradient of index \[5\] is inf"
    ):
        getattr(worker, verb)("w", floats(1, 1, 1, 1, 1, np.inf))
    assert all(table.version == 0 for shard in shards for _, table in shard.tables.values())


def test_a_worker_that_skips_is_told_by_the_statistics() -> None:
    _, worker = make(1)
    worker.create_sparse("clicks", 1, {"name": "add"}, nonfinite="skip")
    worker.push("clicks", np.arange(3), floats([1], [np.nan], [2]))
    assert worker.pull("clicks", np.arange(3)).ravel().tolist() == [1, 0, 2]
    (tables,) = worker.statistics().values()
    assert tables["clicks"].rows_skipped == 1
    with pytest.raises(ConfigError, match="nonfinite is 'count'; allowed: refuse, skip, apply"):
        worker.create_sparse("more", 1, {"name": "add"}, nonfinite="count")


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_server_refuses_it_in_a_step_of_several_workers_before_others_wait(kind: str) -> None:
    shard = TableShard()
    plain = {
        "table": "t",
        "partition": 0,
        "partitions": 1,
        "optimizer": {"name": "add"},
        "initializer": {"name": "constant"},
    }
    plain |= {"consistency": {"name": "sync", "workers": 2}, "name": kind}
    plain |= {"dim": 1} if kind == "sparse" else {"shape": [1], "begin": 0, "end": 1}
    shard.create_table(plain)
    with pytest.raises(BadArguments, match="is nan"):
        shard.push("t", np.arange(1), floats([np.nan])) if kind == "sparse" else shard.push_dense(
            "t", floats(np.nan)
        )
    assert shard.workers() == []


def test_ordinary_gradients_are_known_by_one_pass() -> None:
    assert are_ordinary(np.ones((3, 4), np.float32))
    assert are_ordinary(np.empty((0, 4), np.float32))
    assert not are_ordinary(floats(np.nan))
    assert not are_ordinary(floats(1e13))
