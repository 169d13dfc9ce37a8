"""Scenarios of scenarios_clusters.py, under many seeds."""

from __future__ import annotations

import pytest

from prpc_engine.simulation import run_once
from tests.simulation import scenarios_clusters as scenarios
from tests.simulation.seeds import describe, hold


def test_each_tensor_comes_once_in_its_step_or_a_named_error_does(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.clusters, request, share=2.5)


def test_no_task_is_said_to_begin_again_while_connections_alone_are_lost(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.clusters_without_a_kill, request, share=2.5)


@pytest.mark.parametrize("seed", [5, 6])
def test_a_task_that_ends_unheard_is_found_again_by_the_others(seed: int) -> None:
    """5: a ps is killed over a link that is cut; 6: a host crashes, and is back soon. The network
    of the simulation then kept connections to processes that were no more, for ever.
    """
    outcome = run_once(scenarios.clusters, seed)
    assert not outcome.error, describe(outcome)
