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


PLENTY = 1 << 40


def names(backlog: Backlog, nbytes: int = 8) -> list[str]:
    """Whom an item of that size waits for."""
    return [one.name for one in backlog.full(nbytes)]


def publish(backlog: Backlog, *numbers: int) -> None:
    for number in numbers:
        assert not backlog.full(8)
        backlog.publish(Thing(number))


def taken(backlog: Backlog, reader: int, confirmed: int) -> tuple[list[int], int]:
    given = backlog.take(reader, confirmed)
    return [entry.item.number for entry in given.entries], given.skipped


def test_a_queue_gives_each_item_to_each_reader_in_order() -> None:
    backlog = Backlog("queue", 10, "block", PLENTY)
    backlog.join(1, "first")
    publish(backlog, 10, 20)
    backlog.join(2, "late")
    publish(backlog, 30)
    assert taken(backlog, 1, 0) == ([10, 20, 30], 0)
    assert taken(backlog, 2, 0) == ([30], 0)
    assert taken(backlog, 1, 3) == ([], 0)


def test_what_is_not_confirmed_is_given_again() -> None:
    backlog = Backlog("queue", 10, "block", PLENTY)
    backlog.join(1, "one")
    publish(backlog, 10, 20)
    assert taken(backlog, 1, 0) == ([10, 20], 0)
    publish(backlog, 30)
    assert taken(backlog, 1, 1) == ([20, 30], 0)
    assert taken(backlog, 1, 3) == ([], 0)


def test_block_says_for_whom_there_is_no_room() -> None:
    backlog = Backlog("queue", 2, "block", PLENTY)
    backlog.join(1, "quick")
    backlog.join(2, "slow")
    publish(backlog, 10, 20)
    assert names(backlog) == ["quick", "slow"]
    taken(backlog, 1, 0)
    assert names(backlog) == ["slow"]
    assert backlog.leave(2)
    assert names(backlog) == []
    assert not backlog.leave(2)


def test_drop_oldest_counts_what_goes_and_tells_the_reader_once() -> None:
    backlog = Backlog("queue", 2, "drop_oldest", PLENTY)
    backlog.join(1, "slow")
    publish(backlog, 10, 20, 30, 40, 50)
    assert backlog.readers[1].skipped == 3
    assert taken(backlog, 1, 0) == ([40, 50], 3)
    publish(backlog, 60)
    assert taken(backlog, 1, 5) == ([60], 0)


def test_disconnect_takes_the_slow_off_and_tells_it_when_it_asks() -> None:
    backlog = Backlog("queue", 2, "disconnect", PLENTY)
    backlog.join(1, "slow")
    publish(backlog, 10, 20, 30, 40)
    assert backlog.readers[1].is_disconnected
    with pytest.raises(Disconnected, match=r"slow was taken off.*missed 4"):
        backlog.take(1, 0)
    assert backlog.readers == {}


def test_latest_keeps_the_newest_alone_and_gives_it_to_who_joins() -> None:
    backlog = Backlog("latest", 64, "block", PLENTY)
    backlog.join(1, "one")
    publish(backlog, 10, 20, 30)
    assert taken(backlog, 1, 0) == ([30], 2)
    backlog.join(2, "late")
    assert taken(backlog, 2, 0) == ([30], 0)
    assert taken(backlog, 1, 0) == ([30], 0)  # not confirmed: given again
    publish(backlog, 40)
    assert taken(backlog, 1, 0) == ([40], 0)  # there is a newer one


def test_an_answer_is_bounded_in_bytes_but_for_its_first_item() -> None:
    backlog = Backlog("queue", 10, "block", PLENTY)
    backlog.join(1, "one")
    for number in range(3):
        backlog.publish(Thing(number, ANSWER_BYTES_MAX))
    assert taken(backlog, 1, 0) == ([0], 0)
    assert taken(backlog, 1, 1) == ([1], 0)


@pytest.mark.parametrize(
    ("mode", "capacity", "slow", "bytes_max", "named"),
    [
        ("newest", 1, "block", 1, "mode"),
        ("queue", 0, "block", 1, "capacity"),
        ("queue", True, "block", 1, "capacity"),
        ("queue", 1, "wait", 1, "slow"),
        ("queue", 1, "block", 0, "bytes_max"),
        ("queue", 1, "block", 1.5, "bytes_max"),
    ],
)
def test_what_makes_no_sense_is_named(
    mode: Any, capacity: Any, slow: Any, bytes_max: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"{named}="):
        Backlog(mode, capacity, slow, bytes_max)


