"""The transports of simulated processes: messages over the network of the simulation.

A connection is MemoryConnection with a network between its ends: each message arrives later, in the
order of its lane, and what ends one end is heard of by the other in its time. There is one class
for shm, unix and tcp: they differ in who can be reached. Handshakes are the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from prpc_engine.simulation.network import Listening, Network, NetworkMember, Wire
from shard import (
    AddressInUseError,
    Connection,
    Listener,
    MemoryConnection,
    Node,
    PeerIdentity,
    PeerLostError,
    Reactor,
    ShardError,
    Slab,
    Transport,
    UnreachableError,
    runtime,
)

BULK_BYTES_MIN = 256 << 10  # as over tcp
EVERYWHERE = ("0.0.0.0", "::", "[::]")  # at every interface of the host


class SimulatedConnection(MemoryConnection):
    """One end of a connection between two simulated processes. Made by SimulatedTransport."""

    def __init__(
        self,
        scheme: str,
        peer: str,
        node: Node,
        slab: Slab,
        process: NetworkMember,
        network: Network,
    ) -> None:
        super().__init__(peer, node.limits, slab, process.weather)
        self.transport = scheme
        if node.limits.connections_per_peer > 1 and scheme != "shm":
            self.bulk_bytes_min = BULK_BYTES_MIN
        self.process = process
        self._network = network
        self._before_a_call = runtime.monotonic
        self._out: Wire | None = None
        self._in: Wire | None = None
        self._end_came: str | None = None  # before it was attached

    def wired(self, out: Wire, into: Wire) -> None:
        """It is connected."""
        self._out, self._in = out, into

    # -- what the network tells: as events, in no thread of the process ------------------------

    def arrive(self, item: Any, nbytes: int) -> None:
        """A message is there."""
        self._in_flight.append(item)
        self._sent_to()

    def has_room(self) -> None:
        """The peer took some of what was on its way."""
        if self.reactor is not None and self.error is None:
            self.reactor.call_soon(self.drain)

    def peer_hung_up(self, why: str) -> None:
        """Nothing more will come."""
        error = PeerLostError(f"{self.peer} closed the connection: {why}")
        if self.reactor is None:
            self._end_came = why
        elif self.error is None and not self.reactor.closed:
            self.reactor.call_soon(lambda: self._peer_hung_up(error))

    def lost(self, why: str) -> None:
        """It is over, whatever was on its way."""
        error = PeerLostError(f"{self.peer} was lost: {why}")
        if self.reactor is None:
            self._end_came = why
        elif self.error is None and not self.reactor.closed:
            self.reactor.call_soon(lambda: self.close(error))

    # -- what Connection asks for ------------------------------------------------------------------

    def send(self, body: Any, blocks: Sequence[NDArray[Any]] = (), stable: bool = False) -> None:
        self._before_a_call()  # a thread may stand still before the system sees what it does
        super().send(body, blocks, stable)

    def _write(self, item: Any) -> bool:
        wire = self._out
        if self.error is not None or wire is None:
            return True  # as on any connection that ended: taken, and dropped
        body, blocks = item
        nbytes = len(body) + sum(block.nbytes for block in blocks)
        if not self._network.send(wire, int(nbytes >= self.bulk_bytes_min), item, nbytes):
            return False
        self._sent.nbytes += nbytes
        return True

    def send_everywhere(self, body: Any) -> None:
        self.send(body)
        if self.bulk_bytes_min == BULK_BYTES_MIN and self._out is not None and self.error is None:
            self._network.send(self._out, 1, (bytes(body), []), len(body))

    def _deliver(self) -> None:
        body, blocks = self._in_flight[0]
        nbytes = len(body) + sum(block.nbytes for block in blocks)
        super()._deliver()
        if self._in is not None:
            self._network.taken(self._in, nbytes)

    def _drive(self, reactor: Reactor) -> None:
        reactor.add_source(self)
        self._is_source = True
        if self._end_came is not None:
            why, self._end_came = self._end_came, None
            self.peer_hung_up(why)

    def idle_neighbour(self) -> None:
        return None

    def _end(self) -> None:
        super()._end()
        out, self._out = self._out, None
        if out is not None and not self.process.is_dead:
            self._network.hang_up(out, "it hung up")


class SimulatedListener(Listener):
    """Accepts at one address until it is closed."""

    def __init__(self, address: str, forget: Callable[[], object]) -> None:
        self.address = address
        self._forget = forget

    def close(self) -> None:
        self._forget()


class SimulatedTransport(Transport):
    """One scheme of one node of a simulated process."""

    def __init__(
        self, scheme: str, node: Node, slab: Slab, process: NetworkMember, network: Network
    ) -> None:
        self.scheme = scheme
        self._node = node
        self._slab = slab
        self._process = process
        self._network = network

    def refusal(self) -> str | None:
        return None

    def cannot_reach(self, address: str) -> str | None:
        if self.scheme == "tcp":
            return None
        host, _, _ = address.removeprefix(f"{self.scheme}://").partition(":")
        return None if host == self._process.host.name else "another host"

    def listen(
        self, address: str, reactor: Reactor, accept: Callable[[Connection[Any]], None]
    ) -> SimulatedListener:
        host = self._process.host
        where = address.removeprefix(f"{self.scheme}://")
        name, _, text = where.rpartition(":")
        if self.scheme != "tcp":
            name, text = host.name, "0"
        elif name not in EVERYWHERE and self._network.find(name, host) is not host:
            raise ShardError(
                f"cannot listen at {address}: {host.name} has the address {host.address}, and "
                "127.0.0.1 for processes of its own"
            )

        def greet(then: Callable[[], object]) -> None:
            if not reactor.closed:
                reactor.call_soon(then)

        def take(end: SimulatedConnection) -> None:
            def attach() -> None:
                if end.error is None:
                    end.attach(reactor)
                    accept(end)

            if reactor.closed:
                end.close()
            else:
                reactor.call_soon(attach)

        listening = Listening(self._process, self._node, self._slab, greet, take)
        port = self._network.listen(self.scheme, host, int(text), listening)
        if port is None:
            raise AddressInUseError(
                f"cannot listen at {address}: the port is taken; choose another, or 0 for any "
                "free one"
            )
        key = (self.scheme, host.name, port)
        return SimulatedListener(
            f"{self.scheme}://{name}:{port}", lambda: self._network.listening.pop(key, None)
        )

    async def connect(self, address: str, timeout_s: float) -> Connection[Any]:
        name, _, port = address.removeprefix(f"{self.scheme}://").rpartition(":")
        host = self._network.find(name, self._process.host)
        if host is None or not port.isdecimal():
            raise UnreachableError(f"{address}: there is no such host in the simulation")
        made: Connection[Any] = await self._network.connect(
            self._process,
            self._node.secret,
            (self.scheme, host, int(port)),
            address,
            timeout_s,
            lambda listening, begins_s: self._make(listening, address, begins_s),
        )
        return made

    def _make(self, listening: Listening, address: str, begins_s: float) -> SimulatedConnection:
        """Both ends; the other one is accepted at `begins_s`."""
        network = self._network
        ours = SimulatedConnection(
            self.scheme, address, self._node, self._slab, self._process, network
        )
        theirs = SimulatedConnection(
            self.scheme,
            f"{self._process.name}",
            listening.node,
            listening.slab,
            listening.process,
            network,
        )
        out, into = network.join(ours, theirs, self._node.limits.peer_silent_s, begins_s)
        ours.wired(out, into)
        theirs.wired(into, out)
        mine, its = self._node.incarnation, listening.node.incarnation
        ours.peer_incarnation, theirs.peer_incarnation = its, mine
        theirs.peer_name = ours.known_as = mine
        same_user = self.scheme != "tcp"
        secret = self._node.secret_name if self._node.secret else ""
        ours.peer_identity = theirs.peer_identity = PeerIdentity(secret=secret, same_user=same_user)
        network.begin(theirs, listening, begins_s)
        return ours


def transports_of(
    process: NetworkMember, network: Network, node: Node, slab: Slab
) -> dict[str, Transport]:
    """Those of a node in that process, by their names: as prpc_engine.node.ways has them."""
    process.has_slab(slab)
    one_lane = replace(node, limits=replace(node.limits, connections_per_peer=1))
    made: dict[str, Transport] = {
        scheme: SimulatedTransport(scheme, node, slab, process, network)
        for scheme in ("shm", "unix", "tcp")
    }
    made["control"] = SimulatedTransport("tcp", one_lane, slab, process, network)
    return made
