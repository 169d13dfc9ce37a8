"""A piece of shared memory: made by one process, mapped by any that is handed its file descriptor.

A segment is a memfd: it has no name in any file system, so a process that dies by kill -9 leaves
nothing behind at any moment, nobody can attach who was not handed the descriptor (over a Unix
socket, or by inheriting it), and no mount bounds it: a container's 64 MB of /dev/shm limit nobody.
Its maker seals it once it is whole:

    SHRINK, GROW  nobody can cut it short: that would be SIGBUS, which no `except` catches, in every
                  process that has it mapped
    FUTURE_WRITE  (segments that are lent) nobody but its maker can write to it, map it for writing
                  or punch holes into it
    SEAL          nobody can add another seal

Who attaches asks for these seals, for the size that was announced and for memory that is really
there before it maps anything, so a descriptor of something else, a sparse file for instance, costs
nothing but an error that names it.

`posix_fallocate` takes every page at creation, step by step, and before each step memory_room.py
says whether the host and the cgroup have room for it: lack of memory is ShmFull then, and neither
SIGBUS nor the out-of-memory killer later. Segments of whole huge pages (a slab's; never rings) get
those where they are offered: huge_pages.py.

Only a segment made with `keep_name=True` lies in /dev/shm, under a name, until unlink(). Its maker
holds a lock on the file (flock) for so long, which the kernel takes back when the process ends,
however it ends: `collect_garbage` removes what nobody has locked. A pid alone would not do: in the
PID namespace of another container the same number is nobody, or somebody else. What has no lock and
a pid that lives is left alone, too: it is being made. The name says whose it is:

    /prpc.<uid>.<job>.<pid>.<start>.<random>  start: the owner's start time in clock ticks since
                                              boot, from /proc/pid/stat
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import mmap
import os
import resource
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import posix_ipc

from shard.errors import RemoteProtocolError, ShardError, ShmFull
from shard.memory import huge_pages, memory_room

PREFIX = "prpc"
MIB = 1 << 20
SHM_FOLDER = Path("/dev/shm")
# names that this process made -> a descriptor that holds the lock on each
_kept_names: dict[str, int] = {}

# fcntl(2), memfd_create(2); by number, for not every Python has all of the names.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
MFD_NOEXEC_SEAL = 0x8  # from Linux 6.3 on, where a machine may insist on it
SIZE_SEALS = SEAL_SHRINK | SEAL_GROW

# Pages are taken in steps of this part of the room there is, so that others who take memory at the
# same moment are seen in time.
STEP_PART = 4
STEP_BYTES_MIN = huge_pages.HUGE_PAGE_BYTES
# of memory, address space, or descriptors
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EMFILE, errno.ENFILE)


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when there is none. With the pid
    it names a process.
    """
    try:
        # the name in it is anything that its process likes
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # from field 3 of proc(5) on; the name before ")" may hold spaces
    fields = stat.rpartition(b")")[2].split()
    if fields[0] in b"ZX" and int(fields[17]) <= 1:
        # dead, and nobody has waited for it; a first thread that ended before others is a zombie
        # too
        return None
    return int(fields[19])


def _new_name() -> str:
    pid = os.getpid()
    job = "".join(c for c in os.environ.get("PRPC_JOB", "0") if c.isalnum()) or "0"
    return f"/{PREFIX}.{os.getuid()}.{job}.{pid}.{start_ticks(pid)}.{secrets.token_hex(8)}"


def _new_named_file() -> tuple[str, int]:
    """An empty file in /dev/shm under a new name, locked by this process; the name, and its
    descriptor.
    """
    while True:
        name = _new_name()
        fd: int = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
        # opened anew: a child made by fork() shares the other
        lock = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a collector that is looking at it
        _kept_names[name] = lock
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)  # it saw no lock, from another PID namespace, and took the name away
        unlink(name)


