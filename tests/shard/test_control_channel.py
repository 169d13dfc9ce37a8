"""What a peer may send over the socket beside the rings, and what it may make us hold by that."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from shard import DEFAULT_LIMITS, Limits, RemoteProtocolError
from shard.memory.leases import MeetingSocket
from shard.memory.segment import SEAL_FUTURE_WRITE, SIZE_SEALS, Segment
from shard.transport.control_channel import (
    DROPPED,
    FDS_MAX,
    GOODBYE,
    NOTE,
    RING,
    SEGMENT,
    ControlChannel,
)
from shard.transport.mapped import MappedSegments
from tests.shard.strangers import memfd

LENT = SIZE_SEALS | SEAL_FUTURE_WRITE


class Stranger:
    """A peer that sends what it likes, and what our side makes of it."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        ours, self.socket = socket.socketpair()
        self.segments = MappedSegments("a stranger", limits)
        self.notes = ControlChannel(
            MeetingSocket(ours), "a stranger", self.segments.map, self.segments.unmap
        )

    def says(self, data: bytes, fds: list[int] | None = None) -> None:
        """Our side reads it at once."""
        socket.send_fds(self.socket, [data], fds or [])
        self.notes.read()

    def hands_over(self, number: int, size_bytes: int, fd: int) -> None:
        """A segment note; the descriptor is the stranger's and closed."""
        try:
            self.says(NOTE.pack(SEGMENT, 1, 0, number, size_bytes), [fd])
        finally:
            os.close(fd)

    def close(self) -> None:
        self.notes.close()
        self.segments.clear()
        self.socket.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    made = Stranger()
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", [RING, GOODBYE, DROPPED])
@pytest.mark.parametrize("count", [1, FDS_MAX])
def test_descriptors_that_no_note_announces_break_the_protocol_at_once(
    stranger: Stranger, kind: int, count: int
) -> None:
    before = descriptors()
    with pytest.raises(
        RemoteProtocolError, match=f"{count} descriptors came that no note announced"
    ):
        stranger.says(NOTE.pack(kind, 0, 0, 0, 0), [0] * count)
    stranger.notes.close()
    assert descriptors() == before - 1, "all but our end of the socket, which is closed"


def test_a_note_that_never_ends_holds_the_descriptors_of_one_note_at_most(
    stranger: Stranger,
) -> None:
    note = NOTE.pack(SEGMENT, 1, 0, 0, 4096)
    stranger.says(note[:5], [0] * FDS_MAX)
    with pytest.raises(RemoteProtocolError, match=f"{2 * FDS_MAX} descriptors came"):
        stranger.says(note[5:6], [0] * FDS_MAX)


def test_a_note_cut_anywhere_brings_its_segment(stranger: Stranger) -> None:
    note = NOTE.pack(SEGMENT, 1, 0, 0, 4096)
    for cut in range(1, NOTE.size):
        fd = memfd(4096, LENT)
        stranger.says(note[:cut], [fd])
        os.close(fd)
        assert not stranger.segments
        stranger.says(note[cut:])
        assert stranger.segments.pop(0).size_bytes == 4096


def test_a_segment_arrives_as_announced_and_costs_one_descriptor(stranger: Stranger) -> None:
    before = descriptors()
    stranger.hands_over(3, 8192, memfd(8192, LENT))
    assert stranger.segments[3].memory.readonly
    assert descriptors() == before + 1
    stranger.segments.unmap(3)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("announced", "fd", "why"),
    [
        (4096, lambda: memfd(8192, LENT), "segment of 8192 bytes, 4096 were announced"),
        (8192, lambda: memfd(8192, SIZE_SEALS), "could change it under us"),
        (8192, lambda: memfd(8192, SEAL_FUTURE_WRITE), "could change it under us"),
        (3 << 30, lambda: memfd(3 << 30, LENT, sparse=True), "of which 0 are reserved"),
        (
            8192,
            lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR),
            "is no sealed shared-memory segment",
        ),
        (8192, lambda: os.dup(0), "is no shared-memory segment"),
    ],
)
def test_a_segment_that_is_none_is_not_mapped_and_leaves_nothing(
    stranger: Stranger, announced: int, fd: object, why: str
) -> None:
    before = descriptors()
    with pytest.raises(RemoteProtocolError, match=why):
        stranger.hands_over(0, announced, fd())  # type: ignore[operator]
    assert not stranger.segments
    assert descriptors() == before


def test_a_peer_can_make_us_map_no_more_than_the_limits_say_in_size_sum_and_number() -> None:
    limits = Limits(segment_bytes_max=16 << 10, segments_bytes_max=24 << 10, segments_max=3)
    stranger = Stranger(limits)

    def refused(number: int, size_bytes: int) -> None:
        with pytest.raises(RemoteProtocolError, match="segments_bytes_max"):
            stranger.hands_over(number, size_bytes, memfd(size_bytes, LENT))

    refused(0, 20 << 10)
    stranger.hands_over(0, 16 << 10, memfd(16 << 10, LENT))
    refused(1, 12 << 10)
    stranger.hands_over(1, 4096, memfd(4096, LENT))
    stranger.hands_over(2, 4096, memfd(4096, LENT))
    stranger.segments.unmap(0)
    stranger.hands_over(3, 4096, memfd(4096, LENT))
    refused(4, 4096)
    with pytest.raises(RemoteProtocolError, match="segment 3 was handed over twice"):
        stranger.hands_over(3, 4096, memfd(4096, LENT))
    stranger.close()


def test_what_a_slab_hands_over_is_what_a_peer_may_map(stranger: Stranger) -> None:
    segment = Segment.create(1 << 20, lent=True)
    stranger.hands_over(0, segment.size_bytes, segment.read_only_fd())
    segment.memory[7] = 9
    assert stranger.segments[0].memory[7] == 9
    segment.close()
