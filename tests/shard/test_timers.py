"""Deadlines in order, by a clock that the caller holds."""

from __future__ import annotations

import random

from shard import Timers
from tests.helpers import ManualClock


def test_timers_fire_in_order_and_only_when_due() -> None:
    timers, fired = Timers(), list[float]()
    for when in (3.0, 1.0, 2.0):
        timers.call_at(when, lambda when=when: fired.append(when))  # type: ignore[misc]
    assert timers.fire(0.5) == 0
    assert timers.fire(2.0) == 2
    assert fired == [1.0, 2.0]
    assert timers.fire(9.0) == 1
    assert timers.fire(9.0) == 0
    assert fired == [1.0, 2.0, 3.0]


def test_timers_of_one_time_fire_in_the_order_they_were_made() -> None:
    timers, fired = Timers(), list[int]()
    for number in range(100):
        timers.call_at(1.0, lambda number=number: fired.append(number))  # type: ignore[misc]
    assert timers.fire(1.0) == 100
    assert fired == list(range(100))


def test_the_next_deadline_is_that_of_the_earliest_that_lives() -> None:
    timers = Timers()
    assert timers.next_deadline() is None
    late, early = timers.call_at(5.0, bool), timers.call_at(2.0, bool)
    assert timers.next_deadline() == 2.0
    early.cancel()
    assert timers.next_deadline() == 5.0
    late.cancel()
    assert timers.next_deadline() is None
    assert len(timers) == 0


def test_a_cancelled_timer_never_fires_and_cancelling_again_does_nothing() -> None:
    timers, fired = Timers(), list[str]()
    timer = timers.call_at(1.0, lambda: fired.append("cancelled"))
    other = timers.call_at(1.0, lambda: fired.append("other"))
    timer.cancel()
    timer.cancel()
    assert len(timers) == 1
    assert timers.fire(1.0) == 1
    other.cancel()  # too late
    assert fired == ["other"]
    assert len(timers) == 0


def test_a_timer_may_cancel_one_that_is_due_with_it() -> None:
    timers, fired = Timers(), list[str]()
    timers.call_at(1.0, lambda: second.cancel())
    second = timers.call_at(1.0, lambda: fired.append("second"))
    timers.call_at(1.0, lambda: fired.append("third"))
    assert timers.fire(1.0) == 2
    assert fired == ["third"]
    assert len(timers) == 0


def test_a_timer_made_by_one_that_fires_waits_for_the_next_turn(clock: ManualClock) -> None:
    timers, fired = Timers(), list[float]()

    def again() -> None:
        fired.append(clock())
        timers.call_at(clock(), again)

    timers.call_at(clock(), again)
    assert timers.fire(clock()) == 1
    assert timers.fire(clock()) == 1
    assert len(fired) == 2


def test_ten_thousand_cancelled_timers_take_no_room() -> None:
    timers = Timers()
    kept = [timers.call_at(number, bool) for number in range(10)]
    for number in range(10_000):
        timers.call_at(1000.0 + number, bool).cancel()
    assert len(timers) == len(kept)
    assert len(timers._heap) < 200
    assert timers.fire(2000.0) == 10


def test_any_mixture_fires_what_a_plain_list_would(seed: int) -> None:
    chance = random.Random(seed)
    timers, fired = Timers(), list[int]()
    expected: dict[int, tuple[float, object]] = {}
    now = 0.0
    for number in range(3000):
        timer = timers.call_at(
            now + chance.uniform(0, 10), lambda number=number: fired.append(number)
        )  # type: ignore[misc]
        expected[number] = (timer.when, timer)
        if chance.random() < 0.6:
            victim = chance.choice(list(expected))
            expected.pop(victim)[1].cancel()  # type: ignore[attr-defined]
        if chance.random() < 0.2:
            now += chance.uniform(0, 3)
            due = sorted((when, key) for key, (when, _) in expected.items() if when <= now)
            fired.clear()
            assert timers.fire(now) == len(due)
            assert fired == [key for _, key in due]
            for _, key in due:
                del expected[key]
        assert len(timers) == len(expected)
