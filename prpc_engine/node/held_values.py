"""What a node holds under names for other nodes to fetch: its arrays are lent over shared memory,
one copy for however many readers, and copied over tcp.

    hold(name, value)    until let_go(name); what was fetched stays for as long as somebody reads it
    fetch()              of another node, or of this one
    FETCH at TARGET      what a fetch asks for; a name that is not there is a RemoteError there

No master is asked: the holder passes on its addresses along with the name. Any peer that knows a
name may fetch what it stands for, so a name that is not for all members of the job has to be one
that cannot be guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prpc_engine.node.node import Node
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.allow import AllowList

TARGET = 7  # below what a master gives to servers
FETCH = "fetch"
FETCH_KEY = method_key(FETCH)


class HeldValues:
    """Of one node, which serves them from serve() or the first hold() on; they go with it.
    Thread-safe.

    service  under which they are served, for allow lists
    """

    def __init__(self, node: Node, service: str, allow: AllowList) -> None:
        self._node = node
        self._held: dict[str, Any] = {}
        # inline: a look into a table, which is not worth a change of threads
        self._server = ServedObject(
            service, 0, TARGET, {FETCH: self._fetched}, allow=allow, inline=True
        )

    def serve(self) -> None:
        """Answer those who fetch from now on. Again: does nothing."""
        self._node.servers[TARGET] = self._server

    @property
    def names(self) -> list[str]:
        """What is held."""
        return list(self._held)

    def hold(self, name: str, value: Any) -> None:
        """Hold what the archive can send, in place of what was held under that name. Its arrays
        must change no more; those of the slab are lent as they are, others are copied for each.
        """
        self._held[name] = value
        self.serve()

    def let_go(self, name: str) -> None:
        """Again: does nothing."""
        self._held.pop(name, None)

    def clear(self) -> None:
        """Let go of all."""
        self._held.clear()

    def _fetched(self, name: str) -> Any:
        return self._held[name]

    async def fetch(
        self, addresses: Sequence[str], holder: str, name: str, timeout_s: float
    ) -> Any:
        """What the node at these addresses holds under that name; for coroutines of the control
        loop. `holder`: whom errors name. Connecting may take as long again, an address.

        Raises RemoteError where nothing is held, or not any more, NotSent, MaybeExecuted,
        DeadlineExceeded, and what Node.reach() raises.
        """
        peer = self._node.near_peer(addresses)
        if peer is None:
            peer = await self._node.reach(addresses, timeout_s, holder)
        return await peer.request(
            FixedRoute(TARGET, holder), FETCH, FETCH_KEY, (name,), timeout_s, True
        )
