"""A partition that is lost, and in no checkpoint, comes back with its tables: workers are told
once, then read initial rows.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from prpc_engine.kv import Adagrad, Constant, ElasticServer, EpochChanged, Sgd, TableWorker
from prpc_engine.kv.schema.layout import sliced, spread
from prpc_engine.kv.schema.schema import Schemas, schema_of
from prpc_engine.kv.schema.table_spec import DenseSpec, SparseSpec, TableSpec
from tests.prpc_engine.kv.elastic_processes import PUSH_TIMEOUT_S, elastic_world, serve_elastic
from tests.prpc_engine.workloads.farm import Farm, end, kill

KEYS = np.arange(400)
CUT, WHOLE = np.ones((8, 2), np.float32), np.ones((3,), np.float32)


def create_tables(worker: TableWorker) -> None:
    worker.create_sparse(
        "rows", 1, {"name": "add"}, {"name": "constant", "value": 5.0}, timeout_s=PUSH_TIMEOUT_S
    )
    worker.create_dense("cut", (8, 2), {"name": "add"}, split_bytes_min=1, timeout_s=PUSH_TIMEOUT_S)
    worker.create_dense("whole", (3,), {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_partition_that_is_lost_comes_back_with_its_tables_and_workers_are_told_once(
    farm: Farm, tmp_path: Path, is_saved: bool
) -> None:
    """is_saved: there is a checkpoint of before the tables were created, and so without them."""
    settings = {"partitions": 4, "servers": 2} | ({"checkpoint": str(tmp_path)} if is_saved else {})
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve_elastic, master.address, settings) for _ in range(2)]
        watcher.wait_whole(2)
        worker = TableWorker(watcher.service, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
        if is_saved:
            worker.create_sparse("early", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
            worker.save(str(tmp_path), 7, timeout_s=PUSH_TIMEOUT_S)
        create_tables(worker)
        worker.push("rows", KEYS, np.ones((len(KEYS), 1), np.float32))
        worker.push("cut", CUT)
        worker.push("whole", WHOLE)
        kill(servers.pop())
        told = []
        for _ in range(20):
            for table, *keys in (("rows", KEYS), ("cut",), ("whole",)):
                try:
                    worker.pull(table, *keys)
                except EpochChanged as error:
                    told.append(error.partition)
        assert sorted(told) == sorted(set(told))
        assert len(told) == 2
        rows = worker.pull("rows", KEYS)[:, 0]
        assert set(rows.tolist()) == {5.0, 6.0}
        assert worker.pull("cut").sum() == 8
        worker.push("rows", KEYS, np.ones((len(KEYS), 1), np.float32))
        assert (worker.pull("rows", KEYS)[:, 0] == rows + 1).all()
        create_tables(worker)  # as every worker does at start
        watcher.wait_whole(1)
        end(servers.pop())


@pytest.mark.parametrize(
    "specs",
    [
        spread(SparseSpec("t", 0, 3, Sgd(1.0), Constant(), 2, eviction={"rows_max": 7}), 3),  # type: ignore[arg-type]
        sliced(DenseSpec("t", 0, 3, Adagrad(0.1), Constant(), (np.int64(8), 2), 0, 0), 3, True),
        sliced(DenseSpec("t", 0, 3, Adagrad(0.1), Constant(), (8, 2), 0, 0), 3, False),
        sliced(DenseSpec("t", 0, 3, Adagrad(0.1), Constant(), (), 0, 0), 3, False),
    ],
    ids=["sparse", "cut", "whole", "no axes"],
)
def test_a_schema_tells_what_each_partition_has(specs: dict[int, TableSpec]) -> None:
    assert schema_of(specs).specs() == specs


def test_what_is_noted_is_what_servers_have_agreed_to() -> None:
    one, other = (spread(SparseSpec("t", 0, 2, Sgd(rate), Constant(), 1), 2) for rate in (1.0, 2.0))
    with elastic_world() as (_, watcher), ElasticServer(watcher.service, partitions=2):
        watcher.wait_whole(1)
        until = time.monotonic() + PUSH_TIMEOUT_S
        schemas = Schemas(watcher.service.master_client, "kv")
        schemas.note(one, until, False)  # by a worker that died then
        schemas.note(other, until, False)
        assert schemas.of(1) == [one[1]]
        worker = TableWorker(watcher.service, elastic=True)
        worker.create_sparse("t", 1, Sgd(2.0))
        assert schemas.of(0) == [other[0]]
