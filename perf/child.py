"""Child processes that cannot outlive their parent, pinned to a core, each wait for them bounded.

A benchmark is three processes deep: the one that compares, a child that measures, and its child
that serves. A child ends when it is told to, when its parent's `with` ends, and when its parent
dies for whatever reason (PR_SET_PDEATHSIG); Ctrl-C, and SIGTERM of `prpc bench`, reaches only the
one at the top, which ends the others. The others ignore Ctrl-C, and until they can, while their
interpreter starts and imports, it is blocked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import multiprocess
from multiprocess import resource_tracker

START_S_MAX = 30.0  # interpreter, numpy and a peer's library, on a core that others use too
# for one that has said all: libraries that it closes, on a core that others use too
END_S_MAX = 30.0
STOP_S_MAX = 3.0  # after SIGTERM; then SIGKILL
STOP_LOOK_S = 0.2  # how often a child looks at its StopRequest: too seldom to be seen in any figure
PR_SET_PDEATHSIG = 1

# Never fork the parent: it may hold rings, and threads of grpc. Tests have their children forked
# by a process that has imported what they need and holds nothing ("forkserver", conftest.py).
START_METHOD = "PRPC_BENCH_START_METHOD"

Announce = Callable[[object], None]


class ChildFailed(Exception):
    """The child raised: its traceback is in the text."""


class ChildSilent(Exception):
    """The child said nothing in time, or died without a word."""


class NotOffered(Exception):
    """What was asked for, this candidate does not have."""


def pin(cores: Iterable[int]) -> None:
    """Keep this process, and the threads it starts from here on, on these cores; none named leaves
    all as it is.
    """
    if chosen := set(cores):
        os.sched_setaffinity(0, chosen)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes when the block is over. Where it is blocked in this thread alone another one
    takes it (those of numpy's libraries), and Python has the main thread raise it all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # nothing is raised here
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


class Child:
    """A process running `target(announce, *args)`. Owned by its parent: stop() it, or use it as a
    context manager.

    `target` is a module's function, and `args` can be pickled. Each value it announces is received
    once, in order.
    """

    def __init__(
        self, target: Callable[..., None], *args: object, cores: Iterable[int] = ()
    ) -> None:
        self.name = f"{target.__module__}.{target.__qualname__}"
        context: Any = multiprocess.get_context(os.environ.get(START_METHOD, "spawn"))
        self._words, words = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_main,
            args=(target, args, words, tuple(cores), os.getpid(), dict(os.environ)),
            name=self.name,
        )
        resource_tracker.ensure_running()  # now: starting it unblocks SIGINT
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        finally:
            words.close()

    def _start(self) -> None:
        """Start the process with SIGINT blocked: a new process has the mask of the thread that
        starts it. Raises KeyboardInterrupt with the process started where Ctrl-C came meanwhile.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with _interrupts_wait():
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """The child's process id."""
        pid: int = self._process.pid
        return pid

    def receive(self, timeout_s: float = START_S_MAX) -> Any:
        """The next value announced. Raises ChildFailed, ChildSilent, NotOffered."""
        deadline = time.monotonic() + timeout_s
        try:
            if not self._words.poll(timeout_s):
                raise ChildSilent(
                    f"{self.name} (pid {self.pid}) said nothing for {timeout_s:.0f} s"
                )
            kind, value = self._words.recv()
        except EOFError:
            self._process.join(max(0.0, deadline - time.monotonic()))
            raise ChildSilent(
                f"{self.name} (pid {self.pid}) ended, exit code {self._process.exitcode}"
            ) from None
        if kind == "failed":
            raise ChildFailed(f"{self.name} failed:\n{value}")
        if kind == "not offered":
            raise NotOffered(value)
        return value

    def finish(self, timeout_s: float = END_S_MAX) -> None:
        """Wait for the process to end by itself, having said all. Raises ChildFailed unless it
        does, with code 0.
        """
        self._process.join(timeout_s)
        if self._process.exitcode != 0:
            how = (
                "is still there"
                if self._process.exitcode is None
                else f"ended with code {self._process.exitcode}"
            )
            raise ChildFailed(
                f"{self.name} (pid {self.pid}) did its work, but {how} {timeout_s:.0f} s later"
            )

    def stop(self) -> None:
        """End the process: SIGTERM, then after STOP_S_MAX SIGKILL. A second stop() does nothing."""
        if self._words.closed:
            return
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(STOP_S_MAX)
            if self._process.is_alive():
                self._process.kill()
        if self._process.pid is not None:  # it was started
            self._process.join()
        self._process.close()
        self._words.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _main(
    target: Callable[..., None],
    args: tuple[object, ...],
    words: Any,
    cores: tuple[int, ...],
    parent_pid: int,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)  # which a fork has from the process that forked it
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as Child._start() left it to us
    pin(cores)
    try:
        target(lambda value: words.send(("value", value)), *args)
    except NotOffered as reason:
        words.send(("not offered", str(reason)))
    except Exception:
        words.send(("failed", traceback.format_exc()))
        sys.exit(1)


def _die_with(parent_pid: int) -> None:
    """End this process when the one that made it ends."""
    if os.environ.get(START_METHOD) == "forkserver":  # the kernel's parent of this process
        threading.Thread(target=_wait_and_die, daemon=True).start()
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _wait_and_die() -> None:
    parent = multiprocess.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM in the block is a SIGINT, and waits where that does; for the process at the top."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Whether this process was told to stop, by SIGTERM; for a child that holds something and
    closes it in order.

    The handler only takes a note. An exception raised from it would surface wherever the main
    thread happens to be, and be lost where that is a destructor. Without a StopRequest SIGTERM ends
    a child on the spot.
    """

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: object) -> None:
        self.asked = True
