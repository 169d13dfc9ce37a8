"""How often lost requests are sent again, and when the log says that they wait."""

from __future__ import annotations

import pytest

from prpc_engine.kv.client.recovery_pace import (
    ROUND_PAUSE,
    TOLD_AFTER_S,
    TOLD_EVERY_S,
    RecoveryPace,
)


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (1.0, 1.0)])
def test_pauses_double_up_to_a_bound_and_chance_takes_at_most_half_of_one(
    chance: float, share: float
) -> None:
    pace = RecoveryPace(began=100.0)
    pauses = [pace.pause_s(chance) for _ in range(10)]
    assert pauses[:3] == [share * ROUND_PAUSE.first_s * 2**each for each in range(3)]
    assert max(pauses) == pauses[-1] == share * ROUND_PAUSE.max_s


def test_requests_that_wait_are_told_of_after_a_while_and_then_now_and_then() -> None:
    pace = RecoveryPace(began=100.0)
    told = [at for at in range(100, 130) if pace.tells(float(at))]
    first = 100 + int(TOLD_AFTER_S)
    assert told == [first, first + int(TOLD_EVERY_S), first + 2 * int(TOLD_EVERY_S)]
