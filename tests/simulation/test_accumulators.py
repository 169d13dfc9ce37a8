"""Scenarios of scenarios_accumulators.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_accumulators as scenarios
from tests.simulation.seeds import hold


def test_nothing_counts_twice_and_what_servers_lost_is_told(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.accumulators, request)


def test_sums_are_exact_while_connections_alone_are_lost(request: pytest.FixtureRequest) -> None:
    hold(scenarios.accumulators_without_a_kill, request)
