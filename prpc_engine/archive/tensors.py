"""Tensors of torch, TensorFlow and JAX on the CPU: their memory as a block, and a tensor of the
same library at the other end.

    library     sent                                       arrives
    torch       the tensor's memory; without its gradient  a tensor of its own memory, writable
                                                           (copied from what arrived if that is
                                                           shared: torch has no read-only tensors)
    tensorflow  an eager tensor's memory                   an eager tensor
    jax         an array's memory                          an array on the default device

Where the receiving process has not imported that library by then, a numpy array arrives (bfloat16
and float8 need ml_dtypes): to import it would stop a server for seconds on the word of a peer, and
a program that wants tensors has imported it. Nor does JAX's array arrive where JAX would change its
dtype (64 bits without jax_enable_x64).
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.dtypes import ML_DTYPES, Spec, check_items, dtype_of, spec_of

LIBRARIES = ("torch", "tensorflow", "jax")
ALIGNMENT_BYTES = 64  # what torch gives its own tensors, and its kernels are quickest with


def library_of(value: Any) -> str:
    """The library whose tensor this is, or "". Imports nothing: whoever has a tensor has imported
    its library.
    """
    root = type(value).__module__.partition(".")[0]
    if root == "torch":
        torch = sys.modules["torch"]
        return "torch" if isinstance(value, torch.Tensor) else ""
    if root == "tensorflow":
        tensorflow = sys.modules.get("tensorflow")
        return (
            "tensorflow" if tensorflow is not None and isinstance(value, tensorflow.Tensor) else ""
        )
    if root in ("jax", "jaxlib"):
        jax = sys.modules.get("jax")
        return "jax" if jax is not None and isinstance(value, jax.Array) else ""
    if root == "cupy":
        cupy = sys.modules["cupy"]
        return "cupy" if isinstance(value, cupy.ndarray) else ""
    return ""


def take_apart(library: str, value: Any) -> tuple[NDArray[np.uint8], Spec, tuple[int, ...]]:
    """Memory of the host in C order, dtype and shape. Raises ValueError with the reason."""
    if library == "torch":
        return _take_torch_apart(value)
    if library == "jax" and any(device.platform != "cpu" for device in value.devices()):
        raise ValueError(
            f"it is a JAX array on {value.devices()}: send jax.device_get(value), "
            "or move it to the CPU"
        )
    if library == "tensorflow" and "CPU" not in getattr(value, "device", ""):
        raise ValueError(
            f"it is a TensorFlow tensor on {getattr(value, 'device', 'no device')!r}: "
            "only eager ones on the CPU can be sent"
        )
    array = np.asarray(value)
    spec = spec_of(array.dtype)
    shape = array.shape
    if not array.nbytes:
        return np.empty(0, np.uint8), spec, shape
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8), spec, shape


def _take_torch_apart(value: Any) -> tuple[NDArray[np.uint8], Spec, tuple[int, ...]]:
    plain, spec = plain_torch(value)
    if value.device.type != "cpu":
        raise ValueError(f"it is a torch tensor on {value.device}: send value.cpu()")
    return plain_bytes(plain).numpy(), spec, tuple(value.shape)


def plain_bytes(plain: Any) -> Any:
    """The uint8[n] of a torch tensor from plain_torch(), in its memory."""
    torch = sys.modules["torch"]
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # one element is in C order whatever its strides are, and reshape(-1) would keep them
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def plain_torch(value: Any) -> tuple[Any, str]:
    """A torch tensor of the same numbers whose memory is in C order, where it was; and its dtype.
    Raises ValueError with the reason.
    """
    torch = sys.modules["torch"]
    if getattr(value, "is_nested", False):
        raise ValueError("it is a nested torch tensor: send value.unbind(), its parts")
    if value.layout != torch.strided:
        raise ValueError(
            f"it is a torch tensor of layout {value.layout}: send value.to_dense(), or its parts"
        )
    name = str(value.dtype).removeprefix("torch.")
    if name not in ML_DTYPES and (
        value.is_quantized or not hasattr(np, "bool_" if name == "bool" else name)
    ):
        raise ValueError(
            f"it is a torch tensor of dtype {value.dtype}, which numpy does not know: convert it"
        )
    spec = name if name in ML_DTYPES else np.dtype(name).str
    return value.detach().resolve_conj().resolve_neg().contiguous(), spec


def is_without_array(value: Any) -> bool:
    """Whether a torch tensor on the CPU is sparse, compressed or quantized: no array, and torch can
    pickle it.
    """
    strided = sys.modules["torch"].strided
    return bool(value.device.type == "cpu" and (value.layout != strided or value.is_quantized))


def is_at_hand(library: str) -> bool:
    """Whether this process has imported the library."""
    return library in LIBRARIES and library in sys.modules


def make_torch(block: NDArray[np.uint8], spec: str, shape: tuple[int, ...]) -> Any:
    """A torch tensor on the block if that is ours to write to, else on a copy. Raises ValueError,
    TypeError, RuntimeError.
    """
    torch = sys.modules["torch"]
    dtype = torch_dtype(spec)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != block.nbytes:
        raise ValueError(
            f"tensor of shape {shape} and dtype {dtype} in a block of {block.nbytes} bytes"
        )
    if not block.nbytes:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        check_items(block.view(np.bool_))
    return torch.from_numpy(own_memory(block)).view(dtype).reshape(shape)


def torch_dtype(spec: str) -> Any:
    """torch's own. Raises ValueError where it has none such."""
    torch = sys.modules["torch"]
    if spec in ML_DTYPES:  # whose package torch does without
        name = spec
    else:
        described = dtype_of(spec)
        name = described.name if described.isnative else ""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {spec!r} is none of torch {torch.__version__}")
    return dtype


def own_memory(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The block if a tensor may lie on it and write to it, else a copy. numpy's memory, not
    torch's: large ones are on huge pages, and a copy of 40 MB takes 4 ms instead of 21.
    """
    if block.flags.writeable and block.ctypes.data % ALIGNMENT_BYTES == 0:
        return block
    room = np.empty(block.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    own = room[start : start + block.nbytes]
    own[:] = block
    return own


def make_other(library: str, array: NDArray[Any]) -> Any:
    """A TensorFlow or JAX tensor of the array's values, or the array itself where it would change
    its dtype.
    """
    if library == "tensorflow":
        return sys.modules["tensorflow"].convert_to_tensor(array)
    jax = sys.modules["jax"]
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jax.numpy.array(array)  # copies: what arrived is not JAX's to keep
