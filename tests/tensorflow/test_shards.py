"""A ps that is several processes (NETWORK_PS_CORE_NUMBER): what it comes to, and what becomes of
the task when one of them dies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.program import wait_until
from tests.tensorflow.tasks import Job, TaskProcess, clusters
from tests.tensorflow.test_scenarios import check, same

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
    ),
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two processes of a ps need two cores"
    ),
]
TWO = {"NETWORK_PS_CORE_NUMBER": "2"}
PS, SHARD = "/job:ps/task:0", "/job:ps/task:0/shard:1"


@pytest.fixture(scope="module", autouse=True)
def sharded() -> Iterator[Job]:
    """Two ps of two processes each, and two workers."""
    job = Job(secrets.randbits(32), TWO, ps=2, worker=2)
    yield job
    job.close()


def started(ending: contextlib.ExitStack, **env: str) -> tuple[TaskProcess, TaskProcess]:
    """A ps of two processes and a worker, that are killed in the end."""
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    ps, worker = (TaskProcess(places, job, 0, {**TWO, **env}) for job in ("ps", "worker"))
    for task in (worker, ps):
        ending.callback(task.kill)
        task.do("serves", "prpc")
    return ps, worker


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_losses_are_those_of_stock(sharded: Job, optimizer: str, resource: bool) -> None:
    check(sharded, "train", optimizer=optimizer, sparse=True, resource=resource)


@pytest.mark.parametrize(
    "scenario",
    [
        "partitioned",
        "checkpoint",
        "summaries_and_checkpoints",
        "sharded_files",
        "queue",
        "dataset",
        "resets",
        "containers",
        "devices",
        "accumulators",
    ],
)
def test_it_means_the_same(sharded: Job, scenario: str) -> None:
    check(sharded, scenario)


@pytest.mark.parametrize("version", [1, 2])
def test_a_loop_over_variables_of_both_is_lowered(sharded: Job, version: int) -> None:
    check(sharded, "loop", version=version, resource=True, gradient=False)


def test_variables_are_in_both_processes_and_each_gets_its_requests(sharded: Job) -> None:
    values, requests = sharded.worker().do("spread", "prpc")
    assert values == [[1.0 + 3 * number] * 4 for number in range(6)]
    # one for each step and process, whatever else told a task something meanwhile
    assert requests[PS] >= 3 and requests[SHARD] >= 3


def test_workers_agree_on_who_has_what_whatever_their_graphs(sharded: Job) -> None:
    sharded.worker(0).do("write", "prpc", name="shared", value=7.0)
    for worker in (0, 1):
        assert sharded.worker(worker).do("read", "prpc", name="shared", order=-1) == [7.0] * 6


def test_a_client_that_is_no_task_asks_each_process_too(sharded: Job) -> None:
    with TaskProcess(sharded.clusters, "client", 0) as client:
        keywords = {"optimizer": "adagrad", "sparse": True, "resource": True}
        stock, ours = (client.do("train", one, **keywords) for one in ("grpc", "prpc"))
        assert same(stock, ours)


def test_each_process_has_its_part_of_the_threads(sharded: Job) -> None:
    threads = sharded.tasks["ps", 0].do("threads_of_kernels", "prpc")
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2)


def test_what_was_dealt_out_and_is_used_together_later_is_refused_by_name(sharded: Job) -> None:
    kind, text = sharded.worker().do("used_together_too_late", "prpc")
    assert kind == "InvalidArgumentError", text
    assert "/v0" in text and "/v1" in text and "NETWORK_PS_CORE_NUMBER" in text


def test_the_plane_sendrecv_refuses_it_by_name(sharded: Job) -> None:
    kind, text = sharded.worker().do(
        "in_plane", "prpc", plane="sendrecv", fuse=False, which="open_steps"
    )
    assert kind == "UnimplementedError"
    assert "NETWORK_PS_CORE_NUMBER" in text and "PRPC_TF_PLANE" in text


def test_a_shard_that_is_killed_ends_its_task_and_steps_are_told() -> None:
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending)
        (pid,) = ps.do("processes", "prpc")
        worker.do("open_steps", "prpc")
        worker.begin("steps_until_an_error", "prpc")
        os.kill(pid, signal.SIGKILL)
        kind, text = worker.answer()
        assert kind == "UnavailableError", text
        assert PS in text
        kind, text = ps.do("join", "prpc")
        assert kind == "AbortedError"
        assert f"{SHARD} was ended by SIGKILL" in text and "start it again" in text


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_shards_end_with_their_task_however_that_ends(how: signal.Signals) -> None:
    with contextlib.ExitStack() as ending:
        ps, _ = started(ending)
        (pid,) = ps.do("processes", "prpc")
        os.kill(ps.pid, how)
        wait_until(lambda: is_gone(pid), "the end of the shard")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_steps_that_wait_at_shards_are_told_that_the_task_is_gone(how: signal.Signals) -> None:
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending)
        worker.do("open_waits", "prpc")
        worker.begin("waits_until_an_end", "prpc")
        wait_until(lambda: ps.do("running", "prpc") > 0, "a step that waits at the ps")
        os.kill(ps.pid, how)
        # which a MonitoredTrainingSession goes on from, unlike CancelledError
        assert worker.answer() == ["UnavailableError"]


def test_shards_end_with_their_task_when_a_process_that_it_forked_lives_on() -> None:
    with contextlib.ExitStack() as ending:
        ps, _ = started(ending)
        (pid,) = ps.do("processes", "prpc")
        forked = ps.do("fork", "prpc")
        ending.callback(os.kill, forked, signal.SIGKILL)
        ps.kill()
        wait_until(lambda: is_gone(pid), "the end of the shard")
        assert not is_gone(forked)


def test_ctrl_c_is_for_the_task_and_not_for_its_shards() -> None:
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending)
        (pid,) = ps.do("processes", "prpc")
        worker.do("open_steps", "prpc")
        os.kill(pid, signal.SIGINT)
        assert worker.do("steps_until_an_error", "prpc", steps=3) == ["", ""]
        assert not is_gone(pid)


def test_a_shard_that_does_not_start_is_named() -> None:
    from tensorflow.core.protobuf import config_pb2

    from prpc_engine.cluster.endpoint import Place
    from prpc_engine.errors import RpcError
    from prpc_engine.settings.address import Address
    from prpc_engine.settings.node_config import NodeConfig
    from prpc_engine.tensorflow.shard_process import ShardProcesses

    anywhere = Address("127.0.0.1", 0)
    place = Place(SHARD, "a plan", anywhere, anywhere, NodeConfig.load("ps", 2, shards=0))
    lost: list[Any] = []
    with pytest.raises(RpcError, match=rf"{SHARD} did not start: its process ended with code 1"):
        ShardProcesses(
            [place], config_pb2.ConfigProto(), lambda *told: lost.append(told), "/bin/false"
        )
    assert lost == []
