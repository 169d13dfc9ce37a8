"""Descriptors that spoke lately are looked at apart, and nobody is forgotten for them."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from shard import Reactor
from shard.loop.reactor import (
    DESCRIPTOR_TURNS,
    RECOUNT_LOOKS,
    SPIN_WORK_MAX,
    WARM_DESCRIPTORS_MAX,
    WARM_TURNS,
)


class Pipe:
    """A watched pipe that notes what comes through it, or leaves it there: then it is ready without
    end.
    """

    def __init__(self, reactor: Reactor, lively: bool, endless: bool = False) -> None:
        self.reactor = reactor
        self.reading, self.writing = os.pipe()
        self.seen = 0
        self.endless = endless
        reactor.watch(self.reading, self._on_ready, lively=lively)

    def _on_ready(self, events: int) -> None:
        self.seen += 1 if self.endless else len(os.read(self.reading, 100))

    def write(self) -> None:
        os.write(self.writing, b"x")

    def close(self) -> None:
        self.reactor.unwatch(self.reading)
        os.close(self.reading)
        os.close(self.writing)


class Silent:
    """A source that never has anything."""

    def poll(self) -> int:
        return 0

    def prepare_sleep(self, sleeping: bool) -> float:
        return 1.0

    def has_work(self) -> bool:
        return False


@pytest.fixture
def lively(reactor: Reactor) -> Iterator[list[Pipe]]:
    made = [Pipe(reactor, lively=True) for _ in range(WARM_DESCRIPTORS_MAX + 1)]
    yield made
    for pipe in made:
        pipe.close()


@pytest.fixture
def other(reactor: Reactor) -> Iterator[Pipe]:
    made = Pipe(reactor, lively=False)
    yield made
    made.close()


def speak(reactor: Reactor, *pipes: Pipe) -> None:
    """Each says something, and a whole turn finds it: without sources, each looks at all of them.
    The next look of a spin() at all is DESCRIPTOR_TURNS away then, if one of them is warm.
    """
    for pipe in pipes:
        pipe.write()
    reactor.poll(reactor.clock())


def found_by_a_look_at_the_warm_ones(reactor: Reactor, pipes: list[Pipe]) -> list[Pipe]:
    """Those of them, each of which says something, that are seen before the next look at all."""
    reactor.poll(reactor.clock())
    before = [pipe.seen for pipe in pipes]
    for pipe in pipes:
        pipe.write()
    assert reactor.spin(1)
    return [pipe for pipe, seen in zip(pipes, before, strict=True) if pipe.seen > seen]


def test_one_that_spoke_is_looked_at_every_turn_and_only_one_that_is_lively(
    reactor: Reactor, lively: list[Pipe], other: Pipe
) -> None:
    speak(reactor, other)
    assert not reactor.warm_turns
    speak(reactor, lively[0])
    assert reactor.warm_turns == WARM_TURNS
    lively[0].write()
    assert reactor.spin(1)
    assert lively[0].seen == 2


def test_one_that_is_not_warm_is_seen_a_few_turns_later(
    reactor: Reactor, lively: list[Pipe], other: Pipe
) -> None:
    speak(reactor, lively[0])
    other.write()
    lively[1].write()
    assert not reactor.spin(DESCRIPTOR_TURNS)
    assert reactor.spin(1)
    assert (other.seen, lively[1].seen) == (1, 1)


def test_a_warm_one_that_is_ready_without_end_keeps_no_other_waiting(
    reactor: Reactor, lively: list[Pipe], other: Pipe
) -> None:
    lively[0].endless = True
    speak(reactor, lively[0])
    other.write()
    for _ in range(SPIN_WORK_MAX + 1):  # as a driver does
        if not reactor.spin(256):
            reactor.poll(reactor.clock())
    assert other.seen == 1
    assert lively[0].seen > SPIN_WORK_MAX


def test_where_too_many_speak_all_are_seen_in_the_same_turn(
    reactor: Reactor, lively: list[Pipe], other: Pipe
) -> None:
    speak(reactor, *lively)
    for pipe in (*lively, other):
        pipe.write()
    assert reactor.spin(1)
    assert [pipe.seen for pipe in lively] == [2] * len(lively)
    assert other.seen == 1


def test_a_quiet_one_gets_cold(reactor: Reactor, lively: list[Pipe]) -> None:
    speak(reactor, *lively)  # too many
    assert not reactor.spin(WARM_TURNS)
    assert not reactor.warm_turns
    speak(reactor, lively[0])  # no longer
    lively[0].write()
    lively[1].write()
    assert reactor.spin(1)
    assert (lively[0].seen, lively[1].seen) == (3, 1)


def talk(reactor: Reactor, pipe: Pipe) -> None:
    """It says one thing after the other, with turns in between that find nothing, until all have
    been counted anew.
    """
    for _ in range(RECOUNT_LOOKS + 2):
        pipe.write()
        assert reactor.spin(DESCRIPTOR_TURNS + 1) or reactor.poll(reactor.clock())
        reactor.spin(DESCRIPTOR_TURNS + 1)


def test_one_that_fell_silent_gets_cold_although_another_goes_on_talking(
    reactor: Reactor, lively: list[Pipe]
) -> None:
    speak(reactor, lively[0], lively[1])
    talk(reactor, lively[0])
    assert found_by_a_look_at_the_warm_ones(reactor, lively) == lively[:1]


def test_a_crowd_that_has_dispersed_is_forgotten_while_one_of_it_goes_on_talking(
    reactor: Reactor, lively: list[Pipe]
) -> None:
    speak(reactor, *lively)
    assert found_by_a_look_at_the_warm_ones(reactor, lively) == lively, "all at once"
    talk(reactor, lively[0])
    assert found_by_a_look_at_the_warm_ones(reactor, lively) == lively[:1]


def test_without_sources_every_turn_and_every_look_asks_the_descriptors_warm_or_not(
    reactor: Reactor, other: Pipe
) -> None:
    for look in (partial(reactor.spin, 4), lambda: reactor.poll(reactor.clock())):
        reactor.poll(reactor.clock())  # it has just looked
        other.write()
        assert look()
    assert not reactor.warm_turns


def test_a_spin_that_asked_the_sources_in_vain_makes_descriptors_due_in_the_next_turn(
    reactor: Reactor, other: Pipe
) -> None:
    reactor.poll(reactor.clock())  # it has just looked
    reactor.add_source(Silent())
    other.write()
    assert not reactor.spin(DESCRIPTOR_TURNS)
    assert reactor.poll(reactor.clock())
    assert other.seen == 1


def test_one_that_is_unwatched_is_forgotten_and_its_number_may_be_used_again(
    reactor: Reactor, lively: list[Pipe]
) -> None:
    speak(reactor, *lively[:2])
    reactor.unwatch(lively[0].reading)
    lively[1].write()
    # ready, under a number that nobody watches any more
    os.dup2(lively[1].reading, lively[0].reading)
    assert reactor.spin(1)
    assert not reactor.spin(2 * DESCRIPTOR_TURNS)
    assert (lively[0].seen, lively[1].seen) == (1, 2)


def test_what_a_warm_one_is_watched_for_can_change(reactor: Reactor) -> None:
    one, peer = socket.socketpair()
    seen: list[int] = []

    def on_ready(events: int) -> None:
        seen.append(events)
        if events & select.EPOLLIN:
            one.recv(100)

    with one, peer:
        reactor.watch(one.fileno(), on_ready, lively=True)
        peer.send(b"x")
        reactor.poll(reactor.clock())
        assert not reactor.spin(DESCRIPTOR_TURNS // 2)
        reactor.watch(one.fileno(), on_ready, select.EPOLLIN | select.EPOLLOUT, lively=True)
        assert reactor.spin(1)
        peer.send(b"x")
        assert reactor.spin(1)
        assert seen == [select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT]
        reactor.unwatch(one.fileno())
