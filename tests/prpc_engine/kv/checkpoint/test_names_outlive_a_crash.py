"""A checkpoint that somebody finds outlives a crash, though who committed it was killed between its
rename and the sync of its folder: who finds it syncs that. (A save whose end was not answered was
taken for saved, and the next crash took it: seed 5000084 of the scenario with a disk that loses.)
"""

from __future__ import annotations

import errno
import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from prpc_engine.kv import TableShard
from prpc_engine.kv.checkpoint import CheckpointError
from prpc_engine.kv.client.local import run_to_end
from tests.faults.zygote import Life
from tests.prpc_engine.kv.checkpoint.jobs import (
    FailingFiles,
    create_tables,
    job_and_shards,
    train,
)
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm


class KilledOnceRenamed(FailingFiles):
    """This process is killed with the checkpoint's name given, and not synced."""

    def rename(self, path: Path, to: Path) -> None:
        super().rename(path, to)
        self.at = len(self.calls)


def save_and_die(life: Life, folder: str) -> None:
    worker, _ = job_and_shards(1, KilledOnceRenamed())
    create_tables(worker)
    train(worker)
    life.done = 1
    worker.save(folder, 1)


@pytest.fixture
def renamed(farm: Farm, tmp_path: Path) -> str:
    """A folder with such a checkpoint."""
    folder = str(tmp_path / "job")
    assert farm.start_ready(save_and_die, folder).wait(PATIENCE_S) == -signal.SIGKILL
    return folder


def ask(shard: TableShard, method: str, folder: str) -> Any:
    return run_to_end(getattr(shard, method)(folder))


@pytest.mark.parametrize("method", ["checkpoint_newest", "checkpoint_find"])
def test_the_name_of_what_is_found_is_synced_before_it_is_told(renamed: str, method: str) -> None:
    files = FailingFiles()
    assert ask(TableShard(None, files), method, renamed)
    assert files.calls == ["sync_folder"]


def test_a_save_in_doubt_does_not_take_what_cannot_be_synced_for_saved(renamed: str) -> None:
    with pytest.raises(CheckpointError, match="Input/output error"):
        ask(TableShard(None, FailingFiles(0, errno.EIO)), "checkpoint_newest", renamed)


def test_a_restore_from_a_disk_that_cannot_be_synced_says_what_may_be_gone(
    renamed: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "prpc"):
        name, step, _ = ask(
            TableShard(None, FailingFiles(0, errno.EROFS)), "checkpoint_find", renamed
        )
    assert step == 1
    assert f"{renamed} cannot be synced" in caplog.text and name in caplog.text
