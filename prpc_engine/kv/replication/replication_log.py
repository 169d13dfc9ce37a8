"""What a primary has applied, sent to one other server that has, or is to have, the same: in order,
each with its number.

    state        event                                next
    copying      the other one reads the cut          copying: what is applied is kept
    copying      it has all of it                     live: what was kept is sent
    live         something is applied                 live: it is sent at once, and kept until it is
                                                      answered
    live         it has all that was kept             has_caught_up: it may count as a replica
    live         a connection was lost                interrupted: what is applied is kept; the
                                                      reconciler is called, but for an attempt that
                                                      has failed as the one before
    interrupted  resume(): the reconciler looks       live: all that has no answer is sent again
    interrupted  for INTERRUPTED_S_MAX                broken
    any          refused, or KEPT_BYTES_MAX are kept  broken: it is filled anew

Numbers count what the partition has applied, from its beginning, on every server that holds it. The
receiver takes them in order, and each once (replica.py): it does not matter how often a message was
sent, nor which of the connection's lanes it took.

In the reactor's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from prpc_engine.errors import MaybeExecuted, NotSent, RpcError
from prpc_engine.kv.replication.state_transfer import OutgoingCopy
from shard import Future

KEPT_BYTES_MAX = 1 << 30  # while a partition is copied: some seconds of pushes at full speed
FORWARD_TIMEOUT_S = 10.0  # a replica that has not applied something for so long is filled anew
# a server that lives is connected again within some ms; one that died leaves the placement
INTERRUPTED_S_MAX = 5.0
Message = tuple[Any, ...]  # method, arguments
Forward = Callable[[int, Message], Future]  # number, message -> the call


class ReplicationLog:
    """A replication log sends another server what the primary has applied, in order.

    Owned by one hosted partition; all of it runs in the reactor's thread. begin: the number up to
    which the other one has, or is to be copied, everything. changed: is called when `acked` has
    grown, or the stream broke; with whether it is in another state now. outgoing: the copy that the
    other one reads first; None: it has all. `failure` says why it broke. States: the table at the
    file's head.
    """

    def __init__(
        self,
        begin: int,
        send: Forward,
        changed: Callable[[bool], None],
        outgoing: OutgoingCopy | None,
    ) -> None:
        self.acked = begin  # it has all up to this number
        self.outgoing = outgoing  # while it is copied
        self.failure = ""  # why it broke
        # number, message, bytes: without an answer
        self._kept: deque[tuple[int, Message, int]] = deque()
        self._kept_bytes = 0
        self._newest = self._live_from = begin
        self._interrupted: float | None = None  # since when
        self._is_interrupted = False
        self._send = send
        self._changed = changed

    @property
    def is_live(self) -> bool:
        """Whether what is acknowledged as replicated waits for it."""
        return self.outgoing is None and not self.failure

    @property
    def has_caught_up(self) -> bool:
        """Whether the other one has all that was acknowledged without it."""
        return self.is_live and self.acked >= self._live_from

    @property
    def is_in_doubt(self) -> bool:
        """Whether it has gone on after an interruption, and nothing was answered since: to be
        looked at again in a while.
        """
        return self._interrupted is not None and not self.failure

    def forward(self, number: int, message: Message) -> None:
        """Send what has just been applied, or keep it."""
        if self.failure:
            return
        waits = self.outgoing is not None or self._is_interrupted
        if waits:  # for long, perhaps: what was received is memory of the worker that sent it
            message = tuple(
                each.copy() if isinstance(each, np.ndarray) else each for each in message
            )
        nbytes = sum(each.nbytes for each in message if isinstance(each, np.ndarray))
        self._kept.append((number, message, nbytes))
        self._kept_bytes += nbytes
        self._newest = number
        if not waits:
            self._send_now(number, message)
        if self._kept_bytes > KEPT_BYTES_MAX:
            self.fail(
                f"{self._kept_bytes} bytes of changes wait for it, {KEPT_BYTES_MAX} are allowed"
            )

    def go_live(self) -> None:
        """The other one has the cut."""
        self.outgoing = None
        self._live_from = self._newest
        self._send_all()
        self._changed(True)

    def resume(self, now: float) -> None:
        """After an interruption: send again what has no answer."""
        if not self._is_interrupted or self.failure:
            return
        if not self._kept:  # a later answer had come already
            self._is_interrupted = False
            return
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted > INTERRUPTED_S_MAX:
            self.fail(f"it could not be reached for {INTERRUPTED_S_MAX} s")
            return
        self._is_interrupted = False
        self._send_all()

    def _send_all(self) -> None:
        for number, message, _ in list(self._kept):
            if self._is_interrupted or self.failure:
                return
            self._send_now(number, message)

    def _send_now(self, number: int, message: Message) -> None:
        try:
            call = self._send(number, message)
        except RpcError as error:
            self._lost(error)
        else:
            call.when_done(lambda done: self._answered(number, done))

    def _answered(self, number: int, call: Future) -> None:
        error = call.error()
        if error is not None:
            self._lost(error)
        elif number > self.acked:
            # answers may pass each other; the receiver answers what it has applied in order
            catches_up = self.acked < self._live_from <= number
            self.acked = number
            self._interrupted = None
            while self._kept and self._kept[0][0] <= number:
                self._kept_bytes -= self._kept.popleft()[2]
            self._changed(catches_up)

    def _lost(self, error: BaseException) -> None:
        if self.failure:
            return
        if not isinstance(error, MaybeExecuted | NotSent):
            self.fail(str(error).partition("\n")[0])
        elif not self._is_interrupted:
            self._is_interrupted = True
            # Of a server that died each attempt fails at once: the next one comes by `is_in_doubt`.
            self._changed(self._interrupted is None)

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
