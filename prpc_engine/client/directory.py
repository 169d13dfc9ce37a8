"""The servers of one service, as one client knows them: who gets a call, and when the master is
asked who serves now.

    asked                     by                               waits for
    refresh()                 a user                           a look that begins after it was asked
    after_look(then)          the dispatcher                   the same
    changed()                 the watch of the service         nothing: it is repeated until a look
                                                               succeeds
    after_look_if_stale(...)  the dispatcher, after a failure  the look under way; if is_stale()
                                                               says so, a new one; or nothing

    look       event           next
    none       one is wanted   under way: a coroutine of the control loop asks the master
    under way  one is wanted   under way; another one follows
    under way  it ended        who waited for it is told; under way if another one follows, else
                               none

What is wanted, and who waits for it, belongs to the node's reactor. Who is known is replaced there,
and never changed: any thread looks at it. A look that fails (the master is away) leaves those known
here as they are.
"""

from __future__ import annotations

import logging
import operator
import random
import zlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.client.balance import Balancer
from prpc_engine.client.call_figures import CallFigures
from prpc_engine.client.route import Route, Sought
from prpc_engine.master.registry import ServerEntry
from prpc_engine.node.node import Node
from shard import ClosedError, Future, runtime

REFRESH_S_MIN = 0.05  # between two looks at the master, as long as the servers known here may do
CHANGED_S = 1.0  # between two looks for what has changed while the master is away, or too slow

logger = logging.getLogger("prpc")
Then = Callable[[BaseException | None], object]  # what follows a look, told what it failed with
# asks the master, in the control loop
Lookup = Callable[[], Coroutine[Any, Any, list[ServerEntry]]]


