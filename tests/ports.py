"""Ports that stay ours while nobody listens: for who is killed and started again, and for addresses
where nobody is.
"""

from __future__ import annotations

import socket


def hold_port(port: int = 0) -> socket.socket:
    """Bound to a free port of 127.0.0.1, or to that one, and not listening: whoever connects there
    is refused. A listener with SO_REUSEADDR, as ours are, can have the port beside it; who asks for
    any free one, or connects from one, gets another. Closed by the caller."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


def address_of(held: socket.socket) -> str:
    """host:port."""
    return "{}:{}".format(*held.getsockname())
