"""What the CUDA driver is asked about other devices' access to its memory: on a library that
answers as the driver's interface says. None of it ran on a GPU.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine.cuda.direct import DMA_BUF_SUPPORTED, GPU_DIRECT_RDMA_SUPPORTED
from prpc_engine.cuda.driver import CudaDriver, CudaError


def library(attributes: dict[tuple[int, int], int], code: int = 1) -> Any:
    """A libcuda of two devices that has these attributes, by device and number, and answers `code`
    for others.
    """

    def count(found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 2
        return 0

    def attribute(found: Any, number: int, device: int) -> int:
        if (device, number) not in attributes:
            return code
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = attributes[device, number]
        return 0

    def takes_anything(*arguments: Any) -> int:
        return 0

    names = ("cuInit", "cuMemcpyAsync", "cuIpcOpenMemHandle_v2", "cuMemFree_v2", "cuMemAlloc_v2")
    others = ("cuIpcCloseMemHandle", "cuIpcGetMemHandle", "cuStreamSynchronize")
    return SimpleNamespace(
        **{name: lambda *given: takes_anything(*given) for name in (*names, *others)},
        cuDeviceGetUuid_v2=takes_anything,
        cuGetErrorString=takes_anything,
        cuDeviceGetCount=count,
        cuDeviceGetAttribute=attribute,
    )


def test_an_attribute_is_that_of_the_device_and_0_where_the_driver_does_not_know_it() -> None:
    cuda = CudaDriver(library({(0, GPU_DIRECT_RDMA_SUPPORTED): 1, (1, DMA_BUF_SUPPORTED): 1}))
    asked = [(0, GPU_DIRECT_RDMA_SUPPORTED), (0, DMA_BUF_SUPPORTED), (1, DMA_BUF_SUPPORTED)]
    assert [cuda.attribute(*each) for each in asked] == [1, 0, 1]


def test_an_attribute_that_cannot_be_asked_for_is_an_error() -> None:
    with pytest.raises(CudaError, match="cuDeviceGetAttribute"):
        CudaDriver(library({}, code=999)).attribute(0, DMA_BUF_SUPPORTED)
