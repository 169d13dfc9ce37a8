"""A piece of shared memory: made by one process, mapped by any that is handed its file descriptor.

A segment is an unnamed file in /dev/shm (O_TMPFILE), so that its size, mode and owner are the file system's business; peers
receive its descriptor over a Unix socket. So a process that dies by kill -9 leaves nothing behind at any moment, and nobody can
attach who was not handed it. Only a segment made with `keep_name=True` has a name, until unlink(); the name says whose it is, so
that `collect_garbage` can tell the dead from the living:

    /prpc.<uid>.<job>.<pid>.<start>.<random>     start: the owner's start time in clock ticks since boot, from /proc/pid/stat

`posix_fallocate` takes every page at creation: a full /dev/shm is ShmFull then, and never SIGBUS later.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

import posix_ipc

from shard.errors import ShmFull

PREFIX = "prpc"
SHM_FOLDER = Path("/dev/shm")
_kept_names: dict[str, int] = {}  # segment name -> pid of the process that made it


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when there is none. With the pid it names a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from field 3 of proc(5) on; the name before ")" may hold spaces
    if fields[0] in "ZX" and int(fields[17]) <= 1:
        return None  # dead, and nobody has waited for it; a first thread that ended before others is a zombie too
    return int(fields[19])


def _new_name() -> str:
    pid = os.getpid()
    job = "".join(c for c in os.environ.get("PRPC_JOB", "0") if c.isalnum()) or "0"
    return f"/{PREFIX}.{os.getuid()}.{job}.{pid}.{start_ticks(pid)}.{secrets.token_hex(8)}"


class Segment:
    """Mapped shared memory. Whoever made it or received its descriptor owns this object; the kernel frees the pages
    when the last process has unmapped them."""

    def __init__(self, fd: int, size_bytes: int, name: str | None) -> None:
        """Map `size_bytes` of `fd`; the mapping keeps its own descriptor, `fd` stays the caller's until close()."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.name = name
        self.memory = memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))

    @classmethod
    def create(cls, size_bytes: int, keep_name: bool = False) -> Segment:
        """Zeroed, fully reserved memory, readable by this user alone. Raises ShmFull."""
        name = _new_name() if keep_name else None
        if name is None:
            fd = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        else:
            fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
            _kept_names[name] = os.getpid()
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            return cls(fd, size_bytes, name)
        except OSError as error:
            os.close(fd)
            if name is not None:
                unlink(name)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ShmFull(_full_text(size_bytes)) from error
            raise

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """Map a whole segment received as a descriptor."""
        return cls(fd, os.fstat(fd).st_size, None)

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
    for name, pid in list(_kept_names.items()):
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
