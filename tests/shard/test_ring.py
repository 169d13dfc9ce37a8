"""The record ring, byte by byte, on private memory and between two processes."""

from __future__ import annotations

import pickle
import zlib

import multiprocess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard import LocalProtocolError, RemoteProtocolError, Ring, RingConsumer, RingProducer
from shard.ring import (
    DATA_OFFSET,
    HEAD_WORD,
    MAGIC_WORD,
    PADDING,
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


@pytest.mark.parametrize("start", range(0, 256, 8))
def test_a_record_of_the_whole_capacity_passes_from_every_offset(start: int) -> None:
    producer, consumer, _ = make_ring(256)
    for _ in range(start // 8):
        assert producer.try_write(b"")
        assert consumer.try_read() == b""
    whole = bytes(range(256))[: producer.record_bytes_max]
    while not producer.try_write(whole):
        assert consumer.try_read() is None  # takes the padding away
    assert consumer.try_read() == whole


@pytest.mark.parametrize("excess", [1, 8, 1000])
def test_a_record_larger_than_the_ring_is_named_and_nothing_is_written(excess: int) -> None:
    producer, consumer, _ = make_ring(256)
    with pytest.raises(LocalProtocolError, match=f"record of {248 + excess} bytes, at most 248"):
        producer.try_write(bytes(248 + excess))
    assert consumer.try_read() is None
    assert producer.try_write(b"goes on")
    assert consumer.try_read() == b"goes on"


@given(st.lists(st.one_of(st.none(), st.binary(max_size=120)), max_size=200))
@settings(deadline=None)
def test_any_interleaving_of_writes_and_reads_behaves_like_a_bounded_queue(steps: list[bytes | None]) -> None:
    producer, consumer, _ = make_ring(256)
    expected: list[bytes] = []
    for step in steps:
        if step is None:
            assert consumer.try_read() == (expected.pop(0) if expected else None)
        elif producer.try_write(step):
            expected.append(step)
    assert [consumer.try_read() for _ in expected] == expected
    assert consumer.try_read() is None


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
        return consumer.poll(lambda view: plain.append(bytes(view)), 3, lambda view, tag: tagged.append((bytes(view), tag)))

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


def test_memory_that_is_no_ring_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="magic"):
        RingConsumer(memoryview(bytearray(DATA_OFFSET + 64)))
    with pytest.raises(RemoteProtocolError, match="too few"):
        RingProducer(memoryview(bytearray(64)))
    _, _, memory = make_ring(256)
    with pytest.raises(RemoteProtocolError, match="ring says 256 bytes"):
        RingConsumer(memory[: DATA_OFFSET + 128])
    memory.cast("Q")[MAGIC_WORD] = 0
    with pytest.raises(RemoteProtocolError):
        RingProducer(memory)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (DATA_OFFSET // 8, 10_000),  # a length beyond the ring
        (DATA_OFFSET // 8, 200),  # a length beyond the tail
        (DATA_OFFSET // 8, (PADDING << 32) | 8),  # padding that does not reach the end
        (DATA_OFFSET // 8, (PADDING << 32) | 100_000),
        (TAIL_WORD, 1 << 40),  # a tail that jumped
    ],
)
def test_a_broken_length_or_cursor_is_found_before_anything_outside_is_read(word: int, value: int) -> None:
    producer, consumer, memory = make_ring(256)
    producer.try_write(b"fine")
    memory.cast("Q")[word] = value
    if word != TAIL_WORD:
        with pytest.raises(RemoteProtocolError):
            consumer.poll(lambda view: None, 8)
    with pytest.raises(RemoteProtocolError):
        for _ in range(10_000):
            if consumer.view() is not None:
                consumer.release()


def test_a_tail_that_went_backward_is_found() -> None:
    producer, consumer, memory = make_ring(256)
    producer.try_write(b"fine")
    assert consumer.try_read() == b"fine"
    memory.cast("Q")[TAIL_WORD] = 0
    with pytest.raises(RemoteProtocolError, match="impossible"):
        consumer.poll(lambda view: None, 8)


def test_a_head_that_ran_ahead_is_found_by_the_producer() -> None:
    producer, _, memory = make_ring(64)
    assert producer.try_write(b"x" * 40)
    memory.cast("Q")[HEAD_WORD] = 1 << 40
    with pytest.raises(RemoteProtocolError, match="impossible"):
        producer.try_write(b"y" * 40)


def test_capacities_are_powers_of_two_within_bounds() -> None:
    assert [capacity_for(n) for n in (1, 64, 65, 4096, 5000)] == [64, 64, 128, 4096, 8192]
    for bad in (0, -1, 1 << 40):
        with pytest.raises(LocalProtocolError):
            capacity_for(bad)


# -- two processes --------------------------------------------------------------------------------------------------------

RECORDS = 100_000


def payload_of(number: int) -> bytes:
    """A record whose length and content follow from its number."""
    length = (number * 7919) % 301
    return zlib.crc32(number.to_bytes(8, "little")).to_bytes(4, "little") * (length // 4)


def write_all(handle: Ring) -> None:
    producer = handle.producer()
    for number in range(RECORDS):
        payload = payload_of(number)
        while not producer.try_write(payload):
            pass


def test_a_handle_is_pickled_to_another_process_and_every_byte_arrives_in_order() -> None:
    with Ring.create(64 << 10) as handle:
        assert pickle.loads(pickle.dumps(handle)).name == handle.name
        process = multiprocess.get_context("spawn").Process(target=write_all, args=(handle,), daemon=True)
        process.start()
        consumer = handle.consumer()
        number = 0
        while number < RECORDS:
            view = consumer.view()
            if view is None:
                assert process.is_alive() or not consumer.is_empty() or number == RECORDS, "the writer died"
                continue
            assert view == payload_of(number)
            consumer.release()
            number += 1
        process.join()
        assert process.exitcode == 0
        assert consumer.try_read() is None


def test_a_ring_that_was_unlinked_can_be_attached_by_nobody_new() -> None:
    handle = Ring.create(4096)
    producer = handle.producer()
    handle.unlink()
    assert producer.try_write(b"ends already taken go on")
    with pytest.raises(FileNotFoundError, match="its owner is gone"):
        handle.consumer()


def test_records_are_aligned_so_that_their_header_is_one_word() -> None:
    producer, consumer, memory = make_ring(256)
    for size in (1, 7, 8, 9):
        producer.try_write(bytes(size))
        assert memory.cast("Q")[TAIL_WORD] % RECORD_HEADER_BYTES == 0
        consumer.try_read()
