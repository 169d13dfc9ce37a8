"""Who holds which block: the books of one connection over shared memory, both of its sides.

    lender     writes a block's place and a lease number into a message; the block has one user more until the lease returns
    borrower   reads through an array whose end puts the lease number on a list; the list goes back in one message

The borrower's array is the root of all views on it (see slab.py), so the lease lasts as long as any of them. Its end can
come in any thread at any place, so it only appends to a list and, when the reactor is parked, wakes it.

A connection that is closed while arrays are still borrowed leaves its socket half open: the borrower's half ends with the last of
its arrays, and the lender's slab, which looks at the socket from then on, takes back what was never returned. So no block is
used again while a living peer still reads it, and two that hold blocks of each other do not wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import RemoteProtocolError
from shard.slab import Block, Slab


class BorrowedArray(np.ndarray[Any, np.dtype[Any]]):
    """The root of all views on one borrowed block. Never handed out itself: users get a plain np.ndarray on it."""

    lease = 0
    borrowings: Borrowings | None = None

    def __del__(self) -> None:
        if self.borrowings is not None:
            self.borrowings.returned.append(self.lease)
            self.borrowings.wake_if_parked()


class Line:
    """The socket over which two processes met. Held by the connection's Borrowings, and by the lender's slab while a peer may
    read blocks after the connection's end; closes with the last of them."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def hung_up(self, timeout_s: float) -> bool:
        """Whether the peer's half has ended, within so many seconds: it reads no block of ours any more."""
        poller = select.poll()
        poller.register(self.socket, select.POLLRDHUP)
        return bool(poller.poll(timeout_s * 1000))

    def __del__(self) -> None:
        self.socket.close()


class Borrowings:
    """What we hold of a peer. Lives as long as the connection or any array borrowed over it, and ends our half of the line."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.returned: deque[int] = deque()
        self.wake_if_parked: Callable[[], None] = _nobody_waits
        self._pid = os.getpid()

    def borrow(self, memory: memoryview, offset: int, nbytes: int, lease: int) -> NDArray[np.uint8]:
        """A read-only array over the peer's block, 1-D uint8."""
        root: BorrowedArray = np.ndarray.__new__(BorrowedArray, (nbytes,), np.uint8, memory, offset)
        root.flags.writeable = False
        root.lease = lease
        root.borrowings = self
        return root.view(np.ndarray)

    def __del__(self) -> None:
        if self._pid == os.getpid():  # shutdown() ends it for a process we were forked from, too
            with contextlib.suppress(OSError):  # the peer may be gone
                self.line.socket.shutdown(socket.SHUT_WR)


def _nobody_waits() -> None:
    """Returned leases wait for the next turn."""


class Lendings:
    """What a peer holds of ours. Owned by the connection; lend() from any thread that sends, the rest in the reactor's."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._lent: dict[int, Block] = {}
        self._next_lease = itertools.count(1).__next__  # atomic
        self.bytes_lent = 0  # in all

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, block: Block, nbytes: int) -> int:
        """Note a lease on `nbytes` of `block`, which already counts the peer as a user; its number."""
        self.bytes_lent += nbytes
        lease = self._next_lease()
        self._lent[lease] = block
        return lease

    def take_back(self, lease: int) -> None:
        """The peer returned it. Raises RemoteProtocolError for one it does not hold."""
        block = self._lent.pop(lease, None)
        if block is None:
            raise RemoteProtocolError(f"lease {lease} was returned, which is not held")
        self._slab.release(block)

    def hand_over(self, line: Line) -> None:
        """The connection ends: from now on the slab sees to what the peer still holds."""
        blocks = list(self._lent.values())
        self._lent.clear()
        if blocks:
            self._slab.lend_until_hung_up(line, blocks)
