"""Every kind of table in real shard processes: what tables are told, and compressed gradients, as
they travel.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import (
    Adam,
    Admission,
    Cast,
    DenseTable,
    Eviction,
    Int8,
    TableServer,
    TableWorker,
    TopK,
    WarmUp,
)
from prpc_engine.kv.table.compression import Feedback
from prpc_engine.kv.table.initializer import Constant

GRADS = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)


@pytest.fixture
def worker(forked_shards: None) -> Iterator[TableWorker]:
    with (
        Master() as master,
        RpcService(master=master.address, shards=2) as servers,
        RpcService(master=master.address) as service,
    ):
        TableServer(servers)
        yield TableWorker(service, expected_servers=2)


def test_sparse_tables_of_any_dtype_and_compression(worker: TableWorker) -> None:
    bounds = {"admission": Admission(2), "eviction": Eviction(rows_max=600, ttl_s=60.0)}
    for dtype, made in itertools.product(
        ["float32", "float16", "bfloat16"], [None, Cast(), Cast("float16"), Int8()]
    ):
        table = f"{dtype} {made}"
        worker.create_sparse(table, 8, {"name": "add"}, dtype=dtype, compression=made, **bounds)  # type: ignore[arg-type]
        for _ in range(2):
            worker.push(table, np.arange(1000), GRADS)
        np.testing.assert_allclose(
            worker.pull(table, np.arange(1000)), GRADS, atol=0.03, err_msg=table
        )
        assert sum(each[table].keys_refused for each in worker.statistics().values()) == 1000, table


def test_dense_tables_of_any_compression(worker: TableWorker) -> None:
    """Against slices of the same tensor here, fed with what the worker must have sent."""
    optimizer = Adam(WarmUp(2, then=0.1))
    for made in (None, Cast(), Int8(), TopK(0.5)):
        worker.create_dense(str(made), (1000, 8), optimizer, compression=made, split_bytes_min=0)
        slices = [DenseTable((500, 8), optimizer, Constant(), compression=made) for _ in range(2)]
        feedback = [Feedback(made) for _ in range(2)] if made is not None else None
        for _ in range(3):
            worker.push(str(made), GRADS)
            for i, part in enumerate((GRADS[:500], GRADS[500:])):
                if feedback is None:
                    slices[i].push(part)
                else:
                    feedback[i].send(part, slices[i].push)
        np.testing.assert_array_equal(
            worker.pull(str(made)), np.concatenate([each.pull() for each in slices]), str(made)
        )


def test_subclasses_of_arrays_are_pushed_as_plain_ones(worker: TableWorker) -> None:
    worker.create_sparse("rows", 8, {"name": "add"})
    worker.create_dense("tensor", (4, 8), {"name": "add"})
    matrix = GRADS[:4].view(np.matrix)
    worker.push("rows", np.arange(4), matrix)
    worker.push("tensor", matrix)
    np.testing.assert_array_equal(worker.pull("rows", np.arange(4)), GRADS[:4])
    np.testing.assert_array_equal(worker.pull("tensor"), GRADS[:4])
