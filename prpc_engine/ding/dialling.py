"""Dials other nodes of a DI-engine job: coroutines of the control loop, one for each node that is
not connected.

    the node                       next
    does not answer                again after a pause, PAUSE, for ever; the log says so once
    refuses our secret, or is of   the same, with the longest pause: somebody may mend it
    another kind
    answers at its tcp port        it is asked where else it is reached; on this host by that, and
                                   else over this very connection: hello()
    has told its greeting          the exchange is told, in its reactor
    is this very process           not tried again: the log says so
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.ding import rendezvous_file
from prpc_engine.ding.greeting import HELLO, TARGET, WHERE, NodeGreeting, read_greeting, told
from prpc_engine.ding.hosts import dialled_address
from prpc_engine.ding.link import NodeLink
from prpc_engine.node.node import Node
from prpc_engine.rpc.backoff import Backoff
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from shard import Driver, Future, Task, control_loop, run_blocking, sleep

CONNECT_TIMEOUT_S = 5.0  # for one attempt, and for each answer
# between attempts: a node that comes up is found soon, one that does not costs little
PAUSE = Backoff(first_s=0.02, max_s=1.0)

logger = logging.getLogger("prpc")


class _Itself(Exception):
    """The address leads to the process that dials it."""


class Dialler:
    """Connects links to their nodes. Owned by an Exchange; thread-safe.

    node       of this process
    secret     of the job, or the user's: which addresses may be dialled
    addresses  this process's own
    greeting   what to say to the process of an incarnation
    driver     of its reactor
    greeted    told of the link, its peer, what that has answered, the version of our topics that it
               was told, and a future to complete once it knows the newest; in the reactor
    """

    def __init__(
        self,
        node: Node,
        driver: Driver,
        secret: bytes,
        addresses: list[str],
        greeting: Callable[[int], NodeGreeting],
        greeted: Callable[[NodeLink, Peer, NodeGreeting, int, Future], object],
    ) -> None:
        self._node, self._driver, self._secret, self._own = node, driver, secret, addresses
        self._greeting, self._greeted = greeting, greeted
        self._tasks: set[Any] = set()
        self._meetings: dict[Future, NodeLink] = {}
        self._is_closed = False

    def dial(self, link: NodeLink) -> None:
        """Until it is connected, or close()."""
        if self._is_closed:
            return
        task: Task = control_loop().spawn(self._dial(link))
        self._tasks.add(task)
        task.when_done(self._tasks.discard)
        if self._is_closed:
            task.cancel()

    def meetings(self) -> list[tuple[NodeLink, Future]]:
        """The nodes that hear of our topics just now, perhaps of those of before; each future is
        done when its node knows the newest, or has not been met after all.
        """
        return [(link, met) for met, link in self._meetings.copy().items()]

    def close(self) -> None:
        """Dial no more."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()

    async def _dial(self, link: NodeLink) -> None:
        failures = 0
        while not self._is_closed:
            try:
                await self._meet(link, await self._reach(link))
            except errors.Closed:
                return
            except _Itself as error:
                logger.error("%s: see attach_to", str(error))
                link.give_up()
                return
            except Exception as error:
                failures += 1
                is_lasting = isinstance(
                    error, errors.AuthenticationFailed | errors.NotAPeer | errors.ConfigError
                )
                if failures == 1 or (is_lasting and failures == 2):
                    level = logging.ERROR if is_lasting else logging.INFO
                    logger.log(level, "waiting for %s: %s", link.label, str(error))
                await sleep(PAUSE.max_s if is_lasting else PAUSE.bound_s(failures))
            else:
                return

    async def _reach(self, link: NodeLink) -> Peer:
        place, route = link.place, FixedRoute(TARGET, link.label)
        assert place is not None, "who dials knows where"
        node, text = self._node, link.label
        bootstrap = None
        if place.tcp is None:
            addresses = await run_blocking(rendezvous_file.read, place.path)
        else:
            address = await run_blocking(dialled_address, place.tcp, self._secret)
            bootstrap = await node.reach([f"tcp://{address}"], CONNECT_TIMEOUT_S, text)
            told_addresses = await self._ask(bootstrap, route, WHERE, ())
            addresses = [
                f"tcp://{address}" if one.startswith("tcp://") else one
                for one in map(str, told_addresses)
            ]
        if bootstrap is not None and not node.is_local(addresses):
            return bootstrap
        if not set(self._own).isdisjoint(addresses):
            raise _Itself(f"{link.label} is this very node, which dials itself")
        peer = await node.reach(addresses, CONNECT_TIMEOUT_S, text)
        if bootstrap is not None and peer is not bootstrap:
            node.reactor.call_soon(bootstrap.connection.close)
        return peer

    async def _meet(self, link: NodeLink, peer: Peer) -> None:
        met = Future(self._driver)
        self._meetings[met] = link  # before our topics are looked up
        met.when_done(self._meetings.pop)
        try:
            mine = self._greeting(peer.connection.peer_incarnation)
            route = FixedRoute(TARGET, link.label)
            answer = await self._ask(peer, route, HELLO, tuple(told(mine)))
            greeting = read_greeting(answer, link.label)
            # failpoint: dialling.answered
        except BaseException:
            met.set_result(None)
            raise
        self._node.reactor.call_soon(
            partial(self._greeted, link, peer, greeting, mine.interest.version, met)
        )

    async def _ask(
        self, peer: Peer, route: FixedRoute, method: str, values: tuple[Any, ...]
    ) -> Any:
        try:
            return await peer.request(
                route, method, method_key(method), values, CONNECT_TIMEOUT_S, True
            )
        except errors.UnknownService:
            raise errors.NotSent(
                f"the process at {peer.connection.peer} is no node of DI-engine, or not yet one"
            ) from None
