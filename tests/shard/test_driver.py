"""Who turns the reactor: the thread that waits, another one that waits longer, or the progress
thread when nobody does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from shard import ClosedError, Driver, ForkedError, Future
from tests.shard.lead import held_lead

PATIENCE_S = 20.0  # a test that waits longer has failed


def later(driver: Driver, future: Future, delay_s: float, value: object = None) -> None:
    """The reactor completes the future in so many seconds."""
    driver.reactor.call_soon(
        lambda: driver.reactor.call_later(delay_s, lambda: future.set_result(value))
    )


def in_threads(count: int, work: object) -> None:
    """Run work(number) in so many threads at once, to the end."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_the_thread_that_waits_turns_the_reactor_itself(driver: Driver) -> None:
    future = Future(driver)
    turned_by: list[int] = []

    def finish() -> None:
        turned_by.append(threading.get_ident())
        future.set_result("done")

    with held_lead(driver):  # neither this thread nor the progress thread turns it yet
        driver.reactor.call_soon(finish)
    assert future.result(PATIENCE_S) == "done"
    assert len(turned_by) == 1


def test_a_wait_ends_at_its_time_and_the_future_stays_pending(driver: Driver) -> None:
    future = Future(driver)
    assert not driver.wait(future, 0.02)
    with pytest.raises(TimeoutError, match=r"no result within 0\.01 s"):
        future.result(0.01)
    assert not future.done()
    assert not driver.wait(future, 0.0)
    future.set_result(1)
    assert driver.wait(future, 0.0)


def test_many_threads_wait_at_once_each_for_its_own(driver: Driver) -> None:
    def wait(number: int) -> None:
        for round_number in range(20):
            future = Future(driver)
            later(driver, future, 0.0005 * (number % 3), (number, round_number))
            assert future.result(PATIENCE_S) == (number, round_number)

    in_threads(8, wait)


def test_many_threads_wait_for_one_future(driver: Driver) -> None:
    future = Future(driver)
    later(driver, future, 0.05, "for all")

    def wait(number: int) -> None:
        assert future.result(PATIENCE_S) == "for all"

    in_threads(8, wait)


def test_a_short_wait_beside_a_long_one_ends_in_its_own_time(driver: Driver) -> None:
    long, ended = Future(driver), threading.Event()

    def wait_long() -> None:
        long.result(PATIENCE_S)
        ended.set()

    thread = threading.Thread(target=wait_long)
    thread.start()
    for _ in range(20):
        short = Future(driver)
        later(driver, short, 0.001, "short")
        assert short.result(PATIENCE_S) == "short"
        assert not driver.wait(Future(driver), 0.001)
    assert not ended.is_set()
    driver.reactor.call_soon(lambda: long.set_result(None))
    thread.join(PATIENCE_S)
    assert ended.is_set()


def test_without_anybody_waiting_the_progress_thread_turns(driver: Driver) -> None:
    done = threading.Event()
    names: list[str] = []

    def run() -> None:
        names.append(threading.current_thread().name)
        done.set()

    driver.reactor.call_soon(run)
    assert done.wait(PATIENCE_S)
    assert names == ["prpc-progress"]


def test_the_progress_thread_serves_timers_again_and_again(driver: Driver) -> None:
    done = threading.Event()
    left = [50]

    def run() -> None:
        left[0] -= 1
        if left[0]:
            driver.reactor.call_later(0.001, run)
        else:
            done.set()

    driver.take_over()
    driver.reactor.call_soon(run)
    assert done.wait(PATIENCE_S)


def test_the_progress_thread_hands_over_to_whoever_waits_and_takes_over_again(
    driver: Driver,
) -> None:
    driver.take_over()
    for _ in range(50):
        future = Future(driver)
        later(driver, future, 0.0005, 7)
        assert future.result(PATIENCE_S) == 7
        done = threading.Event()
        driver.reactor.call_soon(done.set)
        assert done.wait(PATIENCE_S)


def test_a_callback_may_wait_itself(driver: Driver) -> None:
    outer, inner = Future(driver), Future(driver)

    def handler() -> None:
        later(driver, inner, 0.005, "inner")
        outer.set_result(("outer", inner.result(PATIENCE_S)))

    driver.reactor.call_soon(handler)
    assert outer.result(PATIENCE_S) == ("outer", "inner")


