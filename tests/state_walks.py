"""Walks through a state table. walks(): a way to each state, and from there each event that may
come; a test drives a real object along them, and so takes each transition. WalkedTable: notes which
transitions an object that goes by it has taken.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

from shard.state_table import ActionT, EventT, StateT, StateTable, word


class Walk(NamedTuple):
    """`way` leads from the initial state to `state`; then comes `event`."""

    state: Enum
    way: tuple[Enum, ...]
    event: Enum


def ways(table: StateTable[StateT, EventT, ActionT]) -> dict[StateT, tuple[EventT, ...]]:
    """The shortest way to each state from the initial one."""
    found: dict[StateT, tuple[EventT, ...]] = {table.initial: ()}
    left = deque([table.initial])
    while left:
        state = left.popleft()
        for event in table.events(state):
            following, _ = table.after(state, event)
            if following not in found:
                found[following] = (*found[state], event)
                left.append(following)
    return found


def walks(table: StateTable[StateT, EventT, ActionT]) -> list[ParameterSet]:
    """One parameter of a test for each transition."""
    there = ways(table)
    return [
        pytest.param(Walk(state, there[state], event), id=f"{word(state)}, {word(event)}")
        for state, event in table.transitions
    ]


class WalkedTable(StateTable[StateT, EventT, ActionT]):
    """The same table as `table`. `taken`: each transition in turn, as (state, event)."""

    def __init__(self, table: StateTable[StateT, EventT, ActionT]) -> None:
        super().__init__(table.title, table.initial, table.transitions)
        self.taken: list[tuple[StateT, EventT]] = []

    def after(self, state: StateT, event: EventT) -> tuple[StateT, tuple[ActionT, ...]]:
        """As the table's, and noted."""
        answer = super().after(state, event)
        self.taken.append((state, event))
        return answer

    def untaken(self) -> set[tuple[Any, Any]]:
        """The transitions that no test has taken."""
        return set(self.transitions) - set(self.taken)

    def end(self) -> StateT:
        """Where those taken lead, one after the other, as they must when one owner took them; the
        initial state when there are none.
        """
        state = self.initial
        for before, event in self.taken:
            assert before is state, f"{event} came in {before}, and the state was {state}"
            state, _ = self.transitions[before, event]
        return state
