"""A group of shards: functions sent to processes, what comes back, and who survives whom."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from shard import ClosedError, ForkedError, PeerLostError, ShardError, ShardGroup, this_shard, usable_cores
from shard.mesh import FUNCTIONS_MAX
from tests.shard import group_functions as functions

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0  # a test that waits longer has failed
BOUND_S = 10.0  # what "quickly" means on a busy machine


@pytest.fixture
def group() -> Iterator[ShardGroup]:
    with ShardGroup(2) as made:
        yield made


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """A function that reads it blocks its shard until the test writes it."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "a shard outlived its parent"
        time.sleep(0.005)


# -- functions and results ---------------------------------------------------------------------------------------------


def test_functions_run_in_the_shard_they_are_sent_to(group: ShardGroup) -> None:
    pids = [group.submit_to(number, os.getpid).result(PATIENCE_S) for number in range(2)]
    assert len({os.getpid(), *pids}) == 3
    assert group.map(os.getpid) == pids
    assert group.map(functions.index) == [0, 1]


def test_arguments_and_results_of_all_kinds_cross(group: ShardGroup) -> None:
    for value in (1, 2.5, "three", b"four", [5, (6,)], np.float32(7)):
        assert group.submit_to(1, functions.double, value).result(PATIENCE_S) == value * 2
    assert group.submit_to(0, math.sqrt, 2.0).result(PATIENCE_S) == math.sqrt(2.0)
    big = bytes(3_000_000)
    assert group.submit_to(0, functions.double, big).result(PATIENCE_S) == bytes(6_000_000)


def test_lambdas_and_closures_are_sent_by_value(group: ShardGroup) -> None:
    factor = 3
    assert group.submit_to(1, lambda value: value * factor, 14).result(PATIENCE_S) == 42
    for number in range(3):
        assert group.submit_to(0, lambda number=number: number).result(PATIENCE_S) == number


def test_more_functions_than_a_lane_remembers_are_sent_again(group: ShardGroup) -> None:
    futures = [group.submit_to(0, _Constant(number)) for number in range(FUNCTIONS_MAX + 100)]
    assert [future.result(PATIENCE_S) for future in futures] == list(range(FUNCTIONS_MAX + 100))
    assert group.submit_to(0, functions.index).result(PATIENCE_S) == 0


