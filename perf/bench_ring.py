"""Records from one pinned process to another through a ring in shared memory, and back.

Expected:
    flag ping-pong    two stores and two loads that miss: 0.2 us there and back. No ring can be faster.
    64 B round trip   two writes and two reads of about 0.5 us each, and two cache-line hand-overs: some 2.5 us.
                      A pipe sleeps and wakes twice: 50 us on a virtual machine.
    one way, 64 B     the slower side's loop, some 0.8 us a record; staged by 32 and polled, 0.5 us: 1 to 2 M/s.
    one way, 64 KiB   a copy in and a copy out, at the same time on two cores, both in cache: as fast as one np.copyto
                      of 64 KiB (10 to 30 GB/s), less 1 us a record: some 10 GB/s.

    python -m perf.bench_ring [--json] [--quick]
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import shard
from perf import peers
from perf.child import Announce
from perf.harness import Candidate, Place, Result, compare
from perf.peers import PeerInfo, open_peer
from perf.peers.face import Job
from perf.targets import Target
from perf.timing import FULL, TINY, Effort, Sample, time_each

NAME = "ring"
CAPACITY_BYTES = 1 << 20  # holds sixteen of the largest records; stays in the second-level cache of both cores
BATCH = 32  # records staged before one publish, and handed out by one poll; fewer when they would fill the ring
PING_PONGS_PER_CALL = 100  # too short to be timed one by one
PING_WORD, PONG_WORD = 0, 16  # on cache lines of their own
FLAG_BYTES = 4096
ONE_WAY_FIRST = 2_000  # records by which the rate is guessed


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A record there, the same record back."""

    size_bytes: int

    def __str__(self) -> str:
        return f"round trip, {self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class OneWay:
    """Records as fast as they go; the reader says when it has had them all."""

    size_bytes: int

    def __str__(self) -> str:
        return f"one way, {self.size_bytes} B"


Case = RoundTrip | OneWay
CASES: list[Case] = [RoundTrip(8), RoundTrip(64), RoundTrip(4096), OneWay(64), OneWay(4096), OneWay(65536)]
TARGETS: list[Target] = []  # none are set for the ring alone: bench_rpc's stand on it


