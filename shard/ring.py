"""A ring of records in shared memory: one process writes, one process reads, neither ever waits.

    offset  size  field     written by  meaning
         0     8  magic     creator     MAGIC, stored last; whoever attaches refuses anything else
         8     8  capacity  creator     bytes in data, a power of two
       128     8  tail      producer    bytes written since creation
       256     8  head      consumer    bytes read since creation
       384     8  sleeping  both        1: the consumer is about to park and wants its doorbell rung; whoever rings puts 0
       512   ...  data      producer    [head, tail) belongs to the consumer, the rest to the producer

A record is contiguous, so that the reader can be handed a view, and starts at a multiple of 8:

         0     4  length    bytes of payload (a padding record: bytes to skip, header and all)
         4     4  tag       chosen by the layer above, below PADDING; PADDING marks the unused end of data before a wrap
         8   ...  payload

Invariant: head <= tail <= head + capacity. Cursors only grow; data is indexed by cursor & (capacity - 1).

Length and tag are one 8-byte word, stored through `memoryview.cast("Q")`, and so are the cursors; never through
`struct.pack_into`, which zeroes a field before it fills it, so that the other process now and then reads a cursor of 0.
What the order of these stores relies on stands in memory_order.py. The three fields lie two cache lines apart, and
each side reads the other's only when its cached copy says full or empty.

Whoever holds an end owns it alone. A ring whose cursors or lengths make no sense was broken by its peer: the end raises
RemoteProtocolError, never reads outside the segment, and stays broken.
"""

from __future__ import annotations

from collections.abc import Callable

from shard.errors import LocalProtocolError, RemoteProtocolError

MAGIC = 0x31474E4952435250  # "PRCRING1", little-endian
MAGIC_WORD, CAPACITY_WORD, TAIL_WORD, HEAD_WORD, SLEEPING_WORD, DATA_OFFSET = 0, 1, 16, 32, 48, 512
assert HEAD_WORD - TAIL_WORD == SLEEPING_WORD - HEAD_WORD == 128 // 8  # two lines: processors fetch them in pairs

RECORD_HEADER_BYTES = 8
LENGTH_MASK = 0xFFFFFFFF
PADDING = 0xFFFFFFFF
CAPACITY_BYTES_MIN = 64
CAPACITY_BYTES_MAX = 1 << 30  # lengths are 32 bits wide, with room to spare


def capacity_for(wanted_bytes: int) -> int:
    """The smallest allowed capacity that holds `wanted_bytes`: a power of two within the bounds above."""
    if not 0 < wanted_bytes <= CAPACITY_BYTES_MAX:
        raise LocalProtocolError(f"ring capacity of {wanted_bytes} bytes, 1 to {CAPACITY_BYTES_MAX} allowed")
    return max(CAPACITY_BYTES_MIN, 1 << (wanted_bytes - 1).bit_length())


def format_ring(memory: memoryview, capacity_bytes: int) -> None:
    """Lay out a new ring in zeroed `memory` of DATA_OFFSET + capacity_bytes bytes."""
    if capacity_bytes != capacity_for(capacity_bytes) or len(memory) != DATA_OFFSET + capacity_bytes:
        raise LocalProtocolError(f"{len(memory)} bytes of memory cannot hold a ring of {capacity_bytes}")
    words = memory.cast("Q")
    words[CAPACITY_WORD] = capacity_bytes
    words[TAIL_WORD] = words[HEAD_WORD] = words[SLEEPING_WORD] = 0
    words[MAGIC_WORD] = MAGIC  # last: whoever sees it sees a finished ring


def _checked_words(memory: memoryview) -> memoryview:
    if len(memory) < DATA_OFFSET + CAPACITY_BYTES_MIN or len(memory) % 8:
        raise RemoteProtocolError(f"{len(memory)} bytes of memory are too few for a ring")
    words = memory.cast("Q")
    if words[MAGIC_WORD] != MAGIC:
        raise RemoteProtocolError(f"not a ring: magic {words[MAGIC_WORD]:#x}, {MAGIC:#x} expected")
    if words[CAPACITY_WORD] != len(memory) - DATA_OFFSET:
        raise RemoteProtocolError(f"ring says {words[CAPACITY_WORD]} bytes, its segment has {len(memory) - DATA_OFFSET}")
    return words


