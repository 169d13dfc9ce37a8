"""What the figures were measured on: without it they say nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

# What may change a figure, or is compared with.
DISTRIBUTIONS = (
    "numpy",
    "msgspec",
    "multiprocess",
    "posix-ipc",
    "psutil",
    "pyzmq",
    "pynng",
    "grpcio",
    "mpi4py",
    "mpich",
    "iceoryx2",
    "prpc-engine",
)
SHM_FOLDER = "/dev/shm"
BUSY_WATCH_S = 0.2
# of all cores, before the run: above it others are at work, and the figures are theirs too
BUSY_PERCENT_MAX = 10.0
STEAL_PERCENT_MAX = 2.0
CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3): the clock of process `pid` is (~pid << 3) | 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts at the start of a run."""

    cpu_model: str
    cores: tuple[int, ...]  # that this process may use
    cgroup_cores: float | None  # quota; None: no limit
    kernel: str
    python: str
    packages: dict[str, str]
    load_1min: float
    busy_percent: float  # of all cores, over BUSY_WATCH_S before the run
    steal_percent: float  # of all cores, taken by the hypervisor in that time
    # why the machine has fewer free cores than the run wants; "" when it has enough
    oversubscribed: str


def facts(cores_wanted: int = 2) -> Machine:
    """Look at this machine; takes BUSY_WATCH_S."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    quota = _cgroup_cores()
    before = cpu_seconds()
    time.sleep(BUSY_WATCH_S)
    busy, steal = percent_between(before, cpu_seconds())
    load = os.getloadavg()[0]
    reasons = []
    if len(cores) < cores_wanted:
        reasons.append(f"{len(cores)} core allowed, {cores_wanted} wanted")
    if quota is not None and quota < cores_wanted:
        reasons.append(f"cgroup quota of {quota:.1f} cores, {cores_wanted} wanted")
    if busy > BUSY_PERCENT_MAX:
        reasons.append(f"{busy:.0f} % of the cores was busy before the run")
    if steal > STEAL_PERCENT_MAX:
        reasons.append(f"the hypervisor took {steal:.0f} % of the cores")
    return Machine(
        cpu_model=_cpu_model(),
        cores=cores,
        cgroup_cores=quota,
        kernel=platform.release(),
        python=_python(),
        packages={name: version for name in DISTRIBUTIONS if (version := version_of(name))},
        load_1min=load,
        busy_percent=round(busy, 1),
        steal_percent=round(steal, 1),
        oversubscribed="; ".join(reasons),
    )


def _python() -> str:
    # not by each process that measures: it loads the command line
    from prpc_engine.cli.checks.host import python_has_profiles
    from prpc_engine.cli.checks.software import WITHOUT_PROFILES

    return platform.python_version() + ("" if python_has_profiles() else f", {WITHOUT_PROFILES}")


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_installed(module: str) -> bool:
    """Whether `module` could be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


def cpu_seconds() -> tuple[float, float, float]:
    """(busy, steal, idle) ticks of all cores since boot, from the first line of /proc/stat
    (proc_stat(5)).
    """
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, idle, wait, irq, soft_irq, steal = fields
    return float(user + nice + system + irq + soft_irq), float(steal), float(idle + wait)


def process_cpu_s(pid: int) -> float:
    """What all threads of a process have used, from its CPU clock: /proc and psutil tell it in
    ticks of 10 ms.
    """
    return time.clock_gettime_ns((~pid << 3) | CPUCLOCK_SCHED) / 1e9


def memory_available_bytes() -> int:
    """What this process could take without driving others out, by the kernel's estimate, and by the
    cgroup's limit if any.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(
        int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")
    )
    most, now = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, int(most.read_text()) - int(now.read_text()))
    except (OSError, ValueError):  # not there, or "max"
        return available


def shm_available_bytes() -> int:
    """What there is room for in /dev/shm."""
    folder = os.statvfs(SHM_FOLDER)
    return folder.f_bavail * folder.f_frsize


def percent_between(before: tuple[float, ...], after: tuple[float, ...]) -> tuple[float, float]:
    """(busy, steal) in percent of all cores' time between two cpu_seconds()."""
    busy, steal, idle = (b - a for a, b in zip(before, after, strict=True))
    total = max(1.0, busy + steal + idle)
    return 100 * busy / total, 100 * steal / total


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cgroup_cores() -> float | None:
    v2, v1 = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    try:
        if v2.exists():
            quota, period = v2.read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        if v1.exists() and int(v1.read_text()) > 0:
            return int(v1.read_text()) / int(v1.with_name("cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None
