"""Messages inside one process: for a client and a server that share it, and, from a seed, the
double of a bad network.

A pair of connections hands messages over through a queue for each end, which the reactor polls as
it polls a ring: so the thread that waits for an answer finds the request by itself, and the answer
in the same look. An ordinary array is copied once, an array of the slab is passed as it is,
read-only. The copy is the array's own copy(), so a subclass may bring more than its bytes.
`Weather` makes the pair delay, lose and cut, reproducibly: what a test asks for.

    in_flight   what the other end has sent and this one has not delivered: any thread appends, the
                reactor's takes out
    delayed     by weather: a timer moves each to in_flight

A layer above that has both ends may pass by the queue while nothing is in it: idle_neighbour() and
carry() say when, and what a message is to the receiver then.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from shard.errors import LocalProtocolError, PeerLostError, ShardError, ShmFull, UnreachableError
from shard.loop.reactor import Reactor
from shard.memory.limits import Limits
from shard.memory.slab import Slab
from shard.memory.unheld import Unheld, no_memory
from shard.transport import Accept, Blocks, Buffer, Connection, Listener, Node, Traffic, Transport
from shard.transport.frame import check_blocks
from shard.transport.identity import PeerIdentity

Message = tuple[bytes, Blocks]
# messages between the two ends, as a ring would hold; more wait in the sender's outbox
IN_FLIGHT_MAX = 1024
# delivered in one go, as by a ring
MESSAGES_PER_TURN = 64


@dataclass
class Weather:
    """What happens to messages on the way. Order is always kept: these are connections, not
    datagrams.
    """

    seed: int = 0
    delay_s_max: float = 0.0  # each message is delayed by up to so much
    cut_after: int | None = None  # the connection is lost after so many messages were delivered
    clogged: bool = False  # the peer takes nothing for as long as this is set
    no_memory: bool = False  # neither for arrays that come nor for copies of those that go
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)


CALM = Weather()  # of those that are given none; nobody changes it


class _Passed:
    """What one end has been given, in bytes. Counted in the thread that turns its reactor."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


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
        self._delayed: deque[Message] = deque()  # the same, on their way until a timer fires
        # what the other end is to be given, where this one's poll() delivers for both
        self._beside: Sequence[Message] = ()
        self._is_source = False  # of a reactor
        self._delivered = 0
        self._sent, self._received = _Passed(), _Passed()
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
            is_lent = self._slab.block_of(block) is not None
            if self._weather.no_memory and not is_lent:
                raise ShmFull(
                    f"this process has no memory for a copy of an array of {block.nbytes} bytes: "
                    "raise its limits (`ulimit -v`, `ulimit -d`), or send the array in parts"
                )
            own = block.view() if is_lent else block.copy()
            own.flags.writeable = False
            kept.append(own)
        return (bytes(body), kept), len(body) + sum(block.nbytes for block in kept)

    def _beginning(self, item: Message) -> Buffer:
        return item[0]

    def traffic(self) -> Traffic:
        return Traffic(self._sent.nbytes, self._received.nbytes)

    def _write(self, item: Message) -> bool:
        if self.error is not None:
            return True  # as on any connection that ended: taken, and dropped
        other = self._taker()
        if other is None:
            return False
        weather = self._weather
        if weather.delay_s_max:
            reactor = other.reactor
            assert reactor is not None, "it takes messages"
            now = reactor.clock()
            other._earliest = max(
                other._earliest, now + weather.random.uniform(0.0, weather.delay_s_max)
            )
            other._delayed.append(item)
            reactor.timers.call_at(other._earliest, other._arrive)
        else:
            other._in_flight.append(item)
        other._sent_to()
        return True

    def _sent_to(self) -> None:
        """A message was appended here: in the sender's thread."""
        if self.error is not None:
            self._forget_all()  # it ended before that, and looks no more
        elif self.reactor is not None and self.reactor.parked:
            self.reactor.wake()

    def _taker(self) -> MemoryConnection | None:
        """The other end, where it takes a message now."""
        other = self._other
        if (
            self._weather.clogged
            or other is None
            or other.reactor is None
            or len(other._in_flight) + len(other._delayed) >= IN_FLIGHT_MAX
        ):
            return None
        return other

    def drain(self) -> int:
        count = super().drain()
        # Room may come after a writer found none and before it let go of the lock: whoever made it
        # could not write then, and nobody looks again by itself. Whoever has the lock now looks
        # here after us.
        while self._outbox and not self._writing.empty() and self._taker() is not None:
            count += super().drain()
        return count

    def _arrive(self) -> None:
        """The time of the first delayed message has come."""
        if self._delayed:
            self._in_flight.append(self._delayed.popleft())

    # -- receiving ---------------------------------------------------------------------------------

    def poll(self) -> int:
        """Deliver a batch of what has been sent to this end, and to the other one where this
        reactor has both; how many messages.
        """
        mine, theirs = self._in_flight, self._beside
        count = 0
        look_at, every = 1, 0
        until = 0.0
        while mine or theirs:
            if mine:
                self._deliver()
                count += 1
            other = self._other
            if theirs and other is not None:  # an answer, most often, which is as quick
                other._deliver()
                count += 1
            if self.error is not None or count >= MESSAGES_PER_TURN:
                break
            if count >= look_at and (mine or theirs):
                if not every:
                    assert self.reactor is not None, "it polls us"
                    clock, until, every = self.reactor.pace()
                if clock() >= until:
                    break
                look_at = count + every
        return count

    def _deliver(self) -> None:
        cut_after = self._weather.cut_after
        if cut_after is not None and self._delivered >= cut_after:
            self.close(PeerLostError(f"{self.peer} was cut off"))
            return
        body, blocks = self._in_flight.popleft()
        self._delivered += 1
        self._received.nbytes += len(body)
        if blocks:
            self._received.nbytes += sum(block.nbytes for block in blocks)
            if self._weather.no_memory:
                largest = max(block.nbytes for block in blocks)
                blocks = Unheld(len(blocks), no_memory(largest))
        self.on_message(memoryview(body), blocks)
        other = self._other
        if other is not None and other._outbox:
            other.drain()

    def prepare_sleep(self, sleeping: bool) -> float:
        """Who sends to it is in this process, and looks whether the reactor is parked."""
        return math.inf

    def has_work(self) -> bool:
        """Whether a message waits."""
        return bool(self._in_flight or self._beside)

    def _drive(self, reactor: Reactor) -> None:
        other = self._other
        if other is not None and other.reactor is reactor:
            other._beside = self._in_flight  # one look finds the request and the answer to it
        else:
            reactor.add_source(self)
            self._is_source = True
        if other is not None:
            reactor.call_soon(self._other_drains)

    def _other_drains(self) -> None:
        if self._other is not None:
            self._other.drain()

    # -- past the queue ----------------------------------------------------------------------------

    def idle_neighbour(self) -> MemoryConnection | None:
        """The other end, where one reactor drives both and nothing is on its way in either
        direction: what is handed over there at once, by whoever may turn that reactor, overtakes
        nothing.
        """
        other = self._other
        if (
            other is None
            or self._in_flight
            or other._in_flight
            or self._outbox
            or other._outbox
            or other.reactor is not self.reactor
            or self.reactor is None
            or self._weather is not CALM
            or self.error is not None  # in a fork of the process
        ):
            return None
        return other

    def carry(self, body: bytes, blocks: Sequence[NDArray[Any]]) -> tuple[bytes, Blocks]:
        """The message as the other end would be given it. Raises as send(), without
        BackpressureError.
        """
        if self.error is not None:
            raise self._ended()
        (body, given), _ = self._prepare(body, blocks, True)
        self.count(sum(block.nbytes for block in given), 0)
        return body, given

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """So much was handed over without send(), and taken."""
        self._sent.nbytes += sent_bytes
        self._received.nbytes += received_bytes

    def unclog(self) -> None:
        """The peer reads again: what waited goes on."""
        self._weather.clogged = False
        self.drain()

    def _end(self) -> None:
        self._forget_all()
        if self._is_source and self.reactor is not None:
            self.reactor.remove_source(self)
        other, self._other = self._other, None
        if other is not None and other.error is None:
            other._other = None
            lost = PeerLostError(f"{other.peer} closed the connection")
            if other.reactor is not None and not other.reactor.closed:
                other.reactor.call_soon(lambda: other._peer_hung_up(lost))
            else:
                other.close(lost)

    def _forget_all(self) -> None:
        """An ended connection may be kept for long, its messages must not be."""
        self._in_flight.clear()
        self._delayed.clear()
        self._beside = ()

    def _read_the_rest(self, why: ShardError) -> None:
        self._in_flight += self._delayed
        self._delayed.clear()
        while self._in_flight and self.error is None:
            self._deliver()
        self.close(why)


def pair(
    limits: Limits, slab: Slab, weather: Weather | None = None
) -> tuple[MemoryConnection, MemoryConnection]:
    """Two connected ends; attach both."""
    sky = weather or CALM
    one, two = (
        MemoryConnection(f"memory://{end}", limits, slab, sky) for end in ("acceptor", "connector")
    )
    one._other, two._other = two, one
    one._sent, two._sent = two._received, one._received
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
