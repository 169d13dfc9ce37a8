"""Blocking reads and writes of the side that connects, while the handshake goes on; each ends at a
deadline.
"""

from __future__ import annotations

import contextlib
import socket
import time

from shard.errors import AuthenticationError, PeerLostError
from shard.transport.handshake import TLS_ALERT, TLS_MISSING_TEXT, check_protocol


def receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """`count` bytes from a blocking socket, until time.monotonic() says `deadline`. Raises
    PeerLostError, TimeoutError, AuthenticationError when the peer turns out to speak TLS, and
    ForeignProtocolError when it speaks HTTP/2."""
    received = b""
    while len(received) < count:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        sock.settimeout(remaining_s)
        try:
            data = sock.recv(count - len(received))
        except BlockingIOError:  # of TLS: part of a record came
            continue
        except ConnectionError:
            data = b""
        if not data:
            if received.startswith(TLS_ALERT):
                raise AuthenticationError(TLS_MISSING_TEXT)
            check_protocol(received)
            raise PeerLostError("the peer hung up during the handshake")
        received += data
    return received


def left_s(deadline: float) -> float:
    """How long until time.monotonic() says so; never 0, which a socket takes for "do not wait"."""
    return max(0.001, deadline - time.monotonic())


def say(sock: socket.socket, data: bytes) -> None:
    """Send it. That the peer has hung up is no error yet: why it did may be there to be read."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
