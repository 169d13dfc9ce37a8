"""Groups and the limit of open files: raised where it may be, and named with the remedy where it
may not.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shard import ShardError, ShardGroup
from shard.group import descriptors
from tests.held import at
from tests.program import UNTIL_S
from tests.shard.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPT = """
import logging, os, resource, shard, sys
if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, {hard}))
    with shard.ShardGroup(6, pin=False) as group:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        print(len(set(group.map(os.getpid))), "shards,", files, "files")
"""


MANY_SCRIPT = """
import os, resource, shard
from tests.shard.group_functions import around
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    with shard.ShardGroup({size}, pin=False, idle="park") as group:
        called = group.submit_to(0, around, {size} - 1).result()
        print(called == list(range({size})), "all called their neighbour")
        most = max(len(files) for files in group.map(os.listdir, "/proc/self/fd"))
        print(most, "files at most in a shard")
    print("closed")
"""


def run(hard: int) -> subprocess.CompletedProcess[str]:
    """A group of six shards in a process that may have 40 files open, and then `hard`."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(hard=hard)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_the_soft_limit_is_raised_where_a_group_needs_more() -> None:
    ended = run(hard=1024)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "6 shards, 1024 files"), (
        ended.stderr
    )
    assert (
        "raised the soft limit of open files from 40 to 1024: 6 shards need up to" in ended.stdout
    )


def test_where_the_hard_limit_is_too_low_the_error_says_what_is_needed_and_what_to_do() -> None:
    ended = run(hard=60)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "ShardError: a group of 6 shards needs up to" in last
    assert "60 are allowed: raise the limit (`ulimit -n " in last


@pytest.mark.slow
def test_24_shards_start_call_each_other_and_close_where_1024_files_may_be_open() -> None:
    size = 24
    ended = subprocess.run(
        [sys.executable, "-c", MANY_SCRIPT.format(size=size)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=UNTIL_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    called, files, closed = ended.stdout.splitlines()
    assert (called, closed) == ("True all called their neighbour", "closed")
    assert int(files.split()[0]) < 6 * size + descriptors.OTHERS


@pytest.mark.parametrize("size", [36, 64])
def test_more_than_fit_into_1024_files_are_refused_with_the_remedy_before_any_is_started(
    size: int,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MANY_SCRIPT.format(size=size)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    needed = descriptors.needed(size)
    last = ended.stderr.splitlines()[-1]
    assert f"ShardError: a group of {size} shards needs up to" in last
    assert "1024 are allowed: raise the limit (`ulimit -n " in last
    assert needed <= int(last.partition("needs up to ")[2].split()[0]) < needed + 64


def test_a_start_opens_no_more_than_was_reckoned_and_keeps_little_of_it() -> None:
    size, most = 8, 0
    before = len(os.listdir("/proc/self/fd"))

    def count() -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) - before)

    with (
        at("group.before_spawn", count),
        ShardGroup(size, start_method="forkserver", pin=False),
    ):
        after = len(os.listdir("/proc/self/fd")) - before
    assert 2 * (size // 2) ** 2 < most <= descriptors.needed(size)
    assert after < 6 * size + descriptors.OTHERS


def test_more_shards_than_a_fork_server_can_pass_descriptors_for_are_refused_by_name() -> None:
    with pytest.raises(ShardError, match="use 'spawn'"):
        ShardGroup(200, start_method="forkserver", pin=False)


def test_a_limit_that_is_met_all_the_same_is_named() -> None:
    with (
        pytest.raises(ShardError, match=r"a group of 3 shards needs up to \d+ file descriptors"),
        descriptors.named(3),
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))
        try:
            for _ in range(9):
                os.dup(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
