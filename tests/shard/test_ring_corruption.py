"""What a broken or hostile peer can do to the other end of a ring: be found out and named, and
nothing else.

A ring has no checksum: a flipped bit of a payload, or a length that still fits, is data to it, and
for the layers above to notice. What it promises is that no field, whatever it holds, makes an end
read or write outside the ring, hang, or raise anything but RemoteProtocolError; and that an end
which raised that raises it ever after.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard import RemoteProtocolError, RingConsumer, RingProducer
from shard.memory.ring import (
    CAPACITY_WORD,
    CURSOR_MAX,
    DATA_OFFSET,
    HEAD_WORD,
    INCARNATION_WORD,
    MAGIC_WORD,
    PADDING,
    SLEEPING_WORD,
    TAIL_WORD,
    VERSION,
    VERSION_WORD,
    format_ring,
)

CAPACITY = 256
PEER = "shard 7 (incarnation 3)"
INCARNATION = 3
WORD_MAX = (1 << 64) - 1
FIRST_RECORD = DATA_OFFSET // 8


def make_memory(capacity: int = CAPACITY) -> memoryview:
    memory = memoryview(bytearray(DATA_OFFSET + capacity))
    format_ring(memory, capacity, INCARNATION)
    return memory


def make_ring(capacity: int = CAPACITY) -> tuple[RingProducer, RingConsumer, memoryview]:
    memory = make_memory(capacity)
    return RingProducer(memory, PEER), RingConsumer(memory, PEER), memory.cast("Q")


def named(reason: str) -> str:
    """What an error about PEER must say, as a regular expression."""
    return rf"shard 7 \(incarnation 3\).*{reason}"


# -- before an end attaches ------------------------------------------------------------------------


@pytest.mark.parametrize("attach", [RingProducer, RingConsumer])
@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [
        (MAGIC_WORD, 0, "magic 0x0, 0x31474e4952435250 expected"),
        (MAGIC_WORD, WORD_MAX, "magic 0xf{16}"),
        (
            VERSION_WORD,
            VERSION + 1,
            f"layout {VERSION + 1}, {VERSION} expected: use one release on both sides",
        ),
        (CAPACITY_WORD, 0, "says 0 bytes, its segment has 256"),
        (CAPACITY_WORD, CAPACITY // 2, "says 128 bytes, its segment has 256"),
        (CAPACITY_WORD, WORD_MAX, "its segment has 256"),
        (INCARNATION_WORD, INCARNATION - 1, "of incarnation 2, 3 expected: it is stale"),
        (TAIL_WORD, CAPACITY + 8, "tail 264, head 0, capacity 256"),
        (TAIL_WORD, 4, "tail 4, head 0"),
        (HEAD_WORD, 8, "tail 0, head 8"),
        (HEAD_WORD, WORD_MAX, "tail 0, head 18446744073709551615"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_with_what_is_wrong_and_whose_it_is(
    attach: type[RingProducer] | type[RingConsumer], word: int, value: int, reason: str
) -> None:
    memory = make_memory()
    memory.cast("Q")[word] = value
    with pytest.raises(RemoteProtocolError, match=named(reason)):
        attach(memory, PEER, INCARNATION)


@pytest.mark.parametrize("cursor", [4, CURSOR_MAX + 8, WORD_MAX - 7])
def test_cursors_that_no_ring_can_have_are_refused_even_when_they_agree(cursor: int) -> None:
    memory = make_memory()
    words = memory.cast("Q")
    words[TAIL_WORD] = words[HEAD_WORD] = cursor
    for attach in (RingProducer, RingConsumer):
        with pytest.raises(RemoteProtocolError, match=named("they do not go together")):
            attach(memory, PEER)


@pytest.mark.parametrize("size_bytes", [0, 8, DATA_OFFSET, DATA_OFFSET + 60])
def test_memory_too_small_for_any_ring_is_refused(size_bytes: int) -> None:
    with pytest.raises(
        RemoteProtocolError,
        match=f"{size_bytes} bytes of memory are too few for a ring with shard 7",
    ):
        RingConsumer(memoryview(bytearray(size_bytes)), PEER)


def test_a_segment_cut_short_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=named("says 256 bytes, its segment has 128")):
        RingConsumer(make_memory()[: DATA_OFFSET + 128], PEER)


def test_any_incarnation_will_do_for_an_end_that_asks_for_none() -> None:
    memory = make_memory()
    memory.cast("Q")[INCARNATION_WORD] = 99
    RingProducer(memory, PEER)


# -- after it --------------------------------------------------------------------------------------


def reading_verbs(consumer: RingConsumer) -> list[Callable[[], object]]:
    return [
        consumer.try_read,
        consumer.view,
        lambda: consumer.poll(lambda view: None, 8),
        lambda: consumer.poll(lambda view: None, 8, lambda view, tag: None),
        lambda: consumer.read_many(8),
    ]


def writing_verbs(producer: RingProducer) -> list[Callable[[], object]]:
    return [
        lambda: producer.try_write(b""),
        lambda: producer.try_write(b"x" * 100, tag=3),
        lambda: producer.try_write_many([b"x"]),
        lambda: producer.try_stage(b"x"),
        lambda: producer.claim(1),
        producer.commit,
        producer.publish,
    ]


def refuses_for_ever(verbs: list[Callable[[], object]], first: Exception) -> None:
    """Every verb, again and again, raises that same error, which does not grow with its
    traceback.
    """
    for _ in range(3):
        for verb in verbs:
            with pytest.raises(RemoteProtocolError) as caught:
                verb()
            assert caught.value is first
            assert len(traceback.extract_tb(caught.value.__traceback__)) < 8


BROKEN = [
    (FIRST_RECORD, 10_000, "a record of 10000 bytes at 0 does not fit the tail 16"),
    # in the ring, and beyond the tail
    (FIRST_RECORD, 200, "a record of 200 bytes at 0 does not fit"),
    (FIRST_RECORD, 9, "a record of 9 bytes at 0 does not fit the tail 16"),
    (FIRST_RECORD, (5 << 32) | 0xFFFFFFFF, "a record of 4294967295 bytes"),  # with a tag
    (FIRST_RECORD, (PADDING << 32) | 8, "padding of 8 bytes at 0, 256 expected"),
    (FIRST_RECORD, (PADDING << 32) | 100_000, "padding of 100000 bytes at 0"),
    # padding that would be skipped for ever
    (FIRST_RECORD, (PADDING << 32) | CAPACITY, "does not fit the tail 16"),
    (FIRST_RECORD, WORD_MAX, "padding of 4294967295 bytes at 0, 256 expected"),
    (TAIL_WORD, 1 << 40, ""),
    (TAIL_WORD, WORD_MAX, ""),
    (TAIL_WORD, 4, "does not fit the tail 4"),
]


@pytest.mark.parametrize("verb", range(5))
@pytest.mark.parametrize(("word", "value", "reason"), BROKEN)
def test_what_makes_no_sense_to_the_reader_is_named_and_the_end_quarantined(
    verb: int, word: int, value: int, reason: str
) -> None:
    producer, consumer, words = make_ring()
    assert producer.try_write(b"fine")
    words[word] = value
    verbs = reading_verbs(consumer)
    with pytest.raises(RemoteProtocolError, match=named("broke the ring: .*" + reason)) as caught:
        verbs[verb]()
    words[word] = 16 if word == TAIL_WORD else 4  # mended again: too late
    refuses_for_ever(verbs, caught.value)
    assert not consumer.is_empty(), "nobody falls asleep over it"
    assert consumer.head == 0, "what it read so far stays known"


@pytest.mark.parametrize("verb", range(5))
def test_a_tail_that_went_backward_is_found_by_every_reading_verb(verb: int) -> None:
    producer, consumer, words = make_ring()
    producer.try_write(b"fine")
    assert consumer.try_read() == b"fine"
    words[TAIL_WORD] = 0
    with pytest.raises(RemoteProtocolError, match=named("tail 0")):
        reading_verbs(consumer)[verb]()


def test_a_tag_nobody_asked_for_is_named() -> None:
    producer, consumer, _ = make_ring()
    producer.try_write(b"fine", tag=6)
    with pytest.raises(
        RemoteProtocolError, match=named("a record has tag 6, where none is known")
    ) as caught:
        consumer.poll(lambda view: None, 8)
    refuses_for_ever(reading_verbs(consumer), caught.value)


@pytest.mark.parametrize("head", [1 << 40, WORD_MAX, 48 + 8])
@pytest.mark.parametrize("verb", range(4))
def test_a_head_that_ran_ahead_is_found_by_the_producer_once_it_looks(verb: int, head: int) -> None:
    producer, _, words = make_ring(64)
    assert producer.try_write(b"x" * 40)
    words[HEAD_WORD] = head
    large = b"y" * 40
    verbs: list[Callable[[], object]] = [
        lambda: producer.try_write(large),
        lambda: producer.try_write_many([large]),
        lambda: producer.try_stage(large),
        lambda: producer.claim(len(large)),
    ]
    with pytest.raises(
        RemoteProtocolError, match=named(f"broke the ring: its head {head} is impossible")
    ) as caught:
        verbs[verb]()
    words[HEAD_WORD] = 48
    refuses_for_ever(writing_verbs(producer), caught.value)


def test_skip_all_does_not_follow_a_tail_that_makes_no_sense() -> None:
    _, consumer, words = make_ring()
    words[TAIL_WORD] = WORD_MAX
    consumer.skip_all()
    assert consumer.head == 0
    with pytest.raises(RemoteProtocolError, match=named("impossible")) as caught:
        consumer.try_read()
    consumer.skip_all()
    refuses_for_ever(reading_verbs(consumer), caught.value)


def test_a_ring_that_breaks_inside_a_handler_ends_the_poll_it_is_in() -> None:
    producer, consumer, words = make_ring()
    producer.try_write_many([b"1", b"2", b"3"])
    seen: list[bytes] = []

    def handler(view: memoryview) -> None:
        seen.append(bytes(view))
        words[TAIL_WORD] = WORD_MAX
        with pytest.raises(RemoteProtocolError):
            consumer.poll(handler, 8)

    with pytest.raises(RemoteProtocolError, match=named("impossible")):
        consumer.poll(handler, 8)
    assert seen == [b"1"]


# -- anything, anywhere, at any time ---------------------------------------------------------------

GUARD_BYTES = 128  # before and behind the ring: nobody writes there
GUARD = b"\xa5" * GUARD_BYTES
SMALL = 64
FIELDS = [
    MAGIC_WORD,
    CAPACITY_WORD,
    VERSION_WORD,
    INCARNATION_WORD,
    TAIL_WORD,
    HEAD_WORD,
    SLEEPING_WORD,
]
words_that_matter = st.one_of(
    st.sampled_from([TAIL_WORD, HEAD_WORD]),
    st.integers(FIRST_RECORD, FIRST_RECORD + SMALL // 8 - 1),
    st.sampled_from(FIELDS),
)
values = st.one_of(
    st.integers(0, 2 * SMALL),
    st.integers(0, SMALL).map(lambda length: (PADDING << 32) | length),
    st.integers(0, WORD_MAX),
)
lengths = st.integers(0, SMALL - 8)
steps = st.one_of(
    st.tuples(st.just("flip"), words_that_matter, st.integers(0, 63)),
    st.tuples(
        st.just("flip anywhere"),
        st.integers(0, DATA_OFFSET // 8 + SMALL // 8 - 1),
        st.integers(0, 63),
    ),
    st.tuples(st.just("put"), words_that_matter, values),
    st.tuples(
        st.sampled_from(["write", "write many", "stage", "claim", "abort"]),
        lengths,
        st.integers(0, 3),
    ),
    st.tuples(st.sampled_from(["publish", "take sleeping"]), st.just(0), st.just(0)),
    st.tuples(
        st.sampled_from(["read", "read many", "poll", "view", "skip"]),
        st.integers(0, 5),
        st.just(0),
    ),
)


class Damaged:
    """A ring that lies between two guards, both of its ends, and what each of them may still do."""

    def __init__(self) -> None:
        self.whole = bytearray(GUARD + bytes(DATA_OFFSET + SMALL) + GUARD)
        memory = memoryview(self.whole)[GUARD_BYTES : GUARD_BYTES + DATA_OFFSET + SMALL]
        format_ring(memory, SMALL)
        self.words = memory.cast("Q")
        self.producer = RingProducer(memory, PEER)
        self.consumer = RingConsumer(memory, PEER)
        self.errors: dict[RingProducer | RingConsumer, RemoteProtocolError] = {}

    def step(self, what: str, one: int, two: int) -> None:
        if what.startswith("flip"):
            self.words[one] ^= 1 << two
        elif what == "put":
            self.words[one] = two
        elif what in ("read", "read many", "poll", "view", "skip"):
            self._try(
                self.consumer,
                lambda: self._read(what, one),
                is_quiet=what == "skip" or (what, one) == ("view", 0),
            )
        else:
            self._try(
                self.producer,
                lambda: self._write(what, one, two),
                is_quiet=what in ("take sleeping", "abort"),
            )

    def _try(
        self, end: RingProducer | RingConsumer, action: Callable[[], None], is_quiet: bool
    ) -> None:
        broken = self.errors.get(end)
        try:
            action()
        except RemoteProtocolError as error:
            self._note(end, error)
        else:
            assert broken is None or is_quiet, "a quarantined end went on"

    def _note(self, end: RingProducer | RingConsumer, error: RemoteProtocolError) -> None:
        assert PEER in str(error)
        assert error is self.errors.setdefault(end, error), "the first error stays"

    def _write(self, what: str, length: int, tag: int) -> None:
        producer, payload = self.producer, b"p" * length
        if what == "write":
            producer.try_write(payload, tag)
        elif what == "write many":
            assert 0 <= producer.try_write_many([payload] * tag or [b""]) <= max(1, tag)
        elif what == "stage":
            producer.try_stage(payload, tag)
        elif what == "publish":
            producer.publish()
        elif what == "take sleeping":
            producer.take_sleeping()
        elif what == "abort":
            producer.abort()
        else:
            memory = producer.claim(length)
            if memory is not None:
                assert len(memory) == length
                memory[:] = payload
                producer.commit(tag)

    def _read(self, what: str, limit: int) -> None:
        consumer = self.consumer
        payloads: list[bytes] = []
        if what == "read":
            payload = consumer.try_read()
            payloads = [] if payload is None else [payload]
        elif what == "read many":
            payloads = consumer.read_many(limit)
            assert len(payloads) <= limit
        elif what == "poll":
            count = consumer.poll(
                lambda view: payloads.append(bytes(view)),
                limit,
                lambda view, tag: payloads.append(bytes(view)),
            )
            assert count == len(payloads) <= limit
        elif what == "view":
            view = consumer.view() if limit else None
            if view is not None:
                payloads.append(bytes(view))
                consumer.release()
        else:
            consumer.skip_all()
        whole = bytes(self.whole[GUARD_BYTES + DATA_OFFSET : -GUARD_BYTES])
        for payload in payloads:
            assert payload in whole, "what is read lies in the ring"


@given(st.lists(steps, max_size=60))
@settings(deadline=None, max_examples=400)
def test_bits_flipped_anywhere_at_any_time_lead_to_data_of_the_ring_or_to_the_one_error(
    sequence: list[tuple[str, int, int]],
) -> None:
    ring = Damaged()
    for step in sequence:
        ring.step(*step)
    assert ring.whole[:GUARD_BYTES] == ring.whole[-GUARD_BYTES:] == GUARD
