"""What lives in kernels and goes on from step to step means the same on the stock protocol and on ours, bit by bit."""

from __future__ import annotations

import pytest

from tests.tensorflow.tasks import Job
from tests.tensorflow.test_flows import check as check_in_plane


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
@pytest.mark.parametrize("where", ["worker", "ps"])
def test_random_kernels_go_on_whatever_a_step_fetches(job: Job, where: str, plane: str) -> None:
    check_in_plane(job, plane, "random_kernels", where=where)


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_random_kernels_go_on_in_loops_and_branches(job: Job, plane: str) -> None:
    check_in_plane(job, plane, "random_in_loop")


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_a_table_that_is_made_of_keys_keeps_what_earlier_steps_put_into_it(job: Job, plane: str) -> None:
    found = check_in_plane(job, plane, "dense_table")
    assert found[:2] == [[6.0, -1.0, 10.0, 12.0, -1.0], 3]


def test_a_table_whose_keys_a_step_could_change_is_refused_by_name(job: Job) -> None:
    name, text = job.worker().do("table_of_a_fed_key", "prpc")
    assert name == "UnimplementedError"
    assert "lives longer than a step" in text and "make it of constants" in text
