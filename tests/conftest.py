"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import examples
from tests.figures import print_figures, tell, told
from tests.helpers import ManualClock
from tests.leaks import _started_once, nothing_is_left_behind
from tests.loops import _uvloop_has_begun, loop
from tests.network.tally import PROPERTY, Tally
from tests.turns import pytest_runtest_protocol
from tests.workers import (
    pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    pytest_xdist_setupnodes,
)

# How long an example takes says nothing on a busy machine: faulthandler_timeout ends what hangs.
settings.register_profile(
    "patient",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
# Who starts pytest in the background ignores Ctrl-C for it and for what it starts; tests send that
# to programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests make for their user is not the developer's; processes that they start inherit this,
# workers of pytest-xdist too.
_own_home = None if "PRPC_TEST_HOME" in os.environ else tempfile.mkdtemp(prefix="prpc-test-home-")
if _own_home is not None:
    os.environ["PRPC_TEST_HOME"] = os.environ["PRPC_HOME"] = _own_home

__all__ = [
    "_started_once",
    "_uvloop_has_begun",
    "clock",
    "fifo",
    "loop",
    "nothing_is_left_behind",
    "pytest_collection_modifyitems",
    "pytest_runtest_protocol",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
    "pytest_xdist_setupnodes",
    "seed",
    "tell",
]


def pytest_unconfigure() -> None:
    """Whoever has made the folder removes it."""
    if _own_home is not None:
        shutil.rmtree(_own_home, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What is there before a test is no garbage of it: without a look at that, 0.1 s of it from
    collecting tests and more with each test that keeps something, gc.collect() takes 1 ms.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Figures of single tests, and what the network tests have found in all."""
    print_figures(terminalreporter)
    tally = Tally()
    for _, counts in told(terminalreporter, PROPERTY):
        tally.counts.update(counts)
    if tally.counts:
        terminalreporter.write_line(f"network faults: {tally.line()}")


@pytest.fixture
def seed() -> int:
    """A fresh seed, or that of PRPC_TEST_SEED; printed, so that a failure shows it."""
    chosen = int(os.environ.get("PRPC_TEST_SEED") or secrets.randbits(32))
    print(f"seed {chosen}: repeat with PRPC_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def clock() -> ManualClock:
    """Time that passes only when the test says so."""
    return ManualClock()


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """What reads it blocks its process until the test writes it."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)
