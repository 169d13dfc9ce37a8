"""A handler that keeps its reactor from turning is named, with its stack; a reactor that rests
costs its watchdog nothing.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shard import Reactor
from shard.loop.stall import (
    FRAMES_MAX,
    REPORTS_PER_MINUTE,
    StallCheck,
    StallDetector,
    StallFinding,
    whereabouts,
)
from tests.helpers import ManualClock

PATIENCE_S = 20.0
BUDGET_S = 0.125  # exact in binary, as is its half: the sums of the clock are, too
LOOK_S = BUDGET_S / 2


# -- the check: by a clock that the test holds -----------------------------------------------------


class Watched:
    """A check and the reactor that it looks at, every half budget."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.check = StallCheck(BUDGET_S)
        self.turns = 0

    def look(
        self, moved: bool = False, parked: bool = False, after_s: float = LOOK_S
    ) -> StallFinding | None:
        self.turns += moved
        return self.check.check(self.clock.advance(after_s), self.turns, parked)

    def stall(self, looks: int) -> list[StallFinding]:
        """A new turn that lasts so many looks, and the turn after it."""
        found = [self.look(moved=True), *(self.look() for _ in range(looks)), self.look(moved=True)]
        return [one for one in found if one is not None]


@pytest.fixture
def watched(clock: ManualClock) -> Watched:
    return Watched(clock)


def test_a_reactor_that_turns_is_left_alone(watched: Watched) -> None:
    assert [watched.look(moved=True) for _ in range(1000)] == [None] * 1000
    assert watched.check.stalls == 0


def test_a_reactor_that_sleeps_is_left_alone_however_long(watched: Watched) -> None:
    assert watched.look(parked=True) is None
    assert watched.look(parked=True, after_s=3600.0) is None
    assert watched.look(after_s=3600.0) is None  # awake in the same turn, and only now
    assert watched.check.stalls == 0


def test_a_turn_within_its_budget_is_no_stall(watched: Watched) -> None:
    watched.look(moved=True)
    assert watched.look() is None
    assert watched.look(moved=True) is None
    assert watched.check.stalls == 0


def test_a_stall_is_told_past_its_budget_and_when_it_is_over(watched: Watched) -> None:
    first, last = watched.stall(looks=3)
    assert first == StallFinding(pytest.approx(BUDGET_S), False, 0)
    assert last == StallFinding(pytest.approx(2 * BUDGET_S), True, 0)
    assert watched.check.stalls == 1
    assert watched.check.longest_s == pytest.approx(2 * BUDGET_S)


def test_a_stall_that_ends_in_a_park_is_over_too(watched: Watched) -> None:
    watched.look(moved=True)
    watched.look()
    assert watched.look() is not None
    over = watched.look(parked=True)
    assert over is not None
    assert over.over
    assert watched.look(parked=True) is None


def test_a_long_stall_is_told_each_time_it_has_doubled(watched: Watched) -> None:
    found = watched.stall(looks=2 * 1024 + 10)
    assert len(found) == 12  # 1, 2, 4 ... 1024 budgets, and the end
    assert [one.lasted_s for one in found[:-1]] == pytest.approx(
        [BUDGET_S * 2**n for n in range(11)]
    )
    assert watched.check.stalls == 1


def test_many_stalls_are_counted_and_some_of_them_told(watched: Watched) -> None:
    found = [one for _ in range(50) for one in watched.stall(looks=3)]
    assert len(found) == 2 * REPORTS_PER_MINUTE
    assert watched.check.stalls == 50
    watched.look(moved=True, after_s=60.0)
    first, *_ = watched.stall(looks=3)
    assert first.untold == 50 - REPORTS_PER_MINUTE


def test_the_longest_counts_though_nobody_is_told(watched: Watched) -> None:
    for _ in range(REPORTS_PER_MINUTE):
        watched.stall(looks=3)
    assert watched.stall(looks=100) == []
    assert watched.check.longest_s == pytest.approx(101 * LOOK_S)


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_a_budget_must_be_more_than_nothing(budget_s: float) -> None:
    with pytest.raises(ValueError, match="leave the detector out to have none"):
        StallCheck(budget_s)


# -- whose frames ----------------------------------------------------------------------------------


def ping(depth: int, call: Callable[[], object]) -> object:
    return pong(depth - 1, call) if depth else call()


def pong(depth: int, call: Callable[[], object]) -> object:
    return ping(depth, call)


def test_a_thread_in_no_handler_is_the_reactor_itself() -> None:
    assert whereabouts(None) == ("the reactor itself", "")


