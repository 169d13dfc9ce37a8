"""The face of all transports: messages between two processes, whole, in order, at most once.

    Transport   a way of talking: refusal(), listen(), connect()
    Listener    accepts connections at an address until closed
    Connection  one peer: send(body, blocks), and on_message for what comes in

A message is a body (the typed part, opaque here) and blocks (1-D contiguous uint8 arrays: the bytes
of what the layer above sends). What every transport promises, and the contract test checks:

- send() never waits. It copies ordinary arrays or has written them when it returns, so their owner
  may change them at once; arrays of the slab go by reference where the transport can. A full peer
  fills a bounded outbox, then send() raises BackpressureError.
- One message is delivered once and whole, or not at all. Order is per lane: messages of one lane
  arrive in the order sent, and after a loss none that follows on it is delivered. A connection has
  one lane, but for tcp, unix and verbs, which carry messages of at least bulk_bytes_min beside the
  others: there small may overtake bulk, and bulk small; small ones keep their order among
  themselves, and so do those of one bulk lane. send_everywhere() is for what must overtake nothing.
- on_message(body, blocks): body is good until it returns; blocks are read-only and the receiver's
  to keep.
- on_close(connection, error) once, when either side ended it: ClosedError for this side,
  PeerLostError or a ProtocolError. Its life is a table: life.py.
- send() may be called from any thread; all else happens in the thread that turns the reactor.
"""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shard.errors import BackpressureError, ClosedError, ForkedError, PeerLostError, ShardError
from shard.loop.reactor import Reactor
from shard.loop.sync import Semaphore
from shard.memory.device_memory import staged
from shard.memory.limits import Limits
from shard.transport.baton import Baton
from shard.transport.callers import Callers
from shard.transport.identity import JOB_SECRET, PeerIdentity
from shard.transport.life import CONNECTION_LIFE, ConnectionAction, ConnectionEvent, event_of

# the receiver's own: emptied as soon as it needs them no longer
Blocks = list[NDArray[np.uint8]] | tuple[()]
Buffer = bytes | bytearray | memoryview
Item = TypeVar("Item")  # a message made ready for one transport
# Sockets that a node connects at a time. A step of one waits for a step of each other, some 0.3 ms:
# with all of a large job at once, handshakes would be late, and an acceptor that is full hangs up
# on those (PROOF_LATE_S). As many as an acceptor takes of one host, by default.
CONNECTING_MAX = 64
BETWEEN_HOSTS = ("tcp", "verbs")  # schemes whose addresses are a host and a port
BEGINNING_BYTES = 64  # of a body: what the layer above needs to know its own message by


class OnMessage(Protocol):
    """The callback of a connection, called once for each message in the thread that turns the
    reactor.
    """

    def __call__(self, body: memoryview, blocks: Blocks = ()) -> None:
        """Take one message. body is good until this returns; blocks are the receiver's to keep."""


def _ignore_message(body: memoryview, blocks: Blocks = ()) -> None:
    """What a connection does with messages before its owner has said what to do."""


def _ignore_close(connection: Connection[Any], error: ShardError) -> None:
    """As above, for its end."""


NOBODY_SLEEPS = (0,)  # what `asleep` of a connection is whose peer never waits for a doorbell


