"""The counters of one process, before anything is sent. Time is a number that the test gives."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import pytest

from prpc_engine.accumulator import Accumulator, Avg, CounterSet, Max, Sum, TopK
from prpc_engine.accumulator.counter import FOLD_COUNT, Counter
from prpc_engine.errors import BadArguments, Closed, ConfigError
from tests.helpers import ManualClock
from tests.prpc_engine.processes import PATIENCE_S


def make(
    law: Any = Sum, flush_count: int = 10, flush_s: float = 5.0
) -> tuple[CounterSet, Accumulator[Any], Counter]:
    counters = CounterSet()
    accumulator = Accumulator("test", law, flush_count, flush_s, counters)
    counter = counters.get("test")
    assert counter is not None
    return counters, accumulator, counter


def taken(counter: Counter, now_s: float = 0.0) -> Any:
    found = counter.take(now_s)
    return None if found is None else (found[0].value, found[1])  # type: ignore[attr-defined]


def test_what_was_written_is_taken_once() -> None:
    _, accumulator, counter = make()
    assert taken(counter) is None
    accumulator.write(1)
    accumulator.write(2.5)
    assert taken(counter) == (3.5, 2)
    assert taken(counter) is None


def test_a_counter_is_full_after_flush_count_values_and_wakes_its_sender_once() -> None:
    counters, accumulator, counter = make(flush_count=10)
    woken: list[None] = []
    counters.attach(object(), lambda: woken.append(None))
    for _ in range(9):
        accumulator.write(1)
    assert not counter.full
    for _ in range(20):
        accumulator.write(1)
    assert counter.full
    assert len(woken) == 1
    assert taken(counter) == (29, 29)
    assert not counter.full


@pytest.mark.parametrize("flush_count", [0, 5 * FOLD_COUNT])
def test_values_are_merged_long_before_they_are_sent(flush_count: int) -> None:
    _, accumulator, counter = make(flush_count=flush_count)
    for _ in range(3 * FOLD_COUNT):
        accumulator.write(1)
    assert len(counter._values) < FOLD_COUNT
    assert not counter.full
    assert taken(counter) == (3 * FOLD_COUNT, 3 * FOLD_COUNT)


def test_a_quiet_counter_is_due_after_flush_s(clock: ManualClock) -> None:
    counters, accumulator, counter = make(flush_s=5.0)
    assert counters.due(clock()) == []
    accumulator.write(1)
    assert counters.next_due_s() == clock() + 5.0
    assert counters.due(clock.advance(4.9)) == []
    assert counters.due(clock.advance(0.1)) == [counter]
    assert taken(counter, clock()) == (1, 1)
    assert counters.due(clock()) == []
    assert counters.next_due_s() == clock() + 5.0


def test_a_full_or_flushed_counter_is_due_at_once(clock: ManualClock) -> None:
    counters, accumulator, counter = make()
    accumulator.write(1)
    assert counters.due(clock()) == []
    accumulator.flush()
    assert counters.due(clock()) == [counter]


def test_the_most_impatient_user_of_a_name_decides() -> None:
    counters, one, counter = make(flush_count=0, flush_s=5.0)
    two = Accumulator("test", Sum, 3, 0.5, counters)
    assert (counter.flush_count, counter.flush_s) == (3, 0.5)
    one.write(1)
    two.write(2)
    assert taken(counter) == (3, 2)


def test_who_is_due_is_told_while_second_users_of_the_names_make_them_due_sooner() -> None:
    class Tightened(Counter):
        """After each look at `due_s` another thread has called tighten()."""

        @property
        def due_s(self) -> float | None:  # type: ignore[override]
            due_s, self.looked_at = self.looked_at, None
            return due_s

        @due_s.setter
        def due_s(self, due_s: float | None) -> None:
            self.looked_at = due_s

    counters, _, counter = make(flush_s=5.0)
    counter.__class__ = Tightened
    for now_s, due in ((0.0, []), (1.0, []), (6.0, [counter])):
        counter.due_s = 5.0
        assert counters.due(now_s) == due
        counter.due_s = 5.0
        assert counters.next_due_s() == 5.0


def test_a_refusal_that_is_over_as_it_is_told_is_told_whole() -> None:
    class Accepted(Counter):
        """After each look at `refusal` the server takes this counter again."""

        @property
        def refusal(self) -> str | None:  # type: ignore[override]
            refusal, self.looked_at = self.looked_at, None
            return refusal

        @refusal.setter
        def refusal(self, refusal: str | None) -> None:
            self.looked_at = refusal

    _, accumulator, counter = make()
    counter.__class__ = Accepted
    counter.refusal = "it is max() there"
    with pytest.raises(BadArguments, match=r"lost: it is max\(\) there"):
        accumulator.flush()


def test_101_threads_lose_nothing() -> None:
    _, accumulator, counter = make(flush_count=10)
    total = count = 0
    done = threading.Event()

    def write() -> None:
        for number in range(1000):
            accumulator.write(number)

    def take() -> None:
        nonlocal total, count
        while True:
            last = done.is_set()
            found = taken(counter)
            if found is not None:
                total, count = total + found[0], count + found[1]
            elif last:
                return

    threads = [threading.Thread(target=write) for _ in range(101)]
    taker = threading.Thread(target=take)
    for thread in [taker, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    taker.join()
    assert (total, count) == (101 * 499_500, 101_000)


def test_a_write_in_the_middle_of_a_merge_by_the_same_thread_neither_waits_nor_is_lost() -> None:
    """As a finalizer or a signal handler may do."""

    class Meddling(Sum, kind="meddling"):
        def merge_values(self, values: Any) -> None:
            if len(values) == FOLD_COUNT:
                for _ in range(2 * FOLD_COUNT):
                    accumulator.write(1)
            super().merge_values(values)

    _, accumulator, counter = make(Meddling, flush_count=0)
    for _ in range(FOLD_COUNT):
        accumulator.write(1)
    assert taken(counter) == (3 * FOLD_COUNT, 3 * FOLD_COUNT)


def test_an_array_written_by_the_thread_that_merges_does_not_wait_for_ever() -> None:
    class Meddling(Sum, kind="meddling with arrays"):
        def merge_values(self, values: Any) -> None:
            if not meddled.is_set():
                meddled.set()
                accumulator.write(np.array([10, 20]))
            super().merge_values(values)

    meddled = threading.Event()
    _, accumulator, counter = make(Meddling, flush_count=0)
    writer = threading.Thread(target=accumulator.write, args=(np.array([1, 2]),), daemon=True)
    writer.start()
    writer.join(PATIENCE_S)
    assert not writer.is_alive()
    value, writes = taken(counter)
    assert value.tolist() == [11, 22]
    assert writes == 2


def test_a_wrong_value_is_an_error_of_that_write_and_of_no_other() -> None:
    _, accumulator, counter = make()
    accumulator.write(1)
    for bad in ("1", None, np.zeros(2)):
        with pytest.raises(BadArguments, match="a sum counter"):
            accumulator.write(bad)
    accumulator.write(2)
    assert taken(counter) == (3, 2)


def test_a_number_after_an_array_is_refused_where_it_is_written() -> None:
    _, accumulator, counter = make()
    accumulator.write(np.array([1, 2]))
    with pytest.raises(BadArguments, match=r"of arrays of shape \(2,\) cannot take a number"):
        accumulator.write(1)
    accumulator.write(np.array([1, 2]))
    value, writes = taken(counter)
    assert value.tolist() == [2, 4]
    assert writes == 2


def test_what_an_aggregator_fails_to_merge_is_told_and_counted() -> None:
    class Failing(Sum, kind="failing"):
        def merge_values(self, values: Any) -> None:
            raise ZeroDivisionError("no")

    _, accumulator, counter = make(Failing, flush_count=3)
    accumulator.write(1)
    accumulator.write(1)
    with pytest.raises(BadArguments, match="'test' dropped 3 values: ZeroDivisionError: no"):
        accumulator.write(1)
    assert counter.dropped == 3


def test_a_batch_drops_only_the_values_that_would_overflow_and_tells_its_writers_once() -> None:
    huge = sys.float_info.max / 1.5
    _, accumulator, counter = make(Sum, flush_count=4)
    accumulator.write(1.0)
    accumulator.write(huge)
    accumulator.write(huge)
    with pytest.raises(
        BadArguments, match="'test' dropped 1 values: BadArguments: a sum counter would overflow"
    ):
        accumulator.write(3.0)
    found = counter.take(0.0)
    assert found is not None
    assert (found[0].value, found[1], counter.dropped) == (huge, 3, 1)  # type: ignore[attr-defined]
    accumulator.flush()


def test_values_that_overflow_in_the_sender_are_told_at_the_next_batch() -> None:
    _, accumulator, counter = make(TopK)
    accumulator.write(("a", 2**62))
    accumulator.write(("a", 2**62))
    assert counter.take(0.0) is not None
    counter.refusal = None  # the server has taken what was left
    with pytest.raises(BadArguments, match=r"'test' dropped 1 values: .* would overflow"):
        accumulator.flush()


def test_a_name_has_one_kind_in_a_process() -> None:
    counters, _, _ = make()
    with pytest.raises(
        ConfigError, match=r"counter 'test' is sum\(\) in this process, and max\(\) was asked for"
    ):
        Accumulator("test", Max, counters=counters)
    Accumulator("top", TopK(5), counters=counters)
    with pytest.raises(
        ConfigError, match=r"topk\(capacity=5\) in this process, and topk\(capacity=6\)"
    ):
        Accumulator("top", TopK(6), counters=counters)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", Sum), "counter name ''"),
        (("a\nb", Sum), "counter name"),
        (("a" * 300, Sum), "counter name"),
        (("a", int), "aggregator="),
        (("a", Sum, -1), "flush_count=-1"),
        (("a", Sum, 1.5), "flush_count=1.5"),
        (("a", Sum, 1, 0), "flush_s=0"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Accumulator(*arguments, counters=CounterSet())


def test_reading_needs_a_client_and_says_so() -> None:
    _, accumulator, _ = make(Avg)
    with pytest.raises(Closed, match="no open AccumulatorClient"):
        accumulator.read()


def test_a_fork_begins_with_empty_counters() -> None:
    _, accumulator, counter = make()
    accumulator.write(1)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            empty = taken(counter) is None
            accumulator.write(7)
            code = 0 if empty and taken(counter) == (7, 1) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert taken(counter) == (1, 1)
