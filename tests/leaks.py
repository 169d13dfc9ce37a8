"""What a test leaves behind: child processes, names in /dev/shm, descriptors, threads.

`nothing_is_left_behind` runs around every test. It notes what there is before, and afterwards
waits, GRACE_S at most, until there is no more than that; then it fails with the names of what is
left. A test that leaks does not spoil the
next one: each starts from what there is, and leaked children are killed.

Allowed to stay, each for a reason:
    resource trackers  one a process, started by the first spawn and kept by the standard library:
                       started here, before the first test
    the forkserver     one a process, started by the first group that asks for it and kept for the
                       next, which is quick for that; and our end of the pipe that keeps it alive.
                       Stopped after the last test. Its children count
    nurseries          one a process, and one with TensorFlow: fork the programs of tests
                       (tests/forked.py); they, and our ends of their sockets. Ended after the last
                       test. Their children count
    the default slab   one a process, keeps its segments for the next array on purpose: their
                       descriptors may stay

Also a pytest plugin: `pytest -p tests.leaks`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import multiprocess
import multiprocess.forkserver
import multiprocess.resource_tracker
import psutil
import pytest

from shard import runtime
from tests.forked import close_nurseries, running

# for what was told to end, on a busy machine; seldom needed
GRACE_S = float(os.environ.get("PRPC_TEST_GRACE_S", "20.0"))
KILL_TIMEOUT_S = 20.0  # for the kernel to end what was killed
POLL_S = 0.02  # how long one look waits for a process or thread to end
SHM_FOLDER = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"prpc\.\d+\.(?P<job>\w+)\.(?P<pid>\d+)\.")
# segments of this run carry it, so that other runs on this machine are not taken for ours
JOB = f"pytest{os.getpid()}"


@dataclass(frozen=True)
class Holdings:
    """What this process and its children hold at one moment."""

    children: dict[int, str] = field(default_factory=dict)  # pid -> what it is
    shm: frozenset[str] = frozenset()
    fds: Counter[str] = field(default_factory=Counter)  # target of /proc/self/fd -> how many
    threads: dict[int, str] = field(default_factory=dict)  # ident -> name


def holdings() -> Holdings:
    """Look now."""
    children = _children()
    return Holdings(children, _shm_names(children), _fd_targets(), _threads())


# Processes that a look has found to be none of ours. They are not looked at again: there are two
# looks a test, and hundreds of processes.
_strangers: set[int] = set()


def _descendants() -> dict[int, str]:
    """Children of this process, and theirs: pid -> what the kernel says of it."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    _strangers.intersection_update(pids)
    found, parents, stats = {os.getpid()}, {}, {}
    for pid in pids - _strangers - found:
        stat = _read(f"/proc/{pid}/stat")
        if stat:
            stats[pid] = stat
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    _strangers.update(parents.keys() - found)
    return {pid: stats[pid] for pid in sorted(found - {os.getpid()})}


def _read(file: str) -> str:
    """What /proc says of a process; nothing when it has ended."""
    with contextlib.suppress(OSError), open(file, errors="replace") as opened:
        return opened.read()
    return ""


def _children() -> dict[int, str]:
    found = {}
    kept = {_forkserver_pid(), *(nursery.pid for nursery in running())}
    for pid, stat in _descendants().items():
        if pid in kept:
            continue
        name, _, rest = stat.partition("(")[2].rpartition(")")
        what = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        if rest.split()[0] in "ZX":
            what = f"{name} (dead, and nobody waited for it)"
        if "resource_tracker import main" not in what:
            found[pid] = what or name
    return found


def _shm_names(children: dict[int, str]) -> frozenset[str]:
    """Those of this run: segments of its job or its processes, and entries of another kind that one
    of its processes maps, has open, or put its number into the name of. What other programs of this
    user make meanwhile is no leak of a test."""
    names, ours = set(), (os.getpid(), *children)
    held: set[str] | None = None  # by ours; looked up where it is asked for
    for entry in os.scandir(SHM_FOLDER):
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
        except FileNotFoundError:
            continue
        segment = SEGMENT_NAME.match(entry.name)
        if segment:
            if segment["job"] == JOB or int(segment["pid"]) in ours:
                names.add(entry.name)
            continue
        if held is None:
            held = {path for pid in ours for path in _held(pid)}
        numbers = re.findall(r"\d+", entry.name)
        if entry.path in held or any(str(pid) in numbers for pid in ours):
            names.add(entry.name)
    return frozenset(names)


