"""What becomes of the work of a group, and of the instances of a Sharded, when the group is closed
or a hook does not end.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shard import (
    CancelledError,
    ClosedError,
    Future,
    Sharded,
    ShardError,
    ShardGroup,
    sleep,
    this_shard,
    yield_now,
)
from shard.group import process
from tests.program import halt, wait_until
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S, watched

SOON_S = 0.2  # where a time is to be over that nobody needs


def write(path: str, line: str) -> None:
    with Path(path).open("a") as log:
        log.write(f"{line}\n")


async def clean_up(path: str, other: int) -> None:
    """What is cancelled asks another shard and sleeps while it cleans up."""
    write(path, "began")
    try:
        await Future()
    except CancelledError as error:
        write(path, f"was told: {error}")
        raise
    finally:
        await sleep(0.001)
        write(path, f"asked: {await this_shard().submit_to(other, functions.double_async, 21)}")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# -- tasks -----------------------------------------------------------------------------------------


def test_what_is_left_at_the_end_of_a_drain_is_cancelled_and_cleans_up_with_awaits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    group = ShardGroup(2, start_method="forkserver", drain_s=0.05)
    task = group.submit_to(0, clean_up, str(log), 1)
    wait_until(log.exists, "it began")
    group.close()
    began, was_told, asked = log.read_text().splitlines()
    assert (began, asked) == ("began", "asked: 42"), "the other shard was still there"
    assert was_told.endswith("cancelled it: its group was closed 0.05 s ago")
    error = task.error(0.0)
    assert isinstance(error, ClosedError)
    assert "cancelled it: its group was closed 0.05 s ago" in str(error)
    assert [each.exit_code for each in group.statistics().shards] == [0, 0]
    assert told(caplog) == []


def test_what_was_called_by_a_shard_that_is_gone_is_cancelled_as_well(tmp_path: Path) -> None:
    log = tmp_path / "log"
    group = ShardGroup(2, start_method="forkserver", drain_s=0.05)
    group.submit_to(0, have_cleaned_up, 1, str(log))
    wait_until(log.exists, "it began")
    with watched([group.statistics().shards[0].pid]) as wait:
        os.kill(group.statistics().shards[0].pid, signal.SIGKILL)
        wait()
    group.close()
    assert log.read_text().splitlines()[-1] == "asked: 42"


async def have_cleaned_up(other: int, path: str) -> None:
    await this_shard().submit_to(other, clean_up, path, other)


def test_a_task_that_goes_on_after_it_was_cancelled_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = ShardGroup(2, start_method="forkserver", drain_s=0.05, clean_up_s=SOON_S)
    group.submit_to(1, functions.go_on_for_ever)
    pid = group.statistics().shards[1].pid
    group.close()
    (line,) = told(caplog)
    begin = f"shard 1 (pid {pid}, incarnation 1) ended at the close of its group: "
    assert line.startswith(f"{begin}these go on after they were cancelled: go_on_for_ever at line ")
    assert "group_functions.py" in line
    assert group.statistics().shards[1].exit_code == 0


def test_many_tasks_that_go_on_are_a_few_names_and_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = ShardGroup(1, start_method="forkserver", drain_s=0.05, clean_up_s=SOON_S)
    for _ in range(process.TOLD_MAX + 3):
        group.submit_to(0, functions.go_on_for_ever)
    group.close()
    (line,) = told(caplog)
    assert line.count("go_on_for_ever") == process.TOLD_MAX
    assert line.endswith(", and 3 more")


def test_a_shard_that_is_killed_is_named_in_the_log(
    fifo: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = ShardGroup(2, start_method="forkserver", drain_s=0.05, clean_up_s=SOON_S)
    group.submit_to(0, functions.read_fifo, fifo)
    pid = group.statistics().shards[0].pid
    group.close()
    assert [line for line in told(caplog) if "shard 0" in line] == [
        f"shard 0 (pid {pid}, incarnation 1) did not end, and was killed at the close of its "
        "group: it does not answer: a function there that does not await holds its reactor, or "
        "it was stopped (SIGSTOP)"
    ]
    assert group.statistics().shards[0].exit_code == -signal.SIGKILL


def test_a_shard_that_is_told_to_stop_cancels_what_is_left_and_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ShardGroup(2, start_method="forkserver", drain_s=0.05) as group:
        task = group.submit_to(0, clean_up, str(log), 1)
        wait_until(log.exists, "it began")
        pid = group.statistics().shards[0].pid
        with watched([pid]) as wait:
            os.kill(pid, signal.SIGTERM)
            assert isinstance(task.error(PATIENCE_S), ClosedError)
            wait()
        wait_until(lambda: group.statistics().shards[0].exit_code is not None)
        assert group.statistics().shards[0].exit_code == 0
    assert log.read_text().splitlines()[-1] == "asked: 42"


# -- hooks -----------------------------------------------------------------------------------------


class Hooked:
    """Writes what is called, and waits for ever in one of its hooks, in one shard."""

    def __init__(self, path: str, name: str, waits_in: str = "", shard: int = 1) -> None:
        self.path, self.name = path, name
        self.waits_in = waits_in if this_shard().index == shard else ""

    async def start(self) -> None:
        await self._hook("start")

    async def stop(self) -> None:
        await self._hook("stop")

    def close(self) -> None:
        self._say("close")

    def get(self) -> str:
        return self.name

    async def _hook(self, hook: str) -> None:
        self._say(hook)
        if self.waits_in == f"{hook}, and swallows":
            while True:
                try:
                    await Future()
                except CancelledError:
                    self._say(f"{hook} was cancelled")
        try:
            await (Future() if self.waits_in == hook else yield_now())
        finally:
            await sleep(0.001)
            self._say(f"{hook} ended")

    def _say(self, what: str) -> None:
        write(f"{self.path}.{this_shard().index}", f"{self.name} {what}")


class Blocking(Hooked):
    """Its hooks block instead."""

    def start(self) -> None:  # type: ignore[override]
        self._block("start")

    def stop(self) -> None:  # type: ignore[override]
        self._block("stop")

    def _block(self, hook: str) -> None:
        self._say(hook)
        if self.waits_in == hook:
            Path(f"{self.path}.fifo").read_text()
        self._say(f"{hook} ended")


def lines(path: Path, index: int) -> list[str]:
    log = Path(f"{path}.{index}")
    return log.read_text().splitlines() if log.exists() else []


def instances() -> int:
    return len(this_shard().sharded)


STARTED = ["one start", "one start ended"]
ENDED = ["one stop", "one stop ended", "one close"]


def test_a_start_that_does_not_end_is_cancelled_named_and_leaves_nothing(
    group: ShardGroup, tmp_path: Path
) -> None:
    with pytest.raises(
        TimeoutError,
        match=r"start\(\) of Hooked in shard 1 did not end within hook_timeout_s=0.2 s and was "
        r"cancelled: what it awaits does not come; or give Sharded\(\) a longer hook_timeout_s",
    ):
        Sharded(Hooked, str(tmp_path / "log"), "one", "start", hook_timeout_s=SOON_S)
    assert group.map(instances) == [0, 0]
    assert lines(tmp_path / "log", 0) == STARTED + ENDED
    assert lines(tmp_path / "log", 1) == STARTED
    with Sharded(Hooked, str(tmp_path / "other"), "two") as two:
        assert two.invoke_on(1, "get").result(PATIENCE_S) == "two"


@pytest.mark.parametrize("waits_in", ["stop", "stop, and swallows"])
def test_a_stop_that_does_not_end_is_cancelled_named_and_followed_by_close(
    group: ShardGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_in: str
) -> None:
    group.map(clean_up_in, SOON_S)
    one = Sharded(Hooked, str(tmp_path / "log"), "one", waits_in, hook_timeout_s=SOON_S)
    with pytest.raises(
        TimeoutError, match=r"stop\(\) of Hooked in shard 1 did not end within hook_timeout_s=0.2 s"
    ):
        one.close()
    assert group.map(instances) == [0, 0]
    assert lines(tmp_path / "log", 0) == STARTED + ENDED
    assert lines(tmp_path / "log", 1)[-1] == "one close"
    assert lines(tmp_path / "log", 1)[-2] in ("one stop ended", "one stop was cancelled")


def clean_up_in(seconds: float) -> None:
    from shard.group import sharded

    sharded.CLEAN_UP_S = seconds


@pytest.mark.parametrize("hook", ["start", "stop"])
def test_a_hook_that_blocks_is_named_and_its_instance_goes_when_it_returns(
    group: ShardGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    from shard.group import sharded

    monkeypatch.setattr(sharded, "CLEAN_UP_S", SOON_S)
    monkeypatch.setattr(sharded, "ANSWER_S", SOON_S)
    log = tmp_path / "log"
    os.mkfifo(f"{log}.fifo")
    with pytest.raises(
        TimeoutError,
        match=rf"shard 1 has not answered .* {hook}\(\) of Blocking, or another function there "
        r"that does not await, holds its reactor for more than hook_timeout_s=0.5 s: have it await",
    ):
        Sharded(Blocking, str(log), "one", hook, hook_timeout_s=0.5).close()
    Path(f"{log}.fifo").write_text("go on")
    assert group.map(instances) == [0, 0]
    assert lines(log, 1) == STARTED + ENDED


def test_a_hook_that_does_not_end_in_a_restarted_shard_is_why_that_does_not_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ShardGroup(2, start_method="forkserver", restart="on-failure") as group:
        Sharded(WaitsWhenRestarted, hook_timeout_s=SOON_S)
        group.submit_to(1, os._exit, 3).error(PATIENCE_S)
        text = (
            "because it could not start: start() of WaitsWhenRestarted in shard 1 did not end "
            "within hook_timeout_s=0.2 s"
        )
        wait_until(lambda: any(text in line for line in told(caplog)))


class WaitsWhenRestarted:
    async def start(self) -> None:
        if this_shard().incarnation > 1:
            await Future()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), "1", None])
def test_a_time_for_hooks_is_a_number_of_seconds(group: ShardGroup, seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"hook_timeout_s=.*: seconds, more than 0, are allowed"):
        Sharded(Hooked, "", "one", hook_timeout_s=seconds)


def test_a_group_that_is_closed_first_stops_the_latest_instances_first_and_then_closes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    with ShardGroup(2, start_method="forkserver", drain_s=0.05) as group:
        one = Sharded(Hooked, str(log), "one")
        Sharded(Hooked, str(log), "two")
        group.submit_to(0, wait_and_say, f"{log}.0")
        wait_until(lambda: "task began" in lines(log, 0))
    two = [line.replace("one", "two") for line in ENDED]
    assert lines(log, 0)[4:] == ["task began", "task ended", *two, *ENDED]
    assert lines(log, 1)[4:] == two + ENDED
    one.close()
    assert len(lines(log, 1)) == 10, "a second close finds nothing"
    assert told(caplog) == []


async def wait_and_say(path: str) -> None:
    write(path, "task began")
    try:
        await Future()
    finally:
        await sleep(0.001)
        write(path, "task ended")


def test_a_stop_that_does_not_end_when_its_group_is_closed_is_for_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    with ShardGroup(2, start_method="forkserver", drain_s=0.05) as group:
        Sharded(Hooked, str(log), "one", "stop", hook_timeout_s=SOON_S)
        Sharded(Hooked, str(log), "two")
    assert lines(log, 1)[-1] == "one close"
    (line,) = told(caplog)
    assert "stop() of Hooked in shard 1 did not end within hook_timeout_s=0.2 s" in line
    assert [each.exit_code for each in group.statistics().shards] == [0, 0]


def test_no_hook_is_waited_for_in_a_shard_that_does_not_answer(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    group = ShardGroup(2, start_method="forkserver", drain_s=0.05, clean_up_s=SOON_S)
    Sharded(Hooked, str(log), "one", hook_timeout_s=10 * PATIENCE_S)
    halt(group.statistics().shards[0].pid)
    group.close()
    assert lines(log, 1) == STARTED + ENDED
    with pytest.raises(ShardError):
        group.submit_to(0, instances)
