"""The verbs in a user's asyncio loop: calls, streams, what cancels them, and what a loop does to a
server beside it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, NamedTuple

import pytest

from prpc_engine import Master, RpcClient, RpcService, errors, incoming
from tests.prpc_engine.blackhole import Blackhole
from tests.prpc_engine.handlers import Handlers
from tests.prpc_engine.inside import looks_up, node_of
from tests.prpc_engine.processes import ServerProcess, wait_connected, wait_until

PATIENCE_S = 20.0  # a test that waits longer has failed


class World(NamedTuple):
    """A server in a process of its own, and a client of it here."""

    service: RpcService
    client: RpcClient
    server: ServerProcess


@pytest.fixture(params=["shm", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with (
        Master("127.0.0.1:0") as master,
        ServerProcess(master.address, "test", request.param) as server,
        RpcService(master.address, transports=[request.param]) as service,
        service.create_client("test", timeout_s=PATIENCE_S) as client,
    ):
        yield World(service, client, server)


class Streams:
    """What streams in both directions."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def count(self, items: int) -> AsyncIterator[int]:
        try:
            for number in range(items):
                yield number
        finally:
            self.ended.set()

    async def total(self) -> int:
        return sum([item async for item in incoming()])

    def echo(self, value: Any) -> Any:
        return value


