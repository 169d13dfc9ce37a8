"""What the shards of a node have done: their processes as the group sees them, and what each says of the node that it is itself.

    figures   read from                       of a shard that is busy, or gone
    process   the group's shared memory       as they stand
    now       the shard, over its lane        None, and `error` says why: after `timeout_s` for all shards together
    last      the same                        what it said last; None: it never did

One question at a time is under way to a shard: one that hangs is not asked again before it has answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from prpc_engine.about import ABOUT_TARGET
from prpc_engine.ended import Ended
from prpc_engine.node import Node
from prpc_engine.peer import PeerStatistics
from prpc_engine.server import ServerStatistics
from shard import Future, ShardError, ShardGroup, ShardStatistics, SlabStatistics

TIMEOUT_S = 1.0  # for all shards to answer: a tenth of what Prometheus waits for a whole scrape


@dataclass(frozen=True)
class NodeFigures:
    """What one node did: whom it talked to, what it served, what it holds."""

    peers: tuple[PeerStatistics, ...]
    servers: dict[str, ServerStatistics]  # by "service/server id"
    slab: SlabStatistics
    ended: dict[str, Ended]  # by transport: what connections did that are over

    @classmethod
    def of(cls, node: Node) -> NodeFigures:
        """A snapshot."""
        peers, ended = node.traffic()
        return cls(
            peers=tuple(peer.statistics() for peer in peers),
            ended=ended,
            servers={
                f"{one.service}/{one.server_id}": one.statistics()
                for target, one in node.servers.copy().items()
                if target != ABOUT_TARGET
            },
            slab=node.slab.statistics(),
        )


@dataclass(frozen=True)
class ShardFigures:
    """One shard. See the file's head."""

    process: ShardStatistics
    now: NodeFigures | None
    last: NodeFigures | None
    error: str = ""


class ShardReader:
    """See the file's head. Thread-safe. `ask` is run in each shard of the group."""

    def __init__(self, group: ShardGroup, ask: Callable[[], NodeFigures]) -> None:
        self._group = group
        self._ask = ask
        self._guard = threading.Lock()
        self._asked: dict[int, Future] = {}  # by shard: the question under way, or the last one
        self._last: dict[int, NodeFigures] = {}

    def read(self, timeout_s: float = TIMEOUT_S) -> tuple[ShardFigures, ...]:
        """Of every shard, in order; waits for `timeout_s` seconds at most. None once the group is closed."""
        deadline = time.monotonic() + timeout_s
        asked = [self._submit(index) for index in range(self._group.size)]
        errors = [self._wait(index, future, deadline) for index, future in enumerate(asked)]
        if self._group.closed:
            return ()
        processes = self._group.statistics().shards
        return tuple(
            ShardFigures(process, None if error else self._last[index], self._last.get(index), error)
            for index, (process, error) in enumerate(zip(processes, errors, strict=True))
        )

    def _submit(self, index: int) -> Future | ShardError:
        with self._guard:
            future = self._asked.get(index)
            if future is None or future.done():
                try:
                    future = self._asked[index] = self._group.submit_to(index, self._ask)
                except ShardError as error:  # it is gone, or has too much to do
                    return error
            return future

    def _wait(self, index: int, asked: Future | ShardError, deadline: float) -> str:
        """Why it says nothing; "" when it has."""
        if isinstance(asked, ShardError):
            return str(asked)
        try:
            self._last[index] = asked.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return "it has not answered yet: a handler keeps it"
        except ShardError as error:
            return str(error)
        return ""
