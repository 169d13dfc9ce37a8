"""A turn is bounded by time, whatever brings the work; classes share that time. On a clock that
nobody but the work moves on.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shard import DEFAULT_LIMITS, Future, Reactor, Slab
from shard import Node as Identity
from shard.loop.reactor import SPIN_WORK_MAX, TURN_SLICE_S, UNHURRIED
from shard.loop.task_class import BULK, LATENCY, TaskClass
from shard.memory.segment import Segment
from shard.transport.frame import FRAME_VERSION
from shard.transport.rings import make_rings
from shard.transport.shm_connection import RECORDS_PER_TURN, ShmConnection, connection_over
from shard.transport.socket_lane import _pack_header
from shard.transport.tcp_connection import TcpConnection
from tests.helpers import ManualClock

COST = struct.Struct("d")
STEP_S = 1e-3
EXACT_S = 1e-9  # of sums of seconds


class Lane:
    """A connection over real rings: each message that arrives takes the time that it says."""

    def __init__(self, reactor: Reactor, clock: ManualClock) -> None:
        self.slabs = Slab(), Slab()
        segment = make_rings(DEFAULT_LIMITS.ring_bytes)
        same = Segment.attach(os.dup(segment.fd))
        one, two = socket.socketpair()
        self.sender: ShmConnection = connection_over(
            one, segment, True, "receiver", DEFAULT_LIMITS, self.slabs[0]
        )
        self.receiver: ShmConnection = connection_over(
            two, same, False, "sender", DEFAULT_LIMITS, self.slabs[1]
        )
        self.clock = clock
        self.sent = 0
        self.costs: list[float] = []
        self.receiver.on_message = self.run
        self.receiver.attach(reactor)

    def run(self, body: memoryview, blocks: object = ()) -> None:
        (cost_s,) = COST.unpack(body)
        self.clock.advance(cost_s)
        self.costs.append(cost_s)

    def send(self, count: int, costs: Callable[[], float]) -> None:
        """Have so many wait."""
        while self.sent - len(self.costs) < count:
            self.sender.send(COST.pack(costs()))
            self.sent += 1

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        for slab in self.slabs:
            slab.close()


@pytest.fixture
def lanes(reactor: Reactor, clock: ManualClock) -> Iterator[list[Lane]]:
    made = [Lane(reactor, clock) for _ in range(3)]
    yield made
    for lane in made:
        lane.close()


@pytest.fixture
def lane(lanes: list[Lane]) -> Lane:
    return lanes[1]


class Ticker:
    """A timer that comes again and again, and notes how late it was."""

    def __init__(self, reactor: Reactor, clock: ManualClock, period_s: float = 0.01) -> None:
        self.reactor, self.clock, self.period_s = reactor, clock, period_s
        self.late_s: list[float] = []
        self.again()

    def again(self) -> None:
        self.due = self.clock.now + self.period_s
        self.reactor.timers.call_at(self.due, self.fire)

    def fire(self) -> None:
        self.late_s.append(self.clock.now - self.due)
        self.again()


def always(step_s: float) -> Callable[[], float]:
    return lambda: step_s


# -- a turn ----------------------------------------------------------------------------------------


def test_a_turn_ends_after_a_long_function_so_that_nobody_else_is_blamed(
    reactor: Reactor, clock: ManualClock, lanes: list[Lane]
) -> None:
    seen: list[str] = []
    lanes[0].send(1, always(0.2))
    for lane in lanes:
        lane.send(10, always(1e-5))
    reactor.call_soon(lambda: seen.append("step"))
    reactor.poll(clock())
    assert ([len(lane.costs) for lane in lanes], seen) == ([1, 0, 0], [])
    reactor.poll(clock())
    assert seen == ["step"]
    assert len(lanes[1].costs) == 10, "the one after it is first in the circle"


@pytest.mark.parametrize("step_s", [2e-5, STEP_S, 20e-3])
def test_a_turn_lasts_a_slice_and_one_step_at_most(
    reactor: Reactor, clock: ManualClock, lanes: list[Lane], step_s: float
) -> None:
    def step() -> None:
        clock.advance(step_s)
        reactor.call_soon(step)

    Ticker(reactor, clock)  # somebody may be late
    for _ in range(5):
        reactor.call_soon(step)
    for _ in range(200):
        for lane in lanes:
            lane.send(100, always(step_s))
        began = clock.now
        assert reactor.poll(began)
        assert clock.now - began <= TURN_SLICE_S + step_s + EXACT_S
    assert all(lane.costs for lane in lanes)


def test_one_message_a_turn_costs_no_look_at_the_clock(lane: Lane, reactor: Reactor) -> None:
    clock, reactor.clock = reactor.clock, pytest.fail  # type: ignore[assignment]
    lane.send(1, always(0.0))
    assert reactor.spin(3)
    assert len(lane.costs) == 1
    reactor.clock = clock


def test_where_nobody_may_be_late_the_clock_is_looked_at_now_and_then(
    reactor: Reactor, clock: ManualClock, lane: Lane
) -> None:
    lane.send(RECORDS_PER_TURN, always(STEP_S))
    reactor.poll(clock())
    assert len(lane.costs) == 1, "the first of several is looked at"
    lane.costs.clear()
    lane.sent = 0
    # cheap at first: so it may go on, and so many more before the next look
    costs = itertools.chain([0.0], itertools.repeat(STEP_S))
    while reactor.poll(clock()):
        pass
    lane.costs.clear()
    lane.sent = 0
    lane.send(RECORDS_PER_TURN, lambda: next(costs))
    reactor.poll(clock())
    assert len(lane.costs) == 1 + UNHURRIED


def test_sources_that_always_have_long_work_have_their_turns_in_a_circle(
    reactor: Reactor, clock: ManualClock, lanes: list[Lane]
) -> None:
    for _ in range(30):
        for lane in lanes:
            lane.send(50, always(STEP_S))
        reactor.poll(clock())
    counts = [len(lane.costs) for lane in lanes]
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 8


def test_answers_that_wait_for_room_leave_although_messages_never_end(
    reactor: Reactor, clock: ManualClock, lane: Lane
) -> None:
    for _ in range(10_000):
        lane.receiver.send(bytes(1000))
    assert lane.receiver.outbox_messages
    lane.sender.on_message = lambda body, blocks=(): None
    for _ in range(10_000):
        lane.send(100, always(STEP_S))
        reactor.poll(clock())
        lane.sender.poll()
        if not lane.receiver.outbox_messages:
            return
    raise AssertionError("they are still there")


# -- timers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bulk_s", [None, 2e-5, STEP_S])
@pytest.mark.parametrize("steps", [0, 10])
def test_a_timer_is_late_by_one_slice_and_one_step_at_most(
    reactor: Reactor, clock: ManualClock, lanes: list[Lane], steps: int, bulk_s: float | None
) -> None:
    ticker = Ticker(reactor, clock)

    def again(step_s: float, task_class: TaskClass) -> None:
        clock.advance(step_s)
        reactor.call_soon(lambda: again(step_s, task_class), queue=task_class)

    for _ in range(steps):
        reactor.call_soon(lambda: again(STEP_S, LATENCY))
    if bulk_s is not None:
        again(bulk_s, BULK)
    while len(ticker.late_s) < 50:
        for lane in lanes:
            lane.send(100, always(STEP_S))
        # as a shard does: a spin where a turn found nothing
        if not reactor.poll(clock()):
            reactor.spin(256)
    assert max(ticker.late_s) <= TURN_SLICE_S + STEP_S + EXACT_S


def test_whoever_spins_on_long_work_comes_back_for_the_timers_after_each_piece(
    reactor: Reactor, clock: ManualClock, lane: Lane
) -> None:
    ticker = Ticker(reactor, clock)
    pieces = 0
    while len(ticker.late_s) < 50:
        lane.send(1, always(STEP_S))
        if reactor.spin(256):
            pieces += 1
        else:
            reactor.poll(clock())
    assert max(ticker.late_s[10:]) <= 2 * STEP_S + TURN_SLICE_S + EXACT_S, "it has learnt that"
    lane.costs.clear()
    lane.sent = 0
    for _ in range(20 * SPIN_WORK_MAX):
        lane.send(1, always(0.0))
        if not reactor.spin(256):
            reactor.poll(clock())
    assert reactor._spin_work_max == SPIN_WORK_MAX, "and forgets it"


# -- descriptors -----------------------------------------------------------------------------------


def test_events_that_there_was_no_time_for_come_in_the_next_turns_each_once(
    reactor: Reactor, clock: ManualClock
) -> None:
    seen: list[int] = []
    pipes = [os.pipe() for _ in range(6)]

    def read(number: int) -> None:
        clock.advance(STEP_S)
        os.read(pipes[number][0], 1)
        seen.append(number)

    for number, (reading, writing) in enumerate(pipes):
        os.write(writing, b"x")
        reactor.watch(reading, lambda _, number=number: read(number))  # type: ignore[misc]
    ticker = Ticker(reactor, clock, 2 * STEP_S)
    for _ in range(3):
        assert reactor.poll(clock()) <= 2
    gone = next(number for number in range(6) if number not in seen)
    reactor.unwatch(pipes[gone][0])
    for _ in range(10):
        reactor.poll(clock())
    assert sorted([*seen, gone]) == list(range(6))
    assert max(ticker.late_s) <= STEP_S + TURN_SLICE_S + EXACT_S
    for number, (reading, writing) in enumerate(pipes):
        if number != gone:
            reactor.unwatch(reading)
        os.close(reading)
        os.close(writing)


@pytest.fixture
def sockets(
    reactor: Reactor, clock: ManualClock, slab: Slab
) -> Iterator[tuple[socket.socket, list[int], TcpConnection]]:
    """A peer's bare socket, what arrived, and the connection: each message takes STEP_S."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    arrived: list[int] = []
    connection = TcpConnection(
        [ours], "peer", Identity(secret=b"", incarnation=1, limits=DEFAULT_LIMITS), slab
    )

    def run(body: memoryview, blocks: object = ()) -> None:
        clock.advance(STEP_S)
        arrived.append(int.from_bytes(body, "little"))

    connection.on_message = run
    connection.attach(reactor)
    yield theirs, arrived, connection
    connection.close()
    theirs.close()


