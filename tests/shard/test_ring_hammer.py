"""A ring between two pinned processes at full speed, watched by a third that reads both cursors all
the time.

    writer    RECORDS records, sizes random from the seed, singles and batches by every verb in turn
    reader    knows every byte of every record from its number: one torn, lost, doubled or out of
              order is seen at once
    observer  no cursor ever goes backward or shows half of a store, and head <= tail <= head +
              capacity

The observer reads with three loads, and both sides move on between them. x86-64 does loads in
program order, so with head read before and after tail it may rely on just this: tail is not behind
the head read before it, and not more than the capacity ahead of the head read after it.

    pytest tests/shard/test_ring_hammer.py                              prints records/s
    PRPC_HAMMER_RECORDS=100000000 pytest -o faulthandler_timeout=0 ...  what .ci/nightly does
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import multiprocess
import pytest

from shard import Ring, RingConsumer, RingProducer, pin, usable_cores
from shard.memory.ring import DATA_OFFSET, HEAD_WORD, TAIL_WORD
from shard.memory.segment import Segment

RECORDS = int(os.environ.get("PRPC_HAMMER_RECORDS", "300000"))
RING_BYTES = 64 << 10  # some 60 records: it wraps, is full and is empty all the time
RECORD_BYTES_MAX = 2000
# random sizes, taken in turn; a prime, so that they meet the verbs and the wrap in ever new ways
SIZES = 4093
PATTERN_BYTES = 64 << 10
BATCH_MAX = 16
READS_MAX = 64  # of one poll() or read_many()
LOOKS_PER_ROUND = 1000  # of the observer, between two questions whether it shall stop
STANDSTILL_S = 60.0  # no record read for so long means that it hangs
VIOLATIONS_MAX = 10  # enough to see what is wrong


class Stream:
    """Every record of one seed, by number."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self._sizes = [chance.randint(0, RECORD_BYTES_MAX) for _ in range(SIZES)]
        self._pattern = chance.randbytes(PATTERN_BYTES + RECORD_BYTES_MAX)

    def payload(self, number: int) -> bytes:
        """Its number, and a piece of the pattern that no record near it has."""
        size = self._sizes[number % SIZES]
        at = number * 40503 % PATTERN_BYTES
        return (number.to_bytes(8, "little") + self._pattern[at : at + size])[:size]


def _write_batch(producer: RingProducer, way: int, payloads: list[bytes]) -> int:
    """Write as many of the payloads as fit, in one of four ways; how many."""
    if way == 0:
        return producer.try_write_many(payloads)
    count = 0
    for payload in payloads:
        if way == 1:
            written = producer.try_write(payload)
        elif way == 2:
            written = producer.try_stage(payload)
        else:
            memory = producer.claim(len(payload))
            written = memory is not None
            if memory is not None:
                memory[:] = payload
                producer.commit()
        if not written:
            break
        count += 1
    if way == 2:
        producer.publish()
    return count


def write_all(handle: Ring, core: int, seed: int, go: Connection) -> None:
    """The writer's process."""
    pin(core)
    producer, stream, chance = handle.producer(), Stream(seed), random.Random(seed + 1)
    go.recv()
    number = 0
    while number < RECORDS:
        size = chance.choice((1, 1, 2, 5, BATCH_MAX))
        payloads = [stream.payload(each) for each in range(number, min(RECORDS, number + size))]
        way = chance.randrange(4)
        while payloads:
            written = _write_batch(producer, way, payloads)
            if not written:
                os.sched_yield()  # the reader may share this core
            del payloads[:written]
            number += written


class Checker:
    """What the reader has read so far, and that it was right."""

    def __init__(self, seed: int) -> None:
        self.number = 0
        self._payload = Stream(seed).payload

    def check(self, payload: bytes | memoryview) -> None:
        if payload != self._payload(self.number):
            raise AssertionError(
                f"record {self.number}: {bytes(payload[:40])!r} of {len(payload)} bytes is not "
                "what was written"
            )
        self.number += 1


def _read_some(
    consumer: RingConsumer, way: int, check: Callable[[bytes | memoryview], None]
) -> int:
    """Read what is there, in one of four ways; how many records."""
    if way == 0:
        return consumer.poll(check, READS_MAX)
    if way == 1:
        payloads = consumer.read_many(READS_MAX)
        for payload in payloads:
            check(payload)
        return len(payloads)
    if way == 2:
        view = consumer.view()
        if view is None:
            return 0
        check(view)
        consumer.release()
        return 1
    copy = consumer.try_read()
    if copy is None:
        return 0
    check(copy)
    return 1


