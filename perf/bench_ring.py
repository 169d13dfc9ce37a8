"""Records from one pinned process to another through a ring in shared memory, and back.

Expected:
    flag ping-pong   two stores and two loads that miss: 0.2 us there and back. No ring can be
                     faster.
    64 B round trip  two writes and two reads of about 0.5 us each, and two cache-line hand-overs:
                     some 2.5 us. A pipe sleeps and wakes twice: 50 us on a virtual machine.
    one way, 64 B    the slower side's loop, some 0.8 us a record; staged by 32 and polled, 0.5 us;
                     a list of records in one call, 0.4 us: 1 to 2.5 M/s.
    one way, 64 KiB  np.copyto of 64 KiB from and to one core's cache runs at 20 to 40 GB/s, and no
                     hand-over can: the reader's core fetches from the other core's cache what was
                     written there, and the writer's has to take the lines back before it writes
                     them again. Two slots and two flags, without a ring, show
                     what the machine allows: as fast as a copy through memory as large as the ring,
                     10 to 20 GB/s, when the reader only looks at the first and last byte (all other
                     lines stay where they are until somebody wants them), and half of it when the
                     reader copies out. The ring adds 1 us a record.

    python -m perf.bench_ring [--json] [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import shard

from . import limits, peers
from .child import Announce
from .harness import Candidate, Place, Result, compare
from .limits import pattern
from .peers import PeerInfo, open_peer
from .peers.face import Job
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each, time_many

NAME = "ring"
# holds sixteen records of 64 KiB; stays in the second-level cache of both cores
CAPACITY_BYTES = 1 << 20
# of the largest: the writer fills one while the reader has another, and some are under way
RECORDS_HELD_MIN = 4
# records published by one store of the cursor, and read by one call; fewer when they would fill the
# ring
BATCH = 32
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

    @property
    def capacity_bytes(self) -> int:
        return max(CAPACITY_BYTES, RECORDS_HELD_MIN * self.size_bytes)

    @property
    def batch(self) -> int:
        """A quarter of the ring at most: the reader has one batch while the next is written."""
        return max(1, min(BATCH, self.capacity_bytes // RECORDS_HELD_MIN // self.size_bytes))


@dataclass(frozen=True, slots=True)
class Way:
    """How records are written, and how they are read."""

    name: str
    write: Callable[[shard.RingProducer, bytes, int, int], None]  # (end, payload, records, batch)
    # (announce, there, back, batch); runs until killed
    read: Callable[[Announce, shard.Ring, shard.Ring, int], None]


Case = RoundTrip | OneWay
SMALL, LARGE = 64, 65536
CASES: list[Case] = [
    RoundTrip(8),
    RoundTrip(SMALL),
    RoundTrip(4096),
    OneWay(SMALL),
    OneWay(4096),
    OneWay(LARGE),
]

_ROUND_TRIP, _SMALL, _LARGE = str(RoundTrip(SMALL)), str(OneWay(SMALL)), str(OneWay(LARGE))
COPIED_OUT, LOOKED_AT = "in place, copied out", "in place, looked at"
IN_CACHE, THROUGH_RING = "np.copyto, in cache", "np.copyto, through 1 MiB"
TARGETS = [
    Target(_ROUND_TRIP, "shard.Ring", "p50_ns", "at most", 2_500),
    Target(_ROUND_TRIP, "shard.Ring", "p99_ns", "at most", 6_000),
    Target(_ROUND_TRIP, "shard.Ring", "p50_ns", "at most", 12.0, against="flag ping-pong"),
    Target(_SMALL, "shard.Ring, many", "ops_per_s", "at least", 2_000_000),
    # What one core does in its own cache, then what two can do: one that copies, or one that hands
    # over without a ring.
    Target(_LARGE, f"shard.Ring, {LOOKED_AT}", "bytes_per_s", "at least", 0.8, against=IN_CACHE),
    Target(
        _LARGE, f"shard.Ring, {LOOKED_AT}", "bytes_per_s", "at least", 0.8, against=THROUGH_RING
    ),
    Target(
        _LARGE,
        f"shard.Ring, {LOOKED_AT}",
        "bytes_per_s",
        "at least",
        0.8,
        against="two slots, looked at",
    ),
    Target(
        _LARGE,
        f"shard.Ring, {COPIED_OUT}",
        "bytes_per_s",
        "at least",
        0.8,
        against="two slots, copied out",
    ),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates."""
    return compare(
        NAME,
        str(case),
        candidates_of(case),
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def candidates_of(case: Case) -> list[Candidate]:
    """All that is measured in a case."""
    return round_trip_candidates(case) if isinstance(case, RoundTrip) else one_way_candidates(case)


def round_trip_candidates(case: RoundTrip) -> list[Candidate]:
    """Two ways to use the ring, the limit, and a pipe."""
    return [
        Candidate("shard.Ring", "ours", partial(measure_round_trip, case=case)),
        Candidate(
            "shard.Ring, in place", "ours", partial(measure_round_trip, case=case, in_place=True)
        ),
        Candidate("flag ping-pong", "limit", limits.measure_ping_pong),
        Candidate(peers.PIPE.name, "peer", partial(measure_peer, case=case, info=peers.PIPE)),
    ]


def one_way_candidates(case: OneWay) -> list[Candidate]:
    """Records one by one and in batches, or written and read in place where they are large; then
    the limits.
    """
    ways = (
        [ONE_BY_ONE, STAGED, MANY]
        if case.size_bytes < LARGE
        else [ONE_BY_ONE, MANY, IN_PLACE_COPIED, IN_PLACE_LOOKED]
    )
    candidates = [
        Candidate(way.name, "ours", partial(measure_one_way, case=case, way=way)) for way in ways
    ]
    candidates.append(
        Candidate(IN_CACHE, "limit", partial(limits.measure_copy, size_bytes=case.size_bytes))
    )
    if case.size_bytes >= LARGE:
        through = partial(
            limits.measure_copy, size_bytes=case.size_bytes, through_bytes=CAPACITY_BYTES
        )
        candidates.append(Candidate(THROUGH_RING, "limit", through))
        for how, copied_out in (("copied out", True), ("looked at", False)):
            slots = partial(
                limits.measure_slots, payload=pattern(case.size_bytes), copied_out=copied_out
            )
            candidates.append(Candidate(f"two slots, {how}", "limit", slots))
    return candidates


# -- there and back --------------------------------------------------------------------------------


def measure_round_trip(
    place: Place, effort: Effort, case: RoundTrip, in_place: bool = False
) -> Sample:
    """try_write and try_read; or claim, view and release, where the reader only looks at the record
    in the ring.
    """
    payload = pattern(case.size_bytes)
    capacity = OneWay(case.size_bytes).capacity_bytes
    with shard.Ring.create(capacity) as there, shard.Ring.create(capacity) as back:
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
                bytes_echoed=len(answer),
                bytes_right=sum(a == b for a, b in zip(answer, payload, strict=True)),
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


# -- one way ---------------------------------------------------------------------------------------


def measure_one_way(
    place: Place, effort: Effort, case: OneWay, way: Way, first: int = ONE_WAY_FIRST
) -> Sample:
    """So many records; the clock stops when the reader has said how many bytes it had. `first` of
    them tell the rate.
    """
    payload = pattern(case.size_bytes)
    with shard.Ring.create(case.capacity_bytes) as there, shard.Ring.create(CAPACITY_BYTES) as back:
        producer, consumer = there.producer(), back.consumer()
        with place.serve(way.read, there, back, case.batch):

            def send(count: int) -> int:
                way.write(producer, payload, count, case.batch)
                while not producer.try_write(b""):  # that was all
                    pass
                while (answer := consumer.try_read()) is None:
                    pass
                return int.from_bytes(answer, "little")

            sample, received = time_many(send, effort, first, 8 * effort.ops_max)
            return sample.with_work(records=sample.ops, bytes_received=received)


def write_each(producer: shard.RingProducer, payload: bytes, count: int, batch: int) -> None:
    """One store of the cursor a record."""
    try_write = producer.try_write
    for _ in range(count):
        while not try_write(payload):
            pass


def write_staged(producer: shard.RingProducer, payload: bytes, count: int, batch: int) -> None:
    """One store of the cursor a batch, which is put together record by record."""
    for index in range(count):
        while not producer.try_stage(payload):
            producer.publish()
        if index % batch == batch - 1:
            producer.publish()
    producer.publish()


def write_many(producer: shard.RingProducer, payload: bytes, count: int, batch: int) -> None:
    """The same with one call a batch. What did not fit stands at the head of the next: all payloads
    are alike.
    """
    payloads = [payload] * batch
    try_write_many = producer.try_write_many
    while count >= batch:
        count -= try_write_many(payloads)
    while count:
        count -= try_write_many(payloads[:count])


def write_in_place(producer: shard.RingProducer, payload: bytes, count: int, batch: int) -> None:
    """One copy, straight into the ring's memory."""
    for _ in range(count):
        while (memory := producer.claim(len(payload))) is None:
            pass
        memory[:] = payload
        producer.commit()


def swallow(announce: Announce, there: shard.Ring, back: shard.Ring, batch: int) -> None:
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


def swallow_polled(announce: Announce, there: shard.Ring, back: shard.Ring, batch: int) -> None:
    """The same through poll(), which frees a batch at a time; the copy goes to one warm place."""
    consumer, producer = there.consumer(), back.producer()
    memory = memoryview(bytearray(there.capacity_bytes))
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
        poll(take, batch)


def swallow_many(announce: Announce, there: shard.Ring, back: shard.Ring, batch: int) -> None:
    """The same through read_many(). The empty record is the last of its list: the writer waits for
    the answer.
    """
    consumer, producer = there.consumer(), back.producer()
    announce("ready")
    received = 0
    read_many = consumer.read_many
    while True:
        payloads = read_many(batch)
        if payloads:
            received += sum(map(len, payloads))
            if not payloads[-1]:
                producer.try_write(received.to_bytes(8, "little"))
                received = 0


def swallow_in_place(announce: Announce, there: shard.Ring, back: shard.Ring, batch: int) -> None:
    """The same through view() and release(), with one copy out to one warm place."""
    _view_each(announce, there, back, memoryview(bytearray(there.capacity_bytes)))


def look_in_place(announce: Announce, there: shard.Ring, back: shard.Ring, batch: int) -> None:
    """Only look at the first and last byte of each record in the ring: two cache lines of it come
    over, no more.
    """
    _view_each(announce, there, back, None)


def _view_each(
    announce: Announce, there: shard.Ring, back: shard.Ring, memory: memoryview | None
) -> None:
    consumer, producer = there.consumer(), back.producer()
    announce("ready")
    received = 0
    while True:
        payload = consumer.view()
        if payload is None:
            continue
        length = len(payload)
        if not length:
            producer.try_write(received.to_bytes(8, "little"))
            received = 0
        elif memory is not None:
            memory[:length] = payload
            received += length
        elif payload[0] == 0 and payload[-1] == (length - 1) & 0xFF:  # as pattern() has them
            received += length
        consumer.release()


ONE_BY_ONE = Way("shard.Ring", write_each, swallow)
STAGED = Way("shard.Ring, staged", write_staged, swallow_polled)
MANY = Way("shard.Ring, many", write_many, swallow_many)
IN_PLACE_COPIED = Way(f"shard.Ring, {COPIED_OUT}", write_in_place, swallow_in_place)
IN_PLACE_LOOKED = Way(f"shard.Ring, {LOOKED_AT}", write_in_place, look_in_place)


def measure_peer(place: Place, effort: Effort, case: RoundTrip, info: PeerInfo) -> Sample:
    """A peer's echo."""
    payload = pattern(case.size_bytes)
    with open_peer(info, place, Job("echo", case.size_bytes)) as peer:
        sample = time_each(partial(peer.round_trip, payload), effort)
        return sample.with_work(bytes_echoed=len(peer.round_trip(payload)))


def test_every_record_comes_back_whole() -> None:
    for case in (RoundTrip(8), RoundTrip(4096)):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            if result.role == "ours":
                assert result.work == {
                    "bytes_echoed": case.size_bytes,
                    "bytes_right": case.size_bytes,
                }
                assert result.ops == TINY.ops_min


def test_every_record_sent_one_way_arrives() -> None:
    for case in (OneWay(SMALL), OneWay(LARGE)):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            assert result.work["bytes_received"] == case.size_bytes * result.work.get("records", 1)


def test_every_target_has_something_to_judge() -> None:
    candidates = {
        (str(case), candidate.name) for case in CASES for candidate in candidates_of(case)
    }
    assert {
        (target.case, name)
        for target in TARGETS
        for name in (target.candidate, target.against)
        if name
    } <= candidates


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
