"""Rows of numbers that can be appended to: one anonymous mapping of memory that grows where it is,
or is moved by the kernel.

Why one array, and not chunks: every pull and push gathers and scatters rows at random, and from one
array that is a single numpy call, from chunks one a chunk behind a sort.

Why a mapping, and not np.empty: mremap(2) moves page tables and copies nothing. Growing 2.5 GB of
rows from nothing takes 1 ms of mremap in all; an array that doubles copies each row about once, and
has old and new in memory while it does. Room not yet used costs address space only. Sizes are whole
huge pages, so that moved pages stay huge.

Rows are gathered and scattered as opaque bytes: a scatter of 100 k rows of 256 bytes takes 3.3 ms
so, 6.6 as floats (numpy 2.4, one EPYC core).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 * 1024 * 1024
GROWTH = 1.5  # of the room when it is full: few moves, and little address space that is never used


class GrowingRows:
    """dtype[len, width]. Owned by one table; `array` may move when extend() is called, so do not
    keep it.

    Who keeps a view of it all the same has the rows as they were: then the rows move by being
    copied.
    """

    def __init__(self, width: int, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self._width = width
        self._opaque_row = np.dtype((np.void, width * self.dtype.itemsize))
        self._memory = _mapping(HUGE_PAGE_BYTES)
        self._room: npt.NDArray[Any]
        self._opaque: npt.NDArray[np.void]
        self.array: npt.NDArray[Any]
        self._map_views(0)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows there are, without the room for more."""
        return self.array.nbytes

    def extend(self, count: int) -> npt.NDArray[Any]:
        """Append `count` rows and return the view of them, dtype[count, width], for the caller to
        fill.

        MemoryError, and nothing has changed, where the system has no room for them.
        """
        before = len(self.array)
        length = before + count
        if length > len(self._room):
            self._grow(length)
        self.array = self._room[:length]
        return self.array[before:]

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on. Their memory stays as room."""
        self.array = self._room[:length]

    def gather(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """A copy of these rows, as float32[n, width]."""
        return self.array.take(rows, axis=0).astype(np.float32, copy=False)

    def scatter(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
        """Store values[i], of float32[n, width] in C order, in row rows[i], rounded to the dtype;
        no row twice.
        """
        stored = values.astype(self.dtype, copy=False)
        self._opaque[rows] = stored.view(self._opaque_row)[:, 0]

    def _grow(self, length: int) -> None:
        present, memory = len(self.array), self._memory
        needed = max(length * self._opaque_row.itemsize, int(GROWTH * len(memory)))
        size = -(-needed // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        del self.array, self._room, self._opaque  # a mapping with views cannot be resized
        try:
            memory.resize(size)
        except BufferError:  # somebody else has a view
            self._memory = _mapping(size)
            used = present * self._opaque_row.itemsize
            self._memory[:used] = memory[:used]
        except OSError as error:
            raise MemoryError(
                f"no room for {length} rows of {self._opaque_row.itemsize} bytes: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._map_views(present)

    def _map_views(self, length: int) -> None:
        # frombuffer: its arrays keep the mapping from being resized
        capacity = len(self._memory) // self._opaque_row.itemsize
        self._opaque = np.frombuffer(self._memory, self._opaque_row, capacity)
        self._room = np.frombuffer(self._memory, self.dtype, capacity * self._width).reshape(
            capacity, self._width
        )
        self.array = self._room[:length]

    def __repr__(self) -> str:
        return (
            f"GrowingRows({len(self.array)} x {self._width} of {self.dtype}, "
            f"room for {len(self._room)})"
        )


def _mapping(size: int) -> mmap.mmap:
    """Private: a shared anonymous one cannot grow."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
