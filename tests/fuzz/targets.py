"""What is fed with hostile bytes: frames, the handshake, archives. Each target raises only what a
peer's bytes may cause to be raised (`named`), and checks what must hold when nothing is raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import DECODE_ERRORS, ArchiveError, Decoder
from shard import AuthenticationError, Limits, RemoteProtocolError
from shard.transport.frame import FrameDecoder
from shard.transport.handshake import ACCEPTED, CLAIM_BYTES, HELLO, PROOF_BYTES, Acceptor, Connector

LIMITS = Limits(body_bytes_max=1 << 20, blocks_bytes_max=1 << 20, blocks_max=16)
SECRET, KIND, CONNECTOR_NONCE, ACCEPTOR_NONCE = b"secret", 1, b"1" * 32, b"2" * 32


def feed_frames(data: bytes) -> None:
    """The first byte says how the rest is cut."""
    step, wire = (data[0] or 4096, data[1:]) if data else (1, b"")
    allocated = 0

    def allocate(size: int) -> NDArray[np.uint8]:
        nonlocal allocated
        allocated += size
        assert size <= LIMITS.blocks_bytes_max, f"{size} bytes were to be allocated"
        return np.empty(size, np.uint8)

    decoder = FrameDecoder(LIMITS, allocate)
    delivered = at = 0
    while at < len(wire):
        destination = decoder.destination()
        assert len(destination), "nowhere to receive"
        count = min(len(destination), step, len(wire) - at)
        destination[:count] = wire[at : at + count]
        at += count
        frame = decoder.next_frame(count)
        while frame is not None:
            body, blocks = frame
            delivered += len(body) + sum(block.nbytes for block in blocks)
            assert delivered <= at, "more was delivered than was received"
            frame = decoder.next_frame() if decoder.more else None
    frames = 1 + len(wire) // 8
    assert allocated <= frames * LIMITS.blocks_bytes_max


def good_handshake() -> tuple[bytes, bytes]:
    """What an acceptor receives of a connector that holds the secret, and the other way round."""
    one, two = (
        Connector(SECRET, KIND, 11, CONNECTOR_NONCE),
        Acceptor(SECRET, KIND, 22, ACCEPTOR_NONCE),
    )
    hello, _ = one.start(), two.start()
    answer = two.feed(hello)
    return hello + one.feed(answer), answer + ACCEPTED


TO_ACCEPTOR, TO_CONNECTOR = good_handshake()
assert len(TO_ACCEPTOR) == HELLO.size + PROOF_BYTES + CLAIM_BYTES


def feed_handshake(data: bytes) -> None:
    """The first byte says whom it goes to. Nobody but the one good connector, or acceptor, is let
    through.
    """
    to_acceptor, wire = bool(data and data[0] & 1), data[1:]
    side: Acceptor | Connector = (
        Acceptor(SECRET, KIND, 22, ACCEPTOR_NONCE)
        if to_acceptor
        else Connector(SECRET, KIND, 11, CONNECTOR_NONCE)
    )
    side.start()
    at = 0
    while side.wanted:
        assert side.wanted <= HELLO.size + PROOF_BYTES
        chunk = wire[at : at + side.wanted]
        if len(chunk) < side.wanted:
            return
        at += len(chunk)
        assert len(side.feed(chunk)) <= HELLO.size + PROOF_BYTES
    assert wire[:at] == (TO_ACCEPTOR if to_acceptor else TO_CONNECTOR), (
        "somebody without the secret was let through"
    )


def feed_archive(data: bytes) -> None:
    """The first byte says how many blocks there are, the next ones how long each is; the body comes
    first.
    """
    count = data[0] % 4 if data else 0
    sizes, rest = list(data[1 : 1 + count]), data[1 + count :]
    blocks: list[NDArray[np.uint8]] = []
    for size in sizes:
        rest, block = (rest[:-size], rest[-size:]) if size else (rest, b"")
        blocks.append(np.frombuffer(block, np.uint8))
    decoder = Decoder(limits=LIMITS)
    decoder.decode(rest, blocks)


def feed_plain_archive(data: bytes) -> None:
    """The short way of messages without blocks. The first byte is left out, so that both targets
    have one corpus.
    """
    Decoder(limits=LIMITS).decode_plain(data[1:])


@dataclass(frozen=True)
class Target:
    """`feed(data)` returns, or raises one of `named`. `corpus` is a folder of ./corpus."""

    feed: Callable[[bytes], None]
    named: tuple[type[Exception], ...]
    corpus: str


TARGETS = {
    "frame": Target(feed_frames, (RemoteProtocolError,), "frame"),
    "handshake": Target(feed_handshake, (AuthenticationError, RemoteProtocolError), "handshake"),
    "archive": Target(feed_archive, (ArchiveError,), "archive"),
    "plain": Target(feed_plain_archive, tuple(DECODE_ERRORS), "archive"),
}
