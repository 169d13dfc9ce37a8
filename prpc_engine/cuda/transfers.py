"""A tensor's bytes from a device into a message, and out of it into a device.

    way     who can                               cost of N bytes
    shared  the receiver opens the sender's pool  copied on the device by either, N / 2 TB/s each,
            (same host, same device visible)      and one wait of each for its device
    direct  Options(gpu_direct=True), a GPU and   the same, and what RDMA takes
            a port that may reach it, over verbs
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

from prpc_engine.cuda.direct import settle
from prpc_engine.cuda.driver import driver
from prpc_engine.cuda.opened import opened
from prpc_engine.cuda.placement import HOST, current
from prpc_engine.cuda.pool import PoolRoom
from prpc_engine.cuda.staging import SHARED_BYTES_MIN, copied_to_host
from shard import DeviceBlock, bytes_of, is_lent


class SentTensor(NamedTuple):
    """What stands for a tensor in a message: the block that holds its bytes, or the ticket of the
    share that does; and the receiver's device.
    """

    block: NDArray[np.uint8]
    target: int
    share: tuple[int, int, bytes, bytes] | None


def send(
    device: int, address: int, nbytes: int, stream: int, may_be_direct: bool = True
) -> SentTensor:
    """From a device of this process, by what current() says. `may_be_direct`: the block goes into
    the message as it is, and may be a DeviceBlock. Raises CudaError.
    """
    placement = current()
    target = placement.targets.get(device)
    if target is None:
        _warn_once(device)
        target = HOST
    if target != HOST and placement.pool is not None and nbytes >= SHARED_BYTES_MIN:
        room = placement.pool.take(device, nbytes)
        if room is not None:
            _fill(room, device, address, nbytes, stream)
            return SentTensor(room.ticket, target, room.share)
    if target != HOST and placement.direct is not None and may_be_direct:
        found = placement.direct.leaving(device, nbytes, target)
        if found is not None:
            room, block = found
            _fill(room, device, address, nbytes, stream)
            return SentTensor(block, target, None)
    return SentTensor(copied_to_host(device, address, nbytes, stream), target, None)


def _fill(room: PoolRoom, device: int, address: int, nbytes: int, stream: int) -> None:
    cuda = driver()
    with cuda.on(device):
        cuda.copy(room.address, address, nbytes, stream)
        cuda.synchronize(stream)


@contextlib.contextmanager
def source_of(block: NDArray[np.uint8], share: Sequence[Any] | None, nbytes: int) -> Iterator[int]:
    """The address here of a tensor's bytes, which stay meanwhile. Raises ValueError where they are
    not there, or may be overwritten; CudaError.
    """
    if share is None:
        _check_size(block, nbytes)
        if type(block) is DeviceBlock:
            settle(block.number)
            yield block.memory.address
        else:
            yield block.ctypes.data
        return
    if not is_lent(block):
        raise ValueError(
            "a tensor in another process's device memory, whose ticket was copied on its way: that "
            "memory may be used again by now"
        )
    with opened().reading(share, block) as address:
        yield address


def _check_size(block: NDArray[np.uint8], nbytes: int) -> None:
    if bytes_of(block) != nbytes:
        raise ValueError(f"a tensor of {nbytes} bytes in a block of {bytes_of(block)}")


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
    if share is None:
        _check_size(block, nbytes)
        return block.stage() if type(block) is DeviceBlock else block
    with source_of(block, share, nbytes) as source:
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
