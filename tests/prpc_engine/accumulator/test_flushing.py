"""When a client pushes again after a failure, how long it rests, and when it is over."""

from __future__ import annotations

import pytest

from prpc_engine.accumulator.counter import Counter
from prpc_engine.accumulator.flushing import (
    IDLE_S_MAX,
    RETRY,
    PushTarget,
    rest_s,
)
from prpc_engine.accumulator.numeric import Sum


def target(values: int = 1) -> PushTarget:
    """A server with so many values to push."""
    one = PushTarget(0)
    if values:
        aggregate = Sum()
        aggregate.merge_value(1.0)
        one.outbox.add(Counter("one", Sum(), 0, 1.0, lambda: None), aggregate, values)
    return one


def test_a_push_is_made_again_ever_later_until_it_is_answered() -> None:
    one, now_s, pauses = target(), 100.0, list[float]()
    first = one.batch(now_s)
    assert first is not None
    for _ in range(8):
        one.failed("no answer", now_s)
        assert one.batch(now_s) is None
        pauses.append(one.retry_at_s - now_s)
        now_s = one.retry_at_s
        assert one.batch(now_s) is first
    assert pauses[:3] == pytest.approx([RETRY.first_s * 2**each for each in range(3)])
    assert max(pauses) == RETRY.max_s
    assert one.failure == "no answer"
    one.answered(7)
    assert (one.epoch, one.failure, one.failures) == (7, None, 0)
    assert one.batch(0.0) is first


@pytest.mark.parametrize(
    ("due_s", "retry_at_s", "rest"),
    [(None, None, IDLE_S_MAX), (103.0, None, 3.0), (103.0, 102.0, 2.0), (99.0, None, 0.0)],
)
def test_it_rests_until_a_counter_or_a_server_is_due(
    due_s: float | None, retry_at_s: float | None, rest: float
) -> None:
    one = target(values=retry_at_s is not None)
    one.retry_at_s = retry_at_s or 0.0
    assert rest_s(100.0, None, due_s, [one, target(0)]) == rest


@pytest.mark.parametrize(
    ("values", "close_by_s", "rest"), [(0, 105.0, None), (1, 105.0, 2.0), (1, 101.0, 1.0)]
)
def test_while_it_closes_it_rests_for_a_server_alone_and_ends_in_time(
    values: int, close_by_s: float, rest: float | None
) -> None:
    one = target(values)
    one.retry_at_s = 102.0
    assert rest_s(100.0, close_by_s, 100.5, [one]) == rest
    assert rest_s(close_by_s, close_by_s, 100.5, [one]) is None
