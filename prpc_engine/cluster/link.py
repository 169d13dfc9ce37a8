"""The way to one other task: found through its control address, then its data address; and what
waits for it.

    the queue (rpc/send_queue.py)  here
    down        offered            a coroutine of the control loop begins to connect
    connecting  (an attempt fails) what is not patient fails; while something waits, another attempt
    connecting  connected          what waits leaves, in turns of the data's reactor: encoding it
                                   would hold up the control loop
    connecting  gave up            what waits fails: nothing patient does, the time is over, or it
                                   is the wrong task
    draining    drained            what comes leaves at once
    up          lost               what is under way fails with TaskLost, by the peer's table
    any         (close)            what waits fails with Closed, and so does what comes; the
                                   coroutine is cancelled

Whatever waits has its own deadline, kept by rpc/pending.py until it leaves and by the peer's table
from then on. When to try again, and when to give up: patience.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.cluster.control import (
    CONTROL_TARGET,
    DATA_TARGET,
    HELLO,
    Facts,
    check_plan,
    check_task,
    data_addresses,
)
from prpc_engine.cluster.errors import TaskAbsent, TaskLost, TaskUnreachable, typed
from prpc_engine.cluster.patience import Patience
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import PASSED, Call
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.paths import Choice
from prpc_engine.rpc.peer import Peer
from prpc_engine.rpc.pending import PendingRequests
from prpc_engine.rpc.send_queue import QueueAction, QueueEvent, QueueState, SendQueue
from prpc_engine.settings.address import Address
from shard import (
    VALUE,
    Future,
    ShardError,
    Task,
    control_loop,
    run_blocking,
    runtime,
    sleep,
)

CONNECT_TIMEOUT_S = 5.0  # for one attempt at one address, and for the answer to hello()
WAITING_MAX = 65536  # requests for a task that is not connected
LEAVE_MAX = 64  # of them in one turn of the reactor, once it is: others have their turns meanwhile

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class LinkStatistics:
    """A snapshot of the connection to one other task: its state, its transport, and the requests
    that wait for it.
    """

    state: str  # "down", "connecting", "up"
    transport: str  # "" when it is not up
    # how it was chosen, and why not those before it; None when it is not up, or the task chose
    choice: Choice | None
    incarnation: int  # of the task when it was last connected; 0: never
    waiting: int  # requests that wait for the connection
    requests: int  # sent over it, or to be


Settle = Callable[[Any], object]  # told what a request brought after all, or None


class Errand(Future):
    """One request on its way to another task.

    `straggle`: what it brings must not be lost. When its deadline passes, or it is cancelled, its
    call stays under way; straggle() is called before anybody hears of that, and what it returns
    once the call has ended."""

    method: str = ""
    what: str = ""  # for texts
    # told the incarnation of the task; may raise
    arguments: Callable[[int], tuple[Any, ...]] | None = None
    deadline: float = 0.0
    is_patient: bool = True  # it waits while the task does not come up
    call: Call | None = None
    straggle: Callable[[], Settle] | None = None
    claims: list[bool] = []  # noqa: RUF012 - a Struct copies it; one where there is `straggle`: for who leaves the call behind
    late: Callable[[Errand, BaseException], bool] | None = None  # ends it; the link's

    def cancel(self, error: BaseException | None = None) -> bool:
        """Nobody waits for it any more; the task is told."""
        if self.finished:
            return False
        settle = None if self.straggle is None else self.straggle()
        ended = Future.cancel(self, error)
        # after its end: whoever sends it sets this, and looks for the end after that
        call = self.call
        if settle is not None:
            self._leave_behind(call if ended else None, settle, True)
        elif call is not None:
            call.cancel()
        return ended

    def failed(self, call: Call, error: BaseException) -> bool:
        """Told by its call instead of its end; True: the call stays pending."""
        if call.deadline != PASSED or self.straggle is None or self.late is None:
            return False
        settle = self.straggle()
        ended = self.late(self, error)
        call.outlive()
        self._leave_behind(call if ended else None, settle, False)
        return True

    def sent(self, call: Call, answered: Callable[[Future], object]) -> None:
        """Its request is on its way, and it may have ended meanwhile."""
        self.call = call
        call.when_done(answered)
        if not self.finished:
            return
        if self.straggle is None:
            call.cancel()
        elif self.finished != VALUE:
            self._leave_behind(call, self.straggle(), True)

    def _leave_behind(self, call: Call | None, settle: Settle, tells: bool) -> None:
        """The call goes on without the errand, once: two threads may find at the same time that it
        has ended. `tells`: the task does not know yet."""
        try:
            claim = self.claims.pop() if call is not None else None
        except IndexError:
            claim = None
        # another thread has ended it, or sends it still, and sees to this
        if call is None or claim is None:
            settle(None)
            return
        self.call = None
        call.when_done(lambda done: settle(done._outcome if done.finished == VALUE else None))
        if tells and call.table is not None:
            call.table.send_cancel(call.call_id)


class Link:
    """Connects to one other task when there is something to send, and sends it requests, one by
    one. Owned by a Server; thread-safe, and never waits.

    `task`, `control`  who that is, and where; `data`: by rule "file" or "offset"
    `me`               what to say of this side
    `on_failure`       called after each attempt that failed, before anybody is told, in a thread
                       that may block
    `patience_s`       how long what is patient waits for the task to come up, in seconds; then:
                       TaskUnreachable

    `peer`: of the last connection, in use while the link is DRAINING or UP; None once it is closed.
    States: the table at the file's head.
    """

    def __init__(
        self,
        task: str,
        control: Address,
        data: Address | None,
        me: Facts,
        control_node: Node,
        data_node: Node,
        patience_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self.task = task
        self._control, self._data, self._me = control, data, me
        self._control_node, self._data_node = control_node, data_node
        self._patience_s = patience_s
        self._on_failure = on_failure
        self._text = f"{task} at {control}"
        self._hello_route = FixedRoute(CONTROL_TARGET, task)
        self._route = FixedRoute(DATA_TARGET, task)
        self._queue: SendQueue[Errand] = SendQueue()
        # what waits: from the moment that it cannot be sent at once until it is
        self._pending: PendingRequests[Errand] = PendingRequests(
            data_node.reactor, self._expire, self._refuse
        )
        # of the last one that began, with the guard held, as is what follows from the queue's state
        self._connecting: Task | None = None
        self.peer: Peer | None = None
        self._requests = 0
        self._why = ""  # the last attempt to connect failed
        self.incarnation = 0

    @property
    def state(self) -> QueueState:
        """Whether the task is connected, as far as is known."""
        return self._queue.state

    def statistics(self) -> LinkStatistics:
        """A snapshot."""
        with self._pending.guard:
            self._look_for_loss()
            is_up = self.state in (QueueState.DRAINING, QueueState.UP)
            peer = self.peer if is_up else None
            return LinkStatistics(
                state="up" if is_up else self.state.name.lower(),
                transport=peer.connection.transport if peer is not None else "",
                choice=peer.choice if peer is not None else None,
                incarnation=self.incarnation,
                waiting=len(self._queue),
                requests=self._requests,
            )

    # -- requests ----------------------------------------------------------------------------------

    def submit(
        self,
        method: str,
        what: str,
        arguments: Callable[[int], tuple[Any, ...]],
        timeout_s: float,
        is_patient: bool = True,
        straggle: Callable[[], Settle] | None = None,
    ) -> Errand:
        """Ask the task; never waits. The errand, which says what `straggle` is, ends within
        `timeout_s`; with Closed, if the link is. Raises Backpressure."""
        self._requests += 1
        errand = Errand(
            self._data_node.waiter,
            method=method,
            what=what,
            arguments=arguments,
            deadline=runtime.monotonic() + timeout_s,
            is_patient=is_patient,
            straggle=straggle,
            late=self._late,
            claims=[True],
        )
        peer = self.peer
        # what the table says of UP, without its price: most requests come then
        if peer is not None and not peer.lost and self._queue.state is QueueState.UP:
            self._send(errand, peer)
            return errand
        if not self._pending.admit(errand, errand.deadline, WAITING_MAX):
            raise errors.Backpressure(
                f"{self._pending.unsent} requests wait for {self._text}, {WAITING_MAX} may; "
                "slow down"
            )
        errand.when_done(self._pending.end)
        with self._pending.guard:
            self._look_for_loss()
            actions, peer = self._pending.offer(errand, self._queue), self.peer
            if QueueAction.CONNECT in actions:
                self._begin(errand)
        if QueueAction.SEND in actions and peer is not None:
            self._leaves(errand, peer)
        return errand

    def _look_for_loss(self) -> None:
        """Nobody tells a link that its connection is lost, or left for a better path. With the
        guard held.
        """
        if self.state is QueueState.UP and self.peer is not None and self.peer.lost:
            self._pending.tell(self._queue, QueueEvent.LOST)

    def _begin(self, errand: Errand) -> None:
        """With the guard held."""
        try:
            # failpoint: link.connecting
            self._connecting = control_loop().spawn(self._connect())
        except BaseException:  # no descriptor, or no thread, for the loop: the next request may
            self._pending.tell(self._queue, QueueEvent.GAVE_UP)
            self._pending.end(errand)
            raise

    def _leaves(self, errand: Errand, peer: Peer) -> None:
        """It waits no longer."""
        self._pending.end(errand)
        if not errand.finished:
            self._send(errand, peer)

    def _send(self, errand: Errand, peer: Peer) -> None:
        # failpoint: link.sending
        left_s = errand.deadline - runtime.monotonic()
        try:
            assert errand.arguments is not None
            arguments = errand.arguments(self.incarnation)
            client = None if errand.straggle is None else errand
            call = peer.request(
                self._route,
                errand.method,
                method_key(errand.method),
                arguments,
                max(0.0, left_s),
                True,
                client,
            )
        except errors.NotSent as error:
            self._fail(errand, self._lost(errand, error))
            return
        except Exception as error:
            self._fail(errand, error)
            return
        errand.sent(call, partial(self._answered, errand))

    def _answered(self, errand: Errand, call: Future) -> None:
        errand.call = None
        if call.finished == VALUE:
            errand.set_result(call._outcome)
            return
        error = call._outcome
        if isinstance(error, errors.RemoteError):
            error = typed(error)
        elif isinstance(error, errors.MaybeExecuted | errors.NotSent):
            error = self._lost(errand, error)
        elif isinstance(error, errors.DeadlineExceeded):
            # The task counts from when the request came: what we ask next would find it waiting
            # still, and taking, for nobody.
            if isinstance(call, Call) and call.table is not None:
                call.table.send_cancel(call.call_id)
            self._late(errand, error)
            return
        errand.set_error(error)

    def _late(self, errand: Errand, error: BaseException) -> bool:
        return errand.set_error(
            errors.DeadlineExceeded(
                f"{errand.what} did not come from {self._text} in time: "
                "look what that task does (whether it sends the tensor, for this step and this "
                "task), or allow a larger timeout_s, which is timeout_in_ms of a TensorFlow step "
                f"({error})"
            )
        )

    def _lost(self, errand: Errand, error: BaseException) -> TaskLost:
        return TaskLost(
            f"{errand.what} was asked of {self._text}, which was lost: {error}; "
            "a tensor that was on its way is lost with the connection: begin another step"
        )

    def _fail(self, errand: Errand, error: BaseException) -> None:
        self._pending.settle(partial(errand.set_error, error))

    def _refuse(self, errand: Errand) -> None:
        errand.set_error(errors.Closed(f"{self.task} was not asked: this server was stopped here"))

    def _expire(self, errand: Errand) -> None:
        errand.set_error(
            errors.DeadlineExceeded(
                f"{errand.what} was not asked of {self._text} before the deadline: "
                f"it is not connected{self._why}; start it, "
                "allow a larger timeout_s, or look whether it can be reached"
            )
        )

    # -- connecting, in the control loop -----------------------------------------------------------

    async def _connect(self) -> None:
        try:
            peer = await self._meet_in_time()
        except errors.NotAPeer as error:  # to wait does not help
            self._give_up(
                errors.ConfigError(
                    f"{error}; start {self.task} with the protocol of this task, "
                    "or mend the cluster"
                )
            )
        except Exception as error:
            # another cluster, another secret, closed, nobody there; or a bug, which those that wait
            # must hear of
            self._give_up(self._failure(error))
        else:
            if peer is not None:
                self._connected(peer)

    async def _meet_in_time(self) -> Peer | None:
        """Try until the task is there; None: nothing waits for it any more. Raises TaskUnreachable
        when its time is over, and what another attempt would not change.
        """
        patience = Patience(runtime.monotonic(), self._patience_s)
        while True:
            try:
                peer = await self._meet()
            except Exception as error:
                await run_blocking(self._on_failure)
                if isinstance(error, errors.NotAPeer) or not isinstance(
                    error, errors.NotSent | errors.MaybeExecuted | errors.DeadlineExceeded
                ):
                    raise
                self._why = f" ({error})"
                now = runtime.monotonic()
                text = (
                    f"{self._text} does not answer ({patience.waited_s(now):.1f} s): {error}; "
                    "start it, or allow more time by "
                    f"NETWORK_MAX_CONNECTION_TIMEOUT, which is {self._patience_s * 1e3:.0f} ms"
                )
                pause_s = patience.pause_s(now)
                if pause_s is None:
                    raise TaskUnreachable(text) from None
                if not self._goes_on(TaskAbsent(text)):
                    return None
                if patience.failed == 1:
                    logger.warning(
                        "waiting for %s, for up to %.3g s: %s",
                        self._text,
                        self._patience_s,
                        str(error),
                    )
            else:
                self._why = ""
                if patience.failed:
                    logger.info(
                        "%s is connected, after %.3g s",
                        self._text,
                        patience.waited_s(runtime.monotonic()),
                    )
                return peer
            await sleep(pause_s)

    async def _meet(self) -> Peer:
        """Ask who is there, connect to its data address, and ask again: it may have been started
        anew in between.
        """
        facts = await self._ask_facts()
        peer = await self._data_node.reach(
            data_addresses(facts, self._control, self._data),
            CONNECT_TIMEOUT_S,
            f"data of {self._text}",
        )
        if (await self._ask_facts()).incarnation != facts.incarnation:
            raise errors.NotSent(f"{self.task} was started again while it was connected to")
        self.incarnation = facts.incarnation
        return peer

    async def _ask_facts(self) -> Facts:
        control = await self._control_node.reach(
            [f"tcp://{self._control}"], CONNECT_TIMEOUT_S, self._text
        )
        me = self._me
        call = control.request(
            self._hello_route,
            HELLO,
            method_key(HELLO),
            (me.plan, me.task, me.incarnation),
            CONNECT_TIMEOUT_S,
            True,
        )
        try:
            facts = Facts.read(await call, self._control)
        except errors.UnknownService:
            raise errors.NotSent(
                f"the process that listens at {self._control} is no task of a cluster, "
                "or has not started yet"
            ) from None
        check_plan(me.plan, me.task, facts.plan, self.task)
        check_task(facts, self.task, self._control)
        return facts

    def _connected(self, peer: Peer) -> None:
        with self._pending.guard:
            self._pending.tell(self._queue, QueueEvent.CONNECTED)
            if self._pending.is_closed:
                return
            self.peer = peer  # before anybody can have an answer, and asks what it came over
        self._data_node.reactor.call_soon(partial(self._drain, peer))

    def _drain(self, peer: Peer) -> None:
        """Some of what waits leaves, in each turn of the data's reactor."""
        errands = self._pending.take(self._queue, LEAVE_MAX)
        for errand in errands:
            self._leaves(errand, peer)
        if errands:
            self._data_node.reactor.call_soon(partial(self._drain, peer))

    def _failure(self, error: Exception) -> errors.RpcError:
        """What to tell those that wait, of what no attempt should raise."""
        if isinstance(error, errors.RpcError):
            return error
        if isinstance(error, ShardError):
            return errors.Closed(f"{self.task} was not asked: {error}")
        logger.error(
            "connecting to %s failed: %s: %s", self._text, type(error).__name__, str(error)
        )
        return errors.RpcError(f"{self._text} was not asked: {type(error).__name__}: {error}")

    def _goes_on(self, error: errors.RpcError) -> bool:
        """After an attempt: what is not patient fails; whether anything else waits. If not,
        whatever comes next begins anew.
        """
        with self._pending.guard:
            failing = self._pending.pick(self._queue, lambda errand: not errand.is_patient)
            goes_on = len(self._queue) > 0
            if not goes_on:
                self._pending.tell(self._queue, QueueEvent.GAVE_UP)
        for errand in failing:
            self._fail(errand, error)
        # failpoint: link.attempted
        return goes_on

    def _give_up(self, error: errors.RpcError) -> None:
        for errand in self._pending.tell(self._queue, QueueEvent.GAVE_UP):
            self._fail(errand, error)

    def close(self) -> None:
        """Ask no more; what waits fails. While the reactor still turns. From any thread; it does
        not wait.
        """
        self._pending.close()
        with self._pending.guard:
            connecting, self.peer = self._connecting, None
        if connecting is not None:
            connecting.cancel()
