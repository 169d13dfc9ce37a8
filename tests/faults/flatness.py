"""What processes hold while they work, sampled over time, and whether it grew.

The first third of the samples is warm-up. A third is worth its maximum, and that of the last third
may exceed that of the middle third by the bound of the measure at most.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

import psutil

from shard import PeerLostError, ShardGroup, SlabStatistics, this_shard

SAMPLE_TIMEOUT_S = 60.0  # a shard that does not tell its figures by then hangs
MIB = 1 << 20


@dataclass(frozen=True)
class Measure:
    """What is sampled, and by how much the last third may be above the middle one."""

    name: str
    bound: float


# Arrays of up to 1 MiB come and go, and what malloc keeps of them moved a third's maximum by 2 MiB;
# more than twice that is no noise. Each process has part in some 20,000 calls in ten seconds, a
# third of a soak: a leak of 260 bytes a call is seen, at night one of 13.
MEMORY = Measure("private memory, MiB", 5.0)
# Stood still in every soak; a sample may catch a restart, where both lanes of the dead and those of
# the newborn are open: three lanes of six.
FDS = Measure("descriptors", 18)
# Stood still in every soak; what the interpreter or a library starts for a moment may be caught in
# a sample.
THREADS = Measure("threads", 2)
# A restart again, with two mappings a lane, and a segment more where large arrays met.
MAPS = Measure("mappings of /dev/shm", 8)
# 32 calls under way with an array each, and 8 arrays that are kept; on average a dozen were seen.
LEASES = Measure("leases", 40)
BLOCKS = Measure("slab blocks in use", 40)
# One more doubling, where many of the largest arrays met.
RESERVED = Measure("slab, MiB reserved", 32)
# Nothing here makes a segment with a name.
NAMES = Measure("names in /dev/shm", 0)


def slab_statistics() -> SlabStatistics:
    """Run in a shard: its slab's figures."""
    return this_shard().slab.statistics()


def anonymous_bytes(pid: int) -> int:
    """Of a process's resident memory, what no file and no segment lies behind: segments are counted
    by their owners' slabs.
    """
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def grew(values: list[float], bound: float) -> bool:
    """Whether the last third's maximum is above the middle third's by more than the bound; the
    first third is warm-up.
    """
    third = len(values) // 3
    return third > 0 and max(values[-third:]) > max(values[third:-third]) + bound


class Samples:
    """A series per measure and process."""

    def __init__(self, groups: dict[str, ShardGroup]) -> None:
        self.series: defaultdict[tuple[Measure, str], list[float]] = defaultdict(list)
        self._groups = groups

    def take(self) -> None:
        """Look once at every process and at the books of both groups."""
        self._take_process("application", os.getpid())
        names = sum(1 for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name)
        self._add(NAMES, "application", names)
        for name, group in self._groups.items():
            now = group.statistics()
            rows = [now.application, *(each.counters for each in now.shards)]
            self._add(LEASES, name, sum(row.leases_lent for row in rows))
            for each in now.shards:
                self._take_process(f"{name} {each.index}", each.pid)
                self._take_slab(f"{name} {each.index}", group, each.index)

    def _take_slab(self, name: str, group: ShardGroup, index: int) -> None:
        try:
            slab = group.submit_to(index, slab_statistics).result(SAMPLE_TIMEOUT_S)
        except PeerLostError:  # killed just now
            return
        self._add(BLOCKS, name, slab.blocks_used)
        self._add(RESERVED, name, slab.reserved_bytes / MIB)

    def _take_process(self, name: str, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            with open(f"/proc/{pid}/maps") as maps:
                mapped = sum(1 for line in maps if "/dev/shm" in line)
            memory = anonymous_bytes(pid) / MIB
            fds, threads = process.num_fds(), process.num_threads()
        except (psutil.Error, OSError, StopIteration):  # killed, and not born again yet
            return
        for measure, value in ((MEMORY, memory), (FDS, fds), (THREADS, threads), (MAPS, mapped)):
            self._add(measure, name, value)

    def _add(self, measure: Measure, name: str, value: float) -> None:
        self.series[measure, name].append(value)

    def complaints(self) -> list[str]:
        """The series that grew."""
        return [
            f"{measure.name} of {name} grew by more than {measure.bound:g}"
            for (measure, name), values in self.series.items()
            if grew(values, measure.bound)
        ]

    def print(self) -> None:
        """The maximum of each third."""
        columns = "".join(f"{name:>10}" for name in ("warm-up", "middle", "last", "bound"))
        print(f"{'maximum in each third of the time':<44}{columns}")
        for (measure, name), values in sorted(
            self.series.items(), key=lambda item: (item[0][0].name, item[0][1])
        ):
            third = len(values) // 3
            parts = (
                [values[:third], values[third:-third], values[-third:]] if third else [values] * 3
            )
            figures = "".join(f"{max(part):>10.1f}" for part in parts)
            verdict = "  GREW" if grew(values, measure.bound) else ""
            print(f"{measure.name + ' of ' + name:<44}{figures}{measure.bound:>+10.1f}{verdict}")
