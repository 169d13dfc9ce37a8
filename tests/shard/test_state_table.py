"""State tables: what follows, what is refused, and the page that is drawn from those that run."""

from __future__ import annotations

import enum
import subprocess
import sys
from pathlib import Path

import pytest

from shard.state_table import StateTable, word
from tests.state_tables import DOCUMENT, page, tables


@enum.unique
class Door(enum.Enum):
    OPEN = "anybody may pass"
    SHUT = "nobody may"
    GONE = "there is no door"


@enum.unique
class DoorEvent(enum.Enum):
    PUSHED = "from either side"
    BURNT = "by anybody"


@enum.unique
class DoorAction(enum.Enum):
    RING_TWICE = "tell the house"


DOORS = StateTable(
    "A door",
    Door.OPEN,
    {
        (Door.OPEN, DoorEvent.PUSHED): (Door.SHUT, (DoorAction.RING_TWICE,)),
        (Door.SHUT, DoorEvent.PUSHED): (Door.OPEN, ()),
        (Door.SHUT, DoorEvent.BURNT): (Door.GONE, ()),
    },
)


def test_the_next_state_and_the_actions_follow_an_event() -> None:
    assert DOORS.after(Door.OPEN, DoorEvent.PUSHED) == (Door.SHUT, (DoorAction.RING_TWICE,))
    assert DOORS.after(Door.SHUT, DoorEvent.PUSHED) == (Door.OPEN, ())
    assert DOORS.events(Door.SHUT) == [DoorEvent.PUSHED, DoorEvent.BURNT]


def test_an_event_that_cannot_come_is_refused_by_name_with_those_that_can() -> None:
    with pytest.raises(LookupError, match="A door: 'burnt' cannot come in the state 'open'"):
        DOORS.after(Door.OPEN, DoorEvent.BURNT)
    with pytest.raises(LookupError, match="what can: nothing"):
        DOORS.after(Door.GONE, DoorEvent.PUSHED)


def test_who_watches_is_told_of_each_transition_that_is_taken_and_nothing_else_changes() -> None:
    plain, told = DOORS.transitions, []
    with DOORS.watch(lambda state, event: told.append((state, event))):
        assert DOORS.after(Door.OPEN, DoorEvent.PUSHED) == plain[Door.OPEN, DoorEvent.PUSHED]
        assert DOORS.events(Door.SHUT) == [DoorEvent.PUSHED, DoorEvent.BURNT]
        assert DOORS.transitions == plain
        with pytest.raises(LookupError, match="cannot come in the state 'open'"):
            DOORS.after(Door.OPEN, DoorEvent.BURNT)
        DOORS.after(Door.SHUT, DoorEvent.BURNT)
    DOORS.after(Door.SHUT, DoorEvent.PUSHED)
    assert told == [(Door.OPEN, DoorEvent.PUSHED), (Door.SHUT, DoorEvent.BURNT)]
    assert DOORS.transitions is plain


def test_a_state_that_nothing_leads_to_is_refused() -> None:
    with pytest.raises(ValueError, match="A door: no event leads from open to gone, shut"):
        StateTable("A door", Door.OPEN, {(Door.SHUT, DoorEvent.BURNT): (Door.GONE, ())})


def test_the_drawing_has_each_transition_and_what_each_word_means() -> None:
    lines = DOORS.draw().splitlines()
    assert lines[0] == "## A door"
    assert "| open | pushed | shut | ring twice |" in lines
    assert "| shut | burnt | gone | - |" in lines
    meanings = [line for line in lines if line.startswith("- ")]
    assert meanings == [
        f"- *{word(member)}*: {member.value}" for kind in (Door, DoorEvent, DoorAction)
        for member in kind
    ]  # fmt: skip


def test_the_page_is_drawn_from_the_tables_that_run() -> None:
    assert DOCUMENT.read_text() == page(), "draw it again: python -m tests.state_tables --write"
    titles = [table.title for _, table in tables()]
    assert len(titles) == len(set(titles))


def test_the_command_prints_the_page() -> None:
    root = Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, "-m", "tests.state_tables"], cwd=root, capture_output=True, text=True
    )
    assert (printed.returncode, printed.stdout) == (0, page()), printed.stderr
