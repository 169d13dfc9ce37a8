"""What other nodes call: one endpoint for each node id that this process has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prpc_engine.errors import Backpressure
from prpc_engine.pslite import wire
from prpc_engine.pslite.barriers import Barriers
from prpc_engine.pslite.customer_router import KV, SIMPLE, CustomerRouter
from prpc_engine.pslite.reliable import Arrivals, Dice
from prpc_engine.pslite.wire import FORGOTTEN
from prpc_engine.rpc.failure_codes import told
from prpc_engine.rpc.peer import Peer, calling_peer
from shard import Future, Reactor, runtime

LATE_MAX = 65536  # answers that are to come later, of requests that came together


class NodeEndpoint:
    """Its public methods are those of the RPC server. `dice` loses what arrives; None: nothing is
    lost.
    """

    def __init__(
        self,
        customer_router: CustomerRouter,
        reactor: Reactor,
        members: Callable[[int], Sequence[int]],
        dice: Dice | None,
    ) -> None:
        self._customer_router, self._reactor, self._members, self._dice = (
            customer_router,
            reactor,
            members,
            dice,
        )
        self._early, self._handlers = customer_router.early, customer_router.handlers[KV]
        self._arrivals, self.meetings = Arrivals(), Barriers()
        self._late: dict[int, Future] = {}
        # those of another process of this node id are others
        self._numbers = itertools.count(runtime.randbits(62))

    def hello(self) -> None:
        """Connect."""

    def kv(self, head: bytes, *arrays: Any) -> Any:
        """One push or pull: wire.py."""
        if self._dice is not None and self._dice.drops():
            return Future()  # the caller's deadline ends it
        return self._take_kv(head, *arrays)

    def kv_many(self, patience_s: float, *messages: Any) -> Any:
        """Several small ones in order, each head followed by the array beside it if there is one,
        each with an answer of its own: batcher.py. None: all are answered by None.

        What is not answered yet can be asked for by late() for patience_s seconds."""
        answers = []
        for message, following in zip(messages, (*messages[1:], b""), strict=True):
            if type(message) is bytes:
                answers.append(
                    self._answer_of(message)
                    if type(following) is bytes
                    else self._answer_of(message, following)
                )
        late = [number for number in answers if type(number) is int]
        if late:
            self._reactor.call_later(patience_s, partial(self._forget, late))
        return answers if any(each is not None for each in answers) else None

    def late(self, number: int) -> Any:
        """The answer to one of kv_many() that there was none of: each can be asked for once."""
        return self._late.pop(number, FORGOTTEN)

    def _answer_of(self, head: bytes, *arrays: Any) -> Any:
        try:
            answer = self.kv(head, *arrays)
            if not isinstance(answer, Future):
                return answer
            if len(self._late) >= LATE_MAX:
                raise Backpressure(
                    f"{LATE_MAX} requests are to be answered later: wait() for some first"
                )
        except (Exception, SystemExit) as error:  # as the engine does for one alone
            return list(told(error))
        number = next(self._numbers)
        self._late[number] = answer
        return number

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._late.pop(number, None)

    def simple(self, app_id: int, *message: Any) -> Any:
        """One request of a SimpleApp: sender, customer id, timestamp, head, body."""
        if self._dice is not None and self._dice.drops():
            return Future()
        return self._customer_router.take(SIMPLE, app_id, message)

    def once(
        self, incarnation: int, lane: int, sequence: int, floor: int, kind: str, *message: Any
    ) -> Any:
        """One of those, which may come again: reliable.py."""
        if self._dice is not None and self._dice.drops():
            return Future()
        take: Callable[..., Any] = self._take_kv if kind == KV else self._take_simple
        return self._arrivals.answer((incarnation, lane), sequence, floor, partial(take, *message))

    def barrier(self, group: int, nodes: Sequence[int], patience_s: float, passed: int) -> Any:
        """At the node that holds it: those nodes are there. (), or the ids of those that are not
        after patience_s seconds.
        """
        expected, call = self._members(group), Future()
        if self.meetings.arrive(group, expected, nodes, call, passed):
            return ()
        timer = self._reactor.call_later(
            patience_s, partial(self.meetings.give_up, group, expected, call)
        )
        peer = calling_peer()

        def lost(_: Peer) -> None:
            call.cancel()  # dead, it would count as there; alive, it comes again

        def leave(_: Future) -> None:
            timer.cancel()
            if peer is not None:
                peer.when_lost.remove(lost)
            self.meetings.leave(group, nodes, call)

        if peer is not None:
            peer.when_lost.append(lost)
        call.when_done(leave)
        return call

    def _take_kv(self, head: bytes, *arrays: Any) -> Any:
        fields = wire.read_head(head)
        if not self._early:
            handler = self._handlers.get(fields[0])
            if handler is not None:
                return handler(head, fields, arrays)
        return self._customer_router.take(KV, fields[0], (head, fields, arrays), arrays)

    def _take_simple(self, app_id: int, *message: Any) -> Any:
        return self._customer_router.take(SIMPLE, app_id, message)
