"""How a thread of a test does what is done by coroutines of the control loop, and what it says to a
listener by hand.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from shard import Connection, Node, PeerLostError, Transport, control_loop
from shard.transport.connecting import meet
from shard.transport.handshake import Connector

T = TypeVar("T")


def run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns or raises, once it has."""
    result: T = control_loop().spawn(coroutine).result()
    return result


def connect(transport: Transport, address: str, timeout_s: float) -> Connection[Any]:
    """A connection of that transport."""
    return run_in_loop(transport.connect(address, timeout_s))


def meet_by(
    sock: socket.socket, address: str, node: Node, kind: int, timeout_s: float, **more: Any
) -> Connector:
    """The connector's side of the handshake, on a socket that has connected."""
    sock.setblocking(False)
    return run_in_loop(meet(sock, address, node, kind, time.monotonic() + timeout_s, **more))


def receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """`count` bytes, until time.monotonic() says `deadline`. Raises PeerLostError, TimeoutError."""
    received = b""
    while len(received) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = sock.recv(count - len(received))
        except BlockingIOError:  # of TLS: part of a record came
            continue
        except ConnectionError:
            data = b""
        if not data:
            raise PeerLostError("the peer hung up")
        received += data
    return received
