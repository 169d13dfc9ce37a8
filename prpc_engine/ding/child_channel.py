"""Objects between a supervisor and one of its children, over a pair of Unix sockets: pickles, whose
arrays and tensors are sent and received in their own memory.

    offset  size  field    meaning
         0     4  parts    how many parts follow the sizes, PARTS_MAX at most
         4     4  stream   how many of them, after the first, are the stream of the pickle
         8   8 x parts     their bytes, each
         .     .  header   the first part: a pickle of plain values, which can be read when the
                           object cannot
         .     .  stream   prpc_engine/archive/pickles.py
         .     .  buffers  the others

A pair of sockets, and none of the engine's connections: DI-engine forks its children, with lambdas
in them, out of processes whose engine has threads, and those are not there in a fork.

The supervisor's side never waits: what the socket has no room for is copied, and leaves later. The
child's side waits.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import weakref
from collections import deque
from typing import Any

import numpy as np

from prpc_engine.archive import pickles
from shard import RemoteProtocolError

_HEAD = struct.Struct("<II")
PARTS_MAX = 1 << 16
SENT_AT_ONCE_MAX = 512  # parts of one call; the kernel takes 1024
SOCKET_BYTES = 1 << 20  # asked for: large arrays cross in few steps


class ChildFrame:
    """One object: `header` can be read; content() makes the object, or raises what that raises."""

    def __init__(self, parts: list[Any], stream: int) -> None:
        self.header: Any = pickle.loads(parts[0])
        self._stream, self._buffers = parts[1 : 1 + stream], parts[1 + stream :]

    def content(self) -> Any:
        return pickles.load(self._stream, self._buffers)


def encoded(header: Any, content: Any) -> list[Any]:
    """The bytes of a frame, in pieces: memory of `content` is among them as it is. Raises
    ValueError for what cannot be pickled.
    """
    stream, buffers = pickles.dump(content)
    whole: list[Any] = [pickle.dumps(header, 5), *stream, *buffers]
    parts = [memoryview(each) for each in whole]
    sizes = [part.nbytes for part in parts]
    head = _HEAD.pack(len(parts), len(stream)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return [memoryview(head), *(part.cast("B") for part in parts if part.nbytes)]


class ChildChannel:
    """One end. Owned by one process; one thread sends at a time, and one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._parts: list[Any] = []  # of the frame that is arriving
        self._stream = 0
        self._sizes_left = 0
        self._wanted: list[memoryview] = []  # what is to be filled yet, the next one last
        self._begin()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether flush() is owed once the socket is writable."""
        return bool(self._unsent)

    def send(self, pieces: list[Any]) -> None:
        """Those of encoded(). What does not leave at once is copied: the memory is the caller's
        again. Raises OSError when the other end is gone.
        """
        waiting = not self._unsent
        self._unsent.extend(pieces)
        if waiting:
            self.flush()
        for at in range(len(self._unsent) - len(pieces), len(self._unsent)):
            if at >= 0:
                self._unsent[at] = memoryview(bytes(self._unsent[at]))

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self._socket.sendmsg([*_first(unsent)])
            except BlockingIOError:
                return
            while unsent and sent >= unsent[0].nbytes:
                sent -= unsent.popleft().nbytes
            if sent:
                unsent[0] = unsent[0][sent:]

    def receive(self) -> ChildFrame | None:
        """The next frame that is whole. None: there is none yet, on a socket that does not wait.
        Raises EOFError when the other end is gone, and OSError.
        """
        while True:
            while self._wanted:
                into = self._wanted[-1]
                try:
                    came = self._socket.recv_into(into)
                except BlockingIOError:
                    return None
                if not came:
                    raise EOFError
                if came < into.nbytes:
                    self._wanted[-1] = into[came:]
                else:
                    self._wanted.pop()
            if (frame := self._next()) is not None:
                return frame

    def hang_up(self) -> None:
        """The other end hears that there is no more, and this one, too."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    # -- what arrives ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._head = bytearray(_HEAD.size)
        self._sizes: bytearray | None = None
        self._parts = []
        self._wanted = [memoryview(self._head)]

    def _next(self) -> ChildFrame | None:
        """All that was wanted has come: the frame, or more is wanted."""
        if self._parts:
            frame = ChildFrame(self._parts, self._stream)
            self._begin()
            return frame
        if self._sizes is None:
            count, self._stream = _HEAD.unpack(self._head)
            if not 0 < count <= PARTS_MAX or self._stream >= count:
                raise RemoteProtocolError(f"a frame of {count} parts, 1 to {PARTS_MAX} allowed")
            self._sizes = bytearray(8 * count)
            self._wanted = [memoryview(self._sizes)]
            return None
        # numpy's memory: not filled with zeros first, and arrays on it can be written
        self._parts = [
            np.empty(size, np.uint8) for (size,) in struct.iter_unpack("<Q", self._sizes)
        ]
        self._wanted = [memoryview(part) for part in reversed(self._parts) if part.nbytes]
        return None


def _first(unsent: deque[memoryview]) -> list[memoryview]:
    return [unsent[at] for at in range(min(len(unsent), SENT_AT_ONCE_MAX))]


def channel_pair() -> tuple[ChildChannel, socket.socket]:
    """The supervisor's end, which does not wait and is closed in whatever it forks; and the socket
    that the child makes its end of.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    ours.setblocking(False)
    _made_here.add(ours)
    return ChildChannel(ours), theirs


_made_here: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    """A child that held its siblings' ends would keep them from hearing that their supervisor has
    died.
    """
    for each in list(_made_here):
        each.close()


os.register_at_fork(after_in_child=_close_in_fork)
