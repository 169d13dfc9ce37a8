"""The figures of one slab: what one would ask first when memory runs out or does not come back.

reserved_bytes = used_bytes + free_bytes + what is not cut into blocks yet
used_bytes     = bytes asked for + internal_bytes
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlabStatistics:
    """A snapshot, in bytes and blocks: each figure was true at one moment, the same for all, and
    may be old when it is read.
    """

    reserved_bytes: int
    """Of shared memory, in all segments; taken from the machine whether used or not."""
    reserved_bytes_max: int
    """The most there ever was of that."""
    used_bytes: int
    """In blocks that somebody uses: an array here, or a peer with a lease."""
    used_bytes_max: int
    """The most there ever was of that."""
    free_bytes: int
    """In blocks that nobody uses, kept warm for the next array of their size."""
    internal_bytes: int
    """Lost in used blocks because sizes are rounded up: used_bytes less what was asked for."""
    external_bytes: int
    """In free blocks that can serve no other size, because their segment has a used block too. Free
    blocks of segments without any are not counted: when memory is short they are cut anew for any
    size."""
    fragmentation: float
    """(internal_bytes + external_bytes) / reserved_bytes: the share of the memory taken that holds
    nothing and cannot hold just anything. 0.0 when nothing is reserved."""
    segments: int
    """How many there are now."""
    segments_dropped: int
    """How many went back to the kernel so far, to make room for others or because they were
    idle.
    """
    segments_trimmed: int
    """Of those, how many were idle."""
    recuts: int
    """How often a segment with free blocks only was cut anew for other sizes, so far."""
    blocks_used: int
    """Blocks with at least one user."""
    blocks_free: int
    """Blocks with none, ready to be used again."""
    leases: int
    """How many peers hold; a block lent to three of them counts three times. Slab.leases() lists
    them.
    """
    leased_bytes: int
    """In blocks that peers hold, each once."""
    lease_age_s_max: float
    """Since when the oldest lease lasts, in seconds; 0.0 without leases. One that only grows is a
    view kept forever.
    """
    limit_bytes: int
    """The bound of reserved_bytes."""
