"""How a pickler takes apart what has memory of its own, so that the memory is a buffer and the rest
a few opcodes. Of these types exactly; subclasses have their own ways.

    type                reduces to                                 comes back
    numpy array         its memory, also of dates and of           read-only, on the memory that
                        ml_dtypes, which numpy would copy into     arrived
                        the pickle; in one piece, if it has gaps
    array.array         its memory                                 with memory of its own
    torch storage       its memory; tensors, parameters, modules   with memory of its own, writable
    on the CPU          are made of it by torch's own reducers     (torch has no read-only tensors)
    jax array           a numpy array                              on the default device; a numpy
                                                                   array where JAX would change
                                                                   its dtype

torch's tensors reduce to storages, and a storage is pickled once: tensors that share one share one
afterwards, as with torch.save(). As there, the whole storage travels, also of a small view.
Storages on other devices are left to torch.

Memory of up to BYTES_INLINE_MAX of storages and array.arrays stands in the pickle: a block of its
own would be copied into the message all the same. Libraries are looked at only when they are
imported here, since nobody has their objects before that.
"""

from __future__ import annotations

import array
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import tensors
from prpc_engine.archive.dtypes import spec_of
from prpc_engine.archive.items import ITEM_CODES, items_of
from prpc_engine.archive.wire import BYTES_INLINE_MAX

Reducer = Callable[[Any], Any]

# of which numpy gives pickle the memory itself, where it has no gaps
_BUFFERS_OF_NUMPY = frozenset(np.dtype(code).num for code in "?bhilqBHILQefdgFDGSU")


def reducers() -> Mapping[type, Reducer]:
    """By type, for all libraries that this process has imported by now."""
    if "torch" in sys.modules and "torch" not in _known:
        _learn_torch(sys.modules["torch"])
    if "jax" in sys.modules and "jax" not in _known:
        _learn_jax(sys.modules.get("jax._src.array"))
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


# -- torch -----------------------------------------------------------------------------------------


def _learn_torch(torch: Any) -> None:
    untyped = getattr(torch, "UntypedStorage", None)
    typed = getattr(torch, "TypedStorage", None)
    if untyped is not None and typed is not None:  # else it is being imported at this moment
        _reducers[untyped] = _reduce_storage
        _reducers[typed] = _reduce_typed_storage
        _known.add("torch")


def _reduce_typed_storage(value: Any) -> Any:
    return typed_storage, (value._untyped_storage, value.dtype)


def _reduce_storage(value: Any) -> Any:
    if value.device.type != "cpu":
        return value.__reduce__()
    torch = sys.modules["torch"]
    size = value.nbytes()
    memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value).numpy()
    if size <= BYTES_INLINE_MAX:
        return storage, (memory.tobytes(), size)
    return storage, (pickle.PickleBuffer(memory), size)


def typed_storage(stored: Any, dtype: Any) -> Any:
    """A typed storage as another dtype, of the same memory; called by unpicklers."""
    return type(stored)(wrap_storage=stored._untyped_storage, dtype=dtype, _internal=True)


def storage(memory: Any, size: int) -> Any:
    """A torch storage, as torch.load() gives it: of single bytes, until a tensor has it. Called by
    unpicklers. Raises ValueError when it is not so many bytes: torch would fill it up.
    """
    import torch

    block = np.frombuffer(memory, np.uint8) if size else np.empty(0, np.uint8)
    if block.nbytes != size:
        raise ValueError(f"a torch storage of {size} bytes in a buffer of {block.nbytes}")
    untyped = (
        torch.from_numpy(tensors.own_memory(block)).untyped_storage()
        if size
        else torch.UntypedStorage(0, device="cpu")
    )
    return torch.TypedStorage(wrap_storage=untyped, dtype=torch.uint8, _internal=True)


# -- JAX -------------------------------------------------------------------------------------------


def _learn_jax(module: Any) -> None:
    found = getattr(module, "ArrayImpl", None)
    if found is not None:
        _reducers[found] = _reduce_jax
        _known.add("jax")


def _reduce_jax(value: Any) -> Any:
    if value.weak_type:  # which only JAX's own way keeps
        return value.__reduce__()
    return jax_array, (np.asarray(value),)


def jax_array(value: NDArray[Any]) -> Any:
    """A JAX array of these numbers, where it keeps their dtype; called by unpicklers."""
    import jax  # noqa: F401  # which make_other() takes from sys.modules

    return tensors.make_other("jax", value)


_known: set[str] = set()
_reducers: dict[type, Reducer] = {np.ndarray: _reduce_array, array.array: _reduce_items}
