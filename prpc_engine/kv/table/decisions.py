"""What a primary decides about the rows of a table, and how its replicas are told: they do the
same, and decide nothing. No I/O.

Which keys get a row, and which rows go, hangs on counts and stamps that grow with each push and
each pull, and pulls are the primary's alone. So each push travels with what was decided for it, and
with the stamps that pulls have left since the one before; what pulls leave is also told when
USES_MAX keys wait, at each look of the reconciler, and when the partition is handed over.

    int64[...]          meaning
    MOMENT              the table's time (eviction.py) at the push; without one: as it is told
    PULLS, KEYS_PULLED  of the table in all
    EVICTED             how many keys follow that have lost their rows
    COUNTED             how many keys follow that were counted for a push which then failed: for one
                        that did not, the replica knows
    USED                how many keys follow that were stamped, with their stamps behind them
    PUSHED              how many keys the push has, each once; then comes a bit for each, lowest
                        first: whether it has a row now

Done in this order: rows go, keys are counted, the push, the stamps: those are as of the end of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments

# keys that pulls have stamped and no replica has heard of: half a MiB, and as much for what they
# were before
USES_MAX = 65536
MOMENT, PULLS, KEYS_PULLED, EVICTED, COUNTED, USED, PUSHED, HEAD = range(8)
NO_KEYS: npt.NDArray[np.int64] = np.empty(0, np.int64)
NO_BITS: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Stamps = npt.NDArray[np.int64]


class Decision(NamedTuple):
    """A decision tells replicas what their primary decided about rows, with one push or beside it.

    evicted: keys that lost their rows; counted: keys counted for a push that failed; used, stamps:
    keys that were stamped, with their stamps. has_row: bool[keys of the push]. encode() makes the
    int64 array that goes over the wire: the table at the file's head.
    """

    moment: int
    pulls: int
    keys_pulled: int
    evicted: Keys
    counted: Keys
    used: Keys
    stamps: Stamps
    has_row: npt.NDArray[np.bool_]

    def encode(self) -> npt.NDArray[np.int64]:
        """As decode() takes it."""
        lengths = (len(self.evicted), len(self.counted), len(self.used), len(self.has_row))
        bits = np.zeros(8 * -(-len(self.has_row) // 64), np.uint8)
        packed = np.packbits(self.has_row, bitorder="little")
        bits[: len(packed)] = packed
        head = np.array([self.moment, self.pulls, self.keys_pulled, *lengths], np.int64)
        return np.concatenate(
            [head, self.evicted, self.counted, self.used, self.stamps, bits.view(np.int64)]
        )


def decode(words: npt.NDArray[Any]) -> Decision:
    """The inverse of encode(). BadArguments: it is none."""
    if words.ndim != 1 or words.dtype != np.int64 or len(words) < HEAD:
        raise BadArguments(
            f"a decision is int64[{HEAD} or more], not {words.dtype}{list(words.shape)}"
        )
    moment, pulls, keys_pulled, evicted, counted, used, pushed = words[:HEAD].tolist()
    ends = np.cumsum([HEAD, evicted, counted, used, used]).tolist()
    if min(evicted, counted, used, pushed) < 0 or ends[-1] - (-pushed // 64) != len(words):
        raise BadArguments(
            f"a decision of {len(words)} words does not have the lengths that it says: "
            f"{words[:HEAD].tolist()}"
        )
    gone, counted, used_keys, stamps = (words[begin:end] for begin, end in pairwise(ends))
    has_row = np.unpackbits(
        np.ascontiguousarray(words[ends[-1] :]).view(np.uint8), count=pushed, bitorder="little"
    )
    return Decision(
        moment, pulls, keys_pulled, gone, counted, used_keys, stamps, has_row.astype(np.bool_)
    )


class Decisions:
    """Those of one table that its replicas have not been told. Owned by the table, while somebody
    follows it.

    tell: is called when they have to be told, outside of a push. moment: the table's time, of which
    all are told.
    """

    def __init__(self, tell: Callable[[], object], moment: int) -> None:
        self.tell = tell
        self._clear(moment)

    def _clear(self, moment: int) -> None:
        self.told_at = moment  # a row with a later stamp is in `used`
        self._pushed_at: int | None = None
        self._has_row = NO_BITS
        self._evicted: list[Keys] = []
        self._counted = NO_KEYS
        self._used: list[tuple[Keys, Stamps]] = []  # keys, and what their stamps were before
        self._uses = 0

    @property
    def is_full(self) -> bool:
        """Whether what pulls have left is to be told now; not amid a push, with which it is told
        anyway.
        """
        return self._uses >= USES_MAX and self._pushed_at is None

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._used)

    def evicted(self, keys: Keys) -> None:
        """These lose their rows."""
        self._evicted.append(keys)

    def pushed(self, moment: int, has_row: npt.NDArray[np.bool_]) -> None:
        """A push has had its rows, and stamped them."""
        self._pushed_at, self._has_row = moment, has_row
        self.told_at = max(self.told_at, moment)

    def failed(self, counted: Keys) -> None:
        """A push has got no rows: what was done for it is told by itself, and at once."""
        self._counted = counted
        self.tell()

    def used(self, keys: Keys, before: Stamps) -> None:
        """These are stamped, as they were not since told_at; what their stamps were."""
        self._used.append((keys, before))
        self._uses += len(keys)

    def take(
        self,
        now: int,
        pulls: int,
        keys_pulled: int,
        stamps_of: Callable[[Keys], tuple[Keys, Stamps]],
    ) -> Decision:
        """All of it, to be told now. stamps_of: those of some keys that have rows, and their
        stamps.
        """
        used = (
            np.unique(np.concatenate([keys for keys, _ in self._used])) if self._used else NO_KEYS
        )
        moment = now if self._pushed_at is None else self._pushed_at
        evicted = np.concatenate([NO_KEYS, *self._evicted])
        decision = Decision(
            moment, pulls, keys_pulled, evicted, self._counted, *stamps_of(used), self._has_row
        )
        self._clear(now)
        return decision

    def take_back(self, restamp: Callable[[Keys, Stamps], object]) -> None:
        """What was not told has not been: who serves from now on does not know of it. restamp: sets
        the stamps of keys.
        """
        for keys, before in reversed(self._used):
            restamp(keys, before)
