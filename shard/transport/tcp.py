"""The tcp transport: addresses, listening, connecting. What goes on over a connection is in tcp_connection.py.

The connector opens lane 0, and when it is accepted the other lanes, each with a handshake of its own; the acceptor has the
connection when all are there (lanes.py).
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from functools import partial
from typing import Any

from shard.errors import AddressInUseError, ShardError, UnreachableError
from shard.handshake import LANES_MAX, ONLY_LANE, TOKEN_BYTES, Lane
from shard.identity import PeerIdentity
from shard.reactor import Reactor
from shard.slab import Slab
from shard.transport import Accept, Listener, Node, Transport
from shard.transport.checked import CheckedSocket
from shard.transport.lanes import HalfMade
from shard.transport.meeting import Deal, Door, DoorStatistics, Greeting, identity_of, meet
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
        self._door = Door(sock, node, KIND, reactor, self._greeted, tls, LANES_MAX, node.tcp_checksum)

    def _greeted(self, greeting: Greeting, fds: list[int]) -> None:
        exchange, lane = greeting.exchange, greeting.exchange.lane
        lanes = self._half_made.join(lane, (greeting.peer_identity, exchange.peer_incarnation), greeting)
        try:
            greeting.accepted()
            if exchange.checks is not None:
                greeting.sock = CheckedSocket(greeting.sock, exchange.checks)
        except OSError:
            for one in lanes or self._half_made.give_up(lane.token):
                one.close()
            raise
        if lanes is None:
            if lane.number == 0:
                self._reactor.call_later(self._node.limits.handshake_s, partial(self._give_up, greeting))
            return
        connection = TcpConnection([one.sock for one in lanes], f"tcp://{lanes[0].peer}", self._node, self._slab)
        connection.peer_incarnation = exchange.peer_incarnation
        connection.peer_identity = greeting.peer_identity
        connection.attach(self._reactor)
        self._accept(connection)

    def _give_up(self, first: Greeting) -> None:
        lanes = self._half_made.give_up(first.exchange.lane.token)
        if lanes:
            limit_s = self._node.limits.handshake_s
            self._door.refuse(first.peer, f"{len(lanes)} of its {first.exchange.lane.count} lanes came within {limit_s:.3g} s")
        for lane in lanes:
            lane.close()

    def share(self, deal: Deal) -> None:
        """From now on offer each socket to other processes first (shared_port.py)."""
        self._door.deal = deal

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
        return self.listen_on(sock, reactor, accept)

    def listen_on(self, sock: socket.socket, reactor: Reactor, accept: Accept) -> TcpListener:
        """Listen at a socket that listens already, or at a port that another process deals out (shared_port.py)."""
        return TcpListener(sock, self._node, self._slab, reactor, accept, self._tls)

    def connect(self, address: str, timeout_s: float) -> TcpConnection:
        """As Transport.connect(). A name is looked up each time, and every address that it stands for is tried, in the order
        of the system's resolver; those after one have the time that it has left them, and it leaves them their share."""
        host, port = parse_address(address)
        deadline = time.monotonic() + timeout_s
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or longer than DNS has
            text = error.strerror if isinstance(error, OSError) else str(error)
            raise UnreachableError(f"nobody listens at {address}: {text}") from error
        refusals = []
        for tried, (family, _, _, _, place) in enumerate(places):
            share_s = _left_s(deadline) / (len(places) - tried)
            try:
                return self._connect(address, family, place, time.monotonic() + share_s)
            except UnreachableError as error:
                refusals.append(error)
        if len(refusals) == 1:
            raise refusals[0]
        tries = zip(places, refusals, strict=True)
        raise UnreachableError(
            f"none of the {len(places)} addresses of {address} answers: "
            + "; ".join(f"{place[4][0]}: {refusal}" for place, refusal in tries)
        )

    def _connect(self, address: str, family: socket.AddressFamily, place: Any, deadline: float) -> TcpConnection:
        count = 1 + self._node.limits.bulk_lanes
        token = secrets.token_bytes(TOKEN_BYTES) if count > 1 else ONLY_LANE.token
        socks: list[socket.socket] = []
        try:
            sock = _dial(address, family, place, deadline)
            who = self._meet(sock, socks, address, deadline, Lane(token, 0, count))
            for number in range(1, count):
                sock = _dial(address, family, place, deadline)
                if self._meet(sock, socks, address, deadline, Lane(token, number, count)) != who:
                    raise UnreachableError(f"{address} leads to several processes by turns: give each an address of its own")
            connection = TcpConnection(socks, address, self._node, self._slab)
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        connection.peer_incarnation, connection.peer_identity = who
        return connection

    def _meet(
        self, sock: socket.socket, socks: list[socket.socket], address: str, deadline: float, lane: Lane
    ) -> tuple[int, PeerIdentity]:
        """Run the handshakes on a socket that has connected, and add it to `socks`, TLS or checksums and all; who is there."""
        socks.append(sock)
        binding = b""
        if self._tls is not None:
            socks[-1] = sock = tls = self._tls.connect(sock, address, deadline)
            binding = tls.binding()
        checked = self._node.tcp_checksum
        exchange = meet(sock, address, self._node, KIND, _left_s(deadline), binding=binding, lane=lane, checked=checked)
        if exchange.checks is not None:
            socks[-1] = sock = CheckedSocket(sock, exchange.checks)
        return exchange.peer_incarnation, identity_of(sock, self._node)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())  # a socket takes no timeout of 0: that is "do not wait"


def _dial(address: str, family: socket.AddressFamily, place: Any, deadline: float) -> socket.socket:
    """A socket that has connected to that place of `address`. Raises UnreachableError."""
    with contextlib.ExitStack() as closing:
        try:
            sock = closing.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.settimeout(_left_s(deadline))
            sock.connect(place)
        except TimeoutError as error:
            raise UnreachableError(f"nobody answered at {address} in time") from error
        except OSError as error:
            raise UnreachableError(f"nobody listens at {address}: {error.strerror or error}") from error
        closing.pop_all()
    return sock
