"""What a sparse table does for its replicas, and as one: it notes what it decides, and does what
was decided elsewhere.

    of a primary's table  begin_telling(), then take_decision() with each push, and whenever it asks
                          for that by `tell`
    of a replica's        replay(), catch_up(): in the order in which the primary took those
    as it becomes one     take_back(): what pulls left here and no replica has heard of is undone

What is decided, and what it looks like on its way, stands in decisions.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments
from prpc_engine.kv.table.admission import Doorkeeper
from prpc_engine.kv.table.decisions import NO_BITS, NO_KEYS, Decision, Decisions, decode
from prpc_engine.kv.table.eviction import Evictor
from prpc_engine.kv.table.initializer import Initializer
from prpc_engine.kv.table.row_store import RowStore

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Replicated:
    """A Replicated table tells its replicas what it decides, or does what its primary decided.

    The base of SparseTable, which has the rows; used in the thread of its shard. replay() and
    catch_up() raise BadArguments when this copy is not equal to the primary's: it is to be made
    anew then.
    """

    before_change: Callable[[Rows | None], None] | None
    _doorkeeper: Doorkeeper | None
    _evictor: Evictor | None
    _initializer: Initializer
    _store: RowStore
    _steps: int
    _pulls: int
    _keys_pulled: int
    _keys_admitted: int
    _keys_refused: int
    _keys_evicted: int
    _decides: bool  # on which rows there are: it has an admission or an eviction
    _decisions: Decisions | None = None  # while replicas follow a table that decides
    _reads_told: tuple[int, int] | None = None  # while replicas follow

    @abstractmethod
    def push(self, keys: Keys, *parts: npt.NDArray[Any]) -> int: ...

    @abstractmethod
    def load_stamps(self, keys: Keys, stamps: Rows) -> None: ...

    @abstractmethod
    def _summed(
        self, keys: Keys, parts: tuple[npt.NDArray[Any], ...]
    ) -> tuple[Keys, Floats, int]: ...

    @abstractmethod
    def _apply_to(self, rows: Rows, grads: Floats, count: int) -> int: ...

    def begin_telling(self, tell: Callable[[], object]) -> None:
        """From now on replicas follow: they have what there is. tell: is called when they have to
        be told something at once.
        """
        if self._reads_told is None:
            self._reads_told = self._pulls, self._keys_pulled
            self._decisions = Decisions(tell, self._now()) if self._decides else None

    def stop_telling(self) -> None:
        """None follows."""
        self._reads_told = self._decisions = None

    @property
    def has_news(self) -> bool:
        """Whether replicas have to be told something beside the pushes."""
        return self._reads_told is not None and self._reads_told != (self._pulls, self._keys_pulled)

    def take_decision(self, with_push: bool = False) -> npt.NDArray[np.int64] | None:
        """What replicas have to be told, of a push and of what was before it; None: of a push
        nothing.
        """
        reads = self._pulls, self._keys_pulled
        if self._decisions is None:
            if with_push:
                return None
            decision = Decision(0, *reads, NO_KEYS, NO_KEYS, NO_KEYS, NO_KEYS, NO_BITS)
        else:
            decision = self._decisions.take(self._now(), *reads, self._stamps_of)
        self._reads_told = reads
        return decision.encode()

    def replay(
        self, decision: npt.NDArray[np.int64] | None, keys: Keys, *parts: npt.NDArray[Any]
    ) -> None:
        """A push that the primary has applied, as it was decided. BadArguments: this table has not
        what the primary has.
        """
        if decision is None:
            self.push(keys, *parts)
            return
        decided = decode(decision)
        keys, grads, count = self._summed(keys, parts)
        if len(decided.has_row) != len(keys):
            raise BadArguments(
                f"a push of {len(keys)} different keys with decisions for {len(decided.has_row)}"
            )
        self._begin_as_decided(decided)
        rows = self._store.index.lookup(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            if self._doorkeeper is not None:
                self._doorkeeper.count(keys[absent])
            coming = absent[decided.has_row[absent]]
            rows[coming] = self._store.add(keys[coming], self._initializer)
            self._keys_admitted += len(coming)
            self._keys_refused += len(absent) - len(coming)
        if not np.array_equal(rows >= 0, decided.has_row):
            raise BadArguments(
                "keys of a push have rows here that they do not have at the primary: "
                "copy the partition again"
            )
        if self._evictor is not None:
            self._stamp(rows[rows >= 0], decided.moment)
        self._apply_to(rows, grads, count)
        self._end_as_decided(decided)

    def catch_up(self, decision: npt.NDArray[np.int64]) -> None:
        """What the primary tells beside pushes."""
        decided = decode(decision)
        self._begin_as_decided(decided)
        self._end_as_decided(decided)

    def take_back(self) -> None:
        """What pulls have left and replicas were not told has not been: one of them is the primary
        now.
        """
        if self._decisions is not None and self._evictor is not None:
            self._decisions.take_back(self.load_stamps)
        if self._reads_told is not None:
            self._pulls, self._keys_pulled = self._reads_told

    def _begin_as_decided(self, decided: Decision) -> None:
        rows = self._store.index.lookup(decided.evicted)
        if len(rows) and rows.min() < 0:
            raise BadArguments(
                "keys lose their rows at the primary that have none here: copy the partition again"
            )
        if self._evictor is not None:
            self._evictor.catch_up(decided.moment)
        self._evict(rows)
        if len(decided.counted) and self._doorkeeper is not None:
            self._doorkeeper.count(decided.counted)

    def _end_as_decided(self, decided: Decision) -> None:
        if len(decided.used):
            self.load_stamps(decided.used, decided.stamps)
        self._pulls, self._keys_pulled = decided.pulls, decided.keys_pulled

    def _now(self) -> int:
        return self._evictor.stamp(self._steps) if self._evictor is not None else 0

    def _use(self, rows: Rows, now: int) -> None:
        """Stamp them for a pull, and note which replicas have not heard of: each once or twice,
        however often it is pulled.
        """
        decisions, stamps = self._decisions, self._stamps()
        if decisions is not None:
            before = stamps[rows]
            fresh = np.flatnonzero((before <= decisions.told_at) & (before != now))
            if len(fresh):
                decisions.used(self._store.keys.array[rows[fresh], 0], before[fresh])
        stamps[rows] = now
        if decisions is not None and decisions.is_full:
            decisions.tell()

    def _stamps_of(self, keys: Keys) -> tuple[Keys, Rows]:
        """Those of the keys that have rows, and their stamps."""
        if not len(keys):
            return keys, keys
        rows = self._store.index.lookup(keys)
        return keys[rows >= 0], self._stamps()[rows[rows >= 0]]

    def _evict(self, rows: Rows) -> None:
        if len(rows):
            if self._decisions is not None:
                self._decisions.evicted(self._store.keys.array[rows, 0])
            self._store.remove(rows, self.before_change)
            self._keys_evicted += len(rows)

    def _stamps(self) -> Rows:
        assert self._store.stamps is not None
        stamps: Rows = self._store.stamps.array[:, 0]
        return stamps

    def _stamp(self, rows: Rows, moment: int) -> None:
        self._stamps()[rows] = moment
