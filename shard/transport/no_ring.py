"""What a connection has in the place of its rings once it has ended: a send() or poll() that was
under way finds this.
"""

from __future__ import annotations

from typing import Any

from shard.memory.ring import DATA_OFFSET
from shard.transport import Buffer


class NoRing:
    """Takes the place of both rings when a connection has ended, so that a send() or poll() under
    way in another thread finds something harmless: writes are swallowed, reads find nothing. It
    keeps the figures that the rings had.
    """

    broken = None
    was_cut = False

    def __init__(self, bytes_written: int, head: int, full_count: int) -> None:
        self.bytes_written = bytes_written
        self.head = head
        self.full_count = full_count

    def try_write(self, payload: Buffer, tag: int = 0) -> bool:
        return True

    def take_sleeping(self) -> bool:
        return False

    def poll(self, *_: Any) -> int:
        return 0


NO_WORDS = memoryview(bytes(DATA_OFFSET)).cast("Q")
