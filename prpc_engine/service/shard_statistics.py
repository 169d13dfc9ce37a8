"""What the shards of a node have done: their processes as the group sees them, and what each says
of the node that it is itself.

    figures  read from                  of a shard that is busy, or gone
    process  the group's shared memory  as they stand
    now      the shard, over its lane   None, and `error` says why: after `timeout_s` for all shards
                                        together
    last     the same                   what it said last; None: it never did
    past     its earlier lives          what each said last, added up: counters go on when a shard
                                        is started again

One question at a time is under way to a shard: one that hangs is not asked again before it has
answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from prpc_engine.node.ended import Ended
from prpc_engine.node.node import Node
from prpc_engine.node.node_info import ABOUT_TARGET
from prpc_engine.rpc.peer import PeerStatistics
from prpc_engine.rpc.server import ServedStatistics
from prpc_engine.rpc.timing import MethodTiming
from shard import (
    ClassStatistics,
    Future,
    ShardError,
    ShardGroup,
    ShardStatistics,
    SlabStatistics,
    runtime,
)

TIMEOUT_S = 1.0  # for all shards to answer: a tenth of what Prometheus waits for a whole scrape


@dataclass(frozen=True)
class NodeFigures:
    """What one node did: whom it talked to, what it served, what it holds."""

    peers: tuple[PeerStatistics, ...]
    servers: dict[str, ServedStatistics]  # by "service/server id"
    slab: SlabStatistics
    ended: dict[str, Ended]  # by transport: what connections did that are over
    pid: int  # of its process
    classes: tuple[ClassStatistics, ...]  # of work in its reactor, LATENCY first

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
            pid=node.pid,
            classes=node.reactor.statistics(),
        )


@dataclass(frozen=True)
class PastFigures:
    """What the earlier lives of one shard did, by what each of them said last."""

    # by transport: all their connections are over
    ended: dict[str, Ended] = field(default_factory=dict)
    servers: dict[str, ServedStatistics] = field(default_factory=dict)

    def with_life(self, last: NodeFigures) -> PastFigures:
        """One more life is over."""
        servers = dict(self.servers)
        for name, one in last.servers.items():
            servers[name] = replace(
                total_of((one, servers.get(name, ServedStatistics()))), tasks=0, queued=0
            )
        return PastFigures(all_ended(last, self.ended), servers)


def all_ended(last: NodeFigures, before: dict[str, Ended]) -> dict[str, Ended]:
    """By transport, what the connections of a process did that is gone, or does not answer, and
    what others did before it.
    """
    ended = dict(before)
    for transport, over in last.ended.items():
        ended[transport] = ended.get(transport, Ended()) + over
    for peer in last.peers:
        ended[peer.transport] = ended.get(peer.transport, Ended()) + peer
    return ended


def total_of(all_statistics: Iterable[ServedStatistics]) -> ServedStatistics:
    """The sum of what several servers did."""
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    timings: dict[str, MethodTiming] = {}
    for one in all_statistics:
        refused.update(one.refused)
        for method, timing in one.timings.items():
            timings[method] = timings[method] + timing if method in timings else timing
        counts.update({name: value for name, value in vars(one).items() if isinstance(value, int)})
    return ServedStatistics(**counts, refused=dict(refused), timings=timings)


@dataclass(frozen=True)
class ShardFigures:
    """What one shard has done, at one look: its process, its node, and what is kept of its earlier
    lives.

    Made by ShardReader.read(). What each field is read from: the table at the file's head.
    """

    process: ShardStatistics
    now: NodeFigures | None
    last: NodeFigures | None
    error: str = ""
    past: PastFigures = field(default_factory=PastFigures)


class ShardReader:
    """Asks all shards of a group what they did, and keeps what those said that were started again
    since.

    group  whose shards are asked; read() gives () once it is closed
    ask    is sent to each shard, and run there

    Thread-safe. A shard that does not answer raises nothing: its `error` says why.
    """

    def __init__(self, group: ShardGroup, ask: Callable[[], NodeFigures]) -> None:
        self._group = group
        self._ask = ask
        self._guard = runtime.Lock()  # of what follows: any thread asks for figures
        self._asked: dict[int, Future] = {}  # by shard: the question under way, or the last one
        self._last: dict[int, NodeFigures] = {}
        self._past: dict[int, PastFigures] = {}

    def read(self, timeout_s: float = TIMEOUT_S) -> tuple[ShardFigures, ...]:
        """Of every shard, in order; waits for `timeout_s` seconds at most. None once the group is
        closed.
        """
        deadline = runtime.monotonic() + timeout_s
        asked = [self._submit(index) for index in range(self._group.size)]
        errors = [self._wait(index, future, deadline) for index, future in enumerate(asked)]
        if self._group.closed:
            return ()
        processes = self._group.statistics().shards
        return tuple(
            ShardFigures(
                process,
                None if error else self._last[index],
                self._last.get(index),
                error,
                self._past.get(index, PastFigures()),
            )
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
            self._keep(index, asked.result(max(0.0, deadline - runtime.monotonic())))
        except TimeoutError:
            return "it has not answered yet: a handler keeps it"
        except ShardError as error:
            return str(error)
        return ""

    def _keep(self, index: int, said: NodeFigures) -> None:
        with self._guard:  # two may read at once
            before = self._last.get(index)
            if before is not None and before.pid != said.pid:  # it was started again
                self._past[index] = self._past.get(index, PastFigures()).with_life(before)
            self._last[index] = said
