"""Sockets that give and take one byte a call, as a kernel may: every read and write of this process
is a short one.

What is patched is the class, below all that stands on a socket. Untouched: recv() and sendall(), of
whoever connects, and what an acceptor says in its handshake, which it sends into an empty buffer
and takes its room for granted.
"""

from __future__ import annotations

import _socket
import socket
from collections.abc import Callable, Iterable
from typing import Any

from shard.transport.handshake import ACCEPTED, MAGIC


def _send(sock: _socket.socket, data: Any, flags: int = 0) -> int:
    view = memoryview(data).cast("B")
    whole = view[: len(MAGIC)] == MAGIC or view == ACCEPTED
    return _socket.socket.send(sock, view if whole else view[:1], flags)


def _sendmsg(sock: _socket.socket, parts: Iterable[Any], *more: Any) -> int:
    assert not more, "no descriptors over tcp"
    return _send(sock, next(part for part in parts if len(part)))


def _recv_into(sock: _socket.socket, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
    return _socket.socket.recv_into(sock, buffer, 1, flags)


def be_stingy(patch: Callable[[object, str, object], None] = setattr) -> None:
    """In this process, from now on; with monkeypatch.setattr until the end of the test."""
    patch(socket.socket, "send", _send)
    patch(socket.socket, "sendmsg", _sendmsg)
    patch(socket.socket, "recv_into", _recv_into)
