"""Topics between real processes: order, loss that is counted, slow readers, death."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService, errors, topics
from prpc_engine.master.registry import DEFAULT_API
from prpc_engine.topics.publisher import SERVICE
from shard import ForkedError
from tests.held import at
from tests.program import Program, halt, wait_until

PATIENCE_S = 20.0
READER = "tests.prpc_engine.topics.reader"
PUBLISHER = "tests.prpc_engine.topics.publisher"


class World:
    """A publisher's service here, and readers beside."""

    def __init__(self, master: Master, stack: contextlib.ExitStack) -> None:
        self.master = master
        self.service = stack.enter_context(RpcService(master.address))
        self._stack = stack

    def reader(self, topic: str) -> Program:
        program = self._stack.enter_context(Program(READER, self.master.address, topic))
        assert program.read_line() == "up"
        return program


@pytest.fixture
def world(master: Master) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(master, stack)


def unlist(service: RpcService, topic: str) -> None:
    """The master has the one publisher of a topic no more, which goes on."""
    service.master_client.deregister_server(DEFAULT_API, SERVICE + topic, 0)


def test_each_reader_gets_each_item_in_order(world: World) -> None:
    readers = [world.reader("numbers") for _ in range(2)]
    with topics.Publisher(world.service, "numbers") as publisher:
        publisher.wait_for_readers(2)
        for number in range(500):
            assert publisher.publish(number) == number + 1
        for reader in readers:
            for number in range(500):
                assert reader.read_line() == f"{number + 1} {float(number)} 0"


def test_an_array_is_copied_once_for_all_readers(world: World) -> None:
    readers = [world.reader("arrays") for _ in range(3)]
    with topics.Publisher(world.service, "arrays") as publisher:
        publisher.wait_for_readers(3)
        wait_until(lambda: world.service.statistics().slab.leases == 0)
        blocks = world.service.statistics().slab.blocks_used
        for reader in readers:
            halt(reader.pid)  # each has asked, and takes what is lent to it later
        array = np.ones(1_000_000)
        publisher.publish(array)
        array[:] = 5.0  # it is the caller's again
        try:
            wait_until(lambda: world.service.statistics().slab.leases == 3)
            assert world.service.statistics().slab.blocks_used == blocks + 1
        finally:
            for reader in readers:
                reader.process.send_signal(signal.SIGCONT)
        for reader in readers:
            assert reader.read_line() == "1 1000000.0 0"


def test_the_latest_is_had_by_who_joins_late_and_by_who_was_slow(world: World) -> None:
    with topics.Publisher(world.service, "weights", mode="latest") as publisher:
        publisher.publish(1.0)
        publisher.publish(2.0)
        reader = world.reader("weights")
        assert reader.read_line() == "2 2.0 0"
        for value in range(3, 100):
            publisher.publish(float(value))
        seen = [reader.read_line().split()]
        while seen[-1][0] != "99":
            seen.append(reader.read_line().split())
        assert sum(1 + int(skipped) for _, _, skipped in seen) == 97
        (statistics,) = publisher.readers()
        assert statistics.name.startswith("rank 1 ")


def test_weights_travel_as_what_has_changed_and_whole_to_who_lacks_the_base(world: World) -> None:
    first = world.reader("weights")
    weights = np.zeros(500_000)
    with topics.Publisher(world.service, "weights", mode="latest") as publisher:
        publisher.wait_for_readers(1)
        version = publisher.publish({"w": weights}, changed_since=0)
        assert first.read_line() == "1 0.0 0"
        sent = _bytes_sent(world.service)
        weights[:100] = 1.0
        version = publisher.publish({"w": weights}, changed_since=version)
        assert first.read_line() == "2 100.0 0"
        assert _bytes_sent(world.service) - sent < weights.nbytes // 10
        late = world.reader("weights")
        assert late.read_line() == "2 100.0 0"
        weights[100:300] = 2.0
        version = publisher.publish({"w": weights}, changed_since=version)
        assert first.read_line() == "3 500.0 0"
        assert late.read_line() == "3 500.0 0"
        with pytest.raises(errors.ConfigError, match="changed_since=1"):
            publisher.publish({"w": weights}, changed_since=1)
        with pytest.raises(errors.BadArguments, match="changed_since=0"):
            publisher.publish({"v": weights}, changed_since=version)


