"""Messages inside one process: for a client and a server that share it, and, from a seed, the
double of a bad network.

A pair of connections hands messages over through the reactor's ready list: an ordinary array is
copied once, an array of the slab is passed as it is, read-only. The copy is the array's own copy(),
so a subclass may bring more than its bytes. `Weather` makes the pair delay, lose and cut,
reproducibly: what a test asks for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from shard.errors import LocalProtocolError, PeerLostError, ShardError, UnreachableError
from shard.loop.reactor import Reactor
from shard.memory.limits import Limits
from shard.memory.slab import Slab
from shard.transport import Accept, Blocks, Buffer, Connection, Listener, Node, Traffic, Transport
from shard.transport.frame import check_blocks
from shard.transport.identity import PeerIdentity

Message = tuple[bytes, Blocks]
# messages between the two ends, as a ring would hold; more wait in the sender's outbox
IN_FLIGHT_MAX = 1024


@dataclass
class Weather:
    """What happens to messages on the way. Order is always kept: these are connections, not
    datagrams.
    """

    seed: int = 0
    delay_s_max: float = 0.0  # each message is delayed by up to so much
    cut_after: int | None = None  # the connection is lost after so many messages were delivered
    clogged: bool = False  # the peer takes nothing for as long as this is set
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)


class MemoryConnection(Connection[Message]):
    """One end of a connection inside one process; pair() makes both. It keeps the contract of all
    transports, and its `weather` can delay messages, refuse them and cut the connection, for
    tests; order is always kept.
    """

    transport = "memory"

    def __init__(self, peer: str, limits: Limits, slab: Slab, weather: Weather) -> None:
        super().__init__(peer, limits)
        self._slab = slab
        self._weather = weather
        self._other: MemoryConnection | None = None
        self._in_flight: deque[Message] = deque()  # sent by the other end, not delivered yet
        self._delivered = 0
        self._bytes_sent = self._bytes_received = 0
        self._earliest = 0.0  # no delivery before: keeps delayed messages in order

    def _prepare(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[Message, int]:
        if len(body) > self.limits.body_bytes_max:
            raise LocalProtocolError(
                f"message body of {len(body)} bytes, at most {self.limits.body_bytes_max} allowed"
            )
        check_blocks([block.nbytes for block in blocks], self.limits, LocalProtocolError)
        kept = []
        for block in blocks:
            own = block.view() if self._slab.block_of(block) is not None else block.copy()
            own.flags.writeable = False
            kept.append(own)
        return (bytes(body), kept), len(body) + sum(block.nbytes for block in kept)

    def _beginning(self, item: Message) -> Buffer:
        return item[0]

    def traffic(self) -> Traffic:
        return Traffic(self._bytes_sent, self._bytes_received)

    def _write(self, item: Message) -> bool:
        if self.error is not None:
            return True  # as on any connection that ended: taken, and dropped
        other = self._taker()
        if other is None:
            return False
        other._in_flight.append(item)
        size = len(item[0]) + sum(block.nbytes for block in item[1])
        self._bytes_sent += size
        other._bytes_received += size
        weather, reactor = self._weather, other.reactor
        assert reactor is not None
        if weather.delay_s_max:
            now = reactor.clock()
            other._earliest = max(
                other._earliest, now + weather.random.uniform(0.0, weather.delay_s_max)
            )
            reactor.timers.call_at(other._earliest, other._deliver)
        else:
            reactor.call_soon(other._deliver)
        return True

    def _taker(self) -> MemoryConnection | None:
        """The other end, where it takes a message now."""
        other = self._other
        if (
            self._weather.clogged
            or other is None
            or other.reactor is None
            or len(other._in_flight) >= IN_FLIGHT_MAX
        ):
            return None
        return other

    def drain(self) -> int:
        count = super().drain()
        # Room may come after a writer found none and before it let go of the lock: whoever made it
        # could not write then, and nobody looks again by itself. Whoever has the lock now looks
        # here after us.
        while self._outbox and not self._writing.locked() and self._taker() is not None:
            count += super().drain()
        return count

    def _deliver(self) -> None:
        if self.error is not None:
            self._in_flight.clear()  # put there by a thread that had not heard of the end
        if not self._in_flight:
            return
        cut_after = self._weather.cut_after
        if cut_after is not None and self._delivered >= cut_after:
            self.close(PeerLostError(f"{self.peer} was cut off"))
            return
        body, blocks = self._in_flight.popleft()
        self._delivered += 1
        self.on_message(memoryview(body), blocks)
        if self._other is not None and self._other._outbox:
            self._other.drain()

    def attach(self, reactor: Reactor) -> None:
        self.reactor = reactor
        if self._other is not None:
            reactor.call_soon(self._other_drains)

    def _other_drains(self) -> None:
        if self._other is not None:
            self._other.drain()

    def unclog(self) -> None:
        """The peer reads again: what waited goes on."""
        self._weather.clogged = False
        self.drain()

    def _end(self) -> None:
        # an ended connection may be kept for long, its messages must not be; see _deliver(), too
        self._in_flight.clear()
        other, self._other = self._other, None
        if other is not None and other.error is None:
            other._other = None
            lost = PeerLostError(f"{other.peer} closed the connection")
            if other.reactor is not None and not other.reactor.closed:
                other.reactor.call_soon(lambda: other._finish(lost))
            else:
                other.close(lost)

    def _finish(self, lost: PeerLostError) -> None:
        """The other end closed: what it had sent still counts."""
        while self._in_flight and self.error is None:
            self._deliver()
        self.close(lost)


def pair(
    limits: Limits, slab: Slab, weather: Weather | None = None
) -> tuple[MemoryConnection, MemoryConnection]:
    """Two connected ends; attach both."""
    sky = weather or Weather()
    one, two = (
        MemoryConnection(f"memory://{end}", limits, slab, sky) for end in ("acceptor", "connector")
    )
    one._other, two._other = two, one
    return one, two


class MemoryListener(Listener):
    """Accepts connections at one address of a MemoryTransport until it is closed. `forget` takes
    the address out of the transport's table.
    """

    def __init__(self, address: str, forget: Callable[[], object]) -> None:
        self.address = address
        self._forget = forget

    def close(self) -> None:
        self._forget()


class MemoryTransport(Transport):
    """Connects nodes of one process with each other, without sockets or rings. Addresses
    "memory://name" are known within this object only.

    weather: what happens to messages on the way, for tests; None: nothing. UnreachableError for an
    address at which nobody listens.
    """

    scheme = "memory"

    def __init__(self, node: Node, slab: Slab, weather: Weather | None = None) -> None:
        self._node = node
        self._slab = slab
        self._weather = weather
        self._accepts: dict[str, tuple[Reactor, Accept]] = {}

    def refusal(self) -> str | None:
        return None

    def cannot_reach(self, address: str) -> str | None:
        return None if address in self._accepts else "another process"

    def listen(self, address: str, reactor: Reactor, accept: Accept) -> MemoryListener:
        if address in self._accepts:
            raise ShardError(f"{address} is listened at already")
        self._accepts[address] = (reactor, accept)
        return MemoryListener(address, lambda: self._accepts.pop(address, None))

    async def connect(self, address: str, timeout_s: float) -> MemoryConnection:
        return self.connect_at_once(address)

    def connect_at_once(self, address: str) -> MemoryConnection:
        """As connect(), without a wait and in any thread: the other end hears of it in its
        reactor's next turn.
        """
        found = self._accepts.get(address)
        if found is None:
            raise UnreachableError(f"nobody listens at {address}")
        reactor, accept = found
        ours, theirs = pair(self._node.limits, self._slab, self._weather)
        ours.peer_incarnation = theirs.peer_incarnation = theirs.peer_name = self._node.incarnation
        secret = self._node.secret_name if self._node.secret else ""
        ours.peer_identity = theirs.peer_identity = PeerIdentity(secret=secret, same_user=True)

        def arrive() -> None:
            # else ours was closed meanwhile, and nobody would be told that again
            if theirs.error is None:
                theirs.attach(reactor)
                accept(theirs)

        reactor.call_soon(arrive)
        return ours
