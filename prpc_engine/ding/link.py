"""The way to one other node of a DI-engine job: its outlet, and the connection that it goes over.

Any thread publishes, and the reactor's hears what comes back: the lock is held while an event is
numbered and sent, so that events leave in the order of their numbers. Sending never waits. Whoever
must wait for room does so outside the lock, and turns the reactor meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.ding.greeting import (
    EVENT,
    INTEREST,
    TAKEN,
    TARGET,
    Interest,
    NodeGreeting,
    told,
)
from prpc_engine.ding.outlet import Event, Outlet, PresenceEvent, PresenceState
from prpc_engine.ding.place import NodePlace
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from shard import ClosedError, Driver, Future, ShardError, runtime

# A node that is connected and takes nothing for so long holds up nobody any more: beyond the
# longest step of training between two looks at events, below what a user takes for a hang.
STALL_S = 60.0
# How long events are held for a node whose connection was lost: a network that is mended, a
# container that is started again.
HELD_S = 60.0
NO_ROOM_AGAIN_S = 0.01  # between tries where the slab or the outbox had no room

logger = logging.getLogger("prpc")
_EVENT, _TAKEN, _INTEREST = map(method_key, (EVENT, TAKEN, INTEREST))


@dataclass(frozen=True)
class PresenceStatistics:
    """A snapshot of the way to one other node."""

    node: str
    state: str  # "awaited", "up", "lost", "away"
    transport: str  # "" while it is not up
    waiting: int  # events that have not left
    in_flight: int  # that have left, and were not taken there
    dropped: int  # that it will never get
    is_stalled: bool


class NodeLink:
    """One other node. Owned by an Exchange; thread-safe.

    place    where it listens; None: it has not said
    dials    whether this side connects; else the other one does
    since    the first event of this process that it is to get
    """

    def __init__(self, place: NodePlace | None, dials: bool, since: int) -> None:
        self.place, self.dials, self.since = place, dials, since
        self.label = f"the node at {place}"
        self.peer: Peer | None = None
        self.incarnation = 0
        self.outlet = Outlet()
        self._driver: Driver | None = None  # once it has been connected
        self._guard = runtime.Lock()  # of the outlet: publishers, and what comes back
        self._room: list[Future] = []  # of those who wait for it
        self._losses = 0
        self._tells_at = 1  # dropped events, for the next line of the log
        self._route = FixedRoute(TARGET, self.label)
        self._is_to_try_again = False

    def statistics(self) -> PresenceStatistics:
        """A snapshot."""
        with self._guard:
            outlet, peer = self.outlet, self.peer
            is_up = outlet.state is PresenceState.UP and peer is not None
            return PresenceStatistics(
                node=self.label,
                state=outlet.state.name.lower(),
                transport=peer.connection.transport if is_up and peer is not None else "",
                waiting=outlet.waiting,
                in_flight=outlet.in_flight,
                dropped=outlet.dropped,
                is_stalled=outlet.is_stalled,
            )

    @property
    def is_up(self) -> bool:
        """Whether it is connected, as far as is known."""
        return self.outlet.state is PresenceState.UP

    @property
    def is_gone(self) -> bool:
        """Whether it will not come again by itself, and nobody dials it."""
        state = self.outlet.state
        return state is PresenceState.AWAY and self.peer is None and not self.dials

    @property
    def is_on_this_host(self) -> bool:
        """Whether what is in shared memory is read there where it is."""
        peer = self.peer
        return peer is not None and self.is_up and peer.connection.transport == "shm"

    # -- events ------------------------------------------------------------------------------------

    def offer(self, event: Event) -> None:
        """It was published: it leaves, or is held, or is not for this node. Never waits."""
        with self._guard:
            self.outlet.offer(event)
            self._send()
        self._tell_dropped()

    def _send(self) -> None:
        """What may leave does. With the guard held."""
        outlet, peer = self.outlet, self.peer
        if peer is None:
            return
        while (found := outlet.first()) is not None:
            number, event = found
            try:
                peer.notify(
                    self._route, EVENT, _EVENT, (number, event.topic, event.payload), stable=True
                )
            except errors.BadArguments as error:  # beyond a limit, which the text names
                outlet.refuse()
                logger.error("an event was not sent to %s: %s", self.label, str(error))
            except (errors.Backpressure, errors.ShmFull):
                self._try_again_later(peer)
                return
            except (errors.NotSent, errors.Closed):
                return  # its loss is about to be told
            else:
                outlet.leave()

    def _try_again_later(self, peer: Peer) -> None:
        if not self._is_to_try_again:
            self._is_to_try_again = True
            reactor = peer.reactor
            reactor.call_soon(partial(reactor.call_later, NO_ROOM_AGAIN_S, self._try_again))

    def _try_again(self) -> None:
        self._is_to_try_again = False
        self.send()

    def send(self) -> None:
        """What may leave does."""
        with self._guard:
            self._send()
            ready = self._take_room()
        _wake(ready)

    def wait_for_room(self) -> None:
        """Until what was offered has left, or nobody need wait for this node any more: it is gone,
        or has taken nothing for STALL_S.
        """
        driver = self._driver
        while driver is not None and not driver.closing:
            with self._guard:
                if not self.outlet.must_wait:
                    return
                taken = self.outlet.taken
                room = Future(driver)
                self._room.append(room)
            try:
                has_room = driver.wait_until(room, runtime.monotonic() + STALL_S)
            except ClosedError:  # stop() was called meanwhile: the event will not leave
                return
            if not has_room:
                self._stall(taken)

    def _stall(self, taken: int) -> None:
        """That many had been taken STALL_S ago."""
        with self._guard:
            if not self.outlet.must_wait or self.outlet.taken != taken:
                return
            self.outlet.stall()
            ready = self._take_room()
        logger.warning(
            "%s is connected and has taken no event for %.0f s: nobody waits for it any more, and "
            "what it does not take is dropped; see what its program does",
            self.label,
            STALL_S,
        )
        _wake(ready)

    def _take_room(self) -> list[Future]:
        """Those to be woken. With the guard held."""
        if not self._room or self.outlet.must_wait:
            return []
        ready, self._room = self._room, []
        return ready

    def _tell_dropped(self) -> None:
        dropped = self.outlet.dropped
        if dropped >= self._tells_at:
            self._tells_at = 2 * dropped
            logger.warning(
                "%d events for %s were dropped: it is not there, or takes none",
                dropped,
                self.label,
            )

    # -- what the node tells -----------------------------------------------------------------------

    def take(self, count: int) -> None:
        """It has handed out so many of the events that this process has sent it."""
        with self._guard:
            self.outlet.take(count)
            self._send()
            ready = self._take_room()
        _wake(ready)

    def tell(self, interest: Interest) -> None:
        """Its topics have changed."""
        with self._guard:
            self.outlet.tell(interest)

    def greeted(
        self, peer: Peer, driver: Driver, greeting: NodeGreeting, interest: Interest
    ) -> None:
        """It said hello over that connection; what it has not got leaves over it with send()."""
        with self._guard:
            self.peer, self._driver = peer, driver
            self.incarnation = peer.connection.peer_incarnation
            where = f" at {greeting.listen_to}" if greeting.listen_to else ""
            self.label = f"{greeting.name or 'the node'}{where}"
            self._route = FixedRoute(TARGET, self.label)
            self.outlet.greeted(self.incarnation, greeting.received, greeting.taken, interest)

    def left(self) -> None:
        """It said goodbye."""
        with self._guard:
            if self.is_up:
                self.outlet.follow(PresenceEvent.LEFT)
            ready = self._take_room()
        logger.info("%s has stopped", self.label)
        _wake(ready)

    def lost(self, peer: Peer, error: object) -> bool:
        """A connection is gone; whether it was the one in use."""
        with self._guard:
            if self.peer is not peer:
                return False
            self.peer = None
            had_left = self.outlet.state is PresenceState.AWAY
            self.outlet.follow(PresenceEvent.LOST)
            waiting = self.outlet.waiting + self.outlet.in_flight
            self._losses += 1
            ready = self._take_room()
        if not had_left:
            logger.warning(
                "%s is lost: %s; %d events are held for it, for %.0f s",
                self.label,
                str(error),
                waiting,
                HELD_S,
            )
            peer.reactor.call_later(HELD_S, partial(self._expire, self._losses))
        _wake(ready)
        return True

    def _expire(self, losses: int) -> None:
        with self._guard:
            if self.outlet.state is not PresenceState.LOST or losses != self._losses:
                return
            forgotten = self.outlet.follow(PresenceEvent.GIVEN_UP)
        logger.warning(
            "%s has not come back within %.0f s: %d events for it were dropped",
            self.label,
            HELD_S,
            forgotten,
        )

    def give_up(self) -> None:
        """Nobody will ever be connected there."""
        with self._guard:
            if self.outlet.state is PresenceState.AWAITED:
                self.outlet.follow(PresenceEvent.GIVEN_UP)
            ready = self._take_room()
        _wake(ready)

    # -- what the node is told ---------------------------------------------------------------------

    def notify_taken(self, count: int) -> bool:
        """Whether it was told."""
        peer = self.peer
        try:
            if peer is not None:
                peer.notify(self._route, TAKEN, _TAKEN, (count,))
                return True
        except (errors.RpcError, ShardError):
            pass  # it hears of them with the next, or when it greets
        return False

    def tell_interest(self, interest: Interest) -> Call | None:
        """Tell it this node's topics; the call is done when it knows them. None: it is not up.

        Without a deadline: what has come too late is not run there, and a busy node would never
        hear of them.
        """
        peer = self.peer
        if peer is None or not self.is_up:
            return None
        return ask(peer, INTEREST, tuple(told(interest)), None)

    # -- the end -----------------------------------------------------------------------------------

    def adopt(self, other: NodeLink) -> None:
        """`other` has turned out to be this node: what was held there for it, and was published
        before this link was made, follows what this one has.
        """
        with other._guard:
            held = [event for event in other.outlet.held() if event.serial < self.since]
        self.place, self.dials = other.place, True
        for event in held:
            self.offer(event)

    def let_go(self) -> None:
        """Nobody waits here any more: the exchange stops."""
        with self._guard:
            ready, self._room = self._room, []
        _wake(ready)

    def when_empty(self, driver: Driver, is_patient: bool) -> Future | None:
        """For stop(): a future that is done when nothing waits here; None: it does not, or for a
        node that will not get it. is_patient: for one that has never been connected, too.
        """
        with self._guard:
            state = self.outlet.state
            waits = self.outlet.waiting and (
                state is PresenceState.UP or (is_patient and state is PresenceState.AWAITED)
            )
            if not waits:
                return None
            room = Future(driver)
            self._room.append(room)
            return room


def ask(
    peer: Peer, method: str, arguments: tuple[Any, ...], timeout_s: float | None
) -> Call | None:
    """One request to a node; None where it cannot be sent."""
    route = FixedRoute(TARGET, f"the node at {peer.connection.peer}")
    try:
        return peer.request(route, method, method_key(method), arguments, timeout_s, True)
    except (errors.RpcError, ShardError):
        return None


def _wake(futures: list[Future]) -> None:
    for future in futures:
        future.set_result(None)
