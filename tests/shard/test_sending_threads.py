"""Threads that send over one connection: one stands still between two bytecodes, at each in turn,
while another one sends, drains or closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

import shard.transport
from shard import DEFAULT_LIMITS, ClosedError, Connection, Reactor, Traffic
from tests.preempted import preempted

SENDING = shard.transport.__name__


class Wire(Connection[bytes]):
    """A connection that notes what is written to it, as long as there is room."""

    def __init__(self, room: int) -> None:
        super().__init__("nobody", DEFAULT_LIMITS)
        self.room = room  # for so many messages more
        self.written: list[bytes] = []
        self.swallowed: list[bytes] = []  # came after the end
        self.has_ended = False
        self.on_close = lambda *_: None

    def make_room(self) -> None:
        self.room = 100
        self.drain()

    def traffic(self) -> Traffic:
        return Traffic()

    def _prepare(
        self, body: Any, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[bytes, int]:
        return bytes(body), len(body)

    def _write(self, item: bytes) -> bool:
        if self.has_ended:
            self.swallowed.append(item)
        elif self.room > 0:
            self.room -= 1
            self.written.append(item)
        else:
            return False
        return True

    def _beginning(self, item: bytes) -> bytes:
        return item

    def _drive(self, reactor: Reactor) -> None:
        raise AssertionError("it is not attached")

    def _end(self) -> None:
        self.has_ended = True


Step = Callable[[], object]


def in_order(first: Step, second: Step, is_second_first: bool) -> tuple[Step, Step]:
    return (second, first) if is_second_first else (first, second)


def test_messages_of_two_threads_are_written_once() -> None:
    for case in preempted(SENDING):
        wire = Wire(room=2)
        case.run(lambda wire=wire: wire.send(b"a"), lambda wire=wire: wire.send(b"bb"))  # type: ignore[misc]
        wire.drain()
        assert sorted(wire.written) == [b"a", b"bb"], case.after
        assert wire.waiting() == (0, 0), case.after


@pytest.mark.parametrize("is_drained_first", [False, True])
def test_a_message_that_comes_as_there_is_room_again_keeps_its_place(
    is_drained_first: bool,
) -> None:
    for case in preempted(SENDING):
        wire = Wire(room=0)
        wire.send(b"a")
        wire.send(b"bb")
        send = lambda wire=wire: wire.send(b"ccc")  # type: ignore[misc] # noqa: E731
        case.run(*in_order(send, wire.make_room, is_drained_first))
        wire.drain()
        assert wire.written == [b"a", b"bb", b"ccc"], case.after
        assert wire.waiting() == (0, 0), f"{case.after}: bytes of what has left count on"


@pytest.mark.parametrize("is_closed_first", [False, True])
@pytest.mark.parametrize("room", [0, 2])
def test_a_message_that_comes_as_the_connection_ends_is_in_one_place(
    room: int, is_closed_first: bool
) -> None:
    for case in preempted(SENDING):
        wire, refused = Wire(room), list[bytes]()
        wire.send(b"a")

        def send(wire: Wire = wire, refused: list[bytes] = refused) -> None:
            try:
                wire.send(b"bb")
            except ClosedError:
                refused.append(b"bb")

        case.run(*in_order(send, wire.close, is_closed_first))
        found = [*wire.written, *wire.swallowed, *map(bytes, wire.unsent), *refused]
        assert sorted(found) == [b"a", b"bb"], case.after
        assert wire.waiting() == (0, 0), case.after
