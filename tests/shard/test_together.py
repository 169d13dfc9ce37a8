"""Coroutines beside each other, none of which outlives the one that runs them."""

from __future__ import annotations

import pytest

from shard import CancelledError, Future, Reactor, sleep
from shard.loop.together import together
from tests.helpers import ManualClock


@pytest.fixture
def reactor(clock: ManualClock) -> Reactor:
    return Reactor(clock)


def turn(reactor: Reactor, clock: ManualClock, seconds: float = 0.0) -> None:
    clock.advance(seconds)
    for _ in range(5):
        reactor.poll(clock.now)


def test_their_results_are_in_order_whoever_was_first(reactor: Reactor, clock: ManualClock) -> None:
    async def after(delay_s: float, value: int) -> int:
        await sleep(delay_s)
        return value

    async def both() -> list[int]:
        return await together(after(2.0, 1), after(1.0, 2))

    task = reactor.spawn(both())
    turn(reactor, clock)
    turn(reactor, clock, 1.1)
    assert not task.done()
    turn(reactor, clock, 1.1)
    assert task.result() == [1, 2]


def test_none_are_done_at_once(reactor: Reactor) -> None:
    async def none() -> list[int]:
        return await together()

    assert reactor.spawn(none()).result() == []


def test_the_first_error_ends_the_others(reactor: Reactor, clock: ManualClock) -> None:
    ended = []

    async def long() -> None:
        try:
            await sleep(100.0)
        finally:
            ended.append("long")

    async def fail() -> None:
        await sleep(1.0)
        raise KeyError("it")

    async def both() -> None:
        try:
            await together(long(), fail())
        finally:
            ended.append("both")

    task = reactor.spawn(both())
    turn(reactor, clock)
    turn(reactor, clock, 1.1)
    with pytest.raises(KeyError, match="it"):
        task.result()
    assert ended == ["long", "both"]
    assert not len(reactor.timers)


def test_who_is_cancelled_cancels_them_those_that_never_ran_too(
    reactor: Reactor, clock: ManualClock
) -> None:
    ended = []
    never = Future()

    async def wait(name: str) -> None:
        try:
            await never
        finally:
            ended.append(name)

    async def both() -> None:
        await together(wait("one"), wait("two"), deadline=clock.now + 10.0)

    task = reactor.spawn(both())
    turn(reactor, clock)
    task.cancel()
    assert sorted(ended) == ["one", "two"]
    assert not len(reactor.timers)
    at_once = reactor.spawn(both())
    at_once.cancel()
    with pytest.raises(CancelledError):
        at_once.result()
    turn(reactor, clock)
    assert len(ended) == 2


def test_after_its_deadline_all_are_cancelled(reactor: Reactor, clock: ManualClock) -> None:
    ended = []

    async def long() -> None:
        try:
            await sleep(100.0)
        finally:
            ended.append("long")

    async def hurried() -> None:
        await together(long(), deadline=clock.now + 1.0)

    task = reactor.spawn(hurried())
    turn(reactor, clock, 0.9)
    assert not task.done()
    turn(reactor, clock, 0.2)
    with pytest.raises(TimeoutError):
        task.result()
    assert ended == ["long"]
