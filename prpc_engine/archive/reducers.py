"""How a pickler takes apart what has memory of its own, so that the memory is a buffer and the rest
a few opcodes. Of these types exactly; subclasses have their own ways.

    type           reduces to                                   comes back
    numpy array    its memory, also of dates and of ml_dtypes,  read-only, on the memory that
                   which numpy would copy into the pickle;      arrived
                   in one piece, if it has gaps
    array.array    its memory                                   with memory of its own
    torch storage  its memory: tensors, parameters, modules     with memory of its own, writable
    on the CPU     are made of it by torch's own reducers       (torch has no read-only tensors)
    JAX array      a numpy array                                on the default device; a numpy array
                                                                where JAX would change its dtype

The last two: tensor_reducers.py.
"""

from __future__ import annotations

import array
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.dtypes import spec_of
from prpc_engine.archive.items import ITEM_CODES, items_of
from prpc_engine.archive.tensor_reducers import Reducer, learn
from prpc_engine.archive.wire import BYTES_INLINE_MAX

# of which numpy gives pickle the memory itself, where it has no gaps
_BUFFERS_OF_NUMPY = frozenset(np.dtype(code).num for code in "?bhilqBHILQefdgFDGSU")


def reducers() -> Mapping[type, Reducer]:
    """By type, also of the libraries that this process has imported by now."""
    learn(_reducers)
    return _reducers


# -- numpy -----------------------------------------------------------------------------------------


def _reduce_array(value: NDArray[Any]) -> Any:
    dtype, flags = value.dtype, value.flags
    if dtype.num in _BUFFERS_OF_NUMPY and flags.forc:
        return value.__reduce_ex__(5)
    try:
        spec_of(dtype)
    except ValueError:  # of objects, say
        return value.__reduce_ex__(5)
    if not value.nbytes:
        return value.__reduce_ex__(5)
    if not flags.forc:
        axes = sorted(range(value.ndim), key=value.strides.__getitem__, reverse=True)
        straight = value.transpose(axes)
        if straight.flags.c_contiguous:  # no gaps, the axes in another order
            return permuted, (straight, tuple(map(axes.index, range(value.ndim))))
        return _reduce_array(np.ascontiguousarray(value))
    order = "F" if flags.fnc else "C"
    flat = (value.T if order == "F" else value).reshape(-1).view(np.uint8)
    return np.ndarray, (value.shape, dtype, flat, 0, None, order)


def permuted(value: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    """The array with its axes in that order; called by unpicklers."""
    return value.transpose(axes)


# -- array.array -----------------------------------------------------------------------------------


def _reduce_items(value: array.array[Any]) -> Any:
    if value.typecode not in ITEM_CODES or len(value) * value.itemsize <= BYTES_INLINE_MAX:
        return value.__reduce_ex__(5)
    return items_of, (value.typecode, sys.byteorder, pickle.PickleBuffer(value))


_reducers: dict[type, Reducer] = {np.ndarray: _reduce_array, array.array: _reduce_items}
