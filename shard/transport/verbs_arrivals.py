"""Messages of a verbs connection on their way in: those that are whole are delivered, in order, and
the blocks of the others are read from the peer's slab.

    a message is  in parts    its payload is longer than a slot, and more of it is to come
                  waiting     blocks of it are still to be read, or it is behind one of which they
                              are
                  delivered   and the leases of its blocks go back

Messages of at least BULK_BYTES_MIN wait among themselves, so that small ones do not wait for them.
READS reads are in flight at a time on each rail, those of small messages first; the next piece goes
to the rail with the fewest. A block is read into the slab, or where that has no room, or may not be
locked, by the queue's own memory into the process's.

A peer announces arrays faster than they can be read, or may mean no good. While more of them wait
than ARRAYS_WAITING_MAX or BYTES_WAITING_MAX say, its slots with arrays are not given back
(is_full), so it has none left after SLOTS more messages. Reads need no slots: two that do this to
each other both go on.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import RemoteProtocolError, ShardError, ShmFull
from shard.memory.arena import BLOCK_BYTES_MIN
from shard.memory.device_memory import DEVICE_NUMBERS, DeviceBlock
from shard.memory.limits import Limits
from shard.memory.slab import Slab
from shard.memory.unheld import Unheld, empty_block
from shard.transport import Blocks, Buffer, Connection
from shard.transport.frame import check_blocks
from shard.transport.laned_connection import BULK_BYTES_MIN
from shard.transport.records import (
    DESCRIPTOR_BYTES,
    MESSAGE,
    ONE_BLOCK,
    PREFIX,
    PREFIX_BYTES,
    unpack_descriptor,
    unpack_one_block,
)
from shard.transport.socket_lane import ANNOUNCED_BYTES_MAX
from shard.transport.verbs_device import NoVerbs
from shard.transport.verbs_domain import READS
from shard.transport.verbs_queue import (
    BOUNCE_BYTES,
    READ_BYTES_MAX,
    VerbsQueue,
    VerbsReader,
)
from shard.transport.verbs_records import (
    COUNT_MAX,
    DEVICE_REGIONS_MAX,
    DROPPED,
    DROPPED_NOTE,
    EVERYWHERE,
    LENT_BODY,
    PART,
    REGION,
    unpack_region,
)

# Announced and not read yet, of one peer, before it has to wait: some milliseconds of a link of
# 100 Gb/s, so that the link is never without work.
ARRAYS_WAITING_MAX, BYTES_WAITING_MAX = 256, 64 << 20
# Of an array that is read over several rails: a smaller piece saves less time than its request
# and its completion take.
PIECE_BYTES_MIN = 256 << 10
ADDRESSES = 1 << 64


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

    __slots__ = (
        "address",
        "arrival",
        "far_address",
        "nbytes",
        "piece_bytes",
        "rkeys",
        "segment",
        "taken",
        "target",
    )

    def __init__(
        self,
        arrival: _Arrival,
        target: NDArray[np.uint8],
        nbytes: int,
        segment: int,
        address: int,
        far_address: int,
        rkeys: tuple[int, ...],
        rails: int,
    ) -> None:
        self.arrival = arrival
        self.target = target
        self.nbytes = nbytes
        self.segment = segment  # of our slab or a device, where it is registered; -1: it is not
        self.address = address  # of the target, where it is registered
        self.far_address, self.rkeys = far_address, rkeys
        self.taken = 0  # bytes of it for which a read was posted
        self.piece_bytes = BOUNCE_BYTES if segment < 0 else READ_BYTES_MAX
        if rails > 1:  # for all to have a part in it
            part = -(-self.nbytes // rails)
            whole_pages = -(-part // mmap.PAGESIZE) * mmap.PAGESIZE
            self.piece_bytes = min(self.piece_bytes, max(PIECE_BYTES_MIN, whole_pages))


class VerbsArrivals:
    """What has come of one peer and is not delivered yet. Owned by its connection, whose
    on_message() gets it; used in the reactor's thread.

    give_back: sends what is in `returned`, as far as there is room
    """

    def __init__(
        self,
        owner: Connection[Any],
        queue: VerbsQueue,
        slab: Slab,
        give_back: Callable[[], object],
    ) -> None:
        self._owner, self._slab = owner, slab
        self._readers: tuple[VerbsReader, ...] = queue.readers
        self._only = self._readers[0] if len(self._readers) == 1 else None
        self._by_number = {reader.number: reader for reader in self._readers}
        self._width = queue.width
        self._limits: Limits = owner.limits
        self._give_back = give_back
        self.returned: deque[int] = deque()  # leases of the peer's that are done with
        self.bytes_received = 0
        self.arrays_waiting = self.bytes_waiting = 0  # announced, and not read to their ends
        self.arrays_waiting_max, self.bytes_waiting_max = ARRAYS_WAITING_MAX, BYTES_WAITING_MAX
        # of the peer: address, bytes, and the key of each rail
        self._regions: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._parts = bytearray()
        self._parts_max = (
            self._limits.body_bytes_max
            + self._limits.blocks_bytes_max
            + PREFIX_BYTES
            + DESCRIPTOR_BYTES * (self._limits.blocks_max + 1)
        )
        self._small: deque[_Arrival] = deque()
        self._bulk: deque[_Arrival] = deque()
        self._to_read: tuple[deque[_Reading], deque[_Reading]] = (deque(), deque())
        # in those: there is something for read_on() to do, once a read completes
        self.arrays_to_read = 0
        self._reads: dict[int, tuple[_Reading, int, int]] = {}  # in flight: from where, how many

    @property
    def is_idle(self) -> bool:
        """Whether a message without blocks may be delivered at once."""
        return not self._small and not self._parts

    @property
    def is_empty(self) -> bool:
        """Whether all that has come whole was delivered."""
        return not self._small and not self._bulk

    @property
    def is_full(self) -> bool:
        """Whether more arrays wait to be read than one peer may have waiting at a time."""
        return (
            self.arrays_waiting > self.arrays_waiting_max
            or self.bytes_waiting > self.bytes_waiting_max
        )

    def take(self, payload: memoryview, tag: int) -> None:
        """What was in a slot; the payload is good until this returns. Raises RemoteProtocolError,
        struct.error for one that is cut short, and ShardError without memory for a body.
        """
        if tag == PART:
            if len(self._parts) + len(payload) > self._parts_max:
                raise RemoteProtocolError(f"a message of more than {self._parts_max} bytes")
            self._parts += payload
            return
        if self._parts:
            whole, self._parts = self._parts, bytearray()
            whole += payload
            payload = memoryview(whole)
        if tag in (0, EVERYWHERE) and len(payload) > self._limits.body_bytes_max:
            raise RemoteProtocolError(
                f"a body of {len(payload)} bytes, at most {self._limits.body_bytes_max} allowed"
            )
        if tag == 0:
            self._arrived(_Arrival(bytes(payload)), self._small)
        elif tag == MESSAGE:
            if not self._read_lent(payload):
                self._read_message(payload, is_inline=True)
        elif tag == LENT_BODY:
            self._read_message(payload, is_inline=False)
        elif tag == EVERYWHERE:
            body = bytes(payload)
            self._arrived(_Arrival(body), self._small)
            if self._owner.error is None:
                self._arrived(_Arrival(body), self._bulk)
        elif tag == REGION:
            self._add_region(*unpack_region(payload, self._width))
        elif tag == DROPPED:
            self._regions.pop(DROPPED_NOTE.unpack(payload)[0], None)
        else:
            raise RemoteProtocolError(f"a message with the unknown tag {tag}")

    def _add_region(self, number: int, address: int, nbytes: int, rkeys: tuple[int, ...]) -> None:
        of_devices = number >= DEVICE_NUMBERS
        count_max = DEVICE_REGIONS_MAX if of_devices else self._limits.segments_max
        count = sum(1 for each in self._regions if (each >= DEVICE_NUMBERS) == of_devices)
        if number in self._regions or count >= count_max:
            raise RemoteProtocolError(
                f"the peer told of segment {number} twice, or of more than {count_max}"
            )
        if address + nbytes > ADDRESSES:
            raise RemoteProtocolError(
                f"the peer's segment {number} of {nbytes} bytes at {address:#x} passes the last "
                "address of 64 bits"
            )
        if max(rkeys) > COUNT_MAX:
            raise RemoteProtocolError(f"the peer's key {max(rkeys):#x} has more than 32 bits")
        self._regions[number] = address, nbytes, rkeys

    def _arrived(self, arrival: _Arrival, queue: deque[_Arrival]) -> None:
        queue.append(arrival)
        if not arrival.missing:
            self._deliver(queue)

    def _deliver(self, queue: deque[_Arrival]) -> None:
        """All at its front that is whole."""
        while queue and not queue[0].missing and self._owner.error is None:
            arrival = queue.popleft()
            for block in arrival.blocks if type(arrival.blocks) is list else ():
                block.setflags(write=False)
            self._owner.on_message(memoryview(arrival.body), arrival.blocks)

    def _read_lent(self, payload: memoryview) -> bool:
        """The way of most messages with an array: one that is lent, beside a body. False: it is
        another message, or not as it may be, and nothing was done.
        """
        if len(payload) < ONE_BLOCK.size:
            return False
        count, body_bytes, *descriptor = unpack_one_block(payload)
        nbytes, _, lease, _, _ = descriptor
        limits, end = self._limits, ONE_BLOCK.size + body_bytes
        if (
            count != 1
            or not lease
            or nbytes > limits.blocks_bytes_max
            or body_bytes > limits.body_bytes_max
            or end > len(payload)
        ):
            return False
        arrival = _Arrival(bytes(payload[ONE_BLOCK.size : end]))
        try:
            reading = self._reading(descriptor, arrival)
        except MemoryError:
            return False
        arrival.blocks, arrival.leases, arrival.missing = [reading.target], [lease], nbytes
        self._announced(arrival, (reading,), body_bytes + nbytes >= BULK_BYTES_MIN)
        return True

    def _read_message(self, payload: memoryview, is_inline: bool) -> None:
        """`is_inline`: the body is in the payload. Raises struct.error where it is cut short."""
        count, body_bytes = PREFIX.unpack_from(payload)
        if count > self._limits.blocks_max or body_bytes > self._limits.body_bytes_max:
            raise RemoteProtocolError(
                f"message of {count} arrays and a body of {body_bytes} bytes is over the limits"
            )
        descriptors = [
            unpack_descriptor(payload, PREFIX_BYTES + DESCRIPTOR_BYTES * index)
            for index in range(count + (not is_inline))
        ]
        sizes = [one[0] for one in descriptors[:count]]
        check_blocks(sizes, self._limits, RemoteProtocolError)
        if not is_inline:
            descriptors[-1] = (*descriptors[-1][:4], 0)  # a body is for no device
        at = PREFIX_BYTES + DESCRIPTOR_BYTES * count
        if (
            at + body_bytes > len(payload)
            if is_inline
            else descriptors[-1][0] != body_bytes or not descriptors[-1][2]
        ):
            raise RemoteProtocolError(f"a body of {body_bytes} bytes passes its message")
        arrival = _Arrival(bytes(payload[at : at + body_bytes]) if is_inline else b"")
        is_bulk = body_bytes + sum(sizes) >= BULK_BYTES_MIN
        blocks: list[NDArray[np.uint8]] = []
        readings: list[_Reading] = []
        try:
            for descriptor in descriptors:
                if descriptor[2]:
                    reading = self._reading(descriptor, arrival)
                    readings.append(reading)
                    arrival.leases.append(descriptor[2])
                    arrival.missing += reading.nbytes
                    blocks.append(reading.target)
                else:
                    blocks.append(_inline_block(payload, descriptor))
        except MemoryError as error:
            if not is_inline:  # nobody knows whose message it is
                raise ShardError(str(error)) from error
            arrival.blocks, arrival.leases, arrival.missing = Unheld(count, str(error)), [], 0
            self.returned += [one[2] for one in descriptors if one[2]]
            self._announced(arrival, (), is_bulk)
            return
        if not is_inline:
            arrival.body = blocks.pop().data
        arrival.blocks = blocks
        self._announced(arrival, readings, is_bulk)

    def _announced(self, arrival: _Arrival, readings: Sequence[_Reading], is_bulk: bool) -> None:
        """A message has come, of which those blocks are to be read."""
        self.arrays_waiting += len(readings)
        self.bytes_waiting += arrival.missing
        self.arrays_to_read += len(readings)
        self._to_read[is_bulk].extend(readings)
        self._arrived(arrival, self._bulk if is_bulk else self._small)

    def _reading(self, descriptor: Sequence[int], arrival: _Arrival) -> _Reading:
        """Of a block that the peer lends. Raises MemoryError."""
        nbytes, offset, _, number, device = descriptor
        address, region_bytes, rkeys = self._regions.get(number, (0, -1, ()))
        if not nbytes or offset + nbytes > region_bytes:
            raise RemoteProtocolError(
                f"array of {nbytes} bytes at {offset} of segment {number}, which has "
                f"{max(0, region_bytes)}"
            )
        announced = self.bytes_waiting + arrival.missing + nbytes
        target, segment, own = self._target(nbytes, device - 1, announced)
        rails = len(self._readers)
        return _Reading(arrival, target, nbytes, segment, own, address + offset, rkeys, rails)

    def _target(
        self, nbytes: int, device: int, announced: int
    ) -> tuple[NDArray[np.uint8], int, int]:
        """An array to read into, and its segment and address, which are registered; -1, 0: they are
        not. As for any socket (socket_lane.py), the slab does not grow for what is only announced,
        nor, with all that is `announced` and not read, what is used of that device of ours that the
        bytes are for; -1: of none.
        """
        most = max(ANNOUNCED_BYTES_MAX, self.bytes_received)
        if device >= 0 and announced <= most:
            found = self._on_device(nbytes, device)
            if found is not None:
                return found
        if BLOCK_BYTES_MIN <= nbytes <= most:
            try:
                block = self._slab.allocate(nbytes)
                array = self._slab.wrap(block, nbytes).view(np.ndarray)
                if self._readers[0].domain.is_iwarp:
                    return array, -1, 0  # no peer may write to the slab: see verbs_iwarp.py
                region = self._readers[0].domain.region(block.segment)
                for reader in self._readers[1:]:
                    reader.domain.region(block.segment)
                return array, block.segment, region.address + block.offset
            except ShmFull:
                pass
            except NoVerbs as error:
                self._readers[0].domain.tell_once("arrays that come are copied once more", error)
        return empty_block(nbytes), -1, 0

    def _on_device(self, nbytes: int, device: int) -> tuple[DeviceBlock, int, int] | None:
        """The same, there; None: they are read into the host's memory."""
        rooms = self._slab.device_rooms
        if rooms is None or self._readers[0].domain.is_iwarp:
            return None
        domain = self._readers[0].domain
        try:
            block = rooms.coming(device, nbytes)
            if block is None:
                return None
            for reader in self._readers:
                domain = reader.domain
                domain.region(block.memory.number)
        except ShardError as error:
            domain.tell_once("tensors arrive by the host's memory", error)
            return None
        rooms.came()
        number = block.memory.number
        return block, number, self._readers[0].domain.region(number).address

    def have_read(self, number: int) -> None:
        """Read `number` has completed."""
        reading, at, nbytes = self._reads.pop(number)
        reader = self._by_number[number // READS]
        reader.free.append(number)
        if reading.segment < 0:
            reading.target.data[at : at + nbytes] = reader.bounce(number)[0][:nbytes]
        arrival = reading.arrival
        arrival.missing -= nbytes
        self.bytes_waiting -= nbytes
        self.bytes_received += nbytes
        if not arrival.missing:
            self.arrays_waiting -= len(arrival.leases)
            self.returned += arrival.leases
            self._give_back()  # before the answer: who has that may send as much again
            for queue in (self._small, self._bulk):
                if queue and not queue[0].missing:
                    self._deliver(queue)

    def read_on(self) -> int:
        """Post reads, as many as may be in flight, those of small messages first; how many. Raises
        VerbsFailed, and ShardError without memory.
        """
        count, only = 0, self._only
        for waiting in self._to_read:
            while waiting and (reader := only or self._least_busy()).free:
                reading = waiting[0]
                number = reader.free.pop()
                nbytes = min(reading.nbytes - reading.taken, reading.piece_bytes)
                try:
                    if reading.segment < 0:
                        place, address, lkey = reader.bounce(number)
                        nbytes = min(nbytes, len(place))
                    else:
                        address = reading.address + reading.taken
                        lkey = reader.domain.region(reading.segment).lkey
                except NoVerbs as error:
                    raise ShardError(f"no memory to read an array into: {error}") from error
                far_address, rkey = (
                    reading.far_address + reading.taken,
                    reading.rkeys[reader.number],
                )
                reader.read(number, address, lkey, far_address, rkey, nbytes)
                self._reads[number] = reading, reading.taken, nbytes
                reading.taken += nbytes
                if reading.taken == reading.nbytes:
                    waiting.popleft()
                    self.arrays_to_read -= 1
                count += 1
        return count

    def reads_in_flight(self, reader: int) -> int:
        """Of the reader with that number."""
        return sum(1 for number in self._reads if number // READS == reader)

    def _least_busy(self) -> VerbsReader:
        """The rail with the most reads to give: a slower one has fewer, and so takes fewer."""
        return max(self._readers, key=_free_of)

    def let_go(self) -> object:
        """The connection ends, and nothing more is delivered: what the device may still write to,
        for the caller to keep until it cannot.
        """
        kept = self._reads, self._small, self._bulk
        self._reads, self._small, self._bulk = {}, deque(), deque()
        self._to_read, self.arrays_to_read = (deque(), deque()), 0
        self._parts = bytearray()
        self._by_number = {}
        del self._readers, self._only, self._give_back
        return kept


def _inline_block(payload: memoryview, descriptor: Sequence[int]) -> NDArray[np.uint8]:
    """A block whose bytes are in the payload. Raises MemoryError."""
    nbytes, offset = descriptor[:2]
    if offset + nbytes > len(payload):
        raise RemoteProtocolError(
            f"array of {nbytes} bytes at {offset} passes its message of {len(payload)}"
        )
    block = empty_block(nbytes)
    block.data[:] = payload[offset : offset + nbytes]
    return block


def _free_of(reader: VerbsReader) -> int:
    return len(reader.free)
