"""What a publisher holds for its readers, without any process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.topics.backlog import ANSWER_BYTES_MAX, Backlog, Disconnected


class Thing:
    """An item of some size."""

    def __init__(self, number: int, nbytes: int = 8) -> None:
        self.number = number
        self.nbytes = nbytes


def publish(backlog: Backlog, *numbers: int) -> None:
    for number in numbers:
        assert not backlog.full()
        backlog.publish(Thing(number))


def taken(backlog: Backlog, reader: int, confirmed: int) -> tuple[list[int], int]:
    given = backlog.take(reader, confirmed)
    return [entry.item.number for entry in given.entries], given.skipped


def test_a_queue_gives_each_item_to_each_reader_in_order() -> None:
    backlog = Backlog("queue", 10, "block")
    backlog.join(1, "first")
    publish(backlog, 10, 20)
    backlog.join(2, "late")
    publish(backlog, 30)
    assert taken(backlog, 1, 0) == ([10, 20, 30], 0)
    assert taken(backlog, 2, 0) == ([30], 0)
    assert taken(backlog, 1, 3) == ([], 0)


def test_what_is_not_confirmed_is_given_again() -> None:
    backlog = Backlog("queue", 10, "block")
    backlog.join(1, "one")
    publish(backlog, 10, 20)
    assert taken(backlog, 1, 0) == ([10, 20], 0)
    publish(backlog, 30)
    assert taken(backlog, 1, 1) == ([20, 30], 0)
    assert taken(backlog, 1, 3) == ([], 0)


def test_block_says_for_whom_there_is_no_room() -> None:
    backlog = Backlog("queue", 2, "block")
    backlog.join(1, "quick")
    backlog.join(2, "slow")
    publish(backlog, 10, 20)
    assert backlog.full() == ["quick", "slow"]
    taken(backlog, 1, 0)
    assert backlog.full() == ["slow"]
    assert backlog.leave(2)
    assert backlog.full() == []
    assert not backlog.leave(2)


def test_drop_oldest_counts_what_goes_and_tells_the_reader_once() -> None:
    backlog = Backlog("queue", 2, "drop_oldest")
    backlog.join(1, "slow")
    publish(backlog, 10, 20, 30, 40, 50)
    assert backlog.readers[1].skipped == 3
    assert taken(backlog, 1, 0) == ([40, 50], 3)
    publish(backlog, 60)
    assert taken(backlog, 1, 5) == ([60], 0)


def test_disconnect_takes_the_slow_off_and_tells_it_when_it_asks() -> None:
    backlog = Backlog("queue", 2, "disconnect")
    backlog.join(1, "slow")
    publish(backlog, 10, 20, 30, 40)
    assert backlog.readers[1].is_disconnected
    with pytest.raises(Disconnected, match=r"slow was taken off.*missed 4"):
        backlog.take(1, 0)
    assert backlog.readers == {}


def test_latest_keeps_the_newest_alone_and_gives_it_to_who_joins() -> None:
    backlog = Backlog("latest", 64, "block")
    backlog.join(1, "one")
    publish(backlog, 10, 20, 30)
    assert taken(backlog, 1, 0) == ([30], 2)
    backlog.join(2, "late")
    assert taken(backlog, 2, 0) == ([30], 0)
    assert taken(backlog, 1, 0) == ([30], 0)  # not confirmed: given again
    publish(backlog, 40)
    assert taken(backlog, 1, 0) == ([40], 0)  # there is a newer one


def test_an_answer_is_bounded_in_bytes_but_for_its_first_item() -> None:
    backlog = Backlog("queue", 10, "block")
    backlog.join(1, "one")
    for number in range(3):
        backlog.publish(Thing(number, ANSWER_BYTES_MAX))
    assert taken(backlog, 1, 0) == ([0], 0)
    assert taken(backlog, 1, 1) == ([1], 0)


@pytest.mark.parametrize(
    ("mode", "capacity", "slow"),
    [("newest", 1, "block"), ("queue", 0, "block"), ("queue", True, "block"), ("queue", 1, "wait")],
)
def test_what_makes_no_sense_is_named(mode: Any, capacity: Any, slow: Any) -> None:
    with pytest.raises(ConfigError):
        Backlog(mode, capacity, slow)


@given(
    st.lists(st.sampled_from(["publish", "take", "lose"]), max_size=60),
    st.sampled_from(["block", "drop_oldest"]),
)
def test_nothing_is_lost_or_doubled_that_is_not_counted(events: list[str], slow: Any) -> None:
    """A reader that confirms what came, over answers that are lost now and then."""
    backlog = Backlog("queue", 3, slow)
    backlog.join(1, "one")
    published, seen, missed = 0, list[int](), 0
    for event in [*events, "take", "take"]:
        if event == "publish" and not backlog.full():
            published += 1
            backlog.publish(Thing(published))
        elif event == "lose":
            missed += backlog.take(1, seen[-1] if seen else 0).skipped
        elif event == "take":
            given = backlog.take(1, seen[-1] if seen else 0)
            missed += given.skipped
            seen += [entry.version for entry in given.entries]
    assert seen == sorted(set(seen))
    assert len(seen) + missed == published == (seen[-1] if seen else 0)
