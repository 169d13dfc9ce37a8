"""Whole jobs of real processes, by `launch`: what ps-lite's own tests do, and what it never did."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from prpc_engine.pslite.launch import launch
from prpc_engine.settings import local_job
from prpc_engine.settings.local_job import START_AGAIN, TIME_IS_OVER, JobReport
from tests.forked import Forked, nursery
from tests.prpc_engine.processes import PATIENCE_S, ROOT, wait_until

TIMEOUT_S = 100.0
PYTHON = [sys.executable, "-m"]
NODE = "tests.prpc_engine.kv.pslite.node"
pytestmark = pytest.mark.slow  # each is a job of three processes or more


@pytest.fixture(autouse=True)
def nodes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not start Python and import everything, some 200 times: test_launch_command.py has
    jobs whose nodes do.
    """

    def start(
        arguments: list[str], *, env: Mapping[str, str], **others: object
    ) -> Forked | subprocess.Popen[bytes]:
        if arguments[: len(PYTHON)] != PYTHON:
            return subprocess.Popen(arguments, env=env, **others)  # type: ignore[call-overload,no-any-return]
        return nursery().start(arguments[len(PYTHON) :], env, leads_group=True)

    monkeypatch.setattr(local_job, "subprocess", SimpleNamespace(Popen=start))


def command(flow: str, *arguments: str) -> list[str]:
    return [*PYTHON, NODE, flow, *arguments]


def run(
    flow: str,
    *arguments: str,
    servers: int = 2,
    workers: int = 2,
    customers: bool = False,
    joint: bool = False,
    **more: str,
) -> JobReport:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return launch(
        command(flow, *arguments), servers, workers, TIMEOUT_S, customers, environment, joint
    )


@pytest.mark.parametrize(
    ("flow", "arguments"),
    [("connection", ()), ("simple_app", ()), ("kv_app", ()), ("kv_app_benchmark", ("1000000",))],
)
def test_what_ps_lite_tests_holds_here(flow: str, arguments: tuple[str, ...]) -> None:
    report = run(flow, *arguments)
    assert report.code == 0, str(report)
    assert sorted(each.name for each in report.ended) == [
        "scheduler",
        "server 0",
        "server 1",
        "worker 0",
        "worker 1",
    ]


def test_a_worker_process_may_have_several_customers() -> None:
    report = run("kv_app_multi_workers", customers=True)
    assert report.code == 0, str(report)
    assert sorted(each.name for each in report.ended) == [
        "scheduler",
        "server 0",
        "server 1",
        "worker 0",
    ]


def test_all_verbs_do_what_they_say_or_raise_what_they_say() -> None:
    report = run("verbs", workers=1)
    assert report.code == 0, str(report)


def test_a_pull_whose_length_the_worker_does_not_know_resizes_its_array() -> None:
    report = run("lengths", workers=1)
    assert report.code == 0, str(report)


def test_requests_wait_in_order_for_a_server_that_has_no_handle_yet() -> None:
    report = run("early", servers=1, workers=1)
    assert report.code == 0, str(report)


def test_a_barrier_names_who_is_missing_and_refuses_who_does_not_belong() -> None:
    report = run("barriers", servers=1)
    assert report.code == 0, str(report)


@pytest.mark.parametrize("van", ["unix", "tcp"])
def test_the_kv_app_is_exact_over_sockets_too(van: str) -> None:
    report = run("kv_app", DMLC_PS_VAN_TYPE=van)
    assert report.code == 0, str(report)


@pytest.mark.parametrize("flow", ["simple_app", "kv_app"])
def test_lost_messages_are_sent_again_and_handled_once(flow: str, seed: int) -> None:
    report = run(
        flow,
        servers=1,
        PS_DROP_MSG="10",
        PS_RESEND="1",
        PS_RESEND_TIMEOUT="50",
        PS_DROP_SEED=str(seed),
    )
    assert report.code == 0, str(report)


def test_messages_that_are_sent_again_are_handled_in_order(seed: int) -> None:
    lossy = {
        "PS_DROP_MSG": "20",
        "PS_RESEND": "1",
        "PS_RESEND_TIMEOUT": "50",
        "PS_DROP_SEED": str(seed),
    }
    report = run("order", servers=1, workers=1, **lossy)
    assert report.code == 0, str(report)


def test_a_joint_process_is_a_server_and_a_worker() -> None:
    report = run("joint", joint=True)
    assert report.code == 0, str(report)
    assert sorted(each.name for each in report.ended) == ["joint 0", "joint 1", "scheduler"]


