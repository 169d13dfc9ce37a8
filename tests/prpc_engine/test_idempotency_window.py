"""Which numbers of a sender were seen: against a model that keeps every number there ever was."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prpc_engine.idempotency_window import (
    FORGOTTEN,
    NEW,
    NUMBERS,
    SEEN,
    IdempotencyWindow,
    NumberEvent,
    NumberState,
    SeenNumbers,
)
from tests.examples import examples

SENDERS_MAX, WINDOW, HIGHEST = 3, 6, 24
SENDERS = st.sampled_from("abcde")
NUMBERED = st.integers(1, HIGHEST)


def test_what_was_seen_is_answered_and_what_was_not_is_new() -> None:
    window: IdempotencyWindow[str, None] = IdempotencyWindow(SENDERS_MAX, WINDOW)
    for number in (1, 2, 4):
        assert window.find("a", number) is NEW
        window.note("a", number)
        assert window.find("a", number) is SEEN
    assert window.find("a", 3) is NEW
    assert window.find("b", 1) is NEW


def test_below_the_window_nothing_is_known() -> None:
    window: IdempotencyWindow[str, None] = IdempotencyWindow(SENDERS_MAX, WINDOW)
    window.note("a", 1)
    window.note("a", 3 + WINDOW)
    assert [window.find("a", number) for number in (1, 2, 3, 4)] == [FORGOTTEN] * 3 + [NEW]


def test_an_outcome_that_went_leaves_those_kept_before_it() -> None:
    window: IdempotencyWindow[str, str] = IdempotencyWindow(SENDERS_MAX)
    for number in (6, 5, 9):
        window.heard("a").keep(number, f"of {number}")
    window.heard("a").forget(6)
    assert [window.find("a", number) for number in (4, 5, 6, 7, 9)] == [
        FORGOTTEN,
        SEEN,
        FORGOTTEN,
        NEW,
        SEEN,
    ]


def test_an_owner_that_keeps_outcomes_elsewhere_says_which_have_gone() -> None:
    window: IdempotencyWindow[str, None] = IdempotencyWindow(SENDERS_MAX)
    for number in (7, 5):
        window.heard("a").forget(number)
    assert [window.find("a", number) for number in (1, 5, 7, 8)] == [FORGOTTEN] * 3 + [NEW]


def test_what_a_sender_waits_for_no_more_goes() -> None:
    window: IdempotencyWindow[str, str] = IdempotencyWindow(SENDERS_MAX)
    for number in (5, 6, 9):
        window.heard("a").keep(number, f"of {number}")
    window.heard("a").settle(6)
    window.heard("a").settle(2)  # of a message that was overtaken
    numbers = window.of("a")
    assert numbers is not None
    assert (numbers.floor, numbers.kept) == (6, {9: "of 9"})
    assert [numbers.find(number) for number in (6, 7, 9, 10)] == [FORGOTTEN, NEW, SEEN, NEW]


@pytest.mark.parametrize("how", ["note", "keep"])
def test_the_sender_heard_least_recently_is_forgotten_and_counted(how: str) -> None:
    window: IdempotencyWindow[str, None] = IdempotencyWindow(2, WINDOW if how == "note" else 0)
    for number, sender in enumerate("abac", 1):
        if how == "note":
            window.note(sender, number)
        else:
            window.heard(sender).keep(number, None)
    assert [sender for sender, _ in window.senders()] == ["a", "c"]
    assert (len(window), window.senders_forgotten) == (2, 1)
    assert "b" not in window and window.of("b") is None
    assert window.find("b", 2) is NEW


class AnyWindow(RuleBasedStateMachine):
    """What both ways of telling have in common: a model that forgets nothing, and the table of
    states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.window: IdempotencyWindow[str, str | None] = self.made()
        # of each sender that is remembered, since then; the one heard last is last
        self.seen: OrderedDict[str, set[int]] = OrderedDict()
        self.forgotten = 0

    def made(self) -> IdempotencyWindow[str, str | None]:
        raise NotImplementedError

    def states(self) -> dict[tuple[str, int], NumberState]:
        """Of each number of each sender."""
        return {
            (sender, number): self.window.find(sender, number)
            for sender in "abcde"
            for number in range(1, HIGHEST + 3)
        }

    def hear(self, sender: str) -> set[int]:
        """In the model; its numbers."""
        numbers = self.seen.setdefault(sender, set())
        self.seen.move_to_end(sender)
        if len(self.seen) > SENDERS_MAX:
            self.seen.popitem(last=False)
            self.forgotten += 1
        return numbers

    def check_events(
        self, before: dict[tuple[str, int], NumberState], noted: tuple[str, int] | None
    ) -> None:
        """Whatever has changed follows from an event of the table."""
        for each, after in self.states().items():
            if each == noted:
                event = NumberEvent.NOTED
            elif each[0] not in self.seen:
                event = NumberEvent.SENDER_GONE
            else:
                event = NumberEvent.PASSED
            if after is not before[each]:
                assert NUMBERS.after(before[each], event)[0] is after, (each, event)

    @invariant()
    def senders_are_those_heard_last(self) -> None:
        assert [sender for sender, _ in self.window.senders()] == list(self.seen)
        assert len(self.window) == len(self.seen) <= SENDERS_MAX
        assert self.window.senders_forgotten == self.forgotten

    @invariant()
    def nothing_that_was_seen_is_new(self) -> None:
        for sender in "abcde":
            numbers = self.seen.get(sender)
            for number in range(1, HIGHEST + 3):
                state = self.window.find(sender, number)
                if numbers is None:
                    assert state is NEW
                elif number in numbers:
                    assert state is not NEW
                else:
                    assert state is not SEEN