def test_block_says_for_whom_there_is_no_room_in_bytes() -> None:
    backlog = Backlog("queue", 10, "block", 100)
    backlog.join(1, "quick")
    backlog.join(2, "slow")
    backlog.publish(Thing(1, 60))
    assert names(backlog, 40) == []
    assert names(backlog, 41) == ["quick", "slow"]
    taken(backlog, 1, 0)
    assert names(backlog, 100) == ["slow"]
    assert backlog.fits(100) and not backlog.fits(101)


def test_as_many_of_the_oldest_go_as_make_room_in_bytes() -> None:
    backlog = Backlog("queue", 10, "drop_oldest", 100)
    backlog.join(1, "slow")
    for number, nbytes in enumerate((30, 30, 30, 90)):
        backlog.publish(Thing(number, nbytes))
    assert taken(backlog, 1, 0) == ([3], 3)
    assert backlog.readers[1].waiting_bytes == 0


def test_disconnect_takes_off_whom_too_many_bytes_wait_for() -> None:
    backlog = Backlog("queue", 10, "disconnect", 100)
    backlog.join(1, "slow")
    for number in range(3):
        backlog.publish(Thing(number, 50))
    with pytest.raises(Disconnected, match=r"bytes \(100\) waited for it as may; it has missed 3"):
        backlog.take(1, 0)


def test_the_latest_has_no_bound_in_bytes() -> None:
    backlog = Backlog("latest", 1, "block", 1)
    backlog.join(1, "one")
    assert backlog.fits(1000)
    backlog.publish(Thing(1, 1000))
    backlog.publish(Thing(2, 1000))
    assert taken(backlog, 1, 0) == ([2], 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "take", "lose", "other"]), st.integers(0, 12)),
        max_size=60,
    ),
    st.sampled_from(["block", "drop_oldest", "disconnect"]),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_what_waits_is_what_a_model_of_both_bounds_says(
    events: list[tuple[str, int]], slow: Any, capacity: int, bytes_max: int
) -> None:
    """Two readers, of which one takes now and then, and a list of sizes for each."""
    backlog = Backlog("queue", capacity, slow, bytes_max)
    models: dict[int, list[tuple[int, int]]] = {1: [], 2: []}
    missed = {1: 0, 2: 0}
    for reader in models:
        backlog.join(reader, str(reader))
    version = 0
    for event, nbytes in events:
        if event == "publish":
            assert backlog.fits(nbytes) == (nbytes <= bytes_max)
            if nbytes > bytes_max:
                continue
            short = {
                reader: len(model) >= capacity
                or sum(size for _, size in model) + nbytes > bytes_max
                for reader, model in models.items()
            }
            assert names(backlog, nbytes) == [
                str(reader) for reader in short if short[reader] and slow == "block"
            ]
            if slow == "block" and any(short.values()):
                continue
            version += 1
            backlog.publish(Thing(version, nbytes))
            for reader, model in list(models.items()):
                if slow == "disconnect" and short[reader]:
                    with pytest.raises(Disconnected, match=f"missed {len(model) + 1}$"):
                        backlog.take(reader, version)
                    backlog.join(reader, str(reader))
                    model.clear()
                    missed[reader] = 0
                    continue
                while len(model) >= capacity or sum(size for _, size in model) + nbytes > bytes_max:
                    model.pop(0)
                    missed[reader] += 1
                model.append((version, nbytes))
        else:
            reader = 2 if event == "other" else 1
            first = backlog.take(reader, version)  # what was given before is confirmed
            assert [(one.version, one.nbytes) for one in first.entries] == models[reader]
            models[reader].clear()
        for reader, model in models.items():
            there = backlog.readers[reader]
            assert [(one.version, one.nbytes) for one in there.waiting] == model
            assert there.waiting_bytes == sum(size for _, size in model) <= bytes_max
            assert len(model) <= capacity
            assert there.skipped == missed[reader]


@given(
    st.lists(st.sampled_from(["publish", "take", "lose"]), max_size=60),
    st.sampled_from(["block", "drop_oldest"]),
)
def test_nothing_is_lost_or_doubled_that_is_not_counted(events: list[str], slow: Any) -> None:
    """A reader that confirms what came, over answers that are lost now and then."""
    backlog = Backlog("queue", 3, slow, PLENTY)
    backlog.join(1, "one")
    published, seen, missed = 0, list[int](), 0
    for event in [*events, "take", "take"]:
        if event == "publish" and not backlog.full(8):
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
