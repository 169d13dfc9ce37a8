"""What two processes that share rings tell each other over their Unix socket: notes of 16 bytes,
some with descriptors.

    offset  size  field    meaning
         0     1  kind     RING, GOODBYE, SEGMENT, DROPPED, HANDOVER, SPILL
         1     1  fds      how many descriptors came with it
         2     2  zero
         4     4  number   SEGMENT, DROPPED: of the sender's slab; HANDOVER: what the two agreed on
         8     8  size     SEGMENT: bytes of it; else zero

    RING      look at your ring: you said that you sleep
    GOODBYE   the sender has closed; arrays lent either way may still be read
    SEGMENT   the descriptor of a segment of the sender's slab, sent before the first message that
              refers to it
    DROPPED   the sender's slab gave that segment back, and no lease on it is out: it need not stay
              mapped
    HANDOVER  descriptors for whoever set on_handover
    SPILL     the receiving end of a socket for arrays that find no room in shared memory
              (spill.py); once, when first needed

Descriptors come with the first byte of the note that announces them. Those that no note claims
break the protocol at once: else a peer could fill our table of descriptors with notes that have
none.

The socket's end is the peer's death, seen at once. A socket that is full of notes has been rung
already.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shard.errors import PeerLostError, RemoteProtocolError, ShardError

NOTE = struct.Struct("<BBHIQ")
assert NOTE.size == 16  # the table above
RING, GOODBYE, SEGMENT, DROPPED, HANDOVER, SPILL = range(6)
FDS_MAX = 8  # of one note
FD = struct.Struct("i")
FDS_BYTES = socket.CMSG_LEN(FDS_MAX * FD.size)
MSG_CTRUNC = int(socket.MSG_CTRUNC)  # `&` with the member of an enum runs Python code
READ_BYTES = 4096

# A peer that does not read its socket for so long while we hand it a descriptor is taken for dead.
TIMEOUT_MS = 2000

_RING_NOTE = NOTE.pack(RING, 0, 0, 0, 0)
_GOODBYE_NOTE = NOTE.pack(GOODBYE, 0, 0, 0, 0)


class SocketHolder(Protocol):
    """Who owns the socket, and closes it with its last holder: leases.Line."""

    socket: socket.socket


class _Ended:
    """In the place of a line that was let go of."""

    socket = socket.socket()
    socket.close()


class ControlChannel:
    """One end of the socket. Reads in the reactor's thread, writes from any, and holds the line
    while it does.
    """

    def __init__(
        self,
        line: SocketHolder,
        peer: str,
        on_segment: Callable[[int, int, int], None],
        on_dropped: Callable[[int], None],
    ) -> None:
        """on_segment(number, fd, size_bytes) owns the descriptor it is called with."""
        line.socket.setblocking(False)
        self.said_goodbye = False  # the peer did
        self.ended = False  # the peer's end of the socket is closed
        self._on_segment = on_segment
        self._on_dropped = on_dropped
        self.on_handover: Callable[[int, list[int]], None] = _close_all  # owns the descriptors, too
        self.on_spill: Callable[[int], None] = os.close  # owns the descriptor, too
        self._line = line
        self._peer = peer
        self._received = bytearray()  # a note cut short
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """To be watched for reading."""
        return self._line.socket.fileno()

    def ring(self) -> None:
        """Wake the peer."""
        self._say(_RING_NOTE)

    def say_goodbye(self) -> None:
        """Nothing follows."""
        self._say(_GOODBYE_NOTE)

    def _say(self, note: bytes) -> None:
        line = self._line
        try:
            line.socket.send(note)
        except BlockingIOError:
            return  # so full that the peer has been told to look already
        except OSError:
            # gone: our own end of the socket says so to the reactor, which closes with the reason
            return

    def tell_dropped(self, number: int) -> bool:
        """A segment is gone; False when the socket has no room for the note now."""
        line = self._line
        try:
            line.socket.send(NOTE.pack(DROPPED, 0, 0, number, 0))
        except BlockingIOError:
            return False
        except OSError:
            return True  # nobody is there to unmap it
        return True

    def hand_over(self, kind: int, number: int, fds: Sequence[int], size_bytes: int = 0) -> None:
        """Give the peer copies of up to FDS_MAX descriptors. Raises PeerLostError."""
        note = NOTE.pack(kind, len(fds), 0, number, size_bytes)
        line = self._line
        try:
            while True:
                try:
                    socket.send_fds(line.socket, [note], fds)
                    return
                except BlockingIOError as error:
                    poller = select.poll()
                    poller.register(line.socket, select.POLLOUT)
                    if not poller.poll(TIMEOUT_MS):
                        raise PeerLostError(f"{self._peer} does not read its socket") from error
                except OSError as error:
                    raise PeerLostError(f"{self._peer} was lost: {error.strerror}") from error
        finally:
            del line  # else whoever keeps the error keeps the socket, by this frame

    def read(self) -> int:
        """Take in some of what has come; how many bytes, 0 when there is nothing, or will be
        (`ended`).

        Raises RemoteProtocolError, and ShardError when this process has no descriptor left for one
        that came."""
        try:
            data, ancillary, flags, _ = self._line.socket.recvmsg(READ_BYTES, FDS_BYTES)
        except BlockingIOError:
            return 0
        except ConnectionResetError:
            # it died with notes of ours unread; its own have been read by now
            self.ended = True
            return 0
        if data == _RING_NOTE and not (ancillary or flags or self._received):
            return NOTE.size  # a doorbell, which is nearly all that comes
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(fd for (fd,) in FD.iter_unpack(content))
        if flags & MSG_CTRUNC:
            raise ShardError(
                "a descriptor was handed over here, and this process has none left: "
                "raise `ulimit -n`"
            )
        self.ended = not data
        self._received += data
        whole = len(self._received) // NOTE.size * NOTE.size
        notes = bytes(self._received[:whole])
        del self._received[:whole]
        for kind, count, _, number, size_bytes in NOTE.iter_unpack(notes):
            self._understand(kind, count, number, size_bytes)
        if len(self._fds) > (FDS_MAX if self._received else 0):
            raise RemoteProtocolError(f"{len(self._fds)} descriptors came that no note announced")
        return len(data)

    def _understand(self, kind: int, count: int, number: int, size_bytes: int) -> None:
        if count > len(self._fds):
            raise RemoteProtocolError(
                f"note {kind} with {count} descriptors, and {len(self._fds)} came"
            )
        fds = [self._fds.popleft() for _ in range(count)]
        if kind == SEGMENT and count == 1:
            self._on_segment(number, fds[0], size_bytes)
        elif kind == DROPPED and not count:
            self._on_dropped(number)
        elif kind == SPILL and count == 1:
            self.on_spill(fds[0])
        elif kind == HANDOVER and count:
            self.on_handover(number, fds)
        elif kind == GOODBYE and not count:
            self.said_goodbye = True
        elif kind != RING or count:
            _close_all(number, fds)
            raise RemoteProtocolError(
                f"note of kind {kind} with {count} descriptors on the doorbell socket"
            )

    def close(self) -> None:
        """Let go of descriptors that no note has claimed, and of the line."""
        _close_all(0, list(self._fds))
        self._fds.clear()
        self._line = _Ended


def _close_all(number: int, fds: list[int]) -> None:
    """Nobody said what to do with descriptors that a peer hands over."""
    for fd in fds:
        os.close(fd)
