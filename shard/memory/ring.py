"""A ring of records in shared memory: one process writes, one process reads, neither ever waits.

    offset  size  field     written by  meaning
         0     8  magic     creator     MAGIC, stored last; whoever attaches refuses anything else
         8     8  capacity  creator     bytes in data, a power of two
        16     8  version   creator     VERSION of this table, and of what a connection puts beside
                                        it (control_channel.py)
        24     8  incarnation creator   which life of the ring's maker this ring belongs to; who
                                        attaches may ask for one
       128     8  tail      producer    bytes written since creation
       256     8  head      consumer    bytes read since creation
       384     8  sleeping  both        1: the consumer is about to park and wants its doorbell
                                        rung; whoever rings puts 0
       512   ...  data      producer    [head, tail) belongs to the consumer, the rest to the
                                        producer

A record is contiguous, so that the reader can be handed a view, and starts at a multiple of 8:

         0    4  length   bytes of payload (a padding record: bytes to skip, header and all)
         4    4  tag      chosen by the layer above, below PADDING; PADDING marks the unused end of
                          data before a wrap
         8  ...  payload

Invariant: head <= tail <= head + capacity. Cursors only grow; data is indexed by cursor & (capacity
- 1).

Length and tag are one 8-byte word, stored through `memoryview.cast("Q")`, and so are the cursors;
never through `struct.pack_into`, which zeroes a field before it fills it, so that the other process
now and then reads a cursor of 0. What the order of these stores relies on stands in
memory_order.py. The three fields lie two cache lines apart, and each side reads the other's only
when its cached copy says full or empty.

Whoever holds an end owns it alone. A ring whose cursors or lengths make no sense was broken by its
peer: the end raises RemoteProtocolError naming that peer, never reads or writes outside the
segment, and is quarantined: every later call raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shard.errors import LocalProtocolError, RemoteProtocolError, ShardError

# What bounds a batch in time: a clock, the time at which no further piece of work begins, and after
# how many pieces to look.
Pace = Callable[[], tuple[Callable[[], float], float, int]]

MAGIC = 0x31474E4952435250  # "PRCRING1", little-endian
VERSION = 3
MAGIC_WORD, CAPACITY_WORD, VERSION_WORD, INCARNATION_WORD = 0, 1, 2, 3
TAIL_WORD, HEAD_WORD, SLEEPING_WORD, DATA_OFFSET = 16, 32, 48, 512
# two lines: processors fetch them in pairs
assert HEAD_WORD - TAIL_WORD == SLEEPING_WORD - HEAD_WORD == 128 // 8

RECORD_HEADER_BYTES = 8
LENGTH_MASK = 0xFFFFFFFF
PADDING = 0xFFFFFFFF
CAPACITY_BYTES_MIN = 64
CAPACITY_BYTES_MAX = 1 << 30  # lengths are 32 bits wide, with room to spare
# A cursor beyond it is no cursor: at 100 GB/s a ring gets there in three years, and has as much
# room again before 64 bits end.
CURSOR_MAX = 1 << 63


def capacity_for(wanted_bytes: int) -> int:
    """The smallest allowed capacity that holds `wanted_bytes`: a power of two within the bounds
    above.
    """
    if not 0 < wanted_bytes <= CAPACITY_BYTES_MAX:
        raise LocalProtocolError(
            f"ring capacity of {wanted_bytes} bytes, 1 to {CAPACITY_BYTES_MAX} allowed"
        )
    return max(CAPACITY_BYTES_MIN, 1 << (wanted_bytes - 1).bit_length())


def format_ring(memory: memoryview, capacity_bytes: int, incarnation: int = 0) -> None:
    """Lay out a new ring in zeroed `memory` of DATA_OFFSET + capacity_bytes bytes."""
    if (
        capacity_bytes != capacity_for(capacity_bytes)
        or len(memory) != DATA_OFFSET + capacity_bytes
    ):
        raise LocalProtocolError(
            f"{len(memory)} bytes of memory cannot hold a ring of {capacity_bytes}"
        )
    words = memory.cast("Q")
    words[CAPACITY_WORD] = capacity_bytes
    words[VERSION_WORD] = VERSION
    words[INCARNATION_WORD] = incarnation
    words[TAIL_WORD] = words[HEAD_WORD] = words[SLEEPING_WORD] = 0
    words[MAGIC_WORD] = MAGIC  # last: whoever sees it sees a finished ring


def _checked_words(memory: memoryview, peer: str, incarnation: int | None) -> memoryview:
    if len(memory) < DATA_OFFSET + CAPACITY_BYTES_MIN or len(memory) % 8:
        raise RemoteProtocolError(
            f"{len(memory)} bytes of memory are too few for a ring with {peer}"
        )
    words = memory.cast("Q")
    if words[MAGIC_WORD] != MAGIC:
        raise RemoteProtocolError(
            f"not a ring with {peer}: magic {words[MAGIC_WORD]:#x}, {MAGIC:#x} expected"
        )
    if words[VERSION_WORD] != VERSION:
        raise RemoteProtocolError(
            f"ring with {peer} has layout {words[VERSION_WORD]}, {VERSION} expected: "
            "use one release on both sides"
        )
    capacity = words[CAPACITY_WORD]
    if capacity != len(memory) - DATA_OFFSET or capacity & (capacity - 1):
        raise RemoteProtocolError(
            f"ring with {peer} says {capacity} bytes, its segment has {len(memory) - DATA_OFFSET}"
        )
    if incarnation is not None and words[INCARNATION_WORD] != incarnation:
        raise RemoteProtocolError(
            f"ring with {peer} is of incarnation {words[INCARNATION_WORD]}, "
            f"{incarnation} expected: it is stale"
        )
    tail, head = words[TAIL_WORD], words[HEAD_WORD]
    if not 0 <= tail - head <= capacity or (tail | head) & 7 or tail > CURSOR_MAX:
        raise RemoteProtocolError(
            f"ring with {peer} has tail {tail}, head {head}, capacity {capacity}: "
            "they do not go together"
        )
    return words


# What a quarantined consumer looks at in place of its ring: a record that can never fit, so that
# each call comes to the check.
_BROKEN_WORDS = memoryview(bytearray(DATA_OFFSET)).cast("Q")
_BROKEN_WORDS[TAIL_WORD] = (1 << 64) - 1


class _End:
    """What both ends have: the mapped ring, whose other end it is, and what broke it."""

    __slots__ = ("_capacity", "_data", "_data_words", "_mask", "_words", "broken", "peer")

    def __init__(self, memory: memoryview, peer: str, incarnation: int | None) -> None:
        self._words = _checked_words(memory, peer, incarnation)
        self._data = memory[DATA_OFFSET:]
        self._data_words = self._data.cast("Q")
        self._capacity = len(self._data)
        self._mask = self._capacity - 1
        self.peer = peer
        self.broken: ShardError | None = None  # set once: the end is quarantined

    def quarantine(self, error: ShardError) -> ShardError:
        """From now on every use of this end raises `error`, which is returned;
        the first one stays.
        """
        if self.broken is None:
            self.broken = error
        # a traceback grows with each raise, and keeps the frames it went through
        return self.broken.with_traceback(None)

    def _break(self, reason: str) -> ShardError:
        return self.quarantine(
            self.broken or RemoteProtocolError(f"{self.peer} broke the ring: {reason}")
        )


class RingProducer(_End):
    """The only writer of tail and data. Owned by one process; not thread-safe."""

    __slots__ = ("_claimed", "_full_at", "_staged", "full_count", "record_bytes_max")

    def __init__(
        self, memory: memoryview, peer: str = "the reader", incarnation: int | None = None
    ) -> None:
        """Attach to the ring in `memory`; `incarnation` is checked when given. Raises
        RemoteProtocolError.
        """
        super().__init__(memory, peer, incarnation)
        # Where the staged bytes would meet the head as last seen: the head is read again only when
        # they do.
        self._full_at = self._words[HEAD_WORD] + self._capacity
        # end of what is committed; runs ahead of tail until publish()
        self._staged = self._words[TAIL_WORD]
        self._claimed = 0  # bytes of the open claim, 0: none
        self.full_count = 0  # how often a record found no room
        # A record may use all of data, provided it starts at offset 0.
        self.record_bytes_max = self._capacity - RECORD_HEADER_BYTES

    def quarantine(self, error: ShardError) -> ShardError:
        self._full_at = -1  # looks full for ever: each write comes to _reserve(), which raises
        return super().quarantine(error)

    def _reserve(self, length: int) -> int:
        """Index in data where a record of `length` payload bytes may stand, or -1 while there is no
        room.
        """
        need = (length + 15) & ~7
        staged = self._staged
        index = staged & self._mask
        room_to_end = self._capacity - index
        padding = room_to_end if need > room_to_end else 0
        if staged + padding + need > self._full_at:
            self._check_whole()
            head = self._words[HEAD_WORD]
            if not 0 <= staged - head <= self._capacity:
                raise self._break(
                    f"its head {head} is impossible where the tail is {staged} and the capacity "
                    f"{self._capacity}"
                )
            self._full_at = head + self._capacity
            if staged + padding + need > self._full_at:
                # All read, yet the record only fits at offset 0: skip to it, so that any record can
                # pass in the end.
                if staged == head and padding and need <= self._capacity:
                    self._pad(index, padding)
                    self._words[TAIL_WORD] = self._staged
                if need > self._capacity:
                    raise LocalProtocolError(
                        f"record of {length} bytes, at most {self.record_bytes_max} allowed in "
                        "this ring"
                    )
                self.full_count += 1
                return -1
        if padding:
            self._pad(index, padding)
            index = 0
        return index

    def _check_whole(self) -> None:
        if self.broken is not None:
            raise self.quarantine(self.broken)

    def _pad(self, index: int, padding: int) -> None:
        self._data_words[index >> 3] = (PADDING << 32) | padding
        self._staged += padding
        # failpoint: ring.after_padding

    def try_write(self, payload: bytes | bytearray | memoryview, tag: int = 0) -> bool:
        """Publish the whole payload as one record or nothing; False means full, come back next
        turn.
        """
        length = len(payload)
        need = (length + 15) & ~7
        index = self._staged & self._mask
        start = index + RECORD_HEADER_BYTES
        after = self._staged + need
        if start + length > self._capacity or after > self._full_at:
            index = self._reserve(length)
            if index < 0:
                return False
            start = index + RECORD_HEADER_BYTES
            after = self._staged + need
        # failpoint: ring.claimed
        self._data[start : start + length] = payload
        # failpoint: ring.after_payload
        self._data_words[index >> 3] = (tag << 32) | length if tag else length
        # failpoint: ring.after_length
        # The cursor last: the bytes are in place before they count.
        self._words[TAIL_WORD] = self._staged = after
        # failpoint: ring.after_tail
        return True

    def try_write_many(self, payloads: Sequence[bytes | bytearray | memoryview]) -> int:
        """Publish as many of the payloads as fit, in order, a record each, with one store of the
        cursor; how many.
        """
        data, data_words, capacity, mask = self._data, self._data_words, self._capacity, self._mask
        count = 0
        staged = self._staged
        try:
            for payload in payloads:
                length = len(payload)
                index = staged & mask
                end = index + length + RECORD_HEADER_BYTES
                if end > capacity or staged + length + 15 > self._full_at:
                    self._staged = staged
                    index = self._reserve(length)
                    staged = self._staged  # past a padding record
                    if index < 0:
                        break
                    end = index + length + RECORD_HEADER_BYTES
                # failpoint: ring.claimed
                data[index + RECORD_HEADER_BYTES : end] = payload
                # failpoint: ring.after_payload
                data_words[index >> 3] = length
                # failpoint: ring.after_length
                staged += (length + 15) & ~7
                count += 1
        finally:
            self._words[TAIL_WORD] = self._staged = staged
        # failpoint: ring.after_tail
        return count

    def try_stage(self, payload: bytes | bytearray | memoryview, tag: int = 0) -> bool:
        """Like try_write, but unseen by the reader until publish(): many records, one store of the
        cursor.
        """
        memory = self.claim(len(payload))
        if memory is None:
            return False
        memory[:] = payload
        self._stage_claimed(tag)
        return True

    def claim(self, length: int) -> memoryview | None:
        """Memory for a payload of `length` bytes to be written in place, or None while full. Then
        commit() or abort().
        """
        index = self._reserve(length)
        if index < 0:
            return None
        self._claimed = length
        # failpoint: ring.claimed
        start = index + RECORD_HEADER_BYTES
        return self._data[start : start + length]

    def commit(self, tag: int = 0) -> None:
        """End the claim and publish its record, and all staged before it."""
        self._check_whole()
        self._stage_claimed(tag)
        self._words[TAIL_WORD] = self._staged
        # failpoint: ring.after_tail

    def _stage_claimed(self, tag: int) -> None:
        # failpoint: ring.after_payload
        self._data_words[(self._staged & self._mask) >> 3] = (tag << 32) | self._claimed
        # failpoint: ring.after_length
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
        self._check_whole()
        self._words[TAIL_WORD] = self._staged
        # failpoint: ring.after_tail

    def take_sleeping(self) -> bool:
        """True when the consumer sleeps and this call took on ringing its doorbell. After
        publishing, never before.
        """
        if self._words[SLEEPING_WORD]:
            self._words[SLEEPING_WORD] = 0
            return True
        return False


class RingConsumer(_End):
    """The only writer of head. Owned by one process; not thread-safe."""

    __slots__ = ("_viewed", "head", "was_cut")

    def __init__(
        self, memory: memoryview, peer: str = "the writer", incarnation: int | None = None
    ) -> None:
        """Attach to the ring in `memory`; `incarnation` is checked when given. Raises
        RemoteProtocolError.
        """
        super().__init__(memory, peer, incarnation)
        # bytes read; runs ahead of the shared cursor within a batch
        self.head = self._words[HEAD_WORD]
        # a poll() ended for want of time, with records left; the owner takes it back
        self.was_cut = False
        self._viewed = 0  # bytes of ring under the open view, 0: none

    def quarantine(self, error: ShardError) -> ShardError:
        self._words, self._data_words = _BROKEN_WORDS, _BROKEN_WORDS[:1]
        self._mask, self._capacity = 0, -1  # no record fits: each read comes to _does_not_fit()
        return super().quarantine(error)

    def poll(
        self,
        handler: Callable[[memoryview], None],
        limit: int,
        tagged: Callable[[memoryview, int], None] | None = None,
        pace: Pace | None = None,
    ) -> int:
        """Hand up to `limit` records to handler(payload), those with a tag to tagged(payload, tag),
        and free them; how many.

        pace: asked after the first of several; `was_cut` says that there was no time for the rest.

        The payload is a view into the ring, good until the handler returns or polls this ring
        again. A record counts as read even when its handler raises.
        """
        words = self._words
        tail = words[TAIL_WORD]
        head = self.head
        if tail == head:
            return 0
        # One record without a tag and nothing behind it, as calls one at a time bring it: all that
        # follows is for more of them. A word with a tag is larger than any distance to the tail,
        # and a tail that is right for a record that fits is no impossible one.
        index = head & self._mask
        start = index + RECORD_HEADER_BYTES
        length = self._data_words[index >> 3]
        end = start + length
        if head + ((length + 15) & ~7) == tail and end <= self._capacity and limit:
            self.head = tail
            try:
                # failpoint: ring.before_handler
                handler(self._data[start:end])
                # failpoint: ring.after_handler
            finally:
                words[HEAD_WORD] = self.head
            # failpoint: ring.after_head
            return 1
        if not 0 < tail - head <= self._capacity:
            raise self._impossible(tail)
        data, data_words, mask = self._data, self._data_words, self._mask
        count = 0
        look_at = limit if pace is None else 1
        every = 0
        try:
            while count < limit:
                index = head & mask
                length = data_words[index >> 3]
                if length > LENGTH_MASK:
                    count += self._take_tagged(length, index, tail, tagged)
                else:
                    end = index + RECORD_HEADER_BYTES + length
                    if end > self._capacity or head + length + RECORD_HEADER_BYTES > tail:
                        raise self._does_not_fit(length, tail)
                    self.head = head + ((length + 15) & ~7)
                    # failpoint: ring.before_handler
                    handler(data[index + RECORD_HEADER_BYTES : end])
                    # failpoint: ring.after_handler
                    count += 1
                head = self.head
                if head >= tail:  # beyond it only when a handler polled this ring itself
                    break
                if count >= look_at and pace is not None:
                    if not every:
                        clock, until, every = pace()
                    if clock() >= until:
                        self.was_cut = True
                        break
                    look_at = count + every
        finally:
            words[HEAD_WORD] = self.head
        # failpoint: ring.after_head
        return count

    def read_many(self, limit: int) -> list[bytes]:
        """Copies of the next records' payloads, `limit` at most, and one store of the cursor for
        all; [] when empty.
        """
        words = self._words
        tail = words[TAIL_WORD]
        head = self.head
        payloads: list[bytes] = []
        if tail == head:
            return payloads
        if not 0 < tail - head <= self._capacity:
            raise self._impossible(tail)
        data, data_words, capacity, mask = self._data, self._data_words, self._capacity, self._mask
        try:
            while limit and head < tail:
                index = head & mask
                length = data_words[index >> 3]
                if length > LENGTH_MASK:
                    tag, length = length >> 32, length & LENGTH_MASK
                    if tag == PADDING:
                        self.head = head
                        self._skip_padding(index, length, tail)
                        head = self.head
                        continue
                end = index + RECORD_HEADER_BYTES + length
                if end > capacity or head + length + RECORD_HEADER_BYTES > tail:
                    self.head = head
                    raise self._does_not_fit(length, tail)
                # failpoint: ring.before_handler
                payloads.append(data[index + RECORD_HEADER_BYTES : end].tobytes())
                # failpoint: ring.after_handler
                head += (length + 15) & ~7
                limit -= 1
        finally:
            words[HEAD_WORD] = self.head = head
        # failpoint: ring.after_head
        return payloads

    def free(self) -> None:
        """Count as read what was handed out so far, of a handler that is not done, too: its payload
        is good no longer.
        """
        self._words[HEAD_WORD] = self.head

    def skip_all(self) -> None:
        """Count everything published as read; a poll() under way ends with its present record.
        Raises nothing: a ring that turns out to be broken is quarantined, and that poll() raises.
        """
        tail = self._words[TAIL_WORD]
        if 0 <= tail - self.head <= self._capacity:
            self.head = tail
        else:
            self._impossible(tail)

    def _take_tagged(
        self, word: int, index: int, tail: int, tagged: Callable[[memoryview, int], None] | None
    ) -> int:
        """Hand out a record with a tag, or step over padding; how many records that was."""
        length, tag = word & LENGTH_MASK, word >> 32
        end = index + RECORD_HEADER_BYTES + length
        if tag == PADDING:
            self._skip_padding(index, length, tail)
            return 0
        if end > self._capacity or self.head + length + RECORD_HEADER_BYTES > tail:
            raise self._does_not_fit(length, tail)
        if tagged is None:
            raise self._break(f"a record has tag {tag}, where none is known")
        self.head += (length + 15) & ~7
        # failpoint: ring.before_handler
        tagged(self._data[index + RECORD_HEADER_BYTES : end], tag)
        # failpoint: ring.after_handler
        return 1

    def _skip_padding(self, index: int, length: int, tail: int) -> None:
        if length != self._capacity - index:
            raise self._break(
                f"padding of {length} bytes at {index}, {self._capacity - index} expected"
            )
        # else padding after padding could be skipped for ever
        if not length <= tail - self.head <= self._capacity:
            raise self._does_not_fit(length, tail)
        self.head += length

    def _does_not_fit(self, length: int, tail: int) -> ShardError:
        return self._break(
            f"a record of {length} bytes at {self.head} does not fit the tail {tail}"
        )

    def _impossible(self, tail: int) -> ShardError:
        return self._break(
            f"its tail {tail} is impossible where the head is {self.head}, "
            f"capacity {self._capacity}"
        )

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
                self._skip_padding(index, length, tail)
                continue
            end = index + RECORD_HEADER_BYTES + length
            if (
                end > self._capacity
                or not length + RECORD_HEADER_BYTES <= tail - head <= self._capacity
            ):
                raise self._does_not_fit(length, tail)
            break
        self._viewed = (length + 15) & ~7
        # failpoint: ring.before_handler
        return self._data[index + RECORD_HEADER_BYTES : end]

    def release(self) -> None:
        """Give the viewed record's bytes back to the producer; the view must not be used after
        this.
        """
        # failpoint: ring.after_handler
        self.head += self._viewed
        self._viewed = 0
        self._words[HEAD_WORD] = self.head
        # failpoint: ring.after_head

    def try_read(self) -> bytes | None:
        """A copy of the next record's payload, or None when empty."""
        view = self.view()
        if view is None:
            return None
        payload = view.tobytes()
        self.release()
        return payload

    def is_empty(self) -> bool:
        """Whether the producer has published nothing that is unread."""
        return bool(self._words[TAIL_WORD] == self.head)

    def set_sleeping(self, sleeping: bool) -> None:
        """Ask for the doorbell, or say that no ring is needed. Before parking: set, fence_all(),
        is_empty().
        """
        self._words[SLEEPING_WORD] = sleeping
