"""The verbs transport: RDMA between two processes, of one host or two, that meet at a tcp port.

    connector                                     acceptor
    handshake (handshake.py) <----------------->
           <-------------------------------------  its verdict, once it is this peer's turn
    makes a queue pair
    far end, or a fault ------------------------>  makes a queue pair, connects it to that end
           <-------------------------------------  far end, or a fault
    connects its queue pair, and reads nothing by
    it: the network carries packets both ways
    (iWARP: by rdma_cm, see verbs_iwarp.py)
    READY -------------------------------------->  the connection is made

INTRODUCTIONS_MAX peers have their turn at a time, in the order in which they proved the secret. To
make a queue pair and register its slots takes milliseconds of either process, and who waits for it
gives up after some seconds and comes again: if all were begun at once, none might be finished.

Before either connects its queue pair it waits until its kernel knows the way to the other's GID, or
knows that there is none (neighbour.py): to connect would stop the whole process as long. What a far
end is stands in verbs_introduction.py, how several devices serve one connection in verbs_rails.py,
what goes on afterwards in verbs_connection.py. No memory but the slots of a connection and segments
of the slab is ever registered.

    refused where          because
    the GID does not       the hosts reach each other over tcp, and not over their RDMA network
     resolve, or nothing
     comes back
    there is no pyverbs    verbs_device.py says what is missing, and of which release
    TLS is configured      RDMA encrypts nothing, and nothing may go unencrypted
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

from shard.errors import PeerLostError, RemoteProtocolError, ShardError, UnreachableError
from shard.loop.reactor import Reactor
from shard.loop.readiness import until_ready
from shard.loop.task_group import CancelScope
from shard.loop.timers import Timer
from shard.loop.waits import run_blocking, sleep
from shard.memory.slab import Slab
from shard.transport import Accept, Listener, Node, Transport
from shard.transport.connecting import a_place, hear, meet, not_reached, say
from shard.transport.handshake_io import Door, DoorStatistics, Greeting, know_peer
from shard.transport.last_look import LastLook
from shard.transport.tcp import (
    ResolvedAddress,
    at_each_place,
    dial,
    format_address,
    listening_socket,
)
from shard.transport.verbs_connection import VerbsConnection, slot_bytes_of
from shard.transport.verbs_device import NoVerbs, loaded, verbs_rails
from shard.transport.verbs_domain import VerbsOptions
from shard.transport.verbs_introduction import FAR_END_BYTES, FarEnd, FirstPair
from shard.transport.verbs_iwarp import IwarpQueue
from shard.transport.verbs_queue import VerbsFailed, VerbsQueue
from shard.transport.verbs_rails import VerbsDevices

KIND = 5  # in the handshake; 4 was that of queue pairs introduced with the proof
INTRODUCTIONS_MAX = 4
READY = b"\x06"

logger = logging.getLogger("shard")


class _Introduction:
    """The acceptor's side of what follows the handshake: one peer that has proved the secret. Ends
    in a connection, or in a line of the log.
    """

    def __init__(self, listener: VerbsListener, greeting: Greeting) -> None:
        self._listener = listener
        self._greeting = greeting
        self._received = b""
        self._queue: VerbsQueue | None = None  # None: the peer has not introduced itself
        self._far = FarEnd()
        self._is_told = False  # the peer is, of the queue pair
        self._meets_at: int | None = None
        self._pause: Timer | None = None
        reactor = listener.reactor
        self._timer = LastLook(reactor, listener.node.limits.handshake_s, self)
        reactor.watch(greeting.sock.fileno(), self._on_ready)

    @property
    def step(self) -> int:
        """How far it is: 1, once the peer has introduced itself."""
        return int(self._queue is not None)

    def look(self) -> None:
        """Take what has come, and go on; it may be over then."""
        self._on_ready(0)

    def overdue(self, limit_s: float) -> None:
        """The time is over."""
        self.fail(f"did not introduce its queue pair within {limit_s:.3g} s")

    def _on_ready(self, events: int) -> None:
        with self._failing():
            if self._read():
                self._finish()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What a step raises ends the introduction; one that would block does not."""
        try:
            yield
        except BlockingIOError:
            return
        except (OSError, ShardError) as error:
            self.fail(str(error))

    def _read(self) -> bool:
        """Take what has come; whether the peer is ready. Raises BlockingIOError, OSError,
        RemoteProtocolError, NoVerbs.
        """
        wanted = FAR_END_BYTES if self._queue is None else len(READY)
        data = self._greeting.sock.recv(wanted - len(self._received))
        if not data:
            raise RemoteProtocolError("hung up before its queue pair was connected")
        self._received += data
        if len(self._received) < wanted:
            return False
        received, self._received = self._received, b""
        if self._queue is not None:
            if received != READY or not self._is_told or not self._queue.is_connected():
                raise RemoteProtocolError(f"says {received!r}, {READY!r} expected, in its turn")
            return True
        with self._telling_fault():
            self._far = FarEnd.unpack(received)
        if self._far.fault:
            raise RemoteProtocolError(f"has no queue pair: {self._far.fault}")
        with self._telling_fault():
            self._queue = self._listener.queue_for(self._far)
            self._queue.search(self._far)
        self._connect()
        return False

    def _connect(self) -> None:
        """Once the kernel knows the way to the peer. Raises ShardError, OSError."""
        queue = self._queue
        assert queue is not None
        with self._telling_fault():
            if not queue.is_found():
                self._pause = self._listener.reactor.call_later(queue.pause_s(), self._look_again)
                return
            queue.connect(self._far)
        self._is_told = True
        if isinstance(queue, IwarpQueue):
            self._meets_at = queue.fileno_of_meeting()
            if self._meets_at is not None:
                self._listener.reactor.watch(self._meets_at, partial(self._meet, queue))
        # into an empty socket buffer: whole, or the peer is broken
        self._greeting.sock.send(queue.near_end().pack())

    def _meet(self, queue: IwarpQueue, events: int) -> None:
        with self._failing():
            queue.step()

    def _look_again(self) -> None:
        with self._failing():
            self._connect()

    @contextlib.contextmanager
    def _telling_fault(self) -> Iterator[None]:
        """The peer is told, too, why there is no queue pair for it, or what is wrong with its."""
        try:
            yield
        except (NoVerbs, RemoteProtocolError) as error:
            self._greeting.sock.send(FarEnd(fault=str(error)).pack())
            raise

    def _finish(self) -> None:
        queue = self._queue
        assert queue is not None
        self._let_go()
        self._listener.made(self._greeting, queue, self._far)

    def fail(self, why: str) -> None:
        """Hang up, and log why."""
        self._let_go()
        if self._queue is not None:
            self._queue.close()
        self._listener.refuse(self._greeting.peer, why)
        self._greeting.close()

    def _let_go(self) -> None:
        self._timer.cancel()
        if self._pause is not None:
            self._pause.cancel()
        if self._meets_at is not None:
            self._listener.reactor.unwatch(self._meets_at)
        self._listener.reactor.unwatch(self._greeting.sock.fileno())
        self._listener.ended(self)


