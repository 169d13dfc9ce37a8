"""Scenarios of scenarios_checkpoints.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_checkpoints as scenarios
from tests.simulation.seeds import hold


def test_a_restore_brings_the_newest_state_that_was_saved_whole(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.checkpoints, request)


def test_a_save_that_finds_no_room_leaves_those_before_it(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.checkpoints_on_a_full_disk, request)


def test_a_checkpoint_that_was_saved_outlives_a_crash_of_its_host(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.checkpoints_on_a_disk_that_loses, request)
