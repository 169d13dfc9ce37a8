"""The loop that runs the engine's own coroutines in one thread: what they await, and who fetches
it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from shard import (
    ClosedError,
    ControlLoop,
    Driver,
    Future,
    ShardError,
    control_loop,
    run_blocking,
    runtime,
    sleep,
)
from shard.loop.waits import BLOCKING_THREADS_MAX

PATIENCE_S = 20.0


@pytest.fixture
def loop() -> ControlLoop:
    return ControlLoop("test-control")


def threads_of(loop: ControlLoop) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "test-control"]


def test_a_coroutine_runs_in_the_thread_of_the_loop(loop: ControlLoop) -> None:
    async def where() -> str:
        await sleep(0.001)
        return threading.current_thread().name

    assert loop.spawn(where()).result(PATIENCE_S) == "test-control"


def test_its_thread_ends_with_the_last_coroutine_and_begins_with_the_next(
    loop: ControlLoop,
) -> None:
    async def number(one: int) -> int:
        await sleep(0.001)
        return one

    for one in range(20):
        assert loop.spawn(number(one)).result(PATIENCE_S) == one
        for thread in threads_of(loop):
            thread.join(PATIENCE_S)
        assert threads_of(loop) == []


def test_no_coroutine_is_lost_as_the_thread_ends(loop: ControlLoop) -> None:
    async def nothing() -> int:
        return 1

    counted = []

    def spawn() -> None:
        for _ in range(300):
            counted.append(loop.spawn(nothing()).result(PATIENCE_S))

    threads = [threading.Thread(target=spawn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
    assert len(counted) == 900
    for thread in threads_of(loop):
        thread.join(PATIENCE_S)
    assert threads_of(loop) == []


def test_a_coroutine_has_no_context_variables_of_who_spawns_it(loop: ControlLoop) -> None:
    variable = ContextVar("variable", default="none")
    variable.set("of the application")

    async def look() -> str:
        return variable.get()

    assert loop.spawn(look()).result(PATIENCE_S) == "none"


def test_what_it_raises_comes_out_of_its_future(loop: ControlLoop) -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        loop.spawn(fail()).result(PATIENCE_S)


def test_a_failing_callback_ends_neither_the_loop_nor_the_others(
    loop: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait() -> str:
        await sleep(0.05)
        return "goes on"

    task = loop.spawn(wait())

    def fail() -> None:
        raise KeyError("a bug")

    task.reactor.call_later(0.0, fail)
    assert task.result(PATIENCE_S) == "goes on"
    assert "a turn of the control loop failed" in caplog.text


def test_a_wait_for_itself_is_refused(loop: ControlLoop) -> None:
    async def deadlock() -> None:
        other = control_loop().spawn(_never(Future()))
        try:
            other.result()
        finally:
            other.cancel()

    with pytest.raises(ShardError, match="must not wait for itself"):
        control_loop().spawn(deadlock()).result(PATIENCE_S)


async def _never(future: Future) -> None:
    await future


def test_what_it_awaits_of_a_driver_is_fetched_though_nobody_else_waits(
    loop: ControlLoop,
) -> None:
    """A reactor that nobody turns: a thread of the engine must, at once and only as long."""
    driver = Driver(polling=False, name="test-fetch")
    try:
        for _ in range(50):
            future = Future(driver)

            async def fetch(future: Future = future) -> str:
                driver.reactor.call_soon(lambda: future.set_result("fetched"))
                value: str = await future
                return value

            assert loop.spawn(fetch()).result(PATIENCE_S) == "fetched"
    finally:
        driver.close()


@pytest.mark.parametrize("closed_first", [True, False])
def test_what_it_awaits_of_a_driver_that_is_closed_ends_with_it(
    loop: ControlLoop, closed_first: bool
) -> None:
    """Nobody else would end it, and the loop's thread would stay for ever."""
    driver = Driver(polling=False, name="test-fetch")
    if closed_first:
        driver.close()
    task = loop.spawn(_never(Future(driver)))
    if not closed_first:
        # its first step is over when that of a later one is
        loop.spawn(sleep_once()).result(PATIENCE_S)
        driver.close()
    with pytest.raises(ClosedError):
        task.result(PATIENCE_S)


async def sleep_once() -> None:
    await sleep(0.0)


def test_blocking_work_for_which_there_is_no_thread_is_refused_where_it_is_awaited(
    loop: ControlLoop,
) -> None:
    """As when the interpreter ends: the loop goes on, and so does the coroutine."""
    ended = ThreadPoolExecutor(1)
    ended.shutdown()

    async def ask() -> str:
        with pytest.raises(RuntimeError, match="after shutdown"):
            await run_blocking(print)
        return "went on"

    threads = runtime.own("blocking threads", lambda: ThreadPoolExecutor(BLOCKING_THREADS_MAX))
    runtime.put("blocking threads", ended)
    try:
        assert loop.spawn(ask()).result(PATIENCE_S) == "went on"
    finally:
        runtime.put("blocking threads", threads)


def test_blocking_work_leaves_the_loop_to_others(loop: ControlLoop) -> None:
    entered, release = threading.Event(), threading.Event()

    def block() -> str:
        entered.set()
        assert release.wait(PATIENCE_S)
        return "blocked"

    async def wait_for(function: Callable[[], str]) -> str:
        value: str = await run_blocking(function)
        return value

    blocked = loop.spawn(wait_for(block))
    assert entered.wait(PATIENCE_S)

    async def quick() -> str:
        await sleep(0.0)
        return "quick"

    assert loop.spawn(quick()).result(PATIENCE_S) == "quick"
    assert not blocked.done()
    release.set()
    assert blocked.result(PATIENCE_S) == "blocked"


def test_a_fork_has_a_loop_of_its_own_and_runs_nothing_of_its_parent() -> None:
    ran = []

    async def clean_up(future: Future) -> None:
        try:
            await future
        finally:
            ran.append(os.getpid())

    never = Future()
    task = control_loop().spawn(clean_up(never))
    parents = control_loop()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        try:

            async def answer() -> bool:
                await sleep(0.001)
                return control_loop() is not parents and not ran

            os.write(writing, b"y" if control_loop().spawn(answer()).result(10.0) else b"n")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"y"
    os.close(reading)
    os.waitpid(pid, 0)
    task.cancel()
    deadline = time.monotonic() + PATIENCE_S
    while not ran and time.monotonic() < deadline:
        pass
    assert ran == [os.getpid()]
