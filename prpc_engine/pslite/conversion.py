"""Values in another dtype: what the dtype cannot hold is refused, never changed silently.

from            to               a value is
floats, complex floats, complex  rounded; refused where it is finite and would be infinite
anything else   anything         kept exactly, or refused: integers in floats, floats in
                                 integers, integers in smaller ones
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.pslite.pairs import Keys, Lens, Vals

# Holds every int64, uint64 and float64 exactly, which no smaller dtype does.
_EXACT, _EXACT_COMPLEX = np.longdouble, np.clongdouble


def converted(keys: Keys, vals: Vals, lens: Lens | None, dtype: np.dtype[Any]) -> Vals:
    """vals as an array of that dtype: themselves where they are of it already.

    keys uint64[n]; vals one-dimensional; lens int32[n] or None, as in KVPairs. Raises ValueError
    that names the first value that dtype does not hold, and its key.
    """
    if vals.dtype == dtype:
        return vals
    with np.errstate(over="ignore", invalid="ignore"):  # what they warn of is refused below
        kept = (vals if dtype.kind == "c" else vals.real).astype(dtype)
        changed = _changed(vals, kept)
    if changed.any():
        at = int(changed.argmax())
        row = at * len(keys) // len(vals) if lens is None else _row_of(at, lens)
        raise ValueError(f"key {keys[row]}: {vals.dtype} {vals[at]} does not fit into {dtype}")
    return kept


def _changed(vals: Vals, kept: Vals) -> npt.NDArray[np.bool_]:
    if vals.dtype.kind in "fc" and np.can_cast(vals.dtype, kept.dtype, "same_kind"):
        return ~np.isfinite(kept) & np.isfinite(vals)
    exact = _EXACT_COMPLEX if "c" in (vals.dtype.kind, kept.dtype.kind) else _EXACT
    changed: npt.NDArray[np.bool_] = vals.astype(exact) != kept.astype(exact)
    return changed


def _row_of(at: int, lens: Lens) -> int:
    return int(np.searchsorted(np.cumsum(lens, dtype=np.int64), at, side="right"))