def _new_memfd() -> int:
    shown = _new_name().removeprefix("/")  # in /proc/<pid>/maps and fd, nowhere else
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            fd = os.memfd_create(shown, flags | MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.memfd_create(shown, flags)  # an older kernel
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ShmFull(_refused_text(0, None, error)) from error
        raise ShardError(
            f"this machine cannot make anonymous shared memory (memfd_create: {error.strerror})"
        ) from error
    os.fchmod(fd, 0o600)
    return fd


@functools.cache
def future_write_seal() -> int:
    """SEAL_FUTURE_WRITE where the kernel has it (Linux 5.1), else 0: then a descriptor for reading
    only has to do.
    """
    fd = _new_memfd()
    try:
        fcntl.fcntl(fd, F_ADD_SEALS, SEAL_FUTURE_WRITE)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return SEAL_FUTURE_WRITE


def _seal(fd: int, lent: bool) -> None:
    """After its maker has mapped it: that mapping stays writable."""
    fcntl.fcntl(fd, F_ADD_SEALS, SIZE_SEALS | SEAL_SEAL | (future_write_seal() if lent else 0))


def _take_pages(fd: int, size_bytes: int, transparent: bool) -> None:
    """All of them, as long as there is room. Raises ShmFull, and OSError as posix_fallocate(3)."""
    taken = 0
    with (
        huge_pages.TransparentFill(fd, size_bytes)
        if transparent
        else contextlib.nullcontext() as fill
    ):
        while taken < size_bytes:
            room = memory_room.read_memory_room()
            left = size_bytes - taken
            if left > room.free_bytes:
                raise ShmFull(_no_memory_text(size_bytes, room))
            step = min(
                left,
                max(
                    STEP_BYTES_MIN, room.free_bytes // STEP_PART // STEP_BYTES_MIN * STEP_BYTES_MIN
                ),
            )
            if fill is not None:
                fill.take(taken, step)
            os.posix_fallocate(fd, taken, step)
            taken += step


class Segment:
    """Mapped shared memory. Whoever made it or received its descriptor owns this object; the kernel
    frees the pages when the last process has unmapped them."""

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        name: str | None,
        writable: bool = True,
        populate: bool = True,
    ) -> None:
        """Map `size_bytes` of `fd`; the mapping keeps its own descriptor, `fd` stays the caller's
        until close().
        """
        self.fd = fd
        self.size_bytes = size_bytes
        self.name = name
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        in_steps = populate and size_bytes > huge_pages.POPULATE_STEP_BYTES
        flags = mmap.MAP_SHARED
        if populate and not in_steps:
            flags |= mmap.MAP_POPULATE
        mapping = mmap.mmap(fd, size_bytes, flags=flags, prot=access)
        if in_steps:
            with contextlib.suppress(OSError):  # an older kernel: at the first touch, then
                huge_pages.populate(mapping, 0, size_bytes)
        self.memory = memoryview(mapping)

    @classmethod
    def create(cls, size_bytes: int, keep_name: bool = False, lent: bool = False) -> Segment:
        """Zeroed, fully reserved memory of `size_bytes`, readable by this user alone; of huge pages
        where it can be and PRPC_HUGE_PAGES lets it. `lent`: others are to read it only, so nobody
        but this mapping can ever write to it.

        Raises ShmFull when host, cgroup, RLIMIT_FSIZE or (with `keep_name`) /dev/shm have no room,
        ValueError for a bad PRPC_HUGE_PAGES, and ShardError where there is no memfd_create.
        """
        wanted = (
            "never"
            if keep_name or not huge_pages.suits(size_bytes)
            else huge_pages.huge_page_policy()
        )
        offer = huge_pages.NOTHING if wanted == "never" else huge_pages.read_huge_page_offer()
        name = fd = None
        if offer.reserved_free_bytes >= size_bytes and not offer.transparent:
            fd = huge_pages.take_reserved(size_bytes, _new_name())
        is_reserved = fd is not None
        if keep_name:
            name, fd = _new_named_file()
        elif fd is None:
            fd = _new_memfd()
        try:
            # failpoint: segment.opened
            if not is_reserved:
                _take_pages(fd, size_bytes, offer.transparent)
            # failpoint: segment.reserved
            segment = cls(fd, size_bytes, name)
            if name is None:
                _seal(fd, lent)
            if wanted == "require" and segment.page_bytes < huge_pages.HUGE_PAGE_BYTES:
                segment.memory = memoryview(b"")
                raise ShmFull(_small_pages_text(size_bytes, offer))
            return segment
        except BaseException as error:
            os.close(fd)
            if name is not None:
                unlink(name)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise ShmFull(_refused_text(size_bytes, name, error)) from error
            raise

    @classmethod
    def attach(
        cls,
        fd: int,
        writable: bool = True,
        size_bytes: int | None = None,
        size_bytes_max: int | None = None,
    ) -> Segment:
        """Map a whole segment received as a descriptor, which belongs to it from then on, but stays
        the caller's when this fails. No page is touched: what nobody reads or writes here costs
        nothing here.

        `size_bytes` is what was announced, `size_bytes_max` what is allowed. With `writable=False`
        it has to be a segment that was made to be lent, and arrays on the memory are read-only.
        Raises RemoteProtocolError for what is no such segment: another kind of file, one that its
        maker could still cut short, one of another size, or a sparse one.
        """
        size = _checked_size(fd, SIZE_SEALS if writable else SIZE_SEALS | future_write_seal())
        if size_bytes is not None and size != size_bytes:
            raise RemoteProtocolError(f"segment of {size} bytes, {size_bytes} were announced")
        if size_bytes_max is not None and size > size_bytes_max:
            raise RemoteProtocolError(f"segment of {size} bytes, at most {size_bytes_max} allowed")
        return cls(fd, size, None, writable, populate=False)

    def read_only_fd(self) -> int:
        """A new descriptor of the same memory for somebody who is to read it: it can be mapped for
        reading alone, and not truncated. The caller owns it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def page_bytes(self) -> int:
        """The size of its pages as they are mapped here: 2 MiB when all of them are huge. Takes
        some milliseconds: the kernel looks through all memory of this process for it."""
        return huge_pages.page_bytes(self.memory)

    @classmethod
    def open(cls, name: str) -> Segment:
        """Map a segment that kept its name. Raises FileNotFoundError."""
        try:
            handle = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError as error:
            raise FileNotFoundError(
                f"no shared-memory segment {name}: its owner is gone"
            ) from error
        return cls(handle.fd, handle.size, name)

    def close(self) -> None:
        """Give up the descriptor and this object's view; the mapping goes when the last array on it
        is gone.

        Never by mmap.close(): numpy keeps an array's buffer as an object without exporting it, so
        the map would be closed under living arrays, and their next use would be a segmentation
        fault.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.memory = memoryview(b"")


