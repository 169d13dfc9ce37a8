"""A /dev/shm without room: ShmFull at creation, and never SIGBUS later. Each program has a small tmpfs of its own there."""

from __future__ import annotations

import signal

import pytest

from tests.shard.small_shm import end_with_own_shm, run_with_own_shm

BEGIN = """
import os
import numpy as np
from shard import Ring, ShmFull, Slab
from shard.segment import Segment

MIB = 1 << 20

def free_bytes():
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize

def refused(act, *words):
    try:
        act()
    except ShmFull as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("no ShmFull")

def fill():
    with open("/dev/shm/others", "ab", buffering=0) as others:
        try:
            while True:
                others.write(bytes(4096))
        except OSError as error:
            assert error.errno == 28, error  # ENOSPC
    assert free_bytes() == 0
"""


def run(program: str, options: str = "size=24m") -> None:
    run_with_own_shm(options, BEGIN + program)


@pytest.mark.parametrize("huge", ["never", "advise"])
def test_a_segment_that_does_not_fit_is_shm_full_leaves_nothing_and_a_smaller_one_works(huge: str) -> None:
    program = """
descriptors = os.listdir("/proc/self/fd")
words = "segment of 32.0 MiB: 24.0 MiB of 24.0 MiB free", "prpc gc", "--shm-size", "PRPC_SLAB_BYTES_MAX"
refused(lambda: Segment.create(32 * MIB), *words)
refused(lambda: Segment.create(32 * MIB, keep_name=True), *words)
assert os.listdir("/dev/shm") == []
assert os.listdir("/proc/self/fd") == descriptors
assert free_bytes() == 24 * MIB
segment = Segment.create(16 * MIB)
np.frombuffer(segment.memory, np.uint8)[:] = 1
refused(lambda: Segment.create(16 * MIB), "8.0 MiB of 24.0 MiB free")
"""
    run(program, f"size=24m,huge={huge}")


def test_pages_we_have_stay_ours_when_others_fill_what_is_left() -> None:
    run("""
segment = Segment.create(8 * MIB)
named = Segment.create(MIB, keep_name=True)
fill()
for ours in (segment, named):
    array = np.frombuffer(ours.memory, np.uint8)
    array[:] = 5
    assert int(array.sum()) == 5 * len(array)
""")


def test_a_sparse_file_dies_there_which_is_why_pages_are_reserved() -> None:
    """The same with ftruncate in place of posix_fallocate: creation seems to work, and a later write is SIGBUS."""
    returncode, output = end_with_own_shm(
        "size=24m",
        BEGIN
        + """
import mmap
fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
os.ftruncate(fd, 8 * MIB)
memory = memoryview(mmap.mmap(fd, 8 * MIB))
fill()
print("created", flush=True)
np.frombuffer(memory, np.uint8)[:] = 5
""",
    )
    assert (returncode, output) == (-signal.SIGBUS, "created\n")


def test_a_slab_that_cannot_grow_is_shm_full_and_its_arrays_stay_usable() -> None:
    run("""
slab = Slab()
arrays = []
def grow():
    while True:
        arrays.append(slab.empty(MIB, np.uint8))
        arrays[-1][:] = len(arrays)
refused(grow, "/dev/shm has no room for a segment", "of 24.0 MiB free")
assert len(arrays) >= 8
fill()
for number, array in enumerate(arrays, 1):
    assert int(array.sum()) == number * MIB
    array[:] = 0
    assert not array.any()
refused(lambda: slab.empty(MIB, np.uint8), "/dev/shm has no room")
del array
arrays.pop()
assert slab.empty(MIB, np.uint8).nbytes == MIB  # a block that came back needs no room
slab.close()
""")


def test_a_ring_that_does_not_fit_is_shm_full_and_a_smaller_one_carries_everything_in_a_full_dev_shm() -> None:
    run("""
refused(lambda: Ring.create(32 * MIB), "/dev/shm has no room for a segment of 32.0 MiB")
assert os.listdir("/dev/shm") == []
with Ring.create(1 << 16) as ring:
    producer, consumer = ring.producer(), ring.consumer()
    fill()
    payload = bytes(range(256)) * 4
    for _ in range(1000):  # many times round: every byte of the ring is written
        assert producer.try_write(payload)
        assert consumer.try_read() == payload
assert os.listdir("/dev/shm") == ["others"]
""")


def test_room_that_comes_back_can_be_used() -> None:
    run("""
first = Segment.create(16 * MIB)
refused(lambda: Segment.create(16 * MIB))
first.close()
fits = Segment.create(16 * MIB)
assert free_bytes() == 8 * MIB
""")
