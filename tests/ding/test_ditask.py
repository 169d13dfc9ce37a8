"""PyPI's DI-engine, its own command and programs that know nothing of prpc: `--mq-type prpc`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import hold_port
from tests.program import ROOT, wait_until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ding") is None, reason="DI-engine is not installed"
)
BIN = Path(sys.executable).parent
LIMIT_S = 250
WORKERS_MAX = 4


@pytest.fixture
def base_port() -> Iterator[int]:
    """The first of some ports in a row that nobody else gets meanwhile."""
    with contextlib.ExitStack() as held:
        while True:
            with contextlib.ExitStack() as row:
                first = row.enter_context(hold_port())
                port = int(first.getsockname()[1])
                try:
                    for one in range(1, WORKERS_MAX):
                        row.enter_context(hold_port(port + one))
                except (OSError, OverflowError):
                    continue
                held.enter_context(row.pop_all())
                break
        yield port


class Launch:
    """One `ditask`, or another command. A context manager, which ends it."""

    def __init__(self, folder: Path, nodes: int, *command: str, port: int = 0, **env: str) -> None:
        self.folder = folder
        # what DI-engine and its libraries leave goes with the launch; short, for names of sockets
        self._temporary = tempfile.TemporaryDirectory(prefix="ding-", dir="/tmp")
        self._log = folder / f"log.{len(list(folder.glob('log.*')))}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "JOBS_FOLDER": str(folder),
                    "JOBS_NODES": str(nodes),
                    "JOBS_PORT": str(port),
                    "PYTHONWARNINGS": "ignore",
                    "TMPDIR": self._temporary.name,
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers end with it
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def said_plainly(self) -> str:
        """Without the line breaks that DI-engine's log puts where it likes."""
        return " ".join(self.said.split())

    def end(self) -> int:
        """Wait for it."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said[-5000:]) from None

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        left = _end_session(self.process)
        self._temporary.cleanup()
        assert not left, f"left in /dev/shm: {left}"


def _session(number: int) -> list[int]:
    """The processes of it that run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _end_session(process: subprocess.Popen[bytes]) -> list[str]:
    """Kill all that it has started; what those have left in /dev/shm. Semaphores of joblib, which
    DI-engine imports, are given back by a program that ends by itself alone: they are removed here.
    """
    pids = set(_session(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    left = [
        entry
        for entry in os.scandir("/dev/shm")
        if pids.intersection(map(int, re.findall(r"\d+", entry.name)))
    ]
    for entry in left:
        if entry.name.startswith("sem.loky-"):
            os.unlink(entry)
    return [entry.name for entry in left if not entry.name.startswith("sem.loky-")]


def ditask(folder: Path, main: str, nodes: int, *options: str, command: str = "ditask") -> Launch:
    """The command as a user types it."""
    package = ("--package", str(ROOT), "--main", f"tests.ding.jobs.{main}")
    return Launch(folder, nodes, str(BIN / command), *package, *options)


def results(folder: Path, nodes: int) -> list[dict[str, Any]]:
    """What each node has written."""
    return [json.loads((folder / f"{node}.json").read_text()) for node in range(nodes)]


def said_by(folder: Path, node: int) -> dict[str, Any]:
    """The same of one, or nothing."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads((folder / f"{node}.json").read_text())
        return found
    return {}


def test_two_workers_of_ditask_hear_each_other(tmp_path: Path, base_port: int) -> None:
    options = f"--parallel-workers 2 --topology mesh --protocol tcp --ports {base_port}"
    with ditask(
        tmp_path, "ping", 2, *options.split(), *["--mq-type", "prpc", "--labels", "a,b"]
    ) as one:
        assert one.end() == 0, one.said[-5000:]
        assert results(tmp_path, 2) == [
            {"heard": [1], "labels": ["a", "b"]},
            {"heard": [0], "labels": ["a", "b"]},
        ]
        assert "over shm" in one.said_plainly()


def test_three_workers_of_the_runner_hear_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ding.jobs", "ping", "torchrpc:cpu", "ipc", "3"]
    with Launch(tmp_path, 3, *command, port=1) as launch:
        assert launch.end() == 0, launch.said[-5000:]
    assert [each["heard"] for each in results(tmp_path, 3)] == [[1, 2], [0, 2], [0, 1]]


def test_the_first_event_of_each_node_arrives(tmp_path: Path) -> None:
    options = "--parallel-workers 2 --topology star --protocol ipc --mq-type prpc"
    with ditask(tmp_path, "first", 2, *options.split()) as launch:
        assert launch.end() == 0, launch.said[-5000:]
    assert results(tmp_path, 2) == [{"heard": [1]}, {"heard": [0]}]


@pytest.mark.parametrize("name", ["prpc", "nng"])
def test_a_burst_of_five_thousand_events_arrives_whole(
    name: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    options = f"--parallel-workers 2 --topology mesh --protocol ipc --mq-type {name}"
    with ditask(tmp_path, "burst", 2, *options.split()) as launch:
        assert launch.end() == 0, launch.said[-5000:]
    sent, got = results(tmp_path, 2)
    tell(f"DI-engine, {name}: of {sent['emitted']} emits {got['received']} arrived")
    if name == "prpc":  # nng: some 15 %, as it happens
        assert got["received"] == sent["emitted"]


def test_nodes_of_several_launches_join_die_and_are_named(tmp_path: Path, base_port: int) -> None:
    addresses = [f"tcp://127.0.0.1:{base_port + one}" for one in range(3)]

    def node(number: int) -> Launch:
        attach = ",".join(addresses[:number])
        return ditask(
            tmp_path,
            "beat",
            3,
            *f"--mq-type prpc --address 127.0.0.1 --ports {base_port + number}".split(),
            *f"--node-ids {number} --topology alone".split(),
            *(["--attach-to", attach] if attach else []),
        )

    def heard(by: int, of: int) -> int:
        return int(said_by(tmp_path, by).get("heard", {}).get(str(of), 0))

    with node(0) as first:
        wait_until(lambda: said_by(tmp_path, 0))
        with node(1) as second, node(2) as third:  # later than the first
            wait_until(lambda: all(heard(a, b) for a in range(3) for b in range(3) if a != b))
            os.killpg(second.process.pid, signal.SIGKILL)
            wait_until(lambda: "is lost" in first.said and "is lost" in third.said)
            now = heard(0, 2), heard(2, 0)
            wait_until(lambda: heard(0, 2) > now[0] + 10 and heard(2, 0) > now[1] + 10)
            (tmp_path / "enough").touch()
            assert (first.end(), third.end()) == (0, 0), first.said[-5000:]
            assert "node 1" in first.said_plainly().partition("is lost")[0][-200:]


def test_what_a_worker_raises_the_launch_raises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ding.jobs", "fail", "prpc", "ipc", "2"]
    with Launch(tmp_path, 2, *command, port=1) as launch:
        assert launch.end() != 0
        assert "P1 Error" in launch.said


OPTIONS = """
import sys
from click.testing import CliRunner
import tests.ding.jobs
from ding.entry import cli_ditask
from prpc_engine.ding.cli import extended

def say(*options):
    ran = CliRunner().invoke(cli_ditask, ["--main", "tests.ding.jobs.fail", *options])
    what = type(ran.exception).__name__, ran.exception
    print(ran.exit_code != 0, " ".join(ran.output.split()), *what)

say("--mq-type", "prpc", "--init-method", "env://")
say("--mq-type", "unknown")
say("--mq-type", "cuda")
say("--mq-type", "prpc", "--attach-to", "host:1")
extended(cli_ditask)
say("--cuda-device-map", "1-0-1")
say("--nonsense", "1")
say("--local-cuda-devices", "0,1")
say("--init-method", "tcp://127.0.0.1:1", "--global_rank", "3", "--protocol", "ipc")
"""


def test_an_option_that_is_wrong_is_named_and_torchrpcs_are_taken(tmp_path: Path) -> None:
    with Launch(tmp_path, 1, sys.executable, "-c", OPTIONS, CUDA_VISIBLE_DEVICES="") as launch:
        assert launch.end() == 0, launch.said[-5000:]
    lines = [line for line in launch.said.splitlines() if line.startswith(("True ", "False "))]
    for line, text in zip(
        lines,
        (
            "No such option",
            "KeyError",
            "needs a CUDA device",
            "attach_to='host:1'",
            "NODE_LOCALGPU_PEERGPU",
            "No such option",
            "a list of 1 numbers",
            "RuntimeError P1 Error",  # all of these are taken
        ),
        strict=True,
    ):
        assert line.startswith("True "), line
        assert text in line
