"""Device memory that processes of this host open: tensors are copied there to be sent, and out of
there by who receives them.

    a block  is free    its ticket is held by the pool alone
             is taken   from take() on: the ticket is in a message
             is free    again once the message is gone, and every lease on the ticket has come back

The *ticket* is a piece of the slab that travels with the message by reference: so what frees a
block is the lease of the engine, whatever becomes of message and peer (shard/memory/leases.py).
A tensor itself is never lent: its library may use the memory for another at any time.

Where an RDMA device may reach it (direct.py), a block is sent and received by itself, too: as a
DeviceBlock, whose ticket it is (shard/memory/device_memory.py).

Blocks have powers of two as sizes, are allocated when they are first needed, and kept until
close(): others have opened them, and CUDA keeps what is open.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.cuda.direct import DirectSupport, shown_memory
from prpc_engine.cuda.driver import OUT_OF_MEMORY, CudaError, driver
from shard import DeviceMemory, ShmFull, Slab, runtime

BLOCK_BYTES_MIN = 1 << 20
POOL_BYTES_MAX = 4 << 30  # of one device; what is beyond goes through the host
# More than travels within a message, and is copied then (shm_connection.INLINE_BYTES_MAX).
TICKET_BYTES = (16 << 10) + 64


@dataclass(frozen=True)
class PoolRoom:
    """A block for one tensor. `share` is what a receiver of this host opens it by: see opened.py;
    `memory` is what RDMA ports know it by, if they may.
    """

    address: int
    ticket: NDArray[np.uint8]
    share: tuple[int, int, bytes, bytes]
    memory: DeviceMemory | None


class _Block:
    def __init__(
        self,
        address: int,
        nbytes: int,
        share: tuple[int, int, bytes, bytes],
        memory: DeviceMemory | None = None,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.share = share
        self.memory = memory
        # the root that all views on it refer to, so that they can be counted
        self.ticket: NDArray[np.uint8] | None = None
        self.lease: Any = None  # the slab's block under the ticket

    def is_free(self) -> bool:
        return self.is_left_here() and (self.lease is None or self.lease.users == 1)

    def is_left_here(self) -> bool:
        # A message holds a view of the ticket, and each view is a reference to it. (What peers
        # hold is counted by the slab, as leases.)
        return self.ticket is None or sys.getrefcount(self.ticket) <= _OWN_REFERENCES


def _references_of_a_block() -> int:
    block = _Block(0, 0, (0, 0, b"", b""))
    block.ticket = np.empty(0, np.uint8)
    return sys.getrefcount(block.ticket)


# The reference count of a ticket that only its block refers to. It differs between versions of
# Python, so it is measured.
_OWN_REFERENCES = _references_of_a_block()


class Pool:
    """Of all devices of this process. Any thread may call. Owned by a worker."""

    def __init__(
        self,
        slab: Slab,
        limit_bytes: int = POOL_BYTES_MAX,
        direct: Sequence[DirectSupport] = (),
    ) -> None:
        """`direct`: of each device whose memory RDMA ports may have."""
        self.slab = slab
        self.direct = direct
        self._limit_bytes = limit_bytes
        self._lock = runtime.Lock()  # of the blocks: any thread sends
        self._blocks: dict[int, list[_Block]] = {}  # by device
        self._numbers = itertools.count()
        free_unused()
        self.owner = runtime.randbits(62) | 1  # who has allocated what a share names
        _pools()[self.owner] = self

    def take(self, device: int, nbytes: int) -> PoolRoom | None:
        """A block of that device for so many bytes; None: there is no room for it."""
        size = max(BLOCK_BYTES_MIN, 1 << (nbytes - 1).bit_length())
        with self._lock:
            blocks = self._blocks.setdefault(device, [])
            fitting = (each for each in blocks if each.nbytes == size and each.is_free())
            block = next(fitting, None) or self._allocate(device, size, blocks)
            if block is None:
                return None
            if block.ticket is None:
                try:
                    fresh = self.slab.empty(TICKET_BYTES, np.uint8)
                    fresh[:] = 0  # code that reads it as data finds no stale memory
                    block.ticket = fresh.base
                    del fresh
                except ShmFull:
                    return None
                assert block.ticket is not None, "empty() gives a view of its root"
                found = self.slab.block_of(block.ticket.view(np.ndarray))
                assert found is not None, "it is of this slab"
                block.lease = found[0]
            return PoolRoom(block.address, block.ticket.view(np.ndarray), block.share, block.memory)

    def _allocate(self, device: int, size: int, blocks: list[_Block]) -> _Block | None:
        if sum(each.nbytes for each in blocks) + size > self._limit_bytes:
            return None
        cuda = driver()
        with cuda.on(device):
            try:
                address = cuda.allocate(size)
            except CudaError as error:
                if error.code == OUT_OF_MEMORY:
                    return None
                raise
            memory = self._shown(device, address, size)
            try:
                handle = cuda.handle(address)
            except CudaError:  # of a platform without CUDA IPC
                if memory is None:
                    cuda.free(address)
                    return None
                handle = b""  # which no receiver opens
        number = next(self._numbers)
        block = _Block(address, size, (self.owner, number, cuda.uuids[device], handle), memory)
        blocks.append(block)
        return block

    def _shown(self, device: int, address: int, size: int) -> DeviceMemory | None:
        if device >= len(self.direct) or not self.direct[device].is_readable:
            return None
        with contextlib.suppress(CudaError):  # without it, its tensors go by the host
            return shown_memory(device, address, size, self.direct[device])
        return None

    def address_of(self, number: int, ticket: NDArray[np.uint8]) -> int | None:
        """Of a block of this pool, for a message within this process. None without the block's own
        ticket: a peer may not have us read what we have sent to another one.
        """
        found = self.slab.block_of(ticket)
        with self._lock:
            each = (block for blocks in self._blocks.values() for block in blocks)
            block = next((block for block in each if block.share[1] == number), None)
            if block is None or found is None or found[0] is not block.lease:
                return None
            return block.address

    def statistics(self) -> dict[str, int]:
        """`blocks` and their `bytes` on devices, and how many are `taken`."""
        with self._lock:
            every = [block for blocks in self._blocks.values() for block in blocks]
            taken = sum(not block.is_free() for block in every)
        return {
            "blocks": len(every),
            "bytes": sum(block.nbytes for block in every),
            "taken": taken,
        }

    def close(self) -> None:
        """Give all memory back, but for what a thread of this process writes to at this moment.
        What others have open stays theirs until they close it. What RDMA ports know is freed once
        nobody uses it, as the next pool is made or closed.
        """
        _pools().pop(self.owner, None)
        with self._lock:
            self._limit_bytes = 0
            for device, blocks in self._blocks.items():
                cuda = driver()
                with cuda.on(device):
                    for block in blocks:
                        if block.memory is None and block.is_left_here():
                            cuda.free(block.address)
                for block in blocks:
                    if block.memory is not None:
                        _left_over().add(device, block)
            self._blocks.clear()
        free_unused()


class _LeftOver:
    """Blocks of pools that were closed while a peer might read them, or a port write to them."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()  # of the blocks: two workers may leave at a time
        self._blocks: list[tuple[int, _Block]] = []  # with their devices

    def add(self, device: int, block: _Block) -> None:
        with self._lock:
            self._blocks.append((device, block))

    def free_unused(self) -> None:
        with self._lock:
            kept = [each for each in self._blocks if not each[1].is_free()]
            unused = [each for each in self._blocks if each not in kept]
            self._blocks = kept
        for device, block in unused:
            if block.memory is not None:
                block.memory.end()
            cuda = driver()
            with cuda.on(device):
                cuda.free(block.address)


def _left_over() -> _LeftOver:
    return runtime.own("cuda left over", _LeftOver)


def free_unused() -> None:
    """Free the blocks of closed pools that no message, peer or port uses any more."""
    _left_over().free_unused()


def _pools() -> dict[int, Pool]:
    return runtime.own("cuda pools", dict)


def own(owner: int) -> Pool | None:
    """The pool of that number, if it is of this process."""
    return _pools().get(owner)
