"""A tensor's bytes from a device into a message, and out of it into a device.

    way     who can                               cost of N bytes
    shared  the receiver opens the sender's pool  copied on the device by either, N / 2 TB/s each,
            (same host, same device visible)      and one wait of each for its device
    host    anybody                               to the host and to the device again, each
                                                  N / 13 GB/s of pageable memory, or less

Either side waits for its copy: the sender before the message leaves, so that no receiver ever waits
for another's device; the receiver before the value is handed out, so that it is complete for every
stream. Copies are queued behind what the library's current stream has to do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prpc_engine.cuda.driver import driver
from prpc_engine.cuda.opened import opened
from prpc_engine.cuda.placement import HOST, current
from shard import ShmFull, Slab, is_lent, runtime

# Smaller ones take as long by the host, and no block of the pool.
SHARED_BYTES_MIN = 32 << 10


class SentTensor(NamedTuple):
    """What stands for a tensor in a message: the block that holds its bytes, or the ticket of the
    share that does; and the receiver's device.
    """

    block: NDArray[np.uint8]
    target: int
    share: tuple[int, int, bytes, bytes] | None


def send(device: int, address: int, nbytes: int, stream: int) -> SentTensor:
    """From a device of this process, by what current() says. Raises CudaError."""
    placement = current()
    target = placement.targets.get(device)
    if target is None:
        _warn_once(device)
        target = HOST
    cuda = driver()
    if target != HOST and placement.pool is not None and nbytes >= SHARED_BYTES_MIN:
        room = placement.pool.take(device, nbytes)
        if room is not None:
            with cuda.on(device):
                cuda.copy(room.address, address, nbytes, stream)
                cuda.synchronize(stream)
            return SentTensor(room.ticket, target, room.share)
    block = _host_block(nbytes)
    if nbytes:
        with cuda.on(device):
            cuda.copy(block.ctypes.data, address, nbytes, stream)
            cuda.synchronize(stream)
    return SentTensor(block, target, None)


def _host_block(nbytes: int) -> NDArray[np.uint8]:
    """In the slab, from where it is sent by reference; where that has no room, anywhere."""
    slab: Slab | None = runtime.made("slab")
    if slab is not None and nbytes >= SHARED_BYTES_MIN:
        with contextlib.suppress(ShmFull):
            return slab.empty(nbytes, np.uint8)
    return np.empty(nbytes, np.uint8)


@contextlib.contextmanager
def source_of(block: NDArray[np.uint8], share: Sequence[Any] | None, nbytes: int) -> Iterator[int]:
    """The address here of a tensor's bytes, which stay meanwhile. Raises ValueError where they are
    not there, or may be overwritten; CudaError.
    """
    if share is None:
        if block.nbytes != nbytes:
            raise ValueError(f"a tensor of {nbytes} bytes in a block of {block.nbytes}")
        yield block.ctypes.data
        return
    if not is_lent(block):
        raise ValueError(
            "a tensor in another process's device memory, whose ticket was copied on its way: that "
            "memory may be used again by now"
        )
    with opened().reading(share, block) as address:
        yield address


def receive(device: int, address: int, source: int, nbytes: int, stream: int) -> None:
    """Into memory of a device of this process. Raises CudaError."""
    if nbytes:
        cuda = driver()
        with cuda.on(device):
            cuda.copy(address, source, nbytes, stream)
            cuda.synchronize(stream)


def to_host(
    block: NDArray[np.uint8], share: Sequence[Any] | None, nbytes: int
) -> NDArray[np.uint8]:
    """A tensor's bytes as a block of the host. Raises as source_of()."""
    with source_of(block, share, nbytes) as source:
        if share is None:
            return block
        found = np.empty(nbytes, np.uint8)
        receive(driver().uuids.index(share[2]), found.ctypes.data, source, nbytes, 0)
        return found


_warned: set[int] = set()


def _warn_once(device: int) -> None:
    if device in _warned:
        return
    _warned.add(device)
    warnings.warn(
        f"a tensor of cuda:{device} is copied to the host, and arrives there: no device map names "
        "it for this receiver (prpc_engine.remote.Options.set_device_map)",
        RuntimeWarning,
        stacklevel=2,
    )
