"""Messages over a reliable queue pair: what is small is sent into the peer's slots, and what is
large lies in the sender's slab until the peer has read it from there.

    slot    offset  size  field
                 0     4  taken    slots that the sender of this has taken, modulo 2^32: they may be
                                   filled again
                 4     4  tag
                 8   ...  payload

    tag         payload
    0           the body of a message without blocks
    MESSAGE     as in a ring (records.py): u32 blocks, u32 body bytes, a descriptor of 32 bytes
                each, body, inline bytes
    LENT_BODY   the same with one descriptor more, in the place of the body
    RETURN      u64 lease numbers that the sender gives back
    PART        the beginning of a payload that is longer than a slot; the slot after it has more,
                and the last of them the tag
    EVERYWHERE  as 0, behind all that was sent before, whatever its size
    REGION      u64 segment, u64 address, u64 bytes, u64 rkey: of the sender's slab, from now on
    DROPPED     u64 segment: no longer
    CREDIT      nothing: `taken` is what it is for

    descriptor  u64 bytes, u64 offset, u64 lease, u32 segment, u32 zero; lease 0: the bytes stand in
                this payload at that offset, else in that segment

Who may send. A sender fills a slot only when it knows that it is free, so a receiver never lacks
one. The last free slot is kept for telling what was taken: with it at least half of the slots are
told, so the peer, too, can tell again, and two that send much to each other never both wait.

    blocks the user's array, or a copy of it, in the sender's slab    until RETURN says that it was
           read
           READS pieces at a time, into a block of the receiver's     until all are here: then the
           slab, or through the queue's own memory where that has     message is delivered
           no room

Messages of at least BULK_BYTES_MIN with blocks to read are delivered in their own order, so that
small ones do not wait for them.

The tcp socket over which both met stays open. It shows the peer's death at once, and says goodbye:
u64 slots that were sent in all, and then its end: the sender of that reads no more. What was sent
is read to its end by the other side. The queue pair lives on as long as the peer may read blocks of
ours, or what was sent last may not have arrived.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shard.errors import (
    BackpressureError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    ShardError,
    ShmFull,
)
from shard.loop.idle import PARK_S_MAX
from shard.loop.reactor import Reactor
from shard.loop.timers import Timer
from shard.memory.arena import BLOCK_BYTES_MIN, Holder
from shard.memory.leases import Lendings, MeetingSocket
from shard.memory.slab import Slab
from shard.memory.unheld import Unheld, empty_block
from shard.transport import BEGINNING_BYTES, Blocks, Buffer, Connection, Node, Traffic
from shard.transport.frame import check_blocks
from shard.transport.laned_connection import BULK_BYTES_MIN
from shard.transport.records import (
    DESCRIPTOR_BYTES,
    LEASE,
    MESSAGE,
    PREFIX,
    PREFIX_BYTES,
    RETURN,
    pack_descriptor,
    pack_lease,
    pack_prefix,
    unpack_descriptor,
)
from shard.transport.silence import keep_alive, why_lost
from shard.transport.socket_lane import ANNOUNCED_BYTES_MAX
from shard.transport.verbs_device import NoVerbs
from shard.transport.verbs_queue import (
    BOUNCE_BYTES,
    FLUSH,
    READ,
    READ_BYTES_MAX,
    READS,
    SENT,
    SIGNAL_EVERY,
    SLOTS,
    SUCCESS,
    FarEnd,
    VerbsDomain,
    VerbsFailed,
    VerbsQueue,
    failure_text,
)

PART, EVERYWHERE, REGION, DROPPED, CREDIT, LENT_BODY = 16, 17, 18, 19, 20, 21
HEADER = struct.Struct("<II")
HEADER_BYTES = HEADER.size
REGION_NOTE, DROPPED_NOTE, GOODBYE = (
    struct.Struct("<QQQQ"),
    struct.Struct("<Q"),
    struct.Struct("<Q"),
)
_pack_header, _unpack_header = HEADER.pack, HEADER.unpack_from
_COUNT_MAX = (1 << 32) - 1
SLOT_BYTES_MAX = 16 << 10  # two copies of more cost as much as a read does
COMPLETIONS_PER_TURN = 64
# For what was sent last to arrive, before close() returns: some microseconds, but for a peer that
# is cut off.
FLUSH_S = 0.05


def slot_bytes_of(ring_bytes: int) -> int:
    """How large each of SLOTS is where a connection's ring may have so many bytes."""
    return max(1024, min(SLOT_BYTES_MAX, ring_bytes // SLOTS))


class VerbsLine(MeetingSocket):
    """The socket over which two processes met, and the queue pair between them. Held by the
    connection, and by the slab while the peer may read blocks after the connection's end; both end
    with the last of them.
    """

    def __init__(self, sock: socket.socket, queue: VerbsQueue) -> None:
        super().__init__(sock)
        self.queue = queue
        self.arriving: list[Any] = []  # arrays that the device may still write to
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self.queue.close()
        super().__del__()


class _Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message ready to be sent, with what to undo if it never is, and the segments that the peer
    has to know for it.
    """

    payload: bytes
    tag: int
    leases: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    beginning: bytes = b""  # of a body that is lent, and so is not in the payload


class _Arrival:
    """A message that has come and is not delivered yet."""

    __slots__ = ("blocks", "body", "leases", "missing")

    def __init__(self, body: Buffer, blocks: Blocks = ()) -> None:
        self.body = body
        self.blocks = blocks
        self.missing = 0  # bytes of blocks that are still to be read
        self.leases: list[int] = []  # which the peer gets back then


class _Reading:
    """A block of the peer's that is to be read: from where, and into which array of ours."""

    __slots__ = ("address", "arrival", "far_address", "lkey", "rkey", "taken", "target")

    def __init__(
        self, arrival: _Arrival, target: NDArray[np.uint8], far_address: int, rkey: int
    ) -> None:
        self.arrival = arrival
        self.target = target
        self.far_address, self.rkey = far_address, rkey
        self.address = self.lkey = 0  # of the target, where it is registered
        self.taken = 0  # bytes of it for which a read was posted


class VerbsConnection(Connection[_Outgoing]):
    """One peer over RDMA. Made of the socket over which both met, and a queue pair that is
    connected; it owns both. Arrays are lent from, and arrive in, `slab`.
    """

    transport = "verbs"

    def __init__(
        self,
        sock: socket.socket,
        queue: VerbsQueue,
        far: FarEnd,
        peer: str,
        node: Node,
        slab: Slab,
        domain: VerbsDomain,
    ) -> None:
        super().__init__(peer, node.limits)
        self._slab, self._domain, self._queue = slab, domain, queue
        self._line = VerbsLine(sock, queue)
        sock.setblocking(False)
        keep_alive(sock, node.limits.peer_silent_s)
        self.bulk_bytes_min = BULK_BYTES_MIN
        self._memory, self._slot_bytes = queue.memory, queue.slot_bytes
        # of both ends, as a slot lies where its message lay
        self._window = min(SLOTS, far.slots)
        self._payload_max = min(queue.slot_bytes, far.slot_bytes) - HEADER_BYTES
        self._short_bytes_max = min(self._payload_max, node.limits.body_bytes_max)
        self._sent = self._retired = 0  # slots of ours: filled, and free for another message
        self._told_sent = 0  # and so many the peer has taken, as it told us
        self._taken = self._told_taken = 0  # slots of the peer's: taken here, and told so
        self._rest: tuple[memoryview, int] | None = None  # of a payload that has begun to leave
        self._regions_told: set[int] = set()
        self._lendings = Lendings(slab, peer)
        self._copies: dict[int, int] = {}  # lease -> bytes that were copied for it
        self._holder = Holder(node.limits.slab_share_max)
        self._returned: deque[int] = deque()  # leases of the peer's that are done with
        self._regions: dict[int, tuple[int, int, int]] = {}  # of the peer: address, bytes, rkey
        self._parts = bytearray()
        self._parts_max = (
            node.limits.body_bytes_max
            + node.limits.blocks_bytes_max
            + PREFIX_BYTES
            + DESCRIPTOR_BYTES * (node.limits.blocks_max + 1)
        )
        self._found: list[Any] = []  # completions that are not looked at yet
        self._armed = False
        self._small: deque[_Arrival] = deque()
        self._bulk: deque[_Arrival] = deque()
        self._to_read: tuple[deque[_Reading], deque[_Reading]] = (deque(), deque())
        self._reads_free = list(range(min(READS, domain.reads, far.reads)))
        self._reads: dict[int, tuple[_Reading, int, int]] = {}  # in flight: from where, how many
        self._goodbye = b""  # what has come of the peer's
        self._sent_by_peer: int | None = None  # slots in all, once it said goodbye
        self._why: ShardError | None = None  # the peer hung up
        self._patience: Timer | None = None
        self._is_broken = False  # the queue pair is in error: nothing more leaves or comes
        self._bytes_sent = self._bytes_received = self._records_received = 0

    # -- sending -----------------------------------------------------------------------------------

    def send(self, body: Buffer, blocks: Sequence[NDArray[Any]] = (), stable: bool = False) -> None:
        """The short way for a small message alone to a peer with room; see Connection.send for the
        rest.
        """
        if (
            not blocks
            and not self._outbox
            and len(body) <= self._short_bytes_max
            and self._writing.take()
        ):
            try:
                if sent := self._rest is None and self._has_room():
                    self._post(body, 0)
            finally:
                self._writing.give_back()
            if sent:
                if self._outbox:
                    self.drain()
                return
        super().send(body, blocks, stable)

    def send_everywhere(self, body: Buffer) -> None:
        self._enqueue(_Outgoing(bytes(body), EVERYWHERE), len(body))

    def _enqueue(self, item: _Outgoing, size: int) -> None:
        """A message of the connection's own, behind what waits."""
        if self.error is not None:
            raise self._ended()
        self._outbox_bytes += size
        self._outbox.append((item, size))
        self.drain()
        if self._outbox and self.reactor is not None and self.reactor.parked:
            self.reactor.wake()

    def _has_room(self) -> bool:
        """Whether a slot may be filled; the last one is for telling what was taken."""
        sent = self._sent
        return sent - self._told_sent < self._window - 1 and sent - self._retired < self._window

    def _post(self, payload: Buffer, tag: int) -> None:
        """Fill the next slot. By the writer, with room."""
        if self.error is not None:
            raise self._ended()
        slot = self._sent % self._window
        nbytes = len(payload) + HEADER_BYTES
        at = (SLOTS + slot) * self._slot_bytes
        taken = self._taken
        self._memory[at : at + nbytes] = _pack_header(taken & _COUNT_MAX, tag) + payload
        try:
            self._queue.send(slot, nbytes, self._sent % SIGNAL_EVERY == SIGNAL_EVERY - 1)
        except VerbsFailed as error:
            raise self._broke(str(error)) from error
        self._told_taken = taken
        self._sent += 1
        self._bytes_sent += nbytes

    def _broke(self, text: str) -> ShardError:
        """The queue pair failed in whatever thread that shows; what a send raises."""
        self._is_broken = True
        error = PeerLostError(f"{self.peer} was lost: {text}")
        if self.reactor is not None:
            self.reactor.call_soon(lambda: self.close(error))
        return error

    def _prepare(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[_Outgoing, int]:
        body_bytes = len(body)
        if body_bytes > self.limits.body_bytes_max:
            raise LocalProtocolError(
                f"message body of {body_bytes} bytes, at most {self.limits.body_bytes_max} allowed"
            )
        if not blocks and body_bytes <= self._payload_max:
            return _Outgoing(bytes(body), 0), body_bytes
        check_blocks([block.nbytes for block in blocks], self.limits, LocalProtocolError)
        lent = _Lent(self)
        count = len(blocks)
        budget = self._payload_max - PREFIX_BYTES - DESCRIPTOR_BYTES * (count + 1)
        descriptors: list[Buffer] = [pack_prefix(count, body_bytes)]
        inline: list[Buffer] = []
        try:
            is_inline = body_bytes <= max(budget, BLOCK_BYTES_MIN)
            body_descriptor = b"" if is_inline else lent.lend(np.frombuffer(body, np.uint8))
            is_inline = is_inline or not body_descriptor
            if is_inline:
                budget -= body_bytes
            at = PREFIX_BYTES + DESCRIPTOR_BYTES * (count + (not is_inline))
            at += body_bytes if is_inline else 0
            for block in blocks:
                nbytes = block.nbytes
                descriptor = b""
                if nbytes > max(budget, 0) and nbytes >= BLOCK_BYTES_MIN:
                    descriptor = lent.lend(block)
                if not descriptor:  # it is short, or found no room in the slab
                    descriptor = pack_descriptor(nbytes, at, 0, 0, 0)
                    inline.append(block.tobytes())
                    at += nbytes
                    budget -= nbytes
                descriptors.append(descriptor)
            descriptors.append(body if is_inline else body_descriptor)
        except BaseException as failure:
            lent.undo()
            if self.error is not None and isinstance(failure, Exception):
                # ended by another thread, and the slab may be closed, too
                raise self._ended() from failure
            raise
        payload = b"".join(descriptors + inline)
        beginning = b"" if is_inline else bytes(body[:BEGINNING_BYTES])
        tag = MESSAGE if is_inline else LENT_BODY
        ready = _Outgoing(payload, tag, tuple(lent.leases), tuple(lent.segments), beginning)
        return ready, len(payload) + lent.copied_bytes

    def _hold_back(self, nbytes: int, bytes_max: int) -> None:
        """Raise BackpressureError when copies of so many bytes more would pass `bytes_max`. One
        message of any size may wait beside them: that the one before it was read shows only once
        the peer has said so.
        """
        unread = sum(self._copies.copy().values())
        if unread >= bytes_max or nbytes <= bytes_max < unread + nbytes:
            raise BackpressureError(
                f"arrays of {unread} bytes already wait for {self.peer}, at most {bytes_max} may "
                "(limit outbox_bytes_max, or slab_share_max of the slab): it reads too slowly"
            )

    def _write(self, item: _Outgoing) -> bool:
        if self.error is not None:
            return True  # it goes nowhere
        if not self._write_rest():
            return False
        for number in item.segments:
            if number not in self._regions_told and not self._tell_region(number):
                return False
        if not self._has_room():
            return False
        payload = item.payload
        if len(payload) <= self._payload_max:
            self._post(payload, item.tag)
        else:
            self._rest = memoryview(payload), item.tag
            self._write_rest()
        return True

    def _write_rest(self) -> bool:
        """Go on with a payload that is longer than a slot; whether none is left. By the writer."""
        if self._rest is None:
            return True
        payload, tag = self._rest
        size = self._payload_max
        while self._has_room() and self.error is None:
            if len(payload) <= size:
                self._rest = None
                self._post(payload, tag)
                return True
            self._post(payload[:size], PART)
            payload = payload[size:]
            self._rest = payload, tag
        return False

    def _tell_region(self, number: int) -> bool:
        if not self._has_room():
            return False
        region = self._domain.region(number)
        self._post(REGION_NOTE.pack(number, region.address, region.nbytes, region.rkey), REGION)
        self._regions_told.add(number)
        return True

    def _tell_drops(self) -> None:
        """Segments that the slab gave back are no longer registered, and the peer may forget them.
        In the reactor's thread.
        """
        self._domain.drop_old()
        if self.error is not None:
            return
        for number in self._regions_told - self._slab.segment_numbers():
            self._regions_told.discard(number)
            self._enqueue(_Outgoing(DROPPED_NOTE.pack(number), DROPPED), DROPPED_NOTE.size)

    def _beginning(self, item: _Outgoing) -> Buffer:
        if item.tag == LENT_BODY:
            return item.beginning
        if item.tag == MESSAGE:
            count, _ = PREFIX.unpack_from(item.payload)
            return item.payload[PREFIX_BYTES + DESCRIPTOR_BYTES * count :]
        return item.payload if item.tag in (0, EVERYWHERE) else b""

    def _discard(self, item: _Outgoing) -> None:
        for lease in item.leases:
            self._lendings.undo(lease)
            self._copies.pop(lease, None)

    def traffic(self) -> Traffic:
        return Traffic(
            self._bytes_sent + self._lendings.bytes_lent,
            self._bytes_received,
            self._records_received,
        )

    # -- receiving ---------------------------------------------------------------------------------

    def poll(self) -> int:
        """One bounded batch of completions, and what else there is to do."""
        try:
            if not self._found:
                self._found = self._queue.poll(COMPLETIONS_PER_TURN)
            work = len(self._found)
            while self._found and self.error is None:
                self._complete(self._found.pop(0))
            if self.error is None:
                work += self._go_on()
            return work
        except VerbsFailed as error:
            self._is_broken = True
            self.close(PeerLostError(f"{self.peer} was lost: {error}"))
        except RemoteProtocolError as error:
            self.close(RemoteProtocolError(f"{self.peer} broke the protocol: {error}"))
        except ShardError as error:
            self.close(type(error)(f"{self.peer}: {error}"))
        return 1

    def _complete(self, done: Any) -> None:
        number = done.wr_id
        if done.status != SUCCESS:
            raise VerbsFailed(failure_text(done.status))
        if number < SLOTS:
            self._take(number, done.byte_len)
        elif number == SENT:
            self._retired += SIGNAL_EVERY
        elif number != FLUSH:
            self._have_read(number - READ)

    def _take(self, slot: int, nbytes: int) -> None:
        """A message of the peer's is in that slot."""
        at = slot * self._slot_bytes
        if nbytes < HEADER_BYTES:
            raise RemoteProtocolError(f"a message of {nbytes} bytes, {HEADER_BYTES} are the least")
        taken, tag = _unpack_header(self._memory, at)
        payload = self._memory[at + HEADER_BYTES : at + nbytes]
        told = (taken - self._told_sent) & _COUNT_MAX
        if told > self._sent - self._told_sent:
            raise RemoteProtocolError(
                f"the peer took {told} messages more, of {self._sent - self._told_sent}"
            )
        self._told_sent += told
        self._bytes_received += nbytes
        self._records_received += 1
        if tag == 0 and not self._small and not self._parts:
            self.on_message(payload)
        else:
            self._read_record(payload, tag)
        if self.error is None:
            self._queue.receive(slot)
            self._taken += 1

    def _read_record(self, payload: memoryview, tag: int) -> None:
        if tag == PART:
            if len(self._parts) + len(payload) > self._parts_max:
                raise RemoteProtocolError(f"a message of more than {self._parts_max} bytes")
            self._parts += payload
            return
        if self._parts:
            whole, self._parts = self._parts, bytearray()
            whole += payload
            payload = memoryview(whole)
        try:
            if tag == 0:
                self._arrived(_Arrival(bytes(payload)), self._small)
            elif tag in (MESSAGE, LENT_BODY):
                self._read_message(payload, tag == MESSAGE)
            elif tag == RETURN:
                for (lease,) in LEASE.iter_unpack(payload):
                    self._lendings.take_back(lease)
                    self._copies.pop(lease, None)
            elif tag == EVERYWHERE:
                body = bytes(payload)
                self._arrived(_Arrival(body), self._small)
                if self.error is None:
                    self._arrived(_Arrival(body), self._bulk)
            elif tag == REGION:
                number, *region = REGION_NOTE.unpack(payload)
                self._add_region(number, *region)
            elif tag == DROPPED:
                self._regions.pop(DROPPED_NOTE.unpack(payload)[0], None)
            elif tag != CREDIT:
                raise RemoteProtocolError(f"a message with the unknown tag {tag}")
        except struct.error as error:
            raise RemoteProtocolError(
                f"a message of {len(payload)} bytes is cut short: {error}"
            ) from error

    def _add_region(self, number: int, address: int, nbytes: int, rkey: int) -> None:
        if number in self._regions or len(self._regions) >= self.limits.segments_max:
            raise RemoteProtocolError(
                f"the peer told of segment {number} twice, or of more than "
                f"{self.limits.segments_max}"
            )
        if rkey > _COUNT_MAX:
            raise RemoteProtocolError(f"the peer's key {rkey:#x} has more than 32 bits")
        self._regions[number] = address, nbytes, rkey

    def _arrived(self, arrival: _Arrival, queue: deque[_Arrival]) -> None:
        queue.append(arrival)
        self._deliver(queue)

    def _deliver(self, queue: deque[_Arrival]) -> None:
        """All at its front that is whole."""
        while queue and not queue[0].missing and self.error is None:
            arrival = queue.popleft()
            for block in arrival.blocks if type(arrival.blocks) is list else ():
                block.setflags(write=False)
            self.on_message(memoryview(arrival.body), arrival.blocks)

    def _read_message(self, payload: memoryview, is_inline: bool) -> None:
        """`is_inline`: the body is in the payload. Raises struct.error where it is cut short."""
        count, body_bytes = PREFIX.unpack_from(payload)
        if count > self.limits.blocks_max or body_bytes > self.limits.body_bytes_max:
            raise RemoteProtocolError(
                f"message of {count} arrays and a body of {body_bytes} bytes is over the limits"
            )
        descriptors = [
            unpack_descriptor(payload, PREFIX_BYTES + DESCRIPTOR_BYTES * index)
            for index in range(count + (not is_inline))
        ]
        check_blocks([one[0] for one in descriptors[:count]], self.limits, RemoteProtocolError)
        at = PREFIX_BYTES + DESCRIPTOR_BYTES * count
        if (
            at + body_bytes > len(payload)
            if is_inline
            else descriptors[-1][0] != body_bytes or not descriptors[-1][2]
        ):
            raise RemoteProtocolError(f"a body of {body_bytes} bytes passes its message")
        arrival = _Arrival(bytes(payload[at : at + body_bytes]) if is_inline else b"")
        total = body_bytes + sum(one[0] for one in descriptors[:count])
        queue = self._bulk if total >= BULK_BYTES_MIN else self._small
        blocks: list[NDArray[np.uint8]] = []
        readings: list[_Reading] = []
        try:
            for descriptor in descriptors:
                blocks.append(self._block(payload, descriptor, arrival, readings))
        except MemoryError as error:
            if not is_inline:  # nobody knows whose message it is
                raise ShardError(str(error)) from error
            arrival.blocks = Unheld(count, str(error))
            self._returned += [one[2] for one in descriptors if one[2]]
            self._arrived(arrival, queue)
            return
        if not is_inline:
            arrival.body = blocks.pop().data
        arrival.blocks = blocks
        arrival.leases = [one[2] for one in descriptors if one[2]]
        arrival.missing = sum(one.target.nbytes for one in readings)
        self._to_read[queue is self._bulk].extend(readings)
        self._arrived(arrival, queue)

    def _block(
        self,
        payload: memoryview,
        descriptor: tuple[int, int, int, int, int],
        arrival: _Arrival,
        readings: list[_Reading],
    ) -> NDArray[np.uint8]:
        """The array for one block. One that the peer lends is not filled yet: it is added to
        `readings`. Raises MemoryError.
        """
        nbytes, offset, lease, number, _ = descriptor
        if not lease:
            if offset + nbytes > len(payload):
                raise RemoteProtocolError(
                    f"array of {nbytes} bytes at {offset} passes its message of {len(payload)}"
                )
            block = empty_block(nbytes)
            block.data[:] = payload[offset : offset + nbytes]
            return block
        address, region_bytes, rkey = self._regions.get(number, (0, -1, 0))
        if not nbytes or offset + nbytes > region_bytes:
            raise RemoteProtocolError(
                f"array of {nbytes} bytes at {offset} of segment {number}, which has "
                f"{max(0, region_bytes)}"
            )
        target, lkey = self._target(nbytes)
        reading = _Reading(arrival, target, address + offset, rkey)
        if lkey:
            reading.address, reading.lkey = target.__array_interface__["data"][0], lkey
        readings.append(reading)
        return target

    def _target(self, nbytes: int) -> tuple[NDArray[np.uint8], int]:
        """An array to read into, and the key of its memory; 0: it is not registered. As for any
        socket (socket_lane.py), the slab does not grow for what is only announced.
        """
        if BLOCK_BYTES_MIN <= nbytes <= max(ANNOUNCED_BYTES_MAX, self._bytes_received):
            with contextlib.suppress(ShmFull, NoVerbs):
                block = self._slab.allocate(nbytes)
                array = self._slab.wrap(block, nbytes).view(np.ndarray)
                return array, self._domain.region(block.segment).lkey
        return empty_block(nbytes), 0

    def _have_read(self, number: int) -> None:
        """A read has completed."""
        reading, at, nbytes = self._reads.pop(number)
        self._reads_free.append(number)
        if not reading.lkey:
            reading.target.data[at : at + nbytes] = self._queue.bounce(number)[0][:nbytes]
        arrival = reading.arrival
        arrival.missing -= nbytes
        self._bytes_received += nbytes
        if not arrival.missing:
            self._returned += arrival.leases
            self._deliver(self._small)
            self._deliver(self._bulk)

    def _read_on(self) -> int:
        """Post reads, as many as may be in flight, those of small messages first."""
        count = 0
        for waiting in self._to_read:
            while waiting and self._reads_free:
                reading = waiting[0]
                number = self._reads_free.pop()
                left = reading.target.nbytes - reading.taken
                try:
                    if reading.lkey:
                        nbytes = min(left, READ_BYTES_MAX)
                        address, lkey = reading.address + reading.taken, reading.lkey
                    else:
                        nbytes = min(left, BOUNCE_BYTES)
                        _, address, lkey = self._queue.bounce(number)
                except (NoVerbs, MemoryError) as error:
                    raise ShardError(f"no memory to read an array into: {error}") from error
                self._queue.read(
                    number, address, lkey, reading.far_address + reading.taken, reading.rkey, nbytes
                )
                self._reads[number] = reading, reading.taken, nbytes
                reading.taken += nbytes
                if reading.taken == reading.target.nbytes:
                    waiting.popleft()
                count += 1
        return count

    def _go_on(self) -> int:
        """What there is to do beside completions."""
        work = 0
        if self._to_read[0] or self._to_read[1]:
            work += self._read_on()
        if self._rest is not None or self._returned or self._owes_credit():
            work += self._write_own()
        if self._outbox:
            work += self.drain()
        if self._why is not None:
            self._look_at_end(self._why)
        return work

    def _owes_credit(self) -> bool:
        return self._taken - self._told_taken >= self._window // 2

    def _write_own(self) -> int:
        """The rest of a message, leases that go back, and what was taken. How many slots."""
        if not self._writing.take():
            return 0
        before = self._sent
        try:
            if self._write_rest():
                while self._returned and self._has_room():
                    leases = [
                        self._returned.popleft()
                        for _ in range(min(len(self._returned), self._payload_max // LEASE.size))
                    ]
                    self._post(b"".join(map(pack_lease, leases)), RETURN)
            if (
                self._owes_credit()
                and self._sent - self._told_sent < self._window
                and self._sent - self._retired < self._window
            ):
                self._post(b"", CREDIT)
        finally:
            self._writing.give_back()
        return self._sent - before

    # -- the socket --------------------------------------------------------------------------------

    def _on_socket(self, events: int) -> None:
        sock = self._line.socket
        why = PeerLostError(f"{self.peer} was lost: it died or hung up")
        try:
            while True:
                data = sock.recv(2 * GOODBYE.size)
                if not data:
                    break
                self._goodbye += data
                if len(self._goodbye) > GOODBYE.size:
                    self.close(
                        RemoteProtocolError(
                            f"{self.peer} broke the protocol: its goodbye is longer"
                        )
                    )
                    return
        except BlockingIOError:
            return
        except OSError as error:
            why = PeerLostError(
                f"{self.peer} was lost: {why_lost(error, self.limits.peer_silent_s)}"
            )
        if self.reactor is not None:
            self.reactor.unwatch(sock.fileno())
        if len(self._goodbye) == GOODBYE.size:
            (self._sent_by_peer,) = GOODBYE.unpack(self._goodbye)
            why = PeerLostError(f"{self.peer} closed the connection")
        self._peer_hung_up(why)

    def _on_event(self, events: int) -> None:
        """Something completed while we slept; poll() finds it."""
        self._armed = False
        try:
            self._queue.take_event()
        except VerbsFailed as error:
            self._is_broken = True
            self.close(PeerLostError(f"{self.peer} was lost: {error}"))

    def _read_the_rest(self, why: ShardError) -> None:
        self._why = why
        if self.reactor is not None:
            self._patience = self.reactor.call_later(
                self.limits.peer_silent_s, lambda: self.close(why)
            )
        if self._sent_by_peer is None:
            self._read_what_is_there()
            self.close(why)
        else:
            self._look_at_end(why)

    def _read_what_is_there(self) -> None:
        """The peer died: what it sent is here, or never comes."""
        try:
            while self.error is None and (found := self._found or self._queue.poll(SLOTS)):
                self._found = []
                for done in found:
                    if done.status == SUCCESS and done.wr_id < SLOTS and self.error is None:
                        self._take(done.wr_id, done.byte_len)
                    elif done.status == SUCCESS and done.wr_id & READ and self.error is None:
                        self._have_read(done.wr_id - READ)
        except (ShardError, VerbsFailed):
            return  # it is lost in any case, and said to be

    def _look_at_end(self, why: ShardError) -> None:
        """The peer said goodbye: whether all of it is delivered."""
        if (
            self._sent_by_peer is not None
            and self._taken >= self._sent_by_peer
            and not self._small
            and not self._bulk
        ):
            self.close(why)

    # -- life --------------------------------------------------------------------------------------

    def _drive(self, reactor: Reactor) -> None:
        self._lendings.tell_drops = lambda: reactor.call_soon(self._tell_drops)
        reactor.add_source(self)
        reactor.watch(self._queue.fileno(), self._on_event)
        reactor.watch(self._line.socket.fileno(), self._on_socket)

    def prepare_sleep(self, sleeping: bool) -> float:
        """Have the next completion wake us."""
        if sleeping and not self._armed and self.error is None:
            self._queue.arm()
            self._armed = True
        return PARK_S_MAX

    def has_work(self) -> bool:
        """Whether a completion waits."""
        if self.error is not None:
            return False
        if not self._found:
            self._found = self._queue.poll(COMPLETIONS_PER_TURN)
        return bool(self._found) or bool(self._returned)

    def _say_goodbye(self) -> None:
        with self._writing:
            self._flush()
            with contextlib.suppress(OSError):  # it is gone
                if not self._is_broken:
                    self._line.socket.send(GOODBYE.pack(self._sent))

    def _flush(self) -> None:
        """Wait until the peer's device has what was sent; then it is read, whatever becomes of this
        process.
        """
        if self._is_broken or self._sent == self._told_sent or self._why is not None:
            return
        until = time.monotonic() + FLUSH_S
        with contextlib.suppress(VerbsFailed):  # what has not left is lost
            self._queue.flush()
            while time.monotonic() < until:
                for done in self._queue.poll(SLOTS):
                    if done.wr_id == FLUSH:
                        return
                os.sched_yield()

    def _end(self) -> None:
        """Let go of the reactor and, unless the peer still reads from us, of the queue pair."""
        reactor, line = self.reactor, self._line
        if reactor is not None:
            reactor.remove_source(self)
            reactor.unwatch(self._queue.fileno())
            reactor.unwatch(line.socket.fileno())
        if self._patience is not None:
            self._patience.cancel()
        self._lendings.tell_drops = _nothing
        with self._writing:
            with contextlib.suppress(OSError):  # the peer may be gone
                line.socket.shutdown(socket.SHUT_WR)
            # the device may still write to these: they end with the queue pair
            line.arriving = [self._reads, self._small, self._bulk]
            self._lendings.hand_over(line)
            self._let_go()

    def _let_go(self) -> None:
        self._rest = None
        self._found, self._reads = [], {}
        self._small, self._bulk = deque(), deque()
        self._to_read = deque(), deque()
        self._parts = bytearray()
        self._memory = memoryview(b"")
        del self._line, self._queue

    def _let_go_in_fork(self) -> None:
        self._returned = deque()


class _Lent:
    """What is lent for one message while it is made ready."""

    def __init__(self, connection: VerbsConnection) -> None:
        self._connection = connection
        self.leases: list[int] = []
        self.segments: list[int] = []
        self.copied_bytes = 0

    def lend(self, array: NDArray[Any]) -> bytes:
        """The descriptor of an array of the slab, or of a copy there; b"" where there is no room
        for one, or no more memory may be locked. Raises BackpressureError.
        """
        connection = self._connection
        slab, lendings, nbytes = connection._slab, connection._lendings, array.nbytes
        found = slab.block_of(array)
        try:
            if found is not None:
                block, offset = found
                connection._domain.region(block.segment)
                lease = lendings.lend(block, nbytes)
            else:
                connection._hold_back(nbytes, connection.limits.outbox_bytes_max)
                block = slab.allocate(nbytes, connection._holder)
                offset = block.offset
                try:
                    connection._domain.region(block.segment)
                    np.copyto(np.frombuffer(slab.memory(block, nbytes), np.uint8), array)
                except BaseException:
                    slab.release(block)
                    raise
                lease = lendings.pass_on(block, nbytes)
                connection._copies[lease] = nbytes
                self.copied_bytes += nbytes
        except (ShmFull, NoVerbs):
            return b""
        self.leases.append(lease)
        if block.segment not in self.segments:
            self.segments.append(block.segment)
        return pack_descriptor(nbytes, offset, lease, block.segment, 0)

    def undo(self) -> None:
        """Its message is not going to be sent."""
        for lease in self.leases:
            self._connection._lendings.undo(lease)
            self._connection._copies.pop(lease, None)


def _nothing() -> None:
    """Nobody is told of dropped segments any more."""