def run(case: Case, effort: Effort = FULL, progress: Callable[[str], None] | None = None, pinned: bool = True) -> list[Result]:
    """Measure one case with all candidates."""
    if isinstance(case, RoundTrip):
        candidates = [
            Candidate("shard.Ring", "ours", partial(measure_round_trip, case=case)),
            Candidate("shard.Ring, in place", "ours", partial(measure_round_trip, case=case, in_place=True)),
            Candidate("flag ping-pong", "limit", measure_ping_pong),
            Candidate(peers.PIPE.name, "peer", partial(measure_peer, case=case, info=peers.PIPE)),
        ]
    else:
        batch = min(BATCH, CAPACITY_BYTES // 4 // case.size_bytes)  # a quarter: the reader has one while the next is staged
        candidates = [
            Candidate("shard.Ring", "ours", partial(measure_one_way, case=case, batch=1)),
            Candidate(f"shard.Ring, by {batch}", "ours", partial(measure_one_way, case=case, batch=batch)),
            Candidate("np.copyto", "limit", partial(measure_copy, case=case)),
        ]
    return compare(NAME, str(case), candidates, effort, bytes_per_op=case.size_bytes, pinned=pinned, progress=progress)


def measure_round_trip(place: Place, effort: Effort, case: RoundTrip, in_place: bool = False) -> Sample:
    """try_write and try_read; or claim, view and release, where the reader only looks at the record in the ring."""
    payload = _payload(case.size_bytes)
    with shard.Ring.create(CAPACITY_BYTES) as there, shard.Ring.create(CAPACITY_BYTES) as back:
        producer, consumer = there.producer(), back.consumer()
        with place.serve(echo_in_place if in_place else echo, there, back):
            if in_place:

                def operate() -> None:
                    while (memory := producer.claim(len(payload))) is None:
                        pass
                    memory[:] = payload
                    producer.commit()
                    while consumer.view() is None:
                        pass
                    consumer.release()

            else:

                def operate() -> None:
                    while not producer.try_write(payload):
                        pass
                    while consumer.try_read() is None:
                        pass

            sample = time_each(operate, effort)
            producer.try_write(payload)
            while (answer := consumer.try_read()) is None:
                pass
            return sample.with_work(
                bytes_echoed=len(answer), bytes_right=sum(a == b for a, b in zip(answer, payload, strict=True))
            )


def echo(announce: Announce, there: shard.Ring, back: shard.Ring) -> None:
    """Send every record back, until killed."""
    consumer, producer = there.consumer(), back.producer()
    announce("ready")
    while True:
        payload = consumer.try_read()
        if payload is not None:
            while not producer.try_write(payload):
                pass


def echo_in_place(announce: Announce, there: shard.Ring, back: shard.Ring) -> None:
    """The same, copying from one ring's memory into the other's."""
    consumer, producer = there.consumer(), back.producer()
    announce("ready")
    while True:
        view = consumer.view()
        if view is not None:
            while (memory := producer.claim(len(view))) is None:
                pass
            memory[:] = view
            producer.commit()
            consumer.release()


def measure_one_way(place: Place, effort: Effort, case: OneWay, batch: int) -> Sample:
    """So many records; the clock stops when the reader has said how many bytes it had."""
    payload = _payload(case.size_bytes)
    with shard.Ring.create(CAPACITY_BYTES) as there, shard.Ring.create(CAPACITY_BYTES) as back:
        producer, consumer = there.producer(), back.consumer()
        with place.serve(swallow if batch == 1 else swallow_batches, there, back):

            def send(count: int) -> int:
                if batch == 1:
                    for _ in range(count):
                        while not producer.try_write(payload):
                            pass
                else:
                    for index in range(count):
                        while not producer.try_stage(payload):
                            producer.publish()
                        if index % batch == batch - 1:
                            producer.publish()
                    producer.publish()
                while not producer.try_write(b""):  # that was all
                    pass
                while (answer := consumer.try_read()) is None:
                    pass
                return int.from_bytes(answer, "little")

            first = ONE_WAY_FIRST if effort.timed_s else effort.ops_min
            send(first)
            before = time.perf_counter_ns()
            send(first)
            each_ns = (time.perf_counter_ns() - before) / first
            count = int(min(8 * effort.ops_max, max(effort.ops_min, effort.timed_s * 1e9 / each_ns)))
            before = time.perf_counter_ns()
            received = send(count)
            return Sample.of_rate(count, time.perf_counter_ns() - before).with_work(records=count, bytes_received=received)


def swallow(announce: Announce, there: shard.Ring, back: shard.Ring) -> None:
    """Copy every record out; answer an empty one with the bytes since the last."""
    consumer, producer = there.consumer(), back.producer()
    announce("ready")
    received = 0
    while True:
        payload = consumer.try_read()
        if payload:
            received += len(payload)
        elif payload is not None:
            producer.try_write(received.to_bytes(8, "little"))
            received = 0


def swallow_batches(announce: Announce, there: shard.Ring, back: shard.Ring) -> None:
    """The same through poll(), which frees up to BATCH records at a time; the copy goes to one warm place."""
    consumer, producer = there.consumer(), back.producer()
    memory = memoryview(bytearray(CAPACITY_BYTES))
    received = 0

    def take(payload: memoryview) -> None:
        nonlocal received
        length = len(payload)
        if length:
            memory[:length] = payload
            received += length
        else:
            producer.try_write(received.to_bytes(8, "little"))
            received = 0

    announce("ready")
    poll = consumer.poll
    while True:
        poll(take, BATCH)


def measure_ping_pong(place: Place, effort: Effort) -> Sample:
    """One process counts up in one word, the other follows in another."""
    path = Path(place.folder, "flags")
    path.write_bytes(bytes(FLAG_BYTES))
    with place.serve(follow, str(path)):
        words = _map(path)
        turns = 0

        def operate() -> None:
            nonlocal turns
            for turn in range(turns + 1, turns + 1 + PING_PONGS_PER_CALL):
                words[PING_WORD] = turn
                while words[PONG_WORD] != turn:
                    pass
            turns += PING_PONGS_PER_CALL

        return time_each(operate, effort, PING_PONGS_PER_CALL).with_work(turns=turns, seen=words[PONG_WORD])


def follow(announce: Announce, path: str) -> None:
    """Copy the one word to the other, until killed."""
    words = _map(Path(path))
    announce("ready")
    while True:
        words[PONG_WORD] = words[PING_WORD]


def _map(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), FLAG_BYTES)).cast("Q")


def measure_copy(place: Place, effort: Effort, case: OneWay) -> Sample:
    """One copy of as many bytes, from and to memory that stays in cache."""
    source, target = np.ones(case.size_bytes, np.uint8), np.zeros(case.size_bytes, np.uint8)
    return time_each(partial(np.copyto, target, source), effort).with_work(bytes_received=int(target.sum()))


def measure_peer(place: Place, effort: Effort, case: RoundTrip, info: PeerInfo) -> Sample:
    """A peer's echo."""
    payload = _payload(case.size_bytes)
    with open_peer(info, place, Job("echo", case.size_bytes)) as peer:
        sample = time_each(partial(peer.round_trip, payload), effort)
        return sample.with_work(bytes_echoed=len(peer.round_trip(payload)))


def _payload(size_bytes: int) -> bytes:
    return bytes(index & 0xFF for index in range(size_bytes))


def test_every_record_comes_back_whole() -> None:
    for case in (RoundTrip(8), RoundTrip(4096)):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            if result.role == "ours":
                assert result.work == {"bytes_echoed": case.size_bytes, "bytes_right": case.size_bytes}
                assert result.ops == TINY.ops_min


def test_every_record_sent_one_way_arrives() -> None:
    for result in run(OneWay(65536), TINY):
        assert result.state == "ok", result.note
        if result.role == "ours":
            assert result.work["bytes_received"] == 65536 * result.work["records"]


if __name__ == "__main__":
    from perf import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
