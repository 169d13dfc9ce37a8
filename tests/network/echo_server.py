"""A tcp listener without RPC, in a process of its own: it sends every message back, with its
number.

    python -m tests.network.echo_server JSON

prints its address, and goes on until its standard input ends. An answer's body is the number of the
message since the start of the process, 8 bytes little-endian, and the message's body; its blocks
are the message's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shard import Connection, Limits, Node, Reactor, ShardError, Slab, TcpTransport
from shard.transport import Blocks
from shard.transport.tcp_connection import TcpConnection
from tests.certificates import Files
from tests.network.proxy import set_buffers
from tests.network.stingy import be_stingy
from tests.program import PATIENCE_S, Program

SECRET = b"a secret of these tests"


def limits(handshake_s: float = 5.0, bulk_lanes: int = 0) -> Limits:
    """Of both sides: small, so that a wrong length is soon found, but one host may prove itself as
    often as it likes.
    """
    return Limits(
        body_bytes_max=1 << 20,
        blocks_bytes_max=2 << 20,
        blocks_max=64,
        handshake_s=handshake_s,
        handshakes_max=1024,
        handshakes_per_host_max=1024,
        connections_per_peer=1 + bulk_lanes,
        peer_silent_s=1.0,
    )


def lanes_of(connection: Connection[Any]) -> tuple[socket.socket, ...]:
    """The sockets of a tcp connection."""
    assert isinstance(connection, TcpConnection)
    return connection.sockets


def main(text: str) -> None:
    settings = json.loads(text)
    if settings["stingy"]:
        be_stingy()
    reactor, slab = Reactor(time.monotonic), Slab()
    node = Node(secret=SECRET, incarnation=2, limits=limits(settings["handshake_s"]))
    numbers = itertools.count(1)
    there: set[Connection[Any]] = set()

    def accept(connection: Connection[Any]) -> None:
        def echo(body: memoryview, blocks: Blocks = ()) -> None:
            with contextlib.suppress(ShardError):  # it is gone: on_close says so
                connection.send(next(numbers).to_bytes(8, "little") + bytes(body), list(blocks))

        for sock in lanes_of(connection) if settings["buffer_bytes"] else ():
            set_buffers(sock, settings["buffer_bytes"])
        there.add(connection)
        connection.on_message = echo
        connection.on_close = lambda connection, _: there.discard(connection)

    tls = Files(*settings["tls"]) if settings["tls"] else None
    listener = TcpTransport(node, slab, tls).listen("tcp://127.0.0.1:0", reactor, accept)
    print(listener.address, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if not reactor.poll(time.monotonic()):
            reactor.park(0.02)
    listener.close()
    for connection in list(there):
        connection.close()
    reactor.close()
    slab.close()


class EchoServer(Program):
    """Such a process."""

    def __init__(
        self,
        handshake_s: float = PATIENCE_S,
        tls: Files | None = None,
        stingy: bool = False,
        buffer_bytes: int = 0,
    ) -> None:
        settings = {
            "handshake_s": handshake_s,
            "tls": tls or (),
            "stingy": stingy,
            "buffer_bytes": buffer_bytes,
        }
        super().__init__("tests.network.echo_server", json.dumps(settings))
        host, _, port = self.read_line().removeprefix("tcp://").rpartition(":")
        self.where = host, int(port)

    def descriptors(self) -> int:
        """How many it has open now, beside those of its slab, which keeps segments for the next
        block.
        """
        count = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += not os.readlink(link).startswith("/memfd:prpc.")
        return count


if __name__ == "__main__":
    main(*sys.argv[1:])
