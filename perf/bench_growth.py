"""How cost grows: with the number of shards, with the size of a record, and in a mesh where
everybody calls everybody.

Expected:
    shards   one thread of the application serves all of them: 2 to 3 us a call of its own, whatever
             their number, so some 300 k calls/s from 1 shard on. One call at a time costs the same
             with 1 or 8 shards while each has a core; the application looks at one ring more per
             shard, 0.1 us. More shards than cores take turns: rates stay, the time of a single call
             grows to that of a wake-up and more.
    records  up to 1 KiB the Python around the copy, then the copy: 10 GB/s and more while all is in
             cache. Time there and back doubles with the size from 64 KiB on.
    mesh     each shard calls and is called: 5 to 6 us a call in all, split over two cores. N shards
             on N cores give N times as many calls; more shards than cores give no more than the
             cores do.

Polling is off, as it is unless asked for: pollers without a core each would hide everything else. A
candidate is marked "oversubscribed" where it has more busy processes than there are cores.

    python -m perf.bench_growth [--json] [--quick] [--plot growth.svg]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import shard

from . import bench_ring, in_shard, machine, plot, units
from .bench_ring import IN_PLACE_LOOKED, ONE_BY_ONE, OneWay, RoundTrip, Way
from .bench_shard import pin_application
from .harness import Candidate, Place, Result, compare
from .in_shard import WINDOW_PER_SHARD
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each, time_many

NAME = "growth"
SHARDS = tuple(range(1, 9))
SIZES_BYTES = (*(8 << shift for shift in range(0, 18, 2)), 1 << 20)  # 8 B, 32 B, ... 512 KiB, 1 MiB
CALLS_FIRST = 500  # by which a rate is guessed
RECORDS_FIRST = 64  # fewer than of small records: 1 MiB takes 0.2 ms


@dataclass(frozen=True, slots=True)
class Shards:
    """The application calls 1 to N shards: one call at a time, then a window to each."""

    counts: tuple[int, ...] = SHARDS

    def __str__(self) -> str:
        return "calls to N shards"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Each of N shards calls all others. One shard alone has nobody to call."""

    counts: tuple[int, ...] = SHARDS[1:]

    def __str__(self) -> str:
        return "N shards call each other"


@dataclass(frozen=True, slots=True)
class RecordThereAndBack:
    """A record of growing size, and its echo."""

    sizes_bytes: tuple[int, ...] = SIZES_BYTES

    def __str__(self) -> str:
        return "record there and back"


@dataclass(frozen=True, slots=True)
class RecordOneWay:
    """Records of growing size as fast as they go."""

    sizes_bytes: tuple[int, ...] = SIZES_BYTES

    def __str__(self) -> str:
        return "records one way"


Case = Shards | Mesh | RecordThereAndBack | RecordOneWay
CASES: list[Case] = [Shards(), Mesh(), RecordThereAndBack(), RecordOneWay()]
# growth is looked at, as a curve; what a single point must reach, bench_ring and bench_shard say
TARGETS: list[Target] = []


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate, and where on which curve its result stands."""

    candidate: Candidate
    curve: str
    x: float  # shards, or bytes


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case at all its points."""
    return compare(
        NAME,
        str(case),
        [point.candidate for point in points_of(case)],
        effort,
        pinned=pinned,
        progress=progress,
    )


def points_of(case: Case) -> list[Point]:
    """The points of a case's curves."""
    if isinstance(case, Shards):
        return [
            _of_shards(count, count + 1, partial(measure_shards, shards=count))
            for count in case.counts
        ]
    if isinstance(case, Mesh):  # the application only waits
        return [
            _of_shards(count, count, partial(measure_mesh, shards=count)) for count in case.counts
        ]
    if isinstance(case, RecordThereAndBack):
        return [
            _of_size(
                size_bytes,
                curve,
                partial(
                    bench_ring.measure_round_trip, case=RoundTrip(size_bytes), in_place=in_place
                ),
            )
            for curve, in_place in (("copied", False), ("in place", True))
            for size_bytes in case.sizes_bytes
        ]
    return [
        _of_size(size_bytes, curve, partial(measure_one_way, size_bytes=size_bytes, way=way))
        for curve, way in (("copied out", ONE_BY_ONE), ("looked at in place", IN_PLACE_LOOKED))
        for size_bytes in case.sizes_bytes
    ]


def _of_shards(shards: int, busy: int, measure: Callable[[Place, Effort], Sample]) -> Point:
    name = f"{shards} shard{'s' * (shards > 1)}"
    if busy > len(shard.usable_cores()):
        name += ", oversubscribed"
    return Point(Candidate(name, "ours", measure), "measured", shards)


def _of_size(size_bytes: int, curve: str, measure: Callable[[Place, Effort], Sample]) -> Point:
    return Point(
        Candidate(f"{units.size(size_bytes)}, {curve}", "ours", measure, bytes_per_op=size_bytes),
        curve,
        size_bytes,
    )


# -- measuring -------------------------------------------------------------------------------------


