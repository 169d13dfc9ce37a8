"""tcp keeps the contract, and what is particular to sockets."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from shard import (
    AddressInUseError,
    AuthenticationError,
    Node,
    PeerLostError,
    RemoteProtocolError,
    Slab,
    TcpTransport,
    Transport,
    UnreachableError,
)
from shard.transport.meeting import meet
from shard.transport.tcp import KIND, parse_address
from tests.transport_contract import LIMITS, Side, TransportContract, World


class TestTcp(TransportContract):
    address = "tcp://127.0.0.1:0"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return TcpTransport(node, slab)

    def raw_peer(self, world: World) -> tuple[socket.socket, Side]:
        """A socket past its handshake, for sending what no well-behaved peer would."""
        host, port = parse_address(world.listener.address)
        sock = socket.create_connection((host, port))
        import threading

        node = Node(secret=b"", incarnation=1, limits=LIMITS)
        thread = threading.Thread(target=meet, args=(sock, world.listener.address, node, KIND, 5.0))
        thread.start()
        world.turn_until(lambda: world.accepted)
        thread.join()
        return sock, world.accepted[-1]

    @pytest.mark.parametrize(
        ("frame", "text"),
        [
            (struct.pack("<IHH", (1 << 20) + 1, 0, 1), "frame body of 1048577 bytes, at most 1048576"),
            (struct.pack("<IHH", 5, 65, 1), "65 blocks, at most 64"),
            (struct.pack("<IHHQ", 5, 1, 1, 1 << 50), "bytes of arrays, at most"),
            (struct.pack("<IHH", 5, 0, 9), "frame version 9"),
        ],
    )
    def test_a_frame_over_a_limit_ends_the_connection_before_anything_is_allocated(
        self, world: World, frame: bytes, text: str
    ) -> None:
        sock, side = self.raw_peer(world)
        sock.sendall(frame)
        world.turn_until(lambda: side.ends)
        assert isinstance(side.ends[0], RemoteProtocolError)
        assert text in str(side.ends[0])
        sock.close()

    def test_a_frame_sent_byte_by_byte_arrives_once(self, world: World) -> None:
        sock, side = self.raw_peer(world)
        frame = struct.pack("<IHHQQ", 5, 2, 1, 3, 0) + b"hello" + b"abc" + struct.pack("<IHH", 2, 0, 1) + b"ok"
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in frame:
            sock.sendall(bytes([byte]))
            world.reactor.park(0.05)
        world.turn_until(lambda: len(side.messages) == 2)
        (body, blocks), (second, none) = side.messages
        assert (body, [bytes(block) for block in blocks]) == (b"hello", [b"abc", b""])
        assert (second, none) == (b"ok", [])
        sock.close()

    @pytest.mark.parametrize("cut", [1, 8, 12, 20])
    def test_a_connection_that_ends_within_a_frame_delivers_nothing_of_it(self, world: World, cut: int) -> None:
        sock, side = self.raw_peer(world)
        sock.sendall((struct.pack("<IHHQ", 5, 1, 1, 8) + b"hello" + bytes(8))[:cut])
        sock.close()
        world.turn_until(lambda: side.ends)
        assert side.messages == []
        assert isinstance(side.ends[0], PeerLostError)

    def test_a_port_that_is_taken_is_named(self, world: World) -> None:
        with pytest.raises(AddressInUseError, match="the port is taken; choose another, or 0"):
            world.transports[1].listen(world.listener.address, world.reactor, lambda connection: None)

    def test_another_secret_is_refused_on_both_sides(self) -> None:
        world = World(self.make, self.address, secret=b"right")
        wrong = TcpTransport(Node(secret=b"wrong", incarnation=2, limits=LIMITS), world.slabs[1])
        with pytest.raises(AuthenticationError, match="PRPC_SECRET_FILE"):
            world.call(wrong)
        none = TcpTransport(Node(secret=b"", incarnation=2, limits=LIMITS), world.slabs[1])
        with pytest.raises(AuthenticationError):
            world.call(none)
        assert world.accepted == []
        right, _ = world.connect()
        right.connection.close()
        world.close()

    def test_a_peer_that_speaks_something_else_is_hung_up_on(self, world: World) -> None:
        sock = socket.create_connection(parse_address(world.listener.address))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\nAccept: everything\r\n\r\n")
        sock.setblocking(False)
        answers: list[bytes] = []

        def hung_up() -> bool:
            try:
                answers.append(sock.recv(100))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                answers.append(b"")
            return answers[-1] == b""

        world.turn_until(hung_up)
        assert world.accepted == []
        sock.close()

    def test_a_silent_peer_is_cut_when_its_time_is_over(self) -> None:
        clock = [50.0]
        world = World(self.make, self.address)
        world.reactor.clock = lambda: clock[0]
        sock = socket.create_connection(parse_address(world.listener.address))
        door = world.listener._door  # type: ignore[attr-defined]
        deadline = time.monotonic() + 10
        while not door._greetings:
            assert time.monotonic() < deadline
            world.reactor.poll(clock[0])
        clock[0] += LIMITS.handshake_s + 0.1
        world.reactor.poll(clock[0])
        assert not door._greetings
        assert sock.recv(100) == b""
        sock.close()
        world.close()

    @pytest.mark.parametrize("address", ["nonsense", "host:port", ":80", "127.0.0.1:70000"])
    def test_what_is_no_address_is_said_so(self, address: str) -> None:
        with pytest.raises(UnreachableError, match="host:port expected"):
            parse_address(address)
