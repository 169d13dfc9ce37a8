"""What is remembered of calls that must not run twice: nothing that ran runs again, however little
is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.rpc.once import (
    ANSWER_SHARE,
    ONCE_CALLS,
    Identity,
    OnceEvent,
    OnceState,
    OnceWindow,
)

CALLER = 77


def window_of(
    answers: int, answers_max: int = 4, bytes_max: int = 1000, keep_s: float = 10.0
) -> OnceWindow[str, str]:
    """One in which calls 1, 2, ... were answered at 1.0, 2.0, ... seconds, with 10 bytes each."""
    window: OnceWindow[str, str] = OnceWindow(answers_max, bytes_max, keep_s, callers_max=2)
    for number in range(1, answers + 1):
        answer(window, (CALLER, number), float(number))
    return window


def answer(window: OnceWindow[str, str], call: Identity, now: float, nbytes: int = 10) -> None:
    assert window.refusal(call, False) is None
    window.begin(call, "job")
    window.answered(call, f"answer to {call[1]}", nbytes, now)


def known(window: OnceWindow[str, str]) -> Iterator[int]:
    return (number for number in range(1, 20) if window.find((CALLER, number)) is not None)


def test_a_call_runs_until_it_is_answered_and_its_answer_is_there_for_who_asks_again() -> None:
    window = window_of(0)
    window.begin((CALLER, 1), "job")
    entry = window.find((CALLER, 1))
    assert entry is not None and (entry.running, entry.answer) == ("job", None)
    window.answered((CALLER, 1), "answer", 10, 0.0)
    entry = window.find((CALLER, 1))
    assert entry is not None and (entry.running, entry.answer) == (None, "answer")
    assert window.refusal((CALLER, 1), True) is None


def test_another_caller_may_use_the_same_number() -> None:
    window = window_of(1)
    assert window.find((CALLER + 1, 1)) is None
    assert window.refusal((CALLER + 1, 1), True) is None


def test_what_was_dropped_before_it_ran_may_run() -> None:
    window = window_of(0)
    window.begin((CALLER, 1), "job")
    window.drop((CALLER, 1))
    assert window.find((CALLER, 1)) is None
    assert window.refusal((CALLER, 1), True) is None


@pytest.mark.parametrize(
    ("window", "left"),
    [
        (window_of(6), [3, 4, 5, 6]),
        (window_of(6, answers_max=100, bytes_max=35), [4, 5, 6]),
        (window_of(6, answers_max=100, keep_s=1.5), [5, 6]),
        (window_of(6, answers_max=0), []),
    ],
    ids=["answers", "bytes", "seconds", "none at all"],
)
def test_the_oldest_answers_are_forgotten_counted_and_refused_when_they_are_asked_for(
    window: OnceWindow[str, str], left: list[int]
) -> None:
    assert list(known(window)) == left
    assert window.forgotten == 6 - len(left)
    assert window.nbytes == 10 * len(left) == 10 * len(window)
    assert "it may have run before what is remembered" in (
        window.refusal((CALLER, 6 - len(left)), True) or ""
    )
    assert window.refusal((CALLER, 7), True) is None, (
        "one that never came is not taken for one that was forgotten"
    )


def test_what_still_runs_is_never_forgotten() -> None:
    window = window_of(0)
    window.begin((CALLER, 1), "slow")
    for number in range(2, 10):
        answer(window, (CALLER, number), float(number))
    assert window.refusal((CALLER, 1), True) is None
    window.answered((CALLER, 1), "at last", 10, 10.0)
    assert list(known(window)) == [1, 7, 8, 9]


def test_a_huge_answer_is_not_kept_and_leaves_the_others_alone() -> None:
    window = window_of(1)
    assert window.answer_bytes_max == 1000 // ANSWER_SHARE
    window.begin((CALLER, 2), "job")
    window.answered((CALLER, 2), None, 0, 2.0)
    assert list(known(window)) == [1, 2]
    assert "its answer of more than 250 bytes was not kept" in (
        window.refusal((CALLER, 2), True) or ""
    )


def test_once_callers_are_forgotten_an_unknown_repeat_is_refused_and_a_new_call_is_not() -> None:
    window = window_of(0, answers_max=0)
    for caller in (1, 2):
        answer(window, (caller, 1), 0.0)
    assert window.refusal((CALLER, 1), True) is None, "nothing was lost sight of yet"
    answer(window, (3, 1), 0.0)
    assert window.refusal((1, 1), True) is not None
    assert window.refusal((CALLER, 1), True) is not None
    assert window.refusal((CALLER, 1), False) is None
    assert window.refusal((3, 2), True) is None, "of this one it is known"


FORGETS = {OnceEvent.OVER_A_BOUND, OnceEvent.PASSED, OnceEvent.CALLER_GONE}


def states_of(window: OnceWindow[str, Identity]) -> dict[Identity, OnceState]:
    """Of each call that the steps below may make."""
    found = {}
    for call in itertools.product(range(1, 5), range(1, 13)):
        entry, refusal = window.find(call), window.refusal(call, False)
        if entry is None:
            found[call] = OnceState.UNKNOWN if refusal is None else OnceState.FORGOTTEN
        elif entry.running is not None:
            found[call] = OnceState.RUNNING
        else:
            found[call] = OnceState.ANSWERED if refusal is None else OnceState.UNKEPT
    return found


def follows(before: OnceState, after: OnceState, events: set[OnceEvent]) -> bool:
    """Whether the table leads from one to the other by these events."""
    reached, left = {before}, [before]
    while left:
        state = left.pop()
        for event in events.intersection(ONCE_CALLS.events(state)):
            following, _ = ONCE_CALLS.after(state, event)
            if following not in reached:
                reached.add(following)
                left.append(following)
    return after in reached


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "answer", "drop"]),
        st.integers(1, 4),
        st.integers(1, 12),
        st.integers(0, 60),
        st.booleans(),
    ),
    max_size=120,
)


@given(steps=STEPS, answers_max=st.integers(0, 5), callers_max=st.integers(1, 4))
def test_nothing_runs_twice_and_what_is_known_is_right(
    steps: list[tuple[str, int, int, int, bool]], answers_max: int, callers_max: int
) -> None:
    """Against a model that forgets nothing, and the table of states."""
    window: OnceWindow[str, Identity] = OnceWindow(answers_max, 100, 30.0, callers_max)
    running: set[Identity] = set()
    ran: set[Identity] = set()
    now = 0.0
    for what, caller, number, value, is_new in steps:
        now += value / 10
        call = caller, number
        before, events = states_of(window), {OnceEvent.ASKED}
        entry = window.find(call)
        assert (entry is not None and entry.running is not None) == (call in running)
        if entry is not None and entry.running is None:
            assert call in ran and entry.answer in (call, None)
        if what == "ask":
            is_repeat = call in ran or not is_new  # a node numbers no two calls alike
            if entry is None and window.refusal(call, is_repeat) is None:
                assert call not in ran
                window.begin(call, "job")
                running.add(call)
        elif call in running:
            running.discard(call)
            if what == "answer":
                ran.add(call)
                is_kept = value <= window.answer_bytes_max
                window.answered(call, call if is_kept else None, value, now)
                events = {OnceEvent.REPLIED if is_kept else OnceEvent.REPLIED_UNKEPT}
            else:
                window.drop(call)
                events = {OnceEvent.DROPPED}
        for each, state in states_of(window).items():
            allowed = FORGETS | events if each == call else FORGETS
            assert follows(before[each], state, allowed), (each, before[each], state, events)
        assert len(window) <= answers_max
        assert window.nbytes <= 100
    assert window.forgotten == len(ran) - len(window)
