"""A partition sent to another server while it goes on changing: a cut of its tables, read piece by
piece in order.

    who is filled                      the primary
    begin                              cuts all tables, and the ledger, at one moment; the copy gets
                                       a number
    read, until there is nothing more  copies the next piece of at most PIECE_BYTES, to who names
                                       that number: what was asked of a copy before may come late
    (the primary keeps what is applied after the cut, in order, and sends it when the reader has
    all: replication_log.py)

A table has one cut at a time: a partition that is being saved is copied after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import Rejected
from prpc_engine.kv.checkpoint.cut import TableCut
from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table.table import SparseTable

Array = npt.NDArray[Any]
PIECE_BYTES = 4 << 20  # the primary's reactor copies one in a millisecond, between other requests
_numbers = itertools.count(1)  # of all copies of this process


class OutgoingCopy:
    """The primary's side. Owned by the stream to the server that is filled, which calls close()."""

    def __init__(self, shard: TableShard) -> None:
        tables = shard.tables
        if shard.is_saving or any(table.before_change is not None for _, table in tables.values()):
            raise Rejected("the partition is being saved or copied: it is copied after that")
        self.number = next(_numbers)
        self._cuts = {name: TableCut(table) for name, (_, table) in tables.items()}
        self.description = {
            "copy": self.number,
            "specs": [spec.to_dict() for spec, _ in tables.values()],
            "scalars": {name: cut.scalars for name, cut in self._cuts.items()},
            "ledger": shard.ledger.arrays(),
        }
        self._pieces = self._walk()

    def _walk(self) -> Iterator[tuple[str, int, dict[str, Array]]]:
        for name, cut in self._cuts.items():
            for begin, end in cut.pieces(PIECE_BYTES):
                yield name, begin, cut.read(begin, end, cut.empty_piece(PIECE_BYTES))
            for what, array in cut.singles.items():
                for begin in range(0, array.size, PIECE_BYTES):
                    yield name, begin, {what: array.reshape(-1)[begin : begin + PIECE_BYTES]}

    def read(self) -> tuple[str, int, dict[str, Array]] | None:
        """The next piece: table, first row (of a dense table, and of singles(): element), columns;
        None: that was all.
        """
        piece = next(self._pieces, None)
        if piece is None:
            self.close()
        return piece

    def close(self) -> None:
        """The tables change freely again."""
        for cut in self._cuts.values():
            cut.close()


class IncomingCopy:
    """The side of who is filled: a new partition's tables, nobody else's yet."""

    def __init__(self, shard: TableShard, description: dict[str, Any]) -> None:
        self.shard = shard
        self._scalars = description["scalars"]
        for spec in description["specs"]:
            shard.create_table(spec)
        shard.ledger.load(description["ledger"])

    def put(self, table: str, begin: int, piece: dict[str, Array]) -> None:
        """What read() gave."""
        _, there = self.shard.tables[table]
        if isinstance(there, SparseTable):
            if "sketch" in piece:
                there.singles()["sketch"].reshape(-1)[begin : begin + len(piece["sketch"])] = piece[
                    "sketch"
                ]
            else:
                there.load(piece)
            return
        for name, array in there.columns().items():
            flat = array.reshape(-1)
            assert np.shares_memory(flat, array)
            flat[begin : begin + len(piece[name])] = piece[name]

    def finish(self) -> TableShard:
        """All pieces are there."""
        for name, scalars in self._scalars.items():
            table = self.shard.tables[name][1]
            table.load_scalars(scalars)
            table.load_counters(scalars)
        return self.shard
