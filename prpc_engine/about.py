"""What a node says of itself to whoever got through the handshake: where else it is reached, and what it runs.

    method   arguments   answer
    about                {"version", "python", "process", "addresses", "services", "time_s"}
    ping                 None: a round trip, and nothing else

Every node serves this at ABOUT_TARGET. `prpc doctor --peer` is who asks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

from prpc_engine.config import allow_from
from prpc_engine.master.protocol import FixedRoute
from prpc_engine.master.whereabouts import this_process
from prpc_engine.release import VERSION
from prpc_engine.server import Server

ABOUT_TARGET = 8  # below what a master gives to servers
ABOUT_ROUTE = FixedRoute(ABOUT_TARGET, "the node itself")
ABOUT, PING = "about", "ping"


def about_server(addresses: Callable[[], list[str]], servers: Mapping[int, Server]) -> Server:
    """The server to put at ABOUT_TARGET of a node that has these addresses and servers."""

    def about() -> dict[str, Any]:
        return {
            "version": VERSION,
            "python": platform.python_version(),
            "process": this_process(),  # as whereabouts.py has it
            "addresses": addresses(),  # most preferred first
            "services": sorted({one.service for target, one in list(servers.items()) if target != ABOUT_TARGET}),
            "time_s": time.time(),
        }

    return Server("prpc", 0, ABOUT_TARGET, {ABOUT: about, PING: _nothing}, allow=allow_from(None))


def _nothing() -> None:
    """A round trip."""
