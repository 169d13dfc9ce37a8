"""Scenarios of scenarios_remote.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_remote as scenarios
from tests.simulation.seeds import hold


def test_workers_call_each_other_and_pass_references_on_while_they_come_and_go(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.remotes, request, share=0.5)


def test_workers_of_a_master_that_forgets_are_all_there_again(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.remotes_without_journal, request, share=0.5)


def test_values_of_workers_that_live_are_there_until_nobody_refers_to_them(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.remotes_that_live, request, share=0.5)
