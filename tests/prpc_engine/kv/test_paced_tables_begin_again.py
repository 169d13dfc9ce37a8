"""A table of a consistency is restored or reset while verbs wait in it for other workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.kv import (
    Add,
    Consistency,
    Constant,
    EpochChanged,
    Ssp,
    Sync,
    TableServer,
    TableWorker,
)
from prpc_engine.kv.schema.layout import spread
from prpc_engine.kv.schema.table_spec import SparseSpec
from tests.prpc_engine.processes import PATIENCE_S, wait_until

ADD = {"name": "add"}
KEYS = np.arange(200)
ONES = np.ones((200, 1), np.float32)
CONSISTENCIES = [Sync(workers=2, reduce="sum"), Ssp(workers=2, bound=0)]
Workers = tuple[TableWorker, TableWorker]
Job = tuple[Workers, RpcClient]


@pytest.fixture
def job() -> Iterator[Job]:
    """Two workers of two servers, and a client of these."""
    with ExitStack() as stack:
        master = stack.enter_context(Master())
        for _ in range(2):
            TableServer(stack.enter_context(RpcService(master.address)))
        services = [stack.enter_context(RpcService(master.address)) for _ in range(2)]
        one, two = (
            TableWorker(
                service, expected_servers=2, timeout_s=PATIENCE_S, call_timeout_s=PATIENCE_S
            )
            for service in services
        )
        yield (one, two), services[0].create_client("kv", 2, PATIENCE_S)


@pytest.fixture
def workers(job: Job) -> Workers:
    return job[0]


def pushed_by_both(workers: Workers, consistency: Consistency) -> None:
    """One push of each, to a table that both have created."""
    one, two = workers
    for worker in workers:
        worker.create_sparse("rows", 1, ADD, consistency=consistency)
    first = one.submit_push("rows", KEYS, ONES)
    two.push("rows", KEYS, ONES)
    first.result()


def behind(worker: TableWorker) -> int:
    """By how many pushes somebody is."""
    lags = [share.lags["rows"].steps for share in worker.balance().workers if share.lags]
    return max(lags, default=0)


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=["sync", "ssp"])
@pytest.mark.parametrize("restores", [True, False], ids=["restored", "reset"])
def test_who_waits_in_a_table_that_begins_again_is_told_at_once(
    workers: Workers, tmp_path: Path, consistency: Consistency, restores: bool
) -> None:
    one, two = workers
    pushed_by_both(workers, consistency)
    two.save(tmp_path, step=7)
    if isinstance(consistency, Ssp):
        one.push("rows", KEYS, ONES)
    waiting = one.submit_push("rows", KEYS, ONES)
    wait_until(lambda: behind(two) == 1, "the push to be there")
    if restores:
        two.restore(tmp_path)
    else:
        two.reset("rows")
    with pytest.raises(EpochChanged) as told:
        waiting.result()
    assert told.value.step == (7 if restores else -1)
    pushed_by_both(workers, consistency)
    assert one.pull("rows", KEYS).max() == (4 if restores else 2)


def test_a_worker_that_waits_at_one_server_is_told_what_another_one_said(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prpc_engine.kv.consistency.barrier_scheduler.WAIT_SHARE", 0.02)
    workers, client = job
    pushed_by_both(workers, CONSISTENCIES[0])
    life, epochs = client.submit_to(1, "standing").result()
    whole = SparseSpec("rows", 0, 2, Add(), Constant(), 1, consistency=CONSISTENCIES[0])
    spec = spread(whole, 2)[1].to_dict()
    # a reset that did not reach partition 0
    client.submit_to(1, "create_table", spec, epochs["rows"] + 1, life).result()
    with pytest.raises(EpochChanged, match="was reset"):
        workers[0].push("rows", KEYS, ONES, timeout_s=PATIENCE_S)
