"""What a server does besides answering at once: deferred answers, cancelled calls, queues, streams,
stopping.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine.rpc.context import remaining_s
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.flow_control import WINDOW_ITEMS
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.method import idempotent
from prpc_engine.rpc.peer import EXPIRED_MAX, calling_peer
from prpc_engine.rpc.server import Bounds, ServedObject
from prpc_engine.rpc.stream import Incoming, Stream, incoming
from shard import BackpressureError, Future
from tests.held import at
from tests.helpers import ManualClock
from tests.prpc_engine.peers import TARGET, Pair, Route


class Handlers:
    def __init__(self) -> None:
        self.gate = Future()
        self.deferred: list[Deferred] = []
        self.seen: list[Any] = []
        self.closed: list[str] = []

    def later(self) -> Deferred:
        """Answered by whoever has it."""
        answer = Deferred()
        self.deferred.append(answer)
        return answer

    def dropped(self) -> Deferred:
        return Deferred()

    @idempotent
    def remaining(self) -> float | None:
        return remaining_s(time.monotonic)

    async def wait(self) -> str:
        try:
            self.seen.append(calling_peer())
            return str(await self.gate)
        finally:
            self.closed.append("wait")

    async def remaining_later(self) -> float | None:
        await self.gate
        return remaining_s(time.monotonic)

    def count(self, to: int) -> Iterator[int]:
        try:
            for number in range(to):
                self.seen.append(number)
                yield number
        finally:
            self.closed.append("count")

    async def arrays(self, to: int) -> AsyncIterator[Any]:
        for number in range(to):
            yield np.full(3, number)

    def breaks(self) -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    async def total(self) -> int:
        total = 0
        async for item in incoming():
            self.seen.append(item)
            total += item
        return total

    async def waits(self) -> int:
        await self.gate
        return len([item async for item in incoming()])

    async def doubled(self) -> AsyncIterator[int]:
        async for item in incoming():
            yield 2 * item


class World(Pair):
    """The test turns the reactor, or a future's waiter does."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        super().__init__(ServedObject("test", 0, TARGET, self.handlers), waiter=self)

    def open(self, method: str, *args: Any, timeout_s: float | None = 20.0) -> Stream:
        return self.client.open(Route(), method, method_key(method), args, timeout_s)

    def wait(self, future: Future, timeout_s: float | None) -> bool:
        return self.wait_until(future, None if timeout_s is None else time.monotonic() + timeout_s)

    def wait_until(self, future: Future, deadline: float | None) -> bool:
        deadline = min(deadline or math.inf, time.monotonic() + 20.0)
        while not future.done() and time.monotonic() < deadline:
            self.reactor.poll(time.monotonic())
        return future.done()

    def take_over(self) -> None:
        raise AssertionError("nobody awaits here")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


# -- deferred answers ------------------------------------------------------------------------------


def test_a_deferred_answer_comes_when_it_is_given_from_any_thread(world: World) -> None:
    calls = [world.ask("later"), world.ask("later")]
    world.turn()
    assert not calls[0].done()
    thread = threading.Thread(target=world.handlers.deferred[1].reply, args=("second",))
    thread.start()
    thread.join()
    world.handlers.deferred[0].fail(ValueError("no rows"))
    world.turn()
    assert calls[1].result() == "second"
    with pytest.raises(errors.RemoteError, match="ValueError: no rows"):
        calls[0].result()
    assert world.server.statistics().tasks == 0


def test_a_deferred_answer_that_is_dropped_is_answered_for(world: World) -> None:
    call = world.ask("dropped")
    world.turn()
    gc.collect()
    world.turn()
    with pytest.raises(errors.RemoteError, match=r"dropped it without reply\(\) or fail\(\)"):
        call.result()


def test_an_answer_after_the_callers_deadline_is_no_harm(world: World) -> None:
    call = world.ask("later", timeout_s=0.01)
    with pytest.raises(errors.DeadlineExceeded):
        call.result()
    world.wait(Future(), 0.02)
    world.turn()
    world.handlers.deferred[0].reply("late")
    world.turn()
    assert world.server.statistics().tasks == 0
    assert world.served.running == {}


# -- cancel ----------------------------------------------------------------------------------------


def test_cancelling_a_call_ends_its_task_over_there(world: World) -> None:
    call = world.ask("wait")
    world.turn()
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(errors.Cancelled):
        call.result()
    world.turn()
    assert world.handlers.closed == ["wait"]
    assert world.server.statistics().cancelled == 1
    assert world.client.statistics().in_flight == 0


def test_cancelling_a_queued_call_takes_it_out_of_the_queue(world: World) -> None:
    world.server.bounds = Bounds(tasks_max=1)
    first, second = world.ask("wait"), world.ask("wait")
    world.turn()
    assert second.cancel()
    world.turn()
    assert world.server.statistics().queued == 0
    world.handlers.gate.set_result("open")
    assert first.result() == "open"
    assert len(world.handlers.seen) == 1


