"""Scenarios of scenarios_memory.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_memory as scenarios
from tests.simulation.seeds import hold


def test_an_array_without_memory_is_refused_by_name_and_nothing_else_is(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.arrays, request, share=0.5)


def test_calls_keep_their_promises_though_memory_is_refused_among_other_faults(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.arrays_among_faults, request, share=0.5)
