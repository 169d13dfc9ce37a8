"""The segments of one peer's slab that this process has mapped to read its arrays: bounded in size, sum and number.

A segment is a stranger's until it has been looked at: Segment.attach() asks for its seals, its announced size and its pages.
"""

from __future__ import annotations

import os

from shard.errors import RemoteProtocolError, ShardError
from shard.limits import Limits
from shard.segment import Segment


class MappedSegments(dict[int, Segment]):
    """By their numbers in the peer's slab. Owned by one connection; used in the reactor's thread."""

    def __init__(self, peer: str, limits: Limits) -> None:
        super().__init__()
        self._peer = peer
        self._limits = limits

    def map(self, number: int, fd: int, size_bytes: int) -> None:
        """Map one that the peer handed over; owns the descriptor. Raises RemoteProtocolError for what may not be mapped, and
        ShardError when this process cannot."""
        try:
            self._check(number, size_bytes)
            segment = Segment.attach(fd, writable=False, size_bytes=size_bytes)
        except OSError as error:  # no descriptor for the mapping, or no address space
            raise ShardError(f"segment {number} of {self._peer} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        segment.fd = -1  # the mapping holds one of its own
        self[number] = segment

    def _check(self, number: int, size_bytes: int) -> None:
        limits = self._limits
        if number in self:
            raise RemoteProtocolError(f"segment {number} was handed over twice")
        total = size_bytes + sum(segment.size_bytes for segment in self.values())
        if size_bytes > limits.segment_bytes_max or total > limits.segments_bytes_max or len(self) >= limits.segments_max:
            raise RemoteProtocolError(
                f"segment {number} of {size_bytes} bytes, beside {len(self)} of {total - size_bytes} bytes: at most "
                f"{limits.segment_bytes_max} each (limit segment_bytes_max), {limits.segments_bytes_max} in all "
                f"(segments_bytes_max), and {limits.segments_max} of them (segments_max) are allowed"
            )

    def unmap(self, number: int) -> None:
        """The peer's slab gave it back; arrays on it keep their memory."""
        self.pop(number, None)
