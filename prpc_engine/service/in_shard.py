"""What runs inside the shard processes of an RpcService: a node of its own, and the servers it is
told to make.

These functions are sent by the application over its lane to each shard.

Each shard has a port of its own. A server's id is that of one instance, in one shard, and its
clients go there directly. Behind one port (shard/transport/shared_port.py, as a cluster's tasks
have it) a client's one connection ends at one shard, and each call for the others' instances, or
for servers of the application, would go through a second process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prpc_engine import errors
from prpc_engine.master.session import MasterSession
from prpc_engine.node import slab
from prpc_engine.node.node import Node
from prpc_engine.rpc.server import Bounds, ServedObject
from prpc_engine.rpc.timing import Timing
from prpc_engine.service.shard_statistics import NodeFigures
from prpc_engine.settings.node_config import NodeConfig
from shard import Future, ShardError, bind_memory, pin, this_shard

RETRY_S = 0.05  # between two looks whether a dead server's id is free
CUT_TIMEOUT_S = 5.0  # for the `finally` blocks of what is cancelled at the end of a drain
# for the master to notice that a lease is over, and to tell, on a busy machine
AFTER_LEASE_S = 10.0


class _ShardNode:
    """The node of this shard and its master."""

    def __init__(self, master: str, config: NodeConfig, cores: tuple[int, ...]) -> None:
        shard = this_shard()
        if cores:
            pin(cores[shard.index])
            bind_memory(cores[shard.index])
        slab.use_slab(shard.slab)
        self.config = config
        self.timing = Timing.of(config.node)
        # of the application's servers that live here, by their number
        self.targets: dict[int, int] = {}
        self.starting: set[int] = set()  # those that are about to
        bind, advertise = config.node.bind, config.node.advertise
        own = config.listening_at(
            replace(bind, port=0), advertise=advertise and replace(advertise, port=0)
        )
        self.node = Node(shard.reactor, None, shard.slab, own)
        self.session = MasterSession(self.node, master, config.node.lease_s, root=config.node.root)
        shard.at_stop(self.close)

    def close(self) -> None:
        """Leave the job."""
        self.session.close()
        self.node.close()


_node: _ShardNode | None = None


async def open_shard(master: str, rank: int, config: NodeConfig, cores: tuple[int, ...]) -> None:
    """Make this shard's node and join the job as part of the rank it belongs to. `cores`: where
    each shard of the group is bound; none: nowhere, or as the group has it.
    """
    global _node
    _node = _ShardNode(master, config, cores)
    await _node.session.opened
    await _node.session.join(_node.node.addresses, rank)


def _here() -> _ShardNode:
    if _node is None:
        raise ShardError("open_shard() comes first")
    return _node


async def serve_in_shard(
    number: int,
    name: str,
    factory: Callable[[], object],
    server_id: int,
    bounds: Bounds | None,
    again: bool,
) -> tuple[int, int]:
    """Make an instance and serve it as the application's server `number`: (server id, target).
    `again`: it takes the place of one that died, whose id is waited for as long as its lease may
    last."""
    here = _here()
    served = factory()
    ServedObject(name, server_id, 0, served)  # refuse a bad object before the master hears of it
    give_up_at = here.node.reactor.clock() + (
        here.config.node.lease_s + AFTER_LEASE_S if again else 0.0
    )
    here.starting.add(number)
    while True:
        target = None
        try:
            given, target = await here.session.prepare_server(name, server_id)
            here.node.servers[target] = ServedObject(
                name, given, target, served, bounds, here.config.allow, here.timing
            )
            await here.session.register_server(name, given, target)
        except BaseException as error:
            if target is not None:
                here.node.servers.pop(target, None)
            is_taken = isinstance(error, errors.NodeExists)
            if is_taken and again and here.node.reactor.clock() < give_up_at:
                await here.node.reactor.sleep(RETRY_S)
            elif not is_taken or target is None:
                # else another one has got that id meanwhile, and the next look says so
                here.starting.discard(number)
                raise
        else:
            break
    here.targets[number] = target
    if number not in here.starting:  # taken back meanwhile
        await stop_serving_in_shard(number, 0.0)
    here.starting.discard(number)
    return given, target


async def stop_serving_in_shard(number: int, drain_s: float) -> None:
    """Take the application's server `number` back; what has begun goes on for up to `drain_s`
    seconds.
    """
    here = _here()
    here.starting.discard(number)
    target = here.targets.pop(number, None)
    server = here.node.servers.get(target) if target is not None else None
    if target is not None and server is not None:
        await here.session.deregister_server(target)
        await _drain(here, server, drain_s)
        here.node.servers.pop(target, None)


def figures_of_shard() -> NodeFigures:
    """What this shard did so far."""
    return NodeFigures.of(_here().node)


async def _drain(here: _ShardNode, server: ServedObject, drain_s: float) -> None:
    for wait_s in (drain_s, CUT_TIMEOUT_S):
        over = here.node.reactor.sleep(wait_s)
        server.stop().when_done(partial(_end, over))
        await over
        server.cut()


def _end(wait: Future, _: Future) -> None:
    wait.set_result(None)
