"""What has come from other nodes, driven by itself."""

from __future__ import annotations

import numpy as np
import pytest

from prpc_engine.ding.inlet import NOTE_EVENTS, Inlet

ONE, OTHER = 11, 22


def inlet_for(*topics: bytes, settled: bool = True, **bounds: int) -> Inlet:
    inlet = Inlet(**bounds)
    for topic in topics:
        inlet.subscribe(topic)
    if settled:
        inlet.settle()
    return inlet


def put(inlet: Inlet, number: int, topic: bytes = b"t", payload: str = "", who: int = ONE) -> bool:
    return inlet.put(who, number, topic, payload or str(number), 1)


def taken(inlet: Inlet) -> list[str]:
    found = []
    while (arrival := inlet.take()) is not None:
        found.append(arrival.payload)
    return found


def test_events_are_taken_in_the_order_in_which_they_came() -> None:
    inlet = inlet_for(b"t")
    for number in (1, 2):
        put(inlet, number, payload=f"one {number}")
        put(inlet, number, payload=f"other {number}", who=OTHER)
    assert taken(inlet) == ["one 1", "other 1", "one 2", "other 2"]


def test_an_event_that_comes_again_is_taken_once() -> None:
    inlet = inlet_for(b"t")
    assert all([put(inlet, 1), put(inlet, 2), put(inlet, 1), put(inlet, 2), put(inlet, 3)])
    assert taken(inlet) == ["1", "2", "3"]


def test_an_event_that_overtakes_others_is_refused() -> None:
    inlet = inlet_for(b"t")
    assert put(inlet, 1)
    assert not put(inlet, 3)
    assert inlet.progress(ONE) == (1, 0)


def test_what_nobody_has_subscribed_to_is_left_out_and_counts_as_taken() -> None:
    inlet = inlet_for(b"t")
    put(inlet, 1, topic=b"u")
    assert taken(inlet) == []
    assert (inlet.left_out, inlet.progress(ONE)) == (1, (1, 1))


def test_what_comes_before_its_subscription_is_parked_while_the_node_starts() -> None:
    inlet = inlet_for(settled=False)
    put(inlet, 1, topic=b"u", payload="u1")
    put(inlet, 2, topic=b"t", payload="t2")
    put(inlet, 3, topic=b"u", payload="u3")
    inlet.subscribe(b"nobody publishes this")
    assert taken(inlet) == []
    assert (inlet.ready, inlet.parked) == (0, 3)
    inlet.subscribe(b"u")
    assert taken(inlet) == ["u1", "u3"]
    assert inlet.progress(ONE) == (3, 3), "each once: parked events do not hold up their sender"
    inlet.settle()
    assert (inlet.parked, inlet.left_out) == (0, 1)


def test_what_is_parked_is_a_copy_and_holds_no_memory_of_its_sender() -> None:
    inlet = Inlet()
    sent = np.frombuffer(bytearray(b"as it was sent"), np.uint8)
    inlet.put(ONE, 1, b"u", sent, sent.nbytes)
    sent[:] = 0  # its memory has another use
    inlet.subscribe(b"u")
    arrival = inlet.take()
    assert arrival is not None and arrival.payload == b"as it was sent"


@pytest.mark.parametrize("bounds", [{"parked_max": 2}, {"parked_bytes_max": 2}])
def test_of_what_is_parked_the_latest_is_kept(bounds: dict[str, int]) -> None:
    inlet = inlet_for(settled=False, **bounds)
    for number in (1, 2, 3):
        put(inlet, number)
    inlet.subscribe(b"t")
    assert taken(inlet) == ["2", "3"]
    assert inlet.left_out == 1


def test_a_sender_hears_of_what_was_taken_by_shares_while_more_is_ready() -> None:
    inlet = inlet_for(b"t", events_max=80)
    for number in range(1, 100):
        put(inlet, number)
    for _ in range(9):
        inlet.take()
        assert inlet.notes() == []
    inlet.take()
    assert inlet.notes() == [(ONE, 10)]
    assert inlet.notes() == []


def test_a_sender_hears_of_a_few_large_events_when_nothing_else_is_ready() -> None:
    inlet = inlet_for(b"t")
    inlet.put(ONE, 1, b"t", "large", 1 << 20)
    inlet.take()
    assert inlet.notes() == [(ONE, 1)]


def test_a_single_small_event_costs_no_note() -> None:
    inlet = inlet_for(b"t")
    for number in range(1, NOTE_EVENTS):
        put(inlet, number)
        inlet.take()
        assert inlet.notes() == []
    put(inlet, NOTE_EVENTS)
    inlet.take()
    assert inlet.notes() == [(ONE, NOTE_EVENTS)]


def test_what_a_process_sent_before_it_ended_is_still_taken() -> None:
    inlet = inlet_for(b"t")
    put(inlet, 1)
    inlet.forget(ONE)
    inlet.forget(ONE)
    assert taken(inlet) == ["1"]
    assert inlet.progress(ONE) == (0, 0)


def test_topics_change_once_and_with_a_version_each() -> None:
    inlet = inlet_for(settled=False)
    versions = [inlet.interest.version]
    assert inlet.subscribe(b"t")
    assert not inlet.subscribe(b"t")
    versions.append(inlet.interest.version)
    inlet.settle()
    versions.append(inlet.interest.version)
    assert inlet.unsubscribe("t")
    assert not inlet.unsubscribe("t")
    versions.append(inlet.interest.version)
    assert versions == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("task.*", {b"other", b"task"}),
        ("*", set()),
        ("nobody", {b"task.a", b"task.b", b"task", b"other"}),
        ("other", {b"task.a", b"task.b", b"task"}),
    ],
)
def test_a_pattern_unsubscribes_what_it_matches(pattern: str, left: set[bytes]) -> None:
    inlet = inlet_for(b"task.a", b"task.b", b"task", b"other")
    inlet.unsubscribe(pattern)
    assert inlet.interest.topics == left


def test_a_topic_with_brackets_is_unsubscribed_by_its_own_name() -> None:
    inlet = inlet_for(b"a[0]")
    assert inlet.unsubscribe("a[0]")


def test_what_was_parked_is_taken_in_its_place_among_what_came() -> None:
    inlet = inlet_for(settled=False)
    for number, topic in enumerate((b"t", b"u", b"t", b"u"), 1):
        put(inlet, number, topic=topic)
    inlet.subscribe(b"u")
    put(inlet, 5, topic=b"u")
    inlet.subscribe(b"t")
    assert taken(inlet) == ["1", "2", "3", "4", "5"]


def test_what_is_parked_is_told_to_its_sender_and_what_finds_no_room_is_counted() -> None:
    inlet = inlet_for(settled=False, parked_max=3)
    for number in range(1, NOTE_EVENTS + 1):
        put(inlet, number)
    assert inlet.notes() == [(ONE, NOTE_EVENTS)]
    assert inlet.parked_dropped == NOTE_EVENTS - 3
