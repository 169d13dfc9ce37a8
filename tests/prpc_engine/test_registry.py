"""What the master decides: sessions, tree, ranks, servers, targets; without I/O, with a manual
clock.
"""

from __future__ import annotations

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.master.namespace import (
    LEASE_S_MAX,
    NAME_LENGTH_MAX,
    VALUE_LENGTH_MAX,
    AnswerForgotten,
    NodeExists,
    NoSuchNode,
    SessionExpired,
    TreeBounds,
    VersionMismatch,
    check_root,
    component,
    name_of,
    natural,
)
from prpc_engine.master.registry import (
    RANK_MAX,
    SERVERS_PER_NODE_MAX,
    Registry,
    RegistryError,
    ServerEntry,
)
from prpc_engine.master.tree import ANSWERS_MAX, Kind, SessionRecord
from tests.helpers import ManualClock

LEASE_S = 5.0


def opened(
    registry: Registry,
    now: float = 0.0,
    lease_s: float = LEASE_S,
    root: str = "root",
    label: str = "",
) -> int:
    return registry.open(SessionRecord("token", lease_s, root, label, ""), now)


def joined(count: int) -> tuple[Registry, list[int]]:
    """A registry and the sessions of nodes of rank 0, 1, ..."""
    registry = Registry()
    sessions = [opened(registry) for _ in range(count)]
    for rank, session in enumerate(sessions):
        assert registry.join(session, [f"tcp://{rank}:1"], -1, -1) == rank
    return registry, sessions


# -- nodes and servers -----------------------------------------------------------------------------


def test_ranks_count_up_and_the_smallest_free_one_is_given_again() -> None:
    registry, (a, b, c) = joined(3)
    assert registry.ranks(a) == [0, 1, 2]
    registry.end(b)
    assert registry.ranks(a) == [0, 2]
    assert registry.join(opened(registry), [], -1, -1) == 1
    assert registry.join(opened(registry), [], -1, -1) == 3
    assert registry.get_comm_info(c)[0] == [0, ["tcp://0:1"]]


def test_who_comes_back_gets_its_rank_again_if_nobody_has_it() -> None:
    registry, (a, _) = joined(2)
    registry.end(a)
    again = opened(registry)
    assert registry.join(again, [], -1, 0) == 0
    assert registry.join(opened(registry), [], -1, 0) == 2


def test_what_is_prepared_is_registered_and_no_target_is_given_twice() -> None:
    registry, (a, b) = joined(2)
    prepared = [registry.prepare_server(each, "echo", -1) for each in (a, b)]
    assert [server_id for server_id, _ in prepared] == [0, 0], "nobody has it yet"
    assert prepared[0][1] != prepared[1][1]
    assert registry.servers(a, "echo") == []
    assert (
        registry.register_server(a, "echo", *prepared[0][:1], target=prepared[0][1])[:2]
        == prepared[0]
    )
    with pytest.raises(RegistryError, match="exists already"):
        registry.register_server(b, "echo", 0, target=prepared[1][1])
    with pytest.raises(RegistryError, match="exists already"):
        registry.prepare_server(b, "echo", 0)
    assert registry.prepare_server(b, "echo", -1)[0] == 1


def test_joining_twice_gives_the_same_rank() -> None:
    registry, (a,) = joined(1)
    version = registry.version
    assert registry.join(a, ["elsewhere"], -1, -1) == 0
    assert registry.version == version


def test_a_server_is_found_under_its_service_with_its_nodes_addresses() -> None:
    registry, (a, b) = joined(2)
    server_id, target, rpc_id = registry.register_server(b, "echo", -1)
    assert registry.servers(a, "echo") == [
        ServerEntry("echo", server_id, target, 1, ("tcp://1:1",))
    ]
    assert registry.services(a) == ["echo"]
    assert registry.servers(a, "other") == []
    assert registry.get_rpc_service_info(a, "RpcService") == [["echo", rpc_id, [[server_id, 1]]]]


