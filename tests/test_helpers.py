"""The helpers of this folder."""

from __future__ import annotations

import pytest

from tests.helpers import ManualClock


def test_a_manual_clock_moves_only_when_told(clock: ManualClock) -> None:
    started = clock()
    assert clock.now == started
    assert clock.advance(2.5) == started + 2.5
    assert clock() == started + 2.5


def test_a_manual_clock_does_not_run_backwards(clock: ManualClock) -> None:
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
