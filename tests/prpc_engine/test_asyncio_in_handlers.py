"""asyncio in handlers and in shards: what it has may be awaited there, its tasks may await what is
ours, and both are cancelled together.

    python -m tests.prpc_engine.test_asyncio_in_handlers MASTER    serves "far" until stdin ends
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import shard
from prpc_engine import Deferred, Master, RpcClient, RpcService, bulk, caller_name, errors
from prpc_engine.rpc.context import remaining_s
from shard import Future, Reactor, ShardGroup
from tests.program import PATIENCE_S, ROOT, Program, wait_until

ON_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="of Python 3.11 and later")
variable = contextvars.ContextVar("variable", default="unset")


class Handlers:
    """Each public method uses something of asyncio's."""

    def __init__(self) -> None:
        self.client: RpcClient | None = None  # of a server with Handlers, in another process
        self.seen: list[str] = []
        self.never = Deferred()

    async def sleeps(self) -> str:
        began = time.monotonic()
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return "slept" if time.monotonic() - began >= 0.01 else "woke early"

    async def in_a_thread(self) -> bool:
        return await asyncio.to_thread(threading.get_ident) != threading.get_ident()

    async def with_primitives(self) -> list[int]:
        event, lock = asyncio.Event(), asyncio.Lock()
        queue = asyncio.Queue[int](maxsize=1)

        async def produce() -> None:
            await event.wait()
            for number in range(5):
                async with lock:
                    await queue.put(number)

        producing = asyncio.create_task(produce())
        event.set()
        numbers = [await queue.get() for _ in range(5)]
        await producing
        return numbers

    async def of_a_subprocess(self) -> str:
        process = await asyncio.create_subprocess_exec(
            "/bin/cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        text, _ = await process.communicate(b"through a pipe")
        return text.decode()

    async def over_streams(self) -> str:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"a line\n")
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        return line.decode()

    async def waits_in_vain(self) -> str:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.sleep(3600), 0.01)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.never, 0.01)
        return "in vain"

    async def times_out(self) -> list[str]:
        seen = []
        for awaited in (lambda: asyncio.sleep(3600), lambda: self.never, lambda: shard.sleep(3600)):
            try:
                async with asyncio.timeout(0.01):
                    await awaited()
            except TimeoutError:
                seen.append("timeout")
        await asyncio.sleep(0)
        return seen

    async def groups(self) -> list[int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0.001, number)) for number in range(3)]
        return [task.result() for task in tasks]

    async def groups_and_fails(self) -> list[str]:
        async def fail() -> None:
            await asyncio.sleep(0.001)
            raise KeyError("one of them")

        seen = []
        for awaited in (lambda: asyncio.sleep(3600), lambda: self.never):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
                    await awaited()
            except BaseException as error:
                seen += [repr(one) for one in getattr(error, "exceptions", [error])]
        return seen

    async def calls_in_tasks(self) -> list[str]:
        assert self.client is not None
        client = self.client

        async def call(name: str) -> str:
            await shard.sleep(0.001)
            await shard.yield_now()
            first = await shard.run_blocking(str.upper, name)
            return first + str(await client.submit("greet", name))

        return await asyncio.gather(*(call(name) for name in "ab"))

    async def who_calls_in_a_task(self) -> tuple[bool, bool, str]:
        variable.set("of the handler")

        async def ask() -> tuple[str, float | None, str]:
            await asyncio.sleep(0.001)
            return caller_name(), remaining_s(time.monotonic), variable.get()

        name, left, value = await asyncio.create_task(ask())
        return name == caller_name(), left is not None and left <= PATIENCE_S, value

    async def calls_and_blocks_in_a_task(self) -> str:
        assert self.client is not None
        client = self.client

        async def call() -> str:
            return str(client.call("greet", "waiting"))

        return await asyncio.create_task(call())

    async def yields(self) -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0.001)
            yield number

    @bulk
    def runs_a_loop_of_its_own(self) -> str:
        return asyncio.run(asyncio.sleep(0.001, "its own"))

    @bulk
    async def sleeps_in_bulk(self) -> str:
        return await self.sleeps()

    def greet(self, name: str) -> str:
        return f"hello {name}"

    # -- what is cancelled -------------------------------------------------------------------------

    async def is_cancelled(self) -> None:
        self.seen.append("began")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.seen.append("asyncio.CancelledError")
            raise
        finally:
            await asyncio.sleep(0.001)
            self.seen.append("cleaned up")

    async def is_cancelled_at_ours(self) -> None:
        self.seen.append("began")
        try:
            await self.never
        except asyncio.CancelledError as error:
            both = isinstance(error, shard.CancelledError)
            self.seen.append("both" if both else "asyncio's alone")
            raise
        finally:
            await asyncio.sleep(0.001)
            self.seen.append("cleaned up")

    async def is_cancelled_with_a_task(self) -> None:
        self.seen.append("began")

        async def child() -> None:
            try:
                await self.never
            finally:
                await asyncio.sleep(0.001)
                self.seen.append("child cleaned up")

        try:
            await asyncio.create_task(child())
        finally:
            self.seen.append("cleaned up")

    async def is_cancelled_in_a_group(self) -> None:
        self.seen.append("began")

        async def child() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                self.seen.append("child cleaned up")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                await self.never
        finally:
            self.seen.append("cleaned up")

    async def cancels_a_call_by_a_timeout(self) -> str:
        assert self.client is not None
        waits = asyncio.ensure_future(self._wait_over_there())
        while await self.client.submit("what_was_seen") != ["began"]:
            continue  # else it may be withdrawn before it runs
        try:
            await asyncio.wait_for(waits, 0.05)
        except asyncio.TimeoutError:
            return "timeout"
        return "answered"

    async def _wait_over_there(self) -> None:
        assert self.client is not None
        await self.client.submit("is_cancelled_at_ours", timeout_s=None)

    async def leaves_a_task(self) -> None:
        async def left() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                self.seen.append("the task that was left is cancelled")

        self.left = asyncio.create_task(left())
        await asyncio.sleep(0)

    def what_was_seen(self) -> list[str]:
        return self.seen