def test_server_ids_are_the_smallest_free_or_the_one_asked_for() -> None:
    registry, (a,) = joined(1)
    assert [registry.register_server(a, "echo", wanted)[0] for wanted in (-1, 2, -1, -1)] == [
        0,
        2,
        1,
        3,
    ]
    assert [entry.server_id for entry in registry.servers(a, "echo")] == [0, 1, 2, 3]
    assert registry.register_server(a, "other", -1)[0] == 0
    with pytest.raises(RegistryError, match="server 2 of 'echo' exists already, at rank 0"):
        registry.register_server(a, "echo", 2)


def test_targets_are_never_used_twice() -> None:
    registry, (a,) = joined(1)
    seen = set()
    for _ in range(100):
        target = registry.register_server(a, "echo", 0)[1]
        assert target not in seen
        assert target >= 16, "the first ones are the master's own"
        seen.add(target)
        assert registry.deregister_server(a, target)
    assert registry.services(a) == []


def test_what_a_node_registered_goes_with_its_session() -> None:
    registry, (a, b) = joined(2)
    for service in ("one", "two", "one"):
        registry.register_server(a, service, -1)
    kept = registry.register_server(b, "one", -1)[1]
    assert registry.end(a)
    assert not registry.end(a)
    assert [entry.target for entry in registry.servers(b, "one")] == [kept]
    assert registry.services(b) == ["one"]


def test_only_the_session_that_registered_a_server_can_take_it_back() -> None:
    registry, (a, b) = joined(2)
    target = registry.register_server(a, "echo", -1)[1]
    assert not registry.deregister_server(b, target)
    assert not registry.deregister_server(a, 999)
    assert registry.deregister_server(a, target)
    assert not registry.deregister_server(a, target)


def test_shards_share_the_rank_of_their_node_and_have_sessions_of_their_own() -> None:
    registry, (a, _) = joined(2)
    shard = opened(registry)
    assert registry.join(shard, ["tcp://b0:1"], 1, -1) == 1
    assert registry.ranks(a) == [0, 1]
    registry.register_server(shard, "echo", -1)
    (entry,) = registry.servers(a, "echo")
    assert (entry.rank, entry.addresses) == (1, ("tcp://b0:1",))
    registry.end(shard)
    assert registry.services(a) == []
    assert registry.ranks(a) == [0, 1]
    with pytest.raises(RegistryError, match="there is no node of rank 7"):
        registry.join(opened(registry), [], 7, -1)


@pytest.mark.parametrize("name", ["", "x" * (NAME_LENGTH_MAX + 1)])
def test_a_name_that_is_too_short_or_long_is_refused_with_the_bounds(name: str) -> None:
    registry, (a,) = joined(1)
    with pytest.raises(RegistryError, match=f"1 to {NAME_LENGTH_MAX} characters, not {len(name)}"):
        registry.register_server(a, name, -1)


def test_a_service_may_be_named_anything() -> None:
    registry, (a,) = joined(1)
    for name in ("a/b", "%2F", "..", "/", "ä b\n"):
        registry.register_server(a, name, -1)
        assert name_of(component(name)) == name
    assert registry.services(a) == sorted(["a/b", "%2F", "..", "/", "ä b\n"], key=component)


def test_who_has_not_joined_cannot_register() -> None:
    registry = Registry()
    with pytest.raises(RegistryError, match="join before"):
        registry.register_server(opened(registry), "echo", -1)


def test_a_node_has_a_bounded_number_of_servers() -> None:
    registry, (a,) = joined(1)
    for number in range(SERVERS_PER_NODE_MAX):
        registry.register_server(a, "echo", number)
    with pytest.raises(RegistryError, match=f"at most {SERVERS_PER_NODE_MAX} servers"):
        registry.register_server(a, "echo", SERVERS_PER_NODE_MAX)


def test_a_service_has_the_same_rpc_id_each_time_and_keeps_it_while_it_has_servers() -> None:
    registry, (a,) = joined(1)
    assert [registry.register_rpc_service(a, "api", name) for name in ("x", "y", "x")] == [0, 1, 0]
    assert registry.register_rpc_service(a, "other api", "y") == 0
    registry.register_server(a, "x", 5, "api", 0)
    with pytest.raises(RegistryError, match="'x' has 1 servers: close them first"):
        registry.del_rpc_service_info(a, "api", "x")
    assert registry.del_rpc_service_info(a, "api", "y")
    assert not registry.del_rpc_service_info(a, "api", "y")


