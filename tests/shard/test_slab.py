"""Blocks for arrays: their sizes and places, who uses them, and what there is when memory runs
out.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import ClosedError, ForkedError, LocalProtocolError, Slab
from shard.memory.arena import ALIGNMENT_BYTES, BLOCK_BYTES_MIN, Block, block_size
from shard.memory.lease_table import Lease
from shard.memory.slab import SEGMENT_BYTES_FIRST

PATIENCE_S = 30.0
MIB = 1 << 20


def address(array: NDArray[Any]) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


class Loans:
    """The leases of a peer, as a connection keeps them."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks

    def leases(self) -> list[Lease]:
        return []

    def tell_drops(self) -> None:
        """Nobody has it mapped."""

    def strike_all(self) -> list[Block]:
        blocks, self.blocks = self.blocks, []
        return blocks


class Reader:
    """A peer that may read on after its connection has ended, until it hangs up."""

    def __init__(self) -> None:
        self.gone = False

    def hung_up(self, timeout_s: float) -> bool:
        return self.gone


# -- sizes and places ------------------------------------------------------------------------------


def test_block_sizes_grow_by_quarters_of_a_power_of_two_and_waste_at_most_a_fifth() -> None:
    assert [block_size(n) for n in (0, 1, 4096)] == [BLOCK_BYTES_MIN] * 3
    assert [block_size(n) for n in (4097, 5120, 5121, 8192, 8193)] == [
        5120,
        5120,
        6144,
        8192,
        10240,
    ]
    for wanted in [
        *range(4096, 70_000, 97),
        *(10**k for k in range(4, 12)),
        *(1 << k for k in range(12, 40)),
    ]:
        size = block_size(wanted)
        assert wanted <= size <= wanted * 1.25
        assert size % ALIGNMENT_BYTES == 0
        assert block_size(size) == size


def test_arrays_are_aligned_writable_and_do_not_overlap(slab: Slab) -> None:
    arrays = [slab.empty((n,), np.uint8) for n in (0, 1, 63, 4096, 4097, 100_000, 3 * MIB, 5 * MIB)]
    for number, array in enumerate(arrays):
        assert address(array) % ALIGNMENT_BYTES == 0
        array[:] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_an_array_has_the_shape_and_dtype_asked_for(slab: Slab) -> None:
    array = slab.empty((3, 4, 5), np.float64)
    assert (array.shape, array.dtype) == ((3, 4, 5), np.dtype(np.float64))
    assert array.flags.c_contiguous
    assert type(array) is np.ndarray
    assert slab.empty(7).shape == (7,)
    assert slab.empty(()).shape == ()
    assert slab.empty((0, 5), "i4").size == 0


def test_what_cannot_be_shared_is_refused(slab: Slab) -> None:
    with pytest.raises(TypeError, match="Python objects"):
        slab.empty(3, object)
    with pytest.raises(ValueError, match=r"negative dimensions in shape \(2, -3\)"):
        slab.empty((2, -3))
    assert slab.statistics().blocks_used == 0


# -- recycling -------------------------------------------------------------------------------------


def test_a_dropped_array_gives_its_block_to_the_next_of_that_size(slab: Slab) -> None:
    array = slab.empty((100_000,), np.uint8)
    place = address(array)
    del array
    again = slab.empty((99_000,), np.uint8)
    assert address(again) == place
    other = slab.empty((99_000,), np.uint8)
    assert address(other) != place


def test_a_block_is_used_as_long_as_any_view_of_it(slab: Slab) -> None:
    array = slab.empty((1000, 100), np.float32)
    views = [
        array[3:],
        array.reshape(-1)[::7],
        array.T,
        memoryview(array.data)[2:],
        array.view(np.uint8),
        np.asarray(array),
    ]
    views.append(np.frombuffer(array, np.float64))
    del array
    gc.collect()
    while views:
        assert slab.statistics().blocks_used == 1
        views.pop()
    gc.collect()
    assert slab.statistics().blocks_used == 0


def test_ten_thousand_arrays_one_after_the_other_take_one_block(slab: Slab) -> None:
    for number in range(10_000):
        slab.empty((20_000,), np.uint8)[0] = number % 256
    assert slab.statistics().used_bytes_max <= 2 * block_size(20_000)
    assert slab.statistics().segments == 1


