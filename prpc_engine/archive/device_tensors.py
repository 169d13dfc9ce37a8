"""Tensors of torch, CuPy and JAX on a CUDA device: what travels of them, and what the receiver
makes of that.

    written as [library, target, block number, dtype, shape, share]
    target  the receiver's device; HOST: its host's memory
    share   None: the block has the bytes. Else they lie in device memory that the receiver opens,
            and the block is the ticket that keeps them there: see prpc_engine/cuda/pool.py

    library  sent                                        arrives
    torch    the tensor's memory; without its gradient   a tensor on the device, of its own memory
    cupy     the array's memory                          an array on the device
    jax      the array's memory, of one device           an array on the device: by DLPack on memory
                                                         of torch or CuPy, where the process has
                                                         one of them, else by way of the host

Where a target is HOST, it arrives as one of the host's memory does: tensors.py; of CuPy, numpy's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import tensors
from prpc_engine.archive.dtypes import dtype_of, spec_of
from prpc_engine.cuda import transfers
from prpc_engine.cuda.driver import find
from prpc_engine.cuda.placement import HOST, current
from prpc_engine.cuda.transfers import SentTensor

LIBRARIES = ("torch", "cupy", "jax")
_CUDA = 2  # kDLCUDA of dlpack.h


class TensorRoom(NamedTuple):
    """Memory of a device, for a library's tensor that is made of it."""

    address: int
    stream: int
    tensor: Any


def device_of(library: str, value: Any) -> int:
    """The CUDA device that it is on; HOST: it is on none."""
    if library == "torch":
        return int(value.device.index) if value.device.type == "cuda" else HOST
    if library == "cupy":
        return int(value.device.id)
    if library == "jax":
        devices = value.devices()
        if len(devices) == 1 and next(iter(devices)).platform == "gpu":
            kind, index = value.__dlpack_device__()
            return int(index) if kind == _CUDA else HOST
    return HOST


def take_apart(library: str, device: int, value: Any) -> tuple[SentTensor, Any, tuple[int, ...]]:
    """What is sent, its dtype and shape. `device`: of device_of(). Raises ValueError, CudaError."""
    if device == HOST:
        block, spec, shape = tensors.take_apart(library, value)
        return SentTensor(block, current().targets.get(HOST, HOST), None), spec, shape
    if library == "torch":
        torch = sys.modules["torch"]
        plain, spec = tensors.plain_torch(value)
        stream = torch.cuda.current_stream(device).cuda_stream
        address, nbytes = plain.data_ptr(), plain.numel() * plain.element_size()
    elif library == "cupy":
        cupy = sys.modules["cupy"]
        with value.device:
            plain = cupy.ascontiguousarray(value)
            stream = cupy.cuda.get_current_stream().ptr
        spec, address, nbytes = spec_of(plain.dtype), plain.data.ptr, plain.nbytes
    else:
        plain = value.block_until_ready()
        spec, nbytes, stream = spec_of(plain.dtype), plain.nbytes, 0
        address = plain.unsafe_buffer_pointer() if nbytes else 0
    return transfers.send(device, address, nbytes, stream), spec, tuple(value.shape)


def make(
    library: str,
    target: int,
    block: NDArray[np.uint8],
    spec: Any,
    shape: tuple[int, ...],
    share: Sequence[Any] | None,
) -> Any:
    """The library's tensor, or where this process has not imported the library, or it is for the
    host, an array of the host. Raises ValueError, CudaError.
    """
    if min(shape, default=0) < 0:
        raise ValueError(f"tensor of shape {shape}, with a negative dimension")
    torch_has = library == "torch" and "torch" in sys.modules
    dtype = tensors.torch_dtype(spec) if torch_has else dtype_of(spec)
    nbytes = math.prod(shape) * dtype.itemsize
    known = library in sys.modules
    if known and target != HOST:
        _check(target)
        if library == "jax":
            return _make_jax(target, block, dtype, shape, share, nbytes)
        with transfers.source_of(block, share, nbytes) as source:
            room = _room(library, target, dtype, shape)
            transfers.receive(target, room.address, source, nbytes, room.stream)
        return room.tensor
    found = transfers.to_host(block, share, nbytes)
    if known and library == "torch":
        return tensors.make_torch(found, spec, shape)
    array: NDArray[Any] = found.view(dtype).reshape(shape)
    return tensors.make_other(library, array) if known and library == "jax" else array


def _check(target: int) -> None:
    there = find()
    count = 0 if there is None else len(there.uuids)
    if not 0 <= target < count:
        raise ValueError(
            f"it is for cuda:{target}, and this process sees {count} CUDA devices: correct the "
            "sender's device map"
        )


def _room(library: str, target: int, dtype: Any, shape: tuple[int, ...]) -> TensorRoom:
    if library == "torch":
        torch = sys.modules["torch"]
        tensor = torch.empty(shape, dtype=dtype, device=f"cuda:{target}")
        return TensorRoom(tensor.data_ptr(), torch.cuda.current_stream(target).cuda_stream, tensor)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(target):
        array = cupy.empty(shape, dtype)
        return TensorRoom(array.data.ptr, cupy.cuda.get_current_stream().ptr, array)


def _make_jax(
    target: int,
    block: NDArray[np.uint8],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    share: Sequence[Any] | None,
    nbytes: int,
) -> Any:
    jax = sys.modules["jax"]
    helper = next((each for each in ("cupy", "torch") if each in sys.modules), None)
    changes = jax.dtypes.canonicalize_dtype(dtype) != dtype
    if helper is None or changes or not nbytes or (helper == "cupy" and dtype.num >= 256):
        array: NDArray[Any] = transfers.to_host(block, share, nbytes).view(dtype).reshape(shape)
        return array if changes else jax.device_put(array.copy(), jax.devices("gpu")[target])
    with transfers.source_of(block, share, nbytes) as source:
        wanted = tensors.torch_dtype(spec_of(dtype)) if helper == "torch" else dtype
        room = _room(helper, target, wanted, shape)
        transfers.receive(target, room.address, source, nbytes, room.stream)
    return jax.dlpack.from_dlpack(room.tensor)


# -- inside of pickles: torch's storages -----------------------------------------------------------


def send_storage(value: Any) -> SentTensor:
    """What stands for an untyped storage of a CUDA device, as bytes of the host."""
    torch = sys.modules["torch"]
    device = int(value.device.index)
    stream = torch.cuda.current_stream(device).cuda_stream
    return transfers.send(device, value.data_ptr(), value.nbytes(), stream, may_be_direct=False)


def make_storage(
    memory: NDArray[np.uint8], size: int, target: int, share: Sequence[Any] | None
) -> Any:
    """That storage, on the device or the host; torch must be there."""
    made = make("torch", target, memory, "|u1", (size,), share)
    return made.untyped_storage()
