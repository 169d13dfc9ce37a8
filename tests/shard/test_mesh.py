"""Functions sent from process to process: what crosses, what comes back, what is given up, what
runs first.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard import (
    BULK,
    CancelledError,
    Future,
    LocalProtocolError,
    PeerLostError,
    ShardError,
    ShardGroup,
    in_class,
    this_shard,
)
from shard.group.functions import FUNCTIONS_MAX
from shard.group.mesh import ShardChannel
from shard.memory.counters import CounterRow
from tests.held import at
from tests.pasted import without_stalls
from tests.program import wait_until
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]


def ask(group: ShardGroup, index: int, function: Callable[..., Any], *args: Any) -> Any:
    return group.submit_to(index, function, *args).result(PATIENCE_S)


def figures(group: ShardGroup, index: int) -> CounterRow:
    """The shard's row as it stands at its end, when it is written once more."""
    group.close()
    return group.statistics().shards[index].counters


# -- functions and results -------------------------------------------------------------------------


def test_functions_run_in_the_shard_they_are_sent_to(group: ShardGroup) -> None:
    pids = [ask(group, number, os.getpid) for number in range(2)]
    assert len({os.getpid(), *pids}) == 3
    assert group.map(os.getpid) == pids
    assert group.map(functions.index) == [0, 1]


def test_arguments_and_results_of_all_kinds_cross(group: ShardGroup) -> None:
    for value in (1, 2.5, "three", b"four", [5, (6,)], np.float32(7)):
        assert ask(group, 1, functions.double, value) == value * 2
    assert ask(group, 0, math.sqrt, 2.0) == math.sqrt(2.0)
    big = bytes(3_000_000)
    assert ask(group, 0, functions.double, big) == bytes(6_000_000)


def test_lambdas_and_closures_are_sent_by_value(group: ShardGroup) -> None:
    factor = 3
    assert ask(group, 1, lambda value: value * factor, 14) == 42
    for number in range(3):
        assert ask(group, 0, lambda number=number: number) == number


def test_a_closure_takes_its_variable_along_as_it_stands_at_each_call(group: ShardGroup) -> None:
    factor = 1

    def scale(value: int) -> int:
        return value * factor

    while factor < 4:
        factor += 1
        assert ask(group, 0, scale, 10) == 10 * factor


def test_bound_methods_and_partials_take_their_state_along_as_it_stands_at_each_call(
    group: ShardGroup,
) -> None:
    tin = functions.Tin(5)
    assert ask(group, 0, tin.add, 1) == 6
    assert tin.value == 5, "a copy of it crossed"
    tin.value = 7
    assert ask(group, 0, tin.get) == 7
    assert ask(group, 1, functools.partial(max, 3), 2) == 3
    assert ask(group, 1, functools.partial(math.pow, 2.0), 10.0) == 1024.0


def test_a_class_is_a_function_that_makes_an_object(group: ShardGroup) -> None:
    assert ask(group, 0, functions.Tin, 3).value == 3


def test_a_callable_object_that_has_no_hash_is_sent_with_each_call(group: ShardGroup) -> None:
    scale = Scale(3)
    assert ask(group, 0, scale, 2) == 6
    scale.factor = 4
    assert ask(group, 0, scale, 2) == 8


@dataclass
class Scale:
    """Compares by value and so has no hash."""

    factor: int

    def __call__(self, value: int) -> int:
        return value * self.factor


def test_more_functions_than_a_lane_remembers_are_sent_again(group: ShardGroup) -> None:
    first = lambda: "first"  # noqa: E731
    assert ask(group, 0, first) == "first"
    futures = [
        group.submit_to(0, eval(f"lambda: {number}")) for number in range(FUNCTIONS_MAX + 100)
    ]
    assert [future.result(PATIENCE_S) for future in futures] == list(range(FUNCTIONS_MAX + 100))
    assert ask(group, 0, first) == "first"
    assert ask(group, 0, functions.index) == 0


