"""Scenarios of scenarios_master.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_master as scenarios
from tests.simulation.seeds import hold


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
