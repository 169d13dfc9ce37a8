"""What a message over tcp takes of system calls. Counted, not timed:
a busy machine changes little.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from shard import Connection, Node, Reactor, Slab, TcpTransport
from shard.loop.reactor import DESCRIPTOR_TURNS, RECOUNT_LOOKS, SPIN_WORK_MAX
from shard.transport import Blocks
from shard.transport.socket_lane import READS_PER_TURN
from tests.connecting import connect
from tests.transport_contract import LIMITS, PATIENCE_S

ROUND_TRIPS = 4 * RECOUNT_LOOKS


class End:
    """One side of a connection with a reactor of its own, as in a process of its own."""

    def __init__(self) -> None:
        self.reactor = Reactor(time.monotonic)
        self.slab = Slab()
        self.transport = TcpTransport(
            Node(secret=b"secret", incarnation=7, limits=LIMITS), self.slab
        )
        self.connections: list[Connection[Any]] = []
        self.messages = 0

    def listen_to(self, connection: Connection[Any]) -> None:
        """Count what comes over it."""
        connection.on_message = self._count

    def _count(self, body: memoryview, blocks: Blocks = ()) -> None:
        self.messages += 1

    def turn_until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.reactor.poll(0.0)

    def find_one(self) -> int:
        """Spin as a driver does until a message is there; how many empty looks were asked for at
        most.
        """
        before, looks = self.messages, 0
        deadline = time.monotonic() + PATIENCE_S
        while self.messages == before:
            if not self.reactor.spin(1):
                looks += 1
                if self.reactor._spin_work <= 0 or looks % SPIN_WORK_MAX == 0:
                    self.reactor.poll(0.0)
            assert time.monotonic() < deadline, "it did not come"
        return looks

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.reactor.close()
        self.slab.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    one, two = End(), End()
    listener = two.transport.listen("tcp://127.0.0.1:0", two.reactor, two.connections.append)
    connecting = threading.Thread(
        target=lambda: one.connections.append(connect(one.transport, listener.address, PATIENCE_S))
    )
    connecting.start()
    two.turn_until(lambda: one.connections and two.connections)
    connecting.join()
    one.connections[0].attach(one.reactor)  # the other was, as it was accepted
    for end in (one, two):
        end.listen_to(end.connections[0])
    yield one, two
    for end in (one, two):
        end.close()
    listener.close()


class Calls:
    """Counts what C functions are called while it is entered, and what they raise."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        sys.setprofile(self._note)
        return self.count

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            owner = type(getattr(function, "__self__", None)).__name__
            self.count[f"{owner}.{function.__name__}"] += 1
        elif event == "c_exception":
            self.count["raised"] += 1


def test_a_warm_message_takes_one_send_one_poll_and_one_receive_and_seldom_an_epoll(
    ends: tuple[End, End],
) -> None:
    one, two = ends
    for end, other in ((one, two), (two, one)):  # both have spoken
        end.connections[0].send(b"x" * 64)
        other.turn_until(lambda end=other: end.messages)
    messages = 2 * ROUND_TRIPS
    by_spins = messages // (DESCRIPTOR_TURNS + 1) + 2 * (RECOUNT_LOOKS // DESCRIPTOR_TURNS)
    by_turns = messages // SPIN_WORK_MAX
    looks_max = messages, 2 * (by_spins + by_turns)
    looks = []
    deadline = time.monotonic() + PATIENCE_S
    # A busy kernel may deliver a packet after send() has returned, and then there are more looks
    # than messages: until it is not.
    while not looks or (
        any(map(operator.gt, looks[-1], looks_max)) and time.monotonic() < deadline
    ):
        with Calls() as calls:
            for _ in range(ROUND_TRIPS):
                one.connections[0].send(b"x" * 64)
                two.find_one()
                two.connections[0].send(b"x" * 64)
                one.find_one()
        assert calls["socket.send"] == calls["socket.recv_into"] == messages
        assert calls["raised"] == 0
        looks.append((calls["poll.poll"], calls["epoll.poll"]))
    assert looks[-1][0] <= looks_max[0]
    assert looks[-1][1] <= looks_max[1]


def test_the_rest_of_a_message_is_read_until_the_socket_is_empty_or_the_turn_over(
    ends: tuple[End, End],
) -> None:
    one, two = ends
    one.connections[0].send(b"x" * 64, [np.zeros(4_000_000, np.uint8)], stable=True)
    turns = 0
    while not two.messages:
        with Calls() as calls:
            worked = two.reactor.poll(0.0)
        turns += worked
        assert (
            not worked
            or two.messages
            or calls["raised"]
            or calls["socket.recv_into"] == READS_PER_TURN
        )
        one.reactor.poll(0.0)
    assert turns < two.connections[0].traffic().bytes_received // 4096
