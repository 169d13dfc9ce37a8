"""The cores of this machine as the kernel shows them: which share a NUMA node or a physical core,
and how much of them is ours.

    file under the root                                          what it says
    sys/devices/system/cpu/online                                cores that are switched on:
                                                                 "0-3,8-11"
    sys/devices/system/cpu/cpu<N>/topology/thread_siblings_list  hyper-threads of N's physical core,
                                                                 N among them
    sys/devices/system/node/node<M>/cpulist                      cores whose memory is node M
    proc/self/cgroup                                             where this process stands in the
                                                                 cgroup trees
    sys/fs/cgroup/<path>/cpu.max                                 version 2: "<quota_us or max>
                                                                 <period_us>"
    sys/fs/cgroup/cpu/<path>/cpu.cfs_{quota,period}_us           version 1: a quota of -1 is none

Containers and virtual machines show less of this. What is missing or unreadable is never an error:
it means one node (0), no siblings, no quota. Who is put where is decided in cpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

CORES = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True)
class Core:
    """One hardware thread that this process may use (the kernel calls it a cpu), with its NUMA node
    and the hardware threads that share its physical core.
    """

    number: int
    node: int  # whose memory is near
    # usable hardware threads of the same physical core, in order; this one is among them
    siblings: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The hardware threads that this process may use, in order of their numbers (at least one), and
    how much CPU time its cgroup allows. Shards are placed by it.
    """

    cores: tuple[Core, ...]
    # CPU time that the cgroup allows in each period, in cores; None: no limit
    quota_cores: float | None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes of the usable cores, in order."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def physical_count(self) -> int:
        """Physical cores among the usable ones: hyper-threads of one count once."""
        return len({core.siblings for core in self.cores})

    def core(self, number: int) -> Core | None:
        """The usable core of that number."""
        return next((core for core in self.cores if core.number == number), None)


def read_topology(usable: Iterable[int], root: Path = Path("/")) -> Topology:
    """What the files under `root` say about the `usable` cores. Cores that are offline drop out,
    unless all would.
    """
    numbers = sorted(set(usable))
    online = parse_ranges(_read(root / CORES / "online"))
    present = [number for number in numbers if number in online] or numbers
    node_of = _node_of_cores(root)
    cores = tuple(
        Core(number, node_of.get(number, 0), _siblings(root, number, present)) for number in present
    )
    return Topology(cores, read_quota(root))


def parse_ranges(text: str | None) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]; [] for None, "" and what is no such list."""
    numbers: list[int] = []
    for part in (text or "").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last.isdecimal() or not dash):
            return []
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def format_ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5", as the kernel writes it."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _siblings(root: Path, number: int, present: list[int]) -> tuple[int, ...]:
    listed = parse_ranges(_read(root / CORES / f"cpu{number}/topology/thread_siblings_list"))
    # Those that we may not use, or that are switched off, take nothing from us that could be
    # avoided.
    return tuple(sorted({number} | {sibling for sibling in listed if sibling in present}))


def _node_of_cores(root: Path) -> dict[int, int]:
    try:
        names = [entry.name for entry in (root / NODES).iterdir()]
    except OSError:
        return {}
    nodes = [
        int(name.removeprefix("node")) for name in names if name.removeprefix("node").isdecimal()
    ]
    return {
        core: node
        for node in nodes
        for core in parse_ranges(_read(root / NODES / f"node{node}/cpulist"))
    }


def read_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's cgroup and those above it, in cores; None without
    one.
    """
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        read: Callable[[Path], float | None]
        if controllers == "":
            base, read = root / CGROUPS, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / CGROUPS / "cpu", _quota_v1
        else:
            continue
        # In a container /proc may show the path on the host, which is not there: its own limits are
        # at the base.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        quotas += [read(base.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    return _in_cores(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _in_cores(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _in_cores(quota_us: str | None, period_us: str | None) -> float | None:
    # "max", "-1", or no such file
    if not (quota_us and period_us and quota_us.isdecimal() and period_us.isdecimal()):
        return None
    return int(quota_us) / int(period_us) if int(quota_us) > 0 and int(period_us) > 0 else None


def _read(path: Path) -> str | None:
    """A small file's text without the white space around it; None when it is not there or not ours
    to read.
    """
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