def within(work: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    return asyncio.wait_for(work, PATIENCE_S)


async def call(client: RpcClient, method: str, *args: Any) -> Any:
    return await client.submit(method, *args)


def test_calls_one_after_the_other_are_answered(
    world: World, loop: asyncio.AbstractEventLoop
) -> None:
    async def ask() -> None:
        for number in range(500):
            assert await world.client.submit("echo", number) == number
            if number % 50 == 0:
                await asyncio.sleep(0.002)  # long enough for both sides to sleep

    loop.run_until_complete(within(ask()))


def test_a_thousand_calls_at_once_are_answered(
    world: World, loop: asyncio.AbstractEventLoop
) -> None:
    async def ask() -> list[int]:
        return await asyncio.gather(*(call(world.client, "echo", number) for number in range(1000)))

    assert loop.run_until_complete(within(ask())) == list(range(1000))


def test_calls_that_take_long_hold_up_nobody(world: World, loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> list[str]:
        naps = [loop.create_task(call(world.client, "nap", 0.1)) for _ in range(20)]
        for number in range(100):
            assert await world.client.submit("echo", number) == number
        assert not any(nap.done() and nap.exception() for nap in naps)
        return await asyncio.gather(*naps)

    assert loop.run_until_complete(within(ask())) == ["rested"] * 20


def test_errors_come_where_they_are_awaited(world: World, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(errors.RemoteError, match="KeyError: 'oh'"):
        loop.run_until_complete(within(call(world.client, "boom", "oh")))

    async def ask() -> None:
        await world.client.submit("nap", PATIENCE_S, timeout_s=0.02)

    with pytest.raises(errors.DeadlineExceeded):
        loop.run_until_complete(within(ask()))


def test_a_server_that_cannot_be_connected_to_does_not_hold_the_loop(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def ask(fine: RpcClient, hung: RpcClient) -> None:
        task = loop.create_task(call(hung, "echo", 1))
        hung.notify("hear", 1)
        for number in range(20):
            assert await fine.submit("echo", number) == number
        await asyncio.sleep(0)
        assert not task.done(), "it is still connected to"
        with pytest.raises(errors.DeadlineExceeded, match="not connected yet"):
            await hung.submit("echo", 2, timeout_s=0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with (
        Blackhole() as hole,
        Master("127.0.0.1:0") as master,
        RpcService(master.address, transports=["tcp"]) as service,
    ):
        service.create_server("test", Handlers(service))
        entries = [hole.entry("test", 0)]
        with (
            service.create_client("test") as fine,
            RpcClient("test", node_of(service), entries, looks_up(lambda: entries)) as hung,
        ):
            loop.run_until_complete(within(ask(fine, hung)))


def test_a_stream_to_a_server_that_cannot_be_connected_to_does_not_hold_the_loop(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def iterate(hung: RpcClient) -> list[Any]:
        return [item async for item in hung.stream("count", 1)]

    async def enter(hung: RpcClient, timeout_s: float | None) -> None:
        async with hung.stream("total", timeout_s=timeout_s):
            raise AssertionError("it is not open")

    async def ask(fine: RpcClient, hung: RpcClient) -> None:
        tasks = [
            loop.create_task(iterate(hung)),
            loop.create_task(enter(hung, None)),
            loop.create_task(enter(hung, None)),
        ]
        for number in range(20):
            assert await fine.submit("echo", number) == number
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks), "it is still connected to"
        with pytest.raises(
            errors.DeadlineExceeded, match=r"'total' was not sent .* not connected yet"
        ):
            await enter(hung, 0.02)
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        # the cancelled one is given up, and the late one forgotten after its end is told
        while hung.statistics().waiting != 2:
            await asyncio.sleep(0.002)
        hung.close()
        ends = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert [type(end) for end in ends] == [errors.Closed] * 2

    with (
        Blackhole() as hole,
        Master("127.0.0.1:0") as master,
        RpcService(master.address, transports=["tcp"]) as service,
    ):
        service.create_server("test", Streams())
        entries = [hole.entry("test", 0)]
        with (
            service.create_client("test") as fine,
            RpcClient("test", node_of(service), entries, looks_up(lambda: entries)) as hung,
        ):
            loop.run_until_complete(within(ask(fine, hung)))


def test_streams_are_opened_off_the_loop_and_go_both_ways(loop: asyncio.AbstractEventLoop) -> None:
    async def ask(client: RpcClient) -> None:
        async with client.stream("total") as total, client.stream("count", 50) as count:
            async for number in count:
                await total.asend(number)
            total.end()
            assert await total.call == sum(range(50))

    with Master("127.0.0.1:0") as master, RpcService(master.address, transports=["tcp"]) as serving:
        serving.create_server("streams", Streams())
        for _ in range(5):
            with (
                RpcService(master.address, transports=["tcp"]) as calling,
                calling.create_client("streams") as client,
            ):
                loop.run_until_complete(within(ask(client)))


def test_a_cancelled_task_cancels_its_call_at_the_server(
    world: World, loop: asyncio.AbstractEventLoop
) -> None:
    async def ask() -> None:
        task = loop.create_task(call(world.client, "nap", PATIENCE_S))
        await asyncio.sleep(0)
        assert await world.client.submit("naps_ended") == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run_until_complete(within(ask()))
    wait_until(lambda: world.client.call("naps_ended") == 1, "the end of the handler")


def test_a_timeout_of_asyncio_cancels_the_call(
    world: World, loop: asyncio.AbstractEventLoop
) -> None:
    assert world.client.call("echo", 1) == 1
    wait_connected(world.client)  # else it may be cancelled before it has left

    async def ask() -> None:
        if hasattr(asyncio, "timeout"):  # Python 3.11
            async with asyncio.timeout(0.02):
                await world.client.submit("nap", PATIENCE_S)
        else:
            await asyncio.wait_for(call(world.client, "nap", PATIENCE_S), 0.02)

    with pytest.raises(asyncio.TimeoutError):
        loop.run_until_complete(within(ask()))
    wait_until(lambda: world.client.call("naps_ended") == 1, "the end of the handler")


def test_a_server_that_dies_ends_the_awaits(world: World, loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> list[Any]:
        naps = [loop.create_task(call(world.client, "nap", PATIENCE_S)) for _ in range(5)]
        # they begin: an await that a spin answers gives no other task its turn
        await asyncio.sleep(0)
        assert await world.client.submit("echo", 1) == 1
        world.server.kill()
        return await asyncio.gather(*naps, return_exceptions=True)

    assert [type(each) for each in loop.run_until_complete(within(ask()))] == [
        errors.MaybeExecuted
    ] * 5


def test_blocking_and_awaited_calls_mix_in_one_coroutine_and_beside_threads(
    world: World, loop: asyncio.AbstractEventLoop
) -> None:
    def block(first: int) -> None:
        for number in range(first, first + 100):
            assert world.client.call("echo", number) == number

    async def ask() -> None:
        nap = loop.create_task(call(world.client, "nap", 0.05))
        threads = [loop.run_in_executor(None, block, 1000 * first) for first in range(2)]
        for number in range(100):
            assert await world.client.submit("echo", number) == number
            assert world.client.call("echo", -number) == -number
        await asyncio.gather(nap, *threads)

    loop.run_until_complete(within(ask()))


def test_run_after_run_with_calls_left_in_flight(world: World) -> None:
    async def leave(number: int) -> Any:
        asyncio.get_running_loop().create_task(call(world.client, "nap", PATIENCE_S))
        await asyncio.sleep(0)
        return await world.client.submit("echo", number)

    for number in range(10):
        assert asyncio.run(within(leave(number))) == number
    wait_until(lambda: world.client.call("naps_ended") == 10, "the end of what was left")


def test_the_service_is_closed_while_a_loop_awaits(
    world: World, loop: asyncio.AbstractEventLoop
) -> None:
    async def ask() -> list[Any]:
        naps = [loop.create_task(call(world.client, "nap", PATIENCE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await world.client.submit("echo", 1) == 1
        await loop.run_in_executor(None, world.service.close)
        return await asyncio.gather(*naps, return_exceptions=True)

    assert all(isinstance(each, errors.RpcError) for each in loop.run_until_complete(within(ask())))


def test_everything_that_is_closed_is_an_async_context_manager(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def use() -> tuple[list[int], int]:
        served = Streams()
        async with Master("127.0.0.1:0") as master, RpcService(master.address) as service:
            service.create_server("streams", served)
            async with service.create_client("streams") as client:
                async with client.stream("count", 1_000_000) as stream:
                    first = [await stream.__anext__() for _ in range(20)]
                async with client.stream("total") as stream:
                    for number in range(50):
                        await stream.asend(number)
                    stream.end()
                    total = await call(client, "echo", 0) or stream.result(PATIENCE_S)
                assert served.ended.wait(PATIENCE_S), "leaving the stream ends it at the server"
        return first, total

    assert loop.run_until_complete(within(use())) == (list(range(20)), sum(range(50)))


def test_a_server_beside_a_loop_answers_while_the_loop_awaits_is_busy_and_is_gone(
    loop: asyncio.AbstractEventLoop,
) -> None:
    with (
        Master("127.0.0.1:0") as master,
        RpcService(master.address) as service,
        RpcService(master.address) as other,
    ):
        service.create_server("here", Handlers(service))
        client, back = other.create_client("here"), service.create_client("here")

        async def work() -> None:
            pending = loop.create_task(call(back, "nap", 0.05))
            for number in range(20):
                assert await loop.run_in_executor(None, client.call, "echo", number) == number
            # this thread turns the other service's reactor only
            assert client.call("echo", "busy") == "busy"
            await pending

        loop.run_until_complete(within(work()))
        assert client.call("echo", "gone") == "gone"
