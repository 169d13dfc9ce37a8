"""What a primary has applied, sent to one other server that has, or is to have, the same: in order, each with its number.

    state      event                                next
    copying    the other one reads the cut          copying: what is applied is kept, up to KEPT_BYTES_MAX
    copying    it has all of it                     live: what was kept is sent
    live       something is applied                 live: it is sent at once
    live       it has all that was kept             has_caught_up: it may count as a replica
    any        a forward fails, or too much waits   broken: it is filled anew

Numbers count what the partition has applied, from its beginning, on every server that holds it. The receiver takes them in order
(hosted.py), so it does not matter which of the connection's lanes a message took. Called in the reactor's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from prpc_engine.errors import RpcError
from prpc_engine.kv.copying import Outgoing
from shard import Future

KEPT_BYTES_MAX = 1 << 30  # while a partition is copied: some seconds of pushes at full speed
FORWARD_TIMEOUT_S = 10.0  # a replica that has not applied something for so long is filled anew
Forward = Callable[[int, tuple[Any, ...]], Future]  # number, (method, arguments) -> the call


class Stream:
    """See the file's head. Owned by one hosted partition.

    changed: is called when `acked` has grown, or the stream broke; with whether it is in another state now.
    """

    def __init__(self, begin: int, send: Forward, changed: Callable[[bool], None], outgoing: Outgoing | None) -> None:
        self.acked = begin  # it has all up to this number
        self.sent = begin
        self.outgoing = outgoing  # while it is copied
        self.failure = ""  # why it broke
        self._kept: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._kept_bytes = 0
        self._live_from = begin
        self._send = send
        self._changed = changed

    @property
    def is_live(self) -> bool:
        """Whether what is applied is sent at once: what is acknowledged as replicated waits for it."""
        return self.outgoing is None and not self.failure

    @property
    def has_caught_up(self) -> bool:
        """Whether the other one has all that was acknowledged without it."""
        return self.is_live and self.acked >= self._live_from

    def forward(self, number: int, message: tuple[Any, ...]) -> None:
        """Send what has just been applied, or keep it."""
        if self.failure:
            return
        if self.outgoing is None:
            self._send_now(number, message)
            return
        # Copied: what was received is memory of the worker that sent it.
        kept = tuple(each.copy() if isinstance(each, np.ndarray) else each for each in message)
        self._kept_bytes += sum(each.nbytes for each in kept if isinstance(each, np.ndarray))
        self._kept.append((number, kept))
        if self._kept_bytes > KEPT_BYTES_MAX:
            self.fail(f"{self._kept_bytes} bytes were applied while it was copied, {KEPT_BYTES_MAX} are kept")

    def go_live(self) -> None:
        """The other one has the cut."""
        self.outgoing = None
        while self._kept and not self.failure:
            self._send_now(*self._kept.popleft())
        self._kept_bytes = 0
        self._live_from = self.sent
        self._changed(True)

    def _send_now(self, number: int, message: tuple[Any, ...]) -> None:
        self.sent = number
        try:
            call = self._send(number, message)
        except RpcError as error:
            self.fail(str(error))
        else:
            call.add_done_callback(lambda done: self._answered(number, done))

    def _answered(self, number: int, call: Future) -> None:
        error = call.error()
        if error is not None:
            self.fail(str(error))
        elif number > self.acked:  # answers may pass each other; the receiver answers what it has applied in order
            catches_up = self.acked < self._live_from <= number
            self.acked = number
            self._changed(catches_up)

    def fail(self, why: str) -> None:
        """It cannot follow any more."""
        if not self.failure:
            self.failure = why
            self.close()
            self._changed(True)

    def close(self) -> None:
        """Keep nothing for it."""
        self._kept.clear()
        if self.outgoing is not None:
            self.outgoing.close()
