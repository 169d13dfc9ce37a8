"""One of two processes that talk over a connection in shared memory, in all the ways there are, and
check every byte.

Both run this same code: each sends a stream of messages that the other can work out by itself,
small ones, arrays that travel in the record, arrays that are lent out of the slab or copied into
it, and bodies too large for the ring. Each keeps what it was lent for a while, so that leases
return late and in another order. A party never runs far ahead of the other, so both often wait,
asleep, and are woken by the doorbell.

The first party closes when it has sent and received everything; the second ends when it is told so,
or that the first is lost.
"""

from __future__ import annotations

import gc
import socket
import time
import zlib
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard import Connection, Limits, PeerLostError, Reactor, Slab
from shard.memory import slab
from shard.memory.segment import Segment
from shard.transport import Blocks
from shard.transport.shm_connection import INLINE_BYTES_MAX, connection_over
from tests.faults.zygote import Life

RING_BYTES = 16 << 10  # so small that messages of 3 KB wrap, and fill it
LIMITS = Limits(ring_bytes=RING_BYTES)
# of a child's slab: reserving the usual 8 MB takes longer than the rest of its life
SEGMENT_BYTES_FIRST = 256 << 10
WINDOW = 3  # messages sent ahead of those received
HELD_MAX = 4  # messages whose blocks are kept
PARK_S = 0.05  # one sleep; what should end it is a doorbell
DEADLINE_S = 60.0  # means that it hangs

Message = tuple[bytes, list[NDArray[np.uint8]]]


def message_of(seed: int, number: int) -> Message:
    """Body and blocks of a message of one stream."""
    crc = zlib.crc32(number.to_bytes(8, "little"), seed)
    body = number.to_bytes(8, "little") + bytes([crc & 0xFF]) * (crc >> 8 & 0xFF)
    sizes: tuple[int, ...] = ()
    way = number % 5
    if way == 1:
        sizes = (crc % 1000, 0)
    elif way == 2:
        sizes = (INLINE_BYTES_MAX + crc % 5000,)
    elif way == 3:
        sizes = (INLINE_BYTES_MAX + crc % 3000, 700, INLINE_BYTES_MAX + crc % 7000)
    elif way == 4:
        body *= 12 + 8 * RING_BYTES // len(body) * (crc & 1)  # some bodies larger than a record
    return body, [(np.arange(size, dtype=np.uint32) + crc).astype(np.uint8) for size in sizes]


class Party:
    """One side. Owns its connection and reactor; the slab is the caller's."""

    def __init__(
        self,
        sock: socket.socket,
        segment: Segment,
        is_first: bool,
        seed: int,
        end: int,
        own_slab: Slab,
        life: Life | None = None,
    ) -> None:
        self.sent = self.received = 0
        self.error: Exception | None = None
        self.told_at_s = 0.0
        self.wrong: list[str] = []  # what did not arrive as it was sent
        self._life = life
        self._is_first = is_first
        self._seeds = (seed, seed + 1) if is_first else (seed + 1, seed)
        self._end = end
        self._slab = own_slab
        self._held: deque[tuple[int, Blocks]] = deque()
        self.reactor = Reactor(time.monotonic)
        self._connection = connection_over(
            sock, segment, is_first, "the other party", LIMITS, own_slab
        )
        self._connection.on_message = self._on_message
        self._connection.on_close = self._on_close
        self._connection.attach(self.reactor)

    def _on_message(self, body: memoryview, blocks: Blocks = ()) -> None:
        expected_body, _ = message_of(self._seeds[1], self.received)
        if body != expected_body:
            self.wrong.append(f"the body of message {self.received}")
        self._check_blocks(self.received, blocks, "as it came")
        self._held.append((self.received, list(blocks)))
        self.received += 1

    def _check_blocks(self, number: int, blocks: Blocks, when: str) -> None:
        _, expected = message_of(self._seeds[1], number)
        if len(blocks) != len(expected) or not all(map(np.array_equal, blocks, expected)):
            self.wrong.append(f"a block of message {number}, {when}")

    def _on_close(self, connection: Connection[Any], error: Exception) -> None:
        if self.error is not None:
            self.wrong.append(f"told twice: {self.error!r}, {error!r}")
        self.error = error
        self.told_at_s = time.monotonic()

    def step(self) -> None:
        """Send what may be sent, give up what was held long enough, turn the reactor once, sleep
        when there is nothing.
        """
        if self._life is not None:
            self._life.sign()
            if self.error is None:
                # in the ring: no death of ours takes them back
                self._life.done = self.sent - self._connection.outbox_messages
        while self.error is None and self.sent < min(self._end, self.received + WINDOW):
            try:
                self._send()
            except PeerLostError:
                break  # on_close says so as well
        while len(self._held) > HELD_MAX:
            self._let_go(self.received % 2)
        if not self.reactor.poll(time.monotonic()) and self.error is None:
            self.reactor.park(PARK_S)
        if (
            self._is_first
            and self.error is None
            and self.sent == self.received == self._end
            and not self._connection.outbox_messages
        ):
            self._connection.close()

    def _send(self) -> None:
        body, blocks = message_of(self._seeds[0], self.sent)
        if self.sent % 2:  # every other message takes arrays that live in the slab already
            mine = [
                self._slab.empty(len(block), np.uint8) if block.nbytes else block
                for block in blocks
            ]
            for array, block in zip(mine, blocks, strict=True):
                array[:] = block
            blocks = mine
        self._connection.send(body, blocks)
        self.sent += 1

    def _let_go(self, index: int) -> None:
        number, blocks = self._held[index]
        self._check_blocks(number, blocks, "after it was kept")
        del self._held[index]

    def finish(self) -> None:
        """After on_close: give up everything, and check what the dead have lent for the last
        time.
        """
        while self._held:
            self._let_go(0)
        del self._connection
        self.reactor.close()

    def run(self) -> None:
        """Until on_close was called. Raises AssertionError when that never comes."""
        deadline = time.monotonic() + DEADLINE_S
        while self.error is None:
            self.step()
            assert time.monotonic() < deadline, (
                f"hangs with {self.sent} messages sent, {self.received} received"
            )
        self.finish()


def converse(life: Life, is_first: bool, seed: int, end: int) -> None:
    """A process that is one party: life.fds are its socket and the segment with both rings."""
    slab.SEGMENT_BYTES_FIRST = SEGMENT_BYTES_FIRST
    sock_fd, segment_fd = life.fds
    own_slab = Slab()
    party = Party(
        socket.socket(fileno=sock_fd),
        Segment.attach(segment_fd),
        is_first,
        seed,
        end,
        own_slab,
        life,
    )
    party.run()
    assert not party.wrong, party.wrong
    gc.collect()
    # a living peer may hold blocks beyond the connection's end
    own_slab.wait_for_readers(DEADLINE_S)
    assert own_slab.statistics().blocks_used == 0