def test_ids_count_up_for_each_key_and_begin_again_when_reset() -> None:
    registry, (a, b) = joined(2)
    assert [registry.generate_id(a, key) for key in ("a", "a", "b", "a")] == [0, 1, 0, 2]
    registry.reset_generate_id(b, "a")
    assert [registry.generate_id(b, key) for key in ("a", "b")] == [0, 1]


# -- the tree --------------------------------------------------------------------------------------


def test_a_node_needs_a_parent_that_stays() -> None:
    registry, (a,) = joined(1)
    with pytest.raises(NoSuchNode, match="'/root/x'"):
        registry.tree_node_add(a, "/x/y", "", False)
    registry.tree_node_add(a, "/x", "1", False)
    registry.tree_node_add(a, "/x/e", "", True)
    with pytest.raises(NodeExists):
        registry.tree_node_add(a, "/x", "", False)
    with pytest.raises(RegistryError, match="ephemeral and can have no child"):
        registry.tree_node_add(a, "/x/e/z", "", False)
    with pytest.raises(RegistryError, match="has 1 children"):
        registry.tree_node_del(a, "/x", -1)
    registry.tree_node_del(a, "/x/e", -1)
    registry.tree_node_del(a, "/x", -1)
    with pytest.raises(NoSuchNode):
        registry.tree_node_get(a, "/x")


@pytest.mark.parametrize("path", ["x", "/", "/a//b", "/a/", "//"])
def test_a_path_that_is_none_is_refused_with_the_rule(path: str) -> None:
    registry, (a,) = joined(1)
    with pytest.raises(RegistryError, match="is no path: it begins with /"):
        registry.tree_node_add(a, path, "", False)


def test_a_value_has_a_bound() -> None:
    registry, (a,) = joined(1)
    registry.tree_node_add(a, "/x", "v" * VALUE_LENGTH_MAX, False)
    with pytest.raises(RegistryError, match=f"at most {VALUE_LENGTH_MAX} characters"):
        registry.tree_node_set(a, "/x", "v" * (VALUE_LENGTH_MAX + 1), -1)


def test_sequence_nodes_count_up_and_begin_again_when_their_parent_was_deleted() -> None:
    registry, (a,) = joined(1)
    registry.tree_node_add(a, "/x", "", False)
    assert [registry.tree_node_gen(a, "/x", "", False) for _ in range(2)] == [
        "_0000000000",
        "_0000000001",
    ]
    registry.tree_node_del(a, "/x/_0000000001", -1)
    assert registry.tree_node_gen(a, "/x", "", True) == "_0000000002"
    assert registry.tree_clear_path(a, "/x") == 3
    registry.tree_node_add(a, "/x", "", False)
    assert registry.tree_node_gen(a, "/x", "", False) == "_0000000000"


def test_compare_and_set_takes_only_the_version_that_was_read() -> None:
    registry, (a, b) = joined(2)
    registry.tree_node_add(a, "/x", "0", False)
    assert registry.tree_node_set(a, "/x", "1", 0) == 1
    with pytest.raises(VersionMismatch, match="has version 1, 0 was expected"):
        registry.tree_node_set(b, "/x", "2", 0)
    assert registry.tree_node_get(b, "/x") == ["1", 1, False]
    with pytest.raises(VersionMismatch):
        registry.tree_node_del(b, "/x", 0)
    registry.tree_node_del(b, "/x", 1)


def test_children_are_listed_by_number_and_then_by_name() -> None:
    registry, (a,) = joined(1)
    for name in ("10", "2", "b", "a"):
        registry.tree_node_add(a, f"/_context_/{name}", "", False)
    assert registry.tree_node_sub(a, "/_context_") == ["2", "10", "a", "b"]
    assert sorted(["x", "11", "9"], key=natural) == ["9", "11", "x"]


