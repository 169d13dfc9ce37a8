"""Cores: which ones this process may use, and how to stay on one."""

from __future__ import annotations

import os

# As the process was started with: pinning a thread later narrows what the kernel answers, and what children inherit.
_AT_START = sorted(os.sched_getaffinity(0))


def usable_cores() -> list[int]:
    """Cores that the cgroup, and whoever started this process, leave to it; in order."""
    return list(_AT_START)


def place(count: int) -> list[int]:
    """A core for each of `count` shards: the last ones first, so that the application keeps the first; in turn when
    there are fewer cores than shards."""
    cores = usable_cores()[::-1]
    return [cores[index % len(cores)] for index in range(count)]


def pin(core: int) -> set[int]:
    """Keep the calling thread on one core; where it was allowed before, for restore(). Raises ValueError."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"core {core!r} is not among the cores this process may use: {usable_cores()}") from error
    return before


def restore(cores: set[int]) -> None:
    """Let the calling thread run where it could before pin()."""
    os.sched_setaffinity(0, cores)