def test_arrays_may_be_made_and_dropped_by_several_threads(slab: Slab) -> None:
    wrong: list[int] = []

    def work(name: int) -> None:
        random = np.random.default_rng(name)
        kept = []
        for _ in range(500):
            array = slab.empty((int(random.integers(1, 50_000)),), np.uint8)
            array[:] = name
            kept.append(array)
            if len(kept) > 5 and (kept.pop(0) != name).any():
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    gc.collect()
    assert slab.statistics().blocks_used == 0


# -- users -----------------------------------------------------------------------------------------


def test_the_block_under_any_view_is_found_with_its_offset(slab: Slab) -> None:
    first = slab.empty((10_000,), np.uint8)
    array = slab.empty((100, 100), np.float32)
    found = slab.block_of(array)
    assert found is not None
    block, offset = found
    assert (block.offset, offset) == (offset, block.offset)
    assert slab.block_of(array[10:]) == (block, offset + 4000)
    assert slab.block_of(array[5, 20:]) == (block, offset + 2080)
    assert slab.block_of(array.reshape(-1).view(np.uint8)[7:]) == (block, offset + 7)
    other = slab.block_of(first)
    assert other is not None
    assert other[0] is not block


def test_arrays_from_elsewhere_have_no_block_here(slab: Slab) -> None:
    elsewhere = Slab()
    for array in (
        np.zeros(10_000),
        np.frombuffer(bytes(100), np.uint8),
        elsewhere.empty(10_000),
        np.asarray(memoryview(b"abc")),
    ):
        assert slab.block_of(array) is None
    copy = slab.empty((10,)).copy()
    assert slab.block_of(copy) is None
    elsewhere.close()


def test_a_lent_block_is_not_used_again_before_it_is_returned(slab: Slab) -> None:
    array = slab.empty((50_000,), np.uint8)
    found = slab.block_of(array)
    assert found is not None
    block, _ = found
    slab.lend(block)
    slab.lend(block)
    assert block.users == 3
    place = address(array)
    del array, found
    assert slab.statistics().blocks_used == 1
    assert address(slab.empty((50_000,), np.uint8)) != place
    slab.release(block)
    assert slab.statistics().blocks_used == 1
    slab.release(block)
    assert slab.statistics().blocks_used == 0
    fresh = [slab.empty((50_000,), np.uint8) for _ in range(2)]
    assert place in [address(each) for each in fresh]


def test_a_block_returned_more_often_than_lent_is_a_bug_named_with_its_place(slab: Slab) -> None:
    block = slab.allocate(5000)
    slab.release(block)
    with pytest.raises(
        LocalProtocolError, match="block at 0:0 released more often than it was lent"
    ):
        slab.release(block)
    assert slab.statistics().blocks_used == 0
    one, two = slab.allocate(5000), slab.allocate(5000)
    assert one is not two, "the free list holds it once"


def test_a_free_block_cannot_be_lent(slab: Slab) -> None:
    block = slab.allocate(5000)
    slab.release(block)
    with pytest.raises(LocalProtocolError, match="block at 0:0 is free and cannot be lent"):
        slab.lend(block)
    assert block.users == 0


def test_a_release_while_the_slab_is_busy_does_not_wait_and_is_not_lost(slab: Slab) -> None:
    block = slab.allocate(5000)
    # as another thread has it, or this one when the collector runs a destructor, or one frozen at
    # exit
    with slab._lock:
        slab.release(block)
        assert block.users == 1
    assert slab.statistics().blocks_used == 0
    assert slab.allocate(5000) is block


def test_destructors_that_the_collector_runs_inside_the_slab_may_release(slab: Slab) -> None:
    class Cycle:
        """Garbage that only the collector finds, whose end releases a block and drops an array."""

        def __init__(self) -> None:
            self.itself = self
            self.array = slab.empty(5000, np.uint8)
            self.block = slab.allocate(6000)

        def __del__(self) -> None:
            slab.release(self.block)

    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # at every object that the collector tracks: those made by the slab, too
    try:
        for size in range(4096, 200_000, 1024):
            Cycle()
            slab.release(slab.allocate(size))
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert slab.statistics().blocks_used == 0


