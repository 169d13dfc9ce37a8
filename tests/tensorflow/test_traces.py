"""RunMetadata tells of all tasks of a step, as on the stock protocol."""

from __future__ import annotations

import pytest

from tests.tensorflow.tasks import Job
from tests.tensorflow.test_sendrecv import ours

PS, WORKER = (
    f"/job:{place}/device:CPU:0" for place in ("ps/replica:0/task:1", "worker/replica:0/task:0")
)


def test_a_trace_shows_each_op_at_the_device_that_ran_it(job: Job) -> None:
    stock, ours = job.both("traced")
    assert ours == [4.0, [[PS, "squared"], [WORKER, "total"]], ["squared", "total"]]
    assert ours == stock


@pytest.mark.parametrize("fuse", [False, True])
def test_a_trace_of_the_plane_sendrecv_shows_the_same(job: Job, fuse: bool) -> None:
    assert ours(job.worker(), "traced", fuse) == job.stock("traced")


def test_graphs_of_all_tasks_are_told_when_they_are_asked_for(job: Job) -> None:
    stock, ours = job.both("partitioned")
    assert ours == [2.0, [[PS, "squared"], [WORKER, "total"]], 0, 0]
    assert ours == stock
