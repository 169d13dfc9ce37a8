"""Requests that outlive their connection: where each of them is, until it has ended.

One PendingRequests holds those of one owner (a client, a link, a session, a lane), each from the
moment that nothing else sees to it: it could not be sent at once, or what it was sent over is lost.
A request that nothing happens to never comes here.

    its owner                       here
    admit(), or hold() of one that  KEPT; a timer of the reactor is set to its deadline
      was sent, and is lost
    offer(request, queue)           QUEUED, where the destination is not connected; the owner
                                    connects, or sends
    take(queue)                     KEPT: those whose turn it is, in order
    sending(request), then sends    UNDER_WAY: from now on the connection's table of calls sees to
                                    its deadline
    left(request)                   counts against the bounds no more
    pause(request, s, then)         PAUSED; then(), once the pause is over
    end(request)                    ENDED: out of its queue, its timers off, nothing of it held

Invariants: a request is in one place at most, and whoever finds it elsewhere than it thought (it
was ended, or sent, by another thread) is told so and leaves it alone. Its deadline is seen to in
every place: overdue(request) is called in the reactor, at the deadline, or as soon as it is held
again after that. close() has the owner end all that are held, and each that comes later.

Who may call what: any thread, but for pause(), of the reactor's thread. The guard is an RLock: a
destructor or a callback that ends a request may run in a thread that has it. No callback of the
owner is called with it held.

What the owner decides stays with it: whether a failed request is sent again, where, after how long
(backoff.py), what it ends with, and who connects.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Generic

from prpc_engine.rpc.call import NEVER
from prpc_engine.rpc.send_queue import QueueAction, QueueEvent, RequestT, SendQueue
from shard import Reactor, StateTable, Timer, runtime


class RequestPlace(Enum):
    KEPT = "its owner decides about it, or looks for where it goes"
    PAUSED = "it waits for the time of its next attempt"
    QUEUED = "it waits in the queue of one destination"
    UNDER_WAY = "it was handed to a connection, whose table of calls sees to its deadline"
    ENDED = "it has its outcome; nothing of it is held"


class PlaceEvent(Enum):
    HELD = "its owner takes it on, or back: what it was sent over is lost"
    OFFERED = "its destination is not connected"
    TAKEN = "its turn in the queue has come, or it is to go elsewhere"
    SENDING = "it is about to be handed to a connection"
    DELAYED = "the next attempt is to come after a pause"
    RESUMED = "that is over"
    DUE = "its deadline has come"
    FINISHED = "an answer, an error, cancel() or close() has completed it"


class PlaceAction(Enum):
    ENQUEUE = "it goes behind the others in the queue"
    HAND_OVER = "its owner sends it"
    SET_PAUSE = "a timer is set to the end of the pause"
    SET_TIMER = "a timer is set to its deadline, unless one is"
    GO_ON = "its owner goes on with it"
    EXPIRE = "its owner ends it: the deadline is over"
    DEQUEUE = "it leaves the queue"
    FORGET = "its timers are off, it counts no more, and nothing of it is held"


PLACES = StateTable(
    "A pending request",
    RequestPlace.KEPT,
    {
        (RequestPlace.KEPT, PlaceEvent.HELD): (RequestPlace.KEPT, (PlaceAction.SET_TIMER,)),
        (RequestPlace.KEPT, PlaceEvent.OFFERED): (RequestPlace.QUEUED, (PlaceAction.ENQUEUE,)),
        (RequestPlace.KEPT, PlaceEvent.SENDING): (RequestPlace.UNDER_WAY, (PlaceAction.HAND_OVER,)),
        (RequestPlace.KEPT, PlaceEvent.DELAYED): (RequestPlace.PAUSED, (PlaceAction.SET_PAUSE,)),
        (RequestPlace.KEPT, PlaceEvent.DUE): (RequestPlace.KEPT, (PlaceAction.EXPIRE,)),
        (RequestPlace.KEPT, PlaceEvent.FINISHED): (RequestPlace.ENDED, (PlaceAction.FORGET,)),
        (RequestPlace.PAUSED, PlaceEvent.HELD): (RequestPlace.PAUSED, ()),
        (RequestPlace.PAUSED, PlaceEvent.OFFERED): (RequestPlace.PAUSED, ()),
        (RequestPlace.PAUSED, PlaceEvent.SENDING): (RequestPlace.PAUSED, ()),
        (RequestPlace.PAUSED, PlaceEvent.DELAYED): (RequestPlace.PAUSED, ()),
        (RequestPlace.PAUSED, PlaceEvent.RESUMED): (RequestPlace.KEPT, (PlaceAction.GO_ON,)),
        (RequestPlace.PAUSED, PlaceEvent.DUE): (RequestPlace.PAUSED, (PlaceAction.EXPIRE,)),
        (RequestPlace.PAUSED, PlaceEvent.FINISHED): (RequestPlace.ENDED, (PlaceAction.FORGET,)),
        (RequestPlace.QUEUED, PlaceEvent.HELD): (RequestPlace.QUEUED, ()),
        (RequestPlace.QUEUED, PlaceEvent.OFFERED): (RequestPlace.QUEUED, ()),
        (RequestPlace.QUEUED, PlaceEvent.TAKEN): (RequestPlace.KEPT, (PlaceAction.DEQUEUE,)),
        (RequestPlace.QUEUED, PlaceEvent.SENDING): (RequestPlace.QUEUED, ()),
        (RequestPlace.QUEUED, PlaceEvent.DELAYED): (RequestPlace.QUEUED, ()),
        (RequestPlace.QUEUED, PlaceEvent.DUE): (RequestPlace.QUEUED, (PlaceAction.EXPIRE,)),
        (RequestPlace.QUEUED, PlaceEvent.FINISHED): (
            RequestPlace.ENDED,
            (PlaceAction.DEQUEUE, PlaceAction.FORGET),
        ),
        (RequestPlace.UNDER_WAY, PlaceEvent.HELD): (RequestPlace.KEPT, (PlaceAction.SET_TIMER,)),
        (RequestPlace.UNDER_WAY, PlaceEvent.OFFERED): (RequestPlace.UNDER_WAY, ()),
        (RequestPlace.UNDER_WAY, PlaceEvent.SENDING): (RequestPlace.UNDER_WAY, ()),
        (RequestPlace.UNDER_WAY, PlaceEvent.DELAYED): (RequestPlace.UNDER_WAY, ()),
        (RequestPlace.UNDER_WAY, PlaceEvent.DUE): (RequestPlace.UNDER_WAY, ()),
        (RequestPlace.UNDER_WAY, PlaceEvent.FINISHED): (RequestPlace.ENDED, (PlaceAction.FORGET,)),
    },
)


class _Entry(Generic[RequestT]):
    """One request, while it is held. `request` None: it has ended; timers may still hold this."""

    __slots__ = (
        "armed",
        "deadline",
        "is_unsent",
        "nbytes",
        "pause",
        "place",
        "queue",
        "request",
        "then",
        "timer",
    )

    def __init__(self, request: RequestT, deadline: float, nbytes: int, is_unsent: bool) -> None:
        self.request: RequestT | None = request
        self.deadline = deadline
        self.nbytes = nbytes
        self.is_unsent = is_unsent  # it counts against the bounds
        self.place = PLACES.initial
        self.queue: SendQueue[RequestT] | None = None  # while it is QUEUED
        self.timer: Timer | None = None  # of its deadline
        self.armed = NEVER  # to when that is set, or is about to be
        self.pause: Timer | None = None
        self.then: Callable[[], object] | None = None  # what follows that


class PendingRequests(Generic[RequestT]):
    """The requests of one owner that are not answered, and may have no connection: their places,
    deadlines and bounds, until each has ended.

    reactor  in whose turns deadlines and pauses are seen to; whose clock they are on, in seconds
    overdue  called there with a request whose deadline has come: ends it, or gives it another by
             until()
    closed   called with each request that is held when close() is called or comes after it, in
             that thread: ends it

    A request is any object that is hashed by identity. It is held until end(request): the owner
    sees to it that this is called when the request has its outcome, mostly by
    request.when_done(pending.end). guard: held where an owner changes something of its own
    in one step with this. Raises nothing but what `overdue`, `closed` and `then` raise.

    Which place a request is in, and what follows: the table PLACES.
    """

    def __init__(
        self,
        reactor: Reactor,
        overdue: Callable[[RequestT], object],
        closed: Callable[[RequestT], object],
    ) -> None:
        self.guard = runtime.RLock()  # any thread admits requests, and cancels them
        self.is_closed = False
        self.unsent = 0  # requests that were admitted and have not left
        self.unsent_bytes = 0
        self._reactor = reactor
        self._overdue = overdue
        self._closed = closed
        self._entries: dict[Any, _Entry[RequestT]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def place(self, request: RequestT) -> RequestPlace:
        """Where it is now; ENDED where it is not held."""
        entry = self._entries.get(request)
        return RequestPlace.ENDED if entry is None else entry.place

    def is_unsent(self, request: RequestT) -> bool:
        """Whether it was admitted and has not left."""
        entry = self._entries.get(request)
        return entry is not None and entry.is_unsent

    # -- taking on ---------------------------------------------------------------------------------

    def admit(
        self,
        request: RequestT,
        deadline: float,
        requests_max: int,
        nbytes: int = 0,
        bytes_max: int | None = None,
    ) -> bool:
        """Hold a request that never left, if there is room: False where so many requests or bytes
        are held already. A single one may be of any size.
        """
        with self.guard:
            if self.unsent >= requests_max or (
                bytes_max is not None and self.unsent and self.unsent_bytes + nbytes > bytes_max
            ):
                return False
            entry = self._entries[request] = _Entry(request, deadline, nbytes, True)
            self.unsent += 1
            self.unsent_bytes += nbytes
        self._see_to(request, entry)
        return True

    def hold(self, request: RequestT, deadline: float, nbytes: int = 0) -> bool:
        """Hold a request, whatever the bounds: one that comes, or comes back, as its connection is
        lost. True where it was not held before.
        """
        with self.guard:
            entry = self._entries.get(request)
            if entry is not None:
                if PlaceAction.SET_TIMER in self._move(entry, PlaceEvent.HELD):
                    self._set_timer(entry)
                return False
            entry = self._entries[request] = _Entry(request, deadline, nbytes, False)
        self._see_to(request, entry)
        return True

    def _see_to(self, request: RequestT, entry: _Entry[RequestT]) -> None:
        self._set_timer(entry)
        if self.is_closed:  # looked at when it is held: close() finds it, or this does
            self._closed(request)

    def until(self, request: RequestT, deadline: float) -> None:
        """It has that deadline from now on."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.deadline = deadline
            self._set_timer(entry)

    # -- sending -----------------------------------------------------------------------------------

    def offer(self, request: RequestT, queue: SendQueue[RequestT]) -> tuple[QueueAction, ...]:
        """It is to be sent to that destination. What its owner has to do: SEND it, CONNECT, or
        nothing, as it waits behind others, or is in another place already.
        """
        with self.guard:
            entry = self._entries.get(request)
            if entry is None or entry.place is not RequestPlace.KEPT:
                return ()
            actions = queue.after(QueueEvent.OFFERED)
            if QueueAction.ENQUEUE in actions:
                self._move(entry, PlaceEvent.OFFERED)
                entry.queue = queue
                queue.add(request)
            return actions

    def take(
        self, queue: SendQueue[RequestT], most: int | None = None, bytes_most: int | None = None
    ) -> list[RequestT]:
        """The next ones of a DRAINING queue: `most` of them, and no more once they have so many
        bytes. None: it is UP from now on, as nothing waits any more.
        """
        with self.guard:
            found = queue.first(most)
            if not found:
                queue.after(QueueEvent.DRAINED)
            elif bytes_most is not None:
                some = nbytes = 0
                while some < len(found) and nbytes < bytes_most:
                    nbytes += self._entries[found[some]].nbytes
                    some += 1
                del found[some:]
            return self._dequeue(found)

    def pick(self, queue: SendQueue[RequestT], which: Callable[[RequestT], bool]) -> list[RequestT]:
        """Take those out of a queue of which that is so, in order; its state stays."""
        with self.guard:
            return self._dequeue([request for request in queue if which(request)])

    def tell(self, queue: SendQueue[RequestT], event: QueueEvent) -> list[RequestT]:
        """CONNECTED, FOUND, LOST or GAVE_UP, of that destination; those that wait there no more.
        Raises LookupError for an event that cannot come in its state.
        """
        with self.guard:
            if QueueAction.DISMISS in queue.after(event):
                return self._dequeue(queue.first())
            return []

    def _dequeue(self, requests: list[RequestT]) -> list[RequestT]:
        """Of those, the ones that waited until now."""
        taken: list[RequestT] = []
        for request in requests:
            entry = self._entries.get(request)
            if entry is not None and entry.queue is not None:
                self._move(entry, PlaceEvent.TAKEN)
                entry.queue.discard(request)
                entry.queue = None
                taken.append(request)
        return taken

    def sending(self, request: RequestT) -> bool:
        """It is about to be sent: False where that is not to be, as it is in another place. One
        that is not held is its sender's. Should it not leave: hold() it again.
        """
        with self.guard:
            entry = self._entries.get(request)
            return entry is None or PlaceAction.HAND_OVER in self._move(entry, PlaceEvent.SENDING)

    def left(self, request: RequestT) -> None:
        """It has been sent: it counts against the bounds no more."""
        with self.guard:
            entry = self._entries.get(request)
            if entry is not None:
                self._uncount(entry)

    def pause(self, request: RequestT, seconds: float, then: Callable[[], object]) -> bool:
        """Call then() after so many seconds, unless it has ended by then; False, and nothing
        follows, where it is in another place. In the reactor.
        """
        with self.guard:
            entry = self._entries.get(request)
            if entry is None or PlaceAction.SET_PAUSE not in self._move(entry, PlaceEvent.DELAYED):
                return False
            entry.then = then
            entry.pause = self._reactor.call_later(seconds, partial(self._resume, entry))
            return True

    def _resume(self, entry: _Entry[RequestT]) -> None:
        with self.guard:
            then, entry.then, entry.pause = entry.then, None, None
            if then is None:  # ended meanwhile
                return
            self._move(entry, PlaceEvent.RESUMED)
        then()

    # -- ends --------------------------------------------------------------------------------------

    def end(self, request: Any) -> bool:
        """It has its outcome: nothing of it is held from now on. False where it was not held."""
        with self.guard:
            entry = self._entries.pop(request, None)
            if entry is None:
                return False
            if PlaceAction.DEQUEUE in self._move(entry, PlaceEvent.FINISHED):
                assert entry.queue is not None, "it is QUEUED"
                entry.queue.discard(request)
                entry.queue = None
            self._uncount(entry)
            entry.request = None
            timers = [timer for timer in (entry.timer, entry.pause) if timer is not None]
            entry.timer = entry.pause = entry.then = None
        for timer in timers:
            self._reactor.call_soon(timer.cancel)
        return True

    def settle(self, complete: Callable[[], object]) -> None:
        """Complete a request in the reactor, as whoever waits for it may have that parked, and
        would not see what another thread completes. Where this is closed, here as well: it may
        turn no more.
        """
        self._reactor.call_soon(complete)
        if self.is_closed:
            complete()

    def close(self) -> None:
        """Have the owner end all that are held, and each that comes from now on."""
        with self.guard:
            self.is_closed = True
            held = list(self._entries)
        for request in held:
            self._closed(request)

    # -- the deadline ------------------------------------------------------------------------------

    def _set_timer(self, entry: _Entry[RequestT]) -> None:
        if entry.armed != entry.deadline != NEVER:
            entry.armed = entry.deadline
            self._reactor.call_soon(partial(self._arm, entry))

    def _arm(self, entry: _Entry[RequestT]) -> None:
        """In the reactor."""
        with self.guard:
            when = entry.armed = entry.deadline
            if entry.request is None or self._reactor.closed or when == NEVER:
                return
            if entry.timer is not None:
                entry.timer.cancel()
            entry.timer = self._reactor.timers.call_at(when, partial(self._due, entry, when))

    def _due(self, entry: _Entry[RequestT], when: float) -> None:
        with self.guard:
            request, entry.timer, entry.armed = entry.request, None, NEVER
            if request is None:  # it has ended meanwhile
                return
            if when < entry.deadline:  # it was put off meanwhile
                self._set_timer(entry)
                return
            if PlaceAction.EXPIRE not in self._move(entry, PlaceEvent.DUE):
                return
        self._overdue(request)

    # -- with the guard held -----------------------------------------------------------------------

    def _move(self, entry: _Entry[RequestT], event: PlaceEvent) -> tuple[PlaceAction, ...]:
        entry.place, actions = PLACES.after(entry.place, event)
        return actions

    def _uncount(self, entry: _Entry[RequestT]) -> None:
        if entry.is_unsent:
            entry.is_unsent = False
            self.unsent -= 1
            self.unsent_bytes -= entry.nbytes
