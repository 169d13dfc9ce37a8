"""The side that is called runs the handshake on the sockets that it accepts, step by step; the
other side is in connecting.py.

tcp, unix and shm meet like this; what follows on the socket is theirs. What a stranger can make us
do is bounded:

    time         limits.handshake_s to its turn, and again from there to the proof, however slowly
                 or quickly it sends; the same once more where this process, not the peer, was late
    number       limits.handshakes_max at a time, limits.handshakes_per_host_max from one address;
                 limits.handshakes_waiting_max more wait for their turn, unread; waiting.py says who
                 has to go when more come, or nobody gets on
    bytes        138 of the exchange; over TLS what OpenSSL takes for a handshake, some 50 KiB
    descriptors  its socket, and one that comes with its proof; when the process has none left,
                 those who knock are hung up on
    log          refusals.LINES_PER_WINDOW lines a window

A process of this user that is closed while it connects is not refused, nor is anybody who is gone
right after its proof: they are counted. Whoever else hangs up may not know the secret, and is told
of in the log: a connector with another one says nothing more once it has heard our proof.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import secrets
import select
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shard.errors import AuthenticationError, RemoteProtocolError, ShardError
from shard.loop.reactor import Reactor
from shard.loop.timers import Timer
from shard.transport import Connection, Node
from shard.transport.handshake import HELLO, MAGIC, NONCE_BYTES, Acceptor, Connector, Lane
from shard.transport.identity import PeerIdentity
from shard.transport.last_look import LastLook
from shard.transport.refusals import RefusalLog
from shard.transport.tls import Tls, TlsSocket
from shard.transport.unix_rendezvous import credentials
from shard.transport.waiting import WaitingPeer, WaitingRoom

logger = logging.getLogger("shard")
# How many descriptors come with the connector's proof, at most: shm sends its segment along.
PROOF_FDS_MAX = 1
# A storm of connections leaves room for the traffic of those that are there.
ACCEPTS_PER_TURN = 16
# For others to give descriptors back, when there are none.
ACCEPT_PAUSE_S = 0.1

# While somebody waits: between looks at who has spoken, and from when a peer at its proof may have
# to make room for such a one. A hello is on its way when the connection is there; for a proof, a
# long round trip, twice. 64 places come to 256 turns a second.
RELIEF_S, HELLO_LATE_S, PROOF_LATE_S = 0.05, 0.1, 0.25

Deal = Callable[[socket.socket, str, "Lane | None"], bool]  # socket, host, lane


def identity_of(sock: socket.socket, node: Node) -> PeerIdentity:
    """What the peer has proved, once the handshake is over."""
    return PeerIdentity(
        subjects=sock.subjects() if isinstance(sock, TlsSocket) else (),
        secret=node.secret_name if node.secret else "",
        same_user=sock.family == socket.AF_UNIX and credentials(sock)[1] == os.getuid(),
    )


def know_peer(
    connection: Connection[Any], exchange: Connector, sock: socket.socket, node: Node
) -> None:
    """Enter what the handshake that we began over `sock` told of the peer: who it is, and what we
    are called there.
    """
    connection.peer_incarnation = exchange.peer_incarnation
    connection.known_as = exchange.known_as
    connection.peer_identity = identity_of(sock, node)


class Greeting:
    """The acceptor's side of one socket that was just accepted. Ends in done(self, fds), or in a
    line of the log.

    Owned by its Door; cut after limits.handshake_s, unless something has come by then that was not
    looked at: this process was stopped, or had too much to do. Raises OSError when the peer is gone
    already.
    """

    def __init__(self, door: Door, sock: socket.socket, peer: str, host: str) -> None:
        self.peer = peer
        self.host = host
        self._door = door
        self._node = door.node
        self._reactor = door.reactor
        self._exchange: Acceptor | None = None  # None: the TLS handshake is under way
        self._received = b""
        self._fds: list[int] = []
        sock.setblocking(False)
        self.sock: socket.socket = sock if door.tls is None else door.tls.accept(sock)
        self._may_be_dealt = False
        if door.tls is None:
            self._begin(b"")
            if door.deal is not None:
                self._may_be_dealt = True
                # one event, for the whole hello
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO.size)
        self._began = self._reactor.clock()
        self._timer = LastLook(self._reactor, self._node.limits.handshake_s, self)
        self._reactor.watch(self.sock.fileno(), self._on_ready)

    def _begin(self, binding: bytes) -> None:
        node = self._node
        door = self._door
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._exchange = Acceptor(
            node.secret,
            door.kind,
            node.incarnation,
            nonce,
            binding,
            door.lanes_max,
            door.checked,
            node.callers,
        )
        self._exchange.start()

    def is_late(self, now: float) -> bool:
        """Whether an honest peer would be further by now: its hello is sent when it connects, its
        proof a round trip later.
        """
        is_silent = self._exchange is not None and self._exchange.wanted == HELLO.size
        return now - self._began >= (HELLO_LATE_S if is_silent else PROOF_LATE_S)

    @property
    def exchange(self) -> Acceptor:
        """Once it is done: who the peer is, which lane it asks for, and what checksums begin
        with.
        """
        assert self._exchange is not None
        return self._exchange

    @property
    def peer_identity(self) -> PeerIdentity:
        """What the peer has proved, once it is done."""
        return identity_of(self.sock, self._node)

    @property
    def step(self) -> int:
        """How far it is: it rises with each part of the exchange that has come."""
        if self._exchange is None:
            return 0
        return 1 if self._exchange.wanted == HELLO.size else 2

    def look(self) -> None:
        """Take what has come, and go on; it may be over then."""
        self._on_ready(0)

    def overdue(self, limit_s: float) -> None:
        """The time is over."""
        self.fail(f"did not finish the handshake within {limit_s:.3g} s")

    def _on_ready(self, events: int) -> None:
        try:
            if self._may_be_dealt and self._deal():
                return
            if self._exchange is None and not self._shake():
                return
            done = self._receive()
        except BlockingIOError:
            return
        except ConnectionError as error:
            self._is_gone(error)
            return
        except (OSError, AuthenticationError, RemoteProtocolError) as error:
            if self._exchange is not None and self._exchange.farewell:
                with contextlib.suppress(OSError):
                    self.sock.send(self._exchange.farewell)
            self.fail(str(error))
            return
        if done:
            self._finish()

    def _deal(self) -> bool:
        """Offer the socket to another process, unread; whether that has it now. Raises
        BlockingIOError, OSError.
        """
        hello = self.sock.recv(HELLO.size, socket.MSG_PEEK)
        self._may_be_dealt = False
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        lane = _lane_asked_for(hello)
        if lane is None or not self._door.is_dealt(self.sock, self.host, lane):
            return False
        self._let_go()
        self.sock.close()
        return True

    def _shake(self) -> bool:
        """One step of the TLS handshake; whether it was the last."""
        sock = self.sock
        assert isinstance(sock, TlsSocket)
        event = sock.shake()
        self._reactor.watch(sock.fileno(), self._on_ready, event or select.EPOLLIN)
        if event:
            return False
        self._begin(sock.binding())
        return True

    def _receive(self) -> bool:
        """What has come of the exchange; whether it is over. Raises BlockingIOError, and what
        _on_ready() names.
        """
        exchange = self._exchange
        assert exchange is not None
        missing = exchange.wanted - len(self._received)
        if self.sock.family == socket.AF_UNIX:
            data, fds, _, _ = socket.recv_fds(self.sock, missing, PROOF_FDS_MAX)
            self._fds += fds
            if len(self._fds) > PROOF_FDS_MAX:
                raise RemoteProtocolError(
                    f"the peer sent {len(self._fds)} descriptors, at most {PROOF_FDS_MAX} allowed"
                )
        else:
            data = self.sock.recv(missing)
        if not data:
            raise RemoteProtocolError("hung up during the handshake")
        self._received += data
        if len(self._received) < exchange.wanted:
            exchange.look(self._received)
            return False
        data, self._received = self._received, b""
        answer = exchange.feed(data)
        if answer:
            # 98 bytes into an empty socket buffer: whole, or the peer is broken
            self.sock.send(answer)
            return False
        return True

    def _finish(self) -> None:
        self._let_go()
        try:
            self._door.done(self, self._fds)
            self._fds = []
        except ConnectionError:
            self._door.gave_up()
            self.close()
        except (OSError, ShardError) as error:
            self._door.refuse(self.peer, str(error))
            self.close()

    def accepted(self) -> None:
        """Tell the peer that it may begin. Raises OSError."""
        self.sock.send(self.exchange.verdict)

    def _let_go(self) -> None:
        self._timer.cancel()
        self._reactor.unwatch(self.sock.fileno())
        self._door.forget(self)

    def fail(self, why: str) -> None:
        """Hang up, and log why."""
        self._door.refuse(self.peer, why)
        self._let_go()
        self.close()

    def _is_gone(self, error: ConnectionError) -> None:
        """It hung up, and has not read what it was sent: no connector does so for what it reads."""
        if self.sock.family != socket.AF_UNIX:
            self.fail(str(error))
            return
        self._door.gave_up()
        self._let_go()
        self.close()

    def close(self) -> None:
        """Hang up."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        self.sock.close()


