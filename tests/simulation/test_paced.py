"""Scenarios of scenarios_paced.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_paced as scenarios
from tests.simulation.seeds import hold


def test_nobody_waits_in_an_ssp_table_for_workers_that_died_or_that_began_it_again(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.ssp, request, share=0.2)


def test_nobody_waits_in_a_sync_table_for_workers_that_died_or_that_began_it_again(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.sync, request, share=0.2)
