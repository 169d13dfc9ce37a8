"""A push that some partitions have applied when others take it back, and what a worker keeps of
gradients that were not applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import BadArguments, MaybeExecuted
from prpc_engine.kv import (
    Consistency,
    EpochChanged,
    KVFuture,
    Ssp,
    Sync,
    TableServer,
    TableWorker,
    TopK,
    WorkersBehind,
)
from tests.prpc_engine.inside import push_part
from tests.prpc_engine.processes import PATIENCE_S, wait_until

ADD = {"name": "add"}
KEYS = np.arange(200)
ONES = np.ones((200, 1), np.float32)
NOTHING = np.arange(0), np.zeros((0, 1), np.float32)
TENSOR = (np.arange(100) + 0.37).astype(np.float32)
ZEROS = np.zeros(100, np.float32)
SYNC = Sync(workers=2, reduce="sum")
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


def one_ahead(workers: Workers, consistency: Consistency) -> None:
    """A table whose next push of the first worker waits for the second one."""
    for worker in workers:
        worker.create_sparse("rows", 1, ADD, consistency=consistency)
    if isinstance(consistency, Ssp):
        workers[0].push("rows", KEYS, ONES)


def divided(workers: Workers, share: float, timeout_s: float) -> KVFuture[None]:
    """A push that partition 1 has applied, and partition 0 has taken back after that share of its
    time, as the second worker came there too late.
    """
    one, two = workers
    with waiting(share):
        in_time = push_part(two, 1, "rows", *NOTHING)
        push = one.submit_push("rows", KEYS, ONES, timeout_s=timeout_s)
        in_time.result(PATIENCE_S)
        wait_until(push.done, "the end of its time at the other partition")
    return push


@contextmanager
def waiting(share: float) -> Iterator[None]:
    """Pushes are taken back after that share of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prpc_engine.kv.consistency.barrier_scheduler.WAIT_SHARE", share)
        yield


async def awaited(push: KVFuture[None]) -> None:
    await push


@pytest.mark.parametrize("consistency", [SYNC, Ssp(workers=2, bound=0)], ids=str)
@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_push_that_one_partition_took_back_is_applied_there_when_the_others_come(
    workers: Workers, consistency: Consistency, is_awaited: bool
) -> None:
    one_ahead(workers, consistency)
    before = workers[1].pull("rows", KEYS)
    push = divided(workers, 0.01, PATIENCE_S)
    late = push_part(workers[1], 0, "rows", *NOTHING)
    if is_awaited:
        asyncio.run(awaited(push))
    else:
        push.result(PATIENCE_S)
    late.result(PATIENCE_S)
    assert (workers[1].pull("rows", KEYS) - before == 1).all()


@pytest.mark.parametrize("consistency", [SYNC, Ssp(workers=2, bound=0)], ids=str)
def test_a_push_that_stays_divided_names_who_has_applied_it(
    workers: Workers, consistency: Consistency
) -> None:
    one_ahead(workers, consistency)
    push = divided(workers, 0.5, 1.0)
    said = r"applied by partition 1 of 'kv' .*, and not by partition 0 of 'kv' .* twice"
    for _ in range(2):  # as often as wanted
        with pytest.raises(MaybeExecuted, match=said):
            push.result()


def test_what_has_not_run_leaves_nothing_to_the_next_push(workers: Workers) -> None:
    one, two = workers
    for worker in workers:
        worker.create_dense("w", (100,), ADD, compression=TopK(0.1), consistency=SYNC)
    with waiting(0.005):
        for _ in range(3):
            with pytest.raises(WorkersBehind):
                one.push("w", TENSOR)
    pushed = TENSOR
    for _ in range(11):  # a tenth of the elements each time, until nothing is left
        push = one.submit_push("w", pushed)
        two.push("w", ZEROS)
        push.result(PATIENCE_S)
        pushed = ZEROS
    np.testing.assert_allclose(one.pull("w"), TENSOR, rtol=1e-5)


@pytest.mark.parametrize("begin", ["reset", "restore"])
def test_what_was_left_over_before_a_table_began_again_is_not_pushed_to_it(
    workers: Workers, begin: str, tmp_path: Path
) -> None:
    for worker in workers:
        worker.create_dense("w", (100,), ADD, compression=TopK(0.1))
    one, two = workers
    one.save(tmp_path, 0)
    for worker in workers:
        worker.push("w", TENSOR)
    if begin == "reset":
        one.reset("w")
    else:
        one.restore(tmp_path)
    with pytest.raises(EpochChanged):
        two.push("w", ZEROS)
    for _ in range(10):
        for worker in workers:
            worker.push("w", ZEROS)
    assert not one.pull("w").any()


def test_an_assign_that_is_refused_changes_no_part_of_the_tensor(workers: Workers) -> None:
    one, _ = workers
    one.create_dense("w", (1000, 100), ADD, split_bytes_min=0)
    values = np.ones((1000, 100), np.float32)
    values[-1, -1] = np.nan
    with pytest.raises(BadArguments, match=r"'w': the value of index \[999, 99\] is nan"):
        one.assign("w", values)
    assert not one.pull("w").any()


def test_who_only_saves_goes_on_after_another_workers_restore(
    workers: Workers, tmp_path: Path
) -> None:
    for worker in workers:
        for table in "ab":
            worker.create_sparse(table, 1, ADD)
    one, saver = workers
    one.push("a", KEYS, ONES)
    saver.save(tmp_path, 1)
    one.push("a", KEYS, ONES)
    assert one.restore(tmp_path) == 1
    for step in (2, 3):
        one.push("a", KEYS, ONES)
        saver.save(tmp_path, step)
    for _ in "ab":  # of each table once
        with pytest.raises(EpochChanged, match="restored from the checkpoint of step 1"):
            saver.pull("a", KEYS)
    assert (saver.pull("a", KEYS) == 3).all()
    assert one.restore(tmp_path) == 3
    assert (one.pull("a", KEYS) == 3).all()
