"""How far workers are behind, and whom others wait for, as their clocks go on."""

from __future__ import annotations

from prpc_engine.kv.consistency.consistency import Clocks
from prpc_engine.kv.consistency.progress import Lag, Lags


def started(**pushes: int) -> tuple[Clocks, Lags]:
    clocks = Clocks(len(pushes))
    lags = Lags(clocks)
    for number, (name, count) in enumerate(pushes.items(), start=1):
        clocks.enter(number, name)
        lags.look_again(10.0, False)
        push(clocks, lags, number, 10.0, count)
    return clocks, lags


def push(clocks: Clocks, lags: Lags, worker: int, now: float, pushes: int = 1) -> None:
    clocks.tick(worker, pushes)
    lags.pushed(worker, now)


def by_name(lags: Lags, now: float) -> dict[str, Lag]:
    return dict(lags.lags(now).values())


def test_a_worker_is_behind_from_the_moment_another_one_passes_it_until_it_is_level() -> None:
    clocks, lags = started(one=4, two=1)
    assert by_name(lags, 12.0) == {"one": Lag(0, 0, 0), "two": Lag(3, 2, 0)}
    push(clocks, lags, 2, 13.0, 2)
    assert by_name(lags, 15.0)["two"] == Lag(1, 5, 0)
    push(clocks, lags, 2, 16.0, 2)
    assert by_name(lags, 18.0) == {"one": Lag(1, 2, 0), "two": Lag(0, 0, 0)}


def test_all_who_are_slowest_hold_a_wait_up_and_each_until_its_own_push() -> None:
    clocks, lags = started(one=2, two=1, three=1)
    lags.look(20.0, True)
    push(clocks, lags, 2, 23.0)
    lags.look(23.0, True)
    push(clocks, lags, 3, 27.0)
    lags.look(27.0, False)
    assert [lag.held_up_s for lag in by_name(lags, 30.0).values()] == [0, 3, 7]


def test_a_wait_that_goes_on_counts_as_far_as_it_has_come() -> None:
    _, lags = started(one=2, two=1)
    lags.look(20.0, True)
    assert by_name(lags, 24.5)["two"].held_up_s == 4.5


def test_nobody_is_blamed_for_workers_that_have_not_come_yet() -> None:
    clocks = Clocks(2)
    lags = Lags(clocks)
    clocks.enter(1, "one")
    push(clocks, lags, 1, 0.0)
    lags.look(0.0, True)
    assert by_name(lags, 9.0) == {"one": Lag(0, 0, 0)}


def test_who_leaves_takes_its_figures_along() -> None:
    clocks, lags = started(one=2, two=1)
    lags.look(20.0, True)
    clocks.leave(2)
    lags.look_again(21.0, False)
    clocks.enter(2, "two")
    assert by_name(lags, 25.0)["two"].held_up_s == 0


def test_a_push_taken_back_makes_its_worker_slow_again() -> None:
    clocks, lags = started(one=2, two=2, three=3)
    lags.look(20.0, True)
    push(clocks, lags, 1, 21.0)
    clocks.tick(1, -1)
    lags.look_again(24.0, True)
    assert by_name(lags, 25.0) == {"one": Lag(1, 1, 2), "two": Lag(1, 15, 5), "three": Lag(0, 0, 0)}
