"""Receives that leave together: those of one source and step, while somebody fuses, in one request.
No I/O here.

    receives of a step are collected  while its fuse() scope is open, or all the time with
                                      tensor_fuse
    they leave                        when the scope ends; when FUSED_MAX keys are collected; when
                                      anybody waits for one of the step, looks whether it is done,
                                      or adds a callback: then those of all sources leave

Those with different timeouts leave in requests of their own. A fused request is answered when the
last of its tensors is there: do not fuse what the source sends only after it has what you make of
another one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from prpc_engine.cluster.receipt import Message, Receipt
from shard import Waiter

# keys of one request: more than two tasks exchange at one level of a graph, a quarter of a
# message's arrays
FUSED_MAX = 1024


class FuseCollector:
    """Collects the receives of one source and step, and lets them leave in one request.

    is_always  without an open scope, too (tensor_fuse)
    waiter     who turns the reactor while a thread waits for a receipt
    guard      the lock of what is collected
    leave      sends a message; called without the guard, by whoever made it leave

    Owned by a Server; thread-safe. When they leave: the list at the file's head.
    """

    def __init__(
        self,
        is_always: bool,
        waiter: Waiter,
        guard: AbstractContextManager[Any],
        leave: Callable[[Message], None],
    ) -> None:
        # collected, or not answered yet, in the order of their first receipts
        self.under_way: dict[Message, None] = {}
        self._is_always = is_always
        self._waiter = waiter
        self._guard = guard
        self._leave = leave
        self._scopes: Counter[int] = Counter()  # by step
        self._collected: dict[tuple[int, int, float], Message] = {}  # by source, step and timeout

    def receive(self, number: int, step: int, key: str, timeout_s: float) -> Receipt:
        """One tensor, alone or with others."""
        if not self._is_always and step not in self._scopes:
            return self.receive_many(number, step, [key], timeout_s, whole=False)
        place = number, step, timeout_s
        with self._guard:
            message = self._collected.get(place)
            if message is None:
                message = self._collected[place] = Message(
                    number, step, timeout_s, self.under_way, self.flush
                )
            message.keys.append(key)
            receipt = Receipt.of(message, self._waiter)
            is_full = len(message.keys) >= FUSED_MAX
            if is_full:
                del self._collected[place]
        if is_full:
            self._leave(message)
        return receipt

    def receive_many(
        self, number: int, step: int, keys: list[str], timeout_s: float, whole: bool = True
    ) -> Receipt:
        """Several by one request that leaves at once: their list, when all are there."""
        message = Message(number, step, timeout_s, self.under_way, self.flush)
        message.keys, message.whole = keys, whole
        # failpoint: fuse.receiving
        receipt = Receipt.of(message, self._waiter)
        self._leave(message)
        return receipt

    def open(self, step: int) -> None:
        """Begin to collect receives of that step."""
        with self._guard:
            self._scopes[step] += 1

    def close(self, step: int) -> None:
        """End what open() began; what was collected leaves."""
        with self._guard:
            self._scopes[step] -= 1
            self._scopes += Counter()  # drops what is at 0
        self.flush(step)

    def flush(self, step: int) -> None:
        """Let all that is collected of a step leave."""
        with self._guard:
            places = [place for place in self._collected if place[1] == step]
            messages = [self._collected.pop(place) for place in places]
        for message in messages:
            self._leave(message)

    def end(self, step: int | None, error: BaseException) -> None:
        """End all receives of that step, or of all steps, with an error."""
        with self._guard:
            for place in [place for place in self._collected if step in (None, place[1])]:
                del self._collected[place]
            messages = [message for message in list(self.under_way) if step in (None, message.step)]
        for message in messages:
            message.end(error)
