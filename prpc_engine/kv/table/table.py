"""Tables: the values of a model and the state of their optimizer, changed where they live.

`DenseTable` is a slice of a named tensor; `SparseTable` maps int64 keys to rows and grows as keys
are pushed. Neither locks: each belongs to one shard, whose handlers run one at a time. Neither
writes to what it is given, and neither gives out its own memory, except to who saves it:

    columns()             the live arrays by name, axis 0 counts rows: what a checkpoint holds of
                          the table, with
    scalars()             what there is one of, and arrays of it:
    singles()             {"sketch": uint8[4, width]}, what admission has counted
    before_change         when set, called before rows change: with their numbers, each once, or
                          None for all. Stamps alone change without: one that was saved may be of a
                          pull after the cut
    load_scalars(),       put back what those gave, scalars first; a dense table's columns are
      load(),             written to instead
      load_sketch(),
      load_counters()
    track_changes(),      of a sparse table: which rows changed, or were used, since the last save,
      changes,            and keys that went
      used_since(),
      remove()

and the same table at a replica (replica.py) is brought to be equal in all of this:

    decisions, take_decision()  of a primary's table: what its replicas have to be told, with each
                                push and beside (decisions.py)
    replay(), catch_up()        of a replica's: a push as it was decided, and what was told beside
    reads, take_back()          what replicas do not see happen, and undoing what of it they were
                                not told

A step is a push: the learning rate's schedule goes by the pushes that this table has applied
before; `version` is how many they are, from the table's beginning: checkpoints and replicas keep
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments
from prpc_engine.kv.table.admission import Admission, Doorkeeper
from prpc_engine.kv.table.changes import Changes
from prpc_engine.kv.table.checks import check_grads, check_keys
from prpc_engine.kv.table.compression import Compressor, received
from prpc_engine.kv.table.decisions import NO_BITS, NO_KEYS, Decision, decode
from prpc_engine.kv.table.duplicates import sum_duplicates
from prpc_engine.kv.table.eviction import PINNED, Eviction, Evictor
from prpc_engine.kv.table.gradients import Guard, staying
from prpc_engine.kv.table.initializer import Initializer
from prpc_engine.kv.table.optimizer import Optimizer
from prpc_engine.kv.table.replicated import Replicated
from prpc_engine.kv.table.row_store import BLOCK_ELEMENTS, RowStore

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
# of sparse tables
COUNTERS = (
    "pulls",
    "pushes",
    "keys_pulled",
    "keys_pushed",
    "keys_admitted",
    "keys_refused",
    "keys_evicted",
)
# elements made at once: an initializer needs some 40 bytes of scratch for each, here 2.5 MiB
INITIAL_BLOCK = 65536


@dataclass(frozen=True)
class TableStatistics:
    """What one table has done and what it holds. rows: of a sparse table the keys stored; of a
    dense one axis 0.

    pulls, pushes: that reached its server, of elastic tables counted for each partition.
    keys_pulled, keys_pushed: those of each verb, where a TableWorker sends each different key once.
    A replica that is promoted lacks the pulls that it was not told of.
    Of sparse tables: keys_admitted got a row (again, if evicted before), keys_refused were pushed
    and got none (each push of each counts), keys_evicted lost theirs. rows_skipped: left as they
    were by a push, as their gradient was NaN or infinite (gradients.py).
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
    """dtype[shape]: rows [begin, begin + shape[0]) of a tensor, with `initializer` seeing each
    element's number.

    Element numbers count over the whole tensor, so that its first values are the same however it is
    cut.
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
        is_assigned_first: bool = False,
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
        self._state = {
            name: np.full(shape, initial, np.float32)
            for name, initial in optimizer.state_initial.items()
        }
        self._flat_state = [each.reshape(-1) for each in self._state.values()]
        self._steps = self._assigns = self._pulls = self._pushes = 0
        # a push before that would train on nobody's values
        self._is_assigned_first = is_assigned_first
        self._pulls_told: int | None = None

    def pull(self) -> Floats:
        """A copy of all values, as float32."""
        self._pulls += 1
        return self.values.astype(np.float32)

    def push(self, *parts: Array) -> int:
        """Apply one gradient for every element: float32 of the slice's shape, or the parts that its
        compression makes of that.

        The version that it makes; else BadArguments, and nothing has changed: also for gradients
        that are NaN or infinite, where `nonfinite` says so (gradients.py).
        """
        grads = received(self._whose, self._compression, parts, self.values.shape)
        grads, stay = self._guard.admit(self._whose, grads)
        if self._is_assigned_first and not self.version:
            raise BadArguments(
                f"{self._whose}: it has no values yet: assign() them first (Parameters.begin() "
                "does)"
            )
        if self.before_change is not None:
            self.before_change(None)
        self._pushes += 1
        rate = self._optimizer.rate_at(self._steps)
        self._steps += 1
        with staying(self.columns().values(), stay) if stay is not None else nullcontext():
            self._change(grads, rate)
        return self.version

    def _change(self, grads: Floats, rate: float) -> None:
        flat, flat_grads = self._flat, grads.reshape(-1)
        # blocks: what a formula needs for scratch stays in the cache
        for begin in range(0, len(flat), BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            values = flat[block].astype(np.float32, copy=False)
            self._optimizer.apply(
                values,
                flat_grads[block],
                [each[block] for each in self._flat_state],
                rate,
                self._steps,
            )
            if values.dtype != flat.dtype:
                flat[block] = values

    def assign(self, values: Floats) -> int:
        """Make these float32 of the slice's shape its values, which later pushes go on from: the
        version that it makes.

        The optimizer's state stays, but for what values are computed from (Optimizer.settle).
        BadArguments, as push().
        """
        whose = self._whose.replace("push", "assign", 1)
        check_grads(whose, values, self.values.shape)
        self._guard.check(whose, values)
        if self.before_change is not None:
            self.before_change(None)
        self.values[...] = values
        if self.version:
            self._optimizer.settle(
                self.values.astype(np.float32),
                list(self._state.values()),
                self._optimizer.rate_at(self._steps),
            )
        self._assigns += 1
        return self.version

    def push_pull(self, *parts: Array) -> Floats:
        """push(), then the new values."""
        self.push(*parts)
        return self.pull()

    @property
    def version(self) -> int:
        """Pushes applied to it, and assigns, from its beginning, of all workers."""
        return self._steps + self._assigns

    def statistics(self) -> TableStatistics:
        """Counters since creation. bytes: values and optimizer state."""
        rows = self.values.shape[0] if self.values.shape else 1
        size = self.values.nbytes + sum(state.nbytes for state in self._state.values())
        keys = rows * self._pulls, rows * self._pushes
        return TableStatistics(
            rows, size, self._pulls, self._pushes, *keys, rows_skipped=self._guard.rows_skipped
        )

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """What there is an entry for each element of: "values", and the optimizer's state.

        Live: to be written to by who restores it only.
        """
        return {"values": self.values} | self._state

    def scalars(self) -> dict[str, float]:
        """The steps, the assigns, and the counters of statistics()."""
        counters = {
            "pulls": self._pulls,
            "pushes": self._pushes,
            "rows_skipped": self._guard.rows_skipped,
        }
        return {"steps": self._steps, "assigns": self._assigns, **counters}

    def singles(self) -> dict[str, npt.NDArray[Any]]:
        """Nothing."""
        return {}

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        """The greater of these and its own: several saved slices may come together in one table."""
        self._steps = max(self._steps, int(scalars["steps"]))
        self._assigns = max(self._assigns, int(scalars.get("assigns", 0)))

    def load_counters(self, scalars: Mapping[str, float]) -> None:
        """The same of the counters: each verb goes to all slices. Those of before they were saved
        are 0.
        """
        self._pulls = max(self._pulls, int(scalars.get("pulls", 0)))
        self._pushes = max(self._pushes, int(scalars.get("pushes", 0)))
        self._guard.rows_skipped = max(
            self._guard.rows_skipped, int(scalars.get("rows_skipped", 0))
        )

    # -- replication -------------------------------------------------------------------------------

    def begin_telling(self, tell: Callable[[], object]) -> None:
        """From now on replicas follow: they have what there is."""
        if self._pulls_told is None:
            self._pulls_told = self._pulls

    def stop_telling(self) -> None:
        """None follows."""
        self._pulls_told = None

    @property
    def has_news(self) -> bool:
        """Whether replicas have to be told something beside the pushes."""
        return self._pulls_told not in (None, self._pulls)

    def take_decision(self, with_push: bool = False) -> npt.NDArray[np.int64] | None:
        """What replicas have to be told; None: of a push nothing."""
        if with_push:
            return None
        self._pulls_told = self._pulls
        return Decision(0, self._pulls, 0, NO_KEYS, NO_KEYS, NO_KEYS, NO_KEYS, NO_BITS).encode()

    def replay(self, decision: npt.NDArray[np.int64] | None, *parts: Array) -> None:
        """A push that the primary has applied."""
        self.push(*parts)

    def catch_up(self, decision: npt.NDArray[np.int64]) -> None:
        """What the primary tells beside."""
        self._pulls = decode(decision).pulls

    def take_back(self) -> None:
        """Pulls that replicas were not told of do not count: one of them is the primary now."""
        if self._pulls_told is not None:
            self._pulls = self._pulls_told


class SparseTable(Replicated):
    """int64 key -> dtype[dim]. A key that has no row has its initial one, and takes no memory.

    A key gets its row with its first push, or when `admission` lets it; it may lose it again as
    `eviction` says.
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
        self._store = RowStore(
            dim,
            dtype,
            optimizer.state_initial,
            optimizer.counts_steps,
            stamped=eviction is not None,
        )
        self._steps = self._pulls = self._pushes = self._keys_pulled = self._keys_pushed = 0
        self._keys_admitted = self._keys_refused = self._keys_evicted = 0
        self._decides = admission is not None or eviction is not None
        self._loaded_at = 0  # the table's time when the rows that are loaded were saved

    def __len__(self) -> int:
        return len(self._store)

    def keys(self) -> Keys:
        """The keys that have a row, in the order of their rows: int64[len]."""
        return self._store.keys.array[:, 0].copy()

    def pull(self, keys: Keys) -> Floats:
        """The row of each key, in the order asked, repeats and all: int64[n] -> float32[n, dim].
        Makes no row.
        """
        check_keys("pull from a sparse table", keys)
        self._pulls += 1
        self._keys_pulled += len(keys)
        rows = self._store.index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if self._evictor is not None:
            self._use(rows[rows >= 0] if len(absent) else rows, self._evictor.stamp(self._steps))
        if not len(absent):
            return self._store.values.gather(rows)
        if len(absent) == len(keys):
            return self._initializer.rows(keys, self.dim)
        # -1 reads the last row, which the initial one then covers
        pulled = self._store.values.gather(rows)
        pulled[absent] = self._initializer.rows(keys[absent], self.dim)
        return pulled

    def push(self, keys: Keys, *parts: Array) -> int:
        """Apply grads[i] (float32[n, dim]) to the row of keys[i]; those of one key are summed, then
        applied once.

        parts: grads, or what the table's compression makes of them. The version that it makes.
        """
        keys, grads, count = self._summed(keys, parts)
        return self._apply_to(self._rows_for(keys), grads, count)

    def _summed(self, keys: Keys, parts: tuple[Array, ...]) -> tuple[Keys, Floats, int]:
        """What push() was given, each key once, without those that are skipped; and how many keys
        there were.
        """
        check_keys(self._whose, keys)
        grads, count = (
            received(self._whose, self._compression, parts, (len(keys), self.dim)),
            len(keys),
        )
        keys, grads = sum_duplicates(keys, grads)
        grads, stay = self._guard.admit(self._whose, grads, keys)
        if stay is not None:
            keys, grads = keys[~stay], grads[~stay]
        return keys, grads, count

    def _apply_to(self, rows: Rows, grads: Floats, count: int) -> int:
        """The push of `count` keys; rows: of each different one, as _rows_for() says. The version
        that it makes.
        """
        self._pushes += 1
        self._keys_pushed += count
        if self._decides:
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
            # all different: what is gathered can go back
            block = rows[begin : begin + store.block_rows]
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
        """Counters since creation. bytes: rows with all they have, the index, and the counters of
        admission.
        """
        return TableStatistics(
            rows=len(self),
            bytes=self._store.nbytes
            + (self._doorkeeper.nbytes if self._doorkeeper is not None else 0),
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
        """The arrays of row_store.py. Live: not to be written, nor kept over a push."""
        return {
            name: array.array[:, 0] if name == "keys" else array.array
            for name, array in self._store.columns.items()
        }

    def scalars(self) -> dict[str, float]:
        """The steps, the table's time and how many keys the sketch has counted where that means
        something, and the counters of statistics()."""
        found: dict[str, float] = {"steps": self._steps}
        if self._evictor is not None:
            found["moment"] = self._evictor.stamp(self._steps)
        if self._doorkeeper is not None:
            found["additions"] = self._doorkeeper.additions
        return (
            found
            | {name: getattr(self, f"_{name}") for name in COUNTERS}
            | {"rows_skipped": self._guard.rows_skipped}
        )

    def singles(self) -> dict[str, npt.NDArray[Any]]:
        """The sketch of admission, if there is one. Live."""
        return {"sketch": self._doorkeeper.counters} if self._doorkeeper is not None else {}

    def track_changes(self, tracked: bool) -> None:
        """Keep `changes` from now on, at the cost of 4 bytes a row and one scatter a push; or not
        any more.
        """
        self._store.track_changes(tracked)

    @property
    def changes(self) -> Changes | None:
        """What has changed, while it is tracked."""
        return self._store.changes

    def used_since(self, moment: float, but: Rows) -> npt.NDArray[np.int64] | None:
        """[key, stamp] of the rows stamped at that moment of the table's time or later, without
        those in `but`: int64[n, 2]. None: they have no stamps."""
        if self._evictor is None:
            return None
        used = self._stamps() >= moment
        used[but] = False
        rows = np.flatnonzero(used)
        return np.stack([self._store.keys.array[rows, 0], self._stamps()[rows]], axis=1)

    def remove(self, keys: Keys) -> None:
        """Forget the rows of these keys, where they have one; none twice."""
        rows = self._store.index.lookup(keys)
        self._store.remove(rows[rows >= 0], self.before_change)

    def load(self, piece: Mapping[str, npt.NDArray[Any]], moment: float | None = None) -> None:
        """Put rows of columns() here, whatever admission and bounds say.

        moment: the table's time when they were saved: they keep their age. None: this table's own;
        so are their stamps. Those without stamps, of older checkpoints, count as just used.
        """
        piece = {**piece, "keys": piece["keys"][:, None]}
        if "stamps" in piece and moment is not None:
            piece["stamps"] = piece["stamps"] + (self._loaded_at - int(moment))
        rows = self._store.load(piece)
        if self._evictor is not None and "stamps" not in piece:
            self._stamp(rows, self._evictor.stamp(self._steps))

    def load_stamps(self, keys: Keys, stamps: Rows, moment: float | None = None) -> None:
        """Of keys whose rows are loaded, where they are; moment: as in load()."""
        rows = self._store.index.lookup(keys)
        self._stamps()[rows[rows >= 0]] = stamps[rows >= 0] + (
            0 if moment is None else self._loaded_at - int(moment)
        )

    def load_sketch(self, counters: npt.NDArray[np.uint8]) -> None:
        """Of admission, uint8[4, width]: those of several tables may come together in one."""
        if self._doorkeeper is not None:
            self._doorkeeper.load(counters)

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        """The greater of these steps and its own: the tables of several servers may come together
        in one. And of its time.
        """
        self._steps = max(self._steps, int(scalars["steps"]))
        if self._evictor is not None:
            moment = int(scalars.get("moment", 0))
            self._evictor.catch_up(moment)
            self._loaded_at = max(self._loaded_at, moment)
        if self._doorkeeper is not None:
            self._doorkeeper.additions = max(
                self._doorkeeper.additions, int(scalars.get("additions", 0))
            )

    def load_counters(self, scalars: Mapping[str, float]) -> None:
        """Counted on: the tables of several servers may come together in one. Those of before they
        were saved are 0.
        """
        for name in COUNTERS:
            setattr(self, f"_{name}", getattr(self, f"_{name}") + int(scalars.get(name, 0)))
        self._guard.rows_skipped += int(scalars.get("rows_skipped", 0))

    def _rows_for(self, keys: Keys) -> Rows:
        """The row of each key (none twice), made where it may be; -1 where it may not."""
        store, evictor = self._store, self._evictor
        now = evictor.stamp(self._steps) if evictor is not None else 0
        if evictor is not None:
            self._evict(evictor.expired(self._stamps(), now))
        rows = store.index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            wanting, counted = len(absent), NO_KEYS
            if self._doorkeeper is not None:
                counted = keys[absent]
                absent = absent[self._doorkeeper.admit(counted)]
            if evictor is not None:
                absent = absent[: max(0, evictor.rows_max - (len(keys) - wanting))]
                if self._make_room(evictor, rows[rows >= 0], len(absent)):
                    present = rows >= 0
                    rows[present] = store.index.lookup(keys[present])  # they may have moved
            try:
                rows[absent] = store.add(keys[absent], self._initializer)
            except (MemoryError, BadArguments):
                if self._decisions is not None:
                    self._decisions.failed(counted)
                raise
            self._keys_admitted += len(absent)
            self._keys_refused += wanting - len(absent)
        if evictor is not None:
            self._stamp(rows[rows >= 0], now)
        if self._decisions is not None:
            self._decisions.pushed(now, rows >= 0)
        return rows

    def _make_room(self, evictor: Evictor, kept: Rows, coming: int) -> bool:
        """Evict until `coming` rows fit beside those there are, but none of `kept`; whether any
        went.
        """
        if len(self) + coming <= evictor.rows_max:
            return False
        before = self._stamps()[kept]  # which stay as they are where the push then finds no memory
        self._stamp(kept, PINNED)
        oldest = evictor.oldest(self._stamps(), len(self) + coming - evictor.rows_max)
        self._stamps()[kept] = before
        self._evict(oldest)
        return True
