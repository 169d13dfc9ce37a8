"""Where tests reach behind the faces of prpc_engine: what moves inside is followed here.

A test that needs one of these holds a thread between two steps, breaks a connection, or looks for
what must not stay. What a public verb says, a test asks that (tests/prpc_engine/seen.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from prpc_engine import RpcService
from shard import run_blocking

if TYPE_CHECKING:
    from prpc_engine import Master, RpcClient
    from prpc_engine.client.dispatcher import Dispatcher
    from prpc_engine.client.route import Route
    from prpc_engine.master.backend import Backend
    from prpc_engine.master.client import MasterClient
    from prpc_engine.master.registry import ServerEntry
    from prpc_engine.master.session import MasterSession
    from prpc_engine.master.watch import Watches
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


def routes_of(client: RpcClient) -> dict[int, Route]:
    """The way to each server, by server id."""
    return client._routes


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
