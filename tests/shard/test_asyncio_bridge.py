"""A reactor as a guest of asyncio loops: who turns it, who may take the lead from a loop, and what
a loop leaves behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shard import ClosedError, Driver, ForkedError, Future
from shard.loop import driver as driver_module
from shard.loop.asyncio_bridge import AsyncioBridge
from tests.shard.lead import held_lead

PATIENCE_S = 20.0  # a test that waits longer has failed


def within(work: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    return asyncio.wait_for(work, PATIENCE_S)


def later(driver: Driver, future: Future, delay_s: float, value: object = None) -> Future:
    """The reactor completes the future in so many seconds."""
    driver.reactor.call_soon(
        lambda: driver.reactor.call_later(delay_s, lambda: future.set_result(value))
    )
    return future


def soon(driver: Driver, value: object = None) -> Future:
    """A future that the reactor's next turn completes."""
    future = Future(driver)
    driver.reactor.call_soon(lambda: future.set_result(value))
    return future


async def value_of(future: Future) -> Any:
    return await future


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def late_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this thread lacks a core, the progress thread does not step in."""
    monkeypatch.setattr(driver_module, "STANDBY_S", 2 * PATIENCE_S)


def test_the_loop_that_awaits_turns_the_reactor_itself(
    late_progress: None, driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    turned_by: set[int] = set()

    async def work() -> None:
        for delay_s in (0.0, 0.0, 0.001, 0.002):
            future = Future(driver)

            def finish(future: Future = future) -> None:
                turned_by.add(threading.get_ident())
                future.set_result(None)

            driver.reactor.call_soon(
                lambda delay_s=delay_s, finish=finish: driver.reactor.call_later(delay_s, finish)
            )
            await future

    loop.run_until_complete(within(work()))
    assert turned_by == {threading.get_ident()}


def test_what_a_spin_finds_costs_no_round_of_the_loop(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> list[str]:
        order: list[str] = []
        loop.call_soon(order.append, "round")
        await soon(driver)
        order.append("answer")
        await asyncio.sleep(0)
        return order

    deadline = time.monotonic() + PATIENCE_S
    # the progress thread may be on duty, now and then
    while loop.run_until_complete(within(work())) != ["answer", "round"]:
        assert time.monotonic() < deadline, "each answer took a round of the loop"


def test_answers_that_come_at_once_for_ever_do_not_starve_the_loop(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> int:
        rounds = 0
        over = asyncio.Event()
        loop.call_later(0.01, over.set)
        while not over.is_set():
            await soon(driver)
            rounds += 1
        return rounds

    assert loop.run_until_complete(within(work())) > 0


def test_a_thousand_awaits_at_once_all_end(driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> list[int]:
        futures = [
            later(driver, Future(driver), 0.0001 * (number % 7), number) for number in range(1000)
        ]
        return await asyncio.gather(*(value_of(future) for future in futures))

    assert loop.run_until_complete(within(work())) == list(range(1000))


def test_errors_are_raised_where_they_are_awaited(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> None:
        future = Future(driver)
        driver.reactor.call_soon(lambda: future.set_error(KeyError("lost")))
        await future

    with pytest.raises(KeyError, match="lost"):
        loop.run_until_complete(within(work()))


def test_a_loop_that_waits_rests(loop: asyncio.AbstractEventLoop) -> None:
    driver = Driver(polling=False)

    async def work() -> tuple[int, int]:
        await soon(driver)
        pending = loop.create_task(value_of(later(driver, Future(driver), 0.3)))
        while not driver.reactor.parked:  # or peers would not know that they have to ring
            await asyncio.sleep(0.001)
        before = driver.reactor.turns
        await pending
        return before, driver.reactor.turns

    with contextlib.closing(driver):
        before, after = loop.run_until_complete(within(work()))
    assert after - before < 1000, "one that polls makes tens of thousands in that time"


def test_another_thread_wakes_a_loop_that_rests(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> None:
        for number in range(50):
            future = Future(driver)
            task = loop.create_task(value_of(future))
            await asyncio.sleep(0.0005 * (number % 3))
            thread = in_thread(
                lambda future=future: driver.reactor.call_soon(lambda: future.set_result(None))
            )
            await task
            thread.join(PATIENCE_S)

    loop.run_until_complete(within(work()))


def test_a_coroutine_may_block_on_a_future_of_the_same_reactor(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> list[Any]:
        beside = loop.create_task(value_of(later(driver, Future(driver), 0.02, "awaited")))
        await asyncio.sleep(0)
        blocked = [
            later(driver, Future(driver), 0.001, number).result(PATIENCE_S) for number in range(5)
        ]
        return [*blocked, await beside]

    assert loop.run_until_complete(within(work())) == [0, 1, 2, 3, 4, "awaited"]


def test_threads_block_while_a_loop_awaits(driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
    def block() -> None:
        for number in range(50):
            assert (
                later(driver, Future(driver), 0.0002 * (number % 3), number).result(PATIENCE_S)
                == number
            )

    async def work() -> None:
        pending = loop.create_task(value_of(later(driver, Future(driver), 0.05)))
        blocking = [loop.run_in_executor(None, block) for _ in range(3)]
        for number in range(50):
            assert await later(driver, Future(driver), 0.0002 * (number % 3), number) == number
        await asyncio.gather(*blocking)
        await pending

    loop.run_until_complete(within(work()))


def test_a_loop_that_is_busy_does_not_keep_others_waiting(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    async def work() -> None:
        pending = loop.create_task(value_of(later(driver, Future(driver), 0.02)))
        await asyncio.sleep(0.005)
        answered = threading.Event()
        thread = in_thread(lambda: (soon(driver).result(PATIENCE_S), answered.set()))
        assert answered.wait(PATIENCE_S), "a thread that waits leads itself"
        thread.join(PATIENCE_S)
        served = threading.Event()
        driver.reactor.call_soon(served.set)
        assert served.wait(PATIENCE_S), "with nobody waiting the progress thread steps in"
        await pending

    loop.run_until_complete(within(work()))


def test_a_loop_that_was_stopped_goes_on_where_it_was(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    future = Future(driver)
    task = loop.create_task(within(value_of(future)))
    loop.run_until_complete(asyncio.sleep(0.01))
    served = threading.Event()
    driver.reactor.call_soon(served.set)
    assert served.wait(PATIENCE_S), "the loop does not run: the progress thread does it"
    assert soon(driver, 3).result(PATIENCE_S) == 3
    driver.reactor.call_soon(lambda: future.set_result("late"))
    assert loop.run_until_complete(task) == "late"


def test_a_loop_closed_with_awaits_pending_leaves_the_driver_usable(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    future = Future(driver)
    task = loop.create_task(value_of(future))
    loop.run_until_complete(asyncio.sleep(0.005))
    loop.close()
    assert soon(driver, 5).result(PATIENCE_S) == 5
    driver.reactor.call_soon(lambda: future.set_result("nobody awaits any more"))
    assert future.result(PATIENCE_S)
    assert asyncio.run(within(value_of(soon(driver, 6)))) == 6
    task._log_destroy_pending = False  # that it never ended is the point


def test_loop_after_loop_can_await_and_none_of_them_stays(driver: Driver) -> None:
    def bridges() -> int:
        gc.collect()
        return sum(isinstance(one, AsyncioBridge) for one in gc.get_objects())

    before = bridges()
    for number in range(30):
        assert (
            asyncio.run(within(value_of(later(driver, Future(driver), 0.0005, number)))) == number
        )
    assert bridges() <= before + 2


def test_loops_of_several_threads_await_at_once(driver: Driver) -> None:
    async def work() -> None:
        for number in range(100):
            assert await later(driver, Future(driver), 0.0003 * (number % 3), number) == number

    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(within(work()))
        except BaseException as error:
            failures.append(error)

    threads = [in_thread(run) for _ in range(4)]
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not failures


def test_a_loop_may_run_inside_a_callback_of_the_reactor(driver: Driver) -> None:
    outer = Future(driver)

    def handler() -> None:
        outer.set_result(
            asyncio.run(within(value_of(later(driver, Future(driver), 0.002, "inner"))))
        )

    driver.reactor.call_soon(handler)
    assert outer.result(PATIENCE_S) == "inner"


def test_a_cancelled_wait_leaves_a_plain_future_alone_and_tells_one_that_wants_to_know(
    driver: Driver, loop: asyncio.AbstractEventLoop
) -> None:
    class Told(Future):
        def cancel(self, error: BaseException | None = None) -> bool:
            return Future.cancel(self, error)

    async def give_up(future: Future) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(value_of(future), 0.005)

    plain, told = Future(driver), Told(driver)
    loop.run_until_complete(within(give_up(plain)))
    loop.run_until_complete(within(give_up(told)))
    assert not plain.done()
    assert told.done()
    plain.set_result(None)


def test_an_interrupt_inside_a_turn_ends_the_loop_and_nothing_else(driver: Driver) -> None:
    future = Future(driver)

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, driver.reactor.call_soon, interrupt)
        await future

    with held_lead(driver), pytest.raises(KeyboardInterrupt):
        # as in a handler: no other thread may run the callback
        asyncio.run(within(work()))
    assert soon(driver, 1).result(PATIENCE_S) == 1
    future.set_result(None)


def test_a_closed_driver_refuses_and_its_loop_forgets_its_descriptor(
    loop: asyncio.AbstractEventLoop,
) -> None:
    driver = Driver(polling=False)

    async def work() -> None:
        task = loop.create_task(value_of(later(driver, Future(driver), 0.01)))
        await asyncio.sleep(0)
        await task
        await loop.run_in_executor(None, driver.close)
        with pytest.raises(ClosedError):
            await Future(driver)
        pairs = [socket.socketpair() for _ in range(8)]  # whose numbers are those that were closed
        for ours, theirs in pairs:
            arrived = asyncio.Event()
            loop.add_reader(ours.fileno(), arrived.set)
            theirs.send(b"x")
            await arrived.wait()
            loop.remove_reader(ours.fileno())
            ours.close()
            theirs.close()

    loop.run_until_complete(within(work()))


def test_a_loop_that_is_new_at_the_very_moment_of_the_close_is_told_of_it(
    loop: asyncio.AbstractEventLoop,
) -> None:
    driver = Driver(polling=False)
    check = driver._check_usable

    def check_and_close() -> None:
        check()
        in_thread(driver.close).join(PATIENCE_S)

    driver._check_usable = check_and_close  # type: ignore[method-assign]
    with pytest.raises(ClosedError):
        loop.run_until_complete(within(value_of(Future(driver))))


def test_an_await_in_a_fork_is_refused(driver: Driver) -> None:
    with warnings.catch_warnings():
        # of Python 3.12: we have threads. That is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            asyncio.run(value_of(Future(driver)))
        except ForkedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(within(value_of(soon(driver, "parent")))) == "parent"
