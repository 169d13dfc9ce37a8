"""Which core each shard runs on, and which memory is near it: the policy over what topology.py
reads.

Pinning is os.sched_setaffinity(0, ...), which is about the *calling thread*.
psutil.Process().cpu_affinity(cores) hands the kernel the process id, which there names the first
thread alone: called from another thread it would pin the wrong one. And
psutil.cpu_count(logical=False) counts the machine's physical cores, not those that a cpuset or
taskset leaves to us.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from shard.group.topology import Core, Topology, read_topology

# As the process was started with: pinning a thread later narrows what the kernel answers, and what
# children inherit.
_AT_START = sorted(os.sched_getaffinity(0))

# set_mempolicy(2), numaif.h and linux/mempolicy.h: MPOL_PREFERRED takes memory of the node while it
# has any, and of others then; MPOL_BIND would end in the out-of-memory killer where one node is
# full.
_SYS_SET_MEMPOLICY_X86_64, _MPOL_PREFERRED = 238, 1
_NODES_MAX = 1024  # what x86-64 kernels can be built for (MAX_NUMNODES); the mask is 128 bytes
_BITS_PER_WORD = 64


def usable_cores() -> list[int]:
    """Cores that the cgroup, and whoever started this process, leave to it; in order."""
    return list(_AT_START)


@functools.cache
def topology() -> Topology:
    """The usable cores of this machine, as first read."""
    return read_topology(_AT_START)


def place(count: int, machine: Topology | None = None) -> list[int]:
    """A core for each of `count` shards; in turn when there are fewer cores than shards. machine:
    None: this one.
    """
    order = placing_order(topology() if machine is None else machine)
    return [order[index % len(order)] for index in range(count)]


def placing_order(machine: Topology) -> list[int]:
    """All usable cores, the best for a shard first.

    The application keeps the first core; its hyper-threads are next to last. Before them come whole
    physical cores, then the other hyper-threads of these: two that poll on one physical core slow
    each other down by more than a hop to the other node costs. In each of these groups the
    application's NUMA node is filled before the next one (its rings and arrays lie there), and the
    last core comes first, because systems put their own work on the first ones.
    """
    application = machine.cores[0]

    def rank(core: Core) -> tuple[bool, bool, int, bool, int, int]:
        return (
            core is application,
            application.number in core.siblings,
            core.siblings.index(core.number),  # 0: nobody else is on this physical core yet
            core.node != application.node,
            core.node,
            -core.number,
        )

    return [core.number for core in sorted(machine.cores, key=rank)]


def auto_shards(machine: Topology | None = None) -> int:
    """How many shards "auto" means: one for each usable physical core that the CPU quota can feed,
    less one for the application; at least 1."""
    machine = topology() if machine is None else machine
    fed = (
        machine.physical_count
        if machine.quota_cores is None
        else min(machine.physical_count, int(machine.quota_cores))
    )
    return max(1, fed - 1)


def oversubscribed(pollers: int, machine: Topology | None = None) -> str | None:
    """What to tell the user when `pollers` busy-polling processes (shards, and an application that
    polls) are more than can run at once; None when they are not."""
    machine = topology() if machine is None else machine
    cores, quota = len(machine.cores), machine.quota_cores
    room = cores if quota is None else min(cores, quota)
    if pollers <= room:
        return None
    what = (
        f"{cores} usable cores"
        if quota is None or quota >= cores
        else f"the cgroup's CPU quota of {quota:g} cores"
    )
    return (
        f"{pollers} busy-polling processes on {what}: they take turns, "
        "and each waits milliseconds for its own; start at most "
        f"{max(1, int(room))}, switch polling off, or allow more cores (taskset, cpuset, "
        "docker --cpus)"
    )


def pin(core: int) -> set[int]:
    """Keep the calling thread on one core; where it was allowed before, for restore(). Raises
    ValueError.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"core {core!r} is not among the cores this process may use: {usable_cores()}"
        ) from error
    return before


def restore(cores: set[int]) -> None:
    """Let the calling thread run where it could before pin()."""
    os.sched_setaffinity(0, cores)


def bind_memory(core: int, machine: Topology | None = None) -> bool:
    """Prefer memory near `core` for all pages that the calling thread, and threads it starts from
    now on, are the first to touch; shared memory too. Whether that was done: False on a machine
    with one node, and where the kernel refuses (some container sandboxes do); nothing has changed
    then, and the memory is right but farther away."""
    machine = topology() if machine is None else machine
    near = machine.core(core)
    if (
        near is None
        or len(machine.nodes) < 2
        or near.node >= _NODES_MAX
        or platform.machine() != "x86_64"
    ):
        return False
    mask = (ctypes.c_ulong * (_NODES_MAX // _BITS_PER_WORD))()
    mask[near.node // _BITS_PER_WORD] = 1 << near.node % _BITS_PER_WORD
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    # maxnode counts one more than the bits: the kernel takes one off before it uses it.
    return bool(
        syscall(_SYS_SET_MEMPOLICY_X86_64, _MPOL_PREFERRED, mask, ctypes.c_ulong(_NODES_MAX + 1))
        == 0
    )
