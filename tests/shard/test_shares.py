"""Who runs next: classes of work with shares of the reactor's time, by a clock that each step moves
on itself.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest

from shard import Future, Reactor, ShardError
from shard.loop.queues import ReadyQueues
from shard.loop.reactor import DESCRIPTOR_TURNS, READY_STEPS_MAX, TURN_SLICE_S
from shard.loop.task_class import BULK, LATENCY, SHARES_MAX, TaskClass, class_of, in_class
from shard.memory.counters import CLASSES_MAX
from tests.helpers import ManualClock
from tests.shard.sources import Source


class CountingClock(ManualClock):
    """Counts how often it is read."""

    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def reactor(clock: CountingClock) -> Iterator[Reactor]:
    made = Reactor(clock)
    yield made
    made.close()


class Load:
    """Steps of one class that take `step_s` each;
    an endless one always has another step waiting.
    """

    def __init__(
        self, reactor: Reactor, clock: ManualClock, queue: TaskClass, step_s: float
    ) -> None:
        self.reactor, self.clock, self.queue, self.step_s = reactor, clock, queue, step_s
        self.used_s = 0.0
        self.endless = False

    def step(self) -> None:
        if self.endless:
            self.reactor.call_soon(self.step, queue=self.queue)
        self.clock.advance(self.step_s)
        self.used_s += self.step_s

    def start(self) -> Load:
        self.endless = True
        self.reactor.call_soon(self.step, queue=self.queue)
        return self


def turn(reactor: Reactor, clock: ManualClock, seconds: float) -> None:
    """Turn for so long, by the clock."""
    end = clock.now + seconds
    while clock.now < end:
        assert reactor.poll(clock.now)


# -- shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency_step_s", "bulk_step_s"), [(10e-6, 10e-6), (5e-6, 2e-3), (1e-3, 20e-6)]
)
def test_two_classes_that_always_want_to_run_get_their_time_by_shares(
    reactor: Reactor, clock: CountingClock, latency_step_s: float, bulk_step_s: float
) -> None:
    latency = Load(reactor, clock, LATENCY, latency_step_s).start()
    bulk = Load(reactor, clock, BULK, bulk_step_s).start()
    turn(reactor, clock, 2.0)
    part = BULK.shares / (BULK.shares + LATENCY.shares)
    # steps are whole, and so are turns
    rest_s = 2 * max(latency_step_s, bulk_step_s) + TURN_SLICE_S
    assert bulk.used_s == pytest.approx(2.0 * part, abs=rest_s)
    assert latency.used_s == pytest.approx(2.0 * (1 - part), abs=rest_s)


def test_more_classes_share_likewise(reactor: Reactor, clock: CountingClock) -> None:
    classes = [LATENCY, BULK, TaskClass("scan", 300), TaskClass("index", 600)]
    loads = [
        Load(reactor, clock, each, 20e-6 * (at + 1)).start() for at, each in enumerate(classes)
    ]
    turn(reactor, clock, 5.0)
    for load in loads:
        assert load.used_s == pytest.approx(5.0 * load.queue.shares / 2000, rel=0.002)


def test_neither_waits_for_longer_than_the_other_ones_part_of_a_step(
    reactor: Reactor, clock: CountingClock
) -> None:
    latency, bulk = (
        Load(reactor, clock, LATENCY, 20e-6).start(),
        Load(reactor, clock, BULK, 1e-3).start(),
    )
    waits = {"latency": 0.0, "bulk": 0.0}
    last = {"latency": (0.0, clock.now), "bulk": (0.0, clock.now)}
    for _ in range(2000):
        reactor.poll(clock.now)
        for load in (latency, bulk):
            used_s, since = last[load.queue.name]
            if load.used_s != used_s:
                last[load.queue.name] = (load.used_s, clock.now)
            else:
                waits[load.queue.name] = max(waits[load.queue.name], clock.now - since)
    assert waits["bulk"] < 11e-3  # ten times its step of 1 ms, as its shares are
    assert waits["latency"] < 1.1e-3  # one bulk step


def test_a_class_that_was_idle_has_saved_up_nothing(reactor: Reactor, clock: CountingClock) -> None:
    latency = Load(reactor, clock, LATENCY, 20e-6).start()
    scan = Load(reactor, clock, TaskClass("scan", 1000), 20e-6).start()
    turn(reactor, clock, 1.0)
    idle = Load(reactor, clock, TaskClass("index", 1000), 20e-6)
    turn(reactor, clock, 5.0)
    before = latency.used_s, scan.used_s
    idle.start()
    turn(reactor, clock, 1.5)
    for used_s in (idle.used_s, latency.used_s - before[0], scan.used_s - before[1]):
        assert used_s == pytest.approx(0.5, rel=0.002)


def test_bulk_work_that_comes_after_an_hour_of_others_takes_no_more_than_its_part(
    reactor: Reactor, clock: CountingClock
) -> None:
    latency = Load(reactor, clock, LATENCY, 20e-6).start()
    for _ in range(10):
        reactor.poll(clock.now)
    clock.advance(3600.0)
    bulk = Load(reactor, clock, BULK, 20e-6).start()
    before = latency.used_s
    turn(reactor, clock, 1.1)
    assert bulk.used_s == pytest.approx(0.1, abs=1e-3)
    assert latency.used_s - before == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("alone_s", "wait_s"), [(0.0, 10.0), (4.0, 6.0), (3600.0, 0.0)])
def test_the_debt_of_one_long_step_is_paid_off_while_latency_is_alone(
    reactor: Reactor, clock: CountingClock, alone_s: float, wait_s: float
) -> None:
    latency = Load(reactor, clock, LATENCY, 1e-3).start()
    bulk = Load(reactor, clock, BULK, 1.0)
    reactor.call_soon(bulk.step, queue=BULK)
    while not bulk.used_s:
        reactor.poll(clock.now)
    reactor.poll(clock.now)  # finds that bulk has no more
    began, before = clock.now, latency.used_s
    clock.advance(alone_s)  # as latency alone would take it
    reactor.call_soon(bulk.step, queue=BULK)
    while bulk.used_s == 1.0:
        reactor.poll(clock.now)
    assert latency.used_s - before == pytest.approx(wait_s, abs=0.2)
    assert clock.now > began


# -- what a turn may take --------------------------------------------------------------------------


def test_one_step_a_turn_of_latency_alone_costs_no_look_at_the_clock(
    reactor: Reactor, clock: CountingClock
) -> None:
    reactor.add_source(Source())
    Load(reactor, clock, LATENCY, 1e-6).start()
    clock.reads = 0
    for _ in range(100):
        reactor.poll(clock.now)
    # before descriptors are asked
    assert clock.reads <= 100 // DESCRIPTOR_TURNS


def test_after_bulk_work_has_ended_the_clock_is_left_alone_again(
    reactor: Reactor, clock: CountingClock
) -> None:
    reactor.add_source(Source())
    Load(reactor, clock, LATENCY, 1e-6).start()
    reactor.call_soon(bool, queue=BULK)
    for _ in range(3):
        reactor.poll(clock.now)
    reads = clock.reads
    for _ in range(100):
        reactor.poll(clock.now)
    assert clock.reads - reads <= 100 // DESCRIPTOR_TURNS
    assert reads


@pytest.mark.parametrize("with_latency", [False, True])
def test_a_turn_with_bulk_work_goes_back_to_the_sources_after_its_slice(
    reactor: Reactor, clock: CountingClock, with_latency: bool
) -> None:
    if with_latency:
        Load(reactor, clock, LATENCY, TURN_SLICE_S / 10).start()
    Load(reactor, clock, BULK, TURN_SLICE_S / 4).start()
    for _ in range(100):
        started = clock.now
        reactor.poll(clock.now)
        assert clock.now - started < 1.3 * TURN_SLICE_S


def test_a_bulk_step_longer_than_the_slice_is_one_a_turn(
    reactor: Reactor, clock: CountingClock
) -> None:
    Load(reactor, clock, BULK, 10 * TURN_SLICE_S).start()
    assert [reactor.poll(clock.now) for _ in range(5)] == [1] * 5


def test_steps_that_take_no_time_are_bounded_by_their_number(
    reactor: Reactor, clock: CountingClock
) -> None:
    for _ in range(READY_STEPS_MAX + 10):
        reactor.call_soon(bool, queue=BULK)
    assert [reactor.poll(clock.now) for _ in range(3)] == [READY_STEPS_MAX, 10, 0]


def test_steps_of_one_class_keep_their_order(reactor: Reactor, clock: CountingClock) -> None:
    seen: list[int] = []
    for number in range(200):
        reactor.call_soon(functools.partial(seen.append, number), queue=BULK)
    while reactor.poll(clock.now):
        pass
    assert seen == list(range(200))


def test_a_step_that_raises_takes_no_other_with_it(reactor: Reactor, clock: CountingClock) -> None:
    seen: list[str] = []

    def fail() -> None:
        raise KeyError("once")

    for step in (lambda: seen.append("before"), fail, lambda: seen.append("after")):
        reactor.call_soon(step, queue=BULK)
    with pytest.raises(KeyError, match="once"):
        reactor.poll(clock.now)
    reactor.poll(clock.now)
    assert seen == ["before", "after"]


def test_a_reactor_with_bulk_work_does_not_sleep_nor_spin(reactor: Reactor) -> None:
    reactor.call_soon(bool, queue=BULK)
    assert reactor.spin(1000) == 0
    reactor.park(60.0)
    assert reactor.parks == 0


def test_steps_that_other_threads_queue_while_the_class_runs_empty_all_run(
    reactor: Reactor,
) -> None:
    count, threads = 2000, 4
    seen: list[int] = []

    def queue_steps() -> None:
        for number in range(count):
            reactor.call_soon(functools.partial(seen.append, number), queue=BULK)

    started = [threading.Thread(target=queue_steps) for _ in range(threads)]
    for thread in started:
        thread.start()
    while any(thread.is_alive() for thread in started):
        reactor.poll(reactor.clock())
    while reactor.poll(reactor.clock()):
        pass
    assert len(seen) == count * threads
    assert not reactor.is_shared()


# -- tasks -----------------------------------------------------------------------------------------


def test_a_bulk_task_waits_its_turn_from_the_first_step_on(
    reactor: Reactor, clock: CountingClock
) -> None:
    steps: list[int] = []
    gate = Future()

    async def work() -> str:
        steps.append(1)
        await gate
        steps.append(2)
        return "end"

    task = reactor.spawn(work(), queue=BULK)
    assert steps == []
    reactor.poll(clock.now)
    assert steps == [1]
    gate.set_result(None)
    assert reactor.is_shared()  # the later step is of the same class
    reactor.poll(clock.now)
    assert task.result() == "end"


def test_a_reactor_that_ends_drops_tasks_that_never_began(clock: CountingClock) -> None:
    closing = Reactor(clock)
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    task = closing.spawn(work(), queue=BULK)
    closing.close()
    # or Python would warn about it
    assert inspect.getcoroutinestate(task.coroutine) == inspect.CORO_CLOSED
    assert ran == []


# -- classes ---------------------------------------------------------------------------------------


@in_class(BULK)
def marked() -> None:
    """A function of a class."""


class Marked:
    @in_class(BULK)
    def method(self) -> None:
        """A method of a class."""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (marked, BULK),
        (Marked().method, BULK),
        (Marked.method, BULK),
        (len, LATENCY),
        (lambda: None, LATENCY),
    ],
)
def test_a_functions_class_is_what_it_was_marked_with(
    function: Callable[..., object], expected: TaskClass
) -> None:
    assert class_of(function) is expected


def test_a_class_that_came_from_another_process_is_the_same_class(
    reactor: Reactor, clock: CountingClock
) -> None:
    seen: list[int] = []
    reactor.call_soon(lambda: seen.append(1), queue=BULK)
    reactor.call_soon(lambda: seen.append(2), queue=pickle.loads(pickle.dumps(BULK)))
    reactor.call_soon(lambda: seen.append(3), queue=pickle.loads(pickle.dumps(LATENCY)))
    assert len(reactor._others) == 1
    while reactor.poll(clock.now):
        pass
    assert sorted(seen) == [1, 2, 3]


@pytest.mark.parametrize("shares", [0, -1, SHARES_MAX + 1])
def test_impossible_shares_are_refused(shares: int) -> None:
    with pytest.raises(
        ValueError, match=f"'odd' with {shares} shares: 1 to {SHARES_MAX} are possible"
    ):
        TaskClass("odd", shares)


def test_a_class_too_many_is_refused(clock: ManualClock) -> None:
    queues = ReadyQueues(clock)
    for number in range(CLASSES_MAX - 1):
        queues.add(TaskClass(f"class {number}", 1), bool)
    with pytest.raises(
        ShardError, match=f"'another' is one more than the {CLASSES_MAX} that a reactor takes"
    ):
        queues.add(TaskClass("another", 1), bool)
