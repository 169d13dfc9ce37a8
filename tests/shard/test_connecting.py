"""Connecting, step by step: what it awaits, how long, and what it leaves behind when it is given up
on the way. Both sides are turned by the test, in one reactor.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shard import (
    CancelledError,
    Node,
    ShmTransport,
    Slab,
    Task,
    TcpTransport,
    Transport,
    UnixTransport,
    UnreachableError,
)
from shard.transport.handshake import LANES_MAX, Acceptor
from shard.transport.laned import LanedListener
from shard.transport.tcp import KIND
from tests.certificates import Authority
from tests.connecting import connect, receive_exactly
from tests.transport_contract import LIMITS, PATIENCE_S, World

LANES = 3
TURNS_MAX = 400  # by then the slowest of them has connected

Make = Callable[[Node, Slab], Transport]


def with_lanes(node: Node) -> Node:
    return replace(node, limits=replace(LIMITS, connections_per_peer=LANES))


@pytest.fixture(params=["shm", "unix", "tcp", "tls", "checked"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    files = Authority(tmp_path).issue("node") if request.param == "tls" else None
    makes: dict[str, tuple[Make, str]] = {
        "shm": (ShmTransport, "shm://"),
        "unix": (lambda node, slab: UnixTransport(with_lanes(node), slab), "unix://"),
        "tcp": (lambda node, slab: TcpTransport(with_lanes(node), slab), "tcp://127.0.0.1:0"),
        "tls": (
            lambda node, slab: TcpTransport(with_lanes(node), slab, files),
            "tcp://127.0.0.1:0",
        ),
        "checked": (
            lambda node, slab: TcpTransport(replace(with_lanes(node), tcp_checksum=True), slab),
            "tcp://127.0.0.1:0",
        ),
    }
    make, address = makes[request.param]
    world = World(make, address)
    yield world
    world.close()


def begin(world: World) -> Task:
    return world.reactor.spawn(world.transports[1].connect(world.listener.address, PATIENCE_S))


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_it_connects_in_whatever_reactor_turns_it_and_starts_no_thread(world: World) -> None:
    threads = threading.active_count()
    task = begin(world)
    world.turn_until(task.done)
    connection = task.result()
    assert threading.active_count() == threads
    world.turn_until(lambda: world.accepted)
    connection.attach(world.reactor)
    connection.send(b"hello")
    world.turn_until(lambda: world.accepted[0].messages)
    connection.close()


def test_given_up_after_any_step_it_leaves_nothing_behind(world: World) -> None:
    """A turn more each time, until one is through: at each await of it, and of its lanes."""
    connected = begin(world)  # what is made once is there
    world.turn_until(lambda: connected.done() and world.accepted)
    connected.result().close()
    world.turn_until(lambda: world.accepted[0].ends)
    before, watched = descriptors(), world.reactor.watched
    given_up = 0
    for turns in range(TURNS_MAX):
        refused = len(world.accepted)
        task = begin(world)
        for _ in range(turns):
            world.reactor.warm_turns = 1  # each looks at the sockets
            world.reactor.poll(time.monotonic())
        if not task.cancel():
            task.result().close()
            break
        given_up += 1
        world.turn_until(task.done)
        with pytest.raises(CancelledError):
            task.result()
        world.turn_until(lambda: world.reactor.watched == watched)
        for side in world.accepted[refused:]:
            side.connection.close()
        if isinstance(world.listener, LanedListener):  # which waits for the lanes that do not come
            world.listen_anew()
        assert descriptors() == before, f"after {turns} turns"
    assert given_up > 3, "it was through at once"
    world.turn_until(lambda: world.reactor.watched == watched)
    for side in world.accepted:
        side.connection.close()
    world.turn_until(lambda: descriptors() == before)


def test_lanes_beside_the_first_do_not_wait_for_each_other() -> None:
    """This acceptor answers the further lanes when all of them have spoken."""
    node = replace(
        Node(secret=b"", incarnation=7, limits=LIMITS),
        limits=replace(LIMITS, connections_per_peer=LANES_MAX),
    )
    slab = Slab()
    met = []
    with contextlib.ExitStack() as closing:
        listening = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(PATIENCE_S)
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        threads = [
            threading.Thread(
                target=lambda: met.append(connect(TcpTransport(node, slab), address, PATIENCE_S))
            )
        ]
        threads[0].start()
        for count in (1, LANES_MAX - 1):
            socks = [closing.enter_context(listening.accept()[0]) for _ in range(count)]
            deadline = time.monotonic() + PATIENCE_S
            exchanges = []
            for sock in socks:
                exchange = Acceptor(b"", KIND, 1, bytes(32), lanes_max=LANES_MAX)
                exchange.start()
                exchanges.append(exchange)
                answer = exchange.feed(receive_exactly(sock, exchange.wanted, deadline))
                sock.sendall(answer)
            for sock, exchange in zip(socks, exchanges, strict=True):
                exchange.feed(receive_exactly(sock, exchange.wanted, deadline))
                sock.sendall(exchange.verdict)
        threads[0].join(PATIENCE_S)
        assert len(met) == 1
        met[0].close()
    slab.close()


def test_a_name_that_is_not_looked_up_in_time_is_given_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up, found = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *args: object, **options: object) -> object:
        if host == "slow.test" and not options.get("flags"):
            looked_up.wait(PATIENCE_S)
        return found(host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    slab = Slab()
    transport = TcpTransport(Node(secret=b"", incarnation=7, limits=LIMITS), slab)
    try:
        with pytest.raises(UnreachableError, match="the name was not looked up in time"):
            connect(transport, "tcp://slow.test:1", 0.05)
    finally:
        looked_up.set()
    slab.close()


def test_the_lanes_and_handshakes_have_one_deadline_together() -> None:
    """Each lane's hello is answered at once, and none of the further lanes' proofs."""
    node = Node(secret=b"", incarnation=7, limits=replace(LIMITS, connections_per_peer=2))
    slab = Slab()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        accepted = []

        def accept() -> None:
            for is_answered in (True, False):
                sock, _ = listening.accept()
                accepted.append(sock)
                exchange = Acceptor(b"", KIND, 1, bytes(32), lanes_max=LANES_MAX)
                exchange.start()
                deadline = time.monotonic() + PATIENCE_S
                sock.sendall(exchange.feed(receive_exactly(sock, exchange.wanted, deadline)))
                exchange.feed(receive_exactly(sock, exchange.wanted, deadline))
                if is_answered:
                    sock.sendall(exchange.verdict)

        accepting = threading.Thread(target=accept)
        accepting.start()
        with pytest.raises(UnreachableError, match="did not finish the handshake within"):
            connect(TcpTransport(node, slab), address, 1.0)
        accepting.join(PATIENCE_S)
        for sock in accepted:
            sock.settimeout(PATIENCE_S)
            assert sock.recv(1) == b"", "all lanes are closed"
            sock.close()
    slab.close()
