"""Pieces of shared memory: their names vanish at once, and those that were kept can be told from
garbage.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shard import RemoteProtocolError, ShmFull, collect_garbage, find_garbage
from shard.memory import huge_pages
from shard.memory.segment import (
    F_ADD_SEALS,
    SEAL_FUTURE_WRITE,
    SEAL_GROW,
    SEAL_SHRINK,
    SHM_FOLDER,
    SIZE_SEALS,
    Segment,
    start_ticks,
    unlink,
)
from tests.shard.strangers import memfd

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def names() -> set[str]:
    """Entries of /dev/shm, less those of other jobs on this machine."""
    job = os.environ["PRPC_JOB"]
    return {
        name
        for name in os.listdir(SHM_FOLDER)
        if not name.startswith("prpc.") or name.split(".")[2:3] == [job]
    }


def no_name_stays(before: set[str]) -> bool:
    """Whether there are no more than before. What others make there is gone soon: the semaphore of
    a queue, say.
    """
    deadline = time.monotonic() + PATIENCE_S
    while names() - before:
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


class Maker:
    """A process that makes a segment with a name, says the name, and waits to be told to end."""

    PROGRAM = (
        "import sys\nfrom shard.memory.segment import Segment\n"
        "segment = Segment.create(4096, keep_name=True)\nprint(segment.name, "
        "flush=True)\nsys.stdin.read()"
    )

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", self.PROGRAM],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        with self.process.stdout:
            self.name = self.process.stdout.readline().strip()
        self.path = SHM_FOLDER / self.name.removeprefix("/")

    def end(self, kill: bool) -> int:
        assert self.process.stdin is not None
        if kill:
            self.process.send_signal(signal.SIGKILL)
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


# Its dead are anybody's who collects: a test beside it, by the time that this one looks.
needs_its_garbage = pytest.mark.alone


@pytest.fixture
def maker() -> Iterator[Maker]:
    made = Maker()
    yield made
    made.end(kill=True)
    unlink(made.name)


def test_a_segment_has_no_name_from_the_start_on_and_is_zeroed() -> None:
    before = names()
    segment = Segment.create(100_000)
    assert no_name_stays(before)
    assert segment.name is None
    assert len(segment.memory) == segment.size_bytes == 100_000
    assert not any(segment.memory)
    segment.close()


def test_whoever_is_handed_the_descriptor_sees_the_same_memory() -> None:
    segment = Segment.create(8192)
    other = Segment.attach(os.dup(segment.fd))
    segment.memory[100:105] = b"hello"
    assert bytes(other.memory[100:105]) == b"hello"
    assert other.size_bytes == 8192
    segment.close()
    assert bytes(other.memory[100:105]) == b"hello"
    other.close()


@pytest.mark.parametrize("keep_name", [False, True])
def test_all_its_pages_are_reserved_and_only_this_user_may_read_it_whatever_the_umask(
    keep_name: bool,
) -> None:
    before = os.umask(0)
    try:
        segment = Segment.create(1 << 20, keep_name=keep_name)
    finally:
        os.umask(before)
    status = os.fstat(segment.fd)
    assert status.st_blocks * 512 >= 1 << 20
    assert stat.S_IMODE(status.st_mode) == 0o600
    segment.close()
    if keep_name:
        unlink(segment.name)


def test_a_read_only_descriptor_shows_what_is_written_and_can_neither_write_nor_truncate() -> None:
    segment = Segment.create(8192, lent=True)
    reader = Segment.attach(segment.read_only_fd(), writable=False)
    segment.memory[100:105] = b"hello"
    assert bytes(reader.memory[100:105]) == b"hello"
    with pytest.raises(TypeError, match="read-only"):
        reader.memory[0] = 1
    array = np.frombuffer(reader.memory, np.uint8)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)
    with pytest.raises(PermissionError):
        Segment.attach(reader.fd)
    again = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)  # as a program of the same user can
    with pytest.raises(PermissionError):
        Segment.attach(again)
    os.close(again)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(reader.fd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(reader.fd, b"x")
    segment.close()
    assert bytes(reader.memory[100:105]) == b"hello"
    reader.close()


@pytest.mark.parametrize("lent", [False, True])
def test_nobody_can_cut_a_segment_short_make_it_longer_or_take_its_pages_away(lent: bool) -> None:
    segment = Segment.create(8192, lent=lent)
    segment.memory[5000] = 7
    for size in (0, 4096, 8191, 8193, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    if lent:
        with pytest.raises(PermissionError):
            segment.memory.obj.madvise(mmap.MADV_REMOVE)  # type: ignore[union-attr]
        with pytest.raises(PermissionError):
            os.pwrite(segment.fd, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, F_ADD_SEALS, 0x8)  # F_SEAL_WRITE: no more seals
    assert segment.memory[5000] == 7
    segment.close()


def test_a_segment_that_its_maker_could_still_change_is_not_mapped() -> None:
    rings, lent = SIZE_SEALS, SIZE_SEALS | SEAL_FUTURE_WRITE
    for seals, writable in (
        (0, True),
        (SEAL_SHRINK, True),
        (SEAL_GROW, True),
        (rings, False),
        (SEAL_FUTURE_WRITE, False),
    ):
        fd = memfd(4096, seals)
        with pytest.raises(RemoteProtocolError, match="its maker could change it under us"):
            Segment.attach(fd, writable)
        os.close(fd)
    for seals, writable in ((rings, True), (lent, False)):
        Segment.attach(memfd(4096, seals), writable).close()


def test_a_sparse_segment_is_refused_before_a_page_of_it_is_ours_to_pay() -> None:
    fd = memfd(3 << 30, SIZE_SEALS | SEAL_FUTURE_WRITE, sparse=True)
    with pytest.raises(
        RemoteProtocolError,
        match="segment of 3221225472 bytes of which 0 are reserved: its maker must reserve",
    ):
        Segment.attach(fd, writable=False)
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_a_peers_segment_of_another_size_or_too_large_leaves_its_descriptor_to_the_caller() -> None:
    segment = Segment.create(8192)
    Segment.attach(os.dup(segment.fd), size_bytes=8192, size_bytes_max=8192).close()
    for announced in (4096, 8191, 8193):
        with pytest.raises(
            RemoteProtocolError, match=f"segment of 8192 bytes, {announced} were announced"
        ):
            Segment.attach(segment.fd, size_bytes=announced)
    with pytest.raises(RemoteProtocolError, match="segment of 8192 bytes, at most 8191 allowed"):
        Segment.attach(segment.fd, size_bytes_max=8191)
    assert os.fstat(segment.fd).st_size == 8192
    segment.close()


def test_attaching_touches_no_page() -> None:
    segment = Segment.create(1 << 20)
    other = Segment.attach(os.dup(segment.fd))
    address = np.frombuffer(other.memory, np.uint8).__array_interface__["data"][0]
    (rss,) = [line for line in huge_pages._lines_of_mapping(address) if line.startswith("Rss:")]
    assert rss.split()[1] == "0", rss
    segment.close()
    other.close()


def test_a_descriptor_of_something_else_is_the_peers_fault() -> None:
    reading, writing = os.pipe()
    folder, device = os.open("/", os.O_RDONLY), os.open("/dev/zero", os.O_RDWR)
    shm, empty = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR), memfd(0, SIZE_SEALS, sparse=True)
    for fd in (reading, writing, folder, device):
        with pytest.raises(
            RemoteProtocolError, match=f"descriptor {fd} is no shared-memory segment"
        ):
            Segment.attach(fd)
    with pytest.raises(
        RemoteProtocolError, match=f"descriptor {shm} is no sealed shared-memory segment"
    ):
        Segment.attach(shm)
    with pytest.raises(RemoteProtocolError, match="segment of 0 bytes of which 0 are reserved"):
        Segment.attach(empty)
    for fd in (reading, writing, folder, device, shm, empty):
        os.close(fd)


def test_a_limit_on_file_sizes_is_named_when_it_is_what_stands_in_the_way() -> None:
    program = (
        "import resource\nfrom shard import ShmFull\nfrom shard.memory.segment import Segment\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))\n"
        "Segment.create(1 << 20).close()\n"
        "try:\n    Segment.create(2 << 20)\nexcept ShmFull as error:\n    print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ran.stdout == (
        "a segment of 2.0 MiB passes this process's limit on file sizes, 1.0 MiB (RLIMIT_FSIZE), "
        "which shared memory falls under: raise `ulimit -f`, or set PRPC_SLAB_BYTES_MAX lower\n"
    )


def test_arrays_on_it_outlive_its_closing() -> None:
    segment = Segment.create(4096)
    array = np.frombuffer(segment.memory, np.uint8)
    array[:] = 3
    segment.close()
    segment.close()
    assert int(array.sum()) == 3 * 4096


def test_one_that_does_not_fit_is_shm_full_and_leaves_nothing() -> None:
    before = names()
    with pytest.raises(
        ShmFull,
        match=r"no memory for a segment of .* MiB: of the .* MiB of .* MiB may be taken, "
        r".* PRPC_SLAB_BYTES_MAX",
    ):
        Segment.create(1 << 50)
    assert no_name_stays(before)


def test_a_kept_name_opens_elsewhere_and_goes_when_it_is_unlinked() -> None:
    segment = Segment.create(4096, keep_name=True)
    assert segment.name is not None
    other = Segment.open(segment.name)
    segment.memory[0] = 9
    assert other.memory[0] == 9
    unlink(segment.name)
    unlink(segment.name)
    assert other.memory[0] == 9
    with pytest.raises(FileNotFoundError, match="its owner is gone"):
        Segment.open(segment.name)
    other.close()
    segment.close()


def test_a_kept_name_says_whose_it_is(maker: Maker) -> None:
    prefix, uid, job, pid, start, _ = maker.name.removeprefix("/").split(".")
    assert prefix == "prpc"
    assert job == os.environ["PRPC_JOB"]
    assert (int(uid), int(pid), int(start)) == (
        os.getuid(),
        maker.process.pid,
        start_ticks(maker.process.pid),
    )


def test_a_process_that_ends_takes_its_kept_names_along(maker: Maker) -> None:
    assert maker.path.exists()
    assert maker.end(kill=False) == 0
    assert not maker.path.exists()


@needs_its_garbage
def test_what_a_killed_process_leaves_is_found_and_removed(maker: Maker) -> None:
    maker.end(kill=True)
    assert maker.path.exists()
    assert maker.name in find_garbage()
    assert maker.name in collect_garbage()
    assert not maker.path.exists()
    assert maker.name not in find_garbage()


@needs_its_garbage
def test_a_dead_process_that_nobody_waited_for_is_dead(maker: Maker) -> None:
    maker.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, maker.process.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie
    assert maker.name in find_garbage()


@needs_its_garbage
def test_names_of_living_processes_are_never_garbage(maker: Maker) -> None:
    own = Segment.create(4096, keep_name=True)
    assert own.name is not None
    assert {own.name, maker.name}.isdisjoint(find_garbage())
    collect_garbage()
    assert maker.path.exists()
    Segment.open(own.name).close()
    unlink(own.name)
    own.close()


@needs_its_garbage
def test_a_collector_in_another_pid_namespace_leaves_names_of_the_living_alone(
    maker: Maker,
) -> None:
    """There the maker's pid is nobody's; it once took rings of other containers away."""
    own = Segment.create(4096, keep_name=True)
    assert own.name is not None
    program = (
        "from shard import collect_garbage, find_garbage\nprint(find_garbage(), collect_garbage())"
    )
    namespace = (
        ["--pid", "--fork", "--mount-proc"]
        if os.getuid() == 0
        else ["--user", "--map-current-user", "--pid", "--fork"]
    )
    elsewhere = ["unshare", *namespace, sys.executable, "-c", program]
    ran = subprocess.run(
        elsewhere, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if ran.returncode and "unshare" in ran.stderr:
        pytest.fail(
            f"this machine lets us have no PID namespace of our own ({ran.stderr.strip()})",
            pytrace=False,
        )
    assert own.name not in ran.stdout
    assert maker.name not in ran.stdout
    assert maker.path.exists()
    Segment.open(own.name).close()
    maker.end(kill=True)
    subprocess.run(
        elsewhere, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert not maker.path.exists(), "what nobody holds goes, from there too"
    unlink(own.name)
    own.close()


@needs_its_garbage
def test_a_name_whose_maker_forked_goes_with_the_maker() -> None:
    """The lock is the maker's: a child that lives on does not hold it."""
    program = (
        "import os, sys\nfrom shard.memory.segment import Segment\nsegment = Segment.create(4096, "
        "keep_name=True)\n"
        "if not os.fork():\n    print(segment.name, flush=True)\n    os.kill(os.getppid(), "
        "9)\nsys.stdin.read()\nos._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        assert maker.wait(PATIENCE_S) == -signal.SIGKILL
        assert name in collect_garbage()


@needs_its_garbage
def test_a_name_whose_pid_lives_again_as_another_process_is_garbage(maker: Maker) -> None:
    fields = maker.name.removeprefix("/").split(".")
    # same pid, started before
    reused = SHM_FOLDER / ".".join([*fields[:4], str(int(fields[4]) - 1), "0" * 16])
    reused.write_bytes(b"left behind")
    assert f"/{reused.name}" in collect_garbage()
    assert not reused.exists()
    assert maker.path.exists()


@needs_its_garbage
@pytest.mark.parametrize(
    "name",
    [
        "other.{uid}.0.1.1.x",
        "prpc.{uid}.0.notapid.1.x",
        "prpc.{uid}.0.1.x",
        "prpc.{other}.0.999999999.1.x",
    ],
)
def test_what_is_not_ours_is_left_alone(name: str) -> None:
    path = SHM_FOLDER / name.format(uid=os.getuid(), other=os.getuid() + 1)
    path.write_bytes(b"not ours")
    try:
        assert f"/{path.name}" not in find_garbage()
        collect_garbage()
        assert path.exists()
    finally:
        path.unlink()


def test_processes_killed_with_segments_leave_nothing() -> None:
    # of one Python: each is forked before it has made anything
    program = (
        "import os, signal\nfrom shard.memory.segment import Segment\n"
        "pids = []\n"
        "while len(pids) < 10 and all(pids):\n"
        "    pids.append(os.fork())\n"
        "if not all(pids):\n"
        "    segments = [Segment.create(4096) for _ in range(20)]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])\n"
    )
    before = names()
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, timeout=PATIENCE_S
    )
    assert json.loads(ran.stdout) == [-signal.SIGKILL] * 10
    assert no_name_stays(before)


