"""Memory that a device reads and writes is locked: what is said, and done, where too little of it
may be.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import traceback
import warnings
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path

import numpy as np

from shard import Slab, VerbsOptions
from shard.transport.verbs_domain import VerbsDomain
from tests.rdma.inside import verbs_of
from tests.rdma.port import chosen_port
from tests.rdma.test_verbs import ADDRESS, make
from tests.transport_contract import World

NOBODY = 65534  # whom CAP_IPC_LOCK, which root has, does not free from the limit
MODULES = ("addr", "cq", "device", "mr", "pd", "qp", "wr")  # of pyverbs


def pinned_bytes() -> int:
    """Of this process, as the kernel counts what devices may read and write."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel counts no pinned memory")


def test_a_segment_that_goes_while_nobody_is_connected_is_locked_no_longer() -> None:
    slab = Slab(limit_bytes=16 << 20)
    domain = VerbsDomain(slab, VerbsOptions(), chosen_port())
    before = pinned_bytes()
    block = slab.allocate(12 << 20)
    domain.region(block.segment)
    assert pinned_bytes() - before >= 12 << 20
    slab.release(block)
    slab.release(slab.allocate(14 << 20))  # for which the other segment has to go
    assert slab.statistics().segments_dropped == 1
    assert pinned_bytes() == before
    slab.close()


def may_lock(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))


def as_nobody(locked_bytes: int, work: Callable[[World], str]) -> list[str]:
    """Lines of a fork of this process, which is another user and may lock so much: what `work` of a
    world of its own returns, or its traceback, and what was logged.
    """
    # another user may not read the modules that are not imported by now
    for name in MODULES:
        importlib.import_module(f"pyverbs.{name}")
    "".encode("idna")
    os.chmod("/dev/infiniband/uverbs0", 0o666)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # of Python 3.12, when there are threads: that is not the point here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        logged = BufferingHandler(1000)
        logging.getLogger().addHandler(logged)
        try:
            may_lock(locked_bytes)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            world = World(make, ADDRESS)
            text = work(world)
            world.close()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, "\n".join([text, *(one.getMessage() for one in logged.buffer)]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return lines


def arrays_by_slots(world: World) -> str:
    one, two = world.connect()
    for _ in range(3):
        one.connection.send(b"x", [np.full(300_000, 7, np.uint8)])
    world.turn_until(lambda: len(two.messages) == 3)
    one.connection.close()
    return f"arrived {two.messages[0][1][0].nbytes} {two.messages[0][1][0].min()}"


def test_too_little_for_the_slots_is_told() -> None:
    said = "\n".join(as_nobody(64 << 10, arrays_by_slots))
    assert "UnreachableError" in said and "ulimit -l" in said
    assert "arrays go through slots" not in said


def test_too_little_for_a_segment_is_done_without() -> None:
    """There is enough for the slots of both ends: arrays go by them, and that is said once."""
    arrived, *logged = as_nobody(1 << 20, arrays_by_slots)
    assert arrived == "arrived 300000 7"
    (line,) = [line for line in logged if "arrays go through slots" in line]
    assert "rxe0:1" in line and "raise `ulimit -l` (memlock)" in line


def read_by_slots(world: World) -> str:
    one, two = world.connect()
    array = world.calling_slab.empty((3_000_000,), np.uint8)
    array[:] = np.resize(np.arange(251, dtype=np.uint8), len(array))
    found = world.calling_slab.block_of(array)
    assert found is not None
    # the sender may lend it, as it did before
    verbs_of(one)._domains[0].region(found[0].segment)
    may_lock(1 << 10)
    for nbytes in (5000, 100_000, len(array)):
        one.connection.send(b"x", [array[:nbytes]])
    world.turn_until(lambda: len(two.messages) == 3)
    assert two.connection.traffic().records_received == 4, "arrays did not come by slots"
    assert all(np.array_equal(blocks[0], array[: len(blocks[0])]) for _, blocks in two.messages)
    one.connection.close()
    return f"arrived {[len(blocks[0]) for _, blocks in two.messages]}"


def test_a_receiver_that_may_lock_nothing_but_its_slots_reads_arrays_by_them() -> None:
    arrived, *logged = as_nobody(64 << 20, read_by_slots)
    assert arrived == "arrived [5000, 100000, 3000000]", logged
    (line,) = [line for line in logged if "16 KiB at a time" in line]
    assert "rxe0:1" in line and "2048 KiB cannot be locked" in line and "`ulimit -l`" in line
