"""Messages between two processes of one host: two rings for the messages, a Unix socket, and blocks
by reference.

How the two came by socket and segment is not told here: shm.py meets strangers, group.py hands them
to its children. The socket is the doorbell, carries the descriptors of slab segments, and its end
is the peer's death (control_channel.py).

    segment  offset 0                ring from the connector to the acceptor
             DATA_OFFSET + capacity  ring the other way; what their records are stands in records.py

Blocks of up to INLINE_BYTES_MAX travel in the record and are copied out. Larger ones are lent:
arrays that already live in the slab as they are, others after one copy into a recycled block. A
body too large for the ring is lent like a block. A copy that finds no room in the slab, or would
pass the peer's share of it, goes over a socket (spill.py); copies that the peer has not read count
like an outbox (unread.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty
from typing import Any, NoReturn

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
from shard.memory.arena import Holder
from shard.memory.device_memory import DeviceBlock
from shard.memory.leases import Borrowings, Lendings, MeetingSocket
from shard.memory.limits import Limits
from shard.memory.ring import (
    DATA_OFFSET,
    RECORD_HEADER_BYTES,
    SLEEPING_WORD,
    TAIL_WORD,
    Pace,
    RingConsumer,
    RingProducer,
)
from shard.memory.segment import Segment
from shard.memory.slab import Slab
from shard.memory.unheld import Unheld
from shard.transport import BEGINNING_BYTES, NOBODY_SLEEPS, Buffer, Connection, Traffic
from shard.transport.control_channel import ControlChannel
from shard.transport.frame import check_blocks
from shard.transport.mapped import MappedSegments
from shard.transport.no_ring import NO_WORDS, NoRing
from shard.transport.records import (
    DESCRIPTOR_BYTES,
    LEASE,
    LEASE_BYTES,
    MESSAGE,
    PREFIX,
    PREFIX_BYTES,
    RETURN,
    RETURN_FIRST,
    Record,
    pack_descriptor,
    pack_lease,
    pack_one_block,
    pack_prefix,
    unpack_descriptor,
)
from shard.transport.spill import SPILLED, Spilled, SpillReader, SpillWriter, copy_of
from shard.transport.told import ToldSegments
from shard.transport.unread import Unread

logger = logging.getLogger("shard")

# Two copies of this many bytes cost about what lending a block does (2-3 us).
INLINE_BYTES_MAX = 16 << 10
# The largest record, so that a few always fit the ring at once; larger bodies are lent.
RECORD_PART_OF_RING = 4
RECORDS_PER_TURN = 64
# Of copies for one peer that has not read them, however little its share of a small slab is: a
# usual tensor or two.
WAITING_BYTES_MIN = 64 << 20

# With messages waiting for room in a full ring we do not sleep for long: nobody rings when there is
# room again.
FULL_RING_PARK_S = 0.001


class ShmConnection(Connection[Record]):
    """One peer on this machine. Made from a connected Unix socket and the two rings."""

    transport = "shm"

    def __init__(
        self,
        sock: socket.socket,
        outgoing: memoryview,
        incoming: memoryview,
        peer: str,
        limits: Limits,
        slab: Slab,
        incarnation: int | None = None,
    ) -> None:
        super().__init__(peer, limits)
        line = MeetingSocket(sock)
        self.mapped = MappedSegments(peer, limits)  # of the peer's slab
        self.notes = ControlChannel(line, peer, self.mapped.map, self.mapped.unmap)
        self._slab = slab
        self._producer = RingProducer(outgoing, peer, incarnation)
        self._consumer = RingConsumer(incoming, peer, incarnation)
        self._poll_ring = self._consumer.poll
        self._pace: Pace | None = None  # of the reactor that polls us
        self._tagged = self._on_tagged  # bound once: the hot path makes no method objects
        self._incoming_words = incoming.cast("Q")
        self._outgoing_words = outgoing.cast("Q")
        self.asleep = self._outgoing_words[SLEEPING_WORD : SLEEPING_WORD + 1]
        self._record_bytes_max = (
            len(outgoing) - DATA_OFFSET
        ) // RECORD_PART_OF_RING - RECORD_HEADER_BYTES
        self._leases_max = self._record_bytes_max // LEASE_BYTES  # in one record
        self._short_bytes_max = min(self._record_bytes_max, limits.body_bytes_max)
        # of a body beside one lent array; as _prepare() has it for any number of them
        self._beside_bytes_max = min(
            self._record_bytes_max // 2,
            self._record_bytes_max - PREFIX_BYTES - 2 * DESCRIPTOR_BYTES,
            limits.body_bytes_max,
        )
        self._lendings = Lendings(slab, peer)
        self._borrowings = Borrowings(line, peer, slab.clock)
        self._returned, self._held_since = self._borrowings.returned, self._borrowings.held_since
        self._holder = Holder(limits.slab_share_max)
        self._unread = Unread(self._outgoing_words)
        self._spill_writer: SpillWriter | None = None
        self._spill_reader: SpillReader | None = None
        self._arrays_spilled = 0
        self.notes.on_spill = self._on_spill
        self._told = ToldSegments(slab, self.notes)
        self._opening_spill = threading.Lock()  # one socket for arrays, whoever is first
        self._bytes_borrowed = 0  # in all
        self._records_received = 0

    # -- sending -----------------------------------------------------------------------------------

    def send(self, body: Buffer, blocks: Sequence[NDArray[Any]] = (), stable: bool = False) -> None:
        """The short ways for a small message, alone or with one array of our slab, to a peer with
        room; see Connection.send for the rest.
        """
        if not blocks and not self._outbox and len(body) <= self._short_bytes_max:
            try:
                self._writing.get_nowait()  # as take(), without its call
            except Empty:
                pass  # another thread writes: this message queues behind
            else:
                try:
                    written = (
                        self._producer.try_write(body)
                        if not self._returned
                        else self._write_with_returned(body)
                    )
                except RemoteProtocolError as error:
                    self._end_soon(error)
                    raise
                finally:
                    self._writing.put(None)
                if written:
                    if self._outgoing_words[SLEEPING_WORD]:
                        self.wake_peer()
                    if self._outbox:
                        self.drain()
                    return
        if self._returned:
            self._give_back()
        if len(blocks) != 1 or not self._send_lent(body, blocks[0]):
            super().send(body, blocks, stable)

    def _write_with_returned(self, body: Buffer) -> bool:
        """Give back what we are done with before an answer: then the peer's next message finds the
        block free, and warm. One lease goes in the same record. By the writer.
        """
        lease = self._returned.popleft()
        if not self._returned and len(body) <= self._short_bytes_max - LEASE_BYTES:
            if self._producer.try_write(pack_lease(lease) + body, RETURN_FIRST):
                return True
            self._returned.appendleft(lease)
            return False
        self._returned.appendleft(lease)
        return self._write_returned() and self._producer.try_write(body)

    def _send_lent(self, body: Buffer, block: NDArray[Any]) -> bool:
        """The way of most messages with an array: one that lies in our slab, beside a short body.
        False: it is another message, or it has to wait, and nothing was done.
        """
        nbytes, told = block.nbytes, self._told
        if (
            nbytes <= INLINE_BYTES_MAX
            or type(block) is DeviceBlock
            or nbytes > self.limits.blocks_bytes_max
            or len(body) > self._beside_bytes_max
            or self._outbox
            or self.error is not None
        ):
            return False
        found = self._slab.block_of(block)
        if found is None:
            return False
        place, offset = found
        segment = place.segment
        if segment not in told.numbers or told.drops_seen != self._slab.segments_dropped:
            return False
        if not self._writing.take():
            return False
        try:
            lease = self._lendings.lend(place, nbytes)
            payload = pack_one_block(1, len(body), nbytes, offset, lease, segment, 0) + body
            written = self._producer.try_write(payload, MESSAGE)
            if not written:
                self._lendings.undo(lease)
        except RemoteProtocolError as error:
            self._end_soon(error)
            raise
        finally:
            self._writing.give_back()
        if written:
            if self._outgoing_words[SLEEPING_WORD]:
                self.wake_peer()
            if self._outbox:
                self.drain()
        return written

    def _prepare(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[Record, int]:
        body_bytes = len(body)
        if body_bytes > self.limits.body_bytes_max:
            raise LocalProtocolError(
                f"message body of {body_bytes} bytes, at most {self.limits.body_bytes_max} allowed"
            )
        if not blocks and body_bytes <= self._record_bytes_max:
            return Record(bytes(body), 0, ()), body_bytes
        count = len(blocks)
        budget = self._record_bytes_max - PREFIX_BYTES - DESCRIPTOR_BYTES * (count + 1)
        if count > self.limits.blocks_max or budget < 0:
            self._refuse(blocks)
        inline_body = body_bytes <= budget and body_bytes <= self._record_bytes_max // 2
        parts: list[Buffer] = [pack_prefix(count, body_bytes)]  # and the descriptors, then the body
        leases: list[int] = []
        copies: list[int] = []
        spilled: list[NDArray[Any]] = []
        inline: list[Buffer] = []
        position = PREFIX_BYTES + DESCRIPTOR_BYTES * (count + (not inline_body))
        if inline_body:
            position += body_bytes
            budget -= body_bytes
        total = 0
        try:
            for block in blocks:
                nbytes = block.nbytes
                total += nbytes
                if total > self.limits.blocks_bytes_max:
                    self._refuse(blocks)
                if nbytes <= INLINE_BYTES_MAX and nbytes <= budget:
                    parts.append(pack_descriptor(nbytes, position, 0, 0, 0))
                    inline.append(block.data)
                    position += nbytes
                    budget -= nbytes
                else:
                    parts.append(self._lend(block, nbytes, leases, copies, spilled))
            if inline_body:
                parts.append(body)
            else:
                parts.append(
                    self._lend(np.frombuffer(body, np.uint8), body_bytes, leases, copies, spilled)
                )
        except BaseException as failure:
            for lease in leases:
                self._lendings.undo(lease)
            if self.error is not None and isinstance(failure, Exception):
                # ended by another thread, and the slab may be closed, too
                raise self._ended() from failure
            raise
        payload = b"".join(parts + inline if inline else parts)
        beginning = b"" if inline_body else bytes(body[:BEGINNING_BYTES])
        if not copies:
            return Record(payload, MESSAGE, tuple(leases), beginning), len(payload)
        copied = sum(copies)
        ready = Record(
            payload,
            MESSAGE,
            tuple(leases),
            beginning,
            copied,
            Spilled(spilled) if spilled else None,
        )
        return ready, len(payload) + copied

    def _refuse(self, blocks: Sequence[NDArray[Any]]) -> NoReturn:
        """Raise what check_blocks() says, else that even the descriptors find no room."""
        check_blocks([block.nbytes for block in blocks], self.limits, LocalProtocolError)
        raise LocalProtocolError(
            f"{len(blocks)} arrays need more descriptors than a ring of this size takes in one "
            "message"
        )

    def _lend(
        self,
        block: NDArray[Any],
        nbytes: int,
        leases: list[int],
        copies: list[int],
        spilled: list[NDArray[Any]],
    ) -> bytes:
        """A lease on the array's block in the slab, or on a copy of it, or without room there the
        copy alone; its descriptor.
        """
        slab = self._slab
        found = slab.block_of(block)
        if found is not None:
            place, offset = found
            lease = self._lendings.lend(place, nbytes)
        else:
            if not copies and self._unread.nbytes + nbytes > self.limits.outbox_bytes_max:
                self._hold_back(nbytes, self.limits.outbox_bytes_max)
            copies.append(nbytes)
            try:
                place = slab.allocate(nbytes, self._holder)
            except ShmFull as full:
                if len(copies) == 1:
                    share = max(WAITING_BYTES_MIN, int(self._holder.share * slab.budget_bytes))
                    self._hold_back(nbytes, min(self.limits.outbox_bytes_max, share))
                spilled.append(self._copy_to_spill(block, full))
                return pack_descriptor(nbytes, 0, 0, SPILLED, 0)
            offset = place.offset
            try:
                np.copyto(np.frombuffer(slab.memory(place, nbytes), np.uint8), block)
            except BaseException:
                slab.release(place)
                raise
            # failpoint: slab.after_copy
            lease = self._lendings.pass_on(place, nbytes)
        leases.append(lease)
        segment = place.segment
        told = self._told
        if segment not in told.numbers:
            told.tell(segment)
        if told.drops_seen != slab.segments_dropped:
            told.tell_drops()
        return pack_descriptor(nbytes, offset, lease, segment, 0)

    def _hold_back(self, nbytes: int, bytes_max: int) -> None:
        """Raise BackpressureError when arrays of so many bytes more would pass `bytes_max`. One
        message of any size may wait.
        """
        unread = self._unread.nbytes
        if self._writing.take():  # else somebody writes, and may count
            try:
                unread = self._unread.look()
            finally:
                self._writing.give_back()
        unread += self._outbox_bytes
        if unread and unread + nbytes > bytes_max:
            raise BackpressureError(
                f"arrays of {unread} bytes already wait for {self.peer}, "
                f"at most {bytes_max} may (limit outbox_bytes_max, or "
                "slab_share_max of the slab): it reads too slowly"
            )

    def _copy_to_spill(self, block: NDArray[Any], full: ShmFull) -> NDArray[Any]:
        copy = copy_of(block, full)
        with self._opening_spill:
            if self._spill_writer is None:
                self._spill_writer = SpillWriter(self.notes)
                logger.warning(
                    "an array for %s goes over a socket, as shared memory has no room: %s",
                    self.peer,
                    str(full),
                )
                if self.error is not None:  # _end() may have come before it
                    self._spill_writer.close()
        self._arrays_spilled += 1
        return copy

    def _write(self, item: Record) -> bool:
        if item.spilled is not None:
            return self._write_spilled(item, item.spilled)
        return self._write_record(item)

    def _write_spilled(self, item: Record, spilled: Spilled) -> bool:
        """Its arrays first. Once some of them have left nothing else may go that way: it becomes
        the first of the outbox.
        """
        first = self._outbox[0][0] if self._outbox else None
        if (
            first is not item
            and first is not None
            and first.spilled is not None
            and first.spilled.begun
        ):
            return False
        if self.error is not None:
            return True  # it goes nowhere
        assert self._spill_writer is not None, "opened for the first array of all"
        spilled.begun = True
        if self._spill_writer.write(spilled.parts) and self._write_record(item):
            return True
        if first is item:
            return False
        size = len(item.payload) + item.copied
        self._outbox_bytes += size
        self._outbox.appendleft((item, size))
        if self.reactor is not None and self.reactor.parked:
            self.reactor.wake()
        return True

    def _end_soon(self, error: ShardError) -> None:
        """The peer has broken the ring that we write to: else each message would find that anew,
        for as long as it reads none.
        """
        if self.reactor is not None:
            self.reactor.call_soon(lambda: self.close(error))

    def _write_record(self, item: Record) -> bool:
        try:
            written = self._producer.try_write(item.payload, item.tag)
        except RemoteProtocolError as error:
            self._end_soon(error)
            raise
        if not written:
            return False
        if item.copied:
            self._unread.written(self._producer.bytes_written, item.copied)
        if self._outgoing_words[SLEEPING_WORD]:
            self.wake_peer()
        return True

    def _beginning(self, item: Record) -> Buffer:
        if item.beginning or item.tag != MESSAGE:
            return item.beginning or item.payload
        block_count, _ = PREFIX.unpack_from(item.payload)
        return item.payload[PREFIX_BYTES + DESCRIPTOR_BYTES * block_count :]

    def _discard(self, item: Record) -> None:
        for lease in item.leases:
            self._lendings.undo(lease)

    def traffic(self) -> Traffic:
        producer = self._producer
        return Traffic(
            producer.bytes_written + self._lendings.bytes_lent,
            self._consumer.head + self._bytes_borrowed,
            self._records_received,
            producer.full_count,
            self._arrays_spilled + self.mapped.arrays_copied,
        )

    @property
    def leases_held(self) -> int:
        """Blocks of the peer that arrays of ours still show."""
        # from any thread: _end() takes the borrowings away
        return len(self._held_since) if self.error is None else 0

    def wake_peer(self) -> None:
        if self._producer.take_sleeping():
            # failpoint: connection.before_doorbell
            self.notes.ring()
            # failpoint: connection.after_doorbell

    # -- receiving ---------------------------------------------------------------------------------

    def poll(self) -> int:
        """One bounded batch of incoming records; when there are none, or too many, what else there
        is to do.
        """
        try:
            if self._incoming_words[TAIL_WORD] != self._consumer.head:
                consumer, poll_ring = self._consumer, self._poll_ring
                work = poll_ring(self.on_message, RECORDS_PER_TURN, self._tagged, self._pace)
                self._records_received += work
                if work < RECORDS_PER_TURN and not consumer.was_cut:
                    return work
                consumer.was_cut = False
            else:
                work = 0
            if self._outbox:
                work += self.drain()
            if self._returned:
                work += self._give_back()
            return work
        except ShardError as error:
            named = (
                error if error is self._consumer.broken else type(error)(f"{self.peer}: {error}")
            )
            self.close(named)
            return 1

    def _on_tagged(self, payload: memoryview, tag: int) -> None:
        blocks: list[NDArray[np.uint8]] | tuple[()] = ()
        try:
            if tag == MESSAGE:
                body, blocks = self._read_message(payload)
                # the peer is held back by arrays that were not read, and a handler may take long:
                # of the record nothing is needed any more
                self._consumer.free()
            elif tag == RETURN_FIRST:
                self._lendings.take_back(LEASE.unpack_from(payload)[0])
                body = payload[LEASE_BYTES:]
            elif tag == RETURN:
                for (lease,) in LEASE.iter_unpack(payload):
                    self._lendings.take_back(lease)
                return
            else:
                raise RemoteProtocolError(f"record with unknown tag {tag}")
        except struct.error as error:
            raise RemoteProtocolError(
                f"record of {len(payload)} bytes is cut short: {error}"
            ) from error
        self.on_message(body, blocks)

    def _read_message(self, payload: memoryview) -> tuple[memoryview, list[NDArray[np.uint8]]]:
        """Body and blocks of a record with tag MESSAGE, none of which lie in it. Raises
        struct.error for one that is cut short.
        """
        block_count, body_bytes = PREFIX.unpack_from(payload)
        if block_count > self.limits.blocks_max or body_bytes > self.limits.body_bytes_max:
            raise RemoteProtocolError(
                f"message of {block_count} arrays and a body of {body_bytes} bytes is over "
                "the limits"
            )
        at = PREFIX_BYTES
        blocks = []
        total = 0
        try:
            for _ in range(block_count):
                nbytes, offset, lease, number, _zero = unpack_descriptor(payload, at)
                at += DESCRIPTOR_BYTES
                total += nbytes
                if total > self.limits.blocks_bytes_max:
                    raise RemoteProtocolError(
                        f"message with over {self.limits.blocks_bytes_max} bytes of arrays"
                    )
                blocks.append(self._block(payload, nbytes, offset, lease, number))
            if at + body_bytes <= len(payload):
                return memoryview(bytes(payload[at : at + body_bytes])), blocks
            nbytes, offset, lease, number, _zero = unpack_descriptor(payload, at)
            if nbytes != body_bytes or not (lease or number == SPILLED):
                raise RemoteProtocolError(f"body of {body_bytes} bytes passes its record")
            return self._block(payload, nbytes, offset, lease, number).data, blocks
        except MemoryError as error:
            at = PREFIX_BYTES + DESCRIPTOR_BYTES * block_count
            if at + body_bytes > len(payload):
                # no body, so nobody knows whose message it is
                raise ShardError(str(error)) from error
            self._drop_blocks(payload, len(blocks) + 1, block_count)
            return memoryview(bytes(payload[at : at + body_bytes])), Unheld(block_count, str(error))

    def _drop_blocks(self, payload: memoryview, first: int, end: int) -> None:
        """Of a message that cannot be held: the peer gets back what it lent, and what comes over
        the socket is read off.
        """
        for at in range(
            PREFIX_BYTES + DESCRIPTOR_BYTES * first,
            PREFIX_BYTES + DESCRIPTOR_BYTES * end,
            DESCRIPTOR_BYTES,
        ):
            nbytes, _, lease, number, _ = unpack_descriptor(payload, at)
            if lease:
                self._borrowings.decline(lease)
            elif number == SPILLED:
                with contextlib.suppress(MemoryError):
                    self._take_spilled(nbytes)

    def _block(
        self, payload: memoryview, nbytes: int, offset: int, lease: int, number: int
    ) -> NDArray[np.uint8]:
        if not lease:
            if number == SPILLED:
                return self._take_spilled(nbytes)
            if offset + nbytes > len(payload):
                raise RemoteProtocolError(
                    f"array of {nbytes} bytes at {offset} passes its record of {len(payload)}"
                )
            block = (
                np.frombuffer(payload, np.uint8, nbytes, offset).copy()
                if nbytes
                else np.empty(0, np.uint8)
            )
            block.setflags(write=False)
            return block
        segment = self.mapped.get(number)
        if segment is None:
            segment = self.mapped.find(number, self.notes.read)
            if segment is None:
                try:
                    return self.mapped.copy_out(number, offset, nbytes)
                finally:  # not before: another thread may return leases at any moment
                    self._borrowings.decline(lease)
        if offset + nbytes > segment.size_bytes:
            raise RemoteProtocolError(
                f"array of {nbytes} bytes at {offset} passes its segment of {segment.size_bytes}"
            )
        self._bytes_borrowed += nbytes
        return self._borrowings.borrow(segment.memory, offset, nbytes, lease)

    def _take_spilled(self, nbytes: int) -> NDArray[np.uint8]:
        while self._spill_reader is None and self.notes.read():
            continue
        reader = self._spill_reader
        if reader is None:
            raise RemoteProtocolError(
                f"array of {nbytes} bytes over a socket that was never handed over"
            )
        was_full = reader.is_full
        try:
            return reader.take(nbytes)
        finally:
            if was_full and not reader.is_full and not reader.ended and self.reactor is not None:
                self.reactor.watch(reader.fileno(), self._on_spill_ready)

    def _give_back(self) -> int:
        """Return the leases of arrays that are gone here."""
        if not self._writing.take():
            return 0
        try:
            if not self._write_returned():
                return 0
        finally:
            self._writing.give_back()
        # failpoint: lease.after_return
        if self._outgoing_words[SLEEPING_WORD]:
            self.wake_peer()
        return 1

    def _write_returned(self) -> bool:
        """As many as one record takes; False: the ring is full. By the writer."""
        returned = self._returned
        leases: list[int] = []
        while returned and len(leases) < self._leases_max:
            leases.append(returned.popleft())
        # failpoint: lease.before_return
        if self._producer.try_write(b"".join(map(pack_lease, leases)), RETURN):
            return True
        returned.extendleft(reversed(leases))
        return False

    # -- the socket --------------------------------------------------------------------------------

    def _on_socket(self, events: int) -> None:
        try:
            self.notes.read()
        except ShardError as error:
            self.close(error)
            return
        if self.notes.said_goodbye:
            self._peer_hung_up(PeerLostError(f"{self.peer} closed the connection"))
        elif self.notes.ended:
            self._peer_hung_up(PeerLostError(f"{self.peer} was lost: it died or hung up"))

    def _on_spill(self, fd: int) -> None:
        if self._spill_reader is not None:
            os.close(fd)
            raise RemoteProtocolError("a second socket for arrays was handed over")
        self._spill_reader = SpillReader(fd, self.peer, self.limits)
        if self.reactor is not None:
            self.reactor.watch(fd, self._on_spill_ready)

    def _on_spill_ready(self, events: int) -> None:
        reader = self._spill_reader
        if reader is None or self.reactor is None:
            return
        try:
            reader.read()
        except ShardError as error:
            self.close(error)
            return
        if reader.ended or reader.is_full:
            self.reactor.unwatch(reader.fileno())

    def _read_the_rest(self, why: ShardError) -> None:
        end = self._incoming_words[TAIL_WORD]  # the peer is to write no more
        while self.error is None:
            try:
                if self._consumer.head >= end or not self._poll_ring(
                    self.on_message, RECORDS_PER_TURN, self._tagged
                ):
                    self.close(why)
            except ShardError as broken:
                self.close(broken)

    # -- life --------------------------------------------------------------------------------------

    def _drive(self, reactor: Reactor) -> None:
        self._pace = reactor.pace
        self._borrowings.wake_if_parked = lambda: reactor.wake() if reactor.parked else None
        self._lendings.tell_drops = lambda: reactor.call_soon(self._told.tell_drops)
        reactor.add_source(self)
        reactor.watch(self.notes.fileno(), self._on_socket)

    def prepare_sleep(self, sleeping: bool) -> float:
        """Set or clear our wish to be rung."""
        if self.error is None:
            self._consumer.set_sleeping(sleeping)
        return FULL_RING_PARK_S if self._outbox else PARK_S_MAX

    def has_work(self) -> bool:
        """Whether a record or a returned lease waits."""
        return self.error is None and (bool(self._returned) or not self._consumer.is_empty())

    def _say_goodbye(self) -> None:
        # failpoint: connection.before_goodbye
        self.notes.say_goodbye()

    def _end(self) -> None:
        """Let go of the rings. Halves of the socket stay while the peer's blocks are held."""
        self._consumer.skip_all()  # a poll() of ours that we are in hands out nothing more
        if self.reactor is not None:
            self.reactor.remove_source(self)
            self.reactor.unwatch(self.notes.fileno())
        self._borrowings.wake_if_parked = self._lendings.tell_drops = _nothing
        self._lendings.hand_over(self._borrowings.line)
        # Our arrays on the peer's blocks hold the borrowings, and those the line; without any our
        # half of it ends now.
        del self._borrowings
        # else another thread's bytes could go to whatever has the descriptor next
        with self._writing:
            if self._spill_writer is not None:
                self._spill_writer.close()
        if self._spill_reader is not None:
            if self.reactor is not None:
                self.reactor.unwatch(self._spill_reader.fileno())
            self._spill_reader.close()
            self._spill_reader = None
        # Whoever keeps this object keeps neither the rings nor the peer's segments mapped.
        self._let_go_of_rings()
        self.mapped.clear()
        self.notes.close()

    def _let_go_of_rings(self) -> None:
        self._producer = self._consumer = NoRing(  # type: ignore[assignment]
            self._producer.bytes_written, self._consumer.head, self._producer.full_count
        )
        self._poll_ring = self._consumer.poll
        self._outgoing_words = self._incoming_words = NO_WORDS
        self.asleep = NOBODY_SLEEPS
        self._unread.let_go(NO_WORDS)

    def _let_go_in_fork(self) -> None:
        """The rings stay the parent's alone: arrays that end here return no lease, whatever is
        called here.
        """
        self._let_go_of_rings()
        self._returned = deque()
        if hasattr(self, "_borrowings"):  # it has not ended
            self._borrowings.let_go_in_fork()


def _nothing() -> None:
    """No reactor waits for returned leases any more."""


def connection_over(
    sock: socket.socket,
    segment: Segment,
    is_connector: bool,
    peer: str,
    limits: Limits,
    slab: Slab,
    incarnation: int | None = None,
) -> ShmConnection:
    """A connection on a segment made by make_rings(), ours or handed over; the segment object is
    used up.

    Raises RemoteProtocolError when the segment holds no such rings, or those of another incarnation
    than asked for."""
    half = segment.size_bytes // 2
    memory = segment.memory
    first, second = memory[:half], memory[half : 2 * half]
    outgoing, incoming = (first, second) if is_connector else (second, first)
    connection = ShmConnection(sock, outgoing, incoming, peer, limits, slab, incarnation)
    segment.close()
    return connection
