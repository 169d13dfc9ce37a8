"""Who holds which block: the books of one connection over shared memory, both of its sides.

    lender    writes a block's place and a lease number into a message; the block has one user more
              until the lease returns
    borrower  reads through an array whose end puts the lease number on a list; the list goes back
              in one message

    a lease is  lent      entered in Lendings; the peer has been or will be told the number
                borrowed  entered in Borrowings when the message arrives
                returned  struck off Borrowings by the end of the array, off Lendings by the message
                          that says so
                undone    struck off Lendings because its message was never written
                waiting   on Lendings although the connection has ended: until the peer hangs up

The borrower's array is the root of all views on it (see slab.py), so the lease lasts as long as any
of them. Its end can come in any thread at any place, so it only appends to a list and, when the
reactor is parked, wakes it.

A connection that is closed while arrays are still borrowed leaves its socket half open: the
borrower's half ends with the last of its arrays, and the lender's slab, which looks at the socket
from then on, takes back what was never returned. So no block is used again while a living peer
still reads it, and two that hold blocks of each other do not wait for each other.

A borrower whose lender died keeps its mapping, and with it every byte as it was: its arrays stay
valid for as long as it wants. A lender whose borrower died takes all leases back at once, for the
kernel hung up on the borrower's behalf.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import RemoteProtocolError
from shard.memory.arena import Block
from shard.memory.lease_table import Held, Lease, call_site
from shard.memory.slab import UINT8, Slab, SlabArray

# A lease on the lender's books: block, bytes lent, since when, and in debug mode the call site of
# the send. A tuple, for one is made on every lease.
Entry = tuple[Block, int, float, str | None]


class BorrowedArray(np.ndarray[Any, np.dtype[Any]]):
    """The root of all views on one borrowed block. Never handed out itself: users get a plain
    np.ndarray on it.
    """

    __slots__ = ("borrowings", "lease")
    borrowings: Borrowings
    lease: int

    def __del__(self) -> None:
        try:
            borrowings, lease = self.borrowings, self.lease
        except AttributeError:
            return  # somebody made it from a root reached through `.base`: the lease is the root's
        borrowings.held_since.pop(lease, None)
        borrowings.returned.append(lease)
        borrowings.wake_if_parked()


def is_lent(array: NDArray[Any]) -> bool:
    """Whether an array shows memory that its sender keeps for as long as it lives: a peer's slab or
    our own. One that was copied on its way keeps nothing for us.
    """
    root: Any = array
    while isinstance(root, np.ndarray | memoryview):
        if isinstance(root, BorrowedArray):
            return hasattr(root, "lease")  # else a user made it of a root
        if isinstance(root, SlabArray):
            return hasattr(root, "block")
        root = root.obj if isinstance(root, memoryview) else root.base
    return False


class MeetingSocket:
    """The socket over which two processes met. Held by the connection's Notes and Borrowings, by
    the lender's slab while a peer may read blocks after the connection's end, and by each thread
    that writes to it, for as long as that takes: closes with the last of them, so that nobody
    writes to a number that has been used again."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def hung_up(self, timeout_s: float) -> bool:
        """Whether the peer's half has ended, within so many seconds: it reads no block of ours any
        more.
        """
        poller = select.poll()
        poller.register(self.socket, select.POLLRDHUP)
        return bool(poller.poll(timeout_s * 1000))

    def __del__(self) -> None:
        self.socket.close()


