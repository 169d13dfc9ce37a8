"""Connections over several devices: arrays are read over all, and what becomes of a connection when
one device of them fails.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import MaybeExecuted, NotSent
from shard import (
    Node,
    PeerLostError,
    RemoteProtocolError,
    ShardError,
    Slab,
    Transport,
    UnreachableError,
    VerbsOptions,
)
from shard.transport.verbs import VerbsTransport
from shard.transport.verbs_connection import VerbsConnection
from shard.transport.verbs_introduction import FarEnd
from shard.transport.verbs_queue import VerbsQueue
from shard.transport.verbs_rails import VerbsRails
from shard.transport.verbs_records import REGION, pack_region
from tests.prpc_engine.inside import node_of, peers_by_address
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until
from tests.rdma.inside import verbs_of
from tests.rdma.neighbours import NOBODYS, lie_as, searching
from tests.transport_contract import Side, World

MIB = 1 << 20
BOTH = "rxe0,rxe1"
Make = Callable[[str, str], "Pair"]


class Pair(World):
    """It closes both of its sides."""

    def __init__(self, listening: str, calling: str) -> None:
        self._calling: list[Side] = []
        devices = iter((listening, calling))

        def transport(node: Node, slab: Slab) -> VerbsTransport:
            return VerbsTransport(node, slab, VerbsOptions(device=next(devices)))

        super().__init__(transport, "verbs://127.0.0.1:0")

    def connect(self, transport: Transport | None = None) -> tuple[Side, Side]:
        sides = super().connect(transport)
        self._calling.append(sides[0])
        return sides

    def close(self) -> None:
        for side in self._calling:
            side.connection.close()
        self._calling.clear()
        super().close()


@pytest.fixture
def make() -> Iterator[Make]:
    """A world whose listening side has the first of two lists of devices, and whose calling side
    the second.
    """
    with contextlib.ExitStack() as closing:

        def make(listening: str, calling: str) -> Pair:
            world = Pair(listening, calling)
            closing.callback(world.close)
            return world

        yield make


def ports_of(side: Side) -> list[str]:
    return [rail.port for rail in verbs_of(side).rails()]


def reads_of(side: Side) -> list[int]:
    return [rail.reads for rail in verbs_of(side).rails()]


def send_until_each_rail_reads(world: World, one: Side, two: Side, nbytes: int) -> None:
    """A rail reads from when it is proven, which takes a turn or more. Each array is looked at."""
    number = 0
    while not all(reads_of(two)):
        array = random_bytes(number, nbytes)
        one.connection.send(b"%d" % number, [array])
        world.turn_until(lambda: two.messages)
        body, (block,) = two.messages.pop()
        assert (body, np.array_equal(block, array)) == (b"%d" % number, True)
        number += 1
        assert number < 100, "a rail reads nothing"


def random_bytes(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def put_into_error(connection: VerbsConnection, rail: int) -> None:
    """As a device does: the queue pair is in error, and what it had is flushed."""
    attributes = importlib.import_module("pyverbs.qp").QPAttr(qp_state=6)  # IBV_QPS_ERR
    connection._queue.readers[rail]._pair.modify(attributes, 1)  # IBV_QP_STATE


@contextlib.contextmanager
def link_down(device: int) -> Iterator[None]:
    """The network device below rxe<device> is down."""
    network = f"dummy{device}"
    subprocess.run(["ip", "link", "set", network, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", network, "up"], check=True)


# -- what is read over which -----------------------------------------------------------------------


def test_large_arrays_are_read_over_both_devices_both_ways(make: Make) -> None:
    world = make(BOTH, BOTH)
    sides = one, two = world.connect()
    send_until_each_rail_reads(world, one, two, 4 * MIB)
    send_until_each_rail_reads(world, two, one, 4 * MIB)
    arrays = [random_bytes(seed, 16 * MIB) for seed in range(2)]
    # the slab does not grow for an array that is larger than all that came before it
    for pieces_bytes in (256 << 10, MIB):
        before = [reads_of(side) for side in sides]
        for side, array in zip(sides, arrays, strict=True):
            side.connection.send(b"", [array])
        world.turn_until(lambda: all(side.messages for side in sides))
        for side, array in zip(sides, reversed(arrays), strict=True):
            assert np.array_equal(side.messages.pop()[1][0], array)
        for side, old in zip(sides, before, strict=True):
            new = reads_of(side)
            assert all(after > then for then, after in zip(old, new, strict=True))
            assert (sum(new) - sum(old)) * pieces_bytes == 16 * MIB
        world.turn_until(lambda: not any(slab.statistics().leases for slab in world.slabs))
    assert [rail.reads_in_flight for side in sides for rail in verbs_of(side).rails()] == [0] * 4


def test_an_array_of_one_read_is_shared_by_both_devices(make: Make) -> None:
    world = make(BOTH, BOTH)
    one, two = world.connect()
    send_until_each_rail_reads(world, one, two, 4 * MIB)
    before = reads_of(two)
    one.connection.send(b"", [np.full(MIB, 3, np.uint8)])
    world.turn_until(lambda: two.messages)
    assert [new - old for new, old in zip(reads_of(two), before, strict=True)] == [1, 1]


def test_arrays_that_find_no_room_in_the_slab_are_read_over_both_devices(make: Make) -> None:
    """Each into the device's own memory, and from there into the process's."""
    world = make(BOTH, BOTH)
    one, two = world.connect()
    next(slab for slab in world.slabs if slab is not world.calling_slab).limit_bytes = 1
    send_until_each_rail_reads(world, one, two, 4 * MIB)


def test_messages_are_delivered_in_order_though_their_arrays_come_over_two_devices(
    make: Make,
) -> None:
    world = make(BOTH, BOTH)
    one, two = world.connect()
    sizes = [(number * 700_001) % (3 * MIB) + 5000 for number in range(30)]
    for number, size in enumerate(sizes):
        array = world.calling_slab.empty(size, np.uint8)
        array[:] = number
        one.connection.send(b"%d" % number, [array])
        del array
    world.turn_until(lambda: len(two.messages) == len(sizes))
    large = [int(body) for body, (block,) in two.messages if block.nbytes >= MIB]
    assert large == sorted(large)
    for body, (block,) in two.messages:
        assert (block.nbytes, block.min(), block.max()) == (sizes[int(body)], int(body), int(body))


def test_each_segment_is_registered_once_with_each_device(make: Make) -> None:
    world = make(BOTH, BOTH)
    one, two = world.connect()
    send_until_each_rail_reads(world, one, two, MIB)

    def registered() -> list[int]:
        return [rail.registrations for side in (one, two) for rail in verbs_of(side).rails()]

    before = registered()
    for side, slab in zip((one, two), (world.calling_slab, world.slabs[0]), strict=True):
        slots, rail = verbs_of(side).rails()
        # each beside one region of the queue pair's own
        assert slots.registrations == rail.registrations == len(slab.segment_numbers()) + 1
    for _ in range(10):
        one.connection.send(b"", [np.ones(MIB, np.uint8)])
        world.turn_until(lambda: two.messages)
        two.messages.clear()
    assert registered() == before


# -- which ports are paired ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listening", "calling", "ports"),
    [
        pytest.param("rxe0", BOTH, ["rxe0:1"], marks=pytest.mark.slow),
        pytest.param(BOTH, "rxe0", ["rxe0:1"], marks=pytest.mark.slow),
        (BOTH, "rxe1", ["rxe1:1"]),
        pytest.param(BOTH, "rxe1,rxe0", ["rxe1:1", "rxe0:1"], marks=pytest.mark.slow),
        ("rxe1, rxe0,rxe1:1", BOTH, ["rxe0:1", "rxe1:1"]),
        ("all", "all", ["rxe0:1", "rxe1:1"]),
    ],
)
def test_the_side_with_fewer_devices_decides_and_those_of_one_subnet_are_paired(
    make: Make, listening: str, calling: str, ports: list[str]
) -> None:
    world = make(listening, calling)
    one, two = world.connect()
    send_until_each_rail_reads(world, one, two, 4 * MIB)
    send_until_each_rail_reads(world, two, one, 4 * MIB)
    assert ports_of(one) == ports_of(two) == ports


def test_a_device_that_is_down_is_left_out_until_it_is_up_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make(BOTH, BOTH)
    for down, left in ((1, ["rxe0:1"]), (0, ["rxe1:1"])):
        with link_down(down), caplog.at_level(logging.WARNING, "shard"):
            caplog.clear()
            for _ in range(2):
                one, two = world.connect()
                assert ports_of(one) == ports_of(two) == left
                send_until_each_rail_reads(world, one, two, 2 * MIB)
                one.connection.close()
            told = [line for line in caplog.messages if "goes on without a port" in line]
            assert (
                told == [f"verbs goes on without a port: rxe{down}:1 is not used: it is down"] * 2
            )  # one of each side
        one, two = world.connect()
        assert ports_of(one) == ports_of(two) == ["rxe0:1", "rxe1:1"]
        one.connection.close()


def test_a_device_that_is_used_alone_is_looked_at_for_each_connection(make: Make) -> None:
    """Where one is named it has to be up again; where none is, the next one is taken."""
    named, any_of_them = make("rxe0", "rxe0"), make("", "")
    for world in (named, any_of_them):
        one, two = world.connect()
        assert ports_of(one) == ports_of(two) == ["rxe0:1"]
        one.connection.close()
    with link_down(0):
        with pytest.raises(ShardError, match="rxe0:1 is not used: it is down"):
            named.connect()
        one, two = any_of_them.connect()
        assert ports_of(one) == ports_of(two) == ["rxe1:1"]
        one.connection.close()
    one, two = named.connect()
    assert ports_of(one) == ports_of(two) == ["rxe0:1"]


def with_a_wrong_number(end: FarEnd) -> FarEnd:
    """Of its queue pair with slots: as on a network that loses all that is sent to it."""
    return replace(end, number=0xFFFFFE)


def test_where_nothing_comes_back_no_connection_is_made(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a node takes another transport."""
    lie_as(monkeypatch, VerbsQueue, "acceptor", with_a_wrong_number)
    world = make("rxe0", "rxe0")
    with pytest.raises(
        UnreachableError, match="cannot be reached by RDMA: rxe0:1: the peer's device acknowledged"
    ):
        world.call(world.connecting_transport())
    assert not world.accepted


