"""The processes of a benchmark, and Ctrl-C while they start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import psutil
import pytest

from perf.child import START_METHOD, Child, sigterm_as_ctrl_c

PATIENCE_S = 30.0


def say_and_end(announce: Callable[[object], None]) -> None:
    """What is announced: whether SIGINT is ignored, and whether it is blocked."""
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    announce((signal.getsignal(signal.SIGINT) == signal.SIG_IGN, blocked))


def wait_for_ever(announce: Callable[[object], None]) -> None:
    """A server's main: it ends by SIGTERM."""
    announce("up")
    signal.pause()


def test_ctrl_c_does_not_reach_a_process_whose_interpreter_still_starts() -> None:
    """It would end in the middle of an import, with a traceback among the figures."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Child(say_and_end) as child:
        os.kill(child.pid, signal.SIGINT)
        assert child.receive(PATIENCE_S) == (True, False)
        child.finish()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_ctrl_c_while_a_process_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's end would wait for it, and a server has none."""
    start = Child._start

    def start_interrupted(child: Child) -> None:
        start(child)
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "_start", start_interrupted)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        Child(wait_for_ever)
    left = set(psutil.Process().children()) - before
    assert not [each for each in left if "spawn_main" in " ".join(each.cmdline())]


def test_sigterm_ends_the_processes_of_a_benchmark_as_ctrl_c_does() -> None:
    """By itself it would end the one at the top alone, with its folder of this run left behind."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c(), Child(wait_for_ever) as child:
        child.receive(PATIENCE_S)
        process = psutil.Process(child.pid)
        signal.raise_signal(signal.SIGTERM)
    assert not process.is_running()
    assert signal.getsignal(signal.SIGTERM) is before


class InterruptsAsItIsSent:
    """An argument: while it is pickled, Ctrl-C is taken by another thread, as numpy's libraries
    have them, and Python has the main thread raise it.
    """

    def __init__(self) -> None:
        self.is_sent = False

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        end = threading.Event()
        other = threading.Thread(target=end.wait)
        with_signals = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        other.start()  # it has the mask of its parent
        signal.pthread_sigmask(signal.SIG_SETMASK, with_signals)
        signal.pthread_kill(other.ident or 0, signal.SIGINT)
        end.set()
        other.join()
        self.is_sent = True
        return int, ()


def test_ctrl_c_that_another_thread_takes_waits_until_a_process_is_started() -> None:
    """Else it would read the end of what it is started with, and say so in a traceback."""
    argument = InterruptsAsItIsSent()
    with pytest.raises(KeyboardInterrupt):
        Child(wait_for_ever, argument)
    assert argument.is_sent
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_process_that_cannot_be_started_says_why() -> None:
    """And stopping it is no error of its own."""
    with pytest.raises(TypeError, match="pickle"):
        Child(wait_for_ever, (number for number in ()))


def serve_and_be_killed(announce: Callable[[object], None]) -> None:
    """A process that measures, and dies without a word while its server is up."""
    with Child(wait_for_ever) as server:
        server.receive(PATIENCE_S)
        announce(server.pid)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_server_ends_with_the_process_that_measures(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(START_METHOD, method)
    with Child(serve_and_be_killed) as measures:
        server_pid = measures.receive(PATIENCE_S)
        try:
            server = psutil.Process(server_pid)
        except psutil.NoSuchProcess:
            return
        server.wait(PATIENCE_S)
