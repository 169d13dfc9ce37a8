"""A client's session at the master: opened, kept by heartbeats, taken up again after a lost
connection, replaced when it expired. Its states: session_states.py.

What is asked of the master outlives connections. Resumed within the lease, everything that the
session owns is still there, and what was not answered is asked again. Once the lease was over, a
new session has joined and registered again before anything else is asked over it; see UNSAFE.

    where             what runs there                          what is its own
    control loop      the keeper: connects, opens, waits for   number, token, when to try again
                      the loss of the connection; heartbeats
    the node's        requests: sent, answered, late; what is  the connection in use, the requests,
     reactor          registered again                         the registration
    any thread        submit() enters a request; close()       nothing

The state is changed in all three, under a guard.

So heartbeats go on while a handler has the reactor, and a thread that asks and waits turns the
reactor itself: its question and its answer change threads for nobody. The control loop hands a
connection over by a step in the reactor, and is told of its loss by a future.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.master.opening import CONNECT_TIMEOUT_S, Opening
from prpc_engine.master.protocol import ANSWER_S, MASTER_ROUTE
from prpc_engine.master.refusals import refusal
from prpc_engine.master.registration import Registration
from prpc_engine.master.registry import DEFAULT_API
from prpc_engine.master.session_states import (
    SESSIONS,
    SessionAction,
    SessionEvent,
    SessionState,
)
from prpc_engine.node.node import Node
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.pending import PendingRequests, RequestPlace
from prpc_engine.rpc.send_queue import QueueAction, QueueEvent, QueueState, SendQueue
from prpc_engine.settings.config import DEFAULT_ROOT, LEASE_S, LEASE_S_MAX, LEASE_S_MIN
from shard import CancelledError, Future, control_loop, runtime, sleep

logger = logging.getLogger("prpc")
HEARTBEATS_PER_LEASE = 5  # so that some may be late on a busy machine
OPEN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0  # for the master to hear that we close; it finds out by itself later
ASK_TIMEOUT_S = 30.0
# After a question's deadline, for the reactor to end it: then the thread that waits does.
LATE_S = 0.5
# Asked and not answered: while the master is away they wait here. More than the master holds for
# one of its servers.
REQUESTS_MAX = 65536

# May have been done, and would be done twice or differently, when asked again over another session
# than before.
UNSAFE = frozenset(
    {
        "barrier",
        "alloc_role_rank",
        "tree_node_gen",
        "tree_node_add",
        "tree_node_set",
        "tree_node_del",
        "tree_clear_path",
    }
)
# leave something at the master until it is given up
CLAIMING = frozenset({"acquire_lock", "barrier", "alloc_role_rank"})
GIVING_UP = "forget"
# the master itself answers them at their deadline, and says what is missing
WAITING = CLAIMING | {"lookup", "tree_wait"}
ASK, OPEN, HEARTBEAT, END = (
    method_key(name) for name in ("ask", "open_session", "heartbeat", "end_session")
)


def check_lease(lease_s: float, heartbeat_s: float | None) -> float:
    """The heartbeat's interval. Raises ConfigError."""
    if not (errors.is_number(lease_s) and LEASE_S_MIN <= lease_s <= LEASE_S_MAX):
        raise errors.ConfigError(
            f"lease_s={lease_s!r}: {LEASE_S_MIN} to {LEASE_S_MAX:.0f} seconds are allowed"
        )
    if heartbeat_s is None:
        return lease_s / HEARTBEATS_PER_LEASE
    if not (errors.is_number(heartbeat_s) and 0.0 < heartbeat_s <= lease_s / 2):
        raise errors.ConfigError(
            f"heartbeat_s={heartbeat_s!r}: up to half of lease_s={lease_s!r} is allowed"
        )
    return heartbeat_s


@dataclass(eq=False)
class _Request:
    """Something asked, until it is answered."""

    number: int
    verb: str
    arguments: tuple[Any, ...]
    asked: float  # when, by runtime.monotonic()
    timeout_s: float
    future: Future
    session: int = 0  # over which it was sent last

    @property
    def deadline(self) -> float:
        return self.asked + self.timeout_s


