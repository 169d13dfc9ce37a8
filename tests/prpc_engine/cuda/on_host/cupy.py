"""As much of CuPy as is needed to send its arrays, over host_driver.py's devices."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import types
from typing import Any

import numpy as np

from prpc_engine.cuda.driver import driver

_of_thread = threading.local()


class Device:
    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> None:
        self._before = _current()
        _of_thread.device = self.id

    def __exit__(self, *_: object) -> None:
        _of_thread.device = self._before


def _current() -> int:
    found: int = getattr(_of_thread, "device", 0)
    return found


class _Memory:
    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
        self._driver = driver()
        with self._driver.on(device):
            self.ptr = self._driver.allocate(max(1, nbytes))

    def __del__(self) -> None:
        with contextlib.suppress(KeyError, AttributeError):  # no room: it was never there
            self._driver.free(self.ptr)


class ndarray:  # noqa: N801
    def __init__(self, shape: Any, dtype: Any, memory: _Memory) -> None:
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), memory
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.device = Device(memory.device)

    def get(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(ctypes.string_at(self.data.ptr, self.nbytes), self.dtype).reshape(
            self.shape
        )


def empty(shape: Any, dtype: Any = np.float32) -> ndarray:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return ndarray(shape, dtype, _Memory(_current(), nbytes))


def asarray(values: np.ndarray[Any, Any]) -> ndarray:
    made = empty(values.shape, values.dtype)
    flat = np.ascontiguousarray(values)
    ctypes.memmove(made.data.ptr, flat.ctypes.data, made.nbytes)
    return made


def ascontiguousarray(value: ndarray) -> ndarray:
    return value


cuda = types.SimpleNamespace(Device=Device, get_current_stream=lambda: types.SimpleNamespace(ptr=0))
