"""Where an application's callbacks of futures run: in an engine thread, as handlers do."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import functools
import logging
import os
import queue
import sys
import threading
from typing import Any

import numpy as np
import pytest

from shard import (
    CancelledError,
    ClosedError,
    Driver,
    Future,
    Reactor,
    ShardGroup,
    Task,
    gather,
    shield,
)
from tests.helpers import ManualClock
from tests.program import wait_until
from tests.shard.lead import held_lead
from tests.shard.processes import in_fork

PATIENCE_S = 20.0
variable = contextvars.ContextVar("variable", default="none")


def fetched(driver: Driver) -> Future:
    """One that whoever leads next completes: the thread that waits for it, as others may not."""
    future = Future(driver)
    driver.reactor.call_soon(lambda: future.set_result("fetched"))
    return future


class Heard:
    """Callbacks that note where they ran, and what they were called with."""

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver
        self._there: queue.SimpleQueue[tuple[str, bool, object]] = queue.SimpleQueue()

    def __call__(self, future: Future) -> None:
        leads = self._driver is not None and self._driver.leads_here()
        self._there.put((threading.current_thread().name, leads, future.error() or future.result()))

    def next(self) -> tuple[str, bool, object]:
        """The name of its thread, whether that led, and the value or error."""
        return self._there.get(timeout=PATIENCE_S)

    @property
    def is_empty(self) -> bool:
        return self._there.empty()


# -- which thread ----------------------------------------------------------------------------------


def test_a_callback_runs_in_an_engine_thread_that_leads_and_not_in_the_one_that_waits(
    driver: Driver,
) -> None:
    heard = Heard(driver)
    for _ in range(100):
        with held_lead(driver):
            future = fetched(driver)
            future.add_done_callback(heard)
        assert future.result(PATIENCE_S) == "fetched"
        name, leads, value = heard.next()
        assert (leads, value) == (True, "fetched")
        assert name.startswith("prpc-progress")


def test_a_callback_may_take_a_lock_that_the_waiting_thread_holds(driver: Driver) -> None:
    lock, entered = threading.Lock(), threading.Event()
    heard = Heard()

    def take(future: Future) -> None:
        entered.set()
        with lock:
            heard(future)

    for _ in range(20):
        entered.clear()
        with lock:
            with held_lead(driver):
                future = fetched(driver)
                future.add_done_callback(take)
            assert future.result(PATIENCE_S) == "fetched"
            assert entered.wait(PATIENCE_S)
            assert heard.is_empty
            # It keeps the reactor, as a handler that blocks does, and no wait longer than that.
            assert not driver.wait(Future(driver), 0.001)
        assert heard.next()[2] == "fetched"


def test_a_callback_runs_in_the_thread_that_runs(driver: Driver) -> None:
    heard, name = Heard(driver), ""
    thread = threading.Thread(target=driver.run, args=(None,), name="running")
    thread.start()
    try:
        while name != "running":  # the progress thread may be quicker, now and then
            future = Future(driver)
            future.add_done_callback(heard)
            future.set_result(1)
            name, leads, _ = heard.next()
            assert leads
    finally:
        driver.stop_running()
        thread.join(PATIENCE_S)


def test_a_callback_runs_in_the_loop_of_asyncio_that_awaits(driver: Driver) -> None:
    heard = Heard(driver)

    async def work() -> set[str]:
        names = set()
        for _ in range(50):
            future = fetched(driver)
            future.add_done_callback(heard)
            assert await future == "fetched"
            while heard.is_empty:
                await asyncio.sleep(0)
            names.add(heard.next()[0])
        return names

    names = asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
    assert threading.current_thread().name in names


def test_it_comes_although_nobody_waits_or_leads(driver: Driver) -> None:
    heard = Heard(driver)
    for number in range(100):
        future = Future(driver)
        future.add_done_callback(heard)
        future.set_result(number)  # in this thread, which is none of the engine's
        name, leads, value = heard.next()
        assert (leads, value) == (True, number)
        assert name != threading.current_thread().name


def test_a_callback_of_a_future_that_is_done_already_runs_there_too(driver: Driver) -> None:
    """Whether it is done is chance, so a lock held here must not decide either."""
    heard, lock = Heard(driver), threading.Lock()
    future = Future(driver)
    future.set_result(1)

    def take(done: Future) -> None:
        with lock:
            heard(done)

    with lock:
        future.add_done_callback(take)
        assert heard.is_empty
    name, leads, _ = heard.next()
    assert leads
    assert name != threading.current_thread().name


def test_callbacks_of_what_is_gathered_or_shielded_run_there_too(driver: Driver) -> None:
    heard = Heard(driver)
    for combine in (lambda parts: gather(parts), lambda parts: shield(parts[0])):
        with held_lead(driver):
            parts = [fetched(driver) for _ in range(3)]
            whole = combine(parts)
            whole.add_done_callback(heard)
        whole.result(PATIENCE_S)
        name, leads, _ = heard.next()
        assert leads
        assert name != threading.current_thread().name


def test_a_callback_of_a_task_does_not_run_inside_its_last_step() -> None:
    reactor = Reactor(ManualClock())
    steps: list[str] = []

    async def work() -> None:
        steps.append("step")

    async def watch() -> None:
        reactor.spawn(work()).add_done_callback(lambda _: steps.append("callback"))
        steps.append("goes on")

    reactor.spawn(watch())
    reactor.poll(reactor.clock())
    assert steps == ["step", "goes on", "callback"]
    reactor.close()


def test_a_future_without_a_reactor_calls_back_in_the_thread_that_completes_it() -> None:
    heard, future = Heard(), Future()
    future.add_done_callback(heard)
    thread = threading.Thread(target=future.set_result, args=(1,), name="completing")
    thread.start()
    thread.join(PATIENCE_S)
    assert heard.next() == ("completing", False, 1)
    future.add_done_callback(heard)
    assert not heard.is_empty


# -- what it may do --------------------------------------------------------------------------------


def test_each_callback_has_a_context_of_its_own(driver: Driver) -> None:
    seen: queue.SimpleQueue[tuple[object, ...]] = queue.SimpleQueue()

    def look(_: Future) -> None:
        seen.put(
            (
                variable.get(),
                decimal.getcontext().prec,
                np.geterr()["divide"],
                sys.exc_info()[0],
            )
        )
        variable.set("of a callback")
        decimal.getcontext().prec = 9

    usual = ("none", decimal.DefaultContext.prec, np.geterr()["divide"], None)
    variable.set("of who waits")
    with decimal.localcontext() as context, np.errstate(divide="raise"):
        context.prec = 3
        try:
            raise ValueError("a secret")
        except ValueError:
            for future in (fetched(driver), Future()):
                future.add_done_callback(look)
                future.add_done_callback(look)
                future.set_result(None)
                future.result(PATIENCE_S)
                first, second = (seen.get(timeout=PATIENCE_S) for _ in range(2))
                assert first[:3] == second[:3] == usual[:3]
                if future.waiter is not None:
                    assert first == second == usual
    assert decimal.getcontext().prec == decimal.DefaultContext.prec


def test_a_callback_may_wait_and_others_run_meanwhile(driver: Driver) -> None:
    go_on = Future(driver)
    heard, waited = Heard(driver), Heard(driver)

    def wait(_: Future) -> None:
        go_on.add_done_callback(waited)
        go_on.result(PATIENCE_S)
        waited(go_on)

    slow = [Future(driver) for _ in range(5)]
    for future in slow:
        future.add_done_callback(wait)
        future.set_result(None)
    for number in range(20):
        other = fetched(driver)
        other.add_done_callback(heard)
        assert other.result(PATIENCE_S) == "fetched"
        assert heard.next()[1:] == (True, "fetched"), number
    go_on.set_result("gone on")
    assert [waited.next()[1:] for _ in range(10)] == [(True, "gone on")] * 10


def test_callbacks_begin_in_the_order_in_which_they_were_added(driver: Driver) -> None:
    for _ in range(50):
        order: queue.SimpleQueue[int] = queue.SimpleQueue()
        put = order.put
        with held_lead(driver):
            future = fetched(driver)
            for number in range(10):
                future.add_done_callback(lambda _, n=number, put=put: put(n))  # type: ignore[misc]
        future.result(PATIENCE_S)
        for number in range(10, 20):
            future.add_done_callback(lambda _, n=number, put=put: put(n))  # type: ignore[misc]
        assert [order.get(timeout=PATIENCE_S) for _ in range(20)] == list(range(20))


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt, CancelledError])
def test_what_a_callback_raises_is_logged_and_nothing_else_ends(
    driver: Driver, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    heard = Heard(driver)

    def broken(_: Future) -> None:
        raise kind("oh")

    future = Future(driver)
    with caplog.at_level(logging.ERROR, "shard"):
        future.add_done_callback(broken)
        future.add_done_callback(heard)
        future.set_result(1)
        assert heard.next()[1:] == (True, 1)
        future.add_done_callback(heard)
        assert heard.next()[1:] == (True, 1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "broken" in caplog.text
    assert f"{kind.__name__}: oh" in caplog.text


def test_a_callback_that_was_taken_back_is_not_called(driver: Driver) -> None:
    heard, kept = Heard(driver), Heard(driver)
    for future in (Future(driver), Future()):
        future.add_done_callback(heard)
        future.add_done_callback(kept)
        future.remove_done_callback(heard)
        future.remove_done_callback(heard)
        future.set_result(1)
        assert kept.next()[2] == 1
    assert heard.is_empty


def test_a_callback_of_a_task_may_be_given_a_context() -> None:
    reactor, context = Reactor(ManualClock()), contextvars.Context()
    seen: list[str] = []
    context.run(variable.set, "given")

    async def work() -> None:
        """Nothing to do."""

    task: Task = reactor.spawn(work())
    task.add_done_callback(lambda _: seen.append(variable.get()), context=context)
    task.add_done_callback(lambda _: seen.append(variable.get()))
    reactor.poll(reactor.clock())
    assert seen == ["given", "none"]
    reactor.close()


# -- the end ---------------------------------------------------------------------------------------


def test_after_close_a_callback_runs_in_the_thread_that_completes_the_future() -> None:
    driver, heard = Driver(polling=False), Heard()
    future = Future(driver)
    future.add_done_callback(heard)
    driver.close()
    future.set_result(1)
    assert heard.next() == (threading.current_thread().name, False, 1)
    future.add_done_callback(heard)
    assert heard.next() == (threading.current_thread().name, False, 1)


def test_what_had_not_begun_by_close_runs_in_an_engine_thread_before_close_returns() -> None:
    for _ in range(20):
        driver = Driver(polling=False)
        heard, lock = Heard(driver), threading.Lock()
        with held_lead(driver):  # nobody else can run any
            futures = [Future(driver) for _ in range(5)]
            for number, future in enumerate(futures):
                future.add_done_callback(heard)
                future.set_result(number)
            closing = threading.Thread(target=driver.close, name="closing")
            closing.start()
            wait_until(lambda driver=driver: driver.closing, "close()")
        with lock:
            closing.join(PATIENCE_S)
        found = [heard.next() for _ in futures]
        assert [value for _, _, value in found] == list(range(5))
        assert {name for name, _, _ in found} == {"prpc-progress"}


def test_callbacks_of_what_ends_in_the_middle_of_close_are_called_once() -> None:
    for _ in range(50):
        driver = Driver(polling=False)
        called: list[int] = []
        futures = [Future(driver) for _ in range(200)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, n=number, called=called: called.append(n))  # type: ignore[misc]
        begun = threading.Event()

        def complete(futures: list[Future] = futures, begun: threading.Event = begun) -> None:
            for number, future in enumerate(futures):
                future.set_result(None)
                if number == 20:
                    begun.set()

        completing = threading.Thread(target=complete)
        completing.start()
        begun.wait(PATIENCE_S)
        driver.close()
        completing.join(PATIENCE_S)
        assert sorted(called) == list(range(200))


def test_a_callback_may_close_its_driver_and_those_after_it_are_called_all_the_same() -> None:
    driver, heard = Driver(polling=False), Heard()
    future = Future(driver)
    future.add_done_callback(lambda _: driver.close())
    future.add_done_callback(heard)
    future.set_result(1)
    assert heard.next()[2] == 1
    with pytest.raises(ClosedError):
        Future(driver).result(PATIENCE_S)


def test_a_callback_that_waits_for_ever_holds_up_close_for_a_bounded_time() -> None:
    driver, let_go, entered = Driver(polling=False), threading.Event(), threading.Event()

    def block(_: Future) -> None:
        entered.set()
        let_go.wait(PATIENCE_S)

    future = Future(driver)
    future.add_done_callback(block)
    future.set_result(None)
    assert entered.wait(PATIENCE_S)
    driver.close(timeout_s=0.05)
    assert not let_go.is_set()
    let_go.set()


def test_a_reactor_that_is_closed_calls_back_what_is_left() -> None:
    reactor, called = Reactor(ManualClock()), list[object]()

    async def work() -> str:
        return "done"

    reactor.spawn(work()).add_done_callback(lambda task: called.append(task.result()))
    assert not called
    reactor.close()
    assert called == ["done"]


def test_in_a_fork_a_callback_runs_in_the_thread_that_completes_the_future(
    driver: Driver,
) -> None:
    future = Future(driver)
    assert in_fork(functools.partial(_complete_in_fork, future)) == 0
    heard = Heard(driver)
    future.add_done_callback(heard)
    future.set_result("parent")
    assert heard.next()[1:] == (True, "parent")


def _complete_in_fork(future: Future) -> None:
    heard, here = Heard(), threading.current_thread().name
    future.add_done_callback(heard)
    future.set_result("child")
    assert heard.next() == (here, False, "child")
    future.add_done_callback(heard)
    assert heard.next() == (here, False, "child")


@pytest.mark.slow
def test_a_callback_that_blocks_holds_up_the_close_of_its_group_for_a_while() -> None:
    """It waits for what follows the close: without a bound, neither would come."""
    closed, began, ended = threading.Event(), threading.Event(), threading.Event()

    def block(_: Future) -> None:
        began.set()
        closed.wait(4 * PATIENCE_S)
        ended.set()

    group = ShardGroup(1, drain_s=0.1)
    group.submit_to(0, os.getpid).add_done_callback(block)
    assert began.wait(PATIENCE_S)
    group.close()
    assert not ended.is_set()
    closed.set()
    assert ended.wait(PATIENCE_S)


@pytest.mark.parametrize("callback", [None, 5])
def test_what_cannot_be_called_is_no_callback(callback: Any) -> None:
    future = Future()
    with pytest.raises(TypeError, match=f"callback of a future, {callback}, cannot be called"):
        future.add_done_callback(callback)
    future.set_result(1)
