"""RDMA verbs as a connection needs them, through pyverbs: a reliable queue pair with slots for
messages at both ends. Nothing else in `shard` calls pyverbs, but for verbs_domain.py, whose memory
it reads and writes, and verbs_device.py, which asks it for the devices.

    VerbsReader   one queue pair, its completion queue and channel, and what it reads at a time
    VerbsQueue    the same with slots, for messages
    verbs_rails.py has a queue with more readers, on other devices

    slots   offset 0                     SLOTS of `slot_bytes`: where messages are received
            SLOTS x slot_bytes           as many: where messages lie that are sent
            2 x SLOTS x slot_bytes       READS pieces of BOUNCE_BYTES_LEAST; over iWARP registered
                                         apart from the slots, for a peer may write there
            over iWARP, the next page    where FLUSH reads to
            over iWARP, the one after    zeros, which the peer's FLUSH reads
    bounce                               READS pieces of BOUNCE_BYTES, mapped and locked when first
                                         needed: for arrays that find no place in registered memory.
                                         Where it may not be locked, the pieces behind the slots
                                         are used, so that a connection that was made can read

    work request            its number                         completes
    receive into slot i     i                                  always: a message is there
    send of slot i          SENT, or that it is not told of    each SIGNAL_EVERY-th, for all before
    read k of READS         READ + k; of the reader on the     always
                            n-th further device
                            READ + n x READS + k
    a read of no bytes;     FLUSH                              once all sends before it arrived
     over iWARP of a few

What a queue may hold is bounded by these, so neither it nor its completion queue ever overflows. A
work request is made once and posted again, since pyverbs does not give back the memory of one that
is dropped, and to make one costs more than to post it.

Constants are of infiniband/verbs.h, whose numbers are an interface; pyverbs has them under other
names in each release.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from typing import Any

from shard.transport.neighbour import NeighbourSearch, NeighbourState
from shard.transport.verbs_device import NoVerbs, pyverbs
from shard.transport.verbs_domain import READS, VerbsDomain, made_here
from shard.transport.verbs_introduction import (
    IWARP_LINK,
    SLOTS_MIN,
    FarEnd,
    FarPair,
    FirstPair,
)

SLOTS = 64
SIGNAL_EVERY = SLOTS_MIN  # no more: of what a peer has slots for, one completes
BOUNCE_BYTES = 256 << 10
BOUNCE_BYTES_LEAST = 16 << 10  # as a slot: of all readers it is locked, used or not
READ_BYTES_MAX = 1 << 20  # of one read: rxe takes 8 MiB, and a long one holds up the others
FLUSHES = 2  # at a time: the one that looks whether the peer is there, and that of the end
SENT, READ, FLUSH = 1 << 20, 1 << 21, 1 << 22
PROBE_BYTES = 8
CHANNEL_TRIES = 100
INLINE_BYTES_ASKED = 220  # what most devices take; a post of so many bytes reads no memory later
INLINE_BYTES_OF_IWARP = 64  # what all of those do: siw takes 80

_RC = 2  # IBV_QPT_RC
_REMOTE_WRITE, _REMOTE_READ = 2, 4  # of IBV_ACCESS_
_SEND, _RDMA_READ = 2, 4  # of IBV_WR_
_SIGNALED, _INLINE = 2, 8  # of IBV_SEND_
SUCCESS = 0  # IBV_WC_SUCCESS
# IBV_WC_, as what they mean to a user
_STATUS = {
    1: "a message was longer than its slot",
    2: "the device could not carry out a request: its network device is gone, say",
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


class VerbsFailed(Exception):
    """A work request ended with an error, which ends its queue pair; the text says why."""


def failure_text(status: int) -> str:
    """What a completion's status means."""
    return _STATUS.get(status, f"a work request ended with status {status}")


