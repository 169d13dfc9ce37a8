"""What connections did that are over, added up: a node's figures go on where those of its
connections end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prpc_engine.rpc.peer import PeerStatistics
from shard import Traffic


@dataclass(frozen=True)
class Ended:
    """Of one transport. The fields have the names of PeerStatistics."""

    connections: int = 0
    requests: int = 0
    replies_dropped: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __add__(self, one: PeerStatistics | Ended) -> Ended:
        """With one more, by its last figures; or both together."""
        return Ended(
            self.connections + (one.connections if isinstance(one, Ended) else 1),
            self.requests + one.requests,
            self.replies_dropped + one.replies_dropped,
            self.traffic + one.traffic,
        )