def _lane_asked_for(hello: bytes) -> Lane | None:
    """None for what is no hello: nobody else needs to see it."""
    if len(hello) < HELLO.size or not hello.startswith(MAGIC):
        return None
    *_, number, count, token = HELLO.unpack(hello)
    return Lane(token, number, count)


@dataclass(frozen=True)
class DoorStatistics:
    """Who came to one listening socket, since it was made; and who is there now."""

    greetings: int  # are proving themselves now
    accepted: int  # proved the secret
    refused: int  # proved nothing, broke the protocol, or were too slow
    waiting: int  # wait for their turn
    too_many: int  # hung up on as one more came, and handshakes_waiting_max were waiting
    shed: int  # hung up on because the process had no descriptor left
    gave_up: int = 0  # were closed while they connected: of this user's processes, or after a proof


class Door:
    """A listening socket and the greetings under way. Owned by a listener, which gets
    done(greeting, descriptors).

    `deal`: who may hand a socket to another process before it is greeted here (shared_port.py), and
    says whether it did.

    The spare descriptor: with none left accept() fails, and those who knock would wait for nothing.
    Given up for a moment, it is what they are accepted with, and hung up on.
    """

    def __init__(
        self,
        sock: socket.socket,
        node: Node,
        kind: int,
        reactor: Reactor,
        done: Callable[[Greeting, list[int]], None],
        tls: Tls | None = None,
        lanes_max: int = 1,
        checked: bool = False,
    ) -> None:
        self.node = node
        self.lanes_max = lanes_max
        self.checked = checked
        self.kind = kind
        self.reactor = reactor
        self.tls = tls
        self.deal: Deal | None = None
        self._sock = sock
        self._done = done
        self._greetings: set[Greeting] = set()
        self._per_host: Counter[str] = Counter()
        self._room = WaitingRoom(node.limits.handshakes_waiting_max)
        self._relief: Timer | None = None  # while somebody waits
        self._log = RefusalLog(logger)
        self._accepted = self._refused = self._gave_up = self._too_many = self._shed = 0
        self._begins = False  # _begin_waiting() is to come
        self._out_of_descriptors = False
        self._spare = _spare_descriptor()
        self._pause: Timer | None = None
        sock.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        self.reactor.watch(self._sock.fileno(), self._acceptable)

    def _acceptable(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):  # level-triggered: the rest comes next turn
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it gave up while it waited
                continue
            except OSError as error:
                self._cannot_accept(error)
                return
            if self._out_of_descriptors:
                self._out_of_descriptors = False
                logger.warning(
                    "accepting connections again: %d were closed so far because this process had "
                    "no file descriptor left",
                    self._shed,
                )
            self._greet(sock, address)

    def _greet(self, sock: socket.socket, address: object) -> None:
        host = str(address[0]) if isinstance(address, tuple) else ""
        peer = f"{host}:{address[1]}" if isinstance(address, tuple) else "a local process"
        if host not in self._room and self._has_place(host):
            self._begin(sock, peer, host)
            return
        limit_s = self.node.limits.handshake_s
        displaced = self._room.add(
            WaitingPeer(sock, peer, host, self.reactor, limit_s, self._waited_too_long)
        )
        if displaced is not None:
            self._too_many += 1
            displaced.sock.close()
        if self._relief is None and self._room:
            self._relief = self.reactor.call_later(RELIEF_S, self._relieve)

    def _has_place(self, host: str) -> bool:
        limits = self.node.limits
        free = len(self._greetings) < limits.handshakes_max
        return free and (not host or self._per_host[host] < limits.handshakes_per_host_max)

    def _begin(self, sock: socket.socket, peer: str, host: str) -> None:
        try:
            if sock.family == socket.AF_UNIX and (uid := credentials(sock)[1]) != os.getuid():
                raise AuthenticationError(f"belongs to user {uid}, this process to {os.getuid()}")
            if self.tls is not None and self.is_dealt(sock, host, None):
                sock.close()
                return
            greeting = Greeting(self, sock, peer, host)
        except (OSError, AuthenticationError) as error:
            self.refuse(peer, str(error))
            sock.close()
            return
        self._greetings.add(greeting)
        self._per_host[host] += 1

    def is_dealt(self, sock: socket.socket, host: str, lane: Lane | None) -> bool:
        """Whether another process has that socket now; `lane` is what it asks for, None where TLS
        hides that.
        """
        return self.deal is not None and self.deal(sock, host, lane)

    def _begin_waiting(self) -> None:
        """Places may be free: for those who have spoken first, and then in the order in which they
        came, a host at a time.
        """
        self._begins = False
        for waiting in self._room.spoken():
            if self._has_place(waiting.host):
                self._take_turn(waiting)
        for host in self._room.hosts:
            while host in self._room and self._has_place(host):
                self._take_turn(self._room.first(host))

    def _relieve(self) -> None:
        """Who has spoken takes the places of those that do not get on."""
        self._relief = None
        now = self.reactor.clock()
        late = [greeting for greeting in self._greetings if greeting.is_late(now)]
        random.shuffle(late)
        for waiting in self._room.spoken():
            if not self._has_place(waiting.host):
                is_full = (
                    self._per_host[waiting.host] >= self.node.limits.handshakes_per_host_max
                    and waiting.host
                )
                victim = next(
                    (one for one in late if not is_full or one.host == waiting.host), None
                )
                if victim is None:
                    continue
                late.remove(victim)
                victim.fail(
                    "made room for others: too many prove themselves at a time, "
                    "and it did not get on"
                )
            self._take_turn(waiting)
        if self._room:
            self._relief = self.reactor.call_later(RELIEF_S, self._relieve)

    def _take_turn(self, waiting: WaitingPeer) -> None:
        self._room.leave(waiting)
        self._begin(waiting.sock, waiting.peer, waiting.host)

    def _waited_too_long(self, waiting: WaitingPeer) -> None:
        limit_s = self.node.limits.handshake_s
        text = (
            f"waited {limit_s:.3g} s for its turn: too many prove themselves at a time "
            "(limits.handshakes_max, _per_host_max)"
        )
        self._turn_away(waiting, text)

    def _turn_away(self, waiting: WaitingPeer, why: str) -> None:
        self._room.leave(waiting)
        self.refuse(waiting.peer, why)
        waiting.sock.close()

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            self._log.write(
                self.reactor.clock(),
                f"cannot accept a connection, trying again in {ACCEPT_PAUSE_S} s: {error}",
            )
        elif not self._out_of_descriptors:
            self._out_of_descriptors = True
            logger.warning(
                "no file descriptors left: new connections are closed; raise `ulimit -n`, "
                "or lower limits.connections_max"
            )
        if self._spare >= 0:
            os.close(self._spare)
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    sock, _ = self._sock.accept()
                except OSError:  # nobody waits any more, or another thread took the descriptor
                    break
                sock.close()
                self._shed += 1
        self._spare = _spare_descriptor()
        # The socket is readable, and accepting fails, in every turn until then.
        self.reactor.unwatch(self._sock.fileno())
        self._pause = self.reactor.call_later(ACCEPT_PAUSE_S, self._watch)

    def done(self, greeting: Greeting, fds: list[int]) -> None:
        """Hand over to the listener. Raises what it raises."""
        self._done(greeting, fds)
        self._accepted += 1

    def refuse(self, peer: str, why: str) -> None:
        """Count it, and log it if there were not too many."""
        self._refused += 1
        self._log.write(self.reactor.clock(), f"refused {peer}: {why}")

    def gave_up(self) -> None:
        """Count it."""
        self._gave_up += 1

    def forget(self, greeting: Greeting) -> None:
        """It is over, one way or the other."""
        self._greetings.discard(greeting)
        self._per_host[greeting.host] -= 1
        if not self._per_host[greeting.host]:
            del self._per_host[greeting.host]
        if self._room and not self._begins:
            self._begins = True
            self.reactor.call_soon(self._begin_waiting)

    def statistics(self) -> DoorStatistics:
        """A snapshot."""
        return DoorStatistics(
            greetings=len(self._greetings),
            accepted=self._accepted,
            refused=self._refused,
            gave_up=self._gave_up,
            waiting=len(self._room),
            too_many=self._too_many,
            shed=self._shed,
        )

    def close(self) -> None:
        """Stop listening and hang up on greetings under way."""
        if self._pause is not None:
            self._pause.cancel()
        self.reactor.unwatch(self._sock.fileno())
        self._sock.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        if self._relief is not None:
            self._relief.cancel()
        for waiting in self._room.all():
            self._turn_away(waiting, "the listener closed")
        for greeting in list(self._greetings):
            greeting.fail("the listener closed")


def _spare_descriptor() -> int:
    """One to give up in need; -1 when there is none."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
