"""Messages that get lost and are sent again: who draws the lots, and who knows what has come before. No I/O here.

    at the sender                 at the receiver
    no answer within resend_s     a message known by (incarnation of its sender, sequence) is not handled again: it gets the
    → again, twice as patient     answer of the first one, at once or when there is one

Remembered are the last ANSWERS_MAX messages of all senders together.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from shard import VALUE, Future

ANSWERS_MAX = 4096  # several times what one sender has on its way
PATIENCE_GROWTH_MAX = 8  # of the first resend_s: a server that is slow is not helped by more messages


class Dice:
    """Loses so many percent of what it is asked about, each by a draw of its own; the same for the same seed and node."""

    def __init__(self, percent: int, seed: int, node: int) -> None:
        self._share = percent / 100
        self._random = random.Random(f"{seed}/{node}")

    def drops(self) -> bool:
        """Whether the next message is lost."""
        return self._random.random() < self._share


class Remembered:
    """What was received. Called in the reactor's thread."""

    def __init__(self, answers_max: int = ANSWERS_MAX) -> None:
        self._answers_max = answers_max
        self._answers: OrderedDict[tuple[int, int], Future] = OrderedDict()

    def answer(self, incarnation: int, sequence: int, handle: Callable[[], Any]) -> Future:
        """The answer of that message, by handle() when it comes for the first time."""
        key = incarnation, sequence
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = Future()
            if len(self._answers) > self._answers_max:
                self._answers.popitem(last=False)
            try:
                value = handle()
            except Exception as error:
                known.set_error(error)
            else:
                follow(known, value)
        again = Future()  # of its own for each request: one that its caller gives up is cancelled
        follow(again, known)
        return again


def follow(future: Future, value: Any) -> None:
    """Complete `future` with a value, or as another future is when that is done."""
    if isinstance(value, Future):
        value.add_done_callback(
            lambda done: future.set_result(done._outcome) if done.finished == VALUE else future.set_error(done._outcome)
        )
    else:
        future.set_result(value)
