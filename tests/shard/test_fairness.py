"""Whatever is endless, the others have their turn after one batch of it."""

from __future__ import annotations

import os

import pytest

from shard import Reactor
from shard.loop.reactor import DESCRIPTOR_TURNS, SPIN_WORK_MAX, WARM_TURNS
from tests.helpers import ManualClock
from tests.shard.sources import Endless, Source


class Surroundings:
    """What else a reactor serves: a second source before and behind, a timer, a task, a descriptor.
    Each notes its turn.
    """

    def __init__(self, reactor: Reactor, clock: ManualClock) -> None:
        self.seen: set[str] = set()
        self.before, self.endless, self.behind = Source(), Endless(), Source()
        for source in (self.before, self.endless, self.behind):
            reactor.add_source(source)
        self.before.work = self.behind.work = 1
        reactor.call_later(0.0, lambda: self.seen.add("timer"))
        reactor.call_soon(lambda: self.seen.add("task"))
        self.reading, self.writing = os.pipe()
        reactor.watch(self.reading, lambda _: self.seen.add("descriptor"))
        os.write(self.writing, b"x")

    def all_served(self) -> bool:
        return (
            self.seen == {"timer", "task", "descriptor"}
            and not self.before.work
            and not self.behind.work
        )

    def close(self, reactor: Reactor) -> None:
        reactor.unwatch(self.reading)
        os.close(self.reading)
        os.close(self.writing)


@pytest.mark.parametrize("warm_turns", [0, WARM_TURNS])
def test_an_endless_source_keeps_nobody_from_a_turn(
    reactor: Reactor, clock: ManualClock, warm_turns: int
) -> None:
    others = Surroundings(reactor, clock)
    reactor.warm_turns = warm_turns
    # a full batch is more work than DESCRIPTOR_TURNS: the descriptors' turn, too
    for _ in range(2):
        reactor.poll(clock())
    assert DESCRIPTOR_TURNS < 64
    assert others.all_served()
    others.close(reactor)


@pytest.mark.parametrize("warm_turns", [0, WARM_TURNS])
def test_one_who_spins_while_there_is_work_gives_everybody_a_turn(
    reactor: Reactor, clock: ManualClock, warm_turns: int
) -> None:
    others = Surroundings(reactor, clock)
    reactor.poll(clock())
    others.seen.clear()
    others.before.work = others.behind.work = 1
    reactor.call_later(0.0, lambda: others.seen.add("timer"))
    reactor.call_later(0.0, lambda: others.seen.add("task"))
    reactor.warm_turns = warm_turns
    # as a driver does: spin while it finds something, else a whole turn
    for _ in range(3 * (DESCRIPTOR_TURNS + 1)):
        if not reactor.spin(256):
            reactor.poll(clock())
    assert others.all_served()
    others.close(reactor)


def test_spinning_on_single_answers_asks_for_a_whole_turn_after_some(reactor: Reactor) -> None:
    source = Source()
    reactor.add_source(source)
    found = 0
    for _ in range(2 * SPIN_WORK_MAX + 2):
        source.work = 1
        found += reactor.spin(256)
    assert found == 2 * SPIN_WORK_MAX
