"""Arrays of devices between workers, where the devices are memory of the host: maps, leases and the
protocol are the real ones. What needs CUDA itself: python -m perf.gpu_check.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine import remote as rpc
from prpc_engine.cuda import transfers
from prpc_engine.cuda.driver import CudaError
from prpc_engine.cuda.opened import opened
from prpc_engine.cuda.pool import Pool
from shard import Slab
from tests.program import wait_until
from tests.prpc_engine.cuda import functions_there as there
from tests.prpc_engine.cuda.workers import (
    Devices,
    array_of,
    nothing_is_taken,
    sum_of,
    two_workers,
)

LARGE = 100_000  # items: by the pool, where it can be opened
SMALL = 10


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[Devices]:
    with two_workers(tmp_path) as devices:
        yield devices


def pool_is_open(devices: Devices) -> None:
    wait_until(
        lambda: (
            rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE),))
            and rpc.statistics()["peers_that_open"]
        ),
        "the peer's opening our pool",
    )


def test_a_map_for_anybody_is_for_a_peer_without_one(devices: Devices) -> None:
    devices.join(anybody={0: 1})
    assert rpc.rpc_sync("there", there.device_and_sum, args=(array_of(SMALL),)) == (1, 45.0)


@pytest.mark.parametrize("size", [0, SMALL, LARGE])
def test_an_array_arrives_on_the_device_that_the_map_says(devices: Devices, size: int) -> None:
    devices.join({0: 1})
    pool_is_open(devices)
    found = rpc.rpc_sync("there", there.device_and_sum, args=(array_of(size),))
    assert found == (1, sum_of(size))
    nothing_is_taken()


def test_it_goes_by_the_pool_when_the_peer_has_opened_it(devices: Devices) -> None:
    devices.join({0: 1})
    value = array_of(LARGE)
    assert rpc.rpc_sync("there", there.device_and_sum, args=(value,)) == (1, sum_of(LARGE))
    pool_is_open(devices)
    assert rpc.statistics()["device_blocks"] >= 1
    assert rpc.rpc_sync("there", there.device_and_sum, args=(value,)) == (1, sum_of(LARGE))


@pytest.mark.parametrize("function", [there.give_back, there.give_back_later])
def test_an_answer_comes_back_by_the_inverse(devices: Devices, function: Any) -> None:
    devices.join({0: 1})
    pool_is_open(devices)
    for _ in range(5):  # the first by the host, while the other asks to open ours
        back = rpc.rpc_sync("there", function, args=([array_of(LARGE), (array_of(SMALL),)],))
        assert back[0].device.id == 0
        assert back[1][0].device.id == 0
        np.testing.assert_array_equal(back[0].get(), np.arange(LARGE, dtype=np.float32))
    made = rpc.rpc_sync("there", there.made, args=(LARGE, 1))
    assert made.device.id == 0
    nothing_is_taken()


def test_what_a_function_returns_after_it_has_blocked_does_too(devices: Devices) -> None:
    devices.join({0: 1})
    future = rpc.rpc_async("there", there.give_back_when_told, args=(array_of(LARGE),))
    rpc.rpc_sync("there", there.tell)
    assert future.wait().device.id == 0
    again = rpc.rpc_async("there", there.give_back_when_told, args=(array_of(LARGE),))
    assert again.wait().device.id == 0


def test_references_follow_the_map(devices: Devices) -> None:
    devices.join({0: 1})
    pool_is_open(devices)
    rref = rpc.remote("there", there.Kept, args=(array_of(LARGE),))
    assert rref.rpc_sync().get().device.id == 0
    kept = rref.remote().get()
    assert kept.to_here().device.id == 0
    assert rpc.remote("there", there.made, args=(SMALL, 1)).to_here().device.id == 0


def test_many_in_flight_are_each_their_own(devices: Devices) -> None:
    devices.join({0: 1, 1: 0})
    pool_is_open(devices)
    futures = [
        rpc.rpc_async("there", there.give_back, args=(array_of(LARGE, index % 2, index),))
        for index in range(40)
    ]
    for index, future in enumerate(futures):
        back = future.wait()
        assert back.device.id == index % 2
        np.testing.assert_array_equal(back.get(), np.arange(index, index + LARGE, dtype=np.float32))
    del back, futures, future
    nothing_is_taken()
    assert rpc.statistics()["device_blocks"] < 60


def test_without_a_map_it_arrives_on_the_host_and_says_so_once(devices: Devices) -> None:
    devices.join({1: 0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE, 0),))
            assert found == (-1, sum_of(LARGE))
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(texts) <= 1  # once a process: another test may have had it
    assert all("cuda:0 is copied to the host" in text for text in texts)


def test_a_peer_that_does_not_see_our_devices_is_reached_by_the_host(devices: Devices) -> None:
    devices.join({0: 1}, gpus="of another host")
    for _ in range(20):
        found = rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE),))
        assert found == (1, sum_of(LARGE))
    assert rpc.statistics()["peers_that_open"] == 0
    back = rpc.rpc_sync("there", there.give_back, args=(array_of(LARGE),))
    assert back.device.id == 0
    nothing_is_taken()


def test_a_device_that_the_peer_lacks_is_named(devices: Devices) -> None:
    devices.join({0: 5})
    with pytest.raises(errors.RpcError, match="for cuda:5, and this process sees 2 CUDA devices"):
        rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE),))
    assert rpc.rpc_sync("there", there.give_back, args=(1,)) == 1
    nothing_is_taken()


def test_a_device_without_room_is_gone_round_by_the_host(devices: Devices) -> None:
    devices.join({0: 1})
    pool_is_open(devices)
    devices.driver.room_left(0, LARGE * 4)
    for size in (1 << 20, 1 << 21):
        with pytest.raises(Exception, match="out of memory"):
            array_of(size)
    value = array_of(LARGE)
    held = [rpc.rpc_async("there", there.give_back_when_told, args=(value,)) for _ in range(6)]
    del value
    devices.driver.room_left(0, 1 << 30)  # for the answers
    rpc.rpc_sync("there", there.tell)
    for future in held:
        assert future.wait().device.id == 0
    nothing_is_taken()


def test_blocks_come_back_from_a_peer_that_is_killed(devices: Devices) -> None:
    program = devices.join({0: 1})
    pool_is_open(devices)
    futures = [
        rpc.rpc_async("there", there.give_back_when_told, args=(array_of(LARGE),)) for _ in range(8)
    ]
    program.kill()
    for future in futures:
        with pytest.raises(RuntimeError):
            future.wait()
    del future, futures
    wait_until(lambda: rpc.statistics()["device_taken"] == 0, "our blocks' coming back")
    wait_until(lambda: len(opened()) == 0, "the closing of its blocks")


def test_all_device_memory_is_given_back_at_the_end(devices: Devices) -> None:
    devices.join({0: 1})
    pool_is_open(devices)
    rpc.rpc_sync("there", there.give_back, args=(array_of(LARGE),))
    rpc.shutdown(graceful=False)
    assert devices.driver.files == {}
    assert devices.driver.opened == []


# -- the pool, and what a lying peer may say -------------------------------------------------------


@pytest.fixture
def pool(devices: Devices) -> Iterator[Pool]:
    slab = Slab()
    made = Pool(slab, limit_bytes=4 << 20)
    yield made
    made.close()
    slab.close()


def test_a_block_is_used_again_when_its_ticket_is_gone(pool: Pool) -> None:
    first = pool.take(0, 100)
    second = pool.take(0, 100)
    assert first is not None
    assert second is not None
    assert first.address != second.address
    view = first.ticket[5:7]
    address = first.address
    del first
    third = pool.take(0, 100)
    assert third is not None
    assert third.address not in (address, second.address)
    del view
    again = pool.take(0, 100)
    assert again is not None
    assert again.address == address


def test_a_block_is_kept_while_a_lease_is_out(pool: Pool, devices: Devices) -> None:
    room = pool.take(0, 100)
    assert room is not None
    slab = pool.slab
    found = slab.block_of(room.ticket)
    assert found is not None
    slab.lend(found[0])
    address = room.address
    del room
    assert pool.statistics()["taken"] == 1
    slab.release(found[0])
    again = pool.take(0, 100)
    assert again is not None
    assert again.address == address


def test_a_full_pool_has_no_room(pool: Pool) -> None:
    rooms = [pool.take(0, 1 << 20) for _ in range(5)]
    assert [room is None for room in rooms] == [False] * 4 + [True]
    assert pool.take(1, 1 << 20) is not None
    assert pool.take(1, 8 << 20) is None


def test_a_ticket_that_was_copied_on_its_way_is_refused(pool: Pool) -> None:
    room = pool.take(0, 100)
    assert room is not None
    with transfers.source_of(room.ticket, room.share, 100) as source:
        assert source == room.address
    with (
        pytest.raises(ValueError, match="ticket was copied"),
        transfers.source_of(room.ticket.copy(), room.share, 100),
    ):
        pass


@pytest.mark.parametrize(
    ("place", "lie", "text"),
    [
        (0, 5, "not seen by this process|invalid resource"),
        (1, 99, "without its ticket"),
        (2, b"x" * 16, "not seen by this process"),
        (3, b"x", "none"),
    ],
)
def test_shares_that_are_none_are_refused(pool: Pool, place: int, lie: Any, text: str) -> None:
    room = pool.take(0, 100)
    assert room is not None
    share = list(room.share)
    share[place] = lie
    if place == 2:
        share[0] += 1  # of another process
    if place == 0:
        share[3] = b"nothing such".ljust(64)
    with (
        pytest.raises((ValueError, CudaError), match=text),
        transfers.source_of(room.ticket, share, 100),
    ):
        pass


def test_a_peer_cannot_have_us_read_a_block_of_ours_by_another_ticket(pool: Pool) -> None:
    first, second = pool.take(0, 100), pool.take(0, 100)
    assert first is not None
    assert second is not None
    with (
        pytest.raises(ValueError, match="without its ticket"),
        transfers.source_of(second.ticket, first.share, 100),
    ):
        pass


def test_without_cuda_ipc_everything_goes_by_the_host(devices: Devices) -> None:
    devices.driver.has_ipc = False
    devices.join({0: 1})
    for _ in range(5):
        found = rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE),))
        assert found == (1, sum_of(LARGE))
    assert rpc.statistics()["device_blocks"] == 0
