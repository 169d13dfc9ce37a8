"""A coroutine that awaits a descriptor, and what it leaves behind however that ends."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator

import pytest

from shard import CancelledError, Reactor, sleep
from shard.loop.readiness import until_ready
from tests.helpers import ManualClock

PATIENCE_S = 20.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    # as the control loop's: asyncio's guest would watch a descriptor of its own
    reactor = Reactor(time.monotonic, hosts_asyncio=False)
    watched = reactor.watched
    yield reactor
    assert reactor.watched == watched, "it watches what nobody awaits"
    assert not len(reactor.timers)
    reactor.close()


def turn_until_done(reactor: Reactor, task: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not task.done():  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        if not reactor.poll(time.monotonic()):
            reactor.park(0.01)


def test_it_goes_on_when_there_is_something_to_read(reactor: Reactor, pair: Pair) -> None:
    one, two = pair

    async def read() -> bytes:
        await until_ready(one, select.EPOLLIN, time.monotonic() + PATIENCE_S)
        return one.recv(10)

    task = reactor.spawn(read())
    reactor.poll(time.monotonic())
    assert not task.done()
    two.send(b"hello")
    turn_until_done(reactor, task)
    assert task.result() == b"hello"


def test_it_goes_on_when_the_peer_hangs_up(reactor: Reactor, pair: Pair) -> None:
    one, two = pair

    async def read() -> bytes:
        await until_ready(one, select.EPOLLIN, time.monotonic() + PATIENCE_S)
        return one.recv(10)

    task = reactor.spawn(read())
    two.close()
    turn_until_done(reactor, task)
    assert task.result() == b""


def test_one_after_the_other_at_one_socket(reactor: Reactor, pair: Pair) -> None:
    one, two = pair

    async def talk() -> int:
        for number in range(100):
            await until_ready(one, select.EPOLLOUT, time.monotonic() + PATIENCE_S)
            one.send(bytes([number]))
            await until_ready(two, select.EPOLLIN, time.monotonic() + PATIENCE_S)
            assert two.recv(10) == bytes([number])
        return number

    task = reactor.spawn(talk())
    turn_until_done(reactor, task)
    assert task.result() == 99


def test_after_its_deadline_it_is_a_timeout(clock: ManualClock, pair: Pair) -> None:
    reactor = Reactor(clock)

    async def read() -> None:
        await until_ready(pair[0], select.EPOLLIN, clock.now + 5.0)

    task = reactor.spawn(read())
    reactor.poll(clock.advance(4.9))
    assert not task.done()
    reactor.poll(clock.advance(0.2))
    reactor.poll(clock.now)
    with pytest.raises(TimeoutError):
        task.result()
    reactor.close()


def test_ready_in_the_very_turn_of_the_deadline_it_wakes_its_task_once(
    clock: ManualClock, pair: Pair
) -> None:
    """A second time the task would awake from what it awaits by then."""
    reactor = Reactor(clock)
    one, two = pair
    steps = []

    async def read() -> None:
        with contextlib.suppress(TimeoutError):
            await until_ready(one, select.EPOLLIN, clock.now + 5.0)
        steps.append("awake")
        await sleep(5.0)
        steps.append("slept")

    task = reactor.spawn(read())
    two.send(b"x")
    clock.advance(5.1)
    for _ in range(40):
        reactor.poll(clock.now)
    assert steps == ["awake"]
    for _ in range(2):
        reactor.poll(clock.advance(5.1))
    assert task.done()
    reactor.close()


def test_cancelled_it_watches_no_longer(reactor: Reactor, pair: Pair) -> None:
    async def read() -> None:
        await until_ready(pair[0], select.EPOLLIN, time.monotonic() + PATIENCE_S)

    task = reactor.spawn(read())
    reactor.poll(time.monotonic())
    task.cancel()
    turn_until_done(reactor, task)
    with pytest.raises(CancelledError):
        task.result()
    pair[1].send(b"late")
    for _ in range(40):
        reactor.poll(time.monotonic())


def test_what_the_system_does_not_watch_is_its_error(reactor: Reactor) -> None:
    """epoll takes no plain file; so it refuses one descriptor too many."""

    async def read() -> None:
        with open(__file__, "rb") as file:
            await until_ready(file, select.EPOLLIN, time.monotonic() + PATIENCE_S)

    task = reactor.spawn(read())
    turn_until_done(reactor, task)
    with pytest.raises(PermissionError):
        task.result()
