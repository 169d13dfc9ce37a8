"""Scenarios of scenarios_jobs.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_jobs as scenarios
from tests.simulation.seeds import hold


def test_requests_end_once_and_leave_their_places_whoever_gives_them_up(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.places, request, share=0.5)