def test_coroutine_functions_run_as_tasks(group: ShardGroup) -> None:
    assert group.map(functions.double_async, 4) == [8, 8]


def test_a_function_that_returns_a_future_is_answered_when_that_is_done(group: ShardGroup) -> None:
    assert ask(group, 0, functions.double_in_the_next_turn, 4) == 8
    assert ask(group, 0, functions.hand_on, 1, 5) == 10
    assert ask(group, 0, functions.hand_on, 0, 6) == 12, "of a call to itself, too"


def test_shards_ask_each_other(group: ShardGroup) -> None:
    assert ask(group, 0, functions.ask, 1, 5) == (0, 10)
    assert ask(group, 1, functions.ask, 0, 6) == (1, 12)
    assert ask(group, 0, functions.ask, 0, 7) == (0, 14), "and themselves"
    assert ask(group, 0, functions.around, 9) == [0, 1] * 5


def test_many_calls_are_in_flight_at_once_and_keep_their_results(group: ShardGroup) -> None:
    futures = [group.submit_to(number % 2, functions.double, number) for number in range(2000)]
    assert [future.result(PATIENCE_S) for future in futures] == [
        2 * number for number in range(2000)
    ]


def test_threads_may_submit_at_the_same_time(group: ShardGroup) -> None:
    wrong: list[int] = []
    finished: list[int] = []

    def work(name: int) -> None:
        for number in range(200):
            value = name * 1000 + number
            if ask(group, number % 2, functions.double, value) != 2 * value:
                wrong.append(value)
        finished.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (sorted(finished), wrong) == ([0, 1, 2, 3], [])


def test_results_can_be_awaited_in_asyncio(group: ShardGroup) -> None:
    async def work() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    async def one(number: int) -> int:
        return int(await group.submit_to(number % 2, functions.double, number))

    assert asyncio.run(work()) == [2 * number for number in range(20)]


PROMPT = """
import functools, shard
from tests.shard import group_functions as functions
factor = 3
def scale(value):
    return value * factor
class Counter:
    def __init__(self, first):
        self.value = first
    def add(self, value):
        self.value += value
        return self.value
async def scale_later(value):
    return scale(value)
with shard.ShardGroup(2) as group:
    by_value = group.map(lambda value: value * factor, 3)
    print(group.map(scale, 2), by_value, group.map(functools.partial(scale, 4)))
    print(group.map(scale_later, 5), group.map(Counter(1).add, 1))
    counters = shard.Sharded(Counter, 10)
    by_function = counters.invoke_on_all(Counter.add, 1).result()
    print(by_function, counters.invoke_on_all("add", 1).result())
    group.submit_to(0, functions.note, "there").result()
    group.submit_to(0, lambda: functions.note(factor)).result()
    print(group.submit_to(0, functions.notes).result(), functions.notes())
"""


def test_functions_and_classes_typed_at_a_prompt_are_sent_by_value_and_modules_by_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-"],
        input=PROMPT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert without_stalls(ended.stderr) == ""
    assert ended.stdout.splitlines() == [
        "[6, 6] [9, 9] [12, 12]",
        "[15, 15] [2, 2]",
        "[11, 11] [12, 12]",
        "['there', 3] []",
    ]


# -- errors ----------------------------------------------------------------------------------------


def test_an_exception_comes_back_with_its_type_message_and_traceback(group: ShardGroup) -> None:
    with pytest.raises(functions.OddError, match="7") as caught:
        ask(group, 1, functions.raise_odd, 7)
    assert caught.value.one == 7
    cause = str(caught.value.__cause__)
    assert 'raise OddError(one, "two")' in cause
    assert "group_functions.py" in cause


def test_an_exception_of_another_shard_is_caught_in_the_one_that_asked(group: ShardGroup) -> None:
    assert ask(group, 0, functions.ask_and_catch, 1) == "caught 1"


