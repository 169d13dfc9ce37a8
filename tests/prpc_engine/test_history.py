"""The changes that the master keeps for watchers that come back: what is kept, and what is not."""

from __future__ import annotations

import pytest

from prpc_engine.master.history import History, TreeChange


def change(version: int, value: str = "") -> TreeChange:
    return [version, 1, f"/{version}", value, 0]


def versions(changes: list[TreeChange] | None) -> list[int] | None:
    return None if changes is None else [one[0] for one in changes]


def test_a_watcher_that_comes_back_gets_what_was_changed_since() -> None:
    history = History(5)
    assert history.since(5, 5) == []
    for version in (6, 8, 9):  # a tree has changes that no watcher hears of
        history.append(change(version))
    assert versions(history.since(5, 9)) == [6, 8, 9]
    assert versions(history.since(8, 9)) == [9]
    assert versions(history.since(9, 9)) == []


@pytest.mark.parametrize("known", [-1, 4, 10])
def test_one_of_before_or_of_another_master_gets_a_snapshot(known: int) -> None:
    history = History(5)
    history.append(change(9))
    assert history.since(known, 9) is None


@pytest.mark.parametrize(
    "history", [History(0, changes_max=4), History(0, length_max=40)], ids=["changes", "length"]
)
def test_what_is_kept_has_a_bound_and_what_went_is_missed_by_nobody(history: History) -> None:
    for version in range(1, 101):
        history.append(change(version, "x" * 10))
    assert versions(history.since(96, 100)) == [97, 98, 99, 100]
    assert history.since(95, 100) is None


def test_one_value_above_the_bound_is_not_kept() -> None:
    history = History(0, length_max=40)
    history.append(change(1, "x" * 41))
    assert history.since(0, 1) is None
    assert history.since(1, 1) == []
