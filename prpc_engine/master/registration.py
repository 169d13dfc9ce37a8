"""A node and its servers as the master knows them: what is told it again over a new session.

    target of a server  first  what prepare_server() gave: its name at this node for good
                        now    another one from every new session on; the node answers to both
                        next   while it is registered again: the node answers to it before the
                               master tells anybody

    in the node's reactor  what
    registered()           a server is known to the master
    take_back()            it is to be known no longer
    anew()                 a generator: it yields what to ask the master over the new session, and
                           is sent the answers, while the others go on

A server that is taken back while it is registered again is taken back there, too. Should the
connection be lost in between, it is registered again under the same number, which the master
answers as it did before.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from prpc_engine import errors
from prpc_engine.master.registry import DEFAULT_API
from prpc_engine.rpc.server import ServedObject

logger = logging.getLogger("prpc")
# what is to be asked: the number of the request or 0, the verb, its arguments
Asked = tuple[Any, ...]


@dataclass
class _Registered:
    """One server."""

    service: str
    server_id: int
    target: int  # now
    number: int  # of the request to register it again
    next: int = 0  # target
    token: str = ""  # of the session over which it was registered again last


class Registration:
    """Keeps what one node has told the master of itself and its servers, to tell it again over a
    new session.

    addresses  where other nodes reach it
    shard_of   for a shard, the rank of its node; -1: it is no shard
    rank       what the master gave it; changed by anew()
    served     the node's own table of servers, by target: the new targets of a server are entered
               here

    Owned by a MasterSession, and used in the reactor of its node alone.
    """

    def __init__(
        self, addresses: list[str], shard_of: int, rank: int, served: dict[int, ServedObject]
    ) -> None:
        self.addresses = addresses
        self.shard_of = shard_of
        self.rank = rank
        self._served = served
        self._servers: dict[int, _Registered] = {}  # by first target

    def registered(self, service: str, server_id: int, target: int, number: int) -> None:
        """The master knows that server now. `number`:
        of a request that nothing else is asked by.
        """
        self._servers[target] = _Registered(service, server_id, target, number)

    def take_back(self, first: int) -> int:
        """It goes; its target now. The node goes on answering to the first one."""
        known = self._servers.pop(first, None)
        if known is None:
            return first
        for target in {known.target, known.next} - {first, 0}:
            self._served.pop(target, None)
        # a new session may have heard of the next one, and of no other
        return known.next or known.target

    def anew(self, token: str) -> Generator[Asked, Any, None]:
        """Join and register again, over the session of that token: what is asked, one after the
        other; sent each answer, or thrown its error. Ends with an error that is no RemoteError;
        then once more, for what is left.
        """
        self.rank = yield 0, "join", self.addresses, self.shard_of, self.rank
        for first, one in self._servers.copy().items():
            if one.token == token:
                continue
            try:
                if not one.next:
                    _, one.next = yield 0, "prepare_server", one.service, one.server_id
                server = self._served.get(first)
                if server is None or not self._answers_to_next(first, one, server):
                    continue
                marks = server.marks()
                yield (
                    one.number,
                    "register_server",
                    one.service,
                    one.server_id,
                    DEFAULT_API,
                    -1,
                    one.next,
                    marks,
                )
            except errors.RemoteError as error:
                logger.error(
                    "server %d of %r could not be registered again: %s",
                    one.server_id,
                    one.service,
                    error.remote_message,
                )
                continue
            one.token = token
            if not self._moved(first, one):
                yield 0, "deregister_server", one.next

    def _answers_to_next(self, first: int, one: _Registered, server: ServedObject) -> bool:
        """Whether that server is still wanted; then the node answers to its next target, too."""
        if self._servers.get(first) is not one or self._served.get(first) is not server:
            return False
        self._served[one.next] = server
        return True

    def _moved(self, first: int, one: _Registered) -> bool:
        """Whether that server is still wanted; then its next target is the one that the master
        knows.
        """
        if self._servers.get(first) is not one:
            return False
        before, one.target, one.next = one.target, one.next, 0
        # so that a node which joins again and again answers to two, and not to ever more
        if before != first:
            self._served.pop(before, None)
        return True
