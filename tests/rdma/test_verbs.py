"""What is particular to verbs: a peer that lies, a device that fails, memory that may not be
locked, a device that is named.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shard import Node, PeerLostError, RemoteProtocolError, Slab, UnreachableError, VerbsOptions
from shard.transport.records import MESSAGE, RETURN, pack_descriptor, pack_lease, pack_prefix
from shard.transport.verbs import VerbsTransport
from shard.transport.verbs_connection import VerbsConnection
from shard.transport.verbs_queue import SLOTS, FarEnd, VerbsQueue
from shard.transport.verbs_records import EVERYWHERE, HEADER, PART, REGION, REGION_NOTE
from tests.transport_contract import LIMITS, Side, World

ADDRESS = "verbs://127.0.0.1:0"
ROOT = Path(__file__).parents[2]


def make(node: Node, slab: Slab) -> VerbsTransport:
    return VerbsTransport(node, slab)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(make, ADDRESS)
    yield world
    world.close()


@pytest.fixture
def sides(world: World) -> Iterator[tuple[Side, Side]]:
    one, two = world.connect()
    yield one, two
    one.connection.close()
    two.connection.close()


def verbs_of(side: Side) -> VerbsConnection:
    assert isinstance(side.connection, VerbsConnection)
    return side.connection


Lie = Callable[[VerbsConnection], None]


def lies(payload: bytes, tag: int) -> Lie:
    return lambda connection: connection._slots.fill(payload, tag)


def take_what_was_never_sent(connection: VerbsConnection) -> None:
    connection._slots.taken += 1000
    connection.send(b"x")


def be_shorter_than_a_header(connection: VerbsConnection) -> None:
    queue = connection._queue
    at = SLOTS * queue.slot_bytes
    queue.memory[at : at + HEADER.size] = HEADER.pack(0, 0)
    queue.send(0, HEADER.size - 1, False)


def lend_memory_that_is_not_registered(connection: VerbsConnection) -> None:
    connection._slots.fill(REGION_NOTE.pack(0, 1 << 40, 1 << 20, 12345), REGION)
    connection._slots.fill(pack_prefix(1, 0) + pack_descriptor(5000, 0, 1, 0, 0), MESSAGE)


def tell_of_a_region_twice(connection: VerbsConnection) -> None:
    for _ in range(2):
        connection._slots.fill(REGION_NOTE.pack(7, 0, 1, 1), REGION)


LIES: dict[str, tuple[Lie, type[Exception], str]] = {
    "tag": (lies(b"", 99), RemoteProtocolError, "unknown tag 99"),
    "counts": (take_what_was_never_sent, RemoteProtocolError, "the peer took 1000 messages"),
    "header": (be_shorter_than_a_header, RemoteProtocolError, "7 bytes, 8 are the least"),
    "message": (lies(b"\1\0\0\0", MESSAGE), RemoteProtocolError, "cut short"),
    "descriptors": (lies(pack_prefix(3, 0), MESSAGE), RemoteProtocolError, "cut short"),
    "many": (lies(pack_prefix(1 << 20, 0), MESSAGE), RemoteProtocolError, "over the limits"),
    "body": (lies(pack_prefix(0, 100), MESSAGE), RemoteProtocolError, "passes its message"),
    "inline": (
        lies(pack_prefix(1, 0) + pack_descriptor(100, 40, 0, 0, 0), MESSAGE),
        RemoteProtocolError,
        "passes its message",
    ),
    "segment": (
        lies(pack_prefix(1, 0) + pack_descriptor(100, 0, 1, 5, 0), MESSAGE),
        RemoteProtocolError,
        "of segment 5, which has 0",
    ),
    "lease": (lies(pack_lease(77), RETURN), RemoteProtocolError, "lease 77"),
    "half a lease": (lies(b"123", RETURN), RemoteProtocolError, "cut short"),
    "region": (tell_of_a_region_twice, RemoteProtocolError, "segment 7 twice"),
    "key": (lies(struct.pack("<4Q", 1, 0, 1, 1 << 40), REGION), RemoteProtocolError, "32 bits"),
    # whichever end hears of it first: its device refuses that too
    "memory": (lend_memory_that_is_not_registered, PeerLostError, "was lost"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_peer_that_lies_is_hung_up_on_by_name(
    world: World, sides: tuple[Side, Side], name: str
) -> None:
    lie, error, text = LIES[name]
    liar, other = sides
    lie(verbs_of(liar))
    world.turn_until(lambda: other.ends and liar.ends)
    assert isinstance(other.ends[0], error)
    assert text in str(other.ends[0])
    assert isinstance(liar.ends[0], PeerLostError)
    assert not other.messages


def test_arrays_of_one_message_may_be_more_together_than_may_wait(
    world: World, sides: tuple[Side, Side]
) -> None:
    one, two = sides
    arrays = [np.full(5 << 20, number, np.uint8) for number in range(3)]  # of 8 MiB that may wait
    for _ in range(2):
        one.connection.send(b"", arrays)
        world.turn_until(lambda: two.messages and not world.calling_slab.statistics().leases)
        _, blocks = two.messages.pop()
        assert [(len(block), block.min(), block.max()) for block in blocks] == [
            (5 << 20, number, number) for number in range(3)
        ]


def test_a_connection_that_another_ends_in_the_same_turn_is_left_alone(
    world: World, sides: tuple[Side, Side]
) -> None:
    _, two = sides
    two.connection.close()
    assert verbs_of(two).poll() == 0


def test_a_body_over_the_limit_is_refused_in_parts_too(
    world: World, sides: tuple[Side, Side]
) -> None:
    liar, other = sides
    verbs_of(liar)._slots.begin(bytes(LIMITS.body_bytes_max + 1), 0)
    world.turn_until(lambda: other.ends)
    assert f"at most {LIMITS.body_bytes_max} allowed" in str(other.ends[0])


def test_a_message_without_an_end_is_bounded(world: World, sides: tuple[Side, Side]) -> None:
    liar, other = sides
    verbs_of(other)._arrivals._parts_max = 10_000
    connection = verbs_of(liar)
    for _ in range(11):
        connection._slots.fill(bytes(1000), PART)
    world.turn_until(lambda: other.ends)
    assert "a message of more than 10000 bytes" in str(other.ends[0])


def test_arrays_without_room_in_the_slab_go_by_slots_both_ways(
    world: World, sides: tuple[Side, Side]
) -> None:
    """In pieces, between which each side tells how many slots it has taken."""
    for slab in world.slabs:
        slab.limit_bytes = 1
    array = np.random.default_rng(1).integers(0, 256, 500_000, np.uint8)
    for _ in range(4):
        for side in sides:
            side.connection.send(b"both", [array])
            side.connection.send(b"small")
    world.turn_until(lambda: all(len(side.messages) == 8 for side in sides))
    for side in sides:
        assert all(np.array_equal(blocks[0], array) for _, blocks in side.messages if blocks)


def test_what_is_sent_everywhere_is_a_message_twice(world: World, sides: tuple[Side, Side]) -> None:
    one, two = sides
    verbs_of(one)._slots.fill(b"note", EVERYWHERE)
    world.turn_until(lambda: len(two.messages) == 2)
    assert two.bodies == [b"note", b"note"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<H254x", 99), "version 99"),
        (FarEnd(slots=1, slot_bytes=1024, reads=1).pack(), "1 slots of 1024 bytes"),
        (FarEnd(slots=SLOTS, slot_bytes=16, reads=1).pack(), "64 slots of 16 bytes"),
        (FarEnd(slots=SLOTS, slot_bytes=1024, reads=0).pack(), "0 reads"),
    ],
)
def test_an_introduction_that_no_queue_pair_can_have_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        FarEnd.unpack(data)


def test_a_peer_without_a_queue_pair_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerbsQueue, "near_end", lambda self: FarEnd(fault="it lies"))
    with pytest.raises(UnreachableError, match="hung up during the handshake"):
        world.call(world.connecting_transport())
    world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]


def test_a_queue_pair_of_another_kind_of_link_is_refused_at_both_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    near_end = VerbsQueue.near_end
    monkeypatch.setattr(
        VerbsQueue, "near_end", lambda self: FarEnd(**{**vars(near_end(self)), "link": 1})
    )
    with pytest.raises(UnreachableError, match="one end is of InfiniBand"):
        world.call(world.connecting_transport())
    world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]


def test_the_device_that_is_named_is_used() -> None:
    world = World(
        lambda node, slab: VerbsTransport(node, slab, VerbsOptions(device="rxe1")),
        ADDRESS,
    )
    try:
        one, two = world.connect()
        one.connection.send(b"x", [np.full(100_000, 7, np.uint8)])
        world.turn_until(lambda: two.messages)
        assert two.messages[0][1][0].min() == 7
        assert verbs_of(one)._domain.port.device == "rxe1"
        one.connection.close()
    finally:
        world.close()


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    refusal = VerbsTransport(
        Node(secret=b"", incarnation=1, limits=LIMITS),
        Slab(),
        VerbsOptions(device="mlx5_7"),
    ).refusal()
    assert refusal is not None
    assert "no RDMA device 'mlx5_7': rxe0:1" in refusal


LOCKED = """
import os, resource, sys
import numpy as np
from tests.rdma.test_verbs import ADDRESS, make
from tests.transport_contract import World

import pyverbs.addr, pyverbs.cq, pyverbs.device, pyverbs.mr, pyverbs.pd, pyverbs.qp, pyverbs.wr

"".encode("idna")  # whose module another user may not read
os.chmod("/dev/infiniband/uverbs0", 0o666)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]), int(sys.argv[1])))
os.setgid(65534)
os.setuid(65534)
world = World(make, ADDRESS)
try:
    one, two = world.connect()
except Exception as error:
    print(type(error).__name__, error)
else:
    one.connection.send(b"x", [np.full(300_000, 7, np.uint8)])
    world.turn_until(lambda: two.messages)
    print("arrived", two.messages[0][1][0].nbytes, two.messages[0][1][0].min())
    one.connection.close()
world.close()
"""


@pytest.mark.parametrize(
    ("locked_bytes", "expected"),
    [
        (64 << 10, ("UnreachableError", "ulimit -l")),
        # enough for the slots of both ends, and for no segment of a slab: the array goes by them
        (1 << 20, ("arrived 300000 7",)),
    ],
)
def test_too_little_memory_that_may_be_locked_is_told_or_done_without(
    locked_bytes: int, expected: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(locked_bytes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert all(text in done.stdout for text in expected), done.stdout + done.stderr
