"""Two peers on one pair of connections in this process: one serves, one asks, and the test turns
the reactor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prpc_engine.archive import Archive
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from shard import DEFAULT_LIMITS, Limits, Reactor, Slab
from shard.transport.memory import pair

TARGET = 16
TURNS = 50  # more than any exchange of these tests takes


class Route:
    """The way to the only server."""

    target = TARGET

    def __str__(self) -> str:
        return "server 0 of 'test'"


class Pair:
    """`client` asks what `served` serves."""

    def __init__(
        self,
        server: ServedObject,
        waiter: Any = None,
        clock: Callable[[], float] = time.monotonic,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.server = server
        self.clock = clock
        self.reactor = Reactor(clock)
        self.slab = Slab()
        one, two = pair(limits, self.slab)
        self.lost: list[Peer] = []
        self.servers = {TARGET: server}  # of the side that serves
        self.client = Peer(
            one, self.reactor, waiter, {}, self.lost.append, Archive(in_process=True)
        )
        self.served = Peer(
            two, self.reactor, None, self.servers, self.lost.append, Archive(in_process=True)
        )
        for connection in (one, two):
            connection.attach(self.reactor)

    def ask(self, method: str, *args: Any, timeout_s: float | None = 20.0) -> Call:
        """Send a request."""
        return self.client.request(Route(), method, method_key(method), args, timeout_s, False)

    def turn(self) -> None:
        """Turn the reactor until all is quiet."""
        for _ in range(TURNS):
            self.reactor.poll(self.clock())

    def close(self) -> None:
        """Hang up and let go of everything."""
        for peer in (self.client, self.served):
            peer.connection.close()
        self.turn()
        self.reactor.close()
        self.slab.close()
