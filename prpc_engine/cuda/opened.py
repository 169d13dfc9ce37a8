"""Blocks of other processes' pools that this one has opened by CUDA IPC.

    share = [owner, number, UUID of the device, IPC handle]     see pool.py

A block is opened once, which takes 140 us, and stays open until its owner is gone: forget(). It
is only read, and while its ticket is held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.cuda.driver import HANDLE_BYTES, UUID_BYTES, CudaError, driver
from prpc_engine.cuda.pool import own
from shard import runtime

OPENED_MAX = 4096  # blocks; a peer that has so many of different sizes is no pool


class OpenedBlocks:
    """Of this process. Any thread may call."""

    def __init__(self) -> None:
        # of what is open: any thread receives, and another may hear meanwhile that its owner died
        self._lock = runtime.Lock()
        # by owner and number: the device here, and the address
        self._opened: dict[tuple[int, int], tuple[int, int]] = {}

    @contextlib.contextmanager
    def reading(self, share: Sequence[Any], ticket: NDArray[np.uint8]) -> Iterator[int]:
        """The address of a block in this process; the block stays open until the caller is done.
        Raises ValueError for what is no share, CudaError where the device is not seen here or the
        driver refuses.
        """
        owner, number, uuid, handle = share
        if type(handle) is not bytes or len(handle) != HANDLE_BYTES or len(uuid) != UUID_BYTES:
            raise ValueError("a share whose handle or device is none")
        ours = own(owner)
        if ours is not None:
            address = ours.address_of(number, ticket)
            if address is None:
                raise ValueError(f"block {number} of this process's pool came without its ticket")
            yield address
            return
        with self._lock:
            found = self._opened.get((owner, number))
            yield self._open(owner, number, uuid, handle) if found is None else found[1]

    def _open(self, owner: int, number: int, uuid: bytes, handle: bytes) -> int:
        if len(self._opened) >= OPENED_MAX:
            raise ValueError(f"{OPENED_MAX} blocks of other processes are open already")
        cuda = driver()
        if uuid not in cuda.uuids:
            raise CudaError(f"device {uuid.hex()} is not seen by this process", 0)
        device = cuda.uuids.index(uuid)
        with cuda.on(device):
            address = cuda.open_handle(handle)
        self._opened[owner, number] = device, address
        return address

    def forget(self, owner: int) -> None:
        """Close all blocks of a pool whose process has ended. Waits for the threads that read."""
        with self._lock:
            for key in [key for key in self._opened if key[0] == owner]:
                device, address = self._opened.pop(key)
                with driver().on(device):
                    driver().close_handle(address)

    def __len__(self) -> int:
        return len(self._opened)


def opened() -> OpenedBlocks:
    """Of this process."""
    return runtime.own("cuda opened", OpenedBlocks)
