"""What restore() brought back survives the loss of a server, two workers that restore get one
checkpoint, and all are told.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import EpochChanged, TableServer, TableWorker
from tests.prpc_engine.kv.elastic_processes import PUSH_TIMEOUT_S, elastic_world, serve_elastic
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, kill

KEYS = np.arange(400)
ROUNDS = 3


def add(worker: TableWorker, value: float) -> None:
    worker.push("rows", KEYS, np.full((len(KEYS), 1), value, np.float32))


@pytest.mark.slow
def test_a_server_that_is_killed_as_soon_as_a_restore_has_returned_takes_nothing_along(
    farm: Farm, tmp_path: Path
) -> None:
    settings = {"partitions": 6, "servers": 3, "replicas": 1}
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve_elastic, master.address, settings) for _ in range(3)]
        watcher.wait_whole(3)
        worker = TableWorker(
            watcher.service, elastic=True, ack="replicated", call_timeout_s=PUSH_TIMEOUT_S
        )
        worker.create_sparse("rows", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
        add(worker, 3.0)
        worker.save(str(tmp_path), 1, timeout_s=PUSH_TIMEOUT_S)
        add(worker, 2.0)
        for _ in range(ROUNDS):
            assert worker.restore(str(tmp_path), timeout_s=PUSH_TIMEOUT_S) == 1
            kill(servers.pop(0))
            add(worker, 0.0)
            assert set(worker.pull("rows", KEYS)[:, 0].tolist()) == {3.0}
            servers.append(farm.start_ready(serve_elastic, master.address, settings))
            watcher.wait_whole(3)
            add(worker, 2.0)


def restore_at_once(workers: list[TableWorker], folder: Path) -> list[object]:
    found: list[object] = [None] * len(workers)

    def restore(number: int) -> None:
        try:
            found[number] = workers[number].restore(str(folder), timeout_s=PATIENCE_S)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=restore, args=(number,)) for number in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_workers_that_restore_plain_tables_at_once_come_one_after_the_other(tmp_path: Path) -> None:
    with Master() as master:
        services = [RpcService(master.address) for _ in range(3)]
        try:
            for service in services[:2]:
                TableServer(service)
            workers = [
                TableWorker(service, expected_servers=2, call_timeout_s=PATIENCE_S)
                for service in services[1:]
            ]
            for worker in workers:
                worker.create_sparse("rows", 1, {"name": "add"})
            add(workers[0], 3.0)
            workers[0].save(str(tmp_path), 1)
            for _ in range(ROUNDS):
                assert restore_at_once(workers, tmp_path) == [1, 1]
                late = TableWorker(services[0], expected_servers=2, call_timeout_s=PATIENCE_S)
                late.create_sparse("rows", 1, {"name": "add"})
                assert set(late.pull("rows", KEYS)[:, 0].tolist()) == {3.0}
        finally:
            for service in reversed(services):
                service.close()


@pytest.mark.slow
def test_workers_that_restore_elastic_tables_at_once_get_one_checkpoint(
    farm: Farm, tmp_path: Path
) -> None:
    settings = {"partitions": 4, "servers": 2}
    with elastic_world() as (master, watcher), RpcService(master.address) as other:
        for _ in range(2):
            farm.start_ready(serve_elastic, master.address, settings)
        watcher.wait_whole(2)
        workers = [
            TableWorker(one, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
            for one in (watcher.service, other)
        ]
        for worker in workers:
            worker.create_sparse("rows", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
        add(workers[0], 3.0)
        workers[0].save(str(tmp_path), 1, timeout_s=PUSH_TIMEOUT_S)
        for _ in range(ROUNDS):
            assert restore_at_once(workers, tmp_path) == [1, 1]
            late = TableWorker(watcher.service, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
            late.create_sparse("rows", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
            assert set(late.pull("rows", KEYS)[:, 0].tolist()) == {3.0}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("verb", ["push", "push_pull", "pull"])
def test_the_first_verb_of_another_worker_is_not_done_and_says_that_tables_were_restored(
    farm: Farm, tmp_path: Path, verb: str, replicas: int
) -> None:
    settings = {"partitions": 4, "servers": 2, "replicas": replicas}
    with elastic_world() as (master, watcher), RpcService(master.address) as other:
        for _ in range(2):
            farm.start_ready(serve_elastic, master.address, settings)
        watcher.wait_whole(2)
        workers = [
            TableWorker(one, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
            for one in (watcher.service, other)
        ]
        for worker in workers:
            worker.create_sparse("rows", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
        restoring, worker = workers
        add(restoring, 3.0)
        restoring.save(str(tmp_path), 1, timeout_s=PUSH_TIMEOUT_S)
        add(worker, 2.0)
        for _ in range(ROUNDS):
            before = worker.pull("rows", KEYS)
            assert set(before[:, 0].tolist()) == {5.0}
            assert restoring.restore(str(tmp_path), timeout_s=PUSH_TIMEOUT_S) == 1
            for _ in range(4):  # versions are beyond what the other worker has seen
                add(restoring, 0.5)
            arguments = (KEYS, before) if "push" in verb else (KEYS,)
            with pytest.raises(
                EpochChanged, match="restored from the checkpoint of step 1, by another worker"
            ) as told:
                getattr(worker, verb)("rows", *arguments)
            assert told.value.step == 1
            assert set(worker.pull("rows", KEYS)[:, 0].tolist()) == {5.0}
            add(worker, 0.0)
            late = TableWorker(other, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
            late.create_sparse("rows", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
            add(late, 0.0)


@pytest.mark.slow
def test_a_worker_that_restores_is_not_told_of_an_older_restore(farm: Farm, tmp_path: Path) -> None:
    settings = {"partitions": 4, "servers": 2}
    with elastic_world() as (master, watcher), RpcService(master.address) as other:
        for _ in range(2):
            farm.start_ready(serve_elastic, master.address, settings)
        watcher.wait_whole(2)
        idle, busy = (
            TableWorker(one, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
            for one in (watcher.service, other)
        )
        for worker in (idle, busy):
            worker.create_sparse("rows", 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
            add(worker, 1.0)
        busy.save(str(tmp_path), 1, timeout_s=PUSH_TIMEOUT_S)
        assert busy.restore(str(tmp_path), timeout_s=PUSH_TIMEOUT_S) == 1  # idle asks nothing
        add(busy, 1.0)
        busy.save(str(tmp_path), 2, timeout_s=PUSH_TIMEOUT_S)
        assert idle.restore(str(tmp_path), timeout_s=PUSH_TIMEOUT_S) == 2
        assert set(idle.pull("rows", KEYS)[:, 0].tolist()) == {3.0}
        with pytest.raises(EpochChanged, match="the checkpoint of step 2, by another worker"):
            busy.pull("rows", KEYS)
