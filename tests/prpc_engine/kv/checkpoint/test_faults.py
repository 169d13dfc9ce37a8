"""Whatever fails while a checkpoint is written, the one before it stays good, and the next one
succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine.errors import NoServer
from prpc_engine.kv import Constant, Sgd, TableShard, TableWorker
from prpc_engine.kv.checkpoint import CheckpointError, latest, verify
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.save import discard
from prpc_engine.kv.client.checkpoint_rounds import Rounds
from prpc_engine.kv.client.local import LocalService, run_to_end
from prpc_engine.kv.schema.table_spec import SparseSpec
from tests.prpc_engine.kv.checkpoint.jobs import (
    FailingFiles,
    assert_same,
    create_tables,
    local_job,
    train,
    values,
)
from tests.shard.small_shm import run_with_own_shm

ROOT = Path(__file__).parents[4]


def calls_of_a_save(folder: Path, full_every: int) -> list[str]:
    files = FailingFiles()
    worker = local_job(2, files)
    create_tables(worker)
    train(worker)
    worker.save(str(folder), 1, keep=1, full_every=full_every)
    files.calls.clear()
    train(worker)
    worker.save(str(folder), 2, keep=1, full_every=full_every)
    return files.calls


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 9])
def test_a_failure_of_any_call_is_told_and_leaves_the_one_before(
    tmp_path: Path, full_every: int
) -> None:
    calls = calls_of_a_save(tmp_path / "undisturbed", full_every)
    removes = {"remove_tree"} if full_every == 1 else set()  # else the one before is the base
    assert {"make_folder", "create", "write_at", "sync", "sync_folder", "rename"} | removes == set(
        calls
    )
    files = FailingFiles()
    worker, other = local_job(2, files), local_job()
    create_tables(worker)
    committed = calls.index("rename")
    for at, name in enumerate(calls):
        folder = tmp_path / str(at)
        train(worker)
        files.at = -1
        worker.save(str(folder), 1, keep=1, full_every=full_every)
        held = values(worker)
        train(worker)
        files.calls.clear()
        files.at, files.error = at, (errno.ENOSPC, errno.EIO)[at % 2]
        if at <= committed:
            with pytest.raises(CheckpointError, match=r"No space left|Input/output error"):
                worker.save(str(folder), 2, keep=1, full_every=full_every)
            # its room is free again
            assert [(finding.step, finding.fault) for finding in verify(folder)] == [(1, "")], name
            assert other.restore(str(folder)) == 1
            assert_same(values(other), held)
        else:
            # the rename is done; whether it is durable is not known
            with contextlib.suppress(CheckpointError):
                worker.save(str(folder), 2, keep=1, full_every=full_every)
            assert latest(folder).step == 2, name
        files.at = -1
        worker.save(str(folder), 3, keep=1, full_every=full_every)
        assert not any(finding.fault for finding in verify(folder)), name
        assert full_every > 1 or len(verify(folder)) == 1, name
        assert other.restore(str(folder)) == 3
        assert_same(values(other), values(worker))  # also what the save that failed would have had


def test_what_is_written_is_removed_although_one_server_cannot_be_asked_at_all() -> None:
    noted: list[str] = []

    def submit(server_id: int, method: str, timeout_s: float, /, *_: Any) -> Any:
        if (server_id, method) == (1, "checkpoint_save"):
            raise NoServer("server 1 has just ended")
        noted.append(f"{method} of {server_id}")
        return SimpleNamespace(result=partial(noted.append, f"{method} of {server_id} is answered"))

    with pytest.raises(
        CheckpointError,
        match="1 was not saved in /folder: server 1 has just ended; the checkpoints before it",
    ):
        Rounds(submit, range(2), 1.0, lambda: None).save("/folder", 1, None, 1)
    assert noted.index("checkpoint_save of 0 is answered") < noted.index("checkpoint_abort of 0")


def test_what_cannot_be_undone_at_a_lost_server_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    methods: list[str] = []

    def submit(index: int, method: str, timeout_s: float, /, *_: Any) -> Any:
        methods.append(method)
        if method == "checkpoint_find":
            return SimpleNamespace(result=lambda: ("checkpoint-00000000-000000000001", 1, {}))
        raise NoServer(f"no server {index}")

    rounds = Rounds(submit, range(1), 0.5, lambda: None, lost_s=0.4)
    with pytest.raises(CheckpointError, match="no server 0"):
        rounds.restore("/folder", lambda saved: {0: {}})
    assert methods.count("checkpoint_forget") > 1
    said = [each.getMessage() for each in caplog.records]
    assert [text for text in said if "checkpoint_forget" in text] == [
        "checkpoint_forget of partition 0 after a failure: no server 0"
    ]


class Interrupted(Files):
    """Just before a save's rename, `meanwhile` is called once."""

    meanwhile: Callable[[], None] | None = None

    def rename(self, path: Path, to: Path) -> None:
        if self.meanwhile is not None and to.name.startswith("checkpoint-"):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        super().rename(path, to)


