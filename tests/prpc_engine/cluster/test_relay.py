"""Communication shards: answers over tcp that leave another process than the one that sends the
tensors.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from prpc_engine import Server, ServerConfig, metrics
from prpc_engine.cluster import Duplicate, StepAborted, TaskLost, relay
from prpc_engine.errors import Cancelled, ConfigError, DeadlineExceeded, RemoteError
from prpc_engine.service import cores as service_cores
from prpc_engine.settings import layers
from prpc_engine.settings.config import TlsSettings
from shard import CoreLocks, ShardStatistics, usable_cores
from tests.certificates import Authority
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host, rule_environment
from tests.prpc_engine.processes import PATIENCE_S, ROOT, wait_until

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


@pytest.fixture
def host(seed: int) -> str:
    return fresh_host(seed)


@pytest.fixture
def tasks(host: str, forked_shards: None) -> Iterator[tuple[Server, Server]]:
    """A ps with two shards, and a worker that reaches it over tcp."""
    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(shards=2)) as ps,
        Server(cluster, "worker", 0, config=ServerConfig(transports=["tcp"])) as worker,
    ):
        assert ps.statistics().shards == 2
        yield ps, worker


def test_a_script_that_its_shards_run_again_is_told_what_to_change(
    host: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import prpc_engine as p\nwith p.Server({{'ps': ['{host}:1']}}, "
        "config=p.ServerConfig(shards=1)): pass\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 1
    assert (
        'a shard of it imports the script: make it under `if __name__ == "__main__":`' in ran.stderr
    )
    assert "port is taken" not in ran.stderr


def test_tensors_and_errors_come_through_a_shard(tasks: tuple[Server, Server]) -> None:
    ps, worker = tasks
    large = np.arange(1 << 18, dtype=np.float64)
    ps.send("large", large, to=WORKER0, step=0)
    ps.send("dead", None, to=WORKER0, step=0, is_dead=True)
    received, dead = worker.recv_many(["large", "dead"], source=PS0, step=0)
    np.testing.assert_array_equal(received, large)  # type: ignore[arg-type]
    assert dead is None
    assert worker.statistics().links[PS0].transport == "tcp"
    assert sum(ps.statistics().shard_connections) == 1
    with pytest.raises(Duplicate, match="'dead' of step 0 was sent to its receiver before"):
        worker.recv("dead", source=PS0, step=0)
    wait = worker.submit_recv("never", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    ps.abort(0, "over")
    assert isinstance(wait.error(PATIENCE_S), StepAborted)


def test_who_gives_up_or_goes_away_behind_a_shard_leaves_its_tensors_there(
    tasks: tuple[Server, Server],
) -> None:
    ps, worker = tasks
    with pytest.raises(DeadlineExceeded):
        worker.recv("late", source=PS0, step=0, timeout_s=0.05)
    wait_until(lambda: ps.statistics().waiting == 0)
    worker.submit_recv("late", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    worker.stop()
    wait_until(lambda: ps.statistics().waiting == 0)


def test_a_shard_forgets_who_went_away_while_they_waited(tasks: tuple[Server, Server]) -> None:
    ps, worker = tasks
    worker.submit_recv("never", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    worker.stop()
    wait_until(lambda: ps.statistics().waiting == 0)
    assert ps._at._relays is not None
    group = ps._at._relays._group
    wait_until(lambda: group.map(askers_remembered, timeout_s=PATIENCE_S) == [0, 0])


def askers_remembered() -> int:
    """In a shard."""
    assert relay._relay is not None
    return len(relay._relay._under_way)


def test_each_shard_is_in_the_metrics_of_its_task_and_so_is_what_all_answered(
    tasks: tuple[Server, Server],
) -> None:
    ps, worker = tasks
    registry = CollectorRegistry()
    metrics.register(ps, registry)
    for step in range(3):
        ps.send("a", np.ones(3), to=WORKER0, step=step)
        worker.recv("a", source=PS0, step=step)
    read = registry.get_sample_value

    def served() -> list[float | None]:
        return [
            read("prpc_server_requests_total", {"service": "data", "server_id": one, "shard": one})
            for one in ("0", "1")
        ]

    # A shard that is late with its figures has none in a scrape.
    wait_until(
        lambda: served() in ([0, 3], [3, 0]),
        "the figures of both shards, one of which the worker is connected to",
    )
    wait_until(
        lambda: [read("prpc_shard_up", {"shard": one}) for one in ("0", "1")] == [1, 1],
        "both shards up",
    )
    assert read("prpc_task_answers_total", {"task": PS0}) == 3
    ps.stop()
    assert list(registry.collect()) == []


def shards_of(server: Server) -> list[ShardStatistics]:
    return [each.process for each in server.figures_of_shards()]


@pytest.mark.parametrize("rule", ["file", "offset", "exchange"])
def test_four_tasks_at_one_data_port_are_spread_evenly(
    rule: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_at(host, ps=1, worker=4)
    for name, value in rule_environment(rule, cluster, tmp_path).items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as exits:
        ps = exits.enter_context(Server(cluster, "ps", 0, config=ServerConfig(shards=2)))
        config = ServerConfig(transports=["tcp"])
        for index in range(4):
            worker = exits.enter_context(Server(cluster, "worker", index, config=config))
            ps.send("weights", np.array(index), to=f"/job:worker/task:{index}", step=0)
            assert worker.recv("weights", source=PS0, step=0) == index
            counts = ps.statistics().shard_connections
            assert sum(counts) == index + 1
            assert max(counts) - min(counts) <= 1
        assert ps.statistics().shards == 2


def test_whatever_else_a_task_may_ask_comes_through_a_shard_too_and_so_do_its_errors(
    host: str,
) -> None:
    def check(number: int) -> int:
        if number:
            raise LookupError(f"no {number} here")
        return os.getpid()

    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(shards=1), methods={"check": check}),
        Server(cluster, "worker", 0, config=ServerConfig(transports=["tcp"])) as worker,
    ):
        assert (
            worker.ask(PS0, "check", "a check", lambda _: (0,), PATIENCE_S).result() == os.getpid()
        )
        with pytest.raises(RemoteError, match="raised LookupError: no 7 here") as caught:
            worker.ask(PS0, "check", "a check", lambda _: (7,), PATIENCE_S).result()
        assert caught.value.type_name == "LookupError"


@pytest.mark.slow
def test_with_tls_the_lanes_of_a_task_meet_at_one_shard(host: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("task")
    tls = TlsSettings(files.cert, files.key, files.ca)
    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(shards=2, tls=tls)) as ps,
        Server(cluster, "worker", 0, config=ServerConfig(transports=["tcp"], tls=tls)) as worker,
    ):
        large = np.arange(1 << 18, dtype=np.float64)  # it takes the lane for large messages
        for step in range(2):
            ps.send("large", large, to=WORKER0, step=step)
            np.testing.assert_array_equal(worker.recv("large", source=PS0, step=step), large)  # type: ignore[arg-type]
        assert sorted(ps.statistics().shard_connections) == [0, 1]


def test_a_killed_shard_is_started_again_and_its_receives_fail_by_name(
    tasks: tuple[Server, Server],
) -> None:
    ps, worker = tasks
    wait = worker.submit_recv("first", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    before = shards_of(ps)
    for shard in before:
        os.kill(shard.pid, signal.SIGKILL)
    with pytest.raises(TaskLost, match=f"'first' of step 0 was asked of {PS0}"):
        wait.result(PATIENCE_S)
    wait_until(lambda: ps.statistics().waiting == 0)  # whoever asks again is no duplicate
    ps.send("first", np.array(1), to=WORKER0, step=0)
    # by whichever shard, or the application, is there
    assert worker.recv("first", source=PS0, step=0) == 1
    wait_until(
        lambda: {shard.pid for shard in shards_of(ps)}.isdisjoint(shard.pid for shard in before),
        "two other shards",
    )
    wait_until(lambda: ps.statistics().shards == 2)


@pytest.mark.slow
def test_a_shard_that_stays_down_is_told_of_once_and_others_answer_in_its_place(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.toml").write_text('[shards]\nrestart = "never"\n')
    monkeypatch.setenv("PRPC_CONFIG", str(tmp_path / "own.toml"))

    def lines() -> list[str]:
        return [
            one.getMessage()
            for one in caplog.records
            if one.name == "prpc" and "stays down: " in one.getMessage()
        ]

    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(shards=2)) as ps,
        Server(cluster, "worker", 0, config=ServerConfig(transports=["tcp"])) as worker,
    ):
        wait = worker.submit_recv("first", source=PS0, step=0)
        wait_until(lambda: ps.statistics().waiting == 1, "the receive")
        for shard in shards_of(ps):
            os.kill(shard.pid, signal.SIGKILL)
        with pytest.raises(TaskLost, match=f"'first' of step 0 was asked of {PS0}"):
            wait.result(PATIENCE_S)
        wait_until(lambda: len(lines()) == 2, "a line for each")
        first, last = lines()
        assert all(line.startswith(f"{PS0}: communication shard ") for line in (first, last))
        assert re.search(
            r"and shard [01] answers in its place \(shard [01] .* killed by SIGKILL; it stays down",
            first,
        )
        assert "and the task's own process answers in its place" in last
        ps.send("first", np.array(1), to=WORKER0, step=9)
        assert worker.recv("first", source=PS0, step=9) == 1


@pytest.mark.slow
def test_one_killed_shard_leaves_the_other_alone_and_gets_the_next_connection(host: str) -> None:
    cluster, config = cluster_at(host, ps=1, worker=2), ServerConfig(transports=["tcp"])
    with (
        Server(cluster, "ps", 0, config=ServerConfig(shards=2)) as ps,
        Server(cluster, "worker", 0, config=config) as worker0,
        Server(cluster, "worker", 1, config=config) as worker1,
    ):
        waits = []
        for number, worker in enumerate((worker0, worker1)):
            waits.append(worker.submit_recv("weights", source=PS0, step=0, timeout_s=600.0))
            wait_until(lambda count=number + 1: ps.statistics().waiting == count)  # type: ignore[misc]
        assert ps.statistics().shard_connections == (1, 1)
        os.kill(shards_of(ps)[0].pid, signal.SIGKILL)
        wait_until(lambda: any(wait.done() for wait in waits))
        lost, kept = (0, 1) if waits[0].done() else (1, 0)
        assert isinstance(waits[lost].error(PATIENCE_S), TaskLost)
        # the one that lives, and the new one
        wait_until(lambda: ps.statistics().shard_connections == (1, 0))
        wait_until(lambda: ps.statistics().waiting == 1)  # the dead one asks for nothing any more
        tasks = (WORKER0, WORKER1)
        for task in tasks:
            ps.send("weights", np.array(1), to=task, step=0)
        assert waits[kept].result(PATIENCE_S) == 1
        assert (worker0, worker1)[lost].recv("weights", source=PS0, step=0) == 1
        assert ps.statistics().shard_connections == (1, 1)


def test_shards_are_bound_to_cores_that_no_other_task_takes(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_DISABLE_PIN_CORES", "0")
    monkeypatch.setattr(service_cores, "locks_folder", lambda: tmp_path)
    with Server(cluster_at(host, ps=1, worker=1), "ps", 0, config=ServerConfig(shards=1)) as ps:
        core = int(next(tmp_path.iterdir()).name)
        assert os.sched_getaffinity(shards_of(ps)[0].pid) == {core}
        with contextlib.closing(CoreLocks.take(1, tmp_path, [core])) as locks:
            assert not locks.cores


def test_without_shards_the_threads_that_answer_are_bound_and_poll(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_DISABLE_PIN_CORES", "0")
    monkeypatch.setenv("PS_ENABLE_POLLING", "1")
    monkeypatch.setattr(service_cores, "locks_folder", lambda: tmp_path)
    before = os.sched_getaffinity(0)
    with Server(cluster_at(host, ps=1, worker=1), "ps", 0) as ps:
        core = int(next(tmp_path.iterdir()).name)
        driver, seen, here = ps._at.driver, list[tuple[set[int], int]](), threading.get_ident()
        assert os.sched_getaffinity(driver._thread.native_id or 0) == {core}

        def look() -> None:
            if threading.get_ident() == here:  # in join(); the progress thread leads until then
                seen.append((os.sched_getaffinity(0), driver.reactor.parks))
            if len(seen) < 2:
                driver.reactor.call_later(0.01, look)
            else:
                driver.stop_running()

        driver.reactor.call_soon(look)
        ps.join(PATIENCE_S)
        assert seen[0] == seen[1] == ({core}, seen[0][1])  # it did not sleep in between
    assert os.sched_getaffinity(0) == before
    with contextlib.closing(CoreLocks.take(1, tmp_path, [core])) as locks:
        assert locks.cores == (core,)


def test_a_core_number_above_the_cpuset_is_clamped_to_it_with_one_line(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = len(usable_cores())
    cluster = cluster_at(host, ps=1, worker=count)
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "1000")
    with Server(cluster, "ps", 0) as ps:
        assert ps.statistics().shards == (count if count > 1 else 0)
    [line] = [text for text in caplog.messages if "cpuset" in text]
    assert line.startswith("NETWORK_PS_CORE_NUMBER='1000'")
    assert f"has {count} cores: there will be {count}" in line


def test_where_shards_cannot_be_the_task_answers_itself(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "2")
    monkeypatch.setattr(layers, "usable_cores", lambda: [0, 1])
    with Server(cluster, "ps", 0, config=ServerConfig(transports=["tcp"])) as ps:
        assert ps.statistics().shards == 0
    text = "they need shared memory and tcp, and transports are tcp"
    assert "NETWORK_PS_CORE_NUMBER='2'" in caplog.text
    assert text in caplog.text
    with pytest.raises(ConfigError, match=text):
        Server(cluster, "ps", 0, config=ServerConfig(shards=1, transports=["tcp"]))


def test_whoever_asked_is_told_why_a_receive_was_cancelled() -> None:
    outcome = Cancelled("'receive' was cancelled there: the caller cancelled it")
    reason = DeadlineExceeded("0.001 s are over")
    assert relay.why_failed(outcome, [reason], True) is reason
    late = relay.why_failed(outcome, [], True)  # before either end has seen it
    assert isinstance(late, DeadlineExceeded)
    assert relay.why_failed(outcome, [], False) is outcome


def test_what_a_late_receive_raised_is_told_as_it_is() -> None:
    raised = RemoteError(
        "", type_name="a.Duplicate", remote_message="received before", remote_traceback=""
    )
    told = relay.why_failed(raised, [], True)
    assert (type(told).__name__, str(told)) == ("Duplicate", "received before")
