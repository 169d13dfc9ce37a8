"""Any sequence of a ring's verbs, against a queue that holds the same records and knows the room to
the byte.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shard import RingConsumer, RingProducer
from shard.memory.ring import DATA_OFFSET, HEAD_WORD, PADDING, TAIL_WORD, format_ring
from tests.examples import examples

CAPACITY = 128
tags = st.one_of(st.just(0), st.integers(1, PADDING - 1))
payloads = st.one_of(st.binary(max_size=24), st.binary(max_size=CAPACITY - 8))
limits = st.integers(0, 9)

Record = tuple[bytes, int]  # payload and tag


class RingMachine(RuleBasedStateMachine):
    """`published` is what the reader may see, `staged` what it may not yet; `claimed` is the open
    claim's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        memory = memoryview(bytearray(DATA_OFFSET + CAPACITY))
        format_ring(memory, CAPACITY)
        self.words = memory.cast("Q")
        self.producer = RingProducer(memory)
        self.consumer = RingConsumer(memory)
        self.published: deque[Record] = deque()
        self.staged: list[Record] = []
        self.claimed: memoryview | None = None
        self.refused = 0

    # -- what the ring must answer -----------------------------------------------------------------

    def has_room(self, length: int) -> bool:
        """Whether a record of this length fits from where the producer stands to where the reader
        is: contiguous, or after padding to the end of data."""
        need = (length + 15) // 8 * 8
        at = self.producer.bytes_written
        to_end = CAPACITY - at % CAPACITY
        padding = to_end if need > to_end else 0
        return bool(at + padding + need - self.words[HEAD_WORD] <= CAPACITY)

    def refuse(self) -> None:
        self.refused += 1

    def publish_staged(self) -> None:
        self.published.extend(self.staged)
        self.staged.clear()

    # -- the producer's verbs ----------------------------------------------------------------------

    @precondition(lambda self: self.claimed is None)
    @rule(payload=payloads, tag=tags)
    def write(self, payload: bytes, tag: int) -> None:
        fits = self.has_room(len(payload))
        assert self.producer.try_write(payload, tag) == fits
        if fits:
            self.publish_staged()
            self.published.append((payload, tag))
        else:
            self.refuse()

    @precondition(lambda self: self.claimed is None)
    @rule(batch=st.lists(payloads, max_size=6))
    def write_many(self, batch: list[bytes]) -> None:
        count = self.producer.try_write_many(batch)
        self.publish_staged()
        self.published.extend((payload, 0) for payload in batch[:count])
        if count < len(batch):
            assert not self.has_room(len(batch[count])), (
                "it stopped where the next one did not fit, and not before"
            )
            self.refuse()

    @precondition(lambda self: self.claimed is None)
    @rule(payload=payloads, tag=tags)
    def stage(self, payload: bytes, tag: int) -> None:
        fits = self.has_room(len(payload))
        assert self.producer.try_stage(payload, tag) == fits
        if fits:
            self.staged.append((payload, tag))
        else:
            self.refuse()

    @precondition(lambda self: self.claimed is None)
    @rule(length=st.integers(0, CAPACITY - 8))
    def claim(self, length: int) -> None:
        fits = self.has_room(length)
        self.claimed = self.producer.claim(length)
        assert (self.claimed is not None) == fits
        if self.claimed is None:
            self.refuse()
        else:
            assert len(self.claimed) == length

    @precondition(lambda self: self.claimed is not None)
    @rule(byte=st.integers(0, 255), tag=tags)
    def commit(self, byte: int, tag: int) -> None:
        assert self.claimed is not None
        payload = bytes([byte]) * len(self.claimed)
        self.claimed[:] = payload
        self.claimed = None
        self.producer.commit(tag)
        self.publish_staged()
        self.published.append((payload, tag))

    @precondition(lambda self: self.claimed is not None)
    @rule(byte=st.integers(0, 255))
    def abort(self, byte: int) -> None:
        assert self.claimed is not None
        self.claimed[:] = bytes([byte]) * len(self.claimed)
        self.claimed = None
        self.producer.abort()

    @precondition(lambda self: self.claimed is None)
    @rule()
    def publish(self) -> None:
        self.producer.publish()
        self.publish_staged()

    # -- the consumer's ----------------------------------------------------------------------------

    @rule()
    def read(self) -> None:
        expected = self.published.popleft()[0] if self.published else None
        assert self.consumer.try_read() == expected

    @rule(limit=limits)
    def read_many(self, limit: int) -> None:
        expected = [self.published.popleft()[0] for _ in range(min(limit, len(self.published)))]
        assert self.consumer.read_many(limit) == expected

    @rule(limit=limits)
    def poll(self, limit: int) -> None:
        seen: list[Record] = []
        count = self.consumer.poll(
            lambda view: seen.append((bytes(view), 0)),
            limit,
            lambda view, tag: seen.append((bytes(view), tag)),
        )
        expected = [self.published.popleft() for _ in range(min(limit, len(self.published)))]
        assert seen == expected
        assert count == len(expected)

    @rule(takes=st.booleans())
    def view(self, takes: bool) -> None:
        view = self.consumer.view()
        assert (None if view is None else bytes(view)) == (
            self.published[0][0] if self.published else None
        )
        if takes and view is not None:
            self.consumer.release()
            self.published.popleft()

    @rule()
    def skip_all(self) -> None:
        self.consumer.skip_all()
        self.published.clear()

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def cursors_keep_the_order_that_the_table_promises(self) -> None:
        tail, head = self.words[TAIL_WORD], self.words[HEAD_WORD]
        assert head <= self.consumer.head <= tail <= self.producer.bytes_written <= head + CAPACITY
        assert (tail | head) % 8 == 0

    @invariant()
    def refusals_are_counted(self) -> None:
        assert self.producer.full_count == self.refused

    @invariant()
    def it_is_empty_only_when_nothing_is_published(self) -> None:
        if self.consumer.is_empty():
            assert not self.published

    def teardown(self) -> None:
        """Whatever happened: once all is read, a record of the whole capacity passes."""
        if self.claimed is not None:
            self.producer.abort()
        self.producer.publish()
        self.publish_staged()
        self.consumer.read_many(len(self.published))
        assert self.consumer.try_read() is None
        largest = bytes(range(self.producer.record_bytes_max))
        assert self.producer.try_write(largest) or self.consumer.try_read() is None
        assert not self.consumer.is_empty() or self.producer.try_write(largest)
        assert self.consumer.try_read() == largest


TestAnySequenceOfVerbs = RingMachine.TestCase
TestAnySequenceOfVerbs.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None
)
