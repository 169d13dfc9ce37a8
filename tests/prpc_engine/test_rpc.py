"""Calls to a real server, over each way there is: shared memory and tcp to another process, memory
within this one.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import prpc_engine
from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import BadArguments, DeadlineExceeded, NoServer, RemoteError
from tests.prpc_engine.handlers import FUNCTIONS, Handlers
from tests.prpc_engine.inside import dispatcher_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_connected, wait_until


class World(NamedTuple):
    """One server called "test", and a client of it."""

    transport: str
    service: RpcService
    client: RpcClient
    master: Master


def make_world(transport: str, mode: str) -> Iterator[World]:
    with Master() as master:
        if transport in ("memory", "inline"):
            inline = transport == "inline"  # where a call may need no message
            with RpcService(master=master.address) as service:
                service.create_server("test", Handlers(service), inline=inline)
                yield World("memory", service, service.create_client("test"), master)
        else:
            with (
                ServerProcess(master.address, "test", transport, mode),
                RpcService(master=master.address, transports=[transport]) as service,
            ):
                client = service.create_client("test", timeout_s=PATIENCE_S)
                client.call("echo", 0)
                wait_connected(client)
                yield World(transport, service, client, master)


@pytest.fixture(params=["shm", "tcp", "memory", "inline"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from make_world(request.param, "progress")


@pytest.fixture(params=["shm", "tcp"])
def remote(request: pytest.FixtureRequest) -> Iterator[World]:
    """As `world`, where the server is another process."""
    yield from make_world(request.param, "forever")


VALUES = [
    None,
    True,
    0,
    -1,
    1 << 63,
    -(1 << 200),
    1.5,
    math.inf,
    2 + 3j,
    "",
    "Grüße, 世界",
    b"",
    b"64 bytes" * 8,
    bytes(range(256)) * 4000,
    [],
    [1, "two", [3.0, None]],
    (),
    (1, (2, [3, (4,)])),
    {},
    {"a": [1, {"b": (2, b"3")}], 7: "seven", None: 0, b"k": 1.0},
    "x" * 1_000_000,
    list(range(100_000)),
]


def test_every_value_comes_back_equal_and_of_the_same_type(world: World) -> None:
    for value in VALUES:
        back = world.client.call("echo", value)
        assert back == value
        assert type(back) is type(value)


ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(10),
    np.zeros((0, 3), np.float32),
    np.array(3.5),
    np.arange(12, dtype=np.int16).reshape(3, 4).T,
    np.arange(1_000_000, dtype=np.float32)[::7],
    np.arange(6, dtype=">i4"),
    np.array(["a", "bcd"]),
    np.random.default_rng(0).normal(size=(500, 700)),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
]


def test_every_array_comes_back_with_its_dtype_shape_and_bytes(world: World) -> None:
    for array in ARRAYS:
        back = world.client.call("echo", array)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert np.array_equal(back, array)
        assert world.client.call("describe", array) == (
            array.dtype.str,
            array.shape,
            False,
            array.tobytes(),
        )


def test_arrays_stand_anywhere_in_a_value(world: World) -> None:
    value = {"weights": [np.arange(3), (np.ones((2, 2)), "x")], "big": np.arange(100_000)}
    back = world.client.call("echo", value)
    assert back["weights"][0].tolist() == [0, 1, 2]
    assert back["weights"][1][0].tolist() == [[1, 1], [1, 1]]
    assert np.array_equal(back["big"], value["big"])  # type: ignore[arg-type]


def test_received_arrays_are_read_only(world: World) -> None:
    for size in (10, 1_000_000):
        back = world.client.call("echo", np.zeros(size))
        with pytest.raises(ValueError, match="read-only"):
            back[0] = 1


def test_results_outlive_the_calls_that_come_after_them(world: World) -> None:
    results = [world.client.call("double", np.full(50_000, number)) for number in range(20)]
    for number, result in enumerate(results):
        assert result.min() == result.max() == 2 * number


def test_a_default_of_the_handler_counts(world: World) -> None:
    assert world.client.call("add", 1) == 11
    assert world.client.call("add", 1, 2) == 3


def test_a_handler_without_a_result_gives_none(world: World) -> None:
    assert world.client.call("hear", "nothing comes back") is None


def test_submit_gives_a_future(world: World) -> None:
    call = world.client.submit("add", 20, 22)
    assert call.result(PATIENCE_S) == 42
    assert call.done()
    assert call.error() is None
    assert call.result() == 42


def test_sixty_four_calls_in_flight_each_get_their_own_answer(world: World) -> None:
    for _ in range(20):
        calls = [world.client.submit("echo", number) for number in range(64)]
        assert [call.result(PATIENCE_S) for call in calls] == list(range(64))


def test_each_call_counts_once_in_the_budget_of_repeats_whether_it_could_be_sent_or_not(
    world: World,
) -> None:
    budget = dispatcher_of(world.client).budget
    before = budget.calls
    world.client.call("add", 20, 22)
    world.client.submit("add", 20, 22).result(PATIENCE_S)
    with pytest.raises(BadArguments):
        world.client.call("echo", object())
    assert budget.calls == before + 3


def test_the_last_of_many_calls_can_be_waited_for_first(world: World) -> None:
    calls = [world.client.submit("echo", number) for number in range(200)]
    assert [call.result(PATIENCE_S) for call in reversed(calls)] == list(range(199, -1, -1))


def test_calls_can_be_awaited_in_asyncio(world: World) -> None:
    async def ask() -> list[int]:
        first = await world.client.submit("echo", -1)
        return [first, *await asyncio.gather(*(one(number) for number in range(50)))]

    async def one(number: int) -> int:
        return int(await world.client.submit("echo", number))

    async def bounded() -> list[int]:
        return await asyncio.wait_for(ask(), PATIENCE_S)

    assert asyncio.run(bounded()) == [-1, *range(50)]


def test_an_awaited_call_raises_its_error(world: World) -> None:
    async def ask() -> None:
        await world.client.submit("boom", "oh", timeout_s=PATIENCE_S)

    with pytest.raises(RemoteError, match="raised KeyError: 'oh'"):
        asyncio.run(ask())


def test_threads_may_call_at_the_same_time(world: World) -> None:
    wrong: list[Any] = []

    def ask(name: int) -> None:
        for number in range(100):
            sent = (name, number, bytes([name]) * (number * 200))
            if world.client.call("echo", sent, timeout_s=PATIENCE_S) != sent:
                wrong.append(sent)
        finished.append(name)

    finished: list[int] = []
    threads = [threading.Thread(target=ask, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(finished) == list(range(6))
    assert wrong == []


def test_notify_arrives_in_order_and_nothing_comes_back(world: World) -> None:
    before = len(world.client.call("heard_so_far"))
    for number in range(100):
        world.client.notify("hear", number)
    assert world.client.call("heard_so_far")[before:] == list(range(100))


def test_a_notification_that_fails_disturbs_nobody(world: World) -> None:
    world.client.notify("boom", "nobody hears it")
    world.client.notify("no such method")
    assert world.client.call("echo", 1) == 1


def test_async_handlers_answer_like_others(world: World) -> None:
    assert world.client.call("echo_async", [1, 2]) == [1, 2]
    assert world.client.call("nap", 0.001) == "rested"
    with pytest.raises(RemoteError, match="raised OSError: gone"):
        world.client.call("boom_async", "gone")


def test_a_blocking_call_inside_a_coroutine_works_as_anywhere(world: World) -> None:
    async def in_a_notebook() -> list[object]:
        return [
            world.client.call("echo", 1),
            world.client.call("nap", 0.001),
            await world.client.submit("nap", 0.001),
        ]

    assert asyncio.run(in_a_notebook()) == [1, "rested", "rested"]


def test_many_async_handlers_wait_at_the_same_time(world: World) -> None:
    naps = [world.client.submit("nap", 0.2) for _ in range(100)]
    assert world.client.call("echo", 1) == 1, "those who wait hold up nobody"
    assert [nap.result(PATIENCE_S) for nap in naps] == ["rested"] * 100


def test_an_async_handler_is_cut_at_its_callers_deadline(world: World) -> None:
    before = world.client.call("naps_ended")
    with pytest.raises(DeadlineExceeded):
        world.client.call("nap", 60.0, timeout_s=0.05)
    wait_until(lambda: world.client.call("naps_ended") == before + 1, "the end of the nap")


def test_an_array_from_empty_is_the_memory_that_the_server_sees(world: World) -> None:
    array = prpc_engine.empty((1000, 1000), np.float32)
    array[:] = 7
    array[-1, -1] = 9
    assert world.client.call("first_and_last", array) == (7, 9)
    if world.transport == "shm":
        flat = array.reshape(-1)
        world.client.call("keep", flat)
        flat[500] = 123
        assert world.client.call("peek", 500) == 123
        world.client.call("drop")


def test_an_ordinary_array_may_be_changed_after_the_call_was_submitted(world: World) -> None:
    for size in (100, 2_000_000):
        array = np.ones(size)
        call = world.client.submit("first_and_last", array)
        array[:] = 2
        assert call.result(PATIENCE_S) == (1, 1)


def test_a_result_from_empty_arrives(world: World) -> None:
    for count in (10, 1_000_000):
        result = world.client.call("shared", count)
        assert result.dtype == np.float32
        assert result[-1] == count - 1


def test_large_results_do_not_use_up_the_slab(world: World) -> None:
    for _ in range(200):
        world.client.call("shared", 1_000_000)
        world.client.call("double", np.ones(500_000))
    wait_until(
        lambda: prpc_engine.node.slab.default_slab().statistics().blocks_used <= 8,
        "the end of the leases",
    )


def test_a_deadline_that_is_not_reached_does_nothing(world: World) -> None:
    assert world.client.call("echo", 5, timeout_s=PATIENCE_S) == 5
    assert world.client.call("echo", 5, timeout_s=None) == 5


def test_to_forms_name_the_server(world: World) -> None:
    (server_id,) = world.client.server_ids
    assert world.client.call_to(server_id, "add", 1, 1) == 2
    assert world.client.submit_to(server_id, "add", 1, 1).result(PATIENCE_S) == 2
    with pytest.raises(NoServer, match=r"'test' has no server 77; it has: \[0\]"):
        world.client.call_to(77, "add", 1, 1)


def test_a_dict_of_functions_can_be_served_and_taken_back(world: World) -> None:
    with RpcService(master=world.master.address) as other:
        server = other.create_server("functions", FUNCTIONS)
        client = world.service.create_client("functions", timeout_s=PATIENCE_S)
        assert client.call("one") == 1
        assert client.call("negate", 5) == -5
        assert server.statistics().requests == 2
        server.close()
        server.close()


def test_a_server_counts_what_it_did(world: World) -> None:
    with RpcService(master=world.master.address) as other:
        server = other.create_server("counted", Handlers(other))
        client = world.service.create_client("counted", timeout_s=PATIENCE_S)
        client.call("echo", 1)
        client.notify("hear", 1)
        for method in ("boom", "boom_async"):
            with pytest.raises(RemoteError):
                client.call(method, "x")
        with pytest.raises(prpc_engine.errors.UnknownMethod):
            client.call("nothing of the kind")
        with pytest.raises(RemoteError):
            client.call("unsendable")

        def counted() -> bool:  # the last answer may be here before it is counted there
            figures = server.statistics()
            return (figures.requests, figures.failures, figures.rejected, figures.tasks) == (
                5,
                3,
                1,
                0,
            )

        wait_until(counted, "5 requests, 3 failures and 1 rejected")


def test_the_way_taken_is_told(remote: World) -> None:
    assert any(
        choice.startswith(f"{remote.transport} to ")
        for choice in remote.service.transports.values()
    )


def test_serve_forever_may_be_for_a_time_and_the_progress_thread_serves_after_it(
    world: World,
) -> None:
    with RpcService(master=world.master.address) as other:
        other.create_server("timed", Handlers(other))
        client = world.service.create_client("timed", timeout_s=PATIENCE_S)
        seen: list[str] = []

        def ask() -> None:
            while "MainThread" not in seen:
                seen.append(client.call("thread", timeout_s=PATIENCE_S))

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            other.serve_forever(timeout_s=0.05)
        thread.join(PATIENCE_S)
        assert client.call("echo", "still there") == "still there"
        assert client.call("thread") == "prpc-progress"


def test_serve_forever_serves_from_the_main_thread(remote: World) -> None:
    wait_until(
        lambda: remote.client.call("thread") == "MainThread", "its main thread"
    )  # it said that it is ready before it serves
    assert {remote.client.call("thread") for _ in range(20)} == {"MainThread"}


def test_handlers_call_other_servers_while_their_caller_waits(remote: World) -> None:
    with ServerProcess(remote.master.address, "other", remote.transport):
        assert remote.client.call("relay", "other", "add", 1, 2) == 3
        assert remote.client.call("relay", "other", "relay", "test", "add", 3, 4) == 7, (
            "and those call back"
        )
        with pytest.raises(RemoteError, match=r"'relay' of .* raised KeyError: 'inner'") as caught:
            remote.client.call("relay", "other", "boom", "inner")
        assert caught.value.remote_traceback.splitlines()[-1].startswith(
            "via 'boom' of server 0 of 'other'"
        )
        assert remote.client.call("echo", 1) == 1


def test_async_handlers_await_other_servers(remote: World) -> None:
    with ServerProcess(remote.master.address, "other", remote.transport):
        remote.client.call("relay", "other", "echo", 0)
        calls = [
            remote.client.submit("relay_async", "other", "echo", number) for number in range(64)
        ]
        assert [call.result(PATIENCE_S) for call in calls] == list(range(64))
