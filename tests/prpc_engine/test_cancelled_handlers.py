"""Handlers that are cancelled: their caller is answered at once, they clean up with awaits, what
they await is cancelled over the wire, and no server waits for them for ever.

    python -m tests.prpc_engine.test_cancelled_handlers MASTER    serves "far" until stdin ends
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest

from prpc_engine import Master, RpcClient, RpcService, errors
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import Bounds, ServedObject
from prpc_engine.rpc.stream import Stream, incoming
from prpc_engine.service import serving
from shard import CancelledError, Future, sleep
from tests.helpers import ManualClock
from tests.program import PATIENCE_S, Program, wait_until
from tests.prpc_engine.peers import TARGET, Pair, Route


def name_of(error: CancelledError) -> str:
    """Of the reason, if there is one."""
    return "CancelledError" if error.__cause__ is None else type(error.__cause__).__name__


class Handlers:
    def __init__(self) -> None:
        self.never = Future()
        self.clean = Future()  # lets go on those that clean up
        self.seen: list[object] = []

    async def wait(self) -> None:
        try:
            await self.never
        except CancelledError as error:
            self.seen.append(name_of(error))
            raise
        finally:
            await self.clean
            self.seen.append("cleaned up")

    async def say_why(self) -> None:
        try:
            await self.never
        except CancelledError as error:
            self.seen.append(str(error))
            raise

    async def say_why_asyncio(self) -> None:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError as error:
            self.seen.append(str(error))
            raise

    async def swallow(self) -> str:
        try:
            await self.never
        except CancelledError:
            self.seen.append("swallowed")
        return "for nobody"

    async def fail_cleaning_up(self) -> None:
        try:
            await self.never
        finally:
            raise ValueError("while cleaning up")

    async def time_out(self) -> None:
        try:
            await self.never
        finally:
            raise errors.DeadlineExceeded("of a call of its own, which had the same deadline")

    async def never_end(self) -> None:
        while True:
            try:
                await self.never
            except CancelledError:
                self.seen.append("went on")

    async def count(self) -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                yield number
                number += 1
        finally:
            await self.clean
            self.seen.append("count cleaned up")

    async def total(self) -> int:
        try:
            return sum([item async for item in incoming()])
        finally:
            await self.clean
            self.seen.append("total cleaned up")

    def hello(self) -> str:
        return "hello"


class World(Pair):
    def __init__(self, clock: ManualClock, bounds: Bounds) -> None:
        self.handlers = Handlers()
        super().__init__(ServedObject("test", 0, TARGET, self.handlers, bounds), clock=clock)

    def open(self, method: str) -> Stream:
        return self.client.open(Route(), method, method_key(method), (), None)

    @property
    def tasks(self) -> int:
        return self.server.statistics().tasks


@pytest.fixture
def world(clock: ManualClock) -> Iterator[World]:
    made = World(clock, Bounds(tasks_max=2))
    yield made
    made.close()


def test_at_its_deadline_the_caller_is_answered_and_the_task_counts_until_it_has_ended(
    world: World, clock: ManualClock
) -> None:
    call = world.ask("wait", timeout_s=1.0)
    world.turn()
    clock.advance(1.1)
    world.turn()
    with pytest.raises(errors.DeadlineExceeded):
        call.result()
    assert world.handlers.seen == ["Expired"]
    assert (world.tasks, world.server.jobs.inside, world.served.running) == (1, 1, {})
    world.handlers.clean.set_result(None)
    world.turn()
    assert world.handlers.seen == ["Expired", "cleaned up"]
    assert (world.tasks, world.server.jobs.inside) == (0, 0)


def test_a_place_is_free_when_the_cancelled_task_has_ended(world: World) -> None:
    calls = [world.ask("wait", timeout_s=None) for _ in range(2)]
    waiting = world.ask("swallow", timeout_s=None)
    world.turn()
    calls[0].cancel()
    world.turn()
    statistics = world.server.statistics()
    assert (statistics.tasks, statistics.queued, statistics.cancelled) == (2, 1, 1)
    world.handlers.clean.set_result(None)
    world.turn()
    statistics = world.server.statistics()
    assert (statistics.tasks, statistics.queued) == (2, 0)
    waiting.cancel()
    world.turn()
    assert world.handlers.seen[-1] == "swallowed"
    assert world.tasks == 1


def test_what_a_handler_that_swallows_it_returns_is_no_second_answer(
    world: World, clock: ManualClock
) -> None:
    call = world.ask("swallow", timeout_s=1.0)
    world.turn()
    clock.advance(1.1)
    world.turn()
    with pytest.raises(errors.DeadlineExceeded):
        call.result()
    # that of the client's deadline and the server's crossed: one answer came too late
    assert world.client.calls.dropped_replies <= 1
    assert (world.handlers.seen, world.tasks) == (["swallowed"], 0)


def test_an_error_of_cleaning_up_is_for_the_log_as_nobody_waits(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    call = world.ask("fail_cleaning_up", timeout_s=None)
    world.turn()
    call.cancel()
    world.turn()
    assert "a cancelled task did not end cleanly" in caplog.text
    assert "ValueError: while cleaning up" in caplog.text
    assert world.tasks == 0


def test_a_call_of_a_handler_that_ends_by_the_same_deadline_is_not_for_the_log(
    world: World, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    world.ask("time_out", timeout_s=1.0)
    world.turn()
    clock.advance(1.1)
    world.turn()
    assert world.tasks == 0
    assert "did not end cleanly" not in caplog.text
    cancelled = world.ask("time_out", timeout_s=None)
    world.turn()
    cancelled.cancel()
    world.turn()
    assert "did not end cleanly" in caplog.text  # that was no deadline's


@pytest.mark.parametrize("method", ["say_why", "say_why_asyncio"])
@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("deadline", "the caller's 1001 ms are over"),
        ("caller", "the caller cancelled it"),
        ("server", "'test' was closed before it was done"),
    ],
)
def test_a_cancelled_handler_is_told_why(
    world: World, clock: ManualClock, method: str, reason: str, text: str
) -> None:
    call = world.ask(method, timeout_s=1.0)
    world.turn()
    if reason == "deadline":
        clock.advance(1.1)
    elif reason == "caller":
        call.cancel()
    else:
        world.server.cut()

    def has_ended() -> bool:
        world.turn()
        return world.tasks == 0

    wait_until(has_ended)
    assert world.handlers.seen == [text]


@pytest.mark.parametrize("method", ["count", "total"])
def test_a_stream_that_is_given_up_cleans_up_with_awaits(world: World, method: str) -> None:
    stream = world.open(method)
    world.turn()
    stream.cancel()
    world.turn()
    assert world.tasks == 1
    world.handlers.clean.set_result(None)
    world.turn()
    assert (world.handlers.seen, world.tasks) == ([f"{method} cleaned up"], 0)


def test_a_server_is_stopped_when_what_it_cut_has_ended_and_may_cut_it_again(
    world: World,
) -> None:
    call = world.ask("never_end", timeout_s=None)
    world.turn()
    stopped = world.server.stop()
    assert world.server.cut() == 1
    world.turn()
    with pytest.raises(errors.Cancelled, match="was closed before it was done"):
        call.result()
    assert not stopped.done()
    assert world.server.cut() == 1
    assert world.handlers.seen == ["went on", "went on"]


# -- with services ---------------------------------------------------------------------------------


@pytest.fixture
def master() -> Iterator[Master]:
    with Master() as made:
        yield made


@pytest.mark.parametrize("closed", ["server", "service"])
def test_a_service_closes_when_its_cancelled_handlers_have_cleaned_up(
    master: Master, closed: str
) -> None:
    handlers = Handlers()
    with RpcService(master=master.address) as ours, RpcService(master=master.address) as theirs:
        server = ours.create_server("test", handlers)
        call = theirs.create_client("test").submit("wait", timeout_s=None)
        wait_until(lambda: server.statistics().tasks == 1)

        async def let_them() -> None:
            await sleep(0.05)
            handlers.clean.set_result(None)

        reactor = ours.driver.reactor
        reactor.call_in_engine(lambda: reactor.spawn(let_them()))
        (server if closed == "server" else ours).close()
        assert handlers.seen == ["CancelledError", "cleaned up"]
        # a service that goes is lost for its callers: another one may be asked
        told = errors.Cancelled if closed == "server" else errors.MaybeExecuted
        assert isinstance(call.error(PATIENCE_S), told)


def test_a_server_closes_though_a_handler_keeps_its_reactor(
    master: Master, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ABSENT_S", "DEREGISTER_TIMEOUT_S", "CUT_TIMEOUT_S"):
        monkeypatch.setattr(serving, name, 0.2)
    let_go, begun = threading.Event(), threading.Event()

    class Blocking:
        def block(self) -> None:
            begun.set()
            assert let_go.wait(PATIENCE_S)

    with RpcService(master=master.address) as ours, RpcService(master=master.address) as theirs:
        server = ours.create_server("test", Blocking())
        call = theirs.create_client("test").submit("block", timeout_s=PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        server.close(drain_s=0.1)
        assert "a handler keeps the reactor" in caplog.text
        let_go.set()
        call.error(PATIENCE_S)


def test_a_handler_that_goes_on_for_ever_does_not_keep_its_service_open(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CUT_TIMEOUT_S", 0.2)
    handlers = Handlers()
    with RpcService(master=master.address) as ours, RpcService(master=master.address) as theirs:
        server = ours.create_server("test", handlers)
        client = theirs.create_client("test")
        call = client.submit("never_end", timeout_s=None)
        wait_until(lambda: server.statistics().tasks == 1)
        server.close()
        assert isinstance(call.error(PATIENCE_S), errors.Cancelled)
        assert "went on" in handlers.seen


def test_calls_without_a_deadline_end_with_a_caller_that_is_killed(master: Master) -> None:
    """They would hold their places for ever: nobody else ends them."""
    handlers = Handlers()
    handlers.clean.set_result(None)
    with RpcService(master=master.address) as service:
        near = service.create_server("near", handlers)
        with Program("tests.prpc_engine.test_cancelled_handlers", master.address) as program:
            assert program.read_line() == "ready"
            far = service.create_client("far")
            call = far.submit("pass_on", timeout_s=None)
            wait_until(lambda: near.statistics().tasks == 1)
            program.kill()
            wait_until(lambda: near.statistics().tasks == 0)
            assert isinstance(call.error(PATIENCE_S), errors.MaybeExecuted)
    assert handlers.seen == ["CancelledError", "cleaned up"]


# -- over the wire, with a process in the middle ---------------------------------------------------


class Middle:
    """Its handlers wait for calls to the test's process."""

    def __init__(self) -> None:
        self.client: RpcClient | None = None
        self.seen: list[str] = []

    async def pass_on(self) -> None:
        assert self.client is not None
        await self._see(self.client.submit("wait", timeout_s=None))

    async def nap(self) -> None:
        await self._see(sleep(3600.0))

    async def _see(self, awaited: Awaitable[object]) -> None:
        assert self.client is not None
        try:
            await awaited
        except CancelledError as error:
            self.seen.append(name_of(error))
            raise
        finally:
            self.seen.append(await self.client.submit("hello"))

    def what_was_seen(self) -> list[str]:
        return self.seen


