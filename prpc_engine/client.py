"""A client: one service by name, and the servers that answer to it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from prpc_engine import errors
from prpc_engine.call import Call
from prpc_engine.message import method_key
from prpc_engine.node import Node
from prpc_engine.peer import Peer
from prpc_engine.registry import ServerEntry
from shard import VALUE

# A call without a timeout of its own gives up after this long: long for a call, short for a person.
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0  # for one attempt at one address


class Route:
    """The way to one server: its entry at the master, and the peer once connected."""

    __slots__ = ("entry", "peer", "target", "text")

    def __init__(self, entry: ServerEntry) -> None:
        self.entry = entry
        self.target = entry.target
        self.peer: Peer | None = None
        self.text = f"server {entry.server_id} of {entry.service!r} (rank {entry.rank})"

    def __str__(self) -> str:
        return self.text


class RpcClient:
    """Calls to one service. Made by RpcService.create_client(); thread-safe.

    A call goes to the server with the fewest calls in flight of two chosen at random; `..._to` forms name the server.
    Every verb raises the errors of prpc_engine.errors; `timeout_s` is in seconds, None waits as long as the connection lasts.
    """

    def __init__(self, name: str, node: Node, entries: list[ServerEntry], lookup: Callable[[], list[ServerEntry]]) -> None:
        self.name = name
        self._node = node
        self._wait = node.wait
        self._lookup = lookup
        self._keys: dict[str, int] = {}
        self._refreshing = threading.Lock()
        self._closed = False
        self._routes: dict[int, Route] = {}
        self._only: Route | None = None
        self._set_routes(entries)

    def __str__(self) -> str:
        return repr(self.name)

    @property
    def server_ids(self) -> tuple[int, ...]:
        """Of the servers known here, sorted."""
        return tuple(sorted(self._routes))

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """The method's result. Blocks; this thread drives the reactor meanwhile."""
        route = self._only or self._pick()
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._connected(route)
        call = peer.request(route, method, self._keys.get(method) or self._key(method), args, timeout_s, True)
        if not call.finished:
            self._wait(call, None)  # the call ends by its own deadline
        return call._outcome if call.finished == VALUE else call.result()

    def submit(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Call:
        """The future of the method's result: .result(timeout_s), .done(), or await."""
        return self._request(self._only or self._pick(), method, args, timeout_s, False)

    def notify(self, method: str, *args: Any) -> None:
        """Send and do not ask for an answer: at most once, and nobody says when it failed there (the server logs it)."""
        route = self._pick()
        self._connected(route).notify(route, method, self._key(method), args)

    def broadcast(self, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> list[Any]:
        """The method's result from every server known here, in order of server id. Raises the first error."""
        calls = [self.submit_to(server_id, method, *args, timeout_s=timeout_s) for server_id in self.server_ids]
        return [call.result() for call in calls]

    def call_to(self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """As call(), of one server."""
        return self._request(self._route_to(server_id), method, args, timeout_s, True).result()

    def submit_to(self, server_id: int, method: str, *args: Any, timeout_s: float | None = TIMEOUT_S) -> Call:
        """As submit(), of one server."""
        return self._request(self._route_to(server_id), method, args, timeout_s, False)

    def close(self) -> None:
        """Call no more; connections stay, they belong to the service."""
        self._closed = True
        self._routes = {}
        self._only = None

    # -- one request ---------------------------------------------------------------------------------------------------

    def _request(self, route: Route, method: str, args: tuple[Any, ...], timeout_s: float | None, stable: bool) -> Call:
        peer = route.peer
        if peer is None or peer.lost:
            peer = self._connected(route)
        return peer.request(route, method, self._keys.get(method) or self._key(method), args, timeout_s, stable)

    def _key(self, method: str) -> int:
        if not isinstance(method, str):
            raise errors.BadArguments(f"a method's name is a str, not {type(method).__name__} ({method!r})")
        key = self._keys[method] = method_key(method)
        return key

    # -- servers -------------------------------------------------------------------------------------------------------

    def _set_routes(self, entries: list[ServerEntry]) -> None:
        old = self._routes
        routes = {}
        for entry in entries:
            known = old.get(entry.server_id)
            routes[entry.server_id] = known if known is not None and known.target == entry.target else Route(entry)
        self._routes = routes
        self._only = next(iter(routes.values())) if len(routes) == 1 else None

    def _route_to(self, server_id: int) -> Route:
        route = self._routes.get(server_id)
        if route is None:
            self._check_open()
            self._refresh()
            route = self._routes.get(server_id)
            if route is None:
                raise errors.NoServer(f"{self.name!r} has no server {server_id}; it has: {list(self.server_ids)}")
        return route

    def _pick(self) -> Route:
        routes = [one for one in self._routes.values() if one.peer is None or not one.peer.lost]
        if not routes:
            self._check_open()
            self._refresh()
            routes = list(self._routes.values())
            if not routes:
                raise errors.NoServer(
                    f"{self.name!r} has no live server at present: start one, or wait for it with create_client()"
                )
        if len(routes) == 1:
            return routes[0]
        one, two = random.sample(routes, 2)
        return one if _load(one) <= _load(two) else two

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed(f"the client of {self.name!r} was closed here")

    def _refresh(self) -> None:
        """Ask the master who serves now; one thread at a time."""
        with self._refreshing:
            self._set_routes(self._lookup())

    def _connected(self, route: Route) -> Peer:
        """The route's peer, connecting if need be."""
        self._check_open()
        started = time.monotonic()
        try:
            route.peer = self._node.peer_at(route.entry.addresses, CONNECT_TIMEOUT_S, route.text)
        except errors.NotSent as error:
            self._refresh()
            raise errors.NotSent(f"{error} (tried for {time.monotonic() - started:.1f} s)") from error
        return route.peer


def _load(route: Route) -> int:
    return len(route.peer.calls.in_flight) if route.peer is not None else 0
