"""A stream of records that both sides of a ring can work out by themselves, and the processes that
write and read it.

What record `number` of stream `seed` holds, and by which method it is written, follows from the two
numbers, so that a reader knows every byte to expect and every way of writing is taken in turn.
"""

from __future__ import annotations

import os
import signal
import time
import zlib

from shard import Ring, RingConsumer, RingProducer
from tests.faults.zygote import Life

CAPACITY_BYTES = 2048  # so small that records wrap, and pad, every few of them
RECORD_BYTES_MAX = 300
GROUP = 4  # records written in one way, before the next way's turn
DEADLINE_S = 60.0  # means that it hangs


def payload_of(seed: int, number: int) -> bytes:
    """Its number and a pattern, or nothing at all."""
    crc = zlib.crc32(number.to_bytes(8, "little"), seed)
    length = crc % (RECORD_BYTES_MAX + 1)
    return (number.to_bytes(8, "little") + crc.to_bytes(4, "little") * (length // 4))[:length]


def tag_of(number: int) -> int:
    """Records written many at a time have none."""
    return 0 if number // GROUP % 4 == 3 else number % 3


class Writer:
    """The stream from record `number` on, as far as the ring has room."""

    def __init__(self, producer: RingProducer, seed: int, number: int = 0) -> None:
        self.number = number
        self._producer = producer
        self._seed = seed
        self._staged = 0  # of them, how many the reader was not shown

    def step(self, end: int) -> bool:
        """Write a record or a few, up to record `end`; False when the ring is full."""
        way = self.number // GROUP % 4
        group_end = min(end, (self.number // GROUP + 1) * GROUP)
        payloads = [payload_of(self._seed, number) for number in range(self.number, group_end)]
        producer = self._producer
        before = self.number
        if way == 3:
            self.number += producer.try_write_many(payloads)
            return self.number > before
        for payload in payloads:
            tag = tag_of(self.number)
            if way == 0:
                written = producer.try_write(payload, tag)
            elif way == 1:
                memory = producer.claim(len(payload))
                written = memory is not None
                if memory is not None:
                    memory[:] = payload
                    producer.commit(tag)
            else:
                written = producer.try_stage(payload, tag)
            if not written:
                break
            self.number += 1
        if way == 2:
            producer.publish()
        return self.number > before


class Reader:
    """Reads the stream in every way there is, and knows what must come."""

    def __init__(self, consumer: RingConsumer, seed: int) -> None:
        self.number = 0
        self._consumer = consumer
        self._seed = seed
        self._steps = 0

    def _expect(self, payload: bytes | memoryview) -> None:
        expected = payload_of(self._seed, self.number)
        assert payload == expected, (
            f"record {self.number} is {bytes(payload)!r}, {expected!r} was written"
        )
        self.number += 1

    def _expect_tagged(self, payload: memoryview, tag: int) -> None:
        assert tag == tag_of(self.number), (
            f"record {self.number} has tag {tag}, {tag_of(self.number)} was written"
        )
        self._expect(payload)

    def step(self) -> bool:
        """Read a few records; False when there is none."""
        before = self.number
        consumer = self._consumer
        self._steps += 1
        way = self._steps % 4
        if way == 0:
            consumer.poll(self._expect, 3, self._expect_tagged)
        elif way == 1:
            view = consumer.view()
            if view is not None:
                self._expect(view)
                consumer.release()
        elif way == 2:
            payload = consumer.try_read()
            if payload is not None:
                self._expect(payload)
        else:
            for payload in consumer.read_many(3):
                self._expect(payload)
        return self.number > before


def produce(life: Life, ring: Ring, seed: int, end: int) -> None:
    """A process that writes the whole stream."""
    writer = Writer(ring.producer(), seed)
    deadline = time.monotonic() + DEADLINE_S
    while writer.number < end:
        if writer.step(end):
            life.done = writer.number  # published, so no death of ours takes them back
        else:
            assert time.monotonic() < deadline, f"no room after record {writer.number}"
            os.sched_yield()


def consume(life: Life, ring: Ring, seed: int, end: int) -> None:
    """A process that reads the whole stream."""
    reader = Reader(ring.consumer(), seed)
    deadline = time.monotonic() + DEADLINE_S
    while reader.number < end:
        if not reader.step():
            assert time.monotonic() < deadline, f"nothing after record {reader.number}"
            os.sched_yield()


def make_ring(life: Life) -> None:
    """A process that makes a ring, tells its name to whoever reads the descriptor it was given, and
    ends without a word.
    """
    with os.fdopen(life.fds[0], "w") as told:
        told.write(Ring.create(CAPACITY_BYTES).name)


def make_ring_and_produce(life: Life, seed: int, end: int) -> None:
    """As produce(), into a ring of its own; what is needed to attach to it goes to the descriptor
    that it was given.
    """
    ring = Ring.create(CAPACITY_BYTES)
    with os.fdopen(life.fds[0], "w") as told:
        told.write(f"{ring.name} {ring.incarnation}")
    produce(life, ring, seed, end)


def hold_a_ring(life: Life, job: str) -> None:
    """A process of another job that has a ring, tells its name, and lives until it is killed."""
    os.environ["PRPC_JOB"] = job
    ring = Ring.create(CAPACITY_BYTES)
    with os.fdopen(life.fds[0], "w") as told:
        told.write(ring.name)
    signal.pause()