class Directory:
    """Knows the servers of one service for one client, chooses who gets a call, and asks the master
    who serves now.

    name     of the service
    node     in whose reactor goes on what waited for a look
    lookup   asks the master
    balance  the name of a policy (balance.py); `random` is for its choices

    `on_change(routes by server id)` hears of every change, `on_gone(route)` of each server that the
    master lists no longer. Owned by a client, which closes it;
    thread-safe. Raises ConfigError. Who asks, and what that waits for: the table at the file's
    head.
    """

    def __init__(
        self,
        name: str,
        node: Node,
        lookup: Lookup,
        balance: str,
        random: random.Random,
    ) -> None:
        self.name = name
        self.figures = CallFigures(node.reactor.clock)
        self.on_change: Callable[[dict[int, Route]], None] = _ignore
        self.on_gone: Callable[[Route], None] = _ignore_gone
        self.routes: dict[int, Route] = {}  # replaced and never changed
        self.server_ids: tuple[int, ...] = ()  # sorted
        self._owners: tuple[Route, ...] = ()  # of keys: in the order of their server ids
        # Each call of any thread picks, and counts what it picked.
        self.balancer: Balancer[Route] = Balancer((), random, balance, guard=runtime.Lock())
        self._ailing = self.balancer.ailing
        self._pick = self.balancer.pick
        self._node = node
        self._clock = node.reactor.clock
        self._lookup = lookup
        self._anybody = Sought(name, f"any server of {name!r}", self.find_any, self.figures)
        self._closed = False
        self._refreshed = 0.0  # when the last look began
        # In the reactor: who waits for the look under way; None: there is none.
        self._looking: list[Then] | None = None
        self._next: list[Then] = []  # who waits for the one after that
        self._is_due = False  # changed() is to be repeated

    # -- who gets a call ---------------------------------------------------------------------------

    def pick(self, avoid: tuple[Route, ...] = ()) -> Route:
        """Who gets the next call; one that is sought when none is known."""
        return self._pick(self._clock() if self._ailing else 0.0, avoid) or self._anybody

    def find_any(self) -> Route:
        """The same. Raises NoServer."""
        route = self._pick(self._clock(), ())
        if route is None:
            raise errors.NoServer(
                f"{self.name!r} has no live server at present: start one, "
                "or wait for it with create_client()"
            )
        return route

    def to(self, server_id: int) -> Route:
        """The server of that id; one that is sought when it is not known."""
        return self.routes.get(server_id) or Sought(
            self.name,
            f"server {server_id} of {self.name!r}",
            partial(self._find, server_id),
            self.figures,
        )

    def _find(self, server_id: int) -> Route:
        route = self.routes.get(server_id)
        if route is None:
            raise errors.NoServer(
                f"{self.name!r} has no server {server_id}; it has: {list(self.server_ids)}"
            )
        return route

    def by(self, key: int | str | bytes) -> Route:
        """The owner of that key among those known; one that is sought when none is. Raises
        BadArguments for a key of another type.
        """
        number = _number_of(key)
        owners = self._owners
        if owners:
            return owners[number % len(owners)]
        return Sought(
            self.name,
            f"the server of {self.name!r} for key {key!r}",
            partial(self._find_by, number),
            self.figures,
        )

    def _find_by(self, number: int) -> Route:
        owners = self._owners
        return owners[number % len(owners)] if owners else self.find_any()

    # -- who is known ------------------------------------------------------------------------------

    def set_entries(self, entries: list[ServerEntry]) -> None:
        """From now on these; the way to those that stay is kept."""
        old = self.routes
        routes = {}
        for entry in entries:
            known = old.get(entry.server_id)
            if known is None or known.target != entry.target:
                known = Route(entry, self._node.is_local(entry.addresses), self, self.figures)
            routes[entry.server_id] = known
        self.routes = routes
        self.server_ids = tuple(sorted(routes))
        self._owners = tuple(routes[server_id] for server_id in self.server_ids)
        self.balancer.set_routes(routes.values())
        self.on_change(routes)
        if not self._closed:
            for route in old.values():
                if routes.get(route.server_id) is not route:
                    self.on_gone(route)

    def refresh(self) -> None:
        """Ask the master who serves now; waits for as long as two lookups take. Raises what the
        lookup raises, Closed.
        """
        try:
            self._look_to_come().result()
        except ClosedError as error:
            raise errors.Closed(
                f"this side was closed before the servers of {self.name!r} were looked up"
            ) from error

    def _look_to_come(self) -> Future:
        done = Future(self._node.waiter)
        self.after_look(
            lambda failure: done.set_result(None) if failure is None else done.set_error(failure)
        )
        return done

    def changed(self) -> None:
        """Servers have come or gone: look who serves now, until a look succeeds."""
        if not self._closed:
            self.after_look(self._looked)

    def _looked(self, failure: BaseException | None) -> None:
        if failure is not None and not self._closed and not self._is_due:
            self._is_due = True
            self._node.reactor.call_later(CHANGED_S, self._look_when_due)

    def _look_when_due(self) -> None:
        self._is_due = False
        self.changed()

    def is_stale(self, error: BaseException, route: Route) -> bool:
        """Whether a failure at that route makes another look worth while: not for every call of
        many that fail at once, but always when a server says that it is not what our newest
        knowledge takes it for."""
        if isinstance(error, errors.UnknownService) and self.routes.get(route.server_id) is route:
            return True
        return self._clock() - self._refreshed >= REFRESH_S_MIN

    def after_look_if_stale(self, error: BaseException, route: Route, then: Then) -> None:
        """Call then() after a look that is worth while, or under way; else now. In the reactor."""
        if self._looking is not None:
            self._looking.append(then)
        elif self.is_stale(error, route):
            self._want(then)
        else:
            then(None)

    def after_look(self, then: Then) -> None:
        """Call then(what the look failed with, or None) in the reactor's thread, after a look at
        the master that begins now or later: the one under way may have been answered before there
        was what is looked for. From any thread."""
        self._node.reactor.call_soon(partial(self._want, then))

    def _want(self, then: Then) -> None:
        if self._looking is not None:
            self._next.append(then)
        else:
            self._look([then])

    def _look(self, waiting: list[Then]) -> None:
        self._looking = waiting
        self._refreshed = self._clock()
        try:
            look: Future = self._node.control_loop().spawn(self._lookup())
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread, for the loop
            look = Future()
            look.set_error(
                errors.NotSent(f"the servers of {self.name!r} could not be looked up: {error}")
            )
        look.when_done(lambda ended: self._node.reactor.call_soon(partial(self._look_ended, ended)))

    def _look_ended(self, look: Future) -> None:
        failure = look.error()
        if failure is not None:
            # the master is away, or this side was closed; whatever it is, somebody waits for it
            logger.debug("the servers of %r could not be looked up: %s", self.name, str(failure))
        elif not self._closed:
            # failpoint: directory.found
            self.set_entries(look.result())
            if self._closed:  # meanwhile, by another thread
                self.set_entries([])
        told, waiting = self._looking or [], self._next
        self._looking, self._next = None, []
        if waiting:
            self._look(waiting)
        for then in told:
            self._node.reactor.call_soon(partial(then, failure))

    def close(self) -> None:
        """Know nobody any more, whatever a look under way finds."""
        self._closed = True
        self.set_entries([])


def _number_of(key: object) -> int:
    """Equal keys have one: also numpy's whole numbers, which have bytes of their own."""
    if isinstance(key, int):
        return key
    if isinstance(key, str):
        return zlib.crc32(key.encode())
    if isinstance(key, bytes | bytearray | memoryview):
        return zlib.crc32(key)
    try:
        return operator.index(key)  # type: ignore[arg-type]
    except TypeError:
        raise errors.BadArguments(
            f"the key {key!r:.100} is of type {type(key).__name__}: a whole number, a str or bytes "
            "are allowed, such as str(key)"
        ) from None


def _ignore(routes: dict[int, Route]) -> None:
    """Before the client listens."""


def _ignore_gone(route: Route) -> None:
    """The default of a callback: does nothing."""
