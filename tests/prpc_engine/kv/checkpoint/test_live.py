"""Checkpoints of servers in processes and shards of their own, while others push; and what becomes
of all when somebody dies.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prpc_engine import Master, RpcService
from prpc_engine.kv import Sgd, TableShard, TableWorker
from prpc_engine.kv.checkpoint import CheckpointError, latest, methods, verify
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.manifest import MANIFEST, decode
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.table import partition
from tests.prpc_engine.kv.checkpoint.jobs import assert_same, create_tables, train, values
from tests.prpc_engine.kv.checkpoint.processes import ServerProcess
from tests.prpc_engine.processes import wait_until

PATIENCE_S = 30.0
LOST_S = 5.0  # for a server that comes back: none does
DOWN = Sgd(1.0)  # each push of 1 lowers a value by exactly 1
ONE = np.ones((1, 1), np.float32)
SAVES, ROUNDS = 20, 20  # at least, so that the ones go on while there are the others


class PatientShard(TableShard):
    """In a shard's process: holds pushes for as long as a busy machine may take from enter to
    cut.
    """

    def __init__(self) -> None:
        methods.HOLD_S_MAX = PATIENCE_S
        super().__init__()


def counts_in(folder: Path, table: str) -> dict[int, int]:
    """{key: pushes} as the newest checkpoint has them."""
    path = latest(folder).path
    found: dict[int, int] = {}
    for file in decode((path / MANIFEST).read_bytes()).files():
        tensors = load_file(path / file.file)
        if file.spec["table"] == table:
            found |= zip(
                tensors["keys"].tolist(),
                (-tensors["values"][:, 0]).astype(int).tolist(),
                strict=True,
            )
    return found


@pytest.mark.slow
def test_no_effect_is_in_a_checkpoint_without_its_cause_and_nothing_acknowledged_is_missing(
    master: Master, tmp_path: Path
) -> None:
    keys = np.arange(100)
    owners = partition.owner_of(keys, 2)
    (a, d), (b, c) = keys[owners == 0][:2], keys[owners == 1][:2]
    done = {int(a): 0, int(c): 0}
    over = threading.Event()
    with (
        RpcService(master=master.address, shards=2) as sharded,
        RpcService(master=master.address) as service,
    ):
        sharded.create_server("kv", PatientShard, sharded=True)
        worker = TableWorker(service, expected_servers=2, timeout_s=PATIENCE_S)
        worker.create_sparse("counts", 1, DOWN)
        worker.create_dense("large", (2000, 1000), DOWN)

        def push_in_turn(cause: int, effect: int) -> None:
            while not over.is_set():
                worker.push("counts", np.array([cause]), ONE)
                worker.push("counts", np.array([effect]), ONE)
                done[int(cause)] += 1

        trainers = [threading.Thread(target=push_in_turn, args=pair) for pair in ((a, b), (c, d))]
        for trainer in trainers:
            trainer.start()
        try:
            deadline = float("inf")
            for step in itertools.count():
                if step == SAVES:
                    deadline = time.monotonic() + PATIENCE_S
                if step >= SAVES and min(done.values()) > ROUNDS:
                    break
                assert time.monotonic() < deadline, "nobody pushes while checkpoints are saved"
                acknowledged = dict(done)
                worker.save(str(tmp_path), step, keep=1)
                counts = {int(key): 0 for key in (a, b, c, d)} | counts_in(tmp_path, "counts")
                for cause, effect in ((a, b), (c, d)):
                    assert counts[effect] <= counts[cause] <= counts[effect] + 1
                    assert counts[effect] >= acknowledged[int(cause)]
        finally:
            over.set()
            for trainer in trainers:
                trainer.join(PATIENCE_S)
        worker.push("counts", np.array([a]), ONE)


@pytest.mark.slow
def test_kill_9_of_a_server_that_writes_leaves_the_checkpoint_before_to_others(
    master: Master, tmp_path: Path
) -> None:
    folder = str(tmp_path / "job")

    def run(killed_at: int, servers: int) -> TableWorker:
        started.enter_context(ServerProcess(master.address, killed_at))
        for _ in range(servers - 1):
            started.enter_context(ServerProcess(master.address))
        service = started.enter_context(RpcService(master=master.address))
        return TableWorker(
            service, expected_servers=servers, timeout_s=PATIENCE_S, call_timeout_s=LOST_S
        )

    with ExitStack() as started:
        worker = run(-1, 1)
        create_tables(worker)
        train(worker)
        worker.save(folder, 1)
        held = values(worker)
    with ExitStack() as started:
        worker = run(4, 2)
        assert worker.restore(folder) == 1
        train(worker)
        with pytest.raises(
            CheckpointError,
            match=f"step 2 was not saved in {folder}: .*; the checkpoints before it are",
        ):
            worker.save(folder, 2)
        assert [(finding.step, finding.fault) for finding in verify(folder)] == [(1, "")]
    with ExitStack() as started:
        worker = run(-1, 3)
        assert worker.restore(folder) == 1
        assert_same(values(worker), held)
        worker.save(folder, 3)
        assert latest(folder).step == 3


def test_pushes_wait_from_enter_to_the_cut_and_then_run_in_order(tmp_path: Path) -> None:
    shard = TableShard()
    shard.create_table(SparseSpec("t", 0, 1, DOWN, {"name": "constant"}, 1).to_dict())  # type: ignore[arg-type]
    shard.push("t", np.array([1]), ONE)
    shard.checkpoint_enter("0" * 16, str(tmp_path))
    waiting = [
        shard.push("t", np.array([1]), ONE),
        shard.push_pull("t", np.array([1]), ONE),
        shard.push("t", np.array([1]), ONE[0]),
    ]
    assert not any(answer.done() for answer in waiting)
    assert shard.pull("t", np.array([1])).tolist() == [[-1]]
    saving = shard.checkpoint_save("0" * 16, str(tmp_path), 1, 0, None, False)
    saving.send(None)  # it is cut, and waits for the disk
    assert waiting[0].result() == 2  # the version that it made
    assert waiting[1].result().tolist() == [[-3]]
    assert "float32[1, 1] is allowed" in str(waiting[2].error())
    assert shard.push("t", np.array([1]), ONE) == 4
    saving.close()


@pytest.fixture
def shard(request: pytest.FixtureRequest) -> TableShard:
    """Whose files are those of the test's parameter."""
    return TableShard(None, getattr(request, "param", None), hold_s=PATIENCE_S)


