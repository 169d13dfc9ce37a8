"""Shared memory between strangers of one host: how two processes meet before they talk over a
ShmConnection.

The acceptor listens at a Unix socket without a name in the file system (unix_rendezvous.py). The
connector makes one segment with both rings and hands its descriptor over with its proof of the
secret; both look at the other's uid. Nothing of it has a name afterwards.
"""

from __future__ import annotations

import contextlib
import socket
import time

from shard.errors import PeerLostError, RemoteProtocolError, ShardError, UnreachableError
from shard.loop.reactor import Reactor
from shard.memory import memory_order
from shard.memory.segment import Segment
from shard.memory.slab import Slab
from shard.transport import Accept, Listener, Node, Transport, unix_rendezvous
from shard.transport.connecting import a_place, meet, not_reached
from shard.transport.handshake_io import Door, DoorStatistics, Greeting, know_peer
from shard.transport.rings import make_rings, rings_bytes
from shard.transport.shm_connection import ShmConnection, connection_over

KIND = 2  # in the handshake


class ShmListener(Listener):
    """Accepts peers of this host that talk through shared memory. They meet at an abstract Unix
    socket, which has no name in the file system; its name is a secret of 128 bits. The peer
    brings the segment with the rings.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        node: Node,
        slab: Slab,
        reactor: Reactor,
        accept: Accept,
    ) -> None:
        self.address = address
        self._node = node
        self._slab = slab
        self._reactor = reactor
        self._accept = accept
        self._door = Door(sock, node, KIND, reactor, self._greeted)

    def _greeted(self, greeting: Greeting, fds: list[int]) -> None:
        pid, _ = unix_rendezvous.credentials(greeting.sock)
        if len(fds) != 1:
            raise RemoteProtocolError("the peer handed over no segment")
        limits = self._node.limits
        segment = Segment.attach(
            fds[0], size_bytes_max=rings_bytes(max(limits.ring_bytes, limits.ring_bytes_max))
        )
        connection = connection_over(
            greeting.sock, segment, False, f"shm://process {pid}", limits, self._slab
        )
        fds.clear()  # it was the segment's, which is used up
        connection.peer_incarnation, connection.peer_name = (
            greeting.exchange.peer_incarnation,
            greeting.exchange.caller,
        )
        connection.peer_identity = greeting.peer_identity
        try:
            greeting.accepted()
        except OSError as error:  # it is gone again
            connection.close(PeerLostError(f"{connection.peer} was lost: {error.strerror}"))
            raise
        connection.attach(self._reactor)
        self._accept(connection)

    def statistics(self) -> DoorStatistics:
        """Who came to its socket."""
        return self._door.statistics()

    def close(self) -> None:
        self._door.close()


class ShmTransport(Transport):
    """Shared memory for one process: blocks are lent from, and copied into, `slab`."""

    scheme = "shm"

    def __init__(self, node: Node, slab: Slab) -> None:
        self._node = node
        self._slab = slab

    def refusal(self) -> str | None:
        try:
            memory_order.require_store_order()
        except ShardError as error:
            return str(error)
        return None

    def cannot_reach(self, address: str) -> str | None:
        return unix_rendezvous.cannot_reach(address) or self.refusal()

    def listen(self, address: str, reactor: Reactor, accept: Accept) -> ShmListener:
        """`address` is "shm://": the rest is chosen here, and not to be guessed."""
        memory_order.require_store_order()
        sock, full = unix_rendezvous.listen(self.scheme)
        return ShmListener(sock, full, self._node, self._slab, reactor, accept)

    async def connect(self, address: str, timeout_s: float) -> ShmConnection:
        refusal = self.cannot_reach(address)
        if refusal is not None:
            raise UnreachableError(f"{address} cannot be reached through shared memory: {refusal}")
        node = self._node
        deadline = time.monotonic() + timeout_s
        async with a_place(node, address, deadline):
            with contextlib.ExitStack() as closing:
                segment = make_rings(node.limits.ring_bytes)
                closing.callback(segment.close)
                sock = closing.enter_context(await unix_rendezvous.dial(address, deadline))
                try:
                    pid, _ = unix_rendezvous.credentials(sock)
                    exchange = await meet(
                        sock,
                        address,
                        node,
                        KIND,
                        deadline,
                        lambda proof: _send_with_segment(sock, proof, segment),
                    )
                    connection = connection_over(
                        sock, segment, True, f"shm://process {pid}", node.limits, self._slab
                    )
                except OSError as error:
                    raise not_reached(address, error) from error
                closing.pop_all()
        know_peer(connection, exchange, sock, node)
        return connection


def _send_with_segment(sock: socket.socket, proof: bytes, segment: Segment) -> None:
    socket.send_fds(sock, [proof], [segment.fd])
