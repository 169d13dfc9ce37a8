"""The servers of one service, as one client knows them: who gets a call, and when the master is asked who serves now.

    asked                      by                                  where the look is made
    refresh()                  a user, the watch of the service    the calling thread
    after_look(then)           the mender                          a thread of its own; who comes meanwhile waits for that look
    after_look_if_stale(...)   the mender, after a failure         the same, where is_stale() says that a look is worth while

One look is made at a time.
A look that fails (the master is away) leaves those known here as they are.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial

from prpc_engine import errors
from prpc_engine.balance import Balancer
from prpc_engine.master.registry import ServerEntry
from prpc_engine.node import Node
from prpc_engine.route import Route, Sought

REFRESH_S_MIN = 0.05  # between two looks at the master, as long as the servers known here may do

logger = logging.getLogger("prpc")
Then = Callable[[BaseException | None], object]  # what follows a look, told what it failed with


class Directory:
    """See the file's head. Thread-safe.

    `lookup()` asks the master and may block; `on_change(routes by server id)` hears of every change.
    """

    def __init__(
        self, name: str, node: Node, lookup: Callable[[], list[ServerEntry]], balance: str, random: random.Random
    ) -> None:
        self.name = name
        self.on_change: Callable[[dict[int, Route]], None] = _ignore
        self.routes: dict[int, Route] = {}  # replaced and never changed
        self.server_ids: tuple[int, ...] = ()  # sorted
        self.balancer: Balancer[Route] = Balancer((), random, balance, guard=threading.Lock())
        self._ailing = self.balancer.ailing
        self._pick = self.balancer.pick
        self._node = node
        self._lookup = lookup
        self._anybody = Sought(name, f"any server of {name!r}", self.find_any)
        self._closed = False
        self._refreshing = threading.Lock()
        self._refreshed = 0.0  # when the last look began
        self._guard = threading.Lock()
        self._looking: list[Then] | None = None  # who waits for the look under way; None: there is none

    # -- who gets a call -----------------------------------------------------------------------------------------------

    def pick(self, avoid: tuple[Route, ...] = ()) -> Route:
        """Who gets the next call; one that is sought when none is known."""
        return self._pick(time.monotonic() if self._ailing else 0.0, avoid) or self._anybody

    def find_any(self) -> Route:
        """The same. Raises NoServer."""
        route = self._pick(time.monotonic(), ())
        if route is None:
            raise errors.NoServer(f"{self.name!r} has no live server at present: start one, or wait for it with create_client()")
        return route

    def to(self, server_id: int) -> Route:
        """The server of that id; one that is sought when it is not known."""
        return self.routes.get(server_id) or Sought(
            self.name, f"server {server_id} of {self.name!r}", partial(self._find, server_id)
        )

    def _find(self, server_id: int) -> Route:
        route = self.routes.get(server_id)
        if route is None:
            raise errors.NoServer(f"{self.name!r} has no server {server_id}; it has: {list(self.server_ids)}")
        return route

    def by(self, key: int | str | bytes) -> Route:
        """The owner of that key among those known; one that is sought when none is."""
        number = key if isinstance(key, int) else zlib.crc32(key.encode() if isinstance(key, str) else key)
        ids = self.server_ids
        if ids:
            return self.to(ids[number % len(ids)])
        return Sought(self.name, f"the server of {self.name!r} for key {key!r}", partial(self._find_by, number))

    def _find_by(self, number: int) -> Route:
        ids = self.server_ids
        return self._find(ids[number % len(ids)]) if ids else self.find_any()

    # -- who is known --------------------------------------------------------------------------------------------------

    def set_entries(self, entries: list[ServerEntry]) -> None:
        """From now on these; the way to those that stay is kept."""
        old = self.routes
        routes = {}
        for entry in entries:
            known = old.get(entry.server_id)
            if known is None or known.target != entry.target:
                known = Route(entry, self._node.is_local(entry.addresses))
            routes[entry.server_id] = known
        self.routes = routes
        self.server_ids = tuple(sorted(routes))
        self.balancer.set_routes(routes.values())
        self.on_change(routes)

    def refresh(self) -> None:
        """Ask the master who serves now, in this thread; one at a time. Raises what the lookup raises."""
        with self._refreshing:
            self._refreshed = time.monotonic()
            entries = self._lookup()
            if not self._closed:
                self.set_entries(entries)

    def is_stale(self, error: BaseException, route: Route) -> bool:
        """Whether a failure at that route makes another look worth while: not for every call of many that fail at once, but
        always when a server says that it is not what our newest knowledge takes it for."""
        if isinstance(error, errors.UnknownService) and self.routes.get(route.server_id) is route:
            return True
        return time.monotonic() - self._refreshed >= REFRESH_S_MIN

    def after_look_if_stale(self, error: BaseException, route: Route, then: Then) -> None:
        """Call then() after a look that is worth while, or under way; else now."""
        with self._guard:
            if self._looking is not None:
                self._looking.append(then)
                return
        if self.is_stale(error, route):
            self.after_look(then)
        else:
            then(None)

    def after_look(self, then: Then) -> None:
        """Call then(what the look failed with, or None) after one look at the master, in the reactor's thread."""
        with self._guard:
            if self._looking is not None:
                self._looking.append(then)
                return
            self._looking = [then]
        threading.Thread(target=self._look, name=f"prpc-look-{self.name}", daemon=True).start()

    def _look(self) -> None:
        failure: BaseException | None = None
        try:
            self.refresh()
        except Exception as error:  # the master is away, or this side was closed; whatever it is, somebody waits for this look
            logger.debug("the servers of %r could not be looked up: %s", self.name, str(error))
            failure = error
        with self._guard:
            waiting, self._looking = self._looking or [], None
        for then in waiting:
            self._node.reactor.call_soon(partial(then, failure))

    def close(self) -> None:
        """Know nobody any more, whatever a look under way finds."""
        self._closed = True
        self.set_entries([])


def _ignore(routes: dict[int, Route]) -> None:
    """Before the client listens."""
