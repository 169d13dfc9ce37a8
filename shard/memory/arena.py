"""One segment as a slab cuts it into blocks.

    [0, cut_bytes)           blocks side by side, each in use or free; a free one serves its own
                             size only
    [cut_bytes, size_bytes)  the tail: serves any size

    used_bytes == 0  every block is free, so nobody here or at a peer reads or writes any of it: the
                     arena can be cut anew, for other sizes, or go back to the kernel

Blocks are 64-byte aligned, because they begin at 0 and their sizes are multiples of 64.
"""

from __future__ import annotations

import functools

import numpy as np

from shard.memory.segment import Segment

ALIGNMENT_BYTES = 64  # a cache line, and what SIMD code and TensorFlow take without a copy
BLOCK_BYTES_MIN = 4096  # smaller arrays travel inside the message
# programs send few sizes of arrays; looking one up costs a fifth of computing it
SIZES_REMEMBERED = 1024


class Holder:
    """One peer, as the slab sees it: blocks that were taken to copy arrays into for it alone, and
    have not come back.
    """

    __slots__ = ("held_bytes", "share")

    def __init__(self, share: float) -> None:
        """`share`: the part of the slab's budget that it may hold."""
        self.share = share
        self.held_bytes = 0  # kept by the slab, under its lock


class Block:
    """A piece of an arena: `size_bytes` at `offset` of segment number `segment`, `users` of it, who
    asked for `asked_bytes`.
    """

    __slots__ = ("arena", "asked_bytes", "holder", "offset", "segment", "size_bytes", "users")

    def __init__(self, arena: Arena, offset: int, size_bytes: int) -> None:
        self.arena = arena
        self.segment = arena.number
        self.offset = offset
        self.size_bytes = size_bytes
        self.asked_bytes = 0
        self.users = 0
        self.holder: Holder | None = None  # the peer that it was taken for, if it was


class Arena:
    """A segment and how far it is cut. Owned by one slab, which keeps `used_bytes` in step with its
    blocks.
    """

    __slots__ = (
        "address",
        "cut_bytes",
        "idle_turns",
        "is_closed",
        "is_warm",
        "number",
        "segment",
        "size_bytes",
        "used_bytes",
    )

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.size_bytes = segment.size_bytes
        # in this process
        self.address: int = np.frombuffer(segment.memory, np.uint8).__array_interface__["data"][0]
        self.cut_bytes = 0
        self.used_bytes = 0  # in blocks with users
        self.is_warm = True  # a block of it was taken since the last look of Slab.trim() ...
        self.idle_turns = 0  # ... else how many looks in a row found none used nor taken
        self.is_closed = False

    @property
    def tail_bytes(self) -> int:
        """Not cut yet."""
        return self.size_bytes - self.cut_bytes

    def cut(self, size_bytes: int) -> Block:
        """The next block of the tail, which must be that long; nobody uses it yet."""
        offset = self.cut_bytes
        self.cut_bytes = offset + size_bytes
        return Block(self, offset, size_bytes)

    def close(self) -> None:
        """Let go of the segment; arrays on it keep the memory they lie in."""
        self.is_closed = True
        self.cut_bytes = self.size_bytes  # no more tail
        self.segment.close()


@functools.lru_cache(SIZES_REMEMBERED)
def block_size(wanted_bytes: int) -> int:
    """The size of the block that holds `wanted_bytes`: quarter steps between powers of two."""
    if wanted_bytes <= BLOCK_BYTES_MIN:
        return BLOCK_BYTES_MIN
    step = 1 << max(0, (wanted_bytes - 1).bit_length() - 3)
    return (wanted_bytes + step - 1) // step * step
