"""A peer that means harm: what it may hand over, write and say."""

from __future__ import annotations

import fcntl
import os
import socket

from shard import RingProducer
from shard.memory.leases import MeetingSocket
from shard.memory.segment import F_ADD_SEALS
from shard.transport.control_channel import NOTE, ControlChannel
from shard.transport.rings import make_rings
from shard.transport.shm_connection import connection_over
from tests.transport_contract import LIMITS, Side, World


def memfd(size_bytes: int, seals: int, sparse: bool = False) -> int:
    """A descriptor of a memfd with these seals; the caller owns it."""
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sparse:
        os.ftruncate(fd, size_bytes)
    else:
        os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


class Stranger:
    """The peer of a connection over shared memory that met it as any peer does, and keeps to no
    rule: the ring that it writes, the words of both rings, and its end of the socket.
    """

    def __init__(self, world: World) -> None:
        theirs, ours = socket.socketpair()
        segment = make_rings(LIMITS.ring_bytes)
        half = segment.size_bytes // 2
        outgoing, incoming = segment.memory[:half], segment.memory[half : 2 * half]
        self.ring = RingProducer(outgoing, "the victim")
        self.outgoing_words, self.incoming_words = outgoing.cast("Q"), incoming.cast("Q")
        self.line = MeetingSocket(ours)
        self.notes = ControlChannel(self.line, "the victim", lambda *_: None, lambda number: None)
        self.victim = Side(
            connection_over(theirs, segment, False, "a liar", LIMITS, world.slabs[0])
        )
        self.victim.connection.attach(world.reactor)

    def note(self, kind: int) -> None:
        """One that comes with nothing."""
        self.line.socket.send(NOTE.pack(kind, 0, 0, 0, 0))
