"""A map from int64 keys to row numbers 0, 1, 2, ... that looks up whole batches: open addressing in one numpy array.

    slots  int64[capacity, 2]   slot s is (key, row); row = -1 marks a free slot, whatever its key says

Capacity is a power of two; a key starts at the highest bits of mix64(key) and walks on in growing steps, to its key or
to a free slot (+1, +2, +3: triangular numbers visit every slot of a power of two; Knuth vol. 3, 6.4, exercise 20).
Invariant: rows in use are exactly 0..len-1, one slot each; nothing is ever removed, so no slot needs a tombstone.

Why a slot is a pair: key and row then come from one cache line, and in a big table the cache miss is the price.
Why batches: each pass handles all keys that are still walking, so Python's cost is paid per pass and not per key. The
bound on the load keeps the number of passes small: at half full, 1 key in 2**k or fewer is left after k steps or so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.mix import mix64

CAPACITY_MIN = 1024  # 16 KiB: below that a table saves nothing
LOAD_MAX = 0.5  # 32 bytes a key at the worst; at 0.7 a lookup takes about half as many passes again
Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]


class KeyIndex:
    """len(index) keys and their rows. Owned by one table."""

    def __init__(self) -> None:
        self._length = 0
        self._slots = _free_slots(CAPACITY_MIN)

    def __len__(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        """Slots there are; len() is at most LOAD_MAX of it."""
        return len(self._slots)

    def lookup(self, keys: Keys) -> Rows:
        """The row of each key, -1 where the key is absent: int64[n] -> int64[n]. Keys may repeat."""
        slots = self._slots
        mask = len(slots) - 1
        positions = _first_positions(keys, len(slots))
        found = slots.take(positions, axis=0)
        rows = found[:, 1].copy()
        walking = np.flatnonzero((found[:, 0] != keys) & (rows >= 0))  # somebody else's slot: walk on
        step = 0
        if len(walking):
            rows[walking] = -1
            keys, positions = keys[walking], positions[walking]
        while len(walking):
            step += 1
            positions = (positions + step) & mask
            found = slots.take(positions, axis=0)
            hit = found[:, 0] == keys
            rows[walking[hit]] = found[hit, 1]  # a free slot may hold the key's bits by chance: then this is -1
            still = np.flatnonzero(~hit & (found[:, 1] >= 0))
            walking, keys, positions = walking[still], keys[still], positions[still]
        return rows

    def lookup_or_insert(self, keys: Keys) -> Rows:
        """The row of each key; absent keys get the next rows, in ascending order of the key within one batch."""
        rows = self.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            fresh, which = np.unique(keys[absent], return_inverse=True)
            first = self._length
            self._reserve(first + len(fresh))
            _insert(self._slots, fresh, np.arange(first, first + len(fresh)))
            self._length = first + len(fresh)
            rows[absent] = first + which
        return rows

    def keys(self) -> Keys:
        """All keys in order of their rows: int64[len]."""
        used = self._slots[self._slots[:, 1] >= 0]
        keys = np.empty(self._length, np.int64)
        keys[used[:, 1]] = used[:, 0]
        return keys

    def _reserve(self, length: int) -> None:
        """Make room for `length` keys. Doubling: each key is moved less than twice on average, however it grew."""
        capacity = len(self._slots)
        while length > capacity * LOAD_MAX:
            capacity *= 2
        if capacity != len(self._slots):
            keys = self.keys()
            self._slots = _free_slots(capacity)
            _insert(self._slots, keys, np.arange(len(keys)))


def _free_slots(capacity: int) -> npt.NDArray[np.int64]:
    slots = np.empty((capacity, 2), np.int64)
    slots[:, 0] = 0
    slots[:, 1] = -1
    return slots


def _first_positions(keys: Keys, capacity: int) -> npt.NDArray[np.int64]:
    """The highest log2(capacity) bits of the mixed key: partition.owner_of has used up the low ones."""
    return (mix64(keys) >> np.uint64(65 - capacity.bit_length())).view(np.int64)


def _insert(slots: npt.NDArray[np.int64], keys: Keys, rows: Rows) -> None:
    """Put keys that are not in `slots`, each once, and their rows; room must be there.

    Several keys may want one free slot in a pass: all write their row, numpy keeps one of them, and who reads its own
    row back has won. The losers walk on; the slot is then another's.
    """
    mask = len(slots) - 1
    positions = _first_positions(keys, len(slots))
    step = 0
    while len(keys):
        free = np.flatnonzero(slots[positions, 1] < 0)
        slots[positions[free], 1] = rows[free]
        won = free[slots[positions[free], 1] == rows[free]]
        slots[positions[won], 0] = keys[won]
        lost = np.ones(len(keys), np.bool_)
        lost[won] = False
        step += 1
        keys, rows, positions = keys[lost], rows[lost], (positions[lost] + step) & mask
