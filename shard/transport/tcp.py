"""The tcp transport: addresses, a port that others may share, names that stand for several
addresses. How the sockets of one connection are made is in laned.py, what goes on over it in
tcp_connection.py."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from shard.errors import AddressInUseError, ShardError, UnreachableError
from shard.loop.reactor import Reactor
from shard.loop.task_group import CancelScope
from shard.loop.waits import run_blocking
from shard.memory.slab import Slab
from shard.transport import Accept, Node, Transport
from shard.transport.connecting import connect_socket, not_reached
from shard.transport.handshake_io import Deal, Greeting
from shard.transport.laned import LanedListener, connect_lanes
from shard.transport.tcp_connection import TcpConnection
from shard.transport.tls import Tls, TlsFiles

KIND = 1  # in the handshake
LISTEN_BACKLOG = 1024
# For all addresses of a name, once one has used up the time: so that each is named with a reason.
SHARE_S_MIN = 0.001
Connected = TypeVar("Connected")


class ResolvedAddress(NamedTuple):
    """One of the addresses that a host's name stands for, as the socket library takes it."""

    family: socket.AddressFamily
    where: Any


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "tcp://host:port", or of another scheme's that meets at a tcp port; IPv6
    hosts stand in brackets. Raises UnreachableError with what is allowed.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or not host:
        raise UnreachableError(
            f"{address!r} is no address: host:port expected, such as 127.0.0.1:9394 or [::1]:9394"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int, scheme: str = "tcp") -> str:
    """The address of a host and port, with brackets around an IPv6 host."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def listening_socket(address: str) -> socket.socket:
    """A tcp socket that listens at "scheme://host:port". Raises AddressInUseError, UnreachableError
    for a name that stands for nothing, ShardError.
    """
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
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
                f"cannot listen at {address}: the port is taken; choose another, "
                "or 0 for any free one"
            ) from error
        raise ShardError(f"cannot listen at {address}: {error.strerror}") from error
    return sock


class TcpListener(LanedListener):
    """Accepts peers at a tcp port; several processes may share the port (shared_port.py). It owns
    the socket and closes it.

    tls: what every connection is encrypted with; None: none is. accept: called with each connection
    once its peer has proved the secret and all its lanes are there.
    """

    def __init__(
        self,
        sock: socket.socket,
        node: Node,
        slab: Slab,
        reactor: Reactor,
        accept: Accept,
        tls: Tls | None,
    ) -> None:
        def make(lanes: list[Greeting]) -> TcpConnection:
            return TcpConnection([one.sock for one in lanes], f"tcp://{lanes[0].peer}", node, slab)

        address = format_address(*sock.getsockname()[:2])
        super().__init__(sock, address, KIND, make, node, reactor, accept, tls, node.tcp_checksum)

    def share(self, deal: Deal) -> None:
        """From now on offer each socket to other processes first (shared_port.py)."""
        self._door.deal = deal


class TcpTransport(Transport):
    """TCP for one process: connections receive into `slab`. With `tls` every connection is
    encrypted, and none is not.

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
        return self.listen_on(listening_socket(address), reactor, accept)

    def listen_on(self, sock: socket.socket, reactor: Reactor, accept: Accept) -> TcpListener:
        """Listen at a socket that listens already, or at a port that another process deals out
        (shared_port.py).
        """
        return TcpListener(sock, self._node, self._slab, reactor, accept, self._tls)

    async def connect(self, address: str, timeout_s: float) -> TcpConnection:
        """As Transport.connect(), at any of the places that the host's name stands for."""
        return await at_each_place(address, timeout_s, self._connect)

    async def _connect(
        self, address: str, place: ResolvedAddress, deadline: float
    ) -> TcpConnection:
        node = self._node
        return await connect_lanes(
            address,
            lambda: dial(address, place, deadline),
            lambda socks: TcpConnection(socks, address, node, self._slab),
            node,
            KIND,
            deadline,
            self._tls,
            node.tcp_checksum,
        )


async def at_each_place(
    address: str,
    timeout_s: float,
    connect: Callable[[str, ResolvedAddress, float], Awaitable[Connected]],
) -> Connected:
    """What connect(address, place, deadline) makes at the first place that answers. A name is
    looked up each time, in a thread of run_blocking(), and every address that it stands for is
    tried, in the order of the system's resolver; those after one have the time that it has left
    them, and it leaves them their share. A look-up that takes longer than `timeout_s` goes on in
    its thread, to nobody's use. Raises UnreachableError, and what connect() does beside it.
    """
    host, port = parse_address(address)
    deadline = time.monotonic() + timeout_s
    places = await _places(address, host, port, deadline)
    refusals = []
    for tried, place in enumerate(places):
        now = time.monotonic()
        share_s = max(SHARE_S_MIN, deadline - now) / (len(places) - tried)
        try:
            return await connect(address, place, now + share_s)
        except UnreachableError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    tries = zip(places, refusals, strict=True)
    raise UnreachableError(
        f"none of the {len(places)} addresses of {address} answers: "
        + "; ".join(f"{place.where[0]}: {refusal}" for place, refusal in tries)
    )


async def _places(address: str, host: str, port: int, deadline: float) -> list[ResolvedAddress]:
    """What the host of `address` stands for; without another thread where it is a number. Raises
    UnreachableError.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        with contextlib.suppress(socket.gaierror):
            return [ResolvedAddress(one[0], one[4]) for one in look_up(flags=socket.AI_NUMERICHOST)]
        async with CancelScope(max(0.0, deadline - time.monotonic())):
            return [ResolvedAddress(one[0], one[4]) for one in await run_blocking(look_up)]
    except (OSError, UnicodeError, RuntimeError) as error:
        # UnicodeError: a label that is empty or longer than DNS has; RuntimeError: no more threads
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreachableError(f"nobody listens at {address}: {text}") from error
    raise UnreachableError(f"{address}: the name was not looked up in time")


async def dial(address: str, place: ResolvedAddress, deadline: float) -> socket.socket:
    """A socket that has connected to that place of `address`, and does not block. Raises
    UnreachableError.
    """
    with contextlib.ExitStack() as closing:
        try:
            sock = closing.enter_context(
                socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            )
            # what a handshake says is short: each waits for no other to be acknowledged
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await connect_socket(sock, place.where, deadline)
        except TimeoutError as error:
            raise UnreachableError(f"nobody answered at {address} in time") from error
        except OSError as error:
            raise not_reached(address, error) from error
        closing.pop_all()
    return sock
