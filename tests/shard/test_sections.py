"""Handlers that need not be waited for: what one does in a section may run beside others, if it
takes long.
"""

from __future__ import annotations

import threading

import pytest

from shard import Driver, Future

PATIENCE_S = 20.0


def in_section(driver: Driver, work: object) -> Future:
    """Work in a section of a handler; what the future brings: whether others led meanwhile."""
    done = Future(driver)

    def handler() -> None:
        section = driver.sections.enter()
        try:
            work()  # type: ignore[operator]
        finally:
            overtaken = driver.sections.leave(section)
            done.set_result(overtaken)

    driver.call_in_engine(handler)
    return done


def test_a_quick_section_is_an_ordinary_handler(driver: Driver) -> None:
    ran_in: list[str] = []
    done = in_section(driver, lambda: ran_in.append(threading.current_thread().name))
    assert done.result(PATIENCE_S) is False
    assert ran_in == ["prpc-progress"] or ran_in == ["prpc-progress-spare"]


def test_a_section_that_waits_for_another_handler_is_overtaken_by_it(driver: Driver) -> None:
    set_by_other = threading.Event()
    done = in_section(driver, lambda: set_by_other.wait(PATIENCE_S))
    driver.call_in_engine(set_by_other.set)
    assert done.result(PATIENCE_S) is True
    assert set_by_other.is_set()


def test_many_sections_block_at_once_and_others_go_on_meanwhile(driver: Driver) -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        begun.release()
        release.wait(PATIENCE_S)

    blocked = [in_section(driver, block) for _ in range(5)]
    for _ in blocked:
        assert begun.acquire(timeout=PATIENCE_S)
    answer = Future(driver)
    driver.call_in_engine(lambda: answer.set_result("meanwhile"))
    assert answer.result(PATIENCE_S) == "meanwhile"
    release.set()
    for done in blocked:
        # all but the last had to be left behind for that
        assert done.result(PATIENCE_S) in (True, False)
    assert driver.leads_here() is False


def test_one_that_was_overtaken_leads_again_before_it_goes_on(driver: Driver) -> None:
    release = threading.Event()
    leads: list[bool] = []
    done = Future(driver)

    def handler() -> None:
        section = driver.sections.enter()
        release.wait(PATIENCE_S)
        assert driver.sections.leave(section)
        leads.append(driver.leads_here())
        done.set_result(None)

    driver.call_in_engine(handler)
    other = Future(driver)
    driver.call_in_engine(lambda: other.set_result(None))
    other.result(PATIENCE_S)
    release.set()
    done.result(PATIENCE_S)
    assert leads == [True]


def test_a_section_may_wait_for_futures_before_and_after_it_is_overtaken(driver: Driver) -> None:
    other = threading.Event()
    seen: list[int] = []

    def later(value: int) -> Future:
        future = Future(driver)
        driver.reactor.call_soon(
            lambda: driver.reactor.call_later(0.001, lambda: future.set_result(value))
        )
        return future

    def work() -> None:
        seen.append(later(1).result(PATIENCE_S))
        driver.call_in_engine(other.set)
        other.wait(PATIENCE_S)
        seen.append(later(2).result(PATIENCE_S))
        seen.append(later(3).result(PATIENCE_S))

    assert in_section(driver, work).result(PATIENCE_S) is True
    assert seen == [1, 2, 3]


def test_what_a_section_raises_comes_out_after_it_leads_again(driver: Driver) -> None:
    other = threading.Event()
    caught: list[tuple[str, bool]] = []
    done = Future(driver)

    def handler() -> None:
        try:
            section = driver.sections.enter()
            try:
                other.wait(PATIENCE_S)
                raise KeyError("its own")
            finally:
                driver.sections.leave(section)
        except KeyError as error:
            caught.append((error.args[0], driver.leads_here()))
        done.set_result(None)

    driver.call_in_engine(handler)
    driver.call_in_engine(other.set)
    done.result(PATIENCE_S)
    assert caught == [("its own", True)]


def test_who_leads_in_a_section_is_not_overtaken_any_more_once_it_asked(driver: Driver) -> None:
    """leads_here() is asked by those who go on as the leader: closing, a loop of asyncio's."""
    release, asked = threading.Event(), threading.Event()

    def work() -> None:
        assert driver.leads_here()
        asked.set()
        release.wait(PATIENCE_S)

    done = in_section(driver, work)
    assert asked.wait(PATIENCE_S)
    answer = Future(driver)
    driver.call_in_engine(lambda: answer.set_result(None))
    for _ in range(3):
        driver.sections.look()  # as the watchdog does
    assert not answer.done()
    release.set()
    assert done.result(PATIENCE_S) is False
    answer.result(PATIENCE_S)


def test_elsewhere_than_in_a_handler_a_section_changes_nothing(driver: Driver) -> None:
    section = driver.sections.enter()
    assert driver.sections.leave(section) is False
    assert in_section(driver, lambda: None).result(PATIENCE_S) is False


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_driver_can_be_closed_while_a_section_runs(overtaken: bool) -> None:
    driver = Driver(polling=False)
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(PATIENCE_S)

    in_section(driver, work)
    assert begun.wait(PATIENCE_S)
    if overtaken:
        other = Future(driver)
        driver.call_in_engine(lambda: other.set_result(None))
        other.result(PATIENCE_S)
    threading.Timer(0.05, release.set).start()
    driver.close()
    assert driver.closing
