"""Scenarios of scenarios_disks.py, under many seeds."""

from __future__ import annotations

import pytest

from prpc_engine.simulation import run_once
from tests.simulation import scenarios_disks as scenarios
from tests.simulation.seeds import describe, hold


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


def test_a_folder_that_a_killed_process_has_made_outlives_the_next_crash() -> None:
    """It was killed before it had synced the folder's name; the next process found the folder, and
    a crash took it away with seven transactions that were answered.
    """
    outcome = run_once(scenarios.journal, 2_000_796, frozenset(range(13)) - {0, 3})
    assert [text.split()[2] for text in outcome.faults] == ["kill", "crash"]
    assert not outcome.error, describe(outcome)
