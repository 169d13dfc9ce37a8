"""verbs over iWARP: the contract of all transports, and what is particular to rdma_cm and to an end
that ends the other. Run in a guest of its own, where test_calls.py and test_soak.py, of calls
between processes, run as well:

    python -m tests.rdma.guest --link siw --devices 2 --memory 2048 run -- \\
        PYTHON -m pytest -p no:cacheprovider tests/rdma/test_iwarp.py
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shard import (
    Node,
    PeerLostError,
    Slab,
    Transport,
    UnreachableError,
    VerbsOptions,
    VerbsTransport,
)
from shard.transport.verbs_connection import VerbsConnection
from shard.transport.verbs_device import IWARP, NoVerbs, VerbsPort, verbs_ports, verbs_rails
from shard.transport.verbs_domain import VerbsDomain
from shard.transport.verbs_introduction import FarEnd, mapped_address
from shard.transport.verbs_iwarp import IwarpQueue
from shard.transport.verbs_queue import FLUSH
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.rdma.inside import fail, verbs_of
from tests.rdma.neighbours import lie_as
from tests.transport_contract import LIMITS, Side, TransportContract, World

ADDRESS = "verbs://127.0.0.1:0"
MIB = 1 << 20
SLOT_BYTES = 1024
OTHER_TOKEN = b"x" * 16


def ports() -> list[VerbsPort]:
    return [port for port in verbs_ports() if port.link == IWARP and not port.fault]


def make(node: Node, slab: Slab) -> Transport:
    return VerbsTransport(node, slab, VerbsOptions(device=str(ports()[0])))


class TestIwarp(TransportContract):
    address = ADDRESS

    @staticmethod
    def make(node: Node, slab: Slab) -> Transport:
        return make(node, slab)


# -- who may connect -------------------------------------------------------------------------------


class Ends:
    """Queue pairs that are to be connected, of one device, and what has become of them."""

    def __init__(self) -> None:
        self.slab = Slab()
        self.domain = VerbsDomain(self.slab, VerbsOptions(), ports()[0])
        self._queues: list[IwarpQueue] = []
        self.acceptor = self.queue(is_accepting=True)
        self.acceptor.connect(self.queue().near_end())
        self.place = self.acceptor.near_end()

    def queue(self, is_accepting: bool = False) -> IwarpQueue:
        made = IwarpQueue(self.domain, SLOT_BYTES, is_accepting)
        self._queues.append(made)
        return made

    def meet(self, far: FarEnd, within_s: float = PATIENCE_S) -> IwarpQueue:
        """A new one connects to that end, while the acceptor looks at what comes. Raises what that
        raises.
        """
        connector = self.queue()
        connector.connect(far)
        raised: list[BaseException] = []

        def run() -> None:
            try:
                connector.meet(far, time.monotonic() + within_s)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            self.acceptor.step()
            thread.join(0.005)
        if raised:
            raise raised[0]
        return connector

    def close(self) -> None:
        for queue in self._queues:
            queue.close()
        self.slab.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_the_end_with_the_token_is_connected_and_nobody_after_it(ends: Ends) -> None:
    connector = ends.meet(ends.place)
    connector.prove("")
    wait_until(connector.is_proven, "a read that comes back")
    assert ends.acceptor.is_connected()
    with pytest.raises(NoVerbs, match=r"no way from siw0:1 to .*refused"):
        ends.meet(ends.place)


@pytest.mark.parametrize("token", [OTHER_TOKEN, b"", b"x"])
def test_a_stranger_at_the_port_of_rdma_cm_is_rejected_and_the_peer_still_comes(
    ends: Ends, token: bytes
) -> None:
    for _ in range(3):
        with pytest.raises(NoVerbs, match="rejected the connection"):
            ends.meet(replace(ends.place, token=token))
    assert not ends.acceptor.is_connected()
    ends.meet(ends.place)
    wait_until(ends.acceptor.is_connected, "the peer")


def test_a_stranger_that_speaks_tcp_alone_keeps_nobody_out(ends: Ends) -> None:
    place = str(mapped_address(ends.place.gid)), ends.place.lid
    with socket.create_connection(place) as silent, socket.create_connection(place) as wrong:
        wrong.send(b"GET / HTTP/1.1\r\n\r\n" * 100)
        ends.meet(ends.place)
        wait_until(ends.acceptor.is_connected, "the peer")
        assert silent.fileno() >= 0


def test_a_peer_that_does_not_accept_is_given_up_in_time(ends: Ends) -> None:
    connector = ends.queue()
    connector.connect(ends.place)
    with pytest.raises(NoVerbs, match=r"no way from siw0:1 to 10\.77\.0\.1 port .* not answer"):
        connector.meet(ends.place, time.monotonic() + 0.2)  # and step() is not called


def test_a_queue_that_is_closed_while_it_connects_is_given_back_once_it_can_be(ends: Ends) -> None:
    connector = ends.queue()
    connector.connect(ends.place)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            connector.meet(ends.place, time.monotonic() + PATIENCE_S)
        except NoVerbs as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: connector.fileno_of_meeting() is not None, "the thread")
    connector.close()
    ends.acceptor.step()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with pytest.raises(NoVerbs, match="given up"):
        connector.meet(ends.place, time.monotonic() + PATIENCE_S)


# -- what connects over tcp first ------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    world = World(make, ADDRESS)
    yield world
    world.close()


@pytest.fixture
def sides(world: World) -> Iterator[tuple[Side, Side]]:
    one, two = world.connect()
    yield one, two
    one.connection.close()
    two.connection.close()


@pytest.mark.parametrize(
    ("liar", "lie", "text"),
    [
        ("acceptor", lambda end: replace(end, token=OTHER_TOKEN), "rejected the connection"),
        ("acceptor", lambda end: replace(end, lid=1), "no way from siw0:1 to 10.77.0.1 port 1"),
        ("acceptor", lambda end: replace(end, link=2), "one end is of iWARP .siw0:1., and the o"),
        ("connector", lambda end: replace(end, link=2), "one end is of iWARP .siw0:1., and the o"),
        ("connector", lambda end: replace(end, link=1), "InfiniBand or RoCE: they do not talk"),
    ],
)
def test_an_end_that_is_not_as_it_says_is_refused_by_name(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    liar: str,
    lie: Callable[[FarEnd], FarEnd],
    text: str,
) -> None:
    lie_as(monkeypatch, IwarpQueue, liar, lie)
    with pytest.raises(UnreachableError, match=text):
        world.call(world.connecting_transport())
    world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]
    one, _ = world.connect()
    one.connection.close()


@contextlib.contextmanager
def kernel_setting(name: str, value: str) -> Iterator[None]:
    path = Path("/proc/sys", name)
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def test_a_host_that_answers_no_tcp_is_given_up_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """siw's connect waits for it longer, in a thread."""
    nobodys = replace(FarEnd(), gid=bytes(10) + b"\xff\xff\x0a\x4d\x00\x63")  # 10.77.0.99
    lie_as(monkeypatch, IwarpQueue, "acceptor", lambda end: replace(end, gid=nobodys.gid))
    with contextlib.closing(World(make, ADDRESS)) as world:
        world.connect_s = 1.0
        with kernel_setting("net/ipv4/tcp_syn_retries", "1"):
            with pytest.raises(UnreachableError, match=r"10\.77\.0\.99 port .* not answer in time"):
                world.call(world.connecting_transport())
            # the thread gives back what it has once the kernel has given up
            world.turn_until(lambda: not open_managers())
        world.turn_until(lambda: world.listener.statistics().refused)  # type: ignore[attr-defined]


