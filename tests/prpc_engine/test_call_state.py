"""The life of a call: the table by itself, and calls of a CallTable that are driven beside it, by
the steps that Peer takes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prpc_engine.errors import Closed, DeadlineExceeded, MaybeExecuted, NotSent, RpcError
from prpc_engine.rpc.call import NEVER, Call, CallTable
from prpc_engine.rpc.call_state import CALL_STATES, CallAction, CallEvent, CallState
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.server import ServedObject
from shard import VALUE
from tests.examples import examples
from tests.helpers import ManualClock
from tests.prpc_engine.peers import TARGET, Pair
from tests.state_walks import Walk, walks

DONE = (CallState.ANSWERED, CallState.FAILED)
IN_TABLE = (CallState.SENDING, CallState.IN_FLIGHT)
# what an owner says within failed(): the next event after an attempt has failed
ANSWERS = (CallEvent.KEPT, CallEvent.OUTLIVED, CallEvent.GIVEN_UP)


class CallLife(RuleBasedStateMachine):
    """Any sequence of events, and what the actions come to."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CALL_STATES.initial
        self.done: list[CallAction] = []
        self.is_in_table = False

    @rule(data=st.data())
    def an_event(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(CALL_STATES.events(self.state)))
        before = self.state
        self.state, actions = CALL_STATES.after(before, event)
        for action in actions:
            if action is CallAction.ENTER:
                assert not self.is_in_table
                self.is_in_table = True
            elif action is CallAction.TAKE_OUT:
                assert self.is_in_table
                self.is_in_table = False
        if before in DONE:
            assert self.state is before, "a call ends once"
            assert CallAction.COUNT in actions or not actions, "what comes later changes nothing"
        self.done += actions

    @invariant()
    def it_ends_once_and_is_in_one_place(self) -> None:
        assert self.done.count(CallAction.COMPLETE) == (self.state in DONE)
        assert self.is_in_table == (self.state in IN_TABLE)


TestCallLife = CallLife.TestCase
TestCallLife.settings = settings(max_examples=examples(200), stateful_step_count=20, deadline=None)


def life_of(call: Call) -> CallState:
    """By what is stored of it. FAILING is over when failed() returns."""
    if call.finished:
        return CallState.ANSWERED if call.finished == VALUE else CallState.FAILED
    if call.table is None or call.call_id not in call.table.in_flight:
        return CallState.WAITING
    return CallState.IN_FLIGHT if call.sent else CallState.SENDING


