"""Rows of float32 that can be appended to: one array with room to spare.

Why one array that doubles, and not chunks: every pull and push gathers and scatters rows at random, and from one array
that is a single numpy call, from chunks one a chunk behind a sort. Doubling copies each row about once in the life of a
table (the sum 1/2 + 1/4 + ...): 64 MiB in some 20 ms at 1 Mi rows of 16. Room not yet used costs address space only, as
numpy.empty leaves large memory untouched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CAPACITY_MIN = 1024  # rows


class GrowingRows:
    """float32[len, width]. Owned by one table; `array` may move when extend() is called, so do not keep it."""

    def __init__(self, width: int) -> None:
        self._room = np.empty((CAPACITY_MIN, width), np.float32)
        self.array: npt.NDArray[np.float32] = self._room[:0]

    def __len__(self) -> int:
        return len(self.array)

    def extend(self, count: int) -> npt.NDArray[np.float32]:
        """Append `count` rows and return the view of them, float32[count, width], for the caller to fill."""
        length = len(self.array)
        if length + count > len(self._room):
            capacity = max(2 * len(self._room), length + count)
            room = np.empty((capacity, self._room.shape[1]), np.float32)
            room[:length] = self.array
            self._room = room
        self.array = self._room[: length + count]
        return self.array[length:]

    def __repr__(self) -> str:
        return f"GrowingRows({len(self.array)} x {self._room.shape[1]}, room for {len(self._room)})"
