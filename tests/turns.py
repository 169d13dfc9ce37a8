"""Which tests run beside others when pytest has several workers (`pytest -n 2`): all, but for those
marked `alone`.

    door  held by who waits for the room, or is about to enter it: nobody passes one that waits to
          be alone
    room  shared by all tests that run, exclusive for one that runs alone

Both are locks on files that are there anyhow (flock), so that a worker that dies leaves none.
Without workers nothing is locked. Runs of pytest at the same time, as stages of .ci/run, have their
turns together where PRPC_TEST_ROOM names one file for them. This is a plugin of pytest: conftest.py
has it, and `-p tests.turns` where that is not read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.workers import is_alone

SHARED = "PRPC_TEST_ROOM"
ROOM = Path(os.environ.get(SHARED, __file__))
DOOR = ROOM.parent


def environment_of_another_run() -> dict[str, str]:
    """For pytest that a test starts: it would wait for its turn, which that test has."""
    own = ("PYTEST_XDIST_WORKER", SHARED)
    return {name: value for name, value in os.environ.items() if name not in own}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With several workers, each test in its turn."""
    with turn(is_alone(item)):
        return (yield)


@contextlib.contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Wait until the test may run; it runs inside."""
    if "PYTEST_XDIST_WORKER" not in os.environ and SHARED not in os.environ:
        yield
        return
    with _opened(ROOM) as room:
        with _opened(DOOR) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a child may have the descriptor, too


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
