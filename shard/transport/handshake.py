"""Two processes prove to each other that they hold the job's secret, before either looks at
anything else.

    connector                                   acceptor
    hello  ------------------------------------>
           <------------------------------------ hello, proof of the acceptor
    proof of the connector, claim -------------->
           <------------------------------------ verdict (one byte)

    hello  offset  size  field
                0     4  magic     b"PRPC"
                4     2  version   HANDSHAKE_VERSION, little-endian
                6     1  kind      what the connector wants to speak: the transport's number
                7     1  wishes    CHECKED: records with checksums follow (transport/checked.py);
                                   others are refused
                8     8  incarnation of the sender: changes with every start of a node
               16    32  nonce     random
               48     1  lane      number of this socket in its connection: 0 opens it, the others
                                   join it in any order
               49     1  lanes     sockets of the connection, 1 to LANES_MAX
               50    16  token     random, the same in all hellos of one connection; zeros where it
                                   has one lane

        claim  offset  size  field
                0     8  name      what the acceptor knows this connector by; 0: it knows none, or
                                   this is a further lane
                8    32  proof     HMAC-SHA256(key of that name, both hellos, binding); callers.py
                                   says who has the key

The acceptor's hello says lane 0 of 1 and no token. Only who opened a connection may add a lane to
it: transport/lanes.py
    compares what both have proved.

    Checksums are on when either side wishes them, and there is no TLS, which has better ones: then
    `checks` says what they begin with. The proofs are of both hellos, so nobody in between can take
    a wish away.

    proof  HMAC-SHA256(secret, role || connector's hello || acceptor's hello || binding || claim),
           RFC 2104; role keeps one side's proof from being sent back to it; the acceptor has no
           claim; binding is empty on a plain socket, inside TLS what only the two ends of that
           channel know (TlsSocket.binding), so that nobody between two channels can pass proofs on

An acceptor that refuses says why where it can, in `farewell`: its hello with a proof of zeros to a
connector of another version or transport, which reads there what is spoken here; one byte to a
connector whose proof is wrong.

The verdict is ACCEPTED (the name is the one claimed), ANEW (the connector has a new name) or
REFUSED.

All messages have a fixed size, so an unauthenticated peer makes us hold 138 bytes at most. Without
a secret the key is empty: the exchange is the same, and a peer that has one is refused. The
connection is authenticated, its frames are not.
No I/O in this file: feed() takes bytes and returns bytes to send.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shard.errors import AuthenticationError, ForeignProtocolError, RemoteProtocolError
from shard.transport.callers import NAME_BYTES, CallerKey, Callers

MAGIC = b"PRPC"
HANDSHAKE_VERSION = 3
HELLO = struct.Struct("<4sHBBQ32sBB16s")
assert HELLO.size == 66  # the table above
PROOF_BYTES = 32
CLAIM_BYTES = NAME_BYTES + PROOF_BYTES
NO_CLAIM = bytes(CLAIM_BYTES)
TOKEN_BYTES = 16
NONCE_BYTES = 32
LANES_MAX = 9  # as many as Limits.connections_per_peer may be
CHECKED = 1  # of a hello's wishes
ACCEPTED, ANEW, REFUSED = b"\x06", b"\x07", b"\x15"

HTTP2_FIRST_TYPES = (4, 7)  # SETTINGS, GOAWAY
TLS_HANDSHAKE, TLS_ALERT = b"\x16\x03", b"\x15\x03"  # how records of TLS begin
TLS_MISSING_TEXT = (
    "the peer speaks TLS, this side does not: set PRPC_TLS_CERT, "
    "PRPC_TLS_KEY and PRPC_TLS_CA at both sides, or at none"
)
_REFUSED_TEXT = (
    "the peer does not hold the same secret; give both sides the same PRPC_SECRET_FILE (or "
    "PRPC_SECRET, or secret=)"
)


@dataclass(frozen=True)
class Lane:
    """A lane says which socket of which connection a hello is about.

    token: random, the same in all hellos of one connection; zeros where it has one lane. number: of
    this socket, 0 opens the connection. count: how many sockets it has, up to LANES_MAX. The bytes:
    the table at the file's head.
    """

    token: bytes = bytes(TOKEN_BYTES)
    number: int = 0
    count: int = 1


ONLY_LANE = Lane()


def _proof(
    secret: bytes,
    role: bytes,
    connector_hello: bytes,
    acceptor_hello: bytes,
    binding: bytes,
    claim: bytes = b"",
) -> bytes:
    return hmac.digest(
        secret, role + connector_hello + acceptor_hello + binding + claim, hashlib.sha256
    )


def _check(role: bytes, connector_hello: bytes, acceptor_hello: bytes) -> int:
    """What the checksums of what that role says begin with."""
    return zlib.crc32(role + connector_hello + acceptor_hello)


def check_protocol(begin: bytes) -> None:
    """Raise ForeignProtocolError for what a server of HTTP/2 says first: a SETTINGS or a GOAWAY
    frame of stream 0.

        offset  size  field
             0     3  length of what follows the header
             3     1  type: 4 SETTINGS, 7 GOAWAY
             4     1  flags: none
             5     4  stream

    The layout is that of RFC 9113, section 4.1. The first byte of ours is none of a length that
    such a frame has.
    """
    if (
        len(begin) >= 9
        and begin[0] == 0
        and begin[3] in HTTP2_FIRST_TYPES
        and begin[4:9] == bytes(5)
    ):
        raise ForeignProtocolError("a gRPC (HTTP/2) server listens there, and no prpc peer")


def _check_magic(begin: bytes) -> None:
    """`begin`: a hello, or its first four bytes at least."""
    check_protocol(begin)
    if begin.startswith(TLS_HANDSHAKE):
        raise RemoteProtocolError(TLS_MISSING_TEXT)
    if not begin.startswith(MAGIC):
        began = begin[: len(MAGIC)]
        raise RemoteProtocolError(
            f"the peer does not speak this protocol: it began with {began!r}, {MAGIC!r} expected"
        )


def _check_hello(hello: bytes, kind: int, lanes_max: int) -> tuple[int, Lane, bool]:
    """The sender's incarnation, which lane it wants, and whether it wishes checksums."""
    _check_magic(hello)
    _, version, their_kind, wishes, incarnation, _, number, count, token = HELLO.unpack(hello)
    if version != HANDSHAKE_VERSION:
        raise RemoteProtocolError(
            f"the peer speaks protocol version {version}, this side {HANDSHAKE_VERSION}: "
            "install the same release at both sides"
        )
    if their_kind != kind:
        raise RemoteProtocolError(
            f"the peer speaks transport {their_kind}, this side listens for {kind}"
        )
    if wishes & ~CHECKED:
        raise RemoteProtocolError(
            f"the peer wishes {wishes:#x}, this side knows {CHECKED:#x}: "
            "install the same release at both sides"
        )
    if not number < count <= lanes_max:
        raise RemoteProtocolError(
            f"the peer asks for lane {number} of {count}, at most {lanes_max} allowed"
        )
    return int(incarnation), Lane(token, number, count), bool(wishes)


