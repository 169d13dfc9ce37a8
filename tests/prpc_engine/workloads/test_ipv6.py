"""All over IPv6: the master, the addresses that nodes tell each other, and the calls."""

from __future__ import annotations

import socket

import pytest

from prpc_engine import Master, RpcService
from tests.prpc_engine.workloads.pattern import mixed
from tests.prpc_engine.workloads.servers import Works


def has_ipv6() -> bool:
    """Whether this machine has a loopback address of that kind."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_a_job_lives_on_ipv6_alone() -> None:
    with (
        Master("[::1]:0") as master,
        RpcService(master.address, bind="[::1]:0", transports=["tcp"]) as ours,
        RpcService(master.address, bind="[::1]:0", transports=["tcp"]) as theirs,
    ):
        ours.create_server("six", Works(ours))
        with theirs.create_client("six") as client:
            assert client.call("mix", 6) == mixed(6)
        assert master.address.startswith("[::1]:")
        nodes = theirs.master_client.get_comm_info()
        assert len(nodes) == 2
        for node in nodes:
            assert any(address.startswith("tcp://[::1]:") for address in node.addresses)
