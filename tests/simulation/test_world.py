"""Scenarios of scenarios_world.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_world as scenarios
from tests.simulation.seeds import hold


def test_groups_of_a_size_come_call_each_other_and_leave_and_no_call_is_cut_off(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.worlds, request, share=0.3)


def test_groups_of_a_size_leave_together_where_connections_are_lost(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.worlds_with_losses, request, share=0.3)


def test_groups_of_a_size_go_on_with_the_next_one_where_workers_are_killed(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.worlds_with_kills, request, share=0.1)
