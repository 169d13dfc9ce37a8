"""Huge pages for shared memory: 2 MiB at a time instead of 4 KiB, where the machine offers them.

Reserving and attaching a segment is work per page. Measured on a 2-core VM with Linux 6.18, 128
MiB: reserving 16 ms instead of 53, attaching at the peer 0.3 ms instead of 7.7; copies through warm
pages are as fast as before (7.3 GB/s), scattered reads gain a fifth or so. Memory that the VM's
host has never given it yet takes 200-400 ms either way. Two offers, and how each is made:

    transparent  made of free memory
                 echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
    reserved     set aside for all processes of the machine
                 sysctl vm.nr_hugepages=N

Transparent ones come first: the reserved pool may have been set aside for somebody else. Segments
are memfds, which lie in no mounted file system: so the mount option huge= of /dev/shm says nothing
about them, and shmem_enabled does, with the file of the same name for pages of 2 MiB, where the
kernel has that, above it (Linux, Documentation/admin-guide/mm/transhuge.rst).

Either way every page is there before a segment is used. Transparent ones are ordinary pages of the
file, huge or not, and posix_fallocate sees to all of them; on the reserved ones posix_fallocate
takes the pages themselves out of the pool. What bounds the transparent ones is memory_room.py, as
for small pages.

PRPC_HUGE_PAGES: auto (the default: where offered), never, require (ShmFull where they cannot be
had).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

HUGE_PAGE_BYTES = 2 << 20  # of x86-64; those of 1 GiB are too large to cut segments from
VARIABLE = "PRPC_HUGE_PAGES"
Policy = Literal["auto", "never", "require"]

POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
SHMEM_ENABLED = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
# Linux 6.11; "inherit": as above
SHMEM_ENABLED_2M = "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"
TO_OFFER_TRANSPARENT = f"echo advise > /{SHMEM_ENABLED}"
OFFERING = ("always", "within_size", "advise")
MADV_POPULATE_WRITE = 23  # madvise(2), from Linux 5.14 on; the mmap module has no name for it
# Neither mmap() nor madvise() of the mmap module releases the interpreter's lock: other threads, of
# heartbeats say, run between steps of some 5 ms.
POPULATE_STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class HugePageOffer:
    """Which huge pages this host offers to shared memory at the moment."""

    transparent: bool  # memfds may get them
    reserved_free_bytes: int  # in the pool, and promised to nobody


NOTHING = HugePageOffer(transparent=False, reserved_free_bytes=0)


def read_huge_page_offer(root: Path = Path("/")) -> HugePageOffer:
    """What the files under `root` say; nothing is offered where they are missing."""
    chosen, of_2m = _chosen(root / SHMEM_ENABLED), _chosen(root / SHMEM_ENABLED_2M)
    transparent = chosen == "force" or (
        chosen != "deny" and (chosen if of_2m in ("", "inherit") else of_2m) in OFFERING
    )
    free = max(0, _number(root / POOL / "free_hugepages") - _number(root / POOL / "resv_hugepages"))
    return HugePageOffer(transparent, free * HUGE_PAGE_BYTES)


def huge_page_policy() -> Policy:
    """What PRPC_HUGE_PAGES asks for. Raises ValueError."""
    text = os.environ.get(VARIABLE, "auto")
    if text not in get_args(Policy):
        raise ValueError(f"{VARIABLE}={text!r}: allowed are {', '.join(get_args(Policy))}")
    return cast(Policy, text)


def suits(size_bytes: int) -> bool:
    """Whether a segment can consist of huge pages: whole ones only. Rings and counters never do,
    because of their headers.
    """
    return size_bytes > 0 and size_bytes % HUGE_PAGE_BYTES == 0


def take_reserved(size_bytes: int, name: str) -> int | None:
    """The descriptor of a memfd of `size_bytes` made of reserved pages, all of them taken, or None;
    `name` is only shown.
    """
    try:
        fd = os.memfd_create(
            name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB
        )
    except OSError:  # a kernel or sandbox without them
        return None
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:  # others were faster, or the cgroup may have fewer (hugetlb.2MB.max)
        os.close(fd)
        return None
    return fd


class TransparentFill:
    """Fills an empty memfd with huge pages, as far as there are any; posix_fallocate does the rest.
    Use it by `with`.

    The advice belongs to a mapping, and posix_fallocate has none: where "advise" is chosen it would
    take small pages. Populating by madvise stops with an error where touching the memory would be
    SIGBUS.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)
        self._mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        self._works = True

    def __enter__(self) -> TransparentFill:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapping.close()

    def take(self, offset: int, size_bytes: int) -> None:
        """Populate a part that begins at a multiple of HUGE_PAGE_BYTES."""
        if not self._works:
            return
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE, offset, size_bytes)
            populate(self._mapping, offset, size_bytes)
        except OSError:
            # an older kernel, or no room: small pages, or ShmFull, are the next step's business
            self._works = False


def populate(mapping: mmap.mmap, offset: int, size_bytes: int) -> None:
    """Have all pages of that part in the page table, writable. Raises OSError before Linux 5.14, or
    where there is no room.
    """
    for at in range(offset, offset + size_bytes, POPULATE_STEP_BYTES):
        step = min(POPULATE_STEP_BYTES, offset + size_bytes - at)
        mapping.madvise(MADV_POPULATE_WRITE, at, step)


def page_bytes(memory: memoryview) -> int:
    """The size of the pages under a mapping that this process has touched: HUGE_PAGE_BYTES when all
    of them are huge.
    """
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    for line in _lines_of_mapping(address):
        name, _, value = line.partition(":")
        if name == "KernelPageSize" and _kib(value) > mmap.PAGESIZE:  # reserved ones
            return _kib(value)
        if name == "ShmemPmdMapped" and _kib(value) >= len(memory):
            return HUGE_PAGE_BYTES
    return mmap.PAGESIZE


def _lines_of_mapping(address: int) -> list[str]:
    """What proc_pid_smaps(5) says about the mapping at `address`."""
    found: list[str] = []
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):  # "7f00-7f80 rw-s ...": the next mapping begins
                if inside:
                    break
                start, _, end = first.partition("-")
                inside = int(start, 16) <= address < int(end, 16)
            elif inside:
                found.append(line)
    return found


def _kib(value: str) -> int:
    """ "  2048 kB" in bytes."""
    return int(value.split()[0]) << 10


def _chosen(path: Path) -> str:
    """The word in brackets; "" where there is none."""
    return (_read(path) or "").partition("[")[2].partition("]")[0]


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if text is not None and text.isdecimal() else 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
