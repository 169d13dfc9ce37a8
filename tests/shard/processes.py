"""What tests of groups need: to wait for processes to end, to kill a shard, to run a child made by
fork().
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator

import psutil

from shard import PeerLostError, ShardGroup
from tests.program import wait_until

PATIENCE_S = 60.0  # a test that waits longer has failed


def gone(pid: int) -> bool:
    """Whether the process has ended, though perhaps nobody has waited for it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def watched(pids: Iterable[int]) -> Iterator[Callable[[], None]]:
    """A function that waits until all these processes, which live now, have ended, and fails when
    one has not.
    """
    fds = {os.pidfd_open(pid): pid for pid in pids}

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        alive = dict(fds)
        while alive and time.monotonic() < deadline:
            for fd, _ in poll.poll(PATIENCE_S * 1000):
                poll.unregister(fd)
                del alive[fd]
        assert not alive, f"still alive: {sorted(alive.values())}"

    try:
        yield wait
    finally:
        for fd in fds:
            os.close(fd)


def why_down(group: ShardGroup, index: int) -> str:
    """What is said of a shard that has died, or is about to, once the application knows how it
    ended.
    """
    said = [""]

    def is_told() -> bool:
        try:
            group.submit_to(index, os.getpid).error(PATIENCE_S)
        except PeerLostError as error:
            said[0] = str(error)
        return "is gone" in said[0]

    wait_until(is_told, f"the end of shard {index}")
    return said[0]


def kill(group: ShardGroup, *indices: int) -> None:
    """SIGKILL to shards, all at once; returns when the application has noticed."""
    pids = {each.index: each.pid for each in group.statistics().shards}
    busy = [group.submit_to(index, signal.pause) for index in indices]
    for index in indices:
        os.kill(pids[index], signal.SIGKILL)
    for future in busy:
        assert isinstance(future.error(PATIENCE_S), PeerLostError)


def in_fork(function: Callable[[], object]) -> int:
    """Run it in a child made by fork(); the child's exit code: 0 when it returned, 1 when it
    raised.
    """
    with warnings.catch_warnings():
        # of Python 3.12: we have threads. That is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
