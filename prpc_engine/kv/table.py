"""Tables: the values of a model and the state of their optimizer, changed where they live.

`DenseTable` is a slice of a named tensor; `SparseTable` maps int64 keys to rows and grows as keys are pushed. Neither
locks: each belongs to one shard, whose handlers run one at a time. Neither writes to what it is given, and neither
gives out its own memory, except to who saves it:

    columns()         the live arrays by name, axis 0 counts rows: what a checkpoint holds of the table, with
    scalars()         what there is one of
    before_change     when set, called before rows change: with their numbers, each once, or None for all
    load(), load_scalars()   put back what columns() and scalars() gave; a dense table's columns are written to instead
    track_changes(), changes, remove()   of a sparse table: which rows changed since the last save, and keys that went

A step is a push: the learning rate's schedule goes by the pushes that this table has applied before; `version` is how many they
are, from the table's beginning: checkpoints and replicas keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.admission import Admission, Doorkeeper
from prpc_engine.kv.changes import Changes
from prpc_engine.kv.checks import check_keys
from prpc_engine.kv.compression import Compressor, received
from prpc_engine.kv.duplicates import sum_duplicates
from prpc_engine.kv.eviction import PINNED, Eviction, Evictor
from prpc_engine.kv.gradients import Guard
from prpc_engine.kv.initializer import Initializer
from prpc_engine.kv.optimizer import Optimizer
from prpc_engine.kv.row_store import BLOCK_ELEMENTS, RowStore

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
INITIAL_BLOCK = 65536  # elements made at once: an initializer needs some 40 bytes of scratch for each, here 2.5 MiB


@dataclass(frozen=True)
class TableStatistics:
    """What one table has done and what it holds. rows: of a sparse table the keys stored; of a dense one axis 0.

    Of sparse tables: keys_admitted got a row (again, if evicted before), keys_refused were pushed and got none (each push
    of each counts), keys_evicted lost theirs. rows_skipped: left as they were by a push, as their gradient was NaN or infinite
    (gradients.py).
    """

    rows: int
    bytes: int
    pulls: int
    pushes: int
    keys_pulled: int
    keys_pushed: int
    keys_admitted: int = 0
    keys_refused: int = 0
    keys_evicted: int = 0
    rows_skipped: int = 0


class DenseTable:
    """dtype[shape]: rows [begin, begin + shape[0]) of a tensor, with `initializer` seeing each element's number.

    Element numbers count over the whole tensor, so that its first values are the same however it is cut.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        optimizer: Optimizer,
        initializer: Initializer,
        begin: int = 0,
        dtype: npt.DTypeLike = np.float32,
        compression: Compressor | None = None,
        nonfinite: str = "refuse",
        name: str = "",
    ) -> None:
        self.values: npt.NDArray[Any] = np.empty(shape, dtype)
        self.before_change: Callable[[Rows | None], None] | None = None
        first, flat = begin * math.prod(shape[1:]), self.values.reshape(-1)
        self._flat = flat
        self._whose = f"push to dense table {name!r}"
        self._guard = Guard(nonfinite, optimizer.gradient_max)
        for done in range(0, len(flat), INITIAL_BLOCK):
            block = flat[done : done + INITIAL_BLOCK]
            numbers = np.arange(first + done, first + done + len(block), dtype=np.int64)
            block[:] = initializer.rows(numbers, 1)[:, 0]
        self._optimizer = optimizer
        self._compression = compression
        self._state = {name: np.full(shape, initial, np.float32) for name, initial in optimizer.state_initial.items()}
        self._flat_state = [each.reshape(-1) for each in self._state.values()]
        self._steps = self._pulls = self._pushes = 0

    def pull(self) -> Floats:
        """A copy of all values, as float32."""
        self._pulls += 1
        return self.values.astype(np.float32)

    def push(self, *parts: Array) -> int:
        """Apply one gradient for every element: float32 of the slice's shape, or the parts that its compression makes of that.

        The version that it makes; else BadArguments, and nothing has changed: also for gradients that are NaN or infinite, where
        `nonfinite` says so (gradients.py).
        """
        grads = received(self._whose, self._compression, parts, self.values.shape)
        grads, stay = self._guard.admit(self._whose, grads)
        if self.before_change is not None:
            self.before_change(None)
        self._pushes += 1
        rate = self._optimizer.rate_at(self._steps)
        self._steps += 1
        if stay is not None:
            with np.errstate(invalid="ignore"):
                before = [(column, column.reshape(len(stay), -1)[stay]) for column in self.columns().values()]
                self._change(grads, rate)
            for column, rows in before:
                column.reshape(len(stay), -1)[stay] = rows
        else:
            self._change(grads, rate)
        return self._steps

    def _change(self, grads: Floats, rate: float) -> None:
        flat, flat_grads = self._flat, grads.reshape(-1)
        for begin in range(0, len(flat), BLOCK_ELEMENTS):  # blocks: what a formula needs for scratch stays in the cache
            block = slice(begin, begin + BLOCK_ELEMENTS)
            values = flat[block].astype(np.float32, copy=False)
            self._optimizer.apply(values, flat_grads[block], [each[block] for each in self._flat_state], rate, self._steps)
            if values.dtype != flat.dtype:
                flat[block] = values

    def push_pull(self, *parts: Array) -> Floats:
        """push(), then the new values."""
        self.push(*parts)
        return self.pull()

    @property
    def version(self) -> int:
        """Pushes applied to it from its beginning, of all workers."""
        return self._steps

    def statistics(self) -> TableStatistics:
        """Counters since creation. bytes: values and optimizer state."""
        rows = self.values.shape[0] if self.values.shape else 1
        size = self.values.nbytes + sum(state.nbytes for state in self._state.values())
        keys = rows * self._pulls, rows * self._pushes
        return TableStatistics(rows, size, self._pulls, self._pushes, *keys, rows_skipped=self._guard.rows_skipped)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """What there is an entry for each element of: "values", and the optimizer's state.

        Live: to be written to by who restores it only.
        """
        return {"values": self.values} | self._state

    def scalars(self) -> dict[str, float]:
        """The steps."""
        return {"steps": self._steps}

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        """The greater of these steps and its own: several saved slices may come together in one table."""
        self._steps = max(self._steps, int(scalars["steps"]))


