"""The side that connects, step by step in a reactor: a socket that connects, what is said and heard
before there is a connection, and the handshake. tcp, unix and shm connect like this.

All are coroutines of the control loop, within one deadline of time.monotonic() for the whole. One
that is cancelled leaves the socket to whoever made it, which closes it.

What TLS still holds decrypted is no event of epoll, so each read is tried before it is waited for.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from shard.errors import AuthenticationError, PeerLostError, UnreachableError
from shard.loop.readiness import until_ready
from shard.loop.task_group import CancelScope
from shard.shortage import shortage_in
from shard.transport import Node
from shard.transport.handshake import (
    NONCE_BYTES,
    ONLY_LANE,
    TLS_ALERT,
    TLS_MISSING_TEXT,
    Connector,
    Lane,
    check_protocol,
)


@asynccontextmanager
async def a_place(node: Node, address: str, deadline: float) -> AsyncIterator[None]:
    """One of node.connecting. Raises UnreachableError when there is none in time."""
    if not node.connecting.try_acquire():
        async with CancelScope(max(0.0, deadline - time.monotonic())) as scope:
            await node.connecting.acquire()
        if scope.cancelled:
            raise UnreachableError(
                f"{address} was not tried: as many others as may were being connected to all the "
                "time"
            )
    try:
        yield
    finally:
        node.connecting.release()


def not_reached(address: str, error: OSError) -> UnreachableError:
    """What connecting to an address raises where the system refused that."""
    shortage = shortage_in(f"a connection to {address}", error)
    return UnreachableError(shortage or f"nobody listens at {address}: {error.strerror or error}")


async def connect_socket(sock: socket.socket, place: Any, deadline: float) -> None:
    """Connect a socket that does not block. Raises TimeoutError, OSError."""
    failure = sock.connect_ex(place)
    if failure == errno.EINPROGRESS:
        await until_ready(sock, select.EPOLLOUT, deadline)
        failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failure:
        raise OSError(failure, os.strerror(failure))


async def meet(
    sock: socket.socket,
    address: str,
    node: Node,
    kind: int,
    deadline: float,
    send_proof: Callable[[bytes], None] | None = None,
    binding: bytes = b"",
    lane: Lane = ONLY_LANE,
    checked: bool = False,
) -> Connector:
    """Run the connector's side of the handshake on a connected socket that does not block; the
    exchange, which knows the peer.

    `send_proof(proof)` sends the proof itself when something has to go with it; `binding` is that
    of the TLS channel, if any. Raises UnreachableError, AuthenticationError, RemoteProtocolError,
    and OSError from send_proof.
    """
    timeout_s = max(0.0, deadline - time.monotonic())
    exchange = Connector(
        node.secret,
        kind,
        node.incarnation,
        secrets.token_bytes(NONCE_BYTES),
        binding,
        lane,
        checked,
        node.callers,
    )
    try:
        await say(sock, exchange.start(), deadline)
        while exchange.wanted:
            answer = exchange.feed(await hear(sock, exchange.wanted, deadline))
            if answer and send_proof is not None:
                send_proof(answer)
            elif answer:
                await say(sock, answer, deadline)
    except TimeoutError as error:
        raise UnreachableError(
            f"{address} did not finish the handshake within {timeout_s:.3g} s: it hangs, "
            "or is no prpc peer"
        ) from error
    except (ConnectionError, PeerLostError) as error:
        raise UnreachableError(
            f"{address} hung up during the handshake: too many connections there, "
            "or no prpc peer; its log says which"
        ) from error
    return exchange


async def hear(sock: socket.socket, count: int, deadline: float) -> bytes:
    """`count` bytes. Raises PeerLostError, TimeoutError, AuthenticationError when the peer turns
    out to speak TLS, and ForeignProtocolError when it speaks HTTP/2.
    """
    received = b""
    while len(received) < count:
        try:
            data = sock.recv(count - len(received))
        except BlockingIOError:
            await until_ready(sock, select.EPOLLIN, deadline)
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


async def say(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Send it. That the peer has hung up is no error yet: why it did may be there to be read.
    Raises TimeoutError.
    """
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await until_ready(sock, select.EPOLLOUT, deadline)
        except ConnectionError:
            return
