"""The demo's processes on this machine: started by spawn, watched, and ended whatever happens.

Every role ends when its process is told so by SIGTERM, and with this process by PR_SET_PDEATHSIG;
what does not end in time is killed. Ctrl-C goes to the whole terminal, so the roles ignore it, and
until they can, while their interpreter starts and imports, it is blocked: this process decides.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import multiprocess
from multiprocess import resource_tracker

# for SIGTERM to be obeyed; after it comes SIGKILL, so that Ctrl-C ends all within 2 s
STOP_TIMEOUT_S = 1.2
_PR_SET_PDEATHSIG = 1


@dataclass
class Role:
    """One process of the cluster."""

    name: str  # "server 0"
    process: Any
    finished: bool = False  # it said so itself: its end is no loss

    @property
    def death(self) -> str:
        """How it ended, in words."""
        code = self.process.exitcode
        if code is None:
            return f"{self.name} (pid {self.process.pid}) is running"
        if code < 0:
            return (
                f"{self.name} (pid {self.process.pid}) was killed by {signal.Signals(-code).name}"
            )
        return f"{self.name} (pid {self.process.pid}) ended with exit code {code}"


def _live(parent_pid: int, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    """What every role's process runs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        return  # it died before we were tied to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as start() left it to us
    main(*args)


class Cluster:
    """All roles. A context manager that leaves no process behind."""

    def __init__(self) -> None:
        self.roles: list[Role] = []
        self._context = multiprocess.get_context("spawn")

    def start(self, name: str, main: Callable[..., None], *args: Any) -> Role:
        """A process that runs main(*args), an importable function."""
        # Not daemonic: a server may have shard processes of its own.
        process = self._context.Process(
            target=_live, name=f"prpc-demo-{name}", args=(os.getpid(), main, args)
        )
        resource_tracker.ensure_running()  # now: starting it unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()  # a new process has the mask of the thread that starts it
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        role = Role(name, process)
        self.roles.append(role)
        return role

    def dead(self) -> list[Role]:
        """Roles whose process ended without having said that it was done."""
        return [
            role for role in self.roles if not role.finished and role.process.exitcode is not None
        ]

    def stop(self) -> None:
        """End all processes, within STOP_TIMEOUT_S and a moment."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for role in self.roles:
            if role.process.exitcode is None:
                role.process.terminate()
        left = {role.process.sentinel: role for role in self.roles if role.process.exitcode is None}
        while left and (remaining := deadline - time.monotonic()) > 0:
            for sentinel in wait(list(left), remaining):
                left.pop(sentinel)
        for role in left.values():
            role.process.kill()
        for role in self.roles:
            role.process.join()
            role.finished = True

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
