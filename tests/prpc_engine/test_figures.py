"""Figures against loads that are known: bytes of connections that are over, and how a client's
calls ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from prpc_engine import HedgePolicy, Master, RpcClient, RpcService, errors, idempotent, metrics
from prpc_engine.client.call_figures import SAMPLE_EVERY
from prpc_engine.service.shard_statistics import NodeFigures
from tests.prpc_engine.handlers import Handlers
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until


def totals(figures: NodeFigures, transport: str) -> tuple[int, int, int]:
    """Requests, bytes sent and bytes received of all connections over it there ever were."""
    every = [one for one in figures.peers if one.transport == transport]
    ended = [one for name, one in figures.ended.items() if name == transport]
    traffic = [one.traffic for one in every] + [one.traffic for one in ended]
    requests = sum(one.requests for one in every) + sum(one.requests for one in ended)
    return (
        requests,
        sum(one.bytes_sent for one in traffic),
        sum(one.bytes_received for one in traffic),
    )


@pytest.mark.parametrize("transport", ["unix", "shm"])  # over tcp there is the master, too
def test_bytes_of_connections_that_are_over_count_to_the_last_one(transport: str) -> None:
    registry = CollectorRegistry()
    with Master() as master, RpcService(master=master.address, transports=[transport]) as there:
        metrics.register(there, registry)
        there.create_server("there", {"take": len})
        before = totals(there.statistics(), transport)
        for number in range(3):
            with RpcService(master=master.address, transports=[transport]) as caller:
                # not by memory
                node_of(caller)._transports = [
                    one for one in node_of(caller)._transports if one.scheme == transport
                ]
                client = caller.create_client("there")
                for _ in range(20):
                    assert client.call("take", bytes(100_000)) == 100_000
            wait_until(
                lambda seen=number: ended_connections(there, transport) == seen + 1,
                "the end of its connection",
            )
            requests, sent, received = totals(NodeFigures.of(node_of(caller)), transport)
            now = totals(there.statistics(), transport)
            assert requests == 20
            assert received <= now[1] - before[1]  # the last words of a connection may be unread
            assert now[2] - before[2] == sent
            before = now
        labels = {"transport": transport, "shard": ""}
        assert (
            registry.get_sample_value("prpc_transport_received_bytes_total", labels)
            == before[2]
            > 6_000_000
        )
        assert registry.get_sample_value("prpc_transport_sent_bytes_total", labels) == before[1]
        assert registry.get_sample_value("prpc_transport_connections_ended_total", labels) == 3


def ended_connections(service: RpcService, transport: str) -> int:
    ended = service.statistics().ended.get(transport)
    return 0 if ended is None else ended.connections


class World(NamedTuple):
    service: RpcService
    client: RpcClient


@pytest.fixture
def world() -> Iterator[World]:
    with Master() as master, RpcService(master=master.address) as service:
        service.create_server("a", Handlers(service))
        yield World(service, service.create_client("a"))


def test_a_client_knows_how_many_calls_it_made_and_how_they_ended(world: World) -> None:
    client, registry = world.client, CollectorRegistry()
    metrics.register(world.service, registry)
    for number in range(150):
        assert client.call("echo", number) == number
    for number in range(50):
        assert client.call_to(0, "echo", number) == number
    assert list(client.stream("rows", 3)) == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(errors.UnknownMethod):
            client.call("no_such_method")
    for _ in range(2):
        with pytest.raises(errors.RemoteError):
            client.call_to(0, "boom", "x")
    for _ in range(4):
        with pytest.raises(errors.DeadlineExceeded):
            client.call("nap", PATIENCE_S, timeout_s=0.01)
    with pytest.raises(errors.NoServer):
        client.call_to(7, "echo", 1)
    with pytest.raises(errors.BadArguments):
        client.call("echo", object())
    found = client.statistics()
    assert found.calls == 150 + 50 + 1 + 3 + 2 + 4 + 1 + 1
    assert found.errors == {
        "BadArguments": 1,
        "DeadlineExceeded": 4,
        "NoServer": 1,
        "RemoteError": 2,
        "UnknownMethod": 3,
    }
    assert found.timeouts == 4
    labels = {"service": "a", "client": "1"}
    assert registry.get_sample_value("prpc_client_calls_total", labels) == found.calls
    assert registry.get_sample_value("prpc_client_timeouts_total", labels) == 4
    assert (
        registry.get_sample_value("prpc_client_errors_total", {**labels, "error": "RemoteError"})
        == 2
    )
    assert (
        registry.get_sample_value("prpc_client_call_seconds_count", labels) == found.latency.calls
    )


def test_one_answered_call_in_so_many_is_timed(world: World) -> None:
    for number in range(5 * SAMPLE_EVERY):
        world.client.call("echo", number)
    assert world.client.statistics().latency.calls == 5
    world.client.submit("nap", 0.05).result()  # the next one that is timed
    wait_until(lambda: world.client.statistics().latency.calls == 6, "its time")
    latency = world.client.statistics().latency
    assert sum(latency.buckets[25:]) >= 1  # of 2**24 ns and more
    assert latency.total_s >= 0.05


def test_a_hedge_that_lost_is_no_failed_call() -> None:
    class Slow:
        @idempotent
        async def nap(self, seconds: float) -> str:
            return await Handlers.nap(handlers, seconds)

    with Master() as master, RpcService(master=master.address) as service:
        handlers = Handlers(service)
        for _ in range(2):
            service.create_server("slow", Slow())
        client = service.create_client("slow", 2, hedge=HedgePolicy(delay_s=0.01))
        for _ in range(5):
            client.call("nap", 0.05)
        found = client.statistics()
        assert found.hedges >= 1
        assert (found.calls, found.errors) == (5, {})
