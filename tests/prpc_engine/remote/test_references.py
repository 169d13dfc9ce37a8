"""Distributed reference counts, without any process: orders of events, and a model of workers that
pass references on, drop them and die.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prpc_engine.remote.references import (
    FORKS,
    NOBODY,
    UNCLAIMED_S,
    ForkEvent,
    ForkState,
    References,
)

OWNER, A, B, C = 1, 2, 3, 4


class Value:
    freed = False


def references() -> References[Value]:
    return References(Value, lambda value: setattr(value, "freed", True))


def created(table: References[Value], value_id: Any = (A, 1), fork: Any = (A, 1)) -> Value:
    value = table.create(value_id, fork, A, 0.0)
    assert value is not None
    return value


def test_a_value_lives_until_its_only_reference_is_dropped() -> None:
    table = references()
    value = created(table)
    assert table.find((A, 1)) is value
    table.dropped((A, 1), (A, 1))
    assert value.freed
    assert table.find((A, 1)) is None
    assert (len(table), table.forks) == (0, 0)


@pytest.mark.parametrize(
    "order", [("pass", "claim", "drop"), ("claim", "pass", "drop"), ("claim", "drop", "pass")]
)
def test_a_reference_passed_on_is_over_in_whatever_order_it_is_heard_of(
    order: tuple[str, ...],
) -> None:
    """A holder's drop follows its claim."""
    table = references()
    value = created(table)
    for what in order:
        {
            "pass": lambda: table.passed((A, 1), (A, 2), B, 0.0),
            "claim": lambda: table.claimed((A, 1), (A, 2), B, 0.0),
            "drop": lambda: table.dropped((A, 1), (A, 2)),
        }[what]()
        assert not value.freed  # A refers to it still
    table.dropped((A, 1), (A, 1))
    assert value.freed
    assert (len(table), table.forks) == (0, 0)


def test_the_holder_keeps_the_value_though_its_parent_has_dropped_its_own() -> None:
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), B, 0.0)
    table.dropped((A, 1), (A, 1))
    assert not value.freed
    table.claimed((A, 1), (A, 2), B, 0.0)
    table.dropped((A, 1), (A, 2))
    assert value.freed


def test_a_value_freed_is_not_freed_again_by_what_is_heard_late() -> None:
    table = references()
    value = created(table)
    table.claimed((A, 1), (A, 2), B, 0.0)
    table.dropped((A, 1), (A, 2))
    table.dropped((A, 1), (A, 1))
    assert value.freed
    assert table.forks == 1  # its parent will say that it passed it on
    value.freed = False
    assert table.passed((A, 1), (A, 2), B, 0.0) is False
    assert not value.freed
    assert (len(table), table.forks) == (0, 0)


def test_the_death_of_a_holder_ends_its_references_and_of_a_parent_what_it_has_not_said() -> None:
    table = references()
    value = created(table)
    table.claimed((A, 1), (A, 2), B, 0.0)
    table.dropped((A, 1), (A, 2))
    table.passed((A, 1), (A, 3), B, 0.0)
    table.worker_gone(A)
    assert not value.freed  # B may be about to claim what A passed on
    table.worker_gone(B)
    assert value.freed
    assert (len(table), table.forks) == (0, 0)


def test_a_claim_of_a_worker_that_has_died_counts_no_more() -> None:
    table = references()
    value = created(table)
    table.worker_gone(B)
    table.passed((A, 1), (A, 2), B, 0.0)
    table.claimed((A, 1), (A, 3), B, 0.0)
    table.dropped((A, 1), (A, 1))
    assert value.freed


def test_a_value_may_be_spoken_of_before_it_is_created() -> None:
    table = references()
    waited_for = table.find((A, 1))
    assert waited_for is not None
    assert table.claimed((A, 1), (A, 2), B, 0.0)
    assert created(table) is waited_for
    table.dropped((A, 1), (A, 1))
    assert not waited_for.freed


def test_what_a_dead_worker_was_to_create_is_told() -> None:
    table = references()
    waited_for = table.find((A, 1))
    assert table.worker_gone(A) == [waited_for]
    assert table.find((A, 1)) is None
    assert table.claimed((A, 1), (A, 2), B, 0.0) is False


