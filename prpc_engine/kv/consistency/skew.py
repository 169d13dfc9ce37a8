"""Who has more than its share, and who is late: worked out from what servers and lanes say.

imbalance   keys pulled and pushed at the busiest server, beside the mean of all: 1.0 is even
stragglers  servers whose answers to pushes take STRAGGLER_RATIO times as long as the median
            server's
workers     what each has pushed, and how fast; in tables with a consistency how far it is behind,
            since when, and how long others have waited for it: who held them up for longest comes
            first

A worker is a node, as in consistency.py. One whose first pushes went to an elastic server that is
gone is known by the number of its TableWorker only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prpc_engine.kv.consistency.progress import Lag
from prpc_engine.kv.table.table import TableStatistics

STRAGGLER_RATIO = 2.0  # twice the median is not noise: each figure is a moving mean of many answers


@dataclass(frozen=True)
class ServerShare:
    """What one server holds and does. answer_s: how long its answers to this worker's pushes take
    lately; 0.0: none came.
    """

    server_id: int
    partitions: int
    rows: int
    bytes: int
    keys: int  # pulled and pushed, of all workers, since its tables are there
    answer_s: float


@dataclass(frozen=True)
class WorkerShare:
    """What one worker does. pushes: applied, a verb's counted at each partition that it went to;
    pushes_per_s: since the look before this one, 0.0 at a worker's first; lags: by table with a
    consistency, each figure of the partition where it is most."""

    worker: str
    pushes: int
    pushes_per_s: float
    lags: Mapping[str, Lag]

    @property
    def held_up_s(self) -> float:
        """Seconds in all in which others have waited for it, at one table or another."""
        return sum((lag.held_up_s for lag in self.lags.values()), 0.0)


@dataclass(frozen=True)
class Balance:
    """A Balance is TableWorker.balance()'s answer: who has more than its share, and who is late.

    imbalance: keys pulled and pushed at the busiest server, beside the mean of all; 1.0 is even.
    stragglers: ids of the servers that take STRAGGLER_RATIO times as long to answer pushes as the
    median one. workers: who held others up for longest comes first. repeats: requests of this
    worker that were sent again; unanswered: pushes without an answer now.
    """

    servers: tuple[ServerShare, ...]
    workers: tuple[WorkerShare, ...]
    imbalance: float
    stragglers: tuple[int, ...]
    repeats: int
    unanswered: int


def share_of(
    server_id: int, answers_s: Sequence[float], tables: Mapping[str, TableStatistics]
) -> ServerShare:
    """Of a server with these tables; answers_s: one figure for each of its partitions, 0.0 where
    nothing was pushed.
    """
    timed = [each for each in answers_s if each]
    each = tables.values()
    return ServerShare(
        server_id,
        partitions=len(answers_s),
        rows=sum(table.rows for table in each),
        bytes=sum(table.bytes for table in each),
        keys=sum(table.keys_pulled + table.keys_pushed for table in each),
        answer_s=max(timed, default=0.0),
    )


class WorkerLooks:
    """What the partitions say of workers, from look to look. Owned by one TableWorker."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # of each worker: its pushes
        self._looked = 0.0

    def shares(
        self, now: float, partitions: Iterable[Iterable[Sequence[Any]]]
    ) -> tuple[WorkerShare, ...]:
        """Of what TableShard.workers() said in each of them. A worker is known by its name: each
        server has a number of its own for it (shard/transport/callers.py)."""
        pushes: dict[str, int] = {}
        lags: dict[str, dict[str, Lag]] = {}
        for workers in partitions:
            for _, worker, count, tables in workers:
                pushes[worker] = pushes.get(worker, 0) + count
                worst = lags.setdefault(worker, {})
                for table, lag in tables.items():
                    worst[table] = Lag(*map(max, lag, worst.get(table, lag)))
        elapsed_s, before = now - self._looked, self._before
        if elapsed_s > 0:
            self._before, self._looked = pushes, now
        else:
            # another thread's look began later and came first: that one stays, and there is no time
            # for a rate
            elapsed_s = float("inf")
        rates = {
            worker: max(0, count - before.get(worker, count)) / elapsed_s
            for worker, count in pushes.items()
        }
        shares = [
            WorkerShare(worker, count, rates[worker], lags[worker])
            for worker, count in pushes.items()
        ]
        return tuple(sorted(shares, key=lambda share: share.held_up_s, reverse=True))


def balance_of(
    servers: Sequence[ServerShare], workers: tuple[WorkerShare, ...], repeats: int, unanswered: int
) -> Balance:
    """Of all servers together."""
    keys = [server.keys for server in servers]
    mean = sum(keys) / max(1, len(keys))
    timed = [server.answer_s for server in servers if server.answer_s]
    late_s = STRAGGLER_RATIO * statistics.median_low(timed) if timed else float("inf")
    stragglers = tuple(server.server_id for server in servers if server.answer_s > late_s)
    imbalance = max(keys, default=0) / mean if mean else 1.0
    return Balance(tuple(servers), workers, imbalance, stragglers, repeats, unanswered)
