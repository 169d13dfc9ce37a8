"""The memory transport keeps the contract, and its weather is reproducible."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from shard import (
    DEFAULT_LIMITS,
    MemoryTransport,
    Node,
    PeerLostError,
    Reactor,
    Slab,
    Transport,
    Weather,
)
from shard.transport.memory import MemoryConnection, pair
from tests.connecting import connect
from tests.transport_contract import PATIENCE_S, Side, TransportContract, World


class TestMemory(TransportContract):
    address = "memory://here"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return MemoryTransport(node, slab)

    def test_a_message_that_another_thread_sends_as_the_other_side_closes_is_kept_by_nobody(
        self, world: World
    ) -> None:
        class Closing(Weather):
            """The other end is closed once the sender has found it."""

            def __getattribute__(self, name: str) -> Any:
                if name == "clogged":
                    receiver.close()
                return super().__getattribute__(name)

        sender, receiver = pair(DEFAULT_LIMITS, world.slabs[0], Closing())
        one, two = Side(sender), Side(receiver)
        for side in (one, two):
            side.connection.attach(world.reactor)
        sender.send(b"late")
        world.turn_until(lambda: one.ends)
        assert two.bodies == []
        assert not receiver.has_work()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def delivery_times(seed: int) -> list[float]:
    clock = Clock()
    reactor = Reactor(clock)
    one, two = pair(DEFAULT_LIMITS, Slab(), Weather(seed=seed, delay_s_max=1.0))
    one.attach(reactor)
    two.attach(reactor)
    side = Side(two)
    times: list[float] = []
    side.on_each = lambda body: times.append(clock.now)
    for number in range(20):
        one.send(bytes([number]))
    while len(times) < 20:
        clock.now += 0.001
        reactor.poll(clock.now)
    assert side.bodies == [bytes([number]) for number in range(20)], "delayed, yet in order"
    reactor.close()
    return times


def test_delays_follow_from_the_seed_and_keep_the_order() -> None:
    assert delivery_times(1) == delivery_times(1)
    assert delivery_times(1) != delivery_times(2)


def test_a_cut_loses_all_that_follows_and_tells_both_sides() -> None:
    reactor = Reactor(time.monotonic)
    one, two = pair(DEFAULT_LIMITS, Slab(), Weather(cut_after=2))
    one.attach(reactor)
    two.attach(reactor)
    left, right = Side(one), Side(two)
    for number in range(5):
        one.send(bytes([number]), [np.zeros(5, np.uint8)])
    for _ in range(20):
        reactor.poll(time.monotonic())
    assert right.bodies == [b"\0", b"\1"]
    assert [type(error) for error in left.ends + right.ends] == [PeerLostError, PeerLostError]
    reactor.close()


def test_a_clogged_peer_takes_nothing_until_it_is_unclogged() -> None:
    reactor = Reactor(time.monotonic)
    one, two = pair(DEFAULT_LIMITS, Slab(), Weather(clogged=True))
    one.attach(reactor)
    two.attach(reactor)
    side = Side(two)
    one.send(b"patience")
    for _ in range(20):
        reactor.poll(time.monotonic())
    assert not side.messages
    one.unclog()
    reactor.poll(time.monotonic())
    assert side.bodies == [b"patience"]
    one.close()
    reactor.poll(time.monotonic())
    reactor.close()


def test_a_connection_that_is_closed_before_the_acceptor_has_it_is_never_accepted() -> None:
    reactor = Reactor(time.monotonic)
    accepted: list[object] = []
    transport = MemoryTransport(Node(secret=b"", incarnation=1, limits=DEFAULT_LIMITS), Slab())
    listener = transport.listen("memory://here", reactor, accepted.append)
    connect(transport, listener.address, 1.0).close()
    reactor.poll(time.monotonic())
    assert not accepted, "it would be kept for ever: its end has been told, to nobody"
    reactor.close()


def test_a_message_that_finds_no_room_just_before_there_is_some_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reactor = Reactor(time.monotonic)
    one, two = pair(DEFAULT_LIMITS, Slab())
    one.attach(reactor)
    side = Side(two)
    write = MemoryConnection._write

    def refuse_slowly(self: MemoryConnection, item: Any) -> bool:
        written = write(self, item)
        if not written and self._outbox and two.reactor is None:
            two.attach(reactor)
            # as its own thread does, while the one that writes has no core
            reactor.poll(time.monotonic())
        return written

    monkeypatch.setattr(MemoryConnection, "_write", refuse_slowly)
    one.send(b"just in time")
    reactor.poll(time.monotonic())
    assert side.bodies == [b"just in time"]
    one.close()
    reactor.poll(time.monotonic())
    reactor.close()


def test_a_message_of_another_thread_ends_a_park() -> None:
    reactor = Reactor(time.monotonic)
    one, two = pair(DEFAULT_LIMITS, Slab())
    one.attach(reactor)
    two.attach(reactor)
    reactor.poll(time.monotonic())
    side = Side(two)

    def send_to_the_sleeper() -> None:
        while not reactor.parked:
            continue
        one.send(b"wake")

    sender = threading.Thread(target=send_to_the_sleeper)
    sender.start()
    while sender.is_alive():  # it may have looked between two parks
        reactor.park(PATIENCE_S)
    reactor.poll(time.monotonic())
    assert side.bodies == [b"wake"]
    assert not reactor.late_wakes
    one.close()
    reactor.poll(time.monotonic())
    reactor.close()


def test_an_end_says_which_other_end_may_be_handed_something_at_once() -> None:
    reactor = Reactor(time.monotonic)
    one, two = pair(DEFAULT_LIMITS, Slab())
    assert one.idle_neighbour() is None, "the other end is not there yet"
    one.attach(reactor)
    two.attach(reactor)
    reactor.poll(time.monotonic())
    side = Side(one)
    assert one.idle_neighbour() is two
    two.send(b"first")
    assert one.idle_neighbour() is two.idle_neighbour() is None, "it would overtake that"
    reactor.poll(time.monotonic())
    assert side.bodies == [b"first"]
    assert two.idle_neighbour() is one
    one.close()
    assert one.idle_neighbour() is two.idle_neighbour() is None
    reactor.poll(time.monotonic())
    reactor.close()


class Bearer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Brings an object of this process along."""

    load: object = None

    def copy(self, order: Any = "C") -> Bearer:
        own = Bearer(0, np.uint8)
        own.load = self.load
        return own


def test_an_array_that_copies_itself_in_its_own_way_brings_more_than_its_bytes() -> None:
    reactor = Reactor(time.monotonic)
    one, two = pair(DEFAULT_LIMITS, Slab())
    one.attach(reactor)
    two.attach(reactor)
    side = Side(two)
    array, bearer = np.arange(5, dtype=np.uint8), Bearer(0, np.uint8)
    bearer.load = load = object()
    one.send(b"", [array, bearer, array])
    for _ in range(20):
        reactor.poll(time.monotonic())
    ((_, (first, second, third)),) = side.messages
    assert second.load is load
    assert second is not bearer
    assert not np.shares_memory(first, array)
    assert third.tolist() == array.tolist()
    one.close()
    reactor.poll(time.monotonic())
    reactor.close()
