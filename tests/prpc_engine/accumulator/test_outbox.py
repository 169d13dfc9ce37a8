"""What a server is still to be told, and what it remembers of what it was told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prpc_engine.accumulator.aggregator import Aggregator
from prpc_engine.accumulator.counter import Counter
from prpc_engine.accumulator.numeric import Sum
from prpc_engine.accumulator.outbox import ENTRIES_MAX, WriteBatch, WriteOutbox
from prpc_engine.accumulator.window import APPLY, DUPLICATE, UNKNOWN, Verdict, WriteWindow
from prpc_engine.archive import Decoder, encode
from prpc_engine.errors import BadArguments


def nobody() -> None:
    """Wakes no one."""


def counter(name: str) -> Counter:
    return Counter(name, Sum(), 1, 1.0, nobody)


def total(value: int) -> Aggregator:
    one = Sum()
    one.merge_value(value)
    return one


def values(batch: WriteBatch | None) -> dict[str, int]:
    assert batch is not None
    return {entry.counter.name: entry.aggregate.value for entry in batch.entries}  # type: ignore[attr-defined]


@pytest.fixture
def named() -> Callable[[str], Counter]:
    made: dict[str, Counter] = {}
    return lambda name: made.setdefault(name, counter(name))


def test_a_batch_on_its_way_keeps_its_content_while_new_values_gather_behind_it(
    named: Callable[[str], Counter],
) -> None:
    outbox = WriteOutbox()
    outbox.add(named("a"), total(1), 1)
    first = outbox.head()
    outbox.add(named("a"), total(10), 1)
    outbox.add(named("a"), total(20), 2)
    assert outbox.head() is first
    assert values(first) == {"a": 1}
    assert outbox.sequence == 1
    outbox.answered({})
    assert values(outbox.head()) == {"a": 30}
    assert (outbox.sequence, outbox.acknowledged, outbox.waiting) == (2, 1, 3)


def test_a_mark_is_settled_when_what_was_added_before_it_is_and_not_later(
    named: Callable[[str], Counter],
) -> None:
    outbox = WriteOutbox()
    assert outbox.is_settled(outbox.mark())
    outbox.add(named("a"), total(1), 1)
    outbox.head()
    outbox.add(named("b"), total(1), 1)
    mark = outbox.mark()
    outbox.answered({})
    assert not outbox.is_settled(mark)
    outbox.head()
    outbox.add(named("c"), total(1), 1)
    assert not outbox.is_settled(mark)
    outbox.answered({})
    assert outbox.is_settled(mark)
    assert outbox.waiting == 1


def test_many_counters_go_in_several_batches_of_one_generation() -> None:
    outbox = WriteOutbox()
    for number in range(2 * ENTRIES_MAX + 1):
        outbox.add(counter(f"{number}"), total(1), 1)
    mark, batches = outbox.mark(), 0
    while outbox.head() is not None:
        assert not outbox.is_settled(mark)
        outbox.answered({})
        batches += 1
    assert batches == 3
    assert outbox.is_settled(mark)


def test_what_a_server_refuses_is_counted_as_dropped_and_its_counter_knows_why(
    named: Callable[[str], Counter],
) -> None:
    outbox = WriteOutbox()
    outbox.add(named("a"), total(1), 5)
    outbox.add(named("b"), total(1), 7)
    outbox.head()
    outbox.answered({1: "it is max()"})
    assert (outbox.acknowledged, outbox.dropped, outbox.waiting) == (5, 7, 0)
    assert (named("a").refusal, named("b").refusal) == (None, "it is max()")
    outbox.add(named("b"), total(1), 1)
    outbox.head()
    outbox.answered({})
    assert named("b").refusal is None


def test_a_batch_that_is_too_large_is_halved_until_one_counter_is_left(
    named: Callable[[str], Counter],
) -> None:
    outbox = WriteOutbox()
    for name in "abc":
        outbox.add(named(name), total(1), 1)
    outbox.head()
    assert outbox.split_head()
    assert values(outbox.head()) == {"a": 1}
    assert not outbox.split_head()
    outbox.drop_head("too large")
    assert outbox.sequence == 1, "the server never saw that number"
    assert outbox.dropped == 1
    assert values(outbox.head()) == {"b": 1, "c": 1}
    assert outbox.drop_all() == 2


def test_a_batch_that_may_have_been_counted_is_neither_split_nor_its_number_used_again(
    named: Callable[[str], Counter],
) -> None:
    outbox = WriteOutbox()
    for name in "ab":
        outbox.add(named(name), total(1), 1)
    batch = outbox.head()
    assert batch is not None
    batch.maybe_applied = True
    assert not outbox.split_head()
    outbox.drop_head("nobody knows")
    assert outbox.sequence == 2


# -- the server's window ---------------------------------------------------------------------------

ANN, BOB = (1, 1), (2, 2)


def test_a_push_counts_once() -> None:
    window = WriteWindow()
    assert window.judge(ANN, 1, False, True) == Verdict(APPLY)
    window.record(ANN, 1, {3: "no"})
    assert window.judge(ANN, 1, True, True) == Verdict(DUPLICATE)
    assert window.refused(ANN, 1) == {3: "no"}
    assert window.judge(ANN, 2, False, True) == Verdict(APPLY)
    window.record(ANN, 2, {})
    assert window.judge(ANN, 1, True, True) == Verdict(DUPLICATE), "late, from a request before"
    assert window.refused(ANN, 1) == {}


def test_a_client_that_starts_again_begins_anew() -> None:
    window = WriteWindow()
    window.record(ANN, 7, {})
    assert window.judge((ANN[0], 99), 1, False, False) == Verdict(APPLY)


def test_a_server_that_lost_pushes_says_how_many() -> None:
    window = WriteWindow()
    assert window.judge(ANN, 5, True, False) == Verdict(APPLY, lost=4), "begun with nothing"
    window.record(BOB, 3, {})
    assert window.judge(BOB, 6, False, False) == Verdict(APPLY, lost=2), "begun with a snapshot"


def test_a_client_that_was_forgotten_is_refused_only_where_a_push_might_count_twice() -> None:
    window = WriteWindow(clients_max=2)
    for client in (ANN, BOB, (3, 3)):
        window.record(client, 1, {})
    assert window.judge(ANN, 1, True, True) == Verdict(UNKNOWN)
    assert window.judge(ANN, 2, False, True) == Verdict(APPLY)
    assert window.judge(BOB, 1, True, True) == Verdict(DUPLICATE)


def test_the_window_in_snapshots_is_read_and_written_as_ever() -> None:
    """By hand: id, incarnation, last number, what was refused of that push."""
    saved = [[2, 2, 9, {}], [1, 1, 4, {0: "why"}], [3, 3, 0, {}]]
    window = WriteWindow(clients_max=3)
    window.deserialize(saved)
    assert [list(one) for one in window.serialize()] == saved
    assert window.judge(ANN, 4, True, True) == Verdict(DUPLICATE)
    assert window.judge(ANN, 3, True, True) == Verdict(DUPLICATE)
    assert (window.refused(ANN, 4), window.refused(ANN, 3)) == ({0: "why"}, {})
    assert window.judge(ANN, 5, True, True) == Verdict(APPLY)
    assert window.judge(BOB, 12, True, True) == Verdict(APPLY, lost=2)
    window.record((4, 4), 1, {})
    assert window.judge(BOB, 9, True, True) == Verdict(UNKNOWN), "it was the first in the file"


@pytest.mark.parametrize("wrong", [["1", 1, 4, {}], [1, 1, 4, []], [1, 1, -1, {}]])
def test_a_window_of_somebody_elses_making_is_refused(wrong: list[object]) -> None:
    with pytest.raises(BadArguments, match="a window of pushes"):
        WriteWindow().deserialize([wrong])


def test_a_window_comes_back_from_a_snapshot() -> None:
    window, other = WriteWindow(), WriteWindow()
    window.record(ANN, 4, {0: "why"})
    other.deserialize(Decoder().decode(*encode(window.serialize())))
    assert other.judge(ANN, 4, True, True) == Verdict(DUPLICATE)
    assert other.refused(ANN, 4) == {0: "why"}
