"""How far readers are, and whom the writer waits for, without any process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.vllm.readers import (
    QUEUE_READERS,
    QueueReaderEvent,
    QueueReaders,
    QueueReaderState,
)

LEFT, LOST = QueueReaderEvent.LEFT, QueueReaderEvent.LOST


def test_there_is_room_until_the_slowest_is_as_far_behind_as_it_may() -> None:
    readers = QueueReaders(2, [0, 1], 2)
    assert readers.local_ranks == [0, 1]
    quick, slow = readers.join(0, 10, "here"), readers.join(1, 11, "here")
    for number in (1, 2):
        assert readers.behind() == []
        readers.enqueued = quick.sent = slow.sent = number
    assert readers.behind() == [quick, slow]
    readers.take(quick, 2)
    assert readers.behind() == [slow]
    readers.take(slow, 1)
    assert readers.behind() == []


def test_one_that_has_not_joined_is_waited_for_and_keeps_its_items() -> None:
    readers = QueueReaders(2, [0], 3)
    first = readers.join(0, 10, "here")
    readers.enqueued = first.sent = 3
    readers.take(first, 3)
    assert [str(one) for one in readers.behind()] == ["a reader of another host (has not joined)"]
    assert readers.kept_from() == 1
    other = readers.join(7, 11, "there")
    other.sent = 2
    assert readers.kept_from() == 3
    assert str(other) == "reader 7 (process 11 on there)"


def test_news_that_come_late_or_lie_change_nothing() -> None:
    readers = QueueReaders(1, [0], 4)
    reader = readers.join(0, 10, "here")
    readers.enqueued, reader.sent = 4, 3
    for count in (2, 1, 4, -1):
        readers.take(reader, count)
        assert reader.taken == 2


def test_one_that_left_is_not_waited_for_and_one_that_was_lost_is_named() -> None:
    readers = QueueReaders(2, [0, 1], 1)
    first, second = readers.join(0, 10, "here"), readers.join(1, 11, "here")
    readers.enqueued = 1
    assert readers.follow(first, LEFT)
    assert not readers.follow(first, LOST)
    assert readers.behind() == [second]
    assert readers.lost is None
    assert not readers.all_have_left
    assert readers.follow(second, LOST)
    assert readers.lost is second
    assert readers.kept_from() == 2


def test_all_have_left_when_there_were_some() -> None:
    assert not QueueReaders(0, [], 1).all_have_left
    readers = QueueReaders(1, [5], 1)
    readers.follow(readers.join(5, 10, "here"), LEFT)
    assert readers.all_have_left


@pytest.mark.parametrize(
    ("rank", "text"),
    [(0, "is taken by reader 0"), (3, "is no reader of this queue"), (-1, "is no reader")],
)
def test_a_rank_that_has_no_place_is_refused(rank: int, text: str) -> None:
    readers = QueueReaders(2, [0, 1], 1)
    readers.join(0, 10, "here")
    with pytest.raises(ConfigError, match=text):
        readers.join(rank, 11, "here")


def test_places_of_other_hosts_go_to_any_rank_but_each_only_once() -> None:
    readers = QueueReaders(4, [0], 1)
    readers.join(9, 1, "there")
    with pytest.raises(ConfigError, match="rank 9 is taken"):
        readers.join(9, 2, "there")
    readers.join(-1, 3, "there")
    readers.join(-1, 4, "there")  # no name: any number of them
    with pytest.raises(ConfigError, match="one too many"):
        readers.join(-1, 5, "there")


def test_one_that_left_does_not_come_back() -> None:
    readers = QueueReaders(1, [0], 1)
    readers.follow(readers.join(0, 10, "here"), LEFT)
    with pytest.raises(ConfigError, match="is gone"):
        readers.join(0, 11, "here")


@pytest.mark.parametrize(("count", "ranks"), [(1, [0, 1]), (2, [3, 3])])
def test_ranks_that_make_no_sense_are_refused(count: int, ranks: list[int]) -> None:
    with pytest.raises(ConfigError):
        QueueReaders(count, ranks, 1)


def test_each_event_of_the_table_leads_where_it_says() -> None:
    up, _ = QUEUE_READERS.after(QueueReaderState.AWAITED, QueueReaderEvent.JOINED)
    assert up is QueueReaderState.UP
    assert QUEUE_READERS.after(up, LEFT)[0] is QueueReaderState.LEFT
    assert QUEUE_READERS.after(up, LOST)[0] is QueueReaderState.LOST


@given(st.lists(st.tuples(st.sampled_from(["enqueue", "take"]), st.integers(0, 2)), max_size=60))
def test_no_reader_is_ever_further_behind_than_it_may(steps: list[tuple[str, int]]) -> None:
    readers = QueueReaders(3, [0, 1, 2], 4)
    all_of_them = [readers.join(rank, rank, "here") for rank in range(3)]
    for step, rank in steps:
        if step == "enqueue" and not readers.behind():
            readers.enqueued += 1
            for reader in all_of_them:
                reader.sent = readers.enqueued
        elif step == "take":
            readers.take(all_of_them[rank], all_of_them[rank].taken + 1)
        for reader in all_of_them:
            assert 0 <= readers.enqueued - reader.taken <= 4