def unlink(name: str) -> None:
    """Take a kept name away; who has it mapped is not disturbed, and a name already gone is no
    error.
    """
    lock = _kept_names.pop(name, None)
    if lock is not None:
        os.close(lock)
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


@atexit.register
def _unlink_kept_names() -> None:
    for name in _kept_names.copy():
        unlink(name)


def _forget_kept_names() -> None:
    """A child made by fork() inherits neither the names nor the locks, which would outlive their
    maker in it.
    """
    while _kept_names:
        os.close(_kept_names.popitem()[1])


os.register_at_fork(after_in_child=_forget_kept_names)


def _checked_size(fd: int, seals_wanted: int) -> int:
    """The size of a stranger's segment, once that is known to stay as it is. Raises
    RemoteProtocolError.
    """
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        what = f"file mode {status.st_mode:o}"
        raise RemoteProtocolError(
            f"descriptor {fd} is no shared-memory segment ({what}: no memfd)"
        ) from error
    if not stat.S_ISREG(status.st_mode) or seals & seals_wanted != seals_wanted:
        raise RemoteProtocolError(
            f"descriptor {fd} is no sealed shared-memory segment (seals {seals:#x}, "
            f"{seals_wanted:#x} expected): its maker could "
            "change it under us; use one release on both sides"
        )
    if status.st_size < 1 or status.st_blocks * 512 < status.st_size:
        raise RemoteProtocolError(
            f"segment of {status.st_size} bytes of which {status.st_blocks * 512} are reserved: "
            "its maker must reserve all of it before it hands it over"
        )
    return status.st_size


