"""Failpoints: what the variable may say, what an instrumented process does, and that all others are
left alone.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shard
from shard import PeerLostError, ShardGroup, failpoints

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "shard").rglob("*.py"))
KNOWN = ["ring.after_payload", "slab.after_copy", "mesh.before_run"]
TIMEOUT_S = 60  # means that it hangs

# Writes ten records into a ring of its own and says how far it came.
WRITE_TEN = """
import sys
from shard import Ring, failpoints
with Ring.create(4096) as ring:
    producer = ring.producer()
    for number in range(10):
        print(number, flush=True)
        producer.try_write(b"x")
print("hits", failpoints.hits("ring.after_payload"))
"""


def run(code: str, setting: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python running `code` with PRPC_FAILPOINTS=setting."""
    everything = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        failpoints.VARIABLE: setting,
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=everything,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


# -- the markers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_marker_stands_alone_on_its_line_where_a_call_may_stand(path: Path) -> None:
    source = path.read_text()
    markers = re.findall(failpoints.MARKER, source)
    if path.stem != "failpoints":
        assert len(markers) == source.count("failpoint: "), "a marker that is no marker"
    calls = [
        node.args[0].value
        for node in ast.walk(ast.parse(failpoints.instrument(source)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == failpoints.CALL
        and isinstance(node.args[0], ast.Constant)
    ]
    assert sorted(calls) == sorted(name for _, name in markers)


def test_the_table_says_of_every_failpoint_what_the_world_looks_like_there() -> None:
    assert failpoints.__doc__ is not None
    described = re.findall(r"^    ([a-z]+\.[a-z0-9_]+)  ", failpoints.__doc__, re.MULTILINE)
    assert sorted(described) == failpoints.names()


def test_a_call_stands_on_the_line_and_in_the_column_of_its_marker() -> None:
    source = (
        "if True:\n    # failpoint: ring.claimed\n    pass  # failpoint: "
        "ring.claimed is no marker here\n"
    )
    assert failpoints.instrument(source).splitlines() == [
        "if True:",
        '    __failpoint__("ring.claimed")',
        "    pass  # failpoint: ring.claimed is no marker here",
    ]


# -- what the variable may say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "armed"),
    [
        ("armed", {}),
        ("on", {}),
        ("ring.after_payload=kill9", {"ring.after_payload": ("kill9", 0, 1)}),
        ("ring.after_payload=stop@2", {"ring.after_payload": ("stop", 0, 2)}),
        ("ring.after_payload=exit", {"ring.after_payload": ("exit", 0, 1)}),
        (
            " mesh.before_run = raise , slab.after_copy=delay:50@17",
            {"mesh.before_run": ("raise", 0, 1), "slab.after_copy": ("delay", 50, 17)},
        ),
        ("ring.after_payload=exit:3", {"ring.after_payload": ("exit", 3, 1)}),
    ],
)
def test_the_variable_says_what_to_arm(setting: str, armed: dict[str, failpoints.Armed]) -> None:
    assert failpoints.parse(setting, KNOWN) == armed


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            "ring.after_paylod=kill9",
            "no failpoint 'ring.after_paylod' (did you mean 'ring.after_payload'?); "
            "there are mesh.before_run",
        ),
        (
            "ring.after_payload=kill",
            "'kill' is no action: kill9, stop, exit[:code], raise, "
            "delay:ms exist (did you mean 'kill9'?)",
        ),
        ("ring.after_payload=kill9:3", "'kill9:3' is no action"),
        ("ring.after_payload=delay", "'delay' is no action"),
        ("ring.after_payload=delay:soon", "'delay:soon' is no action"),
        ("ring.after_payload=kill9@0", "armed for hit 0, where the first is 1"),
        (
            "ring.after_payload=kill9@-1",
            "'ring.after_payload=kill9@-1' is no failpoint: name=action[:argument][@n] expected",
        ),
        ("ring.after_payload", "name=action[:argument][@n] expected, or the word armed alone"),
        ("ring.after_payload=kill9,", "'' is no failpoint"),
        ("ring.after_payload=kill9,ring.after_payload=stop", "ring.after_payload is armed twice"),
        ("armed,ring.after_payload=kill9", "'armed' is no failpoint"),
    ],
)
def test_the_variable_says_something_that_does_not_exist(setting: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        failpoints.parse(setting, KNOWN)


def test_an_unknown_name_in_the_variable_ends_the_import_with_one_line_that_names_both() -> None:
    ended = run("import shard", "ring.after_payloat=kill9")
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ValueError: PRPC_FAILPOINTS=ring.after_payloat=kill9: "
        "there is no failpoint 'ring.after_payloat' (did you"
    )


# -- a process without failpoints ------------------------------------------------------------------


def test_without_the_variable_modules_are_what_they_always_were() -> None:
    assert not failpoints.installed
    assert failpoints.CALL not in vars(shard.memory.ring)
    assert not [
        finder for finder in sys.meta_path if type(finder).__module__ == failpoints.__name__
    ]
    assert failpoints.hits("ring.after_payload") == 0


