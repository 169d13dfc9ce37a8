"""Tables: the values of a model and the state of their optimizer, changed where they live.

`DenseTable` is a slice of a named tensor; `SparseTable` maps int64 keys to rows and grows as keys are pushed. Neither
locks: each belongs to one shard, whose handlers run one at a time. Neither writes to what it is given, and neither
gives out its own memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.checks import check_grads, check_keys
from prpc_engine.kv.duplicates import sum_duplicates
from prpc_engine.kv.index import KeyIndex
from prpc_engine.kv.initializer import Initializer
from prpc_engine.kv.optimizer import Optimizer
from prpc_engine.kv.rows import GrowingRows

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
INITIAL_BLOCK = 65536  # elements made at once: an initializer needs some 40 bytes of scratch for each, here 2.5 MiB


@dataclass(frozen=True)
class TableStatistics:
    """What one table has done and what it holds. rows: of a sparse table the keys stored; of a dense one axis 0."""

    rows: int
    bytes: int
    pulls: int
    pushes: int
    keys_pulled: int
    keys_pushed: int


class DenseTable:
    """float32[shape]: rows [begin, begin + shape[0]) of a tensor, with `initializer` seeing each element's number.

    Element numbers count over the whole tensor, so that its first values are the same however it is cut.
    """

    def __init__(self, shape: tuple[int, ...], optimizer: Optimizer, initializer: Initializer, begin: int = 0) -> None:
        self.values: Floats = np.empty(shape, np.float32)
        first, flat = begin * math.prod(shape[1:]), self.values.reshape(-1)
        for done in range(0, len(flat), INITIAL_BLOCK):
            block = flat[done : done + INITIAL_BLOCK]
            numbers = np.arange(first + done, first + done + len(block), dtype=np.int64)
            block[:] = initializer.rows(numbers, 1)[:, 0]
        self._optimizer = optimizer
        self._state = [np.full(shape, initial, np.float32) for initial in optimizer.state_initial]
        self._pulls = self._pushes = 0

    def pull(self) -> Floats:
        """A copy of all values."""
        self._pulls += 1
        return self.values.copy()

    def push(self, grads: Floats) -> None:
        """Apply one gradient for every element; `grads` has the slice's shape and dtype, else BadArguments."""
        check_grads("push to a dense table", grads, self.values.shape)
        self._pushes += 1
        self._optimizer.apply(self.values, grads, self._state)

    def push_pull(self, grads: Floats) -> Floats:
        """push(), then the new values."""
        self.push(grads)
        return self.pull()

    def statistics(self) -> TableStatistics:
        """Counters since creation. bytes: values and optimizer state."""
        rows = self.values.shape[0] if self.values.shape else 1
        size = self.values.nbytes + sum(state.nbytes for state in self._state)
        return TableStatistics(rows, size, self._pulls, self._pushes, rows * self._pulls, rows * self._pushes)


class SparseTable:
    """int64 key -> float32[dim]. A key that was never pushed has its initial row, and takes no memory."""

    def __init__(self, dim: int, optimizer: Optimizer, initializer: Initializer) -> None:
        self.dim = dim
        self._optimizer = optimizer
        self._initializer = initializer
        self._index = KeyIndex()
        self._values = GrowingRows(dim)
        self._state = [GrowingRows(dim) for _ in optimizer.state_initial]
        self._pulls = self._pushes = self._keys_pulled = self._keys_pushed = 0

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> Keys:
        """The keys that have a row, in the order of their rows: int64[len]."""
        return self._index.keys()

    def pull(self, keys: Keys) -> Floats:
        """The row of each key, in the order asked, repeats and all: int64[n] -> float32[n, dim]. Stores nothing."""
        check_keys("pull from a sparse table", keys)
        self._pulls += 1
        self._keys_pulled += len(keys)
        rows = self._index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if not len(absent):
            return self._values.array.take(rows, axis=0)
        pulled = np.empty((len(keys), self.dim), np.float32)
        present = np.flatnonzero(rows >= 0)
        pulled[present] = self._values.array[rows[present]]
        pulled[absent] = self._initializer.rows(keys[absent], self.dim)
        return pulled

    def push(self, keys: Keys, grads: Floats) -> None:
        """Apply grads[i] (float32[n, dim]) to the row of keys[i]; those of one key are summed, then applied once."""
        check_keys("push to a sparse table", keys)
        check_grads("push to a sparse table", grads, (len(keys), self.dim))
        self._pushes += 1
        self._keys_pushed += len(keys)
        keys, grads = sum_duplicates(keys, grads)
        length = len(self._index)
        rows = self._index.lookup_or_insert(keys)
        if len(self._index) > length:
            self._add_rows(keys[rows >= length])
        values = self._values.array.take(rows, axis=0)  # rows are all different: what is gathered can go back
        state = [each.array.take(rows, axis=0) for each in self._state]
        self._optimizer.apply(values, grads, state)
        self._values.array[rows] = values
        for each, changed in zip(self._state, state, strict=True):
            each.array[rows] = changed

    def push_pull(self, keys: Keys, grads: Floats) -> Floats:
        """push(), then the new rows."""
        self.push(keys, grads)
        return self.pull(keys)

    def statistics(self) -> TableStatistics:
        """Counters since creation. bytes: rows and optimizer state in use, and the index."""
        size = 4 * len(self) * self.dim * (1 + len(self._state)) + 16 * self._index.capacity
        return TableStatistics(len(self), size, self._pulls, self._pushes, self._keys_pulled, self._keys_pushed)

    def _add_rows(self, fresh: Keys) -> None:
        """`fresh`: ascending and without repeats, as the index has numbered them."""
        self._values.extend(len(fresh))[:] = self._initializer.rows(fresh, self.dim)
        for state, initial in zip(self._state, self._optimizer.state_initial, strict=True):
            state.extend(len(fresh))[:] = initial
