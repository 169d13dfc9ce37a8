"""Calls of several classes over one lane between two shards, on a clock that only they move on."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shard import BULK, DEFAULT_LIMITS, CancelledError, Future, Gate, Reactor, Slab, in_class
from shard.group.mesh import ShardChannel, Tally
from shard.memory.segment import Segment
from shard.transport.rings import make_rings
from shard.transport.shm_connection import connection_over
from tests.helpers import ManualClock

STEP_S = 1e-3
TURNS_MAX = 10_000

clock = ManualClock()
ran: list[tuple[str, float]] = []


def plain(cost_s: float) -> float:
    """Takes so long."""
    clock.advance(cost_s)
    ran.append(("plain", cost_s))
    return cost_s


@in_class(BULK)
def bulk(cost_s: float) -> float:
    """The same in class BULK."""
    clock.advance(cost_s)
    ran.append(("bulk", cost_s))
    return cost_s


async def later(cost_s: float) -> float:
    """A coroutine function."""
    return plain(cost_s)


def fails() -> None:
    """Raises."""
    raise KeyError("as it should")


def promise() -> Future:
    """A plain function whose answer comes later."""
    future = Future()
    future.set_result("promised")
    return future


class Both:
    """The application's end of a lane and a shard's, each with its reactor."""

    def __init__(self) -> None:
        segment = make_rings(DEFAULT_LIMITS.ring_bytes)
        same = Segment.attach(os.dup(segment.fd))
        ours, theirs = socket.socketpair()
        self.slabs = Slab(), Slab()
        connections = (
            connection_over(ours, segment, True, "shard", DEFAULT_LIMITS, self.slabs[0]),
            connection_over(theirs, same, False, "app", DEFAULT_LIMITS, self.slabs[1]),
        )
        self.reactors = Reactor(clock), Reactor(clock)
        self.gate = Gate()
        self.app, self.shard = (
            ShardChannel(
                connection,
                reactor,
                None,
                slab,
                Tally(),
                self.gate,
                lambda: None,
                lambda lane, error: None,
            )
            for connection, reactor, slab in zip(
                connections, self.reactors, self.slabs, strict=True
            )
        )
        for lane in (self.app, self.shard):
            lane.attach()
        ran.clear()

    def turn(self) -> None:
        for reactor in self.reactors:
            reactor.poll(clock())

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if done():
                return
            self.turn()
        raise AssertionError(f"not within {TURNS_MAX} turns")

    def close(self) -> None:
        for lane in (self.app, self.shard):
            lane.close()
        for reactor in self.reactors:
            reactor.close()
        for slab in self.slabs:
            slab.close()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.close()


costs = st.lists(st.sampled_from([20e-6, 400e-6, STEP_S, 20e-3]), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=30)
@given(plain_s=costs, bulk_s=costs, seed=st.integers(0, 100))
@example(plain_s=[20e-6], bulk_s=[20e-3], seed=0)
@example(plain_s=[20e-3], bulk_s=[20e-6], seed=0)
@example(plain_s=[20e-6, 20e-3], bulk_s=[20e-6], seed=0)
def test_bulk_calls_behind_plain_ones_in_the_same_ring_have_their_part_all_the_same(
    plain_s: list[float], bulk_s: list[float], seed: int
) -> None:
    made, chance = Both(), random.Random(seed)
    # so much of each is under way that neither runs out in a step of the other
    kinds = (
        (plain, plain_s, 64 + int(0.02 / min(plain_s))),
        (
            bulk,
            bulk_s,
            64 + int(0.02 / min(bulk_s)),
        ),
    )
    under_way: list[deque[Future]] = [deque(), deque()]

    def refill() -> None:
        for (function, each_s, count), waiting in zip(kinds, under_way, strict=True):
            while waiting and waiting[0].done():
                waiting.popleft()
            while len(waiting) < count:
                waiting.append(made.app.submit(function, (chance.choice(each_s),)))

    refill()
    made.until(lambda: any(name == "bulk" for name, _ in ran))
    ran.clear()
    began, window_s = clock.now, 60 * max(*plain_s, *bulk_s, 1e-4)
    while clock.now < began + window_s:
        refill()
        made.turn()
    took_s = clock.now - began
    bulk_took_s = sum(cost_s for name, cost_s in ran if name == "bulk")
    made.close()
    assert bulk_took_s == pytest.approx(took_s / 11, rel=0.2)


def test_functions_begin_in_their_order_whether_or_not_they_wait(both: Both) -> None:
    calls = [both.app.submit(bulk, (STEP_S,))]
    for number in range(200):
        calls.append(both.app.submit(later if number % 3 else plain, (number * 1e-6,)))
        if number % 7 == 0:
            both.turn()
    both.until(lambda: all(call.done() for call in calls))
    plain_ones = [cost_s for name, cost_s in ran if name == "plain"]
    assert plain_ones == sorted(plain_ones)
    assert len(plain_ones) == 200
    assert [call.result() for call in calls[1:]] == plain_ones


def test_what_waits_as_a_step_is_answered_as_ever(both: Both) -> None:
    calls = [both.app.submit(bulk, (STEP_S,))]
    both.until(calls[0].done)
    calls = [
        both.app.submit(function, args)
        for function, args in (
            (plain, (STEP_S,)),
            (later, (STEP_S,)),
            (promise, ()),
            (fails, ()),
            (plain, (2 * STEP_S,)),
            (bulk, (STEP_S,)),
        )
    ]
    gone = both.app.submit(plain, (7.0,))
    gone.cancel()
    both.until(lambda: all(call.done() for call in calls))
    assert [call.result() for call in calls if call is not calls[3]] == [
        STEP_S,
        STEP_S,
        "promised",
        2 * STEP_S,
        STEP_S,
    ]
    with pytest.raises(KeyError, match="as it should"):
        calls[3].result()
    with pytest.raises(CancelledError):
        gone.result()
    for _ in range(10):
        both.turn()
    assert ("plain", 7.0) not in ran, "it had not begun"
    assert not both.gate.inside


def test_a_lane_without_classes_runs_plain_functions_in_the_turn_that_finds_them(
    both: Both,
) -> None:
    calls = [both.app.submit(plain, (0.0,)) for _ in range(10)]
    both.reactors[1].poll(clock())
    assert len(ran) == 10
    both.until(lambda: all(call.done() for call in calls))


def test_a_shard_that_stops_ends_the_functions_that_it_has_taken_on(both: Both) -> None:
    first = both.app.submit(bulk, (STEP_S,))
    both.until(first.done)
    calls = [both.app.submit(plain, (STEP_S,)) for _ in range(5)]
    both.turn()
    ended = both.gate.close()
    assert not ended.done()
    both.until(ended.done)
    both.until(lambda: all(call.done() for call in calls))
    assert sum(call.error() is None for call in calls) == len(ran) - 1 >= 1


def test_a_coroutine_that_began_as_a_step_is_cancelled_at_its_await(both: Both) -> None:
    first = both.app.submit(bulk, (STEP_S,))
    both.until(first.done)
    calls = [both.app.submit(plain, (STEP_S,)), both.app.submit(waits, ())]
    both.until(lambda: ("waits", 0.0) in ran)
    assert both.gate.inside, "a shard that stops waits for it, as for any other task"
    calls[1].cancel()
    both.until(lambda: not both.gate.inside)
    assert ran[-1] == ("cancelled", 0.0)


async def waits() -> None:
    """Waits for ever, and says what became of that."""
    ran.append(("waits", 0.0))
    try:
        await Future()
    except CancelledError:
        ran.append(("cancelled", 0.0))
        raise
