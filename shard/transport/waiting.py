"""Accepted sockets that wait, unread, until it is their turn to prove themselves.

    event                                 what becomes of it
    a place is free                       one of the host's that has spoken, else the one that waits
                                          longest, takes its turn
    all places are taken, one has spoken  a peer that has been at its proof for too long, chosen at
                                          random, makes room for it
    one more comes than may wait          one of the host that has most of them, chosen at random,
                                          is hung up on
    limits.handshake_s passes             it is hung up on

So whoever fills all places with sockets that say nothing, or too little, keeps nobody out: a peer
that means it speaks at once and is through in milliseconds, in which it is hardly ever the one that
chance hits; and if it is, it tries again.
"""

from __future__ import annotations

import random
import select
import socket
from collections import deque
from collections.abc import Callable

from shard.loop.reactor import Reactor


class WaitingPeer:
    """An accepted socket that waits in a WaitingRoom, unread, for its turn to prove itself.
    give_up: called with it after limit_s seconds, unless its timer is cancelled before. host:
    what peers are counted by.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        host: str,
        reactor: Reactor,
        limit_s: float,
        give_up: Callable[[WaitingPeer], None],
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.host = host
        self.timer = reactor.call_later(limit_s, lambda: give_up(self))


class WaitingRoom:
    """All of one listener. Owned by its Door; used in the reactor's thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[WaitingPeer]] = {}  # by host, none of them empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, host: str) -> bool:
        return host in self._queues

    @property
    def hosts(self) -> list[str]:
        """Those that somebody waits of."""
        return list(self._queues)

    def all(self) -> list[WaitingPeer]:
        """In the order in which they came, of each host."""
        return [one for queue in self._queues.values() for one in queue]

    def add(self, waiting: WaitingPeer) -> WaitingPeer | None:
        """The one that has to go instead; it waits no longer."""
        self._queues.setdefault(waiting.host, deque()).append(waiting)
        self._count += 1
        if self._count <= self._most:
            return None
        queue = max(self._queues.values(), key=len)
        # Not the newest, which could not have spoken yet; unless it is alone.
        victim = queue[random.randrange(len(queue) - (queue[-1] is waiting and len(queue) > 1))]
        self.leave(victim)
        return victim

    def leave(self, waiting: WaitingPeer) -> None:
        """It waits no longer."""
        waiting.timer.cancel()
        queue = self._queues[waiting.host]
        queue.remove(waiting)  # the first, nearly always
        self._count -= 1
        if not queue:
            del self._queues[waiting.host]

    def spoken(self) -> list[WaitingPeer]:
        """Who has sent something, or hung up; one system call for all."""
        by_fd = {one.sock.fileno(): one for one in self.all()}
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        return [by_fd[fd] for fd, _ in poll.poll(0)]

    def first(self, host: str) -> WaitingPeer:
        """Who waits longest of that host."""
        return self._queues[host][0]
