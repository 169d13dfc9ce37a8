"""Paths that fail while calls are in flight, whoever made the connection and at whichever end it
breaks (rows of paths.py).
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import MaybeExecuted, RemoteError
from shard import Connection
from tests.prpc_engine.inside import accepted_by, make_unreadable, node_of, peers_by_address
from tests.prpc_engine.processes import PATIENCE_S, ROOT, ServerProcess, wait_until
from tests.shard.small_memory import run_with_memory


def connection_of(service: RpcService, who_connected: str) -> Connection[Any]:
    """Between us and the other process: the one that we made, or the one that it made."""
    node = node_of(service)
    if who_connected == "we":
        (peer,) = [
            peer for first, peer in peers_by_address(node).items() if first.startswith("memory://")
        ]
    else:
        (peer,) = accepted_by(node)
    return peer.connection


def in_flight(service: RpcService, count: int) -> bool:
    return sum(peer.in_flight for peer in service.statistics().peers) >= count


@pytest.mark.parametrize("end", ["here", "there"])
@pytest.mark.parametrize("who_connected", ["we", "they"])
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_connection_that_breaks_ends_its_own_calls_and_both_sides_go_on_over_a_new_one(
    master: Master, transport: str, who_connected: str, end: str
) -> None:
    with (
        ServerProcess(master.address, "there", transport),
        RpcService(master=master.address, transports=[transport]) as service,
    ):
        service.create_server("here", {"echo": lambda value: value, "nap": never(service)})
        client = service.create_client("there", timeout_s=PATIENCE_S)
        assert client.call("relay_async", "here", "echo", 1, timeout_s=PATIENCE_S) == 1
        ours = client.submit("nap", 3600.0, timeout_s=None)
        theirs = client.submit("relay_async", "here", "nap", timeout_s=None)
        wait_until(lambda: service.statistics().servers["here/0"].tasks == 1, "their call")
        connection = connection_of(service, who_connected)
        assert connection.transport == transport
        node_of(service).reactor.call_soon(lambda: make_unreadable(connection, end))
        if who_connected == "we":
            assert [type(call.error(PATIENCE_S)) for call in (ours, theirs)] == [
                MaybeExecuted,
                MaybeExecuted,
            ]
        else:
            error = theirs.error(PATIENCE_S)
            assert isinstance(error, RemoteError)
            assert error.type_name.endswith("MaybeExecuted")
            assert not ours.done(), "it went over the other connection"
        wait_until(lambda: connection.error is not None, "the loss")
        assert client.call("relay_async", "here", "echo", 2, timeout_s=PATIENCE_S) == 2
        again = connection_of(service, who_connected)
        assert again is not connection
        assert again.transport == transport, "one failure is chance: the path keeps its place"


def never(service: RpcService) -> Any:
    async def nap() -> None:
        await node_of(service).reactor.sleep(3600.0)

    return nap


MAPLESS = """
from prpc_engine import RpcService
from shard.memory.segment import Segment

attach = Segment.attach

def refuse(*args, **kwargs):
    raise OSError(24, "Too many open files")

def let(may):
    Segment.attach = attach if may else refuse

with RpcService({master!r}) as service:
    service.create_server("test", {{"let": let, "double": lambda array: 2 * array}})
    print("ready", flush=True)
    input()
"""


def test_a_request_whose_segment_the_server_cannot_map_is_copied_over_the_same_connection(
    master: Master,
) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", MAPLESS.format(master=master.address)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as server,
        RpcService(master.address) as service,
    ):
        client: RpcClient = service.create_client("test", timeout_s=PATIENCE_S)
        client.call("let", False)
        choice = service.transports
        assert client.call("double", np.ones(100_000), timeout_s=PATIENCE_S).sum() == 200_000
        assert client.call("let", True, timeout_s=PATIENCE_S) is None
        assert client.call("double", np.ones(100_000), timeout_s=PATIENCE_S).sum() == 200_000
        assert service.transports == choice
        server.communicate(b"\n", PATIENCE_S)


@pytest.mark.slow
def test_memory_taken_away_while_they_talk_costs_only_what_needs_more_and_by_name() -> None:
    """What is mapped stays: the rings, and the blocks that are there; a larger array takes the
    socket.
    """
    run_with_memory(
        64 << 20,
        """
import numpy as np
import prpc_engine
from prpc_engine import Master, RpcService
from shard import ShmFull

if __name__ == "__main__":
    with Master() as master, RpcService(master.address, transports=["shm"]) as one:
        one.create_server("test", {"double": lambda value: 2 * value})
        with RpcService(master.address, transports=["shm"]) as two:
            client = two.create_client("test")
            assert client.call("double", 1) == 2
            bound_memory(4096)
            for number in range(100):
                assert client.call("double", number, timeout_s=20.0) == 2 * number
            doubled = client.call("double", np.ones(1_000_000), timeout_s=20.0)
            assert doubled.sum() == 2_000_000, "over a socket"
            try:
                prpc_engine.empty(1_000_000)
            except ShmFull as error:
                assert "no memory for a segment" in str(error), error
            else:
                raise AssertionError("it had room")
            bound_memory(64 << 20)
            assert client.call("double", np.ones(1_000_000), timeout_s=20.0).sum() == 2_000_000
""",
    )
