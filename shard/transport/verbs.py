"""The verbs transport: RDMA between two processes, of one host or two, that meet at a tcp port.

    connector                                     acceptor
    handshake (handshake.py) <----------------->
    far end, with its proof -------------------->  makes a queue pair, connects it to that end
           <-------------------------------------  verdict of the handshake, far end or a fault
    connects its queue pair; READY ------------->  both can receive: the connection is made

What a far end is stands in verbs_queue.py, what goes on afterwards in verbs_connection.py. The
device is opened when first needed, and no memory but the slots of a connection and segments of the
slab is ever registered.

    refused where          because
    there is no pyverbs    verbs_device.py says what is missing, and of which release
    TLS is configured      RDMA encrypts nothing, and nothing may go unencrypted
"""

from __future__ import annotations

import contextlib
import socket
import time
from functools import partial

from shard.errors import PeerLostError, RemoteProtocolError, ShardError, UnreachableError
from shard.loop.reactor import Reactor
from shard.memory.slab import Slab
from shard.transport import Accept, Listener, Node, Transport
from shard.transport.connecting import a_place, hear, meet, not_reached, say
from shard.transport.handshake_io import Door, DoorStatistics, Greeting, identity_of
from shard.transport.tcp import (
    ResolvedAddress,
    at_each_place,
    dial,
    format_address,
    listening_socket,
)
from shard.transport.verbs_connection import VerbsConnection, slot_bytes_of
from shard.transport.verbs_device import NoVerbs, chosen_port, loaded
from shard.transport.verbs_queue import (
    FAR_END_BYTES,
    FarEnd,
    VerbsDomain,
    VerbsOptions,
    VerbsQueue,
)

KIND = 4  # in the handshake
READY = b"\x06"


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
        limit_s = listener.node.limits.handshake_s
        reactor = listener.reactor
        self._timer = reactor.call_later(
            limit_s, lambda: self.fail(f"did not introduce its queue pair within {limit_s:.3g} s")
        )
        reactor.watch(greeting.sock.fileno(), self._on_ready)

    def _on_ready(self, events: int) -> None:
        try:
            if self._read():
                self._finish()
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
            if received != READY:
                raise RemoteProtocolError(f"says {received!r}, {READY!r} expected")
            return True
        self._far = FarEnd.unpack(received)
        if self._far.fault:
            raise RemoteProtocolError(f"has no queue pair: {self._far.fault}")
        try:
            self._queue = self._listener.queue()
            self._queue.connect(self._far)
        except NoVerbs as error:
            self._greeting.accepted()
            self._greeting.sock.send(FarEnd(fault=str(error)).pack())
            raise
        self._greeting.accepted()
        # into an empty socket buffer: whole, or the peer is broken
        self._greeting.sock.send(self._queue.near_end().pack())
        return False

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
        self._listener.reactor.unwatch(self._greeting.sock.fileno())
        self._listener.introductions.discard(self)


class VerbsListener(Listener):
    """Accepts peers at a tcp port, and talks to each over a queue pair. It owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        node: Node,
        slab: Slab,
        domain: VerbsDomain,
        reactor: Reactor,
        accept: Accept,
    ) -> None:
        host, port = sock.getsockname()[:2]
        self.address = format_address(host, port, VerbsTransport.scheme)
        self.node, self.reactor = node, reactor
        self.introductions: set[_Introduction] = set()
        self._slab, self._domain, self._accept = slab, domain, accept
        self._door = Door(sock, node, KIND, reactor, self._greeted)

    def _greeted(self, greeting: Greeting, fds: list[int]) -> None:
        if len(self.introductions) >= self.node.limits.connections_max:
            raise RemoteProtocolError(
                f"{len(self.introductions)} peers introduce their queue pairs already, at most "
                f"{self.node.limits.connections_max} may"
            )
        self.introductions.add(_Introduction(self, greeting))

    def queue(self) -> VerbsQueue:
        """One for another peer. Raises NoVerbs."""
        return VerbsQueue(self._domain, slot_bytes_of(self.node.limits.ring_bytes))

    def made(self, greeting: Greeting, queue: VerbsQueue, far: FarEnd) -> None:
        """A peer's queue pair is connected to this one, at both ends."""
        connection = VerbsConnection(
            greeting.sock,
            queue,
            far,
            f"verbs://{greeting.peer}",
            self.node,
            self._slab,
            self._domain,
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
        self._opened: VerbsDomain | None = None

    def refusal(self) -> str | None:
        if self._has_tls:
            return "RDMA encrypts nothing, and this node has TLS: take either"
        if self._opened is not None:
            return None
        try:
            loaded()
            chosen_port(self._options.device)
        except NoVerbs as error:
            return str(error)
        return None

    def cannot_reach(self, address: str) -> str | None:
        return self.refusal()

    @property
    def domain(self) -> VerbsDomain:
        """The device, opened now where it was not. Raises NoVerbs."""
        if self._opened is None:
            self._opened = VerbsDomain(self._slab, self._options)
        return self._opened

    def listen(self, address: str, reactor: Reactor, accept: Accept) -> VerbsListener:
        """At "verbs://host:port", a tcp port of its own. Raises as Transport.listen(), NoVerbs."""
        domain = self.domain
        return VerbsListener(
            listening_socket(address), self._node, self._slab, domain, reactor, accept
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
        node = self._node
        timeout_s = deadline - time.monotonic()
        with contextlib.ExitStack() as closing:
            async with a_place(node, address, deadline):
                try:
                    sock = closing.enter_context(await dial(address, place, deadline))
                    queue = VerbsQueue(self.domain, slot_bytes_of(node.limits.ring_bytes))
                    closing.callback(queue.close)
                    near = queue.near_end().pack()
                    exchange = await meet(
                        sock, address, node, KIND, deadline, partial(_send_with_end, sock, near)
                    )
                    far = FarEnd.unpack(await hear(sock, FAR_END_BYTES, deadline))
                    if far.fault:
                        raise UnreachableError(f"{address} has no queue pair for us: {far.fault}")
                    queue.connect(far)
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
        connection = VerbsConnection(sock, queue, far, address, node, self._slab, self.domain)
        connection.peer_incarnation, connection.known_as = (
            exchange.peer_incarnation,
            exchange.known_as,
        )
        connection.peer_identity = identity_of(sock, node)
        return connection


def _send_with_end(sock: socket.socket, near: bytes, proof: bytes) -> None:
    sock.send(proof + near)
