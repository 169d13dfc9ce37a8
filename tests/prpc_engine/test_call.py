"""Calls in flight: each ends once, by its reply, its deadline, the connection's end or its
caller.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from prpc_engine.errors import Cancelled, Closed, DeadlineExceeded, MaybeExecuted, RpcError
from prpc_engine.rpc.call import LATE_S, NEVER, SENDING_LOOKS_MAX, Call, CallTable
from shard import Driver, runtime


def enter(table: CallTable, deadline: float = NEVER) -> Call:
    """As Peer.request() does."""
    call_id = table.next_id()
    call = table.in_flight[call_id] = Call(
        table=table, call_id=call_id, asked=("work", "a server"), deadline=deadline
    )
    table.soonest = min(table.soonest, deadline)
    return call


def late(call: Call) -> RpcError:
    return DeadlineExceeded(f"{call.call_id} is late")


def lost(call: Call) -> RpcError:
    return MaybeExecuted(f"{call.call_id} is lost")


def expire(table: CallTable, now: float) -> int:
    """Deadlines pass; how many calls end by that."""
    table.find_late(now)
    return table.end_late(late)


def reply(table: CallTable, call: Call) -> bool:
    """The reply arrives; whether somebody waited for it."""
    found = table.in_flight.pop(call.call_id, None)
    if found is None:
        table.dropped_replies += 1
        return False
    return found.set_result("value")


EVENTS: dict[str, tuple[Callable[[CallTable, Call], object], type[RpcError] | None]] = {
    "reply": (lambda table, call: reply(table, call), None),
    "deadline": (lambda table, call: expire(table, call.deadline), DeadlineExceeded),
    "connection ends": (lambda table, call: table.fail_all(lost), MaybeExecuted),
    "cancel": (lambda table, call: call.cancel(), Cancelled),
}


@pytest.mark.parametrize("second", EVENTS)
@pytest.mark.parametrize("first", EVENTS)
def test_the_first_event_decides_and_the_second_changes_nothing(first: str, second: str) -> None:
    table = CallTable()
    call = enter(table, 5.0)
    act, error = EVENTS[first]
    assert act(table, call)
    assert call.done()
    assert type(call.error()) is (error or type(None))
    outcome = call.error() or call.result()
    assert not EVENTS[second][0](table, call)
    assert (call.error() or call.result()) is outcome
    assert table.in_flight == {}
    assert table.dropped_replies == (second == "reply")


def test_call_ids_are_never_used_twice_and_begin_at_one() -> None:
    table = CallTable()
    assert table.started == 0
    assert [enter(table).call_id for _ in range(5)] == [1, 2, 3, 4, 5]
    assert table.started == table.started == 5, "asking takes none"


def test_only_those_whose_deadline_has_passed_expire() -> None:
    table = CallTable()
    calls = [enter(table, deadline) for deadline in (3.0, 1.0, 2.0, NEVER)]
    assert table.soonest == 1.0
    assert expire(table, 0.9) == 0
    assert expire(table, 2.0) == 2
    assert [call.done() for call in calls] == [False, True, True, False]
    assert str(calls[1].error()) == "2 is late"
    assert table.soonest == 3.0
    assert expire(table, 1e9) == 1
    assert table.soonest == NEVER
    assert list(table.in_flight.values()) == [calls[3]]


def test_soonest_is_a_lower_bound_until_it_passes_and_exact_after() -> None:
    table = CallTable()
    first, second = enter(table, 1.0), enter(table, 7.0)
    reply(table, first)
    assert table.soonest == 1.0, "nobody looks for the next one while replies come in"
    assert expire(table, 1.0) == 0
    assert table.soonest == 7.0
    reply(table, second)
    expire(table, 7.0)
    assert table.soonest == NEVER


def test_soonest_is_never_later_than_any_deadline(seed: int) -> None:
    chance = random.Random(seed)
    table, now = CallTable(), 0.0
    for _ in range(2000):
        now += chance.random()
        enter(table, now + chance.uniform(0.1, 20))
        if chance.random() < 0.5:
            reply(table, chance.choice(list(table.in_flight.values())))
        if now >= table.soonest:
            due = [call for call in table.in_flight.values() if call.deadline <= now]
            assert expire(table, now) == len(due)
            assert all(call.done() for call in due)
            assert table.soonest == min(
                (call.deadline for call in table.in_flight.values()), default=NEVER
            )
        assert all(table.soonest <= call.deadline for call in table.in_flight.values())
        assert all(call.deadline > now or now < table.soonest for call in table.in_flight.values())


def test_late_calls_are_ended_some_at_a_time_and_those_answered_meanwhile_are_not() -> None:
    table = CallTable()
    calls = [enter(table, 1.0) for _ in range(10)]
    last = enter(table, 2.0)
    assert table.find_late(1.0)
    assert table.end_late(late, 4) == 4
    assert [call.done() for call in calls] == [True] * 4 + [False] * 6
    assert table.has_late and table.soonest == 2.0
    assert reply(table, calls[4])
    assert calls[5].cancel()
    assert table.end_late(late, 4) == 4
    assert not table.has_late
    assert not last.done()
    assert expire(table, 2.0) == 1


def test_the_end_of_the_connection_ends_all() -> None:
    table = CallTable()
    calls = [enter(table, deadline) for deadline in (1.0, NEVER)]
    assert table.fail_all(lost) == 2
    assert [str(call.error()) for call in calls] == ["1 is lost", "2 is lost"]
    assert table.fail_all(lost) == 0


def test_a_call_that_is_being_sent_when_the_connection_ends_is_looked_at_again() -> None:
    table, looks = CallTable(), deque[Callable[[], object]]()
    sent, refused, later, never = (enter(table) for _ in range(4))
    sent.sent = 1.0
    assert table.fail_all(lost, lambda _, look: looks.append(look)) == 1
    assert sent.done() and len(looks) == 1
    del table.in_flight[refused.call_id]
    later.sent = 2.0
    looks.popleft()()
    assert later.done() and not refused.done() and not never.done()
    for _ in range(SENDING_LOOKS_MAX):  # whoever was to send it stands still
        for look in tuple(looks):
            looks.popleft()
            look()
    assert never.done() and not looks


def test_a_callback_of_one_call_may_make_another() -> None:
    table = CallTable()
    made: list[Call] = []
    first = enter(table, 1.0)
    first.add_done_callback(lambda _: made.append(enter(table, 9.0)))
    expire(table, 1.0)
    assert not made[0].done()
    assert table.soonest <= 9.0
    assert expire(table, 9.0) == 1


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(polling=False)
    yield made
    made.close()


def test_a_thread_that_waits_ends_its_call_where_the_reactor_does_not(driver: Driver) -> None:
    table, cancelled, looks = CallTable(), list[int](), list[int]()
    table.send_cancel, table.own_outbox = cancelled.append, lambda: looks.append(1)
    call = enter(table, NEVER)
    call.waiter, call.overall = driver, runtime.monotonic() - 1.0
    with pytest.raises(DeadlineExceeded, match="no answer to 'work' from a server in time"):
        call.result()
    assert (cancelled, table.in_flight) == ([call.call_id], {})
    assert looks, "the caller may change its arrays from now on"


def test_a_call_whose_side_was_closed_says_so_by_its_name(driver: Driver) -> None:
    call = enter(CallTable())
    call.waiter = driver
    driver.close()
    for timeout_s in (None, 1.0):
        with pytest.raises(Closed, match="'work': this side was closed meanwhile"):
            call.result(timeout_s)


def test_in_a_shard_nobody_waits_for_a_call() -> None:
    assert not enter(CallTable()).wait()


def test_a_late_call_that_stays_for_its_answer_is_cancelled_at_its_server() -> None:
    table, cancelled = CallTable(), list[int]()
    table.send_cancel = cancelled.append
    call = enter(table, 1.0)
    assert expire(table, 1.0) == 1
    call.outlive()
    assert cancelled == [call.call_id]
    assert not table.find_late(9.0), "it has no deadline any more"
    assert not reply(table, call), "nobody waits for what it says"
    assert table.in_flight == {}


def test_a_failure_is_a_figure_of_its_route_but_of_an_attempt() -> None:
    class Attempt(Call):
        is_attempt = True

    failed: list[BaseException] = []
    route = SimpleNamespace(figures=SimpleNamespace(failed=failed.append))
    error = MaybeExecuted("lost")
    for kind in (Call, Attempt):
        assert kind(asked=("work", route)).end(error)
    assert failed == [error]


def test_a_thread_waits_on_where_its_call_was_given_another_deadline_meanwhile() -> None:
    call = enter(CallTable())
    waits: list[float | None] = []

    class Clock:
        """Time passes while one waits for it."""

        def wait_until(self, future: object, deadline: float | None, serves: bool = False) -> bool:
            waits.append(deadline)
            if len(waits) == 1:
                call.overall = 2.0
                return False
            return call.set_result("value")

    call.waiter, call.overall = cast(Driver, Clock()), 1.0
    assert call.result() == "value"
    assert waits == [1.0 + LATE_S, 2.0 + LATE_S]
