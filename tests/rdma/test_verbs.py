"""What is particular to verbs: a peer that lies, a device that fails, a device that is named."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path

import numpy as np
import pytest

from shard import (
    Node,
    PeerLostError,
    Reactor,
    RemoteProtocolError,
    Slab,
    UnreachableError,
    VerbsOptions,
    control_loop,
)
from shard.transport.neighbour import NeighbourState
from shard.transport.records import MESSAGE, RETURN, pack_descriptor, pack_lease, pack_prefix
from shard.transport.verbs import INTRODUCTIONS_MAX, VerbsListener, VerbsTransport
from shard.transport.verbs_connection import VerbsConnection
from shard.transport.verbs_device import NoVerbs
from shard.transport.verbs_domain import VerbsDomain
from shard.transport.verbs_introduction import FarEnd
from shard.transport.verbs_queue import SLOTS, VerbsQueue
from shard.transport.verbs_records import EVERYWHERE, HEADER, PART, REGION, pack_region
from tests.rdma.inside import verbs_of
from tests.rdma.neighbours import NOBODYS, lie_as, searching
from tests.rdma.port import chosen_port
from tests.transport_contract import LIMITS, PATIENCE_S, Side, World

ADDRESS = "verbs://127.0.0.1:0"


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
    connection._slots.fill(pack_region(0, 1 << 40, 1 << 20, [12345]), REGION)
    connection._slots.fill(pack_prefix(1, 0) + pack_descriptor(5000, 0, 1, 0, 0), MESSAGE)


def tell_of_a_region_twice(connection: VerbsConnection) -> None:
    for _ in range(2):
        connection._slots.fill(pack_region(7, 0, 1, [1]), REGION)


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
    "address": (
        lies(pack_region(7, (1 << 64) - 4096, 1 << 20, [1]), REGION),
        RemoteProtocolError,
        "passes the last address of 64 bits",
    ),
    "key": (lies(struct.pack("<4Q", 1, 0, 1, 1 << 40), REGION), RemoteProtocolError, "32 bits"),
    # whichever end hears of it first: its device refuses that too
    "memory": (lend_memory_that_is_not_registered, PeerLostError, "was lost"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_peer_that_lies_is_hung_up_on_by_name(
    world: World, sides: tuple[Side, Side], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says why, once, since the liar only hears that its line has ended."""
    lie, error, text = LIES[name]
    liar, other = sides
    peer = verbs_of(other).peer
    lie(verbs_of(liar))
    with caplog.at_level(logging.WARNING, "shard"):
        world.turn_until(lambda: other.ends and liar.ends)
    assert "Traceback" not in caplog.text
    told = [line for line in caplog.messages if " ends: rxe0:1: " in line]
    if error is RemoteProtocolError:
        (line,) = told
        assert f"the connection to {peer} ends" in line and text in line
    else:
        assert told
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


def test_of_many_that_come_at_once_a_few_are_begun_at_a_time_and_all_get_in(world: World) -> None:
    listener = world.listener
    assert isinstance(listener, VerbsListener)
    transport = world.connecting_transport()
    coming = [
        control_loop().spawn(transport.connect(listener.address, PATIENCE_S))
        for _ in range(2 * INTRODUCTIONS_MAX)
    ]
    begun = 0

    def all_are_in() -> bool:
        nonlocal begun
        begun = max(begun, len(listener.introductions))
        return all(one.done() for one in coming) and len(world.accepted) == len(coming)

    world.turn_until(all_are_in)
    assert 1 <= begun <= INTRODUCTIONS_MAX
    for number, one in enumerate(coming):
        one.result().send(b"%d" % number)
    world.turn_until(lambda: all(side.messages for side in world.accepted))
    assert {body for side in world.accepted for body in side.bodies} == {
        b"%d" % number for number in range(len(coming))
    }
    for one in coming:
        one.result().close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<H254x", 99), "version 99"),
        (FarEnd(slots=1, slot_bytes=1024, reads=1).pack(), "1 slots of 1024 bytes"),
        (FarEnd(slots=SLOTS, slot_bytes=16, reads=1).pack(), "64 slots of 16 bytes"),
        (FarEnd(slots=SLOTS, slot_bytes=1024, reads=0).pack(), "0 reads"),
        # at 0 the kernel of soft RoCE panics, and it is any peer that says it
        (FarEnd(slots=SLOTS, slot_bytes=1024, reads=1, mtu=0).pack(), "MTU 0, 1 to 5"),
        (FarEnd(slots=SLOTS, slot_bytes=1024, reads=1, mtu=6).pack(), "MTU 6, 1 to 5"),
    ],
)
def test_an_introduction_that_no_queue_pair_can_have_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        FarEnd.unpack(data)


