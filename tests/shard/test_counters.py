"""Figures in shared memory: one writer a row, read by anybody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shard import (
    ClassStatistics,
    CounterRow,
    Counters,
    RemoteProtocolError,
    ShardGroup,
    quantile_ns,
)
from shard.memory.counters import CLASSES_MAX, LATENCY_BUCKETS, bucket, size_for
from shard.memory.segment import Segment
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]
FRONT_BYTES, ROW_BYTES = 1024, 2048
MOST = (1 << 64) - 1


def test_what_is_written_in_one_mapping_is_read_in_another() -> None:
    segment = Segment.create(size_for(3))
    writer, reader = Counters.format(segment.memory, 3), Counters(segment.memory)
    assert reader.rows == 3
    assert reader.read(1) == CounterRow()
    rows = [
        CounterRow(*(100 * row + field for field in range(len(CounterRow._fields))))
        for row in range(3)
    ]
    for row, values in enumerate(rows):
        writer.write(row, values)
    assert [reader.read(row) for row in range(3)] == rows
    writer.write(1, CounterRow(turns=MOST))
    assert reader.read(1).turns == MOST
    assert (reader.read(0), reader.read(2)) == (rows[0], rows[2])
    segment.close()


@pytest.mark.parametrize("row", range(4))
def test_each_row_has_cache_lines_of_its_own(row: int) -> None:
    memory = bytearray(size_for(4))
    counters = Counters.format(memoryview(memory), 4)
    before = bytes(memory)
    counters.write(
        row,
        CounterRow(*[MOST] * len(CounterRow._fields)),
        [MOST] * LATENCY_BUCKETS,
        [MOST] * LATENCY_BUCKETS,
        [ClassStatistics("a class of 24 letters ok", *[MOST] * 5)] * CLASSES_MAX,
    )
    changed = [index for index in range(len(memory)) if memory[index] != before[index]]
    start = FRONT_BYTES + ROW_BYTES * row
    assert start <= min(changed) <= max(changed) < start + ROW_BYTES


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


def test_figures_and_latencies_of_a_row_lie_apart() -> None:
    counters = Counters.format(memoryview(bytearray(size_for(2))), 2)
    call_ns, run_ns = (
        tuple(range(100, 100 + LATENCY_BUCKETS)),
        tuple(range(200, 200 + LATENCY_BUCKETS)),
    )
    row = CounterRow(*range(1, 1 + len(CounterRow._fields)))
    counters.write(1, row, call_ns, run_ns)
    assert (counters.read(1), counters.call_ns(1), counters.run_ns(1)) == (row, call_ns, run_ns)
    assert (counters.read(0), counters.call_ns(0)) == (CounterRow(), (0,) * LATENCY_BUCKETS)


# -- latencies by powers of two --------------------------------------------------------------------


def test_a_duration_belongs_to_the_bucket_of_its_highest_bit() -> None:
    assert [bucket(duration_ns) for duration_ns in (0, 1, 2, 3, 4, 1023, 1024)] == [
        0,
        1,
        2,
        2,
        3,
        10,
        11,
    ]
    assert bucket(10**18) == LATENCY_BUCKETS - 1, "the last one holds all that is longer"


def test_a_quantile_is_bounded_by_the_end_of_its_bucket() -> None:
    buckets = [0] * LATENCY_BUCKETS
    buckets[bucket(1_000)] = 50  # 1.0 us: 512 to 1024 ns
    buckets[bucket(3_000)] = 49
    buckets[bucket(1_000_000)] = 1
    assert quantile_ns(buckets, 0.0) == quantile_ns(buckets, 0.5) == 1 << 10
    assert quantile_ns(buckets, 0.51) == quantile_ns(buckets, 0.99) == 1 << 12
    assert quantile_ns(buckets, 0.999) == quantile_ns(buckets, 1.0) == 1 << 20


def test_without_samples_every_quantile_is_zero() -> None:
    assert quantile_ns([0] * LATENCY_BUCKETS, 0.99) == quantile_ns([], 0.5) == 0


def test_the_busy_ratio_is_the_time_that_was_not_idle() -> None:
    assert CounterRow(up_ns=1000, idle_ns=250).busy_ratio == 0.75
    assert CounterRow().busy_ratio == 0.0, "not yet up"


def test_the_busy_ratio_of_a_row_that_is_being_written_is_a_share_too() -> None:
    counters = Counters.format(memoryview(bytearray(size_for(1))), 1)
    counters.write(0, CounterRow(incarnation=1, up_ns=3600 * 10**9, idle_ns=3500 * 10**9))
    seen = list[CounterRow]()

    def next_life() -> Iterator[int]:
        yield from (2, 10**8)
        seen.append(counters.read(0))

    counters.write(0, next_life())  # type: ignore[arg-type]
    assert (seen[0].incarnation, seen[0].up_ns, seen[0].idle_ns) == (2, 10**8, 3500 * 10**9)
    assert 0.0 <= seen[0].busy_ratio <= 1.0


# -- of living shards ------------------------------------------------------------------------------


def test_shards_count_calls_failures_tasks_and_traffic() -> None:
    with ShardGroup(2, start_method="forkserver", drain_s=PATIENCE_S) as group:
        group.driver.reactor.late_bell_s = PATIENCE_S  # as functions.bear_late_bells()
        group.map(functions.bear_late_bells)
        for number in range(5):
            group.submit_to(1, functions.double, number).result(PATIENCE_S)
        group.submit_to(1, functions.double_async, 1).result(PATIENCE_S)
        assert group.submit_to(1, functions.raise_odd, 1).error(PATIENCE_S) is not None
    row = group.statistics().shards[1].counters  # written once more at its end
    assert (row.incarnation, row.tasks, row.failures, row.late_wakes) == (1, 1, 1, 0)
    assert row.calls >= 7
    assert row.records >= row.calls
    assert row.bytes_in > 0 < row.bytes_out
    assert 0 < row.busy_turns <= row.turns
    assert row.wakeups <= row.parks
    assert 0.0 <= row.busy_ratio <= 1.0
    application = group.statistics().application
    assert (application.calls, application.failures, application.late_wakes) == (0, 0, 0)
    assert application.records >= 7


def test_one_call_of_many_is_timed_at_both_ends() -> None:
    with ShardGroup(1, start_method="forkserver", drain_s=PATIENCE_S) as group:
        futures = [group.submit_to(0, functions.double, number) for number in range(500)]
        assert [future.result(PATIENCE_S) for future in futures] == [
            2 * number for number in range(500)
        ]
        calls = group.latency_ns()
    assert 500 // 64 <= sum(calls) <= 500 // 64 + 1
    assert quantile_ns(calls, 0.5) > 0
    assert sum(group._counters.run_ns(0)) >= 500 // 64


READER = """
import sys
from shard import Counters
from shard.memory.segment import Segment
counters = Counters(Segment.attach(int(sys.argv[1])).memory)
seen = 0
while seen < 1000:
    row = counters.read(0)
    assert row.calls >= seen, "whole values, and never less than before"
    seen = row.calls
    print(seen, flush=True)
    sys.stdin.readline()
