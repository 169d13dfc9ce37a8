"""A ring as something to hand around: inert until one process takes each end.

    handle = Ring.create(1 << 20)            # in one process
    producer = handle.producer()             # there, or in a process that the handle was pickled to
    consumer = handle.consumer()             # in another

The segment keeps a name in /dev/shm until unlink(), which the maker owes it: by hand, by `with`, or at its exit.
"""

from __future__ import annotations

from types import TracebackType

from shard import memory_order, ring
from shard.segment import Segment, unlink


class Ring:
    """The name of a ring in shared memory. Picklable; owned by the process that called create()."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes

    @classmethod
    def create(cls, capacity_bytes: int) -> Ring:
        """A new, empty ring of at least `capacity_bytes` bytes (rounded up to a power of two). Raises ShmFull."""
        memory_order.require_store_order()
        capacity = ring.capacity_for(capacity_bytes)
        segment = Segment.create(ring.DATA_OFFSET + capacity, keep_name=True)
        assert segment.name is not None
        ring.format_ring(segment.memory, capacity)
        segment.close()
        return cls(segment.name, capacity)

    def _memory(self) -> memoryview:
        segment = Segment.open(self.name)
        memory = segment.memory[: ring.DATA_OFFSET + self.capacity_bytes]
        segment.close()  # the end holds the mapping from here on
        return memory

    def producer(self) -> ring.RingProducer:
        """The writing end. One process may take it, once. Raises FileNotFoundError when the ring was unlinked."""
        return ring.RingProducer(self._memory())

    def consumer(self) -> ring.RingConsumer:
        """The reading end. One process may take it, once. Raises FileNotFoundError when the ring was unlinked."""
        return ring.RingConsumer(self._memory())

    def unlink(self) -> None:
        """Take the name away: ends already taken go on, new ones cannot be."""
        unlink(self.name)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.unlink()
