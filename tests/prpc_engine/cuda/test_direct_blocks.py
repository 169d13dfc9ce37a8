"""Blocks in memory of a device where no RDMA port reads them: they are staged in the host's memory,
whatever carries them. With a port: tests/rdma/test_gpu_direct.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import remote as rpc
from prpc_engine.archive import Archive, ArchiveError
from prpc_engine.archive.compression import compress, compressor_of
from prpc_engine.cuda import transfers
from prpc_engine.cuda.direct import FLUSH_OPTIONS, GPU_DIRECT_RDMA_SUPPORTED, DirectSupport
from prpc_engine.cuda.direct_blocks import DIRECT_BYTES_MIN, DirectBlocks
from prpc_engine.cuda.placement import DevicePlacement, placing
from prpc_engine.cuda.pool import Pool, free_unused
from prpc_engine.cuda.transfers import source_of
from prpc_engine.errors import BadArguments
from prpc_engine.node.slab import default_slab
from shard import DEFAULT_LIMITS, DeviceBlock, Slab, bytes_of, runtime
from shard.memory.device_memory import device_memory, staged
from tests.prpc_engine.cuda import functions_there as there
from tests.prpc_engine.cuda.on_host import HostDriver
from tests.prpc_engine.cuda.workers import Devices, array_of, nothing_is_taken, sum_of, two_workers

LARGE, SMALL = 100_000, 10  # items; a small tensor always goes by the host
READABLE = DirectSupport(is_readable=True, has_dmabuf=False, can_flush=True)


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[Devices]:
    with two_workers(tmp_path) as devices:
        yield devices


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    runtime.put("cuda", HostDriver(tmp_path))
    slab = Slab()
    try:
        made = Pool(slab, direct=[READABLE, READABLE])
        yield made
        made.close()
    finally:
        slab.close()
        runtime.put("cuda", None)


@pytest.mark.parametrize("transports", ["shm", "unix", "tcp"])
def test_what_no_port_reads_is_staged(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORTS", transports)
    devices.join({0: 1, 1: 0}, gpus="elsewhere", direct=True)
    for size in (SMALL, LARGE, 3 * LARGE):
        for device in (0, 1):
            found = rpc.rpc_sync("there", there.device_and_sum, args=(array_of(size, device),))
            assert found == (1 - device, sum_of(size))
    mine = rpc.statistics()
    assert mine["direct_sent"] == mine["direct_staged"] == 4
    assert mine["direct_received"] == 0
    back = rpc.rpc_sync("there", there.give_back, args=(array_of(LARGE),))
    assert (back.device.id, float(back.get().sum())) == (0, sum_of(LARGE))
    nothing_is_taken()


def test_a_device_that_nobody_else_may_read_is_said_to_be_none(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    devices.driver.attributes[GPU_DIRECT_RDMA_SUPPORTED] = 0
    devices.join({0: 1}, gpus="elsewhere", direct=True)
    assert rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE),)) == (
        1,
        sum_of(LARGE),
    )
    assert "gpu_direct: the CUDA driver lets no other device read" in caplog.text
    assert rpc.statistics()["direct_sent"] == 0


def test_a_block_stays_taken_as_long_as_what_stands_for_it(pool: Pool) -> None:
    blocks = DirectBlocks(pool)
    found = blocks.leaving(0, 1 << 20, target=1)
    assert found is not None
    room, block = found
    del found, room
    assert (bytes_of(block), block.number) == (1 << 20, 1)
    assert pool.statistics()["taken"] == 1
    (copy,) = staged([block])
    assert (copy.nbytes, blocks.staged) == (1 << 20, 1)
    del block
    assert pool.statistics()["taken"] == 0


def test_memory_that_a_port_may_write_to_is_not_freed(pool: Pool) -> None:
    blocks = DirectBlocks(pool)
    block = blocks.coming(0, 1 << 20)
    assert block is not None
    number = block.memory.number
    pool.close()
    assert device_memory(number) is block.memory
    assert blocks.leaving(1, 1 << 20, target=0) is None  # it is closed
    driver = runtime.made("cuda")
    assert len(driver.files) == 1
    del block
    free_unused()  # as the next pool does
    assert (device_memory(number), driver.files) == (None, {})


def test_memory_ends_with_its_pool(pool: Pool) -> None:
    block = DirectBlocks(pool).coming(0, 1 << 20)
    assert block is not None
    number, ended = block.memory.number, []

    class Port:
        def forget(self, number: int) -> None:
            ended.append(number)

    port, gone = Port(), Port()
    block.memory.tell_end(port.forget)
    block.memory.tell_end(gone.forget)
    del gone, block
    pool.close()
    assert ended == [number]
    assert device_memory(number) is None


@pytest.mark.parametrize(
    ("device", "nbytes", "support"),
    [
        (2, 1 << 20, READABLE),  # which there is not
        (0, DIRECT_BYTES_MIN - 1, READABLE),
        (0, 1 << 40, READABLE),
        (0, 1 << 20, DirectSupport(is_readable=True, has_dmabuf=False)),
        (0, 1 << 20, DirectSupport(is_readable=False, has_dmabuf=False, is_ordered=True)),
    ],
)
def test_what_may_not_be_read_into_a_device_comes_by_the_host(
    tmp_path: Path, device: int, nbytes: int, support: DirectSupport
) -> None:
    runtime.put("cuda", HostDriver(tmp_path))
    slab = Slab()
    try:
        pool = Pool(slab, direct=[support, support])
        blocks = DirectBlocks(pool)
        assert blocks.coming(device, nbytes) is None
        assert blocks.received == 0
        pool.close()
    finally:
        slab.close()
        runtime.put("cuda", None)


@pytest.mark.parametrize("ordered", [0, 100])
def test_writes_are_flushed_before_they_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: int
) -> None:
    driver = HostDriver(tmp_path)
    driver.attributes = {GPU_DIRECT_RDMA_SUPPORTED: 1, FLUSH_OPTIONS: 1, 118: ordered}
    runtime.put("cuda", driver)
    runtime.put("cuda direct", None)
    slab = Slab()
    try:
        pool = Pool(slab, direct=[READABLE])
        block = DirectBlocks(pool).coming(0, 1 << 20)
        assert isinstance(block, DeviceBlock)
        with source_of(block, None, 1 << 20) as address:
            assert address == block.memory.address
        assert np.array_equal(block.stage(), np.zeros(1 << 20, np.uint8))
        assert driver.flushes == (0 if ordered else 2)  # once for each look
        with (
            pytest.raises(ValueError, match="a tensor of 4 bytes in a block of 1048576"),
            source_of(block, None, 4),
        ):
            pass
        del block
        pool.close()
    finally:
        slab.close()
        runtime.put("cuda", None)
        runtime.put("cuda direct", None)


def test_values_in_its_place_are_refused(pool: Pool) -> None:
    """A peer that lies has arrays and bytes read into a device; they would be the ticket's."""
    archive = Archive()
    for value in (bytes(32 << 10), np.zeros(1 << 20, np.uint8), bytearray(1 << 20)):
        body, blocks = archive.encode(value)
        assert len(blocks) == 1
        block = DirectBlocks(pool).coming(0, 1 << 20)
        assert block is not None
        with pytest.raises(ArchiveError, match="in memory of a device, and no tensor of one"):
            archive.decode(memoryview(body), [block])
        assert not np.asarray(block.base).any()  # of what was in the slab before


