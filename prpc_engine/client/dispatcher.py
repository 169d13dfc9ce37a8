"""The slow path of a client's calls: those that could not be sent at once, and those that failed.
It blocks neither who calls nor the reactor.

    a call that                                    waits for        where
    goes to a server not known here                a look at the    directory.py
                                                   master
    goes to a server that is not connected         the connection   Route.queue; a connector in the
                                                                    control loop
    could not be sent to the server it is for      that server      a pause; then a look, and the
                                                                    same again
    failed, and may have run; the master does not  the word on its  DESCRIBE, asked of several
      know whether it may be repeated              idempotence      servers at once
    is to be tried again later                     the time         a pause
    is on its way again                            the answer       the peer's table, as any call

From its first line here to its end a call is held by the PendingRequests of the client, in one
place at most (prpc_engine/rpc/pending.py): so it ends at its own deadline wherever it is, and by
cancel() and close() at once. A route's life is that of its queue (prpc_engine/rpc/send_queue.py),
and its peer is set while that is up: calls to one route leave in the order they came.

What waits before it was ever sent is bounded as an outbox is: outbox_messages_max and
outbox_bytes_max for each server known.

Calls are admitted, and sent where their route is connected, by the threads that make them; a
connector sends what waited. It is decided about calls in the reactor, and there they end: what
follows a call may be the application's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.client.balance import Outcome, outcome_of
from prpc_engine.client.directory import Directory
from prpc_engine.client.retry import (
    DID_NOT_RUN,
    ONLY_THERE,
    GiveUp,
    Retry,
    RetryBudget,
    RetryPolicy,
    RetryState,
    is_retriable,
)
from prpc_engine.client.route import Route, Sought
from prpc_engine.client.shared_message import SharedMessage
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import NEVER, SENDING_LOOKS_MAX, SENDING_S, Call, CallOwner
from prpc_engine.rpc.context import inherited_s, wait_in_ms
from prpc_engine.rpc.marks import KnownMarks
from prpc_engine.rpc.message import REPEAT
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.pending import PendingRequests, RequestPlace
from prpc_engine.rpc.send_queue import QueueAction, QueueEvent, QueueState
from prpc_engine.rpc.server import DESCRIBE
from prpc_engine.rpc.stream import StreamCall
from shard import VALUE, Future, Semaphore, ShardError, runtime, yield_now

CONNECT_TIMEOUT_S = 5.0  # for one attempt at one address
# of a client, that connect at a time: so many servers may hang before the others wait for one of
# them to fail
CONNECTORS_MAX = 16
# Calls that a connector sends before it lets other coroutines run: some 20 us each, one with arrays
# longer.
DELIVERED_MAX = 64
TOLD_AFTER_WAITS = 6  # of one call, before its log says that calls wait: a third of a second or so
TOLD_EVERY_S = 10.0
DESCRIBE_SERVERS_MAX = 3  # that are asked at once
# for a server to say whether a method is idempotent, before a failed call of it is given up
DESCRIBE_TIMEOUT_S = 1.0

logger = logging.getLogger("prpc")


class Notice(Call):
    """A notification that could not be sent at once. Its future is done when it has left, or failed
    with the reason why it could not.
    """


class Named:
    """The client of calls that one server alone may run: while it cannot be reached they wait, and
    are sent to no other one.

    An owner of a `key` that the master no longer lists hands them to the next owner. Not used by a
    policy with unsent_max=1: such calls end with the first failure.
    """

    __slots__ = ("_directory", "_dispatcher", "_key")

    def __init__(
        self, dispatcher: Dispatcher, directory: Directory, key: int | str | bytes | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._key = key

    def failed(self, call: Call, error: BaseException) -> bool:
        """True: the call stays pending, and is sent again. What may have run is not repeated; a
        server that the master does not list is not waited for.
        """
        if (
            not isinstance(error, errors.NotSent | errors.UnknownService)
            or self._dispatcher.fails_at_once
        ):
            return False
        if isinstance(error, errors.NoServer) and self._key is None:
            return False
        return self._dispatcher.failed(call, error)

    def find(self, route: Route) -> Route:
        """Where a call goes that failed at `route`, by what is known now."""
        if self._key is not None:
            return self._directory.by(self._key)
        return route if isinstance(route, Sought) else self._directory.to(route.server_id)


class Dispatcher:
    """Takes on the calls of a client that could not be sent at once, or failed: connects, tries
    again, and ends them in time. Owned by one client; thread-safe, with what it decides in the
    reactor's thread.

    `client` hears of the failures of calls that may go to another server; `idempotent` names
    methods that may be run twice.

    Where a call is: the table at the file's head.
    """

    def __init__(
        self,
        client: CallOwner,
        directory: Directory,
        node: Node,
        policy: RetryPolicy,
        random: Random,
        idempotent: Iterable[str],
    ) -> None:
        # Each call of any thread counts for it.
        self.budget = RetryBudget(guard=runtime.Lock())
        self._client = client
        self._directory = directory
        self._balancer = directory.balancer
        self._node = node
        self._reactor = node.reactor
        self._clock = node.reactor.clock
        self._policy = policy
        self._random = random
        # a call of a named server; others are as quick by that policy itself
        self.fails_at_once = policy.unsent_max == 1
        self._quiet_until = 0.0  # nothing is said of calls that wait
        self._pending: PendingRequests[Call] = PendingRequests(
            self._reactor, self._expire, self._end_closed
        )
        self._to_connect = Semaphore(CONNECTORS_MAX)
        self.marks = KnownMarks(idempotent)
        self.is_idempotent = self.marks.is_idempotent
        # who waits for the answer under way; None: nobody asked
        self._describing: list[Callable[[], object]] | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait here before they leave for the first time."""
        return self._pending.unsent

    @property
    def held(self) -> int:
        """Calls that were here and are not finished."""
        return len(self._pending)

    @property
    def connectors(self) -> int:
        """Routes that are being connected now."""
        return CONNECTORS_MAX - self._to_connect.free

    # -- what could not be sent at once ------------------------------------------------------------

    def peer_at_once(self, route: Route) -> Peer | None:
        """The route's peer where that takes no waiting: its node is connected already, or in this
        process.
        """
        if isinstance(route, Sought) or self._pending.is_closed:
            return None
        with self._pending.guard:
            if route.queue.is_busy:
                return None
            route.peer = peer = self._node.near_peer(route.addresses)
            if peer is not None:
                self._pending.tell(route.queue, QueueEvent.FOUND)
            elif route.queue.state is QueueState.UP:
                self._pending.tell(route.queue, QueueEvent.LOST)
            return peer

    def begin(
        self,
        route: Route,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
        stable: bool,
        client: CallOwner,
        error: errors.RpcError | None = None,
        kind: Callable[..., Call] = Call,
    ) -> Call:
        """A call that is sent as soon as it can be. `client` hears of its failures; `error`: why it
        could not be sent to that route just now.

        Raises BadArguments, Closed, Backpressure when too many wait, and ForkedError.
        """
        self._check_open()
        call = self.encoded(route, method, args, timeout_s, stable, client, kind)
        self.admit(call)
        if error is None:
            self.send(call, route)
        else:
            call.set_error(error)
        return call

    def begin_shared(
        self,
        route: Route,
        method: str,
        message: SharedMessage,
        timeout_s: float | None,
        client: CallOwner,
    ) -> Call:
        """As begin(), of a message that others get as well."""
        self._check_open()
        timeout_s = inherited_s(timeout_s, self._clock)
        wait_in_ms(timeout_s)
        call = self._made(Call, route, method, *message, timeout_s, client)
        self.admit(call)
        self.send(call, route)
        return call

    def encoded(
        self,
        route: Route,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float | None,
        stable: bool,
        client: CallOwner | None,
        kind: Callable[..., Call] = Call,
    ) -> Call:
        """A call that has not left, with its arguments as they are now. Raises BadArguments."""
        timeout_s = inherited_s(timeout_s, self._clock)
        wait_in_ms(timeout_s)
        body, blocks = self._node.archive.encode_arguments(args)
        if blocks and not stable:
            blocks = self._own(blocks)
        return self._made(kind, route, method, body, blocks, timeout_s, client)

    def _made(
        self,
        kind: Callable[..., Call],
        route: Route,
        method: str,
        body: bytes,
        blocks: Sequence[NDArray[np.uint8]],
        timeout_s: float | None,
        client: CallOwner | None,
    ) -> Call:
        now = self._clock()
        return kind(
            self._node.waiter,
            asked=(method, route),
            client=client,
            body=body,
            blocks=blocks,
            sent=now,
            overall=NEVER if timeout_s is None else now + timeout_s,
        )

    def _own(self, blocks: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """Arrays of the slab as they are, which is what empty() promises; copies of the others:
        their owner may change them.
        """
        return [
            block if self._node.slab.block_of(block) is not None else block.copy()
            for block in blocks
        ]

    def admit(self, call: Call) -> None:
        """Hold a call that never left. Raises Backpressure."""
        size = len(call.body) + sum(block.nbytes for block in call.blocks)
        limits, servers = self._node.limits, max(1, len(self._directory.routes))
        if not self._pending.admit(
            call,
            call.overall,
            limits.outbox_messages_max * servers,
            size,
            limits.outbox_bytes_max * servers,
        ):
            raise errors.Backpressure(
                f"{call.asked[0]!r} was not sent to {call.asked[1]}: "
                f"{self._pending.unsent} calls of {self._pending.unsent_bytes} bytes wait for a "
                f"connection already, {limits.outbox_messages_max} calls or "
                f"{limits.outbox_bytes_max} bytes for each of "
                f"{servers} servers may (limits outbox_messages_max, outbox_bytes_max); "
                "slow down, or retry later"
            )
        call.when_done(self._pending.end)

    def hold(self, call: Call) -> None:
        """See to it that the call ends by its deadline and at close(), wherever it is."""
        if self._pending.hold(call, call.overall):
            call.when_done(self._pending.end)

    def _expire(self, call: Call) -> None:
        """The deadline of a call has come; one that is under way is ended by the peer's table."""
        if call.finished:
            return
        method, route = call.asked
        now = self._clock()
        is_unsent = self._pending.is_unsent(call)
        if is_unsent and route.queue.is_busy and call.client is not None:
            self._balancer.report(route, Outcome.UNSENT, now)
        if is_unsent:
            text = (
                f"{method!r} was not sent to {route} within {now - call.sent:.3f} s, "
                "which is not connected yet; allow a larger "
            )
            text += "timeout_s, or look whether that server can be reached"
        else:
            text = (
                f"no answer to {method!r} from {route} when its deadline came; "
                "it waited for another attempt"
            )
        state: RetryState[Route] | None = call.state
        if state is not None:
            text += f"; the last attempt ended with: {state.last_reason}"
        error = errors.DeadlineExceeded(text)
        call.end(
            error
            if state is None
            else state.final_error(error, GiveUp("the deadline is over"), now)
        )

    # -- connecting, and sending -------------------------------------------------------------------

    def send(self, call: Call, route: Route) -> None:
        """Send it over the route, when it is known and connected."""
        # failpoint: dispatcher.sending
        if isinstance(route, Sought):
            self._directory.after_look(partial(self._found, call, route))
            return
        call.asked = call.asked[0], route
        peer = route.peer
        if peer is None or peer.lost:
            if self._pending.place(call) is RequestPlace.ENDED:  # a hedged one was to leave at once
                self.hold(call)
            with self._pending.guard:
                peer = route.peer
                if route.queue.state is QueueState.UP and (peer is None or peer.lost):
                    route.peer = None
                    self._pending.tell(route.queue, QueueEvent.LOST)
                actions = self._pending.offer(call, route.queue)
            if QueueAction.CONNECT in actions:
                self._begin_to_connect(route)
            if QueueAction.SEND not in actions:
                return
        assert peer is not None, "its queue is up"
        self._deliver(call, route, peer)

    def _found(self, call: Call, sought: Sought, failure: BaseException | None) -> None:
        try:
            route = sought.find()
        except errors.NoServer as error:
            call.asked = call.asked[0], sought
            # without the master nobody knows if there is one
            call.set_error(_bare(failure or error))
        else:
            self.send(call, route)

    def _begin_to_connect(self, route: Route) -> None:
        try:
            self._node.control_loop().spawn(self._connect(route))
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread, for the loop
            why = errors.NotSent(f"{route} cannot be reached: {error}")
            self._reactor.call_soon(partial(self._not_connected, route, why))

    async def _connect(self, route: Route) -> None:
        """A connector, in the control loop: sends what waits for the route, once it is
        connected.
        """
        async with self._to_connect:
            started = self._clock()
            try:
                peer = await self._node.reach(route.addresses, CONNECT_TIMEOUT_S, route.text)
            except errors.NotSent as error:
                told = errors.NotSent(f"{error} (tried for {self._clock() - started:.1f} s)")
                is_lasting = isinstance(error, errors.NoPath) and error.is_lasting
                self._reactor.call_soon(
                    partial(self._not_connected, route, error if is_lasting else told)
                )
            except Exception as error:
                # AuthenticationFailed, Closed; or a bug, which callers must hear of
                self._reactor.call_soon(partial(self._not_connected, route, error))
            else:
                await self._deliver_all(route, peer)

    async def _deliver_all(self, route: Route, peer: Peer) -> None:
        """Send what waits for the route, until nothing does."""
        self._pending.tell(route.queue, QueueEvent.CONNECTED)
        while calls := self._take_waiting(route, peer):
            for number, call in enumerate(calls, 1):
                self._deliver(call, route, peer)
                if call.blocks or number == DELIVERED_MAX:
                    await yield_now()

    def _take_waiting(self, route: Route, peer: Peer) -> list[Call]:
        """Some of what waits for the route. When that is nothing it is connected: what comes leaves
        at once.
        """
        with self._pending.guard:
            calls = self._pending.take(route.queue, DELIVERED_MAX)
            if not calls:
                route.peer = peer
            return calls

    def _not_connected(self, route: Route, error: Exception) -> None:
        # for calls to that server alone, too: is it there at all?
        self._directory.after_look_if_stale(error, route, _ignore)
        for call in self._pending.tell(route.queue, QueueEvent.GAVE_UP):
            # each its own: what becomes of it is written into its text
            call.set_error(_bare(error))

    def _deliver(self, call: Call, route: Route, peer: Peer) -> None:
        if call.finished:
            return
        now = self._clock()
        if now >= call.overall:
            self._reactor.call_soon(partial(self._expire, call))
            return
        if not self._pending.sending(call):
            return
        method, client = call.asked[0], call.client
        try:
            if isinstance(call, StreamCall):
                peer.open_encoded(
                    call, route, None if call.overall == NEVER else call.overall - now
                )
            elif isinstance(call, Notice):
                peer.notify_encoded(route, method, call.body, call.blocks)
                self._reactor.call_soon(partial(call.set_result, None))
            elif call.state is None or call.state.only is None:
                peer.resend(call, route, self._policy.timeout_s(now, call.overall))
            elif call.table is not None and call.table.life == peer.calls.life:
                peer.resend(call, route, self._policy.timeout_s(now, call.overall), REPEAT)
            else:
                gone = errors.MaybeExecuted(
                    f"{method!r} was sent to an earlier process than {peer.connection.peer}"
                )
                self._reactor.call_soon(partial(self._end_gone, call, gone))
        except Exception as error:  # NotSent, Backpressure, ShmFull; or a bug
            # it comes back by failed() as far as it can be repeated
            self._reactor.call_soon(partial(call.set_error, _bare(error)))
            return
        self._pending.left(call)
        if self._balancer.ailing and client is not None:
            call.when_done(self.answered)
        if call.finished and call.finished != VALUE and call.table is not None:
            # Given up while it was sent: the server was told so before it heard of the call,
            # perhaps.
            peer.calls.in_flight.pop(call.call_id, None)
            peer.calls.send_cancel(call.call_id)

    # -- what failed -------------------------------------------------------------------------------

    def failed(self, call: Call, error: BaseException) -> bool:
        """Told by a call instead of its end; True: it is seen to, and the call stays pending. From
        any thread.
        """
        # before: the end may not say that it never did
        may_have_run = call.state is not None and call.state.may_have_run
        if self._pending.is_closed or not (
            is_retriable(error) or (may_have_run and isinstance(error, DID_NOT_RUN))
        ):
            return False
        if isinstance(error, errors.DeadlineExceeded) and call.state is None:
            now = self._clock()
            # the usual end of a call that takes too long
            if now >= call.overall or call.overall == NEVER:
                self.report(call.asked[1], error, now)
                return False
        self.hold(call)
        self._reactor.call_soon(
            partial(self._take_up, call, error, call.asked[1], SENDING_LOOKS_MAX)
        )
        return True

    def _take_up(self, call: Call, error: BaseException, route: Route, looks: int) -> None:
        """Decide, once the thread that sent the call is done with it: it sets the deadline last,
        after an answer perhaps.
        """
        if call.finished:
            return
        if not call.sent and looks:
            self._reactor.call_later(
                SENDING_S, partial(self._take_up, call, error, route, looks - 1)
            )
            return
        self._pending.until(call, call.overall)  # perhaps unknown when it was held
        # else its sender, who stood still, said so twice
        if self._pending.place(call) is RequestPlace.KEPT:
            self.decide(call, error, route)

    def decide(self, call: Call, error: BaseException, route: Route, is_told: bool = False) -> None:
        """What follows that failure of the call. `is_told`: the servers were asked what may be sent
        again. In the reactor.
        """
        if call.finished:
            return
        method = call.asked[0]
        may_have_run = isinstance(error, errors.MaybeExecuted | errors.DeadlineExceeded)
        if may_have_run and not is_told and self.is_idempotent(method) is None:
            self.describe(partial(self.decide, call, error, route, True))
            return
        now = self._clock()
        self.report(route, error, now)
        state = self.state_of(call)
        known = None if isinstance(route, Sought) else route
        decided = state.decide(
            error,
            known,
            now,
            call.overall,
            bool(self.is_idempotent(method)),
            self.marks.is_once(method),
        )
        if isinstance(decided, GiveUp):
            call.end(state.final_error(error, decided, now))
            return
        if decided.only is not None:
            call.client = self._client  # no longer a race's (hedging.py)
        if state.waits == TOLD_AFTER_WAITS and isinstance(error, errors.NotSent):
            self._tell_of_waiting(error, now)
        again = partial(
            self._directory.after_look_if_stale,
            error,
            route,
            partial(self._again, call, error, decided),
        )
        if decided.delay_s:
            self._pending.pause(call, decided.delay_s, again)
        else:
            again()

    def _tell_of_waiting(self, error: errors.NotSent, now: float) -> None:
        """Say for what calls wait: a line for all of this client, now and then."""
        if now >= self._quiet_until:
            self._quiet_until = now + TOLD_EVERY_S
            name, first_line = self._directory.name, str(error).partition("\n")[0]
            logger.warning(
                "waiting for a server of %r, until the deadlines of its calls: %s", name, first_line
            )

    def _again(
        self, call: Call, error: BaseException, decided: Retry[Route], failure: BaseException | None
    ) -> None:
        if call.finished:
            return
        if decided.only is not None:
            if self._directory.routes.get(decided.only.server_id) is decided.only:
                self.send(call, decided.only)
            else:
                self._end_gone(call, error)
            return
        named = call.client
        route = (
            named.find(call.asked[1])
            if isinstance(named, Named)
            else self._directory.pick(decided.avoid)
        )
        if isinstance(route, Sought):  # the look has been, or is not worth while
            self._found(call, route, failure)
        else:
            self.send(call, route)

    def _end_gone(self, call: Call, error: BaseException) -> None:
        """The process that a call may have run in is not there any more."""
        call.end(self.state_of(call).final_error(error, GiveUp(ONLY_THERE), self._clock()))

    def state_of(self, call: Call) -> RetryState[Route]:
        """What is kept of a call that has failed at least once."""
        if call.state is None:
            call.state = RetryState(
                self._policy,
                self.budget,
                self._random,
                call.asked[0],
                call.sent or self._clock(),
            )
        state: RetryState[Route] = call.state
        return state

    def report(self, route: Route, error: BaseException, now: float) -> None:
        """Let the balancer know of an attempt's failure, as far as it says something about the
        server.
        """
        outcome = outcome_of(error)
        if outcome is not None and not isinstance(route, Sought):
            self._balancer.report(route, outcome, now)

    def answered(self, done: Future) -> None:
        """A call ended that was sent while some server was not well."""
        assert isinstance(done, Call)
        if done.finished == VALUE:
            self._balancer.report(done.asked[1], Outcome.OK, self._clock())
        else:
            self.report(done.asked[1], done._outcome, self._clock())

    # -- what may be run twice ---------------------------------------------------------------------

    def describe(self, then: Callable[[], object]) -> None:
        """Ask the servers which methods are idempotent or `once`, and call then(), even if none has
        answered. In the reactor.
        """
        if self._describing is not None:
            self._describing.append(then)
            return
        self._describing = [then]
        routes = sorted(self._balancer.routes, key=lambda route: not route.is_connected)[
            :DESCRIBE_SERVERS_MAX
        ]
        left = len(routes)

        def told(done: Future) -> None:
            nonlocal left
            left -= 1
            if done.finished == VALUE:
                self.marks.told(done._outcome)
            if done.finished == VALUE or not left:
                finish()

        def finish() -> None:
            waiting, self._describing = self._describing or [], None
            for each in waiting:
                each()

        for route in routes:
            body, _ = self._node.archive.encode_arguments(())
            now = self._clock()
            ask = Call(
                self._node.waiter,
                asked=(DESCRIBE, route),
                body=body,
                sent=now,
                overall=now + DESCRIBE_TIMEOUT_S,
            )
            ask.when_done(lambda done: self._reactor.call_soon(partial(told, done)))
            self.hold(ask)
            self.send(ask, route)
        if not routes:
            finish()

    # -- the end -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._pending.is_closed:
            raise self._closed_error()
        self._node.check_process()

    def _closed_error(self) -> errors.Closed:
        return errors.Closed(f"the client of {self._directory.name!r} was closed here")

    def close(self) -> None:
        """End all calls and streams of this client with Closed; servers are told of those in
        flight. Connectors end by themselves, within CONNECT_TIMEOUT_S an address."""
        self._end_all()
        # those that another thread was about to enter
        self._reactor.call_later(SENDING_S, self._end_all)

    def _end_all(self) -> None:
        self._pending.close()
        mine = self._directory
        for peer in self._node.peers():
            for call in list(peer.calls.in_flight.values()):
                if getattr(call.asked[1], "owner", None) is mine:
                    self._end_closed(call)

    def _end_closed(self, call: Call) -> None:
        call.withdraw()
        call.end(
            errors.Closed(
                f"{self._closed_error()} while {call.asked[0]!r} of {call.asked[1]} was under way"
            )
        )


def _ignore(failure: BaseException | None) -> None:
    """Nobody waits for that look."""


def _bare(error: BaseException) -> BaseException:
    """A copy without traceback and cause: their frames hold the call, which holds the error, until
    a collection of garbage. A bug keeps its traceback."""
    return copy.copy(error) if isinstance(error, errors.RpcError | ShardError) else error
