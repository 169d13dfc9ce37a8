"""Tensors as the engine's archive takes them, and back. An array of numbers is its own memory;
nothing is copied here.

dtype                            travels as
numbers, bool, complex           the array
string                           (shape, lengths, all bytes one after the other)
bfloat16, float8, qint8, ...     (name, the array's bytes as unsigned integers)

All tensors of a call, by pack_all(): [layout, block, the others as above...]. The block has the
bytes of all arrays of up to SMALL_BYTES, one after the other, those of the largest numbers first so
that all are aligned; the layout says which they are: msgpack of [how many tensors there are,
[[place, dtype, shape], ...]]. Both sides keep what they made of a layout, which is the same from
step to step: a small tensor costs each of them half a microsecond. Fewer than two such arrays: the
layout is empty, and there is no block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tensorflow.python.framework import dtypes

_PLAIN = frozenset("biufc")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SMALL_BYTES = 16 << 10  # of a tensor that is copied into the block; larger ones go by reference
LAYOUTS_MAX = 1024  # kept; shapes that change in each step would be without end


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
    raw = np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize])
    return name, raw.reshape(array.shape)  # of a scalar, ascontiguousarray() makes a vector


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


class _Joined(NamedTuple):
    """What the arrays of a call with certain dtypes and shapes become."""

    layout: bytes
    small: list[int]  # places of those in the block, in its order
    others: list[int]


class _Cut(NamedTuple):
    """What a layout says."""

    total: int  # of tensors
    nbytes: int  # of the block
    arrays: list[tuple[int, Any, tuple[int, ...], int]]  # (place, dtype, shape, offset)
    others: list[int]


JOINED: dict[Any, _Joined] = {}
CUTS: dict[bytes, _Cut] = {}
_layouts: msgspec.msgpack.Decoder[tuple[int, list[tuple[int, str, list[int]]]]] = (
    msgspec.msgpack.Decoder(tuple[int, list[tuple[int, str, list[int]]]])
)


def pack_all(values: Sequence[Any]) -> list[Any]:
    """What to send for the tensors of a call; unpack_all() takes it."""
    try:
        key = tuple([(one.dtype, one.shape) for one in values])
    except AttributeError:  # bytes: a string
        values = [one if hasattr(one, "dtype") else np.array(one, object) for one in values]
        key = tuple([(one.dtype, one.shape) for one in values])
    joined = JOINED.get(key)
    if joined is None:
        if len(JOINED) >= LAYOUTS_MAX:
            JOINED.clear()
        joined = JOINED[key] = _join(key)
    layout, small, others = joined
    if not small:
        return [b"", *map(pack, values)]
    block = np.frombuffer(b"".join([values[place] for place in small]), np.uint8)
    return [layout, block, *[pack(values[place]) for place in others]]


def _join(key: Sequence[tuple[Any, tuple[int, ...]]]) -> _Joined:
    small = [
        place
        for place, (dtype, shape) in enumerate(key)
        if dtype.kind in _PLAIN
        and dtype.isnative
        and dtype.itemsize * math.prod(shape) <= SMALL_BYTES
    ]
    if len(small) < 2:
        return _Joined(b"", [], [])
    small.sort(key=lambda place: -key[place][0].itemsize)
    named = [[place, key[place][0].str, key[place][1]] for place in small]
    inside = set(small)
    others = [place for place in range(len(key)) if place not in inside]
    return _Joined(msgspec.msgpack.encode([len(key), named]), small, others)


def unpack_all(packed: Sequence[Any]) -> list[Any]:
    """The tensors of what pack_all() made. Raises ValueError for anything else."""
    layout = packed[0]
    if not layout:
        return [unpack(one) for one in packed[1:]]
    cut = CUTS.get(layout)
    if cut is None:
        if len(CUTS) >= LAYOUTS_MAX:
            CUTS.clear()
        cut = CUTS[layout] = _cut(layout)
    block = packed[1]
    if block.nbytes != cut.nbytes or len(packed) - 2 != len(cut.others):
        raise ValueError(
            f"{len(packed) - 2} tensors beside a block of {block.nbytes} bytes, and its layout has "
            f"{len(cut.others)} beside {cut.nbytes}"
        )
    found: list[Any] = [None] * cut.total
    make = np.ndarray
    for place, dtype, shape, offset in cut.arrays:
        found[place] = make(shape, dtype, block, offset)
    for place, one in zip(cut.others, packed[2:], strict=True):
        found[place] = unpack(one)
    return found


def _cut(layout: bytes) -> _Cut:
    try:
        count, named = _layouts.decode(layout)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no layout of tensors: {error}") from error
    offset, arrays, places = 0, [], set[int]()
    for place, name, shape in named:
        try:
            dtype = np.dtype(name)
        except TypeError as error:
            raise ValueError(f"a layout of tensors has the type {name!r:.100}") from error
        if (
            dtype.kind not in _PLAIN
            or not 0 <= place < count
            or place in places
            or any(extent < 0 for extent in shape)
        ):
            raise ValueError(f"a layout of {count} tensors has {name} {shape} at {place}")
        places.add(place)
        arrays.append((place, dtype, tuple(shape), offset))
        offset += dtype.itemsize * math.prod(shape)
    others = [place for place in range(count) if place not in places]
    return _Cut(count, offset, arrays, others)


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
