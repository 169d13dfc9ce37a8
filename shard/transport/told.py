"""Which segments of this process's slab one peer has been handed: each once, and each that the slab
gave back is taken back.
"""

from __future__ import annotations

import os
import threading

from shard.errors import ShardError
from shard.memory.slab import Slab
from shard.transport.control_channel import SEGMENT, ControlChannel


class ToldSegments:
    """Which segments of our slab one peer has been handed, so that each is handed over once, before
    the first block in it is lent. Owned by one connection; thread-safe.
    """

    def __init__(self, slab: Slab, notes: ControlChannel) -> None:
        self.numbers: set[int] = set()
        self.drops_seen = 0  # of the slab's segments
        self._slab = slab
        self._notes = notes
        # of each segment once: the peer takes a second note of it for a fault
        self._telling = threading.Lock()

    def tell(self, number: int) -> None:
        """Hand over a segment that is not among `numbers`. Raises PeerLostError, and ShardError
        without a descriptor for it.
        """
        with self._telling:
            if number in self.numbers:  # by another thread meanwhile
                return
            segment = self._slab.segment(number)
            try:
                fd = segment.read_only_fd()  # a peer reads our blocks and writes its own
            except OSError as error:
                raise ShardError(
                    f"a segment cannot be handed over: {error.strerror}; raise `ulimit -n`"
                ) from error
            try:
                self._notes.hand_over(SEGMENT, number, [fd], segment.size_bytes)
            finally:
                os.close(fd)
            # failpoint: connection.segment_told
            self.numbers.add(number)

    def tell_drops(self) -> None:
        """Segments that the slab gave back need not stay mapped over there. What finds no room is
        told with a later lease.
        """
        seen = self._slab.segments_dropped
        # first: what another thread adds after a look at the slab is there, and looks dropped
        told = self.numbers.copy()
        for number in told - self._slab.segment_numbers():
            if not self._notes.tell_dropped(number):
                return
            self.numbers.discard(number)
        self.drops_seen = seen
