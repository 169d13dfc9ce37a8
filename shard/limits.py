"""The bounds of a connection: what a peer may make us hold. Checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Each has its reason beside it; configs/default.toml repeats them for users."""

    # The typed part of a message, arrays apart: what a handler's arguments come to without bulk data.
    body_bytes_max: int = 64 << 20
    # All arrays of one message together: a peer cannot make us reserve more in one go.
    blocks_bytes_max: int = 16 << 30
    # Arrays of one message: a descriptor each, and 32 bytes of a ring record.
    blocks_max: int = 4096
    # What waits for a slow peer before callers are told: some seconds of small calls ...
    outbox_messages_max: int = 65536
    # ... or a handful of the largest usual tensors.
    outbox_bytes_max: int = 1 << 30
    # Of each of a connection's two rings: 8,000 small messages, and larger bodies in one record.
    ring_bytes: int = 1 << 20
    # A peer that has not proved the secret by then is cut (slow loris).
    handshake_s: float = 5.0
    # Peers that are still proving it; more are hung up on at once. Each is a socket, with TLS some 50 KiB as well ...
    handshakes_max: int = 256
    # ... and so many from one address, so that one host cannot keep the others out; far above what start together on one.
    handshakes_per_host_max: int = 64
    # Connections of one listener, each some 100 KiB of buffers: far below the usual limit of 1 << 20 descriptors.
    connections_max: int = 16384


DEFAULT_LIMITS = Limits()
