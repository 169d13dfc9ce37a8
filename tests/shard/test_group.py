"""A group of shards: how it is made and ended, what it says of itself, and who else may live beside
it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard import (
    ClosedError,
    Driver,
    Future,
    RestartPolicy,
    ShardError,
    ShardGroup,
    auto_shards,
    this_shard,
    usable_cores,
)
from shard.group import group as group_module
from shard.group.supervisor import Supervisor
from tests.held import at
from tests.program import wait_until, waiting_in
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S, gone, kill

# -- how it is made --------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_group_works_alike_whatever_starts_its_shards(start_method: str, tmp_path: Path) -> None:
    factor = 3
    with ShardGroup(
        2, start_method=start_method, restart="on-failure", drain_s=PATIENCE_S
    ) as group:
        assert group.map(functions.index) == [0, 1]
        assert group.map(lambda value: value * factor, 2) == [6, 6]
        assert group.map(functions.ask_all, 4) == [[8], [8]]
        with pytest.raises(functions.OddError, match="7"):
            group.submit_to(1, functions.raise_odd, 7).result(PATIENCE_S)
        array = group.submit_to(0, functions.make_in_slab, 1000, 1.0).result(PATIENCE_S)
        assert array.sum() == 1000.0
        kill(group, 1)
        group.wait_up(PATIENCE_S)
        assert group.map(functions.ask_all, 4) == [[8], [8]]
        group.submit_to(1, functions.note_the_end, str(tmp_path / "end")).result(PATIENCE_S)
    assert (tmp_path / "end").read_text() == "stopped"
    assert [each.exit_code for each in group.statistics().shards] == [0, 0]


def test_a_busy_shard_finds_the_way_to_a_restarted_one_behind_other_descriptors(fifo: str) -> None:
    with ShardGroup(
        2, start_method="forkserver", restart="on-failure", drain_s=PATIENCE_S
    ) as group:
        busy = group.submit_to(0, functions.read_fifo, fifo)
        with Path(fifo).open("w") as reading:  # opens when the shard reads it
            found = group.slab.block_of(group.slab.empty(1000, np.uint8))
            assert found is not None
            # as a thread whose message is not in the ring yet
            group._lanes[0].connection._told.tell(found[0].segment)
            kill(group, 1)
            group.wait_up(PATIENCE_S)
            asked = group.submit_to(0, functions.ask, 1, 4)
            reading.write("go")
        assert busy.result(PATIENCE_S) == "go"
        assert asked.result(PATIENCE_S) == (0, 8)


def test_auto_is_a_shard_for_each_physical_core_but_one() -> None:
    with ShardGroup("auto", start_method="forkserver") as group:
        assert group.size == auto_shards()
        assert group.map(functions.index) == list(range(group.size))


def test_pinned_shards_have_a_core_each_and_others_may_use_all(group: ShardGroup) -> None:
    for index, cores in group.map(functions.index_and_core):
        assert cores == {group.statistics().shards[index].core}
    with ShardGroup(1, pin=False, start_method="forkserver") as free:
        assert free.map(functions.index_and_core) == [(0, set(usable_cores()))]


def test_a_group_may_use_a_driver_that_is_there_and_leaves_it_open() -> None:
    driver = Driver(polling=False)
    with ShardGroup(1, driver=driver, start_method="forkserver") as group:
        assert group.submit_to(0, functions.double, 2).result(PATIENCE_S) == 4
    assert not driver.closing
    driver.close()


@pytest.mark.parametrize("idle", ["spin", "adaptive", "park"])
def test_shards_answer_however_they_idle(idle: str) -> None:
    with ShardGroup(1, idle=idle, start_method="forkserver", drain_s=PATIENCE_S) as group:
        group.map(functions.bear_late_bells)
        assert group.submit_to(0, functions.double, 21).result(PATIENCE_S) == 42
        if idle != "spin":
            group.submit_to(0, functions.wait_for_a_park).result(PATIENCE_S)
            assert group.submit_to(0, functions.double, 21).result(PATIENCE_S) == 42
    row = group.statistics().shards[0].counters
    assert (row.parks == 0) is (idle == "spin")
    assert row.late_wakes == 0


@pytest.mark.parametrize(
    ("value", "parks"), [("1", False), ("on", False), ("0", True), ("false", True), (None, True)]
)
def test_the_environment_says_whether_shards_poll(
    monkeypatch: pytest.MonkeyPatch, value: str | None, parks: bool
) -> None:
    if value is None:
        monkeypatch.delenv("PRPC_ENABLE_POLLING", raising=False)
    else:
        monkeypatch.setenv("PRPC_ENABLE_POLLING", value)
    with ShardGroup(1, start_method="forkserver", drain_s=PATIENCE_S) as group:
        assert group.submit_to(0, functions.double, 21).result(PATIENCE_S) == 42
        assert group.driver.polling is (not parks)
        if parks:
            group.submit_to(0, functions.wait_for_a_park).result(PATIENCE_S)
    assert (group.statistics().shards[0].counters.parks > 0) is parks


def test_what_is_said_to_the_group_counts_more_than_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_ENABLE_POLLING", "maybe")
    with ShardGroup(1, polling=False, start_method="forkserver") as group:
        assert not group.driver.polling


def test_more_polling_processes_than_cores_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shard"):
        for _ in range(2):
            with ShardGroup(
                len(usable_cores()) + 1, polling=True, start_method="forkserver"
            ) as group:
                assert group.map(functions.index) == list(range(group.size))
    assert sum("busy-polling processes on" in record.message for record in caplog.records) <= 1


# -- what is not possible --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 257, "two", 2.0, None])
def test_an_impossible_size_is_named_with_the_bounds(size: int) -> None:
    with pytest.raises(
        ValueError, match=f'a group of {size!r} shards: 1 to 256 are possible, or "auto"'
    ):
        ShardGroup(size)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"start_method": "fork"},
            "start_method='fork': 'spawn' and 'forkserver' are possible; "
            "a fork would share our rings",
        ),
        ({"restart": "always"}, "restart='always': 'never' and 'on-failure' are possible"),
        ({"idle": "doze"}, "idle strategy 'doze': there are 'spin'.*'adaptive'.*'park'"),
        ({"drain_s": -1.0}, r"drain_s=-1\.0: 0 or more seconds are possible"),
        ({"drain_s": float("nan")}, "drain_s=nan: 0 or more seconds are possible"),
        ({"stall_budget_s": 0.0}, r"stall_budget_s=0\.0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_an_impossible_argument_is_named_with_what_is_possible(
    arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        ShardGroup(1, **arguments)  # type: ignore[arg-type]


def test_an_environment_that_is_no_switch_is_named_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_ENABLE_POLLING", "maybe")
    with pytest.raises(
        ValueError,
        match="PRPC_ENABLE_POLLING='maybe': 1, true or on make the engine poll, 0, false or off",
    ):
        ShardGroup(1)


@pytest.mark.parametrize("index", [-1, 2, "1", None])
def test_an_index_out_of_range_is_named_with_those_there_are(group: ShardGroup, index: int) -> None:
    with pytest.raises(
        ValueError, match=f"there is no shard {index!r}: this group has shards 0 to 1"
    ):
        group.submit_to(index, functions.index)
    if isinstance(index, int):
        with pytest.raises(
            ValueError, match=f"there is no shard {index!r}: this group has shards 0 to 1"
        ):
            group.submit_to(0, functions.ask, index, 1).result(PATIENCE_S)


def test_outside_a_shard_there_is_none() -> None:
    with pytest.raises(ShardError, match="this process is no shard"):
        this_shard()


# -- how it ends -----------------------------------------------------------------------------------


def test_closing_lets_shards_finish_cleanly(group: ShardGroup, tmp_path: Path) -> None:
    group.submit_to(1, functions.note_the_end, str(tmp_path / "end")).result(PATIENCE_S)
    pids = group.map(os.getpid)
    group.close()
    assert (tmp_path / "end").read_text() == "stopped"
    assert all(gone(pid) for pid in pids)
    shards = group.statistics().shards
    assert [(each.exit_code, each.state, each.alive) for each in shards] == [(0, "gone", False)] * 2


def test_after_close_submit_says_so_and_a_second_close_does_nothing(group: ShardGroup) -> None:
    group.close()
    group.close()
    with pytest.raises(ClosedError, match="this group was closed here"):
        group.submit_to(0, functions.index)
    with pytest.raises(ClosedError, match="this group was closed here"):
        group.map(functions.index)
    with pytest.raises(ClosedError, match="this group was closed here"):
        group.at_start(functions.index)
    with pytest.raises(ClosedError, match="this group was closed here"):
        group.wait_up(PATIENCE_S)


def test_a_group_made_in_one_thread_is_used_and_closed_in_others() -> None:
    groups: list[ShardGroup] = []
    answers: list[list[int]] = []
    for work in (
        lambda: groups.append(ShardGroup(2, start_method="forkserver", drain_s=PATIENCE_S)),
        lambda: answers.append(groups[0].map(functions.index)),
        lambda: groups[0].close(),
    ):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(PATIENCE_S)
    assert answers == [[0, 1]]
    assert [each.exit_code for each in groups[0].statistics().shards] == [0, 0]


def test_a_group_whose_driver_was_closed_first_ends_its_shards_all_the_same() -> None:
    driver = Driver(polling=False)
    group = ShardGroup(1, driver=driver, start_method="forkserver")
    driver.close()
    group.close()
    (shard,) = group.statistics().shards
    assert (shard.state, gone(shard.pid)) == ("gone", True)


def test_two_threads_may_close_it_at_once(group: ShardGroup) -> None:
    threads = [threading.Thread(target=group.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [each.exit_code for each in group.statistics().shards] == [0, 0]


def test_of_two_threads_that_find_it_open_at_the_same_moment_one_closes_it(
    group: ShardGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_in = threading.Barrier(2)
    stop, stops, failures = Supervisor.stop, list[float](), list[BaseException]()

    class Meeting(int):
        def __ne__(self, other: object) -> bool:
            both_are_in.wait(PATIENCE_S)
            return int.__ne__(self, other)

    def close() -> None:
        try:
            group.close()
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(
        Supervisor,
        "stop",
        lambda self, timeout_s: (stops.append(timeout_s), stop(self, timeout_s)),
    )
    with monkeypatch.context() as changed:
        changed.setattr(group, "_pid", Meeting(os.getpid()))
        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert (len(stops), failures) == (1, [])


def test_a_thread_that_waits_for_a_result_is_told_of_the_close() -> None:
    group = ShardGroup(1, start_method="forkserver", drain_s=0.05)
    future = group.submit_to(0, functions.wait_for_ever, "task")
    errors: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: errors.append(future.error(PATIENCE_S)))
    waiting.start()
    group.close()
    waiting.join(PATIENCE_S)
    assert isinstance(errors[0], ShardError)


def test_a_thread_that_waits_for_a_shard_to_come_back_is_told_of_the_close() -> None:
    policy = RestartPolicy("on-failure", backoff_s=10 * PATIENCE_S, backoff_s_max=10 * PATIENCE_S)
    with ShardGroup(1, start_method="forkserver", restart=policy) as group:
        kill(group, 0)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                group.wait_up(2 * PATIENCE_S)
            except ShardError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(
            lambda: (
                group.statistics().shards[0].state == "waiting"
                and waiting_in(ShardGroup.wait_up) == 1
            )
        )
    waiting.join(PATIENCE_S)
    assert [type(error) for error in errors] == [ClosedError]


def test_a_shard_that_comes_up_while_its_group_closes_takes_no_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived, on_ready, errors = threading.Event(), ShardGroup._on_ready, list[BaseException]()

    def be_late(self: ShardGroup, index: int) -> Future | None:
        if self._supervisor.lives[index].incarnation == 1:
            return on_ready(self, index)
        arrived.set()
        wait_until(lambda: self.closed and not self._submits, "close() has asked who is up")
        found = on_ready(self, index)
        try:
            self.submit_to(index, functions.index)
        except ShardError as error:
            errors.append(error)
        return found

    monkeypatch.setattr(ShardGroup, "_on_ready", be_late)
    with ShardGroup(
        1, start_method="forkserver", restart="on-failure", drain_s=PATIENCE_S
    ) as group:
        kill(group, 0)
        assert arrived.wait(PATIENCE_S)
    assert [type(error) for error in errors] == [ClosedError]


def test_what_is_to_run_at_the_start_of_a_group_that_is_being_closed_is_refused(
    group: ShardGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickle = group_module.pickle_function

    def be_late(function: Callable[..., Any]) -> bytes:
        group.close()
        return pickle(function)

    monkeypatch.setattr(group_module, "pickle_function", be_late)
    with pytest.raises(ClosedError):
        group.at_start(functions.note, "never")


def test_a_group_closes_in_an_asyncio_loop() -> None:
    async def work() -> int:
        with ShardGroup(1, start_method="forkserver") as group:
            return int(await group.submit_to(0, functions.double, 4))

    assert asyncio.run(work()) == 8


# -- what it says of itself ------------------------------------------------------------------------


def test_statistics_name_every_shard(group: ShardGroup) -> None:
    pids = group.map(os.getpid)
    statistics = group.statistics()
    assert [each.pid for each in statistics.shards] == pids
    assert [
        (each.index, each.alive, each.state, each.incarnation, each.exit_code)
        for each in statistics.shards
    ] == [
        (0, True, "up", 1, None),
        (1, True, "up", 1, None),
    ]
    assert statistics.calls_in_flight == 0
    waiting = group.submit_to(0, functions.wait_for_ever, "task")
    assert group.statistics().calls_in_flight == 1
    waiting.cancel()
    assert group.statistics().calls_in_flight == 0


def test_nothing_that_was_sent_is_missing_from_the_statistics_while_a_lane_ends(
    group: ShardGroup,
) -> None:
    assert group.map(functions.double, 4) == [8, 8]
    sent, seen = group.statistics().application.bytes_out, list[int]()
    with at(
        "connection.before_goodbye",
        lambda: seen.append(group.statistics().application.bytes_out),
        times=1,
    ):
        kill(group, 0)
    assert seen[0] > sent
    assert group.statistics().application.bytes_out == seen[0]


# -- who else lives here ---------------------------------------------------------------------------


def test_two_groups_do_not_know_each_other(group: ShardGroup) -> None:
    with ShardGroup(2, start_method="forkserver") as second:
        assert len({*group.map(os.getpid), *second.map(os.getpid)}) == 4
        group.map(functions.note, "first")
        assert second.map(functions.notes) == [[], []]
        kill(second, 0)
        assert group.map(functions.index) == [0, 1]
    assert group.map(functions.index) == [0, 1]


# of Python 3.12: we have threads. That is what this is about.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_the_users_own_processes_come_and_go_beside_a_group(
    group: ShardGroup, start_method: str
) -> None:
    context = multiprocessing.get_context(start_method)
    results = context.SimpleQueue()
    process = context.Process(target=functions.put_double, args=(21, results))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert results.get() == 42
    process.close()
    results.close()
    assert group.map(functions.ask_all, 4) == [[8], [8]]


def test_a_group_within_a_shard_is_refused_by_name(group: ShardGroup) -> None:
    with pytest.raises(ShardError, match="shard 1 cannot start a group of its own"):
        group.submit_to(1, functions.make_a_group).result(PATIENCE_S)