def test_start_ticks_name_a_process_for_good() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
    assert start_ticks(1 << 30) is None


def test_start_ticks_are_known_whatever_the_process_with_that_pid_calls_itself_now() -> None:
    before, name = start_ticks(os.getpid()), Path("/proc/self/comm").read_bytes().strip()
    try:
        Path("/proc/self/comm").write_bytes(b"\xff) Z 1")
        assert start_ticks(os.getpid()) == before
    finally:
        Path("/proc/self/comm").write_bytes(name)


@pytest.mark.parametrize("transparent", [False, True])
def test_no_call_that_keeps_other_threads_waiting_maps_more_than_a_step(
    transparent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = huge_pages.POPULATE_STEP_BYTES
    size = 3 * step + mmap.PAGESIZE
    flags, parts = [], []

    class Recorded(mmap.mmap):
        def __new__(cls, *args: int, **more: int) -> Recorded:
            flags.append(more["flags"])
            return super().__new__(cls, *args, **more)

        def madvise(self, option: int, *part: int) -> None:
            if option == huge_pages.MADV_POPULATE_WRITE:
                parts.append(part)
            super().madvise(option, *part)

    monkeypatch.setattr(mmap, "mmap", Recorded)
    offer = huge_pages.HugePageOffer(transparent=transparent, reserved_free_bytes=0)
    monkeypatch.setattr(huge_pages, "read_huge_page_offer", lambda: offer)
    segment = Segment.create(size)
    assert not any(each & mmap.MAP_POPULATE for each in flags)
    whole = [(at, min(step, size - at)) for at in range(0, size, step)]
    assert parts[-len(whole) :] == whole
    assert all(length <= step for _, length in parts)  # also of huge pages, where there are any
    segment.memory = memoryview(b"")
    segment.close()


@needs_its_garbage
def test_a_folder_among_segments_is_no_garbage() -> None:
    folder = SHM_FOLDER / f"prpc.{os.getuid()}.0.{2**22 + 1}.2.folder"
    folder.mkdir()
    try:
        assert f"/{folder.name}" not in find_garbage()
        assert f"/{folder.name}" not in collect_garbage()
    finally:
        folder.rmdir()
