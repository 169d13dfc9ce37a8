"""What other nodes call: one endpoint for each node id that this process has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prpc_engine.kv.pslite import wire
from prpc_engine.kv.pslite.mailroom import KV, SIMPLE, Mailroom
from prpc_engine.kv.pslite.meetings import Meetings
from prpc_engine.kv.pslite.reliable import Arrivals, Dice
from shard import Future, Reactor


class Endpoint:
    """Its public methods are those of the RPC server. `dice` loses what arrives; None: nothing is lost."""

    def __init__(self, mailroom: Mailroom, reactor: Reactor, members: Callable[[int], Sequence[int]], dice: Dice | None) -> None:
        self._mailroom, self._reactor, self._members, self._dice = mailroom, reactor, members, dice
        self._early, self._handlers = mailroom.early, mailroom.handlers[KV]
        self._arrivals, self._meetings = Arrivals(), Meetings()

    def hello(self) -> None:
        """Connect."""

    def kv(self, head: bytes, *arrays: Any) -> Any:
        """One push or pull: wire.py."""
        if self._dice is not None and self._dice.drops():
            return Future()  # the caller's deadline ends it
        return self._take_kv(head, *arrays)

    def simple(self, app_id: int, *message: Any) -> Any:
        """One request of a SimpleApp: sender, customer id, timestamp, head, body."""
        if self._dice is not None and self._dice.drops():
            return Future()
        return self._mailroom.take(SIMPLE, app_id, message)

    def once(self, incarnation: int, lane: int, sequence: int, floor: int, kind: str, *message: Any) -> Any:
        """One of those, which may come again: reliable.py."""
        if self._dice is not None and self._dice.drops():
            return Future()
        take: Callable[..., Any] = self._take_kv if kind == KV else self._take_simple
        return self._arrivals.answer((incarnation, lane), sequence, floor, partial(take, *message))

    def barrier(self, group: int, nodes: Sequence[int], patience_s: float) -> Any:
        """At the scheduler: those nodes are there. (), or the ids of those that are not after patience_s seconds."""
        expected, call = self._members(group), Future()
        if self._meetings.arrive(group, expected, nodes, call):
            return ()
        timer = self._reactor.call_later(patience_s, partial(self._meetings.give_up, group, expected, call))

        def leave(_: Future) -> None:
            timer.cancel()
            self._meetings.leave(group, nodes, call)

        call.add_done_callback(leave)
        return call

    def _take_kv(self, head: bytes, *arrays: Any) -> Any:
        fields = wire.read_head(head)
        if not self._early:
            handler = self._handlers.get(fields[0])
            if handler is not None:
                return handler(head, fields, arrays)
        return self._mailroom.take(KV, fields[0], (head, fields, arrays), arrays)

    def _take_simple(self, app_id: int, *message: Any) -> Any:
        return self._mailroom.take(SIMPLE, app_id, message)
