"""How long a task that does not come up is waited for, and how often it is looked for."""

from __future__ import annotations

import pytest

from prpc_engine.cluster.patience import PAUSE, Patience


def test_attempts_are_made_ever_more_rarely_until_the_patience_is_over() -> None:
    patience = Patience(started=100.0, patience_s=30.0)
    now, pauses = 100.0, list[float]()
    while (pause_s := patience.pause_s(now)) is not None:
        pauses.append(pause_s)
        now += pause_s
    assert pauses[:5] == [PAUSE.first_s * 2**each for each in range(5)]
    assert max(pauses) == PAUSE.max_s
    assert now == pytest.approx(130.0)  # the last one is made as it ends
    assert patience.failed == len(pauses) + 1


def test_without_patience_one_attempt_is_made() -> None:
    assert Patience(started=100.0, patience_s=0.0).pause_s(100.1) is None
