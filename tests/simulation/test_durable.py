"""Scenarios of scenarios_durable.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_durable as scenarios
from tests.simulation.seeds import hold


def test_a_push_that_was_answered_as_durable_is_in_each_later_restore(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.durable, request, share=0.2)


def test_a_durable_push_outlives_a_crash_of_the_servers_host(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.durable_on_one_host, request, share=0.2)
