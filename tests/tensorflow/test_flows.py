"""Loops, branches and functions over variables of two ps come to the same as on the stock protocol,
in either plane.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.tensorflow.tasks import Job
from tests.tensorflow.test_scenarios import same

PLANE = pytest.mark.parametrize("plane", ["star", "sendrecv"])


def check(
    job: Job, plane: str, scenario: str, instead: dict[str, Any] | None = None, **keywords: Any
) -> Any:
    """`instead`: keywords for the stock protocol, where it refuses what it is given here."""
    stock = job.stock(scenario, **{**keywords, **(instead or {})})
    assert not isinstance(stock[0], str), stock  # it does not end with an error
    ours = job.worker().do("in_plane", "prpc", plane=plane, fuse=True, which=scenario, **keywords)
    assert same(stock, ours), f"stock: {stock}\nours:  {ours}"
    return ours


@PLANE
@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("both", [False, True], ids=["one", "two"])
def test_a_loop_of_version_2_reads_variables_in_every_turn(
    job: Job, both: bool, gradient: bool, plane: str
) -> None:
    check(job, plane, "loop_over", version=2, gradient=gradient, both=both)


@pytest.mark.parametrize("scenario", ["loop_over", "nested"])
def test_a_loop_of_version_1_has_the_gradients_of_resources_that_it_has_of_references(
    job: Job, scenario: str
) -> None:
    check(job, "star", scenario, {"resource": False}, version=1, gradient=True, resource=True)


@PLANE
@pytest.mark.parametrize(
    ("version", "resource"),
    [(1, False), (1, True), (2, True)],
    ids=["version1-ref", "version1-resource", "version2"],
)
@pytest.mark.parametrize("scenario", ["loop_assigns", "condition", "branches"])
def test_what_two_ps_have_is_read_and_changed(
    job: Job, scenario: str, version: int, resource: bool, plane: str
) -> None:
    check(job, plane, scenario, version=version, resource=resource)


@PLANE
@pytest.mark.parametrize("version", [1, 2])
def test_a_branch_in_a_loop_in_a_loop(job: Job, version: int, plane: str) -> None:
    check(job, plane, "nested", version=version, gradient=version == 2)


@PLANE
def test_one_of_several_cases(job: Job, plane: str) -> None:
    check(job, plane, "cases", version=2)


@PLANE
@pytest.mark.parametrize("version", [1, 2])
def test_changes_that_nothing_depends_on_are_made_as_often_as_there(
    job: Job, version: int, plane: str
) -> None:
    check(job, plane, "effects", version=version)


@pytest.mark.parametrize("kind", ["map_fn", "scan", "foldl"])
def test_a_function_of_every_element(job: Job, kind: str) -> None:
    check(job, "star", "higher_order", version=2, kind=kind)


@pytest.mark.parametrize(
    ("kind", "plane"),
    [(kind, "star") for kind in ("dynamic_rnn", "bidirectional", "lstm1", "lstm", "gru", "simple")]
    + [("lstm", "sendrecv")],
)
def test_a_recurrent_network_of_version_2_has_equal_losses(job: Job, kind: str, plane: str) -> None:
    losses = check(job, plane, "network", version=2, kind=kind)
    assert len(set(losses)) == 4


@pytest.mark.parametrize("kind", ["dynamic_rnn", "bidirectional", "lstm1"])
def test_a_recurrent_network_of_version_1_has_equal_losses(job: Job, kind: str) -> None:
    check(job, "star", "network", version=1, kind=kind)


@PLANE
def test_a_loop_that_looks_rows_up_trains_its_table(job: Job, plane: str) -> None:
    check(job, plane, "decoder", version=2)


@PLANE
def test_a_function_with_variables_of_two_ps_is_called(job: Job, plane: str) -> None:
    own = "/job:worker/task:0"
    check(job, plane, "called", {"homes": [own, own]}, homes=["/job:ps/task:0", "/job:ps/task:0"])
    check(job, plane, "called", {"homes": [own, own]})


@PLANE
def test_lists_go_from_task_to_task(job: Job, plane: str) -> None:
    check(job, plane, "lists")


@PLANE
@pytest.mark.parametrize(("version", "resource"), [(1, False), (2, True)])
def test_a_loop_writes_what_two_ps_make_into_an_array(
    job: Job, version: int, resource: bool, plane: str
) -> None:
    check(job, plane, "list_in_loop", version=version, resource=resource)