class RingProducer:
    """The only writer of tail and data. Owned by one process; not thread-safe."""

    __slots__ = ("_capacity", "_claimed", "_data", "_data_words", "_full_at", "_mask", "_staged", "_words", "record_bytes_max")

    def __init__(self, memory: memoryview) -> None:
        self._words = _checked_words(memory)
        self._data = memory[DATA_OFFSET:]
        self._data_words = self._data.cast("Q")
        self._capacity = len(self._data)
        self._mask = self._capacity - 1
        # Where the staged bytes would meet the head as last seen: the head is read again only when they do.
        self._full_at = self._words[HEAD_WORD] + self._capacity
        self._staged = self._words[TAIL_WORD]  # end of what is committed; runs ahead of tail until publish()
        self._claimed = 0  # bytes of the open claim, 0: none
        # A record may use all of data, provided it starts at offset 0.
        self.record_bytes_max = self._capacity - RECORD_HEADER_BYTES

    def _reserve(self, length: int) -> int:
        """Index in data where a record of `length` payload bytes may stand, or -1 while there is no room."""
        need = (length + 15) & ~7
        staged = self._staged
        index = staged & self._mask
        room_to_end = self._capacity - index
        padding = room_to_end if need > room_to_end else 0
        if staged + padding + need > self._full_at:
            head = self._words[HEAD_WORD]
            if not 0 <= staged - head <= self._capacity:
                raise RemoteProtocolError(f"ring head {head} is impossible: tail is {staged}, capacity {self._capacity}")
            self._full_at = head + self._capacity
            if staged + padding + need > self._full_at:
                # All read, yet the record only fits at offset 0: skip to it, so that any record can pass in the end.
                if staged == head and padding and need <= self._capacity:
                    self._pad(index, padding)
                    self._words[TAIL_WORD] = self._staged
                if need > self._capacity:
                    raise LocalProtocolError(f"record of {length} bytes, at most {self.record_bytes_max} allowed in this ring")
                return -1
        if padding:
            self._pad(index, padding)
            index = 0
        return index

    def _pad(self, index: int, padding: int) -> None:
        self._data_words[index >> 3] = (PADDING << 32) | padding
        self._staged += padding

    def try_write(self, payload: bytes | bytearray | memoryview, tag: int = 0) -> bool:
        """Publish the whole payload as one record or nothing; False means full, come back next turn."""
        length = len(payload)
        staged = self._staged
        index = staged & self._mask
        end = index + length + RECORD_HEADER_BYTES
        if end > self._capacity or staged + length + 15 > self._full_at:
            index = self._reserve(length)
            if index < 0:
                return False
            staged = self._staged
            end = index + length + RECORD_HEADER_BYTES
        self._data[index + RECORD_HEADER_BYTES : end] = payload
        self._data_words[index >> 3] = (tag << 32) | length if tag else length
        # The cursor last: the bytes are in place before they count.
        self._words[TAIL_WORD] = self._staged = staged + ((length + 15) & ~7)
        return True

    def try_stage(self, payload: bytes | bytearray | memoryview, tag: int = 0) -> bool:
        """Like try_write, but unseen by the reader until publish(): many records, one store of the cursor."""
        memory = self.claim(len(payload))
        if memory is None:
            return False
        memory[:] = payload
        self._stage_claimed(tag)
        return True

    def claim(self, length: int) -> memoryview | None:
        """Memory for a payload of `length` bytes to be written in place, or None while full. Then commit() or abort()."""
        index = self._reserve(length)
        if index < 0:
            return None
        self._claimed = length
        start = index + RECORD_HEADER_BYTES
        return self._data[start : start + length]

    def commit(self, tag: int = 0) -> None:
        """End the claim and publish its record, and all staged before it."""
        self._stage_claimed(tag)
        self._words[TAIL_WORD] = self._staged

    def _stage_claimed(self, tag: int) -> None:
        self._data_words[(self._staged & self._mask) >> 3] = (tag << 32) | self._claimed
        self._staged += (self._claimed + 15) & ~7
        self._claimed = 0

    @property
    def bytes_written(self) -> int:
        """Since the ring was made, record headers and padding counted."""
        return self._staged

    def abort(self) -> None:
        """End the claim and write nothing."""
        self._claimed = 0

    def publish(self) -> None:
        """Show the reader everything staged."""
        self._words[TAIL_WORD] = self._staged

    def take_sleeping(self) -> bool:
        """True when the consumer sleeps and this call took on ringing its doorbell. After publishing, never before."""
        if self._words[SLEEPING_WORD]:
            self._words[SLEEPING_WORD] = 0
            return True
        return False