class World:
    """One call, its connection's table, its owner and the thread that waits for it."""

    def __init__(self) -> None:
        self.table = CallTable()
        self.cancels: list[int] = []
        self.table.send_cancel = self.cancels.append
        self.call = Call(self, asked=("work", "a server"), client=self)
        self.call_id = 0
        self.expected = CALL_STATES.initial
        self.says = CallEvent.GIVEN_UP  # the owner, when it is asked
        self.errors: list[BaseException] = []  # that it was told
        self.completed = self.later = 0
        self.now = 0.0
        self.call.when_done(self.count)

    def count(self, _: object) -> None:
        self.completed += 1

    # -- as the call's owner, and as who waits -----------------------------------------------------

    def failed(self, call: Call, error: BaseException) -> bool:
        self.errors.append(error)
        assert life_of(self.call) in (CallState.WAITING, CallState.FAILING)
        if self.says is CallEvent.OUTLIVED:
            call.outlive()
        return self.says is not CallEvent.GIVEN_UP

    def wait_until(self, call: Call, deadline: float | None) -> bool:
        return call.done()

    # -- what happens ------------------------------------------------------------------------------

    def do(self, event: CallEvent) -> None:
        """Let it happen to both."""
        self.expected, actions = CALL_STATES.after(self.expected, event)
        told, cancels, dropped = len(self.errors), len(self.cancels), self.table.dropped_replies
        self.happen(event)
        if self.expected is CallState.FAILING:
            if CallAction.ASK_OWNER in actions:
                assert len(self.errors) == told + 1
            self.expected, more = CALL_STATES.after(self.expected, self.says)
            actions += more
        assert len(self.cancels) == cancels + actions.count(CallAction.SEND_CANCEL)
        assert self.table.dropped_replies == dropped + actions.count(CallAction.COUNT)
        self.check()

    def happen(self, event: CallEvent) -> None:
        table, call = self.table, self.call
        if event is CallEvent.ENTERED:  # as Peer.resend()
            self.call_id = call.call_id = table.next_id()
            call.table, call.deadline, call.sent = table, NEVER, 0.0
            table.in_flight[call.call_id] = call
        elif event is CallEvent.SENT:
            self.now += 1.0
            call.sent, call.deadline = self.now, self.now + 5.0
            table.soonest = min(table.soonest, call.deadline)
        elif event is CallEvent.NOT_SENT:
            if not call.sent:  # else the attempt that was refused is not this one any more
                table.in_flight.pop(call.call_id, None)
        elif event is CallEvent.REPLY:
            self.answer(lambda found: found.set_result("value"))
        elif event is CallEvent.FAILURE:
            self.answer(lambda found: found.set_error(RpcError("it cannot be read")))
        elif event is CallEvent.LATE:
            call.deadline = min(call.deadline, self.now + 5.0)  # one that is outlived has none
            self.now += 10.0
            assert table.find_late(self.now)
            table.end_late(lambda _: DeadlineExceeded("late"))
        elif event is CallEvent.LOST:
            table.fail_all(lost, self.look_later)
        elif event is CallEvent.ENDED_WITH_IT:
            table.fail_all(lost)
        elif event is CallEvent.CANCELLED:
            was_done = call.done()
            assert not (call.cancel() and was_done)
        elif event is CallEvent.OVERDUE:
            call.overall = -1.0
            assert call.wait()
        else:
            assert event is CallEvent.GIVEN_UP
            call.end(MaybeExecuted("its owner gives up"))

    def answer(self, complete: Callable[[Call], object]) -> None:
        """As Peer._on_message() does."""
        found = self.table.in_flight.pop(self.call_id, None)
        if found is None:
            self.table.dropped_replies += 1
        else:
            complete(found)

    def look_later(self, seconds: float, callback: Callable[[], object]) -> None:
        self.later += 1

    def check(self) -> None:
        assert life_of(self.call) is self.expected
        assert self.completed == (self.expected in DONE)
        assert bool(self.table.in_flight) == (self.expected in IN_TABLE)


def lost(call: Call) -> RpcError:
    return MaybeExecuted("the peer was lost")


@pytest.mark.parametrize("walk", walks(CALL_STATES))
def test_a_call_takes_each_transition_of_its_table(walk: Walk) -> None:
    world = World()
    way = [*walk.way, walk.event]
    if walk.state is CallState.FAILING:  # that lasts as long as its owner thinks
        way = [CallEvent.ENTERED, CallEvent.SENT, CallEvent.LATE]
        assert isinstance(walk.event, CallEvent)
        world.says = walk.event
    for event in way:
        assert isinstance(event, CallEvent)
        world.do(event)
    assert world.later == (event is CallEvent.LOST and walk.state is CallState.SENDING)


