"""One array to several servers: copied once, lent to each of this host, and free when all have
dropped it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import prpc_engine
from prpc_engine import Lazy, Master, RpcClient, RpcService, errors
from prpc_engine.archive import encode_arguments
from prpc_engine.client.shared_message import SHARED_BYTES_MIN, shared_message
from shard import Slab
from tests.prpc_engine.handlers import Plain, Reader
from tests.prpc_engine.processes import PATIENCE_S, wait_until

READERS = 3
ITEMS = 1_000_000


@pytest.fixture(params=["shm", "tcp"])
def world(
    request: pytest.FixtureRequest, forked_shards: None
) -> Iterator[tuple[RpcService, RpcClient]]:
    """A client of three readers, each in a process of its own."""
    with (
        Master() as master,
        RpcService(
            master.address, shards=READERS, transports=[request.param], restart="never"
        ) as serving,
        RpcService(master.address, transports=[request.param]) as service,
    ):
        serving.create_server("readers", Reader, sharded=True)
        yield service, service.create_client("readers", READERS, PATIENCE_S)


def used(service: RpcService) -> tuple[int, int]:
    """Blocks of this process's slab that somebody uses, and leases on them."""
    slab = service.statistics().slab
    return slab.blocks_used, slab.leases


def test_an_ordinary_array_is_copied_once_for_all_readers_that_keep_it(
    world: tuple[RpcService, RpcClient],
) -> None:
    service, client = world
    before, _ = used(service)
    array = np.full(ITEMS, 7.0, np.float32)
    assert client.broadcast("hear", array) == [None] * READERS
    in_shm = any(text.startswith("shm") for text in service.transports.values())
    wait_until(lambda: used(service) == ((before + 1, READERS) if in_shm else (before, 0)))
    array[:] = 8.0  # it is the caller's again
    assert client.broadcast("first_heard") == [[7.0]] * READERS
    client.broadcast("forget")
    wait_until(lambda: used(service) == (before, 0))


def test_every_reader_sees_every_byte_and_cannot_write(
    world: tuple[RpcService, RpcClient],
) -> None:
    _, client = world
    array = np.arange(ITEMS).astype(np.float64)
    for dtype, shape, writeable, data in client.broadcast("describe", array):
        assert (dtype, shape, writeable) == ("<f8", (ITEMS,), False)
        assert data == array.tobytes()
    for first, last in client.broadcast("first_and_last", array[::-2]):
        assert (first, last) == (ITEMS - 1.0, 1.0)


def test_an_array_of_the_slab_is_lent_as_it_is(world: tuple[RpcService, RpcClient]) -> None:
    service, client = world
    array = prpc_engine.empty(ITEMS, np.float32)
    array[:] = 1.0
    blocks, _ = used(service)
    client.broadcast("hear", array)
    assert used(service)[0] == blocks
    client.broadcast("forget")
    wait_until(lambda: used(service)[1] == 0)


def test_a_reader_that_dies_of_it_is_named_and_leaves_nothing_lent(
    world: tuple[RpcService, RpcClient],
) -> None:
    service, client = world
    before, _ = used(service)
    array = np.full(ITEMS, 7.0, np.float32)
    victim = client.call_to(1, "pid")
    with pytest.raises(errors.MaybeExecuted, match="'die_if' was sent to server 1 of 'readers'"):
        client.broadcast("die_if", victim, array)
    wait_until(lambda: used(service) == (before, 0))
    assert client.call_to(0, "first_and_last", array) == (7.0, 7.0)


def test_small_arguments_and_many_arrays_arrive_alike(world: tuple[RpcService, RpcClient]) -> None:
    _, client = world
    assert client.broadcast("add", 1, 2) == [3] * READERS
    assert client.broadcast("pid")[0] != client.broadcast("pid")[1]
    arrays = [np.full(size, size, np.int64) for size in (1, 100, 5_000, 50_000)]
    for echo in client.broadcast("echo", {"all": arrays}):
        for given, got in zip(arrays, echo["all"], strict=True):
            np.testing.assert_array_equal(given, got)


def test_a_wrong_argument_is_refused_before_anything_leaves(
    world: tuple[RpcService, RpcClient],
) -> None:
    service, client = world
    array = np.zeros(ITEMS)
    before, _ = used(service)
    with pytest.raises(errors.BadArguments):
        client.broadcast("echo", array, object())
    with pytest.raises(errors.UnknownMethod):
        client.broadcast("nothing_such", array)
    with pytest.raises(errors.BadArguments):
        client.broadcast(5, array)  # type: ignore[arg-type]
    with pytest.raises(errors.BadArguments, match="timeout_s"):
        client.broadcast("echo", array, timeout_s=-1.0)
    wait_until(lambda: used(service) == (before, 0))


def test_servers_of_this_very_process_get_a_copy_each(master: Master) -> None:
    with RpcService(master.address) as service:
        servers = [Plain(), Plain()]
        for server in servers:
            service.create_server("local", server)
        client = service.create_client("local", 2)
        array = np.zeros(ITEMS)
        client.broadcast("hear", array)
        array[:] = 1.0
        assert [server.heard[0][0] for server in servers] == [0.0, 0.0]


def test_a_slab_without_room_is_no_error() -> None:
    with_room, without = Slab(), Slab(limit_bytes=1 << 20)
    try:
        array = np.arange(1 << 20)
        for slab, in_slab in ((with_room, True), (without, False)):
            message = shared_message(encode_arguments, slab, (array,), may_lend=True)
            assert message is not None
            (block,) = message.blocks
            assert (slab.block_of(block) is not None) is in_slab
            assert not np.shares_memory(block, array)
            np.testing.assert_array_equal(block.view(array.dtype), array)
            del message, block
    finally:
        with_room.close()
        without.close()


@pytest.mark.parametrize(
    "arguments", [(), (1, "a"), (np.zeros(10),), (np.zeros(SHARED_BYTES_MIN // 8 - 1),)]
)
def test_what_is_small_is_not_shared(arguments: tuple[object, ...]) -> None:
    slab = Slab()
    assert shared_message(encode_arguments, slab, arguments, may_lend=True) is None
    slab.close()


def test_what_is_handed_over_goes_to_one_alone(master: Master) -> None:
    """A Lazy has one taker in this process: the others are told."""
    with RpcService(master.address) as service:
        servers = [Plain(), Plain()]
        for server in servers:
            service.create_server("local", server)
        client = service.create_client("local", 2)
        with pytest.raises(errors.BadArguments, match="handed over"):
            client.broadcast("hear", Lazy(np.zeros(ITEMS)))
