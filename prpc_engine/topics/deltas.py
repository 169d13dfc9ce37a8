"""Weights as what has changed. No I/O here.

    an array of which          travels as
    nothing has changed        nothing
    few elements have          their indices and their new bits: 4 + itemsize bytes each
    so many that it is longer  the whole array

"Changed" is by bits: a NaN that stays is the same, 0.0 and -0.0 are not. Who applies changes checks
that they are of the version it has, their CRC-32, and names, dtypes and shapes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.errors import BadArguments

INDEX = np.dtype(np.uint32)
INDEX_LARGE = np.dtype(np.uint64)
_BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_BITS[8] = np.dtype(np.uint64)

Changes = dict[str, list[Any]]  # by name: [indices, bits, checksum], or [array]


def _checked(state: object) -> dict[str, NDArray[Any]]:
    if not isinstance(state, Mapping):
        raise BadArguments(f"weights are a dict of arrays by name, not {type(state).__name__}")
    for name, array in state.items():
        if type(name) is not str:
            raise BadArguments(
                f"weights have the key {name!r:.100} of type {type(name).__name__}: names, of type "
                "str, are expected"
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise BadArguments(
                f"weights have the key {name!r:.100}, which is no valid Unicode: names that can be "
                "encoded as UTF-8 are expected"
            ) from error
        if not isinstance(array, np.ndarray):
            raise BadArguments(
                f"weights[{name!r:.100}] is of type {type(array).__name__}: numpy arrays by names "
                "are expected, of a torch tensor its .numpy()"
            )
        if array.dtype.hasobject:
            raise BadArguments(
                f"weights[{name!r:.100}] is an array of Python objects: one without is expected"
            )
        if isinstance(array, np.ma.MaskedArray):
            raise BadArguments(
                f"weights[{name!r:.100}] is a masked array, which would lose its mask: publish its "
                ".data and its .mask"
            )
    return dict(state)


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """Its elements as whole numbers of their bits, 1-D, in the same memory; it is C-ordered."""
    unit: Any = _BITS.get(array.dtype.itemsize, _BITS[1])
    return array.reshape(-1).view(unit)


def _checksum(indices: NDArray[Any], bits: NDArray[Any]) -> int:
    return zlib.crc32(bits.data.cast("B"), zlib.crc32(indices.data.cast("B")))


class Weights:
    """The weights that were published last, as a copy of its own."""

    def __init__(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._state = {name: np.array(array, order="C") for name, array in _checked(state).items()}

    def whole(self) -> dict[str, NDArray[Any]]:
        """All of them."""
        return self._state

    def advance(self, changes: Changes) -> None:
        """They have become what changes() has told."""
        apply(changes, self._state)

    def changes(self, state: Mapping[str, NDArray[Any]]) -> Changes:
        """What has changed in these, for advance(). Raises BadArguments for other names, dtypes or
        shapes.
        """
        new = _checked(state)
        if new.keys() != self._state.keys():
            raise BadArguments(
                f"weights had {sorted(self._state)}, and have {sorted(new)}: publish them with "
                "changed_since=0"
            )
        for name, array in new.items():
            kept = self._state[name]
            if (kept.dtype, kept.shape) != (array.dtype, array.shape):
                raise BadArguments(
                    f"weights[{name!r}] was {kept.dtype}{list(kept.shape)}, and is "
                    f"{array.dtype}{list(array.shape)}: publish them with changed_since=0"
                )
        return {
            name: changes
            for name, array in new.items()
            if (changes := self._changes(self._state[name], array)) is not None
        }

    @staticmethod
    def _changes(kept: NDArray[Any], array: NDArray[Any]) -> list[Any] | None:
        bits = _bits(np.ascontiguousarray(array))
        old = _bits(kept)
        changed = np.flatnonzero(bits != old)
        if not changed.size:
            return None
        index = INDEX if old.size <= 1 << 32 else INDEX_LARGE
        if changed.size * (index.itemsize + bits.itemsize) >= array.nbytes:
            return [np.array(array, order="C")]
        found = bits[changed]
        indices = changed.astype(index)
        return [indices, found, _checksum(indices, found)]


def apply(changes: object, state: dict[str, NDArray[Any]]) -> None:
    """Make of `state`, writable and C-ordered, what it has become. Raises ValueError, and changes
    nothing, for what is not of these weights.
    """
    if not isinstance(changes, dict):
        raise ValueError("changes of weights: a dict is expected")
    work = []
    for name, change in changes.items():
        array = state.get(name)
        if array is None:
            raise ValueError(f"there are no weights {name!r} here")
        if len(change) == 1:
            (whole,) = change
            if (whole.dtype, whole.shape) != (array.dtype, array.shape):
                raise ValueError(f"weights {name!r} have another dtype or shape here")
            work.append((array, None, whole))
            continue
        indices, found, checksum = change
        old = _bits(array)
        if (
            found.dtype != old.dtype
            or indices.shape != found.shape
            or (indices.size and int(indices.max()) >= old.size)
        ):
            raise ValueError(f"changes of weights {name!r} are of another array")
        if _checksum(indices, found) != checksum:
            raise ValueError(f"changes of weights {name!r} have another checksum")
        work.append((old, indices, found))
    for target, indices, found in work:
        if indices is None:
            np.copyto(target, found)
        else:
            target[indices] = found
