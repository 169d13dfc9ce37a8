"""tcp with TLS keeps the contract of all transports, and lets in only who shows a good certificate
and knows the secret.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shard import (
    AuthenticationError,
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
from shard.transport.handshake import CLAIM_BYTES, HELLO, PROOF_BYTES
from shard.transport.identity import PeerIdentity
from shard.transport.tcp import TcpListener, parse_address
from shard.transport.tcp_connection import TcpConnection
from shard.transport.tls import PIECE_BYTES, RECORD_BYTES, Tls, TlsSocket
from tests.certificates import Authority, Files
from tests.connecting import connect, receive_exactly, run_in_loop
from tests.shard.serving import ServedBy
from tests.transport_contract import LIMITS, PATIENCE_S, TransportContract, World

SECRET = b"the job's secret"
ADDRESS = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> Files:
    return authority.issue("worker-3")


# who has its hands on the socket has all of the connection
ONE_LANE = dataclasses.replace(LIMITS, connections_per_peer=1)


def transport_of(files: Files | None, slab: Slab, secret: bytes = SECRET) -> TcpTransport:
    return TcpTransport(Node(secret=secret, incarnation=5, limits=ONE_LANE), slab, files)


@pytest.fixture
def new_world(good: Files) -> Iterator[Callable[..., World]]:
    """new_world(files) makes a listener with such certificates; all are closed at the end."""
    made: list[World] = []

    def new(files: Files | None = good, secret: bytes = SECRET) -> World:
        made.append(World(lambda node, slab: TcpTransport(node, slab, files), ADDRESS, secret))
        return made[-1]

    yield new
    for world in made:
        world.close()


class TestTls(TransportContract):
    address = ADDRESS
    files: Files

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _certificates(cls, good: Files) -> None:
        cls.files = good

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return TcpTransport(node, slab, TestTls.files)


@contextlib.contextmanager
def listening_log() -> Iterator[list[str]]:
    """What the engine logs meanwhile."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shard").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("shard").removeHandler(handler)


def refusal(world: World, files: Files | None, secret: bytes = SECRET) -> tuple[ShardError, str]:
    """What a connector with such certificates is told, and the listener's log."""
    with listening_log() as records:
        with pytest.raises(ShardError) as caught:
            world.call(transport_of(files, world.slabs[1], secret))
        world.turn_until(lambda: records)
    assert world.accepted == []
    return caught.value, records[0]


# -- who is let in ---------------------------------------------------------------------------------


def test_each_side_knows_the_names_in_the_others_certificate(
    new_world: Callable[..., World], authority: Authority, good: Files
) -> None:
    world = new_world()
    one, two = world.connect(transport_of(authority.issue("trainer-7"), world.slabs[1]))
    assert two.connection.peer_identity == PeerIdentity(  # type: ignore[attr-defined]
        subjects=("trainer-7", "trainer-7.example", "spiffe://example/trainer-7"), secret="job"
    )
    assert one.connection.peer_identity.subjects[0] == "worker-3"  # type: ignore[attr-defined]
    one.connection.close()


def test_without_a_ca_the_secret_tells_who_is_there_and_certificates_name_nobody(
    new_world: Callable[..., World], tmp_path: Path
) -> None:
    strange = Authority(tmp_path, "nobody we know").issue("stranger")._replace(ca="")
    world = new_world(strange)
    one, two = world.connect(transport_of(strange, world.slabs[1]))
    assert two.connection.peer_identity == PeerIdentity(subjects=(), secret="job")  # type: ignore[attr-defined]
    one.connection.close()
    error, _ = refusal_after(world, strange)
    assert isinstance(error, AuthenticationError)


def refusal_after(world: World, files: Files) -> tuple[ShardError, str]:
    """As refusal(), of a peer with another secret, once others are connected."""
    world.accepted.clear()
    return refusal(world, files, b"another secret")


def test_a_good_certificate_without_the_secret_is_refused(
    new_world: Callable[..., World], good: Files
) -> None:
    error, logged = refusal(new_world(), good, b"a guess")
    assert isinstance(error, AuthenticationError)
    assert "PRPC_SECRET_FILE" in str(error)
    assert "hung up" in logged, "the connector found out first, and went"


