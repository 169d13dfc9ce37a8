"""Shards that die: who learns of it, who comes back, who is killed, and that no group ever hangs
for it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import multiprocess
import pytest

from shard import ClosedError, Future, PeerLostError, RestartPolicy, ShardError, ShardGroup
from shard.group import supervisor
from shard.group.supervisor import Life, ShardState, Supervisor
from tests.held import at, held_at
from tests.program import halt, wait_until, waiting_in
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S, gone, kill, watched, why_down

ROOT = Path(__file__).parents[2]
AGAIN = RestartPolicy("on-failure", backoff_s=0.01)


@pytest.fixture
def immortal() -> Iterator[ShardGroup]:
    """Three shards that come back."""
    with ShardGroup(3, start_method="forkserver", restart=AGAIN) as made:
        yield made


def pid_of(group: ShardGroup, index: int) -> int:
    return group.statistics().shards[index].pid


@pytest.fixture
def patient_supervisor(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Given the pid of a shard: the supervisor's clock stands still until that has ended, so no
    deadline is over before.
    """

    def wait_for(pid: int) -> None:
        began = time.monotonic()

        def monotonic() -> float:
            now = time.monotonic()
            return began if not gone(pid) and now < began + PATIENCE_S else now

        monkeypatch.setattr(
            supervisor, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
        )

    return wait_for


def all_lanes_work(group: ShardGroup) -> bool:
    """Application to shards, and every shard to every other."""
    assert group.map(functions.index) == list(range(group.size))
    return (
        group.map(functions.ask_all, 4, timeout_s=PATIENCE_S)
        == [[8] * (group.size - 1)] * group.size
    )


# -- who stays down --------------------------------------------------------------------------------


