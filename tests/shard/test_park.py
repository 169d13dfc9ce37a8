"""A reactor that sleeps: what ends it, what it tells its sources, and what is counted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from shard import Reactor
from shard.memory import memory_order
from tests.helpers import ManualClock
from tests.shard.sources import Source

PATIENCE_S = 20.0


def test_parking_tells_the_sources_and_does_not_sleep_on_work(reactor: Reactor) -> None:
    source = Source()
    reactor.add_source(source)
    source.work = 1
    parks = reactor.parks
    reactor.park(PATIENCE_S)
    assert reactor.parks == parks
    assert source.slept == [True, False]
    assert not reactor.parked


def test_parking_lasts_no_longer_than_the_next_timer(reactor: Reactor, clock: ManualClock) -> None:
    reactor.call_later(0.01, bool)
    started = time.monotonic()
    reactor.park(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
    reactor.call_soon(bool)
    reactor.park(PATIENCE_S)  # something is ready: it does not even sleep


def test_another_thread_ends_a_park(reactor: Reactor) -> None:
    for wake in (reactor.wake, lambda: reactor.call_soon(bool)):

        def when_parked(wake: object = wake) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while not reactor.parked and time.monotonic() < deadline:
                os.sched_yield()
            wake()  # type: ignore[operator]

        thread = threading.Thread(target=when_parked)
        thread.start()
        reactor.park(PATIENCE_S)
        thread.join(PATIENCE_S)
        assert not reactor.parked
        reactor.poll(reactor.clock())


def test_a_wake_before_the_park_is_not_lost(reactor: Reactor) -> None:
    reactor.wake()
    started = time.monotonic()
    reactor.park(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S


def test_a_park_that_an_event_ended_counts_as_woken_and_one_out_of_time_does_not(
    reactor: Reactor,
) -> None:
    reactor.park(0.0)
    assert (reactor.parks, reactor.wakeups, reactor.late_wakes) == (1, 0, 0)
    reactor.wake()
    reactor.park(PATIENCE_S)
    assert (reactor.parks, reactor.wakeups, reactor.late_wakes) == (2, 1, 0)


class Forgetful(Source):
    """A ring whose peer publishes while we sleep; what it does about the bell is `ring`."""

    def __init__(self, ring: Callable[[], object]) -> None:
        super().__init__()
        self.looks = 0
        self.ring = ring

    def has_work(self) -> bool:
        self.looks += 1
        if self.looks == 2:  # after the sleep
            self.ring()
        return self.looks >= 2


@pytest.mark.skipif(
    not memory_order.register_fence(), reason="without membarrier every sleep is a short one"
)
def test_work_found_after_a_park_without_a_bell_is_a_lost_wake_up(reactor: Reactor) -> None:
    reactor.add_source(Forgetful(bool))
    reactor.park(0.0)
    assert (reactor.parks, reactor.wakeups, reactor.late_wakes) == (1, 0, 1)


@pytest.mark.skipif(
    not memory_order.register_fence(), reason="without membarrier every sleep is a short one"
)
def test_a_bell_that_was_about_to_ring_when_time_ran_out_is_none(reactor: Reactor) -> None:
    reactor.add_source(Forgetful(reactor.wake))
    reactor.park(0.0)
    assert (reactor.parks, reactor.wakeups, reactor.late_wakes) == (1, 1, 0)


def test_what_a_park_brought_runs_awake_in_the_next_turn(reactor: Reactor) -> None:
    source = Source()
    reactor.add_source(source)
    reading, writing = os.pipe()
    seen: list[tuple[bool, bool]] = []
    try:
        reactor.watch(reading, lambda _: seen.append((reactor.parked, source.slept[-1])))
        os.write(writing, b"x")
        reactor.park(PATIENCE_S)
        assert seen == []
        reactor.poll(0.0)
    finally:
        os.close(reading)
        os.close(writing)
    assert seen == [(False, False)]


def test_after_a_park_each_source_can_be_asked_before_the_doorbell_is_read(
    reactor: Reactor,
) -> None:
    sources = [Source(), Source()]
    for source in sources:
        reactor.add_source(source)
    reading, writing = os.pipe()
    read: list[bytes] = []
    try:
        reactor.watch(reading, lambda _: read.append(os.read(reading, 1)))
        os.write(writing, b"x")
        reactor.park(PATIENCE_S)
        for source in sources:
            source.work = 1
            assert reactor.spin(1)
            assert not source.work
        assert not read
        reactor.poll(0.0)
    finally:
        os.close(reading)
        os.close(writing)
    assert read == [b"x"]


def test_a_signal_handler_ends_a_park(reactor: Reactor) -> None:
    seen: list[str] = []
    handled = threading.Event()

    def handle(*_: object) -> None:
        if not handled.is_set():
            handled.set()
            reactor.call_soon(lambda: seen.append("from the handler"))

    previous = signal.signal(signal.SIGUSR1, handle)

    def when_parked() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reactor.parked and time.monotonic() < deadline:
            os.sched_yield()
        # Python does not see one that comes just before epoll
        while not handled.wait(0.01) and time.monotonic() < deadline:
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=when_parked)
    try:
        thread.start()
        reactor.park(PATIENCE_S)
        thread.join(PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert (reactor.parks, reactor.wakeups) == (1, 1)
    reactor.poll(reactor.clock())
    assert seen == ["from the handler"]


def test_waking_takes_no_lock_that_a_destructor_could_find_held(reactor: Reactor) -> None:
    class Wakes:
        def __del__(self) -> None:
            reactor.wake()

    real = os.eventfd_write

    def write_and_collect(fd: int, value: int) -> None:
        os.eventfd_write = real
        # its destructor runs there, while this thread is inside wake()
        other = threading.Thread(target=lambda: Wakes())
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive()
        real(fd, value)

    os.eventfd_write = write_and_collect
    try:
        reactor.wake()
    finally:
        os.eventfd_write = real
    reactor.park(PATIENCE_S)


def test_a_wake_under_way_keeps_the_descriptor_that_close_lets_go(clock: ManualClock) -> None:
    closing = Reactor(clock)
    held = closing._bell
    assert held is not None
    closing.close()
    os.eventfd_write(held.fd, 1)  # as a thread inside wake() does
    closing.wake()  # and one that comes later does nothing
