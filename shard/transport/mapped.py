"""The segments of one peer's slab that this process has mapped to read its arrays: bounded in size,
sum and number.

A segment is a stranger's until it has been looked at: Segment.attach() asks for its seals, its
announced size and its pages.

One that cannot be mapped, for want of address space (RLIMIT_AS), mappings (vm.max_map_count) or
descriptors, is no fault of the peer, and its arrays are not lost: their bytes are read from the
segment's descriptor, each array into memory of its own, and the lease goes back at once. Mapping is
tried again with each of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shard.errors import RemoteProtocolError
from shard.memory.limits import Limits
from shard.memory.segment import Segment
from shard.memory.unheld import empty_block

# A segment's note is in the socket before the record that refers to it: so many reads empty any
# socket buffer, and a peer that goes on sending other notes keeps nobody.
NOTE_READS_MAX = 1024

logger = logging.getLogger("shard")


class MappedSegments(dict[int, Segment]):
    """By their numbers in the peer's slab. Owned by one connection;
    used in the reactor's thread.
    """

    def __init__(self, peer: str, limits: Limits) -> None:
        super().__init__()
        self._peer = peer
        self._limits = limits
        # descriptor and size of those that could not be mapped
        self._unmapped: dict[int, tuple[int, int]] = {}
        self.arrays_copied = 0  # out of those

    def map(self, number: int, fd: int, size_bytes: int) -> None:
        """Map one that the peer handed over, or keep its descriptor where that is not possible;
        owns the descriptor. Raises RemoteProtocolError for what may not be mapped."""
        try:
            self._check(number, size_bytes)
            self._attach(number, fd, size_bytes)
        except OSError as error:
            if not self._unmapped and not self.arrays_copied:
                logger.warning(
                    "a segment of %s with %.1f MiB cannot be mapped (%s): its arrays, "
                    "and those of others like it, are copied; "
                    "see `ulimit -v` (RLIMIT_AS) and `ulimit -n`",
                    self._peer,
                    size_bytes / (1 << 20),
                    error.strerror,
                )
            self._unmapped[number] = fd, size_bytes
        except BaseException:
            os.close(fd)
            raise
        else:
            os.close(fd)

    def _attach(self, number: int, fd: int, size_bytes: int) -> None:
        segment = Segment.attach(fd, writable=False, size_bytes=size_bytes)
        segment.fd = -1  # the mapping holds one of its own
        self[number] = segment

    def _check(self, number: int, size_bytes: int) -> None:
        limits = self._limits
        if number in self or number in self._unmapped:
            raise RemoteProtocolError(f"segment {number} was handed over twice")
        sizes = [segment.size_bytes for segment in self.values()] + [
            size for _, size in self._unmapped.values()
        ]
        total = size_bytes + sum(sizes)
        if (
            size_bytes > limits.segment_bytes_max
            or total > limits.segments_bytes_max
            or len(sizes) >= limits.segments_max
        ):
            raise RemoteProtocolError(
                f"segment {number} of {size_bytes} bytes, beside {len(sizes)} of "
                f"{total - size_bytes} bytes: at most "
                f"{limits.segment_bytes_max} each (limit segment_bytes_max), "
                f"{limits.segments_bytes_max} in all "
                f"(segments_bytes_max), and {limits.segments_max} of them (segments_max) "
                "are allowed"
            )

    def find(self, number: int, read_notes: Callable[[], int]) -> Segment | None:
        """A segment that has not been found mapped: after the notes that are on their way, or tried
        again. None for one that still cannot be mapped: copy_out() reads it. Raises
        RemoteProtocolError for one that was never handed over."""
        reads_left = NOTE_READS_MAX
        while number not in self and number not in self._unmapped:
            if not reads_left or not read_notes():
                raise RemoteProtocolError(f"array in segment {number}, which was never handed over")
            reads_left -= 1
        if number in self._unmapped:
            fd, size_bytes = self._unmapped[number]
            try:
                self._attach(number, fd, size_bytes)
            except OSError:
                return None
            del self._unmapped[number]
            os.close(fd)
        return self[number]

    def copy_out(self, number: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of an array in a segment that find() could not map. Raises RemoteProtocolError,
        and MemoryError.
        """
        fd, size_bytes = self._unmapped[number]
        if offset + nbytes > size_bytes:
            raise RemoteProtocolError(
                f"array of {nbytes} bytes at {offset} passes its segment of {size_bytes}"
            )
        block = empty_block(nbytes)
        rest = block.data
        while rest:
            count = os.preadv(fd, [rest], offset)
            if not count:
                raise RemoteProtocolError(
                    f"segment {number} ends at {offset}, although it was sealed"
                )
            rest, offset = rest[count:], offset + count
        block.setflags(write=False)
        self.arrays_copied += 1
        return block

    def unmap(self, number: int) -> None:
        """The peer's slab gave it back; arrays on it keep their memory."""
        self.pop(number, None)
        if number in self._unmapped:
            os.close(self._unmapped.pop(number)[0])

    def clear(self) -> None:
        """Let go of all."""
        super().clear()
        while self._unmapped:
            os.close(self._unmapped.popitem()[1][0])
