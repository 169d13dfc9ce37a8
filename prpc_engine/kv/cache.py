"""Hot rows of a sparse table kept at the worker: read again from here for a while, instead of from the servers.

    index    key -> place          keys    int64[rows]         values  float32[rows, dim]
                                   pulled  float64[rows]       when the values came, in seconds; -inf: forgotten, not to be used
                                   used    int64[rows]         the pull that last used the place; -1: the place is free

    a key that is pulled                             is answered from    and then
    is here, pulled at most staleness_s ago          here                counts as used
    is here, and older                               its server          its new row is here
    is not here, and there is a free place           its server          takes it
    is not here, and all places are taken            its server          takes that of the key least recently used (LRU)

An own push makes its keys forgotten once it is applied, or may have been: a worker reads what it wrote. What other workers push
is seen staleness_s later at the worst. All is done in batches, by the index of the tables: some numpy calls a pull, none a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.checks import check_keys
from prpc_engine.kv.duplicates import unique
from prpc_engine.kv.index import KeyIndex
from prpc_engine.kv.spec import checked_count, checked_number
from prpc_engine.kv.worker import TableWorker

ROWS_MAX = 2**31 - 1
NEVER = -np.inf
FREE = -1
Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class CacheStatistics:
    """Of all pulls so far, in different keys of each: hits came from here, misses from servers (stale ones of them were here, and
    too old or forgotten), evicted lost their place. rows: places taken now.
    """

    rows: int
    hits: int
    misses: int
    stale: int
    evicted: int


class CachedTable:
    """pull, push and push_pull of one sparse table of `kv` through a cache of `rows` rows. One user at a time.

    staleness_s: seconds for which a row is read from here; 0: only what was pulled at that very moment. Raises ConfigError for
    bounds that are not allowed, and what the verbs of TableWorker raise.
    """

    def __init__(
        self, kv: TableWorker, table: str, *, rows: int, staleness_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        checked_count(f"cache of {table!r}: rows", rows, at_least=1, at_most=ROWS_MAX)
        self._staleness_s = checked_number(f"cache of {table!r}: staleness_s", staleness_s, at_least=0)
        self.kv = kv
        self.table = table
        self._clock = clock
        self._index = KeyIndex()
        self._keys = np.empty(rows, np.int64)
        self._values = np.empty((rows, kv.pull(table, np.empty(0, np.int64)).shape[1]), np.float32)
        self._pulled = np.full(rows, NEVER)
        self._used = np.full(rows, FREE)
        self._pulls = self._hits = self._misses = self._stale = self._evicted = 0

    def pull(self, keys: Keys, *, timeout_s: float | None = None) -> Floats:
        """The row of each key, at most staleness_s old: int64[n] -> float32[n, dim], the caller's own."""
        asked, which = unique(check_keys(f"pull from table {self.table!r}", keys))
        now = self._clock()
        self._pulls += 1
        places = self._index.lookup(asked)
        missing = np.flatnonzero((places < 0) | (now - self._pulled[places] > self._staleness_s))
        self._hits += len(asked) - len(missing)
        self._misses += len(missing)
        self._used[places[places >= 0]] = self._pulls
        values = self._values.take(places, axis=0)  # -1 reads the last place, which the pulled row then covers
        if len(missing):
            values[missing] = self.kv.pull(self.table, asked[missing], timeout_s=timeout_s)
            self._keep(asked[missing], places[missing], values[missing], now)  # as of when it was asked: no younger than it is
        return values if which is None else values.take(which, axis=0)

    def push(self, keys: Keys, grads: Floats, *, timeout_s: float | None = None) -> None:
        """Have gradients applied; the next pull of these keys asks their servers."""
        try:
            self.kv.push(self.table, keys, grads, timeout_s=timeout_s)
        finally:
            self.forget(keys)

    def push_pull(self, keys: Keys, grads: Floats, *, timeout_s: float | None = None) -> Floats:
        """push(), then the new rows."""
        try:
            return self.kv.push_pull(self.table, keys, grads, timeout_s=timeout_s)
        finally:
            self.forget(keys)

    def forget(self, keys: Keys) -> None:
        """Ask their servers for these keys next time."""
        places = self._index.lookup(keys)
        self._pulled[places[places >= 0]] = NEVER

    def statistics(self) -> CacheStatistics:
        """Counters since creation."""
        return CacheStatistics(len(self._index), self._hits, self._misses, self._stale, self._evicted)

    def _keep(self, keys: Keys, places: npt.NDArray[np.int64], values: Floats, now: float) -> None:
        """Put rows here: `places` says where keys are already; -1: nowhere."""
        here = places >= 0
        self._stale += int(np.count_nonzero(here))
        fresh = np.flatnonzero(~here)[: len(self._keys)]
        room = self._places_for(len(fresh))
        fresh = fresh[: len(room)]
        self._index.insert(keys[fresh], room)
        self._keys[room] = keys[fresh]
        places = places.copy()
        places[fresh] = room
        kept = places >= 0
        self._values[places[kept]] = values[kept]
        self._pulled[places[kept]] = now
        self._used[places[kept]] = self._pulls

    def _places_for(self, count: int) -> npt.NDArray[np.int64]:
        """Up to `count` places, the least recently used ones; none that the present pull uses."""
        if not count:
            return np.empty(0, np.int64)
        oldest = np.argpartition(self._used, count - 1)[:count]
        oldest = oldest[self._used[oldest] < self._pulls]
        taken = oldest[self._used[oldest] != FREE]
        self._index.remove(self._keys[taken])
        self._evicted += len(taken)
        return oldest
