"""Tasks that are not there yet, and tasks that die; real processes, killed with -9."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import time
from collections.abc import Callable

import pytest

from tests.tensorflow.tasks import PATIENCE_S, TaskProcess, clusters

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed: pip install 'prpc[tensorflow]'"
)


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come to pass"
        time.sleep(0.01)


def test_a_ps_is_waited_for_and_its_death_is_told_at_once() -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=1)["prpc"]}
    with contextlib.ExitStack() as ending:
        worker = TaskProcess(places, "worker", 0)
        ending.callback(worker.kill)
        kind, text = worker.do("within", "prpc", timeout_ms=700)
        assert kind == "DeadlineExceededError"
        assert "/job:ps/task:0" in text
        worker.begin("within", "prpc", timeout_ms=100_000)
        ps = TaskProcess(places, "ps", 0)
        ending.callback(ps.kill)
        assert worker.answer() == 2.0
        worker.begin("take", "prpc", name="line")
        wait_until(lambda: ps.do("running", "prpc") == 1, "the wait at the ps")
        ps.kill()
        kind, text = worker.answer()
        assert kind == "UnavailableError"
        assert "/job:ps/task:0" in text


def test_what_a_dead_worker_waited_for_is_left_to_others() -> None:
    places = {"prpc": clusters(secrets.randbits(32), ps=1, worker=2)["prpc"]}
    with contextlib.ExitStack() as ending:
        ps, worker, other = (TaskProcess(places, job, index) for job, index in (("ps", 0), ("worker", 0), ("worker", 1)))
        for task in (ps, worker, other):
            ending.callback(task.kill)
        other.begin("take", "prpc", name="line")
        wait_until(lambda: ps.do("running", "prpc") == 1, "the wait at the ps")
        other.kill()
        wait_until(lambda: ps.do("running", "prpc") == 0, "its end")
        worker.do("put", "prpc", name="line", value=7)
        assert worker.do("size", "prpc", name="line") == 1
        assert worker.do("take", "prpc", name="line") == 7