def framed(count: int) -> bytes:
    """As a connection sends them."""
    return b"".join(
        _pack_header(8, 0, FRAME_VERSION) + number.to_bytes(8, "little") for number in range(count)
    )


def test_messages_that_one_read_brought_are_handed_out_in_several_turns_and_in_order(
    reactor: Reactor, clock: ManualClock, sockets: tuple[socket.socket, list[int], TcpConnection]
) -> None:
    theirs, arrived, _ = sockets
    ticker = Ticker(reactor, clock)
    theirs.sendall(framed(300))
    for _ in range(2000):
        began = clock.now
        reactor.poll(began)
        assert clock.now - began <= TURN_SLICE_S + STEP_S + EXACT_S
        if len(arrived) == 300:
            break
    assert arrived == list(range(300))
    assert max(ticker.late_s) <= TURN_SLICE_S + STEP_S + EXACT_S


def test_a_peer_that_hangs_up_behind_its_messages_has_them_all_handed_out(
    reactor: Reactor, clock: ManualClock, sockets: tuple[socket.socket, list[int], TcpConnection]
) -> None:
    theirs, arrived, connection = sockets
    theirs.sendall(framed(300))
    theirs.close()
    for _ in range(2000):
        reactor.poll(clock())
        if connection.error is not None:
            break
    assert arrived == list(range(300))
    assert connection.error is not None