def test_an_exception_with_a_constructor_of_its_own_keeps_its_type_text_and_attributes(
    group: ShardGroup,
) -> None:
    with pytest.raises(functions.TwoArgumentsError) as caught:
        ask(group, 0, functions.raise_two_arguments)
    assert (str(caught.value), caught.value.one) == ("1 and 2", 1)
    with pytest.raises(functions.AlteredError, match=r"^no luck$"):
        ask(group, 0, functions.raise_altered)


def test_an_exception_that_does_not_load_comes_back_as_its_text(group: ShardGroup) -> None:
    with pytest.raises(ShardError, match="WontLoadError: 1 and 2") as caught:
        ask(group, 0, functions.raise_wont_load)
    assert 'raise WontLoadError("1 and 2")' in str(caught.value.__cause__)


def test_an_exception_whose_class_is_known_over_there_only_comes_back_as_its_text(
    group: ShardGroup,
) -> None:
    with pytest.raises(ShardError, match="HomelessError: nobody knows me") as caught:
        ask(group, 0, functions.raise_homeless)
    assert "in raise_homeless" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
)
def test_what_a_function_raises_ends_its_call_and_never_the_shard(
    group: ShardGroup, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("oh")

    with pytest.raises(error, match="oh"):
        ask(group, 0, fail)
    assert group.map(functions.index) == [0, 1]


def test_an_exit_in_a_function_ends_its_call_and_never_the_shard(group: ShardGroup) -> None:
    with pytest.raises(SystemExit) as caught:
        ask(group, 0, functions.raise_system_exit)
    assert caught.value.code == 3
    assert group.map(functions.index) == [0, 1]


@pytest.mark.parametrize("function", [functions.raise_textless, functions.raise_textless_in_a_task])
def test_an_exception_whose_text_cannot_be_made_ends_its_call_and_never_the_shard(
    group: ShardGroup, function: Callable[..., Any]
) -> None:
    with pytest.raises(functions.TextlessError) as caught:
        ask(group, 0, function)
    assert "TextlessError: <exception str() failed>" in str(caught.value.__cause__)
    assert group.map(functions.index) == [0, 1]


def test_values_that_cannot_be_read_again_end_their_call_only(group: ShardGroup) -> None:
    with pytest.raises(ShardError, match="cannot be read here: TextlessError: <exception str"):
        ask(group, 0, functions.Unreadable)
    with pytest.raises(functions.TextlessError):
        ask(group, 0, str, functions.Unreadable())
    assert group.map(functions.index) == [0, 1]


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_call_only(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="generator"):
        ask(group, 0, functions.give_unpicklable)
    assert group.map(functions.index) == [0, 1]


def test_an_argument_that_cannot_be_pickled_is_refused_here(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="generator"):
        group.submit_to(0, functions.double, (each for each in [1]))
    assert group.statistics().calls_in_flight == 0


def test_a_function_that_cannot_be_sent_is_refused_here_and_named(group: ShardGroup) -> None:
    lock = threading.Lock()
    generator = (each for each in [1])

    def use() -> object:
        return lock, next(generator)

    with pytest.raises(
        LocalProtocolError,
        match=r"use.*cannot be sent to another shard: .*; one at the top of a module can",
    ):
        group.submit_to(0, use)
    assert group.statistics().calls_in_flight == 0


def test_a_call_without_its_arguments_raises_type_error(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="missing 1 required"):
        ask(group, 0, functions.double)


def test_a_result_that_is_not_waited_for_long_enough_is_a_timeout_and_the_work_goes_on(
    group: ShardGroup, fifo: str
) -> None:
    future = group.submit_to(0, functions.read_fifo, fifo)
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        future.result(0.05)
    assert ask(group, 1, functions.index) == 1, "the other shard is free"
    Path(fifo).write_text("late")
    assert future.result(PATIENCE_S) == "late"


# -- cancel ----------------------------------------------------------------------------------------


def test_a_cancelled_task_ends_over_there_and_its_finally_runs(group: ShardGroup) -> None:
    task = group.submit_to(0, functions.wait_for_ever, "task")
    assert ask(group, 0, functions.notes) == ["task began"]
    assert task.cancel()
    assert isinstance(task.error(), CancelledError)
    assert ask(group, 0, functions.notes) == ["task began", "task ended"]
    assert not task.cancel(), "once"
    row = figures(group, 0)
    assert (row.tasks, row.cancelled) == (1, 1)


def test_a_call_that_is_cancelled_before_it_is_read_gives_no_result(
    group: ShardGroup, fifo: str
) -> None:
    busy = group.submit_to(0, functions.read_fifo, fifo)
    plain, task = (
        group.submit_to(0, functions.note, "plain"),
        group.submit_to(0, functions.wait_for_ever, "task"),
    )
    error = ShardError("not wanted")
    assert task.cancel(error)
    assert plain.cancel()
    assert task.error() is error
    assert isinstance(plain.error(), CancelledError)
    Path(fifo).write_text("go")
    assert busy.result(PATIENCE_S) == "go"
    assert ask(group, 0, functions.notes) == ["plain", "task began", "task ended"], (
        "a plain function runs when it is found"
    )
    assert isinstance(plain.error(), CancelledError), "its late reply was dropped"
    assert group.statistics().calls_in_flight == 0
    row = figures(group, 0)
    assert (row.calls, row.tasks, row.cancelled) >= (4, 1, 1)


def test_after_the_reply_there_is_nothing_to_cancel(group: ShardGroup) -> None:
    future = group.submit_to(0, functions.double, 4)
    assert future.result(PATIENCE_S) == 8
    assert not future.cancel()
    assert future.result() == 8


def test_a_bulk_call_that_is_cancelled_in_its_queue_never_runs(
    group: ShardGroup, fifo: str
) -> None:
    busy = group.submit_to(0, functions.read_fifo, fifo)
    calls = [group.submit_to(0, functions.bulk_step, number) for number in range(3)]
    assert calls[1].cancel()
    Path(fifo).write_text("go")
    assert busy.result(PATIENCE_S) == "go"
    assert [calls[number].result(PATIENCE_S) for number in (0, 2)] == [0, 2]
    assert ask(group, 0, functions.notes) == [0, 2]
    assert figures(group, 0).cancelled == 1


@pytest.mark.parametrize("function", [functions.end_by_an_error, functions.end_by_an_await])
def test_a_cancelled_task_that_ends_badly_harms_nobody_else(function: Callable[..., Any]) -> None:
    with ShardGroup(2, start_method="forkserver", drain_s=0.5) as group:
        task = group.submit_to(0, function)
        assert task.cancel()
        assert group.map(functions.index) == [0, 1]
        row = figures(group, 0)
        assert (row.tasks, row.cancelled) == (1, 1), "close() waited for it as long as it says"
        assert group.statistics().shards[0].exit_code == 0


def test_cancelling_a_call_that_was_handed_on_gives_that_up_too(group: ShardGroup) -> None:
    task = group.submit_to(0, hand_on_a_wait, 1)
    assert ask(group, 0, functions.index) == 0
    assert task.cancel()
    assert ask(group, 0, functions.ask, 1, 1) == (0, 2), "behind the cancellation, on the same lane"
    assert ask(group, 1, functions.notes) == ["handed on began", "handed on ended"]


def hand_on_a_wait(other: int) -> Any:
    return this_shard().submit_to(other, functions.wait_for_ever, "handed on")


def test_after_its_shard_is_gone_there_is_nothing_to_cancel() -> None:
    group = ShardGroup(1, start_method="forkserver", drain_s=0.0)
    future = group.submit_to(0, functions.wait_for_ever, "task")
    group.close()
    assert isinstance(future.error(), ShardError)
    assert not future.cancel()


def test_a_call_entered_at_the_moment_its_shard_dies_keeps_no_other_from_being_told(
    group: ShardGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CallId(int):
        def __hash__(self) -> int:
            entering.set()
            assert ended.wait(PATIENCE_S)
            return int.__hash__(self)

    entering, ended, errors = threading.Event(), threading.Event(), list[BaseException]()

    def enter(_: Future) -> None:
        ended.set()
        late.join(PATIENCE_S)

    def submit_late() -> None:
        try:
            group.submit_to(0, functions.index)
        except PeerLostError as error:
            errors.append(error)

    pid = ask(group, 0, os.getpid)
    ask(group, 0, functions.index)
    calls = [group.submit_to(0, signal.pause) for _ in range(2)]
    calls[0].when_done(enter)
    monkeypatch.setattr(group._lanes[0], "_call_ids", iter([CallId(1 << 40)]))
    late = threading.Thread(target=submit_late)
    late.start()
    assert entering.wait(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    assert [type(call.error(PATIENCE_S)) for call in calls] == [PeerLostError] * 2
    assert len(errors) == 1


def test_a_call_that_is_under_way_when_its_shard_dies_says_so() -> None:
    with ShardGroup(1, start_method="forkserver", drain_s=0.0) as group:
        errors: list[Exception] = []

        def be_late(self: ShardChannel) -> None:
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: self.connection.error is not None and not self.in_flight,
                "its calls are told of the end",
            )

        def call() -> None:
            try:
                group.submit_to(0, os.getpid)
            except Exception as error:
                errors.append(error)

        pid = ask(group, 0, os.getpid)
        with at("mesh.before_call", be_late, times=1):
            caller = threading.Thread(target=call)
            caller.start()
            caller.join(PATIENCE_S)
        assert [type(error) for error in errors] == [PeerLostError]


# -- classes of work -------------------------------------------------------------------------------


def test_functions_of_a_class_run_as_tasks_of_it(group: ShardGroup) -> None:
    assert [ask(group, 0, functions.bulk_step, 1), ask(group, 0, functions.bulk_task, 2)] == [1, 2]
    assert ask(group, 0, functions.notes) == [1, 2]
    assert figures(group, 0).tasks == 2


def test_a_function_keeps_its_class_when_it_goes_with_each_call(
    group: ShardGroup, fifo: str
) -> None:
    said = "bulk"
    bulk = [
        in_class(BULK)(lambda: functions.note(said)),
        in_class(BULK)(Scale(2)),
        in_class(BULK)(lambda: functions.note("lambda")),
    ]
    busy = group.submit_to(0, functions.read_fifo, fifo)
    calls = [
        group.submit_to(0, each, *args) for each, args in zip(bulk, ((), (1,), ()), strict=True)
    ]
    plain = group.submit_to(0, functions.note, "plain")
    Path(fifo).write_text("go")
    assert [call.result(PATIENCE_S) for call in (busy, *calls, plain)] == [
        "go",
        None,
        2,
        None,
        None,
    ]
    assert sorted(ask(group, 0, functions.notes)) == ["bulk", "lambda", "plain"]
    assert figures(group, 0).tasks == 3


def test_bulk_work_delays_a_call_by_few_turns(group: ShardGroup, fifo: str) -> None:
    busy = group.submit_to(0, functions.read_fifo, fifo)
    bulk = [group.submit_to(0, functions.bulk_step, number) for number in range(40)]
    plain = group.submit_to(0, functions.notes)
    Path(fifo).write_text("go")
    # A turn does one step that is longer than its slice, and looks for calls then. It takes the 41
    # records out of the ring in that slice, or on a busy machine in some: six were seen.
    assert len(plain.result(PATIENCE_S)) <= len(bulk) // 4
    assert busy.result(PATIENCE_S) == "go"
    assert [each.result(PATIENCE_S) for each in bulk] == list(range(40))


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_bulk_task_submits_is_bulk_there_unless_it_says_otherwise(
    group: ShardGroup, index: int
) -> None:
    bulk, latency = "bulk", "latency"
    assert ask(group, 0, functions.classes_of_submitted, index) == [
        bulk,
        bulk,
        latency,
        bulk,
        bulk,
        latency,
    ]
    assert ask(group, 0, functions.classes_of_submitted_by_latency, index) == [
        latency,
        latency,
        bulk,
    ]
    assert ask(group, index, functions.says_its_class) == latency, "called by the application"