class VerbsListener(Listener):
    """Accepts peers at a tcp port, and talks to each over a queue pair. It owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        node: Node,
        slab: Slab,
        devices: VerbsDevices,
        reactor: Reactor,
        accept: Accept,
    ) -> None:
        host, port = sock.getsockname()[:2]
        self.address = format_address(host, port, VerbsTransport.scheme)
        self.node, self.reactor = node, reactor
        self.introductions: set[_Introduction] = set()
        self._waiting: deque[Greeting] = deque()
        self._slab, self._devices, self._accept = slab, devices, accept
        self._door = Door(sock, node, KIND, reactor, self._greeted)

    def _greeted(self, greeting: Greeting, fds: list[int]) -> None:
        if len(self._waiting) >= self.node.limits.connections_max:
            raise RemoteProtocolError(
                f"{len(self._waiting)} peers wait already to introduce their queue pairs, at most "
                f"{self.node.limits.connections_max} may"
            )
        self._waiting.append(greeting)
        self._take_turns()

    def _take_turns(self) -> None:
        while self._waiting and len(self.introductions) < INTRODUCTIONS_MAX:
            greeting = self._waiting.popleft()
            try:
                if has_hung_up(greeting.sock):
                    raise RemoteProtocolError("hung up before it was its turn")
                greeting.accepted()
            except (OSError, RemoteProtocolError) as error:
                self.refuse(greeting.peer, str(error))
                greeting.close()
            else:
                self.introductions.add(_Introduction(self, greeting))

    def ended(self, introduction: _Introduction) -> None:
        """By a connection, or without one: it is another one's turn."""
        self.introductions.discard(introduction)
        self.reactor.call_soon(self._take_turns)

    def queue_for(self, far: FarEnd) -> VerbsQueue:
        """One to connect to that end of a peer. Raises NoVerbs."""
        return self._devices.queue_for(slot_bytes_of(self.node.limits.ring_bytes), far)

    def made(self, greeting: Greeting, queue: VerbsQueue, far: FarEnd) -> None:
        """A peer's queue pair is connected to this one, at both ends."""
        connection = VerbsConnection(
            greeting.sock,
            queue,
            far,
            f"verbs://{greeting.peer}",
            self.node,
            self._slab,
        )
        exchange = greeting.exchange
        connection.peer_incarnation, connection.peer_name = (
            exchange.peer_incarnation,
            exchange.caller,
        )
        connection.peer_identity = greeting.peer_identity
        connection.attach(self.reactor)
        self._accept(connection)

    def refuse(self, peer: str, why: str) -> None:
        """Count it, and log it if there were not too many."""
        self._door.refuse(peer, why)

    def statistics(self) -> DoorStatistics:
        """Who came, and what became of them."""
        return self._door.statistics()

    def close(self) -> None:
        self._door.close()
        for greeting in self._waiting:
            self.refuse(greeting.peer, "the listener closed")
            greeting.close()
        self._waiting.clear()
        for introduction in list(self.introductions):
            introduction.fail("the listener closed")


