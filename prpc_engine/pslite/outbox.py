"""What waits to leave for one node: the most urgent first, and first come first served among
equals. No I/O here.

So many messages and bytes are on their way at a time; the rest waits where its priority still
counts, and not in a transport that keeps its own order. One message may always go, however large.

    on their way are      a message
    fewer than ALONE_MAX  leaves at once, alone
    as many               of a kind waits for others of it, so that they leave together: its owner
                          says when
                          of none leaves alone, at once while there is room

Messages leave together, within bounds, when they are of one priority and of one kind, which says
how many bytes of them may.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from prpc_engine.errors import Backpressure

MESSAGES_MAX = 256  # on their way: enough to keep a server at work while answers travel
BYTES_MAX = 16 << 20  # on their way; above what one message of the usual tensors has
WAITING_MAX = 65536  # before the caller is told to wait for some
# messages on their way before more of them wait for each other: a few cost less alone than late
ALONE_MAX = 8
TOGETHER_MAX = 32  # messages that leave as one: what a call costs is spread over them by then

Item = TypeVar("Item")
# whatever its messages have in common, and how many bytes of them may leave together
Kind = tuple[Hashable, int]


class Outbox(Generic[Item]):
    """An outbox keeps what waits to leave for one node, and says what may leave now.

    Its owner, a Batcher, holds a lock around every call. messages_max, bytes_max: how much may be
    on its way at a time. waiting_max: how many messages may wait; put() raises Backpressure beyond
    that. When a message leaves, and with which: the table at the file's head.
    """

    def __init__(
        self,
        messages_max: int = MESSAGES_MAX,
        bytes_max: int = BYTES_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._messages_max, self._bytes_max, self._waiting_max = (
            messages_max,
            bytes_max,
            waiting_max,
        )
        # by priority; none is empty
        self._queues: dict[int, deque[tuple[Item, int, Kind | None]]] = {}
        self._priorities: list[int] = []  # of those, ascending
        self._waiting = 0
        self._messages = self._bytes = 0  # on their way

    def __len__(self) -> int:
        return self._waiting

    def admit(self, nbytes: int, messages_max: int) -> bool:
        """Whether a message may leave at once, as nothing waits, fewer are on their way, and there
        is room: then it is taken.
        """
        messages = self._messages
        if self._waiting or (
            messages and (messages >= messages_max or self._bytes + nbytes > self._bytes_max)
        ):
            return False
        self._messages += 1
        self._bytes += nbytes
        return True

    def put(self, item: Item, nbytes: int, priority: int = 0, kind: Kind | None = None) -> bool:
        """Have it sent; a higher priority goes first. Whether there is reason to take() now. Raises
        Backpressure.
        """
        if self._waiting >= self._waiting_max:
            raise Backpressure(
                f"{self._waiting} messages wait to be sent, {self._waiting_max} may: wait() "
                "for some first"
            )
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = deque()
            insort(self._priorities, priority)
        queue.append((item, nbytes, kind))
        self._waiting += 1
        return kind is None or self._waiting >= TOGETHER_MAX or self._messages < ALONE_MAX

    def take(self) -> list[Item]:
        """What is to be sent now, together;
        nothing while enough is on its way, or nothing waits.
        """
        if not self._waiting:
            return []
        priority = self._priorities[-1]
        queue = self._queues[priority]
        item, nbytes, kind = queue[0]
        room = self._messages_max - self._messages
        if self._messages and (room <= 0 or self._bytes + nbytes > self._bytes_max):
            return []
        taken = [item]
        queue.popleft()
        if kind is not None:
            room = min(room, TOGETHER_MAX)
            while queue and len(taken) < room:
                item, more, other = queue[0]
                if other != kind or nbytes + more > kind[1]:
                    break
                queue.popleft()
                taken.append(item)
                nbytes += more
        if not queue:
            del self._queues[priority], self._priorities[-1]
        self._waiting -= len(taken)
        self._messages += len(taken)
        self._bytes += nbytes
        return taken

    def finished(self, nbytes: int, messages: int = 1) -> bool:
        """So many that were taken have been answered, or have failed; whether others wait."""
        self._messages -= messages
        self._bytes -= nbytes
        return self._waiting > 0
