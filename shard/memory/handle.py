"""A ring as something to hand around: inert until one process takes each end.

    handle = Ring.create(1 << 20)            # in one process
    producer = handle.producer()             # there, or in a process that the handle was pickled to
    consumer = handle.consumer()             # in another

The segment keeps a name in /dev/shm until unlink(), which the maker owes it: by hand, by `with`, or
at its exit. A maker that a signal ends (SIGKILL; SIGTERM too, where it has no handler) leaves the
name behind until `prpc gc` or collect_garbage().

Who takes an end locks one byte of the segment for it, by an open file description lock (fcntl(2))
that goes with the end's mapping: the kernel takes it back when the end is dropped, or its process
dies, however it does. A second taker would write records over those of the first.

The ends can wait. There is no doorbell on a bare ring, so a waiting end looks again and again:
WAIT_SPINS times at once, then with pauses that grow to PAUSE_S_MAX. A peer that died is a wait that
ends at its deadline.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import struct
import time
import weakref
from types import TracebackType

from shard.errors import BackpressureError, ForkedError, LocalProtocolError
from shard.memory import memory_order, ring
from shard.memory.segment import Segment, unlink

# Some 50 us of looking: longer than a peer takes that is at work.
WAIT_SPINS = 200
PAUSE_S_MIN = 20e-6
# Costs a waiting process under 1 % of a core, and a peer that comes back half of it in latency.
PAUSE_S_MAX = 1e-3


class _Pauses:
    """What a waiting end does between two looks, until its deadline."""

    def __init__(self, timeout_s: float) -> None:
        """Raises ValueError for a time that is none, which no clock would ever pass."""
        if math.isnan(timeout_s):
            raise ValueError(
                f"timeout_s={timeout_s!r}: a number of seconds is expected, math.inf for no end"
            )
        self._deadline = time.monotonic() + timeout_s
        self._looks = 0
        self._pause_s = PAUSE_S_MIN

    def is_over(self) -> bool:
        """Whether the deadline has passed; if not, a pause was made and it is time for the next
        look.
        """
        self._looks += 1
        if self._looks < WAIT_SPINS:
            return False
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            return True
        time.sleep(min(self._pause_s, remaining))
        self._pause_s = min(PAUSE_S_MAX, self._pause_s * 2)
        return False


_FLOCK = struct.Struct("hhqqi4x")  # struct flock of x86-64: type, whence, start, length, pid
# of the segment: locked by who has that end
PRODUCER_BYTE, CONSUMER_BYTE = ring.TAIL_WORD * 8, ring.HEAD_WORD * 8


class Producer(ring.RingProducer):
    """The writing end of a ring with a handle: try_write() answers, write() insists, wait_write()
    waits.
    """

    def write(self, payload: bytes | bytearray | memoryview, tag: int = 0) -> None:
        """Publish the payload as one record. Raises BackpressureError when the ring is full;
        nothing was written then.
        """
        if not self.try_write(payload, tag):
            raise BackpressureError(
                f"the ring to {self.peer} has no room for {len(payload)} bytes: it reads too slowly"
            )

    def wait_write(
        self, payload: bytes | bytearray | memoryview, timeout_s: float, tag: int = 0
    ) -> None:
        """As write(), but wait up to `timeout_s` seconds for room. Raises ValueError for NaN."""
        pauses = _Pauses(timeout_s)
        while not self.try_write(payload, tag):
            if pauses.is_over():
                raise BackpressureError(
                    f"the ring to {self.peer} had no room for {len(payload)} bytes within "
                    f"{timeout_s} s: it reads too slowly, "
                    "or died"
                )


class Consumer(ring.RingConsumer):
    """The reading end of a ring with a handle: try_read() answers, wait_read() waits."""

    def wait_read(self, timeout_s: float) -> bytes:
        """A copy of the next record's payload. Raises TimeoutError when none came within
        `timeout_s` seconds, ValueError for NaN."""
        pauses = _Pauses(timeout_s)
        while (payload := self.try_read()) is None:
            if pauses.is_over():
                raise TimeoutError(
                    f"{self.peer} wrote nothing to the ring within {timeout_s} s: "
                    "it has nothing to say, or died"
                )
        return payload


_ends_made_here: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()


def _quarantine_in_fork() -> None:
    """Two processes on one end would each believe to be its only writer."""
    for end in list(_ends_made_here):
        end.quarantine(
            ForkedError(
                f"this end of the ring belongs to process {os.getppid()}, "
                f"and was used in its fork {os.getpid()}: start "
                "processes by spawn, and hand them the Ring"
            )
        )


os.register_at_fork(after_in_child=_quarantine_in_fork)


class Ring:
    """The name of a ring in shared memory. Picklable; owned by the process that called create()."""

    def __init__(self, name: str, capacity_bytes: int, incarnation: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.incarnation = incarnation

    @classmethod
    def create(cls, capacity_bytes: int) -> Ring:
        """A new, empty ring of at least `capacity_bytes` bytes (rounded up to a power of two).
        Raises ShmFull.
        """
        memory_order.require_store_order()
        capacity = ring.capacity_for(capacity_bytes)
        incarnation = secrets.randbits(64)
        segment = Segment.create(ring.DATA_OFFSET + capacity, keep_name=True)
        assert segment.name is not None
        # failpoint: handle.named
        ring.format_ring(segment.memory, capacity, incarnation)
        # failpoint: handle.formatted
        segment.close()
        return cls(segment.name, capacity, incarnation)

    def _take(self, byte: int, name: str) -> memoryview:
        segment = Segment.open(self.name)
        try:
            fcntl.fcntl(
                segment.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            )
            return segment.memory[: ring.DATA_OFFSET + self.capacity_bytes]
        except BlockingIOError as error:
            raise LocalProtocolError(
                f"the {name} end of ring {self.name} is taken, in this process or another: "
                "an end has one owner at a time, and "
                "is free again when that drops it or dies; for another pair of processes make a "
                "ring of its own"
            ) from error
        finally:
            segment.close()  # the end holds the mapping from here on, and the mapping the lock

    def producer(self) -> Producer:
        """The writing end, for one owner at a time. Raises FileNotFoundError when the ring was
        unlinked, LocalProtocolError when the end is taken."""
        end = Producer(
            self._take(PRODUCER_BYTE, "writing"), f"{self.name}'s reader", self.incarnation
        )
        _ends_made_here.add(end)
        return end

    def consumer(self) -> Consumer:
        """The reading end, for one owner at a time. Raises FileNotFoundError when the ring was
        unlinked, LocalProtocolError when the end is taken."""
        end = Consumer(
            self._take(CONSUMER_BYTE, "reading"), f"{self.name}'s writer", self.incarnation
        )
        _ends_made_here.add(end)
        return end

    def unlink(self) -> None:
        """Take the name away: ends already taken go on, new ones cannot be."""
        unlink(self.name)

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.unlink()
