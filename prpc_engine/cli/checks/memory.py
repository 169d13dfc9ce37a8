"""Shared memory: room, leftovers, pages."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from shard import (
    ShardError,
    Slab,
    huge_page_policy,
    read_huge_page_offer,
    read_memory_room,
)

MIB = 1 << 20
# The first segment of a process takes 8, a few tensors the rest.
ROOM_BYTES_SMALL = 256 * MIB
PROBE_BYTES = MIB


def shared_memory(host: Host) -> Iterator[Finding]:
    """How much memory host and cgroup leave for segments, and whether a slab can be made."""
    room = read_memory_room(host.root)
    value = (
        f"{_size(max(0, room.free_bytes))} may be taken of {_size(room.total_bytes)} ({room.bound})"
    )
    probe = Slab(debug=False)
    try:
        probe.empty(PROBE_BYTES, "uint8")
    except (ShardError, OSError) as error:
        reason = str(error).partition("\n")[0]
        yield Finding(
            "shared memory",
            f"{value}; {reason}",
            "bad",
            "end what holds it, or give the container more (docker: --memory)",
        )
        return
    except ValueError as error:  # PRPC_HUGE_PAGES
        yield Finding(
            "shared memory", f"{value}; not tried: {error}", "warn", "mend that setting first"
        )
        return
    finally:
        probe.close()
    if room.free_bytes < ROOM_BYTES_SMALL:
        yield Finding(
            "shared memory",
            value,
            "warn",
            "too little for many tensors: a larger memory limit (docker: --memory)",
        )
    else:
        yield Finding("shared memory", value)


def shm_folder(host: Host) -> Iterator[Finding]:
    """/dev/shm, where named rings lie; nothing else does."""
    try:
        space = os.statvfs(host.path("dev/shm"))
    except OSError as error:
        advice = "only Ring.create() needs it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        yield Finding("/dev/shm", error.strerror or str(error), "warn", advice)
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    yield Finding("/dev/shm", f"{_size(free)} free of {_size(size)}, for named rings alone")


def _size(count: int) -> str:
    return (
        f"{count / MIB:.0f} MiB" if count < 10 * 1024 * MIB else f"{count / (1024 * MIB):.0f} GiB"
    )


def garbage(host: Host) -> Iterator[Finding]:
    """Named rings whose process is gone."""
    names = host.garbage()
    if names:
        yield Finding(
            "leftovers", f"{len(names)} segments of dead processes", "warn", "run `prpc gc`"
        )
    else:
        yield Finding("leftovers", "none")


def huge_pages(host: Host) -> Iterator[Finding]:
    """What the machine offers for slabs, and whether they take it."""
    offer = read_huge_page_offer(host.root)
    offered = (
        [f"{_size(offer.reserved_free_bytes)} reserved and free"]
        if offer.reserved_free_bytes
        else []
    )
    if offer.transparent:
        offered.insert(0, "transparent")
    value = "; ".join(offered) or "none offered"
    to_offer = (
        "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, "
        "or `sysctl vm.nr_hugepages=N` (2 MiB each)"
    )
    try:
        policy = huge_page_policy()
    except ValueError as error:
        yield Finding(
            "huge pages", f"{value}; {error}", "bad", "set it to one of these, or unset it"
        )
        return
    if policy == "never":
        yield Finding("huge pages", f"{value}; PRPC_HUGE_PAGES=never")
    elif not offered and policy == "require":
        yield Finding(
            "huge pages", f"{value}; PRPC_HUGE_PAGES=require", "bad", f"offer some: {to_offer}"
        )
    elif not offered:
        yield Finding(
            "huge pages", value, "ok", f"with them slabs grow some three times faster: {to_offer}"
        )
    else:
        yield Finding("huge pages", value)
