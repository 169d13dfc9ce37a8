"""A peer that holds the secret and lies after it: its own connection ends, by name, and it can
neither hold a reactor nor make this process take memory that it has not sent."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from shard import Limits, RemoteProtocolError, Slab, TcpTransport
from shard.memory.ring import HEAD_WORD, TAIL_WORD
from shard.transport.control_channel import GOODBYE, RING
from shard.transport.frame import FRAME_VERSION, HEADER, FrameDecoder, encode_header
from shard.transport.records import DESCRIPTOR, MESSAGE, PREFIX, RETURN, RETURN_FIRST
from shard.transport.spill import LENGTH, SPILLED, SpillReader, SpillWriter
from tests.shard.strangers import Stranger
from tests.transport_contract import LIMITS, Side, World

MIB = 1 << 20
MANY = 20_000  # of what a liar goes on with for ever: who has not given up by then does not


@pytest.fixture
def liar(world: World) -> Iterator[Stranger]:
    made = Stranger(world)
    yield made
    made.victim.connection.close()
    made.victim.messages.clear()


def ended(world: World, side: Side) -> str:
    """How the connection ended: a liar's fault, and the reactor went on turning."""
    world.turn_until(lambda: side.ends)
    assert isinstance(side.ends[0], RemoteProtocolError), side.ends[0]
    return str(side.ends[0])


@pytest.mark.parametrize("length", [1, 7, 9, 15])
def test_a_list_of_returned_leases_that_is_cut_short_ends_the_connection_alone(
    world: World, liar: Stranger, length: int
) -> None:
    liar.ring.try_write(bytes(length), RETURN)
    assert "cut short" in ended(world, liar.victim) or length > 8


@pytest.mark.parametrize("lease", [0, 1, 77, (1 << 64) - 1])
def test_leases_that_were_never_lent_or_come_back_twice_are_named(
    world: World, liar: Stranger, lease: int
) -> None:
    victim = liar.victim.connection
    victim.send(b"lent", [np.zeros(100_000, np.uint8)])
    liar.ring.try_write(lease.to_bytes(8, "little") * 2, RETURN)
    assert f"returned lease {lease}, which it does not hold" in ended(world, liar.victim)


def test_a_lease_that_comes_back_with_a_message_is_looked_at_before_that(
    world: World, liar: Stranger
) -> None:
    victim = liar.victim.connection
    victim.send(b"lent", [np.zeros(100_000, np.uint8)])
    lease = (1).to_bytes(8, "little")
    for body in (b"", b"said"):
        liar.ring.try_write(lease + body, RETURN_FIRST)
    assert "returned lease 1, which it does not hold" in ended(world, liar.victim)
    assert liar.victim.bodies == [b""]


@pytest.mark.parametrize("length", [0, 7])
def test_a_message_without_its_whole_lease_is_cut_short(
    world: World, liar: Stranger, length: int
) -> None:
    liar.ring.try_write(bytes(length), RETURN_FIRST)
    assert "cut short" in ended(world, liar.victim)


def test_a_peer_that_says_goodbye_and_goes_on_writing_holds_nobody(
    world: World, liar: Stranger
) -> None:
    victim = liar.victim
    left = [MANY]

    def write_more(_: bytes) -> None:
        left[0] -= 1
        if left[0] > 0:
            liar.ring.try_write(b"more")

    victim.on_each = write_more
    for _ in range(3):
        liar.ring.try_write(b"before")
    liar.note(GOODBYE)
    world.turn_until(lambda: victim.ends)
    assert victim.bodies[:3] == [b"before"] * 3
    assert len(victim.messages) < 100


