"""Frames on a stream: whatever the cuts, the same frames; whatever the bytes, no harm."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shard import Limits, LocalProtocolError, RemoteProtocolError
from shard.transport.frame import (
    FRAME_VERSION,
    FRONT_BYTES_BULK,
    HEADER,
    HEADER_BYTES,
    PLAIN,
    SMALL_HEADERS,
    STAGING_BYTES,
    FrameDecoder,
    encode_header,
)

LIMITS = Limits(body_bytes_max=1 << 20, blocks_bytes_max=1 << 20, blocks_max=16)
Message = tuple[bytes, list[bytes]]

messages = st.lists(
    st.tuples(st.binary(max_size=300), st.lists(st.binary(max_size=2000), max_size=5)),
    max_size=8,
)
large = st.tuples(
    st.integers(0, STAGING_BYTES + 5000), st.lists(st.integers(0, 100_000), max_size=3)
)


def wire_of(message: Message) -> bytes:
    body, blocks = message
    return (
        encode_header(len(body), [len(block) for block in blocks], LIMITS) + body + b"".join(blocks)
    )


def allocate(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def decode(wire: bytes, cuts: list[int], limits: Limits = LIMITS) -> list[Message]:
    """What comes out when the stream arrives in pieces of such lengths, over and over."""
    decoder = FrameDecoder(limits, allocate)
    out: list[Message] = []
    at = number = 0
    while at < len(wire):
        destination = decoder.destination()
        assert len(destination) > 0
        count = min(
            len(destination), len(wire) - at, cuts[number % len(cuts)] if cuts else len(wire)
        )
        destination[:count] = wire[at : at + count]
        frame = decoder.next_frame(count)
        at += count
        number += 1
        while frame is not None:
            body, blocks = frame
            out.append((bytes(body), [block.tobytes() for block in blocks]))
            frame = decoder.next_frame()
    return out


@given(messages, st.lists(st.integers(1, 700), max_size=20))
def test_a_stream_cut_anywhere_gives_the_same_frames(sent: list[Message], cuts: list[int]) -> None:
    wire = b"".join(wire_of(message) for message in sent)
    assert decode(wire, cuts) == sent


@given(st.lists(large, min_size=1, max_size=3), st.lists(st.integers(1, 200_000), max_size=10))
@settings(max_examples=30, deadline=None)
def test_large_bodies_and_blocks_come_through_in_any_pieces(
    sizes: list[tuple[int, list[int]]], cuts: list[int]
) -> None:
    random = np.random.default_rng(len(cuts))
    sent = [
        (random.bytes(body), [random.bytes(block) for block in blocks]) for body, blocks in sizes
    ]
    wire = b"".join(wire_of(message) for message in sent)
    assert decode(wire, [max(cut, len(wire) // 500) for cut in cuts]) == sent


@pytest.mark.parametrize(
    "message", [(b"body", []), (b"body", [b"block", b""]), (b"", []), (b"", [b"x" * 20])]
)
def test_a_frame_cut_at_every_byte_arrives_once_and_whole(message: Message) -> None:
    wire = wire_of(message)
    for cut in range(1, len(wire)):
        assert decode(wire, [cut, len(wire)]) == [message]
    assert decode(wire, [1]) == [message]


def test_a_block_of_a_large_frame_is_received_in_place_but_for_what_came_with_the_header() -> None:
    decoder = FrameDecoder(LIMITS, allocate, is_bulk=True)
    block = np.arange(500_000, dtype=np.uint32).view(np.uint8)[: 1 << 20]
    wire = wire_of((b"body", [block.tobytes()]))
    for _ in range(2):
        first = decoder.destination()
        assert len(first) == FRONT_BYTES_BULK
        first[:] = wire[: len(first)]
        assert decoder.next_frame(len(first)) is None
        rest = decoder.destination()
        assert len(first) + len(rest) == len(wire)
        rest[:] = wire[len(first) :]
        frame = decoder.next_frame(len(rest))
        assert frame is not None
        assert frame[0] == b"body"
        assert frame[1][0].tobytes() == block.tobytes()


def test_where_frames_are_large_a_header_and_a_body_beyond_the_first_bytes_come_through() -> None:
    message = (bytes(range(256)) * 8, [b"x" * 1000] * 12)
    wire = wire_of(message)
    decoder = FrameDecoder(LIMITS, allocate, is_bulk=True)
    at, frame = 0, None
    while at < len(wire):
        assert frame is None
        destination = decoder.destination()
        count = min(len(destination), len(wire) - at)
        destination[:count] = wire[at : at + count]
        frame = decoder.next_frame(count)
        at += count
    assert frame is not None
    assert (bytes(frame[0]), [each.tobytes() for each in frame[1]]) == message


def test_a_frame_that_is_not_whole_gives_nothing() -> None:
    wire = wire_of((b"body", [b"block"]))
    for length in range(len(wire)):
        assert decode(wire[:length], []) == []


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), max_size=5))
@settings(max_examples=500)
def test_any_bytes_are_frames_or_a_named_error(wire: bytes, cuts: list[int]) -> None:
    try:
        decode(wire, cuts)
    except RemoteProtocolError:
        return


@given(messages.filter(bool), st.integers(0, 1 << 16), st.integers(1, 255))
@settings(max_examples=300)
def test_a_stream_with_a_byte_changed_is_frames_or_a_named_error(
    sent: list[Message], position: int, change: int
) -> None:
    wire = bytearray(b"".join(wire_of(message) for message in sent))
    wire[position % len(wire)] ^= change
    try:
        decode(bytes(wire), [97])
    except RemoteProtocolError:
        return


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (
            HEADER.pack(LIMITS.body_bytes_max + 1, 0, 1),
            "frame body of 1048577 bytes, at most 1048576 allowed",
        ),
        (HEADER.pack(0, LIMITS.blocks_max + 1, 1), "frame of 17 blocks, at most 16 allowed"),
        (
            HEADER.pack(0, 1, 1) + struct.pack("<Q", 1 << 60),
            "bytes of arrays, at most 1048576 allowed",
        ),
        (
            HEADER.pack(0, 2, 1) + struct.pack("<QQ", 1 << 63, 1 << 63),
            "bytes of arrays, at most 1048576 allowed",
        ),
        (HEADER.pack(0, 0, 2), "frame version 2, 1 expected"),
    ],
)
def test_what_is_over_a_limit_is_refused_before_anything_is_allocated_for_it(
    header: bytes, text: str
) -> None:
    decoder = FrameDecoder(LIMITS, _never)
    decoder.destination()[: len(header)] = header
    with pytest.raises(RemoteProtocolError, match=text):
        decoder.next_frame(len(header))


def _never(size: int) -> NDArray[np.uint8]:
    raise AssertionError(f"{size} bytes were to be allocated")


def test_the_limit_itself_is_allowed() -> None:
    message = (bytes(LIMITS.body_bytes_max), [bytes(LIMITS.blocks_bytes_max // 16)] * 16)
    assert decode(wire_of(message), [70_000]) == [message]


def test_the_sender_refuses_what_the_receiver_would() -> None:
    for sizes in (
        (LIMITS.body_bytes_max + 1, []),
        (0, [1] * 17),
        (0, [LIMITS.blocks_bytes_max, 1]),
    ):
        with pytest.raises(LocalProtocolError, match="allowed"):
            encode_header(*sizes, LIMITS)


def test_received_blocks_are_not_kept_by_the_decoder() -> None:
    decoder = FrameDecoder(LIMITS, allocate)
    wire = wire_of((b"", [bytes(100)]))
    decoder.destination()[: len(wire)] = wire
    assert decoder.next_frame(len(wire)) is not None
    assert decoder._blocks == []


FRAME = HEADER.pack(4, 0, 1) + b"body"


@pytest.mark.parametrize(
    "wire",
    [
        *(FRAME[:cut] for cut in range(1, len(FRAME))),
        FRAME + b"x",
        FRAME + FRAME,
        HEADER.pack(4, 0, 2) + b"body",
        HEADER.pack(0, 1, 1) + struct.pack("<Q", 0),
        # with the zeros that stood there before: the word that 7 bytes would have
        b"\xff" * 6 + b"\0",
    ],
)
def test_only_one_whole_frame_without_blocks_goes_the_short_way(wire: bytes) -> None:
    decoder = FrameDecoder(LIMITS, allocate)
    # the second stands where the first was
    for received, is_whole in ((FRAME, True), (wire, False)):
        decoder.front[: len(received)] = received
        assert (
            len(received) >= HEADER_BYTES and decoder.first_word[0] == PLAIN + len(received)
        ) == is_whole


def test_the_short_way_has_no_room_for_what_is_over_the_limit() -> None:
    decoder = FrameDecoder(Limits(body_bytes_max=100), allocate)
    assert len(decoder.front) == HEADER_BYTES + 100


@given(messages, messages, st.lists(st.integers(1, 700), min_size=1, max_size=20))
def test_the_decoder_has_more_exactly_while_bytes_wait_in_it(
    sent: list[Message], cut: list[Message], cuts: list[int]
) -> None:
    wire = b"".join(wire_of(message) for message in sent + cut)
    ends = {
        len(b"".join(wire_of(message) for message in (sent + cut)[:number]))
        for number in range(len(sent + cut) + 1)
    }
    decoder = FrameDecoder(LIMITS, allocate)
    at = number = 0
    while at < len(wire):
        destination = decoder.destination()
        count = min(len(destination), len(wire) - at, cuts[number % len(cuts)])
        destination[:count] = wire[at : at + count]
        at += count
        number += 1
        frame = decoder.next_frame(count)
        while frame is not None and decoder.more:
            frame = decoder.next_frame()
        assert decoder.more == (at not in ends)


def test_headers_that_are_ready_made_are_those_that_would_be_packed() -> None:
    assert [encode_header(size, [], LIMITS) for size in range(len(SMALL_HEADERS))] == SMALL_HEADERS


def test_a_frame_of_another_version_is_refused_whatever_follows() -> None:
    decoder = FrameDecoder(LIMITS, allocate)
    header = HEADER.pack(1, 0, FRAME_VERSION + 1)
    decoder.destination()[: len(header)] = header
    with pytest.raises(RemoteProtocolError, match=f"version {FRAME_VERSION + 1}, {FRAME_VERSION} "):
        decoder.next_frame(len(header))
