"""Objects of unknown types that let others look at their memory, as numpy arrays on that very
memory: array-likes of a user or of a library that this package has not heard of.

    object with                               array
    the buffer protocol, one dimension or     of its format, shape and strides: ctypes arrays, mmap,
    more                                      pyarrow.Buffer, classes with __buffer__ (Python 3.12)
    __dlpack__, on the CPU                    of its dtype, shape and strides
    the buffer protocol without a dimension   none: a ctypes scalar or structure is no array
    bytes and the like, in a subclass         none: it would come back as its base

Nothing is copied here, and the object is kept alive by the array.
"""

from __future__ import annotations

import array
import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.dtypes import spec_of

DLPACK_CPU = 1  # kDLCPU of dlpack.h
_BASES = (bytes, bytearray, array.array)


def array_of(value: Any) -> NDArray[Any] | None:
    """The array, or None: the object exports no memory. Raises ValueError, with the reason, for
    memory that numpy or the archive cannot take.
    """
    if isinstance(value, _BASES):
        return None
    try:
        found = _of_buffer(value)
        if found is None and hasattr(type(value), "__dlpack__"):
            found = _of_dlpack(value)
        if found is not None:
            spec_of(found.dtype)
    except Exception as error:  # the object's own methods may raise anything
        raise ValueError(f"its memory cannot be read: {type(error).__name__}: {error}") from error
    return found


def is_pickled_by_name(value: Any) -> bool:
    """Whether a pickle can name its class. Those that `c_double * n` makes have no place in their
    module, and what cloudpickle makes of such a class cannot be read.
    """
    if not isinstance(value, ctypes.Array):
        return True
    kind = type(value)
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _of_buffer(value: Any) -> NDArray[Any] | None:
    if isinstance(value, ctypes.Array):  # whose formats leave out the padding of structures
        return np.ndarray((), np.dtype(type(value)), memoryview(value))
    try:
        view = memoryview(value)
    except TypeError:  # without the protocol
        return None
    return np.asarray(view) if view.ndim else None


def _of_dlpack(value: Any) -> NDArray[Any]:
    device = value.__dlpack_device__()
    if device[0] != DLPACK_CPU:
        raise ValueError(f"it is on DLPack's device {tuple(device)}, not on the CPU: move it there")
    found: NDArray[Any] = np.from_dlpack(value)
    return found