class MasterSession:
    """Asks the master verbs over a session, keeps its lease, and opens it again after a lost
    connection. Owned by who made the node (an RpcService, a MasterClient, a shard), and closed
    before it.

    opened          a future: done when the master answered for the first time, or with what kept it
                    from that
    open_timeout_s  for that first time: until then it is tried again and again, as the master may
                    start later than its clients. What waiting cannot mend (another secret, another
                    protocol) ends it at once
    state           by the table of session_states.py; read by anyone
    """

    def __init__(
        self,
        node: Node,
        address: str,
        lease_s: float = LEASE_S,
        heartbeat_s: float | None = None,
        root: str = DEFAULT_ROOT,
        label: str = "",
        open_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.node = node
        self.address = address
        self.number = 0
        # In the reactor: a connection, and whether over a new session
        self.on_open: Callable[[Peer, bool], None] = _ignore
        # the same, and how many notifications there should have been
        self.on_heartbeat: Callable[[Peer, int], None] = _ignore
        self.opened = Future(node.waiter)
        self._heartbeat_s = check_lease(lease_s, heartbeat_s)
        self._lease_s = float(lease_s)
        self._root = root
        self._open_timeout_s = open_timeout_s
        self._label = label or f"process {runtime.pid()}"
        self._token = ""
        self._home = runtime.this_process()
        # What is not answered; what comes back after a loss goes before what was asked later.
        self._pending: PendingRequests[_Request] = PendingRequests(
            node.reactor, self._overdue, self._refuse
        )
        self._queue: SendQueue[_Request] = SendQueue(order=lambda request: request.number)
        # Of the next two, with the guard of what is pending held: a loss that the reactor finds
        # must not undo a close() of another thread, and what submit() enters must be there before
        # close() ends what is, or be refused.
        self.state = SESSIONS.initial
        self._peer: Peer | None = None  # the connection in use, while it is UP
        self._numbers = itertools.count(1)
        self._lost = Future()  # done with the connection in use
        self._joined: Registration | None = None
        self._anew = False  # the session is new and what was joined has to be made again
        self._last_error = ""
        node.on_peer_lost = partial(self._peer_lost, node.on_peer_lost)
        self._keeper = control_loop().spawn(self._keep())
        # failpoint: session.made

    @property
    def connected(self) -> bool:
        """Whether there is a connection with a session now."""
        return self.state is SessionState.UP

    @property
    def peer(self) -> Peer | None:
        """That connection. In the reactor: there it changes."""
        return self._peer

    def _after(self, event: SessionEvent) -> tuple[SessionAction, ...]:
        with self._pending.guard:
            self.state, actions = SESSIONS.after(self.state, event)
            return actions

    # -- asking ------------------------------------------------------------------------------------

    def submit(self, verb: str, *arguments: Any, timeout_s: float = ASK_TIMEOUT_S) -> Future:
        """The future of a verb's answer. It outlives connections, and ends soon after `timeout_s`
        in any case.
        """
        self.node.check_process()  # the guard may be held in a fork, for good
        # failpoint: session.submitting
        future = Future(self.node.waiter)
        with self._pending.guard:
            actions = self._after(SessionEvent.ASKED)
            if SessionAction.REFUSE in actions:
                raise errors.Closed(
                    f"{verb!r} was asked of the master at {self.address}, "
                    "but this client was closed before"
                )
            if len(self._pending) >= REQUESTS_MAX and verb != GIVING_UP:
                raise errors.Backpressure(
                    f"{verb!r} was not asked of the master at {self.address}: "
                    f"{len(self._pending)} verbs wait for its answers, "
                    f"{REQUESTS_MAX} may; wait for some of them first"
                )
            # In one step, so that verbs come to the master in the order of their numbers: it takes
            # one that is older than all it remembers for one that it has forgotten.
            number = next(self._numbers)
            request = _Request(number, verb, arguments, runtime.monotonic(), timeout_s, future)
            # It begins (once the guard is free) before its deadline is looked at, which may be now:
            # timeout_s=0.0 asks, and waits for nothing but the answer.
            self.node.reactor.call_soon(partial(self._begin, request))
            self._pending.hold(request, request.deadline)
        return future

    def ask(self, verb: str, *arguments: Any, timeout_s: float = ASK_TIMEOUT_S) -> Any:
        """As submit(), and wait for it."""
        asked = self.submit(verb, *arguments, timeout_s=timeout_s)
        try:
            answer_s = ANSWER_S if verb in WAITING else 0.0
            return asked.result(timeout_s + answer_s + LATE_S)
        except TimeoutError:
            if asked.done():  # that is the answer, or has just come
                return asked.result()
        asked.set_error(
            errors.DeadlineExceeded(
                f"{verb!r} was not answered by the master at {self.address} in time, and no answer "
                "could be taken: a handler of this process, or a callback of a future, keeps its "
                "reactor; the log of stalls names it"
            )
        )
        return asked.result()

    def _begin(self, request: _Request) -> None:
        if request.verb == "deregister_server" and self._joined is not None:
            request.arguments = (self._joined.take_back(*request.arguments),)
        self._offer(request)

    def _offer(self, request: _Request) -> None:
        """It goes over the connection, or waits for the next one, which the keeper sees to."""
        if QueueAction.SEND in self._pending.offer(request, self._queue):
            self._send(request)

    def _send(self, request: _Request) -> None:
        peer = self._peer
        if peer is None:  # lost with what went before it, or closed: then _end() ends it
            self._pending.offer(request, self._queue)
            return
        if request.session not in (0, self.number) and request.verb in UNSAFE:
            self._finish(request, self._maybe(request, "the session expired meanwhile"))
            return
        if not self._pending.sending(request):
            return
        request.session = self.number
        # failpoint: session.asking
        left_s = max(0.0, request.deadline - runtime.monotonic())
        answer_s = ANSWER_S if request.verb in WAITING else 0.0
        asked = (request.number, request.verb, list(request.arguments), left_s)
        try:
            call = peer.request(MASTER_ROUTE, "ask", ASK, asked, left_s + answer_s, False)
        except (errors.NotSent, errors.Closed) as error:
            self._send_over_the_next(request, peer, error)
        except errors.RpcError as error:
            self._finish(request, error)
        else:
            call.when_done(partial(self._answered, request, peer))

    def _send_again(self, request: _Request) -> None:
        self._pending.hold(request, request.deadline)
        self._offer(request)

    def _send_over_the_next(self, request: _Request, peer: Peer, error: errors.RpcError) -> None:
        """Its connection is lost: it goes over the next one, which may be there already."""
        self._last_error = str(error)
        self._lose(peer)
        self._send_again(request)

    def _answered(self, request: _Request, peer: Peer, call: Future) -> None:
        # failpoint: session.answered
        error = call.error()
        if error is None:
            self._finish(request, None, call.result())
            return
        if isinstance(error, errors.RemoteError):
            kind = error.type_name.rpartition(".")[2]
            if kind == "SessionExpired":
                # it was refused before it began, or what it waited for went with the session
                request.session = 0
                self._lose(peer)
                self._send_again(request)
            else:
                asked = f"{self._asked(request)} at the master at {self.address}"
                self._finish(request, refusal(asked, runtime.monotonic() - request.asked, error))
        elif isinstance(error, errors.MaybeExecuted | errors.NotSent | errors.Closed):
            self._send_over_the_next(request, peer, error)
        elif isinstance(error, errors.DeadlineExceeded) and request.verb == GIVING_UP:
            self._renew(request)
            self._send_again(request)
        elif isinstance(error, errors.DeadlineExceeded):
            self._finish(request, self._late(request))
        else:
            self._finish(request, error)

    def _finish(self, request: _Request, error: BaseException | None, answer: Any = None) -> None:
        if not self._pending.end(request):
            return
        if error is None:
            was_heard = request.future.set_result(answer)
            if not was_heard and request.verb in CLAIMING:  # ask() had waited long enough
                self._give_up(request)
            return
        if request.verb in CLAIMING and request.session and not isinstance(error, errors.Rejected):
            self._give_up(request)
        request.future.set_error(error)

    def _give_up(self, request: _Request) -> None:
        """Nobody waits any more for what may have been claimed: let others have it, however long
        the master is away.
        """
        try:
            self.submit(GIVING_UP, request.number)
        except errors.Closed:
            return  # it goes with the session

    def _overdue(self, request: _Request) -> None:
        """Its deadline has come, and it is not under way: of what is, the connection says so."""
        # failpoint: session.overdue
        if request.verb == GIVING_UP:
            self._renew(request)
        else:
            self._finish(request, self._late(request))

    def _renew(self, request: _Request) -> None:
        """It goes on: what it gives up may be a lock that others wait for as long as we live."""
        request.asked = runtime.monotonic()
        self._pending.until(request, request.deadline)

    def _refuse(self, request: _Request) -> None:
        text = f"this side closed its session at the master at {self.address} meanwhile"
        self._finish(request, errors.Closed(text))

    # -- errors ------------------------------------------------------------------------------------

    def _asked(self, request: _Request) -> str:
        shown = ", ".join(repr(one) for one in request.arguments)
        return f"{request.verb}({shown[:200]})"

    def _late(self, request: _Request) -> errors.RpcError:
        after_s = runtime.monotonic() - request.asked
        if self._pending.place(request) is RequestPlace.UNDER_WAY:
            return errors.DeadlineExceeded(
                f"{self._asked(request)} was not answered by the master at {self.address} after "
                f"{after_s:.3f} s: it is stopped "
                "or overloaded; look at it, or allow a larger timeout_s"
            )
        if request.session:
            return self._maybe(request, f"it did not come back within {after_s:.3f} s")
        return errors.MasterUnreachable(
            f"{self._asked(request)} was not asked: no master answers at {self.address} for "
            f"{after_s:.3f} s ({self._last_error}); start it again there with the same --journal"
        )

    def _maybe(self, request: _Request, why: str) -> errors.RpcError:
        return errors.MaybeExecuted(
            f"{self._asked(request)} was sent to the master at {self.address}, which was lost; "
            f"{why} ({self._last_error}): it may have been done; look before you ask again"
        )

    # -- the node and its servers ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """What join() got; another one if the session had to be replaced and the rank was given
        away meanwhile.
        """
        return self._joined.rank if self._joined is not None else -1

    def join(
        self, addresses: list[str], shard_of: int = -1, timeout_s: float = ASK_TIMEOUT_S
    ) -> Future:
        """The future of this node's rank;
        shard_of is the rank of the node that a shard belongs to.
        """

        def joined(rank: int) -> None:
            # failpoint: session.joined
            self._joined = Registration(addresses, shard_of, rank, self.node.servers)

        return self._when_noted(
            joined, self.submit("join", addresses, shard_of, -1, timeout_s=timeout_s)
        )

    def prepare_server(
        self, service: str, server_id: int, timeout_s: float = ASK_TIMEOUT_S
    ) -> Future:
        """The future of [server id, target] for register_server(). The node is to answer to that
        target by then.
        """
        return self.submit("prepare_server", service, server_id, timeout_s=timeout_s)

    def register_server(
        self, service: str, server_id: int, target: int, timeout_s: float = ASK_TIMEOUT_S
    ) -> Future:
        """The future of its end: others hear of that server, which prepare_server() gave a target.
        Should the session be replaced it is registered again; the node then answers to two targets.
        """

        def registered(_: object) -> None:
            if self._joined is not None:
                self._joined.registered(service, server_id, target, next(self._numbers))

        server = self.node.servers.get(target)
        marks = None if server is None else server.marks()
        asked = self.submit(
            "register_server",
            service,
            server_id,
            DEFAULT_API,
            -1,
            target,
            marks,
            timeout_s=timeout_s,
        )
        # failpoint: session.registering
        asked.when_done(partial(self._take_back_unheard, target))
        return self._when_noted(registered, asked)

    def _take_back_unheard(self, target: int, asked: Future) -> None:
        """Who asked gives up, and the master may have done it, or do it yet: then it would tell
        others of what nobody serves.
        """
        if isinstance(asked.error(), errors.DeadlineExceeded | errors.MaybeExecuted):
            with contextlib.suppress(errors.Closed, errors.Backpressure):
                self.submit("deregister_server", target)

    def _when_noted(self, noted: Callable[[Any], object], asked: Future) -> Future:
        """The future of the same answer once noted(answer) was called: whoever waits for `asked`
        itself may go on before that.
        """
        ended = Future(self.node.waiter)

        def end(done: Future) -> None:
            try:
                noted(done.result())
            except Exception as error:
                ended.set_error(error)
            else:
                ended.set_result(done.result())

        asked.when_done(end)
        return ended

    def deregister_server(self, target: int, timeout_s: float = ASK_TIMEOUT_S) -> Future:
        """The future of whether the master knew it;
        `target` is the one that prepare_server() gave.
        """
        return self.submit("deregister_server", target, timeout_s=timeout_s)

    def _now(self, peer: Peer, number: int, verb: str, *arguments: Any) -> Future:
        return peer.request(
            MASTER_ROUTE, "ask", ASK, (number, verb, list(arguments), 0.0), OPEN_TIMEOUT_S, False
        )

    # -- the keeper, in the control loop -----------------------------------------------------------

    async def _keep(self) -> None:
        opening = Opening(runtime.monotonic(), self._open_timeout_s)
        while True:
            try:
                peer, lost = await self._open(opening.attempt_s)
            except CancelledError:  # close()
                raise
            except Exception as error:  # whatever it is, somebody has to go on trying
                if not isinstance(error, errors.RpcError):
                    logger.exception(
                        "unexpected error in the session at the master at %s; it is tried again",
                        self.address,
                    )
                self._last_error = str(error).partition("\n")[0]
                is_new = self.state is SessionState.NEW
                again = opening.failed(error, runtime.monotonic(), runtime.random(), is_new)
                if again is None:
                    event = SessionEvent.GIVEN_UP
                elif not is_new and isinstance(error, errors.AuthenticationFailed):
                    event = SessionEvent.REFUSED
                else:
                    event = SessionEvent.FAILED
                actions = self._after(event)
                if SessionAction.TELL in actions:
                    self.node.reactor.call_soon(partial(self.opened.set_error, error))
                if SessionAction.FAIL in actions:
                    self.node.reactor.call_soon(partial(self._fail_waiting, error))
                if again is None or SessionAction.TRY_AGAIN not in actions:
                    return
                if again.is_first:
                    told = self.address, self._open_timeout_s, self._last_error
                    logger.warning("waiting for the master at %s, for up to %.3g s: %s", *told)
                await sleep(again.delay_s)
            else:
                opening.opened()
                beats = control_loop().spawn(self._beat(peer))
                try:
                    await lost
                finally:
                    beats.cancel()

    async def _open(self, attempt_s: float) -> tuple[Peer, Future]:
        """Connect, and open the session over that: the connection, and what is done when it is
        lost.
        """
        # failpoint: session.opening
        peer = await self.node.reach_master(self.address, attempt_s)
        anew = False
        if self.number:
            try:
                await self._open_session(peer, self.number, self._token, attempt_s)
            except errors.RemoteError as error:
                if error.type_name.rpartition(".")[2] != "SessionExpired":
                    raise
                anew = True
                logger.warning(
                    "the master at %s: %s; joining anew", self.address, error.remote_message
                )
        if anew or not self.number:
            await self._open_session(peer, 0, "", attempt_s)
            self._anew = self._anew or anew
        if self._anew:
            await self._in_reactor(partial(self._register_anew, peer, self._token))
        lost = Future()
        await self._in_reactor(partial(self._take_up, peer, lost, self._anew))
        self._anew = False
        # failpoint: session.opened
        return peer, lost

    async def _open_session(self, peer: Peer, number: int, token: str, attempt_s: float) -> None:
        # failpoint: session.asking_to_open
        arguments = (number, token, self._lease_s, self._root, self._label, self._home)
        opening = peer.request(MASTER_ROUTE, "open_session", OPEN, arguments, attempt_s, False)
        try:
            answer = await opening
            # failpoint: session.was_opened
            self.number, self._token, _ = answer
        except errors.DeadlineExceeded:
            # it may be opened yet, over this connection, which can then have no other one
            self.node.reactor.call_soon(peer.connection.close)
            raise

    async def _beat(self, peer: Peer) -> None:
        """Heartbeats over that connection."""
        while True:
            await sleep(self._heartbeat_s)
            try:
                beat = peer.request(MASTER_ROUTE, "heartbeat", HEARTBEAT, (), self._lease_s, False)
            except errors.RpcError as error:  # the next one may get through
                self._last_error = str(error)
            else:
                beat.when_done(partial(self._heard_soon, peer))

    async def _in_reactor(self, begin: Callable[[Future], object]) -> None:
        """Call begin(done) in the reactor's thread, and await `done`, which it completes, then or
        later.
        """
        done = Future(self.node.waiter)

        def run() -> None:
            try:
                begin(done)
            except Exception as error:
                done.set_error(error)

        self.node.reactor.call_soon(run)
        await done

    # -- the connection, in the reactor ------------------------------------------------------------

    def _register_anew(self, peer: Peer, token: str, done: Future) -> None:
        """Join and register again over a connection that has a new session."""
        if self._joined is None:
            done.set_result(None)
            return
        self._go_on_registering(peer, self._joined.anew(token), None, done)

    def _go_on_registering(
        self, peer: Peer, steps: Generator[Any, Any, None], before: Future | None, done: Future
    ) -> None:
        error = None if before is None else before.error()
        try:
            if error is not None:
                asked = steps.throw(error)
            else:
                asked = steps.send(None if before is None else before.result())
            answer = self._now(peer, *asked)
        except StopIteration:
            done.set_result(None)
        except Exception as failure:
            done.set_error(failure)
        else:
            # failpoint: session.registering_anew
            answer.when_done(lambda answered: self._go_on_registering(peer, steps, answered, done))

    def _take_up(self, peer: Peer, lost: Future, anew: bool, done: Future) -> None:
        """From now on this is the connection; what waits is asked over it."""
        # failpoint: session.taking_up
        if peer.lost:
            raise errors.NotSent(f"the connection to the master at {self.address} was lost again")
        self.on_open(peer, anew)  # first, as it may fail: then the keeper tries again
        with self._pending.guard:
            actions = self._after(SessionEvent.OPENED)
            if SessionAction.SEND in actions:
                self._peer, self._lost = peer, lost
                is_awaited = self._queue.state is QueueState.CONNECTING
                event = QueueEvent.CONNECTED if is_awaited else QueueEvent.FOUND
                self._pending.tell(self._queue, event)
        if SessionAction.SEND in actions:
            self.opened.set_result(None)
            self.node.reactor.call_soon(self._drain)
        done.set_result(None)
        # failpoint: session.taken_up

    def _drain(self) -> None:
        """What waits is asked over the new connection."""
        while self._queue.state is QueueState.DRAINING:
            for request in self._pending.take(self._queue):
                self._send(request)

    def _heard_soon(self, peer: Peer, beat: Future) -> None:
        # it may have been answered before the control loop asked to be told
        self.node.reactor.call_soon(partial(self._heard, peer, beat))

    def _heard(self, peer: Peer, beat: Future) -> None:
        error = beat.error()
        if error is None:
            self.on_heartbeat(peer, beat.result())
        elif peer is self._peer:
            if isinstance(error, errors.RemoteError):
                self._lose(peer)
            elif isinstance(error, errors.DeadlineExceeded):
                self._last_error = f"no heartbeat was answered within {self._lease_s} s"
                peer.connection.close()

    def _lose(self, peer: Peer) -> None:
        """That connection is over, or has no session; told more than once."""
        with self._pending.guard:
            if peer is not self._peer:
                return
            self._peer = None
            self._after(SessionEvent.LOST)
            self._pending.tell(self._queue, QueueEvent.LOST)
        self._lost.set_result(None)

    def _peer_lost(self, before: Callable[[Peer], None], peer: Peer) -> None:
        self._lose(peer)
        before(peer)

    async def direct(self, peer: Peer | None, method: str, *arguments: Any) -> Any:
        """One method of protocol.py over that connection, once. Raises NotSent where there is none.
        For coroutines of the control loop.
        """
        if peer is None:
            raise errors.NotSent(f"there is no connection to the master at {self.address} now")
        # failpoint: session.looking
        return await peer.request(
            MASTER_ROUTE, method, method_key(method), arguments, ANSWER_S, False
        )

    # -- the end -----------------------------------------------------------------------------------

    def _fail_waiting(self, error: BaseException) -> None:
        if self._queue.state is QueueState.CONNECTING:
            for request in self._pending.tell(self._queue, QueueEvent.GAVE_UP):
                self._finish(request, error)

    def _end(self) -> None:
        self._pending.close()
        self.opened.set_error(
            errors.Closed(f"this side was closed while it waited for the master at {self.address}")
        )

    def close(self) -> None:
        """Tell the master, so that what we own goes at once; end what waits. From any thread, and
        never for long. A second close, or one in a fork, does nothing.
        """
        if self.node.pid != os.getpid():
            return
        with self._pending.guard:
            actions = self._after(SessionEvent.CLOSE)
            peer, self._peer = self._peer, None
            if peer is not None:
                self._pending.tell(self._queue, QueueEvent.LOST)
        if SessionAction.END not in actions:
            return
        may_wait = self.node.waiter is not None and not control_loop().is_here()
        try:
            if SessionAction.LEAVE in actions and peer is not None:
                ending = peer.request(MASTER_ROUTE, "end_session", END, (), CLOSE_TIMEOUT_S, False)
                if may_wait:
                    ending.result(CLOSE_TIMEOUT_S)
        except (errors.RpcError, TimeoutError) as error:
            logger.info(
                "the master at %s was not told that this client closes: %s",
                self.address,
                str(error),
            )
        finally:  # interrupted, too
            self.node.reactor.call_soon(self._end)
            self._keeper.cancel()
        if may_wait:
            with contextlib.suppress(TimeoutError):
                self._keeper.error(CLOSE_TIMEOUT_S)


def _ignore(*_: Any) -> None:
    """Nobody watches."""
