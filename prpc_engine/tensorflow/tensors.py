"""Tensors as the engine's archive takes them, and back. An array of numbers is its own memory;
nothing is copied here.

dtype                            travels as
numbers, bool, complex           the array
string                           (shape, lengths, all bytes one after the other)
bfloat16, float8, qint8, ...     (name, the array's bytes as unsigned integers)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.python.framework import dtypes

_PLAIN = frozenset("biufc")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pack(tensor: Any) -> Any:
    """What to send for a tensor."""
    if type(tensor) is bytes:
        tensor = np.array(tensor, object)  # as "S", zeros at its end would be lost
    array = tensor if type(tensor) is np.ndarray else np.asarray(tensor)
    kind = array.dtype.kind
    if kind in _PLAIN and array.dtype.isnative:
        return array
    if kind in "OSU":
        return _pack_strings(array)
    name = dtypes.as_dtype(array.dtype).name
    return name, np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize])


def _pack_strings(array: NDArray[Any]) -> tuple[list[int], NDArray[np.int64], NDArray[np.uint8]]:
    texts = [one.encode() if isinstance(one, str) else bytes(one) for one in array.reshape(-1)]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return list(array.shape), lengths, np.frombuffer(b"".join(texts), np.uint8)


def unpack(packed: Any) -> NDArray[Any]:
    """The tensor of what pack() made."""
    if type(packed) is np.ndarray:
        return packed
    if len(packed) == 2:
        name, raw = packed
        array: NDArray[Any] = raw.view(dtypes.as_dtype(name).as_numpy_dtype)
        return array
    shape, lengths, content = packed
    everything, start, texts = content.tobytes(), 0, np.empty(len(lengths), object)
    for index, length in enumerate(lengths.tolist()):
        texts[index] = everything[start : start + length]
        start += length
    return texts.reshape(shape)


def to_array(tensor: Any) -> NDArray[Any]:
    """One array with all that a tensor has but its type, for where only arrays go; from_array()
    needs the type's name.
    """
    packed = pack(tensor)
    if type(packed) is np.ndarray:
        return packed
    if len(packed) == 2:
        raw: NDArray[Any] = packed[1]
        return raw
    shape, lengths, content = packed
    head = np.array([len(shape), *shape, *lengths], np.int64)
    return np.concatenate([head.view(np.uint8), content])


def from_array(array: NDArray[Any], kind: str) -> NDArray[Any]:
    """The tensor of what to_array() made. `kind`: "" for types that numpy has, else "string" or
    TensorFlow's name.
    """
    if not kind:
        return array
    if kind != "string":
        return unpack((kind, array))
    rank = int(array[:8].view(np.int64)[0])
    shape = array[8 : 8 * (rank + 1)].view(np.int64).tolist()
    start = 8 * (rank + 1 + math.prod(shape))
    return unpack((shape, array[8 * (rank + 1) : start].view(np.int64), array[start:]))
