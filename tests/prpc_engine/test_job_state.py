"""What becomes of a request that is answered later: the table by itself, and a server that takes
each of its transitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prpc_engine import errors, once
from prpc_engine.rpc.call import NEVER, Call
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.job_state import JOB_STATES, JobAction, JobEvent, JobState
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import calling_peer
from prpc_engine.rpc.server import Bounds, ServedObject
from shard import CancelledError, Future
from tests.examples import examples
from tests.helpers import ManualClock
from tests.prpc_engine.peers import TARGET, Pair, Route

HAVE_A_PLACE = (
    JobState.STARTING, JobState.ENDING, JobState.RUNNING, JobState.AWAITING, JobState.OVER
)  # fmt: skip
TELLS = (JobAction.TELL_END, JobAction.TELL_STOPPING, JobAction.TELL_TOO_LATE)


class JobTable(RuleBasedStateMachine):
    """Any sequence of events, and what the actions come to."""

    def __init__(self) -> None:
        super().__init__()
        self.state = JOB_STATES.initial
        self.done: list[JobAction] = []
        self.answers = 0
        self.gave_up_in_queue = False

    @rule(data=st.data())
    def an_event(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(JOB_STATES.events(self.state)))
        before = self.state
        self.state, actions = JOB_STATES.after(before, event)
        self.done += actions
        self.answers += sum(action in TELLS for action in actions)
        self.answers += JobAction.REPORT in actions and before is not JobState.OVER
        if before is JobState.QUEUED and event is JobEvent.ENDED_EARLY:
            self.gave_up_in_queue = True
        if JobAction.THROW in actions:
            assert event is JobEvent.WAITS or before in (JobState.RUNNING, JobState.OVER)

    @invariant()
    def it_is_answered_once_and_leaves_nothing(self) -> None:
        count = self.done.count
        is_over = self.state in (JobState.OVER, JobState.ENDED)
        assert self.answers == (is_over and not self.gave_up_in_queue)
        assert count(JobAction.FORGET) == is_over
        leaves = count(JobAction.LEAVE) + count(JobAction.LEAVE_GATE)
        assert leaves == (self.state is JobState.ENDED)
        places = count(JobAction.TAKE_PLACE) - count(JobAction.LEAVE)
        assert places == (self.state in HAVE_A_PLACE)
        waits = count(JobAction.QUEUE_UP) - count(JobAction.LEAVE_QUEUE)
        assert waits == (self.state is JobState.QUEUED)
        assert count(JobAction.START) <= 1
        assert not (count(JobAction.DROP) and count(JobAction.START)), "what began is not dropped"


TestJobTable = JobTable.TestCase
TestJobTable.settings = settings(max_examples=examples(200), stateful_step_count=15, deadline=None)


class Handlers:
    """Each kind of handler, and what it waits for."""

    def __init__(self) -> None:
        self.gates: list[Future] = []  # of the coroutines that wait
        self.clean: list[Future] = []  # of those that clean up
        self.answers: list[Deferred] = []  # that are to come
        self.in_first_step: Callable[[], object] = lambda: None

    def at_once(self) -> str:
        return "plain"

    async def soon(self) -> str:
        self.in_first_step()
        return "value"

    async def wait(self) -> str:
        self.in_first_step()
        self.gates.append(gate := Future())
        try:
            await gate
        except CancelledError:
            self.clean.append(clean := Future())
            try:
                await clean
            except CancelledError:
                await Future()  # until it is thrown into once more
        return "value"

    def later(self) -> Deferred:
        self.answers.append(answer := Deferred())
        return answer

    @once
    def once_later(self) -> Deferred:
        self.in_first_step()
        return self.later()

    async def count(self) -> AsyncIterator[int]:
        self.in_first_step()
        for number in range(1000):
            yield number


ONE_TASK = Bounds(tasks_max=1)


class World(Pair):
    def __init__(self, bounds: Bounds = ONE_TASK) -> None:
        self.handlers = Handlers()
        self.time = ManualClock()
        server = ServedObject("test", 0, TARGET, self.handlers, bounds)
        super().__init__(server, clock=self.time)
        self.calls: list[Call] = []

    def begin(self, method: str, timeout_s: float | None = None) -> Call:
        """Ask, and let it arrive."""
        self.calls.append(call := self.ask(method, timeout_s=timeout_s))
        self.turn()
        return call

    def let_go(self) -> None:
        """Whatever a handler waits for is there."""
        for futures in (self.handlers.gates, self.handlers.clean, self.handlers.answers):
            while futures:
                futures.pop(0).set_result("value")
        self.turn()

    def states(self) -> list[JobState]:
        """Of the requests that are not answered."""
        return [job.state for job in self.served.running.values()]

    def queue_one(self, timeout_s: float | None = None) -> Call:
        """Behind one that waits."""
        self.begin("wait")
        call = self.begin("soon", timeout_s)
        assert self.states() == [JobState.RUNNING, JobState.QUEUED]
        return call

    def end_in_first_step(self, method: str, times: int = 1) -> Call:
        """Its server is closed, as often, while the handler makes its first step."""

        def cut() -> None:
            for _ in range(times):
                self.server.cut()

        self.handlers.in_first_step = cut
        return self.begin(method)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.let_go()
    made.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobState, JobEvent]]:
    """The transitions that the server has made."""
    made: list[tuple[JobState, JobEvent]] = []
    after = JOB_STATES.after

    def noting(state: JobState, event: JobEvent) -> tuple[JobState, tuple[JobAction, ...]]:
        made.append((state, event))
        return after(state, event)

    monkeypatch.setattr(JOB_STATES, "after", noting)
    return made


def it_runs_and_ends(world: World) -> None:
    assert world.begin("soon").result(0) == "value"


def it_waits_and_ends(world: World) -> None:
    call = world.begin("wait")
    assert world.states() == [JobState.RUNNING]
    world.let_go()
    assert call.result(0) == "value"


def a_plain_function_answers_later(world: World) -> None:
    call = world.begin("later")
    assert world.states() == [JobState.AWAITING]
    world.let_go()
    assert call.result(0) == "value"


def it_waits_in_the_queue_and_runs(world: World) -> None:
    call = world.queue_one()
    world.let_go()
    assert call.result(0) == "value"


def its_time_in_the_queue_is_over(world: World) -> None:
    world.begin("wait")
    call = world.begin("soon", 1.0)
    call.deadline = NEVER  # it is the server that finds it too late
    world.time.advance(1.5)
    world.let_go()
    assert isinstance(call.error(0), errors.DeadlineExceeded)
    assert world.server.statistics().expired == 1


def a_place_comes_in_the_turn_in_which_its_time_is_over(world: World) -> None:
    world.begin("wait")
    call = world.begin("soon", 1.0)
    call.deadline = NEVER
    world.time.advance(1.5)
    world.handlers.gates.pop().set_result("value")  # before any timer fires
    world.turn()
    assert isinstance(call.error(0), errors.DeadlineExceeded)
    assert world.server.statistics().expired == 1


def it_is_cancelled_in_the_queue(world: World) -> None:
    world.queue_one().cancel()
    world.turn()
    assert world.states() == [JobState.RUNNING]


def its_server_is_closed_while_it_waits_in_the_queue(world: World) -> None:
    call = world.queue_one()
    world.server.cut()
    world.turn()
    assert isinstance(call.error(0), errors.Stopping)


def it_is_cancelled_and_cleans_up(world: World) -> None:
    call = world.begin("wait")
    world.server.cut()
    world.turn()
    assert isinstance(call.error(0), errors.Cancelled)
    assert (world.states(), world.server.statistics().tasks) == ([], 1)
    world.let_go()
    assert world.server.statistics().tasks == 0


def it_cleans_up_for_too_long(world: World) -> None:
    world.begin("wait")
    for _ in range(2):
        world.server.cut()
        world.turn()
    assert world.server.statistics().tasks == 1
    world.server.cut()
    world.turn()
    assert world.server.statistics().tasks == 0


def what_it_awaits_is_given_up_and_comes_nevertheless(world: World) -> None:
    call = world.begin("later")
    world.server.cut()
    world.turn()
    assert isinstance(call.error(0), errors.Cancelled)
    world.let_go()


def it_is_ended_in_its_first_step_and_waits_then(world: World) -> None:
    call = world.end_in_first_step("wait")
    assert isinstance(call.error(0), errors.Cancelled)
    assert world.server.statistics().tasks == 1, "it cleans up"
    world.let_go()
    assert world.server.statistics().tasks == 0


def it_is_ended_twice_in_its_first_step_and_returns(world: World) -> None:
    assert world.end_in_first_step("soon", 2).result(0) == "value"


def it_is_ended_in_its_first_step_and_answers_later(world: World) -> None:
    call = world.end_in_first_step("once_later")
    assert isinstance(call.error(0), errors.Cancelled)


SCENARIOS: dict[Callable[[World], None], set[tuple[JobState, JobEvent]]] = {
    it_runs_and_ends: {
        (JobState.TAKEN_ON, JobEvent.PLACE),
        (JobState.STARTING, JobEvent.RETURNED),
    },
    it_waits_and_ends: {
        (JobState.STARTING, JobEvent.WAITS),
        (JobState.RUNNING, JobEvent.RETURNED),
    },
    a_plain_function_answers_later: {
        (JobState.TAKEN_ON, JobEvent.CALLED),
        (JobState.STARTING, JobEvent.DEFERRED),
        (JobState.AWAITING, JobEvent.RETURNED),
    },
    it_waits_in_the_queue_and_runs: {
        (JobState.TAKEN_ON, JobEvent.NO_PLACE),
        (JobState.QUEUED, JobEvent.PLACE),
    },
    its_time_in_the_queue_is_over: {(JobState.QUEUED, JobEvent.TOO_LATE)},
    a_place_comes_in_the_turn_in_which_its_time_is_over: {(JobState.QUEUED, JobEvent.TOO_LATE)},
    it_is_cancelled_in_the_queue: {(JobState.QUEUED, JobEvent.ENDED_EARLY)},
    its_server_is_closed_while_it_waits_in_the_queue: {(JobState.QUEUED, JobEvent.SERVER_CLOSED)},
    it_is_cancelled_and_cleans_up: {
        (JobState.RUNNING, JobEvent.ENDED_EARLY),
        (JobState.OVER, JobEvent.RETURNED),
    },
    it_cleans_up_for_too_long: {(JobState.OVER, JobEvent.ENDED_EARLY)},
    what_it_awaits_is_given_up_and_comes_nevertheless: {
        (JobState.AWAITING, JobEvent.ENDED_EARLY),
        (JobState.ENDED, JobEvent.RETURNED),
    },
    it_is_ended_in_its_first_step_and_waits_then: {
        (JobState.STARTING, JobEvent.ENDED_EARLY),
        (JobState.ENDING, JobEvent.WAITS),
    },
    it_is_ended_twice_in_its_first_step_and_returns: {
        (JobState.ENDING, JobEvent.ENDED_EARLY),
        (JobState.ENDING, JobEvent.RETURNED),
    },
    it_is_ended_in_its_first_step_and_answers_later: {(JobState.ENDING, JobEvent.DEFERRED)},
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_becomes_of_a_request(
    scenario: Callable[[World], None], world: World, taken: list[tuple[JobState, JobEvent]]
) -> None:
    scenario(world)
    assert SCENARIOS[scenario] <= set(taken)
    world.let_go()
    assert (world.server.statistics().queued, world.server.jobs.inside) == (0, 0)


def test_calls_that_were_given_up_in_the_queue_leave_room_for_others() -> None:
    with contextlib.closing(World(Bounds(tasks_max=1, queue_calls_max=3))) as world:
        world.begin("wait")
        late = [world.begin("soon", 1.0) for _ in range(3)]
        refused = world.begin("soon")
        assert isinstance(refused.error(0), errors.Backpressure)
        world.time.advance(1.002)
        world.turn()
        assert all(isinstance(call.error(0), errors.DeadlineExceeded) for call in late)
        taken = world.begin("soon")
        assert world.states() == [JobState.RUNNING, JobState.QUEUED]
        world.let_go()
        assert taken.result(0) == "value"
        assert world.server.statistics().expired == 3


def test_the_server_is_seen_to_take_each_transition() -> None:
    assert set().union(*SCENARIOS.values()) == set(JOB_STATES.transitions)


@pytest.mark.parametrize("method", ["wait", "soon", "count"])
def test_a_handler_that_loses_its_caller_in_its_first_step_does_not_stay(
    world: World, method: str
) -> None:
    def hang_up() -> None:
        peer = calling_peer()
        assert peer is not None
        peer.connection.close()

    world.handlers.in_first_step = hang_up
    if method == "count":
        world.client.open(Route(), method, method_key(method), (), None)
    else:
        world.ask(method, timeout_s=None)
    world.turn()
    world.let_go()
    assert (world.server.statistics().tasks, world.states()) == (0, [])


class DrivenServer(RuleBasedStateMachine):
    """Any requests, and any ends of them, at a real server with two places."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Bounds(tasks_max=2))

    @rule(
        method=st.sampled_from(["at_once", "soon", "wait", "later", "once_later"]),
        timeout_s=st.sampled_from([None, 1.0, 3.0]),
    )
    def a_request_comes(self, method: str, timeout_s: float | None) -> None:
        self.world.begin(method, timeout_s)

    @rule(number=st.integers(0, 30))
    def a_call_is_cancelled(self, number: int) -> None:
        if self.world.calls:
            self.world.calls[number % len(self.world.calls)].cancel()
            self.world.turn()

    # a deadline is there a millisecond later than at the caller: it falls into none of these
    @rule(seconds=st.sampled_from([0.502, 2.002]))
    def time_goes_by(self, seconds: float) -> None:
        self.world.time.advance(seconds)
        self.world.turn()

    @rule(number=st.integers(0, 30), kind=st.sampled_from(["gates", "clean", "answers"]))
    def what_a_handler_waits_for_comes(self, number: int, kind: str) -> None:
        waited_for: list[Future] = getattr(self.world.handlers, kind)
        if waited_for:
            waited_for.pop(number % len(waited_for)).set_result("value")
            self.world.turn()

    @rule(again=st.booleans())
    def all_are_cut(self, again: bool) -> None:
        self.world.server.cut(again)
        self.world.turn()

    @rule()
    def the_next_is_ended_in_its_first_step(self) -> None:
        handlers, server = self.world.handlers, self.world.server

        def cut() -> None:
            handlers.in_first_step = lambda: None
            server.cut()

        handlers.in_first_step = cut

    @invariant()
    def what_is_not_answered_waits_for_something(self) -> None:
        states, statistics = self.world.states(), self.world.server.statistics()
        assert set(states) <= {JobState.QUEUED, JobState.RUNNING, JobState.AWAITING}
        assert states.count(JobState.QUEUED) == statistics.queued
        assert not statistics.queued or statistics.tasks >= 2
        assert self.world.server.jobs.inside == statistics.tasks + statistics.queued
        assert len(states) <= sum(not call.done() for call in self.world.calls), (
            "a call that has ended is over at the server, too"
        )

    def teardown(self) -> None:
        for _ in range(len(self.world.calls) + 1):  # each lets the next ones in the queue begin
            self.world.let_go()
        for _ in range(3):  # those that clean up for ever
            self.world.server.cut()
            self.world.turn()
        assert self.world.server.jobs.inside == 0
        assert all(call.done() for call in self.world.calls)
        self.world.close()


TestDrivenServer = DrivenServer.TestCase
TestDrivenServer.settings = settings(
    max_examples=examples(50), stateful_step_count=25, deadline=None
)
