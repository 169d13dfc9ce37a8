"""A stream that its caller lets go of, in whichever way, ends at the server: its task, and the
generator's `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prpc_engine import Master, RpcClient, RpcService, errors
from prpc_engine.rpc.server import TASKS_MAX
from tests.held import at
from tests.prpc_engine.processes import (
    PATIENCE_S,
    Program,
    ServerProcess,
    wait_connected,
    wait_until,
)

MANY_ROWS = 1_000_000_000
METHODS = ["rows", "rows_async"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes, goes by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["shm", "tcp"])
def service(request: pytest.FixtureRequest, master: Master) -> Iterator[RpcService]:
    """Beside a server in another process."""
    with (
        ServerProcess(master.address, "test", request.param),
        RpcService(master.address, transports=[request.param]) as made,
    ):
        yield made


@pytest.fixture
def client(service: RpcService, no_collector: None) -> Iterator[RpcClient]:
    with service.create_client("test", timeout_s=PATIENCE_S) as made:
        made.call("echo", 0)
        wait_connected(made)
        yield made


def tasks(client: RpcClient) -> int:
    """That run at the server; the one that answers is none."""
    running: int = client.health()[0]["tasks"]
    return running


def ended(client: RpcClient, count: int) -> None:
    """Wait until so many handlers have run their `finally`, and nothing runs."""
    wait_until(lambda: client.call("naps_ended") == count, f"the end of {count} handlers")
    assert tasks(client) == 0


def broken_out(client: RpcClient, method: str) -> None:
    for row in client.stream(method, MANY_ROWS):
        if row == 3:
            break


def raising(client: RpcClient, method: str) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for row in client.stream(method, MANY_ROWS):
            row // 0


def broken_out_async(client: RpcClient, method: str) -> None:
    async def loop() -> None:
        async for row in client.stream(method, MANY_ROWS):
            if row == 3:
                break
        # while this task goes on
        await asyncio.to_thread(wait_until, lambda: not tasks(client), "the end of the handler")

    asyncio.run(loop())


def task_cancelled(client: RpcClient, method: str) -> None:
    async def loop() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream(method, MANY_ROWS):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(loop())


def closed(client: RpcClient, method: str) -> None:
    with contextlib.closing(client.stream(method, MANY_ROWS)) as stream:
        next(stream)
    with pytest.raises(errors.Cancelled):
        stream.result(PATIENCE_S)


def closed_async(client: RpcClient, method: str) -> None:
    async def loop() -> None:
        stream = client.stream(method, MANY_ROWS)
        await stream.__anext__()
        await stream.aclose()

    asyncio.run(loop())


def left(client: RpcClient, method: str) -> None:
    with client.stream(method, MANY_ROWS) as stream:
        next(stream)


def dropped(client: RpcClient, method: str) -> None:
    stream = client.stream(method, MANY_ROWS)
    next(stream)
    del stream


def timed_out(client: RpcClient, method: str) -> None:
    stream = client.stream("count_items")
    with pytest.raises(TimeoutError):
        stream.result(0.0)
    with pytest.raises(TimeoutError):
        stream.next_item(0.0)


@pytest.mark.parametrize(
    "let_go",
    [
        broken_out,
        raising,
        broken_out_async,
        task_cancelled,
        closed,
        closed_async,
        left,
        dropped,
        timed_out,
    ],
    ids=lambda one: one.__name__,
)
def test_a_stream_that_was_let_go_of_ends_at_the_server(
    client: RpcClient, let_go: Callable[[RpcClient, str], None]
) -> None:
    for count, method in enumerate(METHODS, 1):
        let_go(client, method)
        ended(client, count)


@pytest.mark.parametrize("method", METHODS)
def test_as_many_streams_as_tasks_may_run_are_broken_out_of_and_other_calls_go_on(
    client: RpcClient, method: str
) -> None:
    for _ in range(TASKS_MAX):
        for _ in client.stream(method, MANY_ROWS):
            break
    assert client.call("echo_async", "served", timeout_s=PATIENCE_S) == "served"
    ended(client, TASKS_MAX)


def test_a_stream_that_is_dropped_before_it_was_opened_ends_at_the_server(
    master: Master, no_collector: None
) -> None:
    with (
        ServerProcess(master.address, "test", "tcp"),
        RpcService(master.address, transports=["tcp"]) as service,
    ):
        client = service.create_client("test", timeout_s=PATIENCE_S)
        for _ in range(10):
            client.stream("rows", MANY_ROWS)
        client.call("echo", 0, timeout_s=PATIENCE_S)
        wait_connected(client)
        wait_until(lambda: tasks(client) == 0, "the end of all tasks")


def test_a_stream_with_an_item_that_cannot_be_read_ends_at_the_server(
    client: RpcClient,
) -> None:
    def spoil(item: Any) -> None:
        if item == 50:
            raise ValueError("a spoilt item")

    stream = client.stream("rows", MANY_ROWS)
    assert next(stream) == 0
    with (
        at("peer.item_read", spoil),
        pytest.raises(errors.RpcError, match="cannot be read: a spoilt item"),
    ):
        list(stream)
    ended(client, 1)


def test_a_failed_stream_leaves_nothing_for_the_collector_of_garbage(client: RpcClient) -> None:
    def fail() -> None:
        for _ in client.stream("boom_async", "broken"):
            pass

    def wait_for_result() -> None:
        client.stream("boom_async", "broken").result(PATIENCE_S)

    for failing in (fail, wait_for_result) * 3:
        with pytest.raises(errors.RemoteError, match="broken"):
            failing()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for failing in (fail, wait_for_result):
            with contextlib.suppress(errors.RemoteError):
                failing()
        gc.collect()
        assert [
            type(one).__name__
            for one in gc.garbage
            if type(one).__module__.startswith(("prpc_engine", "shard"))
        ] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


# -- the end of a client ---------------------------------------------------------------------------


def test_a_client_that_is_closed_ends_its_calls_and_streams_here_and_there(
    service: RpcService, client: RpcClient
) -> None:
    stream, calls = (
        client.stream("rows", MANY_ROWS),
        [client.submit("nap", 1000.0), client.submit_to(0, "nap", 1000.0)],
    )
    next(stream)
    wait_until(lambda: tasks(client) == 3, "the start of three tasks")
    waiting = threading.Thread(target=lambda: [call.error() for call in calls])
    waiting.start()
    with service.create_client("test", timeout_s=PATIENCE_S) as other:
        of_other = other.submit("nap", 0.01)
        client.close()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        for call in calls:
            with pytest.raises(errors.Closed, match="the client of 'test' was closed here"):
                call.result(PATIENCE_S)
        with pytest.raises(errors.Closed, match="the client of 'test' was closed here"):
            list(stream)
        assert of_other.result(PATIENCE_S) == "rested"
        ended(other, 4)


# -- what is logged --------------------------------------------------------------------------------


class Breaker(Program):
    """A process that opens streams, leaves some of them, and keeps the rest."""

    def __init__(self, master: str, left: int, kept: int) -> None:
        super().__init__("tests.prpc_engine.test_given_up_streams", master, str(left), str(kept))
        assert self.read_line() == "ready"


def test_what_a_killed_client_had_under_way_ends_and_is_not_logged_a_line_each(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.prpc_engine.handlers import Handlers

    with RpcService(master.address) as service:
        handlers = Handlers(service)
        service.create_server("test", handlers)
        with Breaker(master.address, left=100, kept=100) as breaker:
            wait_until(lambda: len(handlers.cut) == 100, "the end of the streams that were left")
            breaker.kill()
            wait_until(
                lambda: len(handlers.cut) == 200, "the end of the streams of the killed client"
            )
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) < 10, lines[:20]


def break_out(master: str, left: str, kept: str) -> None:
    """What the Breaker runs."""
    with RpcService(master) as service:
        client = service.create_client("test", timeout_s=PATIENCE_S)
        for _ in range(int(left)):
            for _ in client.stream("rows", MANY_ROWS):
                break
        streams = [client.stream("rows_async", MANY_ROWS) for _ in range(int(kept))]
        for stream in streams:
            next(stream)
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    break_out(*sys.argv[1:])
