"""Whose the sessions are that registered something here, so that nothing is kept for ever for a
process that is gone. No I/O here.

    a process that has sessions here        its sessions
    is connected                            stay open
    has lost its last connection            stay open: a cable was cut, and it may connect again
    has had none for GONE_S                 are closed, as it would have closed them

A process that comes back later than that goes on: of its stages those are still there that any
session may use, and for the others its steps end with AbortedError, as after a restart of the task.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from prpc_engine.rpc.peer import Peer
from shard import Reactor

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
        # when each process lost a connection last, by its reactor's clock: of those that are looked
        # at again
        self._lost_at: dict[int, float] = {}

    def add(self, session: str, peer: Peer | None) -> None:
        """A session registers something, by that connection; None: one of this process."""
        if peer is not None:
            self._owners[session] = peer.connection.peer_incarnation

    def remove(self, session: str) -> None:
        """A session is over."""
        self._owners.pop(session, None)

    def lost(self, peer: Peer) -> None:
        """A connection is over: look after GONE_S whether the process has another one."""
        owner, reactor = peer.connection.peer_incarnation, peer.reactor
        is_looked_at = owner in self._lost_at
        if not is_looked_at and owner not in self._owners.values():
            return
        self._lost_at[owner] = reactor.clock()
        if not is_looked_at:
            self._look_later(owner, reactor, GONE_S)

    def _look_later(self, owner: int, reactor: Reactor, after_s: float) -> None:
        # the reactor outlives a task that is closed, and would keep all that it had until then
        mine = weakref.ref(self)

        def look() -> None:
            owners = mine()
            if owners is not None:
                owners._look(owner, reactor)

        reactor.call_later(after_s, look)

    def _look(self, owner: int, reactor: Reactor) -> None:
        left_s = self._lost_at[owner] + GONE_S - reactor.clock()
        if left_s > 0:  # it had a connection in the meantime, and lost that, too
            self._look_later(owner, reactor, left_s)
            return
        del self._lost_at[owner]
        if not self._is_connected(owner):
            for session in [one for one, its in self._owners.items() if its == owner]:
                self._close(session)
