"""When shutdown() may end: the rounds, without a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prpc_engine.remote.termination import Termination


class Workers:
    """Each sees what the others have told."""

    def __init__(self, count: int) -> None:
        self.calls: list[Any] = [SimpleNamespace(under_way=0, begun=0) for _ in range(count)]
        self.runners: list[Any] = [SimpleNamespace(running=0) for _ in range(count)]
        self.told: list[tuple[int, ...]] = [()] * count
        self.staying: list[str] = []
        self.each = [
            Termination(self._members(one), self.calls[one], self.runners[one])
            for one in range(count)
        ]

    def _members(self, one: int) -> Any:
        def begun() -> dict[str, tuple[int, ...]]:
            return {f"w{other}": t for other, t in enumerate(self.told) if other != one}

        return SimpleNamespace(begun=begun, staying=lambda: self.staying)

    def tell(self, *ones: int) -> None:
        for one in ones:
            told = self.each[one].next_told()
            if told:
                self.told[one] = told

    def over(self) -> list[bool]:
        return [one.is_over for one in self.each]


def test_two_rounds_of_the_same_numbers_end_it_for_all() -> None:
    workers = Workers(3)
    workers.tell(0, 1, 2)
    assert workers.over() == [False] * 3
    workers.tell(0, 1)
    assert workers.over() == [False] * 3
    workers.tell(2)
    assert workers.over() == [True] * 3


def test_who_has_calls_or_functions_under_way_tells_nothing() -> None:
    workers = Workers(2)
    workers.calls[0].under_way, workers.runners[1].running = 1, 1
    workers.tell(0, 1)
    assert workers.told == [(), ()]
    assert "1 calls of its own are under way and 0 functions" in workers.each[0].waits_for()
    assert "1 functions run in it" in workers.each[1].waits_for()


def test_a_call_that_began_between_two_rounds_costs_another_one() -> None:
    """Of a function whose caller has not waited for it: where it runs, nothing was under way when
    the first number was told.
    """
    workers = Workers(2)
    workers.tell(0, 1)
    workers.tell(0)
    workers.calls[1].begun += 1  # begun and ended
    workers.tell(1)
    assert workers.over() == [False] * 2
    workers.tell(0, 1)
    assert workers.over() == [True] * 2


def test_nobody_is_a_round_ahead_of_another() -> None:
    workers = Workers(2)
    workers.tell(0)
    workers.tell(0)
    assert workers.told == [(0,), ()]
    assert [one.is_turn for one in workers.each] == [False, True]
    workers.staying = ["w1"]
    assert workers.each[0].waits_for() == "'w1' have not called it"
    workers.staying = []
    assert workers.each[0].waits_for() == "calls or functions of 'w1' go on"


def test_who_does_not_wait_any_more_ends_it_for_nobody() -> None:
    workers = Workers(2)
    workers.tell(0, 1)
    workers.each[0].begin_again()
    workers.told[0] = ()
    workers.tell(1)
    assert workers.told[1] == (0,)
    workers.tell(0)
    workers.tell(0, 1)
    assert workers.over() == [True] * 2


def test_one_worker_alone_ends_it() -> None:
    workers = Workers(1)
    workers.tell(0)
    workers.tell(0)
    assert workers.over() == [True]