"""


def test_another_process_reads_the_figures_while_the_shard_works() -> None:
    with ShardGroup(1, start_method="forkserver") as group:
        fd = group._counters_segment.fd
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(fd)],
            cwd=ROOT,
            pass_fds=[fd],
            env={**os.environ, "PYTHONWARNINGS": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        while line := reader.stdout.readline():
            seen = int(line)
            group.submit_to(0, sum, [1, 2]).result(PATIENCE_S)
            for future in [group.submit_to(0, functions.double, 1) for _ in range(200)]:
                future.result(PATIENCE_S)
            reader.stdin.write("again\n")
            reader.stdin.flush()
        reader.stdin.close()
        reader.stdout.close()
        assert reader.wait(PATIENCE_S) == 0
        assert seen >= 1000


def test_classes_of_work_are_read_as_they_were_written_and_a_new_start_forgets_them() -> None:
    counters = Counters.format(memoryview(bytearray(size_for(2))), 2)
    assert counters.classes(0) == ()
    full = [
        ClassStatistics(f"class {number}", 1 + number, 2, MOST, 4, number)
        for number in range(CLASSES_MAX)
    ]
    counters.write(0, CounterRow(), classes=full)
    assert counters.classes(0) == tuple(full)
    assert counters.read(1) == CounterRow()
    long = ClassStatistics("Ä" * 20, 7, 0, 0, 0, 0)
    counters.write(0, CounterRow(), classes=[long])
    assert counters.classes(0) == (long._replace(name="Ä" * 12),)


def test_a_group_tells_what_each_class_did_in_each_shard() -> None:
    with ShardGroup(1) as group:
        for number in range(3):
            group.submit_to(0, functions.bulk_step, number).result(PATIENCE_S)
        give_up = time.monotonic() + PATIENCE_S
        while len(classes := group.statistics().shards[0].classes) < 2 or classes[1].steps < 3:
            assert time.monotonic() < give_up, classes
    latency, bulk = classes
    assert (latency.name, latency.shares) == ("latency", 1000)
    assert (bulk.name, bulk.shares, bulk.steps, bulk.waiting) == ("bulk", 100, 3, 0)
    assert bulk.busy_ns >= bulk.longest_ns > 0
