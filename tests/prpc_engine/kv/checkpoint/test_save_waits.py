"""A save waits, within its deadline, for what else is being done with the tables; and what was
restored is created as always.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import RpcService
from prpc_engine.errors import ConfigError
from prpc_engine.kv import ElasticServer, TableServer, TableWorker
from prpc_engine.kv.checkpoint import CheckpointError, methods, verify
from prpc_engine.kv.replication.replica import Replica
from shard import runtime
from tests.prpc_engine.kv.checkpoint.jobs import job_and_shards, local_job
from tests.prpc_engine.kv.elastic_processes import elastic_world
from tests.prpc_engine.processes import PATIENCE_S, wait_until

SAVERS, SAVES = 3, 4
STRANGER = 99  # a server that the placement does not name


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The chance of each pause of a save before it was tried again."""
    found: list[float] = []

    def chance() -> float:
        found.append(0.0)
        return found[-1]

    monkeypatch.setattr(runtime, "random", chance)
    return found


def now(service: RpcService, function: Any) -> Any:
    return service.in_reactor(lambda done: done.set_result(function())).result(PATIENCE_S)


def copied(hosted: Replica) -> None:
    hosted.begin_copy(STRANGER)


def test_a_save_waits_while_a_partition_is_copied(tmp_path: Path, pauses: list[float]) -> None:
    with elastic_world() as (_, watcher), ElasticServer(watcher.service, partitions=2) as server:
        watcher.wait_whole(1)
        worker = TableWorker(watcher.service, elastic=True)
        worker.create_sparse("t", 1, {"name": "add"})
        hosted = server._host.hosted[1]
        now(watcher.service, lambda: copied(hosted))
        with pytest.raises(
            CheckpointError,
            match=r"partition 1 is being copied .* until the deadline: allow a larger timeout_s",
        ):
            worker.save(tmp_path, 1, timeout_s=0.3)
        assert not hosted.shard.is_saving  # pushes go on
        saved = threading.Thread(
            target=worker.save, args=(tmp_path, 2), kwargs={"timeout_s": PATIENCE_S}
        )
        before = len(pauses)
        saved.start()
        wait_until(lambda: len(pauses) > before, "an attempt")
        now(watcher.service, lambda: hosted.streams.pop(STRANGER).close())
        saved.join(PATIENCE_S)
        assert [(each.step, each.fault) for each in verify(tmp_path)] == [(2, "")]


@pytest.mark.parametrize("is_elastic", [True, False])
def test_workers_that_save_at_the_same_time_all_save(
    tmp_path: Path, is_elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine may take longer from enter to cut
    monkeypatch.setattr(methods, "HOLD_S_MAX", PATIENCE_S)
    with elastic_world() as (master, watcher), RpcService(master.address) as other:
        if is_elastic:
            servers = [
                ElasticServer(service, partitions=4, servers=2)
                for service in (watcher.service, other)
            ]
            watcher.wait_whole(2)
        else:
            for service in (watcher.service, other):
                TableServer(service)
        workers = [
            TableWorker(watcher.service, elastic=is_elastic, expected_servers=2)
            for _ in range(SAVERS)
        ]
        for worker in workers:
            worker.create_sparse("t", 1, {"name": "add"})
        errors: list[BaseException] = []

        def save(worker: TableWorker, first: int) -> None:
            try:
                for step in range(first, first + SAVES):
                    worker.push("t", np.arange(50), np.ones((50, 1), np.float32))
                    worker.save(tmp_path, step, full_every=2, timeout_s=PATIENCE_S)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=save, args=(worker, 100 * i))
            for i, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert errors == []
        assert [each.fault for each in verify(tmp_path)] == [""] * (SAVERS * SAVES)
        if is_elastic:
            for server in servers:
                server.close()


def test_after_a_restore_a_tensor_is_created_as_always_wherever_its_rows_lie(
    tmp_path: Path,
) -> None:
    one, two = local_job(1), local_job(2)
    for name, shape, split_bytes_min in (("cut", (8, 2), 1), ("whole", (30000,), 1 << 30)):
        one.create_dense(name, shape, {"name": "add"}, split_bytes_min=split_bytes_min)
        one.push(name, np.ones(shape, np.float32))
    one.save(tmp_path, 1)
    with elastic_world() as (_, watcher), ElasticServer(watcher.service, partitions=2):
        restoring, other = (TableWorker(watcher.service, elastic=True) for _ in range(2))
        for worker in (two, restoring):
            assert worker.restore(tmp_path) == 1
        for worker in (two, restoring, other):
            worker.create_dense("cut", (8, 2), {"name": "add"}, split_bytes_min=1)
            worker.create_dense("whole", (30000,), {"name": "add"}, split_bytes_min=1 << 30)
            assert worker.pull("cut").tolist() == [[1, 1]] * 8
            assert worker.pull("whole").sum() == 30000
        with pytest.raises(ConfigError, match="with another spec"):
            other.create_dense(
                "cut", (8, 2), {"name": "sgd", "learning_rate": 1.0}, split_bytes_min=1
            )


def test_as_many_servers_get_back_what_each_had(tmp_path: Path) -> None:
    """A tensor of one row, cut all the same, is at the last of them; whole it would be where its
    name says.
    """
    (old, olds), (new, news) = job_and_shards(2), job_and_shards(2)
    for name in "abcdef":
        old.create_dense(name, (1, 4), {"name": "add"}, split_bytes_min=1)
    old.save(tmp_path, 1)
    new.restore(tmp_path)
    was, now_there = ([sorted(shard.tables) for shard in shards] for shards in (olds, news))
    assert now_there == was
