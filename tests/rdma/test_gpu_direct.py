"""Tensors that an RDMA port reads from one worker's devices into the other's, without the host's
memory. The devices are memory of the host, which the port takes by its address, as it would take a
GPU's where nvidia_peermem is loaded: so all is real here but the GPU. Nothing of it ever ran with
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prpc_engine import remote as rpc
from prpc_engine.cuda.direct import DMA_BUF_SUPPORTED, FLUSH_OPTIONS
from prpc_engine.errors import MaybeExecuted, NotSent
from tests.program import wait_until
from tests.prpc_engine.cuda import functions_there as there
from tests.prpc_engine.cuda.workers import Devices, array_of, nothing_is_taken, sum_of, two_workers

pytestmark = pytest.mark.slow  # at night: test_device_memory.py has the same without workers
LARGE, MIB = 100_000, 1 << 18  # items of 4 bytes


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    monkeypatch.setenv("PRPC_TRANSPORTS", "verbs,tcp")
    with two_workers(tmp_path) as devices:
        yield devices


def figures() -> dict[str, int]:
    """Of both workers: of the one, what it sent and staged; of the other, what it received."""
    mine, its = rpc.statistics(), rpc.rpc_sync("there", there.figures)
    return {
        "sent": mine["direct_sent"],
        "staged": mine["direct_staged"],
        "received": its["direct_received"],
    }


def test_arrays_go_from_device_to_device_and_to_the_host_where_none_may_be_written(
    devices: Devices,
) -> None:
    """All in one group: each worker takes the emulated machine half a minute."""
    devices.driver.attributes[FLUSH_OPTIONS] = 0  # so ours are read, and not written to
    program = devices.join({0: 1, 1: 0}, gpus="elsewhere", direct=True)
    for _ in range(3):
        for size in (LARGE, MIB):
            for device in (0, 1):
                array = array_of(size, device)
                found = rpc.rpc_sync("there", there.device_and_sum, args=(array,))
                assert found == (1 - device, sum_of(size))
    assert figures() == {"sent": 12, "staged": 0, "received": 12}
    back = rpc.rpc_sync("there", there.give_back, args=(array_of(MIB),))
    assert (back.device.id, float(back.get().sum())) == (0, sum_of(MIB))
    its = rpc.rpc_sync("there", there.figures)
    assert (its["direct_sent"], its["direct_staged"]) == (1, 0)
    assert rpc.statistics()["direct_received"] == 0
    del back, array
    nothing_is_taken()

    calls = [
        rpc.rpc_async("there", there.give_back_when_told, args=(array_of(4 * MIB),))
        for _ in range(4)
    ]
    wait_until(lambda: rpc.statistics()["direct_sent"] == 17, "the arrays' being sent")
    program.kill()
    for call in calls:
        with pytest.raises((MaybeExecuted, NotSent)):
            call.wait()
    del calls, call
    wait_until(lambda: rpc.statistics()["device_taken"] == 0, "every block's coming back")


def test_a_port_that_registers_no_dma_buf_takes_addresses(devices: Devices) -> None:
    """Soft RoCE is one."""
    devices.driver.attributes[DMA_BUF_SUPPORTED] = 1
    devices.join({0: 1}, gpus="elsewhere", direct=True)
    for _ in range(3):
        found = rpc.rpc_sync("there", there.device_and_sum, args=(array_of(LARGE),))
        assert found == (1, sum_of(LARGE))
    assert figures() == {"sent": 3, "staged": 0, "received": 3}
    nothing_is_taken()
