"""A peer in this very process: what answers a call at once is run by the thread that asks.

A plain handler of an inline server may run in any thread that leads. Who waits for its answer would
take the lead, find the request and run the handler: request_at_once() does the same without a
message in between. Arguments and answer are encoded and decoded all the same, and arrays copied, so
what one side changes never shows at the other.

A call is a message, as to any other process, where
    the server is not inline, or has an allow list, or the method is no plain function
    a message is on its way between the two: a call overtakes nothing
    another thread leads, or work waits for a thread that may run it
    a whole turn of the reactor is due, or other classes wait for theirs
    so many handlers on this stack have asked without one: NESTED_MAX
and an answer is one where it is a failure, or comes later.
"""

from __future__ import annotations

from typing import Any

from prpc_engine.archive import DECODE_ERRORS, PLAIN_BYTES_MAX
from prpc_engine.rpc.call import PASSED, TIMEOUT_S, Call, CallOwner
from prpc_engine.rpc.context import inherited_s, wait_in_ms
from prpc_engine.rpc.peer import HEADER_BYTES, WAIT_MS, Blocks, Destination, Peer, unreadable
from prpc_engine.rpc.server import answers_at_once
from shard import CONTEXT, TOOK_LEAD, MemoryConnection, ShardError

# Inline handlers that call inline handlers, each on the stack of the one before.
NESTED_MAX = 16
NO_BLOCKS: Blocks = ()


class LocalPeer(Peer):
    """Either side of a connection inside one process; see Peer. It has a waiter."""

    connection: MemoryConnection
    _asked: Call | None = None  # of the other side, being answered on this very stack
    _asker: LocalPeer | None = None  # the other side
    _nested = 0

    def request_at_once(
        self,
        route: Destination,
        method: str,
        key: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        stable: bool,
        client: CallOwner | None = None,
    ) -> Call:
        """As request(), by who waits for nothing else: the answer may be there at once."""
        connection = self.connection
        neighbour = connection.idle_neighbour()
        if neighbour is None:
            return self.request(route, method, key, arguments, timeout_s, stable, client)
        theirs: LocalPeer = neighbour.owner
        server = theirs._servers.get(route.target)
        waiter = self._waiter
        if (
            server is None
            or not answers_at_once(server, key)
            or self._nested >= NESTED_MAX
            or not (lead := waiter.step_in())
        ):
            return self.request(route, method, key, arguments, timeout_s, stable, client)
        asked = theirs._asked
        self._nested += 1
        try:
            if CONTEXT.others and CONTEXT.value is not None:
                timeout_s = inherited_s(timeout_s, self.reactor.clock)
            wait_ms = WAIT_MS if timeout_s is TIMEOUT_S else wait_in_ms(timeout_s)
            if len(self._in_flight) >= self._calls_max:
                raise self._too_many(method, route)
            # fetched before they are called: see RpcClient.call()
            encode_arguments, next_id, clock = (
                self._encode_arguments,
                self._next_id,
                self._clock,
            )
            body, blocks = encode_arguments(arguments)
            given_body, given = body, NO_BLOCKS
            if blocks or len(body) > connection.limits.body_bytes_max:
                try:
                    given_body, given = connection.carry(body, blocks)
                except ShardError as error:
                    raise self._not_sent(error, method, route) from error
            call_id = next_id()
            call = Call(
                waiter,
                0,
                None,
                None,
                None,
                self.calls,
                call_id,
                (method, route),
                client,
                body,
                blocks if client is not None else (),
            )
            self._in_flight[call_id] = theirs._asked = call
            theirs._asker = self
            call.sent = now = clock()
            if timeout_s is not None:
                call.deadline = call.overall = now + timeout_s
            try:
                server.request(theirs, call_id, key, wait_ms, given_body, given)
            except BaseException:
                self._in_flight.pop(call_id, None)
                raise
        finally:
            theirs._asked = asked
            self._nested -= 1
            if lead == TOOK_LEAD:
                waiter.let_go()
        if not call.finished:
            self._watch_deadline(call.deadline)
        return call

    def reply(self, call_id: int, value: Any) -> bool:
        """Answer with a value; False when it cannot be sent, which the caller is told."""
        call, asker = self._asked, self._asker
        if call is None or asker is None or call.call_id != call_id:
            return super().reply(call_id, value)
        encode = self._encode
        try:
            body, blocks = encode(value)
            if blocks or len(body) > self.connection.limits.body_bytes_max:
                body, blocks = self.connection.carry(body, blocks)
        except BaseException as error:  # of what its class does to be sent, too
            self._fail_to_reply(call_id, error)
            return False
        calls, clock, decode_plain = asker.calls, asker._clock, asker.decode_plain
        if calls.in_flight.pop(call_id, None) is None:
            calls.dropped_replies += 1
        elif (now := clock()) >= call.deadline:
            calls.dropped_replies += 1
            call.deadline = PASSED
            call.set_error(asker._deadline_exceeded(call, now))
        else:
            self.connection.count(HEADER_BYTES + len(body), HEADER_BYTES + len(call.body))
            try:
                call.set_result(
                    decode_plain(body)
                    if not blocks and len(body) <= PLAIN_BYTES_MAX
                    else asker.decoder.decode(body, blocks)
                )
            except DECODE_ERRORS as error:
                call.set_error(unreadable(call, error))
        return True