def read_all(handle: Ring, core: int, seed: int, told: Connection) -> None:
    """The reader's process; tells the seconds it took."""
    pin(core)
    consumer, checker, chance = handle.consumer(), Checker(seed), random.Random(seed + 2)
    told.send("ready")
    told.recv()
    began = time.perf_counter()
    while checker.number < RECORDS:
        if not _read_some(consumer, chance.randrange(4), checker.check):
            os.sched_yield()
    took_s = time.perf_counter() - began
    assert consumer.try_read() is None, "a record too many"
    told.send(took_s)


def observe(handle: Ring, told: Connection) -> None:
    """The observer's process, until told to stop; tells (looks, how often a cursor had moved, what
    was wrong).
    """
    segment = Segment.open(handle.name)
    words = segment.memory.cast("Q")
    segment.close()
    capacity = handle.capacity_bytes
    assert len(words) * 8 == DATA_OFFSET + capacity
    told.send("ready")
    wrong: list[str] = []
    looks = moves = head = tail = 0
    while not told.poll():
        for _ in range(LOOKS_PER_ROUND):
            head_before = words[HEAD_WORD]
            tail_now = words[TAIL_WORD]
            head_after = words[HEAD_WORD]
            if not (
                head <= head_before <= head_after
                and tail <= tail_now
                and head_before <= tail_now <= head_after + capacity
                and not (head_before | tail_now | head_after) & 7
            ):
                wrong.append(
                    f"after head {head}, tail {tail}: head {head_before}, tail {tail_now}, "
                    f"head {head_after}"
                )
            moves += (head_after != head) + (tail_now != tail)
            head, tail = head_after, tail_now
        looks += LOOKS_PER_ROUND
        del wrong[VIOLATIONS_MAX:]
    told.send((looks, moves, wrong))


def wait_for_end(reader: Any, writer: Any, handle: Ring) -> None:
    """Until both have ended well;
    fails when one ends badly, or no record is read for STANDSTILL_S.
    """
    segment = Segment.open(handle.name)
    words = segment.memory.cast("Q")
    segment.close()
    running = [reader, writer]
    head = -1
    while running:
        ended = wait([each.sentinel for each in running], STANDSTILL_S)
        for each in [each for each in running if each.sentinel in ended]:
            each.join()
            assert each.exitcode == 0, f"the {each.name} ended with exit code {each.exitcode}"
            running.remove(each)
        assert ended or words[HEAD_WORD] != head, (
            f"nothing was read for {STANDSTILL_S} s at head {head}"
        )
        head = words[HEAD_WORD]


@pytest.mark.slow
def test_no_record_is_torn_lost_doubled_or_out_of_order_and_no_cursor_ever_goes_backward(
    seed: int, tell: Callable[[str], None]
) -> None:
    cores = usable_cores()
    context = multiprocess.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    (to_writer, at_writer), (to_reader, at_reader), (to_observer, at_observer) = pipes
    with Ring.create(RING_BYTES) as handle:
        writer = context.Process(
            target=write_all, args=(handle, cores[0], seed, at_writer), name="writer", daemon=True
        )
        reader = context.Process(
            target=read_all, args=(handle, cores[-1], seed, at_reader), name="reader", daemon=True
        )
        observer = context.Process(
            target=observe, args=(handle, at_observer), name="observer", daemon=True
        )
        processes = (writer, reader, observer)
        try:
            for process in processes:
                process.start()
            for ready in (to_reader, to_observer):
                assert ready.poll(STANDSTILL_S) and ready.recv() == "ready"
            to_reader.send("go")
            to_writer.send("go")
            wait_for_end(reader, writer, handle)
            took_s = to_reader.recv()
            to_observer.send("stop")
            looks, moves, wrong = to_observer.recv()
            observer.join(STANDSTILL_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                for end in pipe:
                    end.close()
    tell(
        f"{RECORDS:,} records in {took_s:.1f} s: {RECORDS / took_s:,.0f} records/s; "
        f"{looks:,} looks saw {moves:,} moves of a cursor; seed {seed}"
    )
    assert wrong == []
    assert moves > 2, "the observer watched while they moved"
