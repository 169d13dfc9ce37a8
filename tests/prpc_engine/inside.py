"""Where tests reach behind the faces of prpc_engine: what moves inside is followed here.

A test that needs one of these holds a thread between two steps, breaks a connection, or looks for
what must not stay. What a public verb says, a test asks that (tests/prpc_engine/seen.py).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from prpc_engine import RpcService
from shard import Connection, RemoteProtocolError, run_blocking
from shard.memory.ring import TAIL_WORD
from shard.transport.shm_connection import ShmConnection
from shard.transport.socket_lane import SocketLane

if TYPE_CHECKING:
    from prpc_engine import Master, RpcClient
    from prpc_engine.client.directory import Directory
    from prpc_engine.client.dispatcher import Dispatcher
    from prpc_engine.client.route import Route
    from prpc_engine.kv import ElasticServer, TableWorker
    from prpc_engine.kv.client.partition_client import PartitionRequest
    from prpc_engine.kv.replication.replica import Replica
    from prpc_engine.kv.schema.placement import Placement
    from prpc_engine.master.backend import Backend
    from prpc_engine.master.client import MasterClient
    from prpc_engine.master.registry import Registry, ServerEntry
    from prpc_engine.master.session import MasterSession
    from prpc_engine.master.watch import Watches
    from prpc_engine.node.attempts import PeerAttempt
    from prpc_engine.node.node import Node
    from prpc_engine.rpc.peer import Peer


def node_of(owner: RpcService | Master) -> Node:
    """Its connections, its reactor, and what it serves."""
    return owner._node


async def nap(service: RpcService, seconds: float) -> None:
    """A handler waits and keeps nobody waiting."""
    await node_of(service).reactor.sleep(seconds)


def peers_by_address(node: Node) -> dict[str, Peer]:
    """Whom it has connected to, by the first address of each."""
    return node._peers


def accepted_by(node: Node) -> set[Peer]:
    """Those that have connected to it."""
    return node._accepted


def attempts_of(node: Node) -> dict[str, PeerAttempt]:
    """Those under way to connect, by the first address of each."""
    return node._attempts._under_way


def registry_of(master: Master) -> Registry:
    """What it knows of sessions, nodes and servers."""
    return master._methods._registry


def make_unreadable(connection: Connection[Any], end: str) -> None:
    """Bytes that cannot be, for this side ("here") to find or for the other ("there")."""
    if isinstance(connection, ShmConnection):
        words = connection._incoming_words if end == "here" else connection._outgoing_words
        words[TAIL_WORD] += 1 << 40  # more than a ring holds
        if end == "there":
            connection.notes.ring()
    elif end == "here":
        connection.close(RemoteProtocolError("bytes that are no frame"))
    else:
        socket_of(connection).send(b"\xff" * 64)


def socket_of(connection: Connection[Any]) -> socket.socket:
    """Over which it speaks, one lane long."""
    assert isinstance(connection, SocketLane)
    return connection.sock


@contextmanager
def numbered(peer: Peer, call_id: int) -> Iterator[None]:
    """Calls that it sends meanwhile have that number, as they had elsewhere."""
    usual, peer._next_id = peer._next_id, lambda: call_id
    yield
    peer._next_id = usual


def is_guarded(node: Node) -> bool:
    """Whether a thread may be changing whom it has connected to."""
    return node._guard.locked()


def leave_soon(node: Node, peer: Peer) -> None:
    """It hangs up on that peer, as when a better path may be there."""
    node.reactor.call_soon(lambda: node._leave_later(peer, 0.0))


def routes_of(client: RpcClient) -> dict[int, Route]:
    """The way to each server, by server id."""
    return client._routes


def directory_of(client: RpcClient) -> Directory:
    """What knows the servers of its service."""
    return client._directory


def dispatcher_of(client: RpcClient) -> Dispatcher:
    """What sends the calls that cannot leave at once."""
    return client._dispatcher


def backend_of(client: MasterClient) -> Backend:
    """Of its verbs."""
    return client._backend


def session_of(owner: RpcService | MasterClient) -> MasterSession:
    """With the master."""
    return owner._session if isinstance(owner, RpcService) else owner._backend._session


def watches_of(client: MasterClient) -> Watches:
    """Those of a client with a connection of its own."""
    return client._backend._watches


def looks_up(
    lookup: Callable[[], list[ServerEntry]],
) -> Callable[[], Coroutine[Any, Any, list[ServerEntry]]]:
    """A client asks this who serves now; it may block."""

    async def look() -> list[ServerEntry]:
        found: list[ServerEntry] = await run_blocking(lookup)
        return found

    return look


def entries_of(
    service: RpcService, name: str, expected: int, timeout_s: float
) -> list[ServerEntry]:
    """What the master says of a service's servers, once there are so many."""
    return service._lookup(name, expected, timeout_s)


def hosted_by(server: ElasticServer) -> dict[int, Replica]:
    """The partitions that it holds now, in any role."""
    return server._host.hosted


def placement_of(server: ElasticServer) -> Placement | None:
    """As it has read it last."""
    return server._reconciler.placement


def push_part(
    worker: TableWorker, index: int, table: str, *arrays: NDArray[Any], timeout_s: float = 30.0
) -> PartitionRequest:
    """A push to a sparse table that comes to one partition alone."""
    asked = worker._catalog.layouts[table].asked
    return worker._lanes[index].push("push", timeout_s, asked, *arrays)