class World:
    """A process that serves Handlers, and this one, which serves them, too."""

    def __init__(self) -> None:
        self.master = Master()
        self.handlers = Handlers()
        self.service = RpcService(master=self.master.address)
        self.service.create_server("near", self.handlers)
        self.program = Program("tests.prpc_engine.test_asyncio_in_handlers", self.master.address)
        assert self.program.read_line() == "ready"
        self.handlers.client = self.far = self.service.create_client("far")

    def close(self) -> None:
        self.program.end()
        self.service.close()
        self.master.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    made = World()
    made.far.call("calls_in_tasks")  # connects both to each other, before a test counts
    made.far.call("calls_and_blocks_in_a_task")
    yield made
    made.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def serve(master: str) -> None:
    """What the process runs."""
    handlers = Handlers()
    with RpcService(master=master) as service:
        handlers.client = service.create_client("near")
        service.create_server("far", handlers)
        print("ready", flush=True)
        sys.stdin.read()


# -- what may be awaited ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("sleeps", "slept"),
        ("in_a_thread", True),
        ("with_primitives", [0, 1, 2, 3, 4]),
        ("of_a_subprocess", "through a pipe"),
        ("over_streams", "a line\n"),
        ("waits_in_vain", "in vain"),
        pytest.param("times_out", ["timeout"] * 3, marks=ON_3_11),
        pytest.param("groups", [0, 1, 2], marks=ON_3_11),
        pytest.param("groups_and_fails", ["KeyError('one of them')"] * 2, marks=ON_3_11),
        ("runs_a_loop_of_its_own", "its own"),
        ("sleeps_in_bulk", "slept"),
        ("calls_in_tasks", ["Ahello a", "Bhello b"]),
        ("who_calls_in_a_task", [True, True, "of the handler"]),
        ("calls_and_blocks_in_a_task", "hello waiting"),
    ],
)
def test_a_handler_may_await_what_asyncio_has(shared: World, method: str, result: Any) -> None:
    answer = shared.far.call(method, timeout_s=PATIENCE_S)
    assert (list(answer) if isinstance(answer, tuple) else answer) == result


def test_many_do_so_at_once(shared: World) -> None:
    calls = [shared.far.submit("sleeps", timeout_s=PATIENCE_S) for _ in range(200)]
    assert {call.result() for call in calls} == {"slept"}


def test_a_generator_may_await_it_too(shared: World) -> None:
    assert list(shared.far.stream("yields", timeout_s=PATIENCE_S)) == [0, 1, 2]


def test_while_one_waits_in_a_task_of_asyncio_others_go_on(shared: World) -> None:
    """It has lent the lead: steps of others run in the same loop, from other threads."""
    calls = [
        shared.far.submit(method, timeout_s=PATIENCE_S)
        for _ in range(20)
        for method in ("calls_and_blocks_in_a_task", "calls_in_tasks")
    ]
    results = [call.result() for call in calls]
    assert results == ["hello waiting", ["Ahello a", "Bhello b"]] * 20


