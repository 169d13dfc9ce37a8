"""Scenarios of scenarios_calls.py, under many seeds."""

from __future__ import annotations

import pytest

from prpc_engine.simulation import run_once
from tests.simulation import scenarios_calls as scenarios
from tests.simulation.seeds import describe, hold


def test_calls_end_in_time_and_as_their_kind_promises(request: pytest.FixtureRequest) -> None:
    hold(scenarios.calls, request, share=4)


def test_futures_end_once_and_tell_their_callbacks_once(request: pytest.FixtureRequest) -> None:
    hold(scenarios.futures, request, share=4)


def test_hedged_calls_run_plain_methods_once_at_most(request: pytest.FixtureRequest) -> None:
    hold(scenarios.hedged, request, share=2.5)


def test_servers_that_close_politely_lose_no_call(request: pytest.FixtureRequest) -> None:
    hold(scenarios.rolling, request, share=2.5)


def test_handlers_of_two_processes_may_call_each_other(request: pytest.FixtureRequest) -> None:
    hold(scenarios.nested, request, share=2)


def test_services_are_closed_in_the_middle_of_what_they_do(request: pytest.FixtureRequest) -> None:
    hold(scenarios.comings, request, share=0.5)


def test_streams_bring_each_item_once_in_order_and_end_aloud(
    request: pytest.FixtureRequest,
) -> None:
    hold(scenarios.streams, request, share=1.5)


def test_an_item_that_finds_its_connection_lost_does_not_say_that_the_stream_was_never_sent() -> (
    None
):
    """NotSent would have its caller open the stream again, which the server had begun."""
    outcome = run_once(scenarios.streams, 5_000_141)
    assert not outcome.error, describe(outcome)
