"""Memory of devices that ports read from and write to, over connections alone; the devices are
memory of the host. Between workers, and of Options(gpu_direct=True): test_gpu_direct.py.
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import DeviceBlock, DeviceMemory, Node, Slab, Transport, VerbsOptions, device_block
from shard.transport.records import pack_descriptor, pack_prefix
from shard.transport.verbs import VerbsTransport
from shard.transport.verbs_loans import Outgoing
from shard.transport.verbs_records import LENT_BODY, REGION, pack_region
from tests.rdma.inside import verbs_of
from tests.transport_contract import World

MIB = 1 << 20
TICKET_BYTES = 20_000


class Device:
    """One device, for one slab: rooms for what comes, and blocks that leave."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.memory: list[tuple[NDArray[np.uint8], DeviceMemory]] = []
        self.staged = 0
        self.asked: list[tuple[int, int]] = []
        self.read_into = 0

    def block(self, nbytes: int, to: int = 0, room: int = 0, export: Any = None) -> DeviceBlock:
        """Of so many bytes, which are of no other block."""
        bytes_there = np.zeros(room or nbytes, np.uint8)
        memory = DeviceMemory(bytes_there.ctypes.data, bytes_there.nbytes, export)
        self.memory.append((bytes_there, memory))

        def stage() -> NDArray[np.uint8]:
            self.staged += 1
            return bytes_there[:nbytes].copy()

        return device_block(self.slab.empty(TICKET_BYTES, np.uint8), memory, nbytes, to, stage)

    def coming(self, device: int, nbytes: int) -> DeviceBlock | None:
        self.asked.append((device, nbytes))
        return self.block(nbytes, to=device) if device == 1 else None

    def came(self) -> None:
        self.read_into += 1

    def filled(self, nbytes: int, to: int, seed: int = 0, **how: Any) -> tuple[Any, DeviceBlock]:
        block = self.block(nbytes, to, **how)
        bytes_there, _ = self.memory[-1]
        bytes_there[:] = np.random.default_rng(seed).integers(0, 256, bytes_there.size, np.uint8)
        return bytes_there[:nbytes], block


class Pair:
    """Two sides, each with a device of its own."""

    def __init__(self, devices: str) -> None:
        def make(node: Node, slab: Slab) -> Transport:
            return VerbsTransport(node, slab, VerbsOptions(device=devices))

        self.world = World(make, "verbs://127.0.0.1:0")
        self.one, self.two = self.world.connect()
        calling = self.world.calling_slab
        (called,) = [slab for slab in self.world.slabs if slab is not calling]
        self.near, self.far = Device(calling), Device(called)
        calling.device_rooms, called.device_rooms = self.near, self.far

    def sent(self, blocks: list[NDArray[Any]], body: bytes = b"x") -> list[NDArray[np.uint8]]:
        self.one.connection.send(body, blocks)
        self.world.turn_until(lambda: self.two.messages)
        got, blocks = self.two.messages.pop()
        assert got == body
        return blocks

    def close(self) -> None:
        for _, memory in self.near.memory + self.far.memory:
            memory.end()
        self.one.connection.close()
        self.world.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Over two devices: what is registered is so with both. One alone is in the contract's test."""
    made = Pair("rxe0,rxe1")
    yield made
    made.close()


def test_bytes_are_read_from_one_device_into_the_other(pair: Pair) -> None:
    for seed, nbytes in enumerate((100_000, MIB, 2 * MIB)):
        there, block = pair.near.filled(nbytes, to=1, seed=seed)
        host, device = pair.sent([np.full(70_000, 5, np.uint8), block])
        assert type(device) is DeviceBlock
        assert (device.nbytes_there, device.number) == (nbytes, 1)
        bytes_there, memory = pair.far.memory[-1]
        assert memory is device.memory
        assert np.array_equal(bytes_there, there)
        assert (host.min(), host.max()) == (5, 5)
        del host, device
        pair.sent([np.zeros(MIB, np.uint8)])  # as much as comes next has come before
    assert pair.near.staged == pair.far.staged == 0


def test_without_room_on_the_device_they_come_into_the_host_memory(pair: Pair) -> None:
    there, block = pair.near.filled(MIB, to=0)
    (found,) = pair.sent([block])
    assert type(found) is not DeviceBlock
    assert np.array_equal(found, there)
    assert pair.far.asked == [(0, MIB)]
    pair.world.slabs[0].device_rooms = pair.world.slabs[1].device_rooms = None
    there, block = pair.near.filled(MIB, to=1, seed=1)
    (found,) = pair.sent([block])
    assert np.array_equal(found, there)


