"""A process that lost its lease at the master is dead or stopped: calls to it end then. One whose
handlers take longer than its lease is neither.

    python -m tests.prpc_engine.test_lost_leases MASTER TRANSPORT

serves Busy under "busy" and another server beside it with a lease of LEASE_S; closes the latter
when it reads "close", and ends with its standard input.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prpc_engine import Call, Master, RetryPolicy, RpcClient, RpcService
from prpc_engine.errors import MaybeExecuted, NoServer, NotSent
from prpc_engine.master.client import TreeEvent
from shard import sleep
from tests.program import PATIENCE_S, Program, halt, wait_until
from tests.prpc_engine import seen

LEASE_S = 2.0
LONGER_S = 1.5 * LEASE_S
TIMEOUT_S = 600.0  # no test waits for that
WAITING = 1000
# fails, and is not sent again: what becomes of it then is another matter (test_failover.py)
AT_ONCE = RetryPolicy(unsent_max=1)
TRANSPORTS = ["shm", "tcp"]
PIECE = bytes(8192)  # some hundred fill a ring, or the sockets' buffers, long before a lease ends


class Busy:
    """Handlers that take long, in three ways."""

    async def wait(self) -> None:
        await sleep(TIMEOUT_S)

    def sleep(self) -> str:
        time.sleep(LONGER_S)
        return "slept"

    def compute(self) -> str:
        until = time.monotonic() + LONGER_S
        while time.monotonic() < until:
            pass
        return "computed"

    def take(self, piece: bytes) -> None:
        """What fills rings and sockets."""


class World:
    """A server, this process that calls it, and what the master says of members that go."""

    def __init__(self, service: RpcService, server: Program) -> None:
        self.service = service
        self.server = server
        self.told: queue.SimpleQueue[TreeEvent] = queue.SimpleQueue()
        service.master_client.watch_node(self.told.put)
        self.client: RpcClient = service.create_client("busy", timeout_s=PATIENCE_S, retry=AT_ONCE)
        assert self.client.server_ids == (0,)

    def departures(self) -> list[str]:
        events = [self.told.get_nowait() for _ in range(self.told.qsize())]
        return [event.path for event in events if event.value is None]

    def fill(self) -> list[Call]:
        """Call until messages wait here for the server to read, more than kernels take."""
        calls: list[Call] = []
        while sum(peer.outbox_messages for peer in self.service.statistics().peers) < WAITING:
            calls.append(self.client.submit("take", PIECE, timeout_s=TIMEOUT_S))
            assert not calls[-1].done(), "its lease has ended before"
        return calls


@contextmanager
def world(master: Master, transport: str) -> Iterator[World]:
    with RpcService(master=master.address, transports=["shm", "tcp"]) as service:
        server = Program("tests.prpc_engine.test_lost_leases", master.address, transport)
        try:
            assert server.read_line() == "ready"
            yield World(service, server)
        finally:
            server.process.send_signal(signal.SIGCONT)
            server.end()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_to_a_stopped_process_end_soon_after_its_lease(
    master: Master, transport: str
) -> None:
    with world(master, transport) as here:
        client = here.client
        begun = [client.submit("wait", timeout_s=TIMEOUT_S) for _ in range(3)]
        stream = client.stream("wait", timeout_s=TIMEOUT_S)
        wait_until(lambda: client.health()[0]["tasks"] == 4, "the calls, at their server")
        halt(here.server.pid)
        sent = here.fill()
        for call in begun:
            with pytest.raises(
                MaybeExecuted, match=r"the lease of .* has ended, and it answers nothing"
            ):
                call.result(PATIENCE_S)
        with pytest.raises(MaybeExecuted, match=r"the lease of .* has ended"):
            stream.result()
        ended = [call.error(PATIENCE_S) for call in sent]
        assert all(isinstance(error, MaybeExecuted | NotSent) for error in ended)
        assert isinstance(ended[0], MaybeExecuted)
        assert isinstance(ended[-1], NotSent)
        assert "/_node_/1" in here.departures()
        with pytest.raises(NoServer):
            client.call("wait", timeout_s=TIMEOUT_S)
        here.server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: client.server_ids == (0,), "the server, that joins anew")
        client.call("take", PIECE, timeout_s=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("method", "answer"), [("sleep", "slept"), ("compute", "computed")])
def test_a_handler_that_takes_longer_than_the_lease_costs_neither_lease_nor_call(
    master: Master, transport: str, method: str, answer: str
) -> None:
    with world(master, transport) as here:
        task = here.client.submit("wait", timeout_s=TIMEOUT_S)
        assert here.client.call(method, timeout_s=PATIENCE_S) == answer
        assert here.departures() == []
        assert not task.done()
        task.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_closed_beside_a_handler_that_blocks_costs_no_call(
    master: Master, transport: str
) -> None:
    with world(master, transport) as here:
        beside = here.service.create_client("beside", timeout_s=PATIENCE_S)
        assert beside.call("same", 1) == 1
        call = here.client.submit("sleep", timeout_s=PATIENCE_S)
        here.server.write_line("close")
        wait_until(lambda: beside.server_ids == (), "the end of the other server")
        assert call.result() == "slept"
        assert seen.ranks(here.service) == [0, 1]


def main(master: str, transport: str) -> None:
    """What the process runs."""
    with RpcService(master=master, lease_s=LEASE_S, transports=[transport]) as service:
        service.create_server("busy", Busy())
        beside = service.create_server("beside", {"same": lambda value: value})
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "close":
                beside.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
