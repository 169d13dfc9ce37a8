"""The memory of expanded messages, counted over all connections of the process while anything of it
is held.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.wire import ArchiveError

Block = NDArray[np.uint8]


class Expanded:
    """What compressed messages have come to in this process and is still held, over all
    connections. Safe from any thread.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        # by finalizers, which may run anywhere: so they take no lock
        self._given_back: deque[int] = deque()
        self._guard = threading.Lock()  # of the sum: connections of several reactors add to it

    @property
    def nbytes(self) -> int:
        """Held now."""
        with self._guard:
            self._settle()
            return self._nbytes

    def reserve(self, sizes: Sequence[int], most: int) -> list[Block]:
        """Memory of these sizes, counted until the last array on it is gone. Raises ArchiveError
        where that were over `most`.
        """
        wanted = sum(sizes)
        with self._guard:
            self._settle()
            if self._nbytes + wanted > most:
                raise ArchiveError(
                    f"a message that expands to {wanted} bytes, beside {self._nbytes} that are "
                    f"held of others, at most {most} "
                    "allowed (limit expanded_total_bytes_max)"
                )
            self._nbytes += wanted
        made: list[Block] = []
        try:
            for size in sizes:
                made.append(np.empty(size, np.uint8))
                weakref.finalize(made[-1], self._given_back.append, size).atexit = False
        finally:
            self._given_back.extend(sizes[len(made) :])
        return made

    def _settle(self) -> None:
        while self._given_back:
            self._nbytes -= self._given_back.popleft()


expanded = Expanded()