def test_no_room_is_asked_for_more_than_came_before(pair: Pair) -> None:
    """Of a first message that announces much: it is read into the host's memory by pieces, and of
    several arrays those beyond that.
    """
    there, block = pair.near.filled(2 * MIB, to=1)
    (found,) = pair.sent([block])
    assert np.array_equal(found, there)
    assert pair.far.asked == []
    blocks = [pair.near.filled(MIB, to=1, seed=seed) for seed in range(4)]
    found_there = pair.sent([block for _, block in blocks])
    assert [type(found) is DeviceBlock for found in found_there] == [True, True, False, False]
    assert (pair.far.asked, pair.far.read_into) == ([(1, MIB)] * 2, 2)
    there, block = pair.near.filled(2 * MIB, to=1, seed=1)
    (found,) = pair.sent([block])
    assert type(found) is DeviceBlock
    assert np.array_equal(pair.far.memory[-1][0], there)


def test_memory_is_registered_once_and_given_back_when_it_ends(pair: Pair) -> None:
    there, block = pair.near.filled(MIB, to=0)
    assert np.array_equal(pair.sent([block])[0], there)
    before = [rail.registrations for rail in verbs_of(pair.one).rails()]
    for _ in range(3):
        assert np.array_equal(pair.sent([block])[0], there)
    assert [rail.registrations for rail in verbs_of(pair.one).rails()] == before
    domains = [reader.domain for reader in verbs_of(pair.one)._queue.readers]
    number = block.memory.number
    assert all(number in domain._regions for domain in domains)
    block.memory.end()
    assert not any(number in domain._regions for domain in domains)
    assert np.array_equal(pair.sent([block])[0], there)  # what has ended is staged
    assert pair.near.staged == 1


def test_without_a_dma_buf_memory_is_registered_by_its_address(pair: Pair) -> None:
    """Soft RoCE takes none."""
    there, block = pair.near.filled(MIB, to=1, export=lambda: os.open("/dev/null", os.O_RDWR))
    assert np.array_equal(pair.far.memory[-1][0] if pair.sent([block]) else None, there)
    assert pair.near.staged == 0


def test_what_cannot_be_registered_is_staged_and_not_tried_again(pair: Pair) -> None:
    asked = []

    def export() -> int:
        asked.append(1)
        return os.open("/dev/null", os.O_RDWR)

    there, block = pair.near.filled(MIB, to=1, export=export)
    block.memory.address = mmap.PAGESIZE  # where nothing is
    for _ in range(3):
        assert np.array_equal(pair.sent([block])[0], there)
    assert (pair.near.staged, len(asked)) == (3, 1)


def test_a_peer_is_told_of_so_many_pieces_of_memory_and_no_more(pair: Pair) -> None:
    loans = verbs_of(pair.one)._loans
    loans._devices_max = 2
    for seed in range(4):
        there, block = pair.near.filled(100_000, to=0, seed=seed)
        assert np.array_equal(pair.sent([block])[0], there)
    assert pair.near.staged == 2


def test_a_block_is_taken_until_the_peer_has_read_it(pair: Pair) -> None:
    _, block = pair.near.filled(MIB, to=1)
    pair.sent([block])
    pair.world.turn_until(lambda: not pair.near.slab.statistics().leases)
    del block
    gc.collect()
    pair.world.turn_until(lambda: not pair.near.slab.statistics().blocks_used)


def test_a_body_that_is_said_to_be_for_a_device_is_read_into_the_host_memory(pair: Pair) -> None:
    """By a peer that lies."""
    body = np.full(MIB, 6, np.uint8)
    region = pair.near.block(MIB)
    pair.near.memory[-1][0][:] = body
    connection = verbs_of(pair.one)
    domain = connection._queue.readers[0].domain
    keys = [0] * connection._queue.width
    for reader in connection._queue.readers:
        found = reader.domain.region(region.memory.number)
        keys[reader.number] = found.rkey
    found = domain.region(region.memory.number)
    number = region.memory.number

    connection._enqueue(
        Outgoing(pack_region(number, found.address, found.nbytes, keys), REGION), 24
    )
    payload = pack_prefix(0, MIB) + pack_descriptor(MIB, 0, 1 << 40, number, 2)
    connection._enqueue(Outgoing(payload, LENT_BODY), len(payload))
    pair.world.turn_until(lambda: pair.two.messages)
    got, _ = pair.two.messages.pop()
    assert got == body.tobytes()
    assert pair.far.asked == []