def test_a_queued_call_whose_deadline_has_passed_never_runs(world: World) -> None:
    world.server.bounds = Bounds(tasks_max=1)
    first, second = world.ask("wait"), world.ask("wait", timeout_s=0.005)
    with pytest.raises(errors.DeadlineExceeded):
        second.result()
    world.wait(Future(), 0.01)
    world.handlers.gate.set_result("open")
    assert first.result() == "open"
    world.turn()
    assert len(world.handlers.seen) == 1
    assert world.server.statistics().expired == 1


def test_what_a_lost_peer_queued_is_dropped_and_what_runs_goes_on(world: World) -> None:
    world.server.bounds = Bounds(tasks_max=1)
    running, queued = world.ask("wait"), world.ask("wait")
    world.turn()
    world.client.connection.close()
    world.turn()
    assert isinstance(running.error(), errors.Closed)
    assert isinstance(queued.error(), errors.Closed)
    world.handlers.gate.set_result("open")
    world.turn()
    assert len(world.handlers.seen) == 1
    assert (world.server.statistics().tasks, world.server.statistics().queued) == (0, 0)


def test_an_answer_that_is_there_as_its_caller_gives_the_call_up_leaves(world: World) -> None:
    call = world.ask("later")
    world.turn()
    world.handlers.deferred[0].reply("there")
    assert call.cancel()
    world.turn()
    assert world.client.statistics().replies_dropped == 1
    assert world.server.statistics().cancelled == 0


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_deferred_answer_may_go_on_when_its_caller_gives_the_call_up(
    world: World, goes_on: bool
) -> None:
    told: list[BaseException] = []

    def on_cancel(error: BaseException) -> bool:
        told.append(error)
        return goes_on

    for timeout_s in (20.0, 0.01):
        call = world.ask("later", timeout_s=timeout_s)
        world.turn()
        answer = world.handlers.deferred.pop()
        answer.on_cancel = on_cancel
        if timeout_s > 1.0:
            assert call.cancel()
        else:
            world.wait(Future(), 0.03)
        world.turn()
        assert len(told) == 1
        told.clear()
        assert answer.done() is not goes_on
        assert len(world.served.running) == goes_on
        assert answer.reply("after all") is goes_on
        world.turn()
        assert not world.served.running


def test_calls_that_expire_together_are_ended_some_in_a_turn_with_other_work_in_between() -> None:
    clock = ManualClock()
    handlers = Handlers()
    pair = Pair(ServedObject("test", 0, TARGET, handlers), clock=clock)
    calls = [pair.ask("later", timeout_s=5.0) for _ in range(20 * EXPIRED_MAX)]
    pair.turn()
    clock.advance(5.0)
    other, turns = pair.ask("remaining"), [0]
    with at("peer.looking_for_late", of=pair.client) as looks:
        while turns[-1] < len(calls):
            pair.reactor.poll(clock())
            turns.append(sum(call.done() for call in calls))
            assert turns[-1] - turns[-2] <= 2 * EXPIRED_MAX
            assert len(turns) < 100
    assert other.done()
    assert looks.count == 1
    assert all(isinstance(call.error(), errors.DeadlineExceeded) for call in calls)
    clock.advance(0.1)  # the server's deadline is some ms later
    pair.turn()
    assert pair.server.statistics().tasks == 0
    pair.close()


# -- deadlines are inherited -----------------------------------------------------------------------


def test_a_handler_sees_how_long_its_caller_waits(world: World) -> None:
    assert world.ask("remaining", timeout_s=None).result() is None
    remaining = world.ask("remaining", timeout_s=1000.0).result()
    assert 990.0 < remaining < 1000.1
    call = world.ask("remaining_later", timeout_s=1000.0)
    world.turn()
    world.handlers.gate.set_result(None)
    assert 990.0 < call.result() < 1000.1
    assert remaining_s(time.monotonic) is None


# -- streams ---------------------------------------------------------------------------------------


def test_a_generators_items_come_one_by_one(world: World) -> None:
    assert list(world.open("count", 40)) == list(range(40))
    assert [array.tolist() for array in world.open("arrays", 3)] == [[0] * 3, [1] * 3, [2] * 3]
    assert world.server.statistics().tasks == 0


def test_a_server_runs_no_further_ahead_than_the_window(world: World) -> None:
    stream = world.open("count", 1000)
    world.turn()
    assert len(world.handlers.seen) == WINDOW_ITEMS + 1  # one more waits for credit
    assert [next(stream) for _ in range(100)] == list(range(100))
    world.turn()
    assert len(world.handlers.seen) <= 100 + WINDOW_ITEMS + 1
    assert stream.cancel()
    world.turn()
    assert world.handlers.closed == ["count"]
    with pytest.raises(errors.Cancelled):
        while True:
            next(stream)


def test_an_error_in_mid_stream_comes_after_the_items_before_it(world: World) -> None:
    stream = world.open("breaks")
    assert next(stream) == 1
    with pytest.raises(errors.RemoteError, match="broken"):
        next(stream)


def test_a_caller_streams_to_a_handler_as_fast_as_that_takes(world: World) -> None:
    with world.open("total") as stream:
        for number in range(50):
            stream.send(number)
        stream.end()
        assert stream.result() == sum(range(50))
    assert world.handlers.seen == list(range(50))


