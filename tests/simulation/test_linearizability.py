"""The checker itself, on histories that are known to be good or bad."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.simulation import linearizability
from tests.simulation.linearizability import UNKNOWN, Model, Operation, TooLong, linearization


def register(state: int, called: tuple[Any, ...]) -> tuple[Any, int]:
    if called[0] == "read":
        return state, state
    if called[0] == "write":
        return None, called[1]
    was = state == called[1]  # compare and set
    return was, called[2] if was else state


REGISTER = Model(0, register)


def op(text: str, begun: float, ended: float, client: str = "") -> Operation:
    """ "read 1", "write 2", "cas 1 2 ok", "cas 1 2 no"."""
    verb, *rest = text.split()
    if verb == "read":
        return Operation(client, ("read",), int(rest[0]), begun, ended)
    if verb == "write":
        return Operation(client, ("write", int(rest[0])), None, begun, ended)
    return Operation(client, ("cas", int(rest[0]), int(rest[1])), rest[2] == "ok", begun, ended)


GOOD = {
    "nothing happened": [],
    "a read after a write": [op("write 1", 0, 1), op("read 1", 2, 3)],
    "a read beside a write has the old value": [op("write 1", 0, 9), op("read 0", 2, 3)],
    "a read beside a write has the new value": [op("write 1", 0, 9), op("read 1", 2, 3)],
    "two readers beside a write, the later one has the new value": [
        op("write 1", 0, 9),
        op("read 0", 1, 2),
        op("read 1", 3, 4),
    ],
    "one of two compare-and-sets": [
        op("cas 0 1 ok", 0, 5),
        op("cas 0 2 no", 1, 4),
        op("read 1", 6, 7),
    ],
    "a lost write came late": [
        op("write 1", 0, UNKNOWN),
        op("read 0", 1, 2),
        op("read 1", 8, 9),
    ],
    "a lost write never came": [op("write 1", 0, UNKNOWN), op("read 0", 1, 2), op("read 0", 8, 9)],
    "two lost writes, one of them came": [
        op("write 1", 0, UNKNOWN),
        op("write 2", 0, UNKNOWN),
        op("read 2", 5, 6),
    ],
    "writes that end when others begin": [
        op("write 1", 0, 1),
        op("write 2", 1, 2),
        op("read 1", 2, 3),
    ],
}
BAD = {
    "a stale read": [op("write 1", 0, 1), op("read 0", 2, 3)],
    "a value from nowhere": [op("read 7", 0, 1)],
    "a value before it was written": [op("read 1", 0, 1), op("write 1", 2, 3)],
    "the new value, and then the old one": [
        op("write 1", 0, 9),
        op("read 1", 1, 2),
        op("read 0", 3, 4),
    ],
    "both of two compare-and-sets": [op("cas 0 1 ok", 0, 5), op("cas 0 2 ok", 1, 4)],
    "a lost write that came and went": [
        op("write 1", 0, UNKNOWN),
        op("read 1", 1, 2),
        op("read 0", 3, 4),
    ],
    "a lost write that came twice": [
        op("write 1", 0, UNKNOWN),
        op("read 1", 1, 2),
        op("write 2", 3, 4),
        op("read 1", 5, 6),
    ],
    "two clients that saw two writes in two orders": [
        op("write 1", 0, 9),
        op("write 2", 0, 9),
        op("read 1", 1, 2, "a"),
        op("read 2", 3, 4, "a"),
        op("read 2", 1.5, 2, "b"),
        op("read 1", 4.5, 5, "b"),
        op("read 2", 6, 7, "a"),
    ],
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD)
def test_a_history_that_one_order_explains_is_linearizable(history: list[Operation]) -> None:
    assert linearization(REGISTER, history) is not None


@pytest.mark.parametrize("history", BAD.values(), ids=BAD)
def test_a_history_that_no_order_explains_is_not(history: list[Operation]) -> None:
    assert linearization(REGISTER, history) is None


def holds_in(order: tuple[Operation, ...]) -> bool:
    """Whether that order is allowed by time, and gives these answers."""
    state = 0
    for at, one in enumerate(order):
        if any(later.ended < one.begun for later in order[at + 1 :]):
            return False
        answer, state = register(state, one.called)
        if answer != one.answer:
            return False
    return True


def test_it_agrees_with_trying_every_order() -> None:
    chance = random.Random(1)
    found = set()
    for _ in range(400):
        history = []
        for _ in range(5):
            begun = chance.randrange(6)
            texts = ["write 1", "write 2", "read 0", "read 1", "read 2", "cas 1 2 ok", "cas 1 2 no"]
            history.append(op(chance.choice(texts), begun, begun + chance.randrange(1, 5)))
        expected = any(map(holds_in, itertools.permutations(history)))
        order = linearization(REGISTER, history)
        assert (order is not None) is expected, history
        assert order is None or holds_in(tuple(order))
        found.add(expected)
    assert found == {True, False}


def test_a_history_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linearizability, "TRIED_MAX", 100)
    history = [op(f"write {number}", 0, 9) for number in range(12)]
    with pytest.raises(TooLong):
        linearization(REGISTER, [*history, op("read 99", 10, 11)])
