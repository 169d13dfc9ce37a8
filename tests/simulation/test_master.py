"""Scenarios of scenarios_master.py, under many seeds."""

from __future__ import annotations

import pytest

from prpc_engine.simulation import run_once
from prpc_engine.simulation.explore import Scenario
from tests.simulation import scenarios_master as scenarios
from tests.simulation.seeds import describe, hold


def test_a_lock_has_one_holder_and_tokens_and_ids_grow(request: pytest.FixtureRequest) -> None:
    hold(scenarios.locks, request)


def test_tokens_and_ids_grow_over_masters_that_remember_nothing(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.locks_without_journal, request)


def test_no_barrier_opens_before_all_members_have_come(request: pytest.FixtureRequest) -> None:
    hold(scenarios.barriers, request)


def test_the_tree_is_linearizable_over_restarts_of_its_master(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.tree, request)


@pytest.mark.parametrize("scenario", [scenarios.tree, scenarios.barriers])
def test_a_client_whose_first_attempt_meets_a_crash_finds_the_master_that_is_back(
    scenario: Scenario,
) -> None:
    """The master's host crashes in the middle of a handshake. The attempt had all of the client's
    60 s.
    """
    outcome = run_once(scenario, 1_000_005, frozenset(range(21)) - {8})
    assert outcome.faults == ("fault 8: crash at 0.037 s for 0.356 s",)
    assert not outcome.error, describe(outcome)
