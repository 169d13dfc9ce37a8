"""RDMA verbs as a connection needs them, through pyverbs: memory that is registered once, and a
reliable queue pair with slots for messages at both ends. Nothing else in `shard` calls pyverbs,
but for verbs_device.py, which asks it for the devices.

    VerbsDomain   one open device of this process: its protection domain, and each segment of the
                  slab as one memory region, from the first use of it until the slab drops it
    VerbsQueue    one queue pair, its completion queue and channel, and its slots

    slots   offset 0                     SLOTS of `slot_bytes`: where messages are received
            SLOTS x slot_bytes           as many: where messages lie that are sent
            2 x SLOTS x slot_bytes       READS pieces of `BOUNCE_BYTES`, mapped when first needed:
                                         for arrays that find no place in registered memory

    work request            its number                         completes
    receive into slot i     i                                  always: a message is there
    send of slot i          SENT, or that it is not told of    each SIGNAL_EVERY-th, for all before
    read k of READS         READ + k                           always
    a read of no bytes      FLUSH                              once all sends before it arrived

What a queue may hold is bounded by these, so neither it nor its completion queue ever overflows. A
work request is made once and posted again, since pyverbs does not give back the memory of one that
is dropped, and to make one costs more than to post it.

In a child made by fork() all of it is the parent's: it is neither used nor given back there. Do not
call ibv_fork_init() and do not set RDMAV_FORK_SAFE: since Linux 5.12 memory that is registered
needs no care, and with either a child of rdma-core 44 is killed by the first page that it touches.

Constants are of infiniband/verbs.h, whose numbers are an interface; pyverbs has them under other
names in each release.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import logging
import mmap
import os
import secrets
import struct
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

from shard.errors import RemoteProtocolError
from shard.memory.slab import Slab
from shard.transport.verbs_device import NoVerbs, VerbsPort, chosen_port, loaded

logger = logging.getLogger("shard")

SLOTS = 64
SIGNAL_EVERY = 16
READS = 8  # in flight of one queue, where both devices take so many
BOUNCE_BYTES = 256 << 10
READ_BYTES_MAX = 1 << 20  # of one read: rxe takes 8 MiB, and a long one holds up the others
SENT, READ, FLUSH = 1 << 20, 1 << 21, 1 << 22
CHANNEL_TRIES = 100
INLINE_BYTES_ASKED = 220  # what most devices take; a post of so many bytes reads no memory later

_RC = 2  # IBV_QPT_RC
_LOCAL_WRITE, _REMOTE_READ = 1, 4  # of IBV_ACCESS_
_SEND, _RDMA_READ = 2, 4  # of IBV_WR_
_SIGNALED, _INLINE = 2, 8  # of IBV_SEND_
SUCCESS = 0  # IBV_WC_SUCCESS
# IBV_WC_, as what they mean to a user
_STATUS = {
    1: "a message was longer than its slot",
    4: "memory that is not registered here was used",
    5: "the queue pair was in error already",
    9: "the peer refused a request as none that it takes",
    10: "the peer refused access to its memory: it was registered no longer",
    11: "the peer could not do what was asked",
    12: "the peer's device acknowledged nothing: it is down or cut off, or its process died",
    13: "the peer had no slot for a message",
    21: "the device failed",
}
# 4.096 us x 2^16 = 0.27 s without an acknowledgement, as often as there are tries: some 2 s in all.
# 7 tries, or 7 times no slot, would be for ever with soft RoCE.
_TIMEOUT, _TRIES, _NO_SLOT_TRIES, _NO_SLOT_TIMER = 16, 6, 6, 12
_HOPS = 64
LINK_ETHERNET = 2  # IBV_LINK_LAYER_ETHERNET


@dataclass(frozen=True)
class VerbsOptions:
    """Which device is used, and how its packets are marked.

    device         "device" or "device:port"; None: the first usable port (verbs_device.py)
    gid_index      of the port's GIDs; None: the best of them
    service_level  0 to 15, of InfiniBand's; on Ethernet the priority, where the switch maps it
    traffic_class  0 to 255, of the GRH: on RoCE v2 the DSCP is its upper six bits
    """

    device: str | None = None
    gid_index: int | None = None
    service_level: int = 0
    traffic_class: int = 0


class VerbsFailed(Exception):
    """A work request ended with an error, which ends its queue pair; the text says why."""


def failure_text(status: int) -> str:
    """What a completion's status means."""
    return _STATUS.get(status, f"a work request ended with status {status}")