class Connection(ABC, Generic[Item]):
    """One peer. Owned by whoever opened or accepted it, who sets on_message and on_close and calls
    attach().
    """

    transport = "?"  # the scheme, for texts and statistics
    reads_devices = False  # the peer reads DeviceBlocks from where they are

    def __init__(self, peer: str, limits: Limits) -> None:
        self.peer = peer
        self.limits = limits
        self.peer_incarnation = 0  # what the peer says it is, to all nodes alike
        # accepted: what the peer is called here, which it has proved (callers.py)
        self.peer_name = 0
        # not accepted: this side's name at the peer, the same over all connections where that knew
        # it
        self.known_as = 0
        self.peer_identity = PeerIdentity()
        self.reactor: Reactor | None = None
        self.on_message: OnMessage = _ignore_message
        self.on_close: Callable[[Any, ShardError], None] = _ignore_close
        self.owner: Any = None  # who set those, for an owner of the other end in the same process
        self.life = CONNECTION_LIFE.initial
        # why it ended: set once, with its life, for the one question that each send asks
        self.error: ShardError | None = None
        # messages of so many bytes may be overtaken by smaller ones
        self.bulk_bytes_min = sys.maxsize
        self._writing = Baton()  # whoever has it is the one writer
        self._outbox: deque[tuple[Item, int]] = deque()
        self._outbox_bytes = 0
        # once it ended: the beginning of each message of which not a byte had left
        self.unsent: list[Buffer] = []
        self._short_bytes_max = -1  # bodies of up to so many bytes may take a transport's short way
        # [0] is not 0: the peer sleeps until it is woken by wake_peer(), or by a message
        self.asleep: Sequence[int] = NOBODY_SLEEPS
        _made_here.add(self)

    # -- sending: the first caller writes, others enqueue ------------------------------------------

    def send(self, body: Buffer, blocks: Sequence[NDArray[Any]] = (), stable: bool = False) -> None:
        """Send one message. `stable`: the caller leaves the blocks unchanged until it is answered
        or the connection ends.

        Raises BackpressureError (nothing was sent), LocalProtocolError (over a limit), ShmFull, and
        the error that ended the connection.
        """
        if self.error is not None:
            raise self._ended()
        if blocks and not self.reads_devices:
            blocks = staged(blocks)
        item, size = self._prepare(body, blocks, stable)
        if not self._outbox and self._writing.take():
            try:
                written = self._write(item)
            finally:
                self._writing.give_back()
            if written:
                if self._outbox:
                    self.drain()
                return
        messages, nbytes = self.waiting()
        if messages >= self.limits.outbox_messages_max or (
            messages and nbytes + size > self.limits.outbox_bytes_max
        ):
            self._discard(item)
            raise BackpressureError(
                f"{messages} messages of {nbytes} bytes already wait for {self.peer}, at most "
                f"{self.limits.outbox_messages_max} messages or {self.limits.outbox_bytes_max} "
                "bytes may: it reads too slowly"
            )
        self._outbox_bytes += size
        self._outbox.append((item, size))
        self.drain()
        if self._outbox and self.reactor is not None and self.reactor.parked:
            self.reactor.wake()

    def wake_peer(self) -> None:
        """Wake a peer that sleeps, for a message that follows at once: to wake up takes it longer
        than most messages take to be prepared. From any thread.
        """

    def send_everywhere(self, body: Buffer) -> None:
        """Send a short message over every lane: the peer gets it once a lane, and once at least
        after all that was sent before.

        Raises as send()."""
        self.send(body)

    def drain(self) -> int:
        """Write what waits, as far as the peer takes it; how many messages."""
        count = 0
        while self._outbox and self._writing.take():
            try:
                while self._outbox:
                    item, size = self._outbox[0]
                    if not self._write(item):
                        return count
                    self._outbox.popleft()
                    self._outbox_bytes -= size
                    count += 1
                # Senders add to it beside this, and such a sum may be lost: it is exact when
                # nothing waits.
                self._outbox_bytes = 0
            finally:
                self._writing.give_back()
        return count

    def _ended(self) -> ShardError:
        """A fresh error to raise for a connection that ended."""
        error = self.error
        assert error is not None
        if isinstance(error, ClosedError):
            return ClosedError(f"the connection to {self.peer} was closed here")
        return type(error)(*error.args)

    @property
    def outbox_messages(self) -> int:
        """How many messages wait for the peer."""
        return self.waiting()[0]

    def waiting(self) -> tuple[int, int]:
        """How many messages wait for the peer, and their bytes: what the limits of the outbox are
        compared with.
        """
        return len(self._outbox), self._outbox_bytes

    @abstractmethod
    def traffic(self) -> Traffic:
        """How much has gone over it; also after its end."""

    @abstractmethod
    def _prepare(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[Item, int]:
        """The message as this transport writes it, independent of the caller's memory, and the
        bytes it holds.
        """

    @abstractmethod
    def _write(self, item: Item) -> bool:
        """Write the whole item, or take it over; False when the peer has no room. Called by the one
        writer.
        """

    @abstractmethod
    def _beginning(self, item: Item) -> Buffer:
        """The first bytes of the body of a message in the outbox: BEGINNING_BYTES at least, or the
        whole body.
        """

    def _discard(self, item: Item) -> None:
        """Undo _prepare()."""

    def own_outbox(self) -> None:
        """The caller of a `stable` send wants its arrays back: copy what of them is still to be
        sent.
        """

    # -- life --------------------------------------------------------------------------------------

    def attach(self, reactor: Reactor) -> None:
        """Be driven by `reactor` from now on. In its thread, or before it turns. One that has ended
        meanwhile is left as it is.
        """
        self.life, actions = CONNECTION_LIFE.after(self.life, ConnectionEvent.ATTACHED)
        if ConnectionAction.DRIVE in actions:
            self.reactor = reactor
            self._drive(reactor)

    def close(self, error: ShardError | None = None) -> None:
        """End it; what waits unsent is dropped, and on_close told why. In the reactor's thread.
        Again: does nothing.
        """
        why = error or ClosedError(f"the connection to {self.peer} was closed here")
        self._follow(event_of(why), why)

    def _peer_hung_up(self, why: PeerLostError) -> None:
        """The peer sends nothing more. What it sent before is delivered, then the connection ends
        with that error.
        """
        self._follow(ConnectionEvent.PEER_HUNG_UP, why)

    def _forked(self, why: ForkedError) -> None:
        """This process is a child made by fork(): the connection is the parent's."""
        self._follow(ConnectionEvent.FORKED, why)

    def _follow(self, event: ConnectionEvent, why: ShardError) -> None:
        self.life, actions = CONNECTION_LIFE.after(self.life, event)
        do: dict[ConnectionAction, Callable[[], object]] = {
            ConnectionAction.HANG_UP: self._hang_up,
            ConnectionAction.READ_THE_REST: partial(self._read_the_rest, why),
            ConnectionAction.REFUSE_SENDS: partial(self._refuse_sends, why),
            ConnectionAction.SAY_GOODBYE: self._say_goodbye,
            ConnectionAction.LET_GO: self._end,
            ConnectionAction.NAME_UNSENT: self._name_unsent,
            ConnectionAction.TELL_OWNER: partial(self._tell_owner, why),
            ConnectionAction.LEAVE_TO_PARENT: self._leave_to_parent,
        }
        for action in actions:
            do[action]()

    @abstractmethod
    def _drive(self, reactor: Reactor) -> None:
        """Have it watch for what comes in."""

    def _hang_up(self) -> None:
        """Show the peer that nothing more follows; its own messages are still read."""

    def _read_the_rest(self, why: ShardError) -> None:
        """Deliver what the peer sent before it hung up, then close(why); again for each of its
        lanes. Here: a stream has been read to its end when it shows.
        """
        self.close(why)

    def _refuse_sends(self, why: ShardError) -> None:
        self._short_bytes_max = -1  # no more short way
        self.error = why

    def _say_goodbye(self) -> None:
        """Where the end of a socket does not say it."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of memory, descriptors and the reactor."""

    def _name_unsent(self) -> None:
        with self._writing:  # another thread may be in drain()
            while self._outbox:  # others that saw no end yet append meanwhile
                item, size = self._outbox.popleft()
                self._outbox_bytes -= size
                beginning = self._beginning(item)
                if beginning:
                    self.unsent.append(beginning)
                self._discard(item)
        self.drain()  # what was appended after that look; it goes nowhere

    def _tell_owner(self, why: ShardError) -> None:
        on_close, self.on_close, self.on_message = self.on_close, _ignore_close, _ignore_message
        on_close(self, why)

    def _leave_to_parent(self) -> None:
        self._outbox = deque()  # what waits is the parent's to write
        self._let_go_in_fork()

    def _let_go_in_fork(self) -> None:
        """In a child made by fork(): keep nothing by which something could reach the peer or the
        parent.
        """


_made_here: weakref.WeakSet[Connection[Any]] = weakref.WeakSet()


def _refuse_in_fork() -> None:
    """A child made by fork() shares rings and sockets with its parent: one message from it would
    break them for both.
    """
    for connection in list(_made_here):
        connection._forked(
            ForkedError(
                f"{connection.peer} belongs to process {os.getppid()}, "
                f"and was used in its fork {os.getpid()}: start processes by spawn and connect "
                "there"
            )
        )


os.register_at_fork(after_in_child=_refuse_in_fork)


class Listener(ABC):
    """Accepts peers at `address` and hands each connection, authenticated, to the callback given to
    listen().
    """

    address: str

    @abstractmethod
    def close(self) -> None:
        """Accept no more; connections already accepted go on."""


@dataclass(frozen=True)
class Traffic:
    """How much has gone over one connection since it began, or over several when added with +:
    bytes and counts.
    """

    bytes_sent: int = 0  # written to its ring or socket, and arrays lent in place
    bytes_received: int = 0
    records_received: int = 0  # of a ring; other transports have none
    full_waits: int = 0  # records that found their ring full
    arrays_spilled: int = 0  # found no room in shared memory, and were sent over a socket instead

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.records_received + other.records_received,
            self.full_waits + other.full_waits,
            self.arrays_spilled + other.arrays_spilled,
        )