def test_a_stack_is_cut_at_its_outer_end(clock: ManualClock) -> None:
    reactor = Reactor(clock)
    seen: list[tuple[str, str]] = []

    def deep_handler() -> None:
        ping(FRAMES_MAX, lambda: seen.append(whereabouts(sys._getframe())))

    reactor.call_soon(deep_handler)
    reactor.poll(clock())
    reactor.close()
    ((name, stack),) = seen
    assert "deep_handler" in name
    # the innermost, and the lambda
    assert stack.count("in ping") + stack.count("in pong") == FRAMES_MAX - 1
    assert "in deep_handler" not in stack


# -- a real reactor in a thread --------------------------------------------------------------------


class Patient:
    """A reactor turned in a thread of its own, parking at once, and its watchdog. What was reported
    is in `reports`.
    """

    def __init__(self, budget_s: float = 0.02) -> None:
        self.reactor = Reactor(time.monotonic)
        self.reports: list[str] = []
        self.reported = threading.Condition()
        self.stopping = False
        self.thread = threading.Thread(target=self.turn, name="prpc-test-reactor")
        self.thread.start()
        ident = self.thread.ident
        assert ident is not None
        self.detector = StallDetector(self.reactor, ident, budget_s, "shard 7", self.report)
        self.detector.start()

    def turn(self) -> None:
        while not self.stopping:
            if not self.reactor.poll(time.monotonic()):
                self.reactor.park(PATIENCE_S)

    def report(self, text: str) -> None:
        with self.reported:
            self.reports.append(text)
            self.reported.notify_all()

    def wait_for_report(self, *texts: str) -> str:
        """One with all of these. A machine that is busy may have others made: of a turn that lacked
        a core.
        """
        with self.reported:
            assert self.reported.wait_for(lambda: self.with_texts(*texts), PATIENCE_S), self.reports
            return self.with_texts(*texts)[0]

    def with_texts(self, *texts: str) -> list[str]:
        return [one for one in self.reports if all(text in one for text in texts)]

    def close(self) -> None:
        self.stopping = True
        self.reactor.wake()
        self.thread.join(PATIENCE_S)
        self.detector.close()
        self.reactor.close()


@pytest.fixture
def patient() -> Iterator[Patient]:
    made = Patient()
    yield made
    made.close()


def blocks_on(release: threading.Event) -> None:
    release.wait(PATIENCE_S)


def test_a_handler_that_blocks_is_named_with_its_stack_and_again_when_it_goes_on(
    patient: Patient,
) -> None:
    release = threading.Event()

    def slow_handler() -> None:
        blocks_on(release)

    patient.reactor.call_soon(slow_handler)
    # what it does, inwards
    report = patient.wait_for_report(
        "has held the reactor for", "slow_handler", "blocks_on(release)"
    )
    first, _, stack = report.partition("\n")
    assert first.startswith("shard 7: ")
    assert "slow_handler" in first
    assert "test_stall.py" in first
    assert "reactor.py" not in stack  # and nothing of ours around it
    stalls, told = patient.detector.stalls, len(patient.reports)
    assert stalls >= 1
    with patient.reported:
        assert patient.reported.wait_for(lambda: len(patient.reports) > told, PATIENCE_S), (
            "it is told again when it has doubled"
        )
    assert patient.detector.stalls == stalls, "and is one stall all the same"
    release.set()
    patient.wait_for_report("let the reactor go on after", "slow_handler")
    assert patient.detector.longest_s >= 0.04


def test_a_callback_of_a_descriptor_that_ended_a_park_is_named_too(patient: Patient) -> None:
    release = threading.Event()
    reading, writing = os.pipe()

    def socket_handler(_: int) -> None:
        patient.reactor.unwatch(reading)
        blocks_on(release)

    patient.reactor.call_soon(lambda: patient.reactor.watch(reading, socket_handler))
    os.write(writing, b"x")
    try:
        report = patient.wait_for_report(
            "has held the reactor for", "socket_handler", "blocks_on(release)"
        )
        assert "socket_handler" in report.splitlines()[0]
    finally:
        release.set()
        os.close(reading)
        os.close(writing)


def test_the_innermost_turn_is_the_one_that_stalls(patient: Patient) -> None:
    release = threading.Event()

    def waits_by_turning() -> None:
        patient.reactor.call_soon(inner_handler)
        patient.reactor.poll(time.monotonic())

    def inner_handler() -> None:
        blocks_on(release)

    patient.reactor.call_soon(waits_by_turning)
    try:
        report = patient.wait_for_report(
            "has held the reactor for", "inner_handler", "blocks_on(release)"
        )
        assert "inner_handler" in report.splitlines()[0]
    finally:
        release.set()


