"""Scenarios of scenarios_recovery.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_recovery as scenarios
from tests.simulation.seeds import hold


def test_workers_that_save_restore_and_reset_may_die_in_the_middle(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.recovery, request, share=0.2)


def test_tables_go_on_with_a_master_that_has_forgotten_them(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.recovery_without_journal, request, share=0.2)


def test_tables_come_back_from_a_host_that_crashed(request: pytest.FixtureRequest) -> None:
    hold(scenarios.recovery_on_one_host, request, share=0.2)
