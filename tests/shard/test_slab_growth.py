"""How a slab grows, and how it goes on when it may not: every way to find room for a block, in
their order.
"""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import ShmFull, Slab
from shard.memory.arena import Holder
from shard.memory.slab import (
    HUGE_PAGE_BYTES,
    IDLE_TURNS,
    KEPT_BYTES,
    SEGMENT_BYTES_FIRST,
    SEGMENT_BYTES_MAX,
    TRIM_S,
)
from tests.helpers import ManualClock
from tests.shard.small_memory import end_with_memory

MIB = 1 << 20


def address(array: NDArray[Any]) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def test_segments_double_up_to_a_bound_and_large_blocks_have_one_of_their_own(slab: Slab) -> None:
    kept = [slab.empty((1,), np.uint8)]
    assert slab.statistics().reserved_bytes == SEGMENT_BYTES_FIRST
    kept += [slab.empty((3 * MIB,), np.uint8) for _ in range(6)]  # two of them in the first segment
    assert slab.statistics().segments == 2
    assert slab.statistics().reserved_bytes == 3 * SEGMENT_BYTES_FIRST
    kept.append(slab.empty((SEGMENT_BYTES_MAX // 2 + 1,), np.uint8))
    statistics = slab.statistics()
    assert statistics.segments == 3
    assert (statistics.reserved_bytes - 3 * SEGMENT_BYTES_FIRST) % HUGE_PAGE_BYTES == 0


def test_growing_over_the_slabs_own_bound_is_shm_full_with_the_figures() -> None:
    slab = Slab(limit_bytes=SEGMENT_BYTES_FIRST)
    kept = [slab.empty((MIB,), np.uint8) for _ in range(8)]
    with pytest.raises(
        ShmFull,
        match=r"holds 8 MiB and may grow to 8 MiB.* 8 blocks are in use.*PRPC_SLAB_BYTES_MAX",
    ):
        slab.empty((MIB,), np.uint8)
    with pytest.raises(MemoryError):
        slab.empty((MIB,), np.uint8)
    kept.pop()
    kept.append(slab.empty((MIB,), np.uint8))
    del kept
    slab.close()


def test_free_large_blocks_go_back_to_the_kernel_when_the_bound_is_reached() -> None:
    slab = Slab(limit_bytes=200 * MIB)
    del_me = slab.empty((100 * MIB,), np.uint8)
    del del_me
    larger = slab.empty((150 * MIB,), np.uint8)
    larger[-1] = 1
    assert slab.statistics().segments == 1
    del larger
    slab.close()


def test_a_segment_smaller_than_planned_fills_the_bound() -> None:
    slab = Slab(limit_bytes=SEGMENT_BYTES_FIRST + 3 * MIB)
    kept = [slab.empty((MIB,), np.uint8) for _ in range(11)]
    assert slab.statistics().reserved_bytes == slab.limit_bytes
    with pytest.raises(ShmFull):
        slab.empty((MIB,), np.uint8)
    del kept
    slab.close()


def test_what_can_never_fit_is_refused_with_the_bound(slab: Slab) -> None:
    with pytest.raises(
        ShmFull,
        match=rf"an array of {1 << 50} bytes does not fit a slab that may grow to "
        rf"{slab.limit_bytes} bytes",
    ):
        slab.empty(1 << 50, np.uint8)
    assert slab.statistics().reserved_bytes == 0


@pytest.mark.parametrize("nbytes", [99 * MIB, 100 * MIB, 100 * MIB - 1])
def test_the_whole_bound_can_be_one_array(nbytes: int) -> None:
    slab = Slab(limit_bytes=100 * MIB)  # the size of such a block would be rounded up to 112 MiB
    array = slab.empty(nbytes, np.uint8)
    array[-1] = 1
    del array
    again = slab.empty(nbytes, np.uint8)
    assert again[-1] == 1
    del again
    slab.close()


def test_a_full_slab_cuts_a_segment_anew_whose_blocks_are_all_free() -> None:
    slab = Slab(limit_bytes=SEGMENT_BYTES_FIRST)
    small = [slab.empty(MIB, np.uint8) for _ in range(8)]
    places = {address(array) for array in small}
    keep = small.pop(0)
    small.clear()
    with pytest.raises(ShmFull, match=r"8 MiB, 2.0 MiB more were asked for: 1 blocks are in use"):
        slab.empty(2 * MIB, np.uint8)
    del keep
    large = slab.empty(2 * MIB, np.uint8)
    assert address(large) == min(places), "the very memory, which peers have mapped already"
    statistics = slab.statistics()
    assert (statistics.recuts, statistics.segments, statistics.segments_dropped) == (1, 1, 0)
    assert (statistics.blocks_free, statistics.free_bytes) == (0, 0)
    del large
    slab.close()


def test_no_memory_is_given_up_for_an_array_that_will_not_fit_anyway() -> None:
    slab = Slab(limit_bytes=SEGMENT_BYTES_FIRST + 16 * MIB)
    first = slab.empty(5 * MIB, np.uint8)  # 8 MiB
    second = slab.empty(10 * MIB, np.uint8)  # the other 16
    place = address(second)
    del second
    with pytest.raises(ShmFull):
        slab.empty(20 * MIB, np.uint8)
    assert address(slab.empty(10 * MIB, np.uint8)) == place
    assert slab.statistics().segments_dropped == 0
    del first
    slab.close()


def test_small_segments_give_way_to_a_large_array_under_a_number_never_used_before() -> None:
    slab = Slab(limit_bytes=SEGMENT_BYTES_FIRST + 16 * MIB)
    kept = [slab.allocate(MIB) for _ in range(20)]
    numbers = {block.segment for block in kept}
    for block in kept:
        slab.release(block)
    large = slab.allocate(20 * MIB)
    assert large.segment not in numbers
    assert slab.statistics().segments_dropped == 2
    assert slab.statistics().reserved_bytes <= slab.limit_bytes
    slab.close()


def test_days_of_changing_sizes_stay_within_the_bound() -> None:
    slab = Slab(limit_bytes=24 * MIB)
    for turn in range(200):
        size = (turn * 7919) % (5 * MIB) + 1
        arrays = [slab.empty(size, np.uint8) for _ in range(3)]
        assert len({address(array) for array in arrays}) == 3
        del arrays
    assert slab.statistics().reserved_bytes_max <= slab.limit_bytes
    slab.close()


def test_reserved_memory_is_touched_ahead() -> None:
    slab = Slab()
    slab.reserve(40 * MIB)
    assert slab.statistics().reserved_bytes >= 40 * MIB
    segments = slab.statistics().segments
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [slab.empty(size, np.uint8) for size in (10 * MIB, 14 * MIB, *[MIB] * 16)]
    for array in kept:
        array[::4096] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert slab.statistics().segments == segments
    assert faults < 40 * MIB // 4096 // 10, (
        "a fault for each page is the first touch that was paid before"
    )
    slab.reserve(0)
    assert slab.statistics().segments == segments
    del kept, array
    slab.close()


def test_reserving_takes_what_is_free_before_it_grows() -> None:
    slab = Slab(limit_bytes=SEGMENT_BYTES_FIRST)
    slab.reserve(SEGMENT_BYTES_FIRST)
    kept = [slab.empty(MIB, np.uint8) for _ in range(8)]
    with pytest.raises(ShmFull):
        slab.reserve(1)
    kept.clear()
    slab.reserve(SEGMENT_BYTES_FIRST)
    assert (slab.statistics().segments, slab.statistics().recuts) == (1, 1)
    with pytest.raises(ShmFull, match="does not fit a slab"):
        slab.reserve(SEGMENT_BYTES_FIRST + 1)
    slab.close()


def test_little_memory_is_shm_full_at_once_and_all_of_it_is_used() -> None:
    program = """
import numpy as np
from shard import ShmFull, Slab

slab = Slab()
kept = []
try:
    while True:
        kept.append(slab.empty((1 << 20,), np.uint8))
        kept[-1][:] = len(kept)
except ShmFull as error:
    assert "no memory for a segment of 2.0 MiB" in str(error), error
    assert ": of the 20.0 MiB of a small machine 0.0 MiB may be taken" in str(error), error
    assert "PRPC_SLAB_BYTES_MAX" in str(error)
assert len(kept) == 20  # segments became smaller when there was no room for larger ones
assert all((array == number).all() for number, array in enumerate(kept, 1))
kept.pop()
slab.empty((1 << 20,), np.uint8)[:] = 1
print("all is well")
"""
    assert end_with_memory(20 << 20, program) == (0, "all is well\n")


def look(slab: Slab, clock: ManualClock, times: int) -> int:
    """So many looks for idle segments; how many went back."""
    gone = 0
    for _ in range(times):
        clock.advance(TRIM_S)
        gone += slab.trim()
    return gone


def test_what_a_burst_took_goes_back_one_segment_at_a_time_when_nobody_uses_it() -> None:
    clock = ManualClock()
    slab = Slab(clock=clock)
    arrays = [slab.empty((112 << 20,), np.uint8) for _ in range(4)]
    reserved = slab.statistics().reserved_bytes
    assert look(slab, clock, 20) == 0, "all of it is in use"
    del arrays
    assert look(slab, clock, IDLE_TURNS - 1) == 0, "it may be wanted again soon"
    assert look(slab, clock, 1) == 1
    assert slab.statistics().reserved_bytes == reserved - (112 << 20)
    look(slab, clock, 20)
    statistics = slab.statistics()
    assert KEPT_BYTES <= statistics.reserved_bytes < KEPT_BYTES + (112 << 20), "some stays warm"
    assert statistics.segments_trimmed == statistics.segments_dropped == 2
    slab.close()


def test_a_segment_that_is_used_now_and_then_stays() -> None:
    clock = ManualClock()
    slab = Slab(clock=clock)
    del [slab.empty((112 << 20,), np.uint8) for _ in range(4)][:]
    for _ in range(20):
        assert look(slab, clock, IDLE_TURNS - 1) == 0
        del [slab.empty((112 << 20,), np.uint8) for _ in range(4)][:]
    assert slab.statistics().segments_trimmed == 0
    slab.close()


class Watcher:
    """Counts the segments that it is told of."""

    def __init__(self, told: list[int]) -> None:
        self.told = told

    def segment_dropped(self) -> None:
        self.told.append(1)


def test_who_watches_segments_is_told_of_each_that_goes_and_not_kept_alive() -> None:
    slab = Slab(limit_bytes=16 << 20)
    told: list[int] = []
    watcher, gone = Watcher(told), Watcher(told)
    slab.watch_segments(watcher)
    slab.watch_segments(gone)
    del gone
    for nbytes in (12 << 20, 14 << 20, 16 << 20):
        slab.release(slab.allocate(nbytes))
    assert slab.statistics().segments_dropped == len(told) == 2
    slab.close()


def test_several_who_look_are_no_more_impatient_than_one() -> None:
    clock = ManualClock()
    slab = Slab(clock=clock)
    del [slab.empty((112 << 20,), np.uint8) for _ in range(4)][:]
    slab.statistics()
    assert sum(slab.trim() for _ in range(10 * IDLE_TURNS)) == 0
    slab.close()


def test_one_peer_holds_its_share_at_most_and_the_others_have_theirs() -> None:
    slab = Slab(limit_bytes=64 << 20)
    greedy, modest = Holder(0.5), Holder(0.5)
    blocks = []
    with pytest.raises(
        ShmFull,
        match=r"one peer holds 32.0 MiB of copies .* its share of 64 MiB \(limit slab_share_max = "
        r"0.5\)",
    ):
        while True:
            blocks.append(slab.allocate(4 << 20, greedy))
    assert len(blocks) == 8
    slab.release(slab.allocate(4 << 20, modest))
    slab.release(blocks.pop())
    blocks.append(slab.allocate(4 << 20, greedy))
    for block in blocks:
        slab.release(block)
    assert greedy.held_bytes == modest.held_bytes == 0
    slab.release(slab.allocate(60 << 20, greedy))  # one block of any size
    slab.close()