def _refused_text(size_bytes: int, name: str | None, error: OSError) -> str:
    """Why the kernel took no pages although there seemed to be room. One with a name is no part of
    a slab.
    """
    or_less = "set PRPC_SLAB_BYTES_MAX lower" if name is None else "ask for a smaller one"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return (
            f"a segment of {size_bytes / MIB:.1f} MiB passes this process's limit on file sizes, "
            f"{limit / MIB:.1f} MiB "
            f"(RLIMIT_FSIZE), which shared memory falls under: raise `ulimit -f`, or {or_less}"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"no file descriptor is left to map a segment with ({error.strerror}): "
            "raise `ulimit -n`"
        )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if error.errno == errno.ENOMEM and limit != resource.RLIM_INFINITY:
        return (
            f"a segment of {size_bytes / MIB:.1f} MiB cannot be mapped: "
            f"this process may have {limit / MIB:.1f} MiB of address "
            f"space in all (RLIMIT_AS); raise `ulimit -v`, or {or_less}"
        )
    if name is None:
        return f"{_no_memory_text(size_bytes, memory_room.read_memory_room())} ({error.strerror})"
    space = os.statvfs(SHM_FOLDER)
    return (
        f"/dev/shm has no room for a named segment of {size_bytes / MIB:.1f} MiB: "
        f"{space.f_bavail * space.f_frsize / MIB:.1f} MiB "
        f"of {space.f_blocks * space.f_frsize / MIB:.1f} MiB free; run `prpc gc`, "
        "or give the container a larger --shm-size"
    )


def _no_memory_text(size_bytes: int, room: memory_room.MemoryRoom) -> str:
    return (
        f"no memory for a segment of {size_bytes / MIB:.1f} MiB: "
        f"of the {room.total_bytes / MIB:.1f} MiB of {room.bound} "
        f"{max(0, room.free_bytes) / MIB:.1f} MiB may be taken, "
        "the rest is in use or kept free for heaps; give it more memory, "
        "or set PRPC_SLAB_BYTES_MAX lower"
    )


def _small_pages_text(size_bytes: int, offer: huge_pages.HugePageOffer) -> str:
    return (
        f"no huge pages for a segment of {size_bytes / MIB:.1f} MiB, "
        f"which {huge_pages.VARIABLE}=require asks for: transparent "
        f"ones for shared memory are {'on, and none are free' if offer.transparent else 'off'}, "
        f"{offer.reserved_free_bytes / MIB:.1f} MiB of reserved ones are free; "
        f"run `{huge_pages.TO_OFFER_TRANSPARENT}`, or "
        f"`sysctl vm.nr_hugepages=N`, or set {huge_pages.VARIABLE}=auto"
    )


def _is_garbage(path: Path, fd: int) -> bool:
    """Whether the process that made it is gone. While `fd` is open nobody can lock it, so an answer
    of True stays true.
    """
    fields = path.name.split(".")
    if len(fields) != 6 or not fields[3].isdecimal():
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return str(start_ticks(int(fields[3]))) != fields[4]


def _each_garbage() -> Iterator[str]:
    """Names of this user's segments whose maker is gone; each is locked until the next one is asked
    for.
    """
    for path in sorted(SHM_FOLDER.glob(f"{PREFIX}.{os.getuid()}.*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # gone already, or not ours to read
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _is_garbage(path, fd):
                yield "/" + path.name
        finally:
            os.close(fd)


def find_garbage() -> list[str]:
    """Names of this user's segments whose process is gone. Those of other users and living
    processes, in whichever PID namespace, are never named."""
    return list(_each_garbage())


def collect_garbage() -> list[str]:
    """Unlink what find_garbage() finds; the names."""
    removed = []
    for name in _each_garbage():
        unlink(name)
        removed.append(name)
    return removed
