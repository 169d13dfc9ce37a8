"""Scenarios of scenarios_tables.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_tables as scenarios
from tests.simulation.seeds import hold


def test_pushes_to_plain_tables_count_once_and_a_loss_is_told(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.plain, request, share=0.5)


def test_no_worker_of_an_ssp_table_runs_further_ahead_than_its_bound(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.ssp, request)


def test_workers_of_a_sync_table_see_whole_steps(request: pytest.FixtureRequest) -> None:
    hold(scenarios.sync, request)