def test_changes_are_read_as_weights_though_their_publisher_has_gone(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prpc")
    weights = np.zeros(500_000)
    with RpcService(master.address) as here, topics.Subscriber(here, "weights") as reader:
        with (
            RpcService(master.address) as there,
            topics.Publisher(there, "weights", mode="latest") as publisher,
        ):
            version = publisher.publish({"w": weights}, changed_since=0)
            assert reader.receive(PATIENCE_S).version == version
            weights[:100] = 1.0
            publisher.publish({"w": weights}, changed_since=version)
            wait_until(lambda: [one.behind for one in publisher.readers()] == [0])
        wait_until(lambda: "has gone" in caplog.text, "the reader knows")
        np.testing.assert_array_equal(reader.receive(PATIENCE_S).value["w"], weights)


@contextlib.contextmanager
def reading(
    master: Master, weights: Any
) -> Iterator[tuple[RpcService, topics.Publisher, topics.Subscriber, int]]:
    """The publisher of these weights with its service, and a reader that has that version."""
    with (
        RpcService(master.address) as there,
        RpcService(master.address) as here,
        topics.Publisher(there, "weights", mode="latest") as publisher,
        topics.Subscriber(here, "weights") as reader,
    ):
        version = publisher.publish({"w": weights}, changed_since=0)
        assert reader.receive(PATIENCE_S).version == version
        yield there, publisher, reader, version


def test_changes_come_of_a_publisher_that_the_master_alone_takes_for_dead(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    """The link between the publisher and the reader, who has asked it for the next, is whole."""
    caplog.set_level("INFO", "prpc")
    weights = np.zeros(500_000)
    with reading(master, weights) as (there, publisher, reader, version):
        wait_until(lambda: [one.behind for one in publisher.readers()] == [0], "it asks again")
        unlist(there, "weights")
        wait_until(lambda: "has gone" in caplog.text, "the reader knows")
        weights[:100] = 1.0
        publisher.publish({"w": weights}, changed_since=version)
        np.testing.assert_array_equal(reader.receive(PATIENCE_S).value["w"], weights)


def test_weights_that_are_being_read_as_their_publisher_goes_are_whole(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prpc")
    weights = np.zeros(500_000)

    def go() -> None:
        publisher.close()
        wait_until(lambda: "has gone" in caplog.text, "the reader knows")

    with reading(master, weights) as (_, publisher, reader, version):
        weights[:100] = 1.0
        publisher.publish({"w": weights}, changed_since=version)
        wait_until(lambda: [one.behind for one in publisher.readers()] == [0])
        with at("subscriber.reading", go) as passed:
            np.testing.assert_array_equal(reader.receive(PATIENCE_S).value["w"], weights)
        assert passed.count == 1


def test_a_publisher_that_was_stopped_until_its_lease_was_over_is_read_on_without_a_repeat(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prpc")
    with RpcService(master.address) as here, topics.Subscriber(here, "numbers") as reader:
        with Program(
            PUBLISHER, master.address, "numbers", "queue", env={"PRPC_MASTER_LEASE_S": "1"}
        ) as other:
            assert other.read_line() == "up"
            seen = [reader.receive(PATIENCE_S).version for _ in range(3)]
            halt(other.pid)
            wait_until(lambda: "has gone" in caplog.text, "its lease is over")
            other.process.send_signal(signal.SIGCONT)
            seen += [reader.receive(PATIENCE_S).version for _ in range(300)]
        assert seen == list(range(seen[0], seen[0] + 303))


def _bytes_sent(service: RpcService) -> int:
    return sum(peer.traffic.bytes_sent for peer in service.statistics().peers)


def test_block_waits_for_the_slow_and_names_it_when_the_time_is_over(world: World) -> None:
    reader = world.reader("blocked")
    with topics.Publisher(world.service, "blocked", capacity=4) as publisher:
        publisher.wait_for_readers(1)
        reader.write_line("hold")
        published = 0
        with pytest.raises(errors.Backpressure, match=r"4 items wait for rank 1 \(process"):
            while published < 10_000:
                publisher.publish(published, timeout_s=0.05)
                published += 1
        assert published < 10_000
        blocked = threading.Thread(target=publisher.publish, args=(published,))
        blocked.start()
        reader.write_line("go on")
        blocked.join(PATIENCE_S)
        assert not blocked.is_alive()
        for number in range(published + 1):
            assert reader.read_line() == f"{number + 1} {float(number)} 0"


def test_block_waits_for_whom_too_many_bytes_wait_and_names_it(world: World) -> None:
    reader = world.reader("large")
    with topics.Publisher(world.service, "large", bytes_max=1_000_000) as publisher:
        publisher.wait_for_readers(1)
        halt(reader.pid)  # it has asked, and takes the first
        item = np.ones(50_000)  # 400 KB
        assert [publisher.publish(item) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(
            errors.Backpressure,
            match=r"2 items wait for rank 1 \(process .*, of 8\d{5} bytes.*1000000 bytes may wait",
        ):
            publisher.publish(item, timeout_s=0.05)
        (statistics,) = publisher.readers()
        assert (statistics.behind, statistics.waiting_bytes // 100_000) == (3, 8)
        reader.process.send_signal(signal.SIGCONT)
        assert publisher.publish(item, timeout_s=PATIENCE_S) == 4
        assert [reader.read_line().split()[0] for _ in range(4)] == ["1", "2", "3", "4"]


def test_a_program_that_receives_nothing_has_a_bound_of_bytes_too(world: World) -> None:
    """Its process asks for more until it has 64 MiB, and is given no more than that at a time."""
    item = np.ones(1 << 20)  # 8 MiB
    with (
        topics.Publisher(world.service, "unread", bytes_max=1 << 30) as publisher,
        RpcService(world.master.address) as other,
        topics.Subscriber(other, "unread") as reader,
    ):
        publisher.wait_for_readers(1)
        for _ in range(24):
            publisher.publish(item)
        world.service.create_server("echo", {"same": operator.index})
        client = other.create_client("echo")
        for number in range(200):  # it has the time to ask, as these are answered
            assert client.call("same", number) == number
            (statistics,) = publisher.readers()
            assert statistics.waiting_bytes >= (24 - 16) * item.nbytes
        assert [reader.receive(PATIENCE_S).version for _ in range(24)] == list(range(1, 25))


def test_drop_oldest_drops_as_many_as_an_item_has_bytes(world: World) -> None:
    reader = world.reader("sizes")
    with topics.Publisher(
        world.service, "sizes", slow="drop_oldest", bytes_max=1_000_000
    ) as publisher:
        publisher.wait_for_readers(1)
        halt(reader.pid)
        for nbytes in (100, 400_000, 400_000, 900_000):
            publisher.publish(np.ones(nbytes // 8))
        assert [one.skipped for one in publisher.readers()] == [2]
        reader.process.send_signal(signal.SIGCONT)
        assert reader.read_line() == "1 12.0 0"
        assert reader.read_line() == "4 112500.0 2"


def test_an_item_that_may_not_wait_is_refused_before_it_is_copied(world: World) -> None:
    reader = world.reader("too large")
    with topics.Publisher(world.service, "too large", bytes_max=1_000_000) as publisher:
        publisher.wait_for_readers(1)
        before = world.service.statistics().slab.blocks_used
        for value in (np.ones(125_001), b"a" * 1_000_001, ["a" * 1000] * 1000):
            with pytest.raises(
                errors.BadArguments, match=r"'too large': an item of 100\d+ bytes.*1000000 may wait"
            ):
                publisher.publish(value)
        assert world.service.statistics().slab.blocks_used == before
        assert publisher.publish(5.0) == 1
        assert reader.read_line() == "1 5.0 0"
    with topics.Publisher(world.service, "latest", mode="latest", bytes_max=10) as publisher:
        assert publisher.publish(np.ones(1000)) == 1


def test_half_of_the_slab_may_wait_where_nothing_is_said(world: World) -> None:
    reader = world.reader("half")
    with topics.Publisher(world.service, "half", capacity=1) as publisher:
        publisher.wait_for_readers(1)
        halt(reader.pid)
        half = world.service.statistics().slab.limit_bytes // 2
        publisher.publish(1)
        publisher.publish(2)
        with pytest.raises(errors.Backpressure, match=f"1 items and {half} bytes may wait"):
            publisher.publish(3, timeout_s=0.05)
        reader.process.send_signal(signal.SIGCONT)


def test_drop_oldest_never_waits_and_the_reader_hears_how_many_it_has_missed(world: World) -> None:
    reader = world.reader("dropped")
    with topics.Publisher(world.service, "dropped", capacity=4, slow="drop_oldest") as publisher:
        publisher.wait_for_readers(1)
        reader.write_line("hold")
        halt(reader.pid)
        for number in range(1000):
            publisher.publish(number)
        reader.process.send_signal(signal.SIGCONT)
        reader.write_line("go on")
        seen, missed = 0, 0
        version = 0
        while version < 1000:
            version, _, skipped = (int(float(word)) for word in reader.read_line().split())
            seen, missed = seen + 1, missed + skipped
        assert seen + missed == 1000
        assert publisher.readers()[0].skipped == missed > 0


def test_disconnect_tells_the_slow_one_and_it_may_come_back(world: World) -> None:
    reader = world.reader("strict")
    with topics.Publisher(world.service, "strict", capacity=4, slow="disconnect") as publisher:
        publisher.wait_for_readers(1)
        halt(reader.pid)
        for number in range(100):
            publisher.publish(number)
        reader.process.send_signal(signal.SIGCONT)
        seen, said = 0, reader.read_line()
        while said != "taken off":
            seen, said = int(said.split()[0]), reader.read_line()
        wait_until(lambda: [one.behind for one in publisher.readers()] == [0])
        publisher.publish(7)
        assert reader.read_line() == f"101 7.0 {100 - seen}"


def test_a_killed_reader_holds_up_nobody_for_long_and_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    dies, lives = world.reader("deaths"), world.reader("deaths")
    with topics.Publisher(world.service, "deaths", capacity=2) as publisher:
        publisher.wait_for_readers(2)
        dies.kill()
        for number in range(10):
            publisher.publish(number, timeout_s=PATIENCE_S)
            assert lives.read_line() == f"{number + 1} {float(number)} 0"
        assert len(publisher.readers()) == 1
        assert [text for text in caplog.messages if "is gone" in text and "'deaths'" in text]
        wait_until(lambda: world.service.statistics().slab.leases == 0)


def test_a_publisher_that_is_started_again_is_read_from_its_first_item_where_it_waits_for_readers(
    world: World,
) -> None:
    reader = world.reader("restarts")
    for _ in range(2):
        with topics.Publisher(world.service, "restarts") as publisher:
            publisher.wait_for_readers(1)
            publisher.publish(3)
            assert reader.read_line() == "1 3.0 0"


def test_what_a_new_publisher_published_before_it_was_asked_is_counted(world: World) -> None:
    reader = world.reader("restarts")
    for _ in range(2):
        halt(reader.pid)
        with topics.Publisher(world.service, "restarts") as publisher:
            for number in range(3):
                publisher.publish(number)  # to nobody
            reader.process.send_signal(signal.SIGCONT)
            publisher.wait_for_readers(1)
            publisher.publish(3)
            assert reader.read_line() == "4 3.0 3"
            publisher.publish(4)
            assert reader.read_line() == "5 4.0 0"


def test_who_comes_later_than_a_publisher_has_not_missed_what_came_before(world: World) -> None:
    with topics.Publisher(world.service, "late") as publisher:
        for number in range(3):
            publisher.publish(number)
        reader = world.reader("late")
        publisher.wait_for_readers(1)
        publisher.publish(3)
        assert reader.read_line() == "4 3.0 0"


def test_several_publish_to_one_topic_each_in_its_order(world: World) -> None:
    with (
        RpcService(world.master.address) as other,
        topics.Publisher(world.service, "many") as first,
        topics.Publisher(other, "many") as second,
        RpcService(world.master.address) as reading,
        topics.Subscriber(reading, "many") as reader,
    ):
        for publisher in (first, second):
            publisher.wait_for_readers(1)
        for number in range(50):
            first.publish(("first", number))
            second.publish(("second", number))
        items = [reader.receive(PATIENCE_S) for _ in range(100)]
        for name in ("first", "second"):
            got = [item.value[1] for item in items if item.value[0] == name]
            assert got == list(range(50))
        assert {item.publisher for item in items} == {0, 1}
        assert reader.try_receive() is None


def test_waiting_for_nothing_ends_by_its_time_and_by_close(world: World) -> None:
    reader = topics.Subscriber(world.service, "silent")
    with pytest.raises(errors.DeadlineExceeded, match="publishers: none"):
        reader.receive(0.02)
    with pytest.raises(errors.ConfigError):
        reader.receive(-1.0)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            reader.receive()
        except errors.Closed as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    reader.close()
    thread.join(PATIENCE_S)
    assert len(ended) == 1
    reader.close()
    publisher = topics.Publisher(world.service, "silent")
    with pytest.raises(errors.DeadlineExceeded, match="0 of 1 readers"):
        publisher.wait_for_readers(1, timeout_s=0.02)
    publisher.close()
    publisher.close()
    with pytest.raises(errors.Closed):
        publisher.publish(1)


def test_what_cannot_be_sent_is_refused_and_nothing_is_published(world: World) -> None:
    with topics.Publisher(world.service, "refused") as publisher:
        with pytest.raises(errors.BadArguments):
            publisher.publish(object())
        assert publisher.publish(1) == 1
        with pytest.raises(errors.ConfigError, match="latest"):
            publisher.publish({"w": np.zeros(3)}, changed_since=0)
    with pytest.raises(errors.ConfigError, match="mode="):
        topics.Publisher(world.service, "bad", mode="newest")  # type: ignore[arg-type]


@pytest.fixture
def here(master: Master) -> Iterator[tuple[RpcService, RpcService]]:
    """A service that publishes and one that reads."""
    with RpcService(master.address) as publishes, RpcService(master.address) as reads:
        yield publishes, reads


def test_threads_that_wait_in_one_reader_get_an_item_each_and_all_hear_of_its_end(
    here: tuple[RpcService, RpcService],
) -> None:
    with topics.Publisher(here[0], "numbers") as publisher, ThreadPoolExecutor(6) as threads:
        reader = topics.Subscriber(here[1], "numbers")
        publisher.wait_for_readers(1)
        waiting = [threads.submit(reader.receive, PATIENCE_S) for _ in range(6)]
        for number in range(3):
            publisher.publish(number)
        wait_until(lambda: sum(one.done() for one in waiting) == 3, "three have one")
        assert sorted(one.result().value for one in waiting if one.done()) == [0, 1, 2]
        reader.close()
        ended = [one for one in waiting if isinstance(one.exception(PATIENCE_S), errors.Closed)]
        assert len(ended) == 3


@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_a_publisher_that_is_made_again_at_once_is_read_each_time(
    here: tuple[RpcService, RpcService], mode: topics.Mode
) -> None:
    with topics.Subscriber(here[1], "again") as reader:
        for number in range(60):
            with topics.Publisher(here[0], "again", mode=mode) as publisher:
                if mode == "queue":
                    publisher.wait_for_readers(1, PATIENCE_S)
                publisher.publish(number)
                assert reader.receive(PATIENCE_S).value == number


def test_weights_that_were_received_cannot_be_written_to(
    here: tuple[RpcService, RpcService],
) -> None:
    """They would be the base of the next changes."""
    weights, version = np.zeros(1000), 0
    with (
        topics.Publisher(here[0], "weights", mode="latest") as publisher,
        topics.Subscriber(here[1], "weights") as reader,
    ):
        for index in range(4):
            weights[index] = 1.0
            version = publisher.publish({"w": weights}, changed_since=version)
            received = reader.receive(PATIENCE_S).value["w"]
            np.testing.assert_array_equal(received, weights)
            with pytest.raises(ValueError, match="read-only"):
                received[0] = 2.0


def test_a_reader_that_was_taken_off_hears_of_all_that_it_missed(
    here: tuple[RpcService, RpcService],
) -> None:
    with (
        topics.Publisher(here[0], "numbers", capacity=4, slow="disconnect") as publisher,
        topics.Subscriber(here[1], "numbers") as reader,
    ):
        publisher.wait_for_readers(1)
        for number in range(1, 101):
            publisher.publish(number)
        seen = 0
        with pytest.raises(topics.TakenOff) as taken_off:
            while True:
                seen = reader.receive(PATIENCE_S).version
        assert taken_off.match(rf"it has missed {100 - seen}$")
        assert reader.try_receive() is None
        publisher.wait_for_readers(1)
        publisher.publish(101)
        item = reader.receive(PATIENCE_S)
        assert (item.version, item.skipped) == (101, 100 - seen)


@pytest.mark.parametrize("end", [topics.Publisher, topics.Subscriber])
def test_what_is_no_service_or_topic_is_refused(
    here: tuple[RpcService, RpcService], end: Any
) -> None:
    for arguments, said in (
        ((None, "t"), "service=None: an RpcService is expected"),
        (("t", here[0]), "service='t'"),
        ((here[0], None), "topic=None: a name is expected"),
        ((here[0], ""), "topic=''"),
    ):
        with pytest.raises(errors.ConfigError, match=said):
            end(*arguments)


def test_bad_waits_and_masked_weights_are_refused(here: tuple[RpcService, RpcService]) -> None:
    with topics.Publisher(here[0], "weights", mode="latest") as publisher:
        for timeout_s in (-1, float("nan"), "1", True):
            with pytest.raises(errors.ConfigError, match="or None"):
                publisher.wait_for_readers(1, timeout_s)
        masked = np.ma.array([1.0, 2.0], mask=[0, 1])
        with pytest.raises(errors.BadArguments, match=r"its \.data and its \.mask"):
            publisher.publish({"w": masked}, changed_since=0)
        version = publisher.publish({"w": np.ones(2)}, changed_since=0)
        with pytest.raises(errors.BadArguments, match=r"its \.data and its \.mask"):
            publisher.publish({"w": masked}, changed_since=version)


def test_readers_that_are_opened_and_closed_leave_nobody_behind(
    here: tuple[RpcService, RpcService],
) -> None:
    """A question that left after the word that its reader leaves would make it one again."""
    ends = threading.Event()
    with topics.Publisher(here[0], "crowd", capacity=8) as publisher:

        def publish() -> None:
            while not ends.is_set():
                with contextlib.suppress(errors.Backpressure):
                    publisher.publish(1, timeout_s=0.5)

        def come_and_go(_: int) -> None:
            for _ in range(200):
                with topics.Subscriber(here[1], "crowd") as reader:
                    reader.try_receive()

        with ThreadPoolExecutor(3) as threads:
            publishes = threads.submit(publish)
            for one in [threads.submit(come_and_go, number) for number in range(2)]:
                one.result()
            ends.set()
            publishes.result(PATIENCE_S)
        wait_until(lambda: not publisher.readers(), "nobody is left")


def test_a_closed_publisher_is_let_go_of_though_its_reader_is_still_connected(
    here: tuple[RpcService, RpcService],
) -> None:
    with topics.Subscriber(here[1], "weights") as reader:
        publisher = topics.Publisher(here[0], "weights", mode="latest")
        publisher.publish({"w": np.ones(1000)}, changed_since=0)
        assert reader.receive(PATIENCE_S).version == 1
        publisher.close()
        closed = weakref.ref(publisher)
        del publisher

        def is_let_go_of() -> bool:
            gc.collect()
            return closed() is None

        wait_until(is_let_go_of, "nobody has the publisher any more")
        with topics.Publisher(here[0], "weights", mode="latest") as after:
            after.publish(2)
            assert reader.receive(PATIENCE_S).value == 2  # over the connection of before


def test_of_two_threads_that_publish_changes_of_one_version_one_is_refused(
    here: tuple[RpcService, RpcService],
) -> None:
    with (
        topics.Publisher(here[0], "weights", mode="latest") as publisher,
        ThreadPoolExecutor(2) as threads,
    ):
        for _ in range(30):
            version = publisher.publish({"w": np.zeros(400_000)}, changed_since=0)
            gate = threading.Barrier(2)

            def publish(value: float, version: int = version, gate: Any = gate) -> bool:
                weights = np.zeros(400_000)
                weights[:5] = value
                gate.wait()
                try:
                    publisher.publish({"w": weights}, changed_since=version)
                except errors.ConfigError:
                    return False
                return True

            assert sorted(threads.map(publish, (1.0, 2.0))) == [False, True]


def test_two_publishers_that_take_a_reader_off_are_told_of_each(
    here: tuple[RpcService, RpcService],
) -> None:
    with (
        topics.Publisher(here[0], "two", capacity=2, slow="disconnect") as first,
        topics.Publisher(here[1], "two", capacity=2, slow="disconnect") as second,
        topics.Subscriber(here[1], "two") as reader,
    ):
        for publisher in (first, second):
            publisher.wait_for_readers(1)
            for number in range(100):
                publisher.publish(number)
        taken_off = set()
        while len(taken_off) < 2:
            try:
                reader.receive(PATIENCE_S)
            except topics.TakenOff as error:
                taken_off.add(str(error).partition(":")[0])
        assert taken_off == {"topic 'two', publisher 0", "topic 'two', publisher 1"}


def test_in_a_fork_both_ends_are_refused_and_closing_them_does_nothing(
    here: tuple[RpcService, RpcService],
) -> None:
    with (
        topics.Publisher(here[0], "numbers") as publisher,
        topics.Subscriber(here[1], "numbers") as reader,
    ):
        publisher.wait_for_readers(1)
        child = os.fork()
        if not child:
            refused = 0
            for use in (lambda: publisher.publish(1), lambda: reader.receive(0.1)):
                try:
                    use()
                except ForkedError:
                    refused += 1
            publisher.close()
            reader.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        publisher.publish(1)
        assert reader.receive(PATIENCE_S).value == 1
