"""Keeping everybody else from turning a driver's reactor."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from shard import Driver

PATIENCE_S = 20.0


@contextlib.contextmanager
def held_lead(driver: Driver) -> Iterator[None]:
    """Nobody leads inside. The progress thread may be on duty already, and gives the lead up to those alone who ask for it."""
    deadline = time.monotonic() + PATIENCE_S
    while not driver._lead.acquire(False):
        assert time.monotonic() < deadline, "the lead is not given up"
        driver.ask_for_lead()
        os.sched_yield()
    try:
        yield
    finally:
        driver._lead.release()
