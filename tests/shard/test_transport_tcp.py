"""tcp keeps the contract, and what is particular to sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import resource
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shard import (
    AddressInUseError,
    AuthenticationError,
    Limits,
    Node,
    PeerLostError,
    Reactor,
    RemoteProtocolError,
    ShardError,
    Slab,
    TcpTransport,
    Transport,
    UnreachableError,
)
from shard.transport.handshake import HANDSHAKE_VERSION, HELLO, MAGIC, PROOF_BYTES, Connector
from shard.transport.handshake_io import ACCEPT_PAUSE_S, RELIEF_S, DoorStatistics
from shard.transport.identity import PeerIdentity
from shard.transport.refusals import LINES_PER_WINDOW, WINDOW_S
from shard.transport.socket_lane import SocketLane
from shard.transport.tcp import KIND, TcpListener, parse_address
from tests.connecting import meet_by
from tests.program import wait_until
from tests.transport_contract import LIMITS, PATIENCE_S, Side, TransportContract, World

SOON_S = 5.0  # far below the time that these limits give to silent peers
assert LIMITS.handshake_s > 2 * SOON_S


def hello() -> bytes:
    """A good one."""
    return Connector(b"", KIND, 1, bytes(32)).start()


def receive_all(sock: socket.socket) -> bytes:
    """Until the other side hangs up; what it never read makes that a reset."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(4096):
            received += data
    return received


def send_and_wait(sock: socket.socket, data: bytes) -> None:
    """Until the other side's kernel has all of it."""
    sock.sendall(data)
    wait_until(
        lambda: struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))) == (0,),
        "the other side's acknowledgement",
    )


def has_hung_up(sock: socket.socket) -> bool:
    return receive_all(sock) == b""


def has_answered(sock: socket.socket) -> bool:
    """Whether a whole hello is there."""
    with contextlib.suppress(ConnectionError):
        return (
            bool(select.select([sock], [], [], 0)[0])
            and len(sock.recv(HELLO.size, socket.MSG_PEEK)) == HELLO.size
        )
    return False


class QuietWorld:
    """A listener, time that passes only when it is told to, and nobody connected yet."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 100.0
        self.accepted = 0
        self._slab = Slab()
        self._reactor = Reactor(lambda: self.now)
        transport = TcpTransport(Node(secret=b"", incarnation=7, limits=limits), self._slab)
        self._listener = transport.listen("tcp://127.0.0.1:0", self._reactor, self._count)
        self.statistics = self._listener.statistics
        self.where = parse_address(self._listener.address)

    def _count(self, connection: Any) -> None:
        self.accepted += 1
        connection.close()

    def knock(self, source: str = "127.0.0.1") -> socket.socket:
        """A socket that has connected, once the listener has taken note of it."""
        before = self._seen()
        sock = socket.create_connection(self.where, PATIENCE_S, (source, 0))
        self.look_until(lambda: self._seen() > before)
        return sock

    def _seen(self) -> int:
        there = self.statistics()
        gone = there.refused + there.gave_up + there.too_many + there.shed
        return there.greetings + there.waiting + gone

    def look(self) -> None:
        """At all descriptors and timers, at this very time."""
        self._reactor.warm_turns = 1
        self._reactor.poll(self.now)

    def look_until(self, done: Callable[[], object], each_s: float = 0.0) -> None:
        """`each_s` is how much time passes from look to look."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.look()
            self.now += each_s

    def close(self) -> None:
        self._listener.close()
        self._reactor.close()
        self._slab.close()


@pytest.fixture
def quiet() -> Iterator[QuietWorld]:
    world = QuietWorld()
    yield world
    world.close()


