"""Fixtures for every test."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.helpers import ManualClock
from tests.leaks import _started_once, nothing_is_left_behind
from tests.loops import _uvloop_has_begun, loop

__all__ = ["_started_once", "_uvloop_has_begun", "clock", "loop", "nothing_is_left_behind", "seed"]


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
