"""Whether the peer's device is still there, of a queue pair whose own device does not say so: over
iWARP tcp sends again for minutes where nothing is acknowledged, other devices give up after 2 s.

    state  event                                  next, and what is done
    calm   silent_s have passed                   out: FLUSH is posted
    out    it has completed                       calm
    out    silent_s have passed, it may lie in    out: looks again soon, as this process may have
            the completion queue                   been late
    out    silent_s have passed                   the connection fails
    any    the connection ends                    none: no timer is left
"""

from __future__ import annotations

from collections.abc import Callable

from shard.loop.reactor import Reactor
from shard.transport.verbs_queue import VerbsFailed, VerbsQueue

LATE_LOOKS = 8  # within silent_s, while completions wait to be looked at


class VerbsPulse:
    """Of one connection, in its reactor's thread, from when it is made until cancel().

    silent_s  seconds from one look to the next, and for the answer
    has_work  whether completions wait to be looked at
    fail      called once with why the connection is lost
    """

    def __init__(
        self,
        queue: VerbsQueue,
        reactor: Reactor,
        silent_s: float,
        has_work: Callable[[], bool],
        fail: Callable[[str], object],
    ) -> None:
        self._queue, self._reactor, self._silent_s = queue, reactor, silent_s
        self._has_work, self._fail = has_work, fail
        self._is_out = False
        self._timer = reactor.call_later(silent_s, self._beat)

    def came_back(self) -> bool:
        """A FLUSH has completed; whether it was that of this look. They complete in order."""
        was_out, self._is_out = self._is_out, False
        return was_out

    def _beat(self) -> None:
        next_s = self._silent_s
        if self._is_out and self._has_work():
            next_s /= LATE_LOOKS
        elif self._is_out:
            text = f"the peer's device acknowledged nothing for {self._silent_s:.3g} s"
            self._fail(f"{self._queue.domain.port}: {text} (limits.peer_silent_s)")
            return
        else:
            try:
                self._queue.flush()
            except VerbsFailed as error:
                self._fail(str(error))
                return
            self._is_out = True
        self._timer = self._reactor.call_later(next_s, self._beat)

    def cancel(self) -> None:
        """The connection ends."""
        self._timer.cancel()