class SparseTable:
    """int64 key -> dtype[dim]. A key that has no row has its initial one, and takes no memory.

    A key gets its row with its first push, or when `admission` lets it; it may lose it again as `eviction` says.
    clock: gives seconds; needed for a time to live in seconds.
    """

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        initializer: Initializer,
        dtype: npt.DTypeLike = np.float32,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        clock: Callable[[], float] | None = None,
        compression: Compressor | None = None,
        nonfinite: str = "refuse",
        name: str = "",
    ) -> None:
        self.dim = dim
        self._whose = f"push to sparse table {name!r}"
        self._guard = Guard(nonfinite, optimizer.gradient_max)
        self.before_change: Callable[[Rows | None], None] | None = None
        self._optimizer = optimizer
        self._compression = compression
        self._initializer = initializer
        self._doorkeeper = Doorkeeper(admission) if admission is not None else None
        self._evictor = Evictor(eviction, clock) if eviction is not None else None
        self._store = RowStore(dim, dtype, optimizer.state_initial, optimizer.counts_steps, stamped=eviction is not None)
        self._steps = self._pulls = self._pushes = self._keys_pulled = self._keys_pushed = 0
        self._keys_admitted = self._keys_refused = self._keys_evicted = 0

    def __len__(self) -> int:
        return len(self._store)

    def keys(self) -> Keys:
        """The keys that have a row, in the order of their rows: int64[len]."""
        return self._store.keys.array[:, 0].copy()

    def pull(self, keys: Keys) -> Floats:
        """The row of each key, in the order asked, repeats and all: int64[n] -> float32[n, dim]. Makes no row."""
        check_keys("pull from a sparse table", keys)
        self._pulls += 1
        self._keys_pulled += len(keys)
        rows = self._store.index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if self._evictor is not None:
            self._stamp(rows[rows >= 0] if len(absent) else rows, self._evictor.stamp(self._steps))
        if not len(absent):
            return self._store.values.gather(rows)
        if len(absent) == len(keys):
            return self._initializer.rows(keys, self.dim)
        pulled = self._store.values.gather(rows)  # -1 reads the last row, which the initial one then covers
        pulled[absent] = self._initializer.rows(keys[absent], self.dim)
        return pulled

    def push(self, keys: Keys, *parts: Array) -> int:
        """Apply grads[i] (float32[n, dim]) to the row of keys[i]; those of one key are summed, then applied once.

        parts: grads, or what the table's compression makes of them. The version that it makes.
        """
        check_keys(self._whose, keys)
        grads, pushed = received(self._whose, self._compression, parts, (len(keys), self.dim)), len(keys)
        keys, grads = sum_duplicates(keys, grads)
        grads, stay = self._guard.admit(self._whose, grads, keys)
        if stay is not None:
            keys, grads = keys[~stay], grads[~stay]
        self._pushes += 1
        self._keys_pushed += pushed
        rows = self._rows_for(keys)
        if self._doorkeeper is not None or self._evictor is not None:
            admitted = rows >= 0
            if not admitted.all():
                rows, grads = rows[admitted], grads[admitted]
        if self.before_change is not None:
            self.before_change(rows)
        store, optimizer = self._store, self._optimizer
        if store.changes is not None:
            store.changes.mark(rows)
        rate = optimizer.rate_at(self._steps)
        self._steps += 1
        for begin in range(0, len(rows), store.block_rows):
            block = rows[begin : begin + store.block_rows]  # all different: what is gathered can go back
            values = store.values.gather(block)
            state = [each.gather(block) for each in store.state.values()]
            steps = store.step(block) if optimizer.counts_steps else self._steps
            optimizer.apply(values, grads[begin : begin + store.block_rows], state, rate, steps)
            store.values.scatter(block, values)
            for each, changed in zip(store.state.values(), state, strict=True):
                each.scatter(block, changed)
        return self._steps

    def push_pull(self, keys: Keys, *parts: Array) -> Floats:
        """push(), then the new rows."""
        self.push(keys, *parts)
        return self.pull(keys)

    @property
    def version(self) -> int:
        """Pushes applied to it from its beginning, of all workers."""
        return self._steps

    def statistics(self) -> TableStatistics:
        """Counters since creation. bytes: rows with all they have, the index, and the counters of admission."""
        return TableStatistics(
            rows=len(self),
            bytes=self._store.nbytes + (self._doorkeeper.nbytes if self._doorkeeper is not None else 0),
            pulls=self._pulls,
            pushes=self._pushes,
            keys_pulled=self._keys_pulled,
            keys_pushed=self._keys_pushed,
            keys_admitted=self._keys_admitted,
            keys_refused=self._keys_refused,
            keys_evicted=self._keys_evicted,
            rows_skipped=self._guard.rows_skipped,
        )

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of row_store.py, without the stamps. Live: not to be written, nor kept over a push."""
        return {name: array.array[:, 0] if name == "keys" else array.array for name, array in self._store.columns.items()}

    def scalars(self) -> dict[str, float]:
        """The steps."""
        return {"steps": self._steps}

    def track_changes(self, tracked: bool) -> None:
        """Keep `changes` from now on, at the cost of 4 bytes a row and one scatter a push; or not any more."""
        self._store.track_changes(tracked)

    @property
    def changes(self) -> Changes | None:
        """What has changed, while it is tracked."""
        return self._store.changes

    def remove(self, keys: Keys) -> None:
        """Forget the rows of these keys, where they have one; none twice."""
        rows = self._store.index.lookup(keys)
        self._store.remove(rows[rows >= 0], self.before_change)

    def load(self, piece: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put rows of columns() here, whatever admission and bounds say; they count as just used."""
        rows = self._store.load({**piece, "keys": piece["keys"][:, None]})
        if self._evictor is not None:
            self._stamp(rows, self._evictor.stamp(self._steps))

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        """The greater of these steps and its own: the tables of several servers may come together in one."""
        self._steps = max(self._steps, int(scalars["steps"]))

    def _rows_for(self, keys: Keys) -> Rows:
        """The row of each key (none twice), made where it may be; -1 where it may not."""
        store, evictor = self._store, self._evictor
        now = evictor.stamp(self._steps) if evictor is not None else 0
        if evictor is not None:
            self._evict(evictor.expired(self._stamps(), now))
        rows = store.index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            wanting = len(absent)
            if self._doorkeeper is not None:
                absent = absent[self._doorkeeper.admit(keys[absent])]
            if evictor is not None:
                absent = absent[: max(0, evictor.rows_max - (len(keys) - wanting))]
                if self._make_room(evictor, rows[rows >= 0], len(absent), now):
                    present = rows >= 0
                    rows[present] = store.index.lookup(keys[present])  # they may have moved
            rows[absent] = store.add(keys[absent], self._initializer)
            self._keys_admitted += len(absent)
            self._keys_refused += wanting - len(absent)
        if evictor is not None:
            self._stamp(rows[rows >= 0], now)
        return rows

    def _make_room(self, evictor: Evictor, kept: Rows, coming: int, now: int) -> bool:
        """Evict until `coming` rows fit beside those there are, but none of `kept`; whether any went."""
        if len(self) + coming <= evictor.rows_max:
            return False
        self._stamp(kept, PINNED)
        oldest = evictor.oldest(self._stamps(), len(self) + coming - evictor.rows_max)
        self._stamp(kept, now)
        self._evict(oldest)
        return True

    def _evict(self, rows: Rows) -> None:
        if len(rows):
            self._store.remove(rows, self.before_change)
            self._keys_evicted += len(rows)

    def _stamps(self) -> Rows:
        assert self._store.stamps is not None
        stamps: Rows = self._store.stamps.array[:, 0]
        return stamps

    def _stamp(self, rows: Rows, moment: int) -> None:
        self._stamps()[rows] = moment
