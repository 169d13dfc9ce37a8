"""This process as others see it: a reactor, a slab, transports, listeners, servers, and one peer
per other node.

Peers are shared by all clients of the process: one connection per other node, made when it is first
needed. paths.py says which of our transports is tried first, and Peer.choice which was taken, and
why not the others.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.archive import Archive
from prpc_engine.descriptors import names_shortage
from prpc_engine.node.attempts import Attempts, PeerAttempt, give
from prpc_engine.node.ended import Ended
from prpc_engine.node.node_info import ABOUT_TARGET, about_server
from prpc_engine.node.ways import CONTROL, make_transports
from prpc_engine.rpc.local_peer import LocalPeer
from prpc_engine.rpc.paths import Choice, Paths, Refusal
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import check_exposure
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import UserSecret
from shard import (
    BETWEEN_HOSTS,
    JOB_SECRET,
    USER_SECRET,
    AddressInUseError,
    AuthenticationError,
    ClosedError,
    Connection,
    ControlLoop,
    DistributedPort,
    Driver,
    ForeignProtocolError,
    ForkedError,
    Future,
    Listener,
    MemoryTransport,
    PeerLostError,
    Reactor,
    ShardError,
    Slab,
    SocketDistributor,
    TcpListener,
    TcpTransport,
    Transport,
    Trimmer,
    UnreachableError,
    control_loop,
    runtime,
)
from shard import Node as Identity

logger = logging.getLogger("prpc")
# Between two looks whether a connection is idle that is to be left for a better path; so many find
# it busy, then it is left so.
LEAVE_S, LEAVE_LOOKS_MAX = 1.0, 10
NOT_SIMULATED = "a simulation has no such transport"


class Node:
    """This process as other nodes see it: it listens, connects, and has one peer for each node it
    is connected to.

    waiter        who turns the reactor while a thread waits; None in a shard, where nobody may
                  block
    config        what it is told (settings/node_config.py); without transports it listens for
                  nobody but this process
    servers       are there for whoever connects at once; more may come
    on_peer_lost  called with each peer whose connection is over, in the reactor's thread
    control_loop  where coroutines connect, and where those of its clients run

    Owned by a Master, an RpcService, or a shard that serves; close() by its owner, in the reactor's
    thread. peer_at() may be called from any thread, and blocks. Raises AddressInUse, ConfigError.
    """

    @names_shortage("a node")
    def __init__(
        self,
        reactor: Reactor,
        waiter: Driver | None,
        slab: Slab,
        config: NodeConfig,
        servers: Iterable[ServedObject] = (),
        on_peer_lost: Callable[[Peer], None] | None = None,
        control_loop: Callable[[], ControlLoop] = control_loop,
    ) -> None:
        self.control_loop = control_loop
        node, secret, limits = config.node, config.secret, config.limits
        host, port, transports = node.bind.host, node.bind.port, node.transports
        check_exposure(host, secret)
        self._make_archive = partial(
            Archive, allow_pickle=node.allow_pickle, compression=node.compression, limits=limits
        )
        # For requests that wait for a connection, Peer.resend() sees to what is Lazy; refuses a
        # compression that is not there.
        self.archive = self._make_archive(in_process=True)
        self.limits = limits
        self.reactor = reactor
        self.waiter = waiter
        self.wait_until: Callable[[Future, float | None], bool] = (
            waiter.wait_until if waiter is not None else _cannot_wait
        )
        self.slab = slab
        self._trimmer = Trimmer(slab, reactor)
        self.servers: dict[int, ServedObject] = {server.target: server for server in servers}
        self.servers[ABOUT_TARGET] = about_server(
            lambda: self.addresses,
            self.servers,
            self.traffic,
            slab,
            reactor.statistics,
            config.allow,
        )
        self.on_peer_lost = on_peer_lost or _ignore
        self._peers: dict[str, Peer] = {}  # by the first address of the other node
        self._accepted: dict[Peer, None] = {}
        self._ended: dict[str, Ended] = {}  # by transport: what connections did that are over
        # for a better path: no new calls, and closed when the last is answered
        self._left: dict[Peer, None] = {}
        self._next_number = itertools.count().__next__  # of a connection, made or accepted
        self._connections_max = limits.connections_max
        self._paths = Paths()
        self._unusable: list[Refusal] = []  # what we may use, and this process cannot
        # Of what is entered into _peers and _attempts, of _paths, _ended and _closed; never held
        # while something waits.
        self._guard = runtime.Lock()
        self._attempts = Attempts(self._guard, control_loop)
        self.pid = os.getpid()
        self._closed = False
        identity = Identity(
            secret=secret,
            incarnation=runtime.randbits(63) | 1,
            limits=limits,
            tcp_checksum=config.transport.tcp_checksum,
            secret_name=USER_SECRET if isinstance(secret, UserSecret) else JOB_SECRET,
        )
        self._memory = MemoryTransport(identity, slab)
        self.advertise = node.advertise
        self._transports: list[Transport] = [self._memory]
        self._listeners: list[Listener] = []
        self._known = known = make_transports(identity, slab, config.tls, config.transport)
        listen_at = {name: f"{name}://" for name in known}
        listen_at["tcp"] = f"tcp://{Address(host, port)}"
        listen_at["verbs"] = f"verbs://{Address(host, 0)}"  # a port of its own, for the handshake
        try:
            for name in transports:
                transport = known.get(name)
                refusal = (transport.refusal() or "") if transport is not None else NOT_SIMULATED
                if transport is None or refusal:
                    logger.warning("transport %s is not used: %s", name, refusal)
                    self._unusable.append(Refusal(name, refusal, False))  # that is said once, here
                    continue
                self._transports.append(transport)
                self._listeners.append(transport.listen(listen_at[name], reactor, self._accept))
            if transports and not self._listeners:
                why = "; ".join(map(str, self._unusable))
                raise errors.ConfigError(
                    f"none of the transports {list(transports)} works on this machine: {why}"
                )
            # In-process peers find this node under its first address.
            self._listeners.insert(
                0, self._memory.listen(f"memory://{identity.incarnation:x}", reactor, self._accept)
            )
        except AddressInUseError as error:
            self._close_listeners()
            raise errors.AddressInUse(str(error)) from error
        except ShardError as error:
            self._close_listeners()
            raise errors.ConfigError(str(error)) from error
        except BaseException:
            self._close_listeners()
            raise

    @property
    def addresses(self) -> list[str]:
        """Where other nodes reach this one, most preferred first."""
        return [self._advertised(listener.address) for listener in self._listeners]

    def _advertised(self, bound: str) -> str:
        scheme = bound.partition("://")[0]
        if self.advertise is None or scheme not in BETWEEN_HOSTS:
            return bound
        port = int(bound.rpartition(":")[2])
        if scheme == "tcp":
            port = self.advertise.port or port
        return f"{scheme}://{Address(self.advertise.host, port)}"

    def address(self, scheme: str) -> str:
        """Where one transport listens, without its scheme. Raises Closed when the node is,
        ConfigError where it never did.
        """
        for listener in self._listeners:
            if listener.address.startswith(scheme + "://"):
                return listener.address.partition("://")[2]
        if self._closed:
            raise errors.Closed(
                f"this node is closed and listens at no {scheme} address: ask for it before close()"
            )
        raise errors.ConfigError(
            f"this node listens at no {scheme} address: it was made without that transport"
        )

    # -- one port for several processes ------------------------------------------------------------

    def deal_out(self, dealer: SocketDistributor) -> None:
        """From now on the dealer's takers get what comes to this node's tcp port, while there are
        any.
        """
        for listener in self._listeners:
            if isinstance(listener, TcpListener):
                listener.share(dealer.deal)

    def take(self, port: DistributedPort) -> None:
        """Accept what another process's dealer hands over, as if this node listened at its port."""
        tcp = self._known["tcp"]
        assert isinstance(tcp, TcpTransport), "there is no port to share in a simulation"
        self._listeners.append(tcp.listen_on(port, self.reactor, self._accept))

    # -- peers -------------------------------------------------------------------------------------

    def master_peer(self, address: str, timeout_s: float) -> Peer:
        """The peer for the master at host:port; over tcp on one lane, whatever the data goes over.
        Raises as peer_at().
        """
        control = [self._known[CONTROL]]
        with self._wish([f"tcp://{address}"], control, timeout_s, "the master") as wish:
            peer: Peer = wish.result()
            return peer

    def peer_at(self, addresses: Sequence[str], timeout_s: float, asked: str) -> Peer:
        """The peer for a node that offers `addresses`, connecting if need be. Blocks for at most
        `timeout_s` an address.

        Raises NotSent with each transport's reason, AuthenticationFailed, Closed.
        """
        with self._wish(addresses, self._transports, timeout_s, asked) as wish:
            peer: Peer = wish.result()
            return peer

    async def reach_master(self, address: str, timeout_s: float) -> Peer:
        """As master_peer(), for coroutines of the control loop."""
        control = [self._known[CONTROL]]
        with self._wish([f"tcp://{address}"], control, timeout_s, "the master") as wish:
            peer: Peer = await wish
            return peer

    async def reach(self, addresses: Sequence[str], timeout_s: float, asked: str) -> Peer:
        """As peer_at(), for coroutines of the control loop."""
        # failpoint: node.reaching
        with self._wish(addresses, self._transports, timeout_s, asked) as wish:
            peer: Peer = await wish
            return peer

    def near_peer(self, addresses: Sequence[str]) -> Peer | None:
        """The peer for a node that is connected, or in this process; None for any other, and where
        peer_at() would raise Closed. At once, from any thread.
        """
        first = addresses[0]
        peer = self._peers.get(first)
        if peer is not None and not peer.lost:
            return peer
        if self._memory.cannot_reach(first) is not None:
            return None
        self.check_process()
        with self._guard:
            peer = self._peers.get(first)
            if peer is not None and not peer.lost:
                return peer
            if self._closed:
                return None
            try:
                connection = self._memory.connect_at_once(first)
            except UnreachableError:  # it is being closed
                return None
            choice = Choice(
                self._memory.scheme,
                connection.peer,
                addresses[-1],
                tuple(self._unusable),
                self.reactor.clock(),
            )
            peer, is_news = self._enter(first, connection, choice)
        if is_news:
            _tell(first, choice)
        return peer

    def check_process(self) -> None:
        """Raises ForkedError in a fork of the process that made this node."""
        if self.pid != os.getpid():
            raise ForkedError(
                f"made in process {self.pid}, used in its fork {os.getpid()}: "
                "start processes by spawn and make it there"
            )

    @contextmanager
    def _wish(
        self,
        addresses: Sequence[str],
        transports: Sequence[Transport],
        timeout_s: float,
        asked: str,
    ) -> Iterator[Future]:
        """The future of that peer, for one who waits for it inside; who leaves gives it up. Raises
        Closed, ForkedError.
        """
        self.check_process()
        first = addresses[0]
        peer = self.near_peer(addresses)
        attempt, is_new = None, False
        with self._guard:
            if peer is None:
                peer = self._peers.get(first)
            if peer is None or peer.lost:
                if self._closed:
                    raise errors.Closed(f"{asked}: this side was closed before")
                attempt, wish, is_new = self._attempts.join(first, asked)
        if attempt is None:
            wish = self.control_loop().future()
            wish.set_result(peer)
            yield wish
            return
        try:
            if is_new:
                self._begin(attempt, addresses, transports, timeout_s)
            yield wish
        finally:
            self._attempts.give_up(attempt, wish)

    def _begin(
        self,
        attempt: PeerAttempt,
        addresses: Sequence[str],
        transports: Sequence[Transport],
        timeout_s: float,
    ) -> None:
        connecting = self._connect_for(attempt, addresses, transports, timeout_s)
        try:
            self._attempts.begin(attempt, connecting)
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread, for the loop
            why = error.strerror if isinstance(error, OSError) else error
            refusals = [
                Refusal(one.scheme, str(why), True) for one in transports if one is not self._memory
            ]
            self._attempts.fail(attempt, _no_path(attempt.asked, refusals))

    async def _connect_for(
        self,
        attempt: PeerAttempt,
        addresses: Sequence[str],
        transports: Sequence[Transport],
        timeout_s: float,
    ) -> None:
        """Connect for all that wait for that node."""
        first = attempt.node
        try:
            connection, choice = await self._connect(
                addresses, transports, timeout_s, attempt.asked
            )
        except Exception as error:
            self._attempts.fail(attempt, error)
            return
        with self._guard:
            is_wanted = self._attempts.is_under_way(attempt)
            if is_wanted:
                peer, is_news = self._enter(first, connection, choice)
                wishes = self._attempts.end(attempt)
        if not is_wanted:
            connection.close()  # not attached yet, so it is ours
            return
        if is_news:
            _tell(attempt.asked, choice)
        give(wishes, peer)

    def _enter(self, first: str, connection: Connection[Any], choice: Choice) -> tuple[Peer, bool]:
        """A node is connected to: its peer, and whether the path is worth a line in the log. With
        the guard held.
        """
        peer = self._peers[first] = self._peer_over(connection, choice)
        is_news = self._paths.took(first, choice)
        if choice.again_s is not None:
            self.reactor.call_soon(partial(self._leave_later, peer, choice.again_s))
        self.reactor.call_soon(lambda: connection.attach(self.reactor))
        return peer, is_news

    async def _connect(
        self,
        addresses: Sequence[str],
        transports: Sequence[Transport],
        timeout_s: float,
        asked: str,
    ) -> tuple[Connection[Any], Choice]:
        known = {transport.scheme: transport for transport in transports}
        with self._guard:
            paths = self._paths.arrange(addresses[0], known, self.reactor.clock())
        refusals = {one.transport: one for one in self._unusable} | {
            name: rest for name, rest in paths if rest is not None
        }
        for name, _ in paths:
            refusals.pop(name, None)  # no other one has connected: it rests no longer
            way = await self._go(known[name], addresses, timeout_s, asked)
            if isinstance(way, Connection):
                return way, Choice(
                    name, way.peer, addresses[-1], tuple(refusals.values()), self.reactor.clock()
                )
            # that another process is not this one goes without saying
            if name != MemoryTransport.scheme:
                refusals[name] = way
        raise _no_path(asked, refusals.values())

    def _leave_later(self, peer: Peer, after_s: float, looks: int = LEAVE_LOOKS_MAX) -> None:
        """Hang up on a peer in two steps, so that the next call tries the preferred path again. In
        the reactor.

        When it is seen idle, or was busy at so many looks, it gets no new calls; when it is idle at
        a later look, it is closed. A call on its way meanwhile gets its answer. Calls that follow
        those of a busy one may overtake them.
        """

        def look() -> None:
            if peer.connection.error is not None:
                return
            if peer.is_idle and peer.lost:
                # Lost, not closed: what a slow thread is still about to send here goes over the
                # other path.
                peer.connection.close(
                    PeerLostError(f"{peer.connection.peer} is reached by another path from now on")
                )
                return
            if not peer.lost and (peer.is_idle or not looks):
                peer.lost = True
                with self._guard:
                    self._left[peer] = None
                    self._forget(peer)
            self._leave_later(peer, LEAVE_S, max(0, looks - 1))

        self.reactor.call_later(after_s, look)

    def _forget(self, peer: Peer) -> list[str]:
        """Its node is not connected to any more; the addresses by which it was known. With the
        guard held: another thread may be about to enter the next peer of that node."""
        addresses = [address for address, one in self._peers.items() if one is peer]
        # failpoint: node.forgetting
        for address in addresses:
            del self._peers[address]
        return addresses

    async def _go(
        self, transport: Transport, addresses: Sequence[str], timeout_s: float, asked: str
    ) -> Connection[Any] | Refusal:
        """Try one path. Raises AuthenticationFailed and NotAPeer: the others would lead to the same
        place.
        """
        name = transport.scheme
        address = next((one for one in addresses if one.startswith(f"{name}://")), None)
        if address is None:
            return Refusal(name, f"not offered by {addresses[-1]}", False)
        try:
            reason = transport.cannot_reach(address)
            if reason is not None:
                return Refusal(name, reason, False)
            return await transport.connect(address, timeout_s)
        except AuthenticationError as error:
            raise errors.AuthenticationFailed(f"{asked} at {address}: {error}") from error
        except ForeignProtocolError as error:
            raise errors.NotAPeer(f"{asked} at {address}: {error}") from error
        except ShardError as error:
            return Refusal(name, str(error), True)
        except OSError as error:  # no /dev/shm, or no descriptor left
            return Refusal(name, f"{address}: {error.strerror or error}", True)

    def is_local(self, addresses: Sequence[str]) -> bool:
        """Whether one of these addresses is of this process, or reached without leaving this
        host.
        """
        near = [one for one in self._transports if one.scheme not in BETWEEN_HOSTS]
        return any(
            address.startswith(one.scheme + "://") and one.cannot_reach(address) is None
            for one in near
            for address in addresses
        )

    @property
    def choices(self) -> dict[str, str]:
        """For each node that we have connected to: the path that was taken, and why those before it
        were not.
        """
        return {
            peer.choice.node: str(peer.choice)
            for peer in list(self._peers.values())
            if peer.choice is not None
        }

    def peers(self) -> list[Peer]:
        """All nodes we are connected to, whoever called."""
        return [*list(self._peers.values()), *list(self._left), *list(self._accepted)]

    def traffic(self) -> tuple[list[Peer], dict[str, Ended]]:
        """All nodes we are connected to, and by transport what connections did that are over: of
        one moment, none in both.
        """
        with self._guard:
            return self.peers(), dict(self._ended)

    def _accept(self, connection: Connection[Any]) -> None:
        if len(self._accepted) >= self._connections_max:
            logger.warning(
                "hung up on %s: %d connections are open already",
                connection.peer,
                self._connections_max,
            )
            connection.close()
            return
        self._accepted[self._peer_over(connection)] = None

    def _peer_over(self, connection: Connection[Any], choice: Choice | None = None) -> Peer:
        in_process = connection.transport == MemoryTransport.scheme
        archive = self._make_archive(in_process=in_process)
        return (LocalPeer if in_process and self.waiter is not None else Peer)(
            connection,
            self.reactor,
            self.waiter,
            self.servers,
            self._lost,
            archive,
            choice,
            self._next_number(),
        )

    def _lost(self, peer: Peer) -> None:
        error = peer.connection.error
        figures = peer.statistics()
        with self._guard:
            self._ended[figures.transport] = self._ended.get(figures.transport, Ended()) + figures
            self._accepted.pop(peer, None)
            self._left.pop(peer, None)
            addresses = self._forget(peer)
        for address in addresses:
            if peer.choice is not None and not isinstance(error, ClosedError):
                with self._guard:
                    self._paths.broke(address, peer.choice, str(error), self.reactor.clock())
        self.on_peer_lost(peer)

    # -- the end -----------------------------------------------------------------------------------

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def close(self) -> None:
        """Hang up on everybody. In the reactor's thread."""
        if self._closed:
            return
        with self._guard:
            self._closed = True
        self._attempts.close()
        self._trimmer.close()
        self._close_listeners()
        for peer in self.peers():
            peer.connection.close()
        self._peers.clear()
        self._accepted.clear()


def _no_path(asked: str, refusals: Iterable[Refusal]) -> errors.NoPath:
    refused = list(refusals)
    return errors.NoPath(f"{asked} cannot be reached: " + "; ".join(map(str, refused)), refused)


def _tell(asked: str, choice: Choice) -> None:
    """A line of the log."""
    logger.log(logging.WARNING if choice.failed else logging.INFO, "%s: %s", asked, str(choice))


def _cannot_wait(future: Future, deadline: float | None) -> bool:
    """In a shard nobody may block: await the future."""
    return False


def _ignore(peer: Peer) -> None:
    """What happens when a peer is lost and nobody has said."""
