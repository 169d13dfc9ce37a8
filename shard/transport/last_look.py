"""How long a peer may take to prove itself, and the look at what it sent before it is hung up on.

A turn calls timers before it looks at descriptors (reactor.py). So a process that was stopped, or
had other things to do, for as long as its peers have time would hang up on all who spoke in time,
and they would come again, all at once.

    the time is over, and the look finds   what becomes of the peer
    that it is through                     it is accepted
    the next part of what it has to send   it has the same time again, once: we were late, not it
    nothing, or half a part                it is hung up on
"""

from __future__ import annotations

from typing import Protocol

from shard.loop.reactor import Reactor


class Proving(Protocol):
    """What a peer has to get through."""

    @property
    def step(self) -> int:
        """How far it is; grows with each part that has come."""

    def look(self) -> None:
        """Take what has come; that may be the end of it, one way or the other, and then cancels the
        time.
        """

    def overdue(self, limit_s: float) -> None:
        """It had so much time."""


class LastLook:
    """The time that a peer has, in seconds from now on. Used in the reactor's thread."""

    def __init__(self, reactor: Reactor, limit_s: float, peer: Proving) -> None:
        self._reactor, self._limit_s, self._peer = reactor, limit_s, peer
        self._is_over = self._had_more = False
        self._timer = reactor.call_later(limit_s, self._look)

    def _look(self) -> None:
        peer = self._peer
        before = peer.step
        peer.look()
        if self._is_over:
            return
        if peer.step > before and not self._had_more:
            self._had_more = True
            self._timer = self._reactor.call_later(self._limit_s, self._look)
        else:
            peer.overdue(self._limit_s)

    def cancel(self) -> None:
        """It is through, or gone."""
        self._is_over = True
        self._timer.cancel()
