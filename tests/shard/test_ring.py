"""The record ring, byte by byte, on private memory. Handles are tested in test_handle.py, what a
peer breaks in test_ring_corruption.py, any sequence of verbs in test_ring_model.py, two processes
in test_ring_hammer.py."""

from __future__ import annotations

import pytest

from shard import LocalProtocolError, RingConsumer, RingProducer
from shard.memory.ring import (
    DATA_OFFSET,
    RECORD_HEADER_BYTES,
    TAIL_WORD,
    capacity_for,
    format_ring,
)


def make_ring(capacity: int = 256) -> tuple[RingProducer, RingConsumer, memoryview]:
    memory = memoryview(bytearray(DATA_OFFSET + capacity))
    format_ring(memory, capacity)
    return RingProducer(memory), RingConsumer(memory), memory


def test_what_is_written_is_read_in_order_and_then_the_ring_is_empty() -> None:
    producer, consumer, _ = make_ring()
    assert producer.try_write(b"one")
    assert producer.try_write(b"")
    assert producer.try_write(b"three")
    assert [consumer.try_read() for _ in range(4)] == [b"one", b"", b"three", None]


def test_a_full_ring_refuses_the_write_and_keeps_what_it_holds() -> None:
    producer, consumer, _ = make_ring(64)
    assert producer.try_write(b"a" * 24)
    assert producer.try_write(b"b" * 24)
    assert not producer.try_write(b"c")
    assert consumer.try_read() == b"a" * 24
    assert producer.try_write(b"c")
    assert [consumer.try_read(), consumer.try_read()] == [b"b" * 24, b"c"]


def test_a_record_of_the_whole_capacity_passes_from_every_offset(subtests: pytest.Subtests) -> None:
    for start in range(0, 256, 8):
        with subtests.test(start=start):
            producer, consumer = ring_at(start, 256)
            whole = bytes(range(256))[: producer.record_bytes_max]
            while not producer.try_write(whole):
                assert consumer.try_read() is None  # takes the padding away
            assert consumer.try_read() == whole


def ring_at(start: int, capacity: int) -> tuple[RingProducer, RingConsumer]:
    """An empty ring both of whose cursors stand at `start`, a multiple of 8."""
    producer, consumer, _ = make_ring(capacity)
    for _ in range(start // RECORD_HEADER_BYTES):
        assert producer.try_write(b"")
        assert consumer.try_read() == b""
    return producer, consumer


def written_in_at_most_two_tries(
    producer: RingProducer, consumer: RingConsumer, payload: bytes
) -> None:
    """Into an empty ring: the first try may have to lay padding, which an empty read takes away."""
    if not producer.try_write(payload):
        assert consumer.try_read() is None
        assert producer.try_write(payload)


def test_a_record_of_every_length_wraps_at_every_offset(subtests: pytest.Subtests) -> None:
    for length in range(64 - RECORD_HEADER_BYTES + 1):
        payload = bytes(range(1, length + 1))
        for start in range(0, 64, 8):
            with subtests.test(length=length, start=start):
                producer, consumer = ring_at(start, 64)
                for _ in range(9):  # once around and beyond, from wherever the last one ended
                    written_in_at_most_two_tries(producer, consumer, payload)
                    assert consumer.try_read() == payload
                assert consumer.is_empty()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 48])
def test_batches_wrap_at_every_offset_as_single_records_do(length: int) -> None:
    payloads = [bytes([number]) * length for number in range(12)]
    for start in range(0, 64, 8):
        many, many_reader = ring_at(start, 64)
        single, single_reader = ring_at(start, 64)
        waiting = payloads
        while waiting:
            count = many.try_write_many(waiting)
            assert count == sum(1 for payload in waiting if single.try_write(payload))
            assert many.bytes_written == single.bytes_written
            expected = [single_reader.try_read() for _ in range(count)]
            assert many_reader.read_many(len(waiting) + 1) == expected == waiting[:count]
            assert single_reader.try_read() is None  # takes the padding away, as read_many() did
            assert many_reader.try_read() is None
            waiting = waiting[count:]


@pytest.mark.parametrize(
    "length", [64 - RECORD_HEADER_BYTES + 1, 64 - 1, 64, 64 + 1, 64 + RECORD_HEADER_BYTES, 1000]
)
def test_the_largest_record_is_the_capacity_less_its_header_and_one_larger_is_named(
    length: int, subtests: pytest.Subtests
) -> None:
    named = f"record of {length} bytes, at most 56 allowed"
    for start in range(0, 64, 8):
        with subtests.test(start=start):
            producer, consumer = ring_at(start, 64)
            assert producer.record_bytes_max == 56
            for write in (
                producer.try_write,
                producer.try_stage,
                lambda payload, producer=producer: producer.try_write_many([payload]),  # type: ignore[misc]
            ):
                with pytest.raises(LocalProtocolError, match=named):
                    write(bytes(length))
            with pytest.raises(LocalProtocolError, match=named):
                producer.claim(length)
            assert consumer.try_read() is None, "nothing was written"
            largest = bytes(range(56))
            written_in_at_most_two_tries(producer, consumer, largest)
            assert consumer.try_read() == largest


