"""kill -9 anywhere in a ring: the other side has whole records or none, and the ring serves whoever
comes next.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

from shard import Ring, collect_garbage, find_garbage
from tests.faults.records import (
    CAPACITY_BYTES,
    DEADLINE_S,
    Reader,
    Writer,
    consume,
    hold_a_ring,
    make_ring,
    make_ring_and_produce,
    payload_of,
    produce,
)
from tests.faults.rounds import ROUNDS, Census, Rounds, points_of
from tests.faults.zygote import Victim, Zygote

RECORDS = 120  # of one stream: 18 KB, so that it goes round the ring nine times
SUCCESSOR_RECORDS = 30  # written by who takes over: once round the ring


def run_until_dead(victim: Victim, step: Callable[[], bool], name: str) -> None:
    """Call step() until the victim is dead and step() finds nothing more to do."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        dead = victim.is_dead()
        if not step():
            # A reader tries each of its ways: one that ends with padding says that there was
            # nothing.
            if dead and not step():
                return
            os.sched_yield()
        assert time.monotonic() < deadline, f"{name}: the other side hangs"


def read_until_dead(ring: Ring, victim: Victim, seed: int, name: str) -> Reader:
    reader = Reader(ring.consumer(), seed)
    run_until_dead(victim, reader.step, name)
    return reader


def write_until_dead(ring: Ring, victim: Victim, seed: int, name: str) -> Writer:
    writer = Writer(ring.producer(), seed)
    run_until_dead(victim, lambda: writer.number < RECORDS and writer.step(RECORDS), name)
    return writer


@pytest.fixture(scope="module")
def census(zygote_of_module: Zygote) -> dict[str, Census]:
    """What each role passes in one undisturbed run."""
    counts = {}
    with Ring.create(CAPACITY_BYTES) as ring:
        victim = zygote_of_module.start(produce, ring, 1, RECORDS)
        read_until_dead(ring, victim, 1, "census")
        victim.wait(DEADLINE_S)
        counts["producer"] = victim.life.reported()
    with Ring.create(CAPACITY_BYTES) as ring:
        victim = zygote_of_module.start(consume, ring, 1, RECORDS)
        write_until_dead(ring, victim, 1, "census")
        victim.wait(DEADLINE_S)
        counts["consumer"] = victim.life.reported()
    return counts


@pytest.mark.parametrize("name", points_of("ring"))
def test_some_process_of_these_tests_passes(name: str, census: dict[str, Census]) -> None:
    assert any(counts[name] for counts in census.values()), (
        "no role gets there: give one a step that does"
    )


def kill_producers(zygote: Zygote, rounds: Rounds) -> None:
    for _ in range(ROUNDS):
        seed = rounds.next_seed()
        with Ring.create(CAPACITY_BYTES) as ring:
            victim = zygote.start(produce, ring, seed, RECORDS, arm=rounds.next_arm())
            reader = read_until_dead(ring, victim, seed, rounds.name)
            if not rounds.ended(victim, DEADLINE_S):
                assert reader.number == RECORDS
            assert victim.life.done <= reader.number, "records that were published are lost"
            # Whoever writes next goes on where the reader's knowledge ends: nothing half-written is
            # in the way.
            writer = Writer(ring.producer(), seed, reader.number)
            end = reader.number + SUCCESSOR_RECORDS
            for _ in range(100 * SUCCESSOR_RECORDS):
                writer.step(end)
                reader.step()
            assert reader.number == writer.number == end


def kill_consumers(zygote: Zygote, rounds: Rounds) -> None:
    for _ in range(ROUNDS):
        seed = rounds.next_seed()
        with Ring.create(CAPACITY_BYTES) as ring:
            victim = zygote.start(consume, ring, seed, RECORDS, arm=rounds.next_arm())
            writer = write_until_dead(ring, victim, seed, rounds.name)
            if not rounds.ended(victim, DEADLINE_S):
                assert writer.number == RECORDS
            # Whoever reads next finds whole records, up to the last one written; some the victim
            # had read already.
            successor = ring.consumer()
            found = []
            while (payload := successor.try_read()) is not None:
                found.append(payload)
            assert found == [
                payload_of(seed, number)
                for number in range(writer.number - len(found), writer.number)
            ]


