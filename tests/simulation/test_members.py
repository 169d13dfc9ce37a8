"""Scenarios of scenarios_members.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_members as scenarios
from tests.simulation.seeds import hold


def test_who_lives_is_found_and_who_was_killed_is_not(request: pytest.FixtureRequest) -> None:
    hold(scenarios.leases, request)


def test_after_all_faults_the_master_knows_those_that_live(request: pytest.FixtureRequest) -> None:
    hold(scenarios.members, request)


def test_watches_tell_changes_in_order_and_at_last_all_of_them(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.watches, request)


def test_watches_miss_no_change_where_no_connection_is_lost(request: pytest.FixtureRequest) -> None:
    hold(scenarios.watches_without_loss, request)
