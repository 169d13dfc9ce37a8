"""Workers in processes of their own wait for each other at two servers, and not for one that was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import RemoteError
from prpc_engine.kv import TableServer, TableWorker
from tests.prpc_engine.kv.workers import WorkerProcess

SPARSE = ["create_sparse", "rows", 1, {"name": "add"}]


@pytest.fixture
def job() -> Iterator[tuple[TableWorker, list[WorkerProcess]]]:
    """Two servers, in shards; three workers, one of them here."""
    with ExitStack() as stack:
        master = stack.enter_context(Master())
        others = [stack.enter_context(WorkerProcess(master.address, 2)) for _ in range(2)]
        servers = stack.enter_context(RpcService(master=master.address, shards=2))
        service = stack.enter_context(RpcService(master=master.address))
        TableServer(servers)
        yield TableWorker(service, expected_servers=2), others


def test_steps_are_those_of_one_worker_with_all_the_gradients(job: tuple[TableWorker, list[WorkerProcess]]) -> None:
    kv, others = job
    sync = {"name": "sync", "workers": 3, "reduce": "mean"}
    kv.create_sparse("rows", 1, {"name": "add"}, consistency=sync)
    for other in others:
        other.do(*SPARSE, consistency=sync)
    for step in range(1, 4):
        others[0].begin("push", "rows", [1, 2], [[3.0], [3.0]])
        others[1].begin("push", "rows", [2], [[3.0]])  # the server of key 1 hears of it as well
        kv.push("rows", np.array([2, 3]), np.full((2, 1), 3, np.float32))
        assert [other.answer() for other in others] == [None, None]
        assert kv.pull("rows", np.array([1, 2, 3])).ravel().tolist() == [step, 3 * step, step]


def test_a_killed_worker_is_waited_for_no_longer(job: tuple[TableWorker, list[WorkerProcess]]) -> None:
    kv, others = job
    sync = {"name": "sync", "workers": 3, "reduce": "sum"}
    kv.create_dense("w", (2,), {"name": "add"}, consistency=sync)
    for other in others:
        other.do("create_dense", "w", [2], {"name": "add"}, consistency=sync)
        other.begin("push", "w", [1.0, 1.0])
    kv.push("w", np.ones(2, np.float32))
    assert [other.answer() for other in others] == [None, None]
    others[0].begin("push", "w", [5.0, 5.0])
    push = kv.submit_push("w", np.ones(2, np.float32))
    others[1].kill()
    push.result(30)
    assert others[0].answer() is None
    assert kv.pull("w").tolist() == [9, 9]


def test_a_worker_too_far_ahead_waits_within_its_deadline(job: tuple[TableWorker, list[WorkerProcess]]) -> None:
    kv, others = job
    ssp = {"name": "ssp", "workers": 2, "bound": 1}
    kv.create_sparse("rows", 1, {"name": "add"}, consistency=ssp)
    others[0].do(*SPARSE, consistency=ssp)
    keys, grads = np.array([1]), np.ones((1, 1), np.float32)
    others[0].do("push", "rows", [1], [[1.0]])
    for _ in range(2):
        kv.push("rows", keys, grads)
    assert kv.pull("rows", keys) == 3
    behind = kv.steps_behind("rows")
    assert sorted(behind) == [0, 1]
    assert [list(each.values()) for each in behind.values()] == [[1], [1]]
    kv.push("rows", keys, grads)
    with pytest.raises(RemoteError, match=r"WorkersBehind: table 'rows' .* waited .* for .*; it has not run"):
        kv.pull("rows", keys, timeout_s=0.2)
    pull = kv.submit_pull("rows", keys)
    others[0].do("push", "rows", [2], [[1.0]])
    assert pull.result(30) == 4
    kv.push("rows", keys, grads)
    push = kv.submit_push("rows", keys, grads)
    others[0].kill()
    push.result(30)
    assert kv.pull("rows", keys) == 6
