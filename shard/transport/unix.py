"""The unix transport: for two processes of one host that cannot share memory. Messages go as over
tcp, lanes and all, but through Unix sockets (unix_rendezvous.py): no TCP is between the two, and no
port that another user could reach.

    a peer that dies, however  its sockets end, and we are told at once: no host vanishes from
                               itself, so nobody looks for silence (silence.py)
    TLS, tcp_checksum          not here: nobody but the kernel sees what goes over a Unix socket, or
                               could change it
"""

from __future__ import annotations

import socket
import time

from shard.errors import UnreachableError
from shard.loop.reactor import Reactor
from shard.memory.slab import Slab
from shard.transport import Accept, Node, Transport, unix_rendezvous
from shard.transport.laned import LanedListener, connect_lanes
from shard.transport.laned_connection import LanedConnection

KIND = 3  # in the handshake
# What the kernel may hold of a lane, as far as net.core.wmem_max lets it. By default it is a fifth
# of a 1 MB array, which then takes 0.8 ms, as both sides wait for each other by turns; with this,
# where wmem_max is as much, 0.26 ms.
SEND_BUFFER_BYTES = 4 << 20


class UnixConnection(LanedConnection):
    """A connection to one process of this host and user, over one or several Unix sockets (lanes)
    that it owns.
    """

    transport = "unix"


class UnixTransport(Transport):
    """Unix sockets for one process: connections receive into `slab`."""

    scheme = "unix"

    def __init__(self, node: Node, slab: Slab) -> None:
        self._node = node
        self._slab = slab

    def refusal(self) -> str | None:
        return None

    def cannot_reach(self, address: str) -> str | None:
        return unix_rendezvous.cannot_reach(address)

    def listen(self, address: str, reactor: Reactor, accept: Accept) -> LanedListener:
        """`address` is "unix://": the rest is chosen here, and not to be guessed."""
        sock, full = unix_rendezvous.listen(self.scheme)
        return LanedListener(
            sock,
            full,
            KIND,
            lambda lanes: self._over([one.sock for one in lanes]),
            self._node,
            reactor,
            accept,
        )

    async def connect(self, address: str, timeout_s: float) -> UnixConnection:
        refusal = self.cannot_reach(address)
        if refusal is not None:
            raise UnreachableError(f"{address} cannot be reached through a Unix socket: {refusal}")
        deadline = time.monotonic() + timeout_s
        return await connect_lanes(
            address,
            lambda: unix_rendezvous.dial(address, deadline),
            self._over,
            self._node,
            KIND,
            deadline,
        )

    def _over(self, socks: list[socket.socket]) -> UnixConnection:
        pid, _ = unix_rendezvous.credentials(socks[0])
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return UnixConnection(socks, f"unix://process {pid}", self._node, self._slab)
