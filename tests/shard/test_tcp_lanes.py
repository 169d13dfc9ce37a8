"""A tcp connection of several sockets: small messages do not wait for bulk, and all lanes live and
die together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard import (
    BackpressureError,
    Connection,
    Future,
    Node,
    PeerLostError,
    RemoteProtocolError,
    ShardError,
    TcpTransport,
    UnreachableError,
    control_loop,
)
from shard.transport.frame import encode_header
from shard.transport.handshake import ONLY_LANE, TOKEN_BYTES, Lane
from shard.transport.laned_connection import BULK_BYTES_MIN
from shard.transport.socket_lane import SocketLane
from shard.transport.tcp import KIND, TcpListener, parse_address
from shard.transport.tcp_connection import TcpConnection
from tests.connecting import meet_by
from tests.transport_contract import LIMITS, PATIENCE_S, World

BULK = np.zeros(20_000_000, np.uint8)  # more than the buffers of two sockets hold


@pytest.fixture
def world() -> Iterator[World]:
    made = World(TcpTransport, "tcp://127.0.0.1:0", b"secret")
    yield made
    made.close()


NODE = Node(secret=b"secret", incarnation=7, limits=LIMITS)


def lanes_of(connection: object) -> int:
    assert isinstance(connection, TcpConnection)
    return len(connection.sockets)


def transport(world: World, **limits: float) -> TcpTransport:
    changed = dataclasses.replace(LIMITS, **limits)  # type: ignore[arg-type]
    return TcpTransport(Node(secret=b"secret", incarnation=7, limits=changed), world.slabs[1])


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_a_connection_has_as_many_lanes_as_its_connector_wants(world: World, count: int) -> None:
    one, two = world.connect(transport(world, connections_per_peer=count))
    assert lanes_of(one.connection) == lanes_of(two.connection) == count
    for number in range(20):
        one.connection.send(b"%d" % number, [np.full(400_000, number, np.uint8)])
        two.connection.send(b"%d" % number, [np.full(400_000, number, np.uint8)])
    world.turn_until(lambda: len(one.messages) == len(two.messages) == 20)
    assert {(body, blocks[0][0], blocks[0][-1]) for body, blocks in two.messages} == {
        (b"%d" % n, n, n) for n in range(20)
    }
    one.connection.close()
    world.turn_until(lambda: two.ends)


def test_a_small_message_does_not_wait_for_a_large_one_that_has_begun(world: World) -> None:
    one, two = world.connect()
    one.connection.send(b"bulk", [BULK])
    one.connection.send(b"small", [np.zeros(BULK_BYTES_MIN - 5 - 1, np.uint8)])
    world.turn_until(lambda: len(two.messages) == 2)
    assert two.bodies == [b"small", b"bulk"]
    one.connection.close()


def test_on_one_lane_it_does(world: World) -> None:
    one, two = world.connect(transport(world, connections_per_peer=1))
    one.connection.send(b"bulk", [BULK])
    one.connection.send(b"small")
    world.turn_until(lambda: len(two.messages) == 2)
    assert two.bodies == [b"bulk", b"small"]
    one.connection.close()


def test_of_several_bulk_lanes_the_one_where_least_waits_is_taken(world: World) -> None:
    one, two = world.connect(transport(world, connections_per_peer=3))
    one.connection.send(b"first", [BULK])
    one.connection.send(b"second", [BULK[:300_000]])
    world.turn_until(lambda: len(two.messages) == 2)
    assert two.bodies == [b"second", b"first"]
    one.connection.close()


def test_the_limits_of_the_outbox_are_those_of_the_connection(world: World) -> None:
    one, two = world.connect(
        transport(world, outbox_messages_max=3, outbox_bytes_max=1 << 30, connections_per_peer=3)
    )
    sent = 0
    with pytest.raises(BackpressureError, match=r"3 messages of 600000.. bytes already wait"):
        for _ in range(10):
            one.connection.send(b"bulk", [BULK], stable=True)
            sent += 1
    assert sent == 5, "one begun on each lane, three waiting"
    assert one.connection.outbox_messages == 3
    one.connection.send(b"small")
    world.turn_until(lambda: len(two.messages) == 6)
    one.connection.close()


def test_a_message_that_has_begun_to_leave_is_not_refused_for_what_waits_on_another_lane(
    world: World,
) -> None:
    one, two = world.connect(transport(world, outbox_messages_max=3))
    small = 0
    with pytest.raises(BackpressureError):
        while True:
            one.connection.send(bytes(BULK_BYTES_MIN // 2))
            small += 1
    one.connection.send(b"bulk", [BULK])  # to a lane with room: its first bytes are gone
    world.turn_until(lambda: len(two.messages) == small + 1)
    assert two.bodies.count(b"bulk") == 1
    one.connection.close()


def test_a_lane_ends_once_the_thread_that_writes_to_it_has_done_so(world: World) -> None:
    """Else its bytes could go to whatever has the descriptor next."""
    writing, go_on, descriptors = threading.Event(), threading.Event(), []

    class HeldSocket(socket.socket):
        """Holds the thread that writes, before the system call."""

        def send(self, data: Any, flags: int = 0) -> int:
            writing.set()
            assert go_on.wait(PATIENCE_S)
            descriptors.append(self.fileno())
            return len(data)

    ours, theirs = socket.socketpair()
    sock = HeldSocket(fileno=ours.detach())
    lane = SocketLane(sock, "the peer", NODE, world.slabs[0])
    lane.attach(world.reactor)
    threads = [
        threading.Thread(target=lane.send, args=(b"small",)),
        threading.Thread(target=lane.close),
    ]
    threads[0].start()
    assert writing.wait(PATIENCE_S)
    threads[1].start()
    world.turn_until(lambda: lane.error)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert descriptors[0] >= 0
    assert sock.fileno() == -1
    theirs.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lane_that_breaks_ends_the_connection_and_all_other_lanes(
    world: World, number: int
) -> None:
    one, two = world.connect(transport(world, connections_per_peer=3))
    assert isinstance(one.connection, TcpConnection)
    one.connection.sockets[number].send(b"?" * 64)
    world.turn_until(lambda: two.ends and one.ends)
    assert isinstance(two.ends[0], RemoteProtocolError)
    assert isinstance(one.ends[0], PeerLostError)
    for side in (one, two):
        assert isinstance(side.connection, TcpConnection)
        assert [sock.fileno() for sock in side.connection.sockets] == [-1] * 3
        with pytest.raises(ShardError):
            side.connection.send(b"", [BULK])


def test_what_was_sent_over_any_lane_before_the_end_still_arrives(world: World) -> None:
    whole = 3 + 2 * 500_000 + 2 * len(encode_header(1, [500_000], LIMITS))
    whole += len(encode_header(1, [], LIMITS))
    for _ in range(5):
        one, two = world.connect(transport(world, connections_per_peer=3))
        one.connection.send(b"1", [BULK[:500_000]])
        one.connection.send(b"2", [BULK[:500_000]])
        one.connection.send(b"3")
        world.turn_until(lambda: one.connection.traffic().bytes_sent == whole)  # noqa: B023
        one.connection.close()
        world.turn_until(lambda: two.ends)  # noqa: B023
        assert set(two.bodies) == {b"1", b"2", b"3"}


def test_a_peer_that_hangs_up_on_one_lane_and_keeps_the_others_is_cut_in_time(world: World) -> None:
    accepting = transport(world, peer_silent_s=0.5)
    listener = accepting.listen("tcp://127.0.0.1:0", world.reactor, lambda c: accepted.append(c))
    accepted: list[Connection[object]] = []
    ended: list[ShardError] = []
    world.listener.close()
    world.listener = listener
    one = world.call(world.transports[1])
    world.turn_until(lambda: accepted)
    accepted[0].on_close = lambda _, error: ended.append(error)
    assert isinstance(one, TcpConnection)
    one.sockets[1].shutdown(socket.SHUT_WR)
    world.turn_until(lambda: ended)
    assert "hung up on one of 2 lanes, and left others open" in str(ended[0])
    one.close()


# -- strangers -------------------------------------------------------------------------------------


def knock(
    world: World, lane: Lane, secret: bytes = b"secret", incarnation: int = 7
) -> socket.socket | BaseException:
    """One lane, by hand: its socket, or why it was refused."""
    sock = socket.create_connection(parse_address(world.listener.address), PATIENCE_S)
    node = Node(secret=secret, incarnation=incarnation, limits=LIMITS)
    found: list[socket.socket | BaseException] = []

    def run() -> None:
        try:
            meet_by(sock, "tcp://test", node, KIND, PATIENCE_S, lane=lane)
            found.append(sock)
        except ShardError as error:
            sock.close()
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    world.turn_until(lambda: found)
    thread.join()
    return found[0]


def test_a_lane_joins_only_what_the_same_peer_has_opened(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    token = secrets.token_bytes(TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        assert isinstance(knock(world, Lane(token, 1, 2)), UnreachableError)
        assert "a connection that is not known here" in caplog.messages[-1]
        first = knock(world, Lane(token, 0, 2))
        assert isinstance(first, socket.socket)
        stack.enter_context(first)
        assert isinstance(knock(world, Lane(token, 1, 2), incarnation=8), UnreachableError)
        assert "another peer has opened" in caplog.messages[-1]
        assert isinstance(knock(world, Lane(token, 1, 2), secret=b"wrong"), ShardError)
        assert world.accepted == []
        second = knock(world, Lane(token, 1, 2))
        assert isinstance(second, socket.socket)
        stack.enter_context(second)
        world.turn_until(lambda: world.accepted)
        assert isinstance(knock(world, Lane(token, 1, 2)), UnreachableError), "it is whole"
        alone = knock(world, ONLY_LANE)
        assert isinstance(alone, socket.socket)
        stack.enter_context(alone)
        world.turn_until(lambda: len(world.accepted) == 2)


def test_a_connection_whose_lanes_do_not_all_come_is_given_up_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = dataclasses.replace(LIMITS, handshake_s=0.2)
    world = World(
        lambda node, slab: TcpTransport(dataclasses.replace(node, limits=limits), slab),
        "tcp://127.0.0.1:0",
        b"secret",
    )
    ahead_s = 1000.0
    # so no timer is due before the test says so
    world.reactor.clock = lambda: time.monotonic() + ahead_s
    first = knock(world, Lane(b"t" * TOKEN_BYTES, 0, 3))
    assert isinstance(first, socket.socket)
    assert isinstance(world.listener, TcpListener)
    assert world.listener.statistics().refused == 0
    world.reactor.poll(time.monotonic() + ahead_s + 0.2)
    assert world.listener.statistics().refused == 1
    first.settimeout(PATIENCE_S)
    assert first.recv(1) == b""
    first.close()
    assert caplog.messages[-1].endswith("1 of its 3 lanes came within 0.2 s")
    world.close()


def test_a_listener_that_closes_hangs_up_on_half_made_connections(world: World) -> None:
    first = knock(world, Lane(b"t" * TOKEN_BYTES, 0, 2))
    assert isinstance(first, socket.socket)
    world.listener.close()
    first.settimeout(PATIENCE_S)
    assert first.recv(1) == b""
    first.close()


# -- many ------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_thousand_that_connect_at_once_from_one_host_all_get_in_and_cost_little(
    world: World,
) -> None:
    """Far more than may prove themselves at a time; the others wait for their turn."""
    many = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5 * many:
        pytest.skip(
            f"{hard} descriptors at most (ulimit -Hn): {5 * many} are needed for {many} "
            "connections of two lanes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 5 * many), hard))
    connector = transport(world)
    found: list[Future] = []
    before = resident_bytes()
    connecting = [
        control_loop().spawn(connector.connect(world.listener.address, PATIENCE_S))
        for _ in range(many)
    ]
    for one in connecting:
        one.when_done(found.append)
    try:
        world.turn_until(lambda: len(found) == many)
        assert [str(one.error()) for one in found if one.error() is not None] == []
        world.turn_until(lambda: len(world.accepted) == many)
        each = (resident_bytes() - before) / (2 * many)
        assert each < 64 << 10, "of one idle end of a connection"
    finally:
        for one in found:
            if one.error() is None:
                one.result().close()
        world.turn_until(lambda: all(side.ends for side in world.accepted))
        found.clear()
        connecting.clear()
        gc.collect()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