def test_what_was_freed_while_its_creator_was_taken_for_dead_is_not_waited_for() -> None:
    """Who asks for a value that was freed meanwhile is told so, and keeps none that never comes."""
    table = references()
    value = created(table)
    table.worker_gone(A)
    table.worker_back(A)
    assert value.freed
    assert table.find((A, 1)) is None
    assert not table.passed((A, 1), (A, 2), B, 0.0)
    assert (len(table), table.forks) == (0, 0)
    assert table.create((A, 1), (A, 1), A, 0.0) is None
    again = created(table, (A, 2), (A, 3))
    assert table.find((A, 2)) is again
    assert not again.freed


def test_a_creation_that_comes_again_creates_nothing() -> None:
    table = references()
    created(table)
    assert table.create((A, 1), (A, 1), A, 0.0) is None
    table.dropped((A, 1), (A, 1))
    assert table.create((A, 1), (A, 1), A, 0.0) is None
    assert len(table) == 0


def test_a_value_that_its_creator_drops_before_the_creation_comes_is_never_created() -> None:
    table = references()
    assert table.dropped((A, 1), (A, 1)) is None
    assert table.create((A, 1), (A, 1), A, 0.0) is None
    assert table.find((A, 1)) is None
    assert (len(table), table.forks) == (0, 0)


def test_who_waits_for_a_value_hears_that_its_creator_has_given_it_up() -> None:
    table = references()
    assert table.passed((A, 1), (A, 2), B, 0.0)
    waited_for = table.find((A, 1))
    assert table.dropped((A, 1), (A, 1)) is waited_for
    assert not table.claimed((A, 1), (A, 2), B, 0.0)
    assert table.create((A, 1), (A, 1), A, 0.0) is None
    assert (len(table), table.forks) == (0, 0)


def test_numbers_may_come_in_any_order() -> None:
    table = references()
    for number in (3, 1, 2):
        created(table, (A, number), (A, number))
        table.dropped((A, number), (A, number))
    assert [table.find((A, number)) for number in (1, 2, 3)] == [None] * 3
    assert table.find((A, 4)) is not None


def test_an_answer_that_nobody_claims_is_given_up_in_time() -> None:
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), NOBODY, 5.0)
    table.dropped((A, 1), (A, 1))
    assert table.give_up_unclaimed(4.9 + UNCLAIMED_S) == 1
    assert not value.freed
    assert table.give_up_unclaimed(5.0 + UNCLAIMED_S) == 0
    assert value.freed


def test_a_reference_in_a_call_that_failed_is_given_up_in_time_unless_it_is_claimed() -> None:
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), B, 1.0)
    table.passed((A, 1), (A, 3), C, 1.0)
    table.dropped((A, 1), (A, 1))
    assert table.give_up_unclaimed(1000.0) == 0  # their calls are under way
    assert table.may_be_lost((A, 1), (A, 2), 1000.0)
    assert table.may_be_lost((A, 1), (A, 3), 1000.0)
    table.claimed((A, 1), (A, 3), C, 1001.0)
    assert not table.may_be_lost((A, 1), (A, 3), 1002.0)
    assert table.give_up_unclaimed(999.9 + UNCLAIMED_S) == 1
    assert table.forks == 2
    assert table.give_up_unclaimed(1000.0 + UNCLAIMED_S) == 0
    assert table.forks == 1
    assert not value.freed
    table.dropped((A, 1), (A, 3))
    assert value.freed
    assert not table.may_be_lost((A, 1), (A, 2), 1100.0)
    assert not table.may_be_lost((A, 9), (A, 4), 1100.0)  # of a value that is not there
    assert (len(table), table.forks) == (0, 0)


def test_what_a_dead_parent_passed_on_is_given_up_in_time() -> None:
    """Nobody else could say whether the call that it travelled in came."""
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), B, 1.0)
    table.worker_gone(A)
    table.passed((A, 1), (A, 3), B, 2.0)  # heard late
    assert table.give_up_unclaimed(0.9 + UNCLAIMED_S) == 2
    assert not value.freed
    assert table.give_up_unclaimed(2.0 + UNCLAIMED_S) == 0
    assert value.freed
    assert (len(table), table.forks) == (0, 0)


