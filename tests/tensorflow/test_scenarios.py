"""The same script on the stock protocol and on ours comes to the same, on two ps and two
workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tensorflow.tasks import Job


def same(stock: Any, ours: Any) -> bool:
    """Equal, numbers within float error."""
    if isinstance(stock, list) and isinstance(ours, list):
        return len(stock) == len(ours) and all(map(same, stock, ours))
    if isinstance(stock, float) and isinstance(ours, float):
        return bool(np.isclose(stock, ours, rtol=1e-5, atol=1e-6, equal_nan=True))
    return bool(stock == ours)


def check(job: Job, scenario: str, **keywords: Any) -> Any:
    stock, ours = job.both(scenario, **keywords)
    assert same(stock, ours), f"stock: {stock}\nours:  {ours}"
    return ours


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "adam"])
def test_an_optimizer_has_equal_losses(
    job: Job, optimizer: str, sparse: bool, resource: bool
) -> None:
    losses = check(job, "train", optimizer=optimizer, sparse=sparse, resource=resource)
    assert len(set(losses)) == 6


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_branches_of_a_cond_change_what_is_on_a_ps(
    job: Job, version: int, resource: bool
) -> None:
    check(job, "conditional", version=version, resource=resource)


def test_initial_values_that_depend_on_each_other(job: Job) -> None:
    check(job, "initial_values", resource=True)


@pytest.mark.parametrize(
    ("version", "resource", "gradient"),
    [(1, False, False), (1, False, True), (1, True, False), (2, False, False), (2, True, False)],
)
def test_a_loop_reads_a_variable_of_a_ps_in_every_turn(
    job: Job, version: int, resource: bool, gradient: bool
) -> None:
    check(job, "loop", version=version, resource=resource, gradient=gradient)


@pytest.mark.parametrize("version", [1, 2])
def test_a_recurrent_network(job: Job, version: int) -> None:
    check(job, "recurrent", version=version)


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
def test_a_variable_cut_over_two_ps(job: Job, resource: bool) -> None:
    check(job, "partitioned", resource=resource)


@pytest.mark.parametrize(
    "scenario",
    [
        "lookup", "values", "queue", "dataset", "layers", "checkpoint", "feeding", "failures",
        "dead_fetch", "global_step_read", "misplaced",
    ],
)  # fmt: skip
def test_it_comes_to_the_same(job: Job, scenario: str) -> None:
    found = check(job, scenario)
    # no error of the scenario's own
    assert not (len(found) == 2 and isinstance(found[0], str)), found


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_workers_in_step(job: Job, replicas: int, resource: bool) -> None:
    name, keywords = f"sync{replicas}{resource}", {"replicas": replicas, "resource": resource}
    for index in range(replicas):
        job.worker(index).begin("sync_replicas", "prpc", name=name, steps=4, **keywords)
    assert [job.worker(index).answer() for index in range(replicas)] == [True] * replicas
    assert same(
        job.worker().do("after_sync_replicas", "prpc", name=name, **keywords), [[1.0, 1.0], True]
    )
