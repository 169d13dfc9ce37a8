"""One other node, as seen over one connection: our calls to it, and its calls to our servers."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.archive import DECODE_ERRORS, PLAIN_BYTES_MAX, Archive
from prpc_engine.rpc.call import CALL_ID_BITS, NEVER, TIMEOUT_S, Call, CallOwner, CallTable
from prpc_engine.rpc.context import inherited_s, wait_in_ms, who_asked
from prpc_engine.rpc.failure_codes import error_for, failure_message
from prpc_engine.rpc.flow_control import NUMBER_MASK, WINDOW_ITEMS, Inbox, Window
from prpc_engine.rpc.job import Job, pass_on_interrupt
from prpc_engine.rpc.loss import calls_of, error_of, notifications_in
from prpc_engine.rpc.message import (
    CANCEL,
    CREDIT,
    END,
    FAILURE,
    FROM_CALLER,
    HEADER,
    ITEM,
    KIND_MASK,
    NO_CREDIT,
    NOTIFY,
    OPEN,
    REPEAT,
    REPLY,
    REQUEST,
    SIDE_SHIFT,
    STATUS_SHIFT,
    TO_CALLER,
    WITH_CREDIT,
    Status,
    method_key,
)
from prpc_engine.rpc.paths import Choice
from prpc_engine.rpc.server import ServedObject
from prpc_engine.rpc.stream import Stream, StreamCall, stream_call
from shard import (
    CONTEXT,
    BackpressureError,
    CancelledError,
    ClosedError,
    Connection,
    Future,
    LocalProtocolError,
    PeerLostError,
    Reactor,
    RemoteProtocolError,
    ShardError,
    ShmFull,
    Timer,
    Traffic,
)

logger = logging.getLogger("prpc")
HEADER_BYTES = HEADER.size
# Calls that are ended in one step because their deadline has passed: some 50 us each, with what
# follows them. A turn has two such steps at most, a timer's and one of those that are ready.
EXPIRED_MAX = 16
# Between two looks at the table for such calls, for each call in it: a look takes some 0.1 us a
# call, a tenth of the time where many calls have deadlines a few microseconds apart.
LOOK_S_PER_CALL = 1e-6
# lines of the log that one connection may cause; after those only each that doubles their number
WARNINGS_EACH = 8
# failures that wait for room in the outbox, as many as calls in flight: who asks on without reading
# is not told
UNTOLD_MAX = 65536
UNTOLD_TEXT_MAX = 500  # characters of each
HELD_MAX = 65536  # as many as calls in flight
# what both sides of a stream send each other; `side` says who is the caller
OF_STREAMS = frozenset({ITEM, CREDIT, END})
NOTE_AGAIN_S = 0.01  # between tries of a note that found the outbox full
PAYLOAD = slice(HEADER_BYTES, None)  # of a message's body, made once
# of most calls, which have no timeout of their own: worked out once
WAIT_MS = wait_in_ms(TIMEOUT_S)
_pack, _unpack = HEADER.pack, HEADER.unpack_from
Blocks = list[NDArray[np.uint8]] | tuple[()]


class Destination(Protocol):
    """Where a request goes: the server's number, and its name for texts (str)."""

    target: int


@dataclass(frozen=True)
class PeerStatistics:
    """A snapshot of one connection to another node: its transport, calls and traffic."""

    peer: str
    transport: str
    requests: int  # made by us
    in_flight: int  # of those, how many wait for their reply
    replies_dropped: int  # came after their call was done
    outbox_messages: int  # wait for the peer to read
    traffic: Traffic
    choice: Choice | None  # how its path was chosen; None: by the other side, which connected


