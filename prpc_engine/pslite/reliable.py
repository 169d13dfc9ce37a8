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
waits for.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prpc_engine.errors import Backpressure, BadArguments
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


@dataclass
class _Lane:
    floor: int
    next: int  # to be handled
    answers: dict[int, Future] = field(default_factory=dict)
    held: dict[int, Callable[[], Any]] = field(default_factory=dict)


class Arrivals:
    """Receives messages that may come again or out of order (PS_RESEND): each is handled once, in
    the order of its lane, and one that comes again gets the first answer. Used in the reactor's
    thread.

    lanes_max: lanes that are remembered. ahead_max: how far ahead of the first open one a message
    may be.
    """

    def __init__(self, lanes_max: int = LANES_MAX, ahead_max: int = AHEAD_MAX) -> None:
        self._lanes_max, self._ahead_max = lanes_max, ahead_max
        self._lanes: OrderedDict[tuple[int, int], _Lane] = OrderedDict()

    def answer(
        self, lane_key: tuple[int, int], sequence: int, floor: int, handle: Callable[[], Any]
    ) -> Future:
        """The answer of that message, by handle() when it comes for the first time and its turn has
        come.

        Raises BadArguments for one that its sender said it waits for no more, Backpressure for one
        too far ahead."""
        lane = self._lane(lane_key, floor)
        if sequence < lane.floor:
            raise BadArguments(
                f"message {sequence} comes after its sender gave it up: "
                f"it waits from {lane.floor} on"
            )
        if sequence - lane.floor >= self._ahead_max:
            raise Backpressure(
                f"message {sequence} is {sequence - lane.floor} ahead of the first open one, "
                f"{self._ahead_max} may"
            )
        known = lane.answers.get(sequence)
        if known is None:
            known = lane.answers[sequence] = Future()
            lane.held[sequence] = handle
        again = Future()  # of its own for each request: one that its caller gives up is cancelled
        follow(again, known)
        while (due := lane.held.pop(lane.next, None)) is not None:
            answer = lane.answers[lane.next]
            lane.next += 1
            try:
                value = due()
            except (Exception, SystemExit) as error:  # whatever it is, others wait behind it
                answer.set_error(error)
            else:
                follow(answer, value)
        return again

    def _lane(self, key: tuple[int, int], floor: int) -> _Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(floor, floor)
            if len(self._lanes) > self._lanes_max:
                self._lanes.popitem(last=False)
            return lane
        self._lanes.move_to_end(key)
        if floor > lane.floor:
            for sequence in [each for each in lane.answers if each < floor]:
                del lane.answers[sequence]
                lane.held.pop(sequence, None)
            lane.floor, lane.next = floor, max(lane.next, floor)
        return lane


def follow(future: Future, value: Any) -> None:
    """Complete `future` with a value, or as another future is when that is done."""
    if isinstance(value, Future):
        value.add_done_callback(
            lambda done: (
                future.set_result(done._outcome)
                if done.finished == VALUE
                else future.set_error(done._outcome)
            )
        )
    else:
        future.set_result(value)
