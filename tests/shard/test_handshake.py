"""Two sides prove to each other that they hold the secret; anything else is refused by name."""

from __future__ import annotations

import pytest

from shard import AuthenticationError, ForeignProtocolError, RemoteProtocolError
from shard.transport.handshake import (
    ACCEPTED,
    ANEW,
    CLAIM_BYTES,
    HANDSHAKE_VERSION,
    HELLO,
    LANES_MAX,
    ONLY_LANE,
    PROOF_BYTES,
    REFUSED,
    TOKEN_BYTES,
    Acceptor,
    Connector,
    Lane,
    check_protocol,
)

KIND = 1
NONCE_ONE, NONCE_TWO, NONCE_THREE = b"1" * 32, b"2" * 32, b"3" * 32


def connector(secret: bytes = b"secret", kind: int = KIND, nonce: bytes = NONCE_ONE) -> Connector:
    return Connector(secret, kind, 11, nonce)


def acceptor(secret: bytes = b"secret", kind: int = KIND, nonce: bytes = NONCE_TWO) -> Acceptor:
    made = Acceptor(secret, kind, 22, nonce)
    assert made.start() == b""
    return made


def pack(
    magic: bytes = b"PRPC",
    version: int = HANDSHAKE_VERSION,
    kind: int = KIND,
    wishes: int = 0,
    nonce: bytes = NONCE_ONE,
    lane: Lane = ONLY_LANE,
) -> bytes:
    """A hello."""
    return HELLO.pack(magic, version, kind, wishes, 1, nonce, lane.number, lane.count, lane.token)


def exchange(one: Connector, two: Acceptor) -> tuple[bytes, bytes, bytes]:
    """Run it to the end; what was said: hello, hello and proof, proof."""
    hello = one.start()
    answer = two.feed(hello)
    proof = one.feed(answer)
    assert two.feed(proof) == b""
    assert one.feed(ACCEPTED) == b""
    return hello, answer, proof


HELLO_ONE, ANSWER, PROOF = exchange(connector(), acceptor())


@pytest.mark.parametrize("secret", [b"", b"s", b"x" * 1000])
def test_two_with_the_same_secret_know_each_other(secret: bytes) -> None:
    one, two = connector(secret), acceptor(secret)
    said = exchange(one, two)
    assert [len(part) for part in said] == [
        HELLO.size,
        HELLO.size + PROOF_BYTES,
        PROOF_BYTES + CLAIM_BYTES,
    ]
    assert (one.wanted, two.wanted) == (0, 0)
    assert (one.peer_incarnation, two.peer_incarnation) == (22, 11)


@pytest.mark.parametrize("begin", [b"GET /", b"SSH-2.0-", b"\x16\x03\x01\x02", b"PRPX"])
def test_what_begins_no_hello_is_refused_before_there_is_a_whole_one(begin: bytes) -> None:
    two = acceptor()
    two.look(begin[:3])  # too little to tell
    with pytest.raises(RemoteProtocolError, match=r"began with|speaks TLS"):
        two.look(begin)


def test_a_hello_that_comes_in_pieces_is_waited_for_and_so_is_a_proof() -> None:
    two = acceptor()
    for cut in range(HELLO.size):
        two.look(HELLO_ONE[:cut])
    two.feed(HELLO_ONE)
    two.look(PROOF[:-1])


@pytest.mark.parametrize(
    ("ours", "theirs"), [(b"right", b"wrong"), (b"", b"s"), (b"s", b""), (b"s", b"s\0s")]
)
def test_another_secret_is_refused_by_both_sides(ours: bytes, theirs: bytes) -> None:
    one, two = connector(ours), acceptor(theirs)
    answer = two.feed(one.start())
    with pytest.raises(AuthenticationError, match="the same secret"):
        one.feed(answer)
    honest = connector(theirs)
    honest.start()
    impostor = connector(ours)
    two = acceptor(theirs)
    two.feed(impostor.start())
    with pytest.raises(AuthenticationError, match="PRPC_SECRET_FILE"):
        two.feed(bytes(PROOF_BYTES + CLAIM_BYTES))