class Handshake(ABC):
    """What both roles share. `wanted` says how many bytes feed() needs next; 0 when the exchange is
    over.
    """

    farewell = b""  # what to send before hanging up, once feed() has raised
    # what the checksums of the two directions begin with, ours first; None: there are none
    checks: tuple[int, int] | None = None

    def __init__(
        self,
        secret: bytes,
        kind: int,
        incarnation: int,
        nonce: bytes,
        binding: bytes = b"",
        lane: Lane = ONLY_LANE,
        checked: bool = False,
        callers: Callers | None = None,
    ) -> None:
        """`callers`: what this node remembers of its peers; None: of nobody."""
        self._callers = callers if callers is not None else Callers()
        self._secret = secret
        self._binding = binding
        self._kind = kind
        self._checked = checked
        wishes = CHECKED if checked else 0
        self._is_first = lane.number == 0
        self._hello = HELLO.pack(
            MAGIC,
            HANDSHAKE_VERSION,
            kind,
            wishes,
            incarnation,
            nonce,
            lane.number,
            lane.count,
            lane.token,
        )
        self.peer_incarnation = 0
        self.wanted = 0

    @abstractmethod
    def start(self) -> bytes:
        """What to send before anything arrives."""

    @abstractmethod
    def feed(self, data: bytes) -> bytes:
        """Take exactly `wanted` bytes; what to send. Raises AuthenticationError,
        RemoteProtocolError.
        """


