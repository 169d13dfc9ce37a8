"""Blocks of a pool that RDMA ports read and write by themselves: of tensors that leave, and room
for those that come.

    leaves   a tensor is copied into a block within its device, and the message has a DeviceBlock
             on it; over verbs the peer reads it there, over anything else it is staged first
    comes    an arrival over verbs is read into a block of the device that it is for, and copied
             from there into the tensor within the device
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from prpc_engine.cuda.direct import DirectSupport, settle
from prpc_engine.cuda.pool import Pool, PoolRoom
from prpc_engine.cuda.staging import copied_to_host
from shard import DeviceBlock, device_block

# Smaller ones go by the host: each takes a block of BLOCK_BYTES_MIN, a region of a peer's.
DIRECT_BYTES_MIN = 256 << 10
NO_SUPPORT = DirectSupport(is_readable=False, has_dmabuf=False)


class DirectBlocks:
    """Of one pool. Any thread may call.

    sent      tensors that were put into such blocks for messages
    staged    copies of them to the host after all: for another transport, say. One that is tried
              over two connections is copied twice
    received  tensors that ports read into devices of ours
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.sent = self.staged = self.received = 0

    def leaving(self, device: int, nbytes: int, target: int) -> tuple[PoolRoom, DeviceBlock] | None:
        """Room for a tensor of that device, and what stands for it in a message to a receiver's
        device; None: it goes by the host. Raises CudaError.
        """
        if nbytes < DIRECT_BYTES_MIN or not self._support(device).is_readable:
            return None
        room = self._pool.take(device, nbytes)
        if room is None or room.memory is None:
            return None
        self.sent += 1
        stage = partial(self._stage, device, room.address, nbytes)
        return room, device_block(room.ticket, room.memory, nbytes, target, stage)

    def _support(self, device: int) -> DirectSupport:
        return self._pool.direct[device] if device < len(self._pool.direct) else NO_SUPPORT

    def _stage(self, device: int, address: int, nbytes: int) -> NDArray[np.uint8]:
        copy = copied_to_host(device, address, nbytes)
        self.staged += 1
        return copy

    def coming(self, device: int, nbytes: int) -> DeviceBlock | None:
        """As DeviceRooms has it; those of less than DIRECT_BYTES_MIN come by the host. Raises
        CudaError.
        """
        if nbytes < DIRECT_BYTES_MIN or not self._support(device).may_be_written:
            return None
        room = self._pool.take(device, nbytes)
        if room is None or room.memory is None:
            return None
        copy = partial(_copied_back, device, room.address, nbytes)
        return device_block(room.ticket, room.memory, nbytes, device, copy)

    def came(self) -> None:
        """As DeviceRooms has it."""
        self.received += 1

    def statistics(self) -> dict[str, int]:
        """The three figures, named direct_..."""
        return {
            "direct_sent": self.sent,
            "direct_staged": self.staged,
            "direct_received": self.received,
        }


def _copied_back(device: int, address: int, nbytes: int) -> NDArray[np.uint8]:
    settle(device)
    return copied_to_host(device, address, nbytes)
