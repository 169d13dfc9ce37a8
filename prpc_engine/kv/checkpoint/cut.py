"""The rows of a table as they were at one moment, read piece by piece while the table goes on
changing.

    rows of the table at the cut  0 ... read ... rows
                                  read already   to be read: a push that changes such a row first
                                                 has its old content kept

An incremental checkpoint reads some of the rows only: then "rows" are counted within those, which
ascend.

A piece is what the table holds now, with the kept rows laid over it. So a push costs one copy of
the rows it changes, the first time that it changes them during a save, and nothing else; memory is
bounded by the table's own size, and reached only when every row is changed before it is read. A
dense push changes all rows: the first one during a save keeps what is left to read.

Everything runs in the shard's one thread; what is read is the reader's own memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.table.changes import Changed

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
USED = "used"
# kept rows are stored in segments of that many, as growing one array would copy all again
SEGMENT_ROWS = 65536


class BeforeChange(Protocol):
    """Told by a table which rows it is about to change: a sparse one says their numbers, each once,
    a dense one None for all.
    """

    def __call__(self, rows: Rows | None) -> None: ...


class Table(Protocol):
    """What a checkpoint needs of a sparse or dense table to cut it: its live arrays, its scalars,
    and a call before rows change.
    """

    before_change: BeforeChange | None

    def columns(self) -> dict[str, Array]:
        """Its live arrays; axis 0 counts rows. "keys" is among them when rows have keys."""

    def scalars(self) -> dict[str, float]:
        """What there is one of."""

    def singles(self) -> dict[str, Array]:
        """Its live arrays of which axis 0 counts no rows."""


class TableCut:
    """A cut reads the rows of a table as they were when it was made, while pushes go on.

    pieces() names the pieces, read() copies them, in order and each once. Used in the shard's one
    thread. Owned by one save or one copy, which calls close(); a table has one cut at a time.
    changed: the rows to read of a sparse table; None: all. `removed`: the keys that it names
    beside, None without it.
    used: [key, stamp] of other rows, that have been used since: they are among `singles`, as is a
    copy of the table's own.
    """

    def __init__(
        self,
        table: Table,
        changed: Changed | None = None,
        used: Array | None = None,
        segment_rows: int = SEGMENT_ROWS,
    ) -> None:
        assert table.before_change is None, "a table has one cut at a time"
        self._table = table
        columns = table.columns()
        self.scalars = table.scalars()
        self.singles = {name: array.copy() for name, array in table.singles().items()}
        if used is not None:
            self.singles[USED] = used
        self._chosen = chosen = changed.rows if changed is not None else None
        self.removed = changed.removed if changed is not None else None
        rows = () if chosen is None else (len(chosen),)
        self.shapes = {
            name: (rows or array.shape[:1]) + array.shape[1:] for name, array in columns.items()
        }
        self.dtypes = {name: array.dtype for name, array in columns.items()}
        self._is_dense = "keys" not in columns
        self.rows = len(self._rows_of(columns)["values"]) if chosen is None else len(chosen)
        self.row_bytes = sum(array[:1].nbytes for array in self._rows_of(columns).values()) or 1
        self._read = 0
        self._kept = 0
        # of a row in the segments, counted from 1; 0: not kept
        self._places: npt.NDArray[np.uint32] | None = None
        self._segment_rows = segment_rows
        self._segments: dict[str, list[Array]] = {name: [] for name in columns}
        # rows from _rest_begin on, after a change of all
        self._rest: dict[str, Array] | None = None
        self._rest_begin = 0
        table.before_change = self._keep

    def pieces(self, bytes_max: int) -> Iterator[tuple[int, int]]:
        """[begin, end) of rows, in order, each of at most `bytes_max` bytes, or one row."""
        step = max(1, bytes_max // self.row_bytes)
        for begin in range(0, self.rows, step):
            yield begin, min(begin + step, self.rows)

    def read(self, begin: int, end: int, into: dict[str, Array]) -> dict[str, Array]:
        """Copy the rows as they were at the cut to the first rows of `into`; pieces are read in
        order, each once.
        """
        assert begin == self._read, f"piece from row {begin}, {self._read} is next"
        piece = {name: array[: end - begin] for name, array in into.items()}
        if self._rest is not None:
            for name, array in self._rest.items():
                piece[name][:] = array[begin - self._rest_begin : end - self._rest_begin]
        else:
            # a table that shrank has kept what it lost
            for name, array in self._rows_of(self._table.columns()).items():
                if self._chosen is None:
                    there = array[begin:end]
                    piece[name][: len(there)] = there
                else:
                    rows = self._chosen[begin:end]
                    rows = rows[: np.searchsorted(rows, len(array))]
                    # else take() makes a copy first
                    np.take(array, rows, axis=0, out=piece[name][: len(rows)], mode="clip")
            if self._places is not None:
                self._lay_kept_over(piece, self._places[begin:end])
        self._read = end
        return piece

    def close(self) -> None:
        """The table changes freely again. A second close does nothing."""
        if self._table.before_change == self._keep:
            self._table.before_change = None
        self._segments.clear()
        self._places = self._rest = None

    def empty_piece(self, bytes_max: int) -> dict[str, Array]:
        """Memory for a piece of pieces(bytes_max)."""
        rows = max(1, bytes_max // self.row_bytes)
        now = self._rows_of(self._table.columns())
        return {
            name: np.empty((min(rows, self.rows), *array.shape[1:]), array.dtype)
            for name, array in now.items()
        }

    def _rows_of(self, columns: dict[str, Array]) -> dict[str, Array]:
        """A dense table is read by elements: one row of it can be a GiB."""
        return (
            {name: array.reshape(-1) for name, array in columns.items()}
            if self._is_dense
            else columns
        )

    def _keep(self, rows: Rows | None) -> None:
        if rows is not None:
            self._keep_rows(rows)
        elif self._rest is None:
            self._rest_begin = self._read
            now = self._rows_of(self._table.columns())
            self._rest = {name: array[self._read : self.rows].copy() for name, array in now.items()}

    def _keep_rows(self, rows: Rows) -> None:
        if self._places is None:
            self._places = np.zeros(self.rows, np.uint32)
        numbers = rows  # as read() counts them
        if self._chosen is not None:
            numbers = np.searchsorted(self._chosen, rows)
            is_chosen = numbers < self.rows
            is_chosen[is_chosen] = self._chosen[numbers[is_chosen]] == rows[is_chosen]
            rows, numbers = rows[is_chosen], numbers[is_chosen]
        unread = (numbers >= self._read) & (numbers < self.rows)
        rows, numbers = rows[unread], numbers[unread]
        fresh = self._places[numbers] == 0
        rows, numbers = rows[fresh], numbers[fresh]
        self._places[numbers] = np.arange(
            self._kept + 1, self._kept + 1 + len(rows), dtype=np.uint32
        )
        columns = self._table.columns()
        done = 0
        while done < len(rows):
            used = self._kept % self._segment_rows
            some = rows[done : done + self._segment_rows - used]
            for name, array in columns.items():
                if not used:
                    self._segments[name].append(
                        np.empty((self._segment_rows, *array.shape[1:]), array.dtype)
                    )
                self._segments[name][-1][used : used + len(some)] = array[some]
            done += len(some)
            self._kept += len(some)

    def _lay_kept_over(self, piece: dict[str, Array], places: npt.NDArray[np.uint32]) -> None:
        kept = np.flatnonzero(places)
        at = places[kept].astype(np.int64) - 1
        segments = at // self._segment_rows
        for number in np.unique(segments):
            here = segments == number
            for name, out in piece.items():
                out[kept[here]] = self._segments[name][number][at[here] % self._segment_rows]