def test_instances_of_a_group_are_nodes_of_their_own_and_one_for_the_application() -> None:
    report = run("group", DMLC_GROUP_SIZE="2")
    assert report.code == 0, str(report)


def test_handler_threads_keep_each_workers_order_and_none_waits_for_another() -> None:
    report = run("threads", servers=1)
    assert report.code == 0, str(report)


def test_pushes_land_in_registered_buffers() -> None:
    report = run("landing", servers=1)
    assert report.code == 0, str(report)


def test_requests_are_awaited_in_a_coroutine() -> None:
    report = run("awaited", workers=1)
    assert report.code == 0, str(report)


@pytest.mark.parametrize(
    ("nbytes", "mode"), [("1024", "both"), ("1024000", "push"), ("1024000", "pull")]
)
def test_what_bytedances_benchmark_moves_arrives_whole(nbytes: str, mode: str) -> None:
    report = run("own_benchmark", nbytes, mode)
    assert report.code == 0, str(report)


@pytest.mark.parametrize("nbytes", ["64", "1024000"])
def test_values_in_shared_memory_are_pushed_and_pulled_where_they_are(nbytes: str) -> None:
    report = run("ipc_benchmark", nbytes, servers=3, DMLC_LOCAL="1")
    assert report.code == 0, str(report)


def test_joint_nodes_exchange_values_with_all_others_in_every_round() -> None:
    report = run("benchmark_stress", "30000", "10", servers=3, workers=3, joint=True)
    assert report.code == 0, str(report)


# When something fails


def test_a_node_that_counts_others_than_the_scheduler_does_is_refused() -> None:
    report = run("miscounted", servers=1, workers=1)
    assert report.code == 0, str(report)


def test_the_first_failure_ends_the_job_and_is_its_exit_code() -> None:
    report = run("crash", servers=1)
    assert report.code == 7
    assert [each.name for each in report.ended if not each.by_us] == ["worker 1"]
    assert sorted(each.name for each in report.ended if each.by_us) == [
        "scheduler",
        "server 0",
        "worker 0",
    ]
    assert "worker 1 ended with 7" in str(report)


def test_the_log_tells_who_comes_and_goes_if_asked_to(capfd: pytest.CaptureFixture[str]) -> None:
    for verbose, said in (("0", 0), ("1", 2)):  # the flow joins twice
        report = run("connection", servers=1, workers=1, PS_VERBOSE=verbose)
        assert report.code == 0, str(report)
        log = capfd.readouterr().err
        assert (
            log.count("worker 0 (id 9) has joined the job at 127.0.0.1:")
            == log.count("worker has left the job")
            == said
        )


def test_a_job_that_takes_too_long_is_ended() -> None:
    report = launch([sys.executable, "-c", "import signal; signal.pause()"], 1, 1, timeout_s=0.5)
    assert report.code == TIME_IS_OVER
    assert [each.code for each in report.ended] == [128 + signal.SIGTERM] * 3


# When one that dies is started again


def launched_again(flow: str, folder: Path, restarts: int) -> JobReport:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return launch(
        command(flow, str(folder)), 1, 1, TIMEOUT_S, environment=environment, restarts=restarts
    )


def test_a_worker_that_dies_or_asks_for_it_is_started_again_and_rejoins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = launched_again("rejoin_launched", tmp_path, 2)
    assert report.code == 0, str(report)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": "[1.0, 1.0]",
        "1": "[2.0, 2.0]",
        "2": "[3.0, 3.0]",
    }
    assert [each.code for each in report.ended if each.came_again] == [
        128 + signal.SIGKILL,
        START_AGAIN,
    ]
    said = capsys.readouterr().err
    assert "worker 0 ended with 137; attempt 1 begins; restarts left: 1" in said
    assert "worker 0 ended with 254; attempt 2 begins; restarts left: 0" in said


def test_who_dies_once_more_than_there_are_restarts_ends_the_job(tmp_path: Path) -> None:
    report = launched_again("rejoin_launched", tmp_path, 1)
    assert report.code == START_AGAIN
    assert "worker 0 ended with 254; ended because of that" in str(report)
    assert "worker 0 ended with 137 and was started again" in str(report)


def test_an_elastic_server_that_is_killed_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    report = launched_again("elastic", tmp_path, 1)
    assert report.code == 0, str(report)
    assert [(each.name, each.code) for each in report.ended if each.came_again] == [
        ("server 0", 128 + signal.SIGKILL)
    ]


