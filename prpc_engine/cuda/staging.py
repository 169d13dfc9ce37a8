"""Bytes of a device in the host's memory, on their way to a peer."""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from prpc_engine.cuda.driver import driver
from shard import ShmFull, Slab, runtime

# Smaller ones take as long by the host as by any other way, and no block of a pool.
SHARED_BYTES_MIN = 32 << 10


def copied_to_host(device: int, address: int, nbytes: int, stream: int = 0) -> NDArray[np.uint8]:
    """A block with them, once the stream has done what it has to do. Raises CudaError."""
    block = _host_block(nbytes)
    if nbytes:
        cuda = driver()
        with cuda.on(device):
            cuda.copy(block.ctypes.data, address, nbytes, stream)
            cuda.synchronize(stream)
    return block


def _host_block(nbytes: int) -> NDArray[np.uint8]:
    """In the slab, from where it is sent by reference; where that has no room, anywhere."""
    slab: Slab | None = runtime.made("slab")
    if slab is not None and nbytes >= SHARED_BYTES_MIN:
        with contextlib.suppress(ShmFull):
            return slab.empty(nbytes, np.uint8)
    return np.empty(nbytes, np.uint8)
