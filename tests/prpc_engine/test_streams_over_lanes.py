"""Streams, cancelling and notifications over tcp, where large messages and small ones overtake each
other.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.rpc.stream import incoming
from shard import Future
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_connected, wait_until

LARGE = 3_000_000  # of float32: some ms on the way, where a small message takes some us
ROUNDS = 24


def mixed(number: int) -> np.ndarray[Any, Any]:
    """Large and small ones in turn, that know their number."""
    return np.full(LARGE if number % 3 == 0 else 2, number, np.float32)


class Handlers:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ended = threading.Event()
        self.gate = Future()

    def items(self, count: int) -> Iterator[np.ndarray[Any, Any]]:
        for number in range(count):
            yield mixed(number)

    def breaks(self) -> Iterator[np.ndarray[Any, Any]]:
        yield mixed(0)
        yield mixed(3)
        raise KeyError("broken")

    async def numbers(self, ballast: Any) -> list[int]:
        return [int(item[0]) async for item in incoming()]

    async def echo(self) -> AsyncIterator[Any]:
        async for item in incoming():
            yield item

    def note(self, kind: str, number: int, ballast: Any) -> None:
        self.notes.append(f"{kind} {number}")

    async def wait(self, ballast: Any) -> None:
        try:
            await self.gate
        finally:
            self.ended.set()


class World:
    def __init__(self, master: Master) -> None:
        self.handlers = Handlers()
        self.serving = RpcService(master=master.address, transports=["tcp"])
        self.serving.create_server("test", self.handlers)
        self.calling = RpcService(master=master.address, transports=["tcp"])
        self.client = self.calling.create_client("test", timeout_s=PATIENCE_S)
        assert self.client.call("prpc.health")["state"] == "serving"
        wait_connected(self.client)


@pytest.fixture
def world() -> Iterator[World]:
    with Master() as master:
        made = World(master)
        with made.serving, made.calling:
            yield made


def test_what_a_server_yields_comes_in_order_and_before_the_end(world: World) -> None:
    with world.client.stream("items", ROUNDS, timeout_s=PATIENCE_S) as stream:
        assert [int(item[0]) for item in stream] == list(range(ROUNDS))


def test_a_handler_that_raises_ends_the_stream_after_its_items(world: World) -> None:
    with world.client.stream("breaks", timeout_s=PATIENCE_S) as stream:
        assert [stream.next_item(PATIENCE_S)[0], stream.next_item(PATIENCE_S)[0]] == [0, 3]
        with pytest.raises(errors.RemoteError, match="broken"):
            stream.next_item(PATIENCE_S)


@pytest.mark.parametrize("ballast", [1, LARGE])
def test_what_a_caller_sends_comes_in_order_and_after_a_large_opening(
    world: World, ballast: int
) -> None:
    with world.client.stream(
        "numbers", np.zeros(ballast, np.float32), timeout_s=PATIENCE_S
    ) as stream:
        for number in range(ROUNDS):
            stream.send(mixed(number), PATIENCE_S)
        stream.end()
        assert stream.result(PATIENCE_S) == list(range(ROUNDS))


def test_a_stream_with_a_large_opening_and_no_items_ends(world: World) -> None:
    with world.client.stream(
        "numbers", np.zeros(LARGE, np.float32), timeout_s=PATIENCE_S
    ) as stream:
        stream.end()
        assert stream.result(PATIENCE_S) == []


def test_both_directions_keep_their_order(world: World) -> None:
    with world.client.stream("echo", timeout_s=PATIENCE_S) as stream:
        for number in range(ROUNDS):
            stream.send(mixed(number), PATIENCE_S)
            assert stream.next_item(PATIENCE_S)[-1] == number
        stream.end()
        with pytest.raises(StopIteration):
            stream.next_item(PATIENCE_S)


def test_streams_that_are_over_are_forgotten(world: World) -> None:
    for _ in range(3):
        with world.client.stream("items", 4, timeout_s=PATIENCE_S) as stream:
            assert len(list(stream)) == 4
    peers = [*node_of(world.calling).peers(), *node_of(world.serving).peers()]
    wait_until(lambda: not any(peer._streams or peer.running for peer in peers))


def test_cancelling_finds_a_request_that_it_could_overtake(world: World) -> None:
    call = world.client.submit("wait", np.zeros(5 * LARGE, np.float32))
    assert call.cancel()
    assert world.handlers.ended.wait(PATIENCE_S)


def test_small_notifications_keep_their_order_and_so_do_large_ones(world: World) -> None:
    for number in range(ROUNDS):
        world.client.notify("note", "large", number, np.zeros(LARGE, np.float32))
        world.client.notify("note", "small", number, 0)
    wait_until(lambda: len(world.handlers.notes) == 2 * ROUNDS)
    for kind in ("large", "small"):
        assert [note for note in world.handlers.notes if note.startswith(kind)] == [
            f"{kind} {n}" for n in range(ROUNDS)
        ]
