"""Locks on cores: between real processes, and gone with them however they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shard.group.core_locks import CoreLocks
from shard.group.cpu import placing_order, topology

TIMEOUT_S = 30.0
HOLD = """
import sys, pathlib
from shard.group.core_locks import CoreLocks
cores = [int(core) for core in sys.argv[3:]]
locks = CoreLocks.take(int(sys.argv[1]), pathlib.Path(sys.argv[2]), cores)
print(*locks.cores, flush=True)
sys.stdin.read()
"""


def other_process(
    count: int, folder: Path, cores: list[int]
) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that holds locks until it is killed, and which cores it got."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(count), str(folder), *map(str, cores)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    return process, [int(core) for core in process.stdout.readline().split()]


def test_two_tasks_never_share_a_core_and_a_killed_one_holds_none(tmp_path: Path) -> None:
    process, theirs = other_process(2, tmp_path, [4, 5, 6, 7])
    with process:
        assert theirs == [4, 5]
        ours = CoreLocks.take(2, tmp_path, [4, 5, 6, 7])
        assert ours.cores == (6, 7)
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    more = CoreLocks.take(2, tmp_path, [4, 5, 6, 7])
    assert more.cores == (4, 5)
    more.close()
    ours.close()


def test_too_few_are_none_with_one_warning_and_nothing_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = CoreLocks.take(1, tmp_path, [5])
    none = CoreLocks.take(3, tmp_path, [4, 5, 6])
    assert none.cores == ()
    assert [record.getMessage() for record in caplog.records] == [
        "no cores to bind shards to: 3 asked for, 2 of the 3 usable ones free; "
        f"the locks are in {tmp_path}"
    ]
    others = CoreLocks.take(2, tmp_path, [4, 5, 6])
    assert others.cores == (4, 6)
    for locks in (held, none, others):
        locks.close()
        locks.close()
        assert locks.cores == ()


def test_the_cores_are_those_of_this_process_the_best_first(tmp_path: Path) -> None:
    locks = CoreLocks.take(1, tmp_path / "made" / "when needed")
    assert locks.cores == (placing_order(topology())[0],)
    locks.close()


def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert CoreLocks.take(1, file, [0]).cores == ()
    assert (
        caplog.records[0].getMessage().endswith(f"0 of the 1 usable ones free; {file}: File exists")
    )


def test_a_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0").symlink_to(tmp_path / "elsewhere")
    assert CoreLocks.take(1, tmp_path, [0]).cores == ()
    assert not (tmp_path / "elsewhere").exists()
    assert len(caplog.records) == 1
