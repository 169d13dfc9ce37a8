"""Coroutines driven by a reactor, and its turns: bounded, woken by others, with a clock that the
test holds.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from shard import Future, Reactor, ShardError
from shard.loop.reactor import READY_STEPS_MAX, TIMERS_MAX
from tests.helpers import ManualClock
from tests.shard.sources import Source

PATIENCE_S = 20.0


def turn_until_idle(reactor: Reactor) -> None:
    for _ in range(1000):
        if not reactor.poll(reactor.clock()):
            has_work = reactor.announce(0.0) is None
            reactor.unannounce(False)
            if not has_work:
                return
    raise AssertionError("it never comes to rest")


# -- tasks -----------------------------------------------------------------------------------------


def test_a_coroutine_that_never_waits_is_done_at_once(reactor: Reactor) -> None:
    async def work() -> int:
        return 42

    assert reactor.spawn(work()).result() == 42


def test_a_task_goes_on_when_what_it_awaits_is_done(reactor: Reactor) -> None:
    first, second, seen = Future(), Future(), list[object]()

    async def work() -> str:
        seen.append(await first)
        seen.append(await second)
        return "end"

    task = reactor.spawn(work())
    turn_until_idle(reactor)
    assert not task.done()
    first.set_result(1)
    turn_until_idle(reactor)
    assert seen == [1]
    second.set_result(2)
    turn_until_idle(reactor)
    assert (seen, task.result()) == ([1, 2], "end")


def test_errors_come_in_and_go_out(reactor: Reactor) -> None:
    awaited = Future()

    async def work() -> None:
        try:
            await awaited
        except KeyError as error:
            raise ValueError("from inside") from error

    task = reactor.spawn(work())
    awaited.set_error(KeyError())
    turn_until_idle(reactor)
    with pytest.raises(ValueError, match="from inside"):
        task.result()


def test_a_task_may_await_another(reactor: Reactor) -> None:
    gate = Future()

    async def inner() -> int:
        return int(await gate) + 1

    async def outer() -> int:
        return int(await reactor.spawn(inner())) + 1

    task = reactor.spawn(outer())
    gate.set_result(40)
    turn_until_idle(reactor)
    assert task.result() == 42


def test_a_cancelled_task_runs_its_finally_and_is_done_with_the_error(reactor: Reactor) -> None:
    seen: list[str] = []
    never = Future()

    async def work() -> None:
        try:
            await never
        finally:
            seen.append("cleaned up")

    task = reactor.spawn(work())
    assert task.cancel(TimeoutError("late"))
    turn_until_idle(reactor)
    assert seen == ["cleaned up"]
    assert not task.cancel(TimeoutError("again"))
    never.set_result(None)
    turn_until_idle(reactor)
    with pytest.raises(TimeoutError, match="late"):
        task.result()


def test_awaiting_something_else_ends_the_task_by_name(reactor: Reactor) -> None:
    class Foreign:
        def __await__(self) -> Iterator[object]:
            yield "not a future"

    async def work() -> None:
        await Foreign()  # type: ignore[misc]

    task = reactor.spawn(work())
    turn_until_idle(reactor)
    with pytest.raises(ShardError, match=r"await this engine.s futures, .* not str"):
        task.result()


def test_a_task_is_none_of_an_asyncio_loop_that_its_reactor_is_turned_in(reactor: Reactor) -> None:
    gate = Future()

    async def ours() -> tuple[object, bool]:
        return await gate, asyncio.get_running_loop() is reactor.guest

    async def theirs() -> object:
        task = reactor.spawn(ours())
        gate.set_result("open")
        turn_until_idle(reactor)
        assert asyncio.get_running_loop().is_running()
        return await task

    assert asyncio.run(theirs()) == ("open", True)


def test_sleep_lasts_as_long_as_the_clock_says(reactor: Reactor, clock: ManualClock) -> None:
    async def work() -> str:
        await reactor.sleep(5.0)
        return "rested"

    task = reactor.spawn(work())
    clock.advance(4.9)
    turn_until_idle(reactor)
    assert not task.done()
    clock.advance(0.2)
    turn_until_idle(reactor)
    assert task.result() == "rested"


# -- turns -----------------------------------------------------------------------------------------


def test_timers_fire_by_the_reactors_clock(reactor: Reactor, clock: ManualClock) -> None:
    seen: list[str] = []
    reactor.call_later(2.0, lambda: seen.append("two"))
    reactor.call_later(1.0, lambda: seen.append("one"))
    reactor.poll(clock())
    assert seen == []
    reactor.poll(clock.advance(1.5))
    assert seen == ["one"]
    reactor.poll(clock.advance(1.5))
    assert seen == ["one", "two"]


def test_one_turn_runs_a_bounded_number_of_steps(reactor: Reactor, clock: ManualClock) -> None:
    seen: list[int] = []
    for number in range(READY_STEPS_MAX + 10):
        reactor.call_soon(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert reactor.poll(clock()) == READY_STEPS_MAX
    assert seen == list(range(READY_STEPS_MAX))
    reactor.poll(clock())
    assert len(seen) == READY_STEPS_MAX + 10


def test_what_asks_to_run_again_waits_for_the_next_turn(
    reactor: Reactor, clock: ManualClock
) -> None:
    seen: list[int] = []

    def again() -> None:
        seen.append(1)
        reactor.call_soon(again)

    reactor.call_soon(again)
    for turn in range(1, 6):
        reactor.poll(clock())
        assert len(seen) == turn


def test_steps_that_a_deeper_turn_ran_are_not_run_again(
    reactor: Reactor, clock: ManualClock
) -> None:
    seen: list[str] = []

    def waits_by_turning() -> None:
        reactor.poll(clock())
        seen.append("outer")

    reactor.call_soon(waits_by_turning)
    reactor.call_soon(lambda: seen.append("inner"))
    assert reactor.poll(clock()) == 1
    assert seen == ["inner", "outer"]


def test_one_turn_fires_a_bounded_number_of_timers(reactor: Reactor, clock: ManualClock) -> None:
    seen: list[int] = []
    for number in range(TIMERS_MAX + 10):
        reactor.call_later(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]
    clock.advance(1.0)
    assert reactor.poll(clock()) == TIMERS_MAX
    assert reactor.poll(clock()) == 10
    assert seen == list(range(TIMERS_MAX + 10))


def test_a_timer_that_raises_takes_no_other_with_it(reactor: Reactor, clock: ManualClock) -> None:
    seen: list[int] = []

    def fail() -> None:
        raise KeyError("once")

    for callback in (fail, lambda: seen.append(1), lambda: seen.append(2)):
        reactor.call_later(1.0, callback)
    clock.advance(1.0)
    with pytest.raises(KeyError, match="once"):
        reactor.poll(clock())
    reactor.poll(clock())
    assert seen == [1, 2]


def test_a_timer_that_waits_by_turning_keeps_no_other_from_firing(
    reactor: Reactor, clock: ManualClock
) -> None:
    answered = Future()
    turns: list[int] = []

    def waits_by_turning() -> None:
        while not answered.done() and len(turns) < 10:
            turns.append(reactor.poll(clock()))

    reactor.call_later(1.0, waits_by_turning)
    reactor.call_later(1.0, lambda: answered.set_result(None))
    reactor.poll(clock.advance(1.0))
    assert turns == [1]


def test_a_watched_descriptor_calls_back_until_it_is_unwatched(reactor: Reactor) -> None:
    reading, writing = os.pipe()
    seen: list[bytes] = []
    try:
        reactor.watch(reading, lambda events: seen.append(os.read(reading, 10)))
        turn_until_idle(reactor)
        assert seen == []
        os.write(writing, b"hello")
        reactor.park(PATIENCE_S)
        reactor.poll(0.0)
        assert seen == [b"hello"]
        reactor.unwatch(reading)
        reactor.unwatch(reading)
        os.write(writing, b"unseen")
        for _ in range(100):
            reactor.poll(reactor.clock())
        assert seen == [b"hello"]
    finally:
        os.close(reading)
        os.close(writing)


def test_watching_again_changes_what_is_waited_for(reactor: Reactor) -> None:
    one, two = socket.socketpair()
    with one, two:
        seen: list[int] = []
        reactor.watch(one.fileno(), seen.append)
        reactor.park(0.0)
        reactor.poll(0.0)
        assert seen == []
        reactor.watch(one.fileno(), seen.append, select.EPOLLOUT)
        reactor.park(PATIENCE_S)
        reactor.poll(0.0)
        assert seen == [select.EPOLLOUT]
        reactor.unwatch(one.fileno())


def test_a_callback_may_unwatch_one_that_is_ready_with_it(reactor: Reactor) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [pair[0].fileno() for pair in pairs]
    seen: list[int] = []

    def callback(fd: int) -> None:
        seen.append(fd)
        for each in fds:
            reactor.unwatch(each)

    for fd in fds:
        reactor.watch(fd, lambda _, fd=fd: callback(fd))  # type: ignore[misc]
    for _, other in pairs:
        other.send(b"x")
    reactor.park(PATIENCE_S)
    reactor.poll(0.0)
    assert len(seen) == 1
    for pair in pairs:
        for each in pair:
            each.close()


def test_sources_are_polled_every_turn_until_removed(reactor: Reactor, clock: ManualClock) -> None:
    source = Source()
    reactor.add_source(source)
    source.work = 3
    assert reactor.poll(clock()) == 3
    source.work = 2
    assert reactor.spin(10) == 1
    assert source.work == 0
    reactor.remove_source(source)
    source.work = 1
    assert reactor.poll(clock()) == 0


def test_a_reactor_can_be_closed_while_another_thread_calls_it(reactor: Reactor) -> None:
    def call(frame: FrameType, event: str, argument: object) -> Any:
        """What another thread may do between any two steps of this one."""
        if frame.f_globals["__name__"] == "shard.loop.queues":
            frame.f_trace_opcodes = True
            reactor.call_soon(int)
        return call

    for _ in range(3):
        reactor.call_soon(int)
    before = sys.gettrace()
    sys.settrace(call)
    try:
        reactor.close()
    finally:
        sys.settrace(before)


def test_after_close_turning_finds_nothing_and_waking_does_nothing(
    reactor: Reactor, clock: ManualClock
) -> None:
    reactor.call_soon(reactor.close)
    reactor.poll(clock())
    assert reactor.closed
    assert reactor.poll(clock()) == 0
    assert reactor.spin(10) == 0
    reactor.wake()
    reactor.close()
