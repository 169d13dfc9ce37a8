"""A ps is killed and started again: the script of the worker goes on from its last checkpoint, and knows nothing of it."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine.local_job import free_ports

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
SCRIPT = """
import json, os, sys
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
config = json.loads(os.environ["TF_CONFIG"])
cluster, job = tf.train.ClusterSpec(config["cluster"]), config["task"]["type"]
server = v1.train.Server(cluster, job_name=job, task_index=0)
if job == "ps":
    server.join()

with v1.device(v1.train.replica_device_setter(cluster=cluster)):
    total = v1.get_variable("total", [], initializer=v1.zeros_initializer())
    step = v1.train.get_or_create_global_step()
    with tf.control_dependencies([v1.assign_add(total, 1.0)]):
        op = v1.assign_add(step, 1)
turns = 0
end = [v1.train.StopAtStepHook(last_step=60)]
with v1.train.MonitoredTrainingSession(server.target, checkpoint_dir=sys.argv[1], save_checkpoint_steps=10, hooks=end) as session:
    while not session.should_stop():
        session.run(op)
        turns += 1
        if turns == 35:
            print("half", flush=True)
            sys.stdin.readline()
with v1.Session(server.target) as session:
    print(turns > 60, session.run([total, step]), flush=True)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed: pip install 'prpc[tensorflow]'"
)
def test_a_script_goes_on_from_its_checkpoint_when_the_ps_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ps, worker = (f"127.0.0.1:{port}" for port in free_ports(2))

    def start(job: str) -> subprocess.Popen[bytes]:
        place = {"cluster": {"ps": [ps], "worker": [worker]}, "task": {"type": job, "index": 0}}
        return subprocess.Popen(
            [sys.executable, "-m", "prpc_engine.tensorflow", str(script), str(tmp_path / "model")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": json.dumps(place), "TF_CPP_MIN_LOG_LEVEL": "2"},
        )

    with start("ps") as first, start("worker") as training:
        try:
            assert training.stdout is not None
            assert select.select([training.stdout], [], [], PATIENCE_S)[0], "the worker has not come to the half"
            assert training.stdout.readline() == b"half\n"
            first.kill()
            first.wait(PATIENCE_S)
            with start("ps") as second:
                try:
                    told, _ = training.communicate(b"\n", PATIENCE_S)
                finally:
                    second.kill()
        finally:
            first.kill()
            training.kill()
    assert (training.returncode, told) == (0, b"True [60.0, 60]\n")
