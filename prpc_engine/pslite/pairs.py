"""Keys with values, and what is said of them on the way.

layout   lens       value of keys[i]
fixed    None       vals[i*k : (i+1)*k], where k = len(vals) / len(keys)
varying  int32[n]   the next lens[i] of vals
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments

Keys = npt.NDArray[np.uint64]
Vals = npt.NDArray[Any]
Lens = npt.NDArray[np.int32]
_KEY = np.dtype(np.uint64)  # comparing with this one makes none
_ONE = (1,)  # the shape of one key
NUMBERS = "iufbc"  # kinds of dtypes that values may have
NO_VALS: Vals = np.empty(0, np.float32)


class KVPairs(msgspec.Struct, frozen=True, eq=False):
    """KVPairs are keys with their values, as they are pushed, pulled and handed to handles.

    keys uint64[n], strictly increasing; vals one-dimensional, of any numeric type. lens int32[n]:
    how many of vals each key has; None: all have as many. priority: of what waits, the higher
    leaves first.

    A Struct because its constructor is in C: 60 ns instead of 420, twice for every request.
    """

    keys: Keys
    vals: Vals
    lens: Lens | None = None
    priority: int = 0


def check_pairs(verb: str, keys: object, vals: object, lens: object, priority: int) -> KVPairs:
    """What is to be pushed, else BadArguments."""
    if (
        lens is None
        and type(keys) is np.ndarray
        and type(vals) is np.ndarray
        and keys.dtype is _KEY
        and keys.shape == _ONE
        and vals.ndim == 1
        and vals.dtype.kind in NUMBERS
        and vals.flags.c_contiguous
    ):  # one key, as a model's tensor has: what follows comes to the same, at twice the price
        return KVPairs(keys, vals, None, priority)
    checked = check_keys(verb, keys)
    pushed = check_vals(verb, "vals", vals)
    return KVPairs(checked, pushed, check_layout(verb, checked, pushed, lens), priority)


def check_keys(verb: str, keys: object) -> Keys:
    """`keys` if they are uint64[n] and strictly increasing, of a subclass of ndarray as a plain
    one, else BadArguments.
    """
    if not isinstance(keys, np.ndarray) or keys.dtype != _KEY or keys.ndim != 1:
        raise BadArguments(
            f"{verb}: keys are {_described(keys)}; a numpy array uint64[n] is allowed"
        )
    if len(keys) > 1:
        wrong = keys[1:] <= keys[:-1]
        if wrong.any():
            at = int(wrong.argmax())
            raise BadArguments(
                f"{verb}: keys[{at}] is {keys[at]} and keys[{at + 1}] is {keys[at + 1]}; "
                "sort them, sum up what is there twice"
            )
    return np.asarray(keys)


def check_vals(verb: str, name: str, vals: object, is_written: bool = False) -> Vals:
    """`vals` if it is a contiguous numpy array of numbers, as one dimension and of a subclass of
    ndarray as a plain one, else BadArguments.
    """
    if (
        not isinstance(vals, np.ndarray)
        or vals.dtype.kind not in NUMBERS
        or not vals.flags.c_contiguous
    ):
        raise BadArguments(
            f"{verb}: {name} are {_described(vals)}; a contiguous numpy array of numbers is allowed"
        )
    if is_written and not vals.flags.writeable:
        raise BadArguments(
            f"{verb}: {name} are read-only; the answer is written into them, "
            "so give an array of your own"
        )
    plain = np.asarray(vals)  # first: a matrix keeps two dimensions
    return plain if plain.ndim == 1 else plain.reshape(-1)


def check_layout(verb: str, keys: Keys, vals: Vals, lens: object) -> Lens | None:
    """`lens` if vals fit it, or None where they are of one length; else BadArguments."""
    if lens is None:
        if (len(keys) and len(vals) % len(keys)) or (not len(keys) and len(vals)):
            raise BadArguments(
                f"{verb}: {len(vals)} vals for {len(keys)} keys do not divide; give lens, "
                "one length for each key"
            )
        return None
    checked = check_lens(verb, keys, lens)
    if len(checked) and int(checked.min()) < 0:
        raise BadArguments(
            f"{verb}: lens[{int(checked.argmin())}] is {checked.min()}; 0 and more are allowed"
        )
    if int(checked.sum(dtype=np.int64)) != len(vals):
        raise BadArguments(
            f"{verb}: lens add up to {checked.sum(dtype=np.int64)}, and there are {len(vals)} vals"
        )
    return checked


def check_lens(verb: str, keys: Keys, lens: object) -> Lens:
    """`lens` if they are int32, one for each key, of a subclass of ndarray as a plain one, else
    BadArguments.
    """
    if not isinstance(lens, np.ndarray) or lens.dtype != np.int32 or lens.shape != keys.shape:
        raise BadArguments(
            f"{verb}: lens are {_described(lens)}; a numpy array int32[{len(keys)}] is allowed, "
            "one for each key"
        )
    return np.asarray(lens)


def is_resizable(array: Vals | Lens) -> bool:
    """Whether its length may become another one in place: it is empty, has one axis, and owns its
    memory.
    """
    return isinstance(array, np.ndarray) and array.shape == (0,) and array.flags.owndata


def _described(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__}"
    text = f"{value.dtype}{list(value.shape)}"
    return text if value.flags.c_contiguous else f"{text}, not contiguous"
