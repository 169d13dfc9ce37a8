"""Memory of CUDA devices that an RDMA device reads and writes (GPUDirect RDMA): which devices' may
be, by what their drivers say, and how it is shown to a port. Used where Options(gpu_direct=True)
asks for it, and by `prpc doctor`. Never run on such hardware:
docs/decisions/0111-tensors-past-the-host-where-asked.md.

    way             needs, of the CUDA device      and, of the RDMA device
    a dma-buf       GPU_DIRECT_RDMA_SUPPORTED,     a driver that registers dma-bufs
                    DMA_BUF_SUPPORTED
    its address     GPU_DIRECT_RDMA_SUPPORTED      nvidia_peermem (nv_peer_mem before it) in the
                                                   kernel

What arrives is read into a device only where it may be seen there at once: where the device orders
such writes, or the host can flush them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prpc_engine.cuda.driver import driver, find
from shard import DeviceMemory, runtime

# CU_DEVICE_ATTRIBUTE_
GPU_DIRECT_RDMA_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING, DMA_BUF_SUPPORTED = 116, 117, 118, 124
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_ORDERED_FOR_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


@dataclass(frozen=True)
class DirectSupport:
    """What the CUDA driver says of one device: whether others may read its memory, and whether it
    gives that out as a dma-buf; whether it sees their writes in order, or else is made to.
    """

    is_readable: bool
    has_dmabuf: bool
    is_ordered: bool = False
    can_flush: bool = False

    @property
    def may_be_written(self) -> bool:
        """Whether what an RDMA device wrote there is seen in time."""
        return self.is_readable and (self.is_ordered or self.can_flush)


def direct_support() -> list[DirectSupport]:
    """Of each CUDA device that this process sees. Raises CudaError."""
    cuda = find()
    if cuda is None:
        return []
    return [
        DirectSupport(
            bool(cuda.attribute(device, GPU_DIRECT_RDMA_SUPPORTED)),
            bool(cuda.attribute(device, DMA_BUF_SUPPORTED)),
            cuda.attribute(device, WRITES_ORDERING) >= _ORDERED_FOR_OWNER,
            bool(cuda.attribute(device, FLUSH_OPTIONS) & _FLUSH_BY_HOST),
        )
        for device in range(len(cuda.uuids))
    ]


def _supported() -> list[DirectSupport]:
    """The same, asked once in a process."""
    return runtime.own("cuda direct", direct_support)


def settle(device: int) -> None:
    """Have that device, of ours, see what RDMA ports wrote to its memory. Raises CudaError."""
    if not _supported()[device].is_ordered:
        cuda = driver()
        with cuda.on(device):
            cuda.settle_writes()


def shown_memory(device: int, address: int, nbytes: int, support: DirectSupport) -> DeviceMemory:
    """An allocation of that device, for RDMA ports; end() it before it is freed. Call this inside
    of on(device). Raises CudaError.
    """
    cuda = driver()
    cuda.order_for_others(address)

    def export() -> int:
        with cuda.on(device):
            return cuda.dmabuf(address, nbytes)

    return DeviceMemory(address, nbytes, export if support.has_dmabuf else None)


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
