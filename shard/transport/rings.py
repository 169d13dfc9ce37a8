"""The segment that the two rings of one connection lie in; shm_connection.py has the table."""

from __future__ import annotations

from shard.memory.ring import DATA_OFFSET, capacity_for, format_ring
from shard.memory.segment import Segment


def rings_bytes(capacity_bytes: int) -> int:
    """How large the segment of two rings of at least that capacity is."""
    return 2 * (DATA_OFFSET + capacity_for(capacity_bytes))


def make_rings(capacity_bytes: int, incarnation: int = 0) -> Segment:
    """A segment laid out as the table in shm_connection.py says. Raises ShmFull."""
    capacity = capacity_for(capacity_bytes)
    size = DATA_OFFSET + capacity
    segment = Segment.create(2 * size)
    format_ring(segment.memory[:size], capacity, incarnation)
    format_ring(segment.memory[size:], capacity, incarnation)
    return segment
