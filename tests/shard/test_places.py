"""So many coroutines at a time, and whose the place is of one that leaves, or gives up."""

from __future__ import annotations

import pytest

from shard import Future, Reactor
from shard.loop.places import Places
from tests.helpers import ManualClock


class Room:
    """Two places, and who has been in."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.reactor = Reactor(clock)
        self.places = Places(2)
        self.entered: list[str] = []

    async def visit(self, name: str, leave: Future, timeout_s: float = 10.0) -> None:
        await self.places.enter(self.clock.now + timeout_s)
        try:
            self.entered.append(name)
            await leave
        finally:
            self.places.leave()

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        for _ in range(5):
            self.reactor.poll(self.clock.now)


@pytest.fixture
def room(clock: ManualClock) -> Room:
    return Room(clock)


def test_the_others_come_in_in_the_order_in_which_they_came(room: Room) -> None:
    ends = [Future() for _ in range(5)]
    for name, end in zip("abcde", ends, strict=True):
        room.reactor.spawn(room.visit(name, end))
    room.turn()
    assert room.entered == ["a", "b"]
    ends[1].set_result(None)
    room.turn()
    assert room.entered == ["a", "b", "c"]
    for end in ends:
        end.set_result(None)
        room.turn()
    assert "".join(room.entered) == "abcde"
    room.reactor.spawn(room.visit("f", ends[0]))
    room.reactor.spawn(room.visit("g", Future()))
    assert "".join(room.entered) == "abcdefg", "all places are free again"


def test_who_gets_none_in_time_is_told_and_takes_none_later(room: Room) -> None:
    ends = [Future(), Future()]
    for name, end in zip("ab", ends, strict=True):
        room.reactor.spawn(room.visit(name, end))
    late = room.reactor.spawn(room.visit("late", Future(), timeout_s=1.0))
    patient = room.reactor.spawn(room.visit("patient", Future()))
    room.turn(1.1)
    with pytest.raises(TimeoutError):
        late.result()
    ends[0].set_result(None)
    room.turn()
    assert room.entered == ["a", "b", "patient"]
    assert not patient.done()


@pytest.mark.parametrize("has_place", [False, True])
def test_who_is_cancelled_leaves_the_place_to_the_next(room: Room, has_place: bool) -> None:
    """Also when it has just been given one, and has not gone on yet."""
    ends = [Future(), Future()]
    for name, end in zip("ab", ends, strict=True):
        room.reactor.spawn(room.visit(name, end))
    first = room.reactor.spawn(room.visit("first", Future()))
    room.reactor.spawn(room.visit("second", Future()))
    room.turn()
    if has_place:
        room.places.leave()  # as "a" does
        first.cancel()
    else:
        first.cancel()
        room.places.leave()
    room.turn()
    assert room.entered == ["a", "b", "second"]
