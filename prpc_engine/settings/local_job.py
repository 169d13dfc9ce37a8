"""The processes of a job on this machine, watched until all that work have ended.

    event                               what follows
    a process ends with 0               the others go on
    one that may come again dies by a   it is started again in its place, told the number of that
      signal, or ends with START_AGAIN  attempt, while restarts are left; the others go on, and how
                                        this one ended is not the job's exit code
    the last that works ends with 0     those that serve get SIGTERM, after GRACE_S seconds
                                        SIGKILL; the job's exit code is 0
    a process ends otherwise            all of the rest gets them; its exit code is the job's
    the time limit passes               the same; the job's exit code is 124, as timeout(1) has it
    this process ends, or Ctrl-C        the same; a kill -9 too, by group_guard.py
    Ctrl-C again, in these seconds      all that are left get SIGKILL at once

The processes are watched by descriptors (pidfd), so an end is seen at once. Each has a process
group of its own, which is what the signals go to: what a process started ends with it. Where the
environment gives no secret, they get one of this job by theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prpc_engine.errors import ConfigError
from prpc_engine.settings.config import has_secret
from prpc_engine.settings.group_guard import GroupGuard
from prpc_engine.settings.user_secret import SECRET_BYTES

JOB_S_MAX = 2_000_000  # 23 days: what epoll can wait, its milliseconds being 31 bits
GRACE_S = 5.0  # between SIGTERM and SIGKILL
KILL_TIMEOUT_S = 10.0  # for the kernel to end what was killed
TIME_IS_OVER = 124
START_AGAIN = 254  # with which a process asks for it: dmlc's tracker has it so
SIGNALLED = 128  # plus the signal: what shells make of it
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # before any fork: a child may only call what is loaded


@dataclass(frozen=True)
class EndedProcess:
    """One process that is over. `code` as the shell has it: 128 + n for signal n."""

    name: str
    code: int
    by_us: bool  # it was told to end, since another one had failed
    came_again: bool  # another process was started in its place


@dataclass(frozen=True)
class JobReport:
    """All processes in the order they ended, and the job's exit code: 0 only if all that ended by
    themselves did so with 0; where they were started again, the last in each place."""

    code: int
    ended: tuple[EndedProcess, ...]

    def __str__(self) -> str:
        again = [
            f"{each.name} ended with {each.code} and was started again"
            for each in self.ended
            if each.came_again
        ]
        if not self.code:
            return "; ".join([f"{len(self.ended) - len(again)} processes ended well", *again])
        own = [
            f"{each.name} ended with {each.code}"
            for each in self.ended
            if each.code and not each.by_us and not each.came_again
        ]
        cut = [each.name for each in self.ended if each.by_us]
        over = "the time was over" if self.code == TIME_IS_OVER and not own else ""
        return "; ".join(
            filter(
                None,
                [over, *own, f"ended because of that: {', '.join(cut)}" if cut else "", *again],
            )
        )


@dataclass(frozen=True)
class _Place:
    """What is run, and as what."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    serves: bool
    attempt_variable: str | None
    attempt: int = 0


