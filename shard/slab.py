"""Blocks of shared memory for arrays: cut from segments, recycled for ever, lent to peers by reference.

A slab belongs to one process. It grows by whole segments up to a bound, cuts blocks of certain sizes from them, and keeps
freed blocks in one list per size: they are warm, and the next array of that size finds its pages already mapped. (First
touch of fresh shared memory runs at 0.3-0.7 GB/s, a warm copy at 10-20.)

    block    64-byte aligned; sizes grow by a quarter of a power of two, so at most a fifth of a block is unused
    extent   a block larger than half a segment: has a segment to itself, which goes back to the kernel when the bound
             is reached and the block is free

Every block counts its users: one for the array made on it here, one for each lease a peer holds. At zero it is free. The
array's part is given back by the array itself: the root of all views on it is an object of a private subclass, which lives as
long as any reshape, slice or memoryview of it, and whose end puts the block on a list. That list is looked at by the next
allocation, because a destructor may run in any thread, at any place, and so must not take a lock.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shard.errors import ForkedError, LocalProtocolError, ShmFull
from shard.segment import Segment

ALIGNMENT_BYTES = 64  # a cache line, and what SIMD code and TensorFlow take without a copy
BLOCK_BYTES_MIN = 4096  # smaller arrays travel inside the message
SEGMENT_BYTES_FIRST = 8 << 20  # what a process pays that sends few arrays
SEGMENT_BYTES_MAX = 128 << 20  # segments double up to this: reserving one takes some 50 ms
HUGE_PAGE_BYTES = 2 << 20  # segments are multiples of it
SLAB_BYTES_MAX = 8 << 30  # default bound of one process; configurable


class SlabArray(np.ndarray[Any, np.dtype[Any]]):
    """The root of all views on one block. Never handed out itself: users get a plain np.ndarray on it."""

    block: Block | None = None
    slab: Slab | None = None

    def __del__(self) -> None:
        block, slab = self.block, self.slab
        if block is not None and slab is not None:
            slab._dropped.append(block)


class Block:
    """A piece of a segment: `offset` and `size_bytes` in segment number `segment`, `users` of it."""

    __slots__ = ("offset", "segment", "size_bytes", "users")

    def __init__(self, segment: int, offset: int, size_bytes: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size_bytes = size_bytes
        self.users = 0


class Reader(Protocol):
    """Somebody who may read our blocks although the connection they were lent over has ended."""

    def hung_up(self, timeout_s: float) -> bool:
        """Whether it stopped, or did so within `timeout_s` seconds."""


@dataclass(frozen=True)
class SlabStatistics:
    """Figures of one slab, in bytes and blocks."""

    reserved_bytes: int  # of shared memory, in all segments
    used_bytes: int  # in blocks that somebody uses
    used_bytes_max: int  # the most there ever was
    free_bytes: int  # in blocks ready to be used again
    segments: int
    blocks_used: int
    limit_bytes: int


def block_size(wanted_bytes: int) -> int:
    """The size of the block that holds `wanted_bytes`: quarter steps between powers of two."""
    if wanted_bytes <= BLOCK_BYTES_MIN:
        return BLOCK_BYTES_MIN
    step = 1 << max(0, (wanted_bytes - 1).bit_length() - 3)
    return (wanted_bytes + step - 1) // step * step


class Slab:
    """All blocks of one process. Thread-safe."""

    def __init__(self, limit_bytes: int = SLAB_BYTES_MAX) -> None:
        self.limit_bytes = limit_bytes
        self._segments: dict[int, Segment] = {}
        self._segment_numbers = 0
        self._current = -1  # number of the segment that blocks are cut from, -1: none
        self._cut = 0  # bytes of it that are cut already
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self._dropped: deque[Block] = deque()
        self._readers: list[tuple[Reader, list[Block]]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._reserved = self._used = self._used_max = self._blocks_used = 0

    # -- arrays ------------------------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An uninitialised, writable, C-ordered array in shared memory. Raises ShmFull, and TypeError for object dtypes."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype} holds Python objects, which cannot live in shared memory")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if any(extent < 0 for extent in shape):
            raise ValueError(f"negative dimensions in shape {shape}")
        block = self.allocate(nbytes)
        return np.ndarray(shape, dtype, self.wrap(block, nbytes))

    def wrap(self, block: Block, nbytes: int) -> SlabArray:
        """The root array over the first `nbytes` of an allocated block; its end gives up the block's one user."""
        root: SlabArray = np.ndarray.__new__(SlabArray, (nbytes,), np.uint8, self._segments[block.segment].memory, block.offset)
        root.block = block
        root.slab = self
        return root

    def block_of(self, array: NDArray[Any]) -> tuple[Block, int] | None:
        """The block under an array of this slab and the array's offset in the segment, or None for any other array."""
        base = array.base
        while type(base) is np.ndarray:
            base = base.base
        if type(base) is not SlabArray or base.slab is not self or base.block is None:
            return None
        block = base.block
        start = base.__array_interface__["data"][0]
        return block, block.offset + array.__array_interface__["data"][0] - start

    # -- blocks ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Block:
        """A block of at least `nbytes` with one user. Raises ShmFull when neither slab nor /dev/shm have room."""
        if self._pid != os.getpid():
            raise ForkedError(f"this slab belongs to process {self._pid}, not to its fork {os.getpid()}")
        size = block_size(nbytes)
        with self._lock:
            self._collect_dropped()
            free = self._free[size]
            if not free and self._readers:
                self._collect_from_readers()
            block = free.pop() if free else self._cut_block(size)
            block.users = 1
            self._used += size
            self._blocks_used += 1
            self._used_max = max(self._used_max, self._used)
        return block

    def lend(self, block: Block) -> None:
        """One more user: a lease."""
        with self._lock:
            block.users += 1

    def release(self, block: Block) -> None:
        """One user less."""
        with self._lock:
            self._release(block)

    def _release(self, block: Block) -> None:
        if block.users <= 0:
            raise LocalProtocolError(f"block at {block.segment}:{block.offset} released more often than it was lent")
        block.users -= 1
        if not block.users:
            self._used -= block.size_bytes
            self._blocks_used -= 1
            self._free[block.size_bytes].append(block)

    def _collect_dropped(self) -> None:
        dropped = self._dropped
        while dropped:
            self._release(dropped.popleft())

    def lend_until_hung_up(self, reader: Reader, blocks: list[Block]) -> None:
        """`reader` has a lease on each of `blocks` and no connection to return it over: its end returns them all."""
        with self._lock:
            self._readers.append((reader, blocks))
            self._collect_from_readers()

    def wait_for_readers(self, timeout_s: float) -> None:
        """Give those without a connection so long to drop what they hold; what they hold after that stays lent."""
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout_s
        for reader, _ in list(self._readers):
            reader.hung_up(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._collect_from_readers()

    def _collect_from_readers(self) -> None:
        kept = []
        for reader, blocks in self._readers:
            if reader.hung_up(0.0):
                for block in blocks:
                    self._release(block)
            else:
                kept.append((reader, blocks))
        self._readers = kept

    def _cut_block(self, size: int) -> Block:
        if size * 2 > SEGMENT_BYTES_MAX:
            number = self._add_segment(-(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
            return Block(number, 0, size)
        current = self._segments.get(self._current)
        if current is None or self._cut + size > current.size_bytes:
            wanted = SEGMENT_BYTES_FIRST if current is None else min(SEGMENT_BYTES_MAX, current.size_bytes * 2)
            while wanted < size * 2:
                wanted *= 2
            self._current = self._add_segment(wanted)
            self._cut = 0
        block = Block(self._current, self._cut, size)
        self._cut += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return block

    def _add_segment(self, size_bytes: int) -> int:
        if self._reserved + size_bytes > self.limit_bytes:
            self._drop_free_extents()
        if self._reserved + size_bytes > self.limit_bytes:
            raise ShmFull(
                f"the slab holds {self._reserved >> 20} MiB and may grow to {self.limit_bytes >> 20} MiB, "
                f"{size_bytes >> 20} MiB more were asked for: {self._blocks_used} blocks are in use, here or lent to peers; "
                "drop arrays that are done with, or raise PRPC_SLAB_BYTES_MAX"
            )
        try:
            segment = Segment.create(size_bytes)
        except ShmFull:
            if not self._drop_free_extents():
                raise
            segment = Segment.create(size_bytes)
        number = self._segment_numbers
        self._segment_numbers += 1
        self._segments[number] = segment
        self._reserved += size_bytes
        return number

    def _drop_free_extents(self) -> int:
        """Give free extents back to the kernel; how many bytes."""
        dropped = 0
        for size, blocks in self._free.items():
            if size * 2 > SEGMENT_BYTES_MAX:
                for block in blocks:
                    segment = self._segments.pop(block.segment)
                    dropped += segment.size_bytes
                    segment.close()
                blocks.clear()
        self._reserved -= dropped
        return dropped

    # -- segments ----------------------------------------------------------------------------------------------------

    def segment(self, number: int) -> Segment:
        """The segment that a block lies in, to hand its descriptor to a peer."""
        return self._segments[number]

    def memory(self, block: Block, nbytes: int) -> memoryview:
        """The first `nbytes` of the block, writable."""
        return self._segments[block.segment].memory[block.offset : block.offset + nbytes]

    def statistics(self) -> SlabStatistics:
        """A snapshot."""
        with self._lock:
            self._collect_dropped()
            self._collect_from_readers()
            return SlabStatistics(
                reserved_bytes=self._reserved,
                used_bytes=self._used,
                used_bytes_max=self._used_max,
                free_bytes=sum(size * len(blocks) for size, blocks in self._free.items()),
                segments=len(self._segments),
                blocks_used=self._blocks_used,
                limit_bytes=self.limit_bytes,
            )

    def close(self) -> None:
        """Let go of all segments. Arrays still alive here or at peers keep the memory they lie in."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._free.clear()
            self._readers.clear()
            self._current = -1
            self._reserved = 0