@pytest.mark.parametrize(
    ("listens", "calls", "told", "logged"),
    [
        (
            "good",
            "strange",
            "certificate verify failed|signed by PRPC_TLS_CA",
            "does not know the CA|is refused",
        ),
        ("strange", "good", "signed by PRPC_TLS_CA", "does not know the CA"),
        (
            "expired",
            "good",
            "certificate has expired; one that is valid now",
            "our certificate has expired",
        ),
        ("early", "good", "not yet valid", "refuses our certificate"),
        (
            "good",
            "expired",
            "says that our certificate has expired",
            "certificate has expired; one that is valid now",
        ),
        (
            "good",
            "strange without ca",
            "does not know the CA of our certificate",
            "signed by PRPC_TLS_CA",
        ),
    ],
)
def test_a_certificate_that_is_not_good_is_refused_by_name_on_both_sides(
    new_world: Callable[..., World],
    authority: Authority,
    good: Files,
    tmp_path: Path,
    listens: str,
    calls: str,
    told: str,
    logged: str,
) -> None:
    strange = Authority(tmp_path, "another job").issue("stranger")
    files = {
        "good": good,
        "strange": strange,
        "strange without ca": strange._replace(ca=good.ca),
        "expired": authority.issue("late", -20, -10),
        "early": authority.issue("soon", 10, 20),
    }
    error, line = refusal(new_world(files[listens]), files[calls])
    assert isinstance(error, AuthenticationError)
    assert re.search(told, str(error)), str(error)
    assert re.search(logged, line), line
    assert line.startswith("refused 127.0.0.1:")


def raw_client(world: World, context: ssl.SSLContext) -> tuple[list[Exception], list[str]]:
    """What becomes of a TLS client that is none of ours, and the listener's log."""
    errors: list[Exception] = []

    def run() -> None:
        with socket.create_connection(parse_address(world.listener.address), PATIENCE_S) as sock:
            try:
                with context.wrap_socket(sock) as tls:
                    if not tls.recv(1):
                        raise ConnectionResetError
            except OSError as error:
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with listening_log() as records:
        world.turn_until(lambda: errors and records)
    thread.join()
    assert world.accepted == []
    return errors, records


