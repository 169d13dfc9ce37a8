"""The tcp transport: addresses, listening, connecting. What goes on over a connection is in tcp_connection.py.

The connector opens lane 0, and when it is accepted the other lanes, each with a handshake of its own; the acceptor has the
connection when all are there (lanes.py).
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial

from shard.errors import AddressInUseError, ShardError, UnreachableError
from shard.handshake import LANES_MAX, ONLY_LANE, TOKEN_BYTES, Lane
from shard.identity import PeerIdentity
from shard.reactor import Reactor
from shard.slab import Slab
from shard.transport import Accept, Listener, Node, Transport
from shard.transport.lanes import HalfMade
from shard.transport.meeting import Door, DoorStatistics, Greeting, identity_of, meet
from shard.transport.tcp_connection import TcpConnection
from shard.transport.tls import Tls, TlsFiles

KIND = 1  # in the handshake
LISTEN_BACKLOG = 1024


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "tcp://host:port"; IPv6 hosts stand in brackets. Raises UnreachableError with what is allowed."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or not host:
        raise UnreachableError(f"{address!r} is no address: host:port expected, such as 127.0.0.1:9394 or [::1]:9394")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """The address of a host and port, with brackets around an IPv6 host."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class TcpListener(Listener):
    """One listening socket, and the connections whose lanes have not all come."""

    def __init__(self, sock: socket.socket, node: Node, slab: Slab, reactor: Reactor, accept: Accept, tls: Tls | None) -> None:
        self.address = format_address(*sock.getsockname()[:2])
        self._node = node
        self._slab = slab
        self._reactor = reactor
        self._accept = accept
        self._half_made: HalfMade[Greeting] = HalfMade(node.limits.connections_max)
        self._door = Door(sock, node, KIND, reactor, self._greeted, tls, LANES_MAX)

    def _greeted(self, greeting: Greeting, fds: list[int]) -> None:
        lane = greeting.lane
        lanes = self._half_made.join(lane, (greeting.peer_identity, greeting.peer_incarnation), greeting)
        try:
            greeting.accepted()
        except OSError:
            for one in lanes or self._half_made.give_up(lane.token):
                one.close()
            raise
        if lanes is None:
            if lane.number == 0:
                self._reactor.call_later(self._node.limits.handshake_s, partial(self._give_up, greeting))
            return
        connection = TcpConnection([one.sock for one in lanes], f"tcp://{lanes[0].peer}", self._node, self._slab)
        connection.peer_incarnation = greeting.peer_incarnation
        connection.peer_identity = greeting.peer_identity
        connection.attach(self._reactor)
        self._accept(connection)

    def _give_up(self, first: Greeting) -> None:
        lanes = self._half_made.give_up(first.lane.token)
        if lanes:
            limit_s = self._node.limits.handshake_s
            self._door.refuse(first.peer, f"{len(lanes)} of its {first.lane.count} lanes came within {limit_s:.3g} s")
        for lane in lanes:
            lane.close()

    def statistics(self) -> DoorStatistics:
        """Who came, and what became of them."""
        return self._door.statistics()

    def close(self) -> None:
        self._door.close()
        for lane in self._half_made.give_up_all():
            lane.close()


class TcpTransport(Transport):
    """TCP for one process: connections receive into `slab`. With `tls` every connection is encrypted, and none is not.

    Raises ShardError for files of `tls` that cannot be used.
    """

    scheme = "tcp"

    def __init__(self, node: Node, slab: Slab, tls: TlsFiles | None = None) -> None:
        self._node = node
        self._slab = slab
        self._tls = None if tls is None else Tls(tls)

    def refusal(self) -> str | None:
        return None

    def cannot_reach(self, address: str) -> str | None:
        return None

    def listen(self, address: str, reactor: Reactor, accept: Accept) -> TcpListener:
        host, port = parse_address(address)
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except socket.gaierror as error:
            raise UnreachableError(f"cannot listen at {address}: {error.strerror}") from error
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(LISTEN_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"cannot listen at {address}: the port is taken; choose another, or 0 for any free one"
                ) from error
            raise ShardError(f"cannot listen at {address}: {error.strerror}") from error
        return TcpListener(sock, self._node, self._slab, reactor, accept, self._tls)

    def connect(self, address: str, timeout_s: float) -> TcpConnection:
        host, port = parse_address(address)
        deadline = time.monotonic() + timeout_s
        count = 1 + self._node.limits.bulk_lanes
        token = secrets.token_bytes(TOKEN_BYTES) if count > 1 else ONLY_LANE.token
        socks: list[socket.socket] = []
        try:
            sock = self._dial(address, lambda: socket.create_connection((host, port), timeout_s))
            who = self._meet(sock, socks, address, deadline, Lane(token, 0, count))
            for number in range(1, count):
                sock = self._dial(address, lambda: _another(socks[0], deadline))
                if self._meet(sock, socks, address, deadline, Lane(token, number, count)) != who:
                    raise UnreachableError(f"{address} leads to several processes by turns: give each an address of its own")
            connection = TcpConnection(socks, f"tcp://{host}:{port}", self._node, self._slab)
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        connection.peer_incarnation, connection.peer_identity = who
        return connection

    @staticmethod
    def _dial(address: str, connect: Callable[[], socket.socket]) -> socket.socket:
        try:
            return connect()
        except TimeoutError as error:
            raise UnreachableError(f"nobody answered at {address} in time") from error
        except OSError as error:  # a name that cannot be resolved, too
            raise UnreachableError(f"nobody listens at {address}: {error.strerror or error}") from error

    def _meet(
        self, sock: socket.socket, socks: list[socket.socket], address: str, deadline: float, lane: Lane
    ) -> tuple[int, PeerIdentity]:
        """Run the handshakes on a socket that has connected, and add it to `socks`, TLS and all; who is there."""
        socks.append(sock)
        binding = b""
        if self._tls is not None:
            socks[-1] = sock = tls = self._tls.connect(sock, address, deadline)
            binding = tls.binding()
        incarnation = meet(sock, address, self._node, KIND, _left_s(deadline), binding=binding, lane=lane)
        return incarnation, identity_of(sock, self._node)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())  # a socket takes no timeout of 0: that is "do not wait"


def _another(first: socket.socket, deadline: float) -> socket.socket:
    """A socket to where that one leads: a name may stand for several hosts."""
    sock = socket.socket(first.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_left_s(deadline))
        sock.connect(first.getpeername())
    except BaseException:
        sock.close()
        raise
    return sock
