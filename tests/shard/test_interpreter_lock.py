"""When a loop that never waits lets other threads have the interpreter."""

from __future__ import annotations

import itertools

from shard.loop.interpreter_lock import PAUSE_S_MAX, PAUSE_S_MIN, TAKEN_S, WAKE_UP_S, LockShare


class Machine:
    """A clock, the time that this thread has used, and how long others keep the lock if asked."""

    def __init__(self) -> None:
        self.now, self.used = 100.0, 0.0
        self.others_s = 0.0
        self.offers: list[float] = []
        self.share = LockShare(lambda: self.now, lambda: self.used, self.sleep)
        self.share.offer()  # the first look: no time has passed yet

    def sleep(self, seconds: float) -> None:
        assert seconds == WAKE_UP_S
        self.offers.append(self.now)
        self.now += seconds + self.others_s

    def run(self, seconds: float, steps: int = 100) -> None:
        """This thread runs, and looks now and then."""
        for _ in range(steps):
            self.now += seconds / steps
            self.used += seconds / steps
            self.share.offer()


def test_others_are_offered_the_lock_each_switch_interval_while_they_take_it() -> None:
    machine = Machine()
    machine.others_s = 5e-3
    machine.run(20.5 * PAUSE_S_MIN, 2050)
    assert len(machine.offers) == 20


def test_where_nobody_takes_it_the_pauses_grow() -> None:
    machine = Machine()
    machine.run(10 * PAUSE_S_MAX, 10_000)
    pauses = [after - one for one, after in itertools.pairwise(machine.offers)]
    assert all(after >= one for one, after in itertools.pairwise(pauses))
    assert len(machine.offers) < 20
    assert PAUSE_S_MAX <= pauses[-1] < 1.1 * PAUSE_S_MAX
    machine.others_s = 5e-3
    machine.run(2 * PAUSE_S_MAX, 2000)
    offers = len(machine.offers)
    machine.run(10.5 * PAUSE_S_MIN, 1050)
    assert len(machine.offers) == offers + 10, "once taken, it is offered as often as at first"


def test_a_thread_that_has_lost_time_offers_nothing_for_a_while() -> None:
    machine = Machine()
    for _ in range(20):
        machine.run(0.8 * PAUSE_S_MIN)
        machine.now += 2 * TAKEN_S  # another thread ran, or this one slept
    assert machine.offers == []


def test_another_thread_s_time_says_nothing() -> None:
    machine = Machine()
    for _ in range(20):
        machine.run(0.8 * PAUSE_S_MIN)
        machine.used = 300.0 - machine.used
    assert machine.offers == []