def open_managers() -> int:
    """Descriptors of rdma_cm that this process has."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own, which is closed by now
            found += entry.readlink().name == "rdma_cm"
    return found


def test_the_second_device_works_too_and_several_are_one() -> None:
    names = [str(port) for port in ports()]
    assert names == ["siw0:1", "siw1:1"]
    used, left_out = verbs_rails("siw1,siw0")
    assert [str(port) for port in used] == ["siw1:1"]
    assert left_out == ["siw0:1 is not used: a port of iWARP is used alone, without others"]

    def over_both(node: Node, slab: Slab) -> Transport:
        return VerbsTransport(node, slab, VerbsOptions(device="siw1,siw0"))

    with contextlib.closing(World(over_both, ADDRESS)) as world:
        one, two = world.connect()
        one.connection.send(b"x", [np.full(100_000, 7, np.uint8)])
        world.turn_until(lambda: two.messages)
        assert [rail.port for rail in verbs_of(one).rails()] == ["siw1:1"]
        one.connection.close()


def test_ends_on_different_devices_meet_where_their_networks_do() -> None:
    devices = iter(("siw1", "siw0"))  # of who listens, and who connects

    def by_turns(node: Node, slab: Slab) -> Transport:
        return VerbsTransport(node, slab, VerbsOptions(device=next(devices)))

    with contextlib.closing(World(by_turns, ADDRESS)) as world:
        one, two = world.connect()
        one.connection.send(b"x")
        world.turn_until(lambda: two.messages)
        assert [verbs_of(side).rails()[0].port for side in (one, two)] == ["siw0:1", "siw1:1"]
        one.connection.close()


# -- what a peer may do ----------------------------------------------------------------------------


def write(connection: VerbsConnection, address: int, rkey: int) -> None:
    """What no connection does: write to the peer's memory, under a number that means nothing."""
    wr = importlib.import_module("pyverbs.wr")
    queue = connection._queue
    place = wr.SGE(queue._address, 8, queue._lkey)
    request = wr.SendWR(wr_id=FLUSH, opcode=0, num_sge=1, sg=[place], send_flags=2)
    request.set_wr_rdma(rkey, address)
    queue._pair.post_send(request)


