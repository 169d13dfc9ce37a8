"""KVServerDefaultHandle: the sum of everything that was pushed to a key, whatever its length.

    index    key -> row
    starts   int64[rows]  where in `values` a row's first element is
    lengths  int64[rows]  how many elements it has, fixed by the first push of its key
    values   float[n]     all rows, each where the first push of its key put it: keys that came
                          together lie together

So the usual request, keys that were first pushed together, is one slice of `values`; any other is
gathered by numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments
from prpc_engine.kv.table.index import KeyIndex
from prpc_engine.pslite.conversion import converted
from prpc_engine.pslite.pairs import Keys, KVPairs, Lens, Vals

if TYPE_CHECKING:
    from prpc_engine.pslite.kv_server import KVMeta, KVServer

Where = slice | npt.NDArray[np.int64]


class KVServerDefaultHandle:
    """The default handle of a KVServer sums what is pushed to each key, and answers pulls.

    Push adds, pull reads, push_pull adds and then reads. A key that nobody has pushed reads as one
    0 while all keys have one element; else it is refused, as is a push of another length than the
    first: BadArguments. Sums are of the dtype of this server's first push, of whichever key: floats
    are rounded to it, integers wrap around in it, and a pushed value that it does not hold is
    refused. It takes no lock: for servers with handler_threads of 0 or 1.
    """

    def __init__(self) -> None:
        self._index = KeyIndex()
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)
        self._values: npt.NDArray[Any] | None = None
        self._used = 0
        self._is_scalar = True

    def __len__(self) -> int:
        """Keys that were pushed."""
        return len(self._index)

    def __call__(self, meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
        """Handle one request."""
        if meta.push:
            self.push(pairs)
        if not meta.pull:
            server.response(meta)
            return
        vals, lens = self.pull(pairs.keys)
        server.response(meta, KVPairs(pairs.keys, vals, lens))

    def push(self, pairs: KVPairs) -> None:
        """Add. Raises BadArguments, and then nothing was added."""
        keys, vals, lens = pairs.keys, pairs.vals, pairs.lens
        if not len(keys):
            return
        lengths = (
            np.full(len(keys), len(vals) // len(keys), np.int64)
            if lens is None
            else lens.astype(np.int64)
        )
        if len(lengths) != len(keys) or int(lengths.min()) < 0 or int(lengths.sum()) != len(vals):
            raise BadArguments(
                f"a push of {len(keys)} keys and {len(vals)} vals, whose lens do not fit them"
            )
        rows = self._index.lookup(keys.view(np.int64))
        known = rows >= 0
        wrong = self._lengths[rows[known]] != lengths[known]
        if wrong.any():
            at = int(np.flatnonzero(known)[wrong.argmax()])
            raise BadArguments(
                f"key {keys[at]} has {self._lengths[rows[at]]} values since its first push, "
                f"and {lengths[at]} were pushed now"
            )
        kept = vals.dtype if self._values is None else self._values.dtype
        if vals.dtype is not kept:
            if not np.can_cast(vals.dtype, kept, "same_kind"):
                raise BadArguments(
                    f"values are {kept} since the first push, and {vals.dtype} were pushed now"
                )
            try:
                vals = converted(keys, vals, lens, kept)
            except ValueError as error:
                raise BadArguments(
                    f"{error}, the dtype of this server's first push, of whichever key; "
                    "begin with a push of a dtype that holds all that comes"
                ) from None
        if not known.all():
            self._add_keys(keys[~known], lengths[~known], vals.dtype)
            rows = self._index.lookup(keys.view(np.int64))
        assert self._values is not None
        self._values[self._where(rows)] += vals

    def pull(self, keys: Keys) -> tuple[Vals, Lens | None]:
        """A copy of the values, and their lengths unless all are equal. Raises BadArguments for a
        key that nobody pushed.
        """
        rows = self._index.lookup(keys.view(np.int64))
        absent = rows < 0
        if self._values is None or absent.any():
            if not self._is_scalar:
                raise BadArguments(
                    f"key {keys[absent.argmax()]} was never pushed, so its length is not known; "
                    "push it first"
                )
            vals = np.zeros(len(keys), np.float32 if self._values is None else self._values.dtype)
            if self._values is not None:
                vals[~absent] = self._values[self._starts[rows[~absent]]]
            return vals, None
        lengths = self._lengths[rows]
        is_even = not len(lengths) or bool((lengths == lengths[0]).all())
        where = self._where(rows)
        vals = self._values[where]
        return vals.copy() if isinstance(
            where, slice
        ) else vals, None if is_even else lengths.astype(np.int32)

    def _where(self, rows: npt.NDArray[np.int64]) -> Where:
        """The elements of those rows, in their order."""
        if not len(rows):
            return slice(0, 0)
        starts, lengths = self._starts[rows], self._lengths[rows]
        first, end = int(starts[0]), int(starts[-1] + lengths[-1])
        if len(rows) == 1 or bool((starts[1:] == starts[:-1] + lengths[:-1]).all()):
            return slice(first, end)
        if self._is_scalar:
            return starts
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))

    def _add_keys(self, keys: Keys, lengths: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> None:
        starts = self._used + np.cumsum(lengths) - lengths
        used = self._used + int(lengths.sum())
        if self._values is None:
            self._values = np.zeros(used, dtype)
        elif used > len(self._values):
            self._values = _grown(self._values, used)
        rows = self._index.lookup_or_insert(keys.view(np.int64))
        if len(self._index) > len(self._starts):
            self._starts = _grown(self._starts, len(self._index))
            self._lengths = _grown(self._lengths, len(self._index))
        self._starts[rows], self._lengths[rows] = starts, lengths
        self._used = used
        self._is_scalar = self._is_scalar and bool((lengths == 1).all())


def _grown(array: npt.NDArray[Any], least: int) -> npt.NDArray[Any]:
    """A longer copy, zero behind what was there: at least doubled, so that what is moved is paid
    for by what is new.
    """
    longer = np.zeros(max(least, 2 * len(array)), array.dtype)
    longer[: len(array)] = array
    return longer