def test_a_peer_without_a_queue_pair_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerbsQueue, "near_end", lambda self: FarEnd(fault="it lies"))
    with pytest.raises(UnreachableError, match="hung up before its queue pair was connected"):
        world.call(world.connecting_transport())
    world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]


class OfAnotherRelease(FarEnd):
    def pack(self) -> bytes:
        return struct.pack("<H254x", 99)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (lambda end: OfAnotherRelease(), "in version 99, 4 expected: install the same release"),
        (lambda end: replace(end, mtu=0), "a queue pair of MTU 0, 1 to 5"),
    ],
)
def test_a_connector_whose_introduction_is_refused_is_told_why(
    world: World, monkeypatch: pytest.MonkeyPatch, lie: Callable[[FarEnd], FarEnd], text: str
) -> None:
    lie_as(monkeypatch, VerbsQueue, "connector", lie)
    with pytest.raises(UnreachableError, match=f"has no queue pair for us: .*{text}"):
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


@pytest.mark.parametrize(
    ("liar", "text"),
    [
        ("connector", "has no queue pair for us: 10.77.1.99 answers no ARP at dummy1"),
        ("acceptor", "cannot be reached by RDMA: 10.77.1.99 answers no ARP at dummy1"),
    ],
)
def test_a_gid_that_does_not_resolve_is_refused_by_name_before_the_device_is_asked(
    monkeypatch: pytest.MonkeyPatch, liar: str, text: str
) -> None:
    lie_as(monkeypatch, VerbsQueue, liar, lambda end: replace(end, gid=NOBODYS))
    with searching("dummy1"), contextlib.closing(world_on("rxe1")) as world:
        with pytest.raises(UnreachableError, match=text):
            world.call(world.connecting_transport())
        world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]


def world_on(device: str, gid_index: int | None = None) -> World:
    options = VerbsOptions(device=device, gid_index=gid_index)
    return World(lambda node, slab: VerbsTransport(node, slab, options), ADDRESS)


def test_hosts_of_a_device_that_needs_no_arp_and_our_own_are_not_looked_for() -> None:
    domain = VerbsDomain(Slab(), VerbsOptions(), chosen_port("rxe1"))
    for address in ("10.77.1.99", "10.77.1.1"):
        far = FarEnd(link=domain.link, gid=IPv6Address(f"::ffff:{address}").packed)
        search = domain.search(far)
        assert search is not None and search.state() is NeighbourState.KNOWN
        search.close()
    assert domain.search(replace(far, link=1)) is None  # of InfiniBand


@pytest.mark.parametrize("gid_index", [None, 0])
def test_the_device_that_is_named_is_used(gid_index: int | None) -> None:
    """By the best of its GIDs, or by the one that is named: 0 is link-local."""
    world = world_on("rxe1", gid_index)
    try:
        one, two = world.connect()
        one.connection.send(b"x", [np.full(100_000, 7, np.uint8)])
        world.turn_until(lambda: two.messages)
        assert two.messages[0][1][0].min() == 7
        assert [rail.port for rail in verbs_of(one).rails()] == ["rxe1:1"]
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


@pytest.mark.parametrize("device", [None, "rxe0", " all "])
def test_a_gid_that_a_port_has_not_is_refused_before_anything_connects(device: str | None) -> None:
    transport = VerbsTransport(
        Node(secret=b"", incarnation=1, limits=LIMITS),
        Slab(),
        VerbsOptions(device=device, gid_index=500),
    )
    text = r"row 500 of its table of GIDs is empty, which \[transport\] verbs_gid_index names"
    assert re.search(text, transport.refusal() or "")
    with contextlib.closing(Reactor(time.monotonic)) as reactor, pytest.raises(NoVerbs, match=text):
        transport.listen(ADDRESS, reactor, lambda connection: None)


@pytest.mark.parametrize("slab_bytes", [1 << 30, 1])
def test_what_waits_when_this_side_closes_is_read_by_a_peer_that_reads(
    world: World, slab_bytes: int
) -> None:
    """Without room in the slab arrays leave in parts, and the first of them has begun to."""
    world.calling_slab.limit_bytes = slab_bytes
    connection = world.call(world.connecting_transport())
    assert isinstance(connection, VerbsConnection)
    connection.flush_s = connection.flush_s_max = PATIENCE_S  # of an emulated core
    reactor = Reactor(time.monotonic)  # never turned: what has no slot yet waits for close()
    connection.attach(reactor)
    world.turn_until(lambda: world.accepted)
    (side,) = world.accepted
    array = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    bodies = [b"%d" % number for number in range(3 * SLOTS)]
    bodies[SLOTS] = bytes(50_000)  # of which a copy is lent
    waiting, unread = [], []

    def send_and_close() -> None:
        for number, body in enumerate(bodies):
            connection.send(body, [array] if number % 20 == 19 else [])
        waiting.append(connection.outbox_messages)
        connection.close()
        unread.append(world.calling_slab.statistics().leases)

    thread = threading.Thread(target=send_and_close)
    thread.start()
    world.turn_until(lambda: side.ends)
    thread.join()
    assert waiting[0] > SLOTS
    assert not connection.unsent
    assert side.bodies == bodies
    assert all(np.array_equal(block, array) for _, blocks in side.messages for block in blocks)
    assert sum(len(blocks) for _, blocks in side.messages) == len(bodies) // 20
    assert not unread[0], "the process may end now"
    reactor.close()


