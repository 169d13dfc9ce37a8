"""A server over tcp alone, without a master, for a test that cuts the network to it.

    python -m tests.prpc_engine.silent_server HOST PEER_SILENT_S

prints its address and serves Busy until its standard input ends.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from shard import Connection, Limits, Node, Reactor, Slab, TcpTransport
from tests.prpc_engine.peers import TARGET


class Busy:
    def echo(self, value: Any) -> Any:
        return value

    def compute(self, seconds: float) -> float:
        """Keeps the whole process busy; nothing is read meanwhile."""
        time.sleep(seconds)
        return seconds

    async def wait(self) -> None:
        await self.reactor.sleep(3600.0)

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor


def main(host: str, peer_silent_s: str) -> None:
    reactor, slab = Reactor(time.monotonic), Slab()
    node = Node(secret=b"secret", incarnation=2, limits=Limits(peer_silent_s=float(peer_silent_s)))
    server = ServedObject("test", 0, TARGET, Busy(reactor))
    peers: list[Peer] = []

    def accept(connection: Connection[Any]) -> None:
        peers.append(Peer(connection, reactor, None, {TARGET: server}, lambda peer: None))

    listener = TcpTransport(node, slab).listen(f"tcp://{host}:0", reactor, accept)
    print(listener.address, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if not reactor.poll(time.monotonic()):
            reactor.park(0.05)
    listener.close()
    for peer in peers:
        peer.connection.close()
    reactor.close()
    slab.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
