"""Messages over a few stream sockets that are one connection, so that a small message never waits
behind a large one.

    lane        socket   carries
    small       0        messages of less than BULK_BYTES_MIN, in the order sent
    bulk 1..n   1..n     the others, each over the lane where least waits; in the order sent on each

How the sockets of one connection find each other is in laned.py and lanes.py; what one of them does
in socket_lane.py.

The lanes share one life (life.py): what ends one ends the connection with the same error, and so
all others. The peer hangs up on one lane after the other. From the first on the connection drains:
we hang up on all lanes, and read the others to their ends, since what was sent before is there to
be read. It is lost with the last end, or limits.peer_silent_s after the first.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from shard.errors import PeerLostError, ShardError
from shard.loop.reactor import Reactor
from shard.loop.timers import Timer
from shard.memory.slab import Slab
from shard.transport import Blocks, Buffer, Node, Traffic
from shard.transport.socket_lane import SocketLane

# From here on a message leaves over a bulk lane. At 10 Gbit/s so many bytes take 0.2 ms, which is
# what a small message behind them would wait at most; each that is larger pays some 10 us for
# waking up the peer at another socket.
BULK_BYTES_MIN = 256 << 10


class BulkLane(SocketLane):
    """A lane beside the first. Owned by its LanedConnection, which gets what comes in and how it
    ends.
    """

    def __init__(self, sock: socket.socket, owner: LanedConnection, node: Node, slab: Slab) -> None:
        super().__init__(sock, owner.peer, node, slab, is_bulk=True)
        self._owner = owner
        self.on_message = self._deliver
        self.on_close = self._ended_by

    def _deliver(self, body: memoryview, blocks: Blocks = ()) -> None:
        self._owner.on_message(body, blocks)

    def _ended_by(self, lane: object, error: ShardError) -> None:
        self._owner.close(error)

    def _hung_up(self) -> None:
        self._owner.lane_hung_up(self)

    def waiting(self) -> tuple[int, int]:
        return self._owner.waiting()

    def bytes_ahead(self) -> int:
        """What a message given to this lane now would wait for."""
        return self._outbox_bytes + sum(len(part) for part in self._partial)


class LanedConnection(SocketLane):
    """One peer: this is the small lane itself, and owns the bulk lanes."""

    def __init__(self, socks: Sequence[socket.socket], peer: str, node: Node, slab: Slab) -> None:
        super().__init__(socks[0], peer, node, slab)
        self._bulk = tuple(BulkLane(sock, self, node, slab) for sock in socks[1:])
        if self._bulk:
            self.bulk_bytes_min = BULK_BYTES_MIN
        self._lanes: tuple[SocketLane, ...] = (self, *self._bulk)
        self._rest: Timer | None = None  # for the other lanes to end, once one has

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """One for each lane, that of small messages first: for options of the system's. They stay
        this connection's to read, write and close.
        """
        return tuple(lane.sock for lane in self._lanes)

    # -- sending -----------------------------------------------------------------------------------

    def send_long(self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool) -> None:
        if self._bulk and len(body) + sum(block.nbytes for block in blocks) >= BULK_BYTES_MIN:
            lane = (
                self._bulk[0] if len(self._bulk) == 1 else min(self._bulk, key=BulkLane.bytes_ahead)
            )
            lane.send(body, blocks, stable)
        else:
            super().send_long(body, blocks, stable)

    def send_everywhere(self, body: Buffer) -> None:
        for lane in self._lanes:
            lane.send(body)

    def waiting(self) -> tuple[int, int]:
        messages, nbytes = super().waiting()
        for lane in self._bulk:
            messages += len(lane._outbox)
            nbytes += lane._outbox_bytes
        return messages, nbytes

    def own_outbox(self) -> None:
        super().own_outbox()
        for lane in self._bulk:
            lane.own_outbox()

    def traffic(self) -> Traffic:
        return sum((lane.traffic() for lane in self._bulk), super().traffic())

    # -- life --------------------------------------------------------------------------------------

    def _drive(self, reactor: Reactor) -> None:
        super()._drive(reactor)
        for lane in self._bulk:
            lane.attach(reactor)

    def _hung_up(self) -> None:
        self.lane_hung_up(self)

    def lane_hung_up(self, lane: SocketLane) -> None:
        """The peer hung up on this lane, and all it sent over it was delivered."""
        lane.stop_reading()
        super()._hung_up()

    def _hang_up(self) -> None:
        for lane in self._lanes:
            lane.hang_up()
        if self._bulk:
            reactor = self.reactor
            assert reactor is not None
            # They end when the peer sees that we hung up, if they have not already: this is for one
            # that is gone.
            text = f"{self.peer} hung up on one of {len(self._lanes)} lanes, and left others open"
            self._rest = reactor.call_later(
                self.limits.peer_silent_s, lambda: self.close(PeerLostError(text))
            )

    def _read_the_rest(self, why: ShardError) -> None:
        if all(lane.peer_hung_up for lane in self._lanes):
            self.close(why)

    def _end(self) -> None:
        super()._end()
        if self._rest is not None:
            self._rest.cancel()
        for lane in self._bulk:
            lane.close(self.error)
            self.unsent += lane.unsent
