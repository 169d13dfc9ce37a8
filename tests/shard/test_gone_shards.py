"""Shards that die and what the log says of it: of each restart, and of the end of them."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from shard import PeerLostError, RestartPolicy, ShardGroup
from tests.program import wait_until
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S, kill


def test_each_restart_is_told_and_the_last_death_too_with_its_reason_and_what_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    once = RestartPolicy("on-failure", restarts_max=1, backoff_s=0.01)
    with (
        caplog.at_level(logging.INFO, "shard"),
        ShardGroup(1, start_method="forkserver", restart=once) as group,
    ):
        kill(group, 0)
        group.wait_up(PATIENCE_S)
        kill(group, 0)
        with pytest.raises(PeerLostError, match="stays down"):
            group.wait_up(PATIENCE_S)
        wait_until(
            lambda: any(one.levelno == logging.ERROR for one in caplog.records),
            "the last one is told",
        )
    told = [
        (one.levelname, one.getMessage().partition(")")[2])
        for one in caplog.records
        if one.name == "shard"
    ]
    assert told == [
        ("WARNING", " is gone: killed by SIGKILL; restart 1 of 1 follows in 0.0 s"),
        ("WARNING", " is up again"),
        ("ERROR", " is gone: killed by SIGKILL; it stays down after 1 restarts in a row"),
    ]


def test_a_shard_that_is_not_to_be_restarted_is_told_as_well(
    group: ShardGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shard"):
        kill(group, 0)
        os.kill(group.submit_to(1, os.getpid).result(PATIENCE_S), signal.SIGTERM)
        wait_until(lambda: len(caplog.records) == 2, "both are told")
        group.close()
    lost, stopped = sorted(caplog.records, key=lambda one: one.getMessage())
    assert lost.levelname == "ERROR"
    assert "is gone: killed by SIGKILL; it stays down (restart='never')" in lost.getMessage()
    assert stopped.levelname == "WARNING"
    assert "is gone: exit code 0; it stays down" in stopped.getMessage()


def test_who_made_the_group_is_told_of_deaths_and_restarts() -> None:
    seen: list[tuple[int, str]] = []
    once = RestartPolicy("on-failure", restarts_max=1, backoff_s=0.01)

    def on_change(index: int, state: str, text: str) -> None:
        assert f"shard {index}" in text
        seen.append((index, state))

    with ShardGroup(2, start_method="forkserver", restart=once, on_change=on_change) as group:
        kill(group, 1)
        group.wait_up(PATIENCE_S)
        assert group.submit_to(1, functions.index).result(PATIENCE_S) == 1
        kill(group, 1)
        wait_until(lambda: len(seen) == 3, "it was told")
    assert seen == [(1, "waiting"), (1, "up"), (1, "gone")]


async def note_later(what: str) -> None:
    await functions.double_async(1)
    functions.note(what)


def test_a_coroutine_function_that_is_to_run_at_the_start_runs_at_a_restart_too() -> None:
    policy = RestartPolicy("on-failure", backoff_s=0.01)
    with ShardGroup(1, start_method="forkserver", restart=policy) as group:
        group.at_start(note_later, "first")
        assert group.map(functions.notes) == [["first"]]
        kill(group, 0)
        group.wait_up(PATIENCE_S)
        assert group.map(functions.notes) == [["first"]]
