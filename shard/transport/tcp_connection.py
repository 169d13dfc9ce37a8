"""Messages over TCP: lanes as of any stream socket (laned_connection.py), and a look at whether the
peer's host is still there: one that silence.py finds silent is lost.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from shard.errors import PeerLostError
from shard.loop.reactor import Reactor
from shard.loop.timers import Timer
from shard.memory.slab import Slab
from shard.transport import Node
from shard.transport.laned_connection import LanedConnection
from shard.transport.silence import LOOKS_PER_BOUND, Silence, keep_alive, silence_text


class TcpConnection(LanedConnection):
    """A connection to one peer over one or several tcp sockets (lanes). It ends with PeerLostError
    when the peer's host has not answered for limits.peer_silent_s seconds, though the peer's
    process may be busy for as long as it likes.

    socks: the connected sockets after their handshake, the lane of small messages first; it owns
    them.
    """

    transport = "tcp"

    def __init__(self, socks: Sequence[socket.socket], peer: str, node: Node, slab: Slab) -> None:
        super().__init__(socks, peer, node, slab)
        bound_s = node.limits.peer_silent_s
        for sock in socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, bound_s)
        self._silences = [(sock, Silence(bound_s)) for sock in socks]
        self._look: Timer | None = None

    def _drive(self, reactor: Reactor) -> None:
        super()._drive(reactor)
        self._look_later(reactor)

    def _look_later(self, reactor: Reactor) -> None:
        self._look = reactor.call_later(
            self.limits.peer_silent_s / LOOKS_PER_BOUND, lambda: self._look_at_silence(reactor)
        )

    def _look_at_silence(self, reactor: Reactor) -> None:
        now = reactor.clock()
        try:
            is_silent = any(silence.look(sock, now) for sock, silence in self._silences)
        except OSError as error:
            self.close(PeerLostError(f"{self.peer} was lost: {self._why(error)}"))
            return
        if is_silent:
            self.close(
                PeerLostError(f"{self.peer} was lost: {silence_text(self.limits.peer_silent_s)}")
            )
        else:
            self._look_later(reactor)

    def _end(self) -> None:
        super()._end()
        if self._look is not None:
            self._look.cancel()
