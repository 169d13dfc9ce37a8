"""Programs of tests, forked from one Python that has imported what they need.

    python -m tests.forked FD MODULE...

Starting Python and importing prpc_engine takes 0.35 s, and 3 s with TensorFlow; forking a process
that has done so takes 0.01 s.
A nursery does nothing but fork, so what it forks is as clean as a new process: no thread, no
connection, no secret, nothing made. The child then runs the module as `python -m` does and comes to
its end as any Python: exit handlers, threads that are waited for, SystemExit, Ctrl-C, and all that
the program made is taken down; only the modules that were there before the fork are not.

Requests go over a socket that keeps messages whole: what to run with its three standard streams one
way, a pid the other; then a pid to wait for, and its exit code. The nursery ends when the test's
end of that socket closes, and its children with it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from shard import failpoints

ROOT = Path(__file__).parent.parent
REQUEST_BYTES_MAX = 160 << 10  # a module's name, its arguments, and a whole environment
START_TIMEOUT_S = 120.0  # for python and its imports, TensorFlow's too, on a busy machine
IMPORTS = (
    "prpc_engine.accumulator",
    "prpc_engine.kv",
    "prpc_engine.cluster",
    "prpc_engine.pslite",
    "prpc_engine.cli.doctor",  # and with these two what other commands need
    "prpc_engine.cli.top",
    "pytest",  # for programs that say what must be raised
    "rich.table",
    "tests.prpc_engine.handlers",
    "tests.program",
)
TENSORFLOW = ("tests.tensorflow.imports",)
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


class Forked:
    """One such process, with the verbs of subprocess.Popen that tests use. Its end is waited for by
    whoever started it.
    """

    def __init__(self, nursery: Nursery, pid: int, args: list[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._nursery = nursery
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """As Popen.send_signal: nothing, once it was waited for."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._nursery.reap(self.pid)
            os.close(self._pidfd)
        return self.returncode


class Nursery:
    """The process that forks, seen from the tests: for each set of imports one a process, started
    by the first that asks for it (`nursery()`).
    """

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._lock = threading.Lock()  # tests start programs in threads, too
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *imports],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            # numpy would start threads, which no fork takes along
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket.settimeout(START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Of the socket whose closing ends it."""
        return self._socket.fileno()

    def start(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
        leads_group: bool = False,
        is_strict: bool = False,
        network: str = "",
    ) -> Forked:
        """`python -m *arguments` in ROOT, in a process group of its own where it leads one, with
        `-W error` where it is strict, in the network namespace of that name. The descriptors stay
        the caller's.
        """
        request = {
            "run": arguments,
            "environment": dict(environment),
            "leads": leads_group,
            "strict": is_strict,
            "network": network,
        }
        pid = self._asked(json.dumps(request).encode(), [stdin, stdout, stderr])
        return Forked(self, pid, arguments)

    def reap(self, pid: int) -> int:
        """Wait for a child; its exit code."""
        return self._asked(json.dumps({"reap": pid}).encode())

    def _asked(self, request: bytes, fds: list[int] | None = None) -> int:
        with self._lock:
            socket.send_fds(self._socket, [request], fds or [])
            return int(self._socket.recv(REQUEST_BYTES_MAX))

    def close(self) -> None:
        """End it, and what it has forked."""
        self._socket.close()
        self._process.kill()  # whoever was forked from this process may hold the socket
        self._process.wait(START_TIMEOUT_S)


_nurseries: dict[tuple[str, ...], Nursery] = {}
_starting = threading.Lock()


def nursery(imports: tuple[str, ...] = IMPORTS) -> Nursery:
    """That of this process for these imports: IMPORTS, or TENSORFLOW."""
    with _starting:
        if imports not in _nurseries:
            _nurseries[imports] = Nursery(imports)
        return _nurseries[imports]


def running() -> list[Nursery]:
    """Those of this process."""
    return list(_nurseries.values())


def close_nurseries() -> None:
    """After the last test."""
    with _starting:
        while _nurseries:
            _nurseries.popitem()[1].close()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a program with that environment may be forked: what is read when modules are imported
    was read before.
    """
    return failpoints.VARIABLE not in environment


# -- the nursery's own process ---------------------------------------------------------------------


def serve(sock: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Fork and wait as asked. Returns in each child what it is to run, and None here when the tests
    have hung up.
    """
    libc = ctypes.CDLL(None)
    gc.collect()
    gc.freeze()  # children that collect garbage do not touch, and so copy, every page
    while True:
        data, fds, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, 3)
        if not data:
            return None
        request = json.loads(data)
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], 0)
            sock.send(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if not pid:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            sock.close()
            for standard, fd in enumerate(fds):
                os.dup2(fd, standard)
                os.close(fd)
            if request["network"]:
                _enter_network(libc, request["network"])
            if request["strict"]:
                warnings.simplefilter("error")
                sys.warnoptions[:] = ["error"]  # what it starts is strict, too
            return request["run"], request["environment"]
        for fd in fds:
            os.close(fd)
        if request["leads"]:
            os.setpgid(pid, pid)  # before anybody knows whom to send a signal to
        sock.send(b"%d" % pid)


def _enter_network(libc: ctypes.CDLL, name: str) -> None:
    """As `ip netns exec`."""
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(f"network namespace {name} cannot be entered")
    os.close(namespace)


def run(arguments: list[str], environment: dict[str, str]) -> None:
    """As `python -m *arguments` with that environment."""
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv = arguments
    # Those that there are know what kind of file the nursery had. They stay, as sys.__stdin__ and
    # so on: they would close what they stand for.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def keep_alive(names: Iterable[str]) -> None:
    """Take these modules out of reach of the interpreter's end, and never free them. It would free
    all that was imported before the fork, object by object, and the kernel copy each page of it
    for that: 0.04 s of a core for each process.
    """
    kept = [sys.modules.pop(name, None) for name in names]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if __name__ == "__main__":
    imported: list[str] = []
    # registered before all others, and so the last handler to run
    atexit.register(keep_alive, imported)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # warnings is asked for by objects that are found open at the end
    imported += sys.modules.keys() - {"__main__", "builtins", "sys", "warnings"}
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        run(*asked)
