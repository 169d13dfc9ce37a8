"""Cores: which are ours, how they belong together, what the cgroup leaves of them; clocks and
fences.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from shard import format_ranges, read_topology

CLOCK_READS = 10_000
CLOCK_NS_SLOW = 300  # time.monotonic() takes 30-60 ns where the clock is read without a system call
# linux/membarrier.h
_MEMBARRIER_X86_64, _MEMBARRIER_QUERY, _MEMBARRIER_GLOBAL_EXPEDITED = 324, 0, 2


def machine(host: Host) -> Iterator[Finding]:
    """Only machines that keep stores in order can have rings in shared memory."""
    name = host.machine()
    if name in ("x86_64", "AMD64"):
        yield Finding("machine", name)
    else:
        yield Finding(
            "machine",
            name,
            "warn",
            "shared memory is for x86-64 only: use transports=['tcp'], and no shards",
        )


def cores(host: Host) -> Iterator[Finding]:
    """Those that this process may run on."""
    usable = host.usable_cores()
    value = f"{len(usable)} of {os.cpu_count()} ({format_ranges(usable)})"
    if len(usable) == 1:
        advice = (
            "processes that poll take turns on one core: leave polling off, "
            "or allow more cores (taskset, cpuset)"
        )
        yield Finding("cores", value, "warn", advice)
    else:
        yield Finding("cores", value)


def siblings(host: Host) -> Iterator[Finding]:
    """Hyper-threads: cores that are one physical core take its time from each other."""
    there_is = read_topology(host.usable_cores(), host.root)
    usable, physical = len(there_is.cores), there_is.physical_count
    if physical == usable:
        yield Finding("physical cores", f"{physical}, without hyper-threads")
    else:
        advice = (
            f"shards take whole physical cores first: more than {physical} that poll slow each "
            "other down"
        )
        yield Finding("physical cores", f"{physical}, {usable} hyper-threads on them", "ok", advice)


def quota(host: Host) -> Iterator[Finding]:
    """What the cgroup lets this process use of its cores."""
    limit = read_topology(host.usable_cores(), host.root).quota_cores
    usable = len(host.usable_cores())
    if limit is None:
        yield Finding("cgroup quota", "none")
    elif limit < usable:
        advice = (
            f"more than {limit:g} busy processes are stopped for parts of every period: "
            "poll with fewer, or not at all"
        )
        yield Finding("cgroup quota", f"{limit:g} of {usable} cores", "warn", advice)
    else:
        yield Finding("cgroup quota", f"{limit:g} cores")


def numa(host: Host) -> Iterator[Finding]:
    """Memory nodes of the usable cores."""
    there_is = read_topology(host.usable_cores(), host.root)
    members = {
        node: [core.number for core in there_is.cores if core.node == node]
        for node in there_is.nodes
    }
    if len(members) > 1:
        shown = ", ".join(
            f"node {node}: cores {format_ranges(numbers)}" for node, numbers in members.items()
        )
        advice = (
            "shards fill the application's node first, and memory lands where it is first "
            "touched: keep the processes of one "
            f"job on one node where they fit (numactl -N {there_is.nodes[0]} ...)"
        )
        yield Finding("NUMA nodes", f"{len(members)} ({shown})", "warn", advice)
    else:
        yield Finding("NUMA nodes", "1")


def clock(host: Host) -> Iterator[Finding]:
    """Reactors look at the clock every turn: it should cost no system call."""
    source = (
        host.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    )
    read = time.monotonic
    started = host.clock_ns()
    for _ in range(CLOCK_READS):
        read()
    each_ns = (host.clock_ns() - started) / CLOCK_READS
    value = f"{source}, {each_ns:.0f} ns to read"
    if each_ns > CLOCK_NS_SLOW:
        advice = (
            "each look is a system call, thousands a second: boot with a tsc or kvm-clock source "
            "if the machine has one"
        )
        yield Finding("clock", value, "warn", advice)
    else:
        yield Finding("clock", value)


def fence(host: Host) -> Iterator[Finding]:
    """membarrier(GLOBAL_EXPEDITED):
    what makes going to sleep safe without a fence in every send.
    """
    if host.machine() not in ("x86_64", "AMD64"):
        return
    offered = ctypes.CDLL(None, use_errno=True).syscall(_MEMBARRIER_X86_64, _MEMBARRIER_QUERY, 0, 0)
    if offered > 0 and offered & _MEMBARRIER_GLOBAL_EXPEDITED:
        yield Finding("membarrier", "offered")
    else:
        advice = (
            "sleepers look up every millisecond instead: a kernel from 4.16 on has it, "
            "or a sandbox forbids it"
        )
        yield Finding("membarrier", "not offered", "warn", advice)