class RingConsumer:
    """The only writer of head. Owned by one process; not thread-safe."""

    __slots__ = ("_capacity", "_data", "_data_words", "_mask", "_viewed", "_words", "head")

    def __init__(self, memory: memoryview) -> None:
        self._words = _checked_words(memory)
        self._data = memory[DATA_OFFSET:]
        self._data_words = self._data.cast("Q")
        self._capacity = len(self._data)
        self._mask = self._capacity - 1
        self.head = self._words[HEAD_WORD]  # bytes read; runs ahead of the shared cursor within a batch
        self._viewed = 0  # bytes of ring under the open view, 0: none

    def poll(
        self, handler: Callable[[memoryview], None], limit: int, tagged: Callable[[memoryview, int], None] | None = None
    ) -> int:
        """Hand up to `limit` records to handler(payload), those with a tag to tagged(payload, tag), and free them; how many.

        The payload is a view into the ring, good until the handler returns or polls this ring again. A record counts as
        read even when its handler raises.
        """
        words = self._words
        tail = words[TAIL_WORD]
        if tail == self.head:
            return 0
        count = 0
        data = self._data
        data_words = self._data_words
        mask = self._mask
        try:
            while count < limit:
                head = self.head
                if head >= tail:  # beyond it only when a handler polled this ring itself
                    break
                index = head & mask
                length = data_words[index >> 3]
                if length > LENGTH_MASK:
                    count += self._take_tagged(length, index, tail, tagged)
                    continue
                end = index + RECORD_HEADER_BYTES + length
                if end > self._capacity or head + length + RECORD_HEADER_BYTES > tail:
                    raise self._does_not_fit(length, tail)
                self.head = head + ((length + 15) & ~7)
                handler(data[index + RECORD_HEADER_BYTES : end])
                count += 1
        finally:
            words[HEAD_WORD] = self.head
        if not count and tail != self.head:
            raise RemoteProtocolError(f"ring tail {tail} is impossible: head is {self.head}, capacity {self._capacity}")
        return count

    def skip_all(self) -> None:
        """Count everything published as read; a poll() under way ends with its present record."""
        self.head = self._words[TAIL_WORD]

    def _take_tagged(self, word: int, index: int, tail: int, tagged: Callable[[memoryview, int], None] | None) -> int:
        """Hand out a record with a tag, or step over padding; how many records that was."""
        length, tag = word & LENGTH_MASK, word >> 32
        end = index + RECORD_HEADER_BYTES + length
        if tag == PADDING:
            self._skip_padding(index, length)
            return 0
        if end > self._capacity or self.head + length + RECORD_HEADER_BYTES > tail:
            raise self._does_not_fit(length, tail)
        if tagged is None:
            raise RemoteProtocolError(f"record with tag {tag}, where none is known")
        self.head += (length + 15) & ~7
        tagged(self._data[index + RECORD_HEADER_BYTES : end], tag)
        return 1

    def _skip_padding(self, index: int, length: int) -> None:
        if length != self._capacity - index:
            raise RemoteProtocolError(f"padding of {length} bytes at {index}, {self._capacity - index} expected")
        self.head += length

    def _does_not_fit(self, length: int, tail: int) -> RemoteProtocolError:
        return RemoteProtocolError(f"record of {length} bytes at {self.head} does not fit the ring's tail {tail}")

    def view(self) -> memoryview | None:
        """The next record's payload in place, or None when empty. Then release()."""
        while True:
            head = self.head
            tail = self._words[TAIL_WORD]
            if tail == head:
                self._words[HEAD_WORD] = head  # padding may have been skipped
                return None
            index = head & self._mask
            word = self._data_words[index >> 3]
            length = word & LENGTH_MASK
            if word >> 32 == PADDING:
                self._skip_padding(index, length)
                continue
            end = index + RECORD_HEADER_BYTES + length
            if end > self._capacity or not length + RECORD_HEADER_BYTES <= tail - head <= self._capacity:
                raise self._does_not_fit(length, tail)
            break
        self._viewed = (length + 15) & ~7
        return self._data[index + RECORD_HEADER_BYTES : end]

    def release(self) -> None:
        """Give the viewed record's bytes back to the producer; the view must not be used after this."""
        self.head += self._viewed
        self._viewed = 0
        self._words[HEAD_WORD] = self.head

    def try_read(self) -> bytes | None:
        """A copy of the next record's payload, or None when empty."""
        view = self.view()
        if view is None:
            return None
        payload = bytes(view)
        self.release()
        return payload

    def is_empty(self) -> bool:
        """Whether the producer has published nothing that is unread."""
        return bool(self._words[TAIL_WORD] == self.head)

    def set_sleeping(self, sleeping: bool) -> None:
        """Ask for the doorbell, or say that no ring is needed. Before parking: set, fence_all(), is_empty()."""
        self._words[SLEEPING_WORD] = sleeping
