"""What a group of shards costs: a call to one, an array lent to one, waking one, and having some
that do nothing.

Expected:
    call, plain      a round trip of two rings (2.1 to 2.5 us), and on each side pickle, a table and
                     a header: 5 us.
    call, async def  a task and its first step more: 7 us.
                     A pool of processes has a queue, a lock and two threads on the way: 100 us or
                     more.
    array lent       a descriptor, one book entry on each side, one array object made and dropped, a
                     lease back: 3 us more than the same call without, for 64 KiB as for 64 MiB. The
                     books alone, in one process: 2 us. That leaves nothing for numpy's own pickle
                     by reference, which takes 4.2 us to write and 2.9 to read (CPython 3.11, numpy
                     2.4): 10 us and more while arrays go that way.
    wake-up          a doorbell is a byte on a Unix socket: what a process blocked in recv() takes,
                     20 to 50 us on a virtual machine, and 3 us for the call itself.
    shares           plain functions and bulk ones that never end have their parts of the time, 10
                     to 1, whatever either takes: to within one step of each, which is 20 % after
                     55 times the longest. To receive and answer a call takes some 10 us, which
                     count: of what functions of 20 us take themselves, they have less.
    timer            comes in the turn after the one under way: 0.1 ms and one function late.
    idle             the application and the shards sleep in epoll and wake a few times a second:
                     below 0.5 % of a core.

Both ends are pinned: the application to the first core, shards to the last ones. Where one shard
calls another on a machine of two cores, the application sleeps meanwhile.

    python -m perf.bench_shard [--json] [--quick]
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import shard
from shard.memory.leases import Borrowings, Lendings, MeetingSocket

from . import bench_ring, in_shard, limits, peers, units
from .child import pin
from .harness import Candidate, Place, Result, compare
from .machine import process_cpu_s
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each

NAME = "shard"
LENT_BYTES = (64 << 10, 1 << 20, 64 << 20)
IDLE_SHARDS = 2
CALLS_BEFORE_IDLE = 100
SETTLE_PART = 10  # of the time watched, before it: what is left to settle
BOOK_ENTRIES_PER_CALL = 10  # too short to be timed one by one
PARK_WAIT_S_MAX = 5.0  # for an idle shard to park: it spins 0.1 ms before that


@dataclass(frozen=True, slots=True)
class Call:
    """One call at a time, polling on."""

    def __str__(self) -> str:
        return "submit_to and back"


@dataclass(frozen=True, slots=True)
class Lend:
    """One array of the slab at a time, from one shard to another, polling on."""

    def __str__(self) -> str:
        return "slab array lent and released"


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A call to a shard that has parked: how long until the function runs."""

    def __str__(self) -> str:
        return "wake-up of a sleeper"


@dataclass(frozen=True, slots=True)
class Shares:
    """Plain functions and functions in class BULK, more of both than there is time for."""

    def __str__(self) -> str:
        return "bulk work beside plain functions"


@dataclass(frozen=True, slots=True)
class Ticks:
    """A timer of TICK_S in a shard that has more functions to run than there is time for."""

    def __str__(self) -> str:
        return "timer of 10 ms beside functions of 1 ms"


@dataclass(frozen=True, slots=True)
class Idle:
    """No calls, polling off: what does having shards cost?"""

    def __str__(self) -> str:
        return f"{IDLE_SHARDS} shards, idle"


Case = Call | Lend | WakeUp | Shares | Ticks | Idle
CASES: list[Case] = [Call(), Lend(), WakeUp(), Shares(), Ticks(), Idle()]

_CALL, _LEND, _WAKE_UP, _SHARES, _TICKS, _IDLE = (str(case) for case in CASES)
PLAIN, ASYNC = "application to shard, plain", "application to shard, async def"
PARKED, BLOCKED, BOOKS = "parked shard", "blocked recv", "books alone, one process"


# What plain functions and bulk ones take, in seconds: each call one of these, by chance.
SHORT_S, MIDDLE_S, LONG_S = 20e-6, 1e-3, 20e-3
MIXES = {
    "20 us, bulk 20 ms": ((SHORT_S,), (LONG_S,)),
    "20 ms, bulk 20 us": ((LONG_S,), (SHORT_S,)),
    "both 20 us to 20 ms": ((SHORT_S, MIDDLE_S, LONG_S), (SHORT_S, MIDDLE_S, LONG_S)),
}
WINDOW_STEPS = 100  # of the longest function: the shares are to be seen in that
# What calls under way take together: enough that neither runs out while the other has its part, or
# while the application has no core.
BACKLOG_S = 0.2
FLOOD = "shard, flooded"
TICK_S = 0.01