def test_a_batch_with_a_record_too_large_publishes_those_before_it() -> None:
    producer, consumer, _ = make_ring(64)
    with pytest.raises(LocalProtocolError, match="record of 57 bytes"):
        producer.try_write_many([b"one", b"two", bytes(57), b"four"])
    assert consumer.read_many(9) == [b"one", b"two"]


def test_a_batch_that_finds_the_ring_full_says_how_many_it_published() -> None:
    producer, consumer, _ = make_ring(64)
    assert producer.try_write_many([b"x" * 8] * 9) == 4
    assert producer.full_count == 1
    assert producer.try_write_many([]) == 0
    assert consumer.read_many(2) == [b"x" * 8] * 2
    assert producer.try_write_many([b"y"] * 9) == 2


def test_read_many_takes_its_limit_and_no_more() -> None:
    producer, consumer, _ = make_ring()
    producer.try_write_many([b"1", b"2", b"3"])
    assert consumer.read_many(0) == []
    assert consumer.read_many(2) == [b"1", b"2"]
    assert consumer.read_many(2) == [b"3"]
    assert consumer.read_many(2) == []


def test_staged_records_are_unseen_until_published_and_then_all_at_once() -> None:
    producer, consumer, _ = make_ring()
    assert producer.try_stage(b"one")
    assert producer.try_stage(b"two")
    assert consumer.try_read() is None
    producer.publish()
    assert [consumer.try_read(), consumer.try_read()] == [b"one", b"two"]


def test_a_claim_is_written_in_place_and_an_aborted_one_never_was() -> None:
    producer, consumer, _ = make_ring()
    memory = producer.claim(5)
    assert memory is not None
    memory[:] = b"lost!"
    producer.abort()
    memory = producer.claim(5)
    assert memory is not None
    memory[:] = b"found"
    producer.commit()
    view = consumer.view()
    assert view is not None
    assert bytes(view) == b"found"
    consumer.release()
    assert consumer.view() is None


def test_poll_hands_out_a_bounded_batch_and_tags_apart() -> None:
    producer, consumer, _ = make_ring()
    for number in range(4):
        assert producer.try_write(bytes([number]), tag=number % 2)
    plain: list[bytes] = []
    tagged: list[tuple[bytes, int]] = []

    def take() -> int:
        return consumer.poll(
            lambda view: plain.append(bytes(view)),
            3,
            lambda view, tag: tagged.append((bytes(view), tag)),
        )

    assert take() == 3
    assert take() == 1
    assert take() == 0
    assert plain == [b"\0", b"\2"]
    assert tagged == [(b"\1", 1), (b"\3", 1)]


def test_a_record_counts_as_read_even_when_its_handler_raises() -> None:
    producer, consumer, _ = make_ring()
    producer.try_write(b"bad")
    producer.try_write(b"good")

    def refuse(view: memoryview) -> None:
        raise KeyError(bytes(view))

    with pytest.raises(KeyError):
        consumer.poll(refuse, 8)
    assert consumer.try_read() == b"good"


def test_a_handler_may_poll_the_same_ring_and_no_record_is_seen_twice() -> None:
    producer, consumer, _ = make_ring()
    for number in range(5):
        producer.try_write(bytes([number]))
    seen: list[int] = []

    def handler(view: memoryview) -> None:
        seen.append(view[0])
        consumer.poll(handler, 2)

    assert consumer.poll(handler, 8) >= 1
    assert seen == [0, 1, 2, 3, 4]


def test_skip_all_counts_what_waits_as_read() -> None:
    producer, consumer, _ = make_ring(64)
    producer.try_write_many([b"x" * 24] * 2)
    consumer.skip_all()
    assert consumer.is_empty()
    assert consumer.try_read() is None
    assert producer.try_write(b"room again")
    assert consumer.try_read() == b"room again"


def test_the_sleeping_flag_is_taken_once() -> None:
    producer, consumer, _ = make_ring(64)
    assert not producer.take_sleeping()
    consumer.set_sleeping(True)
    assert producer.take_sleeping()
    assert not producer.take_sleeping()


def test_capacities_are_powers_of_two_within_bounds() -> None:
    assert [capacity_for(n) for n in (1, 64, 65, 4096, 5000)] == [64, 64, 128, 4096, 8192]
    for bad in (0, -1, 1 << 40):
        with pytest.raises(LocalProtocolError):
            capacity_for(bad)


def test_records_are_aligned_so_that_their_header_is_one_word() -> None:
    producer, consumer, memory = make_ring(256)
    for size in (1, 7, 8, 9):
        producer.try_write(bytes(size))
        assert memory.cast("Q")[TAIL_WORD] % RECORD_HEADER_BYTES == 0
        consumer.try_read()
