"""Two containers of one host: what they share decides how they talk, and calls are right either
way.

the server has its own        they talk over
/dev/shm                      shared memory: segments are handed over as descriptors
/dev/shm without room         Unix sockets
process and mount namespaces  shared memory
network namespace             tcp
a ban on shared memory        Unix sockets, whatever else but the network it has of its own
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from prpc_engine import Master, RpcService
from tests.network.namespaces import Network, network_or_skip
from tests.network.server import NAME, SECRET, Serving, checksum, pattern
from tests.prpc_engine.processes import PATIENCE_S

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"),
        reason="makes namespaces: needs root, unshare and ip",
    ),
]


OWN_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"'
CONTAINERS = {
    "its own /dev/shm": ["unshare", "--mount", "sh", "-c", OWN_SHM],
    "its own processes": ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"],
    "its own names": ["unshare", "--mount", "--uts", "--ipc", "--cgroup"],
}


def way_of_calls(service: RpcService, master: Master) -> str:
    """Make calls of every kind; how they went."""
    with service.create_client(NAME, 1, PATIENCE_S) as client:
        for number, nbytes in enumerate((0, 100, 100_000, 5_000_000)):
            sent = pattern(number, nbytes)
            crc, back = client.call("checked", sent, timeout_s=PATIENCE_S)
            assert crc == checksum(sent) == checksum(back)
    (way,) = [
        text for address, text in service.transports.items() if address != f"tcp://{master.address}"
    ]
    return way


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_of_one_network_share_memory_whatever_else_they_have_of_their_own(
    container: str,
) -> None:
    with (
        Master(secret=SECRET) as master,
        Serving(CONTAINERS[container], 1, master.address),
        RpcService(master.address, secret=SECRET) as service,
    ):
        way = way_of_calls(service, master)
    assert way.startswith("shm to shm://"), way


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_of_one_network_that_may_not_share_memory_talk_over_unix_sockets(
    container: str,
) -> None:
    with (
        Master(secret=SECRET) as master,
        Serving(["env", "PRPC_TRANSPORTS=unix,tcp", *CONTAINERS[container]], 1, master.address),
        RpcService(master.address, secret=SECRET) as service,
    ):
        way = way_of_calls(service, master)
    assert way.startswith("unix to unix://process "), way
    assert "; shm: not offered by tcp://" in way


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip(2) as made:
        yield made


def test_containers_of_different_networks_talk_over_tcp_and_say_why(network: Network) -> None:
    here = f"{network.address(1)}:0"
    with (
        Master(here, secret=SECRET) as master,
        Serving(network.prefix(2), 1, master.address, bind=f"{network.address(2)}:0"),
        RpcService(master.address, bind=here, secret=SECRET) as service,
    ):
        way = way_of_calls(service, master)
    assert way.startswith(f"tcp to tcp://{network.address(2)}:")
    assert way.endswith(
        "; shm: another host or network namespace; unix: another host or network namespace"
    )
