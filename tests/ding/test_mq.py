"""The message queue between real processes, as DI-engine uses it, without DI-engine."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import signal
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prpc_engine.ding import PrpcMQ
from prpc_engine.ding.inlet import PARKED_MAX
from prpc_engine.ding.outlet import BYTES_MAX, EVENTS_MAX
from prpc_engine.errors import AddressInUse, BadArguments, Closed, ConfigError
from tests.ding.nodes import NodeProcess, data_of, number_in
from tests.held import held_at
from tests.network.proxy import Proxy
from tests.ports import address_of, hold_port
from tests.program import halt, wait_until

PATIENCE_S = 30.0


@pytest.fixture(params=["ipc", "tcp"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def places(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Five addresses, of files where the test does not ask for a protocol."""
    has_protocol = "protocol" in request.fixturenames
    if has_protocol and request.getfixturevalue("protocol") == "tcp":
        held = [hold_port() for _ in range(5)]
        yield [f"tcp://{address_of(one)}" for one in held]
        for one in held:
            one.close()
    else:
        yield [f"ipc://{tmp_path}/{number}.ipc" for number in range(5)]


@pytest.fixture
def here(places: list[str]) -> Iterator[PrpcMQ]:
    """A node at the first address, which listens."""
    mq = PrpcMQ(listen_to=places[0], name="node 0")
    mq.listen()
    yield mq
    mq.stop()


def there(places: list[str], number: int, *attach_to: int, **more: Any) -> NodeProcess:
    """A node in another process, at that address."""
    more.setdefault("attach_to", [places[one] for one in attach_to])
    return NodeProcess(listen_to=places[number], name=f"node {number}", **more)


def states(mq: PrpcMQ) -> dict[str, str]:
    """By the node's name."""
    return {one.node.partition(" at ")[0]: one.state for one in mq.statistics().nodes}


def wait_for(mq: PrpcMQ, **wanted: str) -> None:
    """Until these nodes are in that state: node_1="up"."""
    names = {name.replace("_", " "): state for name, state in wanted.items()}
    wait_until(lambda: names.items() <= states(mq).items(), f"{names}")


def received(mq: PrpcMQ, count: int) -> list[tuple[str, int]]:
    """Topics and numbers of so many events."""
    events = (mq.recv() for _ in range(count))
    return [(event[0], number_in(event[1])) for event in events if event is not None]


def size_of_next(mq: PrpcMQ) -> int:
    """Of the next event, which is let go."""
    event = mq.recv()
    assert event is not None
    return len(event[1])


def test_two_nodes_of_a_host_exchange_events_over_shared_memory(
    protocol: str, places: list[str], here: PrpcMQ
) -> None:
    here.subscribe("from 1")
    with there(places, 1, 0) as other:
        other.do("subscribe", topic="from 0")
        wait_for(here, node_1="up")
        here.publish("from 0", data_of(7))
        assert other.do("recv", count=1) == [["from 0", 7, 8, zlib.crc32(data_of(7))]]
        other.do("publish", topic="from 1", first=8, end=9)
        assert received(here, 1) == [("from 1", 8)]
        assert [one.transport for one in here.statistics().nodes] == ["shm"]


def test_a_burst_of_five_thousand_arrives_whole_and_in_order(
    places: list[str], here: PrpcMQ
) -> None:
    with there(places, 1, 0) as other:
        other.do("subscribe", topic="burst")
        wait_for(here, node_1="up")
        other.begin("recv", count=5000)
        for number in range(5000):
            here.publish("burst", data_of(number))
        assert [number for _, number, _, _ in other.answer()] == list(range(5000))


def test_what_is_published_before_an_expected_node_is_there_arrives(places: list[str]) -> None:
    mq = PrpcMQ(listen_to=places[0], expects=[places[1]])
    mq.publish("first", data_of(1))  # before it listens, too
    mq.listen()
    mq.publish("first", data_of(2))
    try:
        with there(places, 1, 0) as other:
            wait_until(lambda: mq.statistics().nodes[0].in_flight == 2)
            other.do("subscribe", topic="first")  # later than they came
            assert [one[1] for one in other.do("recv", count=2)] == [1, 2]
    finally:
        mq.stop()