def told_segment(liar: VerbsConnection, other: VerbsConnection) -> tuple[int, int]:
    """Where it is, and its key: what a peer is told so that it reads an array from there."""
    ((address, _, (rkey,)),) = liar._arrivals._regions.values()
    return address, rkey


def slots(liar: VerbsConnection, other: VerbsConnection) -> tuple[int, int]:
    """The same of what no peer is told: keys are tags here, of both kinds."""
    return other._queue._address, other._queue._lkey


@pytest.mark.parametrize("place_of", [told_segment, slots])
def test_a_peer_may_write_neither_to_the_slab_nor_to_slots(
    world: World,
    sides: tuple[Side, Side],
    place_of: Callable[[VerbsConnection, VerbsConnection], tuple[int, int]],
) -> None:
    liar, other = sides
    array = world.slabs[0].empty((100_000,), np.uint8)  # of the side that was called
    array[:] = 7
    other.connection.send(b"read it", [array])
    world.turn_until(lambda: liar.messages)
    memory = verbs_of(other)._queue.memory
    before = bytes(memory[:8])
    write(verbs_of(liar), *place_of(verbs_of(liar), verbs_of(other)))
    world.turn_until(lambda: other.ends and liar.ends)
    assert array.min() == 7 == array.max()
    assert bytes(memory[:8]) == before
    assert all(isinstance(side.ends[0], PeerLostError) for side in sides)


def test_arrays_are_read_into_the_slab_by_a_copy_and_no_peer_may_write_there(
    world: World, sides: tuple[Side, Side]
) -> None:
    one, two = sides
    array = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    one.connection.send(b"x", [array])
    world.turn_until(lambda: two.messages)
    (block,) = two.messages[0][1]
    assert np.array_equal(block, array)
    assert world.slabs[0].block_of(block) is not None, "it may be sent on without a copy"
    assert not verbs_of(two)._domains[0]._regions, "no segment of the receiver is registered"


# -- the end ---------------------------------------------------------------------------------------


def test_a_peer_that_closes_is_not_a_device_that_fails(
    world: World, sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = sides
    with caplog.at_level(logging.WARNING, "shard"):
        one.connection.send(b"last words")
        one.connection.close()
        world.turn_until(lambda: two.ends)
    assert two.bodies == [b"last words"]
    assert "closed the connection" in str(two.ends[0])
    assert not caplog.messages


def test_a_queue_pair_in_error_ends_both_ends_by_name(
    world: World, sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = sides
    with caplog.at_level(logging.WARNING, "shard"):
        fail(verbs_of(one))
        world.turn_until(lambda: one.ends and two.ends)
    assert "siw0:1: the queue pair was in error already" in str(one.ends[0])
    assert isinstance(two.ends[0], PeerLostError)
    assert any(" ends: siw0:1: " in line for line in caplog.messages)


@contextlib.contextmanager
def without_address(network: str, address: str) -> Iterator[None]:
    """What is on the way there is dropped: the kernel has no such address any more."""
    subprocess.run(["ip", "addr", "del", address, "dev", network], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "addr", "add", address, "dev", network], check=True)


def test_an_idle_peer_whose_network_is_cut_is_lost_by_name() -> None:
    """The socket, over another one, goes on."""

    def hasty(node: Node, slab: Slab) -> Transport:
        return make(replace(node, limits=replace(LIMITS, peer_silent_s=1.0)), slab)

    with contextlib.closing(World(hasty, ADDRESS)) as world:
        sides = world.connect()
        sides[0].connection.send(b"x")
        world.turn_until(lambda: sides[1].messages)
        with without_address("dummy0", "10.77.0.1/24"):
            world.turn_until(lambda: all(side.ends for side in sides))
        for side in sides:
            assert isinstance(side.ends[0], PeerLostError)
        assert "acknowledged nothing for 1 s" in str([side.ends[0] for side in sides])


def test_a_look_whether_the_peer_is_there_disturbs_no_arrays() -> None:
    """siw answers a read of no bytes with those of another one, where it is busy."""
    silent_s = 0.5

    def hasty(node: Node, slab: Slab) -> Transport:
        return make(replace(node, limits=replace(LIMITS, peer_silent_s=silent_s)), slab)

    with contextlib.closing(World(hasty, ADDRESS)) as world:
        sides = world.connect()
        array = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8)
        until = time.monotonic() + 6 * silent_s
        while time.monotonic() < until:
            for side in sides:
                side.messages.clear()
                side.connection.send(b"x", [array])
            world.turn_until(lambda: all(side.messages or side.ends for side in sides))
            for side in sides:
                assert not side.ends
                assert np.array_equal(side.messages[0][1][0], array)
        sides[0].connection.close()
