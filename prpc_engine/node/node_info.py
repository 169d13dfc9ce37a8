"""What a node says of itself to whoever got through the handshake: where else it is reached, and
what it runs.

    method   arguments  answer
    about               {"version", "python", "process", "addresses", "services", "time_s"}
    ping                None: a round trip, and nothing else
    statistics          {"process", "peers", "ended", "servers", "slab", "classes"}: PeerStatistics,
                        Ended by transport, ServerStatistics by "service/server id", SlabStatistics
                        and a list of ClassStatistics as they are now, as dicts; a shard answers for
                        itself

Every node serves this at ABOUT_TARGET. `prpc doctor --peer` and `prpc top` are who ask.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prpc_engine.release import VERSION
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.allow import AllowList
from shard import runtime

if TYPE_CHECKING:
    from prpc_engine.node.ended import Ended
    from prpc_engine.rpc.peer import Peer
    from shard import ClassStatistics, Slab

# that are, and by transport what those did that are over
Connections = tuple[list["Peer"], dict[str, "Ended"]]
ABOUT_TARGET = 8  # below what a master gives to servers
ABOUT_ROUTE = FixedRoute(ABOUT_TARGET, "the node itself")
ABOUT, PING, STATISTICS = "about", "ping", "statistics"


def about_server(
    addresses: Callable[[], list[str]],
    servers: dict[int, ServedObject],
    traffic: Callable[[], tuple[list[Peer], dict[str, Ended]]],
    slab: Slab,
    classes: Callable[[], tuple[ClassStatistics, ...]],
    allow: AllowList,
) -> ServedObject:
    """The server to put at ABOUT_TARGET of a node that has these."""

    def about() -> dict[str, Any]:
        return {
            "version": VERSION,
            "python": platform.python_version(),
            "process": runtime.this_process(),  # as whereabouts.py has it
            "addresses": addresses(),  # most preferred first
            "services": sorted(
                {one.service for target, one in servers.copy().items() if target != ABOUT_TARGET}
            ),
            "time_s": runtime.time(),
        }

    def statistics() -> dict[str, Any]:
        peers, ended = traffic()
        return {
            "process": runtime.this_process(),
            "peers": [asdict(peer.statistics()) for peer in peers],
            "ended": {transport: asdict(one) for transport, one in ended.items()},
            "servers": {
                f"{one.service}/{one.server_id}": asdict(one.statistics())
                for target, one in servers.copy().items()
                if target != ABOUT_TARGET
            },
            "slab": asdict(slab.statistics()),
            "classes": [one._asdict() for one in classes()],
        }

    verbs = {ABOUT: about, PING: _nothing, STATISTICS: statistics}
    return ServedObject("prpc", 0, ABOUT_TARGET, verbs, allow=allow, inline=True)


def _nothing() -> None:
    """A round trip."""
