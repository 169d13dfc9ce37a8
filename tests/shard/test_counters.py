"""Figures in shared memory: one writer a row, read by anybody."""

from __future__ import annotations

import pytest

from shard import Counters, RemoteProtocolError
from shard.counters import CounterRow, size_for
from shard.segment import Segment


def test_what_is_written_in_one_mapping_is_read_in_another() -> None:
    segment = Segment.create(size_for(3))
    writer, reader = Counters.format(segment.memory, 3), Counters(segment.memory)
    assert reader.rows == 3
    assert reader.read(1) == CounterRow()
    rows = [CounterRow(*(100 * row + field for field in range(len(CounterRow._fields)))) for row in range(3)]
    for row, values in enumerate(rows):
        writer.write(row, values)
    assert [reader.read(row) for row in range(3)] == rows
    writer.write(1, CounterRow(turns=(1 << 64) - 1))
    assert reader.read(1).turns == (1 << 64) - 1
    assert (reader.read(0), reader.read(2)) == (rows[0], rows[2])
    segment.close()


@pytest.mark.parametrize("row", range(4))
def test_each_row_has_cache_lines_of_its_own(row: int) -> None:
    memory = bytearray(size_for(4))
    counters = Counters.format(memoryview(memory), 4)
    before = bytes(memory)
    counters.write(row, CounterRow(*([0xFFFFFFFFFFFFFFFF] * len(CounterRow._fields))))
    changed = [index for index in range(len(memory)) if memory[index] != before[index]]
    start = 128 + 128 * row
    assert start <= min(changed) <= max(changed) < start + 128


@pytest.mark.parametrize(
    "memory",
    [bytes(1024), size_for(1).to_bytes(8, "little") + bytes(1016)],
    ids=["zeros", "other magic"],
)
def test_memory_without_counters_is_refused(memory: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no counters here"):
        Counters(memoryview(memory))


def test_a_table_that_claims_more_rows_than_its_memory_has_is_refused() -> None:
    memory = bytearray(size_for(2))
    Counters.format(memoryview(memory), 2)
    memory[8] = 3
    with pytest.raises(RemoteProtocolError, match="3 rows"):
        Counters(memoryview(memory))
