"""Where tests reach into connections over verbs."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

from prpc_engine import Master, RpcClient, RpcService
from shard.transport.verbs_connection import VerbsConnection
from tests.prpc_engine.inside import node_of, peers_by_address, session_of
from tests.prpc_engine.processes import PATIENCE_S
from tests.transport_contract import Side

# of the tests that make many: here a tenth of what .ci/nightly does
CALLS = int(os.environ.get("PRPC_TEST_RDMA_CALLS") or 1000)


@contextlib.contextmanager
def client_of(
    master: Master, name: str = "test", transports: tuple[str, ...] = ("verbs",), **settings: Any
) -> Iterator[tuple[RpcService, RpcClient]]:
    with RpcService(master=master.address, transports=transports, **settings) as service:
        yield service, service.create_client(name, timeout_s=PATIENCE_S)


def transports_of(service: RpcService) -> set[str]:
    """Over which the server is reached; the master is another node."""
    return {
        peer.transport
        for peer in service.statistics().peers
        if peer.choice is not None and not peer.choice.node.endswith(session_of(service).address)
    }


def verbs_of(side: Side) -> VerbsConnection:
    """A side's connection, as what it is."""
    assert isinstance(side.connection, VerbsConnection)
    return side.connection


def connections_of(service: RpcService) -> list[VerbsConnection]:
    """Those that it made, over verbs, and that are there now."""
    return [
        peer.connection
        for peer in list(peers_by_address(node_of(service)).values())
        if isinstance(peer.connection, VerbsConnection) and peer.connection.error is None
    ]


def connection_of(service: RpcService) -> VerbsConnection:
    """That to the one server."""
    (connection,) = connections_of(service)
    return connection


def fail(connection: VerbsConnection) -> None:
    """As a device does: the queue pair is in error, and what it had is flushed."""
    attributes = importlib.import_module("pyverbs.qp").QPAttr(qp_state=6)  # IBV_QPS_ERR
    connection._queue._pair.modify(attributes, 1)  # IBV_QP_STATE


def registrations_of(connection: VerbsConnection) -> int:
    """Of memory, since its device was opened."""
    return sum(rail.registrations for rail in connection.rails())


def under_way(connection: VerbsConnection) -> tuple[int, int, int]:
    """Messages that wait for a slot, and arrays and bytes that are still to be read."""
    arrivals = connection._arrivals
    return connection.outbox_messages, arrivals.arrays_waiting, arrivals.bytes_waiting
