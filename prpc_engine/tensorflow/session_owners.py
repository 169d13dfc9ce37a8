"""Whose the sessions are that registered something here, so that nothing is kept for ever for a
process that is gone. No I/O here.

    a process that has sessions here        its sessions
    is connected                            stay open
    has lost its last connection            stay open: a cut cable, it may connect again
    has not connected again after GONE_S    are closed, as it would have closed them

A process that comes back later than that goes on: of its stages those are still there that any
session may use, and for the others its steps end with AbortedError, as after a restart of the task.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from prpc_engine.rpc.peer import Peer

GONE_S = 600.0


class SessionOwners:
    """Which process has which sessions here. Used in the reactor's turns alone.

    is_connected  whether the process of that incarnation (handshake.py) has a connection now
    close         told each session of a process that is gone

    Owned by a task's stages.
    """

    def __init__(self, is_connected: Callable[[int], bool], close: Callable[[str], object]) -> None:
        self._is_connected, self._close = is_connected, close
        self._owners: dict[str, int] = {}  # the incarnation, by session
        self._looking: set[int] = set()  # at which of them again

    def add(self, session: str, peer: Peer | None) -> None:
        """A session registers something, by that connection; None: one of this process."""
        if peer is not None:
            self._owners[session] = peer.connection.peer_incarnation

    def remove(self, session: str) -> None:
        """A session is over."""
        self._owners.pop(session, None)

    def lost(self, peer: Peer) -> None:
        """A connection is over: look again, once, after GONE_S."""
        owner = peer.connection.peer_incarnation
        if owner in self._looking or owner not in self._owners.values():
            return
        self._looking.add(owner)
        # the reactor outlives a task that is closed, and would keep all that it had until then
        mine = weakref.ref(self)

        def look() -> None:
            owners = mine()
            if owners is not None:
                owners._look(owner)

        peer.reactor.call_later(GONE_S, look)

    def _look(self, owner: int) -> None:
        self._looking.remove(owner)
        if not self._is_connected(owner):
            for session in [one for one, its in self._owners.items() if its == owner]:
                self._close(session)
