"""Callbacks of calls run where handlers run: under no lock of somebody who waits, and free to make
calls. The server is a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from prpc_engine import Call, Master, RpcClient, RpcService
from prpc_engine.errors import Closed, DeadlineExceeded
from shard import gather
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_connected
from tests.shard.processes import in_fork


class World(NamedTuple):
    """One server called "test" in a process of its own, and a client of it in this one."""

    service: RpcService
    client: RpcClient


@pytest.fixture(params=["shm", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with (
        Master() as master,
        ServerProcess(master.address, "test", request.param) as server,
        RpcService(master=master.address, transports=[request.param]) as service,
    ):
        assert server.pid
        client = service.create_client("test", timeout_s=PATIENCE_S)
        client.call("echo", 0)
        wait_connected(client)
        yield World(service, client)


class Heard:
    """A callback that notes its thread, and what its call ended with."""

    def __init__(self) -> None:
        self._there: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()

    def __call__(self, call: Call) -> None:
        self._there.put((threading.current_thread().name, call.error() or call.result()))

    def next(self) -> tuple[str, object]:
        """The next one's."""
        return self._there.get(timeout=PATIENCE_S)


def here() -> str:
    return threading.current_thread().name


def test_a_callback_never_runs_in_a_thread_that_waits_for_a_call(world: World) -> None:
    heard = Heard()
    for number in range(200):
        world.client.submit("echo", number).add_done_callback(heard)
        assert world.client.call("echo", -number) == -number
    found = [heard.next() for _ in range(200)]
    assert [value for _, value in found] == list(range(200))
    assert here() not in {name for name, _ in found}


def test_a_wait_under_a_lock_that_a_callback_takes_ends_at_its_deadline(
    world: World, fifo: str
) -> None:
    lock, taken = threading.Lock(), threading.Event()

    def take(_: Call) -> None:
        with lock:
            taken.set()

    with lock:
        world.client.submit("echo", 1).add_done_callback(take)
        with pytest.raises(DeadlineExceeded):
            world.client.call("read_fifo", fifo, timeout_s=0.2)
        assert not taken.is_set()
    assert taken.wait(PATIENCE_S)
    with open(fifo, "w") as file:
        file.write("go on")
    assert world.client.call("echo", 2) == 2


def test_a_callback_may_call_wait_and_follow_what_it_calls(world: World) -> None:
    heard = Heard()

    def follow(call: Call) -> None:
        number = int(call.result())
        assert world.client.call("echo", number) == number
        if number:
            world.client.submit("echo", number - 1).add_done_callback(follow)
        else:
            heard(call)

    for _ in range(3):
        world.client.submit("echo", 30).add_done_callback(follow)
    for number in range(100):  # meanwhile
        assert world.client.call("echo", number) == number
    assert [heard.next()[1] for _ in range(3)] == [0, 0, 0]


def test_callbacks_come_although_no_thread_ever_waits(world: World) -> None:
    heard = Heard()
    for number in range(50):
        call = world.client.submit("echo", number)
        for _ in range(2):  # when it ends, and when it has ended
            call.add_done_callback(heard)
            name, value = heard.next()
            assert value == number
            assert name != here()


def test_the_end_of_a_call_that_is_given_up_or_late_or_cut_is_told_there_too(
    world: World, fifo: str
) -> None:
    heard = Heard()
    given_up = world.client.submit("read_fifo", fifo)
    given_up.add_done_callback(heard)
    given_up.cancel()
    late = world.client.submit("read_fifo", fifo, timeout_s=0.01)
    late.add_done_callback(heard)
    found = [heard.next() for _ in range(2)]
    assert sorted(type(error).__name__ for _, error in found) == ["Cancelled", "DeadlineExceeded"]
    cut = world.client.submit("read_fifo", fifo)
    cut.add_done_callback(heard)
    world.service.close()
    found.append(heard.next())
    assert isinstance(found[-1][1], Closed)
    assert here() not in {name for name, _ in found}
    cut.add_done_callback(heard)  # of a service that is closed
    assert heard.next() == (here(), found[-1][1])
    with open(fifo, "w") as file:
        os.unlink(fifo)  # those that begin yet find nothing to wait for
        file.write("go on")


def test_callbacks_of_calls_that_are_awaited_in_asyncio_run_in_its_loop(world: World) -> None:
    heard = Heard()

    async def work() -> set[str]:
        for number in range(50):
            call = world.client.submit("echo", number)
            call.add_done_callback(heard)
            assert await call == number
        whole = gather([world.client.submit("echo", number) for number in range(5)])
        assert await whole == list(range(5))
        return {await asyncio.to_thread(heard.next) for _ in range(50)}  # type: ignore[misc]

    names = {name for name, _ in asyncio.run(asyncio.wait_for(work(), PATIENCE_S))}  # type: ignore[misc]
    assert here() in names


def test_in_a_fork_nothing_is_called_back_but_what_ends_there(world: World, fifo: str) -> None:
    heard = Heard()
    call = world.client.submit("read_fifo", fifo)
    call.add_done_callback(heard)

    def end() -> None:
        call.end(KeyError("in the fork"))
        name, error = heard.next()
        assert name == threading.main_thread().name
        assert isinstance(error, KeyError)

    assert in_fork(end) == 0
    with open(fifo, "w") as file:
        file.write("in the parent")
    name, value = heard.next()
    assert value == "in the parent"
    assert name != here()
