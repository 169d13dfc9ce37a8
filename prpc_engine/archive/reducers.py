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
    dtype = value.dtype
    if dtype.num not in _BUFFERS_OF_NUMPY:
        return _reduce_memory(value)
    if value.flags.forc or _is_permuted(value):
        return value.__reduce_ex__(5)
    return np.ascontiguousarray(value).__reduce_ex__(5)


def _reduce_memory(value: NDArray[Any]) -> Any:
    """Of dtypes that are no buffers to Python, when they have plain bytes: as if of such bytes."""
    try:
        spec_of(value.dtype)
    except ValueError:  # of objects, say
        return value.__reduce_ex__(5)
    if not value.nbytes:
        return value.__reduce_ex__(5)
    order = "F" if value.flags.fnc else "C"
    flat = np.ascontiguousarray(value.T if order == "F" else value).reshape(-1)
    return np.ndarray, (value.shape, value.dtype, flat.view(np.uint8), 0, None, order)


def _is_permuted(value: NDArray[Any]) -> bool:
    """Whether it has no gaps, and only its axes stand in another order: numpy 2 keeps that."""
    axes = sorted(range(value.ndim), key=value.strides.__getitem__, reverse=True)
    return value.transpose(axes).flags.c_contiguous


# -- array.array -----------------------------------------------------------------------------------


def _reduce_items(value: array.array[Any]) -> Any:
    if value.typecode not in ITEM_CODES or len(value) * value.itemsize <= BYTES_INLINE_MAX:
        return value.__reduce_ex__(5)
    return items_of, (value.typecode, sys.byteorder, pickle.PickleBuffer(value))


_reducers: dict[type, Reducer] = {np.ndarray: _reduce_array, array.array: _reduce_items}
