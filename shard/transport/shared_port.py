"""One port for several processes: one of them accepts, and hands each socket to the one that serves
it from then on.

    dealer  in the process with the port: its door (handshake_io.py) offers each socket, once its
            first message can be seen
    taker   in another process: a listener at a DistributedPort, whose accept() returns what it was
            handed

    dealer <── taker  KEY and an eventfd, once: the taker has come
    dealer ──> taker  COME, once: it has been noted
    dealer ──> taker  FIRST or OTHER, with a socket; FIRST ones are counted
    eventfd           grows by one with each FIRST that the taker has closed, so the dealer knows
                      how many are open there

    socket                               handed to
    lane 0 of a connection               the taker with the fewest connections; of equals, who came
                                         first
    lane k of it, by its token           the taker of its lane 0
    lane k with a token that is unknown  nobody
    any, where TLS hides the token       the taker of the host's earlier ones, else the one with the
                                         fewest hosts: each counts as one connection, for ever
    any, where that taker is gone or     nobody
      reads nothing, or there is none
    handed to nobody                     the door's own process serves it, or refuses it

So connections are at most one apart while none ends, and the next ones fill up where some have
ended. A taker that dies takes its connections with it; whoever comes in its place begins with none,
and so gets the next ones.

Why not a listener with SO_REUSEPORT in each process: the kernel hashes sockets over them. The lanes
of one connection would come to different processes; and four connections were at most one apart
over two listeners in 43 % of 300 tries, over four in 9 %.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import secrets
import socket
import struct
import threading
from typing import Any

from shard.errors import UnreachableError
from shard.loop.reactor import Reactor
from shard.transport.handshake import Lane

KEY_BYTES = 16
COME, FIRST, OTHER = b"\x00", b"\x01", b"\x02"
COME_TIMEOUT_S = 30.0  # for the dealer's reactor to turn, on a machine that is starting a whole job
LISTEN_BACKLOG = 256  # as many as a group may have shards
STRANGERS_MAX = 256  # who have come and not shown the key: processes of this user
ACCEPT_PAUSE_S = 0.1  # for others to give descriptors back, when there are none
# Connections that wait for lanes, or hosts: the oldest is forgotten. As many as one listener has
# connections by default.
REMEMBERED_MAX = 16384


class _Taker:
    """A process that takes sockets, as the dealer sees it."""

    def __init__(self, sock: socket.socket, ended_fd: int) -> None:
        self._sock = sock
        self._ended_fd = ended_fd  # -1: closed
        self._open = 0
        self._guard = threading.Lock()  # around both: any thread may ask

    def connections(self) -> int:
        """How many are open there."""
        with self._guard, contextlib.suppress(BlockingIOError):  # none has ended since
            if self._ended_fd >= 0:
                self._open -= os.eventfd_read(self._ended_fd)
        return self._open

    def try_hand(self, sock: socket.socket, kind: bytes) -> bool:
        """Whether it has a copy of the socket now: no, when it reads nothing, or is dying, as the
        end of its socket will say.
        """
        try:
            socket.send_fds(self._sock, [kind], [sock.fileno()])
        except OSError:
            return False
        return True

    def count(self) -> None:
        """One connection more."""
        with self._guard:
            self._open += 1

    def close(self) -> None:
        """Hand it no more."""
        self._sock.close()
        with self._guard:
            os.close(self._ended_fd)
            self._ended_fd = -1


class SocketDistributor:
    """A socket distributor hands the sockets of one port to the processes that serve them.

    Owned by whoever has the node with the port; used in its reactor's thread. Who gets which
    socket: the table at the file's head.

    `name`, `key`: what a taker must know. The name can be read by every process of the host; the
    key cannot.
    """

    def __init__(self, reactor: Reactor) -> None:
        self.name = f"prpc.port.{secrets.token_hex(16)}"
        self.key = secrets.token_bytes(KEY_BYTES)
        self._reactor = reactor
        self._sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._sock.bind(f"\0{self.name}")
        self._sock.listen(LISTEN_BACKLOG)
        self._strangers: set[socket.socket] = set()
        self._takers: dict[socket.socket, _Taker] = {}  # in the order they came
        # by token or host: whose, and how many more sockets
        self._kept: dict[bytes | str, tuple[_Taker, float]] = {}
        self._closed = False
        self._watch()

    def connections(self) -> tuple[int, ...]:
        """How many each taker has open now; in the order they came."""
        return tuple(taker.connections() for taker in list(self._takers.values()))

    def deal(self, sock: socket.socket, host: str, lane: Lane | None) -> bool:
        """Hand a socket to a taker; False: to nobody. `lane`: what its hello says; None: TLS hides
        it.
        """
        opens = lane is not None and lane.number == 0
        key, more = (host, math.inf) if lane is None else (lane.token, lane.count - 1.0)
        taker, kept = None, None if opens else self._kept.pop(key, None)
        if kept is not None and kept[0] in self._takers.values():
            taker, more = kept[0], kept[1] - 1
        is_new = taker is None
        if is_new and (opens or lane is None):
            taker = min(self._takers.values(), key=_Taker.connections, default=None)
        if taker is None or not taker.try_hand(sock, FIRST if opens else OTHER):
            return False
        if is_new:
            taker.count()
        if more > 0:
            self._remember(key, taker, more)
        return True

    def _remember(self, key: bytes | str, taker: _Taker, more: float) -> None:
        if len(self._kept) >= REMEMBERED_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = taker, more

    # -- takers come and go ------------------------------------------------------------------------

    def _watch(self) -> None:
        if not self._closed:
            self._reactor.watch(self._sock.fileno(), self._knock)

    def _knock(self, events: int) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            # it has given up; or there is no descriptor left, and it would be tried in every turn
            self._reactor.unwatch(self._sock.fileno())
            self._reactor.call_later(ACCEPT_PAUSE_S, self._watch)
            return
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid() or len(self._strangers) >= STRANGERS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        self._strangers.add(sock)
        self._reactor.watch(sock.fileno(), lambda _: self._hear(sock))

    def _hear(self, sock: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(sock, KEY_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if sock in self._strangers and len(fds) == 1 and hmac.compare_digest(data, self.key):
            self._strangers.discard(sock)
            self._takers[sock] = _Taker(sock, fds[0])
            # it has died since, as the end of its socket says next
            with contextlib.suppress(OSError):
                sock.send(COME)
            return
        for fd in fds:
            os.close(fd)
        self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._reactor.unwatch(sock.fileno())
        self._strangers.discard(sock)
        taker = self._takers.pop(sock, None)
        if taker is not None:
            taker.close()
        else:
            sock.close()

    def close(self) -> None:
        """Deal no more. What was handed over stays where it is."""
        if self._closed:
            return
        self._closed = True
        self._reactor.unwatch(self._sock.fileno())
        self._sock.close()
        for sock in [*self._strangers, *self._takers]:
            self._forget(sock)


class DistributedPort(socket.socket):
    """In the place of a listening socket: accept() returns what the dealer accepted. Owned by a
    listener.

    `where`: host and port at which the dealer listens. Waits until the dealer has noted it. Raises
    UnreachableError.
    """

    def __init__(self, name: str, key: bytes, where: tuple[str, int]) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._where = where
        self._ended_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.settimeout(COME_TIMEOUT_S)
        try:
            self.connect(f"\0{name}")
            socket.send_fds(self, [key], [self._ended_fd])
            answer = self.recv(len(COME))
        except OSError as error:
            self.close()
            raise UnreachableError(
                f"the process with port {where[1]} does not answer: {error}"
            ) from error
        if answer != COME:
            self.close()
            raise UnreachableError(
                f"the process with port {where[1]} does not know this one: its key is another one"
            )

    def getsockname(self) -> Any:
        return self._where

    def accept(self) -> tuple[socket.socket, Any]:
        """As of a listening socket."""
        kind, fds, _, _ = socket.recv_fds(self, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not kind:
            raise ConnectionResetError(
                errno.ECONNRESET, f"the process with port {self._where[1]} has ended"
            )
        if not fds:  # the kernel closed the socket
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        sock = socket.socket(fileno=fds[0]) if kind == OTHER else _CountedSocket(self, fds[0])
        try:
            return sock, sock.getpeername()
        except OSError as error:
            sock.close()
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "it gave up while it waited"
            ) from error

    def count_ended(self) -> None:
        """A socket that counts was closed."""
        if self.fileno() >= 0:
            os.eventfd_write(self._ended_fd, 1)

    def close(self) -> None:
        if self.fileno() >= 0:
            super().close()
            os.close(self._ended_fd)


class _CountedSocket(socket.socket):
    """One whose end the dealer hears of; also when another object has its descriptor by then, and
    closes this with itself.
    """

    def __init__(self, port: DistributedPort, fd: int) -> None:
        super().__init__(fileno=fd)
        self._port: DistributedPort | None = port

    def close(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.count_ended()
        super().close()
