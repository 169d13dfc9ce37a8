"""How many bytes were copied for a peer that it has not read yet: what its outbox would hold, did they not lie in the slab.

A record of the ring is as short as the arrays that it refers to are long, so a full ring comes far too late to hold a sender back
from a peer that has stopped.
"""

from __future__ import annotations

import threading
from collections import deque

from shard.errors import BackpressureError
from shard.ring import HEAD_WORD


class Unread:
    """Any thread may call. Lent arrays of the user do not count: they are there anyway."""

    def __init__(self, peer: str, ring_words: memoryview) -> None:
        """`ring_words`: of the ring to the peer, whose head says how far it has read."""
        self._peer = peer
        self._words = ring_words
        self._lock = threading.Lock()
        self._written: deque[tuple[int, int]] = deque()  # where a record ends in the ring, and the bytes copied for it
        self.nbytes = 0

    def check(self, nbytes: int, bytes_max: float) -> None:
        """Raise BackpressureError when a message with so many more would pass `bytes_max`. One message of any size may wait."""
        if self.nbytes and self.nbytes + nbytes > bytes_max:
            with self._lock:
                self._look()
            if self.nbytes and self.nbytes + nbytes > bytes_max:
                raise BackpressureError(
                    f"arrays of {self.nbytes} bytes already wait for {self._peer}, at most {bytes_max:.0f} may (limit "
                    "outbox_bytes_max, or slab_share_max of the slab): it reads too slowly"
                )

    def add(self, nbytes: int) -> None:
        """A message with so many is going to be written ..."""
        with self._lock:
            self.nbytes += nbytes

    def undo(self, nbytes: int) -> None:
        """... or it is not."""
        with self._lock:
            self.nbytes -= nbytes

    def written(self, end: int, nbytes: int) -> None:
        """Its record ends at `end` in the ring."""
        with self._lock:
            self._written.append((end, nbytes))
            self._look()

    def _look(self) -> None:
        written, head = self._written, self._words[HEAD_WORD]
        while written and written[0][0] <= head:
            self.nbytes -= written.popleft()[1]
