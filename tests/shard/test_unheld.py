"""Arrays that the receiving process cannot map, or has no memory for: copied, or told to whoever
reads the message.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import RemoteProtocolError, ShardError, ShmFull, Slab, TcpTransport
from shard.group.payload import decode, encode
from shard.memory.segment import Segment
from shard.memory.unheld import SINK, Unheld, no_memory
from shard.transport.control_channel import SEGMENT
from shard.transport.frame import FrameDecoder, encode_header
from shard.transport.records import DESCRIPTOR, MESSAGE, PREFIX
from shard.transport.spill import Spilled, SpillReader
from tests.shard.small_memory import little_address_space, no_descriptors
from tests.shard.strangers import Stranger
from tests.transport_contract import LIMITS, Side, World

SEGMENT_BYTES = 8 << 20  # of the first of a slab
LITTLE_BYTES = 6 << 20  # address space for what is small, and for no segment


def no_memory_for(nbytes_too_many: int) -> Callable[[int], NDArray[np.uint8]]:
    def allocate(nbytes: int) -> NDArray[np.uint8]:
        if nbytes == nbytes_too_many:
            raise MemoryError(no_memory(nbytes))
        return np.empty(nbytes, np.uint8)

    return allocate


def is_unheld(side: Side) -> list[Any]:
    """What comes from now on, as (body, first bytes of the blocks) or (body, error)."""
    seen: list[Any] = []

    def take(body: memoryview, blocks: Any = ()) -> None:
        try:
            seen.append((bytes(body), [int(block[0]) for block in blocks]))
        except MemoryError as error:
            seen.append((bytes(body), str(error)))

    side.connection.on_message = take
    return seen


def test_arrays_of_a_segment_that_cannot_be_mapped_are_copied_and_lent_no_longer(
    world: World, sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = sides
    slab = world.calling_slab
    lent = slab.empty(100_000, np.uint8)
    lent[:] = 3
    with little_address_space(LITTLE_BYTES):
        for number in range(3):
            one.connection.send(b"%d" % number, [np.full(200_000, number, np.uint8), lent])
        world.turn_until(lambda: len(two.messages) == 3)
    for number, (body, blocks) in enumerate(two.messages):
        assert body == b"%d" % number
        assert (blocks[0] == number).all()
        assert (blocks[1] == 3).all()
        assert not blocks[0].flags.writeable
    world.turn_until(lambda: not slab.leases())
    assert [
        record.message for record in caplog.records if "cannot be mapped" in record.message
    ] == [next(record.message for record in caplog.records)], "once"
    assert two.connection.traffic().arrays_spilled == 6
    assert two.connection.leases_held == 0  # type: ignore[attr-defined]
    one.connection.send(b"mapped", [lent])  # there is address space again
    world.turn_until(lambda: len(two.messages) == 4)
    lent[:] = 9
    assert (two.messages[-1][1][0] == 9).all(), "the very memory"
    assert not one.ends + two.ends


def test_an_array_that_passes_a_segment_which_could_not_be_mapped_breaks_the_protocol(
    world: World,
) -> None:
    liar = Stranger(world)
    segment = Segment.create(SEGMENT_BYTES, lent=True)
    liar.notes.hand_over(SEGMENT, 0, [segment.fd], SEGMENT_BYTES)
    liar.ring.try_write(PREFIX.pack(1, 0) + DESCRIPTOR.pack(1, SEGMENT_BYTES, 99, 0, 0), MESSAGE)
    with little_address_space(LITTLE_BYTES):
        world.turn_until(lambda: liar.victim.ends)
    assert isinstance(liar.victim.ends[0], RemoteProtocolError)
    assert "passes its segment" in str(liar.victim.ends[0])
    segment.close()


def test_what_there_is_no_memory_for_is_told_with_its_own_message_and_gives_leases_back(
    world: World, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sides
    seen = is_unheld(two)
    slab = world.calling_slab
    slab.reserve(1 << 20)
    monkeypatch.setattr("shard.transport.mapped.empty_block", no_memory_for(200_000))
    with little_address_space(LITTLE_BYTES):
        one.connection.send(b"before", [np.full(100_000, 1, np.uint8)])
        one.connection.send(
            b"too much", [np.full(size, 2, np.uint8) for size in (100_000, 200_000, 300_000, 10)]
        )
        one.connection.send(b"after", [np.full(100_000, 3, np.uint8)])
        world.turn_until(lambda: len(seen) == 3)
    assert seen == [(b"before", [1]), (b"too much", no_memory(200_000)), (b"after", [3])]
    world.turn_until(lambda: not slab.leases())
    assert not one.ends + two.ends


@pytest.mark.parametrize("size", [200_000, len(SINK), 3 * len(SINK) + 1])
def test_an_array_that_finds_no_memory_is_read_off_the_socket_and_what_follows_is_whole(
    size: int,
) -> None:
    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    reader = SpillReader(ours.detach(), "the peer", LIMITS, no_memory_for(size))
    sizes = (100_000, size, 50_000)
    spilled = Spilled([np.full(nbytes, 2, np.uint8) for nbytes in sizes])
    rest = b"".join(spilled.parts)
    found: list[int | str] = []
    while rest or len(found) < len(sizes):
        with contextlib.suppress(BlockingIOError):
            rest = rest[theirs.send(rest) :]
        while reader.read():
            pass
        with contextlib.suppress(RemoteProtocolError):  # it has not all been sent yet
            try:
                found.append(int(reader.take(sizes[len(found)]).sum()) // 2)
            except MemoryError as error:
                found.append(str(error))
    assert found == [100_000, no_memory(size), 50_000]
    theirs.close()
    reader.close()


def test_a_sender_without_memory_for_the_detour_is_told_shm_full_and_goes_on(
    world: World, sides: tuple[Side, Side]
) -> None:
    one, two = sides

    class Hungry(np.ndarray[Any, Any]):
        def copy(self, *_: Any, **__: Any) -> Any:
            raise MemoryError

    world.calling_slab.limit_bytes = 4096
    with pytest.raises(
        ShmFull,
        match=r"no memory for 100000 bytes in this process's heap either.*does not fit a slab",
    ):
        one.connection.send(b"", [np.zeros(100_000, np.uint8).view(Hungry)])
    one.connection.send(b"after", [np.zeros(100_000, np.uint8)])
    world.turn_until(lambda: two.messages)
    assert two.bodies == [b"after"]


def test_a_sender_without_descriptors_for_the_detour_names_them(
    world: World, sides: tuple[Side, Side]
) -> None:
    one, two = sides
    slab = world.calling_slab
    limit_bytes, slab.limit_bytes = slab.limit_bytes, 4096
    with (
        no_descriptors(),
        pytest.raises(
            ShardError, match="no socket to send it over: Too many open files; raise `ulimit -n`"
        ),
    ):
        one.connection.send(b"", [np.zeros(100_000, np.uint8)])
    slab.limit_bytes = limit_bytes
    array = slab.empty(100_000, np.uint8)
    with (
        no_descriptors(),
        pytest.raises(
            ShardError,
            match="a segment cannot be handed over: Too many open files; raise `ulimit -n`",
        ),
    ):
        one.connection.send(b"", [array])
    one.connection.send(b"after", [np.zeros(100_000, np.uint8)])
    world.turn_until(lambda: two.messages)
    assert two.bodies == [b"after"]
    assert not one.ends + two.ends


def test_over_tcp_too_the_message_after_one_that_finds_no_memory_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(TcpTransport, "tcp://127.0.0.1:0")
    try:
        one, two = world.connect()
        seen = is_unheld(two)
        world.slabs[0].limit_bytes = 4096  # of the side that receives
        monkeypatch.setattr(np, "empty", _only_up_to(1 << 20, np.empty))
        one.connection.send(b"too much", [np.ones(3_000_000, np.uint8)])
        one.connection.send(b"after", [np.full(300_000, 3, np.uint8)])
        world.turn_until(lambda: len(seen) == 2)
        assert sorted(seen) == [(b"after", [3]), (b"too much", no_memory(3_000_000))]
        assert not one.ends + two.ends
        one.connection.close()
    finally:
        monkeypatch.undo()
        world.close()


def _only_up_to(nbytes_max: int, empty: Callable[..., Any]) -> Callable[..., Any]:
    def allocate(shape: Any, *args: Any) -> Any:
        if isinstance(shape, int) and shape > nbytes_max:
            raise MemoryError
        return empty(shape, *args)

    return allocate


@pytest.mark.parametrize("cut", [1, 7, 1000, 1 << 20])
def test_a_frame_whose_blocks_find_no_memory_is_delivered_without_them_however_it_is_cut(
    cut: int,
) -> None:
    sizes = [10, 200_000, 3 * len(SINK), 0]
    wire = b""
    for body, blocks in ((b"first", sizes), (b"second", [20])):
        wire += (
            encode_header(len(body), blocks, LIMITS)
            + body
            + b"".join(bytes([len(body)]) * size for size in blocks)
        )
    decoder = FrameDecoder(LIMITS, no_memory_for(200_000))
    frames: list[tuple[bytes, Any]] = []
    left = memoryview(wire)
    while left:
        target = decoder.destination()
        count = min(cut, len(target), len(left))
        target[:count] = left[:count]
        left = left[count:]
        frame = decoder.next_frame(count)
        while frame is not None:
            frames.append((bytes(frame[0]), frame[1]))
            frame = decoder.next_frame() if decoder.more else None
    (first, unheld), (second, (block,)) = frames
    assert (first, second, bytes(block)) == (b"first", b"second", bytes([6]) * 20)
    assert isinstance(unheld, Unheld)
    assert len(unheld) == 4
    for look in (lambda: unheld[0], lambda: list(unheld), lambda: unheld[:-1]):
        with pytest.raises(MemoryError, match="an array of 200000 bytes"):
            look()


def test_a_body_that_finds_no_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FrameDecoder(LIMITS, no_memory_for(0))
    body_bytes = LIMITS.body_bytes_max
    header = encode_header(body_bytes, (1,), LIMITS)
    target = decoder.destination()
    target[: len(header)] = header

    monkeypatch.setattr(np, "empty", _only_up_to(body_bytes - 1, np.empty))
    with pytest.raises(ShardError, match=f"no memory for a message body of {body_bytes} bytes"):
        decoder.next_frame(len(header))


@pytest.mark.parametrize(
    "array", [np.arange(200_000, dtype=np.int64)[::2], np.arange(100_000.0)[::-1]]
)
def test_a_strided_array_that_finds_no_room_in_the_slab_is_copied_to_the_heap(
    array: NDArray[Any],
) -> None:
    slab = Slab(limit_bytes=64 << 10)
    for value in ((array,), ([array],)):
        form, payload, blocks = encode(value, slab)
        (back,) = decode(form, payload, [np.asarray(block).view(np.uint8) for block in blocks])
        assert (np.asarray(back).reshape(-1) == array).all()
    slab.close()
