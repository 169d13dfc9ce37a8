"""Processes with little address space (`ulimit -v`): an array that cannot be mapped is copied, and
one that finds no room at all ends its own call, by name, and nothing else."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcClient, RpcService, errors
from tests.prpc_engine.inside import routes_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_connected

MIB = 1 << 20
# for an array of 20 MB, and not for the segment of 64 MiB that it lies in, nor for one of 80 MB
ROOM_BYTES = 50 * MIB
FITS, TOO_LARGE = 5_000_000, 20_000_000  # float32
NO_MEMORY = "no memory for an array of 80000000 bytes.*ulimit -v"


def limit_address_space(pid: int) -> None:
    """To what the process has now and ROOM_BYTES."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(
        pid,
        resource.RLIMIT_AS,
        (pages * resource.getpagesize() + ROOM_BYTES, resource.RLIM_INFINITY),
    )


def last_of(client: RpcClient, count: int, value: float) -> float:
    answer: tuple[float, float] = client.call(
        "first_and_last", np.full(count, value, np.float32), timeout_s=PATIENCE_S
    )
    return answer[1]


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_server_that_can_map_no_more_gets_the_bytes_and_names_what_it_has_no_memory_for(
    master: Master, transport: str
) -> None:
    with (
        ServerProcess(master.address, "small", transport) as server,
        RpcService(master=master.address, transports=[transport]) as service,
    ):
        client = service.create_client("small")
        assert client.call("add", 1) == 11
        wait_connected(client)
        limit_address_space(server.pid)
        (peer,) = {route.peer for route in routes_of(client).values()}
        for number in range(3):
            assert last_of(client, FITS, number) == number
        waiting = client.submit("nap", 0.2)
        for method in ("first_and_last", "echo_async"):
            with pytest.raises(errors.BadArguments, match=NO_MEMORY):
                client.call(method, np.ones(TOO_LARGE, np.float32), timeout_s=PATIENCE_S)
            assert client.call("add", 1) == 11
        assert waiting.result(PATIENCE_S)
        assert last_of(client, FITS, 7) == 7
        assert {route.peer for route in routes_of(client).values()} == {peer}, (
            "over the very connection"
        )


def test_an_answer_that_a_client_has_no_memory_for_ends_its_call_alone(master: Master) -> None:
    with (
        ServerProcess(master.address, "large", "shm"),
        ServerProcess(master.address, "small", "shm") as small,
        RpcService(master=master.address, transports=["shm"]) as service,
    ):
        client = service.create_client("small")
        assert client.call("relay", "large", "add", 1) == 11
        limit_address_space(small.pid)
        with pytest.raises(
            errors.RemoteError, match=f"the answer to 'shared'.* cannot be read: .*{NO_MEMORY}"
        ):
            client.call("relay", "large", "shared", TOO_LARGE, timeout_s=PATIENCE_S)
        assert client.call("relay", "large", "add", 1) == 11
        assert (
            client.call(
                "relay",
                "large",
                "first_and_last",
                np.full(FITS, 3, np.float32),
                timeout_s=PATIENCE_S,
            )[1]
            == 3
        )


def test_a_slab_that_cannot_be_mapped_is_shm_full_for_empty_and_a_detour_for_others(
    master: Master,
) -> None:
    with (
        ServerProcess(master.address, "small", "shm") as server,
        RpcService(master=master.address, transports=["shm"]) as service,
    ):
        client = service.create_client("small")
        assert client.call("add", 1) == 11
        limit_address_space(server.pid)
        with pytest.raises(
            errors.RemoteError, match=r"segment of 80.0 MiB cannot be mapped.*RLIMIT_AS.*ulimit -v"
        ) as raised:
            client.call("shared", TOO_LARGE, timeout_s=PATIENCE_S)
        assert raised.value.type_name.endswith("ShmFull")
        doubled = client.call("double", np.full(3_000_000, 4, np.float32), timeout_s=PATIENCE_S)
        assert (doubled == 8).all()