class VerbsTransport(Transport):
    """RDMA for one process: blocks are lent from, and read into, `slab`."""

    scheme = "verbs"

    def __init__(
        self, node: Node, slab: Slab, options: VerbsOptions | None = None, has_tls: bool = False
    ) -> None:
        """`has_tls`: everything else of this node is encrypted."""
        self._node, self._slab = node, slab
        self._options = options if options is not None else VerbsOptions()
        self._has_tls = has_tls
        self._devices = VerbsDevices(slab, self._options)

    def refusal(self) -> str | None:
        if self._has_tls:
            return "RDMA encrypts nothing, and this node has TLS: take either"
        if self._devices.is_open:
            return None
        try:
            loaded()
            verbs_rails(self._options.device, gid_index=self._options.gid_index)
        except NoVerbs as error:
            return str(error)
        return None

    def cannot_reach(self, address: str) -> str | None:
        return self.refusal()

    def listen(self, address: str, reactor: Reactor, accept: Accept) -> VerbsListener:
        """At "verbs://host:port", a tcp port of its own. Raises as Transport.listen(), NoVerbs."""
        self._devices.usable()  # before a port is taken for it
        return VerbsListener(
            listening_socket(address), self._node, self._slab, self._devices, reactor, accept
        )

    async def connect(self, address: str, timeout_s: float) -> VerbsConnection:
        """As Transport.connect(), at any of the places that the host's name stands for."""
        refusal = self.cannot_reach(address)
        if refusal is not None:
            raise UnreachableError(f"{address} cannot be reached by RDMA: {refusal}")
        return await at_each_place(address, timeout_s, self._connect)

    async def _connect(
        self, address: str, place: ResolvedAddress, deadline: float
    ) -> VerbsConnection:
        """Again while another device may reach the peer where one did not."""
        first: FirstPair | None = None
        tried: set[str] = set()
        while True:
            try:
                return await self._connect_over(first, address, place, deadline)
            except _NotReached as error:
                tried.add(error.near)
                first = next((one for one in error.others if one.near not in tried), None)
                if first is None or time.monotonic() >= deadline:
                    raise
                logger.warning("%s; trying %s", str(error), first.near)

    async def _connect_over(
        self, first: FirstPair | None, address: str, place: ResolvedAddress, deadline: float
    ) -> VerbsConnection:
        node = self._node
        timeout_s = max(0.0, deadline - time.monotonic())
        with contextlib.ExitStack() as closing:
            async with a_place(node, address, deadline):
                try:
                    sock = closing.enter_context(await dial(address, place, deadline))
                    exchange = await meet(sock, address, node, KIND, deadline)
                    queue = await self._queue(sock, first, deadline)
                    closing.callback(queue.close)
                    await say(sock, queue.near_end().pack(), deadline)
                    far = FarEnd.unpack(await hear(sock, FAR_END_BYTES, deadline))
                    if far.fault:
                        raise _NotReached(
                            f"{address} has no queue pair for us: {far.fault}", queue, far
                        )
                    await _join(queue, far, address, deadline)
                    await say(sock, READY, deadline)
                except NoVerbs as error:
                    raise UnreachableError(
                        f"{address} cannot be reached by RDMA: {error}"
                    ) from error
                except TimeoutError as error:
                    raise UnreachableError(
                        f"{address} introduced no queue pair within {timeout_s:.3g} s"
                    ) from error
                except PeerLostError as error:
                    raise UnreachableError(
                        f"{address} hung up before its queue pair was connected; its log says why"
                    ) from error
                except OSError as error:
                    raise not_reached(address, error) from error
            closing.pop_all()
        connection = VerbsConnection(sock, queue, far, address, node, self._slab)
        know_peer(connection, exchange, sock, node)
        return connection

    async def _queue(
        self, sock: socket.socket, first: FirstPair | None, deadline: float
    ) -> VerbsQueue:
        """For a peer that waits for our end. Raises NoVerbs, once the peer was told why."""
        try:
            return self._devices.queue(slot_bytes_of(self._node.limits.ring_bytes), first)
        except NoVerbs as error:
            await say(sock, FarEnd(fault=str(error)).pack(), deadline)
            raise


