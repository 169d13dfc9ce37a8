"""A gate that work passes: who is inside is counted, and its end can be waited for."""

from __future__ import annotations

import pytest

from shard import ClosedError, Driver, Future, Gate, Reactor
from tests.helpers import ManualClock

PATIENCE_S = 20.0


def test_who_is_inside_is_counted() -> None:
    gate = Gate()
    gate.enter()
    with gate:
        assert gate.inside == 2
    gate.leave()
    assert gate.inside == 0


def test_a_closed_gate_lets_nobody_in_and_is_empty_when_the_last_has_left() -> None:
    gate = Gate("the shop")
    gate.enter()
    gate.enter()
    closed = gate.close()
    assert gate.closed
    with pytest.raises(ClosedError, match="the shop is closed: no new work is taken on"):
        gate.enter()
    assert gate.inside == 2, "who was refused is not counted"
    gate.leave()
    assert not closed.done()
    gate.leave()
    assert closed.done()


def test_an_empty_gate_is_closed_at_once_and_can_be_closed_again() -> None:
    gate = Gate()
    assert gate.close().done()
    assert gate.close().done()
    with pytest.raises(ClosedError, match="this gate is closed"), gate:
        raise AssertionError("nobody gets here")


def test_waiting_for_an_empty_gate_leaves_it_open() -> None:
    gate = Gate()
    assert gate.wait_empty().done()
    gate.enter()
    empty, again = gate.wait_empty(), gate.wait_empty()
    gate.enter()
    gate.leave()
    assert not empty.done()
    gate.leave()
    assert empty.done()
    assert again.done()
    gate.enter()
    assert empty.done(), "it was empty at one moment, and that was waited for"
    assert gate.inside == 1


def test_who_leaves_by_an_error_has_left() -> None:
    gate = Gate()
    with pytest.raises(KeyError), gate:
        raise KeyError
    assert gate.inside == 0


def test_leaving_more_often_than_entering_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="left more often than entered"):
        Gate().leave()


def test_a_task_waits_until_the_others_have_left(clock: ManualClock) -> None:
    reactor, gate, seen = Reactor(clock), Gate(), list[str]()
    goes_on = Future()

    async def handler() -> None:
        with gate:
            await goes_on
            seen.append("handled")

    async def shut_down() -> None:
        await gate.close()
        seen.append("shut down")

    reactor.spawn(handler())
    reactor.spawn(shut_down())
    late = reactor.spawn(handler())
    assert isinstance(late.error(), ClosedError)
    goes_on.set_result(None)
    for _ in range(3):
        reactor.poll(clock.now)
    assert seen == ["handled", "shut down"]
    reactor.close()


def test_a_cancelled_task_leaves(clock: ManualClock) -> None:
    reactor, gate = Reactor(clock), Gate()

    async def handler() -> None:
        with gate:
            await Future()

    task = reactor.spawn(handler())
    empty = gate.wait_empty()
    task.cancel()
    reactor.poll(clock.now)
    assert empty.done()
    reactor.close()


def test_a_thread_waits_when_somebody_makes_progress() -> None:
    driver = Driver(polling=False)
    gate = Gate("work", driver)
    gate.enter()
    closed = gate.close()
    driver.reactor.call_soon(gate.leave)
    assert closed.result(PATIENCE_S) is None
    driver.close()
