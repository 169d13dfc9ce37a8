"""A piece of shared memory: made by one process, mapped by any that is handed its file descriptor.

A segment is an unnamed file in /dev/shm (O_TMPFILE), so that its size, mode and owner are the file system's business; peers
receive its descriptor over a Unix socket. So a process that dies by kill -9 leaves nothing behind at any moment, and nobody can
attach who was not handed it. Only a segment made with `keep_name=True` has a name, until unlink(); the name says whose it is, so
that `collect_garbage` can tell the dead from the living:

    /prpc.<uid>.<job>.<pid>.<start>.<random>     start: the owner's start time in clock ticks since boot, from /proc/pid/stat

`posix_fallocate` takes every page at creation: a full /dev/shm is ShmFull then, and never SIGBUS later. With ftruncate alone the
file would be sparse: creating it always succeeds, and whoever first touches a page that /dev/shm has no room for any more is
killed by SIGBUS, which no `except` catches. Segments of whole huge pages (a slab's; never rings) get those where they are
offered: huge_pages.py.

Who is to read only is given `read_only_fd()`: through it the memory can be neither written nor truncated, by mistake or by a
broken program. It is no wall against a program of the same user that means harm: that one could open the file anew, or attach a
debugger; peers over shared memory are of the same user and are trusted as far as that user is.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import secrets
import stat
from pathlib import Path

import posix_ipc

from shard import huge_pages
from shard.errors import RemoteProtocolError, ShmFull

PREFIX = "prpc"
SHM_FOLDER = Path("/dev/shm")
_kept_names: dict[str, int] = {}  # segment name -> pid of the process that made it


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when there is none. With the pid it names a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # the name in it is anything that its process likes
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # from field 3 of proc(5) on; the name before ")" may hold spaces
    if fields[0] in b"ZX" and int(fields[17]) <= 1:
        return None  # dead, and nobody has waited for it; a first thread that ended before others is a zombie too
    return int(fields[19])


def _new_name() -> str:
    pid = os.getpid()
    job = "".join(c for c in os.environ.get("PRPC_JOB", "0") if c.isalnum()) or "0"
    return f"/{PREFIX}.{os.getuid()}.{job}.{pid}.{start_ticks(pid)}.{secrets.token_hex(8)}"


def _new_file(name: str | None) -> int:
    """An empty file in /dev/shm, without a name or with a kept one; its descriptor."""
    if name is None:
        return os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd: int = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
    _kept_names[name] = os.getpid()
    return fd


class Segment:
    """Mapped shared memory. Whoever made it or received its descriptor owns this object; the kernel frees the pages
    when the last process has unmapped them."""

    def __init__(self, fd: int, size_bytes: int, name: str | None, writable: bool = True) -> None:
        """Map `size_bytes` of `fd`; the mapping keeps its own descriptor, `fd` stays the caller's until close()."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.name = name
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self.memory = memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access))

    @classmethod
    def create(cls, size_bytes: int, keep_name: bool = False) -> Segment:
        """Zeroed, fully reserved memory, readable by this user alone; of huge pages where it can be and PRPC_HUGE_PAGES lets it.
        Raises ShmFull, and ValueError for a bad PRPC_HUGE_PAGES."""
        wanted = "never" if keep_name or not huge_pages.suits(size_bytes) else huge_pages.huge_page_policy()
        offer = huge_pages.NOTHING if wanted == "never" else huge_pages.read_huge_page_offer()
        name = _new_name() if keep_name else None
        fd = None
        if offer.reserved_free_bytes >= size_bytes and not offer.transparent:
            fd = huge_pages.take_reserved(size_bytes, _new_name())
        if fd is None:
            fd = _new_file(name)
        try:
            # failpoint: segment.opened
            if offer.transparent:
                huge_pages.ask_for_transparent(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
            # failpoint: segment.reserved
            segment = cls(fd, size_bytes, name)
            if wanted == "require" and segment.page_bytes < huge_pages.HUGE_PAGE_BYTES:
                segment.memory = memoryview(b"")
                raise ShmFull(_small_pages_text(size_bytes, offer))
            return segment
        except BaseException as error:
            os.close(fd)
            if name is not None:
                unlink(name)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ShmFull(_full_text(size_bytes)) from error
            raise

    @classmethod
    def attach(cls, fd: int, writable: bool = True, size_bytes_min: int = 1) -> Segment:
        """Map a whole segment received as a descriptor, which belongs to it from then on, but stays the caller's when this
        fails; at least `size_bytes_min` of it will be used. Raises RemoteProtocolError for what is no segment of that size.

        With `writable=False` arrays on the memory are read-only. A descriptor of read_only_fd() can be mapped only so.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RemoteProtocolError(f"descriptor {fd} is no shared-memory segment (file mode {status.st_mode:o})")
        if status.st_size < max(1, size_bytes_min):
            raise RemoteProtocolError(f"segment of {status.st_size} bytes, at least {max(1, size_bytes_min)} were announced")
        return cls(fd, status.st_size, None, writable)

    def read_only_fd(self) -> int:
        """A new descriptor of the same memory for somebody who is to read it: it can be mapped for reading alone, and not
        truncated. The caller owns it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def page_bytes(self) -> int:
        """The size of its pages as they are mapped here: 2 MiB when all of them are huge. Takes some milliseconds: the kernel
        looks through all memory of this process for it."""
        return huge_pages.page_bytes(self.memory)

    @classmethod
    def open(cls, name: str) -> Segment:
        """Map a segment that kept its name. Raises FileNotFoundError."""
        try:
            handle = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError as error:
            raise FileNotFoundError(f"no shared-memory segment {name}: its owner is gone") from error
        return cls(handle.fd, handle.size, name)

    def close(self) -> None:
        """Give up the descriptor and this object's view; the mapping goes when the last array on it is gone.

        Never by mmap.close(): numpy keeps an array's buffer as an object without exporting it, so the map would be closed under
        living arrays, and their next use would be a segmentation fault.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.memory = memoryview(b"")


def unlink(name: str) -> None:
    """Take a kept name away; who has it mapped is not disturbed, and a name already gone is no error."""
    _kept_names.pop(name, None)
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


@atexit.register
def _unlink_kept_names() -> None:
    for name, pid in _kept_names.copy().items():
        if pid == os.getpid():  # a child made by fork() inherits the table, not the names
            unlink(name)


def _full_text(size_bytes: int) -> str:
    space = os.statvfs(SHM_FOLDER)
    mib = 1 << 20
    return (
        f"/dev/shm has no room for a segment of {size_bytes / mib:.1f} MiB: {space.f_bavail * space.f_frsize / mib:.1f} MiB "
        f"of {space.f_blocks * space.f_frsize / mib:.1f} MiB free; run `prpc gc`, give the container a larger --shm-size, or "
        "set PRPC_SLAB_BYTES_MAX lower"
    )


def _small_pages_text(size_bytes: int, offer: huge_pages.HugePageOffer) -> str:
    mib = 1 << 20
    return (
        f"no huge pages for a segment of {size_bytes / mib:.1f} MiB, which {huge_pages.VARIABLE}=require asks for: transparent "
        f"ones in /dev/shm are {'on, and none are free' if offer.transparent else 'off'}, {offer.reserved_free_bytes / mib:.1f} "
        "MiB of reserved ones are free; run `mount -o remount,huge=advise /dev/shm`, or `sysctl vm.nr_hugepages=N`, or set "
        f"{huge_pages.VARIABLE}=auto"
    )


def find_garbage() -> list[str]:
    """Names of this user's segments whose process is gone. Those of other users and living processes are never named."""
    dead = []
    for path in SHM_FOLDER.glob(f"{PREFIX}.{os.getuid()}.*"):
        fields = path.name.split(".")
        if len(fields) != 6 or not fields[3].isdecimal():
            continue
        if str(start_ticks(int(fields[3]))) != fields[4]:
            dead.append("/" + path.name)
    return sorted(dead)


def collect_garbage() -> list[str]:
    """Unlink what find_garbage() finds; the names."""
    dead = find_garbage()
    for name in dead:
        unlink(name)
    return dead