def test_jobs_with_different_roots_see_nothing_of_each_other() -> None:
    registry = Registry()
    one, other = opened(registry, root="one"), opened(registry, root="other")
    registry.tree_node_add(one, "/x", "", False)
    with pytest.raises(NoSuchNode):
        registry.tree_node_get(other, "/x")
    assert registry.join(one, [], -1, -1) == registry.join(other, [], -1, -1) == 0
    assert registry.generate_id(one, "k") == registry.generate_id(other, "k") == 0


# -- sessions --------------------------------------------------------------------------------------


def test_a_session_lives_for_its_lease_after_it_was_last_heard_of(clock: ManualClock) -> None:
    registry = Registry()
    registry.start(clock.now)
    heard, silent = opened(registry, clock.now), opened(registry, clock.now)
    registry.tree_node_add(silent, "/x", "", True)
    ended = []
    for _ in range(10):
        registry.touch(heard, clock.now)
        clock.advance(1.0)
        ended += [(session, clock.now - 1000.0) for session in registry.expire(clock.now)]
    assert ended == [(silent, LEASE_S)]
    with pytest.raises(NoSuchNode):
        registry.tree_node_get(heard, "/x")
    with pytest.raises(SessionExpired, match=f"session {silent} is over"):
        registry.touch(silent, clock.now)


def test_a_lease_can_be_far_below_a_second(clock: ManualClock) -> None:
    registry = Registry()
    registry.start(clock.now)
    session = opened(registry, clock.now, lease_s=0.2)
    assert registry.look_every_s() == pytest.approx(0.05)
    looks = 0
    while not registry.expire(clock.advance(registry.look_every_s())):
        looks += 1
    assert looks <= 4
    assert not registry.end(session)


def test_a_master_that_was_stopped_does_not_blame_its_clients(clock: ManualClock) -> None:
    registry = Registry()
    registry.start(clock.now)
    session = opened(registry, clock.now)
    clock.advance(1.0)
    assert registry.expire(clock.now) == []
    clock.advance(3600.0)
    assert registry.expire(clock.now) == [], "nobody listened for an hour"
    for _ in range(2):
        assert registry.expire(clock.advance(1.0)) == []
    assert registry.expire(clock.advance(1.0)) == [session]


def test_a_session_is_resumed_by_its_token_alone(clock: ManualClock) -> None:
    registry = Registry()
    session = opened(registry, clock.now)
    registry.resume(session, "token", clock.now)
    for number, token in ((session, "guess"), (session + 1, "token")):
        with pytest.raises(SessionExpired, match="is not known here"):
            registry.resume(number, token, clock.now)


def test_session_numbers_are_never_used_twice() -> None:
    registry = Registry()
    seen = set()
    for _ in range(10):
        session = opened(registry)
        assert session not in seen
        seen.add(session)
        registry.end(session)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, LEASE_S_MAX * 2, float("nan")])
def test_a_lease_that_makes_no_sense_is_refused(lease_s: float) -> None:
    with pytest.raises(RegistryError, match="a lease lasts"):
        opened(Registry(), lease_s=lease_s)


def test_a_request_that_was_served_is_answered_the_same_again() -> None:
    registry, (a, b) = joined(2)
    registry.note_answer(a, 7, [1, "x"])
    assert registry.answered(a, 7) == [[1, "x"]]
    assert registry.answered(a, 8) is None
    assert registry.answered(b, 7) is None
    for request in range(8, 8 + ANSWERS_MAX):
        registry.note_answer(a, request, None)
    assert registry.answered(a, 7) is None, "bounded"
    assert registry.answered(a, 8) == [None]
    for request in (3, 7):
        with pytest.raises(AnswerForgotten, match=f"it may have been done under request {request}"):
            registry.check_remembered(a, request)
        registry.check_remembered(b, request)
    registry.check_remembered(a, 8)
    registry.check_remembered(a, 8 + ANSWERS_MAX)


