"""How much memory may still be taken before this process, or one beside it, meets the out-of-memory
killer.

Segments are memfds: no mount bounds their size, and whoever touches a page that the machine or the
cgroup cannot give is killed, not told. So before pages are taken the smallest of these is read, and
a segment that does not fit is ShmFull:

    proc/meminfo                                    MemAvailable: what the host has, page cache that
                                                    can go included
    sys/fs/cgroup/<path>/memory.{max,current,stat}  version 2, for the process's cgroup and each one
                                                    above it that is visible
    sys/fs/cgroup/memory/<path>/memory.{limit_in_bytes,usage_in_bytes,stat}
                                                    version 1

Of each a margin stays free (MARGIN_PART of it, within bounds): heaps and stacks grow without asking
anybody.

What it cannot see: memory that other processes are about to take (segments are reserved step by
step, with a look before each step, so that those that look too are seen), limits of cgroups above
the visible tree (a container's parents), swap (shared memory that is swapped is slow; it does not
count as room), and memory that was promised but never touched by anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MARGIN_PART = 16  # a sixteenth of the whole stays free ...
MARGIN_BYTES_MIN = 16 << 20  # ... but no less: an interpreter with numpy takes so much in one go
MARGIN_BYTES_MAX = 256 << 20  # ... and no more
CGROUPS = "sys/fs/cgroup"
NO_LIMIT_BYTES = 1 << 60  # version 1 writes its largest number where there is no limit


@dataclass(frozen=True)
class MemoryRoom:
    """The tightest bound on what this process may take, at one moment."""

    free_bytes: int
    """May be taken, the margin left out; 0 or less when nothing may."""
    total_bytes: int
    """Of the host, or the limit of the cgroup."""
    bound: str
    """What sets it: "this host", or "cgroup /path"."""


UNBOUNDED = MemoryRoom(NO_LIMIT_BYTES, NO_LIMIT_BYTES, "nothing known")


def read_memory_room(root: Path = Path("/")) -> MemoryRoom:
    """Look now: some 0.1 ms. UNBOUNDED where the files under `root` say nothing."""
    rooms = [room for room in (_of_host(root), *_of_cgroups(root)) if room is not None]
    return min(rooms, key=lambda room: room.free_bytes, default=UNBOUNDED)


def _room(total_bytes: int, free_bytes: int, bound: str) -> MemoryRoom:
    margin = max(MARGIN_BYTES_MIN, min(MARGIN_BYTES_MAX, total_bytes // MARGIN_PART))
    return MemoryRoom(free_bytes - margin, total_bytes, bound)


def _of_host(root: Path) -> MemoryRoom | None:
    lines = dict(
        line.partition(":")[::2] for line in (_read(root / "proc/meminfo") or "").splitlines()
    )
    total, available = (lines.get(name, "").split()[:1] for name in ("MemTotal", "MemAvailable"))
    if not (total and available and total[0].isdecimal() and available[0].isdecimal()):
        return None
    return _room(int(total[0]) << 10, int(available[0]) << 10, "this host")


def _of_cgroups(root: Path) -> list[MemoryRoom | None]:
    rooms = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers == "":
            base, limit, usage, prefix = root / CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit, usage = (
                root / CGROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            prefix = "total_"  # of the cgroups below it, too, as in the other two files
        else:
            continue
        # In a container /proc may show the path on the host, which is not there: its own limits are
        # at the base.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            bound = "cgroup /" + "/".join(parts[:depth])
            rooms.append(_of_cgroup(base.joinpath(*parts[:depth]), limit, usage, prefix, bound))
    return rooms


def _of_cgroup(folder: Path, limit: str, usage: str, prefix: str, bound: str) -> MemoryRoom | None:
    most, used = _read(folder / limit), _read(folder / usage)
    if not (most and used and most.isdecimal() and used.isdecimal()) or int(most) >= NO_LIMIT_BYTES:
        return None  # "max", or no such file
    # page cache of files, which the kernel takes back before it kills; shared memory is not in
    # these figures
    cached = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}inactive_file", f"{prefix}active_file") and value.isdecimal():
            cached += int(value)
    return _room(int(most), int(most) - max(0, int(used) - cached), bound)


def _read(path: Path) -> str | None:
    """A small file's text without the white space around it; None when it is not there or not ours
    to read.
    """
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
