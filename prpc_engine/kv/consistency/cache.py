"""Hot rows of a sparse table kept at the worker: read again from here for a while, instead of from
the servers.

    index    key -> place   keys    int64[rows]         values  float32[rows, dim]
    pulled   float64[rows]  when the values were asked for, in seconds; -inf: they are not to be
                            used
    pull     int64[rows]    number of the pull that is to fill the place; 0: none is
    is_used  bool[rows]     since the clock's hand passed here last
    is_taken bool[rows]

    a key that is pulled                     is answered from  and then
    is here, pulled at most staleness_s ago  here              counts as used
    is here, and older                       its server        counts as used; this pull is to fill
                                                               its place
    is not here                              its server        this pull is to fill a place, if the
                                                               hand finds one
    comes from its server                                      is here, if this pull still is to
                                                               fill its place

    the hand finds a place that  and then
    is used                      is not used any more: its key has a second chance; the hand goes
                                 on, around once at most
    is not used                  is given away; what was there is evicted

The hand is the CLOCK algorithm: about the least recently used (LRU) goes, and a key that was pulled
once goes before those that were pulled again. It looks at windows of places with a few numpy calls,
and at a place no oftener than that is pulled.

A push takes its keys' rows and the pulls under way of them back, when it is sent and when it is
applied: so a worker reads what it wrote. What other workers push is seen staleness_s later at the
worst. When state went back (session.py) all rows go.

Pulls of 64 / 4096 keys, dim 16, from 2 shards over shared memory: 329 / 701 us, from here 55 / 250;
4096 keys that are not here, in a full cache: 2.6 ms instead of 0.65. So a cache is for keys that
come again: between four and five hits pay for a miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import ConfigError
from prpc_engine.kv.table.index import KeyIndex
from prpc_engine.kv.table.spec import checked_count, checked_number, configured
from shard import runtime

ROWS_MAX = 2**31 - 1
WINDOW = 1024  # places that the hand looks at together: some us
NEVER = -math.inf
Keys = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Cache:
    """rows: how many are kept at this worker; staleness_s: seconds for which one is read from here.
    ConfigError for others.
    """

    rows: int
    staleness_s: float

    def __post_init__(self) -> None:
        checked_count("cache: rows", self.rows, at_least=1, at_most=ROWS_MAX)
        checked_number("cache: staleness_s", self.staleness_s, at_least=0)


@dataclass(frozen=True)
class CacheStatistics:
    """Of all pulls so far, in different keys of each: hits came from here, misses from servers
    (stale ones of them were here, and too old or pushed to), evicted lost their place. rows: places
    taken now. age_s_mean, age_s_max: of the hits' rows, in seconds.
    """

    rows: int
    hits: int
    misses: int
    stale: int
    evicted: int
    age_s_mean: float
    age_s_max: float


class CachedRows(NamedTuple):
    """What a pull has from here. missing: positions whose rows in `values` are still to be asked
    for.
    """

    values: Floats
    missing: npt.NDArray[np.intp]
    pull: int
    asked_s: float


class RowCache:
    """A row cache keeps hot rows of one sparse table at a worker, and answers pulls from them.

    Owned by one worker; any thread may call. settings: how many rows, and for how many seconds a
    row may be used. dim: numbers in a row. clock: gives seconds. A pull calls look_up(), and fill()
    with what servers sent; a push calls forget(). Which rows stay: the tables at the file's head.
    """

    def __init__(self, settings: Cache, dim: int, clock: Callable[[], float] = runtime.now) -> None:
        self.settings = settings
        self._clock = clock
        self._lock = runtime.Lock()  # any thread pulls, and what comes in changes rows
        self._keys = np.empty(settings.rows, np.int64)
        self._values = np.empty((settings.rows, dim), np.float32)
        self._pulls = self._hits = self._misses = self._stale = self._evicted = 0
        self._age_s = self._age_s_max = 0.0
        self._losses = 0
        self._clear()

    def _clear(self) -> None:
        rows = self.settings.rows
        self._index = KeyIndex()
        self._pulled = np.full(rows, NEVER)
        self._pull = np.zeros(rows, np.int64)
        self._is_used, self._is_taken = np.zeros((2, rows), np.bool_)
        self._hand = 0

    @classmethod
    def made(
        cls,
        table: str,
        settings: object,
        dim: int,
        bound: object,
        clock: Callable[[], float] = runtime.now,
    ) -> RowCache | None:
        """Of Cache(...) or its plain form; None -> None. bound: what says how stale this worker's
        pulls may be, else None.

        Raises ConfigError.
        """
        if settings is None:
            return None
        if bound is not None:
            raise ConfigError(
                f"table {table!r}: a cache shows older rows than {bound} allows; "
                "leave one of them out"
            )
        return cls(configured(f"table {table!r}: cache", Cache, settings), dim, clock)

    def look_up(self, keys: Keys, losses: int) -> CachedRows:
        """What is here of those keys (none twice), as of when state had gone back `losses`
        times.
        """
        with self._lock:
            if losses != self._losses:
                self._losses = losses
                self._clear()
            now = self._clock()
            self._pulls += 1
            places = self._index.lookup(keys)
            # -1 reads the last place: the row is not taken from there
            ages_s = now - self._pulled[places]
            is_hit = (places >= 0) & (ages_s <= self.settings.staleness_s)
            values = self._values.take(places, axis=0)
            self._is_used[places[places >= 0]] = True
            missing = np.flatnonzero(~is_hit)
            if len(missing) < len(keys):
                ages_s = ages_s[is_hit]
                self._hits += len(ages_s)
                self._age_s += float(ages_s.sum())
                self._age_s_max = max(self._age_s_max, float(ages_s.max()))
            if len(missing):
                self._misses += len(missing)
                self._reserve(keys[missing], places[missing])
            return CachedRows(values, missing, self._pulls, now)

    def _reserve(self, keys: Keys, places: Places) -> None:
        """This pull is to fill a place for each of these keys; `places`: those that they have, -1:
        none.
        """
        is_here = places >= 0
        self._stale += int(np.count_nonzero(is_here))
        self._pull[places[is_here]] = self._pulls
        fresh = keys[~is_here]
        room = self._room(len(fresh))
        fresh = fresh[: len(room)]
        self._index.insert(fresh, room)
        self._keys[room] = fresh
        self._pulled[room] = NEVER
        self._pull[room] = self._pulls
        self._is_taken[room] = True

    def _room(self, count: int) -> Places:
        """Up to `count` places, free now."""
        rows, passed, found = self.settings.rows, 0, [np.empty(0, np.int64)]
        while count and passed < rows:
            begin = self._hand
            end = min(begin + max(WINDOW, 2 * count), rows, begin + rows - passed)
            unused = np.flatnonzero(~self._is_used[begin:end])[:count] + begin
            if len(unused) == count:
                end = int(unused[-1]) + 1
            self._is_used[begin:end] = False
            found.append(unused)
            count -= len(unused)
            passed += end - begin
            self._hand = end % rows
        room = np.concatenate(found)
        taken = room[self._is_taken[room]]
        self._index.remove(self._keys[taken])
        self._evicted += len(taken)
        return room

    def fill(self, keys: Keys, rows: Floats, found: CachedRows) -> None:
        """What servers answered for the missing keys of a pull; they are as old as the asking."""
        with self._lock:
            places = self._index.lookup(keys)
            kept = np.flatnonzero((places >= 0) & (self._pull[places] == found.pull))
            places = places[kept]
            self._values[places] = rows[kept]
            self._pulled[places] = found.asked_s

    def joined(
        self,
        keys: Keys,
        found: CachedRows,
        pulled: Callable[[list[Floats]], Floats],
        which: npt.NDArray[np.intp] | None,
    ) -> Callable[[list[Floats]], Floats]:
        """What makes the values of a pull of keys[which] of what look_up() found, and of the
        servers' answers for `keys`, which are the missing ones: pulled(answers)."""

        def assemble(answers: list[Floats]) -> Floats:
            if len(keys):
                rows = pulled(answers)
                self.fill(keys, rows, found)
                found.values[found.missing] = rows
            return found.values if which is None else found.values.take(which, axis=0)

        return assemble

    def forgetting(
        self, keys: Keys, join: Callable[[list[Any]], Value]
    ) -> Callable[[list[Any]], Value]:
        """join(), which makes the answer to a push of these keys, and forget(keys) at that
        moment.
        """

        def applied(answers: list[Any]) -> Value:
            self.forget(keys)
            return join(answers)

        return applied

    def forget(self, keys: Keys) -> None:
        """Ask their servers for these keys next time."""
        with self._lock:
            places = self._index.lookup(keys)
            places = places[places >= 0]
            self._pulled[places] = NEVER
            self._pull[places] = 0

    def statistics(self) -> CacheStatistics:
        """Counters since creation."""
        with self._lock:
            return CacheStatistics(
                rows=len(self._index),
                hits=self._hits,
                misses=self._misses,
                stale=self._stale,
                evicted=self._evicted,
                age_s_mean=self._age_s / max(1, self._hits),
                age_s_max=self._age_s_max,
            )
