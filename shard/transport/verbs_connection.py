"""Messages over a reliable queue pair: what is small is sent into the peer's slots, and what is
large lies in the sender's slab until the peer has read it from there. What stands in a slot is in
verbs_records.py.

Who may send when is in verbs_slots.py.

    blocks the user's array, or a copy of it, in the sender's slab      until RETURN says that it
           (verbs_loans.py)                                             was read
           READS pieces at a time, into a block of the receiver's slab  until all are here: then the
           (verbs_arrivals.py)                                          message is delivered

The tcp socket over which both met stays open. It shows the peer's death at once, and says goodbye:
how many slots were sent in all, and then its end: the sender of that reads no more. Before that it
sends what waits, as far as the peer makes room in time (FLUSH_S), until it has arrived and the peer
has read its arrays. What was sent is read to its end by the other side. The queue pair lives on as
long as the peer may read blocks of ours, or what was sent last may not have arrived.

Over iWARP the end of one queue pair ends the other, too, over a tcp connection of their own: an end
that finds its queue pair in error reads in the socket first whether the peer has ended, and waits
LAST_WORDS_S for it to say so. Whether its device is still there it asks itself: verbs_pulse.py.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from shard.errors import (
    ClosedError,
    PeerLostError,
    RemoteProtocolError,
    ShardError,
)
from shard.loop.idle import PARK_S_MAX
from shard.loop.reactor import Reactor
from shard.loop.timers import Timer
from shard.memory.arena import BLOCK_BYTES_MIN
from shard.memory.device_memory import DEVICE_NUMBERS, DeviceBlock
from shard.memory.leases import MeetingSocket
from shard.memory.slab import Slab
from shard.transport import Buffer, Connection, Node, Traffic
from shard.transport.laned_connection import BULK_BYTES_MIN
from shard.transport.records import (
    LEASE,
    MESSAGE,
    ONE_BLOCK,
    RETURN,
    pack_lease,
    pack_one_block,
)
from shard.transport.silence import bound_unacknowledged, keep_alive, why_lost
from shard.transport.verbs_arrivals import VerbsArrivals
from shard.transport.verbs_introduction import FarEnd
from shard.transport.verbs_loans import Outgoing, VerbsLoans
from shard.transport.verbs_pulse import VerbsPulse
from shard.transport.verbs_queue import (
    FLUSH,
    READ,
    SENT,
    SLOTS,
    SUCCESS,
    VerbsFailed,
    VerbsQueue,
    VerbsReader,
)
from shard.transport.verbs_records import (
    CREDIT,
    DROPPED,
    DROPPED_NOTE,
    EVERYWHERE,
    GOODBYE,
    LENT_BODY,
    REGION,
    pack_region,
)
from shard.transport.verbs_slots import VerbsSlots

logger = logging.getLogger("shard")
# of a slot: two copies of more cost as much as a read does
SLOT_BYTES_MAX = 16 << 10
COMPLETIONS_PER_TURN = 64
# A sleep while something waits to leave: nothing tells when the thread that writes has ended.
WAITING_PARK_S = 0.001
# close() sends what waits for room, sees it arrive, and waits for arrays to be read. For so long
# the peer may make no room and read none, and so long may all of it take: one that reads takes 64
# messages in well under a millisecond, and it may have to be woken up on a busy core. Nothing else
# is done meanwhile.
FLUSH_S, FLUSH_S_MAX = 0.25, 1.0
# Two tcp connections between the same two hosts, of which one is lost: so long the other's end may
# take to come, where it was sent before. Some round trips, and a retransmission.
LAST_WORDS_S = 0.5


def slot_bytes_of(ring_bytes: int) -> int:
    """How large each of SLOTS is where a connection's ring may have so many bytes."""
    return max(1024, min(SLOT_BYTES_MAX, ring_bytes // SLOTS))


@dataclass(frozen=True)
class RailStatistics:
    """Of one port of a connection.

    reads            of the peer's memory that were posted there
    reads_in_flight  of those: not found complete yet
    registrations    memory regions of the process there, since the port was opened
    """

    port: str
    reads: int
    reads_in_flight: int
    registrations: int


class VerbsLine(MeetingSocket):
    """The socket over which two processes met, and the queue pair between them. Held by the
    connection, and by the slab while the peer may read blocks after the connection's end; both end
    with the last of them.
    """

    def __init__(self, sock: socket.socket, queue: VerbsQueue) -> None:
        super().__init__(sock)
        self.queue = queue
        self.arriving: object = None  # arrays that the device may still write to

    def __del__(self) -> None:
        self.queue.close()  # before the arrays: nothing is written to them from then on
        super().__del__()


class VerbsConnection(Connection[Outgoing]):
    """One peer over RDMA. Made of the socket over which both met, and a queue pair that is
    connected; it owns both. Arrays are lent from, and arrive in, `slab`.
    """

    transport = "verbs"
    reads_devices = True

    def __init__(
        self,
        sock: socket.socket,
        queue: VerbsQueue,
        far: FarEnd,
        peer: str,
        node: Node,
        slab: Slab,
    ) -> None:
        super().__init__(peer, node.limits)
        self._slab, self._queue = slab, queue
        self._domains = tuple(reader.domain for reader in queue.readers)
        self._is_iwarp = self._domains[0].is_iwarp
        self._line = VerbsLine(sock, queue)
        sock.setblocking(False)
        keep_alive(sock, node.limits.peer_silent_s)
        bound_unacknowledged(sock, node.limits.peer_silent_s)
        self.bulk_bytes_min = BULK_BYTES_MIN
        self._slots = slots = VerbsSlots(queue, far)
        self._short_bytes_max = min(slots.payload_max, node.limits.body_bytes_max)
        self._beside_bytes_max = min(slots.payload_max - ONE_BLOCK.size, node.limits.body_bytes_max)
        # of an array that finds no place in a slot
        self._lent_bytes_min = max(slots.payload_max, BLOCK_BYTES_MIN)
        self._regions_told: set[int] = set()
        self._loans = VerbsLoans(slab, self._domains, peer, node.limits, slots.payload_max)
        self._arrivals = VerbsArrivals(self, queue, slab, self._write_own)
        self._found: list[Any] = []  # completions that are not looked at yet, the first one last
        self._armed = False
        self._goodbye = b""  # what has come of the peer's
        self._sent_by_peer: int | None = None  # slots in all, once it said goodbye
        self._why: ShardError | None = None  # the peer hung up
        self._patience: Timer | None = None
        self._is_broken = False  # the queue pair is in error: nothing more leaves or comes
        self._failure = ""  # how that shows; over iWARP the socket has still to say why
        self._pulse: VerbsPulse | None = None  # of iWARP; its FLUSH comes before that of close()
        self._is_end_logged = False
        self._records_received = 0
        # of close(): until the peer makes room, and in all
        self.flush_s, self.flush_s_max = FLUSH_S, FLUSH_S_MAX

    # -- sending -----------------------------------------------------------------------------------

    def send(self, body: Buffer, blocks: Sequence[NDArray[Any]] = (), stable: bool = False) -> None:
        """The short ways for a small message, alone or with one array of our slab, to a peer with
        room; see Connection.send for the rest.
        """
        if blocks:
            sent = len(blocks) == 1 and not self._outbox and self._send_lent(body, blocks[0])
        elif sent := (
            not self._outbox and len(body) <= self._short_bytes_max and self._writing.take()
        ):
            try:
                if sent := self._slots.has_room:
                    self._send(body, 0)
            finally:
                self._writing.give_back()
        if not sent:
            super().send(body, blocks, stable)
        elif self._outbox:
            self.drain()

    def _send_lent(self, body: Buffer, block: NDArray[Any]) -> bool:
        """The way of most messages with an array: one that lies in our slab, in a segment that the
        peer knows, beside a short body. False: it is another message, or it has to wait, and
        nothing was done.
        """
        nbytes = block.nbytes
        if (
            nbytes < self._lent_bytes_min
            or nbytes > self.limits.blocks_bytes_max
            or len(body) > self._beside_bytes_max
            or type(block) is DeviceBlock
        ):
            return False
        found = self._slab.block_of(block)
        if found is None or found[0].segment not in self._regions_told:
            return False
        if not self._writing.take():
            return False
        try:
            if sent := self._slots.has_room and self.error is None:
                place, offset = found
                lease = self._loans.lendings.lend(place, nbytes)
                beginning = pack_one_block(1, len(body), nbytes, offset, lease, place.segment, 0)
                self._send(beginning + body, MESSAGE)
        finally:
            self._writing.give_back()
        return sent

    def send_everywhere(self, body: Buffer) -> None:
        self._enqueue(Outgoing(bytes(body), EVERYWHERE), len(body))

    def _enqueue(self, item: Outgoing, size: int) -> None:
        """A message of the connection's own, behind what waits."""
        if self.error is not None:
            raise self._ended()
        self._outbox_bytes += size
        self._outbox.append((item, size))
        self.drain()
        if self._outbox and self.reactor is not None and self.reactor.parked:
            self.reactor.wake()

    def _send(self, payload: Buffer, tag: int, at_end: bool = False) -> None:
        """By the writer, with room; `at_end`: after the connection's end, too. Raises
        PeerLostError, and the error that ended the connection.
        """
        if self.error is not None and not at_end:
            raise self._ended()
        try:
            self._slots.begin(payload, tag)
        except VerbsFailed as error:
            raise self._broke(str(error)) from error
        except BaseException as error:  # Ctrl-C, say: nobody knows whether it has left
            self._broke(f"{type(error).__name__} while a message was sent to it")
            raise

    def _broke(self, text: str) -> ShardError:
        """The queue pair failed in whatever thread that shows; what a send raises."""
        self._is_broken = True
        if not self._is_iwarp:
            self._log_end(text)
        if self.reactor is not None:
            self.reactor.call_soon(lambda: self._queue_failed(text))
        return self._lost(text)

    def _lost(self, text: str) -> ShardError:
        return PeerLostError(f"{self.peer} was lost: {text}")

    def _queue_failed(self, text: str) -> None:
        """The end of the connection, in the reactor's thread."""
        self._is_broken = True
        if self.error is not None or self._failure:
            return
        self._failure = text
        if self._pulse is not None:
            self._pulse.cancel()
        if self._is_iwarp and self.reactor is not None:
            self._read_what_is_there()  # a send of ours may have found it before
            if self.error is None and self._why is None:
                self._on_socket(0)
            if self.error is None and self._why is None:
                self._patience = self.reactor.call_later(LAST_WORDS_S, self._fail)
                return
        self._fail()

    def _fail(self) -> None:
        """Close it. Over iWARP the peer's words are the reason where there are any."""
        if self.error is not None:
            return
        if self._is_iwarp and self._why is not None:
            self.close(self._why)
            return
        self._log_end(self._failure)
        self.close(self._lost(self._failure))

    def _log_end(self, text: str) -> None:
        """Why this side ends the connection: the peer hears that its line has ended, and not why.
        `text` names the device. Once: two threads may find the same failure.
        """
        if self._is_end_logged:
            return
        self._is_end_logged = True
        logger.warning("the connection to %s ends: %s", self.peer, text)

    def _ports(self) -> str:
        return ",".join(str(domain.port) for domain in self._domains)

    def _close_by_protocol(self, text: str) -> None:
        """The peer sent what none may send."""
        self._log_end(f"{self._ports()}: it broke the protocol: {text}")
        self.close(RemoteProtocolError(f"{self.peer} broke the protocol: {text}"))

    def _prepare(
        self, body: Buffer, blocks: Sequence[NDArray[Any]], stable: bool
    ) -> tuple[Outgoing, int]:
        try:
            return self._loans.prepare(body, blocks)
        except Exception as failure:
            if self.error is not None:
                # ended by another thread, and the slab may be closed, too
                raise self._ended() from failure
            raise

    def _write(self, item: Outgoing) -> bool:
        if self.error is not None:
            return True  # it goes nowhere
        return self._put(item)

    def _put(self, item: Outgoing, at_end: bool = False) -> bool:
        """Send it, with what the peer has to know for it, as far as there is room; whether all."""
        for number in item.segments:
            if number in self._regions_told:
                continue
            if not self._slots.has_room:
                return False
            keys = [0] * self._queue.width
            for reader in self._queue.readers:
                region = reader.domain.region(number)
                keys[reader.number] = region.rkey
            self._send(pack_region(number, region.address, region.nbytes, keys), REGION, at_end)
            self._regions_told.add(number)
        if not self._slots.has_room:
            return False
        self._send(item.payload, item.tag, at_end)
        return True

    def _tell_drops(self) -> None:
        """The peer may forget segments that the slab gave back. In the reactor's thread."""
        if self.error is not None:
            return
        for number in self._regions_told - self._slab.segment_numbers():
            if number >= DEVICE_NUMBERS:
                continue  # which are told once, and never used again
            self._regions_told.discard(number)
            self._enqueue(Outgoing(DROPPED_NOTE.pack(number), DROPPED), DROPPED_NOTE.size)

    def _beginning(self, item: Outgoing) -> Buffer:
        return item.beginning

    def _discard(self, item: Outgoing) -> None:
        self._loans.undo(item.leases)

    def rails(self) -> list[RailStatistics]:
        """What each port does for it, that of the slots first; none once it has ended."""
        if self.error is not None:
            return []
        return [
            RailStatistics(
                str(one.domain.port),
                one.reads_posted,
                self._arrivals.reads_in_flight(one.number),
                one.domain.registrations,
            )
            for one in self._queue.readers
        ]

    def traffic(self) -> Traffic:
        return Traffic(
            self._slots.bytes_sent + self._loans.lendings.bytes_lent,
            self._slots.bytes_received + self._arrivals.bytes_received,
            self._records_received,
        )

    # -- receiving ---------------------------------------------------------------------------------

    def poll(self) -> int:
        """One bounded batch of completions, and what else there is to do."""
        # ended by a source before this one in the same turn, or about to be
        if self.error is not None or self._failure:
            return 0
        try:
            work = self._look_at_completions()
            if self.error is not None:
                return work
            slots, arrivals = self._slots, self._arrivals
            if arrivals.arrays_to_read:
                work += arrivals.read_on()
            if slots.rest is not None or arrivals.returned or slots.taken >= slots.tell_at:
                work += self._write_own()
            if self._outbox:
                work += self.drain()
            if self._why is not None:
                self._look_at_end(self._why)
            return work
        except VerbsFailed as error:
            self._queue_failed(str(error))
        except RemoteProtocolError as error:
            self._close_by_protocol(str(error))
        except ShardError as error:
            self._log_end(f"{self._ports()}: {error}")
            self.close(type(error)(f"{self.peer}: {error}"))
        except BaseException as error:  # Ctrl-C, say: a message was taken, and not delivered
            self._broke(f"{type(error).__name__} while a message of it was delivered")
            raise
        return 1

    def _look_at_completions(self) -> int:
        """A batch of them, or as many as the turn has time for; how many."""
        found = self._found
        if not found:
            found = self._queue.poll(COMPLETIONS_PER_TURN)
            if len(found) <= 1:
                for done in found:
                    self._complete(done)
                return len(found)
            found.reverse()
            self._found = found
        work, look_at, every = 0, 1, 0
        while found and self.error is None:
            self._complete(found.pop())
            work += 1
            if work >= look_at and found and self.reactor is not None:
                if not every:
                    clock, until, every = self.reactor.pace()
                if clock() >= until:
                    break
                look_at = work + every
        return work

    def _complete(self, done: Any) -> None:
        number = done.wr_id
        if done.status != SUCCESS:
            raise self._queue.end_of(done)
        if number < SLOTS:
            self._take(number, done.byte_len)
        elif number == SENT:
            self._slots.retire()
        elif number == FLUSH:
            if self._pulse is not None:
                self._pulse.came_back()
        else:
            self._arrivals.have_read(number - READ)
            if self._slots.held and self.error is None and not self._arrivals.is_full:
                self._slots.give_back_held()

    def _take(self, slot: int, nbytes: int) -> None:
        """A message of the peer's is in that slot."""
        payload, tag = self._slots.look(slot, nbytes)
        self._records_received += 1
        if tag == 0 and self._arrivals.is_idle:
            self.on_message(payload)
        else:
            self._read_record(payload, tag)
        if self.error is not None:
            return
        if tag in (MESSAGE, LENT_BODY) and self._arrivals.is_full:
            self._slots.hold(slot)
        else:
            self._slots.give_back(slot)

    def _read_record(self, payload: memoryview, tag: int) -> None:
        try:
            if tag == RETURN:
                for (lease,) in LEASE.iter_unpack(payload):
                    self._loans.take_back(lease)
            elif tag != CREDIT:  # which may come between parts of a message
                self._arrivals.take(payload, tag)
        except struct.error as error:
            raise RemoteProtocolError(
                f"a message of {len(payload)} bytes is cut short: {error}"
            ) from error

    def _write_own(self) -> int:
        """The rest of a message, leases that go back, and what was taken. How many slots."""
        if not self._writing.take():
            return 0
        slots, returned = self._slots, self._arrivals.returned
        before = slots.sent
        try:
            if slots.rest is None or slots.go_on():
                while returned and slots.has_room:
                    leases = pack_lease(returned.popleft())
                    while returned and len(leases) <= slots.payload_max - LEASE.size:
                        leases += pack_lease(returned.popleft())
                    slots.fill(leases, RETURN)
            if slots.taken >= slots.tell_at:
                slots.tell()
        finally:
            self._writing.give_back()
        return slots.sent - before

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
                    self._close_by_protocol("its goodbye is longer")
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

    def _on_event(self, reader: VerbsReader, events: int) -> None:
        """Something completed while we slept; poll() finds it."""
        self._armed = False
        try:
            reader.take_event()
        except VerbsFailed as error:
            self._broke(str(error))

    def _read_the_rest(self, why: ShardError) -> None:
        self._why = why
        if self._failure:
            self._fail()
            return
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
            while self.error is None:
                self._found = self._found or self._queue.poll(SLOTS)[::-1]
                if not self._found:
                    return
                while self._found:
                    done = self._found.pop()
                    if done.status == SUCCESS and done.wr_id < SLOTS and self.error is None:
                        self._take(done.wr_id, done.byte_len)
                    elif done.status == SUCCESS and done.wr_id & READ and self.error is None:
                        self._arrivals.have_read(done.wr_id - READ)
        except (ShardError, VerbsFailed):
            return  # it is lost in any case, and said to be

    def _look_at_end(self, why: ShardError) -> None:
        """The peer said goodbye: whether all of it is delivered."""
        if (
            self._sent_by_peer is not None
            and self._slots.taken >= self._sent_by_peer
            and self._arrivals.is_empty
        ):
            self.close(why)

    # -- life --------------------------------------------------------------------------------------

    def _drive(self, reactor: Reactor) -> None:
        self._loans.lendings.tell_drops = lambda: reactor.call_soon(self._tell_drops)
        self._queue.begin(self.peer)
        reactor.add_source(self)
        for reader in self._queue.readers:
            reactor.watch(reader.fileno(), partial(self._on_event, reader))
        reactor.watch(self._line.socket.fileno(), self._on_socket)
        if self._is_iwarp:
            self._pulse = VerbsPulse(
                self._queue, reactor, self.limits.peer_silent_s, self.has_work, self._queue_failed
            )

    def prepare_sleep(self, sleeping: bool) -> float:
        """Have the next completion wake us."""
        if sleeping and not self._armed and self.error is None and not self._failure:
            try:
                self._queue.arm()
            except VerbsFailed as error:
                self._broke(str(error))
            else:
                self._armed = True
        return WAITING_PARK_S if self._waits_here() else PARK_S_MAX

    def _waits_here(self) -> bool:
        """Whether something is to leave that another thread, which was writing, kept from it."""
        slots = self._slots
        return (
            self.error is None
            and not self._failure
            and bool(
                self._outbox
                or slots.rest is not None
                or self._arrivals.returned
                or slots.taken >= slots.tell_at
            )
        )

    def has_work(self) -> bool:
        """Whether a completion waits."""
        if self.error is not None or self._failure:
            return False
        if not self._found:
            try:
                self._found = self._queue.poll(COMPLETIONS_PER_TURN)
            except VerbsFailed as error:
                self._broke(str(error))
            self._found.reverse()
        return bool(self._found)

    def _say_goodbye(self) -> None:
        with self._writing:
            self._flush()
            with contextlib.suppress(OSError):  # it is gone
                if not self._is_broken:
                    self._line.socket.send(GOODBYE.pack(self._slots.sent))

    def _flush(self) -> None:
        """Send what waits, and wait until the peer's device has it, and the arrays with it: then
        it is read, whatever becomes of this process. What does not leave in time stays in the
        outbox.
        """
        slots, lent = self._slots, self._loans.lendings
        if self._is_broken or self._why is not None:
            return
        if slots.all_told and slots.rest is None and not self._outbox and not lent:
            return
        now = time.monotonic()
        until, last = now + self.flush_s, now + self.flush_s_max
        is_asked = has_arrived = False
        with contextlib.suppress(VerbsFailed, ShardError):  # what has not left is lost
            slots.give_back_held()
            while now < until:
                before = slots.sent, len(lent)
                if not is_asked and self._send_what_waits():
                    is_asked = True
                    self._queue.flush()
                self._found = self._found or self._awaited(until - now)
                while self._found:
                    has_arrived |= self._complete_at_end(self._found.pop())
                if has_arrived and not lent:
                    return
                now = time.monotonic()
                if (slots.sent, len(lent)) != before:
                    until = min(now + self.flush_s, last)

    def _send_what_waits(self) -> bool:
        """As far as there is room, of a connection that this side ends; whether nothing is left."""
        if not self._slots.go_on():
            return False
        while self._outbox and isinstance(self.error, ClosedError):
            item, size = self._outbox[0]
            if not self._put(item, at_end=True):
                return False
            self._outbox.popleft()
            self._outbox_bytes -= size
        return self._slots.rest is None

    def _awaited(self, timeout_s: float) -> list[Any]:
        """Completions, the first one last; none within that time: none."""
        queue = self._queue
        if not (found := queue.poll(SLOTS)):
            queue.arm()
            if not (found := queue.poll(SLOTS)):
                poller = select.poll()
                poller.register(queue.fileno(), select.POLLIN)
                if poller.poll(timeout_s * 1000):
                    queue.take_event()
                    found = queue.poll(SLOTS)
        return found[::-1]

    def _complete_at_end(self, done: Any) -> bool:
        """What there is to do for one when nothing is delivered any more: the peer gets room, and
        we get ours and our leases. Whether all that was sent has arrived.
        """
        if done.status != SUCCESS:
            raise self._queue.end_of(done)
        number, slots = done.wr_id, self._slots
        if number < SLOTS:
            payload, tag = slots.look(number, done.byte_len)
            if tag == RETURN:
                self._read_record(payload, tag)
            slots.give_back(number)
            if slots.taken >= slots.tell_at:
                slots.tell()
        elif number == SENT:
            slots.retire()
        if number != FLUSH:
            return False
        return self._pulse is None or not self._pulse.came_back()

    def _end(self) -> None:
        """Let go of the reactor and, unless the peer still reads from us, of the queue pair."""
        reactor, line = self.reactor, self._line
        if reactor is not None:
            reactor.remove_source(self)
            for reader in self._queue.readers:
                reactor.unwatch(reader.fileno())
            reactor.unwatch(line.socket.fileno())
        for pending in (self._patience, self._pulse):
            if pending is not None:
                pending.cancel()
        self._loans.lendings.tell_drops = _nothing
        with self._writing:
            with contextlib.suppress(OSError):  # the peer may be gone
                line.socket.shutdown(socket.SHUT_WR)
            # the device may still write to these: they end with the queue pair
            line.arriving = self._arrivals.let_go()
            self._loans.lendings.hand_over(line)
            self._let_go()

    def _let_go(self) -> None:
        self._found = []
        self._slots.let_go()
        del self._line, self._queue

    def _let_go_in_fork(self) -> None:
        self._arrivals.returned = deque()


def _nothing() -> None:
    """Nobody is told of dropped segments any more."""
