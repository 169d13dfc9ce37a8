"""Communication shards: answers over tcp that leave another process than the one that sends the tensors."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Server, ServerConfig
from prpc_engine.cluster import Duplicate, StepAborted, TaskLost, relay
from prpc_engine.errors import ConfigError, DeadlineExceeded
from shard import CoreLocks, usable_cores
from tests.prpc_engine.cluster.tasks import PATIENCE_S, cluster_at, fresh_host
from tests.prpc_engine.processes import wait_until

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


@pytest.fixture
def host(seed: int) -> str:
    return fresh_host(seed)


@pytest.fixture
def tasks(host: str) -> Iterator[tuple[Server, Server]]:
    """A ps with two shards, and a worker that reaches it over tcp."""
    cluster = cluster_at(host, ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, config=ServerConfig(shards=2)) as ps,
        Server(cluster, "worker", 0, config=ServerConfig(transports=["tcp"])) as worker,
    ):
        assert ps.statistics().shards == 2
        yield ps, worker


def test_tensors_and_errors_come_through_a_shard(tasks: tuple[Server, Server]) -> None:
    ps, worker = tasks
    large = np.arange(1 << 18, dtype=np.float64)
    ps.send("large", large, to=WORKER0, step=0)
    ps.send("dead", None, to=WORKER0, step=0, is_dead=True)
    received, dead = worker.recv_many(["large", "dead"], source=PS0, step=0)
    np.testing.assert_array_equal(received, large)  # type: ignore[arg-type]
    assert dead is None
    assert worker.statistics().links[PS0].transport == "tcp"
    assert all(peer.connection.transport == "shm" for peer in ps._at.data.peers() if not peer.lost)  # they are the shards
    with pytest.raises(Duplicate, match="'dead' of step 0 was received before"):
        worker.recv("dead", source=PS0, step=0)
    wait = worker.submit_recv("never", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    ps.abort(0, "over")
    assert isinstance(wait.error(PATIENCE_S), StepAborted)


def test_who_gives_up_or_goes_away_behind_a_shard_leaves_its_tensors_there(tasks: tuple[Server, Server]) -> None:
    ps, worker = tasks
    with pytest.raises(DeadlineExceeded):
        worker.recv("late", source=PS0, step=0, timeout_s=0.05)
    wait_until(lambda: ps.statistics().waiting == 0)
    worker.submit_recv("late", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    worker.stop()
    wait_until(lambda: ps.statistics().waiting == 0)


def test_when_a_shard_is_killed_its_receivers_hear_of_it_and_the_others_go_on(
    tasks: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    ps, worker = tasks
    wait = worker.submit_recv("first", source=PS0, step=0)
    wait_until(lambda: ps.statistics().waiting == 1)
    assert ps._at._relays is not None
    for shard in ps._at._relays._group.statistics().shards:
        os.kill(shard.pid, signal.SIGKILL)
    assert isinstance(wait.error(PATIENCE_S), TaskLost)
    wait_until(lambda: ps.statistics().shards == 0)
    ps.send("second", np.array(2), to=WORKER0, step=1)
    assert worker.recv("second", source=PS0, step=1) == 2  # by the application's own port


def test_shards_are_bound_to_cores_that_no_other_task_takes(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_DISABLE_PIN_CORES", "0")
    monkeypatch.setattr(relay, "CORES_FOLDER", tmp_path)
    with Server(cluster_at(host, ps=1, worker=1), "ps", 0, config=ServerConfig(shards=1)) as ps:
        assert ps._at._relays is not None
        shard = ps._at._relays._group.statistics().shards[0]
        core = int(next(tmp_path.iterdir()).name)
        assert os.sched_getaffinity(shard.pid) == {core}
        with contextlib.closing(CoreLocks.take(1, tmp_path, [core])) as locks:
            assert not locks.cores


def test_where_shards_cannot_be_the_task_answers_itself(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_at(host, ps=1, worker=len(usable_cores()))
    monkeypatch.setenv("NETWORK_PS_CORE_NUMBER", "1000")
    with Server(cluster, "ps", 0) as ps:
        assert ps.statistics().shards == 0
    assert "usable cores are not one for each, and one for the application; its own process answers" in caplog.text
    monkeypatch.setenv("PRPC_DATA_PORT_OFFSET", "1000")
    with pytest.raises(ConfigError, match="by rule 'offset' the task has one data port"):
        Server(cluster, "ps", 0, config=ServerConfig(shards=1))