class _Constant:
    """A callable, each instance another function to the lane."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self) -> int:
        return self._number


def test_coroutine_functions_run_as_tasks(group: ShardGroup) -> None:
    assert group.map(functions.double_async, 4) == [8, 8]


def test_shards_ask_each_other(group: ShardGroup) -> None:
    assert group.submit_to(0, functions.ask, 1, 5).result(PATIENCE_S) == (0, 10)
    assert group.submit_to(1, functions.ask, 0, 6).result(PATIENCE_S) == (1, 12)
    assert group.submit_to(0, functions.ask, 0, 7).result(PATIENCE_S) == (0, 14), "and themselves"
    assert group.submit_to(0, functions.around, 9).result(PATIENCE_S) == [0, 1] * 5


def test_an_exception_of_another_shard_is_caught_in_the_one_that_asked(group: ShardGroup) -> None:
    assert group.submit_to(0, functions.ask_and_catch, 1).result(PATIENCE_S) == "caught 1"


def test_many_calls_are_in_flight_at_once_and_keep_their_results(group: ShardGroup) -> None:
    futures = [group.submit_to(number % 2, functions.double, number) for number in range(2000)]
    assert [future.result(PATIENCE_S) for future in futures] == [2 * number for number in range(2000)]


def test_threads_may_submit_at_the_same_time(group: ShardGroup) -> None:
    wrong: list[int] = []
    finished: list[int] = []

    def work(name: int) -> None:
        for number in range(200):
            value = name * 1000 + number
            if group.submit_to(number % 2, functions.double, value).result(PATIENCE_S) != 2 * value:
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


def test_arrays_cross_with_their_values_whatever_their_size(group: ShardGroup) -> None:
    for count in (1, 100, 1_000_000):
        assert group.submit_to(0, functions.mean, np.full(count, 3.0)).result(PATIENCE_S) == 3
        for function in (functions.ramp, functions.ramp_in_slab):
            array = group.submit_to(1, function, count).result(PATIENCE_S)
            assert array.dtype == np.float64
            assert array[-1] == count - 1


def test_large_arrays_are_read_only_where_they_arrive(group: ShardGroup) -> None:
    assert not group.submit_to(0, functions.is_writable, np.zeros(100_000)).result(PATIENCE_S)
    assert not group.submit_to(0, functions.ramp, 100_000).result(PATIENCE_S).flags.writeable


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_an_exception_comes_back_with_its_type_message_and_traceback(group: ShardGroup) -> None:
    with pytest.raises(functions.OddError, match="7") as caught:
        group.submit_to(1, functions.raise_odd, 7).result(PATIENCE_S)
    assert caught.value.one == 7
    cause = str(caught.value.__cause__)
    assert 'raise OddError(one, "two")' in cause
    assert "group_functions.py" in cause


def test_an_exception_that_does_not_load_comes_back_as_its_text(group: ShardGroup) -> None:
    with pytest.raises(ShardError, match="WontLoadError: 1 and 2") as caught:
        group.submit_to(0, functions.raise_wont_load).result(PATIENCE_S)
    assert "raise WontLoadError(1, 2)" in str(caught.value.__cause__)


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_call_only(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="generator"):
        group.submit_to(0, functions.give_unpicklable).result(PATIENCE_S)
    assert group.map(functions.index) == [0, 1]


def test_an_argument_that_cannot_be_pickled_is_refused_here(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="generator"):
        group.submit_to(0, functions.double, (each for each in [1]))
    assert group.statistics().calls_in_flight == 0


def test_a_call_without_its_arguments_raises_type_error(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="missing 1 required"):
        group.submit_to(0, functions.double).result(PATIENCE_S)


def test_a_result_that_is_not_waited_for_long_enough_is_a_timeout_and_the_work_goes_on(group: ShardGroup, fifo: str) -> None:
    future = group.submit_to(0, functions.read_fifo, fifo)
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        future.result(0.05)
    assert group.submit_to(1, functions.index).result(PATIENCE_S) == 1, "the other shard is free"
    Path(fifo).write_text("late")
    assert future.result(PATIENCE_S) == "late"


# -- death -------------------------------------------------------------------------------------------------------------


def test_a_killed_shard_ends_its_calls_by_name_and_the_others_go_on(group: ShardGroup, fifo: str) -> None:
    calls = [group.submit_to(0, functions.read_fifo, fifo), group.submit_to(0, functions.index)]
    (pid,) = [each.pid for each in group.statistics().shards if each.index == 0]
    os.kill(pid, signal.SIGKILL)
    for call in calls:
        error = call.error(BOUND_S)
        assert isinstance(error, PeerLostError)
        assert "shard 0" in str(error)
    with pytest.raises(PeerLostError, match=rf"shard 0 \(pid {pid}\) is gone, exit code -9"):
        group.submit_to(0, functions.index)
    with pytest.raises(PeerLostError):
        group.map(functions.index)
    assert group.submit_to(1, functions.index).result(PATIENCE_S) == 1
    assert [each.alive for each in group.statistics().shards] == [False, True]


def test_a_shard_that_waits_for_a_killed_one_learns_of_it(group: ShardGroup, fifo: str) -> None:
    waiting = group.submit_to(1, functions.wait_for_call, 0, fifo)
    writer = os.open(fifo, os.O_WRONLY)  # shard 0 is in it now
    (pid,) = [each.pid for each in group.statistics().shards if each.index == 0]
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(BOUND_S) == "PeerLostError"
    os.close(writer)
    with pytest.raises(ShardError, match="there is no shard 0 here: this group has shards 0 to 1, or it died"):
        group.submit_to(1, functions.ask, 0, 1).result(PATIENCE_S)


def test_a_shard_that_kills_itself_ends_its_own_call(group: ShardGroup) -> None:
    with pytest.raises(PeerLostError, match="may have run"):
        group.submit_to(1, functions.kill_myself).result(BOUND_S)


def test_shards_end_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-m", "tests.shard.group_functions"], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(gone(pid) for pid in pids)
    parent.kill()
    parent.wait(PATIENCE_S)
    wait_until_gone(pids)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_lets_shards_finish_cleanly(tmp_path: Path) -> None:
    with ShardGroup(2) as group:
        group.submit_to(1, functions.note_the_end, str(tmp_path / "end")).result(PATIENCE_S)
        pids = group.map(os.getpid)
        processes = list(group._processes)
    assert (tmp_path / "end").read_text() == "stopped"
    assert all(gone(pid) for pid in pids)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_shard_that_is_busy_at_close_is_killed_within_bounds(fifo: str) -> None:
    group = ShardGroup(2)
    busy = group.submit_to(0, functions.read_fifo, fifo)
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started < BOUND_S
    assert isinstance(busy.error(0.0), ShardError)
    assert [process.exitcode for process in group._processes] == [-signal.SIGKILL, 0]


def test_after_close_submit_says_so_and_a_second_close_does_nothing(group: ShardGroup) -> None:
    group.close()
    group.close()
    with pytest.raises(ClosedError, match="this group was closed here"):
        group.submit_to(0, functions.index)
    with pytest.raises(ClosedError, match="this group was closed here"):
        group.map(functions.index)


def test_a_group_with_a_killed_shard_closes_as_any_other() -> None:
    group = ShardGroup(2)
    os.kill(group.statistics().shards[1].pid, signal.SIGKILL)
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started < BOUND_S


# -- sizes, statistics, places -----------------------------------------------------------------------------------------


def test_an_index_out_of_range_is_named_with_those_there_are(group: ShardGroup) -> None:
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"there is no shard {index}: this group has shards 0 to 1"):
            group.submit_to(index, functions.index)


@pytest.mark.parametrize("size", [0, -1, 257])
def test_an_impossible_size_is_named_with_the_bounds(size: int) -> None:
    with pytest.raises(ValueError, match=f"a group of {size} shards: 1 to 256 are possible"):
        ShardGroup(size)


def test_statistics_count_what_the_shards_did(group: ShardGroup) -> None:
    before = group.statistics().shards[1].counters
    for number in range(5):
        group.submit_to(1, functions.double, number).result(PATIENCE_S)
    group.submit_to(1, functions.double_async, 1).result(PATIENCE_S)
    assert group.submit_to(1, functions.raise_odd, 1).error(PATIENCE_S) is not None
    deadline = time.monotonic() + PATIENCE_S
    while (now := group.statistics().shards[1].counters).calls < before.calls + 7:
        assert time.monotonic() < deadline, "the counters are written within a tenth of a second"
        time.sleep(0.005)
    assert (now.tasks - before.tasks, now.failures - before.failures) == (1, 1)
    assert now.turns > before.turns
    assert now.busy_turns <= now.turns
    assert group.statistics().calls_in_flight == 0


def test_pinned_shards_have_a_core_each_and_others_may_use_all() -> None:
    with ShardGroup(2) as group:
        for index, cores in group.map(functions.index_and_core):
            assert cores == {group.statistics().shards[index].core}
    with ShardGroup(1, pin=False) as group:
        assert group.map(functions.index_and_core) == [(0, set(usable_cores()))]


def test_polling_shards_answer_too() -> None:
    with ShardGroup(1, polling=True) as group:
        assert group.submit_to(0, functions.double, 21).result(PATIENCE_S) == 42
        assert group.statistics().shards[0].counters.parks == 0


def test_outside_a_shard_there_is_none() -> None:
    with pytest.raises(ShardError, match="this process is no shard"):
        this_shard()


def test_a_group_is_refused_in_a_fork_of_its_process(group: ShardGroup) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: we have threads. That is what this is about.
        child = os.fork()
    if not child:
        try:
            group.submit_to(0, functions.index)
        except ForkedError:
            group.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert group.map(functions.index) == [0, 1]