def test_a_view_made_from_the_root_itself_has_no_part_in_the_block(slab: Slab) -> None:
    array = slab.empty(50_000, np.uint8)
    assert array.base is not None
    part = array.base[10:]
    assert slab.block_of(part) is not None, "its base is the root"
    copy = array.base.copy()
    assert slab.block_of(copy) is None
    del array, copy
    gc.collect()
    assert slab.statistics().blocks_used == 1
    del part
    assert slab.statistics().blocks_used == 0


def test_blocks_lent_over_a_connection_that_ended_come_back_when_the_reader_hangs_up(
    slab: Slab,
) -> None:
    reader = Reader()
    blocks = [slab.allocate(5000) for _ in range(3)]
    slab.lend_until_hung_up(reader, Loans(list(blocks)))
    slab.wait_for_readers(0.0)
    assert slab.statistics().blocks_used == 3
    reader.gone = True
    assert slab.allocate(5000) in blocks
    assert slab.statistics().blocks_used == 1


# -- figures ---------------------------------------------------------------------------------------


def test_fragmentation_is_what_rounding_loses_and_what_serves_one_size_only(slab: Slab) -> None:
    assert slab.statistics().fragmentation == 0.0
    kept = [slab.empty(nbytes, np.uint8) for nbytes in (9 << 10, 20 << 10, 20 << 10)]
    kept.pop()
    statistics = slab.statistics()
    assert (block_size(9 << 10), block_size(20 << 10)) == (10 << 10, 20 << 10)
    assert (statistics.internal_bytes, statistics.external_bytes, statistics.blocks_free) == (
        1 << 10,
        20 << 10,
        1,
    )
    assert statistics.fragmentation == (21 << 10) / SEGMENT_BYTES_FIRST
    kept.clear()
    statistics = slab.statistics()
    assert (statistics.internal_bytes, statistics.external_bytes, statistics.free_bytes) == (
        0,
        0,
        50 << 10,
    )
    assert statistics.fragmentation == 0.0, "nothing is used: all of it can be cut anew"


def test_statistics_say_what_is_used_free_and_reserved(slab: Slab) -> None:
    kept = [slab.empty((5000,), np.uint8) for _ in range(3)]
    kept.pop()
    statistics = slab.statistics()
    size = block_size(5000)
    assert (statistics.used_bytes, statistics.free_bytes, statistics.used_bytes_max) == (
        2 * size,
        size,
        3 * size,
    )
    assert (statistics.blocks_used, statistics.segments, statistics.reserved_bytes) == (
        2,
        1,
        SEGMENT_BYTES_FIRST,
    )
    assert (statistics.reserved_bytes_max, statistics.leases, statistics.leased_bytes) == (
        SEGMENT_BYTES_FIRST,
        0,
        0,
    )
    assert statistics.lease_age_s_max == 0.0
    assert statistics.limit_bytes == slab.limit_bytes


# -- the end ---------------------------------------------------------------------------------------


def test_arrays_outlive_the_closing_of_their_slab() -> None:
    slab = Slab()
    array = slab.empty((1000, 1000))
    array[:] = 7
    part = array[500:]
    slab.close()
    slab.close()
    del array
    gc.collect()
    assert (part == 7).all()
    part[:] = 8
    assert part.sum() == 8 * 500_000
    del part, slab
    gc.collect()


def test_a_closed_slab_makes_no_more_arrays_and_takes_back_what_it_made() -> None:
    slab = Slab()
    array = slab.empty(5000, np.uint8)
    slab.close()
    del array
    assert slab.statistics().blocks_used == 0
    with pytest.raises(ClosedError, match="this slab was closed"):
        slab.empty(5000, np.uint8)


def test_an_array_that_is_being_made_as_another_thread_closes_the_slab_is_refused(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, kept = slab.allocate, slab.empty(5000, np.uint8)

    def be_late(nbytes: int) -> Block:
        block = allocate(nbytes)
        slab.close()
        return block

    monkeypatch.setattr(slab, "allocate", be_late)
    with pytest.raises(ClosedError, match="this slab was closed"):
        slab.empty(5000, np.uint8)
    kept[:] = 7


def test_a_slab_is_refused_in_a_fork_of_its_process(slab: Slab) -> None:
    slab.empty((10,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            slab.empty((10,))
        except ForkedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