# -- shares ----------------------------------------------------------------------------------------


def share_of_bulk(
    latency_s: Callable[[], float],
    bulk_s: Callable[[], float],
    window_s: float,
    bulk: TaskClass = BULK,
) -> tuple[float, float]:
    """Messages in a ring, and steps of another class, that never end: the seconds that `bulk` had
    of `window_s`, and what it had by the reactor's own books.
    """
    clock = ManualClock(0.0)
    reactor = Reactor(clock)
    lane = Lane(reactor, clock)
    used_s = 0.0

    def step() -> None:
        nonlocal used_s
        reactor.call_soon(step, queue=bulk)
        took_s = bulk_s()
        clock.advance(took_s)
        used_s += took_s

    lane.send(RECORDS_PER_TURN, latency_s)
    reactor.poll(clock())
    reactor.call_soon(step, queue=bulk)
    began = clock.now
    while clock.now < began + window_s:
        lane.send(2 * RECORDS_PER_TURN, latency_s)
        reactor.poll(clock.now)
    took_s = clock.now - began
    booked = {one.name: one.busy_ns * 1e-9 for one in reactor.statistics()}[bulk.name]
    lane.close()
    reactor.close()
    return used_s * window_s / took_s, booked * window_s / took_s


costs = st.sampled_from([20e-6, 100e-6, 400e-6, STEP_S, 5e-3, 20e-3])