def test_where_the_first_devices_do_not_reach_each_other_messages_go_over_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lie_as(monkeypatch, VerbsRails, "acceptor", with_a_wrong_number)
    world = make(BOTH, BOTH)
    with caplog.at_level(logging.WARNING, "shard"):
        one, two = world.connect()
    assert any("acknowledged nothing" in it and "trying rxe1:1" in it for it in caplog.messages)
    assert ports_of(one) == ports_of(two) == ["rxe1:1", "rxe0:1"]
    send_until_each_rail_reads(world, one, two, 4 * MIB)
    send_until_each_rail_reads(world, two, one, 4 * MIB)


@pytest.mark.parametrize("liar", ["connector", "acceptor"])
def test_where_the_host_is_not_found_by_the_first_device_messages_go_over_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, liar: str
) -> None:
    lie_as(monkeypatch, VerbsRails, liar, lambda end: replace(end, gid=NOBODYS))
    world = make("rxe1,rxe0", "rxe1,rxe0")
    with searching("dummy1"), caplog.at_level(logging.WARNING, "shard"):
        one, two = world.connect()
    assert any("answers no ARP" in it and "trying rxe0:1" in it for it in caplog.messages)
    assert ports_of(one) == ports_of(two) == ["rxe0:1", "rxe1:1"]
    send_until_each_rail_reads(world, one, two, 4 * MIB)


