"""The master's memory: ranks, servers, targets; without I/O."""

from __future__ import annotations

import pytest

from prpc_engine.registry import NAME_LENGTH_MAX, SERVERS_PER_NODE_MAX, Registry, RegistryError, ServerEntry


def joined(*sessions: str) -> Registry:
    registry = Registry()
    for session in sessions:
        registry.join(session, [f"tcp://{session}:1"])
    return registry


def test_ranks_count_up_and_the_smallest_free_one_is_given_again() -> None:
    registry = joined("a", "b", "c")
    assert registry.ranks() == [0, 1, 2]
    registry.leave("b")
    assert registry.ranks() == [0, 2]
    assert registry.join("d", []) == 1
    assert registry.join("e", []) == 3


def test_joining_twice_gives_the_same_rank() -> None:
    registry = joined("a")
    version = registry.version
    assert registry.join("a", ["elsewhere"]) == 0
    assert registry.version == version


def test_a_server_is_found_under_its_service_with_its_nodes_addresses() -> None:
    registry = joined("a", "b")
    entry = registry.register("b", "echo", -1)
    assert registry.servers("echo") == [entry] == [ServerEntry("echo", 0, entry.target, 1, ("tcp://b:1",))]
    assert registry.services() == ["echo"]
    assert registry.servers("other") == []


def test_server_ids_are_the_smallest_free_or_the_one_asked_for() -> None:
    registry = joined("a")
    assert [registry.register("a", "echo", wanted).server_id for wanted in (-1, 2, -1, -1)] == [0, 2, 1, 3]
    assert [entry.server_id for entry in registry.servers("echo")] == [0, 1, 2, 3]
    assert registry.register("a", "other", -1).server_id == 0
    with pytest.raises(RegistryError, match="server 2 of 'echo' exists already, at rank 0"):
        registry.register("a", "echo", 2)


def test_targets_are_never_used_twice() -> None:
    registry = joined("a")
    seen = set()
    for _ in range(100):
        target = registry.register("a", "echo", 0).target
        assert target not in seen
        assert target >= 16, "the first ones are the master's own"
        seen.add(target)
        assert registry.deregister("a", target) == "echo"
    assert registry.services() == []


def test_what_a_node_registered_goes_with_its_session() -> None:
    registry = joined("a", "b")
    for service in ("one", "two", "one"):
        registry.register("a", service, -1)
    kept = registry.register("b", "one", -1)
    assert registry.leave("a") == ["one", "two"]
    assert registry.leave("a") == []
    assert registry.servers("one") == [kept]
    assert registry.services() == ["one"]


def test_only_the_node_that_registered_a_server_can_take_it_back() -> None:
    registry = joined("a", "b")
    entry = registry.register("a", "echo", -1)
    assert registry.deregister("b", entry.target) is None
    assert registry.deregister("nobody", entry.target) is None
    assert registry.deregister("a", 999) is None
    assert registry.servers("echo") == [entry]
    assert registry.deregister("a", entry.target) == "echo"
    assert registry.deregister("a", entry.target) is None


def test_shards_share_the_rank_of_their_node_and_have_sessions_of_their_own() -> None:
    registry = joined("a", "b")
    assert registry.join_as_shard("b0", ["tcp://b0:1"], 1) == 1
    assert registry.ranks() == [0, 1]
    entry = registry.register("b0", "echo", -1)
    assert (entry.rank, entry.addresses) == (1, ("tcp://b0:1",))
    assert registry.leave("b0") == ["echo"]
    assert registry.ranks() == [0, 1]
    with pytest.raises(RegistryError, match="there is no node of rank 7"):
        registry.join_as_shard("c0", [], 7)


@pytest.mark.parametrize("name", ["", "x" * (NAME_LENGTH_MAX + 1)])
def test_a_name_that_is_too_short_or_long_is_refused_with_the_bounds(name: str) -> None:
    with pytest.raises(RegistryError, match=f"1 to {NAME_LENGTH_MAX} characters, not {len(name)}"):
        joined("a").register("a", name, -1)


def test_who_has_not_joined_cannot_register() -> None:
    with pytest.raises(RegistryError, match="join before"):
        Registry().register("a", "echo", -1)


def test_a_node_has_a_bounded_number_of_servers() -> None:
    registry = joined("a")
    for number in range(SERVERS_PER_NODE_MAX):
        registry.register("a", "echo", number)
    with pytest.raises(RegistryError, match=f"at most {SERVERS_PER_NODE_MAX} servers"):
        registry.register("a", "echo", SERVERS_PER_NODE_MAX)


def test_ids_count_up_for_each_key() -> None:
    registry = Registry()
    assert [registry.generate_id(key) for key in ("a", "a", "b", "a")] == [0, 1, 0, 2]


def test_every_change_is_a_new_version() -> None:
    registry = Registry()
    seen = [registry.version]
    for change in (
        lambda: registry.join("a", []),
        lambda: registry.register("a", "echo", 0),
        lambda: registry.deregister("a", registry.servers("echo")[0].target),
        lambda: registry.leave("a"),
    ):
        change()
        seen.append(registry.version)
    assert seen == sorted(set(seen))
