"""Which rows of a sparse table changed since when, and which keys lost theirs: what an incremental
checkpoint writes.

    stamps   uint32[rows, 1]    the epoch in which the row last changed, was added or loaded; moves
                                with its row
    removed  (epoch, int64[n])  keys that lost their row in that epoch, in the order that they did

An epoch ends with each cut. Stamps and not bits, because a save may fail: then nothing has to be
put back, and the next one writes what changed since the last that counts. A push pays one scatter
of 4 bytes a row, and only while a table is tracked.

A key that comes and goes again and again is named each time. When more are named than there are
rows, they are dropped: changes from before are then not known, and the table is saved in full,
which is hardly more than its changes would be.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.table.rows import GrowingRows

REMOVED_MIN = 65536  # named keys that are never too many: half a MiB
Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]


class Changed(NamedTuple):
    """Rows in ascending order, and keys removed; one that came again is in both: removed first,
    then stored.
    """

    rows: Rows
    removed: Keys


class Changes:
    """Of one table that has `rows` rows now. Owned by its RowStore, which moves the stamps."""

    def __init__(self, rows: int) -> None:
        self.stamps = GrowingRows(1, np.uint32)
        self.stamps.extend(rows)  # new memory is 0: before the first epoch
        self._epoch = 1
        self._known_from = 0  # changes since an epoch before this one are not known
        self._removed: list[tuple[int, Keys]] = []
        self._removed_count = 0

    @property
    def nbytes(self) -> int:
        """Of the keys named; the stamps are an array of the rows."""
        return 8 * self._removed_count

    def mark(self, rows: Rows) -> None:
        """These change now."""
        self.stamps.array[:, 0][rows] = self._epoch

    def remove(self, keys: Keys) -> None:
        """These have lost their rows."""
        self._removed.append((self._epoch, keys))
        self._removed_count += len(keys)
        if self._removed_count > max(REMOVED_MIN, len(self.stamps)):
            self._removed, self._removed_count, self._known_from = [], 0, self._epoch

    def end_epoch(self) -> int:
        """The number of the epoch that ends; what changes from now on changed since it."""
        self._epoch += 1
        return self._epoch - 1

    def since(self, epoch: int) -> Changed | None:
        """What changed after that epoch; None when it is not known any more."""
        if epoch < self._known_from:
            return None
        removed = [keys for when, keys in self._removed if when > epoch]
        return Changed(
            np.flatnonzero(self.stamps.array[:, 0] > epoch),
            np.concatenate([np.empty(0, np.int64), *removed]),
        )

    def forget(self, epoch: int) -> None:
        """Nobody will ask since an earlier one."""
        self._known_from = max(self._known_from, epoch)
        self._removed = [(when, keys) for when, keys in self._removed if when > epoch]
        self._removed_count = sum(len(keys) for _, keys in self._removed)