def test_waits_nest_several_deep_beside_other_threads(driver: Driver) -> None:
    def descend(depth: int, done: Future) -> None:
        if depth:
            deeper = Future(driver)
            driver.reactor.call_soon(lambda: descend(depth - 1, deeper))
            done.set_result(1 + deeper.result(PATIENCE_S))
        else:
            done.set_result(0)

    def wait(number: int) -> None:
        future = Future(driver)
        driver.reactor.call_soon(lambda: descend(5, future))
        assert future.result(PATIENCE_S) == 5

    in_threads(3, wait)


def test_run_drives_for_a_time_and_then_returns(driver: Driver) -> None:
    turned_by: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    # the progress thread may be quicker, now and then
    while threading.get_ident() not in turned_by:
        assert time.monotonic() < deadline, "others turn, and run() does not"
        started = time.monotonic()
        driver.reactor.call_soon(lambda: turned_by.append(threading.get_ident()))
        driver.run(0.05)
        assert time.monotonic() - started >= 0.05


def test_run_ends_when_the_driver_is_closed(driver: Driver) -> None:
    thread = threading.Thread(target=driver.run, args=(None,))
    thread.start()
    turning = threading.Event()
    driver.reactor.call_soon(turning.set)
    assert turning.wait(PATIENCE_S)
    driver.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_close_ends_all_waits_with_closed_error(driver: Driver) -> None:
    waiting = threading.Barrier(5)
    errors: list[BaseException] = []

    def wait() -> None:
        waiting.wait(PATIENCE_S)
        try:
            Future(driver).result(PATIENCE_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    waiting.wait(PATIENCE_S)
    driver.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [ClosedError] * 4


def test_a_wait_after_close_says_closed_and_a_second_close_does_nothing(driver: Driver) -> None:
    driver.close()
    driver.close()
    with pytest.raises(ClosedError):
        Future(driver).result(1.0)
    done = Future(driver)
    done.set_result(3)
    assert done.result() == 3, "what is done can still be read"


class DoneMeanwhile:
    """A future that was done, and its driver closed, since its waiter looked."""

    looks = 0

    @property
    def finished(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def when_done(self, callback: Callable[[Any], object]) -> None:
        callback(self)

    def remove_done_callback(self, callback: object) -> None:
        """It was called at once."""


def test_what_ended_just_before_close_is_had(driver: Driver) -> None:
    driver.close()
    one, other = DoneMeanwhile(), DoneMeanwhile()
    assert driver.wait(one, PATIENCE_S)  # type: ignore[arg-type]
    with held_lead(driver):
        in_threads(1, lambda _: driver.wait(other, PATIENCE_S))  # type: ignore[arg-type]
    assert one.looks > 1
    assert other.looks > 1


def test_a_callback_may_close_the_driver(driver: Driver) -> None:
    ended = threading.Event()

    def close() -> None:
        driver.close()
        ended.set()

    driver.reactor.call_soon(close)
    assert ended.wait(PATIENCE_S)
    with pytest.raises(ClosedError):
        Future(driver).result(1.0)


def test_a_fork_is_refused_by_name_and_leaves_the_parent_alone(driver: Driver) -> None:
    with warnings.catch_warnings():
        # of Python 3.12: we have threads. That is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            Future(driver).result(1.0)
        except ForkedError as error:
            os._exit(0 if f"used in its fork {os.getpid()}" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    future = Future(driver)
    later(driver, future, 0.001, "parent")
    assert future.result(PATIENCE_S) == "parent"


def test_an_idle_driver_parks() -> None:
    driver = Driver(polling=False)
    deadline = time.monotonic() + PATIENCE_S
    while not driver.reactor.parks:
        assert time.monotonic() < deadline, "it turns for ever"
        driver.wait(Future(driver), 0.01)
    driver.close()


def test_run_ends_when_it_is_told_to_by_another_thread(driver: Driver) -> None:
    driver.reactor.call_soon(lambda: threading.Thread(target=driver.stop_running).start())
    started = time.monotonic()
    driver.run(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S


def test_a_stop_that_comes_before_run_is_not_lost_and_ends_one_run_only(driver: Driver) -> None:
    driver.stop_running()
    driver.run(None)
    started = time.monotonic()
    driver.run(0.05)
    assert time.monotonic() - started >= 0.05


def test_a_future_that_another_thread_completes_ends_the_wait_at_once() -> None:
    driver = Driver(polling=False)
    try:
        for _ in range(3):
            future = Future(driver)

            def complete(future: Future = future) -> None:
                deadline = time.monotonic() + PATIENCE_S
                while not driver.reactor.parked and time.monotonic() < deadline:
                    time.sleep(0)
                future.set_result("from outside")

            thread = threading.Thread(target=complete)
            thread.start()
            assert future.result(2 * PATIENCE_S) == "from outside"
            thread.join(PATIENCE_S)
        assert driver.reactor.wakeups, "it was woken, and did not sleep its whole time"
    finally:
        driver.close()


class Counted(Future):
    """How many entries are at it, and how many were at a time and in all."""

    entries: int = 0
    most: int = 0
    added: int = 0

    def when_done(self, callback: Callable[[Future], object]) -> None:
        self.entries += 1
        self.added += 1
        self.most = max(self.most, self.entries)
        Future.when_done(self, callback)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.entries -= 1
        Future.remove_done_callback(self, callback)


def test_a_long_wait_beside_another_leaves_one_entry_at_its_future(driver: Driver) -> None:
    first, second, leads = Future(driver), Counted(driver), threading.Event()

    def end_after_ten_rounds() -> None:
        if second.added < 10:
            driver.reactor.call_later(0.001, end_after_ten_rounds)
        else:
            first.set_result(None)
            second.set_result(None)

    driver.reactor.call_soon(end_after_ten_rounds)
    driver.reactor.call_soon(leads.set)
    leader = threading.Thread(target=first.result, args=(PATIENCE_S,))
    leader.start()
    assert leads.wait(PATIENCE_S)
    second.result(PATIENCE_S)
    leader.join(PATIENCE_S)
    assert second.most <= 1, "one for each round would be a GiB in some hours"


def test_waits_that_are_given_up_leave_nothing_at_the_future() -> None:
    driver = Driver(polling=False)
    future = Counted(driver)
    deadline = time.monotonic() + PATIENCE_S
    while driver.reactor.parks < 20:
        assert time.monotonic() < deadline
        driver.wait(future, 0.002)
    assert future.added
    assert not future.entries
    driver.close()


def test_an_exit_in_a_callback_does_not_end_the_progress_thread(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    driver.reactor.call_soon(sys.exit)
    driver.reactor.call_soon(lambda: driver.reactor.call_soon(goes_on.set))
    assert goes_on.wait(PATIENCE_S)
    assert "the reactor's turn failed" in caplog.text


def test_spares_end_though_one_of_them_had_the_lead_when_there_was_no_more_to_do() -> None:
    """A thread that nobody wants back would be the one that leads for good."""
    driver = Driver(polling=False)
    driver.take_over()
    answers, waiting = [Future(driver) for _ in range(8)], threading.Semaphore(0)
    ended = threading.Semaphore(0)

    def handle(answer: Future) -> None:
        waiting.release()
        driver.wait(answer, PATIENCE_S)
        ended.release()

    for answer in answers:
        driver.call_in_engine(lambda answer=answer: handle(answer))  # type: ignore[misc]
        assert waiting.acquire(timeout=PATIENCE_S)
    for answer in answers:
        later(driver, answer, 0.0)
    driver.reactor.wake()
    for _ in answers:
        assert ended.acquire(timeout=PATIENCE_S)
    for _ in range(20):  # who has idled for longest leads after each of these waits
        future = Future(driver)
        later(driver, future, 0.005)
        driver.reactor.wake()
        assert driver.wait(future, PATIENCE_S)
    spares = [one for one in threading.enumerate() if one.name.endswith("-spare")]
    assert spares
    for spare in spares:
        spare.join(PATIENCE_S)
    assert not any(spare.is_alive() for spare in spares)
    future = Future(driver)
    later(driver, future, 0.0)
    driver.reactor.wake()
    assert driver.wait(future, PATIENCE_S)
    driver.close()
