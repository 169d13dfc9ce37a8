"""Processes by the hundred: one Python that has imported everything forks a child for each.

As tests/faults/zygote.py, whose children these are, but without failpoints: here the kernel kills,
at any moment.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from shard import failpoints
from tests.faults.zygote import ROOT, START_TIMEOUT_S, Victim, Zygote
from tests.prpc_engine.processes import wait_until

# -SIGTERM: it came in the process's first instants, before that was blocked.
ENDED_WELL = (0, -signal.SIGKILL, -signal.SIGTERM)


class Farm(Zygote):
    """A zygote that is not instrumented. A context manager, as that one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        environment.pop(failpoints.VARIABLE, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket.settimeout(START_TIMEOUT_S)
        self._victims: list[Victim] = []

    def start_ready(self, function: Callable[..., object], *args: object) -> Victim:
        """A child that has said by life.done that it is ready."""
        victim = self.start(function, *args)
        wait_until(lambda: victim.life.done or victim.is_dead(), "the start of a process")
        assert not victim.is_dead(), f"{function.__name__} ended at once with {victim.wait(0.0)}"
        return victim


def terminate(victim: Victim) -> None:
    """SIGTERM: children of ours close what they have, and exit with 0."""
    if victim.exit_code is None:
        # nobody but Victim.wait() reaps it, so the pid is still its own
        os.kill(victim.pid, signal.SIGTERM)


def kill(victim: Victim) -> None:
    """kill -9, and wait for the end: until then it may still answer."""
    victim.kill()
    assert victim.is_dead(START_TIMEOUT_S), f"process {victim.pid} outlives kill -9"


def end(victim: Victim, timeout_s: float = START_TIMEOUT_S) -> Any:
    """SIGTERM, and what the child reported; fails when it did not end well."""
    terminate(victim)
    code = victim.wait(timeout_s)
    assert code == 0, f"a process that was to end cleanly ended with {code}"
    return victim.life.reported()