def _held(pid: int) -> set[str]:
    """The files in SHM_FOLDER that this process maps or has open."""
    folder, found = f" {SHM_FOLDER}/", set[str]()
    with contextlib.suppress(OSError):  # it ended
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, there, name = line.partition(folder)
            if there:
                found.add(f"{SHM_FOLDER}/{name}")
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(link))
    return found


def _fd_targets() -> Counter[str]:
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets[os.readlink(f"/proc/self/fd/{fd}")] += 1
        except FileNotFoundError:
            continue  # that of the listing itself
    for target in _slab_targets() | _forkserver_targets() | _nursery_targets():
        targets.pop(target, None)
    return targets


def _forkserver_pid() -> int | None:
    return multiprocess.forkserver._forkserver._forkserver_pid  # type: ignore[no-any-return]


def _forkserver_targets() -> set[str]:
    """Our end of the pipe whose closing ends it."""
    fd = multiprocess.forkserver._forkserver._forkserver_alive_fd
    return set() if fd is None else {os.readlink(f"/proc/self/fd/{fd}")}


def _nursery_targets() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{nursery.fileno()}") for nursery in running()}


def _slab_targets() -> set[str]:
    """Segments of the process-wide slab; each has two descriptors, ours and that of its mapping."""
    slab = runtime.made("slab")
    if slab is None:
        return set()
    # it looks after peers that have hung up when it is used, and holds their sockets until then
    slab.statistics()
    segments = [slab.segment(number) for number in slab.segment_numbers()]
    return {os.readlink(f"/proc/self/fd/{segment.fd}") for segment in segments}


def _threads() -> dict[int, str]:
    return {
        t.ident: t.name
        for t in threading.enumerate()
        if t.ident is not None and t.name.startswith("prpc")
    }


def leaks(before: Holdings, after: Holdings) -> list[str]:
    """What is there now and was not, a line each."""
    found = [
        f"process {pid}: {what}"
        for pid, what in after.children.items()
        if pid not in before.children
    ]
    found += [f"/dev/shm/{name}" for name in sorted(after.shm - before.shm)]
    found += [
        f"descriptor of {target} ({count} more)"
        for target, count in (after.fds - before.fds).items()
    ]
    found += [
        f"thread {name}" for ident, name in after.threads.items() if ident not in before.threads
    ]
    return found


def wait_until_clean(before: Holdings, grace_s: float) -> list[str]:
    """The leaks that remain after `grace_s` at most; none at once when there are none."""
    deadline = time.monotonic() + grace_s
    found = leaks(before, holdings())
    while found and time.monotonic() < deadline:
        # it reaps its dead children when it looks at them, and only then
        multiprocess.active_children()
        multiprocessing.active_children()
        gc.collect()
        after = holdings()
        found = leaks(before, after)
        if found:
            _wait_for_an_end(before, after)
    return found


def _wait_for_an_end(before: Holdings, after: Holdings) -> None:
    """Until a leaked process or thread ends, POLL_S at most."""
    poll = select.poll()
    fds = []
    for pid in after.children.keys() - before.children.keys():
        try:
            fds.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    try:
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(POLL_S * 1000)
    finally:
        for fd in fds:
            os.close(fd)


def kill_leaked_children(before: Holdings) -> None:
    """So that a test that leaks costs no more than its own failure."""
    leaked = _children().keys() - before.children.keys()
    processes = [
        child for child in psutil.Process().children(recursive=True) if child.pid in leaked
    ]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=KILL_TIMEOUT_S)


@pytest.fixture(scope="session")
def _started_once() -> Iterator[None]:
    os.environ["PRPC_JOB"] = JOB
    multiprocess.resource_tracker.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    yield
    multiprocess.forkserver._forkserver._stop()
    close_nurseries()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest, _started_once: None) -> Iterator[None]:
    """Fails a test after which there are more processes, /dev/shm entries, descriptors or threads
    than before.
    """
    before = holdings()
    yield
    # pytest would hold the values of other fixtures, long torn down, until after this
    request.node.funcargs.clear()
    found = wait_until_clean(before, GRACE_S)
    if found:
        kill_leaked_children(before)
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)
