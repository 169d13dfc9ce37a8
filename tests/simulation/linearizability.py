"""Whether a history of operations on a shared object is linearizable: whether they can be put in
one order in which each takes effect at one moment between its begin and its end, and answers what
the object in its place answers.

The algorithm of Wing and Gong (1993) with Lowe's memory of what was tried (2017): take an operation
that no other one has ended before it began; if the model allows its answer, go on with the rest
from the state after it; else, or where that comes to nothing, try another. A pair (operations done,
state) that was tried is not tried again.

An operation whose outcome is unknown (`ended` is inf) may take effect at any time after its begin,
or never: the history holds as soon as all others have their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound=Hashable)
UNKNOWN = math.inf  # the end of an operation of which nobody heard
TRIED_MAX = 1_000_000  # pairs: a history that takes more is too long to be checked


class TooLong(Exception):
    """There are too many orders: check a shorter history."""


@dataclass(frozen=True)
class Operation:
    """One call of the object. answer: what came back; nothing for one with an unknown outcome."""

    client: str
    called: tuple[Any, ...]
    answer: Any
    begun: float
    ended: float

    def __str__(self) -> str:
        ended = "unknown" if self.ended == UNKNOWN else f"{self.ended:.6f}"
        return f"{self.begun:.6f} - {ended} {self.client}: {self.called} -> {self.answer!r}"


@dataclass(frozen=True)
class Model(Generic[S]):
    """The object, one operation at a time.

    first  its first state
    step   (state, called) -> (answer, state after it)
    """

    first: S
    step: Callable[[S, tuple[Any, ...]], tuple[Any, S]]


def linearization(model: Model[S], history: Sequence[Operation]) -> list[Operation] | None:
    """An order that explains the history; None: there is none. Raises TooLong."""
    operations = sorted(history, key=lambda one: (one.begun, one.ended))
    to_do = sum(1 << at for at, one in enumerate(operations) if one.ended != UNKNOWN)
    tried: set[tuple[int, S]] = set()
    order: list[int] = []
    # Of each operation in the order: what was done before it, the state before it, and the
    # candidates that are left there.
    stack: list[tuple[int, S, list[int]]] = []
    done, state = 0, model.first
    candidates = _candidates(operations, done)
    while done & to_do != to_do:
        moved = False
        while candidates:
            at = candidates.pop()
            one = operations[at]
            answer, after = model.step(state, one.called)
            if one.ended != UNKNOWN and answer != one.answer:
                continue
            next_done = done | 1 << at
            if (next_done, after) in tried:
                continue
            if len(tried) >= TRIED_MAX:
                raise TooLong(f"{len(operations)} operations have over {TRIED_MAX} beginnings")
            tried.add((next_done, after))
            stack.append((done, state, candidates))
            order.append(at)
            done, state = next_done, after
            candidates = _candidates(operations, done)
            moved = True
            break
        if not moved:
            if not stack:
                return None
            done, state, candidates = stack.pop()
            order.pop()
    return [operations[at] for at in order]


def _candidates(operations: Sequence[Operation], done: int) -> list[int]:
    """Those that may be next: none of the others ended before they began. The likeliest is last."""
    left = [at for at in range(len(operations)) if not done >> at & 1]
    bound = min((operations[at].ended for at in left), default=UNKNOWN)
    may = [at for at in left if operations[at].begun <= bound]
    return sorted(may, key=lambda at: operations[at].ended, reverse=True)