def test_who_closes_does_not_wait_long_for_a_peer_that_does_not_read_its_arrays(
    world: World, sides: tuple[Side, Side]
) -> None:
    one, two = sides
    one.connection.send(b"", [np.zeros(1 << 20, np.uint8)])
    one.connection.close()  # in the thread that would turn the peer
    assert world.calling_slab.statistics().leases
    world.turn_until(lambda: two.ends)
    assert len(two.messages) == 1
    world.turn_until(lambda: not world.calling_slab.statistics().leases)


def drop_all_packets() -> None:
    """From now on those that come for a connected tcp socket of this process, as from a host that
    is gone: by a filter of the kernel's, which takes 0 bytes of each.
    """
    take_nothing = struct.pack("HBBI", 6, 0, 0, 0)  # BPF_RET
    code = ctypes.create_string_buffer(take_nothing)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # one is the folder's own, others are not connected
            if entry.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    if sock.family == socket.AF_INET and sock.getpeername():
                        sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def unacknowledged(side: Side) -> int:
    """Segments of the socket over which both met."""
    sock = verbs_of(side)._line.socket
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    return int(struct.unpack_from("=I", told, 24)[0])  # tcpi_unacked


@pytest.mark.parametrize("has_sent", [False, True])
def test_an_idle_peer_whose_host_vanishes_is_lost_by_name(has_sent: bool) -> None:
    """No packet says so, and no work request is under way. `has_sent`: the socket holds bytes that
    no kernel acknowledges; else it is asked by keepalive.
    """

    def hasty(node: Node, slab: Slab) -> VerbsTransport:
        return VerbsTransport(replace(node, limits=replace(LIMITS, peer_silent_s=1.0)), slab)

    with contextlib.closing(World(hasty, ADDRESS)) as world:
        sides = world.connect()
        sides[0].connection.send(b"x")
        world.turn_until(lambda: sides[1].messages)
        if not has_sent:  # what the two said when they met is acknowledged some 40 ms later
            world.turn_until(lambda: not any(unacknowledged(side) for side in sides))
        drop_all_packets()
        if has_sent:
            for side in sides:
                verbs_of(side)._line.socket.send(b"x")
        world.turn_until(lambda: all(side.ends for side in sides))
        for side in sides:
            assert isinstance(side.ends[0], PeerLostError)
            assert "it answered nothing for 1 s (limits.peer_silent_s)" in str(side.ends[0])


@pytest.mark.parametrize(
    ("arrays_max", "bytes_max"),
    [(256, 1 << 40), pytest.param(1 << 40, 256 * 5000, marks=pytest.mark.slow)],
)
def test_a_peer_with_too_many_arrays_that_wait_has_to_wait_and_both_may_do_it_to_each_other(
    world: World, sides: tuple[Side, Side], arrays_max: int, bytes_max: int
) -> None:
    count, each = 200, 8
    for side, slab in zip(sides, reversed(world.slabs), strict=True):
        arrivals = verbs_of(side)._arrivals
        arrivals.arrays_waiting_max, arrivals.bytes_waiting_max = arrays_max, bytes_max
        array = slab.empty((5000,), np.uint8)
        array[:] = 7
        for number in range(count):
            side.connection.send(b"%d" % number, [array] * each)
    most = 0

    def have_come() -> bool:
        nonlocal most
        for side, slab in zip(sides, reversed(world.slabs), strict=True):
            most = max(most, slab.leases_out - each * side.connection.outbox_messages)
        return all(len(side.messages) == count for side in sides)

    world.turn_until(have_come)
    assert arrays_max < most or bytes_max < most * 5000, "the bound was reached"
    assert most < 1.5 * (256 + each * SLOTS), "and, as reads are slower, all would have waited"
    for side in sides:
        assert side.bodies == [b"%d" % number for number in range(count)]
        assert all(block.min() == 7 == block.max() for block in side.messages[-1][1])
