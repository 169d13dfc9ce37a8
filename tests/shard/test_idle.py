"""What a reactor without work does: poll on, offer the core, or park."""

from __future__ import annotations

import pytest

from shard.loop.idle import (
    PARK_S_MAX,
    SPIN_WINDOW_S_MAX,
    SPIN_WINDOW_S_MIN,
    WAKE_UP_S,
    YIELD_EVERY_TURNS,
    Adaptive,
    Idle,
    Park,
    Spin,
    polling_enabled,
    strategy,
)
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


def test_spinning_never_parks_and_offers_the_core_now_and_then() -> None:
    yields: list[int] = []
    idle = Spin(offer=lambda: yields.append(1))
    assert {idle.idle(float(turn)) for turn in range(3 * YIELD_EVERY_TURNS)} == {0.0}
    assert len(yields) == 3


def test_work_puts_the_offer_off() -> None:
    yields: list[int] = []
    idle = Spin(offer=lambda: yields.append(1))
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


# -- a reactor in a simulation: turns of 1 us, messages at given times -----------------------------

TURN_S = 1e-6


class Simulation:
    """A reactor that idles by a strategy; waking from a park takes `wake_s`.
    Counts what it spends.
    """

    def __init__(self, idle: Idle, clock: ManualClock, wake_s: float = 50e-6) -> None:
        self.idle, self.clock, self.wake_s = idle, clock, wake_s
        self.spun_s = 0.0
        self.parks = 0

    def wait_until(self, arrival: float) -> None:
        """Idle until something arrives at that time, and take it."""
        while self.clock() < arrival:
            park_s = self.idle.idle(self.clock())
            if park_s:
                self.parks += 1
                if self.clock() + park_s < arrival:
                    self.clock.advance(park_s)
                    continue
                self.clock.advance(max(0.0, arrival - self.clock()) + self.wake_s)
            else:
                self.clock.advance(TURN_S)
                self.spun_s += TURN_S
        self.idle.work(self.clock())


def test_ten_messages_a_second_for_an_hour_cost_no_spinning_to_speak_of(clock: ManualClock) -> None:
    reactor = Simulation(Adaptive(), clock)
    start = clock()
    for message in range(1, 36_001):
        reactor.wait_until(start + message / 10)
    assert reactor.spun_s < 0.001 * 3600
    assert reactor.spun_s / 36_000 < 2 * SPIN_WINDOW_S_MIN  # a window and a turn for each


@pytest.mark.parametrize("gap_s", [3e-6, 20e-6, 49e-6])
def test_an_exchange_that_a_window_bridges_never_parks(clock: ManualClock, gap_s: float) -> None:
    reactor = Simulation(Adaptive(), clock)
    for _ in range(1000):
        reactor.wait_until(clock() + gap_s)
    assert reactor.parks == 0


@pytest.mark.parametrize(
    ("gap_s", "wake_s"), [(3e-6, 30e-6), (3e-6, 120e-6), (20e-6, 60e-6), (80e-6, 45e-6)]
)
def test_after_a_long_silence_a_burst_is_spun_for_within_a_few_messages(
    clock: ManualClock, gap_s: float, wake_s: float
) -> None:
    idle = Adaptive()
    reactor = Simulation(idle, clock, wake_s)
    for _ in range(100):
        reactor.wait_until(clock() + 1.0)
    assert idle.window_s == SPIN_WINDOW_S_MIN
    parks = reactor.parks
    for _ in range(1000):
        reactor.wait_until(clock() + gap_s)
    assert reactor.parks - parks <= 3


def test_its_own_waking_up_is_not_taken_for_the_peers_slowness(clock: ManualClock) -> None:
    idle = Adaptive()
    exchange(idle, clock, 1.0, 20)
    reactor = Simulation(idle, clock, wake_s=0.0)
    # parked: the work may have been there WAKE_UP_S before
    reactor.wait_until(clock() + SPIN_WINDOW_S_MAX + 0.9 * WAKE_UP_S)
    assert idle.window_s == pytest.approx(SPIN_WINDOW_S_MAX)


def test_a_pause_after_a_burst_costs_one_window(clock: ManualClock) -> None:
    reactor = Simulation(Adaptive(), clock)
    for _ in range(1000):
        for _ in range(10):
            reactor.wait_until(clock() + 10e-6)
        spun_s = reactor.spun_s
        reactor.wait_until(clock() + 0.1)
        assert reactor.spun_s - spun_s <= SPIN_WINDOW_S_MAX + 2 * TURN_S


# -- the others, and names -------------------------------------------------------------------------


def test_parking_at_once_parks_at_once(clock: ManualClock) -> None:
    idle = Park()
    idle.work(clock())
    assert idle.idle(clock()) == PARK_S_MAX
    assert idle.spin_turns == 0


def test_with_more_pollers_than_cores_every_turn_offers_the_core() -> None:
    yields: list[int] = []
    idle = strategy("spin", oversubscribed=True, offer=lambda: yields.append(1))
    for turn in range(10):
        assert idle.idle(float(turn)) == 0.0
    assert len(yields) == 10
    with pytest.raises(ValueError, match=r"yield_turns=0\): 1 \(every empty turn\) or more"):
        Spin(0)


@pytest.mark.parametrize(("name", "kind"), [("spin", Spin), ("adaptive", Adaptive), ("park", Park)])
def test_a_strategy_is_made_by_its_name(name: str, kind: type) -> None:
    assert type(strategy(name)) is kind
    assert strategy(name) is not strategy(name)  # one a reactor: it has a memory


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"idle strategy 'poll': there are 'spin' .*, 'adaptive' .* and 'park'"
    ):
        strategy("poll")


@pytest.mark.parametrize(
    ("value", "enabled"),
    [("1", True), ("true", True), ("ON", True), (" 0 ", False), ("False", False), ("off", False)],
)
def test_polling_is_switched_by_the_environment(value: str, enabled: bool) -> None:
    assert polling_enabled("PS_ENABLE_POLLING", value, not enabled) is enabled


@pytest.mark.parametrize("default", [True, False])
def test_without_the_variable_polling_is_as_the_default_says(default: bool) -> None:
    assert polling_enabled("PS_ENABLE_POLLING", None, default) is default


@pytest.mark.parametrize("value", ["", "yes", "2", "truee"])
def test_what_is_no_switch_is_refused_by_name(value: str) -> None:
    with pytest.raises(
        ValueError, match=f"WORKER_ENABLE_POLLING='{value}': 1, true or on .* 0, false or off"
    ):
        polling_enabled("WORKER_ENABLE_POLLING", value, False)