def test_a_scheduler_that_dies_and_an_exit_code_of_its_own_end_the_job() -> None:
    code = "import os, signal; os.environ['DMLC_ROLE'] == '%s' and (%s); signal.pause()"
    for role, end, wanted in (
        ("scheduler", "os.kill(os.getpid(), 9)", 137),
        ("worker", "os._exit(3)", 3),
    ):
        report = launch([sys.executable, "-c", code % (role, end)], 1, 1, TIMEOUT_S, restarts=9)
        assert report.code == wanted
        assert not any(each.came_again for each in report.ended)


class Processes:
    """Nodes that the test starts one by one, as it needs them. A context manager:
    none outlives it.
    """

    def __init__(self, servers: int, workers: int) -> None:
        # bound, so that nobody else is given its port; the scheduler may listen there all the same
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self._environment = {
            **os.environ,
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self._port.getsockname()[1]),
        }
        self._started: list[Forked] = []

    def start(self, role: str, *arguments: str, rank: int = -1) -> Forked:
        environment = {**self._environment, "DMLC_ROLE": role, "DMLC_RANK": str(rank)}
        process = nursery().start([NODE, *arguments], environment)
        self._started.append(process)
        return process

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait(PATIENCE_S)
        self._port.close()


def test_a_worker_that_dies_is_replaced_as_often_as_it_dies(tmp_path: Path) -> None:
    with Processes(1, 1) as job:
        others = [
            job.start("scheduler", "rejoin", str(tmp_path)),
            job.start("server", "rejoin", str(tmp_path)),
        ]
        for generation in range(3):
            worker = job.start("worker", "rejoin", str(tmp_path))
            wait_until(
                lambda name=str(generation): (tmp_path / name).exists(), f"worker {generation}"
            )
            worker.kill()
            worker.wait(PATIENCE_S)
        last = job.start("worker", "rejoin", str(tmp_path))
        assert [each.wait(TIMEOUT_S) for each in [last, *others]] == [0, 0, 0]


def test_a_server_that_dies_is_replaced_under_its_node_id(tmp_path: Path) -> None:
    with Processes(1, 1) as job:
        scheduler, server, worker = (
            job.start(role, "replaced_server", str(tmp_path))
            for role in ("scheduler", "server", "worker")
        )
        wait_until(lambda: (tmp_path / "pushed").exists(), "the first push")
        server.kill()
        server.wait(PATIENCE_S)
        (tmp_path / "killed").touch()
        server = job.start("server", "replaced_server", str(tmp_path))
        assert [each.wait(TIMEOUT_S) for each in (worker, server, scheduler)] == [0, 0, 0]


def test_a_server_that_dies_in_a_barrier_does_not_count_as_there(tmp_path: Path) -> None:
    with Processes(1, 1) as job:
        scheduler, server, worker = (
            job.start(role, "dead_in_barrier", str(tmp_path))
            for role in ("scheduler", "server", "worker")
        )
        wait_until(lambda: (tmp_path / "waits").exists(), "the server in the barrier")
        server.kill()
        server.wait(PATIENCE_S)
        assert [each.wait(TIMEOUT_S) for each in (worker, scheduler)] == [0, 0]


def test_a_server_that_dies_fails_what_was_asked_of_it_and_is_known_to_be_dead() -> None:
    with Processes(1, 1) as job:
        scheduler, server, worker = (
            job.start(role, "lost_server") for role in ("scheduler", "server", "worker")
        )
        assert worker.wait(TIMEOUT_S) == 0
        assert server.wait(TIMEOUT_S) == -signal.SIGKILL
        assert scheduler.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("length", ["1", "10000"])
def test_small_requests_that_leave_together_end_each_by_itself(length: str) -> None:
    with Processes(1, 1) as job:
        scheduler, server, worker = (
            job.start(role, "together", length) for role in ("scheduler", "server", "worker")
        )
        assert worker.wait(TIMEOUT_S) == 0
        assert server.wait(TIMEOUT_S) == -signal.SIGKILL
        assert scheduler.wait(TIMEOUT_S) == 0


def test_the_worker_that_holds_a_barrier_is_killed_and_its_successor_holds_it(
    tmp_path: Path,
) -> None:
    with Processes(1, 3) as job:
        scheduler, server = (
            job.start(role, "holder", str(tmp_path)) for role in ("scheduler", "server")
        )
        workers = [job.start("worker", "holder", str(tmp_path), rank=rank) for rank in range(3)]
        assert workers[0].wait(TIMEOUT_S) == -signal.SIGKILL
        (tmp_path / "killed").touch()
        successor = job.start("worker", "holder", str(tmp_path), rank=0)
        assert successor.wait(TIMEOUT_S) == -signal.SIGKILL
        assert [each.wait(TIMEOUT_S) for each in [*workers[1:], server, scheduler]] == [0, 0, 0, 0]