def test_what_is_published_before_a_dialled_node_is_there_arrives(places: list[str]) -> None:
    with there(places, 0, 1) as first:
        first.do("publish", topic="first")
        with there(places, 1) as second:
            second.do("subscribe", topic="first")
            assert [one[0] for one in second.do("recv", count=1)] == ["first"]


def test_a_node_that_joins_later_gets_what_is_published_from_then_on(
    places: list[str], here: PrpcMQ
) -> None:
    here.publish("news", data_of(1))
    with there(places, 1, 0) as other:
        wait_for(here, node_1="up")
        here.publish("news", data_of(2))
        other.do("subscribe", topic="news")
        assert [one[1] for one in other.do("recv", count=1)] == [2]


def test_a_killed_node_is_named_and_holds_up_nobody(
    places: list[str], here: PrpcMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prpc")
    with there(places, 1, 0) as doomed, there(places, 2, 0, 1) as other:
        other.do("subscribe", topic="news")
        wait_for(here, node_1="up", node_2="up")
        doomed.kill()
        for number in range(100):
            here.publish("news", data_of(number, 100_000))
        assert [one[1] for one in other.do("recv", count=100)] == list(range(100))
        wait_for(here, node_1="lost")
    assert re.search(r"node 1 at \S+ is lost: .*events are held for it", caplog.text)
    assert "node 2" not in caplog.text.partition("is lost")[0].rpartition("\n")[2]


def test_a_node_that_stops_says_goodbye_and_is_no_loss(
    places: list[str], here: PrpcMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prpc")
    with there(places, 1, 0):
        wait_for(here, node_1="up")
    wait_for(here, node_1="away")
    assert re.search(r"node 1 at \S+ has stopped", caplog.text)
    assert "is lost" not in caplog.text


def test_a_node_that_is_started_again_under_its_address_gets_what_came_meanwhile(
    protocol: str, places: list[str]
) -> None:
    with there(places, 0, 1) as dialler:
        with there(places, 1) as first_life:
            first_life.do("subscribe", topic="news")
            dialler.do("publish", topic="news", first=1, end=2)
            assert first_life.do("recv", count=1)[0][1] == 1
            first_life.kill()
        dialler.do("publish", topic="news", first=2, end=3)
        with there(places, 1) as second_life:
            second_life.do("subscribe", topic="news")
            # what the first one had taken and not told of comes before it: both are events of
            # this process to a node that is not the same
            numbers = [second_life.do("recv", count=1)[0][1]]
            while numbers[-1] != 2:
                numbers.append(second_life.do("recv", count=1)[0][1])
            assert numbers in ([2], [1, 2])


def test_a_node_that_was_started_again_attaches_again(places: list[str], here: PrpcMQ) -> None:
    here.subscribe("news")
    for life in range(3):
        with there(places, 1, 0) as other:
            other.do("publish", topic="news", first=life, end=life + 1)
            assert received(here, 1) == [("news", life)]
            if life == 1:
                other.kill()
    assert len(here.statistics().nodes) == 1


def test_nodes_that_have_left_are_forgotten_when_others_come(
    places: list[str], here: PrpcMQ, tmp_path: Path
) -> None:
    for number in range(3):
        there = NodeProcess(
            listen_to=f"ipc://{tmp_path}/{number}.elastic", attach_to=[places[0]], name="elastic"
        )
        with there:
            wait_for(here, elastic="up")
        wait_for(here, elastic="away")
        wait_until(lambda: here.statistics().nodes[0].state == "away")
    assert len(here.statistics().nodes) <= 2


def test_a_fork_leaves_its_parents_node_alone(here: PrpcMQ, tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        here.stop()
        os._exit(len(os.listdir(tmp_path)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert os.listdir(tmp_path) == ["0.ipc"]


def test_an_event_goes_on_over_a_new_connection_and_none_is_lost_or_doubled(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORTS", "tcp")
    with hold_port() as held, Proxy() as proxy:
        address = address_of(held)
        proxy.upstream = ("127.0.0.1", int(address.rpartition(":")[2]))
        mq = PrpcMQ(listen_to=f"tcp://{address}", name="node 0")
        mq.listen()
        try:
            mq.subscribe("up")
            with there(places, 1, attach_to=[f"tcp://{proxy.address}"]) as other:
                other.do("subscribe", topic="down")
                wait_for(mq, node_1="up")
                other.begin("publish", topic="up", end=2000, size=1000)
                got = []
                for number in range(2000):
                    mq.publish("down", data_of(number, 1000))
                    got += received(mq, 1)
                    if number % 400 == 399:
                        proxy.cut_all()
                assert other.answer() is None
                assert got == [("up", number) for number in range(2000)]
                down = other.do("recv", count=2000)
                assert [number for _, number, _, _ in down] == list(range(2000))
                assert len(proxy.passages) > 1
                assert len(mq.statistics().nodes) == 1
        finally:
            mq.stop()


def test_two_nodes_that_dial_each_other_get_each_event_once(places: list[str]) -> None:
    with there(places, 0, 1) as one, there(places, 1, 0) as other:
        for node in (one, other):
            node.do("subscribe", topic="news")
        one.do("publish", topic="news", first=1, end=50)
        other.do("publish", topic="news", first=101, end=150)
        assert [each[1] for each in other.do("recv", count=49)] == list(range(1, 50))
        assert [each[1] for each in one.do("recv", count=49)] == list(range(101, 150))
        one.do("publish", topic="news", first=50, end=51)
        assert [each[1] for each in other.do("recv", count=1)] == [50], "nothing came twice"


def test_leaves_of_a_star_hear_the_middle_alone(places: list[str], here: PrpcMQ) -> None:
    here.subscribe("leaf")
    with there(places, 1, 0) as one, there(places, 2, 0) as other:
        one.do("subscribe", topic="leaf")
        wait_for(here, node_1="up", node_2="up")
        other.do("publish", topic="leaf", first=2, end=3)
        assert received(here, 1) == [("leaf", 2)]
        here.publish("leaf", data_of(0))
        assert [each[1] for each in one.do("recv", count=1)] == [0]


TOPICS = ["", "::", "a::b", "\0", "task.*", "\N{SNOWMAN}", "\ud800", "x" * 10_000]


def test_a_topic_may_be_any_text(places: list[str], here: PrpcMQ) -> None:
    other = PrpcMQ(listen_to=places[1], attach_to=[places[0]], name="node 1")
    other.listen()
    try:
        for topic in TOPICS:
            other.subscribe(topic)
        wait_for(here, node_1="up")
        for number, topic in enumerate(TOPICS):
            here.publish(topic, data_of(number))
        assert received(other, len(TOPICS)) == [(topic, n) for n, topic in enumerate(TOPICS)]
    finally:
        other.stop()


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_events_of_any_size_arrive_as_they_were(
    transport: str, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORTS", transport)
    mq = PrpcMQ(listen_to=places[0], name="node 0")
    mq.listen()
    sizes = [8, 16 << 10, (16 << 10) + 1, 1 << 20, 20 << 20]
    try:
        with there(places, 1, 0) as other:
            other.do("subscribe", topic="news")
            wait_for(mq, node_1="up")
            for number, size in enumerate(sizes):
                mq.publish("news", data_of(number, size))
            assert other.do("recv", count=len(sizes)) == [
                ["news", number, size, zlib.crc32(data_of(number, size))]
                for number, size in enumerate(sizes)
            ]
    finally:
        mq.stop()


def test_data_may_be_empty_and_any_buffer_and_is_read_only_where_it_came(
    places: list[str], here: PrpcMQ
) -> None:
    here.subscribe("back")
    with there(places, 1, 0, start_s=0.0) as other:
        other.do("subscribe", topic="news")
        for data in (b"", bytearray(b"1:x"), memoryview(b"2:" + b"y" * 100_000)):
            here.publish("news", data)
        other.do("publish", topic="back", size=100_000)
        event = here.recv()
        assert event is not None
        assert isinstance(event[1], memoryview)
        assert event[1].readonly


def test_a_node_gets_only_what_it_has_subscribed_to_once_it_has_settled(
    places: list[str], here: PrpcMQ
) -> None:
    with there(places, 1, 0, start_s=0.0) as other:
        other.do("subscribe", topic="wanted")
        wait_for(here, node_1="up")
        wait_until(lambda: other.do("statistics")["is_settled"])
        for number in range(10):
            here.publish("unwanted", data_of(number))
        here.publish("wanted", data_of(11))
        assert [each[1] for each in other.do("recv", count=1)] == [11]
        other.do("unsubscribe", topic="want*")
        other.do("unsubscribe", topic="nobody knows this")
        other.do("subscribe", topic="other")
        here.publish("wanted", data_of(12))
        here.publish("other", data_of(13))
        assert [each[1] for each in other.do("recv", count=1)] == [13]


def test_subscribe_waits_for_a_node_that_has_answered_and_is_not_known_to_be_up(
    places: list[str],
) -> None:
    """It publishes by then what this node wanted before."""
    mq = PrpcMQ(attach_to=[places[1]], name="node 0", start_s=0.0)
    mq.subscribe("before")
    with held_at("dialling.answered") as held, ThreadPoolExecutor(1) as pool:
        mq.listen()
        try:
            with there(places, 1) as other:
                held.wait()
                wait_until(lambda: mq.statistics().is_settled)
                subscribing = pool.submit(mq.subscribe, "now")
                wait_until(lambda: "now" in mq.statistics().topics)
                held.release()
                subscribing.result(PATIENCE_S)
                other.do("publish", topic="now", first=7, end=8)
                assert pool.submit(received, mq, 1).result(PATIENCE_S) == [("now", 7)]
        finally:
            mq.stop()


def test_what_is_published_after_subscribe_has_returned_arrives(places: list[str]) -> None:
    """Through a third party that knows before the publisher hears of it by itself."""
    mq = PrpcMQ(listen_to=places[0], name="node 0", start_s=0.0)
    mq.listen()
    try:
        with there(places, 1, 0) as other:
            wait_for(mq, node_1="up")
            for number in range(100):
                mq.subscribe(f"topic {number}")
                other.do("publish", topic=f"topic {number}", first=number, end=number + 1)
                assert received(mq, 1) == [(f"topic {number}", number)]
    finally:
        mq.stop()


def test_events_of_several_threads_all_arrive_in_the_order_of_each(
    places: list[str], here: PrpcMQ
) -> None:
    topics = [f"thread {number}" for number in range(4)]
    for topic in topics:
        here.subscribe(topic)
    with there(places, 1, 0) as other:
        other.do("publish_from_threads", topics=topics, end=500)
        got = received(here, 2000)
    for topic in topics:
        assert [number for one, number in got if one == topic] == list(range(500))


def test_whoever_publishes_waits_for_a_node_that_takes_nothing_and_nothing_is_lost(
    places: list[str], here: PrpcMQ
) -> None:
    count = 20_000
    with there(places, 1, 0) as other, ThreadPoolExecutor(1) as pool:
        other.do("subscribe", topic="flood")
        wait_for(here, node_1="up")
        flood = pool.submit(
            lambda: [here.publish("flood", data_of(number)) for number in range(count)]
        )
        wait_until(lambda: here.statistics().nodes[0].waiting > 0)
        assert not flood.done()
        got = []
        for _ in range(20):
            got += [number for _, number, _, _ in other.do("recv", count=count // 20)]
        flood.result(PATIENCE_S)
        assert got == list(range(count))


def test_a_publisher_that_waits_goes_on_when_the_node_dies(places: list[str], here: PrpcMQ) -> None:
    with there(places, 1, 0) as other, ThreadPoolExecutor(1) as pool:
        other.do("subscribe", topic="flood")
        wait_for(here, node_1="up")
        flood = pool.submit(
            lambda: [here.publish("flood", data_of(number)) for number in range(20_000)]
        )
        wait_until(lambda: here.statistics().nodes[0].waiting > 0)
        other.kill()
        flood.result(PATIENCE_S)
    assert here.statistics().nodes[0].state == "lost"


def test_what_was_published_just_before_stop_arrives(places: list[str]) -> None:
    for number in range(10):
        with there(places, 1) as other:
            other.do("subscribe", topic="last")
            mq = PrpcMQ(listen_to=places[0], attach_to=[places[1]])
            mq.listen()
            mq.publish("last", data_of(number))
            mq.stop()
            assert [each[1] for each in other.do("recv", count=1)] == [number]


def test_stop_ends_a_receiver_and_everything_after_it_does_nothing(here: PrpcMQ) -> None:
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(here.recv)
        here.stop()
        assert receiving.result(PATIENCE_S) is None
    here.stop()
    assert here.recv() is None
    here.publish("news", b"")
    here.subscribe("news")
    here.unsubscribe("*")
    with pytest.raises(Closed, match="stopped"):
        here.listen()


@pytest.mark.parametrize("topic", [None, 5, b"news"])
def test_a_topic_is_a_str(here: PrpcMQ, topic: Any) -> None:
    with pytest.raises(BadArguments, match=f"topic {topic!r}: the name of one"):
        here.subscribe(topic)


def test_a_queue_that_never_listened_stops(places: list[str]) -> None:
    mq = PrpcMQ(listen_to=places[0], attach_to=[places[1]])
    mq.subscribe("news")
    mq.publish("news", b"")
    mq.stop()
    assert mq.recv() is None


def test_who_takes_the_file_of_a_node_that_lives_says_so(
    here: PrpcMQ, places: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "0.ipc"
    of_here = file.read_bytes()
    other = PrpcMQ(listen_to=places[0])
    other.listen()
    other.stop()
    (line,) = [text for text in caplog.messages if "another node's" in text]
    assert f"{file} is another node's, which lives" in line
    caplog.clear()
    here.stop()
    file.write_bytes(of_here)  # as one that was killed leaves it
    again = PrpcMQ(listen_to=places[0])
    again.listen()
    again.stop()
    assert not caplog.messages


def test_a_queue_that_is_dropped_hangs_up_and_takes_its_file_away(
    places: list[str], tmp_path: Path
) -> None:
    mq = PrpcMQ(listen_to=places[0])
    mq.listen()
    assert os.listdir(tmp_path) == ["0.ipc"]
    del mq
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_program_that_ends_without_stop_ends(places: list[str], here: PrpcMQ) -> None:
    with there(places, 1, 0) as other:
        wait_for(here, node_1="up")
        assert other.end(signal.SIGTERM) == -signal.SIGTERM
    wait_for(here, node_1="lost")


def test_a_port_that_is_taken_is_named_and_publish_says_so_too() -> None:
    with hold_port() as held:
        held.listen()
        mq = PrpcMQ(listen_to=f"tcp://{address_of(held)}", attach_to=[f"tcp://{address_of(held)}"])
        with pytest.raises(AddressInUse, match="--ports"):
            mq.listen()
        with pytest.raises(AddressInUse):
            mq.publish("news", b"")
        with pytest.raises(AddressInUse):
            mq.listen()
        assert mq.recv() is None
        mq.stop()


def test_nodes_with_different_secrets_are_not_linked(
    places: list[str], here: PrpcMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prpc")
    mq = PrpcMQ(listen_to=places[1], attach_to=[places[0]], name="node 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRPC_SECRET", "another secret, of sufficient length")
        mq.listen()
    try:
        wait_until(lambda: "waiting for the node at" in caplog.text)
        assert states(here) == {}
        assert list(states(mq).values()) == ["awaited"]
    finally:
        mq.stop()


def test_a_node_that_dials_itself_is_told_and_goes_on(
    places: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prpc")
    mq = PrpcMQ(listen_to=places[0], attach_to=[places[0]])
    mq.subscribe("news")
    mq.listen()
    try:
        wait_until(lambda: "dials itself" in caplog.text)
        mq.publish("news", b"")
        assert mq.statistics().ready == 0
    finally:
        mq.stop()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"listen_to": "nowhere"}, "listen_to='nowhere'"),
        ({"listen_to": "ipc:///a", "attach_to": ["host:1"]}, "attach_to='host:1'"),
        ({"listen_to": "ipc:///a", "expects": ["x"]}, "expects='x'"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PrpcMQ(**arguments)


def test_arguments_of_other_queues_are_taken(places: list[str]) -> None:
    mq = PrpcMQ(listen_to=places[0], redis_host=None, redis_port=None, cuda_device=3)
    assert mq.attach_to == []
    mq.stop()


def test_a_host_of_another_machine_needs_a_secret_of_the_job() -> None:
    mq = PrpcMQ(listen_to="tcp://198.51.100.7:1")
    with pytest.raises(ConfigError, match="PRPC_SECRET_FILE"):
        mq.listen()


def test_all_of_a_mesh_of_five_hear_each_other(places: list[str]) -> None:
    nodes = [there(places, number, *range(number)) for number in range(5)]
    for node, number in itertools.product(nodes, range(5)):
        node.do("subscribe", topic=f"from {number}")
    for node in nodes:
        wait_until(
            lambda: [one["state"] for one in node.do("statistics")["nodes"]] == ["up"] * 4  # noqa: B023
        )
    for number, node in enumerate(nodes):
        node.do("publish", topic=f"from {number}", first=number, end=number + 1)
    for number, node in enumerate(nodes):
        got = {one for _, one, _, _ in node.do("recv", count=4)}
        assert got == set(range(5)) - {number}
    for node in nodes:
        assert node.end() == 0


def test_a_node_that_has_not_subscribed_yet_stops_nobody_and_tells_what_it_drops(
    places: list[str], here: PrpcMQ, caplog: pytest.LogCaptureFixture
) -> None:
    """More events than may be under way to a node."""
    writer = PrpcMQ(listen_to=places[1], attach_to=[places[0]], name="node 1")
    with caplog.at_level(logging.WARNING, "prpc"), ThreadPoolExecutor(1) as threads:
        writer.listen()
        taking = threads.submit(here.recv)  # as DI-engine's thread does from the beginning
        wait_for(writer, node_0="up")
        for number in range(EVENTS_MAX + PARKED_MAX):
            writer.publish("later", data_of(number))
        writer.subscribe("answer")
        here.subscribe("later")
        event = taking.result(PATIENCE_S)
        assert event is not None
        assert number_in(event[1]) > 0
        assert not any(one.is_stalled for one in writer.statistics().nodes)
        writer.stop()
    assert any("came before its program had subscribed" in one for one in caplog.messages)


@pytest.mark.slow
def test_an_event_larger_than_all_that_may_be_under_way_arrives(
    places: list[str], here: PrpcMQ
) -> None:
    """After a small one, which the other node has taken without a word; and as the first one."""
    large = bytes(BYTES_MAX + 1)
    writer = PrpcMQ(listen_to=places[1], attach_to=[places[0]], name="node 1")
    here.subscribe("t")
    writer.publish("t", large)  # held: it does not listen yet
    writer.listen()
    assert size_of_next(here) == len(large)
    writer.publish("t", b"small")
    assert size_of_next(here) == len(b"small")
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(writer.publish, "t", large)
        assert size_of_next(here) == len(large)
        publishing.result(PATIENCE_S)
    writer.stop()


@pytest.mark.slow
def test_who_waits_in_publish_when_the_node_stops_returns(places: list[str], here: PrpcMQ) -> None:
    with there(places, 1, 0) as other, ThreadPoolExecutor(1) as threads:
        other.do("subscribe", topic="t")
        wait_for(here, node_1="up")
        halt(other.pid)
        try:
            publishing = threads.submit(
                lambda: [here.publish("t", bytes(BYTES_MAX // 4)) for _ in range(8)]
            )
            wait_until(lambda: here.statistics().nodes[0].waiting, "an event that waits")
            here.stop()
            publishing.result(PATIENCE_S)
        finally:
            other.kill()
