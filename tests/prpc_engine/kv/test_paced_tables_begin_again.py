"""A table of a consistency is restored or reset while verbs wait in it for other workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import Consistency, EpochChanged, Ssp, Sync, TableServer, TableWorker
from tests.prpc_engine.processes import PATIENCE_S, wait_until

ADD = {"name": "add"}
KEYS = np.arange(200)
ONES = np.ones((200, 1), np.float32)
CONSISTENCIES = [Sync(workers=2, reduce="sum"), Ssp(workers=2, bound=0)]
Workers = tuple[TableWorker, TableWorker]


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two, of two servers."""
    with ExitStack() as stack:
        master = stack.enter_context(Master())
        for _ in range(2):
            TableServer(stack.enter_context(RpcService(master.address)))
        one, two = (
            TableWorker(
                stack.enter_context(RpcService(master.address)),
                expected_servers=2,
                timeout_s=PATIENCE_S,
                call_timeout_s=PATIENCE_S,
            )
            for _ in range(2)
        )
        yield one, two


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
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prpc_engine.kv.consistency.barrier_scheduler.WAIT_SHARE", 0.02)
    one, _ = workers
    pushed_by_both(workers, CONSISTENCIES[0])
    life, tables = one._ask(1, "standing", None).result()
    spec = one._catalog._specs["rows"][1].to_dict()  # a reset that did not reach partition 0
    one._ask(1, "create_table", None, spec, tables["rows"] + 1, life).result()
    with pytest.raises(EpochChanged, match="was reset"):
        one.push("rows", KEYS, ONES, timeout_s=PATIENCE_S)
