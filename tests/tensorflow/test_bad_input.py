"""What users do wrong, and the one line that they read then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.program import ROOT
from tests.tensorflow.tasks import Job


@pytest.mark.parametrize(
    ("mistake", "kind", "texts"),
    [
        ("typo", "NotFoundError", ["No server factory registered for protocol='prcp': 'grpc', 'prpc', "]),
        ("unknown_job", "InvalidArgumentError", ["no job 'chief' in the cluster: there are ps, worker"]),
        ("unknown_task", "InvalidArgumentError", ["no task 7 in job 'worker': its tasks are 0, 1"]),
        ("port_taken", "UnavailableError", ["/job:worker/task:0 cannot listen for control at 127.0.0.1:", "the port is taken"]),
        ("no_endpoint", "InvalidArgumentError", [".endpoint_map has no line for worker 0 (127.0.0.1:3)"]),
        ("no_such_place", "InvalidArgumentError", ["/v", "explicitly assigned to /job:ps/task:9", "/job:ps/replica:0/task:1/"]),
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


def test_without_tensorflow_it_says_how_to_get_it() -> None:
    script = (
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "import prpc_engine.tensorflow\n"
        "prpc_engine.tensorflow.install()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "ImportError: TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'"


def test_another_version_of_tensorflow_is_refused() -> None:
    script = (
        "import sys, types\n"
        "sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
        "sys.modules['tensorflow'].__version__ = '2.16.1'\n"
        "import prpc_engine.tensorflow\n"
        "prpc_engine.tensorflow.install()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == ("ImportError: TensorFlow 2.16.1 is installed, and prpc_engine.tensorflow is for 2.15")
