"""Scenarios of scenarios_disks.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_disks as scenarios
from tests.simulation.seeds import hold


def test_a_transaction_that_was_appended_outlives_crashes_of_its_host(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.journal, request, share=6)


def test_a_crash_takes_the_last_transactions_of_a_journal_that_does_not_sync(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.journal_without_sync, request, share=6)


def test_a_snapshot_that_was_saved_outlives_crashes_of_its_host(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.snapshots, request, share=6)
