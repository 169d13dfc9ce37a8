"""The interpreter ends while a group is open: silently, soon, with the right code, and with nothing
left, in whatever order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pasted import without_stalls
from tests.shard.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]

BEGIN = """
import os, signal, sys, threading
import shard
from tests.shard.group_functions import Tin, double, index, kill_myself, make_in_slab, ramp
from tests.shard.group_functions import read_fifo, wait_for_ever, wait_until_gone

def new(shards=2, **arguments):
    return shard.ShardGroup(shards, start_method=sys.argv[1], drain_s=0.2, **arguments)

def main():
"""

END = """
if __name__ == "__main__":
    main()
"""

# What main() does, and the exit code that comes of it.
WAYS = {
    "in a global": ("global group; group = new(); group.map(index)", 0),
    "in a local": ("group = new(); group.map(index)", 0),
    "in a cycle": ("cycle = {'group': new()}; cycle['self'] = cycle; cycle['group'].map(index)", 0),
    "dropped": ("new().map(index)", 0),
    "closed": ("group = new(); group.map(index); group.close()", 0),
    "two of them": ("global one, two; one = new(); two = new(1); two.map(index)", 0),
    "made in a thread": (
        "thread = threading.Thread(target=lambda: new().map(index)); thread.start(); thread.join()",
        0,
    ),
    "in a thread that goes on": (
        "group = new(); threading.Thread(target=lambda: [group.map(double, 1) "
        "for _ in range(100)]).start()",
        0,
    ),
    "calls in flight": (
        "global calls; group = new(); calls = [group.submit_to(n % 2, double, n) "
        "for n in range(500)]",
        0,
    ),
    "a task in flight": ("global call; call = new().submit_to(0, wait_for_ever, 'task')", 0),
    "a busy shard": ("global call; call = new().submit_to(0, signal.pause)", 0),
    "a dead shard": ("group = new(); group.submit_to(0, kill_myself).error()", 0),
    "a dead shard that is to come back": (
        "group = new(restart='on-failure'); group.submit_to(0, kill_myself).error()",
        0,
    ),
    "a dead shard that would come back when no process can be started any more": (
        "import atexit; groups = []; atexit.register(wait_until_gone, groups); "
        "groups.append(new(restart='on-failure')); groups[0].submit_to(0, kill_myself).error()",
        0,
    ),
    "a stopped shard": (
        "group = new(); os.kill(group.statistics().shards[0].pid, signal.SIGSTOP)",
        0,
    ),
    "arrays held": (
        "global a, b; group = new(); a = group.map(make_in_slab, 100_000, 1.0); "
        "b = group.map(ramp, 100_000)",
        0,
    ),
    "a sharded": (
        "global tins; new(); tins = shard.Sharded(Tin); tins.invoke_on_all('get').result()",
        0,
    ),
    "sys.exit": ("group = new(); group.map(index); sys.exit(3)", 3),
    "sys.exit in its block": ("with new() as group: group.map(index); sys.exit(3)", 3),
    "os._exit": ("group = new(); group.map(index); os._exit(4)", 4),
    "the user's own atexit": (
        "import atexit; group = new(); atexit.register(lambda: group.map(index))",
        0,
    ),
}


# One that has died is announced, with what follows; that a shard is busy or stopped, too, and on a
# busy machine any may seem so.
EXPECTED = re.compile(
    r"shard 0 \(pid \d+, incarnation 1\) (is gone: .*; (restart 1 of 5|it stays down)|"
    r"did not end, and was killed at the close of its group: it does not answer: .*)"
)


def run(
    tmp_path: Path, main: str, start_method: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The script's end. Its shards write where it writes: this returns when the last of them has
    ended, too.
    """
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}    {main}\n{END}")
    return subprocess.run(
        [sys.executable, str(script), start_method],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


# Those in which it matters who started the shards, and who sees to their end.
WAYS_BY_SPAWN = ("in a global", "calls in flight", "a busy shard", "sys.exit", "os._exit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "start_method"),
    [*((way, "forkserver") for way in WAYS), *((way, "spawn") for way in WAYS_BY_SPAWN)],
)
def test_the_interpreter_ends_silently_with_an_open_group(
    tmp_path: Path, way: str, start_method: str
) -> None:
    main, exit_code = WAYS[way]
    ended = run(tmp_path, main, start_method)
    told = [line for line in without_stalls(ended.stderr).splitlines() if not EXPECTED.match(line)]
    assert told == []
    assert (ended.stdout, ended.returncode) == ("", exit_code)


@pytest.mark.slow
def test_shards_that_end_before_the_group_waits_for_them_are_no_news(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "with new() as group: group.map(index)",
        "forkserver",
        PRPC_FAILPOINTS="group.after_stop=delay:1000",
    )
    assert without_stalls(ended.stderr) == ""
    assert (ended.stdout, ended.returncode) == ("", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "main",
    ["global group; group = new(); raise KeyError('mine')", "with new(): raise KeyError('mine')"],
)
def test_an_exception_of_the_user_is_all_that_is_said(tmp_path: Path, main: str) -> None:
    ended = run(tmp_path, main, "forkserver")
    told = without_stalls(ended.stderr)
    assert told.startswith("Traceback")
    assert told.endswith("KeyError: 'mine'\n")
    assert told.count("Traceback") == 1
    assert (ended.stdout, ended.returncode) == ("", 1)


def test_a_script_that_makes_a_group_without_a_main_guard_ends_soon_and_says_why(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import shard\nwith shard.ShardGroup(2) as group:\n    print('made')\n")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1
    assert "made" not in ended.stdout
    assert "if __name__ == '__main__':" in ended.stderr
    assert "exit code 1; the group could not start" in ended.stderr