class VerbsReader:
    """A reliable queue pair that reads the peer's memory, once it is connected, and lets the peer
    read ours. Its methods are for the reactor's thread. Raises NoVerbs.

    number  of the connection's readers: read k of number n is read n x READS + k
    free    numbers of reads that may be posted, which their user takes out and puts back
    """

    def __init__(
        self, domain: VerbsDomain, number: int = 0, slots: int = 0, slot_bytes: int = 0
    ) -> None:
        self.domain, self.number = domain, number
        self.slot_bytes = slot_bytes
        self.first = number * READS
        self.free: list[int] = []
        self.reads_posted = 0  # since it was made
        # its memory, bytes of a piece, address and key
        self._bounce: tuple[memoryview, int, int, int] | None = None
        self._bounce_region: Any = None
        self._search: NeighbourSearch | None = None
        self._exits = contextlib.ExitStack()
        self._error: type[Exception] = pyverbs("pyverbs_error").PyverbsError
        self.is_parents = False  # this process is a fork of the one that made it
        with contextlib.ExitStack() as exits:
            self._exits = exits
            self._open(slots)
            self._exits = exits.pop_all()
        made_here.add(self)

    def _open(self, slots: int) -> None:
        domain, exits, qp = self.domain, self._exits, pyverbs("qp")
        self._slots_bytes = 2 * slots * self.slot_bytes
        at = _whole_pages(self._slots_bytes)
        pieces_bytes = _whole_pages(READS * BOUNCE_BYTES_LEAST)
        probe_bytes = mmap.PAGESIZE if domain.is_iwarp else 0
        memory = mmap.mmap(-1, at + pieces_bytes + 2 * probe_bytes)
        self.memory = memoryview(memory)
        self._pieces = self.memory[at : at + pieces_bytes]
        self._shown_address = self._shown_key = 0
        own_bytes = at if domain.is_iwarp else len(memory)
        self._address, region = domain.register_own(memory, 0, own_bytes)
        exits.callback(region.close)
        self._lkey = region.lkey
        self._pieces_address, self._pieces_lkey = self._address + at, self._lkey
        if domain.is_iwarp:
            self._pieces_address, region = domain.register_pieces(
                memory, at, pieces_bytes + probe_bytes
            )
            exits.callback(region.close)
            self._pieces_lkey = region.lkey
            self._shown_address, region = domain.register_shown(
                memory, at + pieces_bytes + probe_bytes, probe_bytes
            )
            exits.callback(region.close)
            self._shown_key = region.rkey
        try:
            self._channel, self._fd = _open_channel(domain.context)
            exits.callback(self._channel.close)
            self._completions = pyverbs("cq").CQ(
                domain.context, 2 * slots + READS + FLUSHES, None, self._channel, 0
            )
            exits.callback(self._completions.close)
            asked = qp.QPInitAttr(
                qp_type=_RC,
                scq=self._completions,
                rcq=self._completions,
                sq_sig_all=0,
                cap=qp.QPCap(
                    max_send_wr=slots + READS + FLUSHES,
                    max_recv_wr=max(1, slots),
                    max_send_sge=1,
                    max_recv_sge=1,
                    max_inline_data=(
                        0
                        if not slots
                        else INLINE_BYTES_OF_IWARP
                        if domain.is_iwarp
                        else INLINE_BYTES_ASKED
                    ),
                ),
            )
            self._pair: Any = qp.QP(domain.domain, asked)
            exits.callback(self._pair.close)
            first = qp.QPAttr(port_num=domain.port.number)
            first.qp_access_flags = _REMOTE_READ | (_REMOTE_WRITE if domain.is_iwarp else 0)
            self._pair.to_init(first)
        except self._error as error:
            raise NoVerbs(f"{domain.port} gives no queue pair: {error}") from error
        self._inline_bytes = asked.max_inline_data
        self._psn = secrets.randbits(24)
        self._post_send, self._post_receive = self._pair.post_send, self._pair.post_recv
        self._reads = [_request(0, 0, _RDMA_READ, READ + self.first + k) for k in range(READS)]
        for request, _ in self._reads:
            request.send_flags = _SIGNALED
        self._flush, place = _request(
            self._pieces_address + pieces_bytes, self._pieces_lkey, _RDMA_READ, FLUSH
        )
        self._flush.send_flags = _SIGNALED
        place.length = PROBE_BYTES
        if not domain.is_iwarp:
            self._flush.num_sge = 0

    def near_pair(self) -> FarPair:
        """What the peer has to know of it."""
        domain = self.domain
        return FarPair(
            link=domain.link,
            mtu=domain.mtu,
            lid=domain.lid,
            reads=domain.reads,
            number=self._pair.qp_num,
            psn=self._psn,
            gid=domain.gid,
        )

    def search_pair(self, far: FarPair) -> None:
        """Have the kernel look for that pair's host, before connect_pair()."""
        self._search = self.domain.search(far)

    def is_found(self) -> bool:
        """Whether the kernel knows the way there. Raises NoVerbs where nobody answers."""
        search = self._search
        if search is None:
            return True
        state = search.state()
        if state is NeighbourState.SOUGHT:
            return False
        self._search = None
        search.close()
        if state is NeighbourState.FAILED:
            raise NoVerbs(search.why())
        return True

    def pause_s(self) -> float:
        """When to ask again."""
        return 0.0 if self._search is None else self._search.pause_s()

    def check_link(self, far: FarPair) -> None:
        """Raises NoVerbs where no packet passes between the two."""
        ours, theirs = self.domain.link, far.link
        if ours == theirs:
            return
        if IWARP_LINK in (ours, theirs):
            raise NoVerbs(
                f"one end is of iWARP ({self.domain.port if ours == IWARP_LINK else 'the peer'}), "
                "and the other of InfiniBand or RoCE: they do not talk to each other"
            )
        raise NoVerbs("one end is of InfiniBand, and the other of Ethernet: no packet passes")

    def connect_pair(self, far: FarPair) -> None:
        """To that end: from now on it receives, and may send and read. Over Ethernet its host has
        been searched for: else the whole process waits until it is found. Raises NoVerbs.
        """
        domain, options = self.domain, self.domain.options
        self.check_link(far)
        addr = pyverbs("addr")
        attributes = pyverbs("qp").QPAttr(port_num=domain.port.number)
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
        count = min(READS, domain.reads, far.reads)
        self.free = list(range(self.first, self.first + count))

    # -- requests ----------------------------------------------------------------------------------

    def read(
        self, number: int, address: int, lkey: int, far_address: int, rkey: int, nbytes: int
    ) -> None:
        """The peer's memory into ours, as read `number`, which was free. Raises VerbsFailed."""
        request, place = self._reads[number - self.first]
        place.addr, place.length, place.lkey = address, nbytes, lkey
        request.set_wr_rdma(rkey, far_address)
        try:
            self._post_send(request)
        except self._error as error:
            raise self.failed(str(error)) from error
        self.reads_posted += 1

    def flush(self) -> None:
        """Have FLUSH complete once the peer's device has all that was sent: a read of no bytes, for
        which no key is looked at (InfiniBand Architecture, vol. 1, C9-88); over iWARP of a few,
        since siw answers one of none with the bytes of another read where it is busy. Raises
        VerbsFailed.
        """
        try:
            self._post_send(self._flush)
        except self._error as error:
            raise self.failed(str(error)) from error

    def bounce(self, number: int) -> tuple[memoryview, int, int]:
        """Registered memory for read `number`, its address and its key: BOUNCE_BYTES, or
        BOUNCE_BYTES_LEAST where no more may be locked.
        """
        if self._bounce is None:
            self._bounce = self._lock_bounce()
        memory, each, address, lkey = self._bounce
        at = (number - self.first) * each
        return memory[at : at + each], address + at, lkey

    def _lock_bounce(self) -> tuple[memoryview, int, int, int]:
        try:
            memory = mmap.mmap(-1, READS * BOUNCE_BYTES)
            address, region = self.domain.register_pieces(memory, 0, len(memory))
        except (NoVerbs, OSError) as error:
            self.domain.tell_once(
                f"arrays are read {BOUNCE_BYTES_LEAST >> 10} KiB at a time", error
            )
            return self._pieces, BOUNCE_BYTES_LEAST, self._pieces_address, self._pieces_lkey
        self._bounce_region = region
        return memoryview(memory), BOUNCE_BYTES, address, region.lkey

    # -- completions -------------------------------------------------------------------------------

    def poll(self, count: int) -> list[Any]:
        """Up to so many completions, which have wr_id, status and byte_len. Raises VerbsFailed."""
        found: list[Any]
        try:
            number, found = self._completions.poll(count)
        except self._error as error:
            raise self.failed(str(error)) from error
        return found if number else []

    def failed(self, why: str) -> VerbsFailed:
        """The error that names the device."""
        return VerbsFailed(f"{self.domain.port}: {why}")

    def fileno(self) -> int:
        """Readable once something completes after arm()."""
        return self._fd

    def arm(self) -> None:
        """The next completion makes fileno() readable. Raises VerbsFailed."""
        try:
            self._completions.req_notify()
        except self._error as error:
            raise self.failed(str(error)) from error

    def take_event(self) -> None:
        """fileno() was readable. Raises VerbsFailed."""
        try:
            self._channel.get_cq_event(self._completions)
            self._completions.ack_events(1)
        except self._error as error:
            raise self.failed(str(error)) from error

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all of it back: no device reads or writes memory for it any more. Again, or in a
        fork: does nothing.
        """
        if self.is_parents:
            return
        if self._search is not None:
            self._search.close()
        with contextlib.suppress(self._error):  # a device that was removed gives nothing back
            self._exits.close()
            if self._bounce_region is not None:
                self._bounce_region.close()
                self._bounce_region = None

    def __del__(self) -> None:
        self.close()


class VerbsQueue(VerbsReader):
    """A queue pair with slots: it can receive, and sends once it is connected. send() is for the
    one writer, the other methods for the reactor's thread. Raises NoVerbs.

    slot_bytes  of each slot, and so of the longest message
    partner     as of a FarEnd
    width       of how many readers a number may be: as many keys each region is told with
    """

    def __init__(self, domain: VerbsDomain, slot_bytes: int, partner: int = 0) -> None:
        super().__init__(domain, 0, SLOTS, slot_bytes)
        self.width = 1
        self._partner = partner
        wr, address, lkey = pyverbs("wr"), self._address, self._lkey
        self._receives = [
            wr.RecvWR(
                wr_id=slot, num_sge=1, sg=[wr.SGE(address + slot * slot_bytes, slot_bytes, lkey)]
            )
            for slot in range(SLOTS)
        ]
        self._sends = [
            _request(address + (SLOTS + slot) * slot_bytes, lkey, _SEND, SENT)
            for slot in range(SLOTS)
        ]
        for receive in self._receives:
            self._post_receive(receive)

    @property
    def readers(self) -> tuple[VerbsReader, ...]:
        """This, and those on further devices."""
        return (self,)

    def near_end(self) -> FarEnd:
        """What the peer has to know of this end."""
        return FarEnd(
            **vars(self.near_pair()),
            slots=SLOTS,
            slot_bytes=self.slot_bytes,
            partner=self._partner,
        )

    def search(self, far: FarEnd) -> None:
        """Have the kernel look for the way to that end; connect() once it is_found()."""
        self.search_pair(far)

    def connect(self, far: FarEnd) -> None:
        """To that end. Raises NoVerbs."""
        self.connect_pair(far)

    def is_connected(self) -> bool:
        """Whether what connect() began is done."""
        return True

    def prove(self, peer: str) -> None:
        """Both ends are connected: see whether anything comes back, which GIDs do not tell. `peer`:
        what the log calls the other one. Raises VerbsFailed.
        """
        self.flush()

    def is_proven(self) -> bool:
        """Whether something came back. Raises VerbsFailed where nothing will; verbs devices say so
        after some 2 s.
        """
        found = self.poll(1)
        if found and found[0].status != SUCCESS:
            raise self.failed(failure_text(found[0].status))
        if found and found[0].wr_id != FLUSH:
            raise self.failed("the peer sent a message before it was told that it may")
        return bool(found)

    def others(self, far: FarEnd) -> list[FirstPair]:
        """The first queue pairs that another try may have, after this one did not reach that
        end.
        """
        return []

    def begin(self, peer: str) -> None:
        """The connection is made. `peer`: what the log calls the other end."""

    def end_of(self, done: Any) -> VerbsFailed:
        """What the completion of a work request that failed ends the connection with."""
        return self.failed(failure_text(done.status))

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
            raise self.failed(str(error)) from error

    def receive(self, slot: int) -> None:
        """What lies in that slot was taken. Raises VerbsFailed."""
        try:
            self._post_receive(self._receives[slot])
        except self._error as error:
            raise self.failed(str(error)) from error


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _request(address: int, lkey: int, opcode: int, number: int) -> tuple[Any, Any]:
    """A work request, and its one place, which is changed beneath it."""
    wr = pyverbs("wr")
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
            channel = pyverbs("cq").CompChannel(context)
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