class Borrowings:
    """What we hold of a peer. Lives as long as the connection or any array borrowed over it, and
    ends our half of the line.
    """

    def __init__(
        self, line: MeetingSocket, peer: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`peer` is what the books call the lender; `clock` dates what arrives."""
        self.line = line
        self.peer = peer
        self.held_since: dict[int, tuple[int, float]] = {}  # lease -> bytes, when it arrived
        self.returned: deque[int] = deque()
        self.wake_if_parked: Callable[[], None] = _nobody_waits
        self._clock = clock
        self._pid = os.getpid()
        _borrowings_alive[id(self)] = self

    def borrow(self, memory: memoryview, offset: int, nbytes: int, lease: int) -> NDArray[np.uint8]:
        """A read-only array over the peer's block, 1-D uint8: what the peer writes there shows in
        it.

        Raises RemoteProtocolError for a lease that is held already: it would be returned twice.
        """
        if lease in self.held_since:
            raise RemoteProtocolError(
                f"{self.peer} lent under number {lease} again while we hold that lease"
            )
        root = BorrowedArray((nbytes,), UINT8, memory, offset)
        # of a segment mapped for writing; else numpy made it read-only already
        if not memory.readonly:
            root.setflags(write=False)
        clock = self._clock
        self.held_since[lease] = nbytes, clock()
        root.lease = lease
        root.borrowings = self
        # failpoint: lease.borrowed
        return root.view(np.ndarray)

    def decline(self, lease: int) -> None:
        """Give a lease back that nobody here borrows: its bytes were copied, or dropped. Raises as
        borrow().
        """
        if lease in self.held_since:
            raise RemoteProtocolError(
                f"{self.peer} lent under number {lease} again while we hold that lease"
            )
        self.returned.append(lease)

    def held(self) -> tuple[Held, ...]:
        """What arrays of this process still show of the peer's memory, oldest first. A snapshot,
        from any thread.

        What stands here for long is kept by somebody: the array itself, a slice, a memoryview, a
        tensor made of it.
        """
        held = [
            Held(lease, self.peer, nbytes, since)
            for lease, (nbytes, since) in self.held_since.copy().items()
        ]
        return tuple(sorted(held, key=lambda each: each.since_s))

    def let_go_in_fork(self) -> None:
        """In a child made by fork(): the leases are the parent's, and so is the reactor that ends
        of arrays would wake.
        """
        self.returned = deque()
        self.wake_if_parked = _nobody_waits

    def __del__(self) -> None:
        if self._pid == os.getpid():  # shutdown() ends it for a process we were forked from, too
            with contextlib.suppress(OSError):  # the peer may be gone
                self.line.socket.shutdown(socket.SHUT_WR)


def _nobody_waits() -> None:
    """Returned leases wait for the next turn."""


# By id. A snapshot of the references takes one step, whereas a set may grow while another thread
# iterates over it.
_borrowings_alive: weakref.WeakValueDictionary[int, Borrowings] = weakref.WeakValueDictionary()


def held_by_this_process() -> tuple[Held, ...]:
    """What this process holds of all peers, oldest first, those too whose connection has ended. A
    snapshot.
    """
    alive = [each for ref in _borrowings_alive.valuerefs() if (each := ref()) is not None]
    return tuple(
        sorted((held for each in alive for held in each.held()), key=lambda held: held.since_s)
    )


class Lendings:
    """What a peer holds of ours. Owned by its connection, and by the slab from hand_over() on. Any
    thread may call.
    """

    def __init__(self, slab: Slab, peer: str) -> None:
        """`peer` is what the books call the borrower."""
        self._slab = slab
        # bound once, for they are called for every array
        self._add_user, self._release = slab.lend, slab.release
        self._peer = peer
        self._clock = slab.clock
        self._debug = slab.debug
        self._lent: dict[int, Entry] = {}
        self._next_lease = itertools.count(1).__next__  # atomic
        self._connection_ended = False
        self._bytes_lent = self._bytes_undone = self._bytes_told = 0  # in all
        # set by a connection that has a reactor
        self.tell_drops: Callable[[], None] = _nobody_waits
        slab.open_books(self)

    def __len__(self) -> int:
        return len(self._lent)

    @property
    def bytes_lent(self) -> int:
        """In all, without what was undone. A counter for who scrapes it: one that was told stays,
        though messages that waited then be undone since.
        """
        told = self._bytes_told = max(self._bytes_told, self._bytes_lent - self._bytes_undone)
        return told

    def lend(self, block: Block, nbytes: int) -> int:
        """The peer becomes one more user of the block, of which it sees `nbytes`; the number of its
        lease.
        """
        add_user = self._add_user  # fetched before it is called: Python 3.11 is faster so
        add_user(block)
        return self.pass_on(block, nbytes)

    def pass_on(self, block: Block, nbytes: int) -> int:
        """The same for a block that we allocated only for this peer: it takes our place as the user
        of it.
        """
        next_lease, clock = self._next_lease, self._clock
        self._bytes_lent += nbytes
        lease = next_lease()
        self._lent[lease] = block, nbytes, clock(), call_site() if self._debug else None
        # failpoint: lease.lent
        # ended by another thread, and hand_over() may not have seen this lease: nobody else would
        # end it
        if self._connection_ended:
            self.undo(lease)
        return lease

    def take_back(self, lease: int) -> None:
        """The peer returned it. Raises RemoteProtocolError, and changes nothing, for one it does
        not hold.
        """
        entry = self._lent.pop(lease, None)
        if entry is None:
            raise RemoteProtocolError(
                f"{self._peer} returned lease {lease}, which it does not hold: returned before, "
                f"or never lent ({len(self._lent)} leases are out)"
            )
        # failpoint: lease.taken_back
        release = self._release
        release(entry[0])

    def undo(self, lease: int) -> None:
        """Its message is not going to be written; nothing to do when the peer's end took back all
        leases before.
        """
        entry = self._lent.pop(lease, None)
        if entry is not None:
            self._bytes_undone += entry[1]
            self._release(entry[0])

    def leases(self) -> list[Lease]:
        """A snapshot, oldest first."""
        return [
            Lease(
                number=number,
                borrower=self._peer,
                segment=block.segment,
                offset=block.offset,
                block_bytes=block.size_bytes,
                size_bytes=nbytes,
                since_s=since,
                connection_ended=self._connection_ended,
                call_site=site,
            )
            # copy() is one atomic step
            for number, (block, nbytes, since, site) in self._lent.copy().items()
        ]

    def strike_all(self) -> list[Block]:
        """End all leases: the peer is gone. Their blocks, whose users the caller counts down."""
        blocks = []
        # KeyError: empty; a look before each step could be outdated by another thread
        with contextlib.suppress(KeyError):
            while True:
                blocks.append(self._lent.popitem()[1][0])
        return blocks

    def hand_over(self, line: MeetingSocket) -> None:
        """The connection ends: from now on the slab sees to what the peer still holds."""
        self._connection_ended = True
        if self._lent:
            self._slab.lend_until_hung_up(line, self)
        else:
            self._slab.close_books(self)
