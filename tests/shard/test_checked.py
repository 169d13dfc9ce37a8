"""Tcp with checksums: what every transport promises, when they are on, and what they find."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import zlib
from collections.abc import Iterator

import pytest

from shard import Node, RemoteProtocolError, Slab, TcpTransport, Transport
from shard.transport.checked import (
    HEAD,
    LENGTH_BYTES,
    RECORD_BYTES,
    STAGING_BYTES,
    TAIL,
    CheckedSocket,
)
from shard.transport.handshake import CHECKED, Acceptor, Connector
from shard.transport.tcp_connection import TcpConnection
from tests.shard.test_handshake import KIND, NONCE_ONE, NONCE_TWO, exchange, pack
from tests.transport_contract import TransportContract, World

CHECKS = 17, 4711
Pair = tuple[CheckedSocket, CheckedSocket]


class TestChecked(TransportContract):
    address = "tcp://127.0.0.1:0"

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return TcpTransport(dataclasses.replace(node, tcp_checksum=True), slab)


def agreed(
    connector_wishes: bool, acceptor_wishes: bool, binding: bytes = b""
) -> tuple[Connector, Acceptor]:
    one = Connector(b"secret", KIND, 11, NONCE_ONE, binding, checked=connector_wishes)
    two = Acceptor(b"secret", KIND, 22, NONCE_TWO, binding, checked=acceptor_wishes)
    two.start()
    exchange(one, two)
    return one, two


@pytest.mark.parametrize(("one_wishes", "two_wishes"), [(True, False), (False, True), (True, True)])
def test_one_side_that_wishes_checksums_is_enough_and_both_begin_with_the_same(
    one_wishes: bool, two_wishes: bool
) -> None:
    one, two = agreed(one_wishes, two_wishes)
    assert one.checks is not None
    assert one.checks[0] != one.checks[1], "what one says is not taken for what the other says"
    assert two.checks == one.checks[::-1]


def test_there_are_none_where_nobody_wishes_them_or_tls_has_its_own() -> None:
    for one, two in (agreed(False, False), agreed(True, True, binding=b"of a TLS channel")):
        assert (one.checks, two.checks) == (None, None)


def test_a_wish_that_is_not_known_is_refused() -> None:
    two = Acceptor(b"secret", KIND, 22, NONCE_TWO)
    two.start()
    with pytest.raises(
        RemoteProtocolError,
        match="the peer wishes 0x5, this side knows 0x1: install the same release",
    ):
        two.feed(pack(wishes=CHECKED | 4))


@pytest.mark.parametrize("wishes", [(True, False), (False, True), (False, False)])
def test_every_lane_is_checked_when_one_side_wishes_it_and_none_otherwise(
    wishes: tuple[bool, bool],
) -> None:
    sides = iter(wishes)
    world = World(
        lambda node, slab: TcpTransport(dataclasses.replace(node, tcp_checksum=next(sides)), slab),
        "tcp://127.0.0.1:0",
    )
    for side in world.connect():
        connection = side.connection
        assert isinstance(connection, TcpConnection)
        kinds = [type(sock) for sock in connection.sockets]
        assert kinds == [CheckedSocket if any(wishes) else socket.socket] * 2
        connection.close()
    world.close()


# -- the socket itself -----------------------------------------------------------------------------


@contextlib.contextmanager
def joined(ones: tuple[int, int] = CHECKS, twos: tuple[int, int] = CHECKS[::-1]) -> Iterator[Pair]:
    """Both ends of a connection, which begin with these checks."""
    one, two = (
        CheckedSocket(sock, checks)
        for sock, checks in zip(socket.socketpair(), (ones, twos), strict=True)
    )
    with one, two:
        for sock in (one, two):
            sock.setblocking(False)
        yield one, two


@pytest.fixture
def pair() -> Iterator[Pair]:
    with joined() as made:
        yield made


def received(sock: CheckedSocket, count: int) -> bytes:
    """What recv_into() has for a buffer of that size."""
    buffer = bytearray(count)
    return bytes(buffer[: sock.recv_into(memoryview(buffer))])


def wire(*payloads: bytes) -> bytes:
    """What a socket says for them."""
    one, two = socket.socketpair()
    with CheckedSocket(one, CHECKS) as said, two:
        for payload in payloads:
            said.send(payload)
        return two.recv(1 << 20)


def test_pieces_of_any_size_come_out_whole_when_both_take_and_give_as_much_as_they_like(
    pair: Pair, seed: int
) -> None:
    one, two = pair
    chance = random.Random(seed)
    sent = chance.randbytes(3_000_000)
    left = [memoryview(sent[at : at + 100_000]) for at in range(0, len(sent), 100_000)]
    got = bytearray()
    while len(got) < len(sent):
        try:
            count = one.send_parts(left[:2]) if left else 0
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        except BlockingIOError:  # it wants the same bytes again, as we do
            pass
        try:
            got += received(two, chance.choice([1, 1000, 70_000, 300_000]))
        except BlockingIOError:
            assert not two.has_more
    assert got == sent
    assert not two.has_more


def test_a_record_that_comes_byte_by_byte_is_given_out_with_its_last_one(pair: Pair) -> None:
    one, two = pair
    for byte in wire(b"hello")[:-1]:
        one.setblocking(True)
        socket.socket.sendall(one, bytes([byte]))
        with pytest.raises(BlockingIOError):
            received(two, 100)
    socket.socket.sendall(one, wire(b"hello")[-1:])
    assert received(two, 3) == b"hel"
    assert two.has_more
    assert received(two, 3) == b"lo"
    assert not two.has_more


SAID = wire(b"pay", b"wait")
FIRST_BYTES = HEAD.size + len(b"pay") + TAIL.size
FORGED = {
    "missing": SAID[FIRST_BYTES:],
    "twice": SAID[:FIRST_BYTES] * 2,
    "late": SAID + SAID[:FIRST_BYTES],
    "in the other order": SAID[FIRST_BYTES:] + SAID[:FIRST_BYTES],
    **{
        f"bit {bit}": SAID[: bit // 8]
        + bytes([SAID[bit // 8] ^ 1 << bit % 8])
        + SAID[bit // 8 + 1 :]
        for bit in range(8 * len(SAID))
    },
}


def test_what_is_not_as_it_was_said_is_found_at_once_and_given_to_nobody(
    subtests: pytest.Subtests,
) -> None:
    for what, forged in FORGED.items():
        with subtests.test(what), joined() as (one, two):
            socket.socket.sendall(one, forged)
            got = []
            with pytest.raises(RemoteProtocolError, match="on their way"):
                while True:
                    got.append(received(two, 100))
            assert got in ([], [b"pay"], [b"pay", b"wait"])


def test_what_was_said_on_another_connection_is_found() -> None:
    said, heard = CHECKS
    with joined(twos=(heard, said + 1)) as (one, two):
        socket.socket.sendall(one, SAID)
        with pytest.raises(RemoteProtocolError, match="on their way"):
            received(two, 100)


def test_a_length_that_is_too_large_is_refused_before_anything_is_awaited(pair: Pair) -> None:
    one, two = pair
    length = RECORD_BYTES + 1
    head_check = zlib.crc32(HEAD.pack(length, 0)[:LENGTH_BYTES], CHECKS[0])
    socket.socket.sendall(one, HEAD.pack(length, head_check))
    with pytest.raises(
        RemoteProtocolError,
        match=f"record of {RECORD_BYTES + 1} bytes, 1 to {RECORD_BYTES} are allowed",
    ):
        received(two, 100)


def test_a_peer_that_hangs_up_within_a_record_has_hung_up(pair: Pair) -> None:
    one, two = pair
    socket.socket.sendall(one, SAID[: FIRST_BYTES + 3])
    one.close()
    assert received(two, 100) == b"pay"
    assert received(two, 100) == b""


def test_the_staging_takes_a_whole_record_wherever_it_begins(pair: Pair) -> None:
    one, two = pair
    two_bytes = STAGING_BYTES - 20
    sent = [b"x" * size for size in (two_bytes - RECORD_BYTES, RECORD_BYTES - 24, RECORD_BYTES, 7)]
    got = b""
    for payload in sent:
        while True:
            try:
                one.send(payload)
                break
            except BlockingIOError:
                got += received(two, RECORD_BYTES)
    while len(got) < sum(map(len, sent)):
        got += received(two, RECORD_BYTES)
    assert got == b"".join(sent)
