"""Receives that leave together: the same tensors in fewer messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from prpc_engine import Server, ServerConfig
from prpc_engine.cluster import StepAborted
from prpc_engine.cluster.fuse import FUSED_MAX, FuseCollector
from prpc_engine.errors import Closed, RemoteError
from shard import Driver, Future
from tests.held import at
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host
from tests.prpc_engine.processes import PATIENCE_S, wait_until

PS0, PS1, WORKER0 = "/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0"
KEYS = [f"k{index}" for index in range(8)]


@pytest.fixture
def cluster(seed: int) -> dict[str, list[str]]:
    return cluster_at(fresh_host(seed), ps=2, worker=1)


@pytest.fixture
def servers(cluster: dict[str, list[str]]) -> Iterator[tuple[Server, Server, Server]]:
    """Two ps and a worker that does not fuse by itself."""
    with (
        Server(cluster, "ps", 0) as ps0,
        Server(cluster, "ps", 1) as ps1,
        Server(cluster, "worker", 0) as worker,
    ):
        yield ps0, ps1, worker


def send_all(ps: Server, step: int) -> None:
    for index, key in enumerate(KEYS):
        ps.send(key, np.array(index), to=WORKER0, step=step)


def test_fused_and_unfused_receives_give_the_same_tensors(
    servers: tuple[Server, Server, Server],
) -> None:
    ps, _, worker = servers
    for step in range(3):
        send_all(ps, step)
    one_by_one = [int(worker.recv(key, source=PS0, step=0)) for key in KEYS]  # type: ignore[arg-type]
    assert worker.statistics().messages == len(KEYS)
    together = worker.recv_many(KEYS, source=PS0, step=1)
    with worker.fuse(2):
        collected = [worker.submit_recv(key, source=PS0, step=2) for key in KEYS]
    assert (
        one_by_one
        == [int(one) for one in together]
        == [int(one.result(PATIENCE_S)) for one in collected]
    )  # type: ignore[arg-type]
    statistics = worker.statistics()
    assert (statistics.messages, statistics.tensors, statistics.fused) == (
        len(KEYS) + 2,
        3 * len(KEYS),
        2 * len(KEYS),
    )


def test_a_fused_request_waits_for_its_last_tensor(servers: tuple[Server, Server, Server]) -> None:
    ps, _, worker = servers
    wait = worker.submit_recv_many(["a", "b"], source=PS0, step=0)
    ps.send("b", np.array(2), to=WORKER0, step=0)
    wait_until(lambda: ps.statistics().waiting == 2)
    assert not wait.done()
    ps.send("a", np.array(1), to=WORKER0, step=0)
    assert [int(one) for one in wait.result(PATIENCE_S)] == [1, 2]


def test_with_tensor_fuse_the_first_wait_sends_one_request_to_each_source(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_TENSOR_FUSE", "1")
    with (
        Server(cluster, "ps", 0) as ps0,
        Server(cluster, "ps", 1) as ps1,
        Server(cluster, "worker", 0) as worker,
    ):
        for ps in (ps0, ps1):
            send_all(ps, 0)
        receipts = [
            worker.submit_recv(key, source=source, step=0) for key in KEYS for source in (PS0, PS1)
        ]
        assert worker.statistics().messages == 0
        assert int(receipts[0].result(PATIENCE_S)) == 0
        assert worker.statistics().messages == 2
        assert [int(one.result(PATIENCE_S)) for one in receipts[::2]] == list(range(len(KEYS)))


def test_config_wins_over_the_environment(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_TENSOR_FUSE", "1")
    with Server(cluster, "worker", 0, config=ServerConfig(tensor_fuse=False)) as worker:
        worker.send("a", np.zeros(1), to=WORKER0, step=0)
        worker.submit_recv("a", source=WORKER0, step=0)
        assert worker.statistics().messages == 1


def test_a_full_collection_leaves_by_itself(servers: tuple[Server, Server, Server]) -> None:
    _, _, worker = servers
    with worker.fuse(0):
        for index in range(FUSED_MAX):
            worker.submit_recv(f"k{index}", source=PS0, step=0)
        assert worker.statistics().messages == 1


def test_what_was_collected_ends_with_its_step_and_with_the_server(
    servers: tuple[Server, Server, Server],
) -> None:
    _, _, worker = servers
    with worker.fuse(0), worker.fuse(1):
        aborted = worker.submit_recv("a", source=PS0, step=0)
        stopped = worker.submit_recv("a", source=PS0, step=1)
        worker.abort(0, "over")
        assert isinstance(aborted.error(PATIENCE_S), StepAborted)
        worker.stop()
    assert isinstance(stopped.error(PATIENCE_S), Closed)


def test_whatever_a_fused_request_fails_with_all_of_its_receivers_hear_of_it() -> None:
    failed, driver = Future(), Driver(polling=False)
    try:
        collector = FuseCollector(
            False, driver, threading.Lock(), lambda message: message.leave(lambda _: failed)
        )
        collector.open(0)
        receipts = [collector.receive(0, 0, key, 1.0) for key in "ab"]
        collector.close(0)
        failed.set_error(
            RemoteError("a bug", type_name="KeyError", remote_message="a", remote_traceback="")
        )
        assert [type(receipt.error(0.0)) for receipt in receipts] == [RemoteError, RemoteError]
        assert not collector.under_way
    finally:
        driver.close()


def test_one_cancelled_receive_takes_nothing_from_the_others(
    servers: tuple[Server, Server, Server],
) -> None:
    ps, _, worker = servers
    with worker.fuse(0):
        one, other = (worker.submit_recv(key, source=PS0, step=0) for key in "ab")
    assert one.cancel()
    for key in "ab":
        ps.send(key, np.array(ord(key)), to=WORKER0, step=0)
    assert other.result(PATIENCE_S) == ord("b")


def test_a_receive_made_as_its_step_is_cleaned_up_is_found_by_who_aborts_the_step(
    cluster: dict[str, list[str]],
) -> None:
    with Server(cluster, "worker", 0) as worker:
        with at("fuse.receiving", lambda: worker.cleanup(0)):
            # of whom nobody hears
            receipt = worker.submit_recv("k", source=PS0, step=0, timeout_s=2.0)
        worker.abort(0, "enough", timeout_s=0.0)
        with pytest.raises(StepAborted, match="enough"):
            receipt.result(PATIENCE_S)
