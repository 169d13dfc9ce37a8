"""Lanes before they are connected: descriptors of a socket and a segment, handed to the process
that will own each end.

A newborn shard gets its ends with its arguments; a living one gets the end of a lane to a restarted
shard over its connection to the application. An end is an inert handle until connect(), once.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from shard.memory.limits import Limits
from shard.memory.segment import Segment
from shard.memory.slab import Slab
from shard.transport.rings import make_rings
from shard.transport.shm_connection import ShmConnection, connection_over

# the usual ones, with smaller rings: there are N x N of them
LANE_LIMITS = Limits(ring_bytes=256 << 10)


class InheritedFd:
    """A file descriptor that a child process gets with its arguments while it is being started.
    Pickling it duplicates the descriptor for that child, so it works only while one is spawned.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        # here: it brings dill, which nobody needs without shards
        from multiprocess import reduction

        return InheritedFd._receive, (reduction.DupFd(self.fd),)

    @staticmethod
    def _receive(duplicate: Any) -> InheritedFd:
        return InheritedFd(duplicate.detach())


@dataclass
class LaneEnd:
    """What a process needs to build its end of a lane. `incarnation`: that of the rings, checked
    when they are attached.
    """

    socket_fd: InheritedFd
    segment_fd: InheritedFd
    is_connector: bool
    incarnation: int

    def connect(self, peer: str, slab: Slab, limits: Limits) -> ShmConnection:
        """Take possession: the connection owns the descriptors from here on. Raises
        RemoteProtocolError for a stale ring.
        """
        sock = socket.socket(fileno=self.socket_fd.fd)
        segment = Segment.attach(self.segment_fd.fd)
        return connection_over(
            sock, segment, self.is_connector, peer, limits, slab, self.incarnation
        )

    def close(self) -> None:
        """Let go of an end that somebody else has a copy of."""
        os.close(self.socket_fd.fd)
        os.close(self.segment_fd.fd)

    def fds(self) -> list[int]:
        """To be handed over a socket; received() puts them together again."""
        return [self.socket_fd.fd, self.segment_fd.fd]

    @classmethod
    def received(cls, fds: list[int], incarnation: int) -> LaneEnd:
        """The acceptor's end, from what fds() of it gave."""
        return cls(InheritedFd(fds[0]), InheritedFd(fds[1]), False, incarnation)


def make_lane(incarnation: int, ring_bytes: int) -> tuple[LaneEnd, LaneEnd]:
    """A new lane's ends: the connector's, the acceptor's. Raises ShmFull."""
    segment = make_rings(ring_bytes, incarnation)
    ours, theirs = socket.socketpair()
    first = LaneEnd(InheritedFd(ours.detach()), InheritedFd(os.dup(segment.fd)), True, incarnation)
    second = LaneEnd(
        InheritedFd(theirs.detach()), InheritedFd(os.dup(segment.fd)), False, incarnation
    )
    segment.close()
    return first, second
