"""An open RDMA port of this process and the memory that is registered with it, through pyverbs: its
protection domain, and each segment of the slab as one memory region, from the first use of it until
the slab drops it; memory of other devices likewise, until it ends (device_memory.py).

In a child made by fork() all that is of a device is the parent's: it is neither used nor given back
there. Do not call ibv_fork_init() and do not set RDMAV_FORK_SAFE: since Linux 5.12 memory that is
registered needs no care, and with either a child of rdma-core 44 is killed by the first page that
it touches.

Constants are of infiniband/verbs.h, whose numbers are an interface; pyverbs has them under other
names in each release.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from shard.errors import ShardError
from shard.memory.device_memory import DEVICE_NUMBERS, device_memory
from shard.memory.slab import Slab
from shard.transport.neighbour import NeighbourSearch
from shard.transport.verbs_device import (
    IWARP,
    NoVerbs,
    VerbsPort,
    loaded,
    pyverbs,
    routed_network,
)
from shard.transport.verbs_introduction import IWARP_LINK, FarPair, mapped_address

logger = logging.getLogger("shard")

READS = 8  # in flight of one queue pair, where both devices take so many
_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ = 1, 2, 4  # of IBV_ACCESS_
_SENT_OR_READ_INTO = _LOCAL_WRITE | _REMOTE_READ
_ACTIVE = 4  # IBV_PORT_ACTIVE


@dataclass(frozen=True)
class VerbsOptions:
    """Which devices are used, and how their packets are marked.

    device         "device" or "device:port", several of them with commas, or "all"; None: the
                   first usable port (verbs_device.py)
    gid_index      of each port's GIDs; None: the best of them
    service_level  0 to 15, of InfiniBand's; on Ethernet the priority, where the switch maps it
    traffic_class  0 to 255, of the GRH: on RoCE v2 the DSCP is its upper six bits
    """

    device: str | None = None
    gid_index: int | None = None
    service_level: int = 0
    traffic_class: int = 0


@dataclass(frozen=True)
class Region:
    """A segment of the slab, or memory of a device, that is registered: its address and length, the
    key by which our own work requests name it, and that by which a peer reads it.
    """

    address: int
    nbytes: int
    lkey: int
    rkey: int


class VerbsDomain:
    """An open port of an RDMA device, and the slab's segments that are registered with it. Raises
    NoVerbs. Thread-safe.

    is_iwarp  what reads are read into is registered for the peer to write, for there an answer to a
              read is a write (RFC 5040, 5.2): never memory of the slab
    """

    def __init__(self, slab: Slab, options: VerbsOptions, port: VerbsPort) -> None:
        loaded()
        self._error: type[Exception] = pyverbs("pyverbs_error").PyverbsError
        self.port, self.is_iwarp = port, port.link == IWARP
        self.options = options
        self._slab = slab
        self._regions: dict[int, tuple[Region, Any]] = {}
        self._refused: dict[int, str] = {}  # memory of devices that this port cannot register: why
        self._told: set[str] = set()
        # of what is registered: each segment once, by whichever thread sends of it first
        self._registering = threading.Lock()
        try:
            self.context: Any = pyverbs("device").Context(name=self.port.device)
            self.domain: Any = pyverbs("pd").PD(self.context)
            found: Any = self.context.query_port(self.port.number)
            self.mtu, self.link, self.lid = found.active_mtu, found.link_layer, found.lid
            named = None if self.is_iwarp else options.gid_index
            self.gid_index = self.port.gid_index if named is None else named
            told = self.context.query_gid(self.port.number, self.gid_index).gid
        except self._error as error:
            raise NoVerbs(f"{self.port} cannot be opened: {error}") from error
        self.gid = bytes.fromhex(told.replace(":", ""))
        self._network = routed_network(self.port, self.gid_index)
        if self.is_iwarp:
            assert port.gid is not None  # of each that has no fault
            self.link, self.gid, self._network = IWARP_LINK, port.gid.packed, port.network
        self.reads = min(READS, self.context.query_device().max_qp_rd_atom)
        self.registrations = 0  # since it was opened
        self.is_parents = False
        # Else the collector may free them before what is of them, which then faults: they end by
        # close() alone, and some hundred bytes stay.
        for one in (self.context, self.domain):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        made_here.add(self)
        slab.watch_segments(self)

    def region(self, number: int) -> Region:
        """Of that segment of the slab, or memory of a device, registered now where it was not.
        Raises NoVerbs where no more may be locked, or this port cannot reach that device.
        """
        found = self._regions.get(number)
        if found is not None:
            return found[0]
        with self._registering:
            found = self._regions.get(number)
            if found is None:
                if number >= DEVICE_NUMBERS:
                    address, nbytes, held = self._register_device(number)
                else:
                    memory = self._slab.segment(number).memory
                    nbytes = len(memory)
                    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                    held = self._register(nbytes, address, _SENT_OR_READ_INTO)
                found = Region(address, nbytes, held.lkey, held.rkey), held
                self._regions[number] = found
        return found[0]

    def _register_device(self, number: int) -> tuple[int, int, Any]:
        """The address by which work requests and peers name that memory, its length, and the
        region. What failed once is not tried again. Raises NoVerbs.
        """
        memory = device_memory(number)
        if memory is None:
            raise NoVerbs("memory of a device that was given back")
        if number in self._refused:
            raise NoVerbs(self._refused[number])
        held, address, refusals = None, 0, []  # of a dma-buf: offsets in it
        if memory.export is not None:
            try:
                held = self._register_dmabuf(memory.nbytes, memory.export())
            except ShardError as error:
                refusals.append(str(error))
        if held is None:
            address = memory.address
            try:
                held = self._register(memory.nbytes, address, _SENT_OR_READ_INTO)
            except NoVerbs as error:
                refusals.append(f"by its address {error}")
                self._refused[number] = "; ".join(refusals)
                raise NoVerbs(self._refused[number]) from error
        memory.tell_end(self._device_memory_ended)
        return address, memory.nbytes, held

    def _register_dmabuf(self, nbytes: int, dmabuf: int) -> Any:
        try:
            held = pyverbs("mr").DmaBufMR(self.domain, nbytes, _SENT_OR_READ_INTO, dmabuf)
        except (self._error, AttributeError) as error:
            raise NoVerbs(
                f"a dma-buf of {nbytes >> 10} KiB cannot be registered with {self.port}: {error}"
            ) from error
        finally:
            os.close(dmabuf)
        self.registrations += 1
        return held

    def _device_memory_ended(self, number: int) -> None:
        """In any thread."""
        with self._registering:
            _, held = self._regions.pop(number)
        if not self.is_parents:
            held.close()

    def search(self, far: FarPair) -> NeighbourSearch | None:
        """The look for the host with that queue pair's GID, which the caller closes; None: its link
        has no neighbours that are looked for.
        """
        if not self._network or far.link != self.link:
            return None
        return NeighbourSearch(self._network, mapped_address(self.gid), mapped_address(far.gid))

    def is_active(self) -> bool:
        """Whether its link is up now."""
        try:
            return bool(self.context.query_port(self.port.number).state == _ACTIVE)
        except self._error:  # the device was removed
            return False

    def tell_once(self, what: str, why: Exception) -> None:
        """A line in the log, the first time of each `what`: what is slow is known to be so. The
        error itself would keep what its traceback holds, arrays among it.
        """
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s: %s: %s", self.port, what, str(why))

    def segment_dropped(self) -> None:
        """What the slab gave back to the kernel is registered, and locked, no longer; see
        Slab.watch_segments(). Under the slab's lock, so one thread at a time; what region()
        registers meanwhile is in use, and stays.
        """
        for number in self._regions.keys() - self._slab.segment_numbers():
            if number < DEVICE_NUMBERS:
                self._regions.pop(number)[1].close()

    def register_own(self, memory: mmap.mmap, at: int, nbytes: int) -> tuple[int, Any]:
        """So many bytes at that offset of memory of one queue, which no peer reads: their address,
        and the region, which the caller closes. Raises NoVerbs.
        """
        return self._register_part(memory, at, nbytes, _LOCAL_WRITE)

    def register_pieces(self, memory: mmap.mmap, at: int, nbytes: int) -> tuple[int, Any]:
        """The same, of what the queue reads into."""
        access = _LOCAL_WRITE | (_REMOTE_WRITE if self.is_iwarp else 0)
        return self._register_part(memory, at, nbytes, access)

    def register_shown(self, memory: mmap.mmap, at: int, nbytes: int) -> tuple[int, Any]:
        """The same, of what the peer may read."""
        return self._register_part(memory, at, nbytes, _REMOTE_READ)

    def _register_part(
        self, memory: mmap.mmap, at: int, nbytes: int, access: int
    ) -> tuple[int, Any]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + at
        return address, self._register(nbytes, address, access)

    def _register(self, nbytes: int, address: int, access: int) -> Any:
        try:
            held = pyverbs("mr").MR(self.domain, nbytes, access, address=address)
        except self._error as error:
            text = str(error)
            if os.strerror(errno.ENOMEM) in text or f"Errno: {errno.ENOMEM}" in text:
                raise NoVerbs(
                    f"{nbytes >> 10} KiB cannot be locked for {self.port}: raise `ulimit -l` "
                    "(memlock), in a container by --ulimit memlock=-1"
                ) from error
            raise NoVerbs(f"{nbytes >> 10} KiB cannot be registered: {text}") from error
        self.registrations += 1
        return held

    def __del__(self) -> None:
        if "context" not in self.__dict__:
            return  # it was never opened
        # by the garbage collector, in any order with the queues: the kernel does the rest
        with contextlib.suppress(self._error):
            for _, held in self._regions.values():
                held.close()
            self.context.close()  # and, before it, all that there still is of it


def verbs_dmabuf_refusal(port: VerbsPort) -> str | None:
    """Why memory of another device, a dma-buf, cannot be registered with this port; None: it can,
    as its driver says. Nothing is registered: the driver is asked with a descriptor that is none,
    and one that could use it says so of the descriptor. Opens the device.
    """
    try:
        loaded()
    except NoVerbs as error:
        return str(error)
    failed: type[Exception] = pyverbs("pyverbs_error").PyverbsError
    register = getattr(pyverbs("mr"), "DmaBufMR", None)
    if register is None:
        return "this pyverbs registers no dma-buf: rdma-core 34 was the first"
    try:
        context = pyverbs("device").Context(name=port.device)
        with context, pyverbs("pd").PD(context) as domain:
            register(domain, mmap.PAGESIZE, _LOCAL_WRITE, -1)
    except failed as error:
        if f"Errno: {errno.EBADF}," in str(error):
            return None
        return f"{port} registers no dma-buf: {error}"
    return f"{port} registers what is no dma-buf"


class OfDevice(Protocol):
    """What a device has for this process."""

    is_parents: bool  # this process is a fork of the one that made it


made_here: weakref.WeakSet[OfDevice] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A child made by fork() has the parent's descriptor of the device: what it gave back would be
    the parent's. So nothing of it ever ends there.
    """
    for one in list(made_here):
        one.is_parents = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


os.register_at_fork(after_in_child=_leave_to_parent)
