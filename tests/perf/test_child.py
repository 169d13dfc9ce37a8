"""The processes of a benchmark, and Ctrl-C while they start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from perf.child import START_METHOD, Child

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
