"""Memory without room: ShmFull at creation, and never SIGBUS later. Named rings have /dev/shm to do
with as well: a program that is about those has a small tmpfs of its own there."""

from __future__ import annotations

import signal

from tests.shard.small_memory import run_with_memory
from tests.shard.small_shm import end_with_own_shm, run_with_own_shm

BEGIN = """
import os
import numpy as np
from shard import Ring, ShmFull, Slab
from shard.memory.segment import Segment

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


def test_a_segment_that_does_not_fit_is_shm_full_leaves_nothing_and_a_smaller_one_works() -> None:
    run_with_memory(
        24 << 20,
        BEGIN
        + """
descriptors = os.listdir("/proc/self/fd")
refused(
    lambda: Segment.create(32 * MIB),
    "segment of 32.0 MiB: of the 24.0 MiB of a small machine 24.0 MiB may be taken",
)
assert os.listdir("/proc/self/fd") == descriptors
segment = Segment.create(16 * MIB)
np.frombuffer(segment.memory, np.uint8)[:] = 1
refused(lambda: Segment.create(16 * MIB), "8.0 MiB may be taken")
segment.close()
assert Segment.create(16 * MIB).size_bytes == 16 * MIB, "room that comes back can be used"
""",
    )


def test_dev_shm_bounds_named_segments_and_nothing_else() -> None:
    run("""
refused(
    lambda: Segment.create(32 * MIB, keep_name=True),
    "named segment of 32.0 MiB: 24.0 MiB of 24.0 MiB free",
    "--shm-size",
)
assert os.listdir("/dev/shm") == []
segment = Segment.create(32 * MIB)
named = Segment.create(MIB, keep_name=True)
fill()
Segment.create(32 * MIB).close()
slab = Slab()
assert slab.empty(100 * MIB, np.uint8).nbytes == 100 * MIB, "as in a container with 64 MB there"
for ours in (segment, named):
    array = np.frombuffer(ours.memory, np.uint8)
    array[:] = 5
    assert int(array.sum()) == 5 * len(array)
""")


def test_a_sparse_file_dies_there_which_is_why_pages_are_reserved() -> None:
    """The same with ftruncate in place of posix_fallocate: creation seems to work, and a later
    write is SIGBUS.
    """
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
    run_with_memory(
        24 << 20,
        BEGIN
        + """
slab = Slab()
arrays = []
def grow():
    while True:
        arrays.append(slab.empty(MIB, np.uint8))
        arrays[-1][:] = len(arrays)
refused(grow, "no memory for a segment", "of the 24.0 MiB of a small machine")
assert len(arrays) >= 8
for number, array in enumerate(arrays, 1):
    assert int(array.sum()) == number * MIB
    array[:] = 0
    assert not array.any()
refused(lambda: slab.empty(MIB, np.uint8), "no memory for a segment")
del array
arrays.pop()
assert slab.empty(MIB, np.uint8).nbytes == MIB  # a block that came back needs no room
slab.close()
""",
    )


def test_a_ring_that_does_not_fit_a_full_dev_shm_is_shm_full_and_a_smaller_one_works() -> None:
    run("""
refused(lambda: Ring.create(32 * MIB), "/dev/shm has no room for a named segment of 32.0 MiB")
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
