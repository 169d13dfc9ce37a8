"""When a slab gives memory back: a few times a minute, one idle segment at a time, by whoever turns
a reactor anyway.
"""

from __future__ import annotations

from shard.loop.reactor import Reactor
from shard.loop.timers import Timer
from shard.memory.slab import TRIM_S, Slab


class Trimmer:
    """Looks at a slab every TRIM_S seconds in the reactor's thread, until close(), or until the
    slab is closed.
    """

    def __init__(self, slab: Slab, reactor: Reactor) -> None:
        self._slab = slab
        self._reactor = reactor
        self._timer: Timer = reactor.call_later(TRIM_S, self._look)

    def _look(self) -> None:
        if self._slab.is_closed:
            return
        self._slab.trim()
        self._timer = self._reactor.call_later(TRIM_S, self._look)

    def close(self) -> None:
        """Look no more. In the reactor's thread, or before it turns."""
        self._timer.cancel()
