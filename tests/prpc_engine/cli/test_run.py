"""`prpc run` and the clusters it makes, with scripts that need no TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prpc_engine.cli.local_cluster import run_cluster
from prpc_engine.errors import ConfigError
from prpc_engine.settings.local_job import JobReport, LocalJob
from tests.program import run_to_end
from tests.prpc_engine.processes import ROOT

TIMEOUT_S = 60.0
TELL = """
import json, os, sys, time
from pathlib import Path
place = json.loads(os.environ["TF_CONFIG"])
task = place["task"]
me = f"{task['type']} {task['index']}"
Path(sys.argv[1], me + ".new").write_text(json.dumps([place["cluster"], sys.argv[2:]]))
Path(sys.argv[1], me + ".new").rename(Path(sys.argv[1], me))
if me == "worker 1" and "fail" in sys.argv:
    sys.exit(9)
if task["type"] == "ps" or "fail" in sys.argv:
    time.sleep(1000)
"""


def run(
    folder: Path, *arguments: str, flags: bool = False, **tasks: int
) -> tuple[JobReport, dict[str, Any]]:
    """What came of a cluster, and what each of its tasks was told."""
    command = [sys.executable, "-c", TELL, str(folder), *arguments]
    report = run_cluster(command, tasks, flags, TIMEOUT_S)
    return report, {
        path.name: json.loads(path.read_text())
        for path in folder.iterdir()
        if path.suffix != ".new"
    }


def test_every_task_is_told_its_place_and_the_ps_end_with_the_rest(tmp_path: Path) -> None:
    report, told = run(tmp_path, ps=2, chief=1, worker=2, evaluator=1)
    assert report.code == 0
    assert {one.name for one in report.ended if one.by_us} == {"ps 0", "ps 1"}
    assert {one.name: one.code for one in report.ended if not one.by_us} == dict.fromkeys(
        ["chief 0", "worker 0", "worker 1", "evaluator 0"], 0
    )
    clusters = [cluster for cluster, _ in told.values()]
    assert clusters.count(clusters[0]) == len(clusters)
    assert {job: len(hosts) for job, hosts in clusters[0].items()} == {
        "ps": 2,
        "chief": 1,
        "worker": 2,
    }
    hosts = [host for job in clusters[0].values() for host in job]
    assert len(set(hosts)) == 5


def test_scripts_with_flags_are_told_by_them(tmp_path: Path) -> None:
    _, told = run(tmp_path, "--steps=3", flags=True, worker=1)
    cluster, arguments = told["worker 0"]
    assert arguments == [
        "--steps=3",
        "--job_name=worker",
        "--task_index=0",
        "--ps_hosts=",
        f"--worker_hosts={cluster['worker'][0]}",
    ]


def test_one_that_fails_ends_all(tmp_path: Path) -> None:
    report, _ = run(tmp_path, "fail", ps=1, worker=2)
    assert report.code == 9
    assert str(report).startswith("worker 1 ended with 9; ended because of that: ")


def test_what_a_process_left_behind_is_killed_while_its_number_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill, killed = os.killpg, []

    def kill_its_own(group: int, number: int) -> None:
        # raises once somebody has waited for it
        killed.append(os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT))
        kill(group, number)

    monkeypatch.setattr(os, "killpg", kill_its_own)
    with LocalJob() as job:
        job.start("it", [sys.executable, "-c", ""], os.environ)
        assert job.run().code == 0
    assert len(killed) == 1


@pytest.mark.parametrize(
    "tasks", [{"ps": 1, "worker": 0}, {"worker": -1}, {"worker": 100000}, {"chief": 2}]
)
def test_a_cluster_that_cannot_be_is_refused(tasks: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="tasks of"):
        run_cluster(["true"], tasks)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing.py"],
        ["--ps", "1", __file__],
        ["--evaluator", __file__],
        ["--flags", __file__],
        ["--timeout-s", "3", __file__],
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: list[str]) -> None:
    ran = run_to_end("prpc_engine.cli", "run", *arguments, env=os.environ, timeout_s=TIMEOUT_S)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1


LAUNCHER = """
import os, signal, sys, time
from prpc_engine.settings import local_job

class Libc:
    def prctl(self, *arguments):
        launcher = os.getppid()
        os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:
            time.sleep(0.001)
        return real.prctl(*arguments)

real, local_job._libc = local_job._libc, Libc()
with local_job.LocalJob() as job:
    job.start("it", [sys.executable, "-c", "print('it runs')"], os.environ)
"""


INTERRUPTED = """
import os, signal
from prpc_engine.settings.local_job import LocalJob

def interrupt():
    signal.raise_signal(signal.{name})

def handle(*_):
    raise KeyboardInterrupt

signal.signal(signal.{name}, handle)
os.register_at_fork({when}=interrupt)
try:
    with LocalJob() as job:
        job.start("it", ["sleep", "1000"], os.environ)
        job.run()
except KeyboardInterrupt:
    print("interrupted, and left none:", not job._running)
"""


def left_none(code: str, *arguments: str) -> None:
    """That program was interrupted, and says that none of its job's processes is left."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("interrupted, and left none: True\n", "")


@pytest.mark.parametrize("when", ["before", "after_in_parent"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_comes_as_a_process_is_started_ends_the_job(when: str, name: str) -> None:
    code = INTERRUPTED.format(name=name, when=when)
    left_none(code)


IMPATIENT = '''
import os, signal, sys, threading
from prpc_engine.settings.local_job import LocalJob

def interrupt():
    for _ in words:  # one as the process is there, another as it has got SIGTERM
        os.kill(os.getpid(), signal.SIGINT)

path = sys.argv[1]
os.mkfifo(path)
words = os.fdopen(os.open(path, os.O_RDWR))
stubborn = f"""
exec > {path} 2> /dev/null
trap 'echo told' TERM
echo started
while kill -0 $PPID; do sleep 0.1; done  # as long as its launcher lives
"""
try:
    with LocalJob() as job:
        job.start("it", ["sh", "-c", stubborn], os.environ)
        threading.Thread(target=interrupt, daemon=True).start()
        job.run()
except KeyboardInterrupt:
    print("interrupted, and left none:", not job._running)
'''


def test_a_second_ctrl_c_leaves_no_process_that_ignores_sigterm(tmp_path: Path) -> None:
    left_none(IMPATIENT, str(tmp_path / "words"))


def test_a_launcher_that_is_killed_while_it_starts_a_process_leaves_none() -> None:
    command = [sys.executable, "-c", LAUNCHER]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    # all who could write have ended
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
