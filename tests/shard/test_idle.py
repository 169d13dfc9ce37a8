"""What a reactor without work does: poll on, offer the core, or park."""

from __future__ import annotations

import os

import pytest

from shard.idle import PARK_S_MAX, SPIN_WINDOW_S_MAX, SPIN_WINDOW_S_MIN, YIELD_EVERY_TURNS, Adaptive, Spin
from tests.helpers import ManualClock


def park_after(idle: Adaptive, clock: ManualClock, step_s: float = 1e-6) -> float:
    """How long it spins from the first empty turn on."""
    start = clock()
    while idle.idle(clock()) == 0.0:
        clock.advance(step_s)
        assert clock() - start < 1.0
    return clock() - start


def exchange(idle: Adaptive, clock: ManualClock, gap_s: float, count: int) -> None:
    """Pieces of work with such gaps between them."""
    for _ in range(count):
        idle.idle(clock())
        clock.advance(gap_s)
        idle.work(clock())


def test_spinning_never_parks_and_offers_the_core_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    idle = Spin()
    assert {idle.idle(float(turn)) for turn in range(3 * YIELD_EVERY_TURNS)} == {0.0}
    assert len(yields) == 3


def test_work_puts_the_offer_off(monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    idle = Spin()
    for turn in range(10 * YIELD_EVERY_TURNS):
        if turn % (YIELD_EVERY_TURNS - 1) == 0:
            idle.work(float(turn))
        idle.idle(float(turn))
    assert yields == []


def test_an_empty_reactor_spins_for_its_window_and_then_parks(clock: ManualClock) -> None:
    idle = Adaptive()
    assert park_after(idle, clock) == pytest.approx(idle.window_s, abs=2e-6)
    assert idle.idle(clock()) == PARK_S_MAX


def test_a_hot_exchange_never_parks(clock: ManualClock) -> None:
    idle = Adaptive()
    for _ in range(1000):
        for _ in range(5):
            assert idle.idle(clock()) == 0.0
            clock.advance(2e-6)
        idle.work(clock())
    assert idle.window_s <= SPIN_WINDOW_S_MAX


def test_long_gaps_shrink_the_window_until_spinning_costs_nothing(clock: ManualClock) -> None:
    idle = Adaptive()
    exchange(idle, clock, 0.01, 20)
    assert idle.window_s == SPIN_WINDOW_S_MIN
    assert park_after(idle, clock) <= SPIN_WINDOW_S_MIN + 1e-6


def test_gaps_that_a_longer_window_bridges_widen_it_again(clock: ManualClock) -> None:
    idle = Adaptive()
    exchange(idle, clock, 0.01, 20)
    exchange(idle, clock, 20e-6, 3)
    assert idle.window_s >= 39e-6
    exchange(idle, clock, SPIN_WINDOW_S_MAX * 0.99, 3)
    assert idle.window_s == pytest.approx(SPIN_WINDOW_S_MAX)


def test_the_window_keeps_its_bounds_whatever_the_gaps(clock: ManualClock) -> None:
    idle = Adaptive()
    for gap_s in [1e-7, 1e-3, 5e-5, 1.0, 1e-4, 1e-4, 3.0] * 20:
        exchange(idle, clock, gap_s, 1)
        assert SPIN_WINDOW_S_MIN <= idle.window_s <= SPIN_WINDOW_S_MAX
