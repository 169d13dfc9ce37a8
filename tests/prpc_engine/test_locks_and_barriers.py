"""Locks and barriers as the master sees them: who holds, who waits, who is missing; without I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prpc_engine.master.locks_and_barriers import Arrival, LocksAndBarriers, role_of
from prpc_engine.master.namespace import RegistryError, component
from prpc_engine.master.registry import Registry
from prpc_engine.master.tree import SessionRecord


def world(count: int) -> tuple[LocksAndBarriers, Registry, list[int]]:
    registry = Registry()
    sessions = [
        registry.open(SessionRecord("t", 5.0, "root", f"client {number}", ""), 0.0)
        for number in range(count)
    ]
    return LocksAndBarriers(registry), registry, sessions


def arrival(
    request: int, count: int, member: str = "?", item: int = 0, expected: tuple[str, ...] = ()
) -> Arrival:
    return Arrival(request, count, member, item, expected)


def test_a_lock_goes_from_one_to_the_next_in_the_order_they_came() -> None:
    meetings, registry, sessions = world(3)
    tokens = [meetings.claim(session, "l", 1, "") for session in sessions]
    assert tokens == sorted(set(tokens))
    for place, session in enumerate(sessions):
        first = [
            meetings.ahead(one, "l", token) is None
            for one, token in list(zip(sessions, tokens, strict=True))[place:]
        ]
        assert first == [True, False, False][: 3 - place]
        assert meetings.release_lock(session, "l", tokens[place])
    assert registry.tree_node_sub(sessions[0], "/_lock_") == [], "nothing is left of it"


def test_each_waits_for_the_one_just_before_it() -> None:
    meetings, _, (a, b, c) = world(3)
    tokens = [meetings.claim(session, "l", 1, "") for session in (a, b, c)]
    assert meetings.ahead(c, "l", tokens[2]) == f"/root/_lock_/l/{tokens[1]:016}"
    assert meetings.release_lock(b, "l", tokens[1]), "gives its place up"
    assert meetings.ahead(c, "l", tokens[2]) == f"/root/_lock_/l/{tokens[0]:016}"
    assert "client 0" not in meetings.holder(c, "l")
    assert meetings.holder(c, "l").endswith("1 wait for it")


def test_a_claim_that_is_asked_for_again_keeps_its_place() -> None:
    meetings, _, (a, b) = world(2)
    first = meetings.claim(a, "l", 1, "")
    meetings.claim(b, "l", 1, "")
    assert meetings.claim(a, "l", 1, "") == first
    assert meetings.claim(a, "l", 2, "") > first, "another thread of that session"


def test_a_lock_is_released_by_its_holders_session_alone_or_by_its_end() -> None:
    meetings, registry, (a, b) = world(2)
    held, waits = meetings.claim(a, "l", 1, ""), meetings.claim(b, "l", 1, "")
    assert not meetings.release_lock(b, "l", held)
    registry.end(a)
    assert meetings.ahead(b, "l", waits) is None
    assert not meetings.release_lock(b, "l", held)


def test_tokens_grow_even_when_nothing_is_left_of_the_lock() -> None:
    meetings, _, (a,) = world(1)
    tokens = []
    for request in range(3):
        tokens.append(meetings.claim(a, "l", request, ""))
        meetings.release_lock(a, "l", tokens[-1])
    assert tokens == sorted(set(tokens))


def test_a_barrier_opens_for_all_with_its_last_member() -> None:
    meetings, registry, sessions = world(3)
    for session in sessions[:2]:
        meetings.arrive(session, "b", arrival(1, 3, item=10 - session))
        assert registry.answered(session, 1) is None
    meetings.arrive(sessions[2], "b", arrival(1, 3, item=2))
    assert [registry.answered(session, 1) for session in sessions] == [[[2, 8, 9]]] * 3
    assert registry.tree_node_sub(sessions[0], "/_barrier_") == [], "nothing is left of it"


@pytest.mark.parametrize("counts", [(5, 10, 5), (1, 2, 1)])
def test_a_barriers_name_is_used_again_with_other_counts(counts: tuple[int, ...]) -> None:
    meetings, registry, sessions = world(10)
    for turn, count in enumerate(counts):
        for session in sessions[:count]:
            meetings.arrive(session, "b", arrival(turn + 1, count))
        assert all(registry.answered(session, turn + 1) is not None for session in sessions[:count])


def test_members_must_agree_on_the_count() -> None:
    meetings, _, (a, b) = world(2)
    meetings.arrive(a, "b", arrival(1, 3, "a"))
    with pytest.raises(RegistryError, match=r"under way for 3 members \(a wait there\), not for 2"):
        meetings.arrive(b, "b", arrival(1, 2, "b"))
    with pytest.raises(RegistryError, match="a barrier has 1 to"):
        meetings.arrive(b, "c", arrival(1, 0))


def test_who_gives_up_hears_who_came_and_who_did_not() -> None:
    meetings, _, (a, b) = world(2)
    expected = ("rank 0", "rank 2", "rank 10")
    meetings.arrive(a, "b", arrival(1, 3, "rank 0", expected=expected))
    meetings.arrive(b, "b", arrival(1, 3, "rank 10"))
    assert meetings.give_up(b, "b", 1) == "2 of 3 arrived: rank 0, rank 10; missing: rank 2"
    assert meetings.give_up(a, "b", 1) == "1 of 3 arrived: rank 0; missing: rank 10, rank 2"
    meetings.arrive(a, "b", arrival(2, 2, "x"))
    assert meetings.give_up(a, "b", 2) == "1 of 2 arrived: x"


def test_where_all_nodes_are_to_come_the_missing_ranks_are_known() -> None:
    meetings, registry, sessions = world(3)
    for session in sessions:
        registry.join(session, [], -1, -1)
    meetings.arrive(sessions[1], "b", arrival(1, 3, registry.title(sessions[1])))
    assert (
        meetings.give_up(sessions[1], "b", 1) == "1 of 3 arrived: rank 1; missing: rank 0, rank 2"
    )


def test_a_member_that_dies_is_not_counted() -> None:
    meetings, registry, (a, b, c) = world(3)
    meetings.arrive(a, "b", arrival(1, 2))
    registry.end(a)
    meetings.arrive(b, "b", arrival(1, 2))
    assert registry.answered(b, 1) is None
    meetings.arrive(c, "b", arrival(1, 2))
    assert registry.answered(b, 1) is not None


def test_what_a_request_left_behind_is_forgotten_with_it() -> None:
    meetings, registry, (a, b) = world(2)
    meetings.claim(a, "l", 1, "")
    meetings.arrive(a, "b", arrival(2, 2))
    waits = meetings.claim(b, "l", 1, "")
    assert meetings.forget(a, 1)
    assert meetings.forget(a, 2)
    assert not meetings.forget(a, 1)
    assert meetings.ahead(b, "l", waits) is None
    assert registry.tree_node_sub(b, "/_barrier_") == []


class Counting(dict[str, Any]):
    """The nodes of a tree, and how often one was looked at."""

    looks = 0

    def __getitem__(self, path: str) -> Any:
        self.looks += 1
        return super().__getitem__(path)


def cost_of(meet: Callable[[LocksAndBarriers, Registry, list[int]], None], members: int) -> int:
    """Looks at nodes, and characters of changes, until all have met."""
    meetings, registry, sessions = world(members)
    registry.take_changes()
    nodes = meetings._nodes = registry.tree.nodes = Counting(registry.tree.nodes)
    meet(meetings, registry, sessions)
    return nodes.looks + sum(
        len(change.text) + len(change.path) for change in registry.take_changes()
    )


def open_barrier(meetings: LocksAndBarriers, registry: Registry, sessions: list[int]) -> None:
    for session in sessions:
        meetings.arrive(session, "b", Arrival(1, len(sessions), "?", None))
    assert all(registry.answered(session, 1) == [[]] for session in sessions)


def give_barrier_up(meetings: LocksAndBarriers, registry: Registry, sessions: list[int]) -> None:
    for session in sessions:
        meetings.arrive(session, "b", Arrival(1, len(sessions) + 1, "?", None))
    for session in sessions:
        assert f"of {len(sessions) + 1} arrived" in meetings.give_up(session, "b", 1)


def hand_lock_on(meetings: LocksAndBarriers, registry: Registry, sessions: list[int]) -> None:
    tokens = [meetings.claim(session, "l", 1, "") for session in sessions]
    for session, token in zip(sessions, tokens, strict=True):
        assert meetings.ahead(session, "l", token) is None
        assert meetings.release_lock(session, "l", token)


@pytest.mark.parametrize("meet", [open_barrier, give_barrier_up, hand_lock_on])
def test_what_many_members_cost_grows_as_their_number_does(
    meet: Callable[[LocksAndBarriers, Registry, list[int]], None],
) -> None:
    assert cost_of(meet, 2000) < 5 * cost_of(meet, 500)


def test_of_a_large_barrier_that_is_given_up_some_names_are_told() -> None:
    meetings, _, sessions = world(300)
    for session in sessions:
        meetings.arrive(session, "b", arrival(1, 301, f"rank {session}"))
    assert meetings.give_up(sessions[0], "b", 1).startswith("300 of 301 arrived: rank 1, rank 2, ")
    with pytest.raises(
        RegistryError,
        match=r"under way for 301 members \(rank 2, .* and 267 more wait there\), not for 7",
    ):
        meetings.arrive(sessions[0], "b", arrival(2, 7))


def test_no_barriers_name_is_a_roles() -> None:
    assert all(role_of("x") != component(name) for name in ("x", "%role%x", "role/x"))


def test_clearing_the_tree_takes_locks_and_barriers_along() -> None:
    meetings, registry, (a, b) = world(2)
    meetings.claim(a, "l", 1, "")
    meetings.arrive(b, "b", arrival(1, 2))
    registry.tree_clear_path(a, "")
    assert registry.tree_node_sub(a, "/_lock_") == registry.tree_node_sub(a, "/_barrier_") == []
    assert meetings.claim(b, "l", 2, "") > 0


def test_a_claim_that_is_gone_has_none_ahead_of_it_and_says_so() -> None:
    meetings, _, (a, b) = world(2)
    token = meetings.claim(a, "l", 1, "")
    meetings.claim(b, "l", 1, "")
    assert meetings.release_lock(a, "l", token)
    with pytest.raises(RegistryError, match=f"lock 'l': claim {token} was released meanwhile"):
        meetings.ahead(a, "l", token)


def test_a_lock_that_was_never_claimed_is_held_by_nobody() -> None:
    meetings, _, (a,) = world(1)
    assert meetings.holder(a, "l") == "nobody holds it"
    assert not meetings.release_lock(a, "l", 1)


def test_a_request_forgets_what_it_left_and_not_what_others_of_its_session_left() -> None:
    meetings, registry, (a,) = world(1)
    registry.join(a, [], -1, -1)  # a node is no claim
    token = meetings.claim(a, "l", 1, "")
    assert not meetings.forget(a, 2)
    assert meetings.ahead(a, "l", token) is None


def test_a_member_that_arrives_again_is_counted_once() -> None:
    meetings, registry, (a, b) = world(2)
    path = meetings.arrive(a, "b", arrival(1, 2, "x"))
    assert meetings.arrive(a, "b", arrival(1, 2, "x")) == path
    assert registry.answered(a, 1) is None
    meetings.arrive(b, "b", arrival(1, 2, "y"))
    assert registry.answered(a, 1) is not None
    assert meetings.give_up(a, "b", 1) == "its arrival was lost", "the barrier opened meanwhile"


def test_where_others_than_the_nodes_meet_nobody_is_said_to_be_missing() -> None:
    meetings, registry, sessions = world(2)
    for session in sessions:
        registry.join(session, [], -1, -1)
    meetings.arrive(sessions[0], "b", arrival(1, 2, "a thread"))
    assert meetings.give_up(sessions[0], "b", 1) == "1 of 2 arrived: a thread"
