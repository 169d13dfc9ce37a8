"""Threads that run what is submitted, and that a process does not wait for at its end."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time

import pytest

from prpc_engine.tensorflow.threads import DaemonThreads
from tests.imports import ROOT
from tests.prpc_engine.processes import PATIENCE_S

NEVER_ENDS = """
import threading

from prpc_engine.tensorflow.threads import DaemonThreads

begun = threading.Event()
threads = DaemonThreads(1, "stages")
threads.submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("end")
"""


def test_as_many_run_at_a_time_as_are_allowed_and_the_rest_waits() -> None:
    threads, go = DaemonThreads(2, "few"), threading.Event()
    ran: queue.SimpleQueue[str] = queue.SimpleQueue()
    for _ in range(5):
        threads.submit(lambda: (ran.put(threading.current_thread().name), go.wait()))
    first = {ran.get(timeout=PATIENCE_S) for _ in range(2)}
    assert first == {"few-1", "few-2"}
    assert ran.empty()
    go.set()
    assert {ran.get(timeout=PATIENCE_S) for _ in range(3)} <= first
    threads.shutdown()


def test_what_raises_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = DaemonThreads(1, "one"), threading.Event()
    threads.submit(lambda: 1 // 0)
    threads.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert "unexpected error in a thread of one" in caplog.text
    threads.shutdown()


def test_without_another_thread_nothing_is_run_and_the_next_one_is() -> None:
    threads = DaemonThreads(2, "short")
    ran: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        with pytest.raises(RuntimeError):
            threads.submit(ran.put, 1)
    finally:
        threading.stack_size(before)
    threads.submit(ran.put, 2)
    assert ran.get(timeout=PATIENCE_S) == 2
    threads.shutdown()
    assert ran.empty()


def test_at_the_end_what_runs_is_waited_for_and_nothing_else_is_run() -> None:
    threads, begun, go = DaemonThreads(1, "ending"), threading.Event(), threading.Event()
    ran: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads.submit(lambda: (begun.set(), go.wait(), ran.put(1)))
    threads.submit(ran.put, 2)
    assert begun.wait(PATIENCE_S)
    threads.end(time.monotonic())  # which is over: it does not wait
    assert ran.empty()
    go.set()
    threads.end(time.monotonic() + PATIENCE_S)
    threads.submit(ran.put, 3)
    threads.end(time.monotonic() + PATIENCE_S)
    assert (ran.get_nowait(), ran.empty()) == (1, True)


def test_a_process_ends_though_one_of_them_does_not() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
