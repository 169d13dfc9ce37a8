"""Connections of several sockets, made: listening and connecting, whatever family the sockets are
of.

The connector opens lane 0, and when it is accepted the other lanes beside each other, each with a
handshake of its own; the acceptor has the connection when all are there (lanes.py). What goes on
over a connection is in laned_connection.py.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shard.errors import RemoteProtocolError, UnreachableError
from shard.loop.reactor import Reactor
from shard.loop.task_group import TaskGroup
from shard.transport import Accept, Listener, Node
from shard.transport.checked import CheckedSocket
from shard.transport.connecting import a_place, meet
from shard.transport.handshake import LANES_MAX, ONLY_LANE, TOKEN_BYTES, Lane
from shard.transport.handshake_io import Door, DoorStatistics, Greeting, identity_of
from shard.transport.identity import PeerIdentity
from shard.transport.laned_connection import LanedConnection
from shard.transport.lanes import HalfMade
from shard.transport.tls import Tls

Made = TypeVar("Made", bound=LanedConnection)


class LanedListener(Listener):
    """One listening socket, and the connections whose lanes have not all come. `make`: of the
    greetings of all its lanes.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        kind: int,
        make: Callable[[list[Greeting]], LanedConnection],
        node: Node,
        reactor: Reactor,
        accept: Accept,
        tls: Tls | None = None,
        checked: bool = False,
    ) -> None:
        self.address = address
        self._make = make
        self._node = node
        self._reactor = reactor
        self._accept = accept
        self._half_made: HalfMade[Greeting] = HalfMade(node.limits.connections_max)
        self._door = Door(sock, node, kind, reactor, self._greeted, tls, LANES_MAX, checked)

    def _greeted(self, greeting: Greeting, fds: list[int]) -> None:
        if fds:
            raise RemoteProtocolError("the peer handed over a descriptor, which nobody asked for")
        exchange, lane = greeting.exchange, greeting.exchange.lane
        lanes = self._half_made.join(
            lane, (greeting.peer_identity, exchange.peer_incarnation), greeting
        )
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
                self._reactor.call_later(
                    self._node.limits.handshake_s, partial(self._give_up, greeting)
                )
            return
        connection = self._make(lanes)
        connection.peer_incarnation, connection.peer_name = (
            exchange.peer_incarnation,
            lanes[0].exchange.caller,
        )
        connection.peer_identity = greeting.peer_identity
        connection.attach(self._reactor)
        self._accept(connection)

    def _give_up(self, first: Greeting) -> None:
        lanes = self._half_made.give_up(first.exchange.lane.token)
        if lanes:
            limit_s = self._node.limits.handshake_s
            self._door.refuse(
                first.peer,
                f"{len(lanes)} of its {first.exchange.lane.count} lanes came within {limit_s:.3g} "
                "s",
            )
        for lane in lanes:
            lane.close()

    def statistics(self) -> DoorStatistics:
        """Who came, and what became of them."""
        return self._door.statistics()

    def close(self) -> None:
        self._door.close()
        for lane in self._half_made.give_up_all():
            lane.close()


@dataclass(frozen=True)
class _ConnectedLane:
    """One socket past its handshake, as its connector has it."""

    sock: socket.socket
    known_as: int
    who: tuple[int, PeerIdentity]  # at its other end


async def connect_lanes(
    address: str,
    dial: Callable[[], Coroutine[Any, Any, socket.socket]],
    make: Callable[[list[socket.socket]], Made],
    node: Node,
    kind: int,
    deadline: float,
    tls: Tls | None = None,
    checked: bool = False,
) -> Made:
    """A connection to `address` until time.monotonic() says `deadline`. Raises as
    Transport.connect().
    """
    count = node.limits.connections_per_peer
    token = secrets.token_bytes(TOKEN_BYTES) if count > 1 else ONLY_LANE.token
    lanes: list[_ConnectedLane | None] = [None] * count

    async def add_lane(number: int) -> None:
        async with a_place(node, address, deadline):
            await dial_lane(number)

    async def dial_lane(number: int) -> None:
        lane = Lane(token, number, count)
        sock = await dial()
        try:
            binding = b""
            if tls is not None:
                sock = channel = await tls.connect(sock, address, deadline)
                binding = channel.binding()
            exchange = await meet(
                sock, address, node, kind, deadline, binding=binding, lane=lane, checked=checked
            )
            who = exchange.peer_incarnation, identity_of(sock, node)
            if exchange.checks is not None:
                sock = CheckedSocket(sock, exchange.checks)
            lanes[number] = _ConnectedLane(sock, exchange.known_as, who)
        except BaseException:
            sock.close()
            raise

    try:
        await add_lane(0)
        # beside each other: each joins what the first has opened
        async with TaskGroup() as group:
            for number in range(1, count):
                group.spawn(add_lane(number))
        connected = [lane for lane in lanes if lane is not None]
        assert len(connected) == count
        first = connected[0]
        if any(lane.who != first.who for lane in connected):
            raise UnreachableError(
                f"{address} leads to several processes by turns: give each an address of its own"
            )
        connection = make([lane.sock for lane in connected])
    except BaseException:
        for made in lanes:
            if made is not None:
                made.sock.close()
        raise
    connection.peer_incarnation, connection.peer_identity = first.who
    connection.known_as = first.known_as
    return connection
