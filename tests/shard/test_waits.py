"""What a task awaits beside results: time, its next turn, a function that blocks."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from shard import BULK, Future, Reactor, run_blocking, sleep, yield_now
from shard.loop import waits
from shard.loop.waits import Resumable, Wait
from tests.helpers import ManualClock

PATIENCE_S = 20.0
number = contextvars.ContextVar("number", default=0)


def turn_until(reactor: Reactor, future: Future) -> Future:
    """In real time: until it is done."""
    deadline = time.monotonic() + PATIENCE_S
    while not future.done():
        assert time.monotonic() < deadline
        reactor.poll(reactor.clock())
        reactor.park(0.01)
    return future


@pytest.fixture
def timed(clock: ManualClock) -> Reactor:
    return Reactor(clock)


def test_a_task_that_sleeps_goes_on_when_the_time_is_over(
    timed: Reactor, clock: ManualClock
) -> None:
    task = timed.spawn(_sleep(2.0))
    for _ in range(5):
        timed.poll(clock())
    assert not task.done()
    clock.now += 2.0
    for _ in range(5):
        timed.poll(clock())
    assert task.result() == "slept"
    timed.close()


async def _sleep(delay_s: float) -> str:
    await sleep(delay_s)
    return "slept"


def test_a_task_that_is_cancelled_in_its_sleep_leaves_no_timer(
    timed: Reactor, clock: ManualClock
) -> None:
    task = timed.spawn(_sleep(2.0))
    task.cancel()
    timed.poll(1000.0)
    assert timed.timers.next_deadline() is None
    timed.close()


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "1", None])
def test_what_is_no_number_of_seconds_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^sleep\(.*seconds from 0 on are allowed"):
        sleep(wrong)


@pytest.mark.parametrize("queue", [None, BULK])
def test_who_yields_lets_the_others_run(reactor: Reactor, queue: Any) -> None:
    steps = list[str]()

    async def work(name: str) -> None:
        for _ in range(3):
            steps.append(name)
            await yield_now()

    more = {} if queue is None else {"queue": queue}
    tasks = [reactor.spawn(work(name), **more) for name in "ab"]
    for task in tasks:
        turn_until(reactor, task)
    assert "".join(steps) == "ababab"


def test_a_function_that_blocks_runs_in_another_thread_and_holds_up_nobody(
    reactor: Reactor,
) -> None:
    let_go = threading.Event()

    def block(one: int, *, other: int) -> tuple[int, int, int, bool]:
        assert let_go.wait(PATIENCE_S)
        return one, other, number.get(), threading.current_thread() is threading.main_thread()

    async def work() -> Any:
        number.set(7)
        return await run_blocking(block, 1, other=2)

    blocked = reactor.spawn(work())
    others = turn_until(reactor, reactor.spawn(_sleep(0.0)))
    assert others.result() == "slept"
    assert not blocked.done()
    let_go.set()
    assert turn_until(reactor, blocked).result() == (1, 2, 7, False)


@pytest.mark.parametrize("error", [ValueError("of the function"), SystemExit(3)])
def test_what_the_function_raises_the_task_catches(reactor: Reactor, error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def work() -> str:
        with pytest.raises(type(error)) as caught:
            await run_blocking(fail)
        return "the same" if caught.value is error else "another"

    assert turn_until(reactor, reactor.spawn(work())).result() == "the same"


def test_of_more_functions_than_threads_the_rest_waits_and_a_cancelled_one_never_runs(
    reactor: Reactor,
) -> None:
    let_go, ran = threading.Event(), list[int]()

    def block(index: int) -> None:
        assert let_go.wait(PATIENCE_S)
        ran.append(index)

    async def work(index: int) -> None:
        await run_blocking(block, index)

    count = waits.BLOCKING_THREADS_MAX + 3
    tasks = [reactor.spawn(work(index)) for index in range(count)]
    tasks[-1].cancel()
    let_go.set()
    for task in tasks[:-1]:
        turn_until(reactor, task).result()
    assert sorted(ran) == list(range(count - 1))


def test_a_child_of_fork_has_threads_of_its_own(reactor: Reactor) -> None:
    async def work() -> int:
        return await run_blocking(os.getpid)

    turn_until(reactor, reactor.spawn(work()))
    child = os.fork()
    if not child:
        own = Reactor(time.monotonic)
        same = turn_until(own, own.spawn(work())).result() == os.getpid()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("wait", [lambda: sleep(0.0), yield_now, lambda: run_blocking(len, "")])
def test_in_asyncio_it_is_refused_by_name(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    async def work() -> None:
        await wait()

    with pytest.raises(RuntimeError, match=r"bad yield: shard\.(sleep|yield_now|run_blocking)\("):
        asyncio.run(work())


class CannotBegin(Wait):
    """What cannot be waited for."""

    def begin(self, task: Resumable) -> None:
        raise OSError("no more of these")

    def __await__(self) -> Generator[Wait, None, None]:
        yield self


def test_what_cannot_begin_is_the_error_of_who_awaits_it(timed: Reactor) -> None:
    async def work() -> str:
        with pytest.raises(OSError, match="no more of these"):
            await CannotBegin()
        return "goes on"

    assert turn_until(timed, timed.spawn(work())).result() == "goes on"
    timed.close()
