"""Figures of a group of shards in shared memory: each shard writes its own row, anybody reads.

    offset            size  field       written by  meaning
         0               8  magic       creator     MAGIC
         8               8  rows        creator     number of shards
    128 + 128*shard      8  turns       shard       of its reactor
                  +8     8  busy_turns  shard       turns that found work
                 +16     8  parks       shard       times it slept
                 +24     8  calls       shard       functions it ran for others
                 +32     8  failures    shard       of those, how many raised
                 +40     8  tasks       shard       of those, how many were coroutines

A row has cache lines of its own. Each field is one aligned 8-byte store through `cast("Q")`, so a reader sees whole values;
two fields may be of different turns.
"""

from __future__ import annotations

from typing import NamedTuple

from shard.errors import RemoteProtocolError

MAGIC = 0x31544E4343505250  # "PRPCCNT1", little-endian
ROW_WORDS = 16
FIRST_ROW_WORD = 16


class CounterRow(NamedTuple):
    """One shard's figures."""

    turns: int = 0
    busy_turns: int = 0
    parks: int = 0
    calls: int = 0
    failures: int = 0
    tasks: int = 0


assert len(CounterRow._fields) <= ROW_WORDS  # the table above


def size_for(rows: int) -> int:
    """Bytes of memory for so many shards."""
    return (FIRST_ROW_WORD + ROW_WORDS * rows) * 8


class Counters:
    """A view of the table. One writer a row; not owned by anyone."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        if self._words[0] != MAGIC or len(self._words) < FIRST_ROW_WORD + ROW_WORDS * self._words[1]:
            raise RemoteProtocolError(f"no counters here: magic {self._words[0]:#x}, {self._words[1]} rows")
        self.rows = int(self._words[1])

    @classmethod
    def format(cls, memory: memoryview, rows: int) -> Counters:
        """Lay the table out in zeroed memory."""
        words = memory.cast("Q")
        words[1] = rows
        words[0] = MAGIC
        return cls(memory)

    def write(self, row: int, values: CounterRow) -> None:
        """Store a shard's figures. By that shard alone."""
        word = FIRST_ROW_WORD + ROW_WORDS * row
        for value in values:
            self._words[word] = value
            word += 1

    def read(self, row: int) -> CounterRow:
        """A shard's figures as they stand."""
        word = FIRST_ROW_WORD + ROW_WORDS * row
        return CounterRow(*self._words[word : word + len(CounterRow._fields)])