def test_a_peer_that_sends_other_notes_for_ever_in_place_of_a_segment_holds_nobody(
    world: World, liar: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = liar.victim
    notes = victim.connection.notes  # type: ignore[attr-defined]
    read, calls = notes.read, [0]

    def flooded() -> int:
        calls[0] += 1
        if calls[0] < MANY:
            liar.note(RING)
        return int(read())

    monkeypatch.setattr(notes, "read", flooded)
    liar.ring.try_write(PREFIX.pack(1, 0) + DESCRIPTOR.pack(100, 0, 1, 5, 0), MESSAGE)
    assert "segment 5, which was never handed over" in ended(world, victim)
    assert calls[0] < MANY


def test_a_peer_that_dribbles_an_array_that_a_record_calls_whole_holds_nobody(
    world: World, liar: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, read, calls = liar.victim, SpillReader.read, [0]

    def dribbled(self: SpillReader) -> bool:
        calls[0] += 1
        writer.write([memoryview(b"x")])
        return read(self)

    monkeypatch.setattr(SpillReader, "read", dribbled)
    writer = SpillWriter(liar.notes)
    assert writer.write([memoryview(LENGTH.pack(MIB))])
    world.turn_until(lambda: calls[0])
    liar.ring.try_write(PREFIX.pack(1, 0) + DESCRIPTOR.pack(MIB, 0, 0, SPILLED, 0), MESSAGE)
    assert "that it never sent" in ended(world, victim)
    assert calls[0] < MANY
    writer.close()


def test_a_ring_whose_head_its_reader_moves_ends_the_connection_at_the_next_message(
    world: World, liar: Stranger
) -> None:
    victim = liar.victim
    liar.incoming_words[HEAD_WORD] = (1 << 64) - 9
    refused = 0
    for _ in range(MANY):
        try:
            victim.connection.send(bytes(100))
        except RemoteProtocolError:
            refused += 1
            break
    assert refused == 1
    assert "broke the ring" in ended(world, victim)


@pytest.mark.parametrize("tail", [1, 1 << 40, (1 << 64) - 1])
def test_a_ring_whose_tail_cannot_be_ends_the_connection(
    world: World, liar: Stranger, tail: int
) -> None:
    liar.outgoing_words[TAIL_WORD] = tail
    assert "broke the ring" in ended(world, liar.victim)


def test_records_of_random_bytes_and_tags_end_a_connection_or_are_messages_and_never_a_turn(
    world: World,
) -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        liar = Stranger(world)
        victim = liar.victim
        for _ in range(20):
            length = int(rng.integers(0, 200))
            if rng.random() < 0.5:
                payload = rng.bytes(length)
            else:  # nearly right
                numbers = [
                    int(rng.choice([0, 1, 5, 100, 1 << 31, (1 << 63) - 1])) for _ in range(3)
                ]
                payload = PREFIX.pack(int(rng.integers(0, 4)), int(rng.integers(0, 90)))
                payload += DESCRIPTOR.pack(*numbers, int(rng.choice([0, 1, SPILLED])), 0) * int(
                    rng.integers(0, 3)
                )
            liar.ring.try_write(payload, int(rng.integers(0, 5)))
        world.turn_until(
            lambda liar=liar: (
                liar.victim.ends or liar.outgoing_words[HEAD_WORD] == liar.ring.bytes_written
            )
        )
        if victim.ends:
            assert isinstance(victim.ends[0], RemoteProtocolError), victim.ends[0]
        victim.connection.close()


@pytest.fixture
def tcp() -> Iterator[World]:
    made = World(TcpTransport, "tcp://127.0.0.1:0")
    yield made
    made.close()


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_announced_and_never_sent_takes_no_memory(tcp: World) -> None:
    slab: Slab = tcp.slabs[0]
    before = rss_bytes()
    announced = encode_header(3, (LIMITS.blocks_bytes_max,), LIMITS) + b"abc" + bytes(10)
    liars = [tcp.connect()[0].connection for _ in range(5)]
    for one in liars:
        one.sock.send(announced)  # type: ignore[attr-defined]
    tcp.turn_until(
        lambda: all(side.connection.traffic().bytes_received > 10 for side in tcp.accepted)
    )
    assert LIMITS.blocks_bytes_max >= 4 * MIB
    assert slab.statistics().reserved_bytes <= 16 * MIB
    assert rss_bytes() - before < 40 * MIB
    for one in liars:
        one.close()


def test_bodies_that_are_announced_and_never_sent_take_no_memory() -> None:
    before = rss_bytes()
    decoders = [FrameDecoder(Limits(), lambda size: np.empty(size, np.uint8)) for _ in range(5)]
    for decoder in decoders:
        target = decoder.destination()
        target[:20] = HEADER.pack(Limits().body_bytes_max, 0, FRAME_VERSION) + bytes(12)
        assert decoder.next_frame(20) is None
        assert decoder.more
    assert rss_bytes() - before < 40 * MIB


def test_a_peer_that_has_sent_large_arrays_is_given_warm_memory_for_the_next(tcp: World) -> None:
    one, two = tcp.connect()
    slab: Slab = tcp.slabs[0]
    one.connection.send(b"", [np.ones(3_000_000, np.uint8)])
    tcp.turn_until(lambda: two.messages)
    assert slab.statistics().reserved_bytes == 0
    two.messages.clear()
    one.connection.send(b"", [np.ones(3_000_000, np.uint8)])
    tcp.turn_until(lambda: two.messages)
    assert slab.statistics().used_bytes >= 3_000_000
    one.connection.close()