class DrivenCall(RuleBasedStateMachine):
    """Any sequence of events, and any owner, at a real call."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.outcome: object = None

    @rule(data=st.data())
    def an_event(self, data: st.DataObject) -> None:
        world = self.world
        event = data.draw(st.sampled_from(CALL_STATES.events(world.expected)))
        # only what has been late is outlived
        world.says = data.draw(
            st.sampled_from(ANSWERS if event is CallEvent.LATE else ANSWERS[::2])
        )
        world.do(event)

    @invariant()
    def it_has_ended_with_what_came_first(self) -> None:
        call = self.world.call
        if call.done():
            outcome = call.error(0) or call.result(0)
            assert self.outcome in (None, outcome), "what comes later changes nothing"
            self.outcome = outcome


TestDrivenCall = DrivenCall.TestCase
TestDrivenCall.settings = settings(
    max_examples=examples(200), stateful_step_count=20, deadline=None
)


class Server:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.answers: list[Deferred] = []

    def later(self) -> Deferred:
        self.answers.append(answer := Deferred())
        return answer


class DrivenPeer(RuleBasedStateMachine):
    """Calls from one Peer to another, beside the table: sent, answered, failed, late, cancelled and
    lost in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.clock = ManualClock()
        served = ServedObject("test", 0, TARGET, self.server)
        self.pair = Pair(served, clock=self.clock)
        self.calls: list[tuple[Call, float | None]] = []  # and their timeouts
        self.expected: list[CallState] = []
        self.is_over = False

    def follow(self, number: int, event: CallEvent) -> None:
        state, _ = CALL_STATES.after(self.expected[number], event)
        if state is CallState.FAILING:  # these calls have no owner
            state, _ = CALL_STATES.after(state, CallEvent.GIVEN_UP)
        self.expected[number] = state

    def follow_all(self, event: CallEvent) -> None:
        for number, state in enumerate(self.expected):
            if (state, event) in CALL_STATES.transitions:
                self.follow(number, event)

    @rule(timeout_s=st.sampled_from([None, 50.0, 150.0]))
    def a_call_is_made(self, timeout_s: float | None) -> None:
        if self.is_over:
            with pytest.raises((Closed, NotSent)):
                self.pair.ask("later", timeout_s=timeout_s)
            return
        call = self.pair.ask("later", timeout_s=timeout_s)
        self.calls.append((call, None if timeout_s is None else self.clock.now + timeout_s))
        self.expected.append(CallState.WAITING)
        for event in (CallEvent.ENTERED, CallEvent.SENT):
            self.follow(len(self.calls) - 1, event)
        self.pair.turn()
        assert len(self.server.answers) == len(self.calls)

    @rule(number=st.integers(0, 20), is_value=st.booleans())
    def one_is_answered(self, number: int, is_value: bool) -> None:
        if not self.calls or self.is_over:
            return
        number %= len(self.calls)
        answer = self.server.answers[number]
        if answer.reply("value") if is_value else answer.fail(ValueError("no")):
            self.follow(number, CallEvent.REPLY if is_value else CallEvent.FAILURE)
            self.pair.turn()

    @rule(number=st.integers(0, 20))
    def one_is_cancelled(self, number: int) -> None:
        if self.calls:
            number %= len(self.calls)
            call, _ = self.calls[number]
            assert call.cancel() == (self.expected[number] not in DONE)
            self.follow(number, CallEvent.CANCELLED)
            self.pair.turn()

    @rule(number=st.integers(0, 20), is_value=st.booleans())
    def one_is_cancelled_as_its_answer_is_on_its_way(self, number: int, is_value: bool) -> None:
        if not self.calls or self.is_over:
            return
        number %= len(self.calls)
        answer, (call, _) = self.server.answers[number], self.calls[number]
        if answer.reply("value") if is_value else answer.fail(ValueError("no")):
            dropped = self.pair.client.statistics().replies_dropped
            was_done = call.done()
            call.cancel()
            self.follow(number, CallEvent.CANCELLED)
            self.follow(number, CallEvent.REPLY)
            self.pair.turn()
            assert was_done or self.pair.client.statistics().replies_dropped == dropped + 1

    @rule()
    def time_passes(self) -> None:
        self.clock.advance(100.0)
        for number, (_, deadline) in enumerate(self.calls):
            is_late = deadline is not None and deadline <= self.clock.now
            if is_late and self.expected[number] is CallState.IN_FLIGHT:
                self.follow(number, CallEvent.LATE)
        self.pair.turn()

    @rule(is_ours=st.booleans())
    def the_connection_ends(self, is_ours: bool) -> None:
        if not self.is_over:
            self.is_over = True
            peer = self.pair.client if is_ours else self.pair.served
            peer.connection.close()
            self.follow_all(CallEvent.ENDED_WITH_IT if is_ours else CallEvent.LOST)
            self.pair.turn()
            assert self.pair.client.statistics().in_flight == 0
            assert all(call.done() for call, _ in self.calls)

    @invariant()
    def each_call_is_as_its_table_says(self) -> None:
        states = [life_of(call) for call, _ in self.calls]
        assert states == self.expected
        assert self.pair.client.statistics().in_flight == states.count(CallState.IN_FLIGHT)

    def teardown(self) -> None:
        self.pair.close()
        assert all(call.done() for call, _ in self.calls)


TestDrivenPeer = DrivenPeer.TestCase
TestDrivenPeer.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)
