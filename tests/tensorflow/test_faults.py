"""Tasks that are not there yet, and tasks that die, between two steps and in the midst of one; real
processes, killed with -9.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.program import wait_until
from tests.tensorflow.tasks import PATIENCE_S, Job, Script, TaskProcess, clusters

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)
FLOATS = 1 << 24  # 64 MB
NOTHING = {"stages of open sessions": 0, "running": 0, "waiting": 0, "leases": 0, "blocks": 0}


def started(
    ending: contextlib.ExitStack, places: dict[str, Any], *jobs: str, **env: str
) -> list[TaskProcess]:
    """Such tasks, each "ps 0" or the like, that are killed in the end."""
    tasks = [TaskProcess(places, *(job.split()[0], int(job.split()[1])), env) for job in jobs]
    for task in tasks:
        ending.callback(task.kill)
    return tasks


def test_a_ps_is_waited_for_and_its_death_is_told_at_once() -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    with contextlib.ExitStack() as ending:
        (worker,) = started(ending, places, "worker 0")
        kind, text = worker.do("within", "prpc", timeout_ms=700)
        assert kind == "DeadlineExceededError"
        assert "/job:ps/task:0" in text
        worker.begin("within", "prpc", timeout_ms=100_000)
        (ps,) = started(ending, places, "ps 0")
        assert worker.answer() == 2.0
        worker.begin("take", "prpc", name="line")
        wait_until(lambda: ps.do("running", "prpc") == 1, "the wait at the ps")
        ps.kill()
        kind, text = worker.answer()
        assert kind == "UnavailableError"
        assert "/job:ps/task:0" in text


def test_a_ps_that_is_stopped_is_named_once_and_the_step_goes_on() -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending, places, "ps 0", "worker 0")
        told = worker.do("step_while_halted", "prpc", ps=ps.pid, name="line")
        assert [line.partition(" for ")[0].partition(";")[0] for line in told] == [
            "/job:ps/task:0 has not answered",
            "/job:ps/task:0 answers again",
        ]


def test_what_a_dead_worker_waited_for_is_left_to_others() -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=2)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker, other = started(ending, places, "ps 0", "worker 0", "worker 1")
        other.begin("take", "prpc", name="line")
        wait_until(lambda: ps.do("running", "prpc") == 1, "the wait at the ps")
        other.kill()
        wait_until(lambda: ps.do("running", "prpc") == 0, "its end")
        worker.do("put", "prpc", name="line", value=7)
        assert worker.do("size", "prpc", name="line") == 1
        assert worker.do("take", "prpc", name="line") == 7


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_ctrl_c_in_a_step_is_a_keyboard_interrupt(plane: str) -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending, places, "ps 0", "worker 0")
        worker.begin("in_plane", "prpc", plane=plane, fuse=False, which="interrupted", name="line")
        wait_until(lambda: ps.do("running", "prpc") == 1, "the wait at the ps")
        os.kill(worker.pid, signal.SIGINT)
        assert worker.answer() == 5.0
        wait_until(lambda: worker.do("held", "prpc") == NOTHING, "the end of what the worker held")


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_a_ps_killed_while_the_worker_computes_ends_the_step(plane: str) -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending, places, "ps 0", "worker 0")
        step = {"floats": 1 << 18, "victim": ps.pid, "moment": "computes"}
        kind, text = worker.do(
            "in_plane", "prpc", plane=plane, fuse=False, which="kill_in_step", **step
        )
        assert kind == "UnavailableError"
        assert "/job:ps/task:0" in text
        wait_until(lambda: worker.do("held", "prpc") == NOTHING, "the end of what the worker held")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_ps_killed_while_64_mb_go_there_is_told_and_nothing_of_them_is_left(
    transport: str,
) -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker = started(ending, places, "ps 0", "worker 0", PRPC_TRANSPORTS=transport)
        pid = ps.pid
        kind, text = worker.do(
            "kill_in_step", "prpc", floats=FLOATS, victim=pid, moment="pushes", ps=pid
        )
        assert kind == "UnavailableError"
        assert "/job:ps/task:0" in text
        wait_until(lambda: worker.do("held", "prpc") == NOTHING, "the end of what the worker held")


@pytest.mark.parametrize("moment", ["computes", "pushes"])
def test_of_a_worker_killed_in_the_midst_of_a_step_nothing_is_left_and_the_others_go_on(
    moment: str,
) -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=2)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker, other = started(ending, places, "ps 0", "worker 0", "worker 1")
        pid = ps.pid
        ps.do("gone_after", "prpc", seconds=0.2)
        worker.begin("kill_in_step", "prpc", floats=FLOATS, victim=0, moment=moment, ps=pid)
        worker.process.wait(PATIENCE_S)
        os.kill(pid, signal.SIGCONT)
        assert other.do("add_one", "prpc", floats=1000) == 2000.0
        wait_until(
            lambda: ps.do("held", "prpc")["blocks"] == 0,
            "the end of what the ps held for the dead worker",
        )
        wait_until(lambda: ps.do("held", "prpc") == NOTHING, "the end of its sessions")


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_a_ps_that_waits_takes_nothing_for_a_step_that_has_failed_elsewhere(
    job: Job, plane: str
) -> None:
    found = job.worker().do(
        "in_plane", "prpc", plane=plane, fuse=False, which="failing_while_a_ps_waits"
    )
    assert found == ["InvalidArgumentError", 1]


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_the_end_of_a_session_frees_what_it_had_at_each_task(plane: str, job: Job) -> None:
    tasks = [job.tasks["ps", 0], job.tasks["ps", 1], job.worker()]
    # nobody waits until all have heard of the end of the sessions before, and given back what they
    # had
    for task in tasks:
        wait_until(lambda task=task: task.do("held", "prpc") == NOTHING, f"quiet at {task.name}")  # type: ignore[misc]
    job.worker().do("in_plane", "prpc", plane=plane, fuse=False, which="open_session")
    wait_until(lambda: tasks[0].do("held", "prpc")["running"] > 0, "the wait at the ps")
    assert tasks[0].do("held", "prpc")["stages of open sessions"] > 0
    stages, _ = tasks[0].do("kept", "prpc")
    assert job.worker().do("close_session", "prpc")
    for task in tasks:
        wait_until(
            lambda task=task: task.do("held", "prpc") == NOTHING,
            f"the end of the session at {task.name}",
        )  # type: ignore[misc]
    # the one with the generator was that session's own
    assert tasks[0].do("kept", "prpc")[0] < stages


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

    print(json.dumps(server_of(server.target).pids_of_shards), flush=True)
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
    print(turns, *session.run([*totals, step]), flush=True)
"""


