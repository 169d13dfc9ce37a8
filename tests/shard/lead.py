"""Keeping everybody else from turning a driver's reactor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shard import Driver
from tests.program import wait_until


@contextlib.contextmanager
def held_lead(driver: Driver) -> Iterator[None]:
    """This thread leads inside, as one that turns the reactor itself does: no other can. The
    progress thread may be on duty already, and gives the lead up to those alone who ask for it.
    """

    def has_lead() -> bool:
        driver.ask_for_lead()
        return driver.try_lead()

    wait_until(has_lead, "the giving up of the lead")
    try:
        yield
    finally:
        driver.stop_leading()


@contextlib.contextmanager
def no_lead(driver: Driver) -> Iterator[None]:
    """Nobody leads inside, this thread neither, and nobody can begin to."""

    def is_kept() -> bool:
        driver.ask_for_lead()
        return driver._lead.acquire(False)

    wait_until(is_kept, "the giving up of the lead")
    try:
        yield
    finally:
        driver._lead.release()