class TestTcp(TransportContract):
    address = "tcp://127.0.0.1:0"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return TcpTransport(node, slab)

    def raw_peer(self, world: World) -> tuple[socket.socket, Side]:
        """A socket past its handshake, for sending what no well-behaved peer would."""
        host, port = parse_address(world.listener.address)
        sock = socket.create_connection((host, port))
        node = Node(secret=b"", incarnation=1, limits=LIMITS)
        thread = threading.Thread(
            target=meet_by, args=(sock, world.listener.address, node, KIND, PATIENCE_S)
        )
        thread.start()
        world.turn_until(lambda: world.accepted)
        thread.join()
        return sock, world.accepted[-1]

    @pytest.mark.parametrize(
        ("frame", "text"),
        [
            (
                struct.pack("<IHH", (1 << 20) + 1, 0, 1),
                "frame body of 1048577 bytes, at most 1048576",
            ),
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
        frame = (
            struct.pack("<IHHQQ", 5, 2, 1, 3, 0)
            + b"hello"
            + b"abc"
            + struct.pack("<IHH", 2, 0, 1)
            + b"ok"
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in frame:
            sock.sendall(bytes([byte]))
            world.reactor.park(0.05)
        world.turn_until(lambda: len(side.messages) == 2)
        (body, blocks), (second, none) = side.messages
        assert (body, [bytes(block) for block in blocks]) == (b"hello", [b"abc", b""])
        assert (second, none) == (b"ok", [])
        sock.close()

    def test_a_message_sent_while_the_outbox_is_copied_leaves_all_the_same(
        self, world: World, sides: tuple[Side, Side]
    ) -> None:
        one, two = sides
        connection: Any = one.connection
        copying, go_on = threading.Event(), threading.Event()

        class Held(list[memoryview]):
            def __iter__(self) -> Iterator[memoryview]:
                copying.set()
                assert go_on.wait(PATIENCE_S)
                return super().__iter__()

        connection._partial = Held()
        copier = threading.Thread(target=connection.own_outbox)
        copier.start()
        assert copying.wait(PATIENCE_S)
        connection.send(b"meanwhile")
        go_on.set()
        copier.join(PATIENCE_S)
        world.turn_until(lambda: two.messages)

    @pytest.mark.parametrize("size", [100, 100_000])
    def test_ctrl_c_in_the_middle_of_a_message_ends_the_connection_and_nothing_follows_the_half(
        self, world: World, size: int
    ) -> None:
        class InterruptedSocket(socket.socket):
            """Ctrl-C comes when the first bytes have left."""

            def send(self, data: Any, flags: int = 0) -> int:
                super().send(bytes(data)[:10], flags)
                raise KeyboardInterrupt

            def sendmsg(self, parts: Any, *more: Any) -> int:
                return self.send(parts[0])

        node = Node(secret=b"", incarnation=7, limits=LIMITS)
        ours, theirs = socket.socketpair()
        connection = SocketLane(
            InterruptedSocket(fileno=ours.detach()), "the peer", node, world.slabs[0]
        )
        one, two = Side(connection), Side(SocketLane(theirs, "us", node, world.slabs[1]))
        for side in (one, two):
            side.connection.attach(world.reactor)
        with pytest.raises(KeyboardInterrupt):
            connection.send(bytes(100), [] if size == 100 else [np.zeros(size, np.uint8)])
        world.turn_until(lambda: one.ends and two.ends)
        assert not two.messages
        with pytest.raises(ShardError):
            connection.send(b"the next one")

    def test_less_than_a_header_is_no_message_whatever_stood_there_before(
        self, world: World
    ) -> None:
        sock, side = self.raw_peer(world)
        frame = struct.pack("<IHH", 2, 0, 1) + b"ok"
        # with the last byte of the header before it: the word that 7 whole bytes would have
        beginning = b"\xff" * 6 + b"\0"
        for received, data in ((len(frame), frame), (len(frame) + len(beginning), beginning)):
            sock.sendall(data)
            world.turn_until(
                lambda received=received: side.connection.traffic().bytes_received == received
            )
        assert side.messages == [(b"ok", [])]
        assert not side.ends
        sock.close()

    @pytest.mark.parametrize("cut", [1, 8, 12, 20])
    def test_a_connection_that_ends_within_a_frame_delivers_nothing_of_it(
        self, world: World, cut: int
    ) -> None:
        sock, side = self.raw_peer(world)
        sock.sendall((struct.pack("<IHHQ", 5, 1, 1, 8) + b"hello" + bytes(8))[:cut])
        sock.close()
        world.turn_until(lambda: side.ends)
        assert side.messages == []
        assert isinstance(side.ends[0], PeerLostError)

    def test_a_port_that_is_taken_is_named(self, world: World) -> None:
        with pytest.raises(AddressInUseError, match="the port is taken; choose another, or 0"):
            world.transports[1].listen(
                world.listener.address, world.reactor, lambda connection: None
            )

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
        listener = world.listener
        assert isinstance(listener, TcpListener)
        deadline = time.monotonic() + PATIENCE_S
        while not listener.statistics().greetings:
            assert time.monotonic() < deadline
            world.reactor.poll(clock[0])
        clock[0] += LIMITS.handshake_s + 0.1
        world.reactor.poll(clock[0])
        assert not listener.statistics().greetings
        assert sock.recv(100) == b""
        sock.close()
        world.close()

    def test_a_peer_that_sends_a_byte_a_second_is_cut_all_the_same(self, quiet: QuietWorld) -> None:
        with quiet.knock() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in hello()[: int(LIMITS.handshake_s)]:
                assert quiet.statistics().greetings == 1
                sock.sendall(bytes([byte]))
                quiet.look()
                quiet.now += 1.0
            quiet.look()
            assert quiet.statistics() == DoorStatistics(
                greetings=0, accepted=0, refused=1, waiting=0, too_many=0, shed=0
            )
            assert has_hung_up(sock)

    def test_a_peer_that_speaks_in_time_gets_in_though_it_is_looked_at_too_late(
        self, quiet: QuietWorld
    ) -> None:
        """As by a process that was stopped for so long. A turn calls timers before it looks."""
        exchange = Connector(b"", KIND, 1, bytes(32))
        with quiet.knock() as sock:
            send_and_wait(sock, exchange.start())
            quiet.now += LIMITS.handshake_s
            quiet.look()
            send_and_wait(sock, exchange.feed(sock.recv(exchange.wanted, socket.MSG_WAITALL)))
            quiet.now += LIMITS.handshake_s
            quiet.look()
            assert (quiet.accepted, quiet.statistics().refused) == (1, 0)

    def test_a_peer_that_was_looked_at_too_late_has_its_time_once_more(
        self, quiet: QuietWorld
    ) -> None:
        with quiet.knock() as sock:
            send_and_wait(sock, hello())
            for _ in range(2):
                assert quiet.statistics().greetings == 1
                quiet.now += LIMITS.handshake_s
                quiet.look()
            assert quiet.statistics().refused == 1

    def test_more_than_the_first_message_is_not_looked_at(self, quiet: QuietWorld) -> None:
        with quiet.knock() as sock:
            sock.sendall(hello() + bytes(100_000))  # 32 bytes of it are taken for a proof
            quiet.look_until(lambda: quiet.statistics().refused)
            answer = receive_all(sock)
            assert len(answer) in (HELLO.size + PROOF_BYTES, HELLO.size + PROOF_BYTES + 1)
            assert quiet.accepted == 0

    def test_those_over_the_bound_wait_and_one_of_more_than_may_wait_is_hung_up_on(
        self,
    ) -> None:
        quiet = QuietWorld(
            dataclasses.replace(LIMITS, handshakes_per_host_max=2, handshakes_waiting_max=3)
        )
        with contextlib.ExitStack() as stack:
            stack.callback(quiet.close)
            socks = [stack.enter_context(quiet.knock()) for _ in range(6)]
            assert quiet.statistics() == DoorStatistics(
                2, accepted=0, refused=0, waiting=3, too_many=1, shed=0
            )
            gone = next(sock for sock in socks if select.select([sock], [], [], 0)[0])
            assert gone in socks[2:5] and has_hung_up(gone), (
                "any of those that waited, but the newest"
            )
            waiting = [sock for sock in socks[2:] if sock is not gone]
            socks[0].close()
            quiet.look_until(lambda: quiet.statistics().waiting == 2)
            assert quiet.statistics().greetings == 2
            waiting[0].sendall(hello())
            quiet.look_until(lambda: has_answered(waiting[0]))  # who waited longest
            waiting[0].recv(HELLO.size + PROOF_BYTES)
            quiet.now += LIMITS.handshake_s
            quiet.look()
            quiet.look()
            assert quiet.statistics() == DoorStatistics(
                0, accepted=0, refused=5, waiting=0, too_many=1, shed=0
            )
            assert all(has_hung_up(sock) for sock in [socks[1], *waiting])

    @pytest.mark.parametrize(
        "said", [b"", hello()[:1], hello()], ids=["nothing", "a byte", "a hello"]
    )
    def test_while_silent_sockets_take_all_places_of_an_address_an_honest_peer_of_it_gets_in(
        self, said: bytes
    ) -> None:
        limits = dataclasses.replace(LIMITS, handshakes_per_host_max=8, handshakes_waiting_max=64)
        quiet = QuietWorld(limits)
        with contextlib.ExitStack() as stack:
            stack.callback(quiet.close)
            for _ in range(8 + 64):
                sock = stack.enter_context(quiet.knock())
                sock.sendall(said)
            honest = []
            for _ in range(3):  # chance may hit one, which tries again
                sock = stack.enter_context(quiet.knock())
                exchange = Connector(b"", KIND, 1, bytes(32))
                sock.sendall(exchange.start())
                honest.append((sock, exchange))
            begun = quiet.now
            while not any(has_answered(sock) for sock, _ in honest):
                assert quiet.now - begun < SOON_S, (
                    "the silent ones have not been cut yet, and will not be for long"
                )
                quiet.now += RELIEF_S
                quiet.look()
                quiet.look()
            sock, exchange = next((sock, one) for sock, one in honest if has_answered(sock))
            sock.sendall(exchange.feed(sock.recv(exchange.wanted, socket.MSG_WAITALL)))
            quiet.look_until(lambda: quiet.statistics().accepted)

    def test_peers_that_get_on_make_room_for_nobody(self) -> None:
        quiet = QuietWorld(
            dataclasses.replace(LIMITS, handshakes_per_host_max=2, handshakes_waiting_max=3)
        )
        with contextlib.ExitStack() as stack:
            stack.callback(quiet.close)
            for _ in range(4):
                stack.enter_context(quiet.knock()).sendall(hello())
            quiet.now += RELIEF_S
            quiet.look()
            quiet.look()
            assert quiet.statistics() == DoorStatistics(
                2, accepted=0, refused=0, waiting=2, too_many=0, shed=0
            )

    def test_one_host_cannot_take_all_places(self) -> None:
        quiet = QuietWorld(dataclasses.replace(LIMITS, handshakes_max=3, handshakes_per_host_max=2))
        with contextlib.ExitStack() as stack:
            for source in ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3"):
                stack.enter_context(quiet.knock(source))
            assert quiet.statistics() == DoorStatistics(
                3, accepted=0, refused=0, waiting=2, too_many=0, shed=0
            )
        quiet.close()

    def test_without_descriptors_those_who_knock_are_hung_up_on_until_there_are_some(
        self, quiet: QuietWorld, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(socket.socket()) for _ in range(5)]
            taken = [os.open(os.devnull, os.O_RDONLY)]
            stack.callback(lambda: [os.close(fd) for fd in taken])
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 50, before[1]))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                for sock in socks[:4]:
                    sock.connect(quiet.where)
                    quiet.look_until(
                        lambda: quiet.statistics().shed == socks.index(sock) + 1,  # noqa: B023
                        ACCEPT_PAUSE_S,
                    )
                    assert has_hung_up(sock)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            socks[4].connect(quiet.where)
            quiet.look_until(lambda: quiet.statistics().greetings, ACCEPT_PAUSE_S)
        said = [
            record.getMessage() for record in caplog.records if "refused" not in record.getMessage()
        ]
        assert said == [
            "no file descriptors left: new connections are closed; raise `ulimit -n`, "
            "or lower limits.connections_max",
            "accepting connections again: 4 were closed so far because this process had no file "
            "descriptor left",
        ]

    def test_a_flood_of_refusals_is_counted_but_not_all_of_it_logged(
        self, quiet: QuietWorld, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(LINES_PER_WINDOW + 7):
            with quiet.knock() as sock:
                sock.sendall(bytes(HELLO.size))
                quiet.look_until(lambda: quiet.statistics().refused == number + 1)  # noqa: B023
        assert len(caplog.records) == LINES_PER_WINDOW
        quiet.now += WINDOW_S
        with quiet.knock() as sock:
            sock.sendall(bytes(HELLO.size))
            quiet.look_until(lambda: quiet.statistics().refused == LINES_PER_WINDOW + 8)
        assert caplog.messages[-1].endswith("(and 7 refusals before it that were not logged)")

    def test_a_peer_of_another_version_is_told_which_is_spoken_here(
        self, quiet: QuietWorld
    ) -> None:
        with quiet.knock() as sock:
            sock.sendall(
                HELLO.pack(MAGIC, HANDSHAKE_VERSION + 1, KIND, 0, 1, bytes(32), 0, 1, bytes(16))
            )
            quiet.look_until(lambda: quiet.statistics().refused)
            answer = receive_all(sock)
        assert HELLO.unpack(answer[: HELLO.size])[:2] == (MAGIC, HANDSHAKE_VERSION)
        assert answer[HELLO.size :] == bytes(PROOF_BYTES), "no proof of anything"

    @pytest.mark.parametrize(
        "length", [1, HELLO.size - 1, HELLO.size, HELLO.size + PROOF_BYTES - 1]
    )
    def test_a_peer_that_stops_in_the_middle_proves_nothing(
        self, quiet: QuietWorld, length: int
    ) -> None:
        with quiet.knock() as sock:
            sock.sendall((hello() + bytes(PROOF_BYTES))[:length])
            sock.shutdown(socket.SHUT_WR)
            quiet.look_until(lambda: quiet.statistics().refused)
        assert quiet.accepted == 0

    def test_an_answer_that_comes_a_byte_at_a_time_is_not_waited_for_longer(self) -> None:
        """The listener drips: each byte comes in time, all of them together do not."""
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname()) as sock,
        ):
            other, _ = listening.accept()
            with other:
                other.sendall(b"P")
                with pytest.raises(
                    UnreachableError, match=r"did not finish the handshake within [\d.e-]+ s"
                ):
                    meet_by(
                        sock,
                        "tcp://slow",
                        Node(secret=b"", incarnation=1, limits=LIMITS),
                        KIND,
                        0.05,
                    )

    def test_the_secret_is_in_no_text(self, caplog: pytest.LogCaptureFixture) -> None:
        secret = b"a-secret-nobody-may-read"
        world = World(self.make, self.address, secret=secret)
        transport = TcpTransport(
            Node(secret=b"another-secret", incarnation=2, limits=LIMITS), world.slabs[1]
        )
        with pytest.raises(AuthenticationError) as caught:
            world.call(transport)
        one, two = world.connect()
        texts = [
            repr(caught.value),
            caplog.text,
            repr(one.connection),
            repr(two.connection),
            repr(world.listener),
            repr(transport),
        ]
        texts.append(repr(two.connection.peer_identity))  # type: ignore[attr-defined]
        assert not [text for text in texts if "-secret" in text]
        assert two.connection.peer_identity == PeerIdentity(secret="job")  # type: ignore[attr-defined]
        one.connection.close()
        world.close()

    @pytest.mark.parametrize("address", ["nonsense", "host:port", ":80", "127.0.0.1:70000"])
    def test_what_is_no_address_is_said_so(self, address: str) -> None:
        with pytest.raises(UnreachableError, match="host:port expected"):
            parse_address(address)
