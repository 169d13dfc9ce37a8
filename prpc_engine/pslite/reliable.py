"""Messages that get lost and are sent again: who draws the lots, and who knows what has come
before. No I/O here.

    at the sender                                at the receiver, for each lane (a customer of one
                                                 incarnation of a process)
    each message of a lane has the next number,  the next number is handled; one further on is held
      and says below which number nothing is     until all before it have been, or are below the
      waited for any more (floor)                floor
    no answer within resend_s: again, twice as   a number that came before is not handled again: it
      patient                                    gets the answer of the first one, at once or when
                                                 there is one; answers below the floor are forgotten

So order is kept, though any message may be lost, and what is remembered is what a sender still
waits for: idempotency_window.py, with the answers as outcomes, settled up to the floor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from prpc_engine.errors import Backpressure, BadArguments
from prpc_engine.idempotency_window import FORGOTTEN, NEW, IdempotencyWindow, SeenNumbers
from shard import VALUE, Future

LANES_MAX = 4096  # of all senders together; the one that was silent for longest is forgotten
AHEAD_MAX = 4096  # numbers above the floor: several times what a sender has on its way
# of the first resend_s: a server that is slow is not helped by more messages
PATIENCE_GROWTH_MAX = 8


class Dice:
    """Loses so many percent of what it is asked about, each by a draw of its own; the same for the
    same seed and node.
    """

    def __init__(self, percent: int, seed: int, node: int) -> None:
        self._share = percent / 100
        self._random = random.Random(f"{seed}/{node}")

    def drops(self) -> bool:
        """Whether the next message is lost."""
        return self._random.random() < self._share


class _Lane(SeenNumbers[Future]):
    """Numbered from 0 on. `next`: to be handled; `held`: came before it."""

    __slots__ = ("held", "next")

    def __init__(self) -> None:
        super().__init__(-1)
        self.next = 0
        self.held: dict[int, Callable[[], Any]] = {}

    def settle(self, number: int) -> None:
        super().settle(number)
        if self.next <= number:
            self.next = number + 1
            self.held = {each: held for each, held in self.held.items() if each > number}


class _Lanes(IdempotencyWindow[tuple[int, int], Future]):
    def _begun(self, sender: tuple[int, int]) -> _Lane:
        return _Lane()


class Arrivals:
    """Receives messages that may come again or out of order (PS_RESEND): each is handled once, in
    the order of its lane, and one that comes again gets the first answer. Used in the reactor's
    thread.

    lanes_max: lanes that are remembered. ahead_max: how far ahead of the first open one a message
    may be.
    """

    def __init__(self, lanes_max: int = LANES_MAX, ahead_max: int = AHEAD_MAX) -> None:
        self._ahead_max = ahead_max
        self._lanes = _Lanes(lanes_max)

    def answer(
        self, lane_key: tuple[int, int], sequence: int, floor: int, handle: Callable[[], Any]
    ) -> Future:
        """The answer of that message, by handle() when it comes for the first time and its turn has
        come.

        Raises BadArguments for one that its sender said it waits for no more, Backpressure for one
        too far ahead."""
        lane = self._lanes.heard(lane_key)
        assert isinstance(lane, _Lane)
        if floor > lane.floor + 1:
            lane.settle(floor - 1)
        first_open = lane.floor + 1
        known = lane.find(sequence)
        if known is FORGOTTEN:
            raise BadArguments(
                f"message {sequence} comes after its sender gave it up: "
                f"it waits from {first_open} on"
            )
        if sequence - first_open >= self._ahead_max:
            raise Backpressure(
                f"message {sequence} is {sequence - first_open} ahead of the first open one, "
                f"{self._ahead_max} may"
            )
        if known is NEW:
            lane.keep(sequence, Future())
            lane.held[sequence] = handle
        again = Future()  # of its own for each request: one that its caller gives up is cancelled
        follow(again, lane.kept[sequence])
        while (due := lane.held.pop(lane.next, None)) is not None:
            answer = lane.kept[lane.next]
            lane.next += 1
            try:
                value = due()
            except (Exception, SystemExit) as error:  # whatever it is, others wait behind it
                answer.set_error(error)
            else:
                follow(answer, value)
        return again


def follow(future: Future, value: Any) -> None:
    """Complete `future` with a value, or as another future is when that is done."""
    if isinstance(value, Future):
        value.when_done(
            lambda done: (
                future.set_result(done._outcome)
                if done.finished == VALUE
                else future.set_error(done._outcome)
            )
        )
    else:
        future.set_result(value)
