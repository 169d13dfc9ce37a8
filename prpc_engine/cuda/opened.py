"""Blocks of other processes' pools that this one has opened by CUDA IPC.

    share = [owner, number, UUID of the device, IPC handle]     see pool.py

A block is opened once, which takes 140 us, and stays open until its owner is gone: forget(). It
is only read, and while its ticket is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prpc_engine.cuda.driver import HANDLE_BYTES, UUID_BYTES, CudaError, driver
from prpc_engine.cuda.pool import own
from shard import runtime

OPENED_MAX = 4096  # blocks; a peer that has so many of different sizes is no pool


class OpenedBlocks:
    """Of this process. Any thread may call."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()  # of what is open: any thread receives
        # by owner and number: the device here, and the address
        self._opened: dict[tuple[int, int], tuple[int, int]] = {}

    def address_of(self, share: Sequence[Any]) -> int:
        """Where a block lies, for this process. Raises ValueError for what is no share, CudaError
        where the device is not seen here or the driver refuses.
        """
        owner, number, uuid, handle = share
        if type(handle) is not bytes or len(handle) != HANDLE_BYTES or len(uuid) != UUID_BYTES:
            raise ValueError("a share whose handle or device is none")
        ours = own(owner)
        if ours is not None:
            address = ours.address_of(number)
            if address is None:
                raise ValueError(f"block {number} of this process's pool, which has none such")
            return address
        with self._lock:
            found = self._opened.get((owner, number))
            if found is not None:
                return found[1]
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
        """That process is gone: close what was its. Nobody reads it any more."""
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
