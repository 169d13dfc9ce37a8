"""The rows of a sparse table, found by key: an index, and one array for each thing that a row has.

    keys       int64[rows, 1]      the key of the row
    values     dtype[rows, dim]    what is pulled, in the table's storage dtype
    <state>    float32[rows, dim]  one for each state array of the optimizer, under its name there
    row_steps  float32[rows, 1]    gradients that the row has had, where the optimizer looks at
                                   that; exact to 2**24, stays there
    stamps     int64[rows, 1]      when the row was last used, where rows are evicted
    changes    uint32[rows, 1]     when the row was last changed, while that is tracked (changes.py)

Invariant: rows are exactly 0..len-1, and the index says of keys[r] that it is in r. When rows go,
the last ones move into the gaps: so nothing has to know of gaps, and a table that has shrunk is
read as fast as a new one. Rows are filled and moved BLOCK_ELEMENTS at a time: scratch then stays in
the second-level cache, and is never mapped anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments
from prpc_engine.kv.table.changes import Changes
from prpc_engine.kv.table.index import KeyIndex
from prpc_engine.kv.table.initializer import Initializer
from prpc_engine.kv.table.rows import GrowingRows

BLOCK_ELEMENTS = 32768  # float32: 128 KiB an array
STEPS_COUNTED_MAX = 2.0**24
Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class RowStore:
    """A row store holds the rows of a sparse table, and finds them by key.

    Owned by one table. dim: numbers in a row. state_initial: what each state array of the optimizer
    starts with, by name. counts_steps, stamped: whether rows have `row_steps`, and `stamps`. Adding
    rows raises MemoryError or BadArguments, and leaves all as it was. The arrays: the table at the
    file's head.
    """

    def __init__(
        self,
        dim: int,
        dtype: npt.DTypeLike,
        state_initial: Mapping[str, float],
        counts_steps: bool,
        stamped: bool,
    ) -> None:
        self.index = KeyIndex()
        self.keys = GrowingRows(1, np.int64)
        self.values = GrowingRows(dim, dtype)
        self.state = {name: GrowingRows(dim) for name in state_initial}
        self.row_steps = GrowingRows(1) if counts_steps else None
        self.stamps = GrowingRows(1, np.int64) if stamped else None
        self.block_rows = max(1, BLOCK_ELEMENTS // dim)
        self.columns = {"keys": self.keys, "values": self.values} | self.state
        if self.row_steps is not None:
            self.columns["row_steps"] = self.row_steps
        if self.stamps is not None:
            self.columns["stamps"] = self.stamps
        self.changes: Changes | None = None
        self._arrays = [*self.columns.values()]
        self._state_initial = dict(state_initial)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Memory of the rows there are, and of the index."""
        named = self.changes.nbytes if self.changes is not None else 0
        return self.index.nbytes + named + sum(array.nbytes for array in self._arrays)

    def track_changes(self, tracked: bool) -> None:
        """Begin to know what changes from now on, or stop; what is already as asked goes on."""
        if tracked == (self.changes is not None):
            return
        if self.changes is None:
            self.changes = Changes(len(self))
            self._arrays.append(self.changes.stamps)
        else:
            self._arrays.remove(self.changes.stamps)
            self.changes = None

    def add(self, keys: Keys, initializer: Initializer) -> Rows:
        """Give each key of `keys` (absent, none twice) the next row, as `initializer` says, and
        return the rows: int64[n].
        """
        first = len(self)
        rows = self._append(keys)
        for begin in range(0, len(keys), self.block_rows):
            block = slice(first + begin, first + begin + self.block_rows)
            self.values.array[block] = initializer.rows(
                keys[begin : begin + self.block_rows], self.values.array.shape[1]
            )
        for name, initial in self._state_initial.items():
            self.state[name].array[first:] = initial
        if self.row_steps is not None:
            self.row_steps.array[first:] = 0
        return rows

    def remove(self, rows: Rows, before_change: Callable[[Rows], None] | None) -> None:
        """Forget these rows (none twice) and their keys; `before_change` hears of all rows that go
        or are written over.
        """
        length = len(self) - len(rows)
        stays = np.ones(len(self) - length, np.bool_)  # of the last rows, as many as go
        stays[rows[rows >= length] - length] = False
        moving, gaps = length + np.flatnonzero(stays), rows[rows < length]
        if before_change is not None:
            before_change(np.concatenate([gaps, np.arange(length, len(self))]))
        gone = self.keys.array[rows, 0]
        if self.changes is not None:
            self.changes.remove(gone)
        self.index.remove(gone)
        self.index.renumber(self.keys.array[moving, 0], gaps)
        for array in self._arrays:
            for begin in range(0, len(gaps), self.block_rows):
                block = slice(begin, begin + self.block_rows)
                array.array[gaps[block]] = array.array[moving[block]]
            array.truncate(length)

    def load(self, piece: Mapping[str, npt.NDArray[Any]]) -> Rows:
        """Store rows that `columns` once held, for keys that are here or not; returns where they
        are. Who has no stamps for them sets them after."""
        keys: Keys = np.ascontiguousarray(piece["keys"]).reshape(-1)
        rows = self.index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        rows[absent] = self._append(keys[absent])
        # new ones lie in a row
        there = slice(rows[0], rows[0] + len(rows)) if len(absent) == len(rows) > 0 else rows
        for name, array in self.columns.items():
            if name != "stamps" or name in piece:
                array.array[there] = piece[name]
        if self.changes is not None:
            self.changes.mark(rows)
        return rows

    def _append(self, keys: Keys) -> Rows:
        """Rows for these keys (absent, none twice), for the caller to fill. MemoryError,
        BadArguments: all is as it was.
        """
        first = len(self)
        rows = np.arange(first, first + len(keys))
        try:
            for array in self._arrays:
                array.extend(len(keys))
            self.index.insert(keys, rows)
        except (MemoryError, BadArguments):
            for array in self._arrays:
                array.truncate(first)
            raise
        self.keys.array[first:, 0] = keys
        return rows

    def step(self, rows: Rows) -> Floats:
        """Count one more gradient for each row; float32[n, 1] with this one."""
        assert self.row_steps is not None
        steps = self.row_steps.gather(rows)
        steps += 1
        np.minimum(steps, STEPS_COUNTED_MAX, out=steps)
        self.row_steps.scatter(rows, steps)
        return steps
