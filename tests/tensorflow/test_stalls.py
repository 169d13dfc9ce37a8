"""Who is named when steps wait: decided from the calls under way and the time alone."""

from __future__ import annotations

from prpc_engine.tensorflow.stalls import STALL_S, Awaited, stalled


def test_a_task_is_named_from_the_budget_on_with_its_oldest_call() -> None:
    calls = [Awaited("ps", 5.0), Awaited("ps", 3.0), Awaited("other", 5.5)]
    assert stalled(calls, 5.0 + STALL_S) == {"ps": 2.0 + STALL_S}
    assert stalled(calls, 2.9 + STALL_S) == {}


def test_a_call_that_may_take_as_long_as_it_likes_names_nobody() -> None:
    assert stalled([Awaited("", 0.0)], 1e6) == {}


def test_a_call_that_is_answered_is_looked_at_no_longer() -> None:
    assert stalled([], 1e6) == {}
