"""TopK: the keys that came most often, of any number of keys, in a table of `capacity` counters.

This is the summary of J. Misra and D. Gries ("Finding repeated elements", 1982) in its mergeable
form (P. Agarwal, G. Cormode, Z. Huang, J. Phillips, Z. Wei, K. Yi, "Mergeable Summaries", PODS
2012): counts are added exactly; when more than `capacity` keys are there, the (capacity + 1)-th
largest count is taken off all of them, and what is left with nothing goes. For each key

    count kept <= true count <= count kept + error_bound,  error_bound <= total / (capacity + 1)

in whatever order and grouping things were merged: a key that made up more than total / (capacity +
1) is always there, and while no more than `capacity` keys came, every count is exact. `error_bound`
   is what was really taken off, usually far less.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

from prpc_engine.accumulator.aggregator import (
    KEY_LENGTH_MAX,
    Aggregator,
    check_count,
    check_key,
    check_parameter,
)
from prpc_engine.accumulator.arithmetic import COUNT_MAX, add_counts
from prpc_engine.errors import BadArguments

CAPACITY = 1024  # a key that makes up one in a thousand is found; some 100 KB
CAPACITY_MAX = 1 << 20
WHOSE = "a topk counter"


class Hit(NamedTuple):
    """One of the largest keys of a top-k counter. The sketch does not know its count exactly: it
    lies between count_min and count_max, both included.
    """

    key: str | int | bytes
    count_min: int
    count_max: int


class TopK(Aggregator, kind="topk"):
    """A TopK keeps the keys that came most often, of any number of keys, in `capacity` counters.

    Values are keys (str, bytes, ints of 64 bits), or pairs (key, how many of it). Counts kept are
    too small by error_bound at most, which is 0 while no more than `capacity` keys came. Raises
    ConfigError for a capacity that is not possible, BadArguments for other values.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        check_parameter("TopK", "capacity", capacity, 1, CAPACITY_MAX)
        self.capacity = capacity
        self.counts: dict[str | int | bytes, int] = {}
        self.total = 0
        self.error_bound = 0

    def parameters(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    def check(self, value: Any) -> Any:
        if type(value) is str and len(value) <= KEY_LENGTH_MAX and value.isascii():
            return value, 1  # the usual case, without a further call
        key, count = value if isinstance(value, tuple) and len(value) == 2 else (value, 1)
        key = check_key(WHOSE, key)
        if type(count) is not int or not 1 <= count <= COUNT_MAX:
            raise BadArguments(
                f"{WHOSE} takes whole numbers from 1 on as counts, not {count!r:.80}"
            )
        return key, count

    def merge_value(self, value: tuple[str | int | bytes, int]) -> None:
        self.merge_values([value])

    def merge_values(self, values: Sequence[tuple[str | int | bytes, int]]) -> None:
        # no count is larger than the total
        self.total = add_counts(WHOSE, self.total, sum(count for _, count in values))
        counts = self.counts
        for key, count in values:
            counts[key] = counts.get(key, 0) + count
        self._shrink()

    def merge_aggregator(self, other: TopK) -> None:
        self.total = add_counts(WHOSE, self.total, other.total)
        for key, count in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count
        self.error_bound += other.error_bound
        self._shrink()

    def _shrink(self) -> None:
        if len(self.counts) <= self.capacity:
            return
        off = heapq.nlargest(self.capacity + 1, self.counts.values())[-1]
        self.counts = {key: count - off for key, count in self.counts.items() if count > off}
        self.error_bound += off

    def top(self, k: int) -> list[Hit]:
        """The k keys with the largest counts kept, largest first; equal ones in the order of their
        text.
        """
        best = sorted(self.counts.items(), key=lambda item: (-item[1], str(item[0])))[:k]
        return [Hit(key, count, count + self.error_bound) for key, count in best]

    def serialize(self) -> Any:
        return (list(self.counts), list(self.counts.values()), self.total, self.error_bound)

    def deserialize(self, state: Any) -> None:
        keys, counts, total, error_bound = state
        if len(keys) > self.capacity:
            raise BadArguments(
                f"{WHOSE} of capacity {self.capacity}: a state with {len(keys)} keys"
            )
        kept = {
            check_key(WHOSE, key): check_count(WHOSE, count)
            for key, count in zip(keys, counts, strict=True)
        }
        taken_off = check_count(WHOSE, total) - sum(kept.values())
        if (
            len(kept) < len(keys)
            or 0 in kept.values()
            or taken_off < check_count(WHOSE, error_bound) * (self.capacity + 1)
        ):
            raise BadArguments(
                f"{WHOSE}: a state with keys that come twice, or with impossible counts"
            )
        self.counts, self.total, self.error_bound = kept, total, error_bound

    def try_to_string(self) -> str | None:
        if not self.counts:
            return None
        hits = ", ".join(f"{hit.key!s}: {hit.count_min}" for hit in self.top(10))
        return f"{hits} (each at most {self.error_bound} more)" if self.error_bound else hits
