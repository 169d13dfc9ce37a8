"""A ring with a handle: named, pickled, taken by two processes; its ends insist, or wait, and are
refused in a fork.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import multiprocess
import posix_ipc
import pytest

from shard import (
    BackpressureError,
    ForkedError,
    LocalProtocolError,
    RemoteProtocolError,
    Ring,
    collect_garbage,
)
from shard.memory import ring
from shard.memory.segment import Segment

ROOT = Path(__file__).parents[2]
CAPACITY = 256
FULL = [b"x" * 56] * 4  # fills it to the last byte
PATIENCE_S = 30.0  # a wait that should end before; one that lasts so long has failed


@pytest.fixture
def handle() -> Iterator[Ring]:
    with Ring.create(CAPACITY) as made:
        yield made


# -- values ----------------------------------------------------------------------------------------


def test_write_puts_a_record_there_or_says_that_the_reader_is_too_slow(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    for payload in FULL:
        producer.write(payload)
    with pytest.raises(
        BackpressureError,
        match=rf"{handle.name}'s reader has no room for 5 bytes: it reads too slowly",
    ):
        producer.write(b"fifth")
    assert consumer.read_many(9) == FULL, "nothing was written"


def test_write_hands_a_tag_on(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    producer.write(b"one", tag=3)
    producer.wait_write(b"two", 0.0, tag=4)
    tagged: list[tuple[bytes, int]] = []
    consumer.poll(lambda view: None, 9, lambda view, tag: tagged.append((bytes(view), tag)))
    assert tagged == [(b"one", 3), (b"two", 4)]


def test_waits_with_no_time_take_what_is_there(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    producer.wait_write(b"there", 0.0)
    assert consumer.wait_read(0.0) == b"there"


@pytest.mark.parametrize("timeout_s", [0.0, 0.005])
def test_a_wait_for_room_ends_at_its_deadline_with_the_size_the_peer_and_what_may_be_wrong(
    handle: Ring, timeout_s: float
) -> None:
    producer = handle.producer()
    assert producer.try_write_many(FULL) == len(FULL)
    with pytest.raises(BackpressureError) as caught:
        producer.wait_write(b"fifth", timeout_s)
    assert str(caught.value) == (
        f"the ring to {handle.name}'s reader had no room for 5 bytes within {timeout_s} s: "
        "it reads too slowly, or died"
    )


@pytest.mark.parametrize("timeout_s", [0.0, 0.005])
def test_a_wait_for_a_record_ends_at_its_deadline_and_names_the_peer(
    handle: Ring, timeout_s: float
) -> None:
    consumer = handle.consumer()
    with pytest.raises(TimeoutError) as caught:
        consumer.wait_read(timeout_s)
    assert str(caught.value) == (
        f"{handle.name}'s writer wrote nothing to the ring within {timeout_s} s: "
        "it has nothing to say, or died"
    )


def test_a_wait_without_an_end_that_a_clock_could_pass_is_refused(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    with pytest.raises(ValueError, match="timeout_s=nan"):
        consumer.wait_read(math.nan)
    with pytest.raises(ValueError, match="timeout_s=nan"):
        producer.wait_write(b"", math.nan)


# -- one owner an end ------------------------------------------------------------------------------


def test_an_end_is_taken_once_at_a_time_whoever_asks(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    with pytest.raises(
        LocalProtocolError,
        match=f"the writing end of ring {handle.name} is taken, in this process or another",
    ):
        handle.producer()
    with pytest.raises(LocalProtocolError, match="the reading end"):
        pickle.loads(pickle.dumps(handle)).consumer()
    process = multiprocess.get_context("spawn").Process(target=_must_be_refused, args=(handle,))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    producer.write(b"from its only writer")
    assert consumer.try_read() == b"from its only writer"


def _must_be_refused(handle: Ring) -> None:
    for take in (handle.producer, handle.consumer):
        with pytest.raises(LocalProtocolError, match="is taken"):
            take()


def test_an_end_whose_owner_dropped_it_or_was_killed_can_be_taken_and_goes_on_there(
    handle: Ring,
) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    producer.write(b"one")
    del producer
    process = multiprocess.get_context("spawn").Process(
        target=_write_and_die, args=(handle, b"two")
    )
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    producer = handle.producer()
    producer.write(b"three")
    assert consumer.read_many(9) == [b"one", b"two", b"three"]


def _write_and_die(handle: Ring, payload: bytes) -> None:
    handle.producer().write(payload)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_wait_for_room_ends_when_the_reader_makes_some(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    assert producer.try_write_many(FULL) == len(FULL)
    writer = threading.Thread(target=producer.wait_write, args=(b"fifth", PATIENCE_S))
    writer.start()
    while producer.full_count < 2:  # it has found the ring full, and waits
        os.sched_yield()
    assert consumer.read_many(9) == FULL
    assert consumer.wait_read(PATIENCE_S) == b"fifth"
    writer.join(PATIENCE_S)


def test_a_record_too_large_for_the_ring_is_waited_for_by_nobody(handle: Ring) -> None:
    producer = handle.producer()
    with pytest.raises(
        LocalProtocolError, match=f"record of {CAPACITY} bytes, at most {CAPACITY - 8}"
    ):
        producer.wait_write(bytes(CAPACITY), PATIENCE_S)


def test_waits_on_a_broken_ring_end_at_once(handle: Ring) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    segment = Segment.open(handle.name)
    segment.memory.cast("Q")[ring.TAIL_WORD] = 1 << 40
    segment.memory.cast("Q")[ring.HEAD_WORD] = 1 << 40
    segment.close()
    with pytest.raises(RemoteProtocolError, match=f"{handle.name}'s writer broke the ring"):
        consumer.wait_read(PATIENCE_S)
    with pytest.raises(RemoteProtocolError, match=f"{handle.name}'s reader broke the ring"):
        for _ in range(9):
            producer.wait_write(b"x" * 56, PATIENCE_S)
    for write in (producer.write, lambda payload: producer.wait_write(payload, PATIENCE_S)):
        with pytest.raises(RemoteProtocolError, match=f"{handle.name}'s reader broke the ring"):
            write(b"")


# -- names, lives and processes --------------------------------------------------------------------


def test_a_capacity_is_rounded_up_and_an_impossible_one_refused() -> None:
    with Ring.create(100) as handle:
        assert handle.capacity_bytes == 128
        assert handle.producer().record_bytes_max == 120
    with pytest.raises(
        LocalProtocolError, match=f"ring capacity of {1 << 40} bytes, 1 to {1 << 30} allowed"
    ):
        Ring.create(1 << 40)


def _write_numbers(handle: Ring, count: int) -> None:
    producer = handle.producer()
    for number in range(count):
        producer.wait_write(number.to_bytes(8, "little"), PATIENCE_S)


def test_a_handle_is_pickled_to_another_process_whose_records_arrive_in_order(handle: Ring) -> None:
    again = pickle.loads(pickle.dumps(handle))
    assert (again.name, again.capacity_bytes, again.incarnation) == (
        handle.name,
        CAPACITY,
        handle.incarnation,
    )
    process = multiprocess.get_context("spawn").Process(
        target=_write_numbers, args=(handle, 1000), daemon=True
    )
    process.start()
    consumer = handle.consumer()
    assert [int.from_bytes(consumer.wait_read(PATIENCE_S), "little") for _ in range(1000)] == list(
        range(1000)
    )
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    process.close()


def test_a_ring_that_was_unlinked_can_be_attached_by_nobody_new() -> None:
    handle = Ring.create(4096)
    producer = handle.producer()
    handle.unlink()
    assert producer.try_write(b"ends already taken go on")
    with pytest.raises(FileNotFoundError, match="its owner is gone"):
        handle.consumer()


def test_a_handle_of_an_earlier_life_of_its_ring_is_refused(handle: Ring) -> None:
    """The ring under that name was made anew, as a restarted owner does."""
    segment = Segment.open(handle.name)
    ring.format_ring(segment.memory, CAPACITY, incarnation=handle.incarnation ^ 1)
    segment.close()
    for attach in (handle.producer, handle.consumer):
        with pytest.raises(
            RemoteProtocolError,
            match=rf"of incarnation \d+, {handle.incarnation} expected: it is stale",
        ):
            attach()


def test_a_name_that_leads_to_another_ring_is_refused_by_its_size(handle: Ring) -> None:
    posix_ipc.unlink_shared_memory(handle.name)
    other = posix_ipc.SharedMemory(handle.name, posix_ipc.O_CREX, size=ring.DATA_OFFSET + 64)
    other.close_fd()
    with pytest.raises(RemoteProtocolError, match=f"not a ring with {handle.name}'s writer"):
        handle.consumer()


MAKER = """
import signal, shard
ring = shard.Ring.create(4096)
producer = ring.producer()
print(ring.name, flush=True)
signal.pause()
"""


@pytest.mark.alone  # another test's collector would take the name first
def test_the_name_of_a_ring_whose_maker_got_sigterm_stays_until_it_is_collected() -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert maker.stdout is not None
        with maker.stdout as told:
            name = told.readline().strip()
        assert name not in collect_garbage(), "its maker lives"
        assert os.path.exists(f"/dev/shm{name}")
        maker.terminate()
        assert maker.wait(PATIENCE_S) == -signal.SIGTERM
    finally:
        maker.kill()
        maker.wait(PATIENCE_S)
    assert os.path.exists(f"/dev/shm{name}"), (
        "the kernel asks nobody; README says that the name stays"
    )
    assert name in collect_garbage()
    assert not os.path.exists(f"/dev/shm{name}")


def test_the_name_of_a_ring_whose_maker_comes_to_its_exit_goes_with_it() -> None:
    leaving = MAKER.replace("signal.pause()", "")
    made = subprocess.run(
        [sys.executable, "-c", leaving],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert not os.path.exists(f"/dev/shm{made.stdout.strip()}")


def test_a_ring_that_passes_the_limit_on_file_sizes_says_so_and_leaves_no_name() -> None:
    program = (
        "import os, resource, shard\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))\n"
        "before = set(os.listdir('/dev/shm'))\n"
        "try:\n    shard.Ring.create(1 << 21)\nexcept shard.ShmFull as error:\n    print(error)\n"
        "print([name for name in set(os.listdir('/dev/shm')) - before if f'.{os.getpid()}.' in "
        "name])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ran.stdout.splitlines() == [
        "a segment of 2.0 MiB passes this process's limit on file sizes, 1.0 MiB (RLIMIT_FSIZE), "
        "which shared memory falls under: raise `ulimit -f`, or ask for a smaller one",
        "[]",
    ]


def test_two_rings_have_two_incarnations(handle: Ring) -> None:
    with Ring.create(CAPACITY) as other:
        assert (other.name, other.incarnation) != (handle.name, handle.incarnation)
        assert other.incarnation != handle.incarnation


# -- a fork ----------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], None]) -> str:
    """What became of work() in a fork of this process: "fine", or the traceback."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # of Python 3.12, when there are threads: that is not the point here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            work()
            text = "fine"
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return text


