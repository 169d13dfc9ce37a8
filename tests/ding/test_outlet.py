"""What another node is still to get, driven by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from prpc_engine.ding.greeting import Interest
from prpc_engine.ding.outlet import UNTOLD_SHARE, Event, Outlet, PresenceEvent, PresenceState

ALL = Interest(1, False, frozenset())
FIRST_LIFE, SECOND_LIFE = 11, 22


def events(*names: str, nbytes: int = 1) -> list[Event]:
    return [Event(number, b"t", name, nbytes) for number, name in enumerate(names, 1)]


def outlet_with(
    *names: str, up: bool = False, events_max: int = 100, bytes_max: int = 1000
) -> Outlet:
    outlet = Outlet(events_max, bytes_max)
    if up:
        outlet.greeted(FIRST_LIFE, 0, 0, ALL)
    for event in events(*names):
        outlet.offer(event)
    return outlet


def leave(outlet: Outlet, most: int = 1000) -> list[tuple[int, str]]:
    """All that may leave does."""
    left = []
    while len(left) < most and (found := outlet.first()) is not None:
        left.append((found[0], found[1].payload))
        outlet.leave()
    return left


def test_events_are_held_until_the_node_greets_and_leave_in_order() -> None:
    outlet = outlet_with("a", "b")
    assert leave(outlet) == []
    assert [event.payload for event in outlet.held()] == ["a", "b"]
    outlet.greeted(FIRST_LIFE, 0, 0, ALL)
    assert leave(outlet) == [(1, "a"), (2, "b")]
    assert (outlet.waiting, outlet.in_flight, outlet.taken) == (0, 2, 0)


def test_the_same_process_gets_again_what_it_has_not_received() -> None:
    outlet = outlet_with("a", "b", "c", "d", up=True)
    leave(outlet)
    outlet.follow(PresenceEvent.LOST)
    outlet.offer(Event(5, b"t", "e", 1))
    outlet.greeted(FIRST_LIFE, 3, 1, ALL)
    assert leave(outlet) == [(4, "d"), (5, "e")]
    assert outlet.in_flight == 4


def test_a_greeting_that_is_older_than_what_the_node_has_told_since_takes_nothing_back() -> None:
    """Both have dialled: it comes over the second connection."""
    outlet = outlet_with("a", "b", "c", "d", up=True)
    leave(outlet, most=3)
    outlet.take(2)
    newer = Interest(7, True, frozenset({b"t"}))
    outlet.tell(newer)
    outlet.greeted(FIRST_LIFE, 1, 0, ALL)
    assert leave(outlet) == [(3, "c"), (4, "d")]
    assert outlet.interest == newer


def test_another_process_gets_what_the_one_before_had_not_taken() -> None:
    outlet = outlet_with("a", "b", "c", up=True)
    leave(outlet, most=2)
    outlet.take(1)
    outlet.follow(PresenceEvent.LOST)
    outlet.greeted(SECOND_LIFE, 0, 0, ALL)
    assert leave(outlet) == [(1, "b"), (2, "c")]


def test_a_node_that_knows_this_process_from_before_gets_numbers_that_go_on() -> None:
    outlet = Outlet()
    outlet.greeted(FIRST_LIFE, 7, 5, ALL)
    outlet.offer(events("a")[0])
    assert leave(outlet) == [(8, "a")]


def test_a_node_that_has_forgotten_this_process_gets_numbers_from_the_beginning() -> None:
    outlet = outlet_with("a", "b", "c", up=True)
    leave(outlet)
    outlet.take(2)
    outlet.follow(PresenceEvent.LOST)
    outlet.greeted(FIRST_LIFE, 0, 0, ALL)
    assert leave(outlet) == [(1, "c")]


def test_a_topic_that_the_node_does_not_want_is_left_out() -> None:
    outlet = Outlet()
    outlet.greeted(FIRST_LIFE, 0, 0, Interest(4, True, frozenset({b"x"})))
    outlet.offer(Event(1, b"y", "no", 1))
    outlet.offer(Event(2, b"x", "yes", 1))
    assert leave(outlet) == [(1, "yes")]


def test_a_topic_that_was_unsubscribed_while_its_event_waited_is_left_out() -> None:
    outlet = Outlet(events_max=1)
    outlet.greeted(FIRST_LIFE, 0, 0, Interest(4, True, frozenset({b"t"})))
    for event in events("a", "b"):
        outlet.offer(event)
    assert leave(outlet) == [(1, "a")]
    outlet.tell(Interest(5, True, frozenset()))
    outlet.take(1)
    assert leave(outlet) == []
    assert outlet.waiting == 0


def test_older_news_of_topics_change_nothing() -> None:
    outlet = Outlet()
    outlet.greeted(FIRST_LIFE, 0, 0, Interest(4, True, frozenset({b"t"})))
    outlet.tell(Interest(3, True, frozenset()))
    outlet.offer(events("a")[0])
    assert leave(outlet) == [(1, "a")]


def test_while_the_node_is_not_up_nothing_is_left_out() -> None:
    outlet = Outlet()
    outlet.greeted(FIRST_LIFE, 0, 0, Interest(4, True, frozenset()))
    outlet.follow(PresenceEvent.LOST)
    outlet.offer(events("a")[0])
    outlet.greeted(FIRST_LIFE, 0, 0, Interest(5, True, frozenset({b"t"})))
    assert leave(outlet) == [(1, "a")]


@pytest.mark.parametrize(("events_max", "bytes_max"), [(2, 1000), (100, 2)])
def test_a_node_that_is_up_and_has_no_room_is_waited_for(events_max: int, bytes_max: int) -> None:
    outlet = outlet_with("a", "b", "c", up=True, events_max=events_max, bytes_max=bytes_max)
    assert leave(outlet) == [(1, "a"), (2, "b")]
    assert outlet.must_wait
    outlet.take(1)
    assert leave(outlet) == [(3, "c")]
    assert not outlet.must_wait


def test_one_event_beyond_the_bound_leaves_when_nothing_else_is_under_way() -> None:
    outlet = Outlet(bytes_max=10)
    outlet.greeted(FIRST_LIFE, 0, 0, ALL)
    for event in events("large", "next", nbytes=50):
        outlet.offer(event)
    assert leave(outlet) == [(1, "large")]
    outlet.take(1)
    assert leave(outlet) == [(2, "next")]


def test_an_event_beyond_the_bound_does_not_wait_for_what_the_node_need_not_tell() -> None:
    outlet = Outlet(bytes_max=UNTOLD_SHARE)
    outlet.greeted(FIRST_LIFE, 0, 0, ALL)
    for event in (Event(1, b"t", "small", 1), Event(2, b"t", "large", 2 * UNTOLD_SHARE)):
        outlet.offer(event)
    assert leave(outlet) == [(1, "small"), (2, "large")]
    outlet.offer(Event(3, b"t", "next", 1))
    assert leave(outlet) == []


def test_one_event_beyond_the_bound_is_held_for_a_node_that_is_not_there() -> None:
    outlet = Outlet(bytes_max=10)
    for event in events("a", "b", nbytes=50):
        outlet.offer(event)
    assert outlet.dropped == 1
    outlet.greeted(FIRST_LIFE, 0, 0, ALL)
    assert leave(outlet) == [(1, "b")]


@pytest.mark.parametrize("is_lost", [False, True], ids=["awaited", "lost"])
def test_a_node_that_is_not_there_is_never_waited_for_and_loses_the_oldest(is_lost: bool) -> None:
    outlet = outlet_with(up=is_lost, events_max=2)
    if is_lost:
        outlet.follow(PresenceEvent.LOST)
    for event in events("a", "b", "c"):
        outlet.offer(event)
        assert not outlet.must_wait
    assert outlet.dropped == 1
    outlet.greeted(SECOND_LIFE, 0, 0, ALL)
    assert leave(outlet) == [(1, "b"), (2, "c")]


def test_a_node_that_takes_nothing_for_long_is_waited_for_no_more_until_it_goes_on() -> None:
    outlet = outlet_with("a", "b", "c", "d", up=True, events_max=1)
    leave(outlet)
    outlet.stall()
    assert not outlet.must_wait
    assert outlet.dropped == 2, "those that had not left, but for one"
    outlet.take(1)
    assert not outlet.is_stalled
    assert leave(outlet) == [(2, "d")]


def test_a_node_that_said_goodbye_gets_nothing_of_before_when_it_comes_again() -> None:
    outlet = outlet_with("a", "b", up=True)
    leave(outlet, most=1)
    assert outlet.follow(PresenceEvent.LEFT) == 2
    outlet.offer(events("c")[0])
    outlet.follow(PresenceEvent.LOST)
    outlet.greeted(SECOND_LIFE, 0, 0, ALL)
    assert leave(outlet) == []
    assert outlet.dropped == 0


def test_a_node_that_was_lost_for_long_has_its_events_dropped_and_counted() -> None:
    outlet = outlet_with("a", "b", up=True)
    leave(outlet, most=1)
    outlet.follow(PresenceEvent.LOST)
    assert outlet.follow(PresenceEvent.GIVEN_UP) == 2
    assert (outlet.dropped, outlet.state) == (2, PresenceState.AWAY)


def test_an_event_that_can_never_be_sent_is_out_of_the_way() -> None:
    outlet = outlet_with("a", "b", up=True)
    assert outlet.first() is not None
    outlet.refuse()
    assert leave(outlet) == [(1, "b")]


def test_an_event_that_cannot_come_is_refused_by_name() -> None:
    with pytest.raises(LookupError, match="left"):
        Outlet().follow(PresenceEvent.LEFT)


class Receiver:
    """The other node as a model: it hands each event out once, in order."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.received = 0

    def receive(self, sent: Sequence[tuple[int, str]]) -> None:
        for number, payload in sent:
            if number == self.received + 1:
                self.received = number
                self.got.append(payload)
            else:
                assert number <= self.received, "none is left out"


def test_whatever_is_lost_on_the_way_each_event_arrives_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        outlet, receiver, published = Outlet(events_max=5), Receiver(), 0
        outlet.greeted(FIRST_LIFE, 0, 0, ALL)
        for _ in range(100):
            step = chance.randrange(4)
            if step == 0 and not outlet.must_wait and outlet.waiting < 5:
                published += 1
                outlet.offer(Event(published, b"t", str(published), 1))
            elif step == 1:
                receiver.receive(leave(outlet))
            elif step == 2:
                outlet.take(chance.randint(0, receiver.received))
            else:
                leave(outlet, most=chance.randint(0, 3))  # written, and lost with the connection
                outlet.follow(PresenceEvent.LOST)
                outlet.greeted(FIRST_LIFE, receiver.received, 0, ALL)
        outlet.take(receiver.received)
        receiver.receive(leave(outlet))
        outlet.take(receiver.received)
        receiver.receive(leave(outlet))
        assert receiver.got == [str(number) for number in range(1, published + 1)]
