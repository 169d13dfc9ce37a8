"""One port, several processes behind it: who gets a connection, and what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shard import (
    Connection,
    DistributedPort,
    Node,
    Reactor,
    Slab,
    SocketDistributor,
    TcpListener,
    TcpTransport,
    UnreachableError,
)
from shard.transport import shared_port
from shard.transport.handshake import Connector
from tests.connecting import connect, receive_exactly
from tests.program import wait_until
from tests.transport_contract import LIMITS, PATIENCE_S


def node(incarnation: int) -> Node:
    return Node(secret=b"s", incarnation=incarnation, limits=LIMITS)


class House:
    """A port with a dealer, and takers: each with a reactor of its own, as if it were another
    process; turned by one thread.
    """

    def __init__(self) -> None:
        self.reactors = [Reactor(time.monotonic)]
        self.slab = Slab()
        # by incarnation of who accepted; 0: the dealer's process
        self.connections: dict[int, list[Connection[Any]]] = {0: []}
        transport = TcpTransport(node(0), self.slab)
        listener = transport.listen(
            "tcp://127.0.0.1:0", self.reactors[0], self.connections[0].append
        )
        assert isinstance(listener, TcpListener)
        self.listener, self.address = listener, listener.address
        self.dealer = SocketDistributor(self.reactors[0])
        self.listener.share(self.dealer.deal)
        self.takers: dict[int, TcpListener] = {}
        self._to_do: list[tuple[Callable[[], Any], list[Any], threading.Event]] = []
        self._over = False
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def _turn(self) -> None:
        while not self._over:
            for reactor in list(self.reactors):
                reactor.warm_turns = 1
                reactor.poll(time.monotonic())
            for function, results, done in self._to_do[:]:
                self._to_do.pop(0)
                results.append(function())
                done.set()
            os.sched_yield()

    def in_reactor(self, function: Callable[[], Any]) -> Any:
        results: list[Any] = []
        done = threading.Event()
        self._to_do.append((function, results, done))
        assert done.wait(PATIENCE_S)
        return results[0]

    def add_taker(self, incarnation: int) -> None:
        port = DistributedPort(
            self.dealer.name, self.dealer.key, ("127.0.0.1", int(self.address.rpartition(":")[2]))
        )
        reactor = Reactor(time.monotonic)
        accepted = self.connections[incarnation] = []
        transport = TcpTransport(node(incarnation), self.slab)
        self.takers[incarnation] = self.in_reactor(
            lambda: transport.listen_on(port, reactor, accepted.append)
        )
        self.reactors.append(reactor)

    def connect(self) -> Connection[Any]:
        return connect(TcpTransport(node(9), self.slab), self.address, PATIENCE_S)

    def close(self) -> None:
        def close_all() -> None:
            for listener in (self.listener, *self.takers.values()):
                listener.close()
            self.dealer.close()
            for accepted in self.connections.values():
                for connection in accepted:
                    connection.close()

        self.in_reactor(close_all)
        self._over = True
        self._thread.join(PATIENCE_S)
        for reactor in self.reactors:
            reactor.close()
        self.slab.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


@contextlib.contextmanager
def connected(house: House, count: int) -> Iterator[list[Connection[Any]]]:
    made = [house.connect() for _ in range(count)]
    yield made
    for connection in made:
        connection.close()


@pytest.mark.parametrize("takers", [1, 2, 4])
def test_connections_with_all_their_lanes_are_spread_one_apart_at_most(
    house: House, takers: int
) -> None:
    for number in range(1, takers + 1):
        house.add_taker(number)
    for count in range(1, 6):
        with connected(house, count) as connections:
            counts = house.dealer.connections()
            assert sum(counts) == count
            assert max(counts) - min(counts) <= 1
            assert all(0 < one.peer_incarnation <= takers for one in connections)
        wait_until(lambda: not any(house.dealer.connections()))
    assert not house.connections[0]


def test_places_that_have_become_free_are_filled(house: House) -> None:
    house.add_taker(1)
    house.add_taker(2)
    with connected(house, 4) as connections:
        for connection in connections:
            if connection.peer_incarnation == 1:
                connection.close()
        wait_until(lambda: house.dealer.connections() == (0, 2))
        with connected(house, 2) as more:
            assert [one.peer_incarnation for one in more] == [1, 1]


def test_a_connection_with_checksums_counts_until_it_ends(house: House) -> None:
    house.add_taker(1)
    ours = connect(
        TcpTransport(dataclasses.replace(node(9), tcp_checksum=True), house.slab),
        house.address,
        PATIENCE_S,
    )
    wait_until(lambda: house.dealer.connections() == (1,))
    ours.close()
    wait_until(lambda: house.dealer.connections() == (0,))


def test_without_takers_and_once_they_have_gone_the_process_with_the_port_serves(
    house: House,
) -> None:
    with connected(house, 1) as connections:
        assert connections[0].peer_incarnation == 0
    house.add_taker(1)
    with connected(house, 1) as connections:
        assert connections[0].peer_incarnation == 1
        house.in_reactor(house.takers[1].close)
        wait_until(lambda: house.dealer.connections() == ())
        with connected(house, 1) as more:
            assert more[0].peer_incarnation == 0


def test_who_is_refused_by_a_taker_no_longer_counts(house: House) -> None:
    house.add_taker(1)
    with socket.create_connection(_place(house)) as sock:
        sock.sendall(b"PRPC" + bytes(62))  # a hello of version 0
        assert sock.recv(4) == b"PRPC"  # the farewell, which says what is spoken here
    wait_until(lambda: house.takers[1].statistics().refused == 1)
    wait_until(lambda: house.dealer.connections() == (0,))


def test_what_is_no_hello_never_leaves_the_process_with_the_port(house: House) -> None:
    house.add_taker(1)
    with socket.create_connection(_place(house)) as sock:
        sock.sendall(
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1:2222\r\nAccept: */*\r\nUser-Agent: x\r\n\r\n"
        )
        wait_until(lambda: house.listener.statistics().refused == 1)
    with socket.create_connection(_place(house)) as sock:
        sock.sendall(b"PRPC")
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: house.listener.statistics().refused == 2)
    assert house.takers[1].statistics().refused == 0


def test_a_hello_that_comes_in_pieces_goes_to_a_taker_as_a_whole(house: House) -> None:
    house.add_taker(1)
    exchange = Connector(b"s", 1, 5, bytes(32))
    hello = exchange.start()
    with socket.create_connection(_place(house)) as sock:
        sock.sendall(hello[:10])
        wait_until(lambda: house.listener.statistics().greetings == 1)
        sock.sendall(hello[10:])
        exchange.feed(receive_exactly(sock, exchange.wanted, time.monotonic() + PATIENCE_S))
    assert exchange.peer_incarnation == 1


def test_a_taker_without_the_key_gets_nothing(house: House) -> None:
    with pytest.raises(UnreachableError, match="its key is another one"):
        DistributedPort(house.dealer.name, bytes(shared_port.KEY_BYTES), ("127.0.0.1", 1))
    with connected(house, 1) as connections:
        assert connections[0].peer_incarnation == 0


def test_all_connections_of_a_host_go_to_one_taker_where_tls_hides_their_lanes(
    house: House,
) -> None:
    for number in (1, 2):
        house.add_taker(number)
    with contextlib.ExitStack() as exits:
        ours = [exits.enter_context(socket.socket()) for _ in range(5)]
        for sock, host in zip(ours, "aabab", strict=True):
            assert house.in_reactor(
                lambda sock=sock, host=host: house.dealer.deal(sock, host, None)
            )
        assert house.dealer.connections() == (1, 1)


def _place(house: House) -> tuple[str, int]:
    return "127.0.0.1", int(house.address.rpartition(":")[2])
