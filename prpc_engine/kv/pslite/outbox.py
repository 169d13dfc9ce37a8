"""What waits to leave for one node: the most urgent first, and first come first served among equals. No I/O here.

So many messages and bytes are on their way at a time; the rest waits where its priority still counts, and not in a transport
that keeps its own order. One message may always go, however large.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

from prpc_engine.errors import Backpressure

MESSAGES_MAX = 256  # on their way: enough to keep a server at work while answers travel
BYTES_MAX = 16 << 20  # on their way; above what one message of the usual tensors has
WAITING_MAX = 65536  # before the caller is told to wait for some

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """See the file's head. Its owner holds a lock around every call."""

    def __init__(self, messages_max: int = MESSAGES_MAX, bytes_max: int = BYTES_MAX, waiting_max: int = WAITING_MAX) -> None:
        self._messages_max, self._bytes_max, self._waiting_max = messages_max, bytes_max, waiting_max
        self._waiting: list[tuple[int, int, int, Item]] = []  # (-priority, number, bytes, item): a heap
        self._numbers = itertools.count()
        self._messages = self._bytes = 0  # on their way

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, nbytes: int) -> bool:
        """Whether a message may leave at once, as nothing waits and there is room: then it counts as taken."""
        if self._waiting or (self._messages and (self._messages >= self._messages_max or self._bytes + nbytes > self._bytes_max)):
            return False
        self._messages += 1
        self._bytes += nbytes
        return True

    def put(self, item: Item, nbytes: int, priority: int = 0) -> None:
        """Have it sent; a higher priority goes first. Raises Backpressure."""
        if len(self._waiting) >= self._waiting_max:
            raise Backpressure(f"{len(self._waiting)} messages wait to be sent, {self._waiting_max} may: wait() for some first")
        heapq.heappush(self._waiting, (-priority, next(self._numbers), nbytes, item))

    def take(self) -> Item | None:
        """What is to be sent now; None while enough is on its way, or nothing waits."""
        if not self._waiting:
            return None
        nbytes = self._waiting[0][2]
        if self._messages and (self._messages >= self._messages_max or self._bytes + nbytes > self._bytes_max):
            return None
        self._messages += 1
        self._bytes += nbytes
        return heapq.heappop(self._waiting)[3]

    def finished(self, nbytes: int) -> bool:
        """One that was taken has been answered, or has failed; whether others wait."""
        self._messages -= 1
        self._bytes -= nbytes
        return bool(self._waiting)
