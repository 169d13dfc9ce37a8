"""Tables that do not keep all keys, on servers that are killed or drained: whoever takes over has
the rows that were there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from prpc_engine import RpcService
from prpc_engine.kv import ElasticServer, TableWorker
from tests.prpc_engine.kv.elastic_processes import PUSH_TIMEOUT_S, elastic_world, serve_elastic
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, end, kill

TABLE = "t"
ROWS = 400
KEYS_A_PUSH = 20
POLICIES: dict[str, dict[str, Any]] = {
    "rows_max": {"eviction": {"rows_max": ROWS // 4}},
    "ttl_steps": {"eviction": {"ttl_steps": 8}},
    "min_count": {"admission": {"min_count": 2}},
}
OLD = np.arange(0, ROWS // 4)  # are pulled all the time, and so outlive those that come and go


def trained(service: RpcService, policy: str) -> TableWorker:
    worker = TableWorker(service, elastic=True, ack="replicated", call_timeout_s=PUSH_TIMEOUT_S)
    worker.create_sparse(TABLE, 1, {"name": "add"}, **POLICIES[policy])
    train(worker)
    return worker


def train(worker: TableWorker) -> None:
    """Pushes and pulls: which rows there are in the end hangs on both."""
    for key in range(0, len(OLD), KEYS_A_PUSH):
        for _ in range(2):
            push(worker, np.arange(key, key + KEYS_A_PUSH))
    for key in range(len(OLD), ROWS, KEYS_A_PUSH):
        worker.pull(TABLE, OLD[::2])
        push(worker, np.arange(key, key + KEYS_A_PUSH))
        worker.pull(TABLE, OLD[::2])


def push(worker: TableWorker, keys: npt.NDArray[np.int64]) -> None:
    worker.push(TABLE, keys, np.ones((len(keys), 1), np.float32))


def rows(worker: TableWorker) -> list[float]:
    return worker.pull(TABLE, np.arange(2 * ROWS))[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_after_kill_9_the_replica_has_the_rows_that_its_primary_had(
    farm: Farm, policy: str
) -> None:
    settings = {"partitions": 2, "replicas": 1, "servers": 2}
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve_elastic, master.address, settings) for _ in range(2)]
        watcher.wait_whole(2)
        worker = trained(watcher.service, policy)
        before = rows(worker)
        assert 0 < np.count_nonzero(before) < ROWS
        push(worker, OLD[:1])  # acknowledged behind all of that
        before[0] += 1
        kill(servers.pop())
        assert rows(worker) == before
        watcher.wait_whole(1)
        servers.append(farm.start_ready(serve_elastic, master.address, settings))
        watcher.wait_whole(2)
        train(worker)  # and it goes on: what was copied, too, is killed now
        before = rows(worker)
        push(worker, OLD[:1])
        before[0] += 1
        kill(servers.pop(0))
        assert rows(worker) == before
        end(servers.pop())


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_that_is_drained_leaves_the_rows_that_it_had(farm: Farm, policy: str) -> None:
    settings = {"partitions": 2, "replicas": 1, "servers": 2}
    with elastic_world() as (master, watcher):
        staying = farm.start_ready(serve_elastic, master.address, settings)
        with RpcService(master.address) as service, ElasticServer(service, **settings) as leaving:
            watcher.wait_whole(2)
            worker = trained(watcher.service, policy)
            before = rows(worker)
            assert 0 < np.count_nonzero(before) < ROWS
            leaving.drain(PATIENCE_S)
            assert rows(worker) == before
        joining = farm.start_ready(serve_elastic, master.address, settings)
        watcher.wait_whole(2)
        train(worker)
        end(staying)
        end(joining)
