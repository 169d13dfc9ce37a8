"""Whether an RDMA device could read and write memory of this process's CUDA devices (GPUDirect
RDMA), by what their drivers say. Nothing is registered, and tensors go by the host's memory
whatever the answer: docs/decisions/0106-tensors-stay-staged.md.

    way             needs, of the CUDA device      and, of the RDMA device
    a dma-buf       GPU_DIRECT_RDMA_SUPPORTED,     a driver that registers dma-bufs
                    DMA_BUF_SUPPORTED
    its address     GPU_DIRECT_RDMA_SUPPORTED      nvidia_peermem (nv_peer_mem before it) in the
                                                   kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prpc_engine.cuda.driver import find

GPU_DIRECT_RDMA_SUPPORTED, DMA_BUF_SUPPORTED = 116, 124  # CU_DEVICE_ATTRIBUTE_
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


@dataclass(frozen=True)
class DirectSupport:
    """What the CUDA driver says of one device: whether others may read its memory, and whether it
    gives that out as a dma-buf.
    """

    is_readable: bool
    has_dmabuf: bool


def direct_support() -> list[DirectSupport]:
    """Of each CUDA device that this process sees. Raises CudaError."""
    cuda = find()
    if cuda is None:
        return []
    return [
        DirectSupport(
            bool(cuda.attribute(device, GPU_DIRECT_RDMA_SUPPORTED)),
            bool(cuda.attribute(device, DMA_BUF_SUPPORTED)),
        )
        for device in range(len(cuda.uuids))
    ]


def direct_refusal(
    devices: Sequence[DirectSupport], dmabuf_refusal: str | None, has_peer_module: bool
) -> str | None:
    """Why the drivers could not do it; None: they say that they could. `dmabuf_refusal`: why the
    RDMA device registers no dma-buf; None: it does.
    """
    readable = [device for device in devices if device.is_readable]
    if not devices:
        return "this process sees no CUDA device"
    if not readable:
        return "the CUDA driver lets no other device read its devices' memory"
    if has_peer_module:
        return None
    needs_module = f"and the kernel has no {PEER_MODULES[0]}"
    if not any(device.has_dmabuf for device in readable):
        return f"the CUDA driver gives no dma-buf, {needs_module}"
    return None if dmabuf_refusal is None else f"{dmabuf_refusal}; {needs_module}"