def serve(master: str) -> None:
    """What the process runs."""
    middle = Middle()
    with RpcService(master=master) as service:
        middle.client = service.create_client("near")
        service.create_server("far", middle)
        print("ready", flush=True)
        sys.stdin.read()


def test_a_cancelled_call_ends_all_that_wait_for_each_other_behind_it(master: Master) -> None:
    handlers = Handlers()
    handlers.clean.set_result(None)
    with RpcService(master=master.address) as service:
        near = service.create_server("near", handlers)
        with Program("tests.prpc_engine.test_cancelled_handlers", master.address) as program:
            assert program.read_line() == "ready"
            far = service.create_client("far")
            call = far.submit("pass_on", timeout_s=None)
            wait_until(lambda: near.statistics().tasks == 1)
            call.cancel()
            assert isinstance(call.error(PATIENCE_S), errors.Cancelled)
            wait_until(lambda: far.call("what_was_seen") == ["CancelledError", "hello"])
            wait_until(lambda: near.statistics().tasks == 0)
            assert handlers.seen == ["CancelledError", "cleaned up"]


def test_a_handler_may_call_while_it_cleans_up_after_its_deadline(master: Master) -> None:
    with RpcService(master=master.address) as service:
        service.create_server("near", Handlers())
        with Program("tests.prpc_engine.test_cancelled_handlers", master.address) as program:
            assert program.read_line() == "ready"
            far = service.create_client("far")
            assert far.call("what_was_seen") == []  # connected: what follows leaves at once
            with pytest.raises(errors.DeadlineExceeded):
                far.call("nap", timeout_s=0.1)
            wait_until(lambda: far.call("what_was_seen") == ["Expired", "hello"])


if __name__ == "__main__":
    serve(*sys.argv[1:])
