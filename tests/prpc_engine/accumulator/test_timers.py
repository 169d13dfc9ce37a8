"""Auto timers: what is timed is counted, by name, in any thread, and not at all while they are
off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import pytest

from prpc_engine.accumulator import CounterSet, Timer, disable_timers, enable_timers, timer
from prpc_engine.accumulator.counter import Counter
from prpc_engine.errors import ConfigError
from tests.prpc_engine.processes import PATIENCE_S


@pytest.fixture
def counters() -> Iterator[CounterSet]:
    own = CounterSet()
    enable_timers(own)
    yield own
    enable_timers()
    disable_timers()


def found(counters: CounterSet, name: str) -> Timer | None:
    counter = counters.get(name)
    taken = None if counter is None else counter.take(0.0)
    if taken is None:
        return None
    assert isinstance(taken[0], Timer)
    return taken[0]


def test_a_with_statement_is_timed_also_when_it_raises(counters: CounterSet) -> None:
    with timer("reader", "parse"):
        pass
    with pytest.raises(KeyError), timer("reader", "parse"):
        raise KeyError
    one = found(counters, "timer::reader::parse(ms)")
    assert one is not None
    assert one.count == 2
    assert 0 < one.minimum <= one.maximum


def test_a_decorated_function_keeps_its_name_and_its_result(counters: CounterSet) -> None:
    @timer("reader", "double", "us")
    def double(number: int) -> int:
        """Twice as much."""
        return 2 * number

    assert [double(number) for number in range(10)] == [2 * number for number in range(10)]
    assert (double.__name__, double.__doc__) == ("double", "Twice as much.")
    one = found(counters, "timer::reader::double(us)")
    assert one is not None
    assert one.count == 10


def test_units_measure_the_same_time(counters: CounterSet) -> None:
    with timer("a", "b", "us"), timer("a", "b", "s"):
        sum(range(100_000))
    us, s = found(counters, "timer::a::b(us)"), found(counters, "timer::a::b(s)")
    assert us is not None
    assert s is not None
    assert us.total > s.total * 1e6 > 0


def test_one_timer_in_itself_measures_each_block(counters: CounterSet) -> None:
    one = timer("a", "nested", "s")
    begin_s = perf_counter()
    with one:
        with one:
            pass
        with one:
            pass
    ended_s = perf_counter()
    found_timer = found(counters, "timer::a::nested(s)")
    assert found_timer is not None
    assert found_timer.count == 3
    assert ended_s - begin_s >= found_timer.maximum
    # the outer block is longer than both in it
    assert found_timer.maximum >= found_timer.total - found_timer.maximum


def test_one_timer_in_two_threads_and_two_generators_measures_each_from_its_own_start(
    counters: CounterSet,
) -> None:
    one = timer("a", "shared", "s")
    entered, leave = threading.Event(), threading.Event()

    def thread() -> None:
        with one:
            entered.set()
            leave.wait(PATIENCE_S)

    def generator() -> Iterator[None]:
        with one:
            yield

    def latest() -> float:
        taken = found(counters, "timer::a::shared(s)")
        assert taken is not None
        assert taken.count == 1
        return taken.total

    begin_s = perf_counter()
    other = threading.Thread(target=thread)
    other.start()
    assert entered.wait(PATIENCE_S)
    entered_s = perf_counter()
    early, late = generator(), generator()
    next(early)
    between_s = perf_counter()
    next(late)
    with one:
        pass
    assert latest() <= perf_counter() - between_s
    at_least_s = perf_counter() - between_s
    assert next(early, "end") == "end"  # began first, ends first
    assert latest() >= at_least_s
    assert next(late, "end") == "end"
    assert latest() <= perf_counter() - between_s
    leave_s = perf_counter()
    leave.set()
    other.join()
    assert leave_s - entered_s <= latest() <= perf_counter() - begin_s


def test_a_timer_on_an_exit_stack_is_measured(counters: CounterSet) -> None:
    with ExitStack() as stack:
        stack.enter_context(timer("a", "stack"))
    one = found(counters, "timer::a::stack(ms)")
    assert one is not None
    assert one.count == 1


def test_a_block_that_began_while_timers_were_off_is_not_measured_as_another(
    counters: CounterSet,
) -> None:
    one = timer("a", "late")
    disable_timers()
    with one:
        enable_timers(counters)
        with one:
            pass
    taken = found(counters, "timer::a::late(ms)")
    assert taken is not None
    assert taken.count == 1


def test_threads_recursion_and_coroutines_never_see_each_others_start(counters: CounterSet) -> None:
    @timer("a", "recursive")
    def recursive(depth: int) -> None:
        if depth:
            recursive(depth - 1)

    def generator() -> Iterator[None]:
        with timer("a", "interleaved"):
            yield

    threads = [threading.Thread(target=recursive, args=(9,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    one, two = generator(), generator()
    next(one)
    next(two)
    assert next(one, "end") == next(two, "end") == "end"
    for thread in threads:
        thread.join()
    recursive_timer, interleaved = (
        found(counters, "timer::a::recursive(ms)"),
        found(counters, "timer::a::interleaved(ms)"),
    )
    assert recursive_timer is not None
    assert interleaved is not None
    assert (recursive_timer.count, interleaved.count) == (200, 2)


def test_10_000_fast_timers_are_10_000_values(counters: CounterSet) -> None:
    for _ in range(10_000):
        with timer("a", "fast"):
            pass
    one = found(counters, "timer::a::fast(ms)")
    assert one is not None
    assert one.count == 10_000


def test_while_off_nothing_is_counted_and_the_switch_may_be_thrown_in_the_middle(
    counters: CounterSet,
) -> None:
    @timer("a", "decorated")
    def nothing() -> None:
        """It does not do anything."""

    disable_timers()
    with timer("a", "begun off"):
        enable_timers(counters)
    with timer("a", "begun on"):
        disable_timers()
        nothing()
    names = [counter.name for counter in counters.all()]
    assert names == ["timer::a::begun on(ms)"]


def test_an_unknown_unit_is_named_with_those_there_are(counters: CounterSet) -> None:
    with pytest.raises(ConfigError, match="unit='days': allowed are us, ms, s, m, h"):
        timer("a", "b", "days")(len)
    with pytest.raises(ConfigError, match="unit='days'"), timer("a", "b", "days"):
        pass


def test_a_timer_that_its_server_refuses_does_not_break_what_it_times(
    counters: CounterSet, caplog: Any
) -> None:
    with timer("a", "b"):
        pass
    counter = counters.get("timer::a::b(ms)")
    assert counter is not None
    counter.refusal = "it is sum() at the server"
    for _ in range(2000):
        with timer("a", "b"):
            pass
    assert "is refused" in caplog.text


def test_a_timer_made_as_the_counters_are_switched_does_not_stay_with_those_before() -> None:
    others = CounterSet()

    class Before(CounterSet):
        def counter(self, *arguments: Any) -> Counter:
            enable_timers(others)  # as another thread does in the middle
            return super().counter(*arguments)

    try:
        enable_timers(Before())
        with timer("a", "b"):
            pass
        with timer("a", "b"):
            pass
        one = found(others, "timer::a::b(ms)")
        assert one is not None
        assert one.count == 1
    finally:
        enable_timers()
        disable_timers()
