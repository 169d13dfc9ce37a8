"""Programs that a test starts as `python -m` does, talks to by lines, and kills.

Each ends when its standard input does, which the death of the test brings about too: none outlives
its test.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO, TypeVar

from tests.forked import IMPORTS, Forked, can_fork, nursery

ROOT = Path(__file__).parent.parent
PATIENCE_S = 30.0  # a test that waits longer has failed
# The same for what may take several processes their turns, or an import of TensorFlow, on a busy
# machine.
UNTIL_S = 120.0
IN_NETWORK = ("ip", "netns", "exec")  # what a prefix begins with that a fork can do itself
Self = TypeVar("Self", bound="Program")
Process = TypeVar("Process")
Streams = tuple[Process, TextIO, TextIO]  # the process, its input, its output


def wait_until(
    happened: Callable[[], object], what: str = "it", patience_s: float = UNTIL_S
) -> None:
    """Poll until happened() is true; fail after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come to pass"
        time.sleep(0.002)


def waiting_in(function: Callable[..., object]) -> int:
    """How many threads wait for a threading.Condition in a call of `function`: whoever notifies it
    from now on wakes them, as they give its lock away only when they are on its list.
    """
    code = getattr(function, "__code__", None)
    assert code is not None, f"{function} is no function of Python's"
    waits = 0
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        if frame.f_code is threading.Condition.wait.__code__:
            while at is not None and at.f_code is not code:
                at = at.f_back
            waits += at is not None
    return waits


def halt(pid: int) -> None:
    """SIGSTOP a process, and wait until each of its threads stands still: the signal's sender goes
    on before they do.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(
        lambda: all(_state(task) in "TtZX" for task in tasks.iterdir()),
        f"the stop of process {pid}",
    )


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # a thread that has ended meanwhile


def _forked(
    imports: tuple[str, ...],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    network: str,
) -> Streams[Forked]:
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    try:
        process = nursery(imports).start(
            list(arguments), environment, theirs_in, theirs_out, network=network
        )
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return process, open(ours_in, "w"), open(ours_out)


def _started(
    arguments: Sequence[str], prefix: Sequence[str], environment: Mapping[str, str]
) -> Streams[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return process, process.stdin, process.stdout


def run_to_end(
    *arguments: str, env: Mapping[str, str], timeout_s: float, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -W error -m *arguments`, forked, with that environment: as subprocess.run with
    capture_output. stdout: a descriptor that its output goes to instead.
    """
    with open(os.memfd_create("out"), "w+b") as out, open(os.memfd_create("err"), "w+b") as err:
        process = nursery().start(
            list(arguments),
            env,
            stdout=out.fileno() if stdout is None else stdout,
            stderr=err.fileno(),
            is_strict=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE_S)
            raise
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, code, *said)


class Program:
    """One of them. A context manager: it must come to a clean end, unless the test ended it before;
    a failing test kills it.
    """

    patience_s = PATIENCE_S
    end_signal: signal.Signals | None = None  # for programs that do not read their input
    is_forked = True  # of a Python that has imported what it needs; False: it is a new one
    imports = IMPORTS  # what that Python has imported

    def __init__(
        self, *arguments: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """`prefix` is a command that runs the rest; `env` goes on top of the test's own
        environment.
        """
        environment = {**os.environ, **(env or {})}
        self.process: Forked | subprocess.Popen[str]
        network = prefix[-1] if tuple(prefix[:-1]) == IN_NETWORK else ""
        if self.is_forked and can_fork(environment) and (network or not prefix):
            self.process, self.stdin, self.stdout = _forked(
                self.imports, arguments, environment, network
            )
        else:
            self.process, self.stdin, self.stdout = _started(arguments, prefix, environment)
        self._said = b""  # and not read yet: kept here, where a look whether there is more sees it

    @property
    def pid(self) -> int:
        return self.process.pid

    def write_line(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def read_line(self) -> str:
        """What it writes next; fails when that takes too long, or when it has ended."""
        deadline = time.monotonic() + self.patience_s
        while b"\n" not in self._said:
            ready, _, _ = select.select(
                [self.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            data = os.read(self.stdout.fileno(), 65536) if ready else b""
            if not data:
                self.kill()
                raise AssertionError(
                    f"{self.process.args!r} said nothing; it ended with {self.process.returncode}"
                )
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.kill()
        self.process.wait(self.patience_s)
        self._close_pipes()

    def end(self, number: signal.Signals | None = None) -> int:
        """Tell it to end, by that signal and the end of its input; its exit code. One that was
        killed before keeps that code.
        """
        if number is not None:
            self.process.send_signal(number)
        self.stdin.close()
        try:
            return self.process.wait(self.patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._close_pipes()

    def _close_pipes(self) -> None:
        self.stdin.close()
        self.stdout.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.kill()
        elif self.process.returncode is not None:
            self._close_pipes()
        else:
            code = self.end(self.end_signal)
            assert code in (0, -signal.SIGKILL), f"{self.process.args!r} ended with {code}"
