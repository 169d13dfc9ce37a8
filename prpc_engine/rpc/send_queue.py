"""What waits to be sent to one destination, in order, and whether that can be reached. No I/O, no
clock, no lock in this file: whoever owns the queue has a guard (pending.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

from shard import StateTable

RequestT = TypeVar("RequestT")


class QueueState(Enum):
    DOWN = "nobody connects to it, and nothing waits"
    CONNECTING = "somebody connects to it; what comes waits, behind what came before"
    DRAINING = "it is connected, and what waits leaves; what comes still waits behind that"
    UP = "it is connected, and nothing waits: what comes leaves at once"


class QueueEvent(Enum):
    OFFERED = "a request is to be sent there"
    CONNECTED = "who connects has a connection"
    FOUND = "there is a connection that nobody had to wait for"
    DRAINED = "it was asked for the next requests, and there are none"
    LOST = "what was connected is gone, as far as is known"
    GAVE_UP = "who connects gives up, or has nobody to connect for"


class QueueAction(Enum):
    ENQUEUE = "the request waits, behind the others"
    CONNECT = "whoever offered the request has somebody connect"
    SEND = "whoever offered the request sends it"
    DISMISS = "what waits is its owner's again, to be ended or sent elsewhere"


QUEUES = StateTable(
    "What waits for a destination",
    QueueState.DOWN,
    {
        (QueueState.DOWN, QueueEvent.OFFERED): (
            QueueState.CONNECTING,
            (QueueAction.ENQUEUE, QueueAction.CONNECT),
        ),
        (QueueState.DOWN, QueueEvent.FOUND): (QueueState.UP, ()),
        (QueueState.CONNECTING, QueueEvent.OFFERED): (
            QueueState.CONNECTING,
            (QueueAction.ENQUEUE,),
        ),
        (QueueState.CONNECTING, QueueEvent.CONNECTED): (QueueState.DRAINING, ()),
        (QueueState.CONNECTING, QueueEvent.GAVE_UP): (QueueState.DOWN, (QueueAction.DISMISS,)),
        (QueueState.DRAINING, QueueEvent.OFFERED): (QueueState.DRAINING, (QueueAction.ENQUEUE,)),
        (QueueState.DRAINING, QueueEvent.DRAINED): (QueueState.UP, ()),
        (QueueState.DRAINING, QueueEvent.LOST): (QueueState.CONNECTING, ()),
        (QueueState.UP, QueueEvent.OFFERED): (QueueState.UP, (QueueAction.SEND,)),
        (QueueState.UP, QueueEvent.FOUND): (QueueState.UP, ()),
        (QueueState.UP, QueueEvent.LOST): (QueueState.DOWN, ()),
    },
)


class SendQueue(Generic[RequestT]):
    """Requests that wait to be sent to one destination, and its state. len() and iteration: those
    that wait.

    order: by which they leave, a number of each that does not change; None: as they came. So a
    request that comes back after a loss leaves before those that were made after it. is_up: it
    begins UP, of a destination that needs no connecting before the first loss.

    Changed by the PendingRequests of its owner, under that one's guard.
    """

    __slots__ = ("_order", "_waiting", "state")

    def __init__(self, order: Callable[[RequestT], int] | None = None, is_up: bool = False) -> None:
        self.state = QueueState.UP if is_up else QUEUES.initial
        self._order = order
        self._waiting: dict[RequestT, None] = {}

    @property
    def is_busy(self) -> bool:
        """Whether somebody connects, or sends what waited: what comes has to wait."""
        return self.state is QueueState.CONNECTING or self.state is QueueState.DRAINING

    def after(self, event: QueueEvent) -> tuple[QueueAction, ...]:
        """Take the next state; what follows from the event. Raises LookupError for an event that
        cannot come now.
        """
        self.state, actions = QUEUES.after(self.state, event)
        return actions

    def add(self, request: RequestT) -> None:
        """It waits from now on."""
        self._waiting[request] = None

    def discard(self, request: RequestT) -> None:
        """It waits no more; nothing to do where it did not."""
        self._waiting.pop(request, None)

    def first(self, most: int | None = None) -> list[RequestT]:
        """Those that leave next, `most` of them; None: all. They go on waiting."""
        if self._order is None:
            return list(islice(self._waiting, most))
        return sorted(self._waiting, key=self._order)[:most]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self.first())