def test_a_connectors_hello_with_any_byte_changed_is_refused(subtests: pytest.Subtests) -> None:
    for position in range(HELLO.size):
        hello = bytearray(HELLO_ONE)
        hello[position] ^= 0x40
        one, two = connector(), acceptor()
        one.start()
        with (
            subtests.test(position=position),
            pytest.raises((AuthenticationError, RemoteProtocolError)),
        ):
            one.feed(two.feed(bytes(hello)))


def test_an_acceptors_answer_with_any_byte_changed_is_refused(subtests: pytest.Subtests) -> None:
    for position in range(HELLO.size + PROOF_BYTES):
        one, two = connector(), acceptor()
        answer = bytearray(two.feed(one.start()))
        answer[position] ^= 0x01
        with (
            subtests.test(position=position),
            pytest.raises((AuthenticationError, RemoteProtocolError)),
        ):
            one.feed(bytes(answer))


def test_a_connectors_proof_with_any_byte_changed_is_refused(subtests: pytest.Subtests) -> None:
    for position in range(PROOF_BYTES + CLAIM_BYTES):
        one, two = connector(), acceptor()
        proof = bytearray(one.feed(two.feed(one.start())))
        proof[position] ^= 0x80
        with subtests.test(position=position), pytest.raises(AuthenticationError):
            two.feed(bytes(proof))


def test_what_was_said_once_proves_nothing_the_next_time() -> None:
    two = acceptor(nonce=NONCE_THREE)
    two.feed(HELLO_ONE)
    with pytest.raises(AuthenticationError):
        two.feed(PROOF)
    one = connector(nonce=NONCE_THREE)
    one.start()
    with pytest.raises(AuthenticationError):
        one.feed(ANSWER)


def test_one_sides_proof_cannot_be_sent_back_to_it() -> None:
    two = acceptor()
    answer = two.feed(HELLO_ONE)
    with pytest.raises(AuthenticationError):
        two.feed(answer[HELLO.size :] + bytes(CLAIM_BYTES))


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (pack(magic=b"GET "), "does not speak this protocol: it began with b'GET '"),
        (pack(version=9), "protocol version 9, this side 3"),
        (pack(kind=9), f"speaks transport 9, this side listens for {KIND}"),
    ],
)
def test_another_protocol_version_or_kind_is_named(hello: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        acceptor().feed(hello)
    one = connector()
    one.start()
    with pytest.raises(RemoteProtocolError, match=text):
        one.feed(hello + bytes(PROOF_BYTES))


@pytest.mark.parametrize("verdict", [REFUSED, ANEW, b"\0", b"?"])
def test_a_verdict_other_than_accepted_is_a_refusal(verdict: bytes) -> None:
    one, two = connector(), acceptor()
    one.feed(two.feed(one.start()))
    assert one.wanted == 1
    with pytest.raises(AuthenticationError):
        one.feed(verdict)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(b"", b"a"), (b"a", b""), (b"a", b"b"), (b"a" * 48, b"b" * 48)]
)
def test_proofs_hold_for_one_channel_only(ours: bytes, theirs: bytes) -> None:
    one = Connector(b"secret", KIND, 11, NONCE_ONE, ours)
    two = Acceptor(b"secret", KIND, 22, NONCE_TWO, theirs)
    two.start()
    answer = two.feed(one.start())
    with pytest.raises(AuthenticationError):
        one.feed(answer)
    same = Connector(b"secret", KIND, 11, NONCE_ONE, theirs)
    assert same.start() == HELLO_ONE
    proof = same.feed(answer)
    assert two.feed(proof) == b""


