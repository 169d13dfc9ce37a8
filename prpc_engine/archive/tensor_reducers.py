"""How a pickler takes tensors apart, so that their memory is a buffer: torch's storages on the CPU,
and JAX's arrays.

torch's own reducers make storages of tensors, parameters and modules, and a storage is pickled
once: tensors that share one share one afterwards, as with torch.save(). As there, the whole storage
travels, also of a small view. One of a CUDA device goes where tensors of that
device go: device_tensors.py. Storages on other devices are left to torch, which copies them into
the pickle, each tensor by itself.

Memory of up to BYTES_INLINE_MAX stands in the pickle: a block of its own would be copied into the
message all the same. The unpickler imports the library, as it would for the library's own pickle.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import device_tensors, tensors
from prpc_engine.archive.wire import BYTES_INLINE_MAX

Reducer = Callable[[Any], Any]


def learn(table: dict[type, Reducer]) -> None:
    """Put those of the libraries in that this process has imported since the last time."""
    if "torch" in sys.modules and "torch" not in _known:
        torch = sys.modules["torch"]
        untyped, typed = (
            getattr(torch, "UntypedStorage", None),
            getattr(torch, "TypedStorage", None),
        )
        if untyped is not None and typed is not None:  # else it is being imported at this moment
            table[untyped], table[typed] = _reduce_storage, _reduce_typed_storage
            _known.add("torch")
    if "jax" in sys.modules and "jax" not in _known:
        found = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)
        if found is not None:
            table[found] = _reduce_jax
            _known.add("jax")


_known: set[str] = set()


def _reduce_typed_storage(value: Any) -> Any:
    untyped = value._untyped_storage  # value.untyped() and value.device warn
    if untyped.device.type not in ("cpu", "cuda"):
        return value.__reduce__()
    return typed_storage, (untyped, value.dtype)


def _reduce_storage(value: Any) -> Any:
    if value.device.type == "cuda":
        sent = device_tensors.send_storage(value)
        return device_storage, (
            pickle.PickleBuffer(memoryview(sent.block.data)),
            value.nbytes(),
            sent.target,
            sent.share,
        )
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


def device_storage(memory: Any, size: int, target: int, share: Any) -> Any:
    """A torch storage of a CUDA device, as storage() gives it. Called by unpicklers."""
    import torch

    block = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    untyped = device_tensors.make_storage(block, size, target, share)
    return torch.TypedStorage(wrap_storage=untyped, dtype=torch.uint8, _internal=True)


# -- JAX -------------------------------------------------------------------------------------------


def _reduce_jax(value: Any) -> Any:
    if value.weak_type:  # which only JAX's own way keeps
        return value.__reduce__()
    return jax_array, (np.asarray(value),)


def jax_array(value: NDArray[Any]) -> Any:
    """A JAX array of these numbers, where it keeps their dtype; called by unpicklers."""
    import jax  # noqa: F401  # which make_other() takes from sys.modules

    return tensors.make_other("jax", value)
