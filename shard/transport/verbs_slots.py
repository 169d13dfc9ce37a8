"""Which slots of a verbs connection are free, at both ends of it.

    of ours        sent       filled, in all
                   retired    of those: the device no longer reads them
                   told       of those: the peer has taken them, as it said
    of the peer's  taken      read here, and given to the device again
                   told       and the peer was told so

A slot may be filled while sent - told is less than the window, and sent - retired. So a receiver
never lacks one. The last one is kept for telling what was taken: with it at least half of the
window is told, so the peer, too, can tell again, and two that send much to each other never both
wait. A slot that is held counts as not taken until it is given back; what came in it was looked at
all the same, so what the peer told is never held.
"""

from __future__ import annotations

from shard.errors import RemoteProtocolError
from shard.transport import Buffer
from shard.transport.verbs_introduction import FarEnd
from shard.transport.verbs_queue import SIGNAL_EVERY, SLOTS, VerbsQueue
from shard.transport.verbs_records import (
    COUNT_MAX,
    CREDIT,
    HEADER_BYTES,
    PART,
    pack_header,
    unpack_header,
)


class VerbsSlots:
    """The slots of one queue pair, and the messages that are put into them and taken out. What
    fills them is for one writer at a time, what takes for the reactor's thread. All may raise
    VerbsFailed.
    """

    def __init__(self, queue: VerbsQueue, far: FarEnd) -> None:
        self._queue, self._memory, self._slot_bytes = queue, queue.memory, queue.slot_bytes
        # of both ends, as a slot lies where its message lay
        self._window = min(SLOTS, far.slots)
        self.payload_max = min(queue.slot_bytes, far.slot_bytes) - HEADER_BYTES
        self.sent = self.taken = 0
        self._retired = self._sent_told = 0
        # when so many are taken, the peer has to be told, if nothing else goes there
        self.tell_at = self._window // 2
        self.rest: tuple[memoryview, int] | None = None  # of a message that is longer than a slot
        self.held: list[int] = []  # slots that the peer is to wait for
        self.bytes_sent = self.bytes_received = 0

    # -- filling -----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a message may begin: a slot is free, and nothing is left of another message."""
        sent = self.sent
        return (
            sent - self._sent_told < self._window - 1
            and sent - self._retired < self._window
            and self.rest is None
        )

    def begin(self, payload: Buffer, tag: int) -> None:
        """Send a payload of any length; what does not fit now leaves by go_on(). With room."""
        if len(payload) <= self.payload_max:
            self.fill(payload, tag)
        else:
            self.rest = memoryview(payload), tag
            self.go_on()

    def go_on(self) -> bool:
        """Go on with what has begun; whether none is left."""
        while self.rest is not None:
            payload, tag = self.rest
            self.rest = None
            if not self.has_room:
                self.rest = payload, tag
                return False
            if len(payload) <= self.payload_max:
                self.fill(payload, tag)
            else:
                self.fill(payload[: self.payload_max], PART)
                self.rest = payload[self.payload_max :], tag
        return True

    def fill(self, payload: Buffer, tag: int) -> None:
        """Send what fits a slot. With room."""
        sent, taken = self.sent, self.taken
        slot = sent % self._window
        nbytes = len(payload) + HEADER_BYTES
        at = (SLOTS + slot) * self._slot_bytes
        self._memory[at : at + nbytes] = pack_header(taken & COUNT_MAX, tag) + payload
        self.sent = sent + 1  # first: the peer may tell that it took it before the post returns
        self._queue.send(slot, nbytes, sent % SIGNAL_EVERY == SIGNAL_EVERY - 1)
        self.tell_at = taken + self._window // 2
        self.bytes_sent += nbytes

    def tell(self) -> None:
        """Tell it, in the slot that is kept for that, if that is free. Between parts, too."""
        if self.sent - self._sent_told < self._window and self.sent - self._retired < self._window:
            self.fill(b"", CREDIT)

    @property
    def all_told(self) -> bool:
        """Whether the peer has taken all that was sent, as it says."""
        return self.sent == self._sent_told

    # -- taking ------------------------------------------------------------------------------------

    def retire(self) -> None:
        """A send has completed that was to tell of it."""
        self._retired += SIGNAL_EVERY

    def look(self, slot: int, nbytes: int) -> tuple[memoryview, int]:
        """What the peer put into that slot: the payload, good until give_back(), and its tag.
        Raises RemoteProtocolError.
        """
        if nbytes < HEADER_BYTES:
            raise RemoteProtocolError(f"a message of {nbytes} bytes, {HEADER_BYTES} are the least")
        at = slot * self._slot_bytes
        taken, tag = unpack_header(self._memory, at)
        told = (taken - self._sent_told) & COUNT_MAX
        if told > self.sent - self._sent_told:
            raise RemoteProtocolError(
                f"the peer took {told} messages more, of {self.sent - self._sent_told}"
            )
        self._sent_told += told
        self.bytes_received += nbytes
        return self._memory[at + HEADER_BYTES : at + nbytes], tag

    def give_back(self, slot: int) -> None:
        """What was in it is done with."""
        self._queue.receive(slot)
        self.taken += 1

    def hold(self, slot: int) -> None:
        """What was in it is done with, but the peer is to wait for it, until give_back_held()."""
        self.held.append(slot)

    def give_back_held(self) -> None:
        """The peer need not wait for any slot."""
        while self.held:
            self.give_back(self.held.pop())

    def let_go(self) -> None:
        """The connection has ended: keep counts alone."""
        self.rest = None
        self.held = []
        self._memory = memoryview(b"")
        del self._queue