class LocalJob:
    """Starts the processes of a job on this machine, and watches them until all that work have
    ended.
    A context manager: none of the processes outlives it.

    timeout_s   for all of it, in seconds; None: no limit
    restarts    how often processes are started again, all together

    Raises ConfigError for a timeout_s that is none.

    Events: the table at the file's head.
    """

    def __init__(self, timeout_s: float | None = None, restarts: int = 0) -> None:
        if timeout_s is not None and not 0 < timeout_s <= JOB_S_MAX:
            raise ConfigError(
                f"a job of {timeout_s} seconds: more than 0 and at most {JOB_S_MAX} are allowed, "
                "or no limit"
            )
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._restarts_left = restarts
        self._running: dict[int, tuple[_Place, subprocess.Popen[bytes]]] = {}  # by pidfd
        self._working: set[int] = set()  # of these, who does not only serve
        self._watched = selectors.DefaultSelector()
        self._ended: list[EndedProcess] = []
        self._is_ending = False
        self._guard: GroupGuard | None = None  # from the first process on
        # Of this job alone, where nobody has said which: processes of other jobs of this user are
        # strangers.
        self._own = {} if has_secret() else {"PRPC_SECRET": secrets.token_hex(SECRET_BYTES)}

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        serves: bool = False,
        attempt_variable: str | None = None,
    ) -> None:
        """One process; `serves`: only as long as others work. Raises ConfigError where the command
        cannot be run.

        attempt_variable: it may be started again, and this variable of its environment says how
        often it has been."""
        self._start(_Place(name, arguments, environment, serves, attempt_variable))

    def _start(self, place: _Place) -> None:
        environment = {**place.environment, **self._own}
        if place.attempt_variable is not None:
            environment[place.attempt_variable] = str(place.attempt)
        with _signals_held():
            try:
                if self._guard is None:
                    self._guard = GroupGuard(GRACE_S)
                process = subprocess.Popen(
                    place.arguments,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=partial(_end_with_parent, os.getpid()),
                )
            except OSError as error:
                raise ConfigError(
                    f"{place.arguments[0]!r} cannot be run: {error.strerror}"
                ) from error
            self._guard.add(process.pid)
            descriptor = os.pidfd_open(process.pid)
            self._running[descriptor] = place, process
            if not place.serves:
                self._working.add(descriptor)
            self._watched.register(descriptor, selectors.EVENT_READ)

    def run(self) -> JobReport:
        """Until all that work have ended."""
        code = 0
        while self._working and not code:
            code = self._wait(self._deadline)
        self._end()
        return JobReport(code, tuple(self._ended))

    def _wait(self, deadline: float | None) -> int:
        """Until one has ended; the exit code of one that failed, TIME_IS_OVER, or 0."""
        ready = self._watched.select(
            None if deadline is None else max(0.0, deadline - time.monotonic())
        )
        if not ready:
            return TIME_IS_OVER
        code = 0
        for key, _ in ready:
            place, process = self._running.pop(key.fd)
            self._working.discard(key.fd)
            self._watched.unregister(key.fd)
            os.close(key.fd)
            # what it left behind, while the number is still its own
            self._signal(process, signal.SIGKILL)
            status = process.wait()
            if self._guard is not None:
                self._guard.remove(process.pid)
            comes_again = self._comes_again(place, status) and not code
            ended = EndedProcess(
                place.name,
                status if status >= 0 else SIGNALLED - status,
                self._is_ending,
                comes_again,
            )
            self._ended.append(ended)
            if comes_again:
                self._start_again(place, ended.code)
            else:
                code = code or ended.code
        return code

    def _comes_again(self, place: _Place, status: int) -> bool:
        asked = status < 0 or status == START_AGAIN
        return (
            asked
            and place.attempt_variable is not None
            and self._restarts_left > 0
            and not self._is_ending
        )

    def _start_again(self, place: _Place, code: int) -> None:
        self._restarts_left -= 1
        next_one = replace(place, attempt=place.attempt + 1)
        left = f"restarts left: {self._restarts_left}"
        print(
            f"prpc: {place.name} ended with {code}; attempt {next_one.attempt} begins; {left}",
            file=sys.stderr,
        )
        self._start(next_one)

    def _end(self) -> None:
        self._tell_all(signal.SIGTERM, GRACE_S)
        self._kill()

    def _kill(self) -> None:
        self._tell_all(signal.SIGKILL, KILL_TIMEOUT_S)

    def _tell_all(self, number: int, patience_s: float) -> None:
        self._is_ending = True
        for _, process in self._running.values():
            self._signal(process, number)
        deadline = time.monotonic() + patience_s
        while self._running and time.monotonic() < deadline:
            self._wait(deadline)

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of the group has ended
            os.killpg(process.pid, number)

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:  # also where a second Ctrl-C has cut the grace short
            with _signals_held():
                self._kill()
                self._watched.close()
                if self._guard is not None:
                    self._guard.close()
                    self._guard = None


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block. What their handlers raise within a start
    would be lost, in what Python calls around a fork, or leave a process that is in no table; in
    the last kill it would leave whom that had not reached."""
    came: list[int] = []
    held: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                held[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for one, handler in held.items():
            signal.signal(one, handler)
        if came:
            signal.raise_signal(came[0])


def _end_with_parent(parent: int) -> None:
    """In the child, before the command."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel knew whom to tell
        os._exit(SIGNALLED + signal.SIGTERM)


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """So many different ones. Meanwhile the system gives them to nobody who asks for any; who asks
    for one of them, with SO_REUSEADDR as servers do, may listen there."""
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(count):
            each = held.enter_context(socket.socket())
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("", 0))  # any address: servers of TensorFlow's own listen at all
            found.append(each.getsockname()[1])
        yield found