def test_a_view_or_a_copy_of_one_is_refused(pool: Pool) -> None:
    block = DirectBlocks(pool).coming(0, 1 << 20)
    assert block is not None
    for make in (block.view, block.copy, lambda: block[1:]):
        with pytest.raises(TypeError, match="is passed on as it is, or staged"):
            make()


def test_a_message_with_one_is_compressed_without_it(pool: Pool) -> None:
    found = DirectBlocks(pool).leaving(0, 1 << 20, target=1)
    assert found is not None
    ones = np.ones(1 << 20, np.uint8)
    _, blocks = compress(
        "zlib", compressor_of("zlib"), DEFAULT_LIMITS, b"x" * 1000, [ones, found[1]]
    )
    assert blocks[2] is found[1]
    assert blocks[1].nbytes < ones.nbytes


def test_a_storage_in_a_pickle_goes_by_the_host(pool: Pool) -> None:
    array = array_on_device(pool)
    with placing(DevicePlacement({0: 1}, direct=DirectBlocks(pool))):
        direct = transfers.send(0, array, 1 << 20, 0)
        apart = transfers.send(0, array, 1 << 20, 0, may_be_direct=False)
    assert (type(direct.block) is DeviceBlock, apart.block.nbytes) == (True, 1 << 20)
    assert type(apart.block) is not DeviceBlock


def array_on_device(pool: Pool) -> int:
    driver = runtime.made("cuda")
    with driver.on(0):
        address: int = driver.allocate(1 << 20)
    return address


def test_a_platform_without_cuda_ipc_has_it(pool: Pool) -> None:
    runtime.made("cuda").has_ipc = False
    blocks = DirectBlocks(pool)
    assert blocks.coming(0, 1 << 20) is not None
    assert blocks.leaving(0, 1 << 20, target=0) is not None


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_device_that_fails_is_told_at_once(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORTS", transports)
    devices.join({0: 1}, gpus="elsewhere", direct=True)
    array = array_of(LARGE)
    assert rpc.rpc_sync("there", there.device_and_sum, args=(array,)) == (1, sum_of(LARGE))
    devices.driver.reaches_host = False
    with pytest.raises(BadArguments, match="cannot be copied to the host: cuMemcpyAsync"):
        rpc.rpc_sync("there", there.device_and_sum, args=(array,), timeout=0)
    assert devices.driver.failed == 1
    devices.driver.reaches_host = True
    assert rpc.rpc_sync("there", there.device_and_sum, args=(array,)) == (1, sum_of(LARGE))


def test_a_driver_that_fails_leaves_the_way_by_the_host(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    devices.driver.says_nothing = True
    devices.join({0: 1}, gpus="elsewhere", direct=True)
    assert "gpu_direct: the CUDA driver does not say: cuDeviceGetAttribute" in caplog.text
    array = array_of(LARGE)
    assert rpc.rpc_sync("there", there.device_and_sum, args=(array,)) == (1, sum_of(LARGE))


def test_a_worker_that_leaves_has_no_rooms_any_more(devices: Devices) -> None:
    devices.join({0: 1}, direct=True)
    slab = default_slab()
    assert slab.device_rooms is not None
    rpc.shutdown(graceful=False)
    assert slab.device_rooms is None
