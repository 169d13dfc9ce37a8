"""Scenarios of scenarios_sessions.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_sessions as scenarios
from tests.simulation.seeds import hold


def test_clients_of_a_master_that_comes_and_goes_end_in_time_in_any_state(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.sessions, request, share=0.5)