@dataclass(frozen=True)
class Node:
    """What all connections of one process have in common: the secret that they prove, the limits,
    and the incarnation by which peers tell this process from an earlier one.
    """

    secret: bytes = field(repr=False)  # b"": none
    incarnation: int
    limits: Limits
    # wish checksums of every tcp connection without TLS (checked.py); the peer may, too
    tcp_checksum: bool = False
    secret_name: str = JOB_SECRET  # what who proves it is said to hold
    # who is who over several connections
    callers: Callers = field(default_factory=Callers, repr=False, compare=False)
    # for sockets on their way through the handshake, of all its transports
    connecting: Semaphore = field(
        default_factory=lambda: Semaphore(CONNECTING_MAX), repr=False, compare=False
    )


Accept = Callable[[Connection[Any]], None]


class Transport(ABC):
    """A way of talking to other processes: it says whether it can be used here, listens and
    connects. `scheme` begins its addresses, as in "tcp://host:port".
    """

    scheme: str

    @abstractmethod
    def refusal(self) -> str | None:
        """Why it cannot be used in this process, or None when it can."""

    @abstractmethod
    def cannot_reach(self, address: str) -> str | None:
        """Why that address cannot be reached from here by this transport, or None when it is worth
        a try.
        """

    @abstractmethod
    def listen(self, address: str, reactor: Reactor, accept: Accept) -> Listener:
        """Listen at `address`. Raises AddressInUseError, ShardError."""

    @abstractmethod
    async def connect(self, address: str, timeout_s: float) -> Connection[Any]:
        """An authenticated connection, not attached yet, within `timeout_s` seconds. A coroutine of
        the control loop, which a thread waits for so:
        control_loop().spawn(transport.connect(address, timeout_s)).result()

        Cancelled, it leaves no socket and no memory behind. Raises UnreachableError,
        AuthenticationError, RemoteProtocolError, and OSError without descriptors or memory."""