def test_in_an_asyncio_program_handlers_have_a_loop_of_their_own(master: Master) -> None:
    async def main() -> tuple[str, bool]:
        loops: list[asyncio.AbstractEventLoop] = []

        async def where() -> str:
            await asyncio.sleep(0.001)
            loops.append(asyncio.get_running_loop())
            return "slept"

        async with RpcService(master=master.address) as service:
            service.create_server("test", {"where": where})
            async with service.create_client("test") as client:
                answer = await client.submit("where")
            return answer, loops[0] is not asyncio.get_running_loop()

    assert asyncio.run(main()) == ("slept", True)


@pytest.fixture
def master() -> Iterator[Master]:
    with Master() as made:
        yield made


# -- cancelled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize(
    ("method", "seen"),
    [
        ("is_cancelled", ["began", "asyncio.CancelledError", "cleaned up"]),
        ("is_cancelled_at_ours", ["began", "both", "cleaned up"]),
        ("is_cancelled_with_a_task", ["began", "child cleaned up", "cleaned up"]),
        pytest.param(
            "is_cancelled_in_a_group", ["began", "child cleaned up", "cleaned up"], marks=ON_3_11
        ),
    ],
)
def test_a_cancelled_handler_cleans_up_with_awaits_of_asyncio(
    world: World, method: str, seen: list[str], how: str
) -> None:
    assert world.far.call("what_was_seen") == []  # connected: what follows leaves at once
    call = world.far.submit(method, timeout_s=None if how == "cancel" else 0.2)
    if how == "cancel":
        wait_until(lambda: world.far.call("what_was_seen") == ["began"])
        call.cancel()
    error = call.error(PATIENCE_S)
    assert isinstance(error, errors.Cancelled | errors.DeadlineExceeded)
    wait_until(lambda: world.far.call("what_was_seen") == seen)
    assert world.program.end() == 0


def test_a_call_that_a_timeout_of_asyncio_ends_is_withdrawn_at_its_server(world: World) -> None:
    world.handlers.seen.clear()
    assert world.far.call("cancels_a_call_by_a_timeout", timeout_s=PATIENCE_S) == "timeout"
    wait_until(lambda: world.handlers.seen == ["began", "both", "cleaned up"])


def test_tasks_that_are_left_are_cancelled_when_the_service_ends(master: Master) -> None:
    handlers = Handlers()
    with RpcService(master=master.address) as service:
        service.create_server("test", handlers)
        service.create_client("test").call("leaves_a_task")
    assert handlers.seen == ["the task that was left is cancelled"]
    assert handlers.left.cancelled()


# -- in shards -------------------------------------------------------------------------------------


async def sleep_in_a_shard(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return await asyncio.to_thread(os.getpid)


_notes: list[str] = []


async def be_cancelled_in_a_shard() -> None:
    _notes.append("began")
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0.001)
        _notes.append("cleaned up")


def notes() -> list[str]:
    return _notes


def is_asyncio_there() -> bool:
    return "asyncio" in sys.modules


def test_a_coroutine_in_a_shard_may_await_asyncio_and_is_cancelled_there() -> None:
    with ShardGroup(1, start_method="forkserver", drain_s=PATIENCE_S) as group:
        pid = group.submit_to(0, os.getpid).result(PATIENCE_S)
        assert group.submit_to(0, sleep_in_a_shard, 0.001).result(PATIENCE_S) == pid
        task = group.submit_to(0, be_cancelled_in_a_shard)
        wait_until(lambda: group.submit_to(0, notes).result(PATIENCE_S) == ["began"])
        task.cancel()
        wait_until(lambda: group.submit_to(0, notes).result(PATIENCE_S)[1:] == ["cleaned up"])


# -- the loop itself -------------------------------------------------------------------------------


def test_a_process_that_does_not_import_asyncio_has_no_loop() -> None:
    code = """
import sys, time
import shard
reactor = shard.Reactor(time.monotonic)
async def work():
    await shard.yield_now()
    return "done"
task = reactor.spawn(work())
while not task.done():
    reactor.poll(time.monotonic())
print(task.result(), "asyncio" in sys.modules, reactor.guest)
import asyncio
async def more():
    await asyncio.sleep(0)
    return "done"
task = reactor.spawn(more())
while not task.done():
    reactor.poll(time.monotonic())
print(task.result(), type(reactor.guest).__name__)
reactor.close()
"""
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert answer.stdout.splitlines() == ["done False None", "done GuestLoop"], answer.stderr
    assert answer.stderr == ""