@settings(max_examples=40)
@given(
    latency=st.lists(costs, min_size=1, max_size=4),
    bulk=st.lists(costs, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@example(latency=[20e-6], bulk=[20e-3], seed=0)
@example(latency=[20e-3], bulk=[20e-6], seed=0)
@example(latency=[20e-6, 20e-3], bulk=[20e-6, 20e-3], seed=0)
def test_bulk_gets_a_tenth_of_what_plain_functions_get_whatever_either_costs(
    latency: list[float], bulk: list[float], seed: int
) -> None:
    chance = random.Random(seed)
    longest_s = max(*latency, *bulk, TURN_SLICE_S)
    window_s = 60 * longest_s
    used_s, booked_s = share_of_bulk(
        lambda: chance.choice(latency), lambda: chance.choice(bulk), window_s
    )
    assert used_s == pytest.approx(window_s / 11, rel=0.2)
    assert booked_s == pytest.approx(used_s, rel=1e-6)


@settings(max_examples=20)
@given(latency=costs, other=costs, shares=st.sampled_from([10, 100, 300, 1000, 3000, 10_000]))
def test_other_shares_miss_their_part_by_less_than_the_bound_that_is_promised(
    latency: float, other: float, shares: int
) -> None:
    window_s = 50 * max(latency, other)
    used_s, _ = share_of_bulk(always(latency), always(other), window_s, TaskClass("other", shares))
    mine, ours = LATENCY.shares, shares
    bound_s = (other * mine + (TURN_SLICE_S + latency) * ours) / (mine + ours)
    assert abs(used_s - window_s * ours / (mine + ours)) <= bound_s + max(latency, other)


def test_a_step_that_waits_is_not_charged_for_it(reactor: Reactor, clock: ManualClock) -> None:
    def step() -> None:
        clock.advance(STEP_S)
        waited = reactor.begin_waiting()
        inner = reactor.begin_waiting()  # a second one, whose wait lies in the first one's
        clock.advance(1.0)
        reactor.end_waiting(*inner)
        clock.advance(9.0)
        reactor.end_waiting(*waited)
        clock.advance(STEP_S)

    reactor.call_soon(step, queue=BULK)
    reactor.poll(clock())
    latency, bulk = reactor.statistics()
    assert (bulk.steps, bulk.waiting) == (1, 0)
    assert bulk.busy_ns == bulk.longest_ns == pytest.approx(2 * STEP_S * 1e9)
    assert latency.busy_ns == 0


def test_statistics_of_classes_are_what_ran_and_waits(
    reactor: Reactor, clock: ManualClock, lane: Lane
) -> None:
    for cost_s in (STEP_S, 3 * STEP_S, STEP_S):
        reactor.call_soon(lambda cost_s=cost_s: clock.advance(cost_s), queue=BULK)  # type: ignore[misc]
    lane.send(4, always(STEP_S))
    for _ in range(2):
        reactor.poll(clock())
    latency, bulk = reactor.statistics()
    assert (latency.name, latency.shares, latency.steps) == ("latency", 1000, 1)
    assert latency.busy_ns == latency.longest_ns == pytest.approx(STEP_S * 1e9)
    assert (bulk.name, bulk.shares, bulk.steps, bulk.waiting) == ("bulk", 100, 1, 2)
    while reactor.poll(clock()):
        pass
    _, bulk = reactor.statistics()
    assert (bulk.steps, bulk.waiting) == (3, 0)
    assert bulk.longest_ns == pytest.approx(3 * STEP_S * 1e9)


# -- inheritance -----------------------------------------------------------------------------------


def test_what_a_task_spawns_is_of_its_class_unless_it_says_otherwise(
    reactor: Reactor, clock: ManualClock
) -> None:
    seen: list[str] = []
    gate = Future()

    async def note(name: str) -> None:
        seen.append(name)
        await gate

    async def spawn() -> None:
        reactor.spawn(note("bulk"))
        reactor.spawn(note("latency"), queue=LATENCY)
        seen.append("spawned")

    reactor.spawn(spawn(), queue=BULK)
    reactor.poll(clock())
    assert seen[0] == "spawned", "neither runs on the spawning step's account"
    while reactor.poll(clock()):
        pass
    assert sorted(seen) == ["bulk", "latency", "spawned"]
    assert reactor.statistics()[1].steps == 2
    gate.set_result(None)
    while reactor.poll(clock()):
        pass
    assert reactor.statistics()[1].steps == 3