@dataclass(frozen=True)
class FarEnd:
    """What one end tells the other of itself, before either is connected.

        offset  size  field
             0     2  release     INTRODUCTION_VERSION
             2     1  link        IBV_LINK_LAYER of its port: both have to be the same
             3     1  mtu         IBV_MTU; the less of the two is used
             4     2  lid         of InfiniBand
             6     2  reads       that it answers at a time
             8     4  number      of its queue pair
            12     4  psn         of its first packet, 24 bits, random
            16    16  gid
            32     4  slots
            36     4  slot_bytes
            40   216  fault       why it has no queue pair, UTF-8; zeros: it has one

    All little-endian.
    """

    link: int = 0
    mtu: int = 0
    lid: int = 0
    reads: int = 0
    number: int = 0
    psn: int = 0
    gid: bytes = bytes(16)
    slots: int = 0
    slot_bytes: int = 0
    fault: str = ""

    def pack(self) -> bytes:
        """As the table says."""
        return _FAR_END.pack(
            INTRODUCTION_VERSION,
            self.link,
            self.mtu,
            self.lid,
            self.reads,
            self.number,
            self.psn,
            self.gid,
            self.slots,
            self.slot_bytes,
            self.fault.encode()[:_FAULT_BYTES],
        )

    @classmethod
    def unpack(cls, data: bytes) -> FarEnd:
        """Of FAR_END_BYTES. Raises RemoteProtocolError for what no end can be."""
        release, *rest = _FAR_END.unpack(data)
        if release != INTRODUCTION_VERSION:
            raise RemoteProtocolError(
                f"the peer introduces its queue pair in version {release}, this side in "
                f"{INTRODUCTION_VERSION}: install the same release at both sides"
            )
        fault = rest.pop().rstrip(b"\0").decode(errors="replace")
        end = replace(cls(*rest), fault=fault)
        if not end.fault and not (
            end.slots >= SLOTS_MIN and end.slot_bytes >= SLOT_BYTES_MIN and end.reads > 0
        ):
            raise RemoteProtocolError(
                f"the peer has {end.slots} slots of {end.slot_bytes} bytes, and answers "
                f"{end.reads} reads: at least {SLOTS_MIN} of {SLOT_BYTES_MIN}, and one, are needed"
            )
        return end


INTRODUCTION_VERSION = 1
_FAULT_BYTES = 216
_FAR_END = struct.Struct(f"<HBBHHII16sII{_FAULT_BYTES}s")
FAR_END_BYTES = _FAR_END.size
assert FAR_END_BYTES == 256  # the table above
SLOTS_MIN, SLOT_BYTES_MIN = SIGNAL_EVERY, 256


@dataclass(frozen=True)
class Region:
    """A segment of the slab that is registered: its address and length, the key by which our own
    work requests name it, and that by which a peer reads it.
    """

    address: int
    nbytes: int
    lkey: int
    rkey: int


