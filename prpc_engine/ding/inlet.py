"""The events that have come from all other nodes, until recv() takes them. No I/O, no clock, no
lock in this file: its Exchange has them.

    a number is           it is
    the next of its node  new: ready, parked or left out
    an earlier one        left out: it came before, over a connection that was lost
    a later one           refused: a sender leaves none out

    topic                 while this node starts        afterwards
    subscribed            ready                         ready
    not subscribed        parked; ready as soon as      left out: other nodes send none, but what
                          somebody subscribes to it,    was on its way
                          in the place that it came in

A program subscribes some time after its node is connected: what comes before that is parked, so
that no first event is lost, and its sender has its memory back. PARKED_MAX events or
PARKED_BYTES_MAX bytes are, the latest, and all that are left are dropped when the node has settled.

A node is told how many of its events were taken once a share of what may be under way is, or, where
nothing else is ready, once NOTE_EVENTS or NOTE_BYTES are: so it keeps few that are done with, and a
single event costs no message back.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from prpc_engine.ding.greeting import Interest
from prpc_engine.ding.outlet import BYTES_MAX, EVENTS_MAX, UNTOLD_SHARE

PARKED_MAX = EVENTS_MAX
PARKED_BYTES_MAX = 64 << 20
NOTE_SHARE = 8  # a note for each eighth of what may be under way
NOTE_EVENTS, NOTE_BYTES = 64, BYTES_MAX // UNTOLD_SHARE


class EventSource:
    """One process that sends events: how far it has got. Changed by its Inlet alone."""

    __slots__ = ("bytes", "incarnation", "noted", "received", "taken")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.received = self.taken = 0
        self.noted = 0  # of `taken`: it was told so
        self.bytes = 0  # of those it was not told of


class ArrivedEvent(NamedTuple):
    """An event that came."""

    source: EventSource
    topic: bytes
    payload: Any
    nbytes: int
    place: int  # among all that came
    was_parked: bool = False  # then it counts as taken already


_place = attrgetter("place")


class Inlet:
    """Keeps events in order, and knows what this node has subscribed to."""

    def __init__(
        self,
        parked_max: int = PARKED_MAX,
        parked_bytes_max: int = PARKED_BYTES_MAX,
        events_max: int = EVENTS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._parked_max, self._parked_bytes_max = parked_max, parked_bytes_max
        self._note_events, self._note_bytes = events_max // NOTE_SHARE, bytes_max // NOTE_SHARE
        self._sources: dict[int, EventSource] = {}
        self._ready: deque[ArrivedEvent] = deque()
        self._parked: deque[ArrivedEvent] = deque()
        self._parked_bytes = 0
        self._due: dict[EventSource, None] = {}  # took some, and were not told
        self.interest = Interest(1, False, frozenset())
        self._places = itertools.count()
        self.left_out = 0  # events that nobody had subscribed to
        self.parked_dropped = 0  # of these, such as found no room before the node had settled

    @property
    def ready(self) -> int:
        """Events that recv() has not taken."""
        return len(self._ready)

    @property
    def parked(self) -> int:
        """Events that wait for somebody to subscribe to their topic."""
        return len(self._parked)

    # -- what comes --------------------------------------------------------------------------------

    def put(self, incarnation: int, number: int, topic: bytes, payload: Any, nbytes: int) -> bool:
        """An event came from that process; False: others before it are missing."""
        source = self._sources.get(incarnation)
        if source is None:
            source = self._sources[incarnation] = EventSource(incarnation)
        if number <= source.received:
            return True
        if number > source.received + 1:
            return False
        source.received = number
        arrival = ArrivedEvent(source, topic, payload, nbytes, next(self._places))
        if topic in self.interest.topics:
            self._ready.append(arrival)
        elif self.interest.is_settled:
            self._leave_out(arrival)
        else:
            self._took(source, nbytes)  # its sender need not wait for somebody to subscribe
            self._park(arrival)
        return True

    def _leave_out(self, arrival: ArrivedEvent) -> None:
        self.left_out += 1
        self._took(arrival.source, arrival.nbytes)

    def _park(self, arrival: ArrivedEvent) -> None:
        if isinstance(arrival.payload, np.ndarray):  # in the memory of its sender, who needs it
            arrival = arrival._replace(payload=arrival.payload.tobytes())
        self._parked.append(arrival)
        self._parked_bytes += arrival.nbytes
        while len(self._parked) > self._parked_max or (
            len(self._parked) > 1 and self._parked_bytes > self._parked_bytes_max
        ):
            self._parked_bytes -= self._parked.popleft().nbytes
            self.left_out += 1
            self.parked_dropped += 1

    def _took(self, source: EventSource, nbytes: int) -> None:
        source.taken += 1
        source.bytes += nbytes
        self._due[source] = None

    def progress(self, incarnation: int) -> tuple[int, int]:
        """How many events of that process were received and taken."""
        source = self._sources.get(incarnation)
        return (0, 0) if source is None else (source.received, source.taken)

    def forget(self, incarnation: int) -> None:
        """That process has ended: what came from it is still handed out."""
        source = self._sources.pop(incarnation, None)
        if source is not None:
            self._due.pop(source, None)

    # -- what recv() takes -------------------------------------------------------------------------

    def take(self) -> ArrivedEvent | None:
        """The next event; None: there is none."""
        if not self._ready:
            return None
        arrival = self._ready.popleft()
        if not arrival.was_parked:
            self._took(arrival.source, arrival.nbytes)
        return arrival

    def notes(self) -> list[tuple[int, int]]:
        """Whom to tell how many were taken: incarnation and count. They count as told."""
        if not self._due:
            return []
        is_idle = not self._ready
        events = NOTE_EVENTS if is_idle else self._note_events
        nbytes = NOTE_BYTES if is_idle else self._note_bytes
        found = []
        for source in list(self._due):
            if source.taken - source.noted >= events or source.bytes >= nbytes:
                found.append((source.incarnation, source.taken))
                source.noted, source.bytes = source.taken, 0
                del self._due[source]
        return found

    # -- topics ------------------------------------------------------------------------------------

    def subscribe(self, topic: bytes) -> bool:
        """What was parked of it is ready; whether anything has changed."""
        if topic in self.interest.topics:
            return False
        self._change(self.interest.topics | {topic})
        if self._parked:
            found = [one for one in self._parked if one.topic == topic]
            if found:
                self._parked = deque(one for one in self._parked if one.topic != topic)
                self._parked_bytes -= sum(one.nbytes for one in found)
                parked = (one._replace(was_parked=True) for one in found)
                self._ready = deque(heapq.merge(self._ready, parked, key=_place))
        return True

    def unsubscribe(self, pattern: str) -> bool:
        """That topic, or all that a pattern of fnmatch means; whether anything has changed."""
        names = {topic: topic.decode("utf-8", "surrogatepass") for topic in self.interest.topics}
        kept = frozenset(
            topic
            for topic, name in names.items()
            if name != pattern and not fnmatchcase(name, pattern)
        )
        if kept == self.interest.topics:
            return False
        self._change(kept)
        return True

    def settle(self) -> None:
        """The program has had the time to subscribe to what it wants."""
        self.left_out += len(self._parked)
        self._parked.clear()
        self._parked_bytes = 0
        self.interest = Interest(self.interest.version + 1, True, self.interest.topics)

    def _change(self, topics: Iterable[bytes]) -> None:
        before = self.interest
        self.interest = Interest(before.version + 1, before.is_settled, frozenset(topics))
