"""How tasks of one reactor wait for one another: semaphores and conditions."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard import Condition, Reactor, Semaphore, Task, yield_now
from tests.helpers import ManualClock


@pytest.fixture
def reactor() -> Reactor:
    return Reactor(ManualClock())


def turn(reactor: Reactor, times: int = 20) -> None:
    for _ in range(times):
        reactor.poll(reactor.clock())


@pytest.mark.parametrize("wrong", [-1, 1.5, "8", None, True])
def test_a_number_of_permits_that_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="whole number from 0 on"):
        Semaphore(wrong)  # type: ignore[arg-type]


def test_so_many_are_inside_and_the_others_come_in_their_order(reactor: Reactor) -> None:
    permits, inside, most, order = Semaphore(2), 0, 0, []

    async def work(number: int) -> None:
        nonlocal inside, most
        async with permits:
            inside += 1
            most = max(most, inside)
            order.append(number)
            await yield_now()
            inside -= 1

    tasks = [reactor.spawn(work(number)) for number in range(7)]
    assert (permits.free, permits.waiting) == (0, 5)
    turn(reactor)
    assert all(task.done() for task in tasks)
    assert (most, order, permits.free, permits.waiting) == (2, list(range(7)), 2, 0)
    reactor.close()


def test_with_none_somebody_gives_the_first(reactor: Reactor) -> None:
    permits = Semaphore(0)
    task = reactor.spawn(permits.acquire())
    turn(reactor)
    assert not task.done()
    permits.release()
    turn(reactor)
    assert task.done() and not permits.try_acquire()
    reactor.close()


@given(
    permits=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 11), max_size=2), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
)
def test_no_permit_is_lost_whoever_is_cancelled_and_whenever(
    permits: int, steps: list[tuple[list[int], int]]
) -> None:
    semaphore = Semaphore(permits)

    async def work() -> None:
        async with semaphore:
            for _ in range(3):
                await yield_now()

    with contextlib.closing(Reactor(ManualClock())) as reactor:
        tasks: list[Task] = []
        for cancelled, turns in steps:
            tasks.append(reactor.spawn(work()))
            for number in cancelled:
                tasks[number % len(tasks)].cancel()
            turn(reactor, turns)
        turn(reactor, 100)
    assert all(task.done() for task in tasks)
    assert (semaphore.free, semaphore.waiting) == (permits, 0)


def test_a_condition_is_asked_at_once_and_after_each_notification(reactor: Reactor) -> None:
    changed, queue, asked = Condition(), [1, 2], 0

    def is_empty() -> bool:
        nonlocal asked
        asked += 1
        return not queue

    task = reactor.spawn(changed.wait(is_empty))
    assert asked == 1
    for _ in range(2):
        turn(reactor)
        assert not task.done()
        queue.pop()
        changed.notify_all()
    turn(reactor)
    assert task.done() and asked == 3
    at_once = reactor.spawn(changed.wait(is_empty))
    assert at_once.done()
    reactor.close()


def test_so_many_are_notified_as_were_asked_for_and_none_of_the_cancelled(
    reactor: Reactor,
) -> None:
    changed = Condition()
    tasks = [reactor.spawn(changed.wait()) for _ in range(5)]
    tasks[0].cancel()
    changed.notify(2)
    turn(reactor)
    assert [task.done() for task in tasks[1:]] == [True, True, False, False]
    changed.notify()
    tasks[3].cancel()  # notified, and does not go on: the next one does
    turn(reactor)
    assert tasks[4].done()
    reactor.close()
