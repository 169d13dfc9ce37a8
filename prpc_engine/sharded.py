"""What runs inside the shard processes of an RpcService: a node of its own, and the servers it is told to make.

These functions are sent by the application over its lane to each shard.

Each shard has a port of its own. A server's id is that of one instance, in one shard, and its clients go there directly. Behind
one port (shard/transport/shared_port.py, as a cluster's tasks have it) a client's one connection ends at one shard, and each call
for the others' instances, or for servers of the application, would go through a second process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prpc_engine import errors, slab
from prpc_engine.address import Address
from prpc_engine.allow import AllowList
from prpc_engine.config import TlsSettings
from prpc_engine.master.session import MasterSession
from prpc_engine.node import Node, Values
from prpc_engine.server import Bounds, Server
from prpc_engine.shard_figures import NodeFigures
from prpc_engine.timing import Timing
from shard import Limits, ShardError, this_shard


@dataclass(frozen=True)
class ShardSettings:
    """What a shard must know to take part in the job."""

    master: str
    rank: int
    secret: bytes = field(repr=False)
    limits: Limits
    transports: tuple[str, ...]
    host: str
    tls: TlsSettings | None
    allow: AllowList
    values: Values
    lease_s: float
    root: str
    timing: Timing | None
    advertise: Address | None  # the node's: its port is not ours


class _ShardNode:
    """The node of this shard and its master."""

    def __init__(self, settings: ShardSettings) -> None:
        shard = this_shard()
        slab.use_slab(shard.slab)
        self.settings = settings
        self.node = Node(
            shard.reactor,
            None,
            shard.slab,
            settings.secret,
            settings.limits,
            settings.transports,
            settings.host,
            0,
            settings.tls,
            settings.values,
            settings.advertise and Address(settings.advertise.host, 0),
        )
        self.session = MasterSession(self.node, settings.master, settings.lease_s, root=settings.root)
        shard.at_stop(self.close)

    def close(self) -> None:
        """Leave the job."""
        self.session.close()
        self.node.close()


_node: _ShardNode | None = None


async def open_shard(settings: ShardSettings) -> None:
    """Make this shard's node and join the job as part of the rank it belongs to."""
    global _node
    _node = _ShardNode(settings)
    await _node.session.opened
    await _node.session.join(_node.node.addresses, settings.rank)


def _here() -> _ShardNode:
    if _node is None:
        raise ShardError("open_shard() comes first")
    return _node


async def serve_in_shard(name: str, factory: Callable[[], object], server_id: int, bounds: Bounds | None) -> tuple[int, int]:
    """Make an instance and serve it: (server id, target)."""
    here = _here()
    served = factory()
    Server(name, server_id, 0, served)  # refuse a bad object before the master hears of it
    while True:
        given, target = await here.session.prepare_server(name, server_id)
        here.node.servers[target] = Server(name, given, target, served, bounds, here.settings.allow, here.settings.timing)
        try:
            await here.session.register_server(name, given, target)
        except BaseException as error:
            here.node.servers.pop(target, None)
            if not isinstance(error, errors.NodeExists):  # another one has got that id meanwhile
                raise
        else:
            return given, target


async def stop_serving_in_shard(targets: tuple[int, ...], drain_s: float) -> None:
    """Take back those of the servers that live here; what has begun goes on for up to `drain_s` seconds."""
    here = _here()
    for target in targets:
        server = here.node.servers.get(target)
        if server is not None:
            await here.session.deregister_server(target)
            await _drain(here, server, drain_s)
            here.node.servers.pop(target, None)


def figures_of_shard() -> NodeFigures:
    """What this shard did so far."""
    return NodeFigures.of(_here().node)


async def _drain(here: _ShardNode, server: Server, drain_s: float) -> None:
    over = here.node.reactor.sleep(drain_s)
    server.stop().add_done_callback(lambda _: over.set_result(None))
    await over
    server.cut()
