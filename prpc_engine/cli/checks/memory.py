"""Shared memory: room, leftovers, pages."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from shard import ShmFull, Slab, find_garbage, huge_page_policy, read_huge_page_offer

MIB = 1 << 20
# Containers get 64 MiB unless told otherwise; the first segment of a process takes 8, a few tensors the rest.
SHM_BYTES_SMALL = 256 * MIB
PROBE_BYTES = MIB


def shared_memory(host: Host) -> Iterator[Finding]:
    """/dev/shm: size and room, and whether a slab can be made there."""
    try:
        space = os.statvfs(host.path("dev/shm"))
    except OSError as error:
        yield Finding("/dev/shm", error.strerror or str(error), "bad", "mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    value = f"{_size(free)} free of {_size(size)}"
    probe = Slab(debug=False)
    try:
        probe.empty(PROBE_BYTES, "uint8")
    except (ShmFull, OSError) as error:
        reason = str(error).partition("\n")[0]
        yield Finding(
            "/dev/shm", f"{value}; {reason}", "bad", "run `prpc gc`, or give the container more (docker: --shm-size=1g)"
        )
        return
    except ValueError as error:  # PRPC_HUGE_PAGES
        yield Finding("/dev/shm", f"{value}; not tried: {error}", "warn", "mend that setting first")
        return
    finally:
        probe.close()
    if free < SHM_BYTES_SMALL:
        advice = "too little for many tensors: docker run --shm-size=1g; Kubernetes: an emptyDir with medium: Memory there"
        yield Finding("/dev/shm", value, "warn", advice)
    else:
        yield Finding("/dev/shm", value)


def _size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count < 10 * 1024 * MIB else f"{count / (1024 * MIB):.0f} GiB"


def garbage(host: Host) -> Iterator[Finding]:
    """Segments whose process is gone."""
    names = find_garbage()
    if names:
        yield Finding("leftovers", f"{len(names)} segments of dead processes", "warn", "run `prpc gc`")
    else:
        yield Finding("leftovers", "none")


def huge_pages(host: Host) -> Iterator[Finding]:
    """What the machine offers for slabs, and whether they take it."""
    offer = read_huge_page_offer(host.root)
    offered = [f"{_size(offer.reserved_free_bytes)} reserved and free"] if offer.reserved_free_bytes else []
    if offer.transparent:
        offered.insert(0, "transparent in /dev/shm")
    value = "; ".join(offered) or "none offered"
    to_offer = "`mount -o remount,huge=advise /dev/shm`, or `sysctl vm.nr_hugepages=N` (2 MiB each)"
    try:
        policy = huge_page_policy()
    except ValueError as error:
        yield Finding("huge pages", f"{value}; {error}", "bad", "set it to one of these, or unset it")
        return
    if policy == "never":
        yield Finding("huge pages", f"{value}; PRPC_HUGE_PAGES=never")
    elif not offered and policy == "require":
        yield Finding("huge pages", f"{value}; PRPC_HUGE_PAGES=require", "bad", f"offer some: {to_offer}")
    elif not offered:
        yield Finding("huge pages", value, "ok", f"with them slabs grow some three times faster: {to_offer}")
    else:
        yield Finding("huge pages", value)
