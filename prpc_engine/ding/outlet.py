"""The events on their way to one other node: what is held, what has left, what may leave next. No
I/O, no clock, no lock in this file: its NodeLink has them.

    waiting  ->  sent  ->  taken            numbers: 1 for the first event that this process sends
    (no number)  [taken + 1, ...]           to that incarnation of the node

    state     event      next     what becomes of the events
    AWAITED   GREETED    UP       those held leave, in order
    UP        GREETED    UP       the same process over another connection: what it has not received
                                  leaves again, though it may have by now; another process: what
                                  the one before had not taken
    UP        LOST       LOST     held, as while it was awaited
    UP        LEFT       AWAY     forgotten: it said goodbye
    LOST      GREETED    UP       as above
    LOST,     GIVEN_UP   AWAY     forgotten, and counted as dropped
     AWAITED
    AWAY      GREETED    UP       what is published from then on leaves
    AWAY      OFFERED    AWAY     forgotten at once: nobody is there

    state           more than EVENTS_MAX events or BYTES_MAX bytes are here
    UP              whoever publishes waits until there is room
    UP, stalled     the oldest that have not left are dropped: it has taken nothing for long
    AWAITED, LOST   the oldest are dropped: a node that is not there must hold up nobody

One event alone is never too large: it is held, and leaves when what is under way is no more than a
node that has taken it may leave untold (UNTOLD_SHARE).

An event of a topic that the node has not subscribed to is left out when it is published, and once
more when it would leave; neither while the node is not UP, as its topics may change meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from prpc_engine.ding.greeting import Interest
from shard import StateTable

# Of one node, here: a burst of small events fits, and so do some of the largest models.
EVENTS_MAX = 16384
BYTES_MAX = 256 << 20
# 1/4096 of these: 64 KiB, which an idle node may have taken without a word (inlet.py)
UNTOLD_SHARE = 4096


class PresenceState(Enum):
    AWAITED = "it has not been connected yet"
    UP = "it is connected"
    LOST = "its connection is gone, and it did not say goodbye"
    AWAY = "it has stopped, or has been lost for long"


class PresenceEvent(Enum):
    GREETED = "it said hello over a connection"
    LOST = "that connection is gone"
    LEFT = "it said goodbye"
    GIVEN_UP = "it has been lost for as long as events are held, or is this very process"


class PresenceAction(Enum):
    RESUME = "what it has not received leaves, or leaves again"
    HOLD = "events are held for it"
    FORGET = "the events for it are forgotten"


PRESENCES = StateTable(
    "Another node of a DI-engine job",
    PresenceState.AWAITED,
    {
        (PresenceState.AWAITED, PresenceEvent.GREETED): (
            PresenceState.UP,
            (PresenceAction.RESUME,),
        ),
        (PresenceState.AWAITED, PresenceEvent.GIVEN_UP): (
            PresenceState.AWAY,
            (PresenceAction.FORGET,),
        ),
        (PresenceState.UP, PresenceEvent.GREETED): (PresenceState.UP, (PresenceAction.RESUME,)),
        (PresenceState.UP, PresenceEvent.LOST): (PresenceState.LOST, (PresenceAction.HOLD,)),
        (PresenceState.UP, PresenceEvent.LEFT): (PresenceState.AWAY, (PresenceAction.FORGET,)),
        (PresenceState.LOST, PresenceEvent.GREETED): (
            PresenceState.UP,
            (PresenceAction.RESUME,),
        ),
        (PresenceState.LOST, PresenceEvent.GIVEN_UP): (
            PresenceState.AWAY,
            (PresenceAction.FORGET,),
        ),
        (PresenceState.AWAY, PresenceEvent.GREETED): (
            PresenceState.UP,
            (PresenceAction.RESUME,),
        ),
        (PresenceState.AWAY, PresenceEvent.LOST): (PresenceState.AWAY, ()),
    },
)


class Event:
    """One event as it is published, the same for all nodes: its topic and its bytes, and which of
    all events of this process it is.
    """

    __slots__ = ("nbytes", "payload", "serial", "topic")

    def __init__(self, serial: int, topic: bytes, payload: Any, nbytes: int) -> None:
        self.serial, self.topic, self.payload, self.nbytes = serial, topic, payload, nbytes


class Outlet:
    """What one other node is still to get. States: the tables at the file's head."""

    def __init__(self, events_max: int = EVENTS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.state = PRESENCES.initial
        self._events_max, self._bytes_max = events_max, bytes_max
        self._untold_bytes = bytes_max // UNTOLD_SHARE
        self._waiting: deque[Event] = deque()
        self._sent: deque[Event] = deque()
        self._waiting_bytes = self._sent_bytes = 0
        self._taken = 0  # the number before that of the first in _sent
        self._incarnation = 0  # of the process that has got those
        self.interest: Interest | None = None  # of the node while it is UP
        self.is_stalled = False
        self.dropped = 0  # events that it will never get

    @property
    def waiting(self) -> int:
        """Events that have not left."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Events that have left and were not taken."""
        return len(self._sent)

    @property
    def taken(self) -> int:
        """Events that the node has handed out, of all that this process has sent it."""
        return self._taken

    @property
    def must_wait(self) -> bool:
        """Whether whoever publishes has to wait for room."""
        return bool(self._waiting) and self.state is PresenceState.UP and not self.is_stalled

    def held(self) -> list[Event]:
        """Those that have not left, in order."""
        return list(self._waiting)

    # -- events ------------------------------------------------------------------------------------

    def offer(self, event: Event) -> None:
        """It was published."""
        if self.state is PresenceState.AWAY or not self._wants(event):
            return
        self._waiting.append(event)
        self._waiting_bytes += event.nbytes
        if self.state is not PresenceState.UP or self.is_stalled:
            self._drop_oldest()

    def first(self) -> tuple[int, Event] | None:
        """The event that may leave now, and its number; None: none may."""
        if self.state is not PresenceState.UP:
            return None
        waiting = self._waiting
        while waiting:
            event = waiting[0]
            if not self._wants(event):
                waiting.popleft()
                self._waiting_bytes -= event.nbytes
                continue
            in_flight = len(self._sent)
            is_full = (
                self._sent_bytes > self._untold_bytes
                and self._sent_bytes + event.nbytes > self._bytes_max
            )
            if in_flight and (in_flight >= self._events_max or is_full):
                return None
            return self._taken + in_flight + 1, event
        return None

    def leave(self) -> None:
        """That of first() has left."""
        event = self._waiting.popleft()
        self._waiting_bytes -= event.nbytes
        self._sent.append(event)
        self._sent_bytes += event.nbytes

    def refuse(self) -> None:
        """That of first() can never be sent."""
        event = self._waiting.popleft()
        self._waiting_bytes -= event.nbytes
        self.dropped += 1

    def take(self, count: int) -> None:
        """The node has handed out so many events, of all that this process has sent it."""
        for _ in range(min(count - self._taken, len(self._sent))):
            event = self._sent.popleft()
            self._sent_bytes -= event.nbytes
            self._taken += 1
            self.is_stalled = False

    def stall(self) -> None:
        """It has taken nothing for long: nobody waits for it any more, until it goes on."""
        self.is_stalled = True
        self._drop_oldest()

    def tell(self, interest: Interest) -> None:
        """The node's topics have changed; older news change nothing."""
        if self.interest is not None and interest.version >= self.interest.version:
            self.interest = interest

    def _wants(self, event: Event) -> bool:
        return self.interest is None or self.interest.wants(event.topic)

    def _drop_oldest(self) -> None:
        while len(self._waiting) > 1 and (
            len(self._waiting) > self._events_max or self._waiting_bytes > self._bytes_max
        ):
            event = self._waiting.popleft()
            self._waiting_bytes -= event.nbytes
            self.dropped += 1

    # -- the node ----------------------------------------------------------------------------------

    def greeted(self, incarnation: int, received: int, taken: int, interest: Interest) -> None:
        """It said hello: which process it is, and how far that has got."""
        before = self.interest
        is_same = incarnation == self._incarnation
        # Where both dial, its hello over the second connection may be older than what it has told
        # over the first: it has forgotten nothing while it was up.
        is_late = is_same and self.state is PresenceState.UP
        self._follow(PresenceEvent.GREETED)
        self.is_stalled = False
        if not is_late or before is None or interest.version > before.version:
            self.interest = interest
        if is_same and (is_late or received >= self._taken):
            self.take(taken)
            self._back(max(0, received - self._taken))
        else:  # another process, or one that has forgotten this one
            self._back(0)
            self._incarnation, self._taken = incarnation, received

    def _back(self, kept: int) -> None:
        """All but so many of those that have left are to leave again."""
        while len(self._sent) > kept:
            event = self._sent.pop()
            self._sent_bytes -= event.nbytes
            self._waiting.appendleft(event)
            self._waiting_bytes += event.nbytes

    def follow(self, event: PresenceEvent) -> int:
        """The connection was lost, the node left, or was lost for long; how many events were
        forgotten by that.
        """
        do: dict[PresenceAction, Callable[[], int]] = {
            PresenceAction.HOLD: self._hold,
            PresenceAction.FORGET: self._forget,
        }
        forgotten = sum(do[action]() for action in self._follow(event))
        if event is PresenceEvent.GIVEN_UP:
            self.dropped += forgotten
        return forgotten

    def _follow(self, event: PresenceEvent) -> tuple[PresenceAction, ...]:
        self.state, actions = PRESENCES.after(self.state, event)
        return actions

    def _hold(self) -> int:
        self.interest = None  # it may subscribe to others meanwhile
        self.is_stalled = False
        self._drop_oldest()
        return 0

    def _forget(self) -> int:
        forgotten = len(self._waiting) + len(self._sent)
        self._waiting.clear()
        self._sent.clear()
        self._waiting_bytes = self._sent_bytes = 0
        self._incarnation = 0  # its numbers are told anew when it greets
        self.interest = None
        return forgotten
