"""Who of the servers gets which of the keys: views of the arrays, cut where the ranges end. Nothing
is copied here.

A slicer is a function of (pairs, ranges) that gives one KVPairs for each range, None for a server
that gets nothing. Together they must be the keys, cut into runs. Pairs of a pull have no vals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prpc_engine.errors import BadArguments
from prpc_engine.pslite.ids import KeyRange
from prpc_engine.pslite.pairs import Keys, KVPairs

Slicer = Callable[[KVPairs, Sequence[KeyRange]], Sequence[KVPairs | None]]


def by_ranges(pairs: KVPairs, ranges: Sequence[KeyRange]) -> Sequence[KVPairs | None]:
    """The usual one: server i gets the keys of range i."""
    keys, vals, lens = pairs.keys, pairs.vals, pairs.lens
    total = len(keys)
    if not total:
        return [None] * len(ranges)
    if len(ranges) == 1:
        return [pairs]
    inner = np.fromiter((each.begin for each in ranges[1:]), np.uint64, len(ranges) - 1)
    cuts = [0, *np.searchsorted(keys, inner).tolist(), total]
    if lens is None:
        width = len(vals) // total
        ends = [cut * width for cut in cuts]
    elif len(vals):
        before = np.concatenate(([0], np.cumsum(lens, dtype=np.int64)))
        ends = before[cuts].tolist()
    else:
        ends = [0] * len(cuts)  # a pull
    return [
        KVPairs(
            keys[begin:end],
            vals[first:last],
            None if lens is None else lens[begin:end],
            pairs.priority,
        )
        if begin < end
        else None
        for begin, end, first, last in zip(cuts, cuts[1:], ends, ends[1:], strict=False)
    ]


def check_slices(slices: Sequence[KVPairs | None], keys: Keys, ranges: Sequence[KeyRange]) -> None:
    """What a slicer of the user's gave. Raises BadArguments."""
    if len(slices) != len(ranges):
        raise BadArguments(
            f"the slicer gave {len(slices)} slices for {len(ranges)} servers; "
            "one each is allowed, or None"
        )
    used = sorted(
        (each.keys for each in slices if each is not None and len(each.keys)),
        key=lambda each: int(each[0]),
    )
    if not np.array_equal(np.concatenate([keys[:0], *used]), keys):
        raise BadArguments(
            "the slicer must cut the sorted keys into consecutive runs, so that each key is in "
            "one slice"
        )
