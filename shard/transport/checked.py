"""A checksum around a stream socket, for links and cards that are not trusted to keep bytes: the
same calls as on a plain one.

    offset  size  field     meaning
         0     4  length    bytes of payload, 1 to RECORD_BYTES
         4     4  head      checksum of all said before in this direction, and of length
         8     n  payload   a piece of the stream
       8+n     4  tail      checksum of all said before, of length and payload

All integers little-endian. A checksum is CRC-32 (zlib.crc32) that goes on from record to record,
head and tail themselves apart; it begins with that of both hellos of the handshake, whose nonces
are random, and of who speaks. So it finds, besides bits that changed on the way, a piece that is
missing, comes twice or late, or was said on another connection; with a head of its own a wrong
length is found before anybody waits for bytes that never come. What is not right goes to nobody: a
payload is given out when its tail is checked. It proves nothing against somebody who means harm:
TLS does, and has no use for this (handshake.py).

What it costs is paid where it is on: a copy of all that comes in, one pass of zlib over all that
goes either way, and some 12 bytes a record. As with TLS a piece counts as sent when all of its
record is gone; who is told BlockingIOError offers the very same bytes again.
"""

from __future__ import annotations

import errno
import socket
import struct
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from shard.errors import RemoteProtocolError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# of payload: what is held until its tail has come; larger ones are no faster
RECORD_BYTES = 64 << 10
HEAD = struct.Struct("<II")
TAIL = struct.Struct("<I")
assert HEAD.size == 8  # the table above
LENGTH_BYTES = 4
STAGING_BYTES = 2 * RECORD_BYTES  # a whole record, and what comes with it
assert HEAD.size + RECORD_BYTES + TAIL.size <= STAGING_BYTES
# a payload up to that is joined with head and tail: a copy costs less than two more buffers
JOINED_BYTES_MAX = 16 << 10


class CheckedSocket(socket.socket):
    """A socket past its handshake, taken over from `sock`, with `checks` as the handshake says.
    Like a plain one, it raises BlockingIOError where it would have to wait, and answers 0 when the
    peer hung up, within a record too."""

    has_more: bool  # received and not yet given out: epoll does not tell of it

    def __init__(self, sock: socket.socket, checks: tuple[int, int]) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self._before = sock
        self._sent_check, self._received_check = checks
        self._rest = memoryview(b"")  # of the record under way: what the kernel has not taken
        self._rest_payload_bytes = 0
        # left as the system gives it: an idle one costs a page
        self._staging = np.empty(STAGING_BYTES, np.uint8).data
        self._start = self._end = 0  # received, and no checked record yet
        self._given = self._checked = 0  # payload that is checked, and not given out
        self.has_more = False

    def close(self) -> None:
        super().close()
        self._before.close()  # without a descriptor, but somebody may count it (shared_port.py)

    # -- sending: one writer at a time -------------------------------------------------------------

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """A piece of `data`, or BlockingIOError:
        then the next call must begin with the same bytes.
        """
        return self._send_record(memoryview(data)[:RECORD_BYTES])

    def send_parts(self, parts: Iterable[memoryview]) -> int:
        """As sendmsg() on a plain socket: a piece of what the parts come to. Small ones share a
        record.
        """
        piece = bytearray()
        for part in parts:
            if not piece and len(part) >= RECORD_BYTES:
                return self.send(part)
            piece += part[: RECORD_BYTES - len(piece)]
            if len(piece) == RECORD_BYTES:
                break
        return self._send_record(memoryview(piece))

    def _send_record(self, payload: memoryview) -> int:
        if self._rest:
            self._rest = self._rest[super().send(self._rest) :]
            size = self._rest_payload_bytes
        else:
            size = len(payload)
            head_check = zlib.crc32(size.to_bytes(LENGTH_BYTES, "little"), self._sent_check)
            self._sent_check = zlib.crc32(payload, head_check)
            parts: list[bytes | memoryview] = [
                HEAD.pack(size, head_check),
                payload,
                TAIL.pack(self._sent_check),
            ]
            if size <= JOINED_BYTES_MAX:
                parts = [b"".join(parts)]
            try:
                sent = super().sendmsg(parts)
            except BlockingIOError:
                sent = 0
            if sent < HEAD.size + size + TAIL.size:
                self._rest, self._rest_payload_bytes = memoryview(b"".join(parts))[sent:], size
        if self._rest:
            raise BlockingIOError(errno.EAGAIN, "no room for a whole record")
        return size

    # -- receiving: in the reactor's thread --------------------------------------------------------

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """What fits of one record. Raises RemoteProtocolError for one that is not as the peer sent
        it.
        """
        while self._given == self._checked and not self._check_next():
            try:
                count = super().recv_into(self._room())
            except BlockingIOError:
                # the rest of a record is still to come, and epoll tells of that
                self.has_more = False
                raise
            if not count:
                return 0
            self._end += count
        view = memoryview(buffer)
        count = min(len(view), self._checked - self._given)
        view[:count] = self._staging[self._given : self._given + count]
        self._given += count
        self.has_more = self._given < self._checked or self._start < self._end
        return count

    def _room(self) -> memoryview:
        """Where the next bytes belong; never empty, and all that was checked is given out."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == STAGING_BYTES:
            rest = bytes(self._staging[self._start : self._end])
            self._staging[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._staging[self._end :]

    def _check_next(self) -> bool:
        """Take the next record out of what was received; False until it is whole."""
        start, staging = self._start, self._staging
        payload = start + HEAD.size
        if payload > self._end:
            return False
        length, head_check = HEAD.unpack_from(staging, start)
        if zlib.crc32(staging[start : start + LENGTH_BYTES], self._received_check) != head_check:
            raise RemoteProtocolError(
                "a record's head does not have the checksum that was said: "
                "bytes changed on their way"
            )
        if not 1 <= length <= RECORD_BYTES:
            raise RemoteProtocolError(f"record of {length} bytes, 1 to {RECORD_BYTES} are allowed")
        end = payload + length
        if end + TAIL.size > self._end:
            return False
        check = zlib.crc32(staging[payload:end], head_check)
        if TAIL.unpack_from(staging, end)[0] != check:
            raise RemoteProtocolError(
                f"{length} bytes do not have the checksum that was said: they changed on their way"
            )
        self._received_check = check
        self._given, self._checked, self._start = payload, end, end + TAIL.size
        return True
