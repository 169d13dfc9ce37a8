"""The bounds of a connection: what a peer may make us hold.
Checked before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shard.checks import is_count, is_finite

ADDRESS_SPACE = 1 << 47  # of a process on x86-64: nothing larger can be mapped or reserved
RING_BYTES_MIN, RING_BYTES_MAX = 4096, 1 << 30  # a page; lengths in a ring are 32 bits wide

BOUNDS: dict[str, tuple[float, float]] = {  # from, to
    "body_bytes_max": (1, (1 << 32) - 1),  # as wide as the length of a frame's body
    "blocks_bytes_max": (1, ADDRESS_SPACE),
    "expanded_bytes_max": (1, ADDRESS_SPACE),
    "expanded_total_bytes_max": (1, ADDRESS_SPACE),
    "blocks_max": (1, (1 << 16) - 1),  # as wide as the count in a frame
    "outbox_messages_max": (1, 1 << 30),
    "outbox_bytes_max": (1, ADDRESS_SPACE),
    "slab_share_max": (0.01, 1.0),
    "calls_in_flight_max": (1, 1 << 30),
    "ring_bytes": (RING_BYTES_MIN, RING_BYTES_MAX),
    "ring_bytes_max": (RING_BYTES_MIN, RING_BYTES_MAX),
    "segment_bytes_max": (1, ADDRESS_SPACE),
    "segments_bytes_max": (1, ADDRESS_SPACE),
    "segments_max": (1, 1 << 20),
    "handshake_s": (0.01, 3600.0),
    "handshakes_max": (1, 1 << 20),  # of these four each is a descriptor
    "handshakes_per_host_max": (1, 1 << 20),
    "handshakes_waiting_max": (0, 1 << 20),
    "connections_max": (1, 1 << 20),
    "connections_per_peer": (1, 9),
    "peer_silent_s": (0.5, 3600.0),
}


@dataclass(frozen=True)
class Limits:
    """Each has its reason beside it; configs/default.toml repeats them for users. Raises ValueError
    for one that is out of its bounds."""

    # The typed part of a message, arrays apart: what a handler's arguments come to without bulk
    # data.
    body_bytes_max: int = 64 << 20
    # All arrays of one message together: a peer cannot make us reserve more in one go. Above the
    # largest usual tensors.
    blocks_bytes_max: int = 4 << 30
    # What the arrays of one compressed message may expand to: some kilobytes are enough to announce
    # a gibibyte ...
    expanded_bytes_max: int = 256 << 20
    # ... and what all of them may come to that this process still holds, over all connections.
    expanded_total_bytes_max: int = 4 << 30
    # Arrays of one message: a descriptor each, and 32 bytes of a ring record.
    blocks_max: int = 4096
    # What waits for a slow peer before callers are told: some seconds of small calls ...
    outbox_messages_max: int = 65536
    # ... or a handful of the largest usual tensors.
    outbox_bytes_max: int = 1 << 30
    # Of what the slab may come to: copies that were made for one peer over shared memory, and that
    # it has not read or keeps. What passes it is sent over a socket, or refused while the peer does
    # not read. Arrays of empty() that are lent do not count.
    slab_share_max: float = 0.5
    # Calls and open streams of one connection that wait for answers: far beyond what a server
    # queues, half a GiB of futures.
    calls_in_flight_max: int = 1 << 20
    # Of each of a connection's two rings: 8,000 small messages, and larger bodies in one record.
    ring_bytes: int = 1 << 20
    # ... and of those that a connecting peer brings along, whatever it chose.
    ring_bytes_max: int = 64 << 20
    # One segment of a peer's slab that we map to read its arrays: room for blocks_bytes_max, which
    # is an array that has a segment to itself. Mapping takes address space only: the memory is the
    # peer's, and nothing of it is touched unread.
    segment_bytes_max: int = 16 << 30
    # All segments of one peer's slab that are mapped at a time: eight slabs of the default size ...
    segments_bytes_max: int = 64 << 30
    # ... in so many pieces, a descriptor and a mapping each (vm.max_map_count is 65530).
    segments_max: int = 1024
    # A peer that has not proved the secret by then is cut (slow loris).
    handshake_s: float = 5.0
    # Peers that are proving it at a time; the others wait. Each is a socket, with TLS some 50 KiB
    # as well ...
    handshakes_max: int = 256
    # ... and so many from one address, so that one host cannot keep the others out.
    handshakes_per_host_max: int = 64
    # Peers that wait for their turn, handshake_s at most: a socket each, unread, as in the kernel's
    # own queue (somaxconn: 4096). A whole job that starts at once on one host gets through; more
    # than that are hung up on at once.
    handshakes_waiting_max: int = 1024
    # Connections of one listener: far below the usual limit of 1 << 20 descriptors, with a few
    # sockets each.
    connections_max: int = 16384
    # Sockets of a peer that this side reaches over tcp or unix: one for small messages, the rest
    # for large ones, out of their way. More than two help where one socket does not fill the
    # network. 1: all messages share it, and stay in order.
    connections_per_peer: int = 2
    # A tcp peer that answers nothing for so long is lost: above the hiccups of a network (a few
    # lost packets in a row take 1 to 3 s), below what a user takes for a hang. Its kernel answers,
    # so how busy it is does not count. While nothing is under way the kernel counts whole seconds:
    # 2 s is the least there.
    peer_silent_s: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value, is_whole = field.name, getattr(self, field.name), field.type == "int"
            if not (is_count(value) if is_whole else is_finite(value)):
                raise ValueError(
                    f"{name} = {value!r}: a {'whole ' if is_whole else ''}number is expected"
                )
            least, most = BOUNDS[name]
            if not least <= value <= most:
                raise ValueError(f"{name} = {value!r:.100}: {least} to {most} is allowed")


DEFAULT_LIMITS = Limits()
