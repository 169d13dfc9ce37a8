"""The CUDA driver, by its C interface (libcuda.so.1, which comes with the driver): what moves bytes
to, from and between devices, whatever library's arrays they are.

    call                          used for
    cuInit, cuDevice...           the devices that this process sees, their UUIDs and attributes
    cuDevicePrimaryCtxRetain      the context that torch, CuPy and JAX use, too
    cuMemAlloc, cuMemFree         memory that other processes may open (pool.py)
    cuIpcGetMemHandle, cuIpcOpenMemHandle, cuIpcCloseMemHandle
                                  the same memory in another process (opened.py)
    cuMemGetHandleForAddressRange, cuPointerSetAttribute, cuFlushGPUDirectRDMAWrites
                                  the same memory for an RDMA device (direct.py)
    cuMemcpyAsync                 between any two addresses: unified addressing knows the devices

Reference: NVIDIA's CUDA Driver API. Loaded at the first use; where there is none, find() is
None and nothing else is called.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from shard import ShardError, runtime

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
UUID_BYTES = 16
INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE = 1, 2, 100  # CUDA_ERROR_...
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_OF_CONTEXT, _TO_OWNER = 0, 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_..., ..._TO_OWNER
_LIBRARY = "libcuda.so.1"


class CudaError(ShardError):
    """The CUDA driver refused a call; `code` is its CUresult."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * UUID_BYTES),)


class CudaDriver:
    """The driver of this process. Any thread may call; raises CudaError."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cuMemcpyAsync.argtypes = (
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
        library.cuMemFree_v2.argtypes = library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
        library.cuMemAlloc_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        library.cuIpcGetMemHandle.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        library.cuStreamSynchronize.argtypes = (ctypes.c_void_p,)
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.uuids = tuple(self._uuid(index) for index in range(count.value))
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def _uuid(self, index: int) -> bytes:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), index)
        return ctypes.string_at(ctypes.byref(uuid), UUID_BYTES)

    def _call(self, name: str, *arguments: Any) -> None:
        code: int = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(f"{name}: {self._text(code)}", code)

    def _text(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorString(code, ctypes.byref(text)) or text.value is None:
            return f"CUresult {code}"
        return f"{text.value.decode()} (CUresult {code})"

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Calls of this thread are for that device, counted as the process sees them."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def attribute(self, device: int, number: int) -> int:
        """A property of a device, by its CU_DEVICE_ATTRIBUTE_; 0 where this driver is older than
        the property.
        """
        value = ctypes.c_int()
        try:
            self._call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        except CudaError as error:
            if error.code != INVALID_VALUE:
                raise
        return value.value

    # -- memory of the device in hand: call these inside of on() -----------------------------------

    def allocate(self, nbytes: int) -> int:
        """The address of so many bytes on the device."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Give them back. Waits for what the device still does with them."""
        self._call("cuMemFree_v2", address)

    def handle(self, address: int) -> bytes:
        """What another process opens an allocation by, HANDLE_BYTES long."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open_handle(self, handle: bytes) -> int:
        """The address here of another process's allocation. Its bytes stay there until
        close_handle(), whatever that process does, and it may end.
        """
        opened = _Handle()
        ctypes.memmove(ctypes.byref(opened), handle, HANDLE_BYTES)
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _PEER_ACCESS)
        return address.value

    def close_handle(self, address: int) -> None:
        """Undo open_handle()."""
        self._call("cuIpcCloseMemHandle", address)

    def dmabuf(self, address: int, nbytes: int) -> int:
        """A descriptor of the allocation as a dma-buf, which the caller closes. Both are multiples
        of the host's pages.
        """
        found = ctypes.c_int(-1)
        self._call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(found),
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            _DMA_BUF_FD,
            ctypes.c_uint64(0),
        )
        return found.value

    def order_for_others(self, address: int) -> None:
        """Have calls that wait for copies from and to that allocation wait until other devices
        see them, too.
        """
        on = ctypes.c_uint(1)
        self._call(
            "cuPointerSetAttribute", ctypes.byref(on), _SYNC_MEMOPS, ctypes.c_uint64(address)
        )

    def settle_writes(self) -> None:
        """Have the device in hand see what an RDMA device has written to its memory."""
        self._call("cuFlushGPUDirectRDMAWrites", _OF_CONTEXT, _TO_OWNER)

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copy, behind what the stream of the device in hand has to do. Either address may be the
        host's. Does not wait.
        """
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def synchronize(self, stream: int = 0) -> None:
        """Wait until the stream has done all it was given."""
        self._call("cuStreamSynchronize", stream)


def _load() -> CudaDriver | None:
    try:
        return CudaDriver(ctypes.CDLL(_LIBRARY))
    except (OSError, AttributeError, CudaError):  # no driver, one of before CUDA 11, no device
        return None


def find() -> CudaDriver | None:
    """The driver, where this process sees a CUDA device. A fork gets its own, which CUDA refuses to
    make where the parent had one: None then.
    """
    found: CudaDriver | None = runtime.own("cuda", _load)
    return found if found is not None and found.uuids else None


def driver() -> CudaDriver:
    """The driver. Raises CudaError where there is none."""
    found = find()
    if found is None:
        raise CudaError("this process sees no CUDA device", NO_DEVICE)
    return found