def test_who_claims_what_was_given_up_has_it_again_while_the_value_is_there() -> None:
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), B, 0.0)
    table.may_be_lost((A, 1), (A, 2), 0.0)
    table.give_up_unclaimed(UNCLAIMED_S)
    assert table.claimed((A, 1), (A, 2), B, UNCLAIMED_S)
    table.dropped((A, 1), (A, 1))
    assert not value.freed
    table.dropped((A, 1), (A, 2))
    assert value.freed


def test_an_answer_that_was_claimed_is_kept() -> None:
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), NOBODY, 5.0)
    table.claimed((A, 1), (A, 2), B, 6.0)
    table.dropped((A, 1), (A, 1))
    assert table.give_up_unclaimed(1000.0) == 0
    assert not value.freed
    table.worker_gone(B)
    assert value.freed


def test_every_state_of_a_fork_answers_to_what_may_come_late() -> None:
    """A parent's word may be repeated, and workers die, in any state but the first and the last."""
    for state in ForkState:
        if state in (ForkState.UNKNOWN, ForkState.OVER):
            continue
        for event in (ForkEvent.PASS, ForkEvent.HOLDER_GONE, ForkEvent.PARENT_GONE):
            FORKS.after(state, event)


@pytest.mark.parametrize("to", [A, B, NOBODY])
def test_what_a_parent_says_again_of_a_reference_that_is_over_makes_no_new_one(to: int) -> None:
    """Its answer was lost with the connection, say. A new one would keep the value for good."""
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), to, 0.0)
    table.claimed((A, 1), (A, 2), B, 0.0)
    table.dropped((A, 1), (A, 2))
    assert table.passed((A, 1), (A, 2), to, 0.0)  # the value is there
    assert table.forks == 1
    table.dropped((A, 1), (A, 1))
    assert value.freed
    assert not table.passed((A, 1), (A, 2), to, 0.0)
    assert (len(table), table.forks) == (0, 0)


def test_a_holder_that_was_taken_for_dead_may_claim_what_it_was_passed() -> None:
    table = references()
    value = created(table)
    table.passed((A, 1), (A, 2), B, 0.0)
    table.worker_gone(B)
    table.worker_back(B)
    assert table.forks == 1  # A's
    assert table.claimed((A, 1), (A, 2), B, 0.0)
    table.dropped((A, 1), (A, 1))
    assert not value.freed
    table.dropped((A, 1), (A, 2))
    assert value.freed
    assert (len(table), table.forks) == (0, 0)


def test_a_parent_that_was_taken_for_dead_says_nothing_new_of_what_is_over() -> None:
    table = references()
    value = table.create((C, 1), (C, 1), C, 0.0)
    assert value is not None
    table.claimed((C, 1), (A, 1), B, 0.0)
    table.worker_gone(A)
    table.worker_back(A)
    table.dropped((C, 1), (A, 1))
    assert table.passed((C, 1), (A, 1), B, 0.0)
    table.dropped((C, 1), (C, 1))
    assert value.freed
    assert (len(table), table.forks) == (0, 0)


def test_an_owner_remembers_one_number_for_all_references_that_it_has_heard_of() -> None:
    """However many were passed on, and whether or not their values were there."""
    table = references()
    value = created(table)
    for number in range(2, 1000):
        table.passed((A, 1), (A, number), B, 0.0)
        table.dropped((A, 1), (A, number))
    table.dropped((A, 1), (A, 1))
    assert value.freed
    assert not table.passed((A, 1), (A, 1000), B, 0.0)
    assert table.dropped((A, 2), (A, 1001)) is None  # its creation was lost
    assert table.numbers_apart == 0
    table.passed((A, 3), (A, 1003), B, 0.0)
    assert table.numbers_apart == 1  # until the one before it comes
    table.passed((A, 3), (A, 1002), B, 0.0)
    assert table.numbers_apart == 0


