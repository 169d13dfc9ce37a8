"""Shards that die, or are asked for too much, at the very moment when others begin with them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import multiprocess
import pytest

from shard import Future, PeerLostError, RestartPolicy, ShardError, ShardGroup, ShmFull
from shard.group import group as group_module
from shard.group.lane_handoff import LaneEnd
from shard.group.mesh import ShardChannel
from shard.group.supervisor import Life, Supervisor
from tests.held import at, held_at
from tests.program import wait_until
from tests.shard import group_functions as functions
from tests.shard.processes import PATIENCE_S, kill


def test_a_shard_that_dies_as_wait_up_looks_is_none_that_stays_down() -> None:
    class Submits(dict[int, Any]):
        def __len__(self) -> int:
            found, group._submits = super().__len__(), dict(self)
            kill(group, 1)
            return found

    with ShardGroup(2, start_method="forkserver", restart="on-failure") as group:
        group._submits = Submits(group._submits)
        group.wait_up(PATIENCE_S)
        group.wait_up(PATIENCE_S)
        assert group.statistics().shards[1].incarnation == 2


@pytest.mark.slow
def test_a_shard_that_dies_before_it_is_asked_to_set_up_is_waited_for_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def be_late(self: ShardChannel) -> None:
        if "incarnation 2" in self.connection.peer:
            monkeypatch.delenv("PRPC_FAILPOINTS", raising=False)
            wait_until(lambda: self.connection.error, "the application has noticed")

    with ShardGroup(1, restart="on-failure") as group, at("mesh.before_call", be_late):
        monkeypatch.setenv("PRPC_FAILPOINTS", "group.started=kill9")
        assert isinstance(
            group.submit_to(0, functions.exit_at_once, 5).error(PATIENCE_S), ShardError
        )
        group.wait_up(PATIENCE_S)
        shard = group.statistics().shards[0]
        assert (shard.incarnation, shard.exit_code) == (3, -signal.SIGKILL)


def test_a_shard_whose_lane_is_seen_to_end_after_the_group_did_wakes_no_supervisor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready, told = Future(), list[str]()

    def start(life: Life) -> tuple[Any, Callable[[], Future]]:
        process = multiprocess.get_context("forkserver").Process(target=os._exit, args=(3,))
        process.start()
        multiprocess.process._children.discard(process)
        return process, lambda: ready

    told_by = Supervisor(
        1, RestartPolicy(), start, lambda index: None, lambda index, text: told.append(text)
    )
    with pytest.raises(ShardError, match="exit code 3"):
        told_by.start()
    told_by.stop(PATIENCE_S)
    told_by.close()
    ready.set_error(PeerLostError("seen late, by a reactor that was busy"))
    assert (len(told), caplog.records) == (1, []), (
        "it would write to whatever has that descriptor by now"
    )


def test_a_shard_that_cannot_be_told_what_it_is_to_run_at_its_start_is_ended() -> None:
    with ShardGroup(
        1, start_method="forkserver", restart=RestartPolicy("on-failure", restarts_max=1)
    ) as group:
        with held_at("group.before_spawn") as born_again:
            assert isinstance(
                group.submit_to(0, functions.exit_at_once, 5).error(PATIENCE_S), ShardError
            )
            born_again.wait()
            # nobody is up who would have refused it
            group.at_start(functions.note, (each for each in [1]))
        with pytest.raises(
            ShardError, match=r"killed by SIGKILL, because it could not start: .*generator"
        ):
            group.wait_up(PATIENCE_S)


def test_a_shard_that_cannot_be_joined_to_all_others_leaves_no_lane_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, make_lane = list[LaneEnd](), group_module.make_lane

    def refuse_the_third(incarnation: int, ring_bytes: int) -> tuple[LaneEnd, LaneEnd]:
        if len(made) == 4:
            raise ShmFull("no room for a third lane")
        ends = make_lane(incarnation, ring_bytes)
        made.extend(ends)
        return ends

    with ShardGroup(
        3, start_method="forkserver", restart=RestartPolicy("on-failure", restarts_max=1)
    ) as group:
        # a record would keep the ends, by its traceback
        caplog.set_level(logging.CRITICAL, "shard")
        monkeypatch.setattr(group_module, "make_lane", refuse_the_third)
        kill(group, 0)
        with pytest.raises(PeerLostError, match="no room for a third lane"):
            group.wait_up(PATIENCE_S)
        # whose traceback keeps a connection that was not used
        group._supervisor.lives[0].error = None
    assert len(made) == 4, "and what watches every test finds none of their descriptors"


def test_a_shard_that_is_born_while_its_group_closes_is_told_to_stop_as_the_others_are() -> None:
    group = ShardGroup(1, start_method="forkserver", restart="on-failure", drain_s=PATIENCE_S)
    with (
        held_at("group.before_spawn") as born_again,
        at("group.after_stop", born_again.release),  # all have been told
        group,
    ):
        kill(group, 0)
        born_again.wait()
    assert (group.statistics().shards[0].incarnation, group.statistics().shards[0].exit_code) == (
        2,
        0,
    )
