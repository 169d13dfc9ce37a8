"""Which transitions of the state tables a run of scenarios has taken, beside all there are.

    pytest tests/simulation --transitions          print the report at the end of the run
    pytest tests/simulation --transitions=FILE     the same, and write it to FILE
    ... --all-transitions                          and fail where one is neither taken nor argued

A table is watched while a test runs (StateTable.watch); three that nobody asks are asked beside
their owners (beside.py). Each test tells what it has taken as a property of its report, so workers
of pytest-xdist may run them. untaken.py argues for those that no scenario can take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shard.state_table import StateTable, word
from tests.simulation.beside import asked_beside
from tests.simulation.untaken import ARGUED
from tests.state_tables import tables

PROPERTY = "transitions"  # a user property of a test: [title, state, event] of each that it took
Transition = tuple[str, str, str]  # title of its table, state, event


def all_transitions() -> dict[str, dict[tuple[str, str], str]]:
    """Of each table by its title: (state, event) -> next state."""
    return {
        table.title: {
            (word(state), word(event)): word(following)
            for (state, event), (following, _) in table.transitions.items()
        }
        for _, table in tables()
    }


@contextlib.contextmanager
def taken() -> Iterator[set[Transition]]:
    """Those that are taken meanwhile, in this process; those that no table has as well."""
    found: set[Transition] = set()
    with contextlib.ExitStack() as stack:
        for _, table in tables():
            stack.enter_context(_watched(table, found))
        stack.enter_context(asked_beside(lambda *each: found.add(each)))
        yield found


def _watched(
    table: StateTable[Any, Any, Any], found: set[Transition]
) -> contextlib.AbstractContextManager[None]:
    seen: set[tuple[Any, Any]] = set()

    def note(state: Any, event: Any) -> None:
        if (state, event) not in seen:
            seen.add((state, event))
            found.add((table.title, word(state), word(event)))

    return table.watch(note)


@dataclass
class Report:
    """What was taken of all tables, in the end."""

    found: set[Transition] = field(default_factory=set)

    def add(self, each: Iterable[Iterable[str]]) -> None:
        """What one test has taken."""
        self.found.update((title, state, event) for title, state, event in each)

    def open(self) -> list[Transition]:
        """Neither taken nor argued."""
        return [
            (title, *pair)
            for title, transitions in all_transitions().items()
            for pair in transitions
            if (title, *pair) not in self.found and pair not in ARGUED.get(title, {})
        ]

    def unknown(self) -> list[Transition]:
        """Taken, and in no table."""
        every = all_transitions()
        return sorted(each for each in self.found if each[1:] not in every.get(each[0], {}))

    def lines(self) -> list[str]:
        """The report."""
        said = []
        for title, transitions in all_transitions().items():
            taken = {pair: to for pair, to in transitions.items() if (title, *pair) in self.found}
            states = {state for state, _ in transitions} | set(transitions.values())
            reached = {state for state, _ in taken} | set(taken.values())
            argued = ARGUED.get(title, {})
            left = [pair for pair in transitions if pair not in taken]
            said.append(
                f"{title}: {len(reached)} of {len(states)} states reached, {len(taken)} of "
                f"{len(transitions)} transitions taken, "
                f"{sum(pair in argued for pair in left)} argued, "
                f"{sum(pair not in argued for pair in left)} open"
            )
            for pair in left:
                why = argued.get(pair)
                told = f"argued: {why}" if why else "NEITHER TAKEN NOR ARGUED"
                said.append(f"  {pair[0]}, {pair[1]}: {told}")
            said += [
                f"  {state}, {event}: argued, and taken"
                for state, event in argued
                if (state, event) in taken
            ]
        said += [f"{', '.join(each)}: TAKEN, AND IN NO TABLE" for each in self.unknown()]
        return said
