"""Scripts of the shape that TensorFlow's users have, unmodified: on TensorFlow's own servers and on
ours they learn the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from prpc_engine.cli.commands import load
from prpc_engine.settings import local_job
from tests.forked import TENSORFLOW, Forked, nursery

ROOT = Path(__file__).parents[2]
# of a cluster; importing TensorFlow in five processes takes half a minute on a busy machine
TIMEOUT_S = 120
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'",
)


class Ran(NamedTuple):
    """What came of a script: its exit code, and what it and `prpc run` have printed."""

    code: int
    printed: str


def run(protocol: str, script: str, *arguments: str, **jobs: int) -> Ran:
    """What `prpc run` makes of a cluster of these jobs. Its tasks are forked of a Python that has
    imported TensorFlow; tests/test_grpcpp_page.py has a cluster of new ones.
    """
    options = [f"--{job}={count}" if count else f"--{job}" for job, count in jobs.items()]
    options += ["--protocol", protocol, "--timeout-s", str(TIMEOUT_S)]
    with (
        tempfile.TemporaryFile() as out,
        open(os.devnull) as nothing,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(io.StringIO()) as told,
    ):

        def start(command: Sequence[str], env: Mapping[str, str], **_: object) -> Forked:
            assert command[:2] == [sys.executable, "-m"]
            streams = nothing.fileno(), out.fileno(), out.fileno()
            return nursery(TENSORFLOW).start(list(command[2:]), env, *streams, leads_group=True)

        # a new Python's end with its parent is looked at in tests/prpc_engine/cli/test_run.py
        patch.setattr(local_job, "subprocess", SimpleNamespace(Popen=start))
        code = load("run").main([*options, script, *arguments], standalone_mode=False)
        out.seek(0)
        return Ran(code, out.read().decode() + told.getvalue())


def figure(ran: Ran, name: str) -> float:
    """What it printed last under that name."""
    assert ran.code == 0, ran.printed[-4000:]
    # within a line: tasks print at the same time
    found = re.findall(rf"{name} ([0-9.]+)", ran.printed)
    assert found, ran.printed[-4000:]
    return float(found[-1])


@pytest.mark.parametrize(
    ("ps", "flags"),
    [
        (1, ["--supervisor"]),
        (2, []),
        (2, ["--supervisor", "--sync_replicas"]),
        (1, ["--sync_replicas"]),
    ],
    ids=["supervisor", "monitored", "supervisor, in step", "monitored, in step"],
)
def test_replicas_learn_to_the_same_accuracy(ps: int, flags: list[str]) -> None:
    script = str(HERE / "replicas.py")
    arguments = (script, "--train_steps", "100", *flags)
    found = [
        figure(run(protocol, *arguments, ps=ps, workers=2, flags=0), "accuracy")
        for protocol in ("grpc", "prpc")
    ]
    assert min(found) > 0.9
    assert abs(found[0] - found[1]) < 0.03


@pytest.mark.slow
def test_an_estimator_takes_the_protocol_from_its_run_config(tmp_path: Path) -> None:
    found = []
    for protocol in ("grpc", "prpc"):
        arguments = (
            str(HERE / "estimator_job.py"),
            "--protocol",
            protocol,
            "--model_dir",
            str(tmp_path / protocol),
        )
        found.append(figure(run("grpc", *arguments, ps=1, workers=1, chief=0), "accuracy"))
    assert min(found) > 0.9


@pytest.mark.slow
def test_wide_and_deep_finds_late_flights_as_well() -> None:
    script = str(ROOT / "examples" / "wide_and_deep.py")
    found = [
        figure(run(protocol, script, ps=1, workers=2), "test AUC") for protocol in ("grpc", "prpc")
    ]
    assert min(found) > 0.68
    assert abs(found[0] - found[1]) < 0.005


def test_a_task_that_fails_ends_its_cluster_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import json, os, sys, time\n"
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
        "sys.exit(7) if task == {'type': 'worker', 'index': 1} else time.sleep(1000)\n"
    )
    ran = run("prpc", str(script), ps=1, workers=2)
    assert ran.code == 7
    assert "worker 1 ended with 7; ended because of that: " in ran.printed


def test_a_script_of_one_task_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("NAME = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside_it\n"
        "import tensorflow as tf\n"
        "config = tf.compat.v1.ConfigProto(tensor_fuse=True)\n"
        "server = tf.compat.v1.train.Server({'local': ['localhost:0']}, config=config)\n"
        "print(__name__, sys.argv[1:], beside_it.NAME, config.tensor_fuse, "
        "server.target.partition(':')[0], flush=True)\n"
        "sys.exit(5)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "prpc_engine.cli", "run", str(script), "--steps", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (
        5,
        "__main__ ['--steps', '3'] found True prpc",
    )
