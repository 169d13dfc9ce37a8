"""What users do wrong, and the one line that they read then."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import TENSORFLOW, nursery
from tests.program import ROOT
from tests.tensorflow.tasks import PATIENCE_S, Job, clusters


@pytest.mark.parametrize(
    ("mistake", "kind", "texts"),
    [
        (
            "typo",
            "NotFoundError",
            ["No server factory registered for protocol='prcp': 'grpc', 'prpc', "],
        ),
        (
            "unknown_job",
            "InvalidArgumentError",
            ["no job 'chief' in the cluster: there are ps, worker"],
        ),
        ("unknown_task", "InvalidArgumentError", ["no task 7 in job 'worker': its tasks are 0, 1"]),
        (
            "port_taken",
            "UnavailableError",
            ["/job:worker/task:0 cannot listen for control at 127.0.0.1:", "the port is taken"],
        ),
        (
            "no_endpoint",
            "InvalidArgumentError",
            [".endpoint_map has no line for worker 0 (127.0.0.1:3)"],
        ),
        (
            "no_such_place",
            "InvalidArgumentError",
            ["/v", "explicitly assigned to /job:ps/task:9", "/job:ps/replica:0/task:1/"],
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(job: Job, mistake: str, kind: str, texts: list[str]) -> None:
    found, text = job.worker().do(mistake, "prpc")
    assert found == kind, text
    assert any(all(one in line for one in texts) for line in text.splitlines()), text


def test_a_ps_of_another_cluster_is_told(job: Job) -> None:
    kind, text, _ = job.worker().do("other_cluster", "prpc")
    assert kind == "InvalidArgumentError", text
    assert "/job:worker/task:0 and /job:ps/task:0 do not have the same cluster" in text
    assert "\n" not in text


def test_a_ps_that_is_not_up_is_named_and_waited_for_as_long_as_the_session_says(job: Job) -> None:
    kind, text, told = job.worker().do("not_up", "prpc")
    assert kind == "DeadlineExceededError", text
    assert "/job:ps/task:0" in text
    assert "\n" not in text
    (line,) = [one for one in told if one.startswith("waiting for ")]
    assert line.startswith("waiting for /job:ps/task:0")


def test_a_stock_server_in_the_place_of_a_ps_is_named_and_ends_a_monitored_session(
    job: Job,
) -> None:
    kind, text = job.worker().do("grpc_ps", "grpc")
    assert kind == "InvalidArgumentError", text
    assert "a gRPC (HTTP/2) server listens there" in text
    assert "start /job:ps/task:0 with the protocol of this task" in text


def test_a_ps_that_never_comes_up_ends_a_monitored_session_after_the_connection_timeout(
    job: Job,
) -> None:
    kind, text = job.worker().do("never_up", "prpc")
    assert kind == "DeadlineExceededError", text
    assert "/job:ps/task:0" in text and "NETWORK_MAX_CONNECTION_TIMEOUT" in text


DATA_AT_A_PS = """
import json, os
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
config = json.loads(os.environ["TF_CONFIG"])
cluster, job = tf.train.ClusterSpec(config["cluster"]), config["task"]["type"]
server = v1.train.Server(cluster, job_name=job, task_index=0)
if job == "ps":
    server.join()
with v1.device(v1.train.replica_device_setter(cluster=cluster)):
    with v1.device("/job:ps/task:0"):
        one = v1.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    step = v1.train.get_or_create_global_step()
    op = v1.assign_add(step, 0 * one + 1)
turns = 0
with v1.train.MonitoredTrainingSession(server.target) as session:
    while not session.should_stop():
        session.run(op)
        turns += 1
print(turns, flush=True)
"""


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_the_end_of_the_data_puts_nothing_into_any_log(plane: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'")
    script = tmp_path / "script.py"
    script.write_text(DATA_AT_A_PS)
    cluster = clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]
    with contextlib.ExitStack() as ending:
        nothing = ending.enter_context(open(os.devnull, "rb"))
        tasks, out, told = {}, tmp_path / "out", tmp_path / "told"
        for name in ("ps", "worker"):
            place = {"cluster": cluster, "task": {"type": name, "index": 0}}
            with open(out, "ab") as stdout, open(told, "ab") as stderr:
                tasks[name] = nursery(TENSORFLOW).start(
                    ["prpc_engine.tensorflow", str(script)],
                    {**os.environ, "PRPC_TF_PLANE": plane, "TF_CONFIG": json.dumps(place)},
                    nothing.fileno(),
                    stdout.fileno(),
                    stderr.fileno(),
                )
            ending.callback(tasks[name].wait, PATIENCE_S)
            ending.callback(tasks[name].kill)
        assert tasks["worker"].wait(PATIENCE_S) == 0, told.read_text()
    assert out.read_text() == "5\n", told.read_text()
    for word in ("Traceback", "prpc-error", "op_kernel"):
        assert word not in told.read_text()


def test_without_tensorflow_it_says_how_to_get_it() -> None:
    script = (
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "import prpc_engine.tensorflow\n"
        "prpc_engine.tensorflow.install()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 1
    assert (
        ran.stderr.splitlines()[-1]
        == "ImportError: TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'"
    )


def test_to_install_and_uninstall_again_does_nothing() -> None:
    pytest.importorskip("tensorflow", reason="not installed: pip install 'prpc-engine[tensorflow]'")
    script = (
        "import tensorflow as tf, prpc_engine.tensorflow as prpc_tf\n"
        "stock = tf.distribute.Server.__init__\n"
        "for _ in range(2):\n"
        "    prpc_tf.install(); prpc_tf.install()\n"
        "    assert tf.distribute.Server.__init__ is not stock\n"
        "    prpc_tf.uninstall(); prpc_tf.uninstall()\n"
        "    assert tf.distribute.Server.__init__ is stock\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr


def test_another_version_of_tensorflow_is_refused() -> None:
    script = (
        "import sys, types\n"
        "sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
        "sys.modules['tensorflow'].__version__ = '2.16.1'\n"
        "import prpc_engine.tensorflow\n"
        "prpc_engine.tensorflow.install()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: TensorFlow 2.16.1 is installed, and prpc_engine.tensorflow is for 2.15"
    )


EAGER = """
import prpc_engine.tensorflow

prpc_engine.tensorflow.install()
import tensorflow as tf

cluster = tf.train.ClusterSpec(
    {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
)
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster, task_type="chief", task_id=0, rpc_layer="prpc"
)
for ask in (
    lambda: tf.distribute.ParameterServerStrategy(resolver),
    lambda: tf.config.experimental_connect_to_cluster(cluster, protocol="grpc++"),
):
    try:
        ask()
    except tf.errors.UnimplementedError as error:
        print(error.message)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)
def test_an_eager_client_is_refused_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EAGER)
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for line, protocol in zip(ended.stdout.splitlines(), ("prpc", "grpc++"), strict=True):
        assert f"protocol={protocol!r}" in line and 'Use protocol="grpc"' in line