def test_a_reactor_that_ends_leaves_no_descriptor_no_task_and_no_generator() -> None:
    before = set(os.listdir("/proc/self/fd"))
    reactor, seen = Reactor(time.monotonic), list[str]()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            seen.append("generator")

    async def child() -> None:
        try:
            async for _ in numbers():
                await asyncio.sleep(3600)
        finally:
            seen.append("child")

    async def work() -> None:
        children.append(asyncio.create_task(child()))
        await asyncio.sleep(0.001)

    children: list[Any] = []
    task = reactor.spawn(work())
    deadline = time.monotonic() + PATIENCE_S
    while not task.done() and time.monotonic() < deadline:
        reactor.poll(time.monotonic())
    assert reactor.guest is not None
    reactor.close()
    assert reactor.guest.is_closed()
    assert sorted(seen) == ["child", "generator"]
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_future_of_another_loop_is_refused_by_name() -> None:
    reactor, other = Reactor(time.monotonic), asyncio.new_event_loop()

    async def work() -> None:
        await other.create_future()

    task = reactor.spawn(work())
    for _ in range(10):
        reactor.poll(time.monotonic())
    with pytest.raises(
        shard.ShardError, match="what asyncio has, of the loop that it runs in, not"
    ):
        task.result()
    other.close()
    reactor.close()


def test_steps_that_begin_others_and_tasks_of_asyncio_know_who_they_are() -> None:
    reactor, seen = Reactor(time.monotonic), list[bool]()
    tasks: list[Any] = []

    async def inner() -> None:
        await asyncio.sleep(0)
        seen.append(asyncio.current_task() is tasks[0])

    async def child() -> None:
        before = asyncio.current_task()
        tasks.append(reactor.spawn(inner()))
        seen.append(asyncio.current_task() is before)
        await tasks[0]

    async def outer() -> None:
        before = asyncio.current_task()
        await asyncio.create_task(child())
        seen.append(asyncio.current_task() is before)

    whole = reactor.spawn(outer())
    deadline = time.monotonic() + PATIENCE_S
    while not whole.done() and time.monotonic() < deadline:
        reactor.poll(time.monotonic())
    assert (whole.error(), seen) == (None, [True, True, True])
    reactor.close()


def test_a_cancelled_task_of_asyncio_cancels_the_task_of_ours_that_it_awaits() -> None:
    reactor, seen = Reactor(time.monotonic), list[str]()

    async def ours() -> None:
        try:
            await Future()
        finally:
            await asyncio.sleep(0)
            seen.append("ours")

    async def child() -> None:
        await reactor.spawn(ours())

    async def work() -> None:
        task = asyncio.create_task(child())
        await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.001)

    whole = reactor.spawn(work())
    deadline = time.monotonic() + PATIENCE_S
    while not (whole.done() and seen) and time.monotonic() < deadline:
        reactor.poll(time.monotonic())
    assert (whole.error(), seen) == (None, ["ours"])
    reactor.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])


class Nested:
    """A plain handler that runs a loop of its own, in which it calls its own service."""

    def __init__(self) -> None:
        self.client: RpcClient | None = None
        self.ended: list[str] = []

    def ping(self) -> int:
        return threading.get_ident()

    def run(self) -> tuple[int, int]:
        async def ask() -> int:
            assert self.client is not None
            await asyncio.sleep(0.01)
            asked: int = await self.client.submit("ping", timeout_s=PATIENCE_S)
            return asked

        return asyncio.run(ask()), threading.get_ident()

    async def _numbers(self) -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(0.0)
            await shard.sleep(0.0)
            self.ended.append("cleaned up")

    async def first(self) -> int:
        async for number in self._numbers():
            return number
        return -1


def test_while_a_plain_handler_runs_a_loop_others_are_handled_in_other_threads(
    master: Master,
) -> None:
    nested = Nested()
    with RpcService(master=master.address) as ours, RpcService(master=master.address) as theirs:
        ours.create_server("nested", nested)
        nested.client = ours.create_client("nested")
        client = theirs.create_client("nested")
        calls = [client.submit("run", timeout_s=PATIENCE_S) for _ in range(4)]
        for call in calls:
            asked, ran = call.result()
            assert asked != ran, "no handler begins on another one's stack"


def test_an_async_generator_that_a_handler_drops_cleans_up_with_awaits(master: Master) -> None:
    nested = Nested()
    with RpcService(master=master.address) as ours, RpcService(master=master.address) as theirs:
        ours.create_server("nested", nested)
        assert theirs.create_client("nested").call("first", timeout_s=PATIENCE_S) == 0
        wait_until(lambda: nested.ended == ["cleaned up"])
