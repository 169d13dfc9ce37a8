"""How often lost requests are sent again, and when the log says that they wait."""

from __future__ import annotations

import math

import pytest

from prpc_engine.kv.client.recovery_pace import (
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    TOLD_AFTER_S,
    TOLD_EVERY_S,
    RecoveryPace,
)


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (1.0, 1.0)])
def test_pauses_double_up_to_a_bound_and_chance_takes_at_most_half_of_one(
    chance: float, share: float
) -> None:
    pace = RecoveryPace(began=100.0)
    pauses = [pace.pause_s(100.0, chance, math.inf) for _ in range(10)]
    assert pauses[:3] == [share * BACKOFF_S_MIN * 2**each for each in range(3)]
    assert max(pauses) == pauses[-1] == share * BACKOFF_S_MAX


def test_a_pause_ends_at_the_first_deadline() -> None:
    pace = RecoveryPace(began=100.0)
    assert pace.pause_s(100.0, 1.0, 100.001) == pytest.approx(0.001)
    assert pace.pause_s(100.0, 1.0, 99.0) == 0.0


def test_requests_that_wait_are_told_of_after_a_while_and_then_now_and_then() -> None:
    pace = RecoveryPace(began=100.0)
    told = [at for at in range(100, 130) if pace.tells(float(at))]
    first = 100 + int(TOLD_AFTER_S)
    assert told == [first, first + int(TOLD_EVERY_S), first + 2 * int(TOLD_EVERY_S)]
