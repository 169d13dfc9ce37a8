"""Tasks that are real processes: they find each other by each of the three rules, and none waits
for one that is gone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, Server, ServerConfig, empty
from prpc_engine.cluster import (
    Duplicate,
    StepAborted,
    TaskLost,
    TaskRestarted,
    TaskUnreachable,
)
from prpc_engine.errors import AuthenticationFailed, Cancelled, Closed, DeadlineExceeded
from prpc_engine.rpc.peer import Peer
from shard import run_blocking
from tests.held import at
from tests.prpc_engine.cluster.tasks import TaskProcess, cluster_at, fresh_host, rule_environment
from tests.prpc_engine.processes import PATIENCE_S, wait_until

PS0, PS1, WORKER0, WORKER1 = (
    f"/job:{job}/task:{index}" for job in ("ps", "worker") for index in (0, 1)
)


@pytest.fixture
def host(seed: int) -> str:
    return fresh_host(seed)


@pytest.mark.parametrize("rule", ["file", "offset", "exchange"])
def test_two_ps_and_two_workers_exchange_tensors(
    rule: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_at(host, ps=2, worker=2)
    for name, value in (environment := rule_environment(rule, cluster, tmp_path)).items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as exits:
        ps0, ps1, worker1 = (
            exits.enter_context(TaskProcess(cluster, job, index, environment))
            for job, index in (("ps", 0), ("ps", 1), ("worker", 1))
        )
        worker0 = exits.enter_context(Server(cluster, "worker", 0))
        for number, ps in enumerate((ps0, ps1)):
            ps.do("send", key="weights", value=[number, 1], to=WORKER0, step=1)
            ps.do("send", key="weights", value=[number, 2], to=WORKER1, step=1)
        assert [worker0.recv("weights", source=ps, step=1).tolist() for ps in (PS0, PS1)] == [
            [0, 1],
            [1, 1],
        ]  # type: ignore[union-attr]
        assert [worker1.do("recv", key="weights", source=ps, step=1) for ps in (PS0, PS1)] == [
            [0, 2],
            [1, 2],
        ]
        ps1.begin("recv", key="gradient", source=WORKER0, step=1)  # before it is sent
        wait_until(lambda: worker0.statistics().waiting == 1)
        worker0.send("gradient", np.arange(3), to=PS1, step=1)
        assert ps1.answer() == [0, 1, 2]
        worker0.send("peer", np.float32(4), to=WORKER1, step=1)
        assert worker1.do("recv", key="peer", source=WORKER0, step=1) == 4
        assert ps0.do("statistics") == {"rule": rule, "waiting": 0, "transports": []}
        assert worker1.do("statistics")["transports"] == ["shm"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_large_and_dead_tensors_arrive_as_they_were_sent(transport: str, host: str) -> None:
    cluster, config = cluster_at(host, ps=1, worker=1), ServerConfig(transports=[transport])
    with (
        Server(cluster, "ps", 0, config=config) as ps,
        Server(cluster, "worker", 0, config=config) as worker,
    ):
        ordinary, ours = np.arange(1 << 18, dtype=np.float64), empty((1 << 18,), np.int32)
        ours[...] = 7
        ps.send("ordinary", ordinary, to=WORKER0, step=0)
        ps.send("ours", ours, to=WORKER0, step=0)
        ps.send("columns", np.arange(12).reshape(3, 4).T, to=WORKER0, step=0)
        ps.send("dead", None, to=WORKER0, step=0, is_dead=True)
        ordinary[...] = 0  # sent as it was
        columns, dead, large, lent = worker.recv_many(
            ["columns", "dead", "ordinary", "ours"], source=PS0, step=0
        )
        assert dead is None
        assert columns is not None
        assert columns.tolist() == np.arange(12).reshape(3, 4).T.tolist()
        np.testing.assert_array_equal(large, np.arange(1 << 18, dtype=np.float64))  # type: ignore[arg-type]
        np.testing.assert_array_equal(lent, ours)  # type: ignore[arg-type]
        assert worker.statistics().links[PS0].transport == transport
        del large, lent


def test_a_link_says_why_it_took_no_better_path(host: str) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(transports=["tcp"])) as ps,
        Server(cluster, "worker", 0) as worker,
    ):
        ps.send("weights", np.zeros(1), to=WORKER0, step=0)
        worker.recv("weights", source=PS0, step=0)
        choice = worker.statistics().links[PS0].choice
        assert choice is not None
        assert choice.transport == "tcp"
        assert [(one.transport, one.reason.partition(" by ")[0]) for one in choice.refusals] == [
            ("shm", "not offered"),
            ("unix", "not offered"),
        ]


def test_receives_are_sync_futures_and_awaitable(host: str, loop: object) -> None:
    cluster = cluster_at(host, worker=1)
    with Server(cluster) as server:
        for key in "abc":
            server.send(key, np.array(ord(key)), to=WORKER0, step=0)

        async def receive() -> int:
            return int(await server.submit_recv("c", source=WORKER0, step=0))

        assert server.recv("a", source=WORKER0, step=0) == ord("a")
        assert server.submit_recv("b", source=WORKER0, step=0).result(PATIENCE_S) == ord("b")
        assert loop.run_until_complete(receive()) == ord("c")  # type: ignore[attr-defined]


@pytest.fixture
def pair(host: str) -> Iterator[tuple[TaskProcess, Server]]:
    """A ps in a process of its own, and a worker here that knows it."""
    cluster = cluster_at(host, ps=1, worker=1)
    with TaskProcess(cluster, "ps", 0) as ps, Server(cluster, "worker", 0) as worker:
        ps.do("send", key="first", value=1, to=WORKER0, step=0)
        assert worker.recv("first", source=PS0, step=0) == 1
        wait_until(
            lambda: worker.statistics().links[PS0].state == "up",
            "the end of connecting: what is asked now leaves at once",
        )
        yield ps, worker


def test_a_killed_ps_ends_the_waits_of_its_receivers(pair: tuple[TaskProcess, Server]) -> None:
    ps, worker = pair
    waits = [worker.submit_recv(key, source=PS0, step=1, timeout_s=600.0) for key in "ab"]
    wait_until(lambda: ps.do("statistics")["waiting"] == 2)
    ps.kill()
    for wait in waits:
        with pytest.raises(TaskLost, match=re.escape(f"of step 1 was asked of {PS0}")):
            wait.result(PATIENCE_S)


def test_what_a_killed_worker_waited_for_is_there_for_the_next_one(host: str) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with Server(cluster, "ps", 0) as ps:
        with TaskProcess(cluster, "worker", 0) as worker:
            worker.begin("recv", key="weights", source=PS0, step=0)
            wait_until(lambda: ps.statistics().waiting == 1)
            worker.kill()
        wait_until(lambda: ps.statistics().waiting == 0)
        with TaskProcess(cluster, "worker", 0) as again:
            ps.send("weights", np.array(1), to=WORKER0, step=1)
            assert again.do("recv", key="weights", source=PS0, step=1) == 1
            # the step knew the first one
            assert again.do("recv", key="weights", source=PS0, step=0)[0] == "TaskRestarted"


def test_a_step_does_not_go_on_with_a_ps_that_was_started_again(
    pair: tuple[TaskProcess, Server], host: str
) -> None:
    ps, worker = pair
    ps.kill()
    with TaskProcess(cluster_at(host, ps=1, worker=1), "ps", 0) as again:
        again.do("send", key="late", value=1, to=WORKER0, step=0)
        again.do("send", key="late", value=2, to=WORKER0, step=1)
        wait_until(lambda: worker.statistics().links[PS0].state == "down")
        with pytest.raises(TaskRestarted, match=f"step 0: {PS0} was started again"):
            worker.recv("late", source=PS0, step=0)
        assert worker.recv("late", source=PS0, step=1) == 2


def test_an_abort_ends_the_step_everywhere_and_no_other(pair: tuple[TaskProcess, Server]) -> None:
    ps, worker = pair
    wait, other = (worker.submit_recv("never", source=PS0, step=step) for step in (1, 2))
    ps.begin("abort", step=1, error="the loss is NaN", timeout_s=PATIENCE_S)
    text = f"step 1 was aborted by {PS0}: the loss is NaN"
    with pytest.raises(StepAborted, match=text):
        wait.result(PATIENCE_S)
    assert ps.answer() == []  # nobody was not told
    with pytest.raises(StepAborted, match=text):
        worker.recv("later", source=PS0, step=1)
    with pytest.raises(StepAborted, match=text):
        worker.send("later", np.zeros(1), to=PS0, step=1)
    ps.do("send", key="never", value=5, to=WORKER0, step=2)
    assert other.result(PATIENCE_S) == 5
    worker.abort(3, ValueError("no data"))
    assert ps.do("recv", key="x", source=WORKER0, step=3) == [
        "StepAborted",
        f"step 3 was aborted by {WORKER0}: ValueError: no data",
    ]


def test_an_abort_names_who_could_not_be_told(
    pair: tuple[TaskProcess, Server], caplog: pytest.LogCaptureFixture
) -> None:
    ps, worker = pair
    ps.kill()
    assert worker.abort(1, "over") == (PS0,)
    assert f"{PS0} does not know that step 1 was aborted" in caplog.text


def test_what_waits_in_a_step_that_is_cleaned_up_ends_and_its_number_is_free(
    pair: tuple[TaskProcess, Server],
) -> None:
    ps, worker = pair
    wait = worker.submit_recv("never", source=PS0, step=0)
    worker.cleanup(0)
    with pytest.raises(StepAborted, match="step 0 was cleaned up"):
        wait.result(PATIENCE_S)
    ps.do("cleanup", step=0)
    ps.do("send", key="first", value=2, to=WORKER0, step=0)
    assert worker.recv("first", source=PS0, step=0) == 2


def test_a_tensor_that_nobody_took_in_time_is_there_for_the_next_one(
    pair: tuple[TaskProcess, Server],
) -> None:
    ps, worker = pair
    with pytest.raises(DeadlineExceeded, match=f"'b' and 1 more of step 1 did not come from {PS0}"):
        worker.recv_many(["b", "c"], source=PS0, step=1, timeout_s=0.2)
    wait_until(lambda: ps.do("statistics")["waiting"] == 0)
    wait = worker.submit_recv("c", source=PS0, step=1)
    wait_until(lambda: ps.do("statistics")["waiting"] == 1)
    assert wait.cancel()
    with pytest.raises(Cancelled):
        wait.result()
    wait_until(lambda: ps.do("statistics")["waiting"] == 0)
    ps.do("send", key="c", value=3, to=WORKER0, step=1)
    assert worker.recv("c", source=PS0, step=1) == 3


def test_who_asks_again_after_its_deadline_is_no_duplicate(
    pair: tuple[TaskProcess, Server],
) -> None:
    ps, worker = pair
    for _ in range(30):  # the source hears of the end of one only after the next one
        with pytest.raises(DeadlineExceeded):
            worker.recv("late", source=PS0, step=1, timeout_s=0.005)
    first, second = (worker.submit_recv("late", source=PS0, step=1) for _ in range(2))
    with pytest.raises(
        Duplicate, match="'late' of step 1 was asked for again: a tensor is received once"
    ):
        first.result(PATIENCE_S)
    ps.do("send", key="late", value=1, to=WORKER0, step=1)
    assert second.result(PATIENCE_S) == 1


def test_a_receive_waits_for_a_ps_that_is_not_up_and_says_so_once(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with Server(cluster, "worker", 0) as worker:
        wait = worker.submit_recv("first", source=PS0, step=0, timeout_s=600.0)
        wait_until(lambda: "waiting for" in caplog.text)
        with TaskProcess(cluster, "ps", 0) as ps:
            ps.do("send", key="first", value=1, to=WORKER0, step=0)
            assert wait.result(PATIENCE_S) == 1
    told = [
        record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()
    ]
    assert len(told) == 1
    assert told[0].startswith(
        f"waiting for {PS0} at {host}:2222, for up to 120 s: {PS0} at {host}:2222 cannot be reached"
    )


def test_a_service_at_the_address_of_a_task_is_named(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETWORK_MAX_CONNECTION_TIMEOUT", "1")
    with (
        Master(f"{host}:2222"),
        Server(cluster_at(host, ps=1, worker=1), "worker", 0) as worker,
        pytest.raises(TaskUnreachable, match=f"the process that listens at {host}:2222 is no task"),
    ):
        worker.recv("first", source=PS0, step=0)


def test_a_ps_that_does_not_come_up_is_named_after_the_connection_timeout(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETWORK_MAX_CONNECTION_TIMEOUT", "50")
    with (
        Server(cluster_at(host, ps=1, worker=1), "worker", 0) as worker,
        pytest.raises(
            TaskUnreachable, match=rf"{PS0} at {host}:2222 does not answer .* which is 50 ms"
        ),
    ):
        worker.recv("first", source=PS0, step=0)


def test_the_settings_file_and_above_it_an_argument_say_the_connection_timeout(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[network]\nconnection_timeout_s = 0.04\n")
    monkeypatch.setenv("PRPC_CONFIG", str(file))
    cluster = cluster_at(host, ps=1, worker=1)
    for config, bound_ms in ((None, 40), (ServerConfig(connection_timeout_s=0.03), 30)):
        with (
            Server(cluster, "worker", 0, config=config) as worker,
            pytest.raises(TaskUnreachable, match=rf"does not answer .* which is {bound_ms} ms"),
        ):
            worker.recv("first", source=PS0, step=0)


def test_a_deadline_ends_a_wait_for_a_ps_that_is_not_up(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(cluster_at(host, ps=1, worker=1), "worker", 0) as worker:
        worker.submit_recv("patient", source=PS0, step=0)
        wait_until(lambda: "waiting for" in caplog.text, "the first attempt")
        with pytest.raises(
            DeadlineExceeded,
            match=rf"'first' of step 0 was not asked of {PS0} .*\(.*Connection refused\); start it",
        ):
            worker.recv("first", source=PS0, step=0, timeout_s=0.2)


def test_a_task_with_another_secret_is_told_at_once(host: str) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(secret="the secret of one job")),
        Server(
            cluster, "worker", 0, config=ServerConfig(secret="the secret of another job")
        ) as worker,
        pytest.raises(AuthenticationFailed),
    ):
        worker.recv("first", source=PS0, step=0)


def test_stopping_ends_what_waits_here_and_there(host: str) -> None:
    cluster = cluster_at(host, ps=1, worker=1)
    with Server(cluster, "ps", 0) as ps, Server(cluster, "worker", 0) as worker:
        ps.send("first", np.zeros(1), to=WORKER0, step=0)
        worker.recv("first", source=PS0, step=0)
        here, there = (
            ps.submit_recv("a", source=WORKER0, step=0),
            worker.submit_recv("b", source=PS0, step=0),
        )
        wait_until(lambda: ps.statistics().waiting == 1)
        ps.stop()
        assert isinstance(here.error(PATIENCE_S), Closed)
        assert isinstance(there.error(PATIENCE_S), TaskLost)


def test_a_receive_that_begins_as_its_server_is_stopped_ends_with_closed(host: str) -> None:
    with (
        Server(cluster_at(host, ps=1, worker=1), "worker", 0) as worker,
        at("cluster.receiving", lambda: worker.stop()),
    ):
        assert isinstance(worker.submit_recv("a", source=PS0, step=0).error(PATIENCE_S), Closed)


def test_a_receive_that_begins_as_its_step_is_aborted_ends_with_it(host: str) -> None:
    def abort_first() -> None:
        # it is not there, and does not know
        assert worker.abort(0, "the loss is NaN") == (PS0,)

    with (
        Server(cluster_at(host, ps=1, worker=1), "worker", 0) as worker,
        at("cluster.receiving", abort_first),
    ):
        assert isinstance(
            worker.submit_recv("a", source=PS0, step=0).error(PATIENCE_S), StepAborted
        )


def test_a_task_started_again_while_it_is_connected_to_is_not_taken_for_the_one_before(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, config = cluster_at(host, ps=1, worker=1), ServerConfig(transports=["tcp"])
    for name, value in rule_environment("offset", cluster, tmp_path).items():
        monkeypatch.setenv(name, value)

    def start_again() -> None:
        servers.pop().stop()
        servers.append(Server(cluster, "ps", 0, config=config))

    async def start_again_first() -> None:
        await run_blocking(start_again)

    servers = [Server(cluster, "ps", 0, config=config)]
    with (
        at(
            "node.reaching",
            start_again_first,
            when=lambda asked: asked.startswith("data of"),
            times=1,
        ),
        Server(cluster, "worker", 0, config=config) as worker,
    ):
        receipt = worker.submit_recv("a", source=PS0, step=0)
        wait_until(
            lambda: worker.statistics().links[PS0].state == "up", "a connection to the second one"
        )
        servers[0].send("a", np.ones(1), to=WORKER0, step=0)
        assert receipt.result(PATIENCE_S).tolist() == [1]
    servers.pop().stop()


def test_who_asks_a_server_that_still_starts_and_goes_away_again_takes_nothing_with_it(
    host: str,
) -> None:
    cluster = cluster_at(host, ps=1, worker=1)

    def come_and_go() -> None:
        with TaskProcess(cluster, "worker", 0) as worker:
            worker.begin("recv", key="weights", source=PS0, step=0)
            wait_until(lambda: ps.statistics().waiting == 1)
            worker.kill()
        wait_until(lambda: ps.statistics().waiting == 0)

    with Server(cluster, "ps", 0, start=False) as ps, at("endpoint.serving", come_and_go):
        ps.start()


def test_what_is_asked_of_a_task_as_it_is_lost_ends_with_task_lost(
    pair: tuple[TaskProcess, Server],
) -> None:
    ps, worker = pair

    def lose_first(peer: Peer) -> None:
        ps.kill()
        wait_until(lambda: peer.lost, "the loss of the ps")

    with (
        at("link.sending", lose_first, times=1),
        pytest.raises(TaskLost, match=f"'late' of step 0 was asked of {PS0}"),
    ):
        worker.recv("late", source=PS0, step=0, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_link_is_up_before_its_first_answer_is_there(transport: str, host: str) -> None:
    cluster, config = cluster_at(host, ps=1, worker=1), ServerConfig(transports=[transport])
    seen: list[str] = []
    with (
        Server(cluster, "ps", 0, config=config) as ps,
        Server(cluster, "worker", 0, config=config) as worker,
    ):
        ps.send("weights", np.zeros(1), to=WORKER0, step=0)
        with at("link.sending", lambda self: seen.append(self.statistics().transport)):
            worker.recv("weights", source=PS0, step=0)
        assert seen == [transport]