class Job(RuleBasedStateMachine):
    """Workers pass references to one value of an owner; news comes in any order and any number of
    times until its answer does, and dies with its worker. A reference is kept until what was said
    of it, and of those that were made of it, was answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = references()
        self.value = created(self.table)
        self.held: dict[tuple[int, int], int] = {(A, 1): A}  # fork -> holder
        # by worker: what, fork, holder, and the fork that is kept until it is answered
        self.news: dict[int, list[tuple[str, tuple[int, int], int, tuple[int, int]]]] = {
            A: [],
            B: [],
            C: [],
        }
        self.under_way: list[tuple[tuple[int, int], int]] = []
        self.alive = {A, B, C}
        self.dead: list[int] = []  # and the owner has not noticed it
        self.numbers = itertools.count(2)

    @initialize()
    def begin(self) -> None:
        assert not self.value.freed

    def _can_pass(self) -> list[tuple[int, int]]:
        return [fork for fork, holder in self.held.items() if holder in self.alive]

    @precondition(lambda self: self._can_pass())
    @rule(data=st.data())
    def pass_on(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self._can_pass()))
        parent = self.held[source]
        to = data.draw(st.sampled_from([A, B, C]))
        fork = (parent, next(self.numbers))
        self.news[parent].append(("pass", fork, to, source))
        self.under_way.append((fork, to))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        fork, to = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if to in self.alive:
            self.held[fork] = to
            self.news[to].append(("claim", fork, to, fork))

    @rule()
    def wait(self) -> None:
        """There is always something to do."""

    def _can_drop(self) -> list[tuple[int, int]]:
        kept = {fork for news in self.news.values() for _, _, _, fork in news}
        return [
            fork for fork, holder in self.held.items() if holder in self.alive and fork not in kept
        ]

    @precondition(lambda self: self._can_drop())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        fork = data.draw(st.sampled_from(self._can_drop()))
        self.news[self.held.pop(fork)].append(("drop", fork, 0, fork))

    @precondition(lambda self: any(self.news.values()))
    @rule(data=st.data(), answered=st.booleans())
    def hear(self, data: st.DataObject, answered: bool) -> None:
        worker = data.draw(st.sampled_from([each for each, news in self.news.items() if news]))
        news = self.news[worker]
        at = data.draw(st.integers(0, len(news) - 1))
        self.tell(*news[at])
        if answered:
            del news[at]

    def tell(self, what: str, fork: tuple[int, int], to: int, _: tuple[int, int]) -> None:
        if what == "pass":
            self.table.passed((A, 1), fork, to, 0.0)
        elif what == "claim":
            self.table.claimed((A, 1), fork, to, 0.0)
        else:
            self.table.dropped((A, 1), fork)

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """What it has said is heard before its death, or never."""
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(worker)
        self.news[worker].clear()
        self.held = {fork: holder for fork, holder in self.held.items() if holder != worker}
        self.dead.append(worker)

    def _noticeable(self) -> list[int]:
        """Those of whom nothing is under way, for the owner is late to notice a death."""
        late = {fork[0] for fork, to in self.under_way if to in self.alive}
        late |= {fork[0] for news in self.news.values() for _, fork, _, _ in news}
        return [worker for worker in self.dead if worker not in late]

    @precondition(lambda self: self._noticeable())
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self._noticeable()))
        self.dead.remove(worker)
        self.table.worker_gone(worker)

    @invariant()
    def nobody_holds_what_is_gone(self) -> None:
        """A fork that arrived keeps the value, heard of or not: the one it was made of is kept."""
        if self.held:
            assert not self.value.freed

    def teardown(self) -> None:
        """When all is dropped, heard or dead, nothing is left."""
        while self.under_way:
            fork, to = self.under_way.pop()
            if to in self.alive:
                self.held[fork] = to
                self.news[to].append(("claim", fork, to, fork))
        for news in self.news.values():
            for each in news:
                self.tell(*each)
        for fork, holder in list(self.held.items()):
            if holder in self.alive:
                self.table.dropped((A, 1), fork)
        for worker in self.dead:
            self.table.worker_gone(worker)
        assert self.value.freed
        assert (len(self.table), self.table.forks) == (0, 0)


TestJob = Job.TestCase
