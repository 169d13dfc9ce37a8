"""A process that ends process groups when the one that started them is killed.

    the launcher           the guard
    starts a group         notes its number
    has seen its end       forgets it
    ends, however          has nothing left to note: those that it still knows get SIGTERM, and
                           after some seconds SIGKILL; then it ends

The kernel's own signal at a parent's death (PR_SET_PDEATHSIG) reaches the process that was started
alone: not what a shell started in its turn, and none that ignores it. The guard is a fork, which
hears of groups by a pipe; the end of the launcher ends that. It has a session of its own, so that
what ends the launcher's group or terminal leaves it alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings

POLL_S = 0.05  # between looks whether groups have ended: the kernel tells their parent alone
_PIPE = 3  # the number of the guard's own end, and the only descriptor that it keeps


class GroupGuard:
    """A guard of process groups. Owned by one thread; grace_s: between SIGTERM and SIGKILL, in
    seconds.
    """

    def __init__(self, grace_s: float) -> None:
        reader, self._writer = os.pipe()
        with warnings.catch_warnings():
            # of Python 3.12, when there are threads: the child uses system calls alone
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            try:
                _guard(reader, grace_s)
            finally:
                os._exit(0)
        os.close(reader)

    def add(self, group: int) -> None:
        """It was started."""
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        """It has ended."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Nothing is guarded from here on."""
        with contextlib.suppress(ProcessLookupError):  # somebody has killed it
            os.kill(self._pid, signal.SIGKILL)  # ends it even while it is stopped
        os.waitpid(self._pid, 0)
        os.close(self._writer)

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._writer, line.encode())  # some bytes: a pipe takes them at once


def _guard(reader: int, grace_s: float) -> None:
    """What the fork does."""
    os.setsid()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    if reader != _PIPE:
        os.dup2(reader, _PIPE)
    os.closerange(_PIPE + 1, os.sysconf("SC_OPEN_MAX"))
    groups: set[int] = set()
    said = b""
    while data := os.read(_PIPE, 4096):
        *lines, said = (said + data).split(b"\n")
        for number in map(int, lines):
            if number > 0:
                groups.add(number)
            else:
                groups.discard(-number)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 0.0)):
        groups = {group for group in groups if _tell(group, number)}
        deadline = time.monotonic() + patience_s
        while groups and time.monotonic() < deadline:
            time.sleep(POLL_S)
            groups = {group for group in groups if _tell(group, 0)}


def _tell(group: int, number: int) -> bool:
    """Whether there is such a group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user by now: as with sudo
        return number == 0
    return True