def test_an_answer_that_was_noted_late_is_kept_as_long_as_others() -> None:
    """Of a barrier, whose request is older than those that were served while it waited."""
    registry, (a,) = joined(1)
    for request in range(8, 8 + ANSWERS_MAX):
        registry.note_answer(a, request, None)
    registry.note_answer(a, 7, "late")
    assert registry.answered(a, 8) is None
    assert registry.answered(a, 7) == ["late"]
    registry.check_remembered(a, 7)


def test_every_change_is_a_new_version_and_is_told_once() -> None:
    registry = Registry()
    session = opened(registry)
    told = registry.take_changes()
    assert registry.version == len(told)
    assert registry.take_changes() == []
    registry.join(session, [], -1, -1)
    assert [(change.kind, change.path) for change in registry.take_changes()] == [
        (Kind.PUT, "/root/_node_/0")
    ]
    assert registry.version == len(told) + 1


@pytest.mark.parametrize("rank", [-1, RANK_MAX + 1, "0"])
def test_a_rank_that_its_owner_chose_has_bounds(rank: int) -> None:
    registry = Registry()
    with pytest.raises(RegistryError, match=f"a rank is 0 to {RANK_MAX}"):
        registry.register_node(opened(registry), rank, [])


def test_a_rank_that_its_owner_chose_is_its_own() -> None:
    registry = Registry()
    a, b = opened(registry), opened(registry)
    registry.register_node(a, 7, ["tcp://7:1"])
    assert registry.get_comm_info(b) == [[7, ["tcp://7:1"]]]
    with pytest.raises(NodeExists):
        registry.register_node(b, 7, [])


def test_a_master_that_begins_gives_each_session_it_remembers_its_whole_lease() -> None:
    registry = Registry()
    session = opened(registry, now=0.0)  # before it was killed
    registry.start(100.0)
    ended = [registry.expire(100.0 + tenths / 10) for tenths in range(int(LEASE_S * 10))]
    assert not any(ended)
    assert registry.expire(100.0 + LEASE_S + 0.1) == [session]


def test_the_root_of_a_job_stays() -> None:
    registry = Registry()
    with pytest.raises(RegistryError, match="the root stays"):
        registry.tree_node_del(opened(registry), "", -1)


@pytest.mark.parametrize("root", ["", "r" * (NAME_LENGTH_MAX + 1), 3, None])
def test_a_root_is_a_short_text_that_is_not_empty(root: object) -> None:
    with pytest.raises(ConfigError, match=f"1 to {NAME_LENGTH_MAX} characters"):
        check_root(root)


def test_sequence_nodes_end_where_their_digits_do() -> None:
    """More would be sorted before the first ones."""
    registry = Registry()
    session = opened(registry)
    registry.tree_node_add(session, "/queue", "", False)
    assert registry.tree_node_gen(session, "/queue", "", False) == "_0000000000"
    registry.tree.counters[registry.full_path(session, "/queue")] = 10**10 - 1
    assert registry.tree_node_gen(session, "/queue", "", False) == "_9999999999"
    with pytest.raises(RegistryError, match="has had all its 10000000000 sequence nodes"):
        registry.tree_node_gen(session, "/queue", "", False)


def test_labels_and_counts_have_bounds() -> None:
    with pytest.raises(RegistryError, match="label and home have at most"):
        opened(Registry(), label="l" * (NAME_LENGTH_MAX + 1))
    registry = Registry(bounds=TreeBounds(nodes=nodes_of_a_root(), sessions=1))
    session = opened(registry)
    with pytest.raises(RegistryError, match="delete some"):
        registry.tree_node_add(session, "/a", "", False)
    with pytest.raises(RegistryError, match="1 sessions are open"):
        opened(registry)
    registry.end(session)
    with pytest.raises(RegistryError, match="no room for another root"):
        opened(registry, root="another")


def nodes_of_a_root() -> int:
    registry = Registry()
    opened(registry)
    return len(registry.tree.nodes)


def test_what_changes_nothing_keeps_no_answer() -> None:
    registry = Registry()
    session = opened(registry)
    registry.note_answer(session, 0, "of a request without a number")
    assert registry.tree.sessions[session].answers.kept == {}