@pytest.fixture
def worker(master: Master, shard: TableShard) -> Iterator[TableWorker]:
    """Of one server in this process, as patient as those."""
    with RpcService(master=master.address) as service:
        service.create_server("kv", shard)
        worker = TableWorker(service, timeout_s=PATIENCE_S)
        create_tables(worker)
        yield worker


def test_a_worker_that_dies_after_enter_holds_pushes_up_for_a_moment_only(
    master: Master, worker: TableWorker, shard: TableShard, tmp_path: Path
) -> None:
    with RpcService(master=master.address) as other:
        shard.hold_s = 0.05
        other.create_client("kv").call("checkpoint_enter", "0" * 16, str(tmp_path))
        shard.hold_s = PATIENCE_S
    train(worker)
    worker.save(str(tmp_path), 1)
    assert latest(tmp_path).step == 1


class BlockedFiles(Files):
    """A disk that answers nothing until it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self.may_go_on.wait(PATIENCE_S)
        super().write_at(fd, data, offset)


BLOCKED = BlockedFiles()


@pytest.mark.parametrize("shard", [BLOCKED], indirect=True)
def test_a_save_that_takes_too_long_ends_and_the_next_one_succeeds(
    worker: TableWorker, shard: TableShard, tmp_path: Path
) -> None:
    with pytest.raises(TimeoutError):
        worker.save(str(tmp_path), 1, timeout_s=0.1)
    train(worker)  # nothing is held
    wait_until(
        lambda: not shard.is_saving,
        "the end of the save at its server, whose deadline began with its arrival",
    )
    BLOCKED.may_go_on.set()
    worker.save(str(tmp_path), 2)
    assert [(finding.step, finding.fault) for finding in verify(tmp_path)] == [(2, "")]
    assert worker.restore(str(tmp_path)) == 2
