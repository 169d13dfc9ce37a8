"""Whether and when a shard is started again: decisions, without a process."""

from __future__ import annotations

import signal

import pytest

from shard import RestartPolicy
from shard.group.restart import NEVER, ON_FAILURE, ending


@pytest.mark.parametrize("exit_code", [0, 1, 143, -signal.SIGKILL, None])
def test_never_means_never(exit_code: int | None) -> None:
    policy = RestartPolicy()
    assert policy.kind == NEVER
    assert policy.delay_s(exit_code, 0) is None
    assert policy.outlook(exit_code, 0) == "it stays down (restart='never')"


@pytest.mark.parametrize("exit_code", [1, 143, -signal.SIGKILL, None])
def test_what_failed_is_started_again_after_a_delay_that_doubles_up_to_its_bound(
    exit_code: int | None,
) -> None:
    policy = RestartPolicy(ON_FAILURE, restarts_max=6, backoff_s=0.1, backoff_s_max=1.0)
    assert [policy.delay_s(exit_code, restarts) for restarts in range(7)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
        None,
    ]


def test_what_was_stopped_stays_down() -> None:
    policy = RestartPolicy(ON_FAILURE)
    assert policy.delay_s(0, 0) is None
    assert policy.outlook(0, 0) == "it stays down (restart='on-failure')"


def test_the_outlook_says_which_restart_follows_and_when_and_when_no_more_do() -> None:
    policy = RestartPolicy(ON_FAILURE, restarts_max=2, backoff_s=0.5)
    assert policy.outlook(1, 0) == "restart 1 of 2 follows in 0.5 s"
    assert policy.outlook(-9, 1) == "restart 2 of 2 follows in 1.0 s"
    assert policy.outlook(1, 2) == "it stays down after 2 restarts in a row"


def test_a_policy_without_restarts_starts_nothing_again() -> None:
    assert RestartPolicy(ON_FAILURE, restarts_max=0).delay_s(1, 0) is None


def test_a_very_long_row_of_restarts_is_delayed_by_the_bound() -> None:
    assert (
        RestartPolicy(ON_FAILURE, restarts_max=100_000).delay_s(1, 99_999)
        == RestartPolicy().backoff_s_max
    )


def test_an_unknown_kind_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="restart='always': 'never' and 'on-failure' are possible"):
        RestartPolicy("always")


@pytest.mark.parametrize("bound", ["restarts_max", "backoff_s", "backoff_s_max"])
def test_a_bound_below_zero_is_refused(bound: str) -> None:
    with pytest.raises(ValueError, match=f"{bound}=-1.*from 0 on is allowed"):
        RestartPolicy(ON_FAILURE, **{bound: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "exit code 0"),
        (143, "exit code 143"),
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-40, "killed by signal 40"),
        (None, "its connection broke"),
    ],
)
def test_how_a_process_ended_is_told_in_words(exit_code: int | None, words: str) -> None:
    assert ending(exit_code) == words