def test_a_peer_that_is_gone_before_it_is_accepted_is_refused_and_harms_nobody(
    new_world: Callable[..., World],
) -> None:
    world = new_world()
    sock = socket.create_connection(parse_address(world.listener.address), PATIENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # by a reset
    with listening_log() as records:
        world.turn_until(lambda: records)
    assert records[0].startswith("refused 127.0.0.1:")


def test_a_listener_that_hangs_up_before_the_tls_handshake_is_unreachable(good: Files) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # by a reset
        assert select.select([sock], [], [], PATIENCE_S)[0]
        sock.setblocking(False)
        with pytest.raises(UnreachableError, match="hung up before the TLS handshake"):
            run_in_loop(Tls(good).connect(sock, ADDRESS, time.monotonic() + PATIENCE_S))


def test_who_shows_no_certificate_is_refused(new_world: Callable[..., World], good: Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(good.ca)
    errors, logged = raw_client(new_world(), context)
    assert "showed no certificate; give it one with PRPC_TLS_CERT" in logged[0]
    assert isinstance(errors[0], ssl.SSLError)
    assert "CERTIFICATE_REQUIRED" in str(errors[0])


def test_tls_1_2_is_refused(new_world: Callable[..., World], good: Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(good.ca)
    context.load_cert_chain(good.cert, good.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    errors, logged = raw_client(new_world(), context)
    assert "offers no TLS 1.3, and nothing older is taken" in logged[0]
    assert "PROTOCOL_VERSION" in str(errors[0])


def test_no_session_can_be_resumed(new_world: Callable[..., World], good: Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(good.ca)
    context.load_cert_chain(good.cert, good.key)
    world, has_ticket = new_world(), []

    def run() -> None:
        with (
            socket.create_connection(parse_address(world.listener.address), PATIENCE_S) as sock,
            context.wrap_socket(sock) as tls,
        ):
            tls.sendall(bytes(HELLO.size))  # none of ours: it hangs up
            with contextlib.suppress(OSError):
                while tls.recv(1024):  # tickets come first, and are read on the way
                    pass
            has_ticket.append(tls.session is not None and tls.session.has_ticket)

    thread = threading.Thread(target=run)
    thread.start()
    world.turn_until(lambda: has_ticket or not thread.is_alive())
    thread.join()
    assert has_ticket == [False]


def test_a_listener_that_takes_no_tls_1_3_is_refused(good: Files, slab: Slab) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(good.cert, good.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        ServedBy(lambda sock: context.wrap_socket(sock, server_side=True).close()) as address,
        pytest.raises(AuthenticationError, match=r"takes no TLS 1.3, and nothing older is offered"),
    ):
        connect(transport_of(good, slab), address, PATIENCE_S)


def test_a_plain_peer_is_refused_by_a_tls_listener_and_told_so(
    new_world: Callable[..., World],
) -> None:
    error, logged = refusal(new_world(), None)
    assert isinstance(error, AuthenticationError)
    assert "the peer speaks TLS, this side does not: set PRPC_TLS_CERT" in str(error)
    assert "does not speak TLS; switch TLS on at both sides" in logged


def test_a_tls_peer_is_refused_by_a_plain_listener_and_told_so(
    new_world: Callable[..., World], good: Files
) -> None:
    error, logged = refusal(new_world(None), good)
    assert isinstance(error, UnreachableError)
    assert "it may not speak TLS; switch TLS on at both sides" in str(error)
    assert "the peer speaks TLS, this side does not: set PRPC_TLS_CERT" in logged


def test_one_in_the_middle_cannot_pass_proofs_on_between_two_channels(
    new_world: Callable[..., World], good: Files
) -> None:
    """It holds a certificate of the job, but not the secret: it decrypts, and re-encrypts what both
    sides say.
    """
    world = new_world(good._replace(ca=""))
    tls = Tls(good._replace(ca=""))

    def relay(sock: socket.socket) -> None:
        outer = tls.accept(sock)
        poll = select.poll()
        poll.register(outer, select.POLLIN)
        while outer.shake():
            poll.poll(PATIENCE_S * 1000)
        plain = socket.create_connection(parse_address(world.listener.address))
        plain.setblocking(False)
        inner = run_in_loop(
            tls.connect(plain, world.listener.address, time.monotonic() + PATIENCE_S)
        )
        try:
            outer.settimeout(PATIENCE_S)
            inner.settimeout(PATIENCE_S)
            inner.sendall(receive_exactly(outer, HELLO.size, time.monotonic() + PATIENCE_S))
            outer.sendall(
                receive_exactly(inner, HELLO.size + PROOF_BYTES, time.monotonic() + PATIENCE_S)
            )
            inner.sendall(
                receive_exactly(outer, PROOF_BYTES + CLAIM_BYTES, time.monotonic() + PATIENCE_S)
            )
        except (PeerLostError, TimeoutError):
            return
        finally:
            inner.close()
            outer.close()

    with ServedBy(relay) as address:
        error = call_at(world, transport_of(good._replace(ca=""), world.slabs[1]), address)
    assert isinstance(error, AuthenticationError)
    assert world.accepted == []


def call_at(world: World, transport: TcpTransport, address: str) -> BaseException:
    """The error of connecting to `address`, while the world turns."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            connect(transport, address, PATIENCE_S)
        except ShardError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    world.turn_until(lambda: caught)
    thread.join()
    return caught[0]


# -- streams ---------------------------------------------------------------------------------------


def raw_channel(world: World, files: Files) -> tuple[TlsSocket, TcpConnection]:
    """A TLS socket past both handshakes, and the connection at its other end."""
    transport = transport_of(files, world.slabs[1])
    connection = world.call(transport)
    assert isinstance(connection, TcpConnection)
    world.turn_until(lambda: world.accepted)
    sock = connection.sock
    assert isinstance(sock, TlsSocket)
    accepted = world.accepted[-1].connection
    assert isinstance(accepted, TcpConnection)
    return sock, accepted


def test_several_frames_in_one_record_all_arrive(
    new_world: Callable[..., World], good: Files
) -> None:
    world = new_world()
    sock, _ = raw_channel(world, good)
    frames = b"".join(struct.pack("<IHH", 3, 0, 1) + b"%03d" % number for number in range(1000))
    assert sock.send(frames[:RECORD_BYTES]) == len(frames)
    side = world.accepted[-1]
    world.turn_until(lambda: len(side.messages) == 1000)
    assert side.bodies == [b"%03d" % number for number in range(1000)]
    sock.close()


def test_a_small_block_and_what_follows_it_in_the_record_are_read_without_another_event(
    new_world: Callable[..., World], good: Files
) -> None:
    world = new_world()
    sock, _ = raw_channel(world, good)
    frame = struct.pack("<IHHQQ", 1, 2, 1, 5, 3) + b"b" + b"12345" + b"678"
    sock.send(frame * 400)  # more reads than one turn allows, all from one record
    side = world.accepted[-1]
    world.turn_until(lambda: len(side.messages) == 400)
    assert {bytes(blocks[1]) for _, blocks in side.messages} == {b"678"}
    sock.close()


def test_a_write_that_finds_no_room_goes_on_with_the_same_bytes(
    new_world: Callable[..., World], good: Files
) -> None:
    world = new_world()
    one, two = world.connect(transport_of(good, world.slabs[1]))
    data = np.random.default_rng(3).integers(0, 256, 5 * PIECE_BYTES + 77, np.uint8)
    sent = 0
    while not one.connection.outbox_messages:
        one.connection.send(b"%d" % sent, [data])
        sent += 1
    one.connection.send(b"last", [data])
    world.turn_until(lambda: len(two.messages) == sent + 1)
    assert two.bodies == [*(b"%d" % number for number in range(sent)), b"last"]
    assert all(np.array_equal(blocks[0], data) for _, blocks in two.messages)
    one.connection.close()


def test_the_end_is_announced_by_a_goodbye(new_world: Callable[..., World], good: Files) -> None:
    world = new_world()
    one, two = world.connect(transport_of(good, world.slabs[1]))
    one.connection.close()
    world.turn_until(lambda: two.ends)
    assert isinstance(two.ends[0], PeerLostError)
    assert str(two.ends[0]).endswith("hung up")


def test_a_stream_that_is_cut_is_told_from_one_that_ended(
    new_world: Callable[..., World], good: Files
) -> None:
    world = new_world()
    sock, _ = raw_channel(world, good)
    side = world.accepted[-1]
    with socket.socket(fileno=sock.detach()) as plain:
        plain.shutdown(socket.SHUT_RDWR)
    world.turn_until(lambda: side.ends)
    assert isinstance(side.ends[0], PeerLostError)
    assert "without a TLS goodbye" in str(side.ends[0])


def test_a_record_that_was_changed_on_the_way_ends_the_connection(
    new_world: Callable[..., World], good: Files
) -> None:
    world = new_world()
    sock, _ = raw_channel(world, good)
    side = world.accepted[-1]
    with socket.socket(fileno=sock.detach()) as plain:
        plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        world.turn_until(lambda: side.ends)
    assert isinstance(side.ends[0], RemoteProtocolError)
    assert "broke the protocol: TLS: " in str(side.ends[0])
    assert side.messages == []


def test_what_is_sent_is_not_to_be_read_on_the_way(
    new_world: Callable[..., World], good: Files
) -> None:
    world = new_world()
    seen = bytearray()

    def tap(sock: socket.socket) -> None:
        with socket.create_connection(parse_address(real)) as behind:
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            poll.register(behind, select.POLLIN)
            while True:
                for fd, _ in poll.poll(PATIENCE_S * 1000):
                    source, sink = (sock, behind) if fd == sock.fileno() else (behind, sock)
                    data = source.recv(65536)
                    if not data:
                        return
                    seen.extend(data)
                    sink.sendall(data)

    real = world.listener.address
    with ServedBy(tap) as address:
        world.listener.address = address
        one, two = world.connect(transport_of(good, world.slabs[1]))
        one.connection.send(
            b"a plain word" * 10, [np.frombuffer(b"another plain word" * 100, np.uint8)]
        )
        world.turn_until(lambda: two.messages)
        one.connection.close()
        world.turn_until(lambda: two.ends)
    assert len(seen) > 1000
    assert b"plain word" not in seen
    assert b"PRPC" not in seen


# -- time, and bad files ---------------------------------------------------------------------------


def test_a_peer_that_is_slow_within_the_tls_handshake_is_cut_when_its_time_is_over(
    good: Files, slab: Slab
) -> None:
    now = [50.0]
    reactor = Reactor(lambda: now[0])
    listener = transport_of(good, slab).listen(ADDRESS, reactor, lambda connection: None)
    assert isinstance(listener, TcpListener)
    with socket.create_connection(parse_address(listener.address)) as sock:
        sock.settimeout(PATIENCE_S)
        while not listener.statistics().greetings:
            reactor.park(0.05)
            reactor.poll(now[0])
        for number in range(6):  # a byte now and then, of a record that would be whole some time
            assert listener.statistics().refused == 0
            sock.sendall(b"\x16\x03\x01\x02\x00\x01"[number : number + 1])
            reactor.park(0.05)
            now[0] += LIMITS.handshake_s / 5
            reactor.poll(now[0])
            if now[0] >= 50.0 + LIMITS.handshake_s:
                break
        assert listener.statistics().refused == 1
        with contextlib.suppress(ConnectionResetError):  # some of its bytes were never read
            assert sock.recv(1) == b""
    listener.close()
    reactor.close()


def test_a_listener_that_never_answers_is_given_up_on(good: Files, slab: Slab) -> None:
    released = threading.Event()
    with ServedBy(lambda sock: released.wait(PATIENCE_S)) as address:
        with pytest.raises(UnreachableError, match="did not finish the TLS handshake in time"):
            connect(transport_of(good, slab), address, 0.05)
        released.set()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("cert", r"certificate '.*nothing' with key .* cannot be used: No such file"),
        ("key", r"with key '.*nothing' cannot be used: No such file"),
        ("ca", r"CA '.*nothing' cannot be used: No such file"),
        (
            "mixed",
            "KEY_VALUES_MISMATCH; both in PEM, the key without a password and that of the "
            "certificate",
        ),
        ("locked", "cannot be used: .*; both in PEM, the key without a password"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    authority: Authority, good: Files, tmp_path: Path, broken: str, said: str
) -> None:
    if broken == "mixed":
        files = good._replace(key=authority.issue("another").key)
    elif broken == "locked":
        files = authority.issue("locked", password=b"1234")
    else:
        files = good._replace(**{broken: str(tmp_path / "nothing")})
    with pytest.raises(ShardError, match=said):
        Tls(files)
