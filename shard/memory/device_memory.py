"""Memory of another device, a GPU say, that an RDMA port may read and write, and what stands for
bytes there in a message. No kind of device is named here: prpc_engine/cuda makes these.

    DeviceMemory   a piece of it, until end(): a port registers it once, as it does a segment of the
                   slab, and by a number of the same kind
    DeviceBlock    bytes in it. The array itself is the *ticket*: a piece of the slab that keeps
                   the memory taken as long as it is leased or referred to, and never looked into
    over verbs     the peer reads the bytes from where they are; the lease is the ticket's
    else           Connection.send() has staged() copy them into the host's memory
    at the peer    they are read into a DeviceBlock of its own, where its DeviceRooms have room on
                   the device that they are for; else into the host's memory, as any block
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shard.errors import LocalProtocolError, ShardError

DEVICE_NUMBERS = 1 << 31  # from here on; those of the slab's segments are below
_numbers = itertools.count(DEVICE_NUMBERS)


class DeviceMemory:
    """`nbytes` at that address of a device. Made and ended by who has allocated it.

    export  gives out a dma-buf of it, a descriptor which the caller closes; None: there is none,
            and ports are told the address. Raises ShardError
    """

    def __init__(self, address: int, nbytes: int, export: Callable[[], int] | None = None) -> None:
        self.address, self.nbytes, self.export = address, nbytes, export
        self.number = next(_numbers)
        self._told: list[weakref.WeakMethod[Callable[[int], object]]] = []
        _there[self.number] = self

    def tell_end(self, forget: Callable[[int], object]) -> None:
        """Have that method called, with its number, when it ends."""
        self._told.append(weakref.WeakMethod(forget))

    def end(self) -> None:
        """It is about to be freed: no port has it registered when this returns. Again: nothing."""
        if _there.pop(self.number, None) is None:
            return
        for each in self._told:
            forget = each()
            if forget is not None:
                forget(self.number)


_there: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()


def device_memory(number: int) -> DeviceMemory | None:
    """That of the number; None: it has ended."""
    return _there.get(number)


class DeviceBlock(np.ndarray[Any, np.dtype[Any]]):
    """The first `nbytes_there` of `memory`. Made by device_block().

    number  of a device. In a message that leaves: the receiver's, that they are for; that came:
            ours, where they are
    stage   copies them into the host's memory. Raises ShardError
    """

    __slots__ = ("memory", "nbytes_there", "number", "stage")
    memory: DeviceMemory
    nbytes_there: int
    number: int
    stage: Callable[[], NDArray[np.uint8]]

    def __array_finalize__(self, made_of: object) -> None:
        """Raises TypeError: a view or a copy would be of the ticket, and keep nothing taken."""
        if type(made_of) is DeviceBlock:
            raise TypeError("a DeviceBlock is passed on as it is, or staged")


class DeviceRooms(Protocol):
    """Room on devices of ours for what peers send. Called by the reactor."""

    def coming(self, device: int, nbytes: int) -> DeviceBlock | None:
        """For so many bytes on that one; None: there is none. Raises ShardError."""

    def came(self) -> None:
        """A port reads into such room."""


def device_block(
    ticket: NDArray[np.uint8],
    memory: DeviceMemory,
    nbytes: int,
    device: int,
    stage: Callable[[], NDArray[np.uint8]],
) -> DeviceBlock:
    """That ticket, for so many bytes at the beginning of that memory."""
    block = ticket.view(DeviceBlock)
    block.memory, block.nbytes_there, block.number, block.stage = memory, nbytes, device, stage
    return block


def bytes_of(block: NDArray[Any]) -> int:
    """How many a block has, wherever they are."""
    return block.nbytes_there if type(block) is DeviceBlock else block.nbytes


def is_device(block: NDArray[Any]) -> bool:
    """Whether its bytes are in memory of a device."""
    return type(block) is DeviceBlock


def staged(blocks: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
    """The same, all in the host's memory. Raises as staged_block()."""
    for block in blocks:
        if type(block) is DeviceBlock:
            return [staged_block(each) if type(each) is DeviceBlock else each for each in blocks]
    return blocks


def staged_block(block: DeviceBlock) -> NDArray[np.uint8]:
    """Its bytes, in the host's memory. Raises LocalProtocolError where the device or the host does
    not do it: the message is not sent, over this connection or another.
    """
    try:
        return block.stage()
    except (ShardError, MemoryError) as error:
        raise LocalProtocolError(
            f"{block.nbytes_there} bytes of a device cannot be copied to the host: {error}"
        ) from error