def test_without_the_variable_nothing_can_be_armed() -> None:
    with pytest.raises(ValueError, match="set PRPC_FAILPOINTS=armed before it imports shard"):
        failpoints.arm("ring.after_payload", "kill9")


# -- a process with failpoints ---------------------------------------------------------------------


@pytest.mark.alone  # it collects garbage, which a test beside it may need
def test_a_process_dies_at_the_hit_it_was_told_and_not_before() -> None:
    ended = run(WRITE_TEN, "ring.after_payload=kill9@4")
    shard.collect_garbage()  # the ring's name: its maker could not take it away
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ["0", "1", "2", "3"]


@pytest.mark.alone  # as above
def test_a_process_exits_with_the_code_it_was_told() -> None:
    ended = run(WRITE_TEN, "ring.after_tail=exit:7")
    shard.collect_garbage()
    assert ended.returncode == 7
    assert ended.stdout.split() == ["0"]


def test_a_failpoint_that_raises_is_seen_at_the_line_of_its_marker() -> None:
    ended = run(WRITE_TEN, "ring.after_payload=raise@2")
    assert (
        "shard.errors.FailpointError: failpoint ring.after_payload raised at hit 2" in ended.stderr
    )
    line = re.findall(r"shard/memory/ring\.py\", line (\d+)", ended.stderr)[-1]
    marker = (ROOT / "shard/memory/ring.py").read_text().splitlines()[int(line) - 1]
    assert marker.strip() == "# failpoint: ring.after_payload"


@pytest.mark.parametrize("setting", ["armed", "ring.after_payload=delay:1@3"])
def test_a_process_goes_on_where_nothing_is_armed_and_after_a_delay(setting: str) -> None:
    ended = run(WRITE_TEN, setting)
    assert ended.stdout.splitlines()[-1] == "hits 10"
    assert ended.stderr == ""


def test_a_process_stops_until_it_is_told_to_go_on() -> None:
    environment = {
        **os.environ,
        failpoints.VARIABLE: "ring.after_payload=stop@5",
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_TEN], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == [
            *(str(number) for number in range(10)),
            "hits 10",
        ]
        assert process.wait(TIMEOUT_S) == 0


ARM_IN_TURN = """
from shard import Ring, failpoints
assert failpoints.installed
def complaint(*args):
    try:
        failpoints.arm(*args)
    except ValueError as error:
        return str(error)
print(complaint("ring.after_paylod", "kill9"))
print(complaint("ring.after_payload", "kill8"))
print(complaint("ring.after_payload", "stop", 0))
with Ring.create(4096) as ring:
    producer = ring.producer()
    producer.try_write(b"x")
    failpoints.arm("ring.after_payload", "raise", 3)
    for number in range(6):
        try:
            producer.try_write(b"x")
        except failpoints.FailpointError:
            print("raised at", number, failpoints.hits("ring.after_payload"))
    failpoints.arm("ring.after_payload", "raise")
    failpoints.disarm_all()
    producer.try_write(b"x")
    print("hits", failpoints.hits("ring.after_payload"))
"""


def test_arming_counts_from_then_on_happens_once_and_is_undone() -> None:
    lines = run(ARM_IN_TURN, "armed").stdout.splitlines()
    assert "did you mean 'ring.after_payload'?" in lines[0]
    assert "did you mean 'kill9'?" in lines[1]
    assert lines[2] == "ring.after_payload armed for hit 0, where the first is 1"
    assert lines[3:] == ["raised at 2 4", "hits 1"]


def test_byte_code_is_neither_read_nor_written_for_instrumented_modules(tmp_path: Path) -> None:
    cache = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}

    def cached() -> dict[str, float]:
        return {
            path.name.partition(".")[0]: path.stat().st_mtime
            for path in (tmp_path / str(ROOT / "shard")[1:]).rglob("*.pyc")
        }

    run("import shard", "armed", **cache)
    # imported before anything is instrumented
    assert cached().keys() == {"__init__", "errors", "failpoints", "interpreter"}
    run("import shard", "", **cache)
    as_always = cached()
    assert as_always.keys() > {"ring", "slab", "mesh"}
    assert run(WRITE_TEN, "armed", **cache).stdout.splitlines()[-1] == "hits 10"
    assert cached() == as_always


# -- its children ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_inherit_the_variable_and_are_instrumented(method: str) -> None:
    code = (
        "import multiprocess\n"
        "from shard import failpoints\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocess.get_context({method!r}).Pool(1) as pool:\n"
        "        pool.apply(failpoints.arm, ('ring.claimed', 'kill9')) "
        " # refused where nothing is instrumented\n"
        "        print('armed')\n"
    )
    assert run(code, "armed").stdout.split() == ["armed"]


def test_a_test_arms_one_shard_of_a_group_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "armed")
    with ShardGroup(2) as group:
        group.submit_to(1, failpoints.arm, "mesh.before_run", "kill9", 2).result(TIMEOUT_S)
        assert group.submit_to(1, failpoints.hits, "ring.after_tail").result(TIMEOUT_S) > 0
        with pytest.raises(PeerLostError):
            group.submit_to(1, os.getpid).result(TIMEOUT_S)
        assert group.submit_to(0, failpoints.hits, "mesh.before_run").result(TIMEOUT_S) == 2
