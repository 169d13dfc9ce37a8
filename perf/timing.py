"""How long an operation takes: warmed up, timed one by one, told as percentiles.

Garbage collection stays on, and so does whatever else the machine does: a user has both.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to measure."""

    repeats: int  # fresh processes each time; the result is the median over repeats
    warm_s: float  # before the first figure counts
    timed_s: float  # what one repeat aims to spend on timed operations
    ops_min: int
    ops_max: int
    idle_s: float  # how long an idle pair of processes is watched


FULL = Effort(repeats=5, warm_s=0.2, timed_s=0.6, ops_min=15, ops_max=60_000, idle_s=3.0)
QUICK = Effort(repeats=3, warm_s=0.1, timed_s=0.2, ops_min=7, ops_max=20_000, idle_s=2.0)
# tests: it works, that is all
TINY = Effort(repeats=1, warm_s=0.0, timed_s=0.0, ops_min=3, ops_max=3, idle_s=0.1)

# A percentile wants ten operations above it, or it is the figure of one accident.
P99_OPS_MIN, P999_OPS_MIN = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class Sample:
    """What one repeat of one candidate came to."""

    ops: int = 0
    p50_ns: float | None = None
    p99_ns: float | None = None  # None: too few operations to say
    p999_ns: float | None = None
    ops_per_s: float | None = None
    work: dict[str, int] = field(default_factory=dict)  # what was done, for tests to check
    # what else was measured; the name carries the unit
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_rate(cls, ops: int, took_ns: int) -> Sample:
        """Operations that overlap: how many a second, no single times."""
        return cls(ops=ops, ops_per_s=ops * 1e9 / max(1, took_ns))

    def with_work(self, **work: int) -> Sample:
        """The same, with what was done."""
        return replace(self, work=work)


def time_each(operate: Callable[[], object], effort: Effort, ops_per_call: int = 1) -> Sample:
    """Call `operate` as often as `effort` says, and time every call.

    `ops_per_call` > 1 says that one call is so many operations: times are then per operation,
    averaged within the call, for what is too short to be timed one by one (a clock reading costs
    some 50 ns).
    """
    return time_calls(operate, calls_for(operate, effort), ops_per_call)


def time_calls(operate: Callable[[], object], calls: int, ops_per_call: int = 1) -> Sample:
    """As time_each, for who has warmed up and knows how many calls it wants."""
    took_ns = np.zeros(calls, dtype=np.int64)
    clock = time.perf_counter_ns
    for index in range(calls):
        before = clock()
        operate()
        took_ns[index] = clock() - before
    return summary(took_ns / ops_per_call, ops_per_call)


def time_rested(operate: Callable[[], object], effort: Effort, rest_s: float) -> Sample:
    """As time_each, with a sleep before each call that is not in its time: the other side has had
    nothing to do for as long, and what it does then, a caller sees here.
    """
    operate()
    calls = max(effort.ops_min, int(min(effort.ops_max, effort.timed_s / rest_s)))
    took_ns = np.zeros(calls, dtype=np.int64)
    clock = time.perf_counter_ns
    for index in range(calls):
        time.sleep(rest_s)
        before = clock()
        operate()
        took_ns[index] = clock() - before
    return summary(took_ns)


def calls_for(operate: Callable[[], object], effort: Effort) -> int:
    """Warm up, and learn from it how many calls fit into the time that one repeat has."""
    clock = time.perf_counter_ns
    start = now = clock()
    calls = 0
    last_ns = 0
    while calls < 2 or now - start < effort.warm_s * 1e9:
        before = now
        operate()
        now = clock()
        last_ns = now - before
        calls += 1
        if effort.timed_s == 0.0:
            return effort.ops_min
    return _calls_in(effort, min(last_ns, (now - start) // calls))


def _calls_in(effort: Effort, typical_ns: float) -> int:
    return int(min(effort.ops_max, max(effort.ops_min, effort.timed_s * 1e9 / max(1, typical_ns))))


async def time_in_turn(
    operations: Sequence[Callable[[], Awaitable[Any]]], effort: Effort
) -> list[Sample]:
    """As time_each, for what is awaited, and for several of it a, b, a, b: a drift hits all alike.
    A sample each.
    """
    clock = time.perf_counter_ns
    start = clock()
    calls = 0
    while calls < 2 or clock() - start < effort.warm_s * 1e9:
        for operate in operations:
            await operate()
        calls += 1
    calls = _calls_in(effort, (clock() - start) / calls) if effort.timed_s else effort.ops_min
    took_ns = np.zeros((len(operations), calls), dtype=np.int64)
    for index in range(calls):
        for row, operate in enumerate(operations):
            before = clock()
            await operate()
            took_ns[row, index] = clock() - before
    return [summary(row) for row in took_ns]


def time_alternately(operations: Sequence[Callable[[], object]], calls: int) -> list[Sample]:
    """As time_calls, for several operations a, b, a, b: a drift hits all alike. A sample each."""
    took_ns = np.zeros((len(operations), calls), dtype=np.int64)
    clock = time.perf_counter_ns
    for index in range(calls):
        for row, operate in enumerate(operations):
            before = clock()
            operate()
            took_ns[row, index] = clock() - before
    return [summary(row) for row in took_ns]


def time_many(
    operate: Callable[[int], Answer], effort: Effort, first_ops: int, ops_max: int
) -> tuple[Sample, Answer]:
    """The rate of operations that overlap: `operate(count)` does so many, and its last answer comes
    with the sample.

    It is first called with `first_ops`, twice: to warm up, and to guess how many fit into the time
    of a repeat.
    """
    clock = time.perf_counter_ns
    first = first_ops if effort.timed_s else effort.ops_min
    operate(first)
    before = clock()
    operate(first)
    each_ns = (clock() - before) / first
    count = int(min(ops_max, max(effort.ops_min, effort.timed_s * 1e9 / each_ns)))
    before = clock()
    answer = operate(count)
    return Sample.of_rate(count, clock() - before), answer


def summary(took_ns: np.ndarray, ops_per_call: int = 1) -> Sample:
    """Percentiles of the times of single operations, in nanoseconds; those that too few operations
    support are None.
    """
    ops = len(took_ns)
    p50, p99, p999 = (float(p) for p in np.percentile(took_ns, [50, 99, 99.9]))
    return Sample(
        ops=ops * ops_per_call,
        p50_ns=p50,
        p99_ns=p99 if ops >= P99_OPS_MIN else None,
        p999_ns=p999 if ops >= P999_OPS_MIN else None,
        ops_per_s=1e9 / float(took_ns.mean()) if took_ns.any() else None,
    )