@pytest.mark.parametrize("name", points_of("ring"))
def test_who_dies_here_leaves_whole_records_in_order_to_the_other(
    name: str, zygote: Zygote, census: dict[str, Census], seed: int
) -> None:
    for role, kill in (("producer", kill_producers), ("consumer", kill_consumers)):
        if census[role][name]:
            rounds = Rounds(name, role, census[role], seed)
            kill(zygote, rounds)
            print(rounds.report())
            assert rounds.killed, "nobody died: the test shows nothing"


# -- both dead, and what has a name ----------------------------------------------------------------


def start_telling(
    zygote: Zygote,
    function: Callable[..., object],
    *args: object,
    arm: tuple[str, str, int] | None = None,
) -> tuple[Victim, int]:
    """A child, and the descriptor to read what it tells from."""
    reading, writing = os.pipe()
    try:
        return zygote.start(function, *args, fds=[writing], arm=arm), reading
    finally:
        os.close(writing)


def told(reading: int) -> str:
    """What a child told, "" when it died before."""
    with os.fdopen(reading) as pipe:
        return pipe.read()


def names_in_shm(victim: Victim) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f".{victim.pid}." in name]


# The dead are anybody's who collects garbage: a test beside these, by the time that they look.
needs_its_garbage = pytest.mark.alone


@needs_its_garbage
@pytest.mark.parametrize("name", points_of("ring"))
def test_when_both_die_the_next_run_starts_without_anybody_cleaning_up(
    name: str, zygote: Zygote, census: dict[str, Census], seed: int
) -> None:
    rng = random.Random(f"{seed}{name}")
    for _ in range(max(1, ROUNDS // 4)):
        arms = {}
        for role, counts in census.items():  # who does not pass this one dies at another
            point = (
                name
                if counts[name]
                else rng.choice([point for point in points_of("ring") if counts[point]])
            )
            arms[role] = (point, "kill9", rng.randint(1, counts[point]))
        producer, reading = start_telling(
            zygote, make_ring_and_produce, seed, RECORDS, arm=arms["producer"]
        )
        ring_name, incarnation = told(reading).split()
        consumer = zygote.start(
            consume,
            Ring(ring_name, CAPACITY_BYTES, int(incarnation)),
            seed,
            RECORDS,
            arm=arms["consumer"],
        )
        first, second = rng.sample([producer, consumer], 2)
        # One of them may wait for the other's next step for ever: it dies while it waits.
        while not first.is_dead(0.001) and not second.is_dead(0.001):
            pass
        for victim in first, second:
            victim.kill()
            victim.wait(DEADLINE_S)
        assert ring_name in find_garbage()
        collect_garbage()
        assert not names_in_shm(producer)
    with Ring.create(CAPACITY_BYTES) as ring:
        victim = zygote.start(produce, ring, seed, RECORDS)
        assert read_until_dead(ring, victim, seed, name).number == RECORDS
        assert victim.wait(DEADLINE_S) == 0


@needs_its_garbage
@pytest.mark.parametrize("name", points_of("handle", "segment"))
def test_a_maker_that_dies_leaves_a_name_at_most_and_it_is_collected(
    name: str, zygote: Zygote
) -> None:
    for _ in range(max(1, ROUNDS // 4)):
        maker, reading = start_telling(zygote, make_ring, arm=(name, "kill9", 1))
        assert told(reading) == ""
        assert maker.wait(DEADLINE_S) < 0
        left = names_in_shm(maker)
        assert len(left) <= 1
        assert {f"/{one}" for one in left} <= set(collect_garbage())
        assert not names_in_shm(maker)


@needs_its_garbage
def test_collecting_after_the_dead_leaves_the_rings_of_other_jobs_alone(zygote: Zygote) -> None:
    other, reading_other = start_telling(zygote, hold_a_ring, "otherjob")
    others_ring = told(reading_other)
    dead, reading_dead = start_telling(zygote, make_ring)
    deads_ring = told(reading_dead)
    dead.wait(DEADLINE_S)
    collected = collect_garbage()
    assert deads_ring in collected
    assert others_ring not in collected
    assert names_in_shm(other) == [others_ring[1:]]
    other.kill()
    other.wait(DEADLINE_S)
    assert others_ring in collect_garbage()