def test_a_save_that_is_long_in_counting_leaves_what_the_next_one_writes(tmp_path: Path) -> None:
    """Its worker has given it up, perhaps, and saves again."""
    files, folder = Interrupted(), str(tmp_path)
    shard = TableShard(None, files)
    shard.create_table(SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1).to_dict())
    parts = []

    def write(number: int) -> None:
        shard.checkpoint_enter(str(number) * 16, folder)
        parts.append(
            run_to_end(shard.checkpoint_save(str(number) * 16, folder, number, 0, None, False))
        )

    def count(number: int) -> None:
        run_to_end(
            shard.checkpoint_commit(
                str(number) * 16, folder, number, parts[number : number + 1], None, None
            )
        )

    write(0)
    files.meanwhile = lambda: write(1)
    count(0)
    count(1)
    assert [(finding.step, finding.fault) for finding in verify(tmp_path)] == [(1, ""), (0, "")]


class GivenUp(Files):
    """Just before the save's rename, another server discards what it has written, and has not come
    far.
    """

    is_late = False

    def rename(self, path: Path, to: Path) -> None:
        if self.is_late and to.name.startswith("checkpoint-"):
            self.is_late = False
            discard(self, path)
        super().rename(path, to)

    def remove_tree(self, path: Path) -> None:
        if path.name.startswith("removed-"):
            next(path.glob("part-*")).unlink()
        else:
            super().remove_tree(path)


def test_a_save_that_is_given_up_as_it_is_committed_does_not_become_half_a_checkpoint(
    tmp_path: Path,
) -> None:
    files = GivenUp()
    worker = local_job(2, files)
    create_tables(worker)
    worker.save(str(tmp_path), 1, keep=1)
    files.is_late = True
    with pytest.raises(CheckpointError, match="No such file"):
        worker.save(str(tmp_path), 2, keep=1)
    assert (latest(tmp_path).step, latest(tmp_path).fault) == (1, "")


class OwnDisk(Files):
    """A server that sees another disk than the others at the same path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_folder(self, path: Path) -> None:
        super().make_folder(self.root / path.name)

    def create(self, path: Path) -> int:
        return super().create(self.root / path.parent.name / path.name)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(self.root / path.name)


def test_servers_that_do_not_see_one_folder_are_told_so(tmp_path: Path) -> None:
    service = LocalService()
    for files in (Files(), OwnDisk(tmp_path / "other")):
        service.create_server("kv", TableShard(None, files))
    worker = TableWorker(service, expected_servers=2)
    create_tables(worker)
    with pytest.raises(CheckpointError, match="the folder must be one that all servers see"):
        worker.save(str(tmp_path / "job"), 1)
    assert verify(tmp_path / "job") == []


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 2])
def test_kill_9_at_any_call_leaves_a_whole_one(tmp_path: Path, full_every: int) -> None:
    program = "tests.prpc_engine.kv.checkpoint.kill_at_every_call"
    ran = subprocess.run(
        [sys.executable, "-m", program, str(tmp_path), str(full_every)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    steps = [line.split() for line in ran.stdout.splitlines()]
    committed = [name for name, _ in steps].index("rename")  # killed before it
    assert {step for _, step in steps[: committed + 1]} == {"1"}
    assert {step for _, step in steps[committed + 1 :]} == {"2"}
    assert len(steps) > 20


@pytest.mark.slow
def test_a_full_disk_is_told_and_its_room_comes_back() -> None:
    run_with_own_shm(
        "size=4m",
        """
import os
import numpy as np
import pytest
from prpc_engine.kv import Sgd
from prpc_engine.kv.checkpoint import CheckpointError, verify
from tests.prpc_engine.kv.checkpoint.jobs import local_job

def free():
    return os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_bsize

worker = local_job(2)
worker.create_sparse("t", 64, Sgd(1.0))
keys = np.arange(4000)
worker.push("t", keys, np.ones((4000, 64), np.float32))
worker.save("/dev/shm/job", 1)
room = free()
keys = np.arange(40000)
worker.push("t", keys, np.ones((40000, 64), np.float32))
with pytest.raises(CheckpointError, match="No space left on device"):
    worker.save("/dev/shm/job", 2)
assert free() == room, (free(), room)
assert [(finding.step, finding.fault) for finding in verify("/dev/shm/job")] == [(1, "")]
other = local_job(3)
assert other.restore("/dev/shm/job") == 1
assert (other.pull("t", keys)[:4000] == -1).all() and (other.pull("t", keys)[4000:] == 0).all()
""",
    )
