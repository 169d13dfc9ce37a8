"""One stream socket as a connection: frames, written vectored and received in place.

A message leaves by one sendmsg of header, body and blocks, without joining them. What the kernel
does not take stays with the lane and goes on when the socket is writable; no other message of this
lane overtakes it. Blocks are received straight into the slab's recycled memory when they are large,
so nothing is copied between the kernel and the handler's arrays.

With TLS (tls.py), or checksums (checked.py), the same frames go through a socket that hands out one
record at a time and keeps what did not fit, of which epoll does not tell: so reading goes on after
a full record, and as long as the socket says has_more.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import PeerLostError, RemoteProtocolError, ShardError, ShmFull
from shard.loop.reactor import WARM_TURNS, Reactor
from shard.memory.arena import BLOCK_BYTES_MIN
from shard.memory.device_memory import staged
from shard.memory.slab import Slab
from shard.transport import Buffer, Connection, Node, Traffic
from shard.transport.checked import CheckedSocket
from shard.transport.frame import (
    FRAME_VERSION,
    HEADER,
    HEADER_BYTES,
    PLAIN,
    SMALL_HEADERS,
    FrameDecoder,
    body_offset,
    encode_header,
)
from shard.transport.silence import why_lost
from shard.transport.tls import RECORD_BYTES, TlsSocket

_pack_header = HEADER.pack
READABLE = int(select.EPOLLIN)
_SMALL_BYTES = len(SMALL_HEADERS)

# Reads of one connection in one turn, so that a flood from one peer leaves room for the others.
READS_PER_TURN = 8

# Bodies up to this size are joined with their header: a copy of that size costs less than a second
# buffer.
SHORT_BYTES_MAX = 16 << 10

# A slab that grows takes every page at once. For a block that is only announced it grows by no more
# than this, or than the peer has sent before: else a few bytes would cost gigabytes, and the
# reactor their first touch. Other blocks get pages as bytes come.
ANNOUNCED_BYTES_MAX = 1 << 20

# sendmsg takes at most this many buffers (UIO_MAXIOV); a message of more is written in several
# calls.
BUFFERS_MAX = 1024


class SocketLane(Connection[list[memoryview]]):
    """One stream socket, tcp, Unix or TLS, that carries framed messages after its handshake. It is
    a connection by itself, or one lane of a LanedConnection. It owns the socket.

    is_bulk: it carries the large messages of a connection. Arrays arrive in blocks of `slab`.
    """

    def __init__(
        self, sock: socket.socket, peer: str, node: Node, slab: Slab, is_bulk: bool = False
    ) -> None:
        super().__init__(peer, node.limits)
        self.sock = sock
        # it hands out one at a time
        self._records = sock if isinstance(sock, TlsSocket | CheckedSocket) else None
        # bound once, for the hot path
        self._send_bytes, self._recv_into = sock.send, sock.recv_into
        self._send_parts = sock.sendmsg if self._records is None else self._records.send_parts
        self._slab = slab
        # of the message being written: what the kernel has not taken yet
        self._partial: list[memoryview] = []
        self._decoder = decoder = FrameDecoder(node.limits, self._allocate, is_bulk)
        self._front, self._first_word = decoder.front, decoder.first_word
        self._watched = select.EPOLLIN
        self.peer_hung_up = False
        self._is_behind = False  # messages were read, and wait for another turn
        self._bytes_sent = self._bytes_received = 0
        self._short_bytes_max = SHORT_BYTES_MAX
        sock.setblocking(False)

    def _allocate(self, size: int) -> NDArray[np.uint8]:
        if size < BLOCK_BYTES_MIN or size > max(ANNOUNCED_BYTES_MAX, self._bytes_received):
            return np.empty(size, np.uint8)
        try:
            # empty() at half its price
            return self._slab.wrap(self._slab.allocate(size), size).view(np.ndarray)
        except ShmFull:  # the process's own memory is as good here, only slower the first time
            return np.empty(size, np.uint8)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, body: Buffer, blocks: Sequence[NDArray[Any]] = (), stable: bool = False) -> None:
        """The short way for a message without blocks to a socket with room; send_long() for the
        rest.
        """
        size = len(body)
        if (
            not blocks
            and not self._outbox
            and size <= self._short_bytes_max
            and self._writing.take()
        ):
            try:
                # looked at with the lock held: else another thread's rest could be cut in two
                free = not self._partial
                if free:
                    header = (
                        SMALL_HEADERS[size]
                        if size < _SMALL_BYTES
                        else _pack_header(size, 0, FRAME_VERSION)
                    )
                    message = header + body
                    sent = self._send_bytes(message)
                    self._bytes_sent += sent
                    if sent < len(message):
                        self._partial = [memoryview(message)[sent:]]
            except BlockingIOError:
                self._partial = [memoryview(message)]
            except OSError as error:
                raise self._lost(error) from error
            except BaseException:
                self._cut()
                raise
            finally:
                self._writing.give_back()
            if free:
                if self.reactor is not None:
                    self.reactor.warm_turns = WARM_TURNS
                if self._partial:
                    self._want_writable()
                elif self._outbox:
                    self.drain()
                return
        self.send_long(body, staged(blocks) if blocks else blocks, stable)

    def send_long(self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool) -> None:
        """What does not go the short way."""
        if stable or not blocks or not self._sent_at_once(body, blocks):
            super().send(body, blocks, stable)

    def _sent_at_once(self, body: Buffer, blocks: Sequence[NDArray[Any]]) -> bool:
        """Write blocks that others may change once we return, and keep a copy of what the kernel
        does not take, ahead of all else; False, and nothing has left, when others are writing or
        wait. Raises as send()."""
        if self.error is not None:
            raise self._ended()
        parts = self._parts(body, blocks)
        if self._outbox or not self._writing.take():
            return False
        try:
            if self._partial:
                return False
            self._partial = [memoryview(bytes(part)) for part in self._send(parts)]
            if self._partial:
                self._want_writable()
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self._cut()
            raise
        finally:
            self._writing.give_back()
        if self._outbox:
            self.drain()
        return True

    def _lost(self, error: OSError) -> ShardError:
        """What a send raises whose socket says so; when the connection has ended meanwhile, that is
        why.
        """
        return (
            PeerLostError(f"{self.peer} was lost: {self._why(error)}")
            if self.error is None
            else self._ended()
        )

    def _why(self, error: OSError) -> str:
        return why_lost(error, self.limits.peer_silent_s)

    def _parts(self, body: Buffer, blocks: Sequence[NDArray[Any]]) -> list[memoryview]:
        """What a message is on the wire. Raises LocalProtocolError."""
        header = encode_header(len(body), [block.nbytes for block in blocks], self.limits)
        return [memoryview(header + body), *(block.data for block in blocks if block.nbytes)]

    def _prepare(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[list[memoryview], int]:
        parts = self._parts(body, blocks)
        if not stable:
            parts[1:] = [memoryview(bytes(part)) for part in parts[1:]]
        return parts, sum(map(len, parts))

    def _write(self, item: list[memoryview]) -> bool:
        try:
            if self._partial:
                self._partial = self._send(self._partial)
                if self._partial:
                    self._want_writable()
                    return False
            self._partial = self._send(item)
        except OSError:
            self._partial = []  # the reader will see the end, and says so to everyone
            return True
        except BaseException:
            self._cut()
            raise
        if self._partial:
            self._want_writable()
        return True

    def _cut(self) -> None:
        """Ctrl-C while it wrote: nobody knows what has left, and what follows would be taken for
        the rest. The reader sees it.
        """
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def _send(self, parts: list[memoryview]) -> list[memoryview]:
        """Write what the kernel takes; the rest."""
        if self.reactor is not None:
            self.reactor.warm_turns = WARM_TURNS
        at = 0
        while at < len(parts):
            try:
                sent = (
                    self._send_parts(parts[at : at + BUFFERS_MAX])
                    if len(parts) - at > 1
                    else self._send_bytes(parts[at])
                )
            except BlockingIOError:
                break
            self._bytes_sent += sent
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = parts[at][sent:]
        return parts[at:]

    def _beginning(self, item: list[memoryview]) -> Buffer:
        return item[0][body_offset(item[0]) :]

    def traffic(self) -> Traffic:
        return Traffic(self._bytes_sent, self._bytes_received)

    def own_outbox(self) -> None:
        with self._writing:
            self._partial = [memoryview(bytes(part)) for part in self._partial]
            waiting = [self._outbox.popleft() for _ in range(len(self._outbox))]
            # In front again: other threads append meanwhile.
            self._outbox.extendleft(
                ([memoryview(bytes(part)) for part in parts], size)
                for parts, size in reversed(waiting)
            )
        if self._outbox:
            self.drain()  # what others appended while they could not write

    def _want_writable(self) -> None:
        reactor = self.reactor
        if reactor is not None and self._watched == select.EPOLLIN:
            self._watched = select.EPOLLIN | select.EPOLLOUT
            reactor.call_soon(self._watch)

    def _watch(self) -> None:
        if self.error is None and self.reactor is not None and not self.peer_hung_up:
            self.reactor.watch(self.sock.fileno(), self._on_ready, self._watched, lively=True)

    # -- receiving ---------------------------------------------------------------------------------

    def _on_ready(self, events: int) -> None:
        """The short way when one whole message without blocks is all there is; _read() for the
        rest.
        """
        try:
            if events == READABLE and not self._decoder.more:
                try:
                    count = self._recv_into(self._front)
                except BlockingIOError:
                    return
                if self._first_word[0] == PLAIN + count and count >= HEADER_BYTES:
                    self.on_message(self._front[HEADER_BYTES:count])
                    self._bytes_received += count
                    if self._records is not None:
                        self._read_what_is_kept()
                elif self._take(count, len(self._front)):
                    self._read()
                return
            if events & select.EPOLLOUT:
                self._go_on_writing()
            if events & ~select.EPOLLOUT:
                self._read()
        except OSError as error:
            self.close(PeerLostError(f"{self.peer} was lost: {self._why(error)}"))
        except RemoteProtocolError as error:
            self.close(RemoteProtocolError(f"{self.peer} broke the protocol: {error}"))
        except ShardError as error:  # no memory for a body
            self.close(type(error)(f"{self.peer}: {error}"))

    def _go_on_writing(self) -> None:
        if self._partial and self._writing.take():
            try:
                self._partial = self._send(self._partial)
            finally:
                self._writing.give_back()
        if not self._partial:
            self.drain()
        if not self._partial and not self._outbox:
            self._watched = select.EPOLLIN
            # sent by another thread that still saw us waiting for room
            if self._partial or self._outbox:
                self._watched |= select.EPOLLOUT
            self._watch()

    def _read(self) -> None:
        if self._is_behind:
            return  # what was read comes first, and then epoll tells again
        for _ in range(READS_PER_TURN):
            destination = self._decoder.destination()
            try:
                count = self._recv_into(destination)
            except BlockingIOError:
                return
            if not self._take(count, len(destination)):
                return
        self._read_what_is_kept()

    def _take(self, count: int, asked: int) -> bool:
        """Deliver what `count` more bytes make whole, of `asked` for; whether to read on: the
        socket may have more.
        """
        if not count:
            self._hung_up()
            return False
        self._bytes_received += count
        return self._hand_out(count) and (
            # A plain socket that gave less is empty, most likely, and the reactor sees when it is
            # not; but the rest of a message that has begun is on its way, at the speed of a copy.
            count == asked
            or self._decoder.more
            or (self._records is not None and (count >= RECORD_BYTES or self._records.has_more))
        )

    def _hand_out(self, count: int) -> bool:
        """Hand out the messages that `count` more bytes make whole, as long as the turn has time;
        False: there are more, which another turn hands out, or the connection has ended.
        """
        decoder = self._decoder
        frame = decoder.next_frame(count)
        look_at, every = 1, 0
        delivered = 0
        while frame is not None:
            body, blocks = frame
            if type(blocks) is list:  # else there are none, or no memory for them
                for block in blocks:
                    block.setflags(write=False)
            self.on_message(body, blocks)
            if self.error is not None:
                return False
            if not decoder.more:
                break
            delivered += 1
            if delivered >= look_at and self.reactor is not None:
                if not every:
                    clock, until, every = self.reactor.pace()
                if clock() >= until:
                    self._is_behind = True
                    self.reactor.call_soon(self._go_on_handing_out)
                    return False
                look_at = delivered + every
            frame = decoder.next_frame()
        return True

    def _go_on_handing_out(self) -> None:
        """In another turn than that in which there was no time for all that was read."""
        if self.error is not None:
            return
        self._is_behind = False
        try:
            if self._hand_out(0):
                self._read_what_is_kept()
        except RemoteProtocolError as error:
            self.close(RemoteProtocolError(f"{self.peer} broke the protocol: {error}"))
        except ShardError as error:  # no memory for a body
            self.close(type(error)(f"{self.peer}: {error}"))

    def _hung_up(self) -> None:
        """The peer has, and all it sent over this lane was delivered."""
        self._peer_hung_up(PeerLostError(f"{self.peer} hung up"))

    def hang_up(self) -> None:
        """Send nothing more, so that the peer ends too; what it still sends is read."""
        self._short_bytes_max = -1
        with contextlib.suppress(OSError):  # it is gone already
            # that of TLS would take what still comes for plain bytes
            socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def stop_reading(self) -> None:
        """The peer has hung up on this lane; it stays open all the same."""
        self.peer_hung_up = True
        if self.reactor is not None:
            self.reactor.unwatch(self.sock.fileno())

    def _read_what_is_kept(self) -> None:
        """Next turn, as epoll does not tell of it."""
        if self._records is not None and self._records.has_more and self.reactor is not None:
            self.reactor.call_soon(self._go_on_reading)

    def _go_on_reading(self) -> None:
        if self.error is None and not self.peer_hung_up:
            self._on_ready(select.EPOLLIN)

    # -- life --------------------------------------------------------------------------------------

    def _drive(self, reactor: Reactor) -> None:
        self._watch()
        self._read_what_is_kept()
        if self._partial or self._outbox:
            self._want_writable()

    def _end(self) -> None:
        if self.reactor is not None:
            self.reactor.unwatch(self.sock.fileno())
        # else another thread's bytes could go to whatever has the descriptor next
        with self._writing:
            self.sock.close()
            self._partial = []
        self._decoder.let_go()