def test_a_stall_after_a_park_is_noticed(patient: Patient) -> None:
    for _ in range(3):
        deadline = time.monotonic() + PATIENCE_S
        while not patient.reactor.parked:
            assert time.monotonic() < deadline
            os.sched_yield()
        turned = threading.Event()
        patient.reactor.call_soon(turned.set)
        assert turned.wait(PATIENCE_S)
    release = threading.Event()
    patient.reactor.call_soon(lambda: blocks_on(release))
    patient.wait_for_report("has held the reactor for", "blocks_on(release)")
    release.set()


def test_nobody_turning_is_no_stall(clock: ManualClock) -> None:
    reactor = Reactor(clock)
    reports: list[str] = []
    detector = StallDetector(reactor, lambda: 0, 0.02, "idle", reports.append)
    for _ in range(10):
        detector.look(clock.advance(1.0))
    assert reports == []
    detector.close()
    reactor.close()


def test_progress_without_turns_counts_where_its_owner_says_so(clock: ManualClock) -> None:
    reactor = Reactor(clock)
    reports: list[str] = []
    led = [0]
    detector = StallDetector(
        reactor, threading.get_ident(), 0.02, "led", reports.append, progress=lambda: led[0]
    )
    for _ in range(10):
        led[0] += 1
        detector.look(clock.advance(1.0))
    assert reports == []
    detector.look(clock.advance(1.0))
    assert len(reports) == 1
    detector.close()
    reactor.close()


def test_with_handlers_only_a_thread_between_handlers_is_left_alone(clock: ManualClock) -> None:
    """It may lack a core, or the interpreter: the application's threads have as much of that as
    they like.
    """
    reactor = Reactor(clock)
    reports: list[str] = []
    detector = StallDetector(
        reactor, threading.get_ident(), 0.02, "inline", reports.append, handlers_only=True
    )

    def look_on() -> None:
        for _ in range(4):
            detector.look(clock.advance(1.0))

    look_on()
    assert reports == []
    reactor.call_soon(look_on)
    reactor.poll(clock())
    assert "look_on" in reports[0]
    assert detector.stalls == 1
    detector.close()
    reactor.close()


def test_a_stall_that_ends_while_it_is_told_again_keeps_the_name_it_was_told_by(
    clock: ManualClock,
) -> None:
    reactor = Reactor(clock)
    reports: list[str] = []
    # at each of four looks, and again before one tells: the turn ends within the third
    progress = iter([1, 1, 1, 1, 2, 2])
    detector = StallDetector(
        reactor, threading.get_ident(), 0.02, "led", reports.append, progress=lambda: next(progress)
    )

    def busy_handler() -> None:
        for _ in range(4):
            detector.look(clock.advance(1.0))

    reactor.call_soon(busy_handler)
    reactor.poll(clock())
    assert ["busy_handler" in text for text in reports] == [True] * 3
    assert "let the reactor go on after" in reports[-1]
    detector.close()
    reactor.close()


def test_an_infinite_budget_starts_no_thread(clock: ManualClock) -> None:
    reactor = Reactor(clock)
    detector = StallDetector(reactor, threading.get_ident(), math.inf)
    detector.start()
    assert not watching_threads()
    detector.close()
    reactor.close()


def watching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prpc-stalls"]


def test_one_thread_watches_all_and_ends_with_the_last(clock: ManualClock) -> None:
    reactors = [Reactor(clock) for _ in range(3)]
    detectors = [StallDetector(reactor, threading.get_ident()) for reactor in reactors]
    for detector in detectors:
        detector.start()
    assert len(watching_threads()) == 1
    for detector in detectors:
        assert len(watching_threads()) == 1
        detector.close()
        detector.close()
    assert not watching_threads()
    detectors[0].start()
    assert len(watching_threads()) == 1, "it begins anew"
    detectors[0].close()
    for reactor in reactors:
        reactor.close()


def test_modules_of_the_engine_can_be_named_one_by_one(clock: ManualClock) -> None:
    reactor = Reactor(clock)
    seen: list[tuple[str, str]] = []

    def handler() -> None:
        seen.append(whereabouts(sys._getframe(), ("shard", __name__)))
        seen.append(whereabouts(sys._getframe(), ("shard", __name__.rpartition(".")[0])))
        seen.append(whereabouts(sys._getframe(), ("shard", "tests.shard.test_st")))

    reactor.call_soon(lambda: ping(2, handler))
    reactor.poll(clock())
    reactor.close()
    assert ["lambda" in name for name, _ in seen] == [False, False, True]


def test_closing_ends_the_watch_whatever_the_reactor_does(patient: Patient) -> None:
    release = threading.Event()
    patient.reactor.call_soon(lambda: blocks_on(release))
    patient.wait_for_report("has held the reactor for", "blocks_on(release)")
    patient.detector.close()
    patient.detector.close()
    assert not watching_threads()
    release.set()
