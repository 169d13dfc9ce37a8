"""A node and its servers as the master knows them: what the keeper makes again over a new session.

    target of a server   first    what register_server() gave: its name at this node for good
                         now      another one from every new session on; the node answers to both

    changed by           what                                     in which thread
    registered()         a server is known to the master          the reactor's
    serve()              the node answers to it                   any
    take_back()          it is to be known no longer              any
    anew()               all are registered over a new session    the keeper's, while the others go on

A server that is taken back while it is registered again is taken back there, too. Should the connection be lost in between, it is
registered again under the same number, which the master answers as it did before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prpc_engine import errors
from prpc_engine.server import Server

logger = logging.getLogger("prpc")
Ask = Callable[..., Any]  # (number of the request or 0, verb, its arguments): the master's answer


@dataclass
class _Registered:
    """One server."""

    service: str
    server_id: int
    target: int  # now
    number: int  # of the request to register it again


class Joined:
    """See the file's head. `served` are the node's servers, by target."""

    def __init__(self, addresses: list[str], shard_of: int, rank: int, served: dict[int, Server]) -> None:
        self.addresses = addresses
        self.shard_of = shard_of
        self.rank = rank
        self._served = served
        self._guard = threading.Lock()
        self._servers: dict[int, _Registered] = {}  # by first target

    def registered(self, service: str, server_id: int, target: int, number: int) -> None:
        """The master knows that server now. `number`: of a request that nothing else is asked by."""
        self._servers[target] = _Registered(service, server_id, target, number)

    def serve(self, first: int, server: Server) -> None:
        """From now on the node answers to it."""
        with self._guard:
            known = self._servers.get(first)
            self._served[first] = server
            if known is not None:
                self._served[known.target] = server

    def take_back(self, first: int) -> int:
        """It goes; its target now. The node goes on answering to the first one."""
        with self._guard:
            known = self._servers.pop(first, None)
            if known is None:
                return first
            if known.target != first:
                self._served.pop(known.target, None)
            return known.target

    def anew(self, ask: Ask) -> None:
        """Join and register again. Raises what `ask` raises; then once more, from the beginning."""
        self.rank = ask(0, "join", self.addresses, self.shard_of, self.rank)
        for first, one in list(self._servers.items()):
            try:
                _, target, _ = ask(one.number, "register_server", one.service, one.server_id)
            except errors.RemoteError as error:
                logger.error(
                    "server %d of %r could not be registered again: %s", one.server_id, one.service, error.remote_message
                )
                continue
            if not self._moved(first, one, target):
                ask(0, "deregister_server", target)

    def _moved(self, first: int, one: _Registered, target: int) -> bool:
        """Whether that server, whose target is another one now, is still wanted."""
        with self._guard:
            if self._servers.get(first) is not one:
                return False
            before, one.target = one.target, target
            server = self._served.get(before)
            if server is not None:  # else serve() is still to come
                self._served[target] = server
            if before not in (first, target):  # so that a node which joins again and again answers to two, and not to ever more
                self._served.pop(before, None)
            return True