class AnyNotes(AnyWindow):
    """Numbers are noted in any order, and moved to another window as if through a file."""

    def made(self) -> IdempotencyWindow[str, str | None]:
        return IdempotencyWindow(SENDERS_MAX, WINDOW)

    @rule(sender=SENDERS, number=NUMBERED)
    def comes(self, sender: str, number: int) -> None:
        before = self.states()
        if before[sender, number] is not NEW:
            return
        self.window.note(sender, number)
        self.hear(sender).add(number)
        self.check_events(before, (sender, number))

    @rule(sender=SENDERS, count=st.integers(1, 3 * WINDOW))
    def come_in_order(self, sender: str, count: int) -> None:
        first = max(self.seen.get(sender, {0})) + 1
        for number in range(first, min(first + count, HIGHEST + 1)):
            self.comes(sender, number)

    @rule()
    def move(self) -> None:
        before, moved = self.states(), self.made()
        for sender, numbers in self.window.senders():
            copy: SeenNumbers[None] = SeenNumbers(numbers.floor)
            copy.highest, copy.kept = numbers.highest, dict(numbers.kept)
            moved.merge(sender, copy)
        moved.senders_forgotten, self.window = self.forgotten, moved
        assert self.states() == before

    @rule(sender=SENDERS, floor=NUMBERED, above=st.sets(NUMBERED))
    def come_together(self, sender: str, floor: int, above: set[int]) -> None:
        """Two that have seen different numbers of one sender."""
        other: IdempotencyWindow[str, None] = IdempotencyWindow(1, WINDOW)
        for number in (*range(1, floor + 1), *sorted(each for each in above if each > floor)):
            other.note(sender, number)
        ((_, numbers),) = other.senders()
        is_known = sender in self.seen
        self.window.merge(sender, numbers)
        if not is_known:
            self.hear(sender)
        self.seen[sender] |= {*range(1, floor + 1), *(each for each in above if each > floor)}

    @invariant()
    def within_the_window_each_number_is_told(self) -> None:
        for sender, numbers in self.window.senders():
            seen = self.seen[sender]
            assert numbers.highest == max(seen)
            assert numbers.floor >= numbers.highest - WINDOW
            assert len(numbers.kept) <= WINDOW
            for number in range(max(1, numbers.highest - WINDOW + 1), HIGHEST + 3):
                expected = SEEN if number in seen else NEW
                assert self.window.find(sender, number) is expected


class AnyOutcomes(AnyWindow):
    """Numbers are kept with an outcome, in any order; outcomes go one by one, or all up to a
    number.
    """

    @initialize()
    def begin(self) -> None:
        self.kept: dict[str, dict[int, str | None]] = {}
        self.floors: dict[str, int] = {}

    def made(self) -> IdempotencyWindow[str, str | None]:
        return IdempotencyWindow(SENDERS_MAX)

    def heard(self, sender: str) -> None:
        self.hear(sender)
        for one in "abcde":
            if one not in self.seen:
                self.kept[one], self.floors[one] = {}, 0
        self.kept.setdefault(sender, {})
        self.floors.setdefault(sender, 0)

    @rule(sender=SENDERS, number=NUMBERED)
    def comes(self, sender: str, number: int) -> None:
        before = self.states()
        if before[sender, number] is not NEW:
            return
        self.window.heard(sender).keep(number, f"{sender}{number}")
        self.heard(sender)
        self.seen[sender].add(number)
        self.kept[sender][number] = f"{sender}{number}"
        self.check_events(before, (sender, number))

    @rule(sender=SENDERS)
    def the_first_outcome_goes(self, sender: str) -> None:
        numbers = self.window.of(sender)
        if numbers is None or not numbers.kept:
            return
        before, number = self.states(), next(iter(numbers.kept))
        self.window.heard(sender).forget(number)
        self.heard(sender)
        del self.kept[sender][number]
        self.floors[sender] = max(self.floors[sender], number)
        self.check_events(before, None)

    @rule(sender=SENDERS, number=NUMBERED)
    def its_sender_waits_for_none_up_to(self, sender: str, number: int) -> None:
        before = self.states()
        self.window.heard(sender).settle(number)
        self.heard(sender)
        if number > self.floors[sender]:
            self.floors[sender] = number
            self.kept[sender] = {
                each: outcome for each, outcome in self.kept[sender].items() if each > number
            }
        self.check_events(before, None)

    @invariant()
    def outcomes_and_floors_are_those_of_the_model(self) -> None:
        for sender, numbers in self.window.senders():
            kept = self.kept[sender]
            assert (numbers.floor, numbers.kept) == (self.floors[sender], kept)
            assert list(numbers.kept) == list(kept)
            for number in range(1, HIGHEST + 3):
                expected = SEEN if number in kept else NEW if number > numbers.floor else FORGOTTEN
                assert self.window.find(sender, number) is expected


AnyNotes.TestCase.settings = AnyOutcomes.TestCase.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None
)
TestNotes = AnyNotes.TestCase
TestOutcomes = AnyOutcomes.TestCase
