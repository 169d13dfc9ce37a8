"""What a stranger may not do to a Unix socket of ours, before it has proved anything."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from shard import ForeignProtocolError, Node, Reactor, UnreachableError
from shard.transport.handshake import HELLO, Connector
from shard.transport.handshake_io import Door, DoorStatistics, Greeting
from shard.transport.identity import PeerIdentity
from tests.connecting import meet_by, receive_exactly
from tests.transport_contract import LIMITS, PATIENCE_S

NODE = Node(secret=b"s", incarnation=3, limits=LIMITS)
KIND = 2


class House:
    """A door at a Unix socket, and whom it let in."""

    def __init__(self) -> None:
        self.reactor = Reactor(time.monotonic)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("")  # the kernel chooses a name that no file system has
        listening.listen()
        self.where = listening.getsockname()
        self.identities: list[PeerIdentity] = []
        self.fds: list[int] = []
        self.door = Door(listening, NODE, KIND, self.reactor, self._let_in)

    def _let_in(self, greeting: Greeting, fds: list[int]) -> None:
        self.identities.append(greeting.peer_identity)
        self.fds += fds
        greeting.accepted()
        greeting.sock.close()

    def turn_until(self, done: object) -> None:
        deadline = time.monotonic() + PATIENCE_S
        assert callable(done)
        while not done():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.reactor.warm_turns = 1
            self.reactor.poll(time.monotonic())

    def knock(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.where)
        return sock


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.door.close()
    made.reactor.close()
    for fd in made.fds:
        os.close(fd)


def test_descriptors_beyond_the_one_that_comes_with_the_proof_are_refused_and_closed(
    house: House,
) -> None:
    """A byte and a descriptor, over and over: 80 of them would fit into the exchange."""
    before = len(os.listdir("/proc/self/fd"))
    hello = Connector(b"s", KIND, 1, bytes(32)).start()
    with house.knock() as sock:
        for byte in hello[:2]:
            socket.send_fds(sock, [bytes([byte])], [sock.fileno()])
        house.turn_until(lambda: house.door.statistics().refused)
        assert len(os.listdir("/proc/self/fd")) == before + 1, "the peer's own"
    assert house.door.statistics() == DoorStatistics(
        greetings=0, accepted=0, refused=1, waiting=0, too_many=0, shed=0
    )


def test_the_kernel_says_that_a_peer_is_of_the_same_user(house: House) -> None:
    with house.knock() as sock:
        exchange = Connector(b"s", KIND, 1, bytes(32))
        sock.sendall(exchange.start())
        house.turn_until(lambda: house.door.statistics().greetings)
        house.turn_until(lambda: _readable(sock))
        proof = exchange.feed(receive_exactly(sock, exchange.wanted, time.monotonic() + PATIENCE_S))
        socket.send_fds(sock, [proof], [sock.fileno()])
        house.turn_until(lambda: house.identities)
    assert house.identities == [PeerIdentity(secret="job", same_user=True)]
    assert len(house.fds) == 1


def _readable(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return len(sock.recv(HELLO.size, socket.MSG_PEEK)) > 0
    except BlockingIOError:
        return False


def test_a_listener_that_hangs_up_is_not_waited_for() -> None:
    one, two = socket.socketpair()
    two.close()
    with (
        one,
        pytest.raises(
            UnreachableError, match="hung up during the handshake: too many connections there"
        ),
    ):
        meet_by(one, "unix", NODE, KIND, PATIENCE_S)


@pytest.mark.parametrize(
    "first",
    [
        bytes([0, 0, 18, 4, 0, 0, 0, 0, 0]) + bytes(18),
        bytes([0, 0, 8, 7, 0, 0, 0, 0, 0]) + bytes(90),
    ],
)
def test_a_server_of_http2_is_told_from_one_that_has_too_many_connections(first: bytes) -> None:
    """What a gRPC server says first, a SETTINGS or GOAWAY frame: shorter than our hello, and
    longer.
    """
    one, two = socket.socketpair()
    with (
        one,
        two,
        pytest.raises(ForeignProtocolError, match=r"a gRPC \(HTTP/2\) server listens there"),
    ):
        two.sendall(first)
        two.shutdown(socket.SHUT_WR)
        meet_by(one, "tcp://there", NODE, KIND, PATIENCE_S)
