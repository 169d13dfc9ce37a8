"""Scenarios of scenarios_elastic.py, under many seeds."""

from __future__ import annotations

import pytest

from tests.simulation import scenarios_elastic as scenarios
from tests.simulation.seeds import hold


def test_what_elastic_tables_lose_is_told_and_replicas_are_equal(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.elastic, request, share=0.5)


def test_nothing_replicated_is_lost_while_one_server_at_a_time_dies(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.replicated, request, share=0.25)


def test_partitions_that_move_all_the_time_are_told_of_what_they_lose(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.moving, request, share=0.5)


def test_partitions_that_move_while_tables_are_restored_are_whole(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.restored, request, share=0.1)


@pytest.mark.slow  # 3 s of a core for a seed
def test_two_primaries_never_answer_at_once_though_clocks_drift(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.one_primary, request, share=0.1)