_SMALLEST, _LARGEST = units.size(LENT_BYTES[0]), units.size(LENT_BYTES[-1])
TARGETS = [
    Target(_CALL, PLAIN, "p50_ns", "at most", 5_000),
    Target(_CALL, ASYNC, "p50_ns", "at most", 8_000),
    *(
        Target(_LEND, units.size(size_bytes), "lend_ns", "at most", 3_000)
        for size_bytes in LENT_BYTES
    ),
    *(
        Target(_LEND, units.size(size_bytes), "copied_bytes", "at most", 0)
        for size_bytes in LENT_BYTES
    ),
    # the same cost, but for a repeat's scatter
    Target(_LEND, _LARGEST, "p50_ns", "at most", 1.1, against=_SMALLEST),
    Target(_LEND, BOOKS, "p50_ns", "at most", 3_000),
    Target(_WAKE_UP, PARKED, "p50_ns", "at most", 1.2, against=BLOCKED),
    *(Target(_SHARES, name, "bulk_of_its_part", "at least", 0.8) for name in MIXES),
    *(Target(_SHARES, name, "bulk_of_its_part", "at most", 1.2) for name in MIXES),
    Target(_TICKS, FLOOD, "late_ns_p90", "at most", 1_500_000),
    Target(_IDLE, "shard.ShardGroup", "application_cpu_percent", "at most", 0.5),
    Target(_IDLE, "shard.ShardGroup", "busiest_shard_cpu_percent", "at most", 0.5),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates."""
    # one long watch, not several: what wakes a process now and then is missed by short ones
    if isinstance(case, Idle):
        effort = replace(effort, repeats=1, idle_s=effort.idle_s * effort.repeats)
    return compare(NAME, str(case), candidates_of(case), effort, pinned=pinned, progress=progress)


def candidates_of(case: Case) -> list[Candidate]:
    """All that is measured in a case."""
    if isinstance(case, Call):
        pair = bench_ring.RoundTrip(bench_ring.SMALL)
        return [
            Candidate(PLAIN, "ours", partial(measure_call, is_async=False)),
            Candidate(ASYNC, "ours", partial(measure_call, is_async=True)),
            Candidate(
                "shard to shard, plain",
                "ours",
                partial(measure_call_between_shards, is_async=False),
            ),
            Candidate(
                "shard to shard, async def",
                "ours",
                partial(measure_call_between_shards, is_async=True),
            ),
            Candidate(
                "two rings, 64 B", "limit", partial(bench_ring.measure_round_trip, case=pair)
            ),
            Candidate(
                peers.PIPE.name,
                "peer",
                partial(bench_ring.measure_peer, case=pair, info=peers.PIPE),
            ),
            Candidate("concurrent.futures", "peer", measure_pool),
        ]
    if isinstance(case, Lend):
        lending = [
            Candidate(
                units.size(size_bytes), "ours", partial(measure_lending, size_bytes=size_bytes)
            )
            for size_bytes in LENT_BYTES
        ]
        return [*lending, Candidate(BOOKS, "ours", measure_books)]
    if isinstance(case, WakeUp):
        return [
            Candidate(PARKED, "ours", measure_wake_up),
            Candidate(BLOCKED, "limit", limits.measure_blocked_recv),
        ]
    if isinstance(case, Shares):
        return [
            Candidate(name, "ours", partial(measure_shares, plain_s=plain_s, bulk_s=bulk_s))
            for name, (plain_s, bulk_s) in MIXES.items()
        ]
    if isinstance(case, Ticks):
        return [Candidate(FLOOD, "ours", measure_ticks)]
    return [Candidate("shard.ShardGroup", "ours", measure_idle)]


def pin_application(place: Place) -> bool:
    """Keep this process on the first core, which a group leaves to it; whether anything is to be
    pinned.
    """
    if place.cores:
        pin(shard.usable_cores()[:1])
    return bool(place.cores)


def two_spinning_shards(place: Place) -> shard.ShardGroup:
    """Shards that poll, and an application that does not: it waits for one answer, and on two cores
    there is none for it.
    """
    return shard.ShardGroup(2, polling=False, idle="spin", pin=pin_application(place))


# -- calls -----------------------------------------------------------------------------------------


def measure_call(place: Place, effort: Effort, is_async: bool) -> Sample:
    """From the application into its one shard."""
    function = in_shard.add_one_async if is_async else in_shard.add_one
    with shard.ShardGroup(1, polling=True, pin=pin_application(place)) as group:
        submit_to = group.submit_to
        sample = time_each(lambda: submit_to(0, function, 1).result(), effort)
        return sample.with_work(answer=submit_to(0, function, 1).result())


def measure_call_between_shards(place: Place, effort: Effort, is_async: bool) -> Sample:
    """From shard 0 to shard 1, measured in shard 0."""
    with two_spinning_shards(place) as group:
        sample: Sample = group.submit_to(0, in_shard.time_calls, 1, is_async, effort).result()
        return sample


def measure_pool(place: Place, effort: Effort) -> Sample:
    """The standard library's pool with one process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=pin, initargs=(place.server_cores,)) as pool:
        sample = time_each(lambda: pool.submit(in_shard.add_one, 1).result(), effort)
        return sample.with_work(answer=pool.submit(in_shard.add_one, 1).result())


# -- lending ---------------------------------------------------------------------------------------


def measure_lending(place: Place, effort: Effort, size_bytes: int) -> Sample:
    """From shard 0 to shard 1, measured in shard 0."""
    with two_spinning_shards(place) as group:
        sample: Sample = group.submit_to(0, in_shard.time_lending, 1, size_bytes, effort).result()
        return sample


def measure_books(place: Place, effort: Effort) -> Sample:
    """Both sides' book entries for one array, without a message between them: lend, borrow, drop,
    take back.
    """
    ours, theirs = socket.socketpair()
    slab = shard.Slab()
    size_bytes = LENT_BYTES[0]
    array = slab.empty((size_bytes,), np.uint8)
    lendings, borrowings = (
        Lendings(slab, "the borrower"),
        Borrowings(MeetingSocket(ours), "the lender"),
    )
    found = slab.block_of(array)
    assert found is not None
    memory = slab.segment(found[0].segment).memory
    with theirs:

        def operate() -> None:
            for _ in range(BOOK_ENTRIES_PER_CALL):
                found = slab.block_of(array)
                assert found is not None
                block, offset = found
                borrowed = borrowings.borrow(
                    memory, offset, size_bytes, lendings.lend(block, size_bytes)
                )
                del borrowed
                lendings.take_back(borrowings.returned.popleft())

        sample = time_each(operate, effort, BOOK_ENTRIES_PER_CALL)
        sample.figures.update(
            copied_bytes=slab.statistics().used_bytes_max - slab.statistics().used_bytes
        )
        return sample.with_work(still_lent=len(lendings))


# -- time in a shard -------------------------------------------------------------------------------


def flood(
    group: shard.ShardGroup,
    end: Callable[[], bool],
    kinds: Sequence[tuple[Callable[[float], None], Sequence[float]]],
) -> None:
    """Keep BACKLOG_S of each (function, what it takes) under way in shard 0 until `end`."""
    chance = random.Random(0)
    under_way: list[deque[shard.Future]] = [deque() for _ in kinds]
    while not end():
        for (function, costs_s), waiting in zip(kinds, under_way, strict=True):
            while waiting and waiting[0].done():
                waiting.popleft().result()
            while len(waiting) * sum(costs_s) / len(costs_s) < BACKLOG_S:
                waiting.append(group.submit_to(0, function, chance.choice(costs_s)))
        time.sleep(BACKLOG_S / 100)  # the shard has work for longer
        under_way[0][0].done()
    for waiting in under_way:
        for future in waiting:
            future.cancel()


def measure_shares(
    place: Place, effort: Effort, plain_s: Sequence[float], bulk_s: Sequence[float]
) -> Sample:
    """What BULK had of a shard's time, as a part of what it is to have of it.

    Figures: bulk_of_its_part, by what the shard charges its classes, which counts receiving and
    answering calls; charged_percent, how much of all the time that is; bulk_of_own_time, by what
    the functions took themselves.
    """
    wanted = shard.BULK.shares / (shard.BULK.shares + shard.LATENCY.shares)
    window_s = (WINDOW_STEPS if effort.timed_s else WINDOW_STEPS / 4) * max(*plain_s, *bulk_s)
    with shard.ShardGroup(1, polling=False, idle="spin", pin=pin_application(place)) as group:
        # Until the shard has warmed up, until its clock has begun, then for the window: neither
        # class is to run out of calls meanwhile.
        until = time.monotonic() + window_s / 10
        began: shard.Future | None = None
        ended: shard.Future | None = None

        def end() -> bool:
            nonlocal until, began, ended
            now = time.monotonic()
            if began is None:
                if now >= until:
                    began, until = group.submit_to(0, in_shard.used_s), math.inf
            elif until == math.inf and began.done():
                until = now + window_s
            elif now >= until:  # ahead of what flood() cancels, which takes time as well
                ended = group.submit_to(0, in_shard.used_s)
            return ended is not None

        flood(group, end, [(in_shard.burn, plain_s), (in_shard.burn_in_bulk, bulk_s)])
        assert began is not None and ended is not None, "flood() goes on until they are there"
        first, last = began.result(), ended.result()
        bulk, latency, every = (
            [
                after - before
                for before, after in zip(first.get(name, (0.0, 0.0)), last[name], strict=True)
            ]
            for name in ("bulk", "latency", "all")
        )
        own_part, part = (
            of_bulk / (of_bulk + of_latency)
            for of_bulk, of_latency in zip(bulk, latency, strict=True)
        )
        figures = {
            "bulk_of_its_part": part / wanted,
            "charged_percent": 100 * (bulk[1] + latency[1]) / every[1],
            "bulk_of_own_time": own_part / wanted,
        }
        return Sample(figures=figures).with_work(kinds=(bulk[0] > 0) + (latency[0] > 0))


def measure_ticks(place: Place, effort: Effort) -> Sample:
    """How late a timer comes."""
    count = max(effort.ops_min, int(3 * effort.timed_s / TICK_S))
    with shard.ShardGroup(1, polling=False, idle="spin", pin=pin_application(place)) as group:
        ticks = group.submit_to(0, in_shard.time_ticks, TICK_S, count)
        flood(group, ticks.done, [(in_shard.burn, (MIDDLE_S,))])
        late_s = sorted(ticks.result())
        return Sample(
            figures={
                "late_ns_p50": late_s[len(late_s) // 2] * 1e9,
                "late_ns_p90": late_s[len(late_s) * 9 // 10] * 1e9,
                "late_ns_max": late_s[-1] * 1e9,
            }
        ).with_work(ticks=len(late_s))


# -- sleeping --------------------------------------------------------------------------------------


def measure_wake_up(place: Place, effort: Effort) -> Sample:
    """A call to a shard whose counters say that it parked again since the last one, and whose
    process sleeps.
    """
    with shard.ShardGroup(1, polling=False, pin=pin_application(place)) as group:
        pid = group.statistics().shards[0].pid
        parks = 0

        def wait_until_parked() -> None:
            nonlocal parks
            give_up = time.monotonic() + PARK_WAIT_S_MAX
            while (now := group.statistics().shards[0].counters.parks) <= parks:
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"the shard did not park within {PARK_WAIT_S_MAX} s: {group.statistics()}"
                    )
            parks = now
            limits.wait_until_asleep(pid)

        return limits.time_wake_ups(
            lambda: group.submit_to(0, in_shard.clock_ns).result(), wait_until_parked, effort
        )


def measure_idle(place: Place, effort: Effort) -> Sample:
    """After some calls, sleep, and read what each process, all its threads, has used of a core
    meanwhile.
    """
    with shard.ShardGroup(IDLE_SHARDS, polling=False, pin=pin_application(place)) as group:
        for _ in range(CALLS_BEFORE_IDLE):
            group.map(in_shard.add_one, 1)
        pids = [os.getpid(), *(each.pid for each in group.statistics().shards)]
        time.sleep(effort.idle_s / SETTLE_PART)
        before = [process_cpu_s(pid) for pid in pids]
        start = time.monotonic()
        time.sleep(effort.idle_s)
        took_s = time.monotonic() - start
        application, *shards = (
            100 * (process_cpu_s(pid) - was) / took_s for pid, was in zip(pids, before, strict=True)
        )
        figures = {"application_cpu_percent": application, "busiest_shard_cpu_percent": max(shards)}
        # still awake when called
        return Sample(figures=figures).with_work(answers=sum(group.map(in_shard.add_one, 1)))


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_every_call_comes_back_with_its_answer() -> None:
    for result in run(Call(), TINY):
        assert result.state == "ok", result.note
        if result.role == "ours":
            assert result.work == {"answer": 2}
            assert result.ops == TINY.ops_min


def test_an_array_is_lent_without_a_copy_and_all_of_it_is_given_back() -> None:
    for result in run(Lend(), TINY):
        assert result.state == "ok", result.note
        assert result.work == ({"still_lent": 0} if result.candidate == BOOKS else {"shared": 1})
        assert result.figures["copied_bytes"] == 0


def test_sleepers_are_woken_and_the_times_are_in_order() -> None:
    for result in run(WakeUp(), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"wakes": TINY.ops_min, "in_order": TINY.ops_min}


def test_plain_and_bulk_functions_both_have_their_parts() -> None:
    for result in run(Shares(), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"kinds": 2}


def test_a_timer_comes_beside_a_flood() -> None:
    (result,) = run(Ticks(), TINY)
    assert result.state == "ok", result.note
    assert result.work == {"ticks": TINY.ops_min}


def test_idle_shards_still_answer_afterwards() -> None:
    for result in run(Idle(), TINY):
        assert result.state == "ok", result.note
        assert result.work == {"answers": 2 * IDLE_SHARDS}


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
