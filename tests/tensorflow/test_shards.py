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
from tests.tensorflow.tasks import Job, Script, TaskProcess, clusters
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


SCRIPT = """
import json, os, sys
import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
config = json.loads(os.environ["TF_CONFIG"])
cluster, job = tf.train.ClusterSpec(config["cluster"]), config["task"]["type"]
server = v1.train.Server(cluster, job_name=job, task_index=0)
if job == "ps":
    from prpc_engine.tensorflow.server import server_of

    print(*server_of(server.target).pids_of_shards, flush=True)
    server.join()
turns = 0

def compute(step):
    global turns
    turns += 1
    if turns == 35:
        print("half", flush=True)
        sys.stdin.readline()
    return np.float32(1.0)

with v1.device(v1.train.replica_device_setter(cluster=cluster)):
    totals = [v1.get_variable(f"t{n}", [], initializer=v1.zeros_initializer()) for n in range(4)]
    step = v1.train.get_or_create_global_step()
    one = v1.py_func(compute, [step], tf.float32)
    with tf.control_dependencies([v1.assign_add(total, one) for total in totals]):
        op = v1.assign_add(step, 1)
end = [v1.train.StopAtStepHook(last_step=60)]
with v1.train.MonitoredTrainingSession(
    server.target, checkpoint_dir=sys.argv[1], save_checkpoint_steps=10, hooks=end
) as session:
    while not session.should_stop():
        session.run(op)
with v1.Session(server.target) as session:
    print(*session.run([*totals, step]), flush=True)
"""


def test_a_job_goes_on_from_its_checkpoint_when_a_shard_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cluster = clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]
    with contextlib.ExitStack() as ending:

        def start(job: str) -> Script:
            place = {"cluster": cluster, "task": {"type": job, "index": 0}}
            process = Script(str(script), str(tmp_path / "model"), place=place, env=TWO)
            ending.callback(process.kill)
            return process

        ps, worker = start("ps"), start("worker")
        pid = int(ps.read_line())
        assert worker.read_line() == "half"
        os.kill(pid, signal.SIGKILL)
        # not 0: who looks after it starts it again
        assert ps.process.wait(ps.patience_s) == 1
        start("ps")
        worker.write_line("")
        assert worker.read_line() == "60.0 60.0 60.0 60.0 60"


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