class VerbsDomain:
    """An open port of an RDMA device, and the slab's segments that are registered with it. Raises
    NoVerbs. Thread-safe.
    """

    def __init__(self, slab: Slab, options: VerbsOptions) -> None:
        loaded()
        self._error: type[Exception] = _pyverbs("pyverbs_error").PyverbsError
        self.port: VerbsPort = chosen_port(options.device)
        self.options = options
        self._slab = slab
        self._regions: dict[int, tuple[Region, Any]] = {}
        self._drops_seen = 0
        self._is_told = False
        # of what is registered: each segment once, by whichever thread sends of it first
        self._registering = threading.Lock()
        try:
            self.context: Any = _pyverbs("device").Context(name=self.port.device)
            self.domain: Any = _pyverbs("pd").PD(self.context)
            found: Any = self.context.query_port(self.port.number)
            self.mtu, self.link, self.lid = found.active_mtu, found.link_layer, found.lid
            self.gid_index = self.port.gid_index if options.gid_index is None else options.gid_index
            told = self.context.query_gid(self.port.number, self.gid_index).gid
        except self._error as error:
            raise NoVerbs(f"{self.port} cannot be opened: {error}") from error
        self.gid = bytes.fromhex(told.replace(":", ""))
        self.reads = min(READS, self.context.query_device().max_qp_rd_atom)
        self.registrations = 0  # since it was opened
        # Else the collector may free them before what is of them, which then faults: they end by
        # close() alone, and some hundred bytes stay.
        for one in (self.context, self.domain):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        _made_here.add(self)

    def region(self, number: int) -> Region:
        """Of that segment of the slab, registered now where it was not. Raises NoVerbs where no
        more may be locked.
        """
        found = self._regions.get(number)
        if found is not None:
            return found[0]
        with self._registering:
            found = self._regions.get(number)
            if found is None:
                memory = self._slab.segment(number).memory
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                held = self._register(len(memory), address, _LOCAL_WRITE | _REMOTE_READ)
                found = Region(address, len(memory), held.lkey, held.rkey), held
                self._regions[number] = found
        return found[0]

    def tell_once(self, text: str) -> None:
        """A line in the log, the first time: what is slow is known to be so."""
        if not self._is_told:
            self._is_told = True
            logger.warning("%s: %s", self.port, text)

    def drop_old(self) -> None:
        """What the slab gave back to the kernel is registered no longer."""
        if self._drops_seen == self._slab.segments_dropped:
            return
        with self._registering:
            self._drops_seen = self._slab.segments_dropped
            for number in self._regions.keys() - self._slab.segment_numbers():
                self._regions.pop(number)[1].close()

    def register_own(self, memory: mmap.mmap) -> tuple[int, Any]:
        """Memory of one queue, which no peer reads: its address, and the region, which the caller
        closes. Raises NoVerbs.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return address, self._register(len(memory), address, _LOCAL_WRITE)

    def _register(self, nbytes: int, address: int, access: int) -> Any:
        try:
            held = _pyverbs("mr").MR(self.domain, nbytes, access, address=address)
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


class VerbsQueue:
    """A reliable queue pair that can receive, and sends once it is connected. Its methods are for
    one thread at a time: send() for the one writer, the others for the reactor's. Raises NoVerbs.

    slot_bytes: of each slot, and so of the longest message.
    """

    def __init__(self, domain: VerbsDomain, slot_bytes: int) -> None:
        self._domain = domain
        self.slot_bytes = slot_bytes
        self._bounce: tuple[mmap.mmap, int, Any] | None = None
        self._exits = contextlib.ExitStack()
        self._error: type[Exception] = _pyverbs("pyverbs_error").PyverbsError
        self.is_parents = False  # this process is a fork of the one that made it
        with contextlib.ExitStack() as exits:
            self._exits = exits
            self._open(domain)
            self._exits = exits.pop_all()
        _made_here.add(self)

    def _open(self, domain: VerbsDomain) -> None:
        qp, wr = _pyverbs("qp"), _pyverbs("wr")
        exits, slot_bytes = self._exits, self.slot_bytes
        memory = mmap.mmap(-1, _whole_pages(2 * SLOTS * slot_bytes))
        self.memory = memoryview(memory)
        address, region = domain.register_own(memory)
        exits.callback(region.close)
        try:
            self._channel, self._fd = _open_channel(domain.context)
            exits.callback(self._channel.close)
            self._completions = _pyverbs("cq").CQ(
                domain.context, 2 * SLOTS + READS + 1, None, self._channel, 0
            )
            exits.callback(self._completions.close)
            asked = qp.QPInitAttr(
                qp_type=_RC,
                scq=self._completions,
                rcq=self._completions,
                sq_sig_all=0,
                cap=qp.QPCap(
                    max_send_wr=SLOTS + READS + 1,
                    max_recv_wr=SLOTS,
                    max_send_sge=1,
                    max_recv_sge=1,
                    max_inline_data=INLINE_BYTES_ASKED,
                ),
            )
            self._pair: Any = qp.QP(domain.domain, asked)
            exits.callback(self._pair.close)
            first = qp.QPAttr(port_num=domain.port.number)
            first.qp_access_flags = _REMOTE_READ
            self._pair.to_init(first)
        except self._error as error:
            raise NoVerbs(f"{domain.port} gives no queue pair: {error}") from error
        self._inline_bytes = asked.max_inline_data
        self._psn = secrets.randbits(24)
        self._post_send, self._post_receive = self._pair.post_send, self._pair.post_recv
        self._receives = [
            wr.RecvWR(
                wr_id=slot,
                num_sge=1,
                sg=[wr.SGE(address + slot * slot_bytes, slot_bytes, region.lkey)],
            )
            for slot in range(SLOTS)
        ]
        self._sends = [
            _request(address + (SLOTS + slot) * slot_bytes, region.lkey, _SEND, SENT)
            for slot in range(SLOTS)
        ]
        self._reads = [_request(address, region.lkey, _RDMA_READ, READ + k) for k in range(READS)]
        for request, _ in self._reads:
            request.send_flags = _SIGNALED
        self._flush, _ = _request(address, region.lkey, _RDMA_READ, FLUSH)
        self._flush.send_flags = _SIGNALED
        self._flush.num_sge = 0
        for receive in self._receives:
            self._post_receive(receive)

    def near_end(self) -> FarEnd:
        """What the peer has to know of this end."""
        domain = self._domain
        return FarEnd(
            link=domain.link,
            mtu=domain.mtu,
            lid=domain.lid,
            reads=domain.reads,
            number=self._pair.qp_num,
            psn=self._psn,
            gid=domain.gid,
            slots=SLOTS,
            slot_bytes=self.slot_bytes,
        )

    def connect(self, far: FarEnd) -> None:
        """To that end: from now on it receives, and may send. Raises NoVerbs."""
        domain, options = self._domain, self._domain.options
        if far.link != domain.link:
            raise NoVerbs("one end is of InfiniBand, and the other of Ethernet: no packet passes")
        addr = _pyverbs("addr")
        attributes = _pyverbs("qp").QPAttr(port_num=domain.port.number)
        attributes.path_mtu = min(domain.mtu, far.mtu)
        attributes.dest_qp_num = far.number
        attributes.rq_psn, attributes.sq_psn = far.psn, self._psn
        attributes.max_dest_rd_atomic = domain.reads
        attributes.max_rd_atomic = min(domain.reads, far.reads)
        attributes.min_rnr_timer = _NO_SLOT_TIMER
        text = far.gid.hex()
        attributes.ah_attr = addr.AHAttr(
            gr=addr.GlobalRoute(
                dgid=addr.GID(":".join(text[at : at + 4] for at in range(0, 32, 4))),
                sgid_index=domain.gid_index,
                hop_limit=_HOPS,
                traffic_class=options.traffic_class,
            ),
            is_global=1,
            port_num=domain.port.number,
            dlid=far.lid,
            sl=options.service_level,
        )
        try:
            self._pair.to_rtr(attributes)
            attributes.timeout, attributes.retry_cnt = _TIMEOUT, _TRIES
            attributes.rnr_retry = _NO_SLOT_TRIES
            self._pair.to_rts(attributes)
        except self._error as error:
            raise NoVerbs(
                f"no way from {domain.port} ({domain.port.address}) to GID {text}: {error}"
            ) from error

    # -- requests ----------------------------------------------------------------------------------

    def send(self, slot: int, nbytes: int, is_told: bool) -> None:
        """What lies in that slot for sending; `is_told`: it completes. Raises VerbsFailed."""
        request, place = self._sends[slot]
        place.length = nbytes
        request.send_flags = (_INLINE if nbytes <= self._inline_bytes else 0) | (
            _SIGNALED if is_told else 0
        )
        try:
            self._post_send(request)
        except self._error as error:
            raise VerbsFailed(str(error)) from error

    def receive(self, slot: int) -> None:
        """What lies in that slot was taken. Raises VerbsFailed."""
        try:
            self._post_receive(self._receives[slot])
        except self._error as error:
            raise VerbsFailed(str(error)) from error

    def read(
        self, number: int, address: int, lkey: int, far_address: int, rkey: int, nbytes: int
    ) -> None:
        """The peer's memory into ours, as read `number` of READS. Raises VerbsFailed."""
        request, place = self._reads[number]
        place.addr, place.length, place.lkey = address, nbytes, lkey
        request.set_wr_rdma(rkey, far_address)
        try:
            self._post_send(request)
        except self._error as error:
            raise VerbsFailed(str(error)) from error

    def flush(self) -> None:
        """Have FLUSH complete once the peer's device has all that was sent: a read of no bytes, for
        which no key is looked at (InfiniBand Architecture, vol. 1, C9-88). Raises VerbsFailed.
        """
        try:
            self._post_send(self._flush)
        except self._error as error:
            raise VerbsFailed(str(error)) from error

    def bounce(self, number: int) -> tuple[memoryview, int, int]:
        """Registered memory of BOUNCE_BYTES for read `number`, its address and its key. Raises
        NoVerbs, and MemoryError.
        """
        if self._bounce is None:
            try:
                memory = mmap.mmap(-1, READS * BOUNCE_BYTES)
            except OSError as error:
                raise MemoryError(f"no memory for {READS * BOUNCE_BYTES} bytes") from error
            address, region = self._domain.register_own(memory)
            self._bounce = memory, address, region
        memory, address, region = self._bounce
        at = number * BOUNCE_BYTES
        return memoryview(memory)[at : at + BOUNCE_BYTES], address + at, region.lkey

    # -- completions -------------------------------------------------------------------------------

    def poll(self, count: int) -> list[Any]:
        """Up to so many completions, which have wr_id, status and byte_len. Raises VerbsFailed."""
        found: list[Any]
        try:
            number, found = self._completions.poll(count)
        except self._error as error:
            raise VerbsFailed(str(error)) from error
        return found if number else []

    def fileno(self) -> int:
        """Readable once something completes after arm()."""
        return self._fd

    def arm(self) -> None:
        """The next completion makes fileno() readable. Raises VerbsFailed."""
        try:
            self._completions.req_notify()
        except self._error as error:
            raise VerbsFailed(str(error)) from error

    def take_event(self) -> None:
        """fileno() was readable. Raises VerbsFailed."""
        try:
            self._channel.get_cq_event(self._completions)
            self._completions.ack_events(1)
        except self._error as error:
            raise VerbsFailed(str(error)) from error

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all of it back: no device reads or writes memory for it any more. Again, or in a
        fork: does nothing.
        """
        if self.is_parents:
            return
        with contextlib.suppress(self._error):  # a device that was removed gives nothing back
            self._exits.close()
            if self._bounce is not None:
                self._bounce[2].close()
                self._bounce = None

    def __del__(self) -> None:
        self.close()


def _pyverbs(name: str) -> Any:
    return importlib.import_module(f"pyverbs.{name}")


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _request(address: int, lkey: int, opcode: int, number: int) -> tuple[Any, Any]:
    """A work request, and its one place, which is changed beneath it."""
    wr = _pyverbs("wr")
    place = wr.SGE(address, 0, lkey)
    request = wr.SendWR(wr_id=number, opcode=opcode, num_sge=1, sg=[place])
    request.sg_list = place
    return request, place


# of a new channel's descriptor, which pyverbs 44 does not tell: two at a time would be mixed up
_opening = threading.Lock()


def _open_channel(context: Any) -> tuple[Any, int]:
    """A channel of completions, and its descriptor. Raises NoVerbs."""
    with _opening:
        for _ in range(CHANNEL_TRIES):
            before = _channels()
            channel = _pyverbs("cq").CompChannel(context)
            fd = getattr(channel, "fd", None)
            found = _channels()
            # one that another thread closed meanwhile may have the number of this one
            if fd is None and before <= found and len(found) == len(before) + 1:
                (fd,) = found - before
            if fd is not None:
                os.set_blocking(fd, False)
                return channel, fd
            channel.close()
    raise NoVerbs("the descriptor of a new channel is not found: too many begin and end at a time")


def _channels() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, which is closed by now
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


_made_here: weakref.WeakSet[VerbsDomain | VerbsQueue] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A child made by fork() has the parent's descriptor of the device: what it gave back would be
    the parent's. So nothing of it ever ends there.
    """
    for one in list(_made_here):
        if isinstance(one, VerbsQueue):
            one.is_parents = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


os.register_at_fork(after_in_child=_leave_to_parent)
