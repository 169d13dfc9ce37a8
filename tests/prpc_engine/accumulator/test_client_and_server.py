"""Counters over real calls: what was written is read, from any process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.accumulator import (
    AUC,
    Accumulator,
    AccumulatorClient,
    AccumulatorServer,
    AccumulatorShard,
    Aggregator,
    Avg,
    CounterSet,
    Histogram,
    KeyedAvg,
    Max,
    Min,
    Sum,
    Timer,
    TopK,
    snapshot_file,
)
from prpc_engine.accumulator.client import SERVICE_NAME
from prpc_engine.errors import BadArguments, ConfigError, Rejected
from tests.prpc_engine.accumulator.processes import NEVER_S, WRITES, Process
from tests.prpc_engine.processes import PATIENCE_S, wait_until


class World(NamedTuple):
    """A service with one accumulator server, and a client with counters of its own."""

    master: Master
    service: RpcService
    server: AccumulatorServer
    client: AccumulatorClient
    counters: CounterSet

    def accumulator(
        self, name: str, law: Any = Sum, flush_count: int = 10, flush_s: float = NEVER_S
    ) -> Accumulator[Any]:
        return Accumulator(name, law, flush_count, flush_s, self.counters)


@pytest.fixture
def world() -> Iterator[World]:
    counters = CounterSet()
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        AccumulatorServer(service) as server,
        AccumulatorClient(service, counters=counters) as client,
    ):
        yield World(master, service, server, client, counters)


def test_what_was_written_before_wait_empty_is_read_after_it(world: World) -> None:
    one = world.accumulator("one")
    for number in range(25):
        one.write(number)
    world.client.wait_empty()
    assert one.read().value == 300
    assert one.read_to_string() == one.read_string() == one.try_read_to_string() == "300"
    statistics = world.client.statistics()
    assert (statistics.acknowledged, statistics.waiting, statistics.dropped) == (25, 0, 0)


@pytest.mark.parametrize(
    ("law", "values", "text"),
    [
        (Avg, [1, 2, 6], "3.0"),
        (KeyedAvg, [("a", 1), ("a", 2)], '{"a": 1.5}'),
        (Max, [-3.5, -2], "-2"),
        (Min, [np.array([1, 5]), np.array([2, 4])], "[1 4]"),
        (Timer, [2.0, 4.0], "TOTAL=6 COUNT=2 MEAN=3 VARIANCE=1 MIN=2 MAX=4"),
        (AUC, [(0, 0.1), (1, 0.9), (np.array([0, 1]), np.array([0.2, 0.8]))], "1.000000"),
        (Histogram(0.1), [1.0, 1.0], "COUNT=2 MEAN=1 MIN=1 P50=1 P90=1 P99=1 MAX=1"),
        (TopK(3), ["x", "y", "x"], "x: 2, y: 1"),
        (Sum, [np.ones(100_000), np.ones(100_000)], "[2. 2. 2. ... 2. 2. 2.]"),
    ],
)
def test_every_aggregator_goes_to_the_server_and_back(
    world: World, law: Any, values: list[Any], text: str
) -> None:
    one = world.accumulator("one", law)
    for value in values:
        one.write(value)
        one.flush()
    world.client.wait_empty()
    assert one.read_to_string() == text
    assert world.server.generate_output_info() == {"one": text}


def test_a_quiet_counter_shows_although_nobody_flushes_it(world: World) -> None:
    one = world.accumulator("one", flush_count=1000, flush_s=0.02)
    one.write(7)
    wait_until(lambda: one.try_read_to_string() == "7", "the flush by time")


def test_a_full_counter_shows_although_its_time_is_far(world: World) -> None:
    one = world.accumulator("one", flush_count=3)
    for _ in range(3):
        one.write(1)
    wait_until(lambda: one.try_read_to_string() == "3", "the flush by count")


def test_values_dropped_before_a_write_are_told_by_it_and_by_wait_empty_once_each(
    world: World,
) -> None:
    lengths = world.accumulator("lengths", Histogram(0.01))
    lengths.write(1e308)
    lengths.write(1e308)
    with pytest.raises(
        BadArguments, match=r"'lengths' dropped 1 values: .* all others so far are counted"
    ):
        lengths.write(np.array([1.0, 2.0]))
    lengths.write(np.array([3.0]))
    with pytest.raises(BadArguments, match="'lengths' dropped 1 values"):
        world.client.wait_empty()
    world.client.wait_empty()
    assert lengths.read().count == 4
    assert world.client.statistics().dropped == 1


def test_what_was_written_before_there_was_a_client_is_sent_by_the_first(world: World) -> None:
    counters = CounterSet()
    early = Accumulator("early", Sum, counters=counters)
    early.write(5)
    with AccumulatorClient(world.service, counters=counters):
        early.write(6)
    early.write(7)  # after its end: waits for the next
    with AccumulatorClient(world.service, counters=counters) as client:
        client.wait_empty()
        assert early.read().value == 18


def test_two_clients_write_to_one_name(world: World) -> None:
    counters = CounterSet()
    with AccumulatorClient(world.service, counters=counters) as other:
        Accumulator("shared", Sum, counters=counters).write(1)
        other.wait_empty()
    shared = world.accumulator("shared")
    shared.write(10)
    world.client.wait_empty()
    assert shared.read().value == 11


def test_one_set_of_counters_has_one_client(world: World) -> None:
    with pytest.raises(ConfigError, match="these counters have a client"):
        AccumulatorClient(world.service, counters=world.counters)


def test_a_counter_that_nobody_wrote_is_not_there(world: World) -> None:
    one = world.accumulator("one")
    assert one.try_read() is None
    assert one.try_read_to_string() is None
    with pytest.raises(Rejected, match="has no counter 'one': it appears with its first flush"):
        one.read()


def test_reset_begins_anew_and_erase_forgets_each_after_what_was_written_before(
    world: World,
) -> None:
    one, two, three = (world.accumulator(name) for name in ("one", "two", "three"))
    for each in (one, two, three):
        each.write(1)
    one.reset()
    two.erase()
    assert (one.read().value, two.try_read(), three.read().value) == (0, None, 1)
    for each in (one, two, three):
        each.write(5)
    world.client.wait_empty()
    assert (one.read().value, two.read().value, three.read().value) == (5, 5, 6)
    one.write(1)
    world.client.erase_all()
    assert world.server.generate_output_info() == {}


def test_a_snapshot_has_what_was_written_before_it_and_is_sorted(world: World) -> None:
    world.accumulator("b").write(1)
    world.accumulator("a", Max).write(2)
    found = world.client.snapshot()
    assert [(name, str(one)) for name, one in found.items()] == [("a", "2"), ("b", "1")]
    world.server.wait_empty()
    assert json.loads(world.server.generate_json_str()) == {"PicoAccumulator": {"a": "2", "b": "1"}}


# -- what does not fit -----------------------------------------------------------------------------


def test_a_name_of_another_kind_is_refused_told_and_counted_and_the_others_go_on(
    world: World,
) -> None:
    world.accumulator("taken").write(1)
    world.client.wait_empty()
    counters = CounterSet()
    with AccumulatorClient(world.service, counters=counters) as other:
        wrong = Accumulator("taken", Max, 2, NEVER_S, counters)
        right = Accumulator("free", Max, 2, NEVER_S, counters)
        wrong.write(1)
        right.write(1)
        with pytest.raises(
            BadArguments,
            match=r"1 counters are refused.*'taken': it is sum\(\) at the server, and max\(\) came",
        ):
            other.wait_empty()
        with pytest.raises(BadArguments, match="'taken' is refused"):
            wrong.write(1)
            wrong.write(1)
        with pytest.raises(
            BadArguments, match=r"'taken' is sum\(\) at its server and max\(\) here"
        ):
            wrong.read()
        assert right.read().value == 1
        wrong.erase()
        wrong.write(9)
        other.wait_empty()
        assert wrong.read().value == 9
        statistics = other.statistics()
        assert statistics.dropped >= 1
        assert statistics.acknowledged + statistics.dropped == 5


def test_a_shape_that_does_not_fit_is_refused_by_the_server(world: World) -> None:
    world.accumulator("array").write(np.zeros(2))
    world.client.wait_empty()
    counters = CounterSet()
    with AccumulatorClient(world.service, counters=counters) as other:
        Accumulator("array", Sum, counters=counters).write(np.zeros(3))
        with pytest.raises(
            BadArguments, match=r"of arrays of shape \(2,\) cannot take an array of shape \(3,\)"
        ):
            other.wait_empty()


class Unsendable(Aggregator, kind="unsendable"):
    """A state that no message can carry."""

    def merge_value(self, value: Any) -> None:
        self.value = value

    def merge_aggregator(self, other: Unsendable) -> None:
        self.value = other.value

    def serialize(self) -> Any:
        return self.value

    def deserialize(self, state: Any) -> None:
        self.value = state

    def try_to_string(self) -> str:
        return "?"


def test_one_counter_that_cannot_be_sent_does_not_hold_up_the_others(world: World) -> None:
    for number in range(5):
        world.accumulator(f"good {number}").write(1)
    world.accumulator("bad", Unsendable).write(threading.Lock())
    for number in range(5, 10):
        world.accumulator(f"good {number}").write(1)
    with pytest.raises(BadArguments, match="'bad'"):
        world.client.wait_empty()
    assert world.client.statistics().acknowledged == 10
    assert world.client.statistics().dropped == 1


class Stubborn(Unsendable, kind="stubborn"):
    """One that cannot even say its state."""

    def serialize(self) -> Any:
        raise ZeroDivisionError("no state")


def test_an_aggregator_that_raises_in_the_sender_does_not_end_it(world: World) -> None:
    world.accumulator("bad", Stubborn).write(1)
    with pytest.raises(BadArguments, match="'bad': ZeroDivisionError: no state"):
        world.client.wait_empty()
    world.accumulator("good").write(1)
    with pytest.raises(BadArguments, match="'bad'"):
        world.client.wait_empty()
    assert world.server.generate_output_info() == {"good": "1"}


class Dumb(Unsendable, kind="dumb"):
    """One that the server can merge, and not tell."""

    def serialize(self) -> Any:
        return self.value if self.value == "first" else threading.Lock()

    def try_to_string(self) -> str:
        raise ZeroDivisionError("no text")


def test_a_counter_that_cannot_be_told_takes_nothing_from_the_others(
    world: World, tmp_path: Path
) -> None:
    world.accumulator("good").write(1)
    world.accumulator("bad", Dumb).write("first")
    world.client.wait_empty()
    world.service.create_client(SERVICE_NAME).call(
        "push", 1, 1, 1, False, 0, [("bad", "dumb", {}, "second")]
    )
    found = world.client.snapshot()
    assert [(name, str(one)) for name, one in found.items()] == [("good", "1")]
    assert list(found.missing) == ["counter 'bad'"]
    assert world.server.generate_output_info() == {
        "good": "1",
        "bad": "cannot be told: ZeroDivisionError: no text",
    }
    world.server.wait_empty()
    assert list(world.server.save(tmp_path / "snapshot")) == ["counter 'bad'"]
    assert [state[0] for state in snapshot_file.load(tmp_path / "snapshot")[0]["counters"]] == [
        "good"
    ]


def test_more_arrays_than_a_message_may_have_are_told_and_saved(
    world: World, tmp_path: Path
) -> None:
    for number in range(1100):
        world.accumulator(f"counter {number}", Histogram).write(1.5)
    found = world.client.snapshot()
    assert (len(found), found.missing) == (1100, {})
    assert world.server.save(tmp_path / "snapshot") == {}
    assert len(snapshot_file.load(tmp_path / "snapshot")[0]["counters"]) == 1100


def test_a_push_with_a_number_that_no_snapshot_could_hold_is_refused() -> None:
    with pytest.raises(BadArguments, match=r"a push: .* is no count"):
        AccumulatorShard().push(1, 1, 1 << 70, False, 0, [])


def test_an_entry_that_is_none_is_refused_by_its_position() -> None:
    entries: list[Any] = [("good", "sum", {}, ((), 1)), ("bad",), 7]
    assert sorted(AccumulatorShard().push(1, 1, 1, False, 0, entries)[3]) == [1, 2]


def test_a_push_of_nonsense_is_answered_entry_by_entry(world: World) -> None:
    client = world.service.create_client(SERVICE_NAME)
    entries: list[Any] = [
        ("good", "sum", {}, ((), 1)),
        ("bad", "sum", {}, "what"),
        ("bad", "eval", {}, 1),
        ("bad", "topk", {"capacity": "9"}, 1),
        ("", "sum", {}, ((), 1)),
        ("bad", "sum", None, ((), 1)),
    ]
    action, _, _, refused = client.call("push", 1, 1, 1, False, 0, entries)
    assert action == "apply"
    assert sorted(refused) == [1, 2, 3, 4, 5]
    assert world.server.generate_output_info() == {"good": "1"}


def test_a_server_holds_a_bounded_number_of_counters() -> None:
    shard = AccumulatorShard(names_max=2)
    _, _, _, refused = shard.push(1, 1, 1, False, 0, [(name, "sum", {}, ((), 1)) for name in "abc"])
    assert list(refused) == [2]
    assert "2 counters already" in refused[2]


# -- many ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 5, 8])
def test_so_many_processes_write_and_nothing_is_lost(processes: int) -> None:
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        AccumulatorServer(service) as server,
        ExitStack() as writers,
    ):
        started = [
            writers.enter_context(Process("writer", master.address, str(rank)))
            for rank in range(processes)
        ]
        for writer in started:
            assert writer.process.wait(2 * PATIENCE_S) == 0  # eight interpreters begin at once
        found = server.generate_output_info()
    everything = WRITES * (WRITES + 1) // 2 * sum(rank + 1 for rank in range(processes))
    assert found == {"sum": str(everything), "max": str(WRITES * processes), "min": "1"}


def test_who_ends_without_closing_anything_still_sends_what_it_wrote() -> None:
    with (
        Master() as master,
        RpcService(master=master.address) as service,
        AccumulatorServer(service) as server,
        Process("careless", master.address) as careless,
    ):
        assert careless.process.wait(PATIENCE_S) == 0
        assert server.generate_output_info() == {"sum": "7"}


def test_101_threads_write_and_nothing_is_lost(world: World) -> None:
    one = world.accumulator("one")

    def write() -> None:
        for number in range(1000):
            one.write(number)

    threads = [threading.Thread(target=write) for _ in range(101)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.client.wait_empty()
    assert one.read().value == 101 * 499_500


def test_names_are_spread_over_servers_and_read_wherever_they_are() -> None:
    counters = CounterSet()
    with Master() as master, RpcService(master=master.address) as service, ExitStack() as stack:
        servers = [stack.enter_context(AccumulatorServer(service)) for _ in range(3)]
        client = stack.enter_context(AccumulatorClient(service, servers=3, counters=counters))
        accumulators = [
            Accumulator(f"counter {number}", Sum, counters=counters) for number in range(600)
        ]
        for number, accumulator in enumerate(accumulators):
            accumulator.write(number)
        client.wait_empty()
        assert [accumulator.read().value for accumulator in accumulators] == list(range(600))
        shares = [len(server.generate_output_info()) for server in servers]
        assert sum(shares) == 600
        assert min(shares) > 100
        assert len(client.snapshot()) == 600


@pytest.mark.slow
def test_shards_serve_counters_and_go_on_from_their_snapshots(tmp_path: Path) -> None:
    counters, path = CounterSet(), tmp_path / "snapshot"
    with Master() as master, RpcService(master=master.address) as service:
        for expected in (1, 2):
            with (
                RpcService(master=master.address, shards=2) as home,
                AccumulatorServer(home, snapshot_path=path),
                AccumulatorClient(service, servers=2, counters=counters) as client,
            ):
                accumulators = [
                    Accumulator(f"counter {number}", Sum, counters=counters) for number in range(20)
                ]
                for accumulator in accumulators:
                    accumulator.write(1)
                client.wait_empty(PATIENCE_S)
                assert [accumulator.read().value for accumulator in accumulators] == [expected] * 20
