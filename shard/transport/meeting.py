"""Two processes meet on a stream socket and run the handshake: blocking where we called, step by step where we were called.

Both tcp and shm meet like this; what follows on the socket is theirs.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable

from shard.errors import AuthenticationError, PeerLostError, RemoteProtocolError, ShardError, UnreachableError
from shard.handshake import ACCEPTED, REFUSED, Acceptor, Connector
from shard.reactor import Reactor
from shard.timers import Timer
from shard.transport import Node

logger = logging.getLogger("shard")
NONCE_BYTES = 32
# How many descriptors come with the connector's proof, at most: shm sends its segment along.
PROOF_FDS_MAX = 1
# A storm of connections leaves room for the traffic of those that are there.
ACCEPTS_PER_TURN = 16
# For others to give descriptors back, when there are none.
ACCEPT_PAUSE_S = 0.1


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes from a blocking socket. Raises PeerLostError, TimeoutError."""
    received = b""
    while len(received) < count:
        data = sock.recv(count - len(received))
        if not data:
            raise PeerLostError("the peer hung up during the handshake")
        received += data
    return received


def meet(
    sock: socket.socket, address: str, node: Node, kind: int, timeout_s: float, send_proof: Callable[[bytes], None] | None = None
) -> int:
    """Run the connector's side on a connected socket; the peer's incarnation. Leaves the socket non-blocking.

    `send_proof(proof)` sends the proof itself when something has to go with it.
    """
    deadline = time.monotonic() + timeout_s
    exchange = Connector(node.secret, kind, node.incarnation, secrets.token_bytes(NONCE_BYTES))
    try:
        sock.settimeout(timeout_s)
        sock.sendall(exchange.start())
        while exchange.wanted:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            answer = exchange.feed(receive_exactly(sock, exchange.wanted))
            if answer and send_proof is not None:
                send_proof(answer)
            elif answer:
                sock.sendall(answer)
    except TimeoutError as error:
        raise UnreachableError(
            f"{address} did not finish the handshake within {timeout_s} s: it hangs, or is no prpc peer"
        ) from error
    except (ConnectionError, PeerLostError) as error:
        raise UnreachableError(f"{address} hung up during the handshake: too many connections there, or no prpc peer") from error
    sock.setblocking(False)
    return exchange.peer_incarnation


class Greeting:
    """The acceptor's side of one socket that was just accepted. Ends in done(socket, incarnation, fds), or in a log line.

    Owned by its listener; cut after limits.handshake_s.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        node: Node,
        kind: int,
        reactor: Reactor,
        done: Callable[[Greeting, list[int]], None],
        gone: Callable[[Greeting], None],
    ) -> None:
        self.sock = sock
        self.peer = peer
        self._reactor = reactor
        self._done = done
        self._gone = gone
        self._exchange = Acceptor(node.secret, kind, node.incarnation, secrets.token_bytes(NONCE_BYTES))
        self._received = b""
        self._fds: list[int] = []
        sock.setblocking(False)
        self._exchange.start()
        self._timer = reactor.call_later(
            node.limits.handshake_s, lambda: self._fail(f"did not finish the handshake within {node.limits.handshake_s} s")
        )
        reactor.watch(sock.fileno(), self._readable)

    @property
    def peer_incarnation(self) -> int:
        """Of the peer, once it is done."""
        return self._exchange.peer_incarnation

    def _readable(self, events: int) -> None:
        try:
            if self.sock.family == socket.AF_UNIX:
                data, fds, _, _ = socket.recv_fds(self.sock, self._exchange.wanted - len(self._received), PROOF_FDS_MAX)
                self._fds += fds
            else:
                data = self.sock.recv(self._exchange.wanted - len(self._received))
            if not data:
                self._fail("hung up during the handshake")
                return
            self._received += data
            if len(self._received) < self._exchange.wanted:
                return
            data, self._received = self._received, b""
            answer = self._exchange.feed(data)
            if answer:
                self.sock.send(answer)  # 80 bytes into an empty socket buffer: whole, or the peer is broken
                return
        except BlockingIOError:
            return
        except AuthenticationError as error:
            with contextlib.suppress(OSError):
                self.sock.send(REFUSED)
            self._fail(str(error))
            return
        except (OSError, RemoteProtocolError) as error:
            self._fail(str(error))
            return
        self._let_go()
        try:
            self._done(self, self._fds)
            self._fds = []
        except (OSError, ShardError) as error:
            logger.warning("refused %s: %s", self.peer, error)
            self.close()

    def accepted(self) -> None:
        """Tell the peer that it may begin. Raises OSError."""
        self.sock.send(ACCEPTED)

    def _let_go(self) -> None:
        self._timer.cancel()
        self._reactor.unwatch(self.sock.fileno())
        self._gone(self)

    def _fail(self, why: str) -> None:
        logger.warning("refused %s: %s", self.peer, why)
        self._let_go()
        self.close()

    def close(self) -> None:
        """Hang up."""
        socket_fds, self._fds = self._fds, []
        for fd in socket_fds:
            socket.close(fd)
        self.sock.close()


class Door:
    """A listening socket and the greetings under way. Owned by a listener."""

    def __init__(
        self, sock: socket.socket, node: Node, kind: int, reactor: Reactor, done: Callable[[Greeting, list[int]], None]
    ) -> None:
        self._sock = sock
        self._node = node
        self._kind = kind
        self._reactor = reactor
        self._done = done
        self._greetings: set[Greeting] = set()
        sock.setblocking(False)
        self._pause: Timer | None = None
        self._watch()

    def _watch(self) -> None:
        self._reactor.watch(self._sock.fileno(), self._acceptable)

    def _acceptable(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):  # level-triggered: the rest comes next turn
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, most likely: it would be readable, and fail, every turn
                logger.warning("cannot accept a connection, trying again in %s s: %s", ACCEPT_PAUSE_S, error)
                self._reactor.unwatch(self._sock.fileno())
                self._pause = self._reactor.call_later(ACCEPT_PAUSE_S, self._watch)
                return
            if len(self._greetings) >= self._node.limits.handshakes_max:
                sock.close()
                continue
            peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a local process"
            self._greetings.add(Greeting(sock, peer, self._node, self._kind, self._reactor, self._done, self._greetings.discard))

    def close(self) -> None:
        """Stop listening and hang up on greetings under way."""
        if self._pause is not None:
            self._pause.cancel()
        self._reactor.unwatch(self._sock.fileno())
        self._sock.close()
        for greeting in list(self._greetings):
            greeting._fail("the listener closed")
