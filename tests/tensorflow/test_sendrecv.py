"""The plane "sendrecv": what it comes to is what the stock protocol comes to, with few messages
when fused.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.prpc_engine.processes import wait_until
from tests.tensorflow.tasks import Job, TaskProcess, clusters
from tests.tensorflow.test_scenarios import same
from tests.tensorflow.test_semantics import SCENARIOS

FUSED = pytest.mark.parametrize("fuse", [False, True], ids=["each", "fused"])


def ours(
    worker: TaskProcess, scenario: str, fuse: bool, plane: str = "sendrecv", **keywords: Any
) -> Any:
    return worker.do("in_plane", "prpc", plane=plane, fuse=fuse, which=scenario, **keywords)


def check(job: Job, scenario: str, fuse: bool, **keywords: Any) -> Any:
    stock = job.stock(scenario, **keywords)
    found = ours(job.worker(), scenario, fuse, **keywords)
    assert same(stock, found), f"stock: {stock}\nours:  {found}"
    return found


@pytest.fixture(scope="module")
def single(_started_once: None) -> Iterator[dict[str, TaskProcess]]:
    """One ps and one worker, whose TensorFlow has one thread for ops."""
    pytest.importorskip("tensorflow")
    with contextlib.ExitStack() as closing:
        plan = clusters(secrets.randbits(32), ps=1, worker=1)
        one_thread = {"TF_NUM_INTEROP_THREADS": "1"}
        yield {
            job: closing.enter_context(TaskProcess(plan, job, 0, one_thread))
            for job in ("ps", "worker")
        }


@FUSED
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_an_optimizer_has_equal_losses(job: Job, sparse: bool, resource: bool, fuse: bool) -> None:
    losses = check(job, "train", fuse, optimizer="adam", sparse=sparse, resource=resource)
    assert len(set(losses)) == 6


@FUSED
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_branches_of_a_cond_change_what_is_on_a_ps(
    job: Job, version: int, resource: bool, fuse: bool
) -> None:
    check(job, "conditional", fuse, version=version, resource=resource)


@FUSED
@pytest.mark.parametrize(
    ("version", "resource", "gradient"), [(1, False, True), (1, True, False), (2, True, False)]
)
def test_a_loop_reads_a_variable_of_a_ps(
    job: Job, version: int, resource: bool, gradient: bool, fuse: bool
) -> None:
    check(job, "loop", fuse, version=version, resource=resource, gradient=gradient)


@FUSED
@pytest.mark.parametrize(
    "scenario",
    [
        "lookup", "values", "queue", "dataset", "layers", "checkpoint", "feeding", "failures",
        "dead_fetch", "global_step_read", "misplaced", "from_ps_to_ps",
    ],
)  # fmt: skip
def test_it_comes_to_the_same(job: Job, scenario: str, fuse: bool) -> None:
    found = check(job, scenario, fuse)
    # no error of the scenario's own
    assert not (len(found) == 2 and isinstance(found[0], str)), found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_means_the_same(job: Job, scenario: str) -> None:
    found = check(job, scenario, True)
    # none of the scenario's own
    assert not (len(found) == 2 and isinstance(found[0], str) and found[0].endswith("Error")), found


@FUSED
@pytest.mark.parametrize("variables", [2, 8, 32])
def test_models_have_equal_losses_on_two_ps(job: Job, variables: int, fuse: bool) -> None:
    losses = check(job, "losses", fuse, variables=variables)
    assert same(losses, ours(job.worker(), "losses", fuse, "star", variables=variables))
    assert len(set(losses)) == 5


@FUSED
@pytest.mark.parametrize("variables", [2, 8, 32])
def test_models_have_equal_losses_on_one_ps_with_one_thread(
    single: dict[str, TaskProcess], variables: int, fuse: bool
) -> None:
    stock = single["worker"].do("losses", "grpc", variables=variables)
    found = ours(single["worker"], "losses", fuse, variables=variables)
    assert same(stock, found), f"stock: {stock}\nours:  {found}"


def test_a_step_takes_one_message_each_way_when_fused_and_one_a_value_when_not(
    single: dict[str, TaskProcess],
) -> None:
    each, fused = (ours(single["worker"], "messages", fuse, variables=32) for fuse in (False, True))
    assert each["messages"] == each["tensors"] >= 64
    assert fused["messages"] * 3 <= each["messages"]
    assert fused["messages"] <= 4
    assert fused["programs"] == each["programs"] == 1
    assert fused["calls"] == 0


@FUSED
def test_nothing_of_its_steps_outlives_a_session(job: Job, fuse: bool) -> None:
    for scenario in ("from_ps_to_ps", "failing"):
        ours(job.worker(), scenario, fuse)
    for task in (job.worker(), job.tasks["ps", 0], job.tasks["ps", 1]):
        wait_until(
            lambda task=task: task.do("left_behind", "prpc") == 0,
            f"{task.name} to have nothing left",
        )


@FUSED
def test_an_error_of_one_task_ends_the_step_everywhere(job: Job, fuse: bool) -> None:
    assert ours(job.worker(), "failing", fuse) == [
        6,
        "InvalidArgumentError",
        4,
        "InvalidArgumentError",
        4,
    ]


@FUSED
def test_an_error_elsewhere_ends_what_the_own_task_waits_for(job: Job, fuse: bool) -> None:
    assert ours(job.worker(), "failing_while_it_waits", fuse) == [
        "InvalidArgumentError",
        [2.5, 3],
        0,
    ]


@FUSED
def test_workers_in_step(job: Job, fuse: bool) -> None:
    named = {
        "plane": "sendrecv",
        "fuse": fuse,
        "name": f"exchange{fuse}",
        "replicas": 2,
        "resource": True,
    }
    for index in range(2):
        job.worker(index).begin("in_plane", "prpc", which="sync_replicas", steps=4, **named)
    assert [job.worker(index).answer() for index in range(2)] == [True, True]
    assert same(
        job.worker().do("in_plane", "prpc", which="after_sync_replicas", **named),
        [[1.0, 1.0], True],
    )


def test_a_step_that_waits_ends_when_its_session_is_closed(job: Job) -> None:
    kind, (value, size) = ours(job.worker(), "closed_while_it_waits", True)
    assert (kind, value, size) == ("CancelledError", 1.0, 1)


def test_the_death_of_a_ps_ends_the_steps_that_need_it(single: dict[str, TaskProcess]) -> None:
    pid = single["ps"].process.pid
    assert ours(single["worker"], "death_of_a_ps", True, pid=pid) == "UnavailableError"
    single["ps"].kill()
