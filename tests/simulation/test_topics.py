"""Scenarios of scenarios_topics.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_topics as scenarios
from tests.simulation.seeds import hold


def test_a_reader_that_starts_with_its_publisher_gets_all_items(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.starts_at_once, request, share=3.0)
