"""State tables that run: what follows an event in a state is data, and the same data is drawn into
the documents. No I/O, no clock, no lock in this file.

class Door(Enum):
    OPEN = "anybody may pass"
    SHUT = "nobody may"

class DoorEvent(Enum):
    PUSHED = "from either side"

class DoorAction(Enum):
    RING = "tell the house"

DOORS = StateTable("A door", Door.OPEN, {
    (Door.OPEN, DoorEvent.PUSHED): (Door.SHUT, (DoorAction.RING,)),
    (Door.SHUT, DoorEvent.PUSHED): (Door.OPEN, ()),
})
state, actions = DOORS.after(Door.OPEN, DoorEvent.PUSHED)

The owner of a state asks after(), stores the next state, and does the actions in their order. It
keeps the lock, the clock and the sockets. So the table can be driven by itself, through every
sequence of events.

A pair that the table lacks is an event that cannot come in that state: after() refuses it by name
(LookupError), as a defect of the owner. An event that may come and changes nothing is in the table,
with the same state and no action.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)
ActionT = TypeVar("ActionT", bound=Enum)


class StateTable(Generic[StateT, EventT, ActionT]):
    """What follows each event in each state: the next state, and what the owner does then.

    title: of the drawing. initial: the state that an owner begins in. transitions: (state, event)
    -> (next state, actions in their order). A state that no transition leaves is an end.

    Members of the three enumerations have a text as their value: what the state, event or action
    means. The drawing has it. Where a lookup is on a hot path, take IntEnum: its members hash in C.

    Raises ValueError when a state of the table cannot be reached from the initial one.
    """

    def __init__(
        self,
        title: str,
        initial: StateT,
        transitions: Mapping[tuple[StateT, EventT], tuple[StateT, tuple[ActionT, ...]]],
    ) -> None:
        self.title, self.initial, self.transitions = title, initial, dict(transitions)
        named = {state for state, _ in transitions} | {state for state, _ in transitions.values()}
        lost = named - self._reachable()
        if lost:
            words = ", ".join(sorted(map(word, lost)))
            raise ValueError(f"{title}: no event leads from {word(initial)} to {words}")

    def _reachable(self) -> set[StateT]:
        found, left = {self.initial}, [self.initial]
        while left:
            here = left.pop()
            for (state, _), (following, _) in self.transitions.items():
                if state is here and following not in found:
                    found.add(following)
                    left.append(following)
        return found

    def after(self, state: StateT, event: EventT) -> tuple[StateT, tuple[ActionT, ...]]:
        """The next state, and the actions. Raises LookupError for an event that cannot come in that
        state.
        """
        try:
            return self.transitions[state, event]
        except KeyError:
            allowed = ", ".join(repr(word(each)) for each in self.events(state)) or "nothing"
            raise LookupError(
                f"{self.title}: {word(event)!r} cannot come in the state {word(state)!r}; "
                f"what can: {allowed}"
            ) from None

    def events(self, state: StateT) -> list[EventT]:
        """Those that may come in that state."""
        return [event for here, event in self.transitions if here is state]

    @contextlib.contextmanager
    def watch(self, note: Callable[[StateT, EventT], object]) -> Iterator[None]:
        """Meanwhile note(state, event) is called for each transition that after() answers with: for
        tests that ask which are taken. At any other time nothing looks, and nothing is slower.
        """
        plain = self.transitions
        self.transitions = _Watched(plain, note)
        try:
            yield
        finally:
            self.transitions = plain

    def draw(self) -> str:
        """A Markdown section: the table, then what its words mean."""
        rows = [
            f"| {word(state)} | {word(event)} | {word(following)} | "
            f"{', '.join(map(word, actions)) or '-'} |"
            for (state, event), (following, actions) in self.transitions.items()
        ]
        drawn: dict[Enum, None] = {self.initial: None}
        for (state, event), (following, actions) in self.transitions.items():
            drawn.update(dict.fromkeys((state, event, following, *actions)))
        kinds = dict.fromkeys(type(member) for member in drawn)
        meanings = [
            f"- *{word(member)}*: {member.value}"
            for kind in kinds
            for member in drawn
            if type(member) is kind and isinstance(member.value, str)
        ]
        head = [f"## {self.title}", "", f"Begins {word(self.initial)}.", ""]
        columns = ["| state | event | next | actions |", "|---|---|---|---|"]
        return "\n".join([*head, *columns, *rows, "", *meanings])


class _Watched(dict[tuple[StateT, EventT], tuple[StateT, tuple[ActionT, ...]]]):
    """The same transitions, of which each that is looked up is noted."""

    def __init__(
        self,
        transitions: Mapping[tuple[StateT, EventT], tuple[StateT, tuple[ActionT, ...]]],
        note: Callable[[StateT, EventT], object],
    ) -> None:
        super().__init__(transitions)
        self._note = note

    def __getitem__(self, key: tuple[StateT, EventT]) -> tuple[StateT, tuple[ActionT, ...]]:
        found = super().__getitem__(key)
        self._note(*key)
        return found


def word(member: Enum) -> str:
    """A member's name as a reader says it."""
    return member.name.lower().replace("_", " ")
