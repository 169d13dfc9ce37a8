"""Topics between hosts: an item crosses the network once for all readers of a host, whoever of them
is killed, stopped or not reached by the others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService, topics
from prpc_engine.topics.tree import TREE_BYTES_MIN
from tests.faults.rounds import ROUNDS
from tests.network.namespaces import Network, network_or_skip
from tests.network.server import SECRET
from tests.program import ROOT, Program, halt, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None,
        reason="makes network namespaces: needs root and ip",
    ),
]
READER = "tests.prpc_engine.topics.reader"
PUBLISHER = "tests.prpc_engine.topics.publisher"
FLOATS = 1 << 20  # of an item
ITEM_BYTES = 8 * FLOATS


class Hosts:
    """A publisher's service here, on host 1, and readers on others."""

    def __init__(self, network: Network, stack: contextlib.ExitStack) -> None:
        self._network, self._stack = network, stack
        here = f"{network.address(1)}:0"
        self._master = stack.enter_context(Master(here, secret=SECRET))
        self.service = stack.enter_context(
            RpcService(self._master.address, bind=here, secret=SECRET)
        )

    def reader(self, host: int, **settings: Any) -> Program:
        """One that has asked for the first time, or will."""
        return self.start(host, READER, **settings)

    def start(self, host: int, module: str, *words: str, **settings: Any) -> Program:
        """Such a program, with arguments of its RpcService."""
        arguments = {"bind": f"{self._network.address(host)}:0", "secret": SECRET, **settings}
        program = self._stack.enter_context(
            Program(
                module,
                self._master.address,
                "items",
                *words,
                json.dumps(arguments),
                prefix=self._network.prefix(host),
                env={"PYTHONPATH": str(ROOT)},
            )
        )
        assert program.read_line() == "up"
        return program

    @contextlib.contextmanager
    def parted_pairs(self, *pairs: tuple[int, int]) -> Iterator[None]:
        with contextlib.ExitStack() as cuts:
            for one, other in pairs:
                cuts.enter_context(self._network.parted_pair(one, other))
            yield

    def copies_sent(self) -> float:
        """Items, by the bytes that left this process over tcp."""
        statistics = self.service.statistics()
        sent = sum(peer.traffic.bytes_sent for peer in statistics.peers if peer.transport == "tcp")
        ended = statistics.ended.get("tcp")
        return (sent + (ended.traffic.bytes_sent if ended else 0)) / ITEM_BYTES

    def copies_since(self, before: float, at_least: float) -> float:
        """Once they are so many: what has arrived may not be counted yet."""
        wait_until(lambda: self.copies_sent() - before > at_least, "what was sent is counted")
        return self.copies_sent() - before


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with network_or_skip(getattr(request, "param", 2)) as network, contextlib.ExitStack() as stack:
        yield Hosts(network, stack)


def item(number: int) -> Any:
    return np.full(FLOATS, float(number))


def joined(hosts: Hosts, publisher: topics.Publisher, count: int) -> list[Program]:
    """Readers of host 2, the first of which is the first to be given anything."""
    readers = []
    for number in range(1, count + 1):
        readers.append(hosts.reader(2))
        publisher.wait_for_readers(number)
    return readers


def said(number: int, skipped: int = 0) -> str:
    """By a reader, of an item whose number is its version."""
    return f"{number} {float(number) * FLOATS} {skipped}"


@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_four_readers_of_another_host_are_sent_one_copy(hosts: Hosts, mode: topics.Mode) -> None:
    readers = [hosts.reader(2) for _ in range(4)]
    with topics.Publisher(hosts.service, "items", mode=mode) as publisher:
        publisher.wait_for_readers(4)
        before = hosts.copies_sent()
        for number in range(1, 9):
            publisher.publish(item(number))
            for reader in readers:
                assert reader.read_line() == said(number)
        assert hosts.copies_since(before, 7.9) < 8.1


