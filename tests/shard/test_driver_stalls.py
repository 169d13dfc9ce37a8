"""A driver names the handler that keeps the thread that leads, whichever that is; and nobody, when
nobody leads.
"""

from __future__ import annotations

import math
import threading
import time

import pytest

from shard import Driver, Future
from tests.program import wait_until
from tests.shard.lead import no_lead

PATIENCE_S = 20.0


def blocks(release: threading.Event) -> None:
    release.wait(PATIENCE_S)


@pytest.mark.parametrize("leader", ["the progress thread", "a thread that waits"])
def test_a_handler_that_blocks_is_named_whoever_leads(
    leader: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(polling=False, stall_budget_s=0.02)
    release = threading.Event()
    done = Future(driver)

    def handler() -> None:
        blocks(release)
        done.set_result(None)

    driver.reactor.call_soon(handler)
    thread = threading.Thread(target=done.result, args=(PATIENCE_S,))
    if leader == "a thread that waits":
        thread.start()
    wait_until(lambda: "has held the reactor" in caplog.text)
    release.set()
    done.result(PATIENCE_S)
    wait_until(lambda: "let the reactor go on after" in caplog.text)
    driver.close()
    if thread.ident is not None:
        thread.join(PATIENCE_S)
    assert driver.watchdog.stalls == 1
    first = next(line for line in caplog.text.splitlines() if "has held the reactor" in line)
    assert "handler" in first
    assert "test_driver_stalls.py:" in first
    assert "prpc (pid " in first
    assert caplog.text.count("let the reactor go on after") == 1


def test_a_handler_that_waits_by_turning_the_reactor_is_no_stall() -> None:
    driver = Driver(polling=False, stall_budget_s=3600.0)
    # it looks when the handler says: after one of its own in between, the next, hours on, finds a
    # stall
    driver.watchdog.close()
    done = Future(driver)

    def handler() -> None:
        for hours in range(1, 10):
            driver.watchdog.look(time.monotonic() + 3600.0 * hours)
            inner = Future(driver)
            driver.reactor.call_soon(lambda future=inner: future.set_result(None))
            inner.result(PATIENCE_S)
        done.set_result(driver.watchdog.stalls)

    driver.reactor.call_soon(handler)
    assert done.result(PATIENCE_S) == 0
    driver.close()


def test_nobody_leading_is_no_stall_however_long_it_lasts() -> None:
    driver = Driver(polling=False, stall_budget_s=3600.0)
    with no_lead(driver):  # and nobody can
        for hours in range(1, 10):
            driver.watchdog.look(time.monotonic() + 3600.0 * hours)
    assert driver.watchdog.stalls == 0
    driver.close()


def test_it_can_be_switched_off() -> None:
    driver = Driver(polling=False, name="unwatched", stall_budget_s=math.inf)
    assert not any(thread.name.startswith("unwatched (pid") for thread in threading.enumerate())
    driver.close()


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a stall budget of 0\.0 s"):
        Driver(polling=False, stall_budget_s=0.0)