def test_an_acceptor_says_in_its_farewell_why_it_hangs_up() -> None:
    two = acceptor()
    assert two.farewell == b""
    two.feed(HELLO_ONE)
    with pytest.raises(AuthenticationError):
        two.feed(bytes(PROOF_BYTES + CLAIM_BYTES))
    assert two.farewell == REFUSED
    newer = acceptor()
    with pytest.raises(RemoteProtocolError):
        newer.feed(pack(version=9))
    one = connector()
    one.start()
    changed = pack(version=1, nonce=NONCE_TWO) + newer.farewell[HELLO.size :]
    with pytest.raises(
        RemoteProtocolError,
        match="protocol version 1, this side 3: install the same release at both sides",
    ):
        one.feed(changed)
    with pytest.raises(AuthenticationError):
        connected = connector()
        connected.start()
        connected.feed(newer.farewell)
    stranger = acceptor()
    with pytest.raises(RemoteProtocolError):
        stranger.feed(b"GET / HTTP/1.1".ljust(HELLO.size))
    assert stranger.farewell == b"", "it would not know what to make of it"


def test_a_peer_that_speaks_tls_is_told_apart_from_one_that_speaks_nonsense() -> None:
    with pytest.raises(
        RemoteProtocolError, match="the peer speaks TLS, this side does not: set PRPC_TLS_CERT"
    ):
        acceptor().feed(b"\x16\x03\x01\x02\x00".ljust(HELLO.size))


def test_the_acceptor_learns_which_lane_of_which_connection_it_is() -> None:
    lane = Lane(b"t" * TOKEN_BYTES, 3, LANES_MAX)
    one = Connector(b"secret", KIND, 11, NONCE_ONE, lane=lane)
    two = Acceptor(b"secret", KIND, 22, NONCE_TWO, lanes_max=LANES_MAX)
    two.start()
    exchange(one, two)
    assert two.lane == lane


@pytest.mark.parametrize(
    ("number", "count", "most"), [(0, 2, 1), (1, 1, 9), (0, 0, 9), (9, 10, 9), (255, 255, 9)]
)
def test_more_lanes_than_there_may_be_are_refused(number: int, count: int, most: int) -> None:
    two = Acceptor(b"secret", KIND, 22, NONCE_TWO, lanes_max=most)
    two.start()
    with pytest.raises(
        RemoteProtocolError, match=f"lane {number} of {count}, at most {most} allowed"
    ):
        two.feed(pack(lane=Lane(number=number, count=count)))


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (True, True)])
def test_frames_have_checksums_where_either_side_wishes_them(ours: bool, theirs: bool) -> None:
    """Each begins with what the other one expects, and what is sent differs from what is read."""
    one = Connector(b"secret", KIND, 11, NONCE_ONE, checked=ours)
    two = Acceptor(b"secret", KIND, 22, NONCE_TWO, checked=theirs)
    two.start()
    exchange(one, two)
    assert one.checks is not None
    assert two.checks is not None
    assert one.checks == two.checks[::-1]
    assert one.checks[0] != one.checks[1]


def test_inside_tls_and_unwished_there_are_no_checksums() -> None:
    """TLS has better ones."""
    for binding, checked in ((b"channel", True), (b"", False)):
        one = Connector(b"secret", KIND, 11, NONCE_ONE, binding, checked=checked)
        two = Acceptor(b"secret", KIND, 22, NONCE_TWO, binding, checked=checked)
        two.start()
        exchange(one, two)
        assert (one.checks, two.checks) == (None, None)


@pytest.mark.parametrize("kind", [4, 7])
def test_a_grpc_server_is_named_by_its_first_frame(kind: int) -> None:
    with pytest.raises(ForeignProtocolError, match="gRPC"):
        check_protocol(bytes([0, 0, 24, kind]) + bytes(5))
    check_protocol(
        bytes([0, 0, 24, kind]) + bytes(4) + b"\x01"
    )  # a frame of a stream: not the first
