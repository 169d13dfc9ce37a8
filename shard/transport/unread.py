"""How many bytes were copied for a peer that it has not read yet: what its outbox would hold, did
they not lie in the slab.

A record of the ring is as short as the arrays that it refers to are long, so a full ring comes far
too late to hold a sender back from a peer that has stopped.
"""

from __future__ import annotations

from collections import deque

from shard.memory.ring import HEAD_WORD

# after so many the ring's head is looked at: it changes under the reader, and a look costs a cache
# line
RECORDS_MAX = 64


class Unread:
    """Of records that stand in the ring; the outbox counts those that wait. Arrays of the user that
    are lent do not count: they are there anyway. Changed by the connection's one writer, read by
    any thread."""

    __slots__ = ("_words", "_written", "nbytes")

    def __init__(self, ring_words: memoryview) -> None:
        """`ring_words`: of the ring to the peer, whose head says how far it has read."""
        self._words = ring_words
        # where a record ends in the ring, and the bytes copied for it
        self._written: deque[tuple[int, int]] = deque()
        self.nbytes = 0  # as last counted: some of it may have been read since

    def written(self, end: int, nbytes: int) -> None:
        """A record that ends at `end` in the ring refers to so many."""
        self.nbytes += nbytes
        self._written.append((end, nbytes))
        if len(self._written) > RECORDS_MAX:
            self.look()

    def look(self) -> int:
        """Count again. For the one writer."""
        written, head = self._written, self._words[HEAD_WORD]
        while written and written[0][0] <= head:
            self.nbytes -= written.popleft()[1]
        return self.nbytes

    def let_go(self, no_words: memoryview) -> None:
        """The connection has ended, or this is a fork: look at `no_words` from now on, and hold the
        ring's memory no longer.
        """
        self._words = no_words
        self._written = deque()
        self.nbytes = 0
