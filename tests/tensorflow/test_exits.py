"""How a process with servers and sessions ends that nobody has closed: at once, and without a word
of ours.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.tensorflow.tasks import PATIENCE_S, clusters

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)
SCRIPT = """
import atexit
import sys
import threading

late = []  # run after what was registered later
atexit.register(lambda: [one() for one in late])

import prpc_engine.tensorflow

prpc_engine.tensorflow.install()
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
v1.logging.set_verbosity("ERROR")
how, ps, worker = sys.argv[1:]
cluster = tf.train.ClusterSpec({"ps": [ps], "worker": [worker]})
servers = [
    v1.train.Server(cluster, job_name=job, task_index=0, protocol="prpc")
    for job in ("ps", "worker")
]
with v1.device("/job:ps/task:0"):
    v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
    item = v1.FIFOQueue(2, [tf.float32], [[]]).dequeue()
    op = v1.assign_add(v, [1.0, 1.0])
session = v1.Session(servers[1].target)
session.run(v1.global_variables_initializer())
begun = threading.Event()

def wait():
    begun.set()
    session.run(item)

def step():
    while True:
        session.run(op)
        begun.set()

if how == "in a step that waits":
    threading.Thread(target=wait, daemon=True).start()
    begun.wait()
elif how == "in steps":
    threading.Thread(target=step, daemon=True).start()
    begun.wait()
elif how == "in a monitored session":
    v1.train.get_or_create_global_step()
    monitored = v1.train.MonitoredTrainingSession(servers[1].target)
    monitored.run(op)
elif how == "with a trace":
    told = v1.RunMetadata()
    session.run(op, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), run_metadata=told)
    print(*sorted(one.device.partition("/replica")[0] for one in told.step_stats.dev_stats))
elif how == "with functions of atexit":
    def run(text):
        try:
            print(text, session.run(op).tolist())
        except Exception as error:
            print(text, type(error).__name__, "has to be registered after" in str(error))

    atexit.register(run, "in time:")
    late.append(lambda: run("too late:"))
print("end")
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("with a session", ["end"]),
        ("in a step that waits", ["end"]),
        ("in steps", ["end"]),
        ("in a monitored session", ["end"]),
        ("with a trace", ["/job:ps /job:worker", "end"]),  # of two tasks of one process
        (
            "with functions of atexit",
            ["end", "in time: [2.0, 2.0]", "too late: CancelledError True"],
        ),
    ],
)
def test_a_process_ends_at_once_and_without_a_word(
    how: str, said: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cluster = clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]
    ended = subprocess.run(
        [sys.executable, str(script), how, *cluster["ps"], *cluster["worker"]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.stdout.splitlines() == said
    assert ended.stderr == ""
    assert ended.returncode == 0
