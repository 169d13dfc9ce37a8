"""Channels between threads: bounded, closable, in order, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prpc_engine.errors import Closed, ConfigError
from prpc_engine.support import Channel, ThreadGroup
from tests.program import waiting_in
from tests.prpc_engine.processes import PATIENCE_S, wait_until


def test_items_come_out_in_the_order_they_went_in() -> None:
    channel: Channel[int] = Channel(10)
    for number in range(5):
        channel.put(number)
    assert channel.put_many(range(5, 10)) == 5
    assert [channel.get(), channel.try_get()] == [0, 1]
    assert channel.get_many(3) == [2, 3, 4]
    assert channel.get_many(100) == [5, 6, 7, 8, 9]


def test_a_full_channel_refuses_or_waits_and_keeps_what_it_holds() -> None:
    channel: Channel[str] = Channel(1, "letters")
    assert channel.try_put("a")
    assert not channel.try_put("b")
    with pytest.raises(TimeoutError, match="letters was full for 0 s: 1 of 1 items"):
        channel.put("b", timeout_s=0)
    with pytest.raises(TimeoutError):
        channel.put_many(["b"], timeout_s=0)
    assert channel.get() == "a"
    assert len(channel) == 0


def test_an_empty_channel_says_so_and_is_told_apart_from_a_closed_one() -> None:
    channel: Channel[str] = Channel(1, "letters")
    assert channel.try_get() is None
    assert channel.try_get("nothing") == "nothing"
    with pytest.raises(TimeoutError, match="letters was empty"):
        channel.get(timeout_s=0)
    with pytest.raises(TimeoutError):
        channel.get_many(2, timeout_s=0)
    channel.close()
    for read in (channel.get, channel.try_get, lambda: channel.get_many(2)):
        with pytest.raises(Closed, match="letters was closed"):
            read()


def test_closing_lets_readers_finish_and_writers_not() -> None:
    channel: Channel[int] = Channel(10)
    channel.put_many([1, 2, 3])
    channel.close()
    assert channel.closed
    for write in (channel.put, channel.try_put, lambda item: channel.put_many([item])):
        with pytest.raises(Closed):
            write(4)
    assert list(channel) == [1, 2, 3]


def test_a_shared_channel_closes_with_its_last_opener() -> None:
    channel: Channel[int] = Channel(10)
    with channel.shared_open() as same:
        assert same is channel
        channel.close()
        channel.put(1)
    assert channel.closed
    with pytest.raises(Closed):
        channel.shared_open()
    channel.close()  # nobody's: nothing happens
    assert list(channel) == [1]


def test_an_aborted_channel_is_closed_for_all_and_hands_out_what_waited() -> None:
    channel: Channel[int] = Channel(10).shared_open()
    channel.put_many([1, 2])
    assert channel.abort() == [1, 2]
    with pytest.raises(Closed):
        channel.put(3)
    assert list(channel) == []


def test_a_batch_larger_than_the_channel_goes_through_it_piece_by_piece() -> None:
    channel: Channel[int] = Channel(3)
    with ThreadGroup(1) as group:
        written = group.async_exec(channel.put_many, range(1000))
        read: list[int] = []
        while len(read) < 1000:
            taken = channel.get_many(7, timeout_s=PATIENCE_S)
            assert 1 <= len(taken) <= 3
            read += taken
        assert written.result(PATIENCE_S) == 1000
    assert read == list(range(1000))


def test_a_batch_cut_off_says_how_much_went_in() -> None:
    channel: Channel[int] = Channel(3)
    assert channel.put_many(range(5), timeout_s=0) == 3
    channel.get()
    with ThreadGroup(1) as group:
        written = group.async_exec(channel.put_many, range(3, 10))
        wait_until(lambda: len(channel) == 3)
        channel.close()
        assert written.result(PATIENCE_S) == 1
    assert list(channel) == [1, 2, 3]


@pytest.mark.parametrize(
    "wait",
    [
        lambda empty, full: empty.get(),
        lambda empty, full: empty.get_many(2),
        lambda empty, full: full.put(1),
        lambda empty, full: full.put_many([1]),
    ],
    ids=["get", "get_many", "put", "put_many"],
)
def test_closing_ends_every_wait(wait: Callable[[Channel[int], Channel[int]], Any]) -> None:
    empty: Channel[int] = Channel(1)
    full: Channel[int] = Channel(1)
    full.put(0)
    with ThreadGroup(3) as group:
        waits = [group.async_exec(wait, empty, full) for _ in range(3)]
        wait_until(lambda: waiting_in(wait) == 3, "a wait of each thread")
        empty.close()
        full.close()
        for one in waits:
            with pytest.raises(Closed):
                one.result(PATIENCE_S)


def test_two_threads_play_ping_pong_until_one_hangs_up() -> None:
    ping: Channel[int] = Channel(1)
    pong: Channel[int] = Channel(1)

    def other_side() -> int:
        with pong:
            for number in ping:
                pong.put(number + 1)
        return number

    with ThreadGroup(1) as group:
        last = group.async_exec(other_side)
        for number in range(1000):
            ping.put(number)
            assert pong.get(PATIENCE_S) == number + 1
        ping.close()
        assert last.result(PATIENCE_S) == 999
    with pytest.raises(Closed):
        pong.get()


def test_between_many_threads_every_item_arrives_once() -> None:
    channel: Channel[tuple[int, int]] = Channel(5)
    writers, readers, each = 4, 3, 800

    def write(writer: int) -> None:
        with channel:
            for number in range(0, each, 4):
                channel.put((writer, number))
                if not channel.try_put((writer, number + 1)):
                    channel.put((writer, number + 1))
                assert channel.put_many([(writer, number + 2), (writer, number + 3)]) == 2

    def read_singly() -> list[tuple[int, int]]:
        return list(channel)

    def read_batches() -> list[tuple[int, int]]:
        read: list[tuple[int, int]] = []
        while True:
            try:
                read += channel.get_many(4)
            except Closed:
                return read

    for _ in range(writers - 1):
        channel.shared_open()
    with ThreadGroup(writers + readers) as group:
        reads = [group.async_exec(read) for read in (read_singly, read_singly, read_batches)]
        writes = [group.async_exec(write, writer) for writer in range(writers)]
        for one in writes:
            one.result(PATIENCE_S)
        got = [one.result(PATIENCE_S) for one in reads]
    assert sorted(item for read in got for item in read) == [
        (writer, number) for writer in range(writers) for number in range(each)
    ]
    for read in got:  # each writer's items in its order
        for writer in range(writers):
            numbers = [number for who, number in read if who == writer]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, 1 << 40])
def test_an_impossible_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        Channel(capacity)
    with pytest.raises(ConfigError, match="items_max"):
        Channel(1).get_many(capacity)