def measure_shards(place: Place, effort: Effort, shards: int) -> Sample:
    """Percentiles of one call at a time, to the shards in turn; the rate with a window of calls
    under way to each.
    """
    with shard.ShardGroup(shards, polling=False, pin=pin_application(place)) as group:
        submit_to = group.submit_to
        turn = 0

        def call() -> None:
            nonlocal turn
            submit_to(turn, in_shard.add_one, 1).result()
            turn = (turn + 1) % shards

        def calls(count: int) -> int:
            under_way: deque[shard.Future] = deque()
            window = WINDOW_PER_SHARD * shards
            right = 0
            for number in range(count + window):
                if number >= window:
                    right += under_way.popleft().result() == number - window + 1
                if number < count:
                    under_way.append(submit_to(number % shards, in_shard.add_one, number))
            return right

        alone = time_each(call, effort)
        rate, right = time_many(calls, effort, CALLS_FIRST, 8 * effort.ops_max)
        return replace(alone, ops=alone.ops + rate.ops, ops_per_s=rate.ops_per_s).with_work(
            wrong=rate.ops - right
        )


def measure_mesh(place: Place, effort: Effort, shards: int) -> Sample:
    """The rate of all calls together, from the application's word to the last shard's answer."""
    with shard.ShardGroup(shards, polling=False, pin=pin_application(place)) as group:

        def calls(count: int) -> int:
            each = -(-count // shards)
            right: int = sum(group.map(in_shard.call_all_others, shards, each))
            return each * shards - right

        sample, wrong = time_many(calls, effort, CALLS_FIRST * shards, 8 * effort.ops_max)
        return sample.with_work(wrong=wrong)


def measure_one_way(place: Place, effort: Effort, size_bytes: int, way: Way) -> Sample:
    """As bench_ring, with a smaller first guess."""
    return bench_ring.measure_one_way(place, effort, OneWay(size_bytes), way, RECORDS_FIRST)


# -- showing ---------------------------------------------------------------------------------------

# What a panel shows upwards, from a result; a case has a panel for each that it measured.
Y_AXES: dict[str, Callable[[Result], float | None]] = {
    "p50 of one at a time, us": lambda result: (
        None if result.p50_ns is None else result.p50_ns / 1e3
    ),
    "a second": lambda result: result.ops_per_s,
    "GB/s": lambda result: None if result.bytes_per_s is None else result.bytes_per_s / 1e9,
}


def draw(results: Sequence[Result], path: Path) -> None:
    """All curves to a file. Raises NoPlot where matplotlib is missing, OSError, ValueError for an
    unknown ending.
    """
    plot.draw(panels(results), path)


def panels(results: Sequence[Result]) -> list[plot.Panel]:
    """The curves of the results: a panel for each thing measured in each case."""
    drawn = []
    for case in CASES:
        is_records = isinstance(case, RecordThereAndBack | RecordOneWay)
        places = {point.candidate.name: (point.curve, point.x) for point in points_of(case)}
        for y_label, value_of in Y_AXES.items():
            curves: dict[str, list[tuple[float, float]]] = {}
            for result in results:
                y = value_of(result) if result.case == str(case) else None
                if y is not None and result.candidate in places:
                    curve, x = places[result.candidate]
                    curves.setdefault(curve, []).append((x, y))
            if curves:
                x_label = "bytes of a record" if is_records else "shards"
                drawn.append(
                    plot.Panel(f"{NAME}: {case}", x_label, y_label, curves, is_log=is_records)
                )
    return drawn


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_every_number_of_shards_answers_all_calls() -> None:
    for case in (Shards((1, 2)), Mesh((2, 3))):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            assert result.work == {"wrong": 0}
            assert result.ops_per_s


def test_records_of_every_size_arrive_whole() -> None:
    for result in run(RecordThereAndBack((8, 1 << 20)), TINY):
        assert result.state == "ok", result.note
        assert result.work == {
            "bytes_echoed": result.bytes_per_op,
            "bytes_right": result.bytes_per_op,
        }
    for result in run(RecordOneWay((8, 1 << 20)), TINY):
        assert result.state == "ok", result.note
        assert result.work["bytes_received"] == result.bytes_per_op * result.work["records"]


def test_more_busy_processes_than_cores_are_marked() -> None:
    cores = len(shard.usable_cores())
    marks = [
        "oversubscribed" in point.candidate.name for point in points_of(Shards((1, cores + 1)))
    ]
    assert marks == [cores < 2, True]


def test_results_become_curves_in_a_file_or_a_word_on_what_is_missing(tmp_path: Path) -> None:
    import pytest  # who only measures need not have it

    results = run(RecordOneWay((8, 32)), TINY)
    rate, gigabytes = panels(results)
    assert rate.curves.keys() == gigabytes.curves.keys() == {"copied out", "looked at in place"}
    assert [x for x, _ in rate.curves["copied out"]] == [8, 32]
    file = tmp_path / "growth.svg"
    if machine.is_installed("matplotlib"):
        draw(results, file)
        assert "<svg" in file.read_text()
    else:
        with pytest.raises(plot.NoPlot, match="pip install"):
            draw(results, file)


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