def test_both_ends_are_refused_in_a_fork_and_go_on_in_the_process_that_took_them(
    handle: Ring,
) -> None:
    producer, consumer = handle.producer(), handle.consumer()
    assert producer.try_stage(b"from the parent")
    parent = os.getpid()

    def use() -> None:
        verbs: list[Callable[[], object]] = [
            lambda: producer.try_write(b"from the fork"),
            lambda: producer.write(b"from the fork"),
            lambda: producer.wait_write(b"from the fork", PATIENCE_S),
            lambda: producer.try_write_many([b"from the fork"]),
            lambda: producer.claim(1),
            producer.commit,
            producer.publish,
            consumer.try_read,
            lambda: consumer.wait_read(PATIENCE_S),
            lambda: consumer.read_many(9),
            lambda: consumer.poll(lambda view: None, 9),
        ]
        for verb in verbs:
            with pytest.raises(
                ForkedError,
                match=rf"belongs to process {parent}, and was used in its fork {os.getpid()}",
            ):
                verb()

    assert in_a_fork(use) == "fine"
    producer.publish()
    assert consumer.read_many(9) == [b"from the parent"]


def test_a_fork_may_take_ends_of_its_own_from_the_handle(handle: Ring) -> None:
    consumer = handle.consumer()

    def write() -> None:
        handle.producer().write(b"from the fork")

    assert in_a_fork(write) == "fine"
    assert consumer.wait_read(PATIENCE_S) == b"from the fork"
