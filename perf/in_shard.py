"""What the benchmarks run inside shards: functions to be called, and functions that call other
shards and time it.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial

import numpy as np
from numpy.typing import NDArray

import shard

from .timing import Effort, Sample, time_in_turn

WINDOW_PER_SHARD = 16  # calls under way to each shard: enough that none of them waits for work

_kept: list[NDArray[np.uint8]] = []


def add_one(number: int) -> int:
    """A plain function: runs in the turn that finds its call."""
    return number + 1


async def add_one_async(number: int) -> int:
    """The same as a coroutine: a task, which never waits."""
    return number + 1


def clock_ns() -> int:
    """When this ran; one clock for all processes of a machine."""
    return time.perf_counter_ns()


def take(value: object) -> None:
    """Receive and drop: what arrives by reference is given back with the answer."""


def keep(array: NDArray[np.uint8]) -> None:
    """Hold on to an array that was lent, until drop()."""
    _kept.append(array)


def first_of_kept() -> int:
    """The first byte, as it is now, of what keep() holds."""
    return int(_kept[-1][0])


def drop() -> None:
    """Give back what keep() holds."""
    _kept.clear()


def burn(seconds: float) -> None:
    """Take so long of the processor, as a plain function of class LATENCY."""
    _burn("latency", seconds)


@shard.in_class(shard.BULK)
def burn_in_bulk(seconds: float) -> None:
    """The same in class BULK."""
    _burn("bulk", seconds)


def _burn(name: str, seconds: float) -> None:
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        pass
    _burnt_s[name] = _burnt_s.get(name, 0.0) + now - began


_burnt_s: dict[str, float] = {}


def used_s() -> dict[str, tuple[float, float]]:
    """By class what burn() and burn_in_bulk() took so far, and what this shard has charged the
    class, in seconds; as "all" the time that it is now, twice.
    """
    now = time.perf_counter()
    charged = {each.name: each.busy_ns / 1e9 for each in shard.this_shard().reactor.statistics()}
    return {name: (_burnt_s.get(name, 0.0), charged_s) for name, charged_s in charged.items()} | {
        "all": (now, now)
    }


async def time_ticks(period_s: float, count: int) -> list[float]:
    """How late a timer of this shard comes, in seconds, again and again."""
    reactor = shard.this_shard().reactor
    late_s = []
    for _ in range(count):
        rung: shard.Future = shard.Future()
        due = reactor.clock() + period_s
        reactor.timers.call_at(due, lambda to=rung: to.set_result(reactor.clock()))  # type: ignore[misc]
        late_s.append(await rung - due)
    return late_s


async def time_calls(index: int, is_async: bool, effort: Effort) -> Sample:
    """Calls from this shard to shard `index`, one at a time."""
    submit_to = shard.this_shard().submit_to
    function = add_one_async if is_async else add_one
    sample = (await time_in_turn([partial(submit_to, index, function, 1)], effort))[0]
    return sample.with_work(answer=await submit_to(index, function, 1))


async def time_lending(index: int, size_bytes: int, effort: Effort) -> Sample:
    """An array of our slab to shard `index` and back, in turn with the same call without one.

    The percentiles are of the call with the array. Figures: lend_ns, by how much its median is
    above that of the other call; copied_bytes, by how much the slab's use grew at any time, for a
    copy would need a second block.
    """
    this = shard.this_shard()
    array = this.slab.empty((size_bytes,), np.uint8)
    array[:] = 0
    with_array, without = (
        partial(this.submit_to, index, take, array),
        partial(this.submit_to, index, take, None),
    )
    used_bytes_max = this.slab.statistics().used_bytes_max
    await with_array()  # the segment's descriptor goes over once
    sample, bare = await time_in_turn([with_array, without], effort)
    copied_bytes = this.slab.statistics().used_bytes_max - used_bytes_max
    await this.submit_to(index, keep, array)
    array[0] = 7  # the other side sees it: what it holds is this very memory
    is_shared = await this.submit_to(index, first_of_kept) == 7
    await this.submit_to(index, drop)
    assert sample.p50_ns is not None and bare.p50_ns is not None
    sample.figures.update(
        without_ns=bare.p50_ns, lend_ns=sample.p50_ns - bare.p50_ns, copied_bytes=copied_bytes
    )
    return sample.with_work(shared=int(is_shared))


async def call_all_others(shards: int, count: int) -> int:
    """`count` calls to the other shards in turn, a window of them under way; how many came back
    right.
    """
    this = shard.this_shard()
    others = [index for index in range(shards) if index != this.index]
    under_way: deque[shard.Future] = deque()
    right = 0
    for number in range(count + WINDOW_PER_SHARD):
        if number >= WINDOW_PER_SHARD:
            right += await under_way.popleft() > 0
        if number < count:
            under_way.append(this.submit_to(others[number % len(others)], add_one, number))
    return right
