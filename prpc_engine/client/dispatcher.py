"""The slow path of a client's calls: those that could not be sent at once, and those that failed.
It blocks neither who calls nor the reactor.

    a call that                                    waits for        where
    goes to a server not known here                a look at the    directory.py
                                                   master
    goes to a server that is not connected         the connection   Route.waiting; a connector in
                                                                    the control loop
    could not be sent to the server it is for      that server      a timer; then a look, and the
                                                                    same again
    failed, and may have run; the master does not  the word on its  DESCRIBE, asked of several
      know whether it may be repeated              idempotence      servers at once
    is to be tried again later                     the time         a timer of the reactor
    is on its way again                            the answer       the peer's table, as any call

Invariant: a call is at one of these places at most; who takes it out puts it into the next or ends
it. Wherever it is, a timer ends it at its own deadline, cancel() and close() end it at once, and
whoever then finds it finished drops it.

    route          event                          next
    connected      its peer is lost, a call comes waiting: the call; a connector begins, or one of
                                                  CONNECTORS_MAX takes it next
    waiting        a call comes                   waiting, behind the others
    waiting        connected                      those that wait are sent, until none does; then
                                                  connected
    waiting        not connected                  not connected: all that wait have failed
    not connected  a call comes                   as connected, its peer lost

Calls to one route leave in the order they came: while some wait for its connection, those that come
later wait behind them. What waits before it was ever sent is bounded as an outbox is:
outbox_messages_max and outbox_bytes_max for each server known.

Calls are admitted, and sent where their route is connected, by the threads that make them; a
connector sends what waited. It is decided about calls in the reactor, and there they end: what
follows a call may be the application's.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
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
    ONLY_THERE,
    GiveUp,
    Retry,
    RetryBudget,
    RetryPolicy,
    RetryState,
    is_retriable,
)
from prpc_engine.client.route import Route, Sought
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import NEVER, SENDING_LOOKS_MAX, SENDING_S, Call, CallOwner
from prpc_engine.rpc.context import inherited_s, wait_in_ms
from prpc_engine.rpc.marks import KnownMarks
from prpc_engine.rpc.message import REPEAT
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.server import DESCRIBE
from prpc_engine.rpc.stream import StreamCall
from shard import VALUE, Future, ShardError, Timer, control_loop, yield_now

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
        self.budget = RetryBudget(guard=threading.Lock())
        self._client = client
        self._directory = directory
        self._balancer = directory.balancer
        self._node = node
        self._reactor = node.reactor
        self._policy = policy
        self._random = random
        # a call of a named server; others are as quick by that policy itself
        self.fails_at_once = policy.unsent_max == 1
        self._closed = False
        self._quiet_until = 0.0  # nothing is said of calls that wait
        # Of what follows, and of Route.waiting: a thread that makes a call hears of Backpressure at
        # once, and its call keeps its place behind those that came before.
        self._guard = threading.Lock()
        # all that were here and are not finished; the timer of their deadline
        self._held: dict[Call, Timer | None] = {}
        self._unsent: dict[Call, int] = {}  # those of them that never left, and their bytes
        self._unsent_bytes = 0
        self._to_connect: deque[Route] = deque()
        self._connectors = 0
        self.marks = KnownMarks(idempotent)
        self.is_idempotent = self.marks.is_idempotent
        # who waits for the answer under way; None: nobody asked
        self._describing: list[Callable[[], object]] | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait here before they leave for the first time."""
        return len(self._unsent)

    # -- what could not be sent at once ------------------------------------------------------------

    def peer_at_once(self, route: Route) -> Peer | None:
        """The route's peer where that takes no waiting: its node is connected already, or in this
        process.
        """
        if isinstance(route, Sought) or self._closed:
            return None
        with self._guard:
            if route.waiting is None:
                route.peer = self._node.near_peer(route.addresses)
            return route.peer if route.waiting is None else None

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
        timeout_s = inherited_s(timeout_s, self._reactor.clock)
        wait_in_ms(timeout_s)
        body, blocks = self._node.archive.encode_arguments(args)
        if blocks and not stable:
            blocks = self._own(blocks)
        now = time.monotonic()
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
        with self._guard:
            count = len(self._unsent)
            if count >= limits.outbox_messages_max * servers or (
                count and self._unsent_bytes + size > limits.outbox_bytes_max * servers
            ):
                raise errors.Backpressure(
                    f"{call.asked[0]!r} was not sent to {call.asked[1]}: "
                    f"{count} calls of {self._unsent_bytes} bytes wait for a "
                    f"connection already, {limits.outbox_messages_max} calls or "
                    f"{limits.outbox_bytes_max} bytes for each of "
                    f"{servers} servers may (limits outbox_messages_max, outbox_bytes_max); "
                    "slow down, or retry later"
                )
            self._unsent[call] = size
            self._unsent_bytes += size
        self.hold(call)

    def hold(self, call: Call) -> None:
        """See to it that the call ends by its deadline and at close(), wherever it is."""
        if call in self._held:
            return
        self._held[call] = None
        call.add_done_callback(self._forget)
        if call.overall != NEVER:
            self._reactor.call_soon(partial(self._arm, call))
        if self._closed:
            call.end(self._closed_error())

    def _arm(self, call: Call) -> None:
        if not call.finished:
            self._held[call] = self._reactor.timers.call_at(
                call.overall, partial(self._expire, call)
            )
            if call.finished:  # meanwhile, by another thread
                self._forget(call)

    def _forget(self, call: Future) -> None:
        assert isinstance(call, Call)
        self._has_left(call)
        with self._guard:
            waiting = call.asked[1].waiting
            if waiting:
                waiting.pop(call, None)  # it may hold arrays, and the connector may hang for long
        timer = self._held.pop(call, None)
        if timer is not None:
            self._reactor.call_soon(timer.cancel)

    def _has_left(self, call: Call) -> None:
        with self._guard:
            self._unsent_bytes -= self._unsent.pop(call, 0)

    def _expire(self, call: Call) -> None:
        """The deadline of a call has come; one that is in flight is ended by the peer's table."""
        if call.finished or call.is_in_flight:
            return
        method, route = call.asked
        now = time.monotonic()
        is_unsent = call in self._unsent
        if is_unsent and route.waiting is not None and call.client is not None:
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
        if isinstance(route, Sought):
            self._directory.after_look(partial(self._found, call, route))
            return
        call.asked = call.asked[0], route
        begins = False
        with self._guard:
            peer = None if route.waiting is not None else route.peer
            if route.waiting is not None:
                route.waiting[call] = None
            elif peer is None or peer.lost:
                route.peer = peer = None
                route.waiting = {call: None}
                self._to_connect.append(route)
                begins = self._connectors < CONNECTORS_MAX
                self._connectors += begins
        if begins:
            control_loop().spawn(self._connect())
        if peer is not None:
            self._deliver(call, route, peer)
        else:
            self.hold(call)  # a hedged one was to leave at once (hedging.py)

    def _found(self, call: Call, sought: Sought, failure: BaseException | None) -> None:
        try:
            route = sought.find()
        except errors.NoServer as error:
            call.asked = call.asked[0], sought
            # without the master nobody knows if there is one
            call.set_error(_bare(failure or error))
        else:
            self.send(call, route)

    async def _connect(self) -> None:
        """A connector, in the control loop: one route after the other, until none is left."""
        while True:
            with self._guard:
                if not self._to_connect:
                    self._connectors -= 1
                    return
                route = self._to_connect.popleft()
            started = time.monotonic()
            try:
                peer = await self._node.reach(route.addresses, CONNECT_TIMEOUT_S, route.text)
            except errors.NotSent as error:
                told = errors.NotSent(f"{error} (tried for {time.monotonic() - started:.1f} s)")
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
        while calls := self._take_waiting(route, peer):
            for number, call in enumerate(calls, 1):
                self._deliver(call, route, peer)
                if call.blocks or not number % DELIVERED_MAX:
                    await yield_now()

    def _not_connected(self, route: Route, error: Exception) -> None:
        # for calls to that server alone, too: is it there at all?
        self._directory.after_look_if_stale(error, route, _ignore)
        for call in self._take_waiting(route, None):
            # each its own: what becomes of it is written into its text
            call.set_error(_bare(error))

    def _take_waiting(self, route: Route, peer: Peer | None) -> list[Call]:
        """What waits for the route now. When that is nothing, or there is no peer, nobody need wait
        any more.
        """
        with self._guard:
            calls = list(route.waiting or ())
            done = peer is None or not calls
            route.waiting = None if done else {}
            if done:
                route.peer = peer
            return calls

    def _deliver(self, call: Call, route: Route, peer: Peer) -> None:
        if call.finished:
            return
        now = time.monotonic()
        if now >= call.overall:
            self._reactor.call_soon(partial(self._expire, call))
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
        self._has_left(call)
        if self._balancer.ailing and client is not None:
            call.add_done_callback(self.answered)
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
        if self._closed or not (
            is_retriable(error) or (may_have_run and isinstance(error, errors.Rejected))
        ):
            return False
        if isinstance(error, errors.DeadlineExceeded) and call.state is None:
            now = time.monotonic()
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
        if not call.sent and looks:
            self._reactor.call_later(
                SENDING_S, partial(self._take_up, call, error, route, looks - 1)
            )
            return
        if call.overall != NEVER and self._held.get(call) is None:  # unknown when it was held
            self._arm(call)
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
        now = time.monotonic()
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
            self._reactor.call_later(decided.delay_s, again)
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
        call.end(self.state_of(call).final_error(error, GiveUp(ONLY_THERE), time.monotonic()))

    def state_of(self, call: Call) -> RetryState[Route]:
        """What is kept of a call that has failed at least once."""
        if call.state is None:
            call.state = RetryState(
                self._policy,
                self.budget,
                self._random,
                call.asked[0],
                call.sent or time.monotonic(),
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
            self._balancer.report(done.asked[1], Outcome.OK, time.monotonic())
        else:
            self.report(done.asked[1], done._outcome, time.monotonic())

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
            now = time.monotonic()
            ask = Call(
                self._node.waiter,
                asked=(DESCRIBE, route),
                body=body,
                sent=now,
                overall=now + DESCRIBE_TIMEOUT_S,
            )
            ask.add_done_callback(lambda done: self._reactor.call_soon(partial(told, done)))
            self.hold(ask)
            self.send(ask, route)
        if not routes:
            finish()

    # -- the end -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        self._node.check_process()

    def _closed_error(self) -> errors.Closed:
        return errors.Closed(f"the client of {self._directory.name!r} was closed here")

    def close(self) -> None:
        """End all calls and streams of this client with Closed; servers are told of those in
        flight. Connectors end by themselves, within CONNECT_TIMEOUT_S an address."""
        self._closed = True
        self._end_all()
        # those that another thread was about to enter
        self._reactor.call_later(SENDING_S, self._end_all)

    def _end_all(self) -> None:
        in_flight = [
            call for peer in self._node.peers() for call in list(peer.calls.in_flight.values())
        ]
        mine = self._directory
        for call in [
            *self._held,
            *(call for call in in_flight if getattr(call.asked[1], "owner", None) is mine),
        ]:
            call.withdraw()
            call.end(
                errors.Closed(
                    f"{self._closed_error()} while {call.asked[0]!r} of {call.asked[1]} was under "
                    "way"
                )
            )


def _ignore(failure: BaseException | None) -> None:
    """Nobody waits for that look."""


def _bare(error: BaseException) -> BaseException:
    """A copy without traceback and cause: their frames hold the call, which holds the error, until
    a collection of garbage. A bug keeps its traceback."""
    return copy.copy(error) if isinstance(error, errors.RpcError | ShardError) else error