class _NotReached(UnreachableError):
    """By that queue. `near`: its first port, `others`: what another try may begin with."""

    def __init__(self, text: str, queue: VerbsQueue, far: FarEnd) -> None:
        super().__init__(text)
        self.near, self.others = str(queue.domain.port), queue.others(far)


async def _join(queue: VerbsQueue, far: FarEnd, address: str, deadline: float) -> None:
    """Connect the queue to that end, and see that something comes back. Raises _NotReached."""
    try:
        queue.search(far)
        while not queue.is_found():
            await sleep(queue.pause_s())
        queue.connect(far)
        if isinstance(queue, IwarpQueue):
            await _meet(queue, far, deadline)
        queue.prove(address)
        while not queue.is_proven():
            queue.arm()
            if queue.is_proven():  # it came back before that
                break
            await until_ready(queue, select.EPOLLIN, deadline)
            queue.take_event()
    except TimeoutError as error:
        text = f"{queue.domain.port}: nothing came back in time"
        raise _NotReached(f"{address} cannot be reached by RDMA: {text}", queue, far) from error
    except (NoVerbs, VerbsFailed) as error:
        raise _NotReached(f"{address} cannot be reached by RDMA: {error}", queue, far) from error


async def _meet(queue: IwarpQueue, far: FarEnd, deadline: float) -> None:
    """Have a thread connect it, which may wait longer than the deadline. Raises NoVerbs."""
    async with CancelScope(max(0.0, deadline - time.monotonic())) as scope:
        await run_blocking(queue.meet, far, deadline)
    if scope.cancelled:
        raise NoVerbs(f"{queue.domain.port}: {far.place} did not answer in time")


def has_hung_up(sock: socket.socket) -> bool:
    """Whether its peer has, as far as what it sent before was read. Raises OSError."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
