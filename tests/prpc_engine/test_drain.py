"""A server that is taken back: what has begun may go on for a while, and is ended then; every
caller is told.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import prpc_engine
from prpc_engine import Deferred, Master, RpcService, errors
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import Bounds, ServedObject
from shard import Future
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.peers import TARGET, Pair, Route
from tests.prpc_engine.processes import PATIENCE_S, wait_until


class Handlers:
    def __init__(self) -> None:
        self.gate = Future()
        self.ended: list[str] = []
        self.deferred: list[Deferred] = []

    def endless(self) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            self.ended.append("endless")

    async def all_day(self) -> AsyncIterator[int]:
        try:
            async for item in prpc_engine.incoming():
                yield item
        finally:
            self.ended.append("all_day")

    async def wait(self) -> str:
        try:
            return str(await self.gate)
        finally:
            self.ended.append("wait")

    def later(self) -> Deferred:
        self.deferred.append(Deferred())
        return self.deferred[-1]

    def has_ended(self) -> list[str]:
        return self.ended


class World(Pair):
    def __init__(self) -> None:
        self.handlers = Handlers()
        super().__init__(ServedObject("test", 0, TARGET, self.handlers))

    def open(self, method: str) -> Any:
        return self.client.open(Route(), method, method_key(method), (), None)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_what_has_begun_is_ended_and_every_caller_is_told_whether_it_ran(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.bounds = Bounds(tasks_max=4)
    deferred = world.ask("later", timeout_s=None)
    streams = [world.open("endless"), world.open("all_day")]
    running, queued = world.ask("wait", timeout_s=None), world.ask("wait", timeout_s=None)
    world.turn()
    assert (world.server.statistics().tasks, world.server.statistics().queued) == (4, 1)
    stopped = world.server.stop()
    assert not stopped.done()
    assert world.server.cut() == 5
    assert stopped.done()
    world.turn()
    for ended in (running, deferred, *(stream.call for stream in streams)):
        with pytest.raises(
            errors.Cancelled, match="was cancelled there: 'test' was closed before it was done"
        ):
            ended.result()
    with pytest.raises(errors.Stopping):
        queued.result()
    assert sorted(world.handlers.ended) == ["all_day", "endless", "wait"], (
        "their `finally` blocks ran, of those that began"
    )
    assert "did not end cleanly" not in caplog.text
    world.handlers.deferred[0].reply("too late")
    assert (
        world.server.statistics().tasks,
        world.server.statistics().queued,
        world.served.running,
    ) == (0, 0, {})


def test_health_says_that_it_stops_and_what_still_runs(world: World) -> None:
    call = world.ask("wait", timeout_s=None)
    world.turn()
    serving = world.server.health()
    assert serving == {
        "service": "test",
        "server_id": 0,
        "state": "serving",
        "tasks": 1,
        "queued": 0,
    }
    stopped = world.server.stop()
    health = world.ask("prpc.health")
    world.turn()
    assert health.result() == {**serving, "state": "stopping"}
    world.handlers.gate.set_result("open")
    world.turn()
    assert stopped.done()
    assert call.result() == "open"
    assert world.server.cut() == 0


@pytest.fixture(params=[0, 1], ids=["inline", "sharded"])
def serve(
    request: pytest.FixtureRequest, forked_shards: None
) -> Iterator[Callable[[], tuple[Any, Any]]]:
    """Make a server of Handlers and a client of it."""
    with Master() as master, RpcService(master=master.address, shards=request.param) as service:

        def make() -> tuple[Any, Any]:
            served = Handlers if request.param else Handlers()
            server = service.create_server("test", served, sharded=bool(request.param))
            return server, service.create_client("test", timeout_s=PATIENCE_S)

        yield make


def test_a_drain_with_open_streams_ends_in_its_time(serve: Callable[[], tuple[Any, Any]]) -> None:
    server, client = serve()
    reading, writing = (
        client.stream("endless", timeout_s=None),
        client.stream("all_day", timeout_s=None),
    )
    assert [reading.next_item(PATIENCE_S) for _ in range(20)] == list(range(20))
    writing.send("there")
    assert writing.next_item(PATIENCE_S) == "there"
    server.close(drain_s=0.05)
    for stream in (reading, writing):
        with pytest.raises(errors.Cancelled, match="'test' was closed before it was done"):
            while True:
                stream.next_item(PATIENCE_S)
    with pytest.raises(errors.RpcError):
        client.call("has_ended", timeout_s=0.1)


def test_a_drain_waits_for_what_ends_and_takes_nothing_new_meanwhile() -> None:
    with Master() as master, RpcService(master=master.address) as service:
        handlers = Handlers()
        server = service.create_server("test", handlers)
        client = service.create_client(
            "test",
            timeout_s=PATIENCE_S,
            retry=prpc_engine.RetryPolicy(attempts_max=1, unsent_max=1),
        )
        call = client.submit("wait", timeout_s=None)
        (served,) = (one for one in node_of(service).servers.values() if one.service == "test")
        wait_until(lambda: served.statistics().tasks, "the call's begin")
        closing = threading.Thread(target=server.close, args=(PATIENCE_S,))
        closing.start()
        wait_until(lambda: served.jobs.closed, "the drain's begin")
        with pytest.raises(errors.RpcError):
            client.call("has_ended", timeout_s=PATIENCE_S)
        service.driver.reactor.call_soon(lambda: handlers.gate.set_result("in time"))
        assert call.result(PATIENCE_S) == "in time"
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
