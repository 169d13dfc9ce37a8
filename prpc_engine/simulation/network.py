"""Hosts and what lies between them: how long a message takes, and what becomes of it when a link is
cut, a process dies or a host is gone. Draws from the seed; runs as events of the scheduler.

    what                       what both ends of a connection see
    delay, per message     order is kept on each lane; a small message may overtake a bulk one
    link cut, one way      nothing arrives; what was sent waits, and arrives when it is mended
     or both
    cut for peer_silent_s  PeerLostError at each end, in its own time
    reset                  PeerLostError at each end; what was on its way is gone
    a process ends         the other end hears of it; what it sent before arrives, or a part of it
    a host crashes         nothing: silence, as after a cut
    an end that was not    PeerLostError at the other end, once the host can be reached: its kernel
     heard of (a crash,    refuses what is sent to a connection that it does not have, and an idle
     or over a cut link,   one is asked, too
     or lost by silence)
    connecting over a cut  sent again after 1, 3, 7 ... s, until the time is over
     link
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol

from prpc_engine.simulation.clock import HostClock
from prpc_engine.simulation.errors import SimulationError
from prpc_engine.simulation.scheduler import Scheduler
from shard import AuthenticationError, Future, Node, Slab, UnreachableError, Weather

# Seconds that a message takes, on a host and between hosts: the least, and what the mean adds.
LOCAL_DELAY_S, LINK_DELAY_S = (4e-6, 8e-6), (40e-6, 120e-6)
SLOW_CHANCE, SLOW_S_MAX = 0.003, 0.05  # one in so many is held up: a retransmission, a full queue
PACKET_BYTES, BYTES_PER_S = 1500, 1.25e9  # what is longer takes that much longer
WINDOW_BYTES = 4 << 20  # on its way in one direction of one connection; then the sender waits
AGAIN_S = 1.0  # a kernel that connects, and hears nothing, tries again; then after twice as long
# Of peer_silent_s: for so long a connection is idle before its kernel asks whether the other end is
# there, as shard/transport/silence.py has it.
KEEP_ALIVE = 0.4
LANES = 2  # of a connection: small messages, and bulk
FIRST_PORT = 20000
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class NetworkMember(Protocol):
    """A process, as the network has it."""

    name: str
    host: SimulatedHost
    is_dead: bool
    weather: Weather  # of all its connections

    def has_slab(self, slab: Slab) -> None:
        """A node of it has that."""


class End(Protocol):
    """One end of a connection, as the network has it: transport.SimulatedConnection."""

    process: NetworkMember

    def arrive(self, item: object, nbytes: int) -> None:
        """A message is there."""

    def has_room(self) -> None:
        """The peer took some of what was on its way."""

    def peer_hung_up(self, why: str) -> None:
        """Nothing more will come."""

    def lost(self, why: str) -> None:
        """The connection is over, whatever was on its way."""


@dataclass(eq=False)
class Wire:
    """One direction of a connection."""

    sender: End
    receiver: End
    link: NetworkLink
    bytes_on_the_way: int = 0
    sender_waits: bool = False
    is_over: bool = False  # nothing of it arrives any more
    is_unheard: bool = False  # its sender has ended, and the receiver cannot hear of that yet
    is_refused: bool = False  # its receiver has ended, and its sender has not heard of that
    arrivals: list[float] = field(default_factory=lambda: [0.0] * LANES)  # the last of each lane
    sent: int = 0  # messages
    doom: str | None = None  # why the connection is reset once the next message has arrived
    # Met a link that is cut: number of the message, lane, bytes, its arrival.
    held: list[tuple[int, int, int, Callable[[], object]]] = field(default_factory=list)


@dataclass(eq=False)
class NetworkLink:
    """From one host to another."""

    source: str
    target: str
    least_s: float
    mean_s: float
    is_cut: bool = False
    since_s: float = 0.0  # when it was cut
    wires: dict[Wire, None] = field(default_factory=dict)  # in the order in which they were made


@dataclass(eq=False)
class SimulatedHost:
    """A machine: its processes share an address, its ports and a monotonic clock. Made by
    Simulation.host().
    """

    name: str
    address: str
    next_port: int = FIRST_PORT
    is_down: bool = False
    clock: HostClock = field(default_factory=HostClock)


@dataclass(eq=False)
class Listening:
    """One address at which a process listens, until it closes or ends."""

    process: NetworkMember
    node: Node
    slab: Slab
    greet: Callable[
        [Callable[[], object]], object
    ]  # calls back in its reactor, unless that is over
    accept: Callable[[Any], object]  # an end that the connector made, in its reactor


class Network:
    """All hosts, links and connections of a simulation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        chance = scheduler.stream("network")
        self._draw = chance.random
        self.hosts: dict[str, SimulatedHost] = {}
        self._links: dict[tuple[str, str], NetworkLink] = {}
        self.listening: dict[tuple[str, str, int], Listening] = {}  # (scheme, host's name, port)
        self._connections: dict[tuple[Wire, Wire], float] = {}  # and their peer_silent_s
        # Connections that are being made: to whom, and what tells their makers that it has ended.
        self._greetings: dict[Future, tuple[Listening, Callable[[], object]]] = {}

    # -- hosts and links ---------------------------------------------------------------------------

    def host(self, name: str) -> SimulatedHost:
        """The host of that name, made when it is first asked for."""
        host = self.hosts.get(name)
        if host is None:
            number = len(self.hosts) + 1
            host = SimulatedHost(name, f"10.0.{number // 250}.{number % 250 + 1}")
            self.hosts[name] = host
        return host

    def known(self, *names: str) -> None:
        """Raises SimulationError for a name that is no host's."""
        for name in names:
            if name not in self.hosts:
                raise SimulationError(f"no host {name!r:.100}: there are {sorted(self.hosts)}")

    def find(self, address: str, near: SimulatedHost) -> SimulatedHost | None:
        """The host of that address, as `near` sees it."""
        if address in LOOPBACK:
            return near
        return next(
            (host for host in self.hosts.values() if address in (host.address, host.name)), None
        )

    def link(self, source: str, target: str) -> NetworkLink:
        """The way from one host to another."""
        link = self._links.get((source, target))
        if link is None:
            least_s, more_s = LOCAL_DELAY_S if source == target else LINK_DELAY_S
            link = NetworkLink(source, target, least_s, more_s * (0.5 + self._draw()))
            self._links[source, target] = link
        return link

    def _delay_s(self, link: NetworkLink, nbytes: int) -> float:
        delay_s = link.least_s + link.mean_s * 2 * self._draw()
        if self._draw() < SLOW_CHANCE:
            delay_s += SLOW_S_MAX * self._draw()
        if nbytes > PACKET_BYTES:
            delay_s += nbytes / BYTES_PER_S
        return delay_s

    def cut(self, source: str, target: str) -> None:
        """Nothing passes from one host to the other, until mend()."""
        link = self.link(source, target)
        if link.is_cut:
            return
        link.is_cut, link.since_s = True, self._scheduler.now
        self._note("fault", f"{source} -> {target} is cut")
        for connection in self._over(link):
            self._watch_silence(connection, link)

    def mend(self, source: str, target: str) -> None:
        """What was sent meanwhile goes on."""
        link = self.link(source, target)
        ends = (self.hosts.get(source), self.hosts.get(target))
        if not link.is_cut or any(host is not None and host.is_down for host in ends):
            return  # a host without power is not reached before it is back
        link.is_cut = False
        self._note("fault", f"{source} -> {target} is mended")
        for wire in list(link.wires):
            # What was on its way when the link was cut came here behind what was sent later.
            held, wire.held = sorted(wire.held, key=itemgetter(0)), []
            for number, lane, nbytes, arrive in held:
                self._carry(wire, number, lane, nbytes, arrive)
        for connection in self._over(link):
            if any(wire.is_unheard for wire in connection):
                asks_s = KEEP_ALIVE * self._connections[connection] * self._draw()
                self._scheduler.after(
                    asks_s,
                    lambda connection=connection: self._refuse(connection),  # type: ignore[misc]
                )

    def _refuse(self, connection: tuple[Wire, Wire]) -> None:
        """What one end sent, or its kernel asked, is at a host that does not have the other end any
        more: an end that was not heard of is heard of now, if both ways are open.
        """
        if any(wire.is_over or wire.link.is_cut for wire in connection):
            return
        for wire in connection:
            if wire.is_unheard:
                self._end_and_tell(wire)

    def _over(self, link: NetworkLink) -> list[tuple[Wire, Wire]]:
        """Connections that need it: an answer needs the way back."""
        return [pair for pair in self._connections if link in (pair[0].link, pair[1].link)]

    def _watch_silence(self, connection: tuple[Wire, Wire], link: NetworkLink) -> None:
        """A connection over a link that stays cut is lost, at each end in its own time."""
        silent_s = self._connections[connection]
        since_s = link.since_s

        def look(wire: Wire) -> None:
            still = link.is_cut and link.since_s == since_s
            ends = not (wire.is_unheard or wire.is_over or wire.sender.process.is_dead)
            if still and ends and connection in self._connections:
                self._unheard(wire)
                connection[wire is connection[0]].is_refused = True
                wire.sender.lost(f"it answered nothing for {silent_s:g} s")
                if all(each.is_over or each.is_unheard for each in connection):
                    self._forget(connection)

        for wire in connection:
            bound_s = silent_s * (0.75 + 0.5 * self._draw())
            self._scheduler.after(bound_s, lambda wire=wire: look(wire))  # type: ignore[misc]

    def _note(self, kind: str, text: str) -> None:
        self._scheduler.timeline.note(self._scheduler.now, "network", kind, text)

    # -- connections -------------------------------------------------------------------------------

    def join(self, one: End, two: End, silent_s: float, begins_s: float) -> tuple[Wire, Wire]:
        """Connect two ends: the wires on which each sends. Nothing arrives before `begins_s`."""
        wires = []
        for sender, receiver in ((one, two), (two, one)):
            link = self.link(sender.process.host.name, receiver.process.host.name)
            wire = Wire(sender, receiver, link, arrivals=[begins_s] * LANES)
            link.wires[wire] = None
            wires.append(wire)
        connection = (wires[0], wires[1])
        self._connections[connection] = silent_s
        for wire in connection:
            if wire.link.is_cut:
                self._watch_silence(connection, wire.link)
                break
        return connection

    def send(self, wire: Wire, lane: int, item: object, nbytes: int) -> bool:
        """One message; False: too much is on its way, and the sender is told when that arrives."""
        if wire.bytes_on_the_way and wire.bytes_on_the_way + nbytes > WINDOW_BYTES:
            wire.sender_waits = True
            return False
        wire.bytes_on_the_way += nbytes
        self._transmit(wire, lane, nbytes, lambda: wire.receiver.arrive(item, nbytes))
        return True

    def _transmit(self, wire: Wire, lane: int, nbytes: int, arrive: Callable[[], object]) -> None:
        wire.sent += 1
        self._carry(wire, wire.sent, lane, nbytes, arrive)

    def _carry(
        self, wire: Wire, number: int, lane: int, nbytes: int, arrive: Callable[[], object]
    ) -> None:
        if wire.link.is_cut:
            wire.held.append((number, lane, nbytes, arrive))
            return
        due_s = self._scheduler.now + self._delay_s(wire.link, nbytes)
        # Of what is due at one time chance says what comes first.
        due_s = max(due_s, math.nextafter(wire.arrivals[lane], math.inf))
        wire.arrivals[lane] = due_s

        def come() -> None:
            if wire.is_over or wire.is_unheard:
                return
            if wire.link.is_cut:
                wire.held.append((number, lane, nbytes, arrive))
            elif not (wire.is_refused or wire.receiver.process.is_dead):
                arrive()
                if wire.doom is not None:
                    self.reset(wire, wire.doom)
            else:
                connection = self._connection_of(wire)
                if connection is not None:
                    self._refuse(connection)

        self._scheduler.at(due_s, come)

    def taken(self, wire: Wire, nbytes: int) -> None:
        """The receiver has it: there is room again."""
        wire.bytes_on_the_way -= nbytes
        if wire.sender_waits and wire.bytes_on_the_way < WINDOW_BYTES // 2:
            wire.sender_waits = False
            back = self.link(wire.link.target, wire.link.source)
            self._scheduler.after(self._delay_s(back, 0), wire.sender.has_room)

    def hang_up(self, wire: Wire, why: str) -> None:
        """Nothing follows on it; the receiver hears of that behind what was sent before."""
        if wire.is_over:
            return
        for lane in range(1, LANES):
            wire.arrivals[0] = max(wire.arrivals[0], wire.arrivals[lane])
        self._transmit(wire, 0, 0, lambda: self._arrived_end(wire, why))

    def _arrived_end(self, wire: Wire, why: str) -> None:
        self._end_wire(wire)
        connection = self._connection_of(wire)
        if connection is not None and all(
            each.is_over or each.sender.process.is_dead for each in connection
        ):
            self._forget(connection)
        wire.receiver.peer_hung_up(why)

    def reset(self, wire: Wire, why: str) -> None:
        """Both ends lose the connection, each in its own time, and all that is on its way."""
        connection = self._connection_of(wire)
        if connection is None:
            return
        self._forget(connection)
        for each in connection:
            self._scheduler.after(
                self._delay_s(each.link, 0),
                lambda end=each.receiver: end.lost(why),  # type: ignore[misc]
            )

    def reset_after_next(self, wire: Wire, why: str) -> None:
        """The same, once the next message of that direction has arrived: an answer is lost then."""
        wire.doom = why

    def connections(self) -> list[tuple[Wire, Wire]]:
        """Those there are, in the order in which they were made."""
        return list(self._connections)

    def _connection_of(self, wire: Wire) -> tuple[Wire, Wire] | None:
        return next((pair for pair in self._connections if wire in pair), None)

    def _end_wire(self, wire: Wire) -> None:
        wire.is_over = True
        wire.held.clear()
        wire.link.wires.pop(wire, None)

    def _forget(self, connection: tuple[Wire, Wire]) -> None:
        for wire in connection:
            self._end_wire(wire)
        self._connections.pop(connection, None)

    # -- ends of processes -------------------------------------------------------------------------

    def process_ended(self, process: NetworkMember) -> None:
        """Its kernel hangs up for it. Of what it had sent the last may not arrive."""
        for key, each in list(self.listening.items()):
            if each.process is process:
                del self.listening[key]
        is_down = process.host.is_down
        for listening, refuse in list(self._greetings.values()):
            if listening.process is process and not is_down:
                refuse()
        for connection in list(self._connections):
            for wire in connection:
                if wire.sender.process is process and not wire.is_over:
                    if is_down:
                        self._unheard(wire)
                    elif self._draw() < 0.3:  # it had not read all: what it sent is dropped
                        self._end_and_tell(wire)
                    else:
                        self.hang_up(wire, f"{process.name} ended")

    def _end_and_tell(self, wire: Wire) -> None:
        receiver = wire.receiver
        delay_s = self._delay_s(wire.link, 0)
        if wire.link.is_cut:
            self._unheard(wire)  # a kernel says that once
            return
        self._end_wire(wire)
        self._scheduler.after(delay_s, lambda: receiver.lost("it was reset by the peer"))

    def _unheard(self, wire: Wire) -> None:
        """Silence is all that its receiver hears for now; what was on its way is gone."""
        wire.is_unheard = True
        wire.held.clear()

    def crash(self, name: str) -> None:
        """A host is gone, without a word to anybody."""
        self._note("fault", f"{name} crashes")
        self.host(name).is_down = True
        for other in self.hosts:
            if other != name:
                self.cut(name, other)
                self.cut(other, name)

    def boot(self, name: str) -> None:
        """It is there again."""
        self._note("fault", f"{name} is back")
        self.host(name).is_down = False
        for other in self.hosts.values():
            if other.name != name and not other.is_down:
                self.mend(name, other.name)
                self.mend(other.name, name)

    def mend_all(self) -> None:
        """All links pass messages again, and no connection is to be reset any more."""
        for connection in self._connections:
            for wire in connection:
                wire.doom = None
        for source, target in list(self._links):
            self.mend(source, target)

    def close(self) -> None:
        """Nothing is to come any more."""
        self._connections.clear()
        self._greetings.clear()
        self.listening.clear()
        self._links.clear()

    # -- connecting --------------------------------------------------------------------------------

    def listen(
        self, scheme: str, host: SimulatedHost, port: int, listening: Listening
    ) -> int | None:
        """The port; None: it is taken."""
        if not port:
            port = host.next_port
            host.next_port += 1
        if (scheme, host.name, port) in self.listening:
            return None
        self.listening[scheme, host.name, port] = listening
        return port

    def connect(
        self,
        process: NetworkMember,
        secret: bytes,
        target: tuple[str, SimulatedHost, int],
        address: str,
        timeout_s: float,
        make: Callable[[Listening, float], object],
    ) -> Future:
        """A future of what make(listening, when the other end begins) gives; it may end with
        UnreachableError or AuthenticationError.
        """
        done = Future()
        scheme, host, port = target
        there = self.link(process.host.name, host.name)
        back = self.link(host.name, process.host.name)

        def fail(error: Exception) -> None:
            done.set_error(error)

        def late() -> None:
            fail(UnreachableError(f"nobody answered at {address} in time"))

        self._scheduler.after(process.host.clock.virtual(timeout_s), late)

        def over(link: NetworkLink, then: Callable[[], object], again_s: float = AGAIN_S) -> None:
            """The next step, once it arrives: over a cut link it is sent again and again."""

            def come() -> None:
                if done.finished or process.is_dead:
                    return
                if link.is_cut:
                    self._scheduler.after(again_s, lambda: over(link, then, 2 * again_s))
                else:
                    then()

            self._scheduler.after(self._delay_s(link, 0), come)

        def arrived() -> None:
            listening = self.listening.get(target_key)
            if host.is_down:
                return
            if listening is None:
                over(back, lambda: fail(UnreachableError(f"nobody listens at {address}")))
            else:
                self._greetings[done] = (listening, refuse)
                done.when_done(lambda _: self._greetings.pop(done, None))
                listening.greet(lambda: over(back, lambda: greeted(listening)))

        def refuse() -> None:
            over(back, lambda: fail(UnreachableError(f"{address} closed the connection")))

        def greeted(listening: Listening) -> None:
            if listening.node.secret != secret:
                fail(AuthenticationError(f"{address} does not hold the same secret"))
            elif self.listening.get(target_key) is not listening:
                refuse()
            else:
                begins_s = self._scheduler.now + self._delay_s(there, 0)
                done.set_result(make(listening, begins_s))

        target_key = (scheme, host.name, port)
        over(there, arrived)
        return done

    def begin(self, end: End, listening: Listening, begins_s: float) -> None:
        """The acceptor gets its end of a connection then."""

        def come() -> None:
            if not listening.process.is_dead:
                listening.accept(end)

        self._scheduler.at(begins_s, come)
