"""Cores, what the cgroup leaves of them, clocks and fences."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from shard import usable_cores

CLOCK_READS = 10_000
CLOCK_NS_SLOW = 300  # time.monotonic() takes 30-60 ns where the clock is read without a system call
_MEMBARRIER_X86_64, _MEMBARRIER_QUERY, _MEMBARRIER_GLOBAL_EXPEDITED = 324, 0, 2  # linux/membarrier.h


def machine(host: Host) -> Iterator[Finding]:
    """Only machines that keep stores in order can have rings in shared memory."""
    name = platform.machine()
    if name in ("x86_64", "AMD64"):
        yield Finding("machine", name)
    else:
        yield Finding("machine", name, "warn", "shared memory is for x86-64 only: use transports=['tcp'], and no shards")


def cores(host: Host) -> Iterator[Finding]:
    """Those that this process may run on."""
    usable = usable_cores()
    value = f"{len(usable)} of {os.cpu_count()} ({_ranges(usable)})"
    if len(usable) == 1:
        advice = "processes that poll take turns on one core: leave polling off, or allow more cores (taskset, cpuset)"
        yield Finding("cores", value, "warn", advice)
    else:
        yield Finding("cores", value)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5", as the kernel writes it."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cgroup_cores(host: Host) -> float | None:
    """The smallest CPU quota of this process's cgroup and those above it, in cores; None without one.

    Version 2: cpu.max, "<quota or max> <period>". Version 1: cpu.cfs_quota_us, -1 for none, and cpu.cfs_period_us.
    """
    quotas = []
    for line in (host.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        # In a container /proc may show the path on the host, which is not there: its own limits are at the base.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            quota = read(host, "/".join([base, *parts[:depth]]))
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_v2(host: Host, folder: str) -> float | None:
    words = (host.read(f"{folder}/cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(host: Host, folder: str) -> float | None:
    quota, period = host.read(f"{folder}/cpu.cfs_quota_us"), host.read(f"{folder}/cpu.cfs_period_us")
    return None if quota is None or period is None or int(quota) <= 0 else int(quota) / int(period)


def quota(host: Host) -> Iterator[Finding]:
    """What the cgroup lets this process use of its cores."""
    limit = cgroup_cores(host)
    usable = len(usable_cores())
    if limit is None:
        yield Finding("cgroup quota", "none")
    elif limit < usable:
        advice = f"more than {limit:g} busy processes are stopped for parts of every period: poll with fewer, or not at all"
        yield Finding("cgroup quota", f"{limit:g} of {usable} cores", "warn", advice)
    else:
        yield Finding("cgroup quota", f"{limit:g} cores")


def numa(host: Host) -> Iterator[Finding]:
    """Memory nodes."""
    nodes = [name for name in host.entries("sys/devices/system/node") if name.removeprefix("node").isdigit()]
    if len(nodes) > 1:
        advice = "memory lands where it is first touched: keep the processes of one job on one node (numactl -N 0 -m 0 ...)"
        yield Finding("NUMA nodes", str(len(nodes)), "warn", advice)
    else:
        yield Finding("NUMA nodes", "1")


def clock(host: Host) -> Iterator[Finding]:
    """Reactors look at the clock every turn: it should cost no system call."""
    source = host.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    read = time.monotonic
    started = time.perf_counter_ns()
    for _ in range(CLOCK_READS):
        read()
    each_ns = (time.perf_counter_ns() - started) / CLOCK_READS
    value = f"{source}, {each_ns:.0f} ns to read"
    if each_ns > CLOCK_NS_SLOW:
        advice = "each look is a system call, thousands a second: boot with a tsc or kvm-clock source if the machine has one"
        yield Finding("clock", value, "warn", advice)
    else:
        yield Finding("clock", value)


def fence(host: Host) -> Iterator[Finding]:
    """membarrier(GLOBAL_EXPEDITED): what makes going to sleep safe without a fence in every send."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    offered = ctypes.CDLL(None, use_errno=True).syscall(_MEMBARRIER_X86_64, _MEMBARRIER_QUERY, 0, 0)
    if offered > 0 and offered & _MEMBARRIER_GLOBAL_EXPEDITED:
        yield Finding("membarrier", "offered")
    else:
        advice = "sleepers look up every millisecond instead: a kernel from 4.16 on has it, or a sandbox forbids it"
        yield Finding("membarrier", "not offered", "warn", advice)
