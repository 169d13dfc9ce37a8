"""Which server has more than its share, and which one answers late: worked out from what servers and lanes say.

imbalance    keys pulled and pushed at the busiest server, beside the mean of all: 1.0 is even
stragglers   servers whose answers to pushes take STRAGGLER_RATIO times as long as the median server's
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prpc_engine.kv.table import TableStatistics

STRAGGLER_RATIO = 2.0  # twice the median is not noise: each figure is a moving mean of many answers


@dataclass(frozen=True)
class ServerShare:
    """What one server holds and does. answer_s: how long its answers to this worker's pushes take lately; 0.0: none came."""

    server_id: int
    partitions: int
    rows: int
    bytes: int
    keys: int  # pulled and pushed, of all workers, since its tables are there
    answer_s: float


@dataclass(frozen=True)
class Balance:
    """See the file's head. repeats: requests of this worker that were sent again; unanswered: pushes without an answer now."""

    servers: tuple[ServerShare, ...]
    imbalance: float
    stragglers: tuple[int, ...]
    repeats: int
    unanswered: int


def share_of(server_id: int, answers_s: Sequence[float], tables: Mapping[str, TableStatistics]) -> ServerShare:
    """Of a server with these tables; answers_s: one figure for each of its partitions, 0.0 where nothing was pushed."""
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


def balance_of(servers: Sequence[ServerShare], repeats: int, unanswered: int) -> Balance:
    """Of all servers together."""
    keys = [server.keys for server in servers]
    mean = sum(keys) / max(1, len(keys))
    timed = [server.answer_s for server in servers if server.answer_s]
    late_s = STRAGGLER_RATIO * statistics.median_low(timed) if timed else float("inf")
    stragglers = tuple(server.server_id for server in servers if server.answer_s > late_s)
    return Balance(tuple(servers), max(keys, default=0) / mean if mean else 1.0, stragglers, repeats, unanswered)
