"""Processes to be killed by the hundred: one instrumented Python that forks a child for each round.

Starting Python and importing numpy and shard takes 150 ms, forking a process that has done so 2 ms.
The zygote does nothing else: it never holds a ring, a slab or a connection, so its children start
as clean as new processes.

    with Zygote() as zygote:
        victim = zygote.start(some_function, arg, fds=[fd], arm=("ring.after_payload", "kill9", 17))
        ...                                 # some_function(life, arg) runs in the child; life.fds
                                            are its descriptors
        exit_code = victim.wait(timeout_s)  # negative: the signal that killed it

Life is memory that a child shares with the test: its last sign of life, how much it has done for
good, and what its function returned; in place of None, how often it had passed each failpoint by
then. Requests go over a socket that keeps messages whole: (function, args, arm) and descriptors one
way, a pid the other; then the pid to wait for, and its exit code. The zygote ends when the test's
end of that socket closes, and its children with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from shard import failpoints

ROOT = Path(__file__).parents[2]
REQUEST_BYTES_MAX = 64 << 10  # a function's name and a few small arguments
FDS_MAX = 8
LIFE_BYTES = 16 << 10  # holds a pickled dictionary of all failpoints
SIGN_WORD, DONE_WORD, REPORT_SIZE_WORD, REPORT_OFFSET = 0, 1, 2, 24
EXIT_BROKEN = 70  # the function raised; its traceback is on stderr
START_TIMEOUT_S = 60.0  # for python, numpy and shard on a busy machine
_PR_SET_PDEATHSIG = 1

Arm = tuple[str, str, int]  # failpoint, action, hit


class Life:
    """What a child and the test know of each other."""

    def __init__(self, fd: int, fds: list[int]) -> None:
        self.fds = fds
        self._memory = memoryview(mmap.mmap(fd, LIFE_BYTES))
        self._words = self._memory[:REPORT_OFFSET].cast("Q")

    def sign(self) -> None:
        """The child: I live."""
        self._words[SIGN_WORD] = time.monotonic_ns()

    @property
    def last_sign_s(self) -> float:
        """When it last did, by the monotonic clock: an upper bound of how long ago it died is the
        time since.
        """
        return float(self._words[SIGN_WORD]) / 1e9

    @property
    def done(self) -> int:
        """How much of its work the child had finished for good when it died; what that is, its
        function says.
        """
        return int(self._words[DONE_WORD])

    @done.setter
    def done(self, count: int) -> None:
        self._words[DONE_WORD] = count

    def report(self, value: object) -> None:
        """The child: this is what I found."""
        data = pickle.dumps(value)
        self._memory[REPORT_OFFSET : REPORT_OFFSET + len(data)] = data
        self._words[REPORT_SIZE_WORD] = len(data)

    def reported(self) -> Any:
        """What the child found."""
        size = self._words[REPORT_SIZE_WORD]
        assert size, "the child reported nothing"
        return pickle.loads(self._memory[REPORT_OFFSET : REPORT_OFFSET + size])


class Victim:
    """A child of the zygote. Owned by the test that started it, which waits for it."""

    def __init__(self, zygote: Zygote, pid: int, life: Life) -> None:
        self.pid = pid
        self.life = life
        self.exit_code: int | None = None
        self._zygote = zygote
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def is_dead(self, timeout_s: float = 0.0) -> bool:
        """Whether it ended, by itself or not, within so many seconds."""
        return self.exit_code is not None or bool(self._poll.poll(timeout_s * 1000))

    def wait(self, timeout_s: float) -> int:
        """Its exit code, negative for a signal. Raises AssertionError when it runs on, and kills it
        then.
        """
        if self.exit_code is None:
            hangs = not self.is_dead(timeout_s)
            if hangs:
                self.kill()
            self.exit_code = self._zygote.reap(self.pid)
            os.close(self._pidfd)
            assert not hangs, f"process {self.pid} did not end within {timeout_s} s"
        return self.exit_code

    def kill(self) -> None:
        """kill -9, wherever it is."""
        if self.exit_code is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Zygote:
    """The instrumented process, seen from the test. A context manager; its end is the end of all
    its children.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno())],
            env={
                **os.environ,
                failpoints.VARIABLE: "armed",
                "PYTHONPATH": str(ROOT),
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket.settimeout(START_TIMEOUT_S)
        self._victims: list[Victim] = []

    def start(
        self,
        function: Callable[..., object],
        *args: object,
        fds: Sequence[int] = (),
        arm: Arm | None = None,
    ) -> Victim:
        """A child that runs function(life, *args) and exits with 0; `fds` stay the caller's."""
        life_fd = os.memfd_create("life")
        os.ftruncate(life_fd, LIFE_BYTES)
        try:
            socket.send_fds(self._socket, [pickle.dumps((function, args, arm))], [life_fd, *fds])
            life = Life(life_fd, [])
        finally:
            os.close(life_fd)
        pid = pickle.loads(self._socket.recv(REQUEST_BYTES_MAX))
        victim = Victim(self, pid, life)
        self._victims = [*(one for one in self._victims if one.exit_code is None), victim]
        return victim

    def reap(self, pid: int) -> int:
        self._socket.send(pickle.dumps(pid))
        return int(pickle.loads(self._socket.recv(REQUEST_BYTES_MAX)))

    def end_all(self) -> None:
        """Kill and wait for what a failed test left running."""
        for victim in self._victims:
            victim.kill()
            victim.wait(START_TIMEOUT_S)
        self._victims = []

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_all()
        self._socket.close()
        self._process.wait(START_TIMEOUT_S)


# -- the zygote's own process ----------------------------------------------------------------------


def serve(sock: socket.socket) -> None:
    """Fork and wait as asked, until the test hangs up."""
    libc = ctypes.CDLL(None)
    gc.freeze()  # children that collect garbage do not touch, and so copy, every page
    while True:
        data, fds, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, FDS_MAX)
        if not data:
            return
        request = pickle.loads(data)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            sock.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if not pid:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            sock.close()
            _live(fds, *request)
        for fd in fds:
            os.close(fd)
        sock.send(pickle.dumps(pid))


def _live(
    fds: list[int], function: Callable[..., object], args: tuple[object, ...], arm: Arm | None
) -> NoReturn:
    """The whole life of a child: no handler, no destructor and no atexit of the zygote runs
    in it.
    """
    try:
        life = Life(fds[0], fds[1:])
        os.close(fds[0])
        life.sign()
        if arm is not None:
            failpoints.arm(*arm)
        found = function(life, *args)
        life.report(
            {name: failpoints.hits(name) for name in failpoints.names()} if found is None else found
        )
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        os._exit(EXIT_BROKEN)
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
