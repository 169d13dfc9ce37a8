"""A CUDA driver whose devices are memory of the host, so that all but the driver is tested where
there is no GPU: its allocations are files that other processes map by their handles.
Two processes with one folder see the same devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from prpc_engine.cuda.direct import FLUSH_OPTIONS, GPU_DIRECT_RDMA_SUPPORTED
from prpc_engine.cuda.driver import HANDLE_BYTES, CudaError


class HostDriver:
    """`devices` of `room_bytes` each. As prpc_engine.cuda.driver.CudaDriver."""

    def __init__(self, folder: Path, devices: int = 2, room_bytes: int = 1 << 30) -> None:
        self._folder = folder
        self._room = [room_bytes] * devices
        self.uuids = tuple(
            f"{folder.name:.10}-{index}".encode().ljust(16, b"-")[:16] for index in range(devices)
        )
        self._numbers = itertools.count()
        self._of_thread = threading.local()
        self.files: dict[int, tuple[int, Path, int]] = {}  # by address: device, file, bytes
        self._maps: dict[int, mmap.mmap] = {}
        self.opened: list[int] = []
        self.copies = 0
        self.has_ipc = True
        self.attributes = {GPU_DIRECT_RDMA_SUPPORTED: 1, FLUSH_OPTIONS: 1}
        self.flushes = 0
        self.says_nothing = False  # of its devices' attributes
        self.reaches_host = True  # copies to the host succeed
        self.failed = 0

    def room_left(self, device: int, nbytes: int) -> None:
        """So many bytes are left on it."""
        self._room[device] = nbytes

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before = getattr(self._of_thread, "device", -1)
        self._of_thread.device = device
        try:
            yield
        finally:
            self._of_thread.device = before

    def allocate(self, nbytes: int) -> int:
        device = self._of_thread.device
        if self._room[device] < nbytes:
            raise CudaError("cuMemAlloc_v2: out of memory", 2)
        self._room[device] -= nbytes
        path = self._folder / f"{os.getpid()}-{next(self._numbers)}"
        path.touch()
        os.truncate(path, nbytes)
        address = self._map(path)
        self.files[address] = device, path, nbytes
        return address

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[address] = mapped
        return address

    def free(self, address: int) -> None:
        device, path, nbytes = self.files.pop(address)
        self._room[device] += nbytes
        path.unlink()

    def handle(self, address: int) -> bytes:
        if not self.has_ipc:
            raise CudaError("cuIpcGetMemHandle: operation not supported", 801)
        return self.files[address][1].name.encode().ljust(HANDLE_BYTES)

    def open_handle(self, handle: bytes) -> int:
        path = self._folder / handle.decode().strip()
        if not path.exists():
            raise CudaError("cuIpcOpenMemHandle_v2: invalid resource handle", 400)
        address = self._map(path)
        self.opened.append(address)
        return address

    def close_handle(self, address: int) -> None:
        self.opened.remove(address)

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        if not self.reaches_host and target not in self._maps:
            self.failed += 1
            raise CudaError("cuMemcpyAsync: an illegal memory access", 700)
        self.copies += 1
        ctypes.memmove(target, source, nbytes)

    def attribute(self, device: int, number: int) -> int:
        if self.says_nothing:
            raise CudaError("cuDeviceGetAttribute: unknown error", 999)
        return self.attributes.get(number, 0)

    def order_for_others(self, address: int) -> None:
        assert address in self.files

    def dmabuf(self, address: int, nbytes: int) -> int:
        """What is no dma-buf, as ports find."""
        path = self.files[address][1]
        return os.open(path, os.O_RDWR)

    def settle_writes(self) -> None:
        self.flushes += 1

    def synchronize(self, stream: int = 0) -> None:
        """Copies are complete when copy() returns."""
