"""Connecting to other nodes, one attempt a node at a time: a task of the control loop, for all who
want that peer.

    state      event                          what follows
    none       somebody wants that peer       under way: a task is spawned; they wait
    under way  another one wants it           waits for the same
    under way  it has connected               over: each has the peer
    under way  it has failed                  over: each has an error of its own, with that text
    under way  one gives up                   the others wait on
    under way  the last gives up              over: the task is cancelled
    under way  the node is closed             over: each has Closed, the task is cancelled
    over       it has connected all the same  the connection is closed by its task

Each waits for a future of its own, so that giving up, however that is done, ends it for nobody
else. A task is cancelled in the control loop's thread, where it lets go of its sockets.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from prpc_engine import errors
from shard import ControlLoop, Future, Task

if TYPE_CHECKING:
    from prpc_engine.rpc.peer import Peer


class PeerAttempt:
    """To connect to one node. Owned by an Attempts.

    node   the first address by which it is known
    asked  who is to be reached, for texts
    """

    def __init__(self, node: str, asked: str) -> None:
        self.node = node
        self.asked = asked
        self.wishes: dict[Future, None] = {}
        self.task: Task | None = None  # until it has been spawned


class Attempts:
    """Those under way, of one Node. From any thread.

    guard         of the node's peers: to find no peer, and to join the attempt, is one step
    control_loop  where those under way run
    """

    def __init__(self, guard: threading.Lock, control_loop: Callable[[], ControlLoop]) -> None:
        self._guard, self._control_loop = guard, control_loop
        self._under_way: dict[str, PeerAttempt] = {}

    def join(self, node: str, asked: str) -> tuple[PeerAttempt, Future, bool]:
        """The attempt, the future of its peer for one who waits, and whether it is new: then begin
        it. With the guard held; give_up() follows in any case.
        """
        attempt = self._under_way.get(node)
        is_new = attempt is None
        if attempt is None:
            attempt = self._under_way[node] = PeerAttempt(node, asked)
        wish = self._control_loop().future()
        attempt.wishes[wish] = None
        return attempt, wish, is_new

    def begin(self, attempt: PeerAttempt, connecting: Coroutine[Any, Any, None]) -> None:
        """Spawn the task that ends in succeed() or fail(). Raises RuntimeError, OSError where the
        control loop has no thread, or no descriptors.
        """
        task = self._control_loop().spawn(connecting)
        with self._guard:
            attempt.task = task
            is_over = not self.is_under_way(attempt)
        if is_over:  # the node was closed meanwhile, or it has connected
            task.cancel()

    def is_under_way(self, attempt: PeerAttempt) -> bool:
        """Whether somebody waits for it. With the guard held."""
        return self._under_way.get(attempt.node) is attempt

    def end(self, attempt: PeerAttempt) -> list[Future]:
        """It is over; who waits for it. With the guard held: the peer is entered in the same
        step."""
        if self.is_under_way(attempt):
            del self._under_way[attempt.node]
        return list(attempt.wishes)

    def fail(self, attempt: PeerAttempt, error: Exception) -> None:
        """It is over, for all that wait for it."""
        with self._guard:
            wishes = self.end(attempt)
        for wish in wishes:
            wish.set_error(error)
            error = copy.copy(error)  # each raises one of its own

    def give_up(self, attempt: PeerAttempt, wish: Future) -> None:
        """One waits no longer; the last one ends it."""
        with self._guard:
            attempt.wishes.pop(wish, None)
            is_last = not attempt.wishes and self.is_under_way(attempt)
            if is_last:
                self.end(attempt)
        if is_last and attempt.task is not None:
            attempt.task.cancel()

    def close(self) -> None:
        """Nobody joins any more; all that wait have Closed."""
        with self._guard:
            attempts = list(self._under_way.values())
        for one in attempts:
            self.fail(one, errors.Closed(f"{one.asked}: this side was closed meanwhile"))
            if one.task is not None:
                one.task.cancel()


def give(wishes: Sequence[Future], peer: Peer) -> None:
    """It has connected."""
    for wish in wishes:
        wish.set_result(peer)
