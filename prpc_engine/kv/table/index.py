"""A map from int64 keys to row numbers that looks up whole batches: open addressing in one numpy
array, grown by linear hashing.

    slots  int64[capacity, 2]  slot s is (key, row); FREE (-1) in place of the row: never used,
                               whatever its key says; REMOVED (-2): was used, so a walk goes on past
                               it, and the next insert may take it

Slots are in segments of one size, a power of two. Two fields of mix64(key) say where a key starts:
the highest bits which slot of its segment, and `number`, bits from SEGMENT_SHIFT up, which segment.
From there it walks on in growing steps within the segment, to its key or to a free slot (+1, +2,
+3: triangular numbers visit every slot of a power of two; Knuth vol. 3, 6.4, exercise 20).

Growth is Litwin's (VLDB 1980). Of `segments`, with 2**level the power of two not above it:

    number modulo 2**(level+1)    segment
    below `segments`              that
    the others                    that - 2**level: this one has not been split yet

To grow is to split segment `segments - 2**level`: those of its keys whose number has bit `level` go
to a new segment at the end. So the array grows where it is, by one segment for every so many keys,
and a push moves two keys or so for each new one, however large the table is: 100 k of them in 10 M
split 10 segments, in 11 ms of 16 (an index that doubled at once held one push of 80 up for 0.7 s).
While there is one segment alone and it is small, it doubles.

Invariants: of a segment that has not been split yet LOAD_MAX of the slots have keys, or fewer, give
or take what chance does (1 %). With those removed it stays below LOAD_MAX + 1 / CLEANING, since
inserts clean segments in turn. None is fuller than FULL_MAX: keys that were made to meet are
refused. So every walk ends, and soon. A key takes 2 * 16 / LOAD_MAX = 53 bytes always.

Why a slot is a pair: key and row then come from one cache line, and in a big table the cache miss
is the price.
Why batches: each pass handles all keys that are still walking, so Python's cost is paid per pass
and not per key. The bound on the load keeps the number of passes small: at half full, 1 key in 2**k
or fewer is left after k steps or so. While few are walking, the calls are what costs, so each pass
looks at PROBES_FEW slots of each: 64 keys in 22 us, 36 with one a pass.

Measured with 10 M keys, 100 k at a time (numpy 2.4, one EPYC core), in million keys/s: lookup 55
(58 in a table that doubles), absent ones as many, insert 6, from nothing to 10 M the same. Against
it, searchsorted in one sorted array: lookup 0.5, 3.6 with the keys asked sorted first, and 0.5 for
a merge of new ones; a dict: 0.8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments
from prpc_engine.kv.table.mix import mix64
from prpc_engine.kv.table.rows import GrowingRows

CAPACITY_MIN = 1024  # 16 KiB: below that a table saves nothing
# 512 KiB: is split within the second-level cache, in 1 ms; and large enough that chance fills all
# alike
SEGMENT_SLOTS = 32768
LOAD_MAX = 0.6  # at 0.7 a lookup takes half as many passes again
CLEANING = 4  # so many slots are cleaned of removed keys for each key inserted
FULL_MAX = 0.875
SEGMENT_SHIFT = 17  # partition.owner_of has used up the bits below
FREE, REMOVED = -1, -2
# up to so many keys still walking, so many slots of each are looked at in a pass
FEW, PROBES_FEW = 512, 8
Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]

# where each step of a walk is, from its begin
_TRIANGLES = np.cumsum(np.arange(SEGMENT_SLOTS + PROBES_FEW))


class KeyIndex:
    """Maps int64 keys to row numbers, a batch at a time; len(index) is the number of keys. Owned by
    one table; not thread-safe. It grows by a segment at a time.
    """

    def __init__(self) -> None:
        self._length = 0
        self._removed = 0  # slots that say REMOVED
        self._cleaned_next = 0  # the segment that is cleaned next
        self._segment_slots = CAPACITY_MIN
        self._segments = 1
        self._level = 0
        # of the segment that each number belongs to, modulo 2**(level + 1), its first slot
        self._begins = np.zeros(2, np.int64)
        self._used = np.zeros(
            1, np.int64
        )  # of each segment, slots that are not free; too many where removed ones were taken again
        self._table = GrowingRows(2, np.int64)
        _free(self._table.extend(CAPACITY_MIN))

    def __len__(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        """Slots there are."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Memory of the slots."""
        return self._table.nbytes

    def lookup(self, keys: Keys) -> Rows:
        """The row of each key, -1 where the key is absent: int64[n] -> int64[n].
        Keys may repeat.
        """
        return self._find(keys)[0]

    def lookup_or_insert(self, keys: Keys) -> Rows:
        """The row of each key; absent keys get rows len, len + 1, ..., in ascending order of the
        key within one batch.
        """
        rows = self.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            fresh, which = np.unique(keys[absent], return_inverse=True)
            first = self._length
            self.insert(fresh, np.arange(first, first + len(fresh)))
            rows[absent] = first + which
        return rows

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Add keys that are absent, each once, with their rows (at least 0).

        MemoryError, or BadArguments where many keys were made to meet in their hashes; the keys are
        as they were then.
        """
        self._reserve(keys)
        self._put(keys, rows)
        self._length += len(keys)

    def remove(self, keys: Keys) -> None:
        """Forget keys that are present, each once."""
        self._table.array[self._find(keys)[1], 1] = REMOVED
        self._length -= len(keys)
        self._removed += len(keys)

    def renumber(self, keys: Keys, rows: Rows) -> None:
        """Say rows[i] of keys[i] from now on; the keys are present, each once."""
        self._table.array[self._find(keys)[1], 1] = rows

    def _find(self, keys: Keys) -> tuple[Rows, Rows]:
        """(row or -1, the slot that it is in, if any) of each key."""
        slots, mask = self._table.array, self._segment_slots - 1
        positions = self._first_positions(keys)
        found = slots.take(positions, axis=0)
        rows = found[:, 1].copy()
        # somebody else's slot
        walking = (((found[:, 0] != keys) | (rows == REMOVED)) & (rows != FREE)).nonzero()[0]
        if not len(walking):
            return rows, positions
        rows[walking] = -1
        asked, starts, step = keys[walking], positions[walking], 1
        while len(walking):
            steps = _TRIANGLES[step : step + (PROBES_FEW if len(walking) <= FEW else 1)]
            step += len(steps)
            probes = starts[:, None] + steps
            probes &= mask
            probes |= (starts & ~mask)[:, None]
            found = slots.take(probes, axis=0)
            rows_met = found[..., 1]
            over = found[..., 0] == asked[:, None]
            over &= rows_met >= 0  # once at most in a walk, also beyond a free slot
            at, probe = over.nonzero()
            hit = walking[at]
            rows[hit] = rows_met[at, probe]
            positions[hit] = probes[at, probe]
            over |= rows_met == FREE
            still = (~over.any(axis=1)).nonzero()[0]
            walking, asked, starts = walking[still], asked[still], starts[still]
        return rows, positions

    def _reserve(self, keys: Keys) -> None:
        """Make room for these keys."""
        length = self._length + len(keys)
        while self._segment_slots < SEGMENT_SLOTS and length > self._segment_slots * LOAD_MAX:
            self._double()
        self._split(int(2 * length / (SEGMENT_SLOTS * LOAD_MAX)))
        if self._removed:
            for _ in range(-(-len(keys) * CLEANING // self._segment_slots)):
                self._refill([self._cleaned_next], self._taken_out(self._cleaned_next))
                self._cleaned_next = (self._cleaned_next + 1) % self._segments
        used = self._used + self._counted(keys)
        if used.max() > self._segment_slots * FULL_MAX:
            raise BadArguments(
                f"{used.max()} keys agree in the {self._level} bits of their hashes that choose a "
                "segment; "
                f"{int(self._segment_slots * FULL_MAX)} are allowed: no chance makes such keys, "
                "and are not stored"
            )

    def _first_positions(self, keys: Keys) -> Rows:
        """Where the walk of each key begins; see the file's head."""
        mixed = mix64(keys)
        slot_bits = self._segment_slots.bit_length() - 1
        positions = mixed >> np.uint64(64 - slot_bits)
        starts = positions.view(np.int64)
        if self._segments > 1:
            mixed >>= np.uint64(SEGMENT_SHIFT)
            mixed &= np.uint64(len(self._begins) - 1)
            starts += self._begins.take(mixed.view(np.int64))
        return starts

    def _counted(self, keys: Keys) -> Rows:
        """How many of the keys each segment gets."""
        return np.bincount(
            self._first_positions(keys) // self._segment_slots, minlength=self._segments
        )

    def _put(self, keys: Keys, rows: Rows) -> None:
        """Store keys that are not here, each once, and their rows; room must be there.

        Several keys may want one free slot in a pass: all write their row, numpy keeps one of them,
        and who reads its own row back has won. The losers walk on; the slot is then another's.
        """
        slots, mask = self._table.array, self._segment_slots - 1
        positions = self._first_positions(keys)
        self._used += np.bincount(positions // self._segment_slots, minlength=self._segments)
        step = 0
        while len(keys):
            before = slots[positions, 1]
            free = np.flatnonzero(before < 0)
            wanted = positions[free]
            slots[wanted, 1] = rows[free]
            won = free[slots[wanted, 1] == rows[free]]
            slots[positions[won], 0] = keys[won]
            self._removed -= int(np.count_nonzero(before[won] == REMOVED))
            lost = np.ones(len(keys), np.bool_)
            lost[won] = False
            step += 1
            keys, rows, positions = keys[lost], rows[lost], positions[lost]
            positions = (positions & ~mask) | ((positions + step) & mask)

    def _double(self) -> None:
        """The only segment, while it is small."""
        # first: where there is no memory nothing has changed
        _free(self._table.extend(self._segment_slots))
        pairs = self._taken_out(0)
        self._segment_slots *= 2
        self._refill([0], pairs)

    def _split(self, segments: int) -> None:
        """Until there are so many."""
        while self._segments < segments:
            self._table.extend(SEGMENT_SLOTS)
            old = self._segments - (1 << self._level)
            pairs = self._taken_out(old)
            self._begins[self._segments] = self._segments * SEGMENT_SLOTS
            self._segments += 1
            if self._segments == 2 << self._level:
                self._level += 1
                self._begins = np.tile(self._begins, 2)
            self._used = np.append(self._used, 0)
            self._refill([old, self._segments - 1], pairs)

    def _taken_out(self, segment: int) -> Slots:
        """A copy of the slots in use; what is removed is forgotten."""
        slots = self._slots_of(segment)
        self._removed -= int(np.count_nonzero(slots[:, 1] == REMOVED))
        return slots[slots[:, 1] >= 0]

    def _refill(self, segments: list[int], pairs: Slots) -> None:
        """Nothing but these slots in these segments, which are those of all their keys."""
        for segment in segments:
            _free(self._slots_of(segment))
            self._used[segment] = 0
        self._put(pairs[:, 0], pairs[:, 1])

    def _slots_of(self, segment: int) -> Slots:
        slots: Slots = self._table.array[
            segment * self._segment_slots : (segment + 1) * self._segment_slots
        ]
        return slots


def _free(slots: Slots) -> None:
    slots[:, 0] = 0
    slots[:, 1] = FREE