@pytest.mark.parametrize("victim", ["ps", "worker", "shard"])
def test_a_script_goes_on_from_its_checkpoint_when_a_task_was_killed_in_the_midst_of_a_step(
    victim: str, tmp_path: Path
) -> None:
    if victim == "shard" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two processes of a ps need two cores")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cluster = clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]
    env = {"NETWORK_PS_CORE_NUMBER": "2" if victim == "shard" else "1"}

    def start(job: str) -> Script:
        place = {"cluster": cluster, "task": {"type": job, "index": 0}}
        process = Script(str(script), str(tmp_path / "model"), place=place, env=env)
        ending.callback(process.kill)
        return process

    with contextlib.ExitStack() as ending:
        tasks = {job: start(job) for job in ("ps", "worker")}
        shards = json.loads(tasks["ps"].read_line())
        assert tasks["worker"].read_line() == "half"
        if victim == "shard":
            os.kill(shards[0], signal.SIGKILL)
            # join() raises, and whoever looks after the script starts it again
            assert tasks["ps"].process.wait(PATIENCE_S) == 1
            tasks["ps"] = start("ps")
        else:
            tasks[victim].kill()
            tasks[victim] = start(victim)
        tasks["worker"].write_line("")
        turns, _, found = tasks["worker"].read_line().partition(" ")
        assert (tasks["worker"].end(), found) == (0, "60.0 60.0 60.0 60.0 60")
        assert int(turns) < 60 if victim == "worker" else int(turns) > 60