def test_small_items_are_sent_to_each(hosts: Hosts) -> None:
    readers = [hosts.reader(2) for _ in range(2)]
    small = np.ones(TREE_BYTES_MIN // 8 - 1)
    with topics.Publisher(hosts.service, "items") as publisher:
        publisher.wait_for_readers(2)
        before = hosts.copies_sent()
        publisher.publish(small)
        for reader in readers:
            assert reader.read_line() == f"1 {float(small.size)} 0"
        assert hosts.copies_since(before, 2 * small.nbytes / ITEM_BYTES)


def test_who_joins_a_host_that_has_the_latest_gets_it_there(hosts: Hosts) -> None:
    with topics.Publisher(hosts.service, "items", mode="latest") as publisher:
        publisher.publish(item(1))
        publisher.publish(item(2))
        assert hosts.reader(2).read_line() == said(2)
        before = hosts.copies_sent()
        for _ in range(3):
            assert hosts.reader(2).read_line() == said(2)
        assert hosts.copies_sent() - before < 0.1


def test_a_publisher_that_is_faster_than_the_network_starves_no_reader(hosts: Hosts) -> None:
    """A newer item takes the place of none that a reader waits for."""
    readers = [hosts.reader(2) for _ in range(3)]
    ends = threading.Event()
    with (
        topics.Publisher(hosts.service, "items", mode="latest") as publisher,
        ThreadPoolExecutor(1) as beside,
    ):
        publisher.wait_for_readers(3)
        arrays = [item(number) for number in range(4)]

        def publish() -> None:
            for number in itertools.count():
                if ends.is_set():
                    return
                publisher.publish(arrays[number % 4])

        publishes = beside.submit(publish)
        try:
            for reader in readers:
                for _ in range(10):
                    assert reader.read_line()
        finally:
            ends.set()
        publishes.result()


def test_changes_of_weights_are_had_from_a_reader_and_whole_by_who_lacks_the_base(
    hosts: Hosts,
) -> None:
    weights = np.zeros(4 * FLOATS)
    readers = [hosts.reader(2) for _ in range(3)]
    with topics.Publisher(hosts.service, "items", mode="latest") as publisher:
        publisher.wait_for_readers(3)
        version = 0
        for number in range(1, 6):
            weights[:: 40 + number] += 1.0  # some 100,000, which are 1.2 MB
            before = hosts.copies_sent()
            version = publisher.publish({"w": weights}, changed_since=version)
            for reader in readers:
                assert reader.read_line() == f"{number} {weights.sum()} 0"
            sent = (hosts.copies_sent() - before) * ITEM_BYTES
            assert sent < 1.1 * weights.nbytes if number == 1 else sent < 2_500_000
        late = hosts.reader(2)
        assert late.read_line() == f"5 {weights.sum()} 0"


def test_what_all_have_is_held_no_more(hosts: Hosts) -> None:
    readers = [hosts.reader(2) for _ in range(3)]
    with topics.Publisher(hosts.service, "items") as publisher:
        publisher.wait_for_readers(3)
        for reader in readers[1:]:
            reader.write_line("hold")
        for number in range(1, 4):
            publisher.publish(item(number))
            assert readers[0].read_line() == said(number)
        for reader in readers[1:]:
            reader.write_line("go on")
            assert [reader.read_line() for _ in range(3)] == [said(1), said(2), said(3)]
        for reader in readers:
            wait_until(lambda reader=reader: held_by(reader)[0] == 0, "letting go")


def held_by(reader: Program) -> tuple[int, int]:
    """Items that it holds for others, and how often its memory is lent."""
    reader.write_line("held")
    _, held, leases = reader.read_line().split()
    return int(held), int(leases)


def test_the_copy_of_a_host_is_lent_to_its_readers(hosts: Hosts) -> None:
    """Each keeps the array that it has received last."""
    readers = [hosts.reader(2) for _ in range(4)]
    with topics.Publisher(hosts.service, "items", mode="latest") as publisher:
        publisher.wait_for_readers(4)
        publisher.publish(item(1))
        for reader in readers:
            assert reader.read_line() == said(1)
        assert sorted(map(held_by, readers)) == [(0, 0), (0, 0), (0, 0), (1, 3)]


def test_what_is_held_goes_with_the_publisher(hosts: Hosts) -> None:
    readers = [hosts.reader(2) for _ in range(2)]
    with topics.Publisher(hosts.service, "items", mode="latest") as publisher:
        publisher.wait_for_readers(2)
        publisher.publish(item(1))
        for reader in readers:
            assert reader.read_line() == said(1)
        wait_until(lambda: sum(held_by(one)[0] for one in readers) == 1, "one holds it")
    wait_until(lambda: sum(held_by(one)[0] for one in readers) == 0, "letting go")


@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_readers_go_on_though_the_one_that_they_fetch_from_has_stopped(
    hosts: Hosts, mode: topics.Mode
) -> None:
    """It has asked, so it is given the next item, and never says that it has it."""
    with topics.Publisher(hosts.service, "items", mode=mode, capacity=8) as publisher:
        readers = joined(hosts, publisher, 3)
        publisher.publish(item(1))
        for reader in readers:
            assert reader.read_line() == said(1)
        wait_until(lambda: not any(one.behind for one in publisher.readers()), "all ask")
        halt(readers[0].pid)
        publisher.publish(item(2))
        for reader in readers[1:]:
            assert reader.read_line() == said(2)
        readers[0].process.send_signal(signal.SIGCONT)
        assert readers[0].read_line() == said(2)
        publisher.publish(item(3))
        for reader in readers:
            assert reader.read_line() == said(3)


@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_a_reader_that_is_killed_before_it_is_asked_costs_the_other_one_its_own_copy(
    hosts: Hosts, mode: topics.Mode
) -> None:
    with topics.Publisher(hosts.service, "items", mode=mode) as publisher:
        carrier, other = joined(hosts, publisher, 2)
        halt(other.pid)
        publisher.publish(item(1))
        assert carrier.read_line() == said(1)
        wait_until(lambda: [one.behind for one in publisher.readers()] == [0, 1], "it confirms")
        carrier.kill()  # the other one was told to fetch it there
        other.process.send_signal(signal.SIGCONT)
        assert other.read_line() == said(1)
        publisher.publish(item(2))
        assert other.read_line() == said(2)


def test_a_reader_that_receives_nothing_holds_up_nobody(hosts: Hosts) -> None:
    """It asks until its inbox is full, and says that it has what came last."""
    part = np.ones(TREE_BYTES_MIN // 4)
    with topics.Publisher(hosts.service, "items", capacity=1024) as publisher:
        readers = joined(hosts, publisher, 3)
        readers[0].write_line("hold")
        before = hosts.copies_sent()
        for number in range(1, 151):
            publisher.publish(part)
            for reader in readers[1:]:
                assert reader.read_line() == f"{number} {float(part.size)} 0"
        assert (hosts.copies_sent() - before) * ITEM_BYTES < 151 * part.nbytes
        readers[0].write_line("go on")
        for number in range(1, 151):
            assert readers[0].read_line() == f"{number} {float(part.size)} 0"


def test_what_a_slow_reader_misses_is_counted_as_on_one_host(hosts: Hosts) -> None:
    last = 40
    with topics.Publisher(hosts.service, "items", capacity=4, slow="drop_oldest") as publisher:
        readers = joined(hosts, publisher, 3)
        halt(readers[1].pid)
        for number in range(1, last + 1):
            publisher.publish(item(number))
        readers[1].process.send_signal(signal.SIGCONT)
        for reader in readers:
            version = seen = missed = 0
            while version < last:
                line = reader.read_line().split()
                version = int(line[0])
                assert line == said(version, int(line[2])).split()
                seen, missed = seen + 1, missed + int(line[2])
            assert seen + missed == last
        assert publisher.readers()[1].skipped > 0


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_publisher_that_is_killed_is_read_again_when_it_is_back(hosts: Hosts) -> None:
    floats = TREE_BYTES_MIN // 4
    readers = [hosts.reader(2) for _ in range(3)]
    seen = {reader.pid: 0 for reader in readers}
    for _ in range(3):
        publisher = hosts.start(3, PUBLISHER, "queue", str(floats))
        for reader in readers:
            for _ in range(200):  # more than can be left of the one before
                version, total, skipped = map(float, reader.read_line().split())
                assert total == version * floats
                # the next one; or the first of another one, with what that had published before
                assert version == (skipped + 1 if skipped or version == 1 else seen[reader.pid] + 1)
                seen[reader.pid] = int(version)
        publisher.kill()
    wait_until(lambda: all(map(drained, readers)), "letting go")


def drained(reader: Program) -> bool:
    """Whether it holds nothing; it may have more to say of items."""
    reader.write_line("held")
    while not (line := reader.read_line()).startswith("held"):
        pass
    return line.split()[1] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_readers_that_are_killed_cost_the_others_of_their_host_nothing(
    hosts: Hosts, mode: topics.Mode, seed: int
) -> None:
    chance = random.Random(seed)
    readers = [hosts.reader(2) for _ in range(3)]
    with topics.Publisher(hosts.service, "items", mode=mode, capacity=64) as publisher:
        publisher.wait_for_readers(3)
        number = 0
        seen = {reader.pid: 0 for reader in readers}
        before = hosts.copies_sent()
        for _ in range(ROUNDS):
            last = number + 5
            victim = chance.randrange(3)
            killed_at = number + chance.randrange(1, 5)
            while number < last:
                number += 1
                publisher.publish(item(number))
                if number == killed_at:
                    readers.pop(victim).kill()
            for reader in readers:
                while seen[reader.pid] < last:
                    version, total, skipped = map(float, reader.read_line().split())
                    assert total == version * FLOATS
                    assert version == seen[reader.pid] + 1 + skipped
                    assert mode == "latest" or not skipped
                    seen[reader.pid] = int(version)
            joins = hosts.reader(2)
            readers.append(joins)
            if mode == "latest":
                assert joins.read_line() == said(number)
            wait_until(lambda pid=joins.pid: reads(publisher, pid), "a reader more")
            seen[joins.pid] = number
        assert hosts.copies_sent() - before < 2.5 * number
        wait_until(lambda: hosts.service.statistics().slab.leases == 0)


def reads(publisher: topics.Publisher, pid: int) -> bool:
    return any(f"(process {pid})" in one.name for one in publisher.readers())


def copies_of_five_items(hosts: Hosts, readers: list[Program], at_least: float) -> float:
    """How many copies left the publisher until all these readers had five items."""
    with topics.Publisher(hosts.service, "items") as publisher:
        publisher.wait_for_readers(len(readers))
        before = hosts.copies_sent()
        for number in range(1, 6):
            publisher.publish(item(number))
            for reader in readers:
                assert reader.read_line() == said(number)
        return hosts.copies_since(before, at_least)


def test_readers_that_do_not_reach_each_other_are_sent_their_own(hosts: Hosts) -> None:
    """Both say that they are at an address which is nobody's."""
    readers = [hosts.reader(2, transports=["tcp"], advertise="127.9.9.9:9") for _ in range(2)]
    assert copies_of_five_items(hosts, readers, 9.9) < 10.1


@pytest.mark.parametrize("hosts", [5], indirect=True)
def test_hosts_that_have_an_item_pass_it_on(hosts: Hosts) -> None:
    readers = [hosts.reader(host) for host in (2, 3, 4, 5)]
    assert copies_of_five_items(hosts, readers, 9.9) < 10.1


@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_hosts_that_do_not_reach_each_other_are_sent_their_own(hosts: Hosts) -> None:
    readers = [hosts.reader(host) for host in (2, 3, 4)]
    with (
        topics.Publisher(hosts.service, "items") as publisher,
        hosts.parted_pairs((2, 4), (3, 4)),
    ):
        publisher.wait_for_readers(3)
        for number in range(1, 6):
            publisher.publish(item(number))
            for reader in readers:
                assert reader.read_line() == said(number)
