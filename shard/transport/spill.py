"""Arrays that find no room in shared memory, over a Unix socket of their own: slower, and no error.

    block  u64 bytes, then these bytes; block after block, in the order in which records of the ring
           refer to them

The sender makes the socket when it is first needed, and hands its other end over by a note. It
writes a record into the ring only after the last byte of its blocks went into the socket: so they
are there for whoever reads the record, who never waits, and what order there is on the connection
is the order of the ring.

A receiver reads ahead, for else the sender would not come to its record; but no more than one
message may have, and then stops until records have claimed what came.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import RemoteProtocolError, ShardError, ShmFull
from shard.memory.limits import Limits
from shard.memory.unheld import SINK, empty_block
from shard.transport.control_channel import SPILL, ControlChannel

LENGTH = struct.Struct("<Q")
SPILLED = 0xFFFFFFFF  # in a descriptor, in the place of a segment's number
READS_PER_TURN = 8
# of reads for one block: what is in the socket, as all of it is when its record is written, takes a
# few
TURNS_MAX = 256
SEND_BUFFER_BYTES = 1 << 20  # the kernel gives what net.core.wmem_max allows: 208 KiB, mostly


def copy_of(block: NDArray[Any], full: ShmFull) -> NDArray[Any]:
    """An array's bytes, for a socket to take. Raises ShmFull where this process has no memory of
    its own for it either.
    """
    try:
        return block.copy()
    except MemoryError:
        raise ShmFull(
            f"no memory for {block.nbytes} bytes in this process's heap either (see `ulimit -v`): "
            f"{full}"
        ) from full


class Spilled:
    """The arrays of one message that go this way, copied: what of them is still to be written."""

    __slots__ = ("begun", "parts")

    def __init__(self, blocks: list[NDArray[np.uint8]]) -> None:
        self.parts = [
            part for block in blocks for part in (memoryview(LENGTH.pack(block.nbytes)), block.data)
        ]
        # some of it is in the socket, so nothing else may go there before the rest
        self.begun = False


class _Dropped:
    """In the place of a block that this process has no memory for."""

    __slots__ = ("left_bytes", "nbytes", "text")

    def __init__(self, nbytes: int, text: str) -> None:
        self.nbytes = self.left_bytes = nbytes  # still to come
        self.text = text


class SpillWriter:
    """The sending end. Owned by a connection; used by its one writer."""

    def __init__(self, notes: ControlChannel) -> None:
        """Raises PeerLostError, and ShardError without descriptors for it."""
        try:
            self._socket, theirs = socket.socketpair()
        except OSError as error:
            raise ShardError(
                f"no room in shared memory, and no socket to send it over: {error.strerror}; "
                "raise `ulimit -n`"
            ) from error
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            notes.hand_over(SPILL, 0, [theirs.fileno()])
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def write(self, parts: list[memoryview]) -> bool:
        """Write what the socket takes, and drop that from `parts`; whether nothing is left."""
        done = 0
        try:
            while done < len(parts):
                sent = self._socket.send(parts[done])
                if sent == len(parts[done]):
                    done += 1
                else:
                    parts[done] = parts[done][sent:]
        except BlockingIOError:
            pass
        except OSError:
            done = len(parts)  # the peer is gone: the doorbell's socket tells so
        del parts[:done]
        return not parts

    def close(self) -> None:
        """What was written can still be read."""
        self._socket.close()


class SpillReader:
    """The receiving end. Owned by a connection; used in the reactor's thread."""

    def __init__(
        self,
        fd: int,
        peer: str,
        limits: Limits,
        allocate: Callable[[int], NDArray[np.uint8]] = empty_block,
    ) -> None:
        """`allocate` may raise MemoryError: then that array is read and dropped."""
        self._allocate = allocate
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._peer = peer
        self._bytes_max = limits.blocks_bytes_max + limits.body_bytes_max  # of one message
        self._blocks_max = limits.blocks_max + 1
        self._arrived: deque[NDArray[np.uint8] | _Dropped] = deque()
        self._arrived_bytes = 0
        self._length = bytearray(LENGTH.size)
        # the one that is being read; None: its length is
        self._block: NDArray[np.uint8] | _Dropped | None = None
        self._rest = memoryview(self._length)  # of either, still to come
        self.ended = False

    def fileno(self) -> int:
        """To be watched for reading, unless is_full or ended."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether as much is here as one message may have:
        records have to claim some of it first.
        """
        return self._arrived_bytes >= self._bytes_max or len(self._arrived) >= self._blocks_max

    def read(self) -> bool:
        """Take in a bounded part of what has come; whether there was any. Raises
        RemoteProtocolError.
        """
        for turn in range(READS_PER_TURN):
            try:
                count = self._socket.recv_into(self._rest)
            except BlockingIOError:
                return turn > 0
            except ConnectionResetError:
                count = 0
            if not count:
                self.ended = True
                return turn > 0
            self._rest = self._rest[count:]
            if not self._rest:
                self._next()
        return True

    def _next(self) -> None:
        """A length, or a block, is whole."""
        if self._block is None:
            (nbytes,) = LENGTH.unpack(self._length)
            if nbytes > self._bytes_max:
                raise RemoteProtocolError(
                    f"{self._peer} sends an array of {nbytes} bytes, "
                    f"at most {self._bytes_max} allowed"
                )
            try:
                self._block = self._allocate(nbytes)  # not of the slab: it has no room, most likely
                self._rest = self._block.data
            except MemoryError as error:
                self._block = _Dropped(nbytes, str(error))
            else:
                if nbytes:
                    return
        block = self._block
        if isinstance(block, _Dropped):
            if block.left_bytes:
                self._rest = SINK[: min(block.left_bytes, len(SINK))]
                block.left_bytes -= len(self._rest)
                return
        else:
            block.setflags(write=False)
            self._arrived_bytes += block.nbytes
        self._arrived.append(block)
        self._block, self._rest = None, memoryview(self._length)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next block, which a record refers to: all of it is here or in the socket. Raises
        RemoteProtocolError, and MemoryError for one that was dropped."""
        turns_left = TURNS_MAX
        while not self._arrived:
            turns_left -= 1
            if turns_left < 0 or not self.read():
                raise RemoteProtocolError(
                    f"{self._peer} refers to an array of {nbytes} bytes that it never sent"
                )
        block = self._arrived.popleft()
        if block.nbytes != nbytes:
            raise RemoteProtocolError(
                f"{self._peer} refers to an array of {nbytes} bytes, and sent one of {block.nbytes}"
            )
        if isinstance(block, _Dropped):
            raise MemoryError(block.text)
        self._arrived_bytes -= block.nbytes
        return block

    def close(self) -> None:
        """Read no more."""
        self._socket.close()
