"""Blocks of shared memory for arrays: cut from segments, recycled for ever, lent to peers by
reference.

A slab belongs to one process. It grows by whole segments up to a bound, cuts blocks of certain
sizes from them (arena.py), and keeps freed blocks in one list per size: they are warm, and the next
array of that size finds its pages already mapped. (First touch of fresh shared memory runs at
0.3-0.7 GB/s, a warm copy at 10-20.)

    block   64-byte aligned; sizes grow by a quarter of a power of two, so at most a fifth of a
            block is unused
    extent  a block larger than half a segment: has a segment to itself

    when no free block has the size wanted, it comes from the first of these that can give it:
    tail     what is not cut yet of any segment
    growth   a new segment, within the bound and what memory there is: twice the last one, else as
             small as will do
    recut    a segment whose blocks are all free is cut anew; peers have it mapped already
    swap     segments whose blocks are all free go back to the kernel until a new one fits
    ShmFull  which says who holds what

What a peer holds of copies that were made for it counts against its share of the budget, so that
one that stops reading leaves the others theirs. Segments that have been idle for a while go back to
the kernel (trim(), trimming.py).

Numbers of segments are never used again, so a peer that has one mapped which is gone is told of its
successor as of any other.

Every block counts its users: one for the array made on it here, one for each lease a peer holds. At
zero it is free. The array's part is given back by the array itself: the root of all views on it is
an object of a private subclass, which lives as long as any reshape, slice or memoryview of it, and
whose end puts the block on a list. That list is looked at by the next allocation, because a
destructor may run in any thread, at any place, and so must not wait for a lock: not even for one
that its own thread, or a thread that the end of the interpreter froze, is holding.

Aliasing: what is lent is the memory itself. An array made by empty() and written after it was sent
changes what every borrower sees, at once and without any order; write to it again only when they
are done with it. Borrowers' arrays are read-only. Other arrays are copied at the send, and may be
changed as soon as it returns.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shard.errors import ClosedError, ForkedError, LocalProtocolError, ShmFull
from shard.memory import memory_room
from shard.memory.arena import ALIGNMENT_BYTES, Arena, Block, Holder, block_size
from shard.memory.borrowers import Books, Reader, Watcher
from shard.memory.device_memory import DeviceRooms
from shard.memory.lease_table import Lease, debug_leases
from shard.memory.segment import Segment
from shard.memory.slab_statistics import SlabStatistics

SEGMENT_BYTES_FIRST = 8 << 20  # what a process pays that sends few arrays
SEGMENT_BYTES_MAX = 128 << 20  # segments double up to this: reserving one takes some 50 ms
HUGE_PAGE_BYTES = 2 << 20  # segments are multiples of it, but for one that fills the bound
KEPT_BYTES = SEGMENT_BYTES_MAX  # of idle segments, at least so much stays warm
TRIM_S = 5.0  # between two looks for idle segments ...
# ... of which so many in a row find one idle before it goes back: half a minute, longer than a
# training step
IDLE_TURNS = 6
SLAB_BYTES_MAX = 8 << 30  # default bound of one process; configurable
UINT8 = np.dtype(np.uint8)  # numpy looks np.uint8 up each time
_NOBODY = -1  # no process has this pid
CLOSED_TEXT = (
    "this slab was closed: arrays can be made and sent as long as their node or group is open"
)


class SlabArray(np.ndarray[Any, np.dtype[Any]]):
    """The root of all views on one block. Never handed out itself: users get a plain np.ndarray on
    it.
    """

    __slots__ = ("block", "slab")
    block: Block
    slab: Slab

    def __del__(self) -> None:
        try:
            block, slab = self.block, self.slab
        except AttributeError:
            # somebody made it from a root reached through `.base`: it has no part in the block, its
            # own base has
            return
        slab._dropped.append(block)


class Slab:
    """All blocks of one process. Thread-safe.

    release(), the ends of arrays and those of connections never wait, so they may happen in
    destructors, whenever the collector runs one, and at the interpreter's end. The other methods
    wait for a lock that is held for some microseconds, and while a segment is added for its 50 ms:
    a destructor must not make or send arrays.
    """

    def __init__(
        self,
        limit_bytes: int = SLAB_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
        debug: bool | None = None,
    ) -> None:
        """`clock` dates the leases; `debug` makes them note call sites, None: as PRPC_DEBUG_LEASES
        says (ValueError if badly).
        """
        self.limit_bytes = limit_bytes
        self.clock = clock
        self.debug = debug_leases() if debug is None else debug
        # of devices, for what peers send there; None: it arrives in the host's memory
        self.device_rooms: DeviceRooms | None = None
        self._segments: dict[int, Segment] = {}
        self._arenas: list[Arena] = []  # of those segments, oldest first
        self._segment_numbers = 0
        # blocks are cut from it first, and the next segment is twice its size
        self._current: Arena | None = None
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self._dropped: deque[Block] = deque()
        # these are changed by single atomic steps, without the lock
        self._books: list[Books] = []
        self._readers: deque[tuple[Reader, Books]] = deque()
        self._watchers: list[weakref.ref[Watcher]] = []
        self._lock = threading.Lock()  # of segments and blocks: any thread allocates, and lends
        self._pid = os.getpid()
        _made_here.add(self)
        self._is_closed = False
        self._reserved = self._used = self._asked = self._blocks_used = 0
        self._reserved_max = self._used_max = self._recuts = self.segments_dropped = (
            self._trimmed
        ) = 0
        self._look_at = 0.0
        # what it may come to, by its bound and by the memory there was when it last grew
        self.budget_bytes = limit_bytes

    # -- arrays ------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An uninitialised, writable, C-ordered array in shared memory. Raises ShmFull, and
        TypeError for object dtypes.

        Sending it lends it: what is written to it afterwards is what its borrowers see (see
        "Aliasing" above).
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(
                f"dtype {dtype} holds Python objects, which cannot live in shared memory"
            )
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        # int: a numpy one would spread to all figures
        nbytes = int(math.prod(shape)) * dtype.itemsize
        if min(shape, default=0) < 0:
            raise ValueError(f"negative dimensions in shape {shape}")
        block = self.allocate(nbytes)
        return np.ndarray(shape, dtype, self.wrap(block, nbytes))

    def wrap(self, block: Block, nbytes: int) -> SlabArray:
        """The root array over the first `nbytes` of an allocated block, whose one user its end
        gives up. Raises ClosedError.
        """
        try:
            root = SlabArray((nbytes,), UINT8, block.arena.segment.memory, block.offset)
        except (TypeError, ValueError) as error:
            # there is no memory any more: another thread closed the slab
            raise ClosedError(CLOSED_TEXT) from error
        root.block = block
        root.slab = self
        return root

    def block_of(self, array: NDArray[Any]) -> tuple[Block, int] | None:
        """The block under an array of this slab and the array's offset in the segment, or None for
        any other array.
        """
        root: Any = array.base
        while type(root) is not SlabArray:
            if type(root) is np.ndarray:
                root = root.base
            elif type(root) is memoryview:
                root = root.obj
            else:
                return None
        try:
            block, slab = root.block, root.slab
        except AttributeError:
            return None  # made by a user from the root: see SlabArray
        if slab is not self:
            return None
        if array.nbytes == root.nbytes and array.flags.c_contiguous:
            # the whole of it: no need for the address, which takes numpy a microsecond
            return block, block.offset
        return block, array.__array_interface__["data"][0] - block.arena.address

    # -- blocks ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, holder: Holder | None = None) -> Block:
        """A block of at least `nbytes` with one user; what is for one peer alone counts for its
        `holder` until it is free again.

        Raises ShmFull when slab or memory have no room, or when the holder would hold more than its
        share: one block of any size it may.
        """
        if self._pid != os.getpid():
            raise self._forked()
        size = block_size(nbytes)
        if size > self.limit_bytes:
            size = self._size_within_bound(nbytes)
        with self._lock:
            if self._dropped:
                self._collect_dropped()
            if (
                holder is not None
                and holder.held_bytes
                and holder.held_bytes + size > holder.share * self.budget_bytes
            ):
                raise self._share_reached(size, holder)
            free = self._free[size]
            block = free.pop() if free else self._find_block(size)
            block.users = 1
            block.asked_bytes = nbytes
            arena = block.arena
            arena.used_bytes += size
            arena.is_warm = True
            if holder is not None:
                holder.held_bytes += size
                block.holder = holder
            self._asked += nbytes
            self._blocks_used += 1
            self._used = used = self._used + size
            if used > self._used_max:
                self._used_max = used
        # failpoint: slab.after_allocate
        return block

    def lend(self, block: Block) -> None:
        """One more user: a lease. Raises LocalProtocolError for a free block, which the next
        allocation may take.
        """
        with self._lock:
            if not block.users:
                raise LocalProtocolError(
                    f"block at {block.segment}:{block.offset} is free and cannot be lent"
                )
            block.users += 1
        # failpoint: slab.after_lend

    def release(self, block: Block) -> None:
        """One user less, now or, when the slab is busy at this moment, with the next allocation.

        Raises LocalProtocolError, and changes nothing, when the block has no user any more.
        """
        if self._lock.acquire(False):
            try:
                self._release(block)
            finally:
                self._lock.release()
        else:
            self._dropped.append(block)

    def _forked(self) -> ForkedError:
        return ForkedError(
            f"this slab belongs to process {os.getppid()}, not to its fork {os.getpid()}: "
            "start processes by spawn, or make arrays of a slab that the fork made itself"
        )

    def _release(self, block: Block) -> None:
        if block.users <= 0:
            raise LocalProtocolError(
                f"block at {block.segment}:{block.offset} released more often than it was lent"
            )
        block.users -= 1
        if not block.users:
            size, arena = block.size_bytes, block.arena
            arena.used_bytes -= size
            if block.holder is not None:
                block.holder.held_bytes -= size
                block.holder = None
            self._used -= size
            self._asked -= block.asked_bytes
            self._blocks_used -= 1
            if not arena.is_closed:
                self._free[size].append(block)

    def _collect_dropped(self) -> None:
        dropped = self._dropped
        while dropped:
            self._release(dropped.popleft())

    def _size_within_bound(self, nbytes: int) -> int:
        """For a block whose size would be rounded up past the bound: to the alignment only. Raises
        ShmFull.
        """
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size > self.limit_bytes:
            raise ShmFull(
                f"an array of {nbytes} bytes does not fit a slab that may grow to "
                f"{self.limit_bytes} bytes: "
                "send it in parts, or raise PRPC_SLAB_BYTES_MAX"
            )
        return size

    # -- leases ------------------------------------------------------------------------------------

    def open_books(self, books: Books) -> None:
        """A connection begins to lend."""
        self._books.append(books)

    def close_books(self, books: Books) -> None:
        """It has ended, and nothing is lent any more."""
        with contextlib.suppress(ValueError):  # close() was first
            self._books.remove(books)

    def lend_until_hung_up(self, reader: Reader, books: Books) -> None:
        """`reader` holds what is on these books and has no connection to return it over: its end
        returns it all.
        """
        self._readers.append((reader, books))
        if self._lock.acquire(False):  # a busy slab looks at it later
            try:
                self._collect_from_readers()
            finally:
                self._lock.release()

    def wait_for_readers(self, timeout_s: float) -> None:
        """Give those without a connection so long to drop what they hold; what they hold after that
        stays lent.
        """
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout_s
        for reader, _ in list(self._readers):
            reader.hung_up(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._collect_from_readers()

    def _collect_from_readers(self) -> None:
        for _ in range(len(self._readers)):
            reader, books = self._readers.popleft()
            if reader.hung_up(0.0):
                self.close_books(books)
                for block in books.strike_all():
                    self._release(block)
            else:
                self._readers.append((reader, books))

    def leases(self) -> tuple[Lease, ...]:
        """Who holds what since when, oldest first: all connections, and peers that read on after
        theirs. A snapshot.

        A lease that is here for long is an array (or a view of one) that the borrower keeps; its
        process lists it as Held.
        """
        with self._lock:
            self._collect_from_readers()
        return self._leases()

    def _leases(self) -> tuple[Lease, ...]:
        found = [lease for books in list(self._books) for lease in books.leases()]
        return tuple(sorted(found, key=lambda lease: lease.since_s))

    # -- growth ------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Touch memory ahead: blocks of `size_bytes` in all, rounded up as block_size() does, then
        need no other first touch.

        What is free for any size counts, what is free for one size only does not. Raises ShmFull.
        """
        if self._pid != os.getpid():
            raise self._forked()
        wanted = self._size_within_bound(size_bytes)
        with self._lock:
            self._collect_dropped()
            self._collect_from_readers()
            self._arena_with_room(wanted)

    def _find_block(self, size: int) -> Block:
        """When no block of that size is known to be free."""
        if self._readers:
            self._collect_from_readers()
            if self._free[size]:
                return self._free[size].pop()
        return self._arena_with_room(size).cut(size)

    def _arena_with_room(self, size: int) -> Arena:
        """An arena with a tail of `size` bytes, by the first of the ways told at the top of this
        file.
        """
        current = self._current
        if current is not None and current.tail_bytes >= size:
            return current
        for arena in self._arenas:
            if arena.tail_bytes >= size:
                return arena
        refused: ShmFull | None = None
        for wanted in sorted({self._planned_bytes(size), self._least_bytes(size)}, reverse=True):
            if self._reserved + wanted <= self.limit_bytes:
                try:
                    return self._add_arena(wanted, size)
                except ShmFull as error:
                    refused = error
        return self._reuse_arenas(size, refused)

    def _planned_bytes(self, size: int) -> int:
        """How large a new segment should be:
        with room for more blocks than the one it is made for.
        """
        if size * 2 > SEGMENT_BYTES_MAX:
            return self._least_bytes(size)
        wanted = (
            SEGMENT_BYTES_FIRST
            if self._current is None
            else min(SEGMENT_BYTES_MAX, self._current.size_bytes * 2)
        )
        while wanted < size * 2:
            wanted *= 2
        return wanted

    def _least_bytes(self, size: int) -> int:
        """How large it must be: whole huge pages, unless that alone would pass the bound."""
        return max(
            size,
            min(-(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, self.limit_bytes - self._reserved),
        )

    def _reuse_arenas(self, size: int, refused: ShmFull | None) -> Arena:
        """Make room where all blocks are free; `refused` is what the memory said, None when only
        the bound is in the way.
        """
        unused = [arena for arena in self._arenas if not arena.used_bytes]
        large_enough = [arena for arena in unused if arena.size_bytes >= size]
        if large_enough:
            arena = min(large_enough, key=lambda each: each.size_bytes)
            self._forget_blocks({arena})
            arena.cut_bytes = 0
            self._recuts += 1
            if size * 2 <= SEGMENT_BYTES_MAX:
                self._current = arena
            return arena
        room = self.limit_bytes - self._reserved
        if room + sum(arena.size_bytes for arena in unused) < size:
            raise refused or self._bound_reached(size)  # and what is warm stays warm
        while unused:
            self._drop_arena(unused.pop())
            if self._reserved + size <= self.limit_bytes:
                try:
                    return self._add_arena(self._least_bytes(size), size)
                except ShmFull as error:
                    refused = error
        raise refused or self._bound_reached(size)

    def _add_arena(self, size_bytes: int, block_bytes: int) -> Arena:
        """A new segment, made for a block of `block_bytes`. Raises ShmFull."""
        if self._is_closed:
            raise ClosedError(CLOSED_TEXT)
        self.budget_bytes = min(
            self.limit_bytes, self._reserved + max(0, memory_room.read_memory_room().free_bytes)
        )
        segment = Segment.create(size_bytes, lent=True)
        # failpoint: slab.after_segment
        arena = Arena(self._segment_numbers, segment)
        self._segment_numbers += 1
        self._segments[arena.number] = segment
        self._arenas.append(arena)
        self._reserved += size_bytes
        self._reserved_max = max(self._reserved_max, self._reserved)
        if block_bytes * 2 <= SEGMENT_BYTES_MAX:
            self._current = arena
        return arena

    def _drop_arena(self, arena: Arena) -> None:
        """Give one whose blocks are all free back to the kernel, which keeps it while a peer has it
        mapped.
        """
        self._forget_blocks({arena})
        self._arenas.remove(arena)
        del self._segments[arena.number]
        if self._current is arena:
            self._current = None
        self._reserved -= arena.size_bytes
        self.segments_dropped += 1
        arena.close()
        for books in list(self._books):
            books.tell_drops()
        for reference in list(self._watchers):
            if (watcher := reference()) is not None:
                watcher.segment_dropped()

    def trim(self) -> int:
        """Look for segments whose blocks are all free and were not taken since the last look, at
        most every TRIM_S seconds; give one back that was found so IDLE_TURNS times in a row, unless
        less than KEPT_BYTES would be left; how many went. Bounded work, for a timer."""
        with self._lock:
            if self.clock() < self._look_at or self._is_closed:
                return 0
            self._look_at = self.clock() + TRIM_S * 0.9  # timers are late, never early
            self._collect_dropped()
            self._collect_from_readers()
            idle = []
            for arena in self._arenas:
                arena.idle_turns = 0 if arena.used_bytes or arena.is_warm else arena.idle_turns + 1
                arena.is_warm = False
                if (
                    arena.idle_turns >= IDLE_TURNS
                    and self._reserved - arena.size_bytes >= KEPT_BYTES
                ):
                    idle.append(arena)
            if not idle:
                return 0
            self._drop_arena(max(idle, key=lambda each: each.size_bytes))
            self._trimmed += 1
            return 1

    def _forget_blocks(self, arenas: set[Arena]) -> None:
        """Take the free blocks of these arenas off the lists."""
        for size, blocks in self._free.items():
            self._free[size] = [block for block in blocks if block.arena not in arenas]

    def _share_reached(self, size: int, holder: Holder) -> ShmFull:
        return ShmFull(
            f"one peer holds {holder.held_bytes / (1 << 20):.1f} MiB of copies that were made for "
            "it, "
            f"{size / (1 << 20):.1f} MiB more "
            f"would pass its share of {self.budget_bytes >> 20} MiB (limit slab_share_max = "
            f"{holder.share:g})"
        )

    def _bound_reached(self, size: int) -> ShmFull:
        leases = self._leases()
        held = (
            f", {len(leases)} leases at peers, the oldest at {leases[0].borrower}" if leases else ""
        )
        return ShmFull(
            f"the slab holds {self._reserved >> 20} MiB and may grow to {self.limit_bytes >> 20} "
            "MiB, "
            f"{size / (1 << 20):.1f} MiB more were asked for: {self._blocks_used} blocks are in "
            "use, here or lent to "
            f"peers{held}; drop arrays that are done with (Slab.leases() says who holds what), "
            "or raise PRPC_SLAB_BYTES_MAX"
        )

    # -- segments ----------------------------------------------------------------------------------

    def segment(self, number: int) -> Segment:
        """The segment that a block lies in, to hand its descriptor to a peer."""
        return self._segments[number]

    def segment_numbers(self) -> set[int]:
        """Of all segments there are; `segments_dropped` counts those that there were. No number is
        used again.
        """
        return set(self._segments)

    def watch_segments(self, watcher: Watcher) -> None:
        """Tell it of each segment that goes back to the kernel, for as long as it lives."""
        self._watchers.append(weakref.ref(watcher, self._watchers.remove))

    def memory(self, block: Block, nbytes: int) -> memoryview:
        """The first `nbytes` of the block, writable."""
        return block.arena.segment.memory[block.offset : block.offset + nbytes]

    @property
    def used_bytes(self) -> int:
        """In blocks that somebody uses; as last counted, so arrays that have just ended may still
        be in it.
        """
        return self._used

    @property
    def leases_out(self) -> int:
        """Leases that peers hold; what leases() lists, counted only."""
        return sum(len(books) for books in list(self._books))

    def statistics(self) -> SlabStatistics:
        """A snapshot: true when it was taken, for other threads and peers go on. Takes a
        microsecond or so for each lease.
        """
        leases = self.leases()
        with self._lock:
            self._collect_dropped()
            free = sum(arena.cut_bytes - arena.used_bytes for arena in self._arenas)
            external = sum(
                arena.cut_bytes - arena.used_bytes for arena in self._arenas if arena.used_bytes
            )
            internal = self._used - self._asked
            return SlabStatistics(
                reserved_bytes=self._reserved,
                reserved_bytes_max=self._reserved_max,
                used_bytes=self._used,
                used_bytes_max=self._used_max,
                free_bytes=free,
                internal_bytes=internal,
                external_bytes=external,
                fragmentation=(internal + external) / self._reserved if self._reserved else 0.0,
                segments=len(self._arenas),
                segments_dropped=self.segments_dropped,
                segments_trimmed=self._trimmed,
                recuts=self._recuts,
                blocks_used=self._blocks_used,
                blocks_free=sum(map(len, self._free.values())),
                leases=len(leases),
                leased_bytes=sum(
                    {(lease.segment, lease.offset): lease.block_bytes for lease in leases}.values()
                ),
                lease_age_s_max=max(0.0, self.clock() - leases[0].since_s) if leases else 0.0,
                limit_bytes=self.limit_bytes,
            )

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._is_closed

    def close(self) -> None:
        """Let go of all segments; allocate() raises ClosedError from now on. Arrays still alive
        here or at peers keep the memory they lie in."""
        with self._lock:
            self._is_closed = True
            for arena in self._arenas:
                arena.close()
            self._arenas.clear()
            self._segments.clear()
            self._free.clear()
            self._books.clear()
            self._readers.clear()
            self._current = None
            self._reserved = 0


_made_here: weakref.WeakSet[Slab] = weakref.WeakSet()


def _refuse_in_fork() -> None:
    """A child made by fork() maps the same memory as its parent: both would hand out the same
    blocks. Pids alone do not tell them apart for sure: in a PID namespace of its own the child may
    have its parent's number."""
    for slab in list(_made_here):
        slab._pid = _NOBODY


os.register_at_fork(after_in_child=_refuse_in_fork)
