"""A child made by fork(): it is refused what lives in its parent, and the parent goes on as if it
had not been there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shard import ForkedError, Ring, Sharded, ShardGroup
from tests.pasted import without_stalls
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S, in_fork

ROOT = Path(__file__).parents[2]


def refused(function: Callable[..., Any], *args: Any) -> Callable[[], None]:
    def ask() -> None:
        with pytest.raises(ForkedError, match="start processes by spawn"):
            function(*args)

    return ask


def test_a_child_may_not_use_the_group_and_the_parent_goes_on(group: ShardGroup) -> None:
    for ask in (
        refused(group.submit_to, 0, functions.index),
        refused(group.submit_to, 1, lambda: 1),
        refused(group.map, functions.index),
        refused(group.at_start, functions.note, "forked"),
    ):
        assert in_fork(ask) == 0
        assert group.map(functions.index) == [0, 1]
    assert group.map(functions.notes) == [[], []]


def test_a_child_may_not_wait_for_its_parents_calls(group: ShardGroup) -> None:
    future = group.submit_to(0, functions.wait_for_ever, "task")
    assert in_fork(refused(future.result, PATIENCE_S)) == 0
    assert in_fork(future.cancel) == 0
    assert group.submit_to(0, functions.notes).result(PATIENCE_S) == ["task began"], (
        "the child cancelled nothing here"
    )
    future.cancel()


def test_a_child_may_not_use_a_sharded(group: ShardGroup) -> None:
    tins = Sharded(functions.Tin)
    assert in_fork(refused(tins.invoke_on, 0, functions.Tin.add, 1)) == 0
    assert in_fork(refused(tins.map_reduce, functions.Tin.get, max)) == 0
    assert tins.invoke_on_all(functions.Tin.get).result(PATIENCE_S) == [0, 0]


def test_a_child_may_not_use_the_ends_of_a_ring() -> None:
    with Ring.create(4096) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        assert in_fork(refused(producer.try_write, b"from the child")) == 0
        producer.write(b"from the parent")
        assert in_fork(refused(consumer.try_read)) == 0
        assert consumer.try_read() == b"from the parent"


def test_a_child_that_closes_the_group_closes_nothing(group: ShardGroup) -> None:
    assert in_fork(group.close) == 0
    assert group.map(functions.index) == [0, 1]


CHILD_ENDS = """
import os, sys, threading
import shard
from tests.shard.group_functions import ask_all

def main():
    with shard.ShardGroup(2, start_method=sys.argv[1], drain_s=60.0) as group:
        pids = [each.pid for each in group.statistics().shards]
        child = os.fork()
        if not child:
            {end}
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(group.map(ask_all, 4), [each.pid for each in group.statistics().shards] == pids)
    print([each.exit_code for each in group.statistics().shards])

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("end", "exit_code"), [("sys.exit(3)", 3), ("raise KeyError('child')", 1), ("return", 0)]
)
def test_a_child_that_ends_like_any_python_leaves_the_parents_shards_alone(
    tmp_path: Path, end: str, exit_code: int, start_method: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILD_ENDS.format(end=end))
    ended = subprocess.run(
        [sys.executable, str(script), start_method],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    # what a child says that just returned
    lines = [line for line in ended.stdout.splitlines() if line != "[None, None]"]
    assert lines == [str(exit_code), "[[8], [8]] True", "[0, 0]"]
    assert (
        ("KeyError: 'child'" in ended.stderr)
        if exit_code == 1
        else (without_stalls(ended.stderr) == "")
    )
    assert ended.returncode == 0