def test_a_killed_shard_ends_its_calls_by_name_and_the_others_go_on(
    group: ShardGroup, fifo: str
) -> None:
    calls = [group.submit_to(0, functions.read_fifo, fifo), group.submit_to(0, functions.index)]
    pid = pid_of(group, 0)
    os.kill(pid, signal.SIGKILL)
    for call in calls:
        error = call.error(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert "shard 0" in str(error)
    why_down(group, 0)
    with pytest.raises(
        PeerLostError,
        match=rf"shard 0 \(pid {pid}, incarnation 1\) is gone: killed by SIGKILL; it stays down",
    ):
        group.submit_to(0, functions.index)
    with pytest.raises(PeerLostError):
        group.map(functions.index)
    with pytest.raises(PeerLostError, match="shard 0"):
        group.wait_up(PATIENCE_S)
    assert group.submit_to(1, functions.index).result(PATIENCE_S) == 1
    shards = group.statistics().shards
    assert [(each.alive, each.state, each.exit_code) for each in shards] == [
        (False, "gone", -9),
        (True, "up", None),
    ]


def test_a_shard_that_waits_for_a_killed_one_learns_of_it(group: ShardGroup, fifo: str) -> None:
    waiting = group.submit_to(1, functions.wait_for_call, 0, fifo)
    writer = os.open(fifo, os.O_WRONLY)  # shard 0 is in it now
    os.kill(pid_of(group, 0), signal.SIGKILL)
    assert waiting.result(PATIENCE_S) == "PeerLostError"
    os.close(writer)
    with pytest.raises(ShardError, match=r"shard 0 is gone: shard 0 \(incarnation 1\) was lost"):
        group.submit_to(1, functions.ask, 0, 1).result(PATIENCE_S)


def test_a_shard_that_kills_itself_ends_its_own_call(group: ShardGroup) -> None:
    with pytest.raises(PeerLostError, match="may have run"):
        group.submit_to(1, functions.kill_myself).result(PATIENCE_S)


def test_a_shard_that_exits_with_code_0_is_not_started_again(immortal: ShardGroup) -> None:
    assert isinstance(
        immortal.submit_to(1, functions.exit_at_once, 0).error(PATIENCE_S), PeerLostError
    )
    with pytest.raises(
        PeerLostError,
        match=r"shard 1 .* is gone: exit code 0; it stays down \(restart='on-failure'\)",
    ):
        immortal.wait_up(PATIENCE_S)


# -- who comes back --------------------------------------------------------------------------------


def test_a_killed_shard_comes_back_as_the_next_incarnation_with_all_its_lanes(
    immortal: ShardGroup,
) -> None:
    assert all_lanes_work(immortal)
    before = pid_of(immortal, 1)
    kill(immortal, 1)
    immortal.wait_up(PATIENCE_S)
    wait_until(
        lambda: immortal.statistics().shards[1].state != "starting",
        "the supervisor has noted that it is up",
    )
    shard = immortal.statistics().shards[1]
    assert (shard.incarnation, shard.state, shard.alive, shard.exit_code) == (
        2,
        "up",
        True,
        -signal.SIGKILL,
    )
    assert shard.pid != before
    assert all_lanes_work(immortal)


def test_a_shard_that_exits_with_an_error_comes_back(immortal: ShardGroup) -> None:
    assert isinstance(
        immortal.submit_to(2, functions.exit_at_once, 5).error(PATIENCE_S), PeerLostError
    )
    immortal.wait_up(PATIENCE_S)
    assert immortal.statistics().shards[2].exit_code == 5
    assert all_lanes_work(immortal)


def test_while_a_shard_is_down_calls_to_it_say_what_follows() -> None:
    patient = RestartPolicy("on-failure", backoff_s=1000.0, backoff_s_max=1000.0)
    with ShardGroup(2, start_method="forkserver", restart=patient) as group:
        kill(group, 0)
        why_down(group, 0)
        with pytest.raises(
            PeerLostError, match=r"shard 0 .*killed by SIGKILL; restart 1 of 5 follows in 1000\.0 s"
        ):
            group.submit_to(0, functions.index)
        with pytest.raises(
            TimeoutError, match=r"not all shards were up within 0\.0 s: shard 0 .*restart 1 of 5"
        ):
            group.wait_up(0.0)
        assert group.statistics().shards[0].state == "waiting"
    assert group.statistics().shards[0].state == "gone"


def test_what_was_to_run_at_the_start_ran_before_any_call(immortal: ShardGroup) -> None:
    immortal.at_start(functions.note, "first")
    immortal.at_start(functions.note, "second")
    assert immortal.map(functions.notes) == [["first", "second"]] * 3
    kill(immortal, 0)
    immortal.wait_up(PATIENCE_S)
    assert immortal.submit_to(0, functions.notes).result(PATIENCE_S) == ["first", "second"]


def test_what_was_taken_back_runs_no_more_at_a_start(immortal: ShardGroup) -> None:
    for what in ("first", "second"):
        immortal.at_start(functions.note, what)
    immortal.not_at_start(functions.note, "first")
    kill(immortal, 0)
    immortal.wait_up(PATIENCE_S)
    assert immortal.submit_to(0, functions.notes).result(PATIENCE_S) == ["second"]


def test_what_raises_at_once_does_not_run_at_a_later_start(immortal: ShardGroup) -> None:
    with pytest.raises(functions.OddError):
        immortal.at_start(functions.raise_odd, 1)
    with pytest.raises(TypeError, match="generator"):
        immortal.at_start(functions.note, (each for each in [1]))
    kill(immortal, 0)
    immortal.wait_up(PATIENCE_S)
    assert all_lanes_work(immortal)


def test_what_is_asked_for_while_a_shard_starts_runs_before_it_counts_as_up(
    immortal: ShardGroup, fifo: str
) -> None:
    immortal.at_start(functions.read_fifo_when_restarted, 0, fifo)
    kill(immortal, 0)
    with Path(fifo).open("w") as starting:  # opens when the shard reads it
        immortal.at_start(functions.note, "late")
        starting.write("go")
    immortal.wait_up(PATIENCE_S)
    assert immortal.submit_to(0, functions.notes).result(PATIENCE_S) == ["late"]


def test_two_shards_killed_at_once_come_back_and_know_each_other(immortal: ShardGroup) -> None:
    kill(immortal, 0, 2)
    immortal.wait_up(PATIENCE_S)
    assert [each.incarnation for each in immortal.statistics().shards] == [2, 1, 2]
    assert all_lanes_work(immortal)


def test_a_shard_killed_while_another_starts_comes_back_and_they_know_each_other(
    immortal: ShardGroup, fifo: str
) -> None:
    immortal.at_start(functions.read_fifo_when_restarted, 0, fifo)
    kill(immortal, 0)
    with Path(fifo).open("w") as starting:
        kill(immortal, 1)
        starting.write("go")
    immortal.wait_up(PATIENCE_S)
    assert [each.incarnation for each in immortal.statistics().shards] == [2, 2, 1]
    assert all_lanes_work(immortal)


def test_a_shard_killed_while_it_starts_is_started_once_more(
    immortal: ShardGroup, fifo: str
) -> None:
    immortal.at_start(functions.read_fifo_when_restarted, 0, fifo)
    before = pid_of(immortal, 0)
    kill(immortal, 0)
    with Path(fifo).open("w"):
        wait_until(
            lambda: pid_of(immortal, 0) != before, "the supervisor has noted who is starting"
        )
        os.kill(pid_of(immortal, 0), signal.SIGKILL)
    immortal.wait_up(PATIENCE_S)
    assert immortal.statistics().shards[0].incarnation == 3
    assert all_lanes_work(immortal)


def test_a_shard_that_was_busy_meanwhile_reaches_the_next_incarnation_in_its_very_next_call(
    immortal: ShardGroup, fifo: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "other")
    waiting = immortal.submit_to(0, functions.wait_for_call, 1, str(tmp_path / "other"))
    held = os.open(tmp_path / "other", os.O_WRONLY)  # shard 1 is in that call now
    busy = immortal.submit_to(0, functions.read_fifo, fifo)
    with Path(fifo).open("w") as reading:
        kill(immortal, 1)
        while (
            immortal.statistics().shards[1].incarnation,
            immortal.statistics().shards[1].state,
        ) != (2, "up"):
            with pytest.raises(TimeoutError):
                busy.result(0.01)
        asked = immortal.submit_to(0, functions.ask, 1, 4)
        reading.write("go")
    os.close(held)
    assert busy.result(PATIENCE_S) == "go"
    assert waiting.result(PATIENCE_S) == "PeerLostError"
    assert asked.result(PATIENCE_S) == (0, 8)


# -- who is given up -------------------------------------------------------------------------------


def test_a_shard_that_dies_at_every_start_is_given_up_and_the_text_says_so() -> None:
    twice = RestartPolicy("on-failure", restarts_max=2, backoff_s=0.01)
    with ShardGroup(2, start_method="forkserver", restart=twice) as group:
        group.at_start(functions.die_when_restarted, 1)
        kill(group, 1)
        text = (
            r"shard 1 \(pid \d+, incarnation 3\) is gone: killed by SIGKILL.*; "
            r"it stays down after 2 restarts in a row"
        )
        with pytest.raises(PeerLostError, match=text):
            group.wait_up(PATIENCE_S)
        with pytest.raises(PeerLostError, match=text):
            group.submit_to(1, functions.index)
        assert group.submit_to(0, functions.index).result(PATIENCE_S) == 0


def test_a_shard_that_cannot_be_started_again_is_given_up_and_who_waits_for_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # a record would keep the group, by its traceback
    caplog.set_level(logging.CRITICAL, "shard")
    policy = RestartPolicy("on-failure", restarts_max=1, backoff_s=0.0)
    with ShardGroup(1, start_method="forkserver", restart=policy) as group:
        told: list[str] = []

        def wait_up() -> None:
            with pytest.raises(PeerLostError) as caught:
                group.wait_up(10 * PATIENCE_S)
            told.append(str(caught.value))

        def refuse() -> None:
            waiter.start()
            wait_until(lambda: waiting_in(ShardGroup.wait_up) == 1, "somebody waits")
            raise OSError("no descriptor is left")

        waiter = threading.Thread(target=wait_up)
        with at("group.before_spawn", refuse):
            os.kill(pid_of(group, 0), signal.SIGKILL)
            wait_until(lambda: told, "it was told")
        waiter.join(PATIENCE_S)
        assert (
            "could not be started: no descriptor is left; it stays down after 1 restarts in a row"
            in told[0]
        )


def test_a_shard_whose_setup_raises_at_every_start_is_given_up_with_what_it_raised() -> None:
    once = RestartPolicy("on-failure", restarts_max=1, backoff_s=0.01)
    with ShardGroup(1, start_method="forkserver", restart=once) as group:
        group.at_start(functions.fail_when_restarted)
        kill(group, 0)
        with pytest.raises(
            PeerLostError, match=r"no second life.*it stays down after 1 restarts in a row"
        ):
            group.wait_up(PATIENCE_S)


def test_a_group_whose_shard_dies_at_its_first_start_raises_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_FAILPOINTS", "group.started=kill9")
    with pytest.raises(ShardError, match=r"shard \d .*the group could not start"):
        ShardGroup(2, restart=AGAIN)


def test_a_stopped_shard_that_lost_its_lane_is_killed_before_another_takes_its_place(
    immortal: ShardGroup,
) -> None:
    stopped = pid_of(immortal, 0)
    with watched([stopped]) as wait:
        lost = immortal.submit_to(0, functions.hang_up_and_stop)
        assert isinstance(lost.error(PATIENCE_S), PeerLostError)
        immortal.wait_up(PATIENCE_S)
        assert gone(stopped), "two processes must never own what is shard 0's"
        wait()
    shard = immortal.statistics().shards[0]
    assert (shard.incarnation, shard.exit_code) == (2, -signal.SIGKILL)
    assert all_lanes_work(immortal)


def test_a_shard_that_is_stopped_and_goes_on_is_the_one_it_was(immortal: ShardGroup) -> None:
    pid = pid_of(immortal, 0)
    halt(pid)
    call = immortal.submit_to(0, functions.double, 4)
    with pytest.raises(TimeoutError):
        call.result(0.01)
    assert immortal.submit_to(1, functions.index).result(PATIENCE_S) == 1, "the others go on"
    os.kill(pid, signal.SIGCONT)
    assert call.result(PATIENCE_S) == 8
    assert immortal.statistics().shards[0].incarnation == 1


# -- SIGTERM ---------------------------------------------------------------------------------------


def test_a_shard_asked_to_end_lets_its_task_end_and_takes_on_nothing_new(
    group: ShardGroup, fifo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_TIMEOUT_S", PATIENCE_S)
    task = group.submit_to(0, functions.ask_when_written, fifo, 1, 21)
    assert group.submit_to(0, functions.index).result(PATIENCE_S) == 0
    pid = pid_of(group, 0)
    os.kill(pid, signal.SIGTERM)
    while (refused := group.submit_to(0, functions.index).error(PATIENCE_S)) is None:
        continue  # it was faster than the signal
    assert isinstance(refused, ClosedError)
    assert f"shard 0 (pid {pid}) is stopping: it takes on no new calls" in str(refused)
    with pytest.raises(ClosedError):
        group.submit_to(1, functions.ask, 0, 1).result(PATIENCE_S)
    Path(fifo).write_text("go")
    assert task.result(PATIENCE_S) == 42, "it could still ask the others"
    assert f"shard 0 (pid {pid}, incarnation 1) is gone: exit code 0; it stays down" in why_down(
        group, 0
    )


def test_a_second_sigterm_ends_a_shard_whose_function_never_returns(fifo: str) -> None:
    with (
        ShardGroup(1, start_method="forkserver", drain_s=1000.0) as group,
        watched([pid_of(group, 0)]) as wait,
    ):
        stuck = group.submit_to(0, functions.never_return, fifo)
        with Path(fifo).open() as said:
            assert said.readline() == "in\n"
            os.kill(pid_of(group, 0), signal.SIGTERM)
            assert said.readline() == "asked\n"
        os.kill(pid_of(group, 0), signal.SIGTERM)
        assert isinstance(stuck.error(PATIENCE_S), PeerLostError)
        wait()
        with pytest.raises(PeerLostError, match="exit code 143"):
            group.wait_up(PATIENCE_S)


@pytest.mark.parametrize(
    "function", [functions.never_return, functions.never_return_and_miss_an_alarm]
)
def test_the_end_of_its_time_to_drain_ends_a_shard_whose_function_never_returns(
    fifo: str, function: Callable[[str], None]
) -> None:
    with ShardGroup(1, start_method="forkserver", drain_s=0.05) as group:
        stuck = group.submit_to(0, function, fifo)
        with Path(fifo).open() as said:
            assert said.readline() == "in\n"
            os.kill(pid_of(group, 0), signal.SIGTERM)
            assert isinstance(stuck.error(PATIENCE_S), PeerLostError)
        with pytest.raises(PeerLostError, match="exit code 143"):
            group.wait_up(PATIENCE_S)


# -- the application dies --------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_shards_end_with_an_application_that_is_killed(start_method: str) -> None:
    command = [sys.executable, "-m", "tests.shard.group_functions", start_method]
    application = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert application.stdout is not None
    with application.stdout:
        pids = [int(pid) for pid in application.stdout.readline().split()]
        assert len(pids) == 3
        halt(pids[2])
        with watched(pids) as wait:
            application.kill()
            application.wait(PATIENCE_S)
            wait()


# -- the end of a group that is not well -----------------------------------------------------------


def test_a_shard_that_is_busy_at_close_is_killed(
    fifo: str, patient_supervisor: Callable[[int], None]
) -> None:
    group = ShardGroup(2, start_method="forkserver", drain_s=0.1)
    busy = group.submit_to(0, functions.read_fifo, fifo)
    patient_supervisor(pid_of(group, 1))
    group.close()
    assert isinstance(busy.error(0.0), ShardError)
    assert [each.exit_code for each in group.statistics().shards] == [-signal.SIGKILL, 0]


def test_a_stopped_shard_is_killed_at_close(patient_supervisor: Callable[[int], None]) -> None:
    group = ShardGroup(2, start_method="forkserver", drain_s=0.1)
    halt(pid_of(group, 1))
    patient_supervisor(pid_of(group, 0))
    group.close()
    assert [each.exit_code for each in group.statistics().shards] == [0, -signal.SIGKILL]


def test_a_group_with_a_killed_shard_closes_as_any_other() -> None:
    group = ShardGroup(2, start_method="forkserver", drain_s=PATIENCE_S)
    os.kill(pid_of(group, 1), signal.SIGKILL)
    group.close()
    assert group.statistics().shards[0].exit_code == 0


def test_a_group_closes_while_a_shard_is_being_restarted(
    fifo: str, patient_supervisor: Callable[[int], None]
) -> None:
    group = ShardGroup(2, start_method="forkserver", restart=AGAIN, drain_s=0.1)
    group.at_start(functions.read_fifo_when_restarted, 0, fifo)
    kill(group, 0)
    with Path(fifo).open("w"):
        patient_supervisor(pid_of(group, 1))
        group.close()
    assert [each.exit_code for each in group.statistics().shards] == [-signal.SIGKILL, 0]


def test_close_waits_for_tasks_that_ask_each_other(fifo: str) -> None:
    group = ShardGroup(2, start_method="forkserver", drain_s=PATIENCE_S)
    task = group.submit_to(0, functions.ask_when_written, fifo, 1, 21)
    assert group.submit_to(0, functions.index).result(PATIENCE_S) == 0
    closing = threading.Thread(target=group.close)
    with Path(fifo).open("w") as waited_for:
        closing.start()
        with pytest.raises(TimeoutError):
            task.result(0.05)
        waited_for.write("go")
    assert task.result(PATIENCE_S) == 42
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert [each.exit_code for each in group.statistics().shards] == [0, 0]


def test_a_task_that_does_not_end_holds_close_up_for_the_drain_time_only(
    patient_supervisor: Callable[[int], None],
) -> None:
    group = ShardGroup(1, start_method="forkserver", drain_s=0.05)
    patient_supervisor(pid_of(group, 0))
    task = group.submit_to(0, functions.wait_for_ever, "task")
    group.close()
    assert isinstance(task.error(0.0), ShardError)
    assert group.statistics().shards[0].exit_code == 0, "it was idle, and so could stop"


def test_who_waits_for_a_shard_that_stays_down_is_told_why_however_early_it_asks() -> None:
    with ShardGroup(1, start_method="forkserver") as group:
        with held_at("group.before_down"):
            kill(group, 0)
            wait_until(
                lambda: group.statistics().shards[0].state == "gone", "the supervisor has seen it"
            )
            with pytest.raises(TimeoutError):
                group.wait_up(0.0)
        with pytest.raises(PeerLostError, match=r"shard 0 .* is gone: killed by SIGKILL"):
            group.wait_up(PATIENCE_S)


def test_a_shard_that_waits_for_its_restart_is_gone_after_close() -> None:
    closes = threading.Event()

    def say_when_told_to_stop(index: int) -> None:
        if index == 1:
            assert closes.wait(PATIENCE_S)

    # close() lacks a core between telling the shards and telling the supervisor
    def stop_late() -> None:
        wait_until(lambda: not group.statistics().shards[1].alive, "shard 1 has ended")

    patient = RestartPolicy("on-failure", backoff_s=1000.0, backoff_s_max=1000.0)
    with (
        at("group.before_down", say_when_told_to_stop),
        at("group.before_stop", closes.set),
        at("group.after_stop", stop_late),
        ShardGroup(2, start_method="forkserver", restart=patient) as group,
    ):
        kill(group, 0)
        why_down(group, 0)
    assert [each.state for each in group.statistics().shards] == ["gone", "gone"]


def test_a_shard_counts_as_up_before_anybody_is_told_that_it_is_ready() -> None:
    """wait_up() ends where the group is told, and statistics() say what its life says."""
    seen, ready = list[ShardState](), Future()
    ready.set_result(None)

    def start(life: Life) -> tuple[Any, Callable[[], Future]]:
        process = multiprocess.get_context("forkserver").Process(target=time.sleep, args=(3600.0,))
        process.start()
        multiprocess.process._children.discard(process)
        return process, lambda: ready

    tested = Supervisor(
        1,
        RestartPolicy(),
        start,
        lambda index: seen.append(tested.lives[index].state),
        lambda index, text: None,
    )
    tested.start()
    tested.stop(0.0)
    tested.close()
    assert seen == [ShardState.UP]
