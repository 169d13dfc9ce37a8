"""Workers in processes of their own wait for each other at two servers, and not for one that was
killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import TableServer, TableWorker, WorkersBehind, WorkerShare
from tests.held import at
from tests.prpc_engine.kv.workers import WorkerProcess
from tests.prpc_engine.processes import PATIENCE_S, wait_until

SPARSE = ["create_sparse", "rows", 1, {"name": "add"}]


@pytest.fixture
def job(
    request: pytest.FixtureRequest, forked_shards: None
) -> Iterator[tuple[TableWorker, list[WorkerProcess]]]:
    """Two servers, in shards, or in this process for the parameter 0; three workers, one of them
    here.
    """
    shards = getattr(request, "param", 2)
    with ExitStack() as stack:
        master = stack.enter_context(Master())
        others = [stack.enter_context(WorkerProcess(master.address, 2)) for _ in range(2)]
        servers = [
            stack.enter_context(RpcService(master=master.address, shards=shards))
            for _ in range(1 if shards else 2)
        ]
        service = stack.enter_context(RpcService(master=master.address))
        for each in servers:
            TableServer(each)
        yield TableWorker(service, expected_servers=2, timeout_s=PATIENCE_S), others


def test_steps_are_those_of_one_worker_with_all_the_gradients(
    job: tuple[TableWorker, list[WorkerProcess]],
) -> None:
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


def test_a_killed_worker_is_waited_for_no_longer(
    job: tuple[TableWorker, list[WorkerProcess]],
) -> None:
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


@pytest.mark.parametrize("job", [0], indirect=True)
def test_a_worker_too_far_ahead_waits_within_its_deadline(
    job: tuple[TableWorker, list[WorkerProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, others = job
    ssp = {"name": "ssp", "workers": 2, "bound": 1}
    kv.create_sparse("rows", 1, {"name": "add"}, consistency=ssp)
    others[0].do(*SPARSE, consistency=ssp)
    keys, grads = np.array([1]), np.ones((1, 1), np.float32)
    others[0].do("push", "rows", [1], [[1.0]])
    for _ in range(2):
        kv.push("rows", keys, grads)
    assert kv.pull("rows", keys) == 3
    kv.push("rows", keys, grads)
    with monkeypatch.context() as patched:
        # the rest of its time is for the answer
        patched.setattr("prpc_engine.kv.consistency.barrier_scheduler.WAIT_SHARE", 0.01)
        with pytest.raises(
            WorkersBehind, match=r"table 'rows' .* waited .* for .*; it has not run"
        ):
            kv.pull("rows", keys, timeout_s=PATIENCE_S)
    pull = kv.submit_pull("rows", keys)
    others[0].do("push", "rows", [2], [[1.0]])
    assert pull.result(30) == 4
    kv.push("rows", keys, grads)
    push = kv.submit_push("rows", keys, grads)
    others[0].kill()
    push.result(30)
    assert kv.pull("rows", keys) == 6


@pytest.mark.slow
def test_the_balance_names_the_worker_that_others_wait_for(
    job: tuple[TableWorker, list[WorkerProcess]],
) -> None:
    kv, others = job
    here, slow, free = os.getpid(), others[0].process.pid, others[1].process.pid

    def share(pid: int) -> WorkerShare:
        return next(each for each in kv.balance().workers if each.worker.endswith(f"process {pid}"))

    sync = {"name": "sync", "workers": 2, "reduce": "sum"}
    kv.create_dense("w", (1,), {"name": "add"}, consistency=sync)
    kv.create_sparse("free", 1, {"name": "add"})
    for other in others:
        other.do("create_dense", "w", [1], {"name": "add"}, consistency=sync)
        other.do("create_sparse", "free", 1, {"name": "add"})
    others[0].begin("push", "w", [1.0])
    kv.push("w", np.ones(1, np.float32))
    assert others[0].answer() is None
    for _ in range(3):
        others[1].do("push", "free", [1, 2, 3, 4], [[1.0]] * 4)  # of both partitions
    before = {pid: share(pid).held_up_s for pid in (here, slow)}
    push = kv.submit_push("w", np.ones(1, np.float32))
    wait_until(lambda: share(slow).lags["w"].steps == 1, "the push")
    wait_until(
        lambda: kv.balance().workers[0].worker.endswith(f"process {slow}"),
        "the one that is waited for",
    )
    assert share(here).held_up_s == before[here]
    lag = share(slow).lags["w"]
    assert lag.steps == 1
    assert lag.since_s > 0
    assert lag.held_up_s > before[slow]
    assert (share(free).pushes, share(free).lags) == (6, {})
    others[1].do("push", "free", [1, 2, 3, 4], [[1.0]] * 4)
    assert share(free).pushes_per_s > 0
    others[0].do("push", "w", [1.0])
    push.result(30)
    assert [share(pid).lags["w"].steps for pid in (here, slow)] == [0, 0]


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_nobody_waits_for_the_grace_of_a_worker_whose_process_was_killed(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prpc_engine.kv.consistency.barrier_scheduler.GRACE_S", 600.0)
    sync = {"name": "sync", "workers": 2, "reduce": "sum"}
    with ExitStack() as stack:
        said = stack.enter_context(at("barrier.said"))
        master = stack.enter_context(Master())
        other = stack.enter_context(WorkerProcess(master.address, 1))
        server = stack.enter_context(RpcService(master=master.address, transports=[transport]))
        service = stack.enter_context(RpcService(master=master.address))
        TableServer(server)
        kv = TableWorker(service)
        kv.create_dense("w", (1,), {"name": "add"}, consistency=sync)
        other.do("create_dense", "w", [1], {"name": "add"}, consistency=sync)
        other.begin("push", "w", [1.0])
        kv.push("w", np.ones(1, np.float32))
        assert other.answer() is None
        push = kv.submit_push("w", np.ones(1, np.float32))
        said.wait(2)  # the workers have said which processes they are
        other.kill()
        push.result(30)
        assert kv.pull("w").tolist() == [3]
