"""From whom a reader on another host gets an item, without any process."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from prpc_engine.topics.tree import (
    SENT,
    TREE_BYTES_MIN,
    Key,
    OnItsWay,
    ReaderTree,
    Way,
    host_of,
    patience_s,
)

LARGE = TREE_BYTES_MIN
ONE = Key(1, 0)
CARRIES = Way(True)


def place_of(host: str, reader: int) -> str:
    return f"memory://{reader} shm://{host}/0/{reader} tcp://10.0.0.1:{reader}"


def tree_of(*hosts: str, keeps_newest: bool = False) -> ReaderTree:
    """A reader on each, numbered from 1."""
    tree = ReaderTree(keeps_newest)
    for reader, host in enumerate(hosts, 1):
        tree.join(reader, place_of(host, reader))
    return tree


def way(tree: ReaderTree, reader: int, key: Key = ONE, now: float = 0.0) -> Way | OnItsWay:
    return tree.way(reader, key, LARGE, LARGE, now)


def from_reader(host: str, reader: int, holds: bool = False) -> Way:
    return Way(holds, place_of(host, reader), reader)


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        (["memory://1", "shm://boot.1/0/t", "unix://boot.1/0/u", "tcp://10.0.0.1:7"], "boot.1/0"),
        (["memory://1", "unix://boot.1/0/u", "tcp://10.0.0.1:7"], "boot.1/0"),
        (["memory://1", "tcp://10.0.0.1:7"], "10.0.0.1"),
        (["memory://1", "tcp://[fe80::1]:7"], "[fe80::1]"),
        (["memory://1"], ""),
        ([], ""),
    ],
)
def test_a_host_is_where_memory_is_shared_else_an_address(addresses: list[str], host: str) -> None:
    assert host_of(addresses) == host


def test_the_first_of_a_host_is_sent_it_and_others_wait_and_fetch_it_there() -> None:
    tree = tree_of("a", "a", "a")
    assert way(tree, 1) == CARRIES
    assert way(tree, 2) == way(tree, 3) == OnItsWay(patience_s(LARGE))
    assert tree.arrived(1, 1)
    assert not tree.arrived(1, 1)
    assert way(tree, 2) == way(tree, 3) == from_reader("a", 1)
    assert not tree.arrived(2, 1)


def test_what_is_small_and_who_has_no_place_is_sent_it() -> None:
    tree = tree_of("a", "a")
    for reader in (1, 2):
        assert tree.way(reader, ONE, LARGE - 1, LARGE, 0.0) == SENT
    assert way(tree, 9) == SENT
    assert 9 not in tree


def test_who_is_alone_holds_nothing_but_the_newest() -> None:
    tree = tree_of("a", "b")
    assert way(tree, 1) == way(tree, 2) == SENT
    tree = tree_of("a", "b", keeps_newest=True)
    assert way(tree, 1) == way(tree, 2) == CARRIES


def test_what_has_changed_and_the_whole_are_two_things() -> None:
    tree = tree_of("a", "a", "a")
    assert way(tree, 1, Key(2, 1)) == CARRIES
    assert way(tree, 2, Key(2, 0)) == CARRIES
    assert tree.arrived(1, 2)
    assert way(tree, 3, Key(2, 1)) == from_reader("a", 1)
    assert isinstance(way(tree, 3, Key(2, 0)), OnItsWay)


@pytest.mark.parametrize("is_held", [False, True])
def test_when_its_carrier_leaves_the_next_is_sent_it(is_held: bool) -> None:
    tree = tree_of("a", "a", "a")
    assert way(tree, 1) == CARRIES
    if is_held:
        tree.arrived(1, 1)
        assert way(tree, 2) == from_reader("a", 1)
    assert tree.leave(1)
    assert not tree.leave(1)
    assert way(tree, 2) == CARRIES
    assert isinstance(way(tree, 3), OnItsWay)


def test_a_carrier_that_takes_too_long_is_waited_for_no_more() -> None:
    tree = tree_of("a", "a")
    assert way(tree, 1) == CARRIES
    late = way(tree, 2)
    assert isinstance(late, OnItsWay)
    assert way(tree, 2, now=late.until_s) == CARRIES
    assert not tree.arrived(1, 1)  # another one carries it
    assert tree.arrived(2, 1)


def test_a_carrier_has_the_time_that_all_of_its_answer_takes() -> None:
    tree = tree_of("a", "a")
    assert tree.way(1, ONE, LARGE, 64 << 20, 10.0) == CARRIES
    assert way(tree, 2) == OnItsWay(10.0 + patience_s(64 << 20))


def test_a_carrier_whose_answer_was_lost_is_sent_it_again() -> None:
    tree = tree_of("a", "a")
    assert way(tree, 1) == way(tree, 1) == CARRIES
    assert tree.arrived(1, 1)
    assert way(tree, 2) == from_reader("a", 1)


def test_who_could_not_fetch_it_is_sent_it_and_nobody_is_told_to_fetch_it_there_again() -> None:
    tree = tree_of("a", "a", "a")
    way(tree, 1)
    tree.arrived(1, 1)
    assert way(tree, 2) == from_reader("a", 1)
    assert tree.failed(2)
    assert not tree.failed(2)
    assert way(tree, 2) == SENT
    assert way(tree, 3) == CARRIES


def test_what_was_lost_on_its_way_is_not_held_though_a_later_one_has_come() -> None:
    """In mode "latest" it is not sent again."""
    tree = tree_of("a", "a")
    assert way(tree, 1) == CARRIES
    assert tree.asks(1, 0)
    assert not tree.asks(1, 0)
    assert way(tree, 1, Key(2, 0)) == CARRIES
    assert tree.asks(1, 2)
    assert way(tree, 2, Key(2, 0)) == from_reader("a", 1)
    assert way(tree, 2) == CARRIES
    assert not tree.asks(9, 2)


def test_a_fetch_that_went_well_is_not_what_has_failed() -> None:
    tree = tree_of("a", "a", "a")
    way(tree, 1)
    tree.arrived(1, 1)
    way(tree, 2)
    tree.arrived(2, 1)
    assert tree.failed(2)
    assert way(tree, 3) == from_reader("a", 1)


def test_a_reader_that_comes_back_elsewhere_leaves_what_it_held() -> None:
    tree = tree_of("a", "a")
    way(tree, 1)
    tree.join(1, place_of("a", 1))
    assert isinstance(way(tree, 2), OnItsWay)
    tree.join(1, place_of("b", 1))
    assert way(tree, 2) == SENT


def test_what_is_let_go_of_is_sent_again() -> None:
    tree = tree_of("a", "a")
    way(tree, 1)
    assert not tree.let_go(1, 2)  # it is on its way
    assert tree.carries(1)
    assert not tree.carries(2)
    tree.arrived(1, 1)
    assert not tree.let_go(1, 1)
    assert tree.let_go(1, 2)
    assert not tree.let_go(1, 2)
    assert not tree.let_go(9, 2)
    assert not tree.carries(1)
    assert way(tree, 2) == CARRIES


def test_more_hosts_than_one_process_sends_to_have_it_from_each_other() -> None:
    tree = tree_of("a", "b", "c", "d", "e", "f")
    assert way(tree, 1) == way(tree, 2) == CARRIES
    assert isinstance(way(tree, 3), OnItsWay)
    tree.arrived(1, 1)
    assert way(tree, 3) == way(tree, 4) == from_reader("a", 1, holds=True)
    tree.arrived(2, 1)
    assert way(tree, 5) == from_reader("b", 2, holds=True)
    tree.arrived(3, 1)
    assert way(tree, 6) == from_reader("c", 3, holds=True)
    assert set(tree.sharing(1)) == {1, 2, 3, 4, 5, 6}


def test_a_few_hosts_share_nothing() -> None:
    tree = tree_of("a", "b", "a")
    assert way(tree, 1) == CARRIES
    tree.arrived(1, 1)
    assert way(tree, 2) == SENT
    assert set(tree.sharing(1)) == {1, 3}
    assert set(tree.sharing(2)) == {2}


def test_a_host_that_does_not_reach_another_one_is_sent_it_from_then_on() -> None:
    tree = tree_of("a", "b", "c")
    way(tree, 1), way(tree, 2)
    tree.arrived(1, 1)
    assert way(tree, 3) == from_reader("a", 1, holds=True)
    assert tree.failed(3)
    tree.join(3, place_of("c", 3))
    for version in range(2, 6):
        key = Key(version, 0)
        assert [way(tree, reader, key) for reader in (1, 2, 3)] == [CARRIES] * 3


HOSTS = ("a", "b", "c", "d", "e")


class Job(RuleBasedStateMachine):
    """Readers that join, ask, confirm, fail and leave in any order: nobody waits for ever, and none
    is told to fetch from one that has not confirmed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree = ReaderTree(keeps_newest=False)
        self.now = 0.0
        self.hosts: dict[int, str] = {}
        self.has: dict[int, set[int]] = {}  # confirmed, as a carrier
        self.gets: dict[int, tuple[Key, Way]] = {}
        self.version = 1

    @rule(reader=st.integers(1, 12), host=st.sampled_from(HOSTS))
    def joins(self, reader: int, host: str) -> None:
        host = self.hosts.setdefault(reader, host)
        self.tree.join(reader, place_of(host, reader))
        self.has.setdefault(reader, set())

    @rule()
    def publishes(self) -> None:
        self.version += 1

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def asks(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.hosts)))
        key = Key(data.draw(st.integers(1, self.version)), 0)
        self.tree.asks(reader, 0)
        self.gets.pop(reader, None)
        answer = self.tree.way(reader, key, LARGE, LARGE, self.now)
        if isinstance(answer, OnItsWay):
            assert answer.until_s > self.now
            return
        self.gets[reader] = key, answer
        if answer.place:
            assert reader in self.tree
            assert key.version in self.has[answer.holder]
            assert answer.place == place_of(self.hosts[answer.holder], answer.holder)
            assert answer.holds == (self.hosts[answer.holder] != self.hosts[reader])

    @precondition(lambda self: self.gets)
    @rule(data=st.data())
    def confirms(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.gets)))
        key, answer = self.gets.pop(reader)
        self.tree.arrived(reader, key.version)
        if answer.holds and reader in self.tree:
            self.has[reader].add(key.version)

    @precondition(lambda self: self.hosts)
    @rule(data=st.data(), how=st.sampled_from(["leave", "failed"]))
    def goes(self, data: st.DataObject, how: str) -> None:
        reader = data.draw(st.sampled_from(sorted(self.hosts)))
        getattr(self.tree, how)(reader)
        assert reader not in self.tree
        self.gets.pop(reader, None)
        del self.hosts[reader], self.has[reader]

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def lets_go(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.hosts)))
        below = data.draw(st.integers(1, self.version + 1))
        self.tree.let_go(reader, below)
        if reader in self.tree:
            assert reader in self.tree.sharing(reader)
        self.has[reader] = {one for one in self.has[reader] if one >= below}

    def teardown(self) -> None:
        """Nobody waits for ever, though no carrier confirms anything any more."""
        for reader in self.hosts:
            now = self.now
            for _ in range(len(self.hosts) + 1):
                answer = self.tree.way(reader, Key(self.version, 0), LARGE, LARGE, now)
                if isinstance(answer, Way):
                    break
                now = answer.until_s
            else:
                raise AssertionError(f"reader {reader} waits")


TestJob = Job.TestCase
