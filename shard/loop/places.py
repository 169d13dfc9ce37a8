"""So many coroutines at a time: the others wait, in the order in which they came.

state    event                    what follows
waiting  one who is in leaves     the first that waits is in
waiting  its deadline passes      it waits no longer; TimeoutError
waiting  its task is cancelled    it waits no longer
in       it leaves, or its task   its place is free, or the next one's
           is cancelled
"""

from __future__ import annotations

from collections import deque

from shard.loop.future import Future
from shard.loop.together import together


class Places:
    """A semaphore for the coroutines of one reactor, in its thread.

    most  how many are in at a time
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = 0
        self._waiting: deque[Future] = deque()

    async def enter(self, deadline: float) -> None:
        """Be in; await a place until the reactor's clock says `deadline`. leave() follows, unless
        this raises: TimeoutError.
        """
        if self._taken < self.most:
            self._taken += 1
            return
        mine = Future()
        self._waiting.append(mine)
        try:
            await together(_result_of(mine), deadline=deadline)
        except BaseException:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self.leave()  # it was given a place, in the same turn
            raise

    def leave(self) -> None:
        """Be out: the place is the next one's."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken -= 1


async def _result_of(future: Future) -> None:
    await future
