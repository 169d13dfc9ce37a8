"""A node of a DI-engine job: it listens, dials, and exchanges events with the nodes that it is
linked to. There is no master; who is dialled publishes back over the same connection.

    state      listen()            publish()                            recv()        stop()
    NEW        LISTENING, FAILED   held for the nodes that it will      listens, and  STOPPED
                                   dial, and that it expects            waits
    LISTENING  does nothing        sent, or held (outlet.py)            the next one  STOPPED
    FAILED     raises why, again   raises why                           None          STOPPED
    STOPPED    Closed              does nothing                         None          does nothing

How a node is found: its tcp port is asked where else it is reached, and where both are on one host
they go on over shared memory; at an ipc:// place a file says the same (rendezvous_file.py).

What a program may rely on:
- events from one node come in the order in which that node published them, each once, and none is
  lost while both live and one of them is not STALL_S behind (outlet.py);
- an event that is published after subscribe() has returned here arrives here: subscribe() waits
  until the nodes that are up know the topic, as they send no others;
- what is published before a node is connected is held, for those that this one dials or expects;
  what comes before a program has subscribed is parked, until START_S after it first has (inlet.py).

One reactor, turned by whoever waits in recv() or publish(), else by the engine's progress thread;
dialling is a coroutine of the control loop.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import errors
from prpc_engine.ding import rendezvous_file
from prpc_engine.ding.dialling import Dialler
from prpc_engine.ding.greeting import (
    EVENT,
    GOODBYE,
    HELLO,
    INTEREST,
    PROTOCOL,
    TAKEN,
    TARGET,
    WHERE,
    Interest,
    NodeGreeting,
    read_greeting,
    read_interest,
    told,
)
from prpc_engine.ding.hosts import listening_address
from prpc_engine.ding.inlet import PARKED_BYTES_MAX, Inlet
from prpc_engine.ding.link import NodeLink, PresenceStatistics, ask
from prpc_engine.ding.outlet import Event
from prpc_engine.ding.place import NodePlace
from prpc_engine.master.master import close_in_reactor
from prpc_engine.node.node import Node
from prpc_engine.node.slab import default_slab
from prpc_engine.rpc.method import ENGINE
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import check_environment
from prpc_engine.settings.node_config import NodeConfig
from shard import ClosedError, Driver, Future, RemoteProtocolError, ShardError, ShmFull, runtime

# For a program to subscribe to what it wants, from when it first does: a task's start comes before
# its environments and models are made, and on two busy cores to import torch alone takes a minute.
# A learner that misses the first transitions waits for them for ever. What it costs: events of
# topics that a node does not want come to it meanwhile, as those of nng do all the time.
START_S = 300.0
# For the nodes that are up to know a new topic: one that does not answer is busy, or stopped.
INTEREST_S = 5.0
LINGER_S = 5.0  # at stop(), for events that are still to leave
READERS_S = 0.2  # then, for other processes to drop what they read of our memory
INLINE_BYTES_MAX = 16 << 10  # more of an event travels beside its message, without a copy of it

logger = logging.getLogger("prpc")


class ExchangeState(enum.Enum):
    """Where an Exchange stands. Events: the table at the file's head."""

    NEW = "new"
    LISTENING = "listening"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ExchangeStatistics:
    """What one asks first when it is stuck: what waits for whom."""

    state: str
    ready: int  # events that came, and were not taken by recv()
    parked: int  # that wait for somebody to subscribe
    is_settled: bool  # the program has had the time to; other nodes send its topics alone
    left_out: int  # that came, and nobody had subscribed to
    topics: tuple[str, ...]  # that this node has subscribed to
    nodes: tuple[PresenceStatistics, ...]