def test_a_rail_over_which_nothing_comes_back_is_done_without(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As between two networks that no router connects. It ends no connection."""
    near_end = VerbsRails.near_end

    def with_wrong_numbers(queue: VerbsRails) -> FarEnd:
        end = near_end(queue)
        return replace(end, rails=tuple(replace(one, number=0xFFFFFE) for one in end.rails))

    monkeypatch.setattr(VerbsRails, "near_end", with_wrong_numbers)
    world = make(BOTH, BOTH)
    one, two = world.connect()
    with caplog.at_level(logging.WARNING, "shard"):
        world.turn_until(
            lambda: (
                sum("read without a rail: rxe1:1: the peer's" in it for it in caplog.messages) == 2
            )
        )
    one.connection.send(b"", [random_bytes(1, 4 * MIB)])
    world.turn_until(lambda: two.messages)
    assert np.array_equal(two.messages[0][1][0], random_bytes(1, 4 * MIB))
    assert reads_of(two)[1] == 0 and not one.ends and not two.ends


@pytest.mark.parametrize("liar", ["connector", "acceptor"])
def test_a_rail_whose_host_is_not_found_is_done_without(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, liar: str
) -> None:
    def lie(end: FarEnd) -> FarEnd:
        return replace(end, rails=tuple(replace(one, gid=NOBODYS) for one in end.rails))

    lie_as(monkeypatch, VerbsRails, liar, lie)
    world = make(BOTH, BOTH)
    with searching("dummy1"), caplog.at_level(logging.WARNING, "shard"):
        one, two = world.connect()
        world.turn_until(lambda: any("10.77.1.99 answers no ARP" in it for it in caplog.messages))
    one.connection.send(b"", [random_bytes(1, 4 * MIB)])
    world.turn_until(lambda: two.messages)
    assert np.array_equal(two.messages[0][1][0], random_bytes(1, 4 * MIB))
    assert sum(reads_of(two)[1:]) == 0 and not one.ends and not two.ends


# -- lies ------------------------------------------------------------------------------------------


def test_a_region_is_told_with_a_key_for_each_rail(make: Make) -> None:
    world = make(BOTH, BOTH)
    liar, other = world.connect()
    verbs_of(liar)._slots.fill(pack_region(7, 0, 1, [1]), REGION)
    world.turn_until(lambda: other.ends and liar.ends)
    assert isinstance(other.ends[0], RemoteProtocolError)
    assert "cut short" in str(other.ends[0])


def test_a_peer_that_answers_with_more_rails_than_were_offered_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    near_end = VerbsRails.near_end
    world = make(BOTH, BOTH)
    made = 0

    def with_one_more(queue: VerbsRails) -> FarEnd:
        nonlocal made
        made += 1
        end = near_end(queue)
        return replace(end, rails=end.rails * made)  # the second one answers the first

    monkeypatch.setattr(VerbsRails, "near_end", with_one_more)
    with pytest.raises(RemoteProtocolError, match="has 2 rails for 1 of this side"):
        world.call(world.connecting_transport())


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(True, id="that reads"),
        pytest.param(False, id="that is read from", marks=pytest.mark.slow),
    ],
)
def test_a_rail_that_fails_in_the_middle_of_an_array_ends_the_connection_by_its_name(
    make: Make, reader: bool
) -> None:
    world = make(BOTH, BOTH)
    one, two = world.connect()
    send_until_each_rail_reads(world, one, two, 4 * MIB)
    before = reads_of(two)
    one.connection.send(b"", [np.full(16 * MIB, number, np.uint8) for number in range(3)])
    world.turn_until(lambda: reads_of(two)[1] > before[1])
    put_into_error(verbs_of(two if reader else one), 1)
    world.turn_until(lambda: two.ends and one.ends)
    assert isinstance(two.ends[0], PeerLostError)
    assert "was lost: rxe1:1: " in str(two.ends[0])
    assert not two.messages
    world.turn_until(lambda: not any(slab.statistics().leases for slab in world.slabs))
    one, two = world.connect()
    send_until_each_rail_reads(world, one, two, 4 * MIB)


@contextlib.contextmanager
def served(name: str) -> Iterator[tuple[ServerProcess, RpcService, RpcClient]]:
    with (
        Master("127.0.0.1:0") as master,
        ServerProcess(master.address, name, "verbs") as process,
        RpcService(master=master.address, transports=("verbs",)) as service,
    ):
        yield process, service, service.create_client(name, timeout_s=PATIENCE_S)


def test_where_nothing_comes_back_calls_go_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    # the server answers to a queue pair that does not exist, and nothing comes back to this process
    lie_as(monkeypatch, VerbsQueue, "connector", with_a_wrong_number)
    both = ("verbs", "tcp")
    with (
        Master("127.0.0.1:0") as master,
        ServerProcess(master.address, "cut off", ",".join(both)),
        RpcService(master=master.address, transports=both) as service,
    ):
        client = service.create_client("cut off", timeout_s=PATIENCE_S)
        assert client.call("echo", 7) == 7
        # the device gives up after a while, unless this machine is so slow that the deadline of
        # the attempt passes before
        why = ("acknowledged nothing", "nothing came back in time")
        choices = node_of(service).choices.values()
        (choice,) = [one for one in choices if any(text in one for text in why)]
        assert choice.startswith("tcp to ")


def connection_of(service: RpcService) -> VerbsConnection:
    (found,) = [
        peer.connection
        for peer in peers_by_address(node_of(service)).values()
        if isinstance(peer.connection, VerbsConnection)
    ]
    return found


def test_a_call_whose_rail_failed_ends_by_name_and_the_next_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_VERBS_DEVICE", "all")
    with served("rails") as (_, service, client):
        array = random_bytes(1, 16 * MIB)
        client.call("echo", array)
        while not all(rail.reads for rail in connection_of(service).rails()):
            assert np.array_equal(client.call("echo", array), array)
        future = client.submit("echo", array)
        put_into_error(connection_of(service), 1)
        with pytest.raises((MaybeExecuted, NotSent), match="verbs://"):
            future.result(PATIENCE_S)
        assert np.array_equal(client.call("echo", array), array)
        assert len(connection_of(service).rails()) == 2


@pytest.mark.slow
def test_a_server_that_is_killed_while_both_rails_read_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_VERBS_DEVICE", BOTH)
    with served("killed") as (process, service, client):
        array = np.ones(32 * MIB, np.uint8)
        client.call("echo", array)
        connection = connection_of(service)
        before = [rail.reads for rail in connection.rails()]
        futures = [client.submit("echo", array) for _ in range(4)]
        wait_until(
            lambda: all(
                rail.reads > then for rail, then in zip(connection.rails(), before, strict=True)
            ),
            "reads on both rails",
        )
        process.kill()
        errors = []
        for future in futures:
            try:
                assert np.array_equal(future.result(PATIENCE_S), array)
            except (MaybeExecuted, NotSent) as error:
                errors.append(str(error))
        assert errors and all("verbs://" in text for text in errors)
        del array, future, futures
        slab = node_of(service).slab
        wait_until(lambda: not slab.statistics().leases, "leases that came back")