class Peer:
    """Sends our calls to one other node over one connection, and runs its calls to our servers.

    waiter   who turns the reactor while a thread waits for a call; None in a shard, where tasks
             await
    servers  ours, by target: looked up for each request
    on_lost  called with this peer, in the reactor's thread, once its connection is over
    archive  encodes and decodes values; None: one that allows no pickles
    choice   how the connection's path was chosen; None: by the other side
    number   of the connection: larger than those of its node before it

    Owned by the node. request(), resend() and notify() may be called from any thread, and raise
    NotSent, Backpressure, BadArguments, Closed, ShmFull; what comes in is handled in the reactor's.
    """

    def __init__(
        self,
        connection: Connection[Any],
        reactor: Reactor,
        waiter: Any,
        servers: dict[int, ServedObject],
        on_lost: Callable[[Peer], None],
        archive: Archive | None = None,
        choice: Choice | None = None,
        number: int = 0,
    ) -> None:
        self.connection = connection
        self.choice = choice
        # of the connection: each one of a node has a larger one than those before it
        self.number = number
        self.calls = CallTable(
            number << CALL_ID_BITS, (connection.peer_incarnation, connection.known_as)
        )
        self._in_flight, self._next_id = self.calls.in_flight, self.calls.next_id
        # requests of the other side that are not answered yet, by its call id
        self.running: dict[int, Job] = {}
        self._streams: dict[int, tuple[Inbox, Window]] = {}  # ours, by call id
        self.calls.send_cancel = lambda call_id: self.send_note(CANCEL, call_id, FROM_CALLER)
        self.calls.own_outbox = connection.own_outbox
        self.decoder = archive or Archive()
        self._encode, self._encode_arguments = self.decoder.encode, self.decoder.encode_arguments
        self.decode_plain = self.decoder.decode_plain
        self._armed = NEVER  # when expire() is next called
        self._warnings = 0  # of what the other side made go wrong
        self._untold: deque[bytes] = deque()  # failures that found the outbox full
        self._untold_timer: Timer | None = None
        self.lost = False
        # called with it, in the reactor, once its connection is over
        self.when_lost: list[Callable[[Peer], object]] = []
        self._calls_max = connection.limits.calls_in_flight_max
        self._send = connection.send
        self.reactor, self._waiter = reactor, waiter
        self._clock = reactor.clock
        self._servers, self._on_lost = servers, on_lost
        connection.owner = self
        connection.on_message = self._on_message
        connection.on_close = self._on_close

    def statistics(self) -> PeerStatistics:
        """A snapshot."""
        connection, calls = self.connection, self.calls
        return PeerStatistics(
            peer=connection.peer,
            transport=connection.transport,
            requests=calls.started,
            in_flight=len(calls.in_flight),
            replies_dropped=calls.dropped_replies,
            outbox_messages=connection.outbox_messages,
            traffic=connection.traffic(),
            choice=self.choice,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way here, in either direction."""
        return not (
            self._in_flight or self._streams or self.running or self.connection.outbox_messages
        )

    # -- our calls ---------------------------------------------------------------------------------

    def request(
        self,
        route: Destination,
        method: str,
        key: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        stable: bool,
        client: CallOwner | None = None,
    ) -> Call:
        """Send one request; `client` hears of its failure first, where it could be sent again.
        Raises NotSent, Backpressure, BadArguments, ShmFull."""
        if CONTEXT.others and CONTEXT.value is not None:
            timeout_s = inherited_s(timeout_s, self.reactor.clock)
        wait_ms = WAIT_MS if timeout_s is TIMEOUT_S else wait_in_ms(timeout_s)
        if len(self._in_flight) >= self._calls_max:
            raise self._too_many(method, route)
        if self.connection.asleep[0]:
            self.connection.wake_peer()  # meanwhile the request is made
        # fetched before they are called: see RpcClient.call()
        encode_arguments, next_id, send = self._encode_arguments, self._next_id, self._send
        body, blocks = encode_arguments(arguments)
        call_id = next_id()
        if blocks and not stable:
            client = None  # the caller may change its arrays once this returns
        kept = blocks if client is not None else ()
        call = Call(
            self._waiter,
            0,
            None,
            None,
            None,
            self.calls,
            call_id,
            (method, route),
            client,
            body,
            kept,
        )
        self._in_flight[call_id] = call
        # failpoint: peer.sending
        try:
            send(_pack(REQUEST, route.target, call_id, key, wait_ms) + body, blocks, stable)
        except BaseException as error:
            is_ours = self._in_flight.pop(call_id, None) is not None
            if not isinstance(error, ShardError):
                raise
            if is_ours:
                raise self._not_sent(error, method, route) from error
            # This thread stood still, and the reactor has told the call's owner meanwhile: what
            # becomes of it is that one's.
        # failpoint: peer.sent
        now = self._set_deadline(call, timeout_s)
        call.overall, call.sent = call.deadline, now
        return call

    # As request(), for a caller that waits for nothing else: the answer may be there at once.
    request_at_once = request

    def resend(
        self, call: Call, route: Destination, timeout_s: float | None, kind: int = REQUEST
    ) -> None:
        """Send the request of a pending call, which waited for this connection or failed elsewhere;
        as a REPEAT it keeps its number, which the server knows it by. Raises as request()."""
        method = call.asked[0]
        if len(self._in_flight) >= self._calls_max:
            raise self._too_many(method, route)
        body, blocks = self.decoder.for_peer(call.body, call.blocks)
        call_id = call.call_id if kind == REPEAT else self._next_id()
        call.table, call.call_id, call.asked = self.calls, call_id, (method, route)
        # those that it has are of the attempt before
        call.deadline, call.sent, sent = NEVER, 0.0, call.sent
        self._in_flight[call_id] = call
        # failpoint: peer.sending
        wait_ms = wait_in_ms(timeout_s)
        try:
            self._send(
                _pack(kind, route.target, call_id, method_key(method), wait_ms) + body,
                blocks,
                True,
            )
        except BaseException as error:
            is_ours = self._in_flight.pop(call_id, None) is not None
            # as in request(): else it may be under way elsewhere already
            call.sent = sent if is_ours else call.sent or sent
            if not isinstance(error, ShardError):
                raise
            if is_ours:
                raise self._not_sent(error, method, route) from error
            return
        call.sent = self._set_deadline(call, timeout_s)

    def open(
        self,
        route: Destination,
        method: str,
        key: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
    ) -> Stream:
        """Begin a stream; it counts as a call in flight. Raises as request()."""
        if CONTEXT.others and CONTEXT.value is not None:
            timeout_s = inherited_s(timeout_s, self.reactor.clock)
        body, blocks = self._encode_arguments(arguments)
        call = stream_call(self._waiter, asked=(method, route))
        self._open(call, route, key, body, blocks, timeout_s, False)
        return Stream(call, self.reactor.call_soon)

    def open_encoded(self, call: StreamCall, route: Destination, timeout_s: float | None) -> None:
        """The same, of a stream that waited for this connection."""
        body, blocks = self.decoder.for_peer(call.body, call.blocks)
        self._open(call, route, method_key(call.asked[0]), body, blocks, timeout_s, True)

    def _open(
        self,
        call: StreamCall,
        route: Destination,
        key: int,
        body: bytes,
        blocks: Sequence[NDArray[Any]],
        timeout_s: float | None,
        stable: bool,
    ) -> None:
        method = call.asked[0]
        if len(self._in_flight) >= self._calls_max:
            raise self._too_many(method, route)
        call_id = self._next_id()
        call.table, call.call_id, call.asked = self.calls, call_id, (method, route)
        call.line.lead_over(self, call_id)
        may_be_overtaken = (
            HEADER_BYTES + len(body) + sum(block.nbytes for block in blocks)
            >= self.connection.bulk_bytes_min
        )
        side = NO_CREDIT if may_be_overtaken else WITH_CREDIT
        wait_ms = wait_in_ms(timeout_s)
        # once it has left, whatever comes is the end
        client, sent, call.client, call.sent = call.client, call.sent, None, 0.0
        self._streams[call_id] = call.inbox, call.window
        self._in_flight[call_id] = call
        # failpoint: peer.sending
        try:
            self._send(
                _pack(OPEN | side << SIDE_SHIFT, route.target, call_id, key, wait_ms) + body,
                blocks,
                stable,
            )
        except BaseException as error:
            self._in_flight.pop(call_id, None)
            self._streams.pop(call_id, None)
            call.client, call.sent = client, sent
            if isinstance(error, ShardError):
                raise self._not_sent(error, method, route) from error
            raise
        call.sent = self._set_deadline(call, timeout_s)
        call.opened(not may_be_overtaken)
        call.when_done(self._answered)

    def _answered(self, call: Future) -> None:
        assert isinstance(call, StreamCall)
        self._forget_finished(call.call_id, call.inbox)

    def _forget_finished(self, call_id: int, inbox: Inbox) -> None:
        """A stream is over when its call is done and all its items have come, in whichever order
        that is.
        """
        if inbox.finished:
            self._streams.pop(call_id, None)

    def send_item(self, call_id: int, side: int, item: Any) -> None:
        """One item of a stream, whose window has let it through. Raises NotSent, Backpressure,
        BadArguments, Closed.
        """
        # failpoint: peer.sending_item
        body, blocks = self._encode(item)
        _, window = self._halves(call_id, side)
        if window is None:
            raise errors.Closed("an item was not sent: the stream is over")
        try:
            self._send(
                _pack(ITEM | side << SIDE_SHIFT, window.sent & NUMBER_MASK, call_id, 0, 0) + body,
                blocks,
            )
        except ShardError as error:
            raise self._not_sent(error, "an item of a stream", self.connection.peer) from error
        window.sent += 1

    def _halves(self, call_id: int, sender: int) -> tuple[Inbox | None, Window | None]:
        """Ours of a stream in which we are `sender`; None each where there is none."""
        if sender == FROM_CALLER:
            return self._streams.get(call_id, (None, None))
        job = self.running.get(call_id)
        return (job.inbox, job.window) if job is not None else (None, None)

    def send_note(self, kind: int, call_id: int, side: int, count: int = 0) -> None:
        """CREDIT, END or CANCEL. A peer that is gone needs none; one whose outbox is full is told
        when there is room: without CREDIT or END a stream would stand still, without CANCEL a task
        run on."""
        send = self._send if kind == CREDIT else self.connection.send_everywhere
        try:
            # failpoint: peer.noting
            send(_pack(kind | side << SIDE_SHIFT, count & NUMBER_MASK, call_id, 0, 0))
        except BackpressureError:
            again = partial(self.send_note, kind, call_id, side, count)
            self.reactor.call_soon(partial(self.reactor.call_later, NOTE_AGAIN_S, again))
        except ShardError as error:
            logger.debug("%s was not told (%d): %s", self.connection.peer, kind, str(error))

    def _set_deadline(self, call: Call, timeout_s: float | None) -> float:
        # The other side is at work: what follows costs the caller nothing. Last it says by `sent`,
        # which is now, that it is done.
        clock = self._clock
        now = clock()
        if timeout_s is not None:
            call.deadline = deadline = now + timeout_s
            if deadline < self.calls.soonest:
                self._watch_deadline(deadline)
        return now

    def _watch_deadline(self, deadline: float) -> None:
        if deadline < self.calls.soonest:
            self.calls.soonest = deadline
            self.reactor.call_soon(partial(self._arm, deadline))

    def notify(
        self,
        route: Destination,
        method: str,
        key: int,
        arguments: tuple[Any, ...],
        stable: bool = False,
    ) -> None:
        """Send one notification: no answer comes. `stable`: nobody ever changes the arrays in it.
        Raises as request().
        """
        body, blocks = self._encode_arguments(arguments)
        try:
            self._send(_pack(NOTIFY, route.target, 0, key, 0) + body, blocks, stable)
        except ShardError as error:
            raise self._not_sent(error, method, route) from error

    def notify_encoded(
        self, route: Destination, method: str, body: bytes, blocks: Sequence[NDArray[Any]]
    ) -> None:
        """The same, of arguments that waited for this connection."""
        body, blocks = self.decoder.for_peer(body, blocks)
        try:
            self._send(_pack(NOTIFY, route.target, 0, method_key(method), 0) + body, blocks)
        except ShardError as error:
            raise self._not_sent(error, method, route) from error

    def _too_many(self, method: str, route: Destination) -> errors.Backpressure:
        connection = self.connection
        return errors.Backpressure(
            f"{method!r} was not sent to {route} over {connection.transport}: "
            f"{len(self._in_flight)} calls to {connection.peer} "
            f"wait for answers, {self._calls_max} may (limit calls_in_flight_max); "
            "wait for some first, or see why it is slow"
        )

    def _not_sent(self, error: ShardError, method: str, route: Destination | str) -> Exception:
        text = f"{method!r} was not sent to {route} over {self.connection.transport}: {error}"
        if isinstance(error, ShmFull):
            return errors.ShmFull(text)
        if isinstance(error, BackpressureError):
            return errors.Backpressure(text)
        if isinstance(error, LocalProtocolError):
            return errors.BadArguments(text)
        if isinstance(error, ClosedError):
            return errors.Closed(text)
        return errors.NotSent(text)

    def _arm(self, when: float) -> None:
        """See to it that expire() is called at `when`."""
        if self.connection.error is None and when < self._armed:
            self._armed = when
            self.reactor.timers.call_at(when, self._expire)

    def _expire(self) -> None:
        self._armed = NEVER
        if self.calls.has_late:
            return  # _end_late() is to come again, and looks for the next deadline at its end
        # failpoint: peer.looking_for_late
        if self.calls.find_late(self.reactor.clock()):
            # before their callers hear of it, who may change their arrays then
            self.connection.own_outbox()
        # at once: who answers in this process at the deadline is no earlier than that
        self._end_late()

    def _end_late(self) -> None:
        now = self.reactor.clock()
        self.calls.end_late(lambda call: self._deadline_exceeded(call, now), EXPIRED_MAX)
        if self.calls.has_late:
            self.reactor.call_soon(self._end_late)
        else:
            self._arm(max(self.calls.soonest, now + len(self._in_flight) * LOOK_S_PER_CALL))

    def _deadline_exceeded(self, call: Call, now: float) -> errors.DeadlineExceeded:
        # 0.0: it is being sent
        waited = f"after {now - call.sent:.3f} s" if call.sent else "when its deadline came"
        return errors.DeadlineExceeded(
            f"no answer to {call.asked[0]!r} from {call.asked[1]} at {self.connection.peer} "
            f"{waited}; "
            "the handler may still be running: allow a larger timeout_s, or look why it is slow"
        )

    # -- what comes in -----------------------------------------------------------------------------

    def _on_message(self, body: memoryview, blocks: Blocks = ()) -> None:
        try:
            what, target, call_id, key, wait_ms = _unpack(body)
        except struct.error:
            self.connection.close(
                RemoteProtocolError(
                    f"message of {len(body)} bytes, {HEADER_BYTES} at least expected"
                )
            )
            return
        if what == REPLY:
            call = self._in_flight.pop(call_id, None)
            if call is None:
                self.calls.dropped_replies += 1
                return
            try:
                payload, decode_plain = body[PAYLOAD], self.decode_plain
                is_plain = not blocks and len(payload) <= PLAIN_BYTES_MAX
                call.set_result(
                    decode_plain(payload) if is_plain else self.decoder.decode(payload, blocks)
                )
            except DECODE_ERRORS as error:
                call.set_error(unreadable(call, error))
        elif what == REQUEST or what == NOTIFY:
            server = self._servers.get(target)
            if server is None:
                self.fail(call_id, Status.UNKNOWN_SERVICE, "", "", "")
            elif self.reactor.serves or server.inline:
                server.request(self, call_id, key, wait_ms, body[PAYLOAD], blocks)
            else:
                self._hold(call_id, body, blocks)
        else:
            self._on_other(what, target, call_id, key, wait_ms, body, blocks)

    def _on_other(
        self,
        what: int,
        target: int,
        call_id: int,
        key: int,
        wait_ms: int,
        body: memoryview,
        blocks: Blocks,
    ) -> None:
        """Any message but the two that calls are made of."""
        kind, side = what & KIND_MASK, what >> SIDE_SHIFT & KIND_MASK
        if kind == FAILURE:
            self._on_failure(what >> STATUS_SHIFT, call_id, body[PAYLOAD], blocks)
        elif self.reactor.serves or (side == TO_CALLER and kind in OF_STREAMS):
            self._on_rare(kind, side, target, call_id, key, wait_ms, body[PAYLOAD], blocks)
        else:
            self._hold(call_id if kind in (OPEN, REPEAT) else 0, body, blocks)

    def _hold(self, call_id: int, body: memoryview, blocks: Blocks) -> None:
        """Keep what is for our handlers, in its order, until a thread that runs them turns the
        reactor, and what came before has begun. More than HELD_MAX requests are refused.
        """
        held = self.reactor.held
        if call_id and len(held) >= HELD_MAX:
            text = f"{len(held)} requests wait for a thread that runs handlers: all wait in theirs"
            self.fail(call_id, Status.BACKPRESSURE, "", text, "")
            return
        self.reactor.call_in_engine(
            partial(self._on_held, call_id, memoryview(bytes(body)), blocks)
        )

    def _on_held(self, call_id: int, body: memoryview, blocks: Blocks) -> None:
        """A thread that runs handlers has come to it. What a peer asked that was lost meanwhile
        does not begin: nobody waits for it, and a handler that keeps something for as long as its
        caller is there would never be told of the loss.
        """
        if not (call_id and self.lost):
            self._on_message(body, blocks)

    def _on_rare(
        self,
        kind: int,
        side: int,
        target: int,
        call_id: int,
        key: int,
        wait_ms: int,
        payload: memoryview,
        blocks: Blocks,
    ) -> None:
        """What belongs to streams, to repeating and to cancelling. Notes that cross the end of
        their call are dropped.
        """
        if kind == OPEN:
            server = self._servers.get(target)
            if server is None or call_id in self.running:
                self.fail(call_id, Status.UNKNOWN_SERVICE, "", "", "")
            else:
                server.open(self, call_id, key, wait_ms, payload, blocks)
                if side == NO_CREDIT and call_id in self.running:
                    self.send_note(CREDIT, call_id, TO_CALLER, WINDOW_ITEMS)
            return
        if kind == REPEAT:
            server = self._servers.get(target)
            if server is None:
                self.fail(call_id, Status.UNKNOWN_SERVICE, "", "", "")
            else:
                server.repeat(self, call_id, key, wait_ms, payload, blocks)
            return
        if kind == CANCEL:
            job = self.running.get(call_id)
            if job is not None:
                job.end(CancelledError("the caller cancelled it"))
            return
        inbox, window = self._halves(call_id, TO_CALLER if side == FROM_CALLER else FROM_CALLER)
        if kind == ITEM:
            if inbox is not None:
                self._on_item(inbox, call_id, side, target, payload, blocks)
                if side == TO_CALLER:
                    self._forget_finished(call_id, inbox)
        elif kind == CREDIT:
            if window is not None:
                window.grant(target)
        elif kind == END:
            if inbox is not None:
                self._on_end(inbox, side, target)
        else:
            self.connection.close(RemoteProtocolError(f"message of unknown kind {kind}"))

    def _on_item(
        self,
        inbox: Inbox,
        call_id: int,
        side: int,
        number: int,
        payload: memoryview,
        blocks: Blocks,
    ) -> None:
        try:
            item = self.decoder.decode(payload, blocks)
            # failpoint: peer.item_read
        except DECODE_ERRORS as error:
            failure = errors.RpcError(
                f"an item of the stream with {self.connection.peer} cannot be read: {error}"
            )
            inbox.cut(failure)
            call = self._in_flight.get(call_id) if side == TO_CALLER else None
            if call is not None:
                call.cancel(failure)  # or the server would go on for a stream that is over here
            return
        if not inbox.put(number, item):
            self.connection.close(
                RemoteProtocolError("more items of a stream than there was credit for")
            )

    def _on_end(self, inbox: Inbox, side: int, count: int) -> None:
        if not inbox.expect(count):
            self.connection.close(
                RemoteProtocolError(f"a stream cannot have ended after {count} items")
            )
        elif side == FROM_CALLER:
            inbox.finish()  # ours ends with the server's answer, which says how

    def reply(self, call_id: int, value: Any) -> bool:
        """Answer with a value; False when it cannot be sent, which the caller is told."""
        encode, send = self._encode, self._send
        try:
            body, blocks = encode(value)
            # failpoint: peer.answering
            send(_pack(REPLY, 0, call_id, 0, 0) + body, blocks)
        except PeerLostError:
            return True  # who asked is gone, and knows that it may have run
        except BaseException as error:  # of what its class does to be sent, too
            self._fail_to_reply(call_id, error)
            return False
        return True

    def _fail_to_reply(self, call_id: int, error: BaseException) -> None:
        self.fail(call_id, Status.BAD_RESULT, type(error).__qualname__, errors.text_of(error), "")
        pass_on_interrupt(error, self.reactor)

    def fail(self, call_id: int, status: Status, name: str, text: str, more: str) -> None:
        """Answer that there is no value, and why. For a notification: log it."""
        if not call_id:
            self._warn(
                f"a notification from {self.connection.peer} failed: {status.name} {name}: {text}"
            )
            return
        try:
            # failpoint: peer.answering
            self._send(failure_message(self.decoder, call_id, status, name, text, more))
        except (PeerLostError, ClosedError) as error:  # what it had under way: no line each
            logger.debug(
                "%s was not told of a failure (%s): %s",
                self.connection.peer,
                status.name,
                str(error),
            )
        except BackpressureError as error:
            # of an answer that found no room, too: whoever asked may wait without a deadline
            if len(self._untold) >= UNTOLD_MAX:
                self._warn(
                    f"{self.connection.peer} was not told of a failure ({status.name}): {error}"
                )
                return
            self._untold.append(
                failure_message(self.decoder, call_id, status, name, text[:UNTOLD_TEXT_MAX], "")
            )
            self.reactor.call_soon(self._tell_untold_later)  # answers come from any thread
        except ShardError as error:
            self._warn(f"{self.connection.peer} was not told of a failure ({status.name}): {error}")

    def _tell_untold_later(self) -> None:
        if self._untold_timer is None and self._untold:
            self._untold_timer = self.reactor.call_later(NOTE_AGAIN_S, self._tell_untold)

    def _tell_untold(self) -> None:
        self._untold_timer = None
        while self._untold:
            try:
                # failpoint: peer.answering
                self._send(self._untold[0])
            except BackpressureError:
                self._tell_untold_later()
                return
            except (PeerLostError, ClosedError):  # with the connection its calls have ended
                self._untold.clear()
                return
            except ShardError as error:
                self._warn(f"{self.connection.peer} was not told of a failure: {error}")
            self._untold.popleft()

    def _warn(self, text: str) -> None:
        """A line of the log; of what happens ever again only the first ones, the 16th, the 32nd: a
        peer must not fill a disk.
        """
        self._warnings = count = self._warnings + 1
        if count <= WARNINGS_EACH:
            logger.warning("%s", text)
        elif not count & (count - 1):
            logger.warning(
                "%s (the last of %d such lines of this connection, most of which were left out)",
                text,
                count,
            )

    def _on_failure(self, status: int, call_id: int, body: memoryview, blocks: Blocks) -> None:
        call = self._in_flight.pop(call_id, None)
        if call is None:
            self.calls.dropped_replies += 1
            return
        try:
            name, text, more = self.decoder.decode(body, blocks)
            if not type(name) is type(text) is type(more) is str:
                raise ValueError("its name, text and traceback must be str")
            reason = Status(status)
        except DECODE_ERRORS as error:
            call.set_error(
                errors.RpcError(
                    f"the failure of {call.asked[0]!r} at {call.asked[1]} cannot be read: {error}"
                )
            )
            return
        call.set_error(error_for(call, self.connection.peer, reason, name, text, more))

    # -- the end -----------------------------------------------------------------------------------

    def _on_close(self, connection: Connection[Any], error: ShardError) -> None:
        notifications = notifications_in(connection.unsent)
        unsent, connection.unsent = calls_of(connection.unsent), []
        self.lost = True
        if notifications:
            logger.warning(
                "%d notifications to %s had not left when their connection ended, and are lost: %s",
                notifications,
                connection.peer,
                str(error),
            )
        # else nobody may come to look again
        later = None if isinstance(error, ClosedError) else self.reactor.call_later
        self.calls.fail_all(
            lambda call: error_of(call, error, call.call_id in unsent, self.reactor.clock()), later
        )
        for call_id, (inbox, _) in self._streams.copy().items():
            if call_id not in self._in_flight:  # answered, with items still under way
                inbox.cut(
                    errors.MaybeExecuted(
                        f"the peer was lost before all items of a stream had come ({error})"
                    )
                )
        self._streams.clear()
        gone = CancelledError(f"{connection.peer} is gone")
        # what nobody waits for goes on only when it has begun, is no stream, and ends by itself
        for job in list(self.running.values()):
            has_no_end = not job.timeout_ms and not job.is_once
            if job.inbox is not None or job.is_queued or job.ends_with_caller or has_no_end:
                job.end(gone)
        self._on_lost(self)
        for tell in list(self.when_lost):
            tell(self)


def unreadable(call: Call, error: Exception) -> errors.RpcError:
    return errors.RpcError(
        f"the answer to {call.asked[0]!r} from {call.asked[1]} cannot be read: {error}"
    )


def calling_peer() -> Peer | None:
    """Who made the request that is being handled, to call or to notify it in turn; None outside
    handlers.
    """
    return cast("Peer | None", who_asked())  # requests come in over Peers alone