class Exchange:
    """One node. Thread-safe. Raises ConfigError for addresses that are none.

    listen_to   where it listens, as DI-engine writes it (place.py); None: nobody can dial it
    attach_to   whom it dials, again and again while they are not there
    expects     who will dial it: events are held for them meanwhile
    name        how the others name it in their logs
    start_s     see START_S

    stop() by its owner. States: the table at the file's head.
    """

    def __init__(
        self,
        listen_to: str | None,
        attach_to: Sequence[str],
        expects: Sequence[str] = (),
        name: str = "",
        start_s: float = START_S,
    ) -> None:
        self.name, self._start_s = name, start_s
        self._place = None if listen_to is None else NodePlace.parse(listen_to, "listen_to")
        self.state = ExchangeState.NEW
        self._failure: Exception | None = None
        self._pid = runtime.pid()
        self._changing = runtime.RLock()  # of the state: a failed listen() stops
        self._guard = runtime.Lock()  # of the inlet, the links and who waits for events
        self._inlet = Inlet()
        self._arrived: list[Future] = []
        self._serials = itertools.count(1)
        self._links: tuple[NodeLink, ...] = ()  # replaced as a whole: publish() walks it
        self._by_incarnation: dict[int, NodeLink] = {}
        self._early: dict[int, Interest] = {}  # of nodes whose greeting is still on its way
        self._driver: Driver | None = None
        self._tells_at = 1  # dropped events, for the next line of the log
        self._is_settling = False  # a timer says when the program has had the time to subscribe
        dialled = dict.fromkeys(NodePlace.parse(one, "attach_to") for one in attach_to)
        for place in dialled:
            self._add(NodeLink(place, True, 1))
        for place in dict.fromkeys(NodePlace.parse(one, "expects") for one in expects):
            if place not in dialled:
                self._add(NodeLink(place, False, 1))

    def statistics(self) -> ExchangeStatistics:
        """A snapshot."""
        with self._guard:
            inlet = self._inlet
            return ExchangeStatistics(
                state=self.state.value,
                ready=inlet.ready,
                parked=inlet.parked,
                is_settled=inlet.interest.is_settled,
                left_out=inlet.left_out,
                topics=tuple(sorted(map(_text, inlet.interest.topics))),
                nodes=tuple(link.statistics() for link in self._links),
            )

    # -- life --------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Be reached from now on, and dial. Raises AddressInUse, ConfigError, and Closed after
        stop().
        """
        with self._changing:
            if self.state is ExchangeState.STOPPED:
                raise errors.Closed(f"{self._named()} was stopped: make another one")
            if self._failure is not None:
                raise self._failure
            if self.state is ExchangeState.LISTENING:
                return
            try:
                self._begin()
            except Exception as error:
                self._failure, self.state = error, ExchangeState.FAILED
                logger.error("%s cannot listen: %s", self._named(), str(error))
                self._wake_receivers()
                raise
            self.state = ExchangeState.LISTENING

    def _begin(self) -> None:
        check_environment()
        config = _config_for(self._place)
        with contextlib.ExitStack() as closing:
            driver = Driver(config.shards.polling, "prpc-ding", engine=ENGINE)
            closing.callback(driver.close)
            self._node = node = self._made_node(driver, config)
            closing.callback(close_in_reactor, driver, node)
            addresses = [one for one in node.addresses if not one.startswith("memory://")]
            methods = {
                WHERE: lambda: addresses,
                HELLO: self._hello,
                EVENT: self._event,
                TAKEN: self._taken,
                INTEREST: self._interest,
                GOODBYE: self._goodbye,
            }
            node.servers[TARGET] = ServedObject(
                "ding", 0, TARGET, methods, allow=config.allow, inline=True
            )
            if self._place is not None and self._place.tcp is None:
                rendezvous_file.write(self._place.path, addresses)
                closing.callback(rendezvous_file.remove, self._place.path, addresses)
            dialler = Dialler(
                node, driver, config.secret, addresses, self._my_greeting, self._greeted
            )
            closing.callback(dialler.close)
            self._driver, self._dialler = driver, dialler
            driver.take_over()
            for link in self._links:
                if link.dials:
                    dialler.dial(link)
            self._closing = closing.pop_all()
        self._settle_later()
        logger.info(
            "%s listens at %s, attaches to %s",
            self._named(),
            self._place,
            ", ".join(str(link.place) for link in self._links if link.dials) or "nobody",
        )

    def _made_node(self, driver: Driver, config: NodeConfig) -> Node:
        try:
            return Node(
                driver.reactor, driver, default_slab(), config, on_peer_lost=self._peer_lost
            )
        except errors.AddressInUse as error:
            raise errors.AddressInUse(
                f"{self._named()} cannot listen at {self._place}: {error}; end who has the port "
                "(ss -ltnp names it), or pass another by --ports"
            ) from error

    def _named(self) -> str:
        return self.name or f"the node at {self._place}"

    def stop(self, linger_s: float = LINGER_S) -> None:
        """Say goodbye and hang up; recv() returns None at once. Events that are still to leave may
        do so for `linger_s` seconds. Again: does nothing.
        """
        if self._pid != runtime.pid():  # in a fork: all of it is the parent's
            return
        with self._changing:
            before, self.state = self.state, ExchangeState.STOPPED
            if before is ExchangeState.STOPPED:
                return
        self._wake_receivers()
        driver = self._driver
        if before is not ExchangeState.LISTENING or driver is None:
            return
        deadline = runtime.monotonic() + linger_s
        if linger_s > 0 and not driver.leads_here():
            self._linger(driver, deadline)
        self._closing.close()
        for link in self._links:
            link.let_go()
        default_slab().wait_for_readers(READERS_S if linger_s > 0 else 0.0)

    def _linger(self, driver: Driver, deadline: float) -> None:
        for link in self._links:
            while (empty := link.when_empty(driver, is_patient=True)) is not None:
                if not driver.wait_until(empty, deadline):
                    left = link.statistics()
                    logger.warning(
                        "%s stops: %d events for %s were never sent (it is %s)",
                        self._named(),
                        left.waiting,
                        left.node,
                        left.state,
                    )
                    break
        # over each connection: one may be linked there, and not yet here
        left_s = max(0.0, deadline - runtime.monotonic())
        goodbyes = [ask(peer, GOODBYE, (), left_s) for peer in self._node.peers()]
        for goodbye in goodbyes:
            if goodbye is not None:
                driver.wait_until(goodbye, deadline)

    # -- events ------------------------------------------------------------------------------------

    def publish(self, topic: str, data: bytes | bytearray | memoryview) -> None:
        """Send an event to each node that has subscribed to its topic. Waits while one that is up
        has no room for it; never for one that is not there. Raises why listen() has failed, and
        TypeError for a topic or data that is none.
        """
        if self._failure is not None:
            raise self._failure
        links = self._links
        if not links or self.state is ExchangeState.STOPPED:
            return
        nbytes = len(data) if type(data) is bytes else memoryview(data).nbytes
        payload: Any = bytes(data)  # the very same where it is bytes
        if nbytes > INLINE_BYTES_MAX:
            payload = _in_memory(payload, any(link.is_on_this_host for link in links))
        event = Event(next(self._serials), _encoded(topic), payload, nbytes)
        for link in links:
            link.offer(event)
        for link in links:
            if link.outlet.must_wait:
                link.wait_for_room()

    def recv(self) -> tuple[str, bytes | memoryview] | None:
        """The next event: its topic, and its data, read-only. Waits for it; None after stop(). One
        thread at a time gets each event.

        A thread other than the main one parks as soon as there is no event. It is taken for one
        that has others of its process handle them, as DI-engine's does: while it spins, those
        cannot run.
        """
        while True:
            with self._guard:
                arrival = None if self.state is ExchangeState.STOPPED else self._inlet.take()
                notes = self._notes()
                future = None
                if arrival is None and not self._is_over:
                    future = Future(self._driver)
                    self._arrived.append(future)
            _tell(notes)
            if arrival is not None:
                payload = arrival.payload
                is_bytes = isinstance(payload, bytes)
                return _text(arrival.topic), payload if is_bytes else memoryview(payload)
            if future is None:
                return None
            if self._driver is None:
                self.listen()
                continue
            hands_over = threading.current_thread() is not threading.main_thread()
            with contextlib.suppress(ShardError):  # closed meanwhile: looked at above
                self._driver.wait_until(future, None, spins=not hands_over)

    def _notes(self) -> list[tuple[NodeLink | None, int]]:
        """Whom to tell how many of its events were taken. With the guard held."""
        return [(self._by_incarnation.get(who), count) for who, count in self._inlet.notes()]

    @property
    def _is_over(self) -> bool:
        return self.state in (ExchangeState.STOPPED, ExchangeState.FAILED)

    def _wake_receivers(self) -> None:
        with self._guard:
            arrived, self._arrived = self._arrived, []
        for future in arrived:
            future.set_result(None)

    # -- topics ------------------------------------------------------------------------------------

    def subscribe(self, topic: str) -> None:
        """Get events of that topic from now on. Waits until the nodes that are up know it,
        INTEREST_S at most. Again: does nothing.
        """
        with self._guard:
            if not self._inlet.subscribe(_encoded(topic)):
                return
            interest = self._inlet.interest
            is_ready = self._inlet.ready > 0
        if is_ready:
            self._wake_receivers()
        if interest.is_settled:
            self._tell_all(interest, waits=True)
        else:
            self._settle_later()

    def unsubscribe(self, pattern: str) -> None:
        """No events of that topic any more, or of those that a pattern such as "task.*" means; one
        that is not known: does nothing. Those that come in a worker's first `start_s` seconds are
        kept all the same, for who subscribes again.
        """
        with self._guard:
            if not self._inlet.unsubscribe(pattern):
                return
            interest = self._inlet.interest
        if interest.is_settled:
            self._tell_all(interest, waits=False)

    def _settle_later(self) -> None:
        """Once somebody has subscribed, and this node listens."""
        with self._guard:
            driver = self._driver
            if self._is_settling or driver is None or not self._inlet.interest.topics:
                return
            self._is_settling = True
        reactor = driver.reactor
        reactor.call_soon(partial(reactor.call_later, self._start_s, self._settle))

    def _settle(self) -> None:
        with self._guard:
            self._inlet.settle()
            interest = self._inlet.interest
        self._tell_all(interest, waits=False)

    def _tell_all(self, interest: Interest, waits: bool) -> None:
        driver = self._driver
        calls = [(link, link.tell_interest(interest)) for link in self._links]
        if driver is None or not waits:
            return
        deadline = runtime.monotonic() + INTEREST_S
        # the other side of a meeting may take the node for up before this one does
        for link, known in [*calls, *self._dialler.meetings()]:
            if known is not None and not driver.wait_until(known, deadline):
                logger.warning(
                    "%s has not answered for %.1f s: events of new topics that it publishes "
                    "until it does may not come",
                    link.label,
                    INTEREST_S,
                )

    # -- nodes -------------------------------------------------------------------------------------

    def _add(self, link: NodeLink) -> None:
        """One more; those that are gone for good make room: elastic jobs have many."""
        gone = [one for one in self._links if one.is_gone]
        for one in gone:
            self._by_incarnation.pop(one.incarnation, None)
            self._inlet.forget(one.incarnation)
        self._links = (*(one for one in self._links if one not in gone), link)

    def _my_greeting(self, incarnation: int) -> NodeGreeting:
        """For the process of that incarnation. With the guard held, or where it does not matter."""
        received, taken = self._inlet.progress(incarnation)
        place = "" if self._place is None else str(self._place)
        return NodeGreeting(PROTOCOL, self.name, place, received, taken, self._inlet.interest)

    def _hello(self, *values: Any) -> Any:
        """A node has dialled this one."""
        peer = _caller()
        greeting = read_greeting(list(values), peer.connection.peer)
        with self._guard:
            link = self._link_of(peer.connection.peer_incarnation, greeting.listen_to)
            mine = self._my_greeting(peer.connection.peer_incarnation)
            self._connected(link, peer, greeting)
        peer.reactor.call_soon(link.send)  # after the answer
        return told(mine)

    def _link_of(self, incarnation: int, listen_to: str) -> NodeLink:
        """With the guard held."""
        link = self._by_incarnation.get(incarnation)
        if link is None and listen_to:
            with contextlib.suppress(errors.ConfigError):
                place = NodePlace.parse(listen_to, "listen_to")
                link = next((one for one in self._links if one.place == place), None)
                if link is None:
                    link = NodeLink(place, False, next(self._serials))
                    self._add(link)
        if link is None:
            link = NodeLink(None, False, next(self._serials))
            self._add(link)
        return link

    def _connected(self, link: NodeLink, peer: Peer, greeting: NodeGreeting) -> None:
        """With the guard held."""
        incarnation = peer.connection.peer_incarnation
        if link.incarnation not in (0, incarnation):  # it was started again
            self._inlet.forget(link.incarnation)
            self._by_incarnation.pop(link.incarnation, None)
        early = self._early.pop(incarnation, greeting.interest)
        interest = max(early, greeting.interest, key=lambda one: one.version)
        assert self._driver is not None, "nobody is connected before listen()"
        link.greeted(peer, self._driver, greeting, interest)
        self._by_incarnation[incarnation] = link
        logger.info(
            "%s is linked to %s, over %s", self._named(), link.label, peer.connection.transport
        )

    def _greeted(
        self, link: NodeLink, peer: Peer, greeting: NodeGreeting, told_version: int, met: Future
    ) -> None:
        """A node that this one has dialled has answered; in the reactor. `met`: done when it knows
        our topics.
        """
        if peer.lost:
            met.set_result(None)
            self._dialler.dial(link)
            return
        with self._guard:
            known = self._by_incarnation.get(peer.connection.peer_incarnation)
            if known is not None and known is not link:
                self._links = tuple(one for one in self._links if one is not link)
            self._connected(known or link, peer, greeting)
            interest = self._inlet.interest
        if known is not None and known is not link:
            known.adopt(link)
        (known or link).send()
        call = None
        if interest.version != told_version and interest.is_settled:
            call = (known or link).tell_interest(interest)
        if call is None:
            met.set_result(None)
        else:
            call.when_done(met.set_result)

    def _event(self, number: int, topic: bytes, payload: Any) -> None:
        peer = _caller()
        nbytes = len(payload)
        with self._guard:
            is_next = self._inlet.put(
                peer.connection.peer_incarnation, number, topic, payload, nbytes
            )
            arrived: Sequence[Future] = ()
            notes: Sequence[tuple[NodeLink | None, int]] = ()
            if not self._inlet.ready:  # it was parked or left out: recv() does not hear of it
                notes = self._notes()
            elif self._arrived:
                arrived, self._arrived = self._arrived, []
            dropped = self._inlet.parked_dropped
        for future in arrived:
            future.set_result(None)
        _tell(notes)
        if dropped >= self._tells_at:
            self._tells_at = 2 * dropped
            logger.warning(
                "%s: %d events that came before its program had subscribed to their topics were "
                "dropped, the oldest first: %d MiB of them are kept",
                self._named(),
                dropped,
                PARKED_BYTES_MAX >> 20,
            )
        if not is_next:
            peer.connection.close(
                RemoteProtocolError(f"event {number} came before those that it follows")
            )

    def _taken(self, count: int) -> None:
        link = self._by_incarnation.get(_caller().connection.peer_incarnation)
        if link is not None:
            link.take(count)

    def _interest(self, version: int, is_settled: bool, topics: list[bytes]) -> None:
        interest = read_interest(version, is_settled, topics)
        incarnation = _caller().connection.peer_incarnation
        with self._guard:
            link = self._by_incarnation.get(incarnation)
            if link is None:
                self._early[incarnation] = interest
        if link is not None:
            link.tell(interest)

    def _goodbye(self) -> None:
        link = self._by_incarnation.get(_caller().connection.peer_incarnation)
        if link is not None:
            link.left()

    def _peer_lost(self, peer: Peer) -> None:
        incarnation = peer.connection.peer_incarnation
        self._early.pop(incarnation, None)
        link, error = self._by_incarnation.get(incarnation), peer.connection.error
        if link is None or isinstance(error, ClosedError):  # stop() hangs up on all
            return
        if link.lost(peer, error) and link.dials:
            self._dialler.dial(link)


def _tell(notes: Sequence[tuple[NodeLink | None, int]]) -> None:
    for link, count in notes:
        if link is not None:
            link.notify_taken(count)


def _caller() -> Peer:
    peer = calling_peer()
    assert peer is not None, "these are handlers"
    return peer


def _config_for(place: NodePlace | None) -> NodeConfig:
    """What the user, the environment and the file say, for a node there. One lane: events keep
    their order. Raises ConfigError.
    """
    config = NodeConfig.load()
    names = config.node.transports
    bind = Address("127.0.0.1", 0)
    if place is not None and place.tcp is not None:
        bind = listening_address(place.tcp, config.secret)
        names = (*names, "tcp") if "tcp" not in names else names
    else:
        names = tuple(name for name in names if name != "tcp") or names
    limits = replace(config.limits, connections_per_peer=1)
    return config.listening_at(bind, names).limited_to(limits)


def _in_memory(payload: bytes, for_this_host: bool) -> Any:
    """A large event as an array; in shared memory, once for all, where some node reads it there."""
    array = np.frombuffer(payload, np.uint8)
    if not for_this_host:
        return array
    try:
        shared = default_slab().empty(len(payload), np.uint8)
    except ShmFull:
        return array  # each connection does what it can
    shared[:] = array
    return shared


def _encoded(topic: str) -> bytes:
    if not isinstance(topic, str):
        raise errors.BadArguments(f"topic {topic!r:.100}: the name of one is expected, a str")
    return topic.encode("utf-8", "surrogatepass")


def _text(topic: bytes) -> str:
    return topic.decode("utf-8", "surrogatepass")
