"""A name that stands for several addresses: looked up at each connect, and every address is tried
within the time there is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shard import TcpTransport, UnreachableError
from shard.transport.tcp import parse_address
from tests.connecting import connect
from tests.transport_contract import World

Names = Callable[..., None]


@pytest.fixture
def world() -> Iterator[World]:
    world = World(TcpTransport, "tcp://127.0.0.1:0")
    yield world
    world.close()


@pytest.fixture
def name(world: World, monkeypatch: pytest.MonkeyPatch) -> Names:
    """Makes node.test stand for addresses, at the listener's port; the world's transports connect
    to it.
    """
    port = parse_address(world.listener.address)[1]
    real = socket.getaddrinfo
    hosts: list[str] = []

    def look_up(host: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [
            found
            for one in (hosts if host == "node.test" else [host])
            for found in real(one, *args, **kwargs)
        ]

    def stands_for(*now: str) -> None:
        hosts[:] = now
        world.listener.address = f"tcp://node.test:{port}"

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return stands_for


def test_the_address_that_answers_is_taken_with_all_lanes(world: World, name: Names) -> None:
    name("127.0.0.2", "127.0.0.3", "127.0.0.1")
    one, two = world.connect()
    one.connection.send(b"hello")
    world.turn_until(lambda: two.messages)
    assert one.connection.peer == world.listener.address
    one.connection.close()
    two.connection.close()


@pytest.mark.slow
def test_one_that_hangs_leaves_the_others_their_share_of_the_time(
    world: World, name: Names
) -> None:
    port = parse_address(world.listener.address)[1]
    world.connect_s = 8.0  # half of it passes in vain
    with socket.create_server(("127.0.0.2", port)):  # the kernel accepts, and nobody says anything
        name("127.0.0.2", "127.0.0.1")
        one, two = world.connect()
    one.connection.close()
    two.connection.close()


def test_a_name_is_looked_up_at_each_connect(world: World, name: Names) -> None:
    name("127.0.0.2")
    with pytest.raises(
        UnreachableError, match=r"^nobody listens at tcp://node\.test:\d+: Connection refused$"
    ):
        world.connect()
    name("127.0.0.1")  # it has moved
    one, two = world.connect()
    one.connection.close()
    two.connection.close()


def test_when_none_answers_each_is_named(world: World, name: Names) -> None:
    name("127.0.0.2", "127.0.0.3")
    with pytest.raises(
        UnreachableError,
        match=r"^none of the 2 addresses of tcp://node.*; 127\.0\.0\.3: nobody listens",
    ):
        world.connect()


def test_a_name_that_does_not_resolve_is_said_so(world: World) -> None:
    with pytest.raises(UnreachableError, match=r"^nobody listens at tcp://a\.\.b:1: "):
        connect(world.transports[1], "tcp://a..b:1", 1.0)
