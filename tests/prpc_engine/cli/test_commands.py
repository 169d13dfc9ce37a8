"""The command line as a user sees it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import prpc_engine
from perf import cli_bench
from prpc_engine import cli
from prpc_engine.cli import bench
from tests.program import run_to_end

ROOT = Path(__file__).parent.parent.parent.parent
TIMEOUT_S = 60.0


def prpc(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command, in a fork of a Python that has imported what most commands need."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **env}
    return run_to_end("prpc_engine.cli", *arguments, env=environment, timeout_s=TIMEOUT_S)


def started_prpc(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The same, in a Python of its own: what it imports, and what it makes of the environment as it
    starts.
    """
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "prpc_engine.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(arguments: list[str]) -> None:
    ran = prpc(*arguments)
    assert ran.returncode == (0 if arguments else 2)
    for name, summary in cli.COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(summary)}$", ran.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help_of_its_own(command: str) -> None:
    ran = started_prpc(command, "--help")  # each imports what it needs
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"Usage: prpc {command} ")


def test_a_command_that_is_not_there_is_wrong_usage_and_says_who_knows_which_are() -> None:
    ran = prpc("trainify")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines() == [
        "Usage: prpc [OPTIONS] <command> ...",
        "prpc: No such command 'trainify'. (`prpc --help` says more)",
    ]


@pytest.mark.parametrize(
    "arguments", [["bench", "everything"], ["gc", "--all"], ["demo", "--workers", "0"]]
)
def test_a_wrong_argument_is_wrong_usage(arguments: list[str]) -> None:
    ran = prpc(*arguments)
    assert ran.returncode == 2
    assert arguments[-1] in ran.stderr
    assert "Traceback" not in ran.stderr


def test_version_says_what_pyproject_and_the_package_say() -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    declared = found[1]
    assert prpc_engine.__version__ == declared
    assert prpc("--version").stdout == f"prpc {declared}\n"
    assert prpc("version").stdout.splitlines()[0] == f"prpc {declared}"
    assert json.loads(prpc("version", "--json").stdout)["prpc"] == declared


def test_doctor_prints_a_table_and_succeeds_where_these_tests_can_run() -> None:
    ran = prpc("doctor", COLUMNS="40")  # of a terminal, which this is not
    assert ran.returncode == 0, ran.stdout
    for fact in (
        "cores",
        "cgroup quota",
        "/dev/shm",
        "open files",
        "membarrier",
        "RDMA devices",
        "CUDA",
        "clock",
    ):
        assert fact in ran.stdout
    assert re.search(r"^\d+ ok, \d+ to look at, 0 bad$", ran.stdout, re.MULTILINE)


def test_doctor_as_json_holds_what_the_table_holds() -> None:
    findings = json.loads(prpc("doctor", "--json").stdout)
    assert {frozenset(finding) for finding in findings} == {
        frozenset(("fact", "value", "verdict", "advice"))
    }
    assert all(finding["advice"] for finding in findings if finding["verdict"] != "ok")


def test_doctor_fails_when_something_is_bad(tmp_path: Path) -> None:
    ran = prpc("doctor", "--json", PRPC_SECRET_FILE=str(tmp_path / "missing"))
    assert ran.returncode == 1
    bad = [finding for finding in json.loads(ran.stdout) if finding["verdict"] == "bad"]
    assert [finding["fact"] for finding in bad] == ["job secret"]


def test_doctor_never_shows_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("swordfish")
    assert "swordfish" not in prpc("doctor", "--json", PRPC_SECRET_FILE=str(file)).stdout
    assert "swordfish" not in prpc("doctor", "--json", PRPC_SECRET="swordfish-swordfish").stdout


@pytest.fixture
def dead_segment() -> str:
    """A segment that keeps its name, of a process that was killed."""
    script = (
        "import os, signal, shard\n"
        "handle = shard.Ring.create(4096)\n"
        "print(handle.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    return ran.stdout.strip()


@pytest.mark.alone  # a test beside it that collects garbage would take this
def test_gc_removes_what_a_killed_process_left(dead_segment: str) -> None:
    path = Path("/dev/shm") / dead_segment.removeprefix("/")
    assert path.exists()
    dry = prpc("gc", "--dry-run")
    assert dead_segment in dry.stdout.splitlines()
    assert "would be removed" in dry.stdout
    assert path.exists()
    ran = prpc("gc")
    assert ran.returncode == 0
    assert dead_segment in ran.stdout.splitlines()
    assert not path.exists()
    assert dead_segment not in prpc("gc").stdout


def test_gc_leaves_segments_of_the_living_alone() -> None:
    with_name = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import shard; handle = shard.Ring.create(4096); print(handle.name, flush=True); "
            "input()",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with with_name as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert name not in prpc("gc").stdout.splitlines()
        assert (Path("/dev/shm") / name.removeprefix("/")).exists()
        owner.communicate("\n", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "options", [[], ["--json"], ["--quick"], ["--record"], ["--compare"], ["--compare", "abc"]]
)
def test_bench_hands_over_to_perf(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def main(subject: str, **given: object) -> int:
        asked.append((subject, given))
        return 7

    monkeypatch.setattr("perf.cli_bench.main", main)
    assert cli.main(["bench", "rpc", *options]) == 7
    compare = (options[1:] or [""])[0] if "--compare" in options else None
    expected = {name: f"--{name}" in options for name in ("json", "quick", "record")}
    assert asked == [("rpc", {**expected, "compare": compare, "finished": None})]


def test_bench_says_what_to_do_where_the_benchmarks_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "benchmarks_package", lambda: "nowhere_perf")
    assert cli.main(["bench", "rpc"]) == cli.WRONG_USAGE
    said = capsys.readouterr().err
    assert "no benchmarks here" in said
    assert "pip install prpc-engine" in said


def test_a_finished_run_is_taken_for_something() -> None:
    ran = prpc("bench", "rpc", "--from", "run.jsonl")
    assert ran.returncode == cli.WRONG_USAGE
    assert "--compare or --record" in ran.stderr


def test_bench_knows_the_subjects_of_perf() -> None:
    assert tuple(bench.SUBJECTS) == cli_bench.SUBJECTS


@pytest.mark.parametrize("command", ["version", "doctor"])  # the second draws with rich
def test_a_reader_that_goes_away_is_no_traceback(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ran = run_to_end(
            "prpc_engine.cli", command, env=os.environ, timeout_s=TIMEOUT_S, stdout=write
        )
    finally:
        os.close(write)
    assert ran.returncode == cli.READER_GONE
    assert "Traceback" not in ran.stderr
