"""What runs inside the shard processes of an RpcService: a node of its own, and the servers it is told to make.

These functions are sent by the application over its lane to each shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prpc_engine import slab
from prpc_engine.master import MASTER_ROUTE
from prpc_engine.message import method_key
from prpc_engine.node import Node
from prpc_engine.server import Server
from shard import Limits, ShardError, this_shard

CONNECT_TIMEOUT_S = 5.0
MASTER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ShardSettings:
    """What a shard must know to take part in the job."""

    master: str
    rank: int
    secret: bytes
    limits: Limits
    transports: tuple[str, ...]
    host: str


class _ShardNode:
    """The node of this shard and its master."""

    def __init__(self, settings: ShardSettings) -> None:
        shard = this_shard()
        slab.use_slab(shard.slab)
        self._settings = settings
        self.node = Node(shard.reactor, None, shard.slab, settings.secret, settings.limits, settings.transports, settings.host, 0)
        shard.at_stop(self.node.close)

    async def ask_master(self, method: str, *args: Any) -> Any:
        """Call the master without blocking the shard."""
        peer = self.node.master_peer(self._settings.master, CONNECT_TIMEOUT_S)
        return await peer.request(MASTER_ROUTE, method, method_key(method), args, MASTER_TIMEOUT_S, False)


_node: _ShardNode | None = None


async def open_shard(settings: ShardSettings) -> None:
    """Make this shard's node and join the job as part of the rank it belongs to."""
    global _node
    _node = _ShardNode(settings)
    await _node.ask_master("join", _node.node.addresses, settings.rank)


def _here() -> _ShardNode:
    if _node is None:
        raise ShardError("open_shard() comes first")
    return _node


async def serve_in_shard(name: str, factory: Callable[[], object], server_id: int) -> tuple[int, int]:
    """Make an instance and serve it: (server id, target)."""
    here = _here()
    served = factory()
    Server(name, server_id, 0, served)  # refuse a bad object before the master hears of it
    server_id, target = await here.ask_master("register_server", name, server_id)
    here.node.servers[target] = Server(name, server_id, target, served)
    return server_id, target


async def stop_serving_in_shard(targets: tuple[int, ...]) -> None:
    """Forget those of the servers that live here."""
    here = _here()
    for target in targets:
        if here.node.servers.pop(target, None) is not None:
            await here.ask_master("deregister_server", target)