def test_both_directions_at_once(world: World) -> None:
    with world.open("doubled") as stream:
        for number in range(20):
            stream.send(number)
            assert next(stream) == 2 * number
        stream.end()
        assert list(stream) == []


def test_sending_to_a_stream_that_is_over_says_so(world: World) -> None:
    stream = world.open("breaks")
    world.turn()
    with pytest.raises(errors.RemoteError, match="broken"):
        stream.send(1)


def test_an_item_after_the_end_is_refused_by_name(world: World) -> None:
    stream = world.open("total")
    stream.send(1)
    stream.end()
    stream.end()
    with pytest.raises(
        errors.Closed, match=r"end\(\) of this stream of 'total' was called before it"
    ):
        stream.send(2)
    with pytest.raises(
        errors.Closed, match=r"end\(\) of this stream of 'total' was called before it"
    ):
        stream.asend(3).send(None)
    assert stream.result() == 1
    with pytest.raises(errors.Closed, match=r"end\(\) of this stream"):
        stream.send(4)


def test_an_item_that_waits_for_room_as_the_end_comes_is_refused_by_name(world: World) -> None:
    stream = world.open("waits")
    for number in range(WINDOW_ITEMS):
        stream.send(number)
    task = world.reactor.spawn(stream.asend("late"))
    world.turn()
    stream.end()
    stream.call.window.grant(1)  # as the server does that takes an item before it looks for the end
    world.turn()
    error = task.error()
    assert isinstance(error, errors.Closed)
    assert (
        str(error) == "the item was not sent: end() of this stream of 'waits' was called before it"
    )
    world.handlers.gate.set_result("open")
    world.turn()
    assert stream.result() == WINDOW_ITEMS


def test_sending_to_a_stream_that_ends_as_an_item_is_about_to_leave_says_how(
    world: World,
) -> None:
    stream = world.open("breaks")
    with (
        at("peer.sending_item", world.turn),
        pytest.raises(errors.RemoteError, match="broken"),
    ):
        stream.send(1)


def test_a_stream_over_a_lost_connection_ends_on_both_sides(world: World) -> None:
    stream = world.open("count", 1000)
    assert next(stream) == 0
    world.client.connection.close()
    with pytest.raises(errors.Closed):
        list(stream)
    world.turn()
    assert world.handlers.closed == ["count"]
    assert world.server.statistics().tasks == 0


def test_a_stream_and_a_call_are_not_mixed_up(world: World) -> None:
    with pytest.raises(
        errors.BadArguments, match=r"'count' yields its results: call it by client.stream\(\)"
    ):
        world.ask("count", 3).result()
    assert world.open("remaining", timeout_s=None).result() is None
    with pytest.raises(LookupError, match="this call is no stream"):
        incoming()


def test_a_plain_loop_over_what_is_incoming_says_how_it_is_read() -> None:
    inbox: Any = None  # it is not looked at
    with pytest.raises(TypeError, match="async for item in incoming"):
        list(Incoming(inbox))


def test_a_stream_ends_at_its_deadline(world: World) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        world.open("total", timeout_s=0.01).result()
    world.wait(Future(), 0.02)
    world.turn()
    assert world.server.statistics().tasks == 0


def test_notes_that_find_no_room_are_sent_when_there_is_some(world: World) -> None:
    stream = world.open("count", 1000)
    world.turn()

    def find_no_room() -> None:
        raise BackpressureError("the outbox is full")

    with at("peer.noting", find_no_room, of=world.client, times=3) as refused:
        assert [next(stream) for _ in range(100)] == list(range(100))
    assert refused.count == 3
    with at("peer.noting", find_no_room, of=world.client, times=3) as refused:
        assert stream.cancel()
        world.wait(Future(), 0.2)
    assert refused.count == 3
    assert world.handlers.closed == ["count"]


# -- health, description, stopping -----------------------------------------------------------------


def test_a_server_tells_what_it_has(world: World) -> None:
    described = world.ask("prpc.describe").result()
    assert described["later"] == {
        "signature": "() -> 'Deferred'",
        "kind": "plain",
        "idempotent": False,
        "once": False,
        "text": "Answered by whoever has it.",
    }
    assert described["remaining"]["idempotent"]
    assert [described[name]["kind"] for name in ("wait", "count", "arrays")] == [
        "task",
        "stream",
        "stream",
    ]
    assert world.ask("prpc.health").result()["state"] == "serving"


def test_a_stopping_server_finishes_what_it_has_and_takes_nothing_new(world: World) -> None:
    running = world.ask("wait")
    world.turn()
    stopped = world.server.stop()
    for method in ("remaining", "wait"):
        with pytest.raises(errors.Stopping, match="another server of that service may take it"):
            world.ask(method).result()
    assert world.ask("prpc.health").result()["state"] == "stopping"
    assert not stopped.done()
    world.handlers.gate.set_result("open")
    assert running.result() == "open"
    assert stopped.done()


@pytest.mark.parametrize(
    ("name", "value"), [("tasks_max", 0), ("queue_calls_max", -1), ("queue_bytes_max", 1.5)]
)
def test_impossible_bounds_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError, match=name):
        Bounds(**{name: value})