class Connector(Handshake):
    """The side that called. Afterwards `known_as` is its name at the acceptor; 0 for lanes other
    than the first.
    """

    known_as = 0

    def start(self) -> bytes:
        self.wanted = HELLO.size + PROOF_BYTES
        return self._hello

    def feed(self, data: bytes) -> bytes:
        assert len(data) == self.wanted
        if self.wanted == 1:
            self.wanted = 0
            if data != ACCEPTED and (data != ANEW or self._claimed is None):
                raise AuthenticationError(_REFUSED_TEXT)
            self._learn_name(data == ANEW)
            return b""
        hello, proof = data[: HELLO.size], data[HELLO.size :]
        self.peer_incarnation, _, checked = _check_hello(hello, self._kind, 1)
        if not hmac.compare_digest(
            proof, _proof(self._secret, b"acceptor", self._hello, hello, self._binding)
        ):
            raise AuthenticationError(_REFUSED_TEXT)
        if (checked or self._checked) and not self._binding:
            self.checks = (
                _check(b"connector", self._hello, hello),
                _check(b"acceptor", self._hello, hello),
            )
        self.wanted = 1
        claim = self._claim(hello)
        return _proof(self._secret, b"connector", self._hello, hello, self._binding, claim) + claim

    def _claim(self, hello: bytes) -> bytes:
        self._transcript = self._hello + hello + self._binding
        self._claimed = self._callers.own_key(self.peer_incarnation) if self._is_first else None
        if self._claimed is None:
            return NO_CLAIM
        return self._claimed.name.to_bytes(NAME_BYTES, "little") + self._claimed.proof(
            self._transcript
        )

    def _learn_name(self, is_new: bool) -> None:
        if not self._is_first:
            return
        if self._claimed is not None and not is_new:
            self.known_as = self._claimed.name
            return
        own = CallerKey.derive(self._secret, self._transcript)
        self._callers.keep_own(self.peer_incarnation, own, self._claimed)
        self.known_as = own.name


class Acceptor(Handshake):
    """The side that was called; takes connections of up to `lanes_max` lanes. After the exchange
    `caller` is the connector's proven name (0 for lanes other than the first), and the transport
    sends `verdict` itself, once it can take messages."""

    caller = 0
    verdict = ACCEPTED

    def __init__(
        self,
        secret: bytes,
        kind: int,
        incarnation: int,
        nonce: bytes,
        binding: bytes = b"",
        lanes_max: int = 1,
        checked: bool = False,
        callers: Callers | None = None,
    ) -> None:
        super().__init__(
            secret, kind, incarnation, nonce, binding, checked=checked, callers=callers
        )
        self._lanes_max = lanes_max
        self.lane = ONLY_LANE  # what the connector asks for

    def start(self) -> bytes:
        self.wanted = HELLO.size
        self._their_hello = b""
        return b""

    def look(self, begin: bytes) -> None:
        """Raise RemoteProtocolError when what has come so far begins no hello: nobody need wait for
        the rest of it.
        """
        if not self._their_hello and len(begin) >= len(MAGIC):
            _check_magic(begin)

    def feed(self, data: bytes) -> bytes:
        assert len(data) == self.wanted
        if not self._their_hello:
            try:
                self.peer_incarnation, self.lane, checked = _check_hello(
                    data, self._kind, self._lanes_max
                )
            except RemoteProtocolError:
                if data.startswith(MAGIC):  # else it would not know what to make of it
                    self.farewell = self._hello + bytes(PROOF_BYTES)
                raise
            self._their_hello = data
            if (checked or self._checked) and not self._binding:
                self.checks = (
                    _check(b"acceptor", data, self._hello),
                    _check(b"connector", data, self._hello),
                )
            self.wanted = PROOF_BYTES + CLAIM_BYTES
            return self._hello + _proof(self._secret, b"acceptor", data, self._hello, self._binding)
        self.wanted = 0
        proof, claim = data[:PROOF_BYTES], data[PROOF_BYTES:]
        expected = _proof(
            self._secret, b"connector", self._their_hello, self._hello, self._binding, claim
        )
        if not hmac.compare_digest(proof, expected):
            self.farewell = REFUSED
            raise AuthenticationError(_REFUSED_TEXT)
        if self.lane.number == 0:
            self._name(int.from_bytes(claim[:NAME_BYTES], "little"), claim[NAME_BYTES:])
        return b""

    def _name(self, claimed: int, proof: bytes) -> None:
        transcript = self._their_hello + self._hello + self._binding
        if claimed and self._callers.recognize(claimed, proof, transcript):
            self.caller = claimed
            return
        new = CallerKey.derive(self._secret, transcript)
        self._callers.admit(new)
        self.caller = new.name
        self.verdict = ANEW if claimed else ACCEPTED
