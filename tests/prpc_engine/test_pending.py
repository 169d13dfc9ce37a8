"""Requests that outlive their connection: each is in one place, ends once and in time, leaves in
order, and is not held after its end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prpc_engine.rpc.call import NEVER
from prpc_engine.rpc.pending import PLACES, PendingRequests, PlaceEvent, RequestPlace
from prpc_engine.rpc.send_queue import QUEUES, QueueAction, QueueEvent, QueueState, SendQueue
from shard import Reactor
from tests.examples import examples
from tests.helpers import ManualClock

REQUESTS_MAX, BYTES_MAX = 6, 100
THREADS, REQUESTS_EACH = 4, 300


class Request:
    """What an owner was asked for."""

    def __init__(self, number: int = 0, deadline: float = NEVER) -> None:
        self.number = number
        self.deadline = deadline
        self.outcomes: list[str] = []  # one, in the end


class Owner:
    """Asks for things, and ends what it is told to end."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.pending: PendingRequests[Request] = PendingRequests(
            reactor, lambda request: self.end(request, "late"), self.closed
        )
        self._ending = threading.Lock()

    def closed(self, request: Request) -> None:
        self.end(request, "closed")

    def end(self, request: Request, outcome: str) -> bool:
        """As a future does it: the first outcome counts."""
        with self._ending:
            if request.outcomes:
                return False
            request.outcomes.append(outcome)
        self.pending.end(request)
        return True

    def ask(self, deadline: float = NEVER, number: int = 0, nbytes: int = 0) -> Request:
        request = Request(number, deadline)
        assert self.pending.admit(request, deadline, REQUESTS_MAX, nbytes, BYTES_MAX)
        return request

    def turn(self) -> None:
        """Until there is nothing to do."""
        while self.reactor.poll(self.reactor.clock()):
            pass


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def owner(clock: ManualClock) -> Iterator[Owner]:
    reactor = Reactor(clock)
    yield Owner(reactor)
    reactor.close()


def drain(owner: Owner, queue: SendQueue[Request]) -> list[Request]:
    """Connect, and take all that waits."""
    owner.pending.tell(queue, QueueEvent.CONNECTED)
    taken: list[Request] = []
    while some := owner.pending.take(queue, 2):
        taken += some
    return taken


# -- tables ----------------------------------------------------------------------------------------


def test_whatever_comes_has_an_answer_in_each_place() -> None:
    only_there = {
        PlaceEvent.TAKEN: {RequestPlace.QUEUED},
        PlaceEvent.RESUMED: {RequestPlace.PAUSED},
    }
    for event in PlaceEvent:
        listed = {place for place in RequestPlace if event in PLACES.events(place)}
        assert listed == only_there.get(event, set(RequestPlace) - {RequestPlace.ENDED})


def test_only_somebody_who_connects_or_drains_keeps_what_comes_waiting() -> None:
    for state in QueueState:
        _, actions = QUEUES.after(state, QueueEvent.OFFERED)
        assert (QueueAction.ENQUEUE in actions) is (QueueAction.SEND not in actions)
        assert (QueueAction.CONNECT in actions) is (state is QueueState.DOWN)


# -- order -----------------------------------------------------------------------------------------


def test_the_first_that_comes_has_somebody_connect_and_all_leave_in_order(owner: Owner) -> None:
    queue, requests = SendQueue[Request](), [owner.ask() for _ in range(5)]
    actions = [owner.pending.offer(request, queue) for request in requests]
    assert [QueueAction.CONNECT in each for each in actions] == [True] + 4 * [False]
    assert list(queue) == requests
    assert queue.is_busy
    assert drain(owner, queue) == requests
    assert (queue.state, len(queue)) == (QueueState.UP, 0)
    assert owner.pending.offer(owner.ask(), queue) == (QueueAction.SEND,)


def test_what_comes_while_others_leave_waits_behind_them(owner: Owner) -> None:
    queue, first, second = SendQueue[Request](), owner.ask(), owner.ask()
    owner.pending.offer(first, queue)
    owner.pending.tell(queue, QueueEvent.CONNECTED)
    assert owner.pending.take(queue) == [first]
    assert owner.pending.offer(second, queue) == (QueueAction.ENQUEUE,)
    assert owner.pending.take(queue) == [second]
    assert owner.pending.take(queue) == []
    assert queue.state is QueueState.UP


def test_with_an_order_what_comes_back_leaves_before_what_was_made_later(owner: Owner) -> None:
    queue = SendQueue[Request](order=lambda request: request.number, is_up=True)
    requests = [owner.ask(number=number) for number in range(4)]
    assert owner.pending.offer(requests[0], queue) == (QueueAction.SEND,)
    assert owner.pending.sending(requests[0])
    owner.pending.tell(queue, QueueEvent.LOST)
    for request in requests[1:]:
        owner.pending.offer(request, queue)
    owner.pending.hold(requests[0], NEVER)
    owner.pending.offer(requests[0], queue)
    assert drain(owner, queue) == requests


def test_some_are_picked_out_of_a_queue_and_the_others_stay(owner: Owner) -> None:
    queue, requests = SendQueue[Request](), [owner.ask(number=number) for number in range(4)]
    for request in requests:
        owner.pending.offer(request, queue)
    assert owner.pending.pick(queue, lambda each: each.number % 2 == 1) == requests[1::2]
    assert list(queue) == requests[::2]
    assert {owner.pending.place(each) for each in requests[1::2]} == {RequestPlace.KEPT}
    assert owner.pending.tell(queue, QueueEvent.GAVE_UP) == requests[::2]
    assert queue.state is QueueState.DOWN


def test_as_many_leave_as_there_are_bytes_for_and_one_at_least(owner: Owner) -> None:
    queue, requests = SendQueue[Request](), [owner.ask(nbytes=30) for _ in range(3)]
    for request in requests:
        owner.pending.offer(request, queue)
    owner.pending.tell(queue, QueueEvent.CONNECTED)
    assert owner.pending.take(queue, bytes_most=1) == requests[:1]
    assert owner.pending.take(queue, bytes_most=60) == requests[1:]


# -- one place -------------------------------------------------------------------------------------


def test_a_request_that_is_elsewhere_is_left_alone(owner: Owner) -> None:
    queue, other = SendQueue[Request](), SendQueue[Request]()
    request = owner.ask()
    owner.pending.offer(request, queue)
    assert owner.pending.offer(request, other) == ()
    assert not owner.pending.sending(request)
    assert not owner.pending.pause(request, 1.0, pytest.fail)
    assert (list(queue), list(other)) == ([request], [])
    assert other.state is QueueState.DOWN
    assert drain(owner, queue) == [request]
    assert owner.pending.sending(request)
    assert not owner.pending.sending(request), "another thread sends it"
    assert owner.pending.offer(request, other) == ()


def test_a_request_that_is_not_held_is_its_senders(owner: Owner) -> None:
    request, queue = Request(), SendQueue[Request]()
    assert owner.pending.sending(request)
    owner.pending.left(request)
    owner.pending.until(request, 1.0)
    assert owner.pending.offer(request, queue) == ()
    assert not owner.pending.pause(request, 1.0, pytest.fail)
    assert not owner.pending.end(request)
    assert (len(owner.pending), len(queue)) == (0, 0)


# -- bounds ----------------------------------------------------------------------------------------


def test_so_many_wait_and_no_more_until_one_has_left_or_ended(owner: Owner) -> None:
    requests = [owner.ask() for _ in range(REQUESTS_MAX)]
    assert not owner.pending.admit(Request(), NEVER, REQUESTS_MAX)
    assert owner.pending.unsent == len(owner.pending) == REQUESTS_MAX
    owner.pending.sending(requests[0])
    assert not owner.pending.admit(Request(), NEVER, REQUESTS_MAX), "it may come back"
    owner.pending.left(requests[0])
    owner.ask()
    owner.end(requests[0], "answered")
    assert owner.pending.unsent == REQUESTS_MAX
    owner.end(requests[1], "cancelled")
    owner.ask()
    assert owner.pending.hold(Request(), NEVER), "one that is lost comes back whatever there is"
    assert owner.pending.unsent == REQUESTS_MAX


def test_bytes_are_bounded_and_one_request_may_be_of_any_size(owner: Owner) -> None:
    large = owner.ask(nbytes=10 * BYTES_MAX)
    assert not owner.pending.admit(Request(), NEVER, REQUESTS_MAX, 1, BYTES_MAX)
    assert owner.pending.is_unsent(large)
    owner.pending.left(large)
    assert not owner.pending.is_unsent(large)
    owner.ask(nbytes=BYTES_MAX)
    assert owner.pending.unsent_bytes == BYTES_MAX


# -- deadlines -------------------------------------------------------------------------------------


def kept(owner: Owner, request: Request) -> None:
    """It is where it was put."""


def paused(owner: Owner, request: Request) -> None:
    assert owner.pending.pause(request, 60.0, pytest.fail)


def queued(owner: Owner, request: Request) -> None:
    owner.pending.offer(request, SendQueue[Request]())


@pytest.mark.parametrize("put", [kept, paused, queued])
def test_a_deadline_is_seen_to_wherever_the_request_is(
    owner: Owner, clock: ManualClock, put: Callable[[Owner, Request], None]
) -> None:
    request = owner.ask(clock.now + 5.0)
    put(owner, request)
    clock.advance(4.9)
    owner.turn()
    assert request.outcomes == []
    clock.advance(0.1)
    owner.turn()
    assert request.outcomes == ["late"]
    assert (len(owner.pending), len(owner.reactor.timers)) == (0, 0)


def test_what_is_under_way_is_its_connections_until_it_comes_back(
    owner: Owner, clock: ManualClock
) -> None:
    request = owner.ask(clock.now + 5.0)
    owner.pending.sending(request)
    owner.turn()
    clock.advance(6.0)
    owner.turn()
    assert request.outcomes == []
    assert not owner.pending.hold(request, request.deadline)
    owner.turn()
    assert request.outcomes == ["late"]


def test_a_deadline_may_be_told_later_and_put_off(owner: Owner, clock: ManualClock) -> None:
    request = owner.ask()
    owner.turn()
    assert len(owner.reactor.timers) == 0
    owner.pending.until(request, clock.now + 1.0)
    owner.turn()
    clock.advance(1.0)
    owner.pending.until(request, clock.now + 2.0)  # before the turn that would end it
    owner.turn()
    assert request.outcomes == []
    owner.pending.until(request, clock.now + 1.0)
    owner.turn()
    clock.advance(1.0)
    owner.turn()
    assert request.outcomes == ["late"]


def test_a_pause_ends_with_what_follows_it_or_with_the_request(
    owner: Owner, clock: ManualClock
) -> None:
    told: list[str] = []
    requests = [owner.ask(), owner.ask()]
    for number, request in enumerate(requests):
        assert owner.pending.pause(request, 1.0, lambda number=number: told.append(f"{number}"))
    owner.end(requests[1], "cancelled")
    clock.advance(1.0)
    owner.turn()
    assert told == ["0"]
    assert owner.pending.place(requests[0]) is RequestPlace.KEPT
    assert len(owner.reactor.timers) == 0


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", [kept, paused, queued])
def test_nothing_of_a_request_is_held_after_its_end_though_the_reactor_stands_still(
    owner: Owner, clock: ManualClock, put: Callable[[Owner, Request], None]
) -> None:
    request = owner.ask(clock.now + 5.0, nbytes=10)
    put(owner, request)
    owner.turn()
    owner.end(request, "cancelled")
    gone = weakref.ref(request)
    del request
    assert gone() is None
    assert (len(owner.pending), owner.pending.unsent, owner.pending.unsent_bytes) == (0, 0, 0)


def test_close_ends_all_that_are_held_and_each_that_comes_later(owner: Owner) -> None:
    requests = [owner.ask(), owner.ask(), owner.ask()]
    queue = SendQueue[Request]()
    owner.pending.offer(requests[0], queue)
    owner.pending.sending(requests[1])
    owner.pending.close()
    late = Request()
    assert owner.pending.hold(late, NEVER)
    assert [each.outcomes for each in (*requests, late)] == 4 * [["closed"]]
    assert (len(owner.pending), len(queue)) == (0, 0)


def test_what_completes_a_request_runs_in_the_reactor_and_once_closed_here_too(
    owner: Owner,
) -> None:
    told: list[int] = []
    owner.pending.settle(lambda: told.append(1))
    assert told == []
    owner.turn()
    assert told == [1]
    owner.pending.close()
    owner.pending.settle(lambda: told.append(2))
    assert told == [1, 2]


# -- any sequence of events ------------------------------------------------------------------------


class AnyLife(RuleBasedStateMachine):
    """A model beside the thing: where each request is, and what waits at each destination."""

    seconds = st.integers(0, 8).map(float)
    which = st.integers(0, 1)
    picked = st.integers(0, 1_000)

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.owner = Owner(Reactor(self.clock))
        self.pending = self.owner.pending
        self.queues = [SendQueue[Request](), SendQueue[Request]()]
        self.waiting: list[list[Request]] = [[], []]
        self.places: dict[Request, RequestPlace] = {}
        self.unsent: dict[Request, int] = {}
        self.resumes: dict[Request, float] = {}
        self.numbers = 0

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            self.owner.reactor.close()

    # -- the model -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Forget in the model what has ended in the thing, which must have had a reason."""
        for request in [each for each in self.places if each.outcomes]:
            (outcome,) = request.outcomes
            if outcome == "late":
                assert request.deadline <= self.clock.now
                assert self.places[request] is not RequestPlace.UNDER_WAY
            assert self.pending.place(request) is RequestPlace.ENDED
            del self.places[request]
            self.unsent.pop(request, None)
            self.resumes.pop(request, None)
            for waiting in self.waiting:
                if request in waiting:
                    waiting.remove(request)

    def choose(self, picked: int) -> Request | None:
        held = list(self.places)
        return held[picked % len(held)] if held else None

    @invariant()
    def the_thing_is_where_the_model_is(self) -> None:
        if not hasattr(self, "owner"):
            return
        self.settle()
        assert len(self.pending) == len(self.places)
        for request, place in self.places.items():
            assert self.pending.place(request) is place
        for queue, waiting in zip(self.queues, self.waiting, strict=True):
            assert list(queue) == waiting
            assert all(self.places[each] is RequestPlace.QUEUED for each in waiting)
            assert queue.is_busy or not waiting
        queued = [each for each in self.places if self.places[each] is RequestPlace.QUEUED]
        assert len(queued) == sum(map(len, self.waiting)), "in one queue each"
        assert self.pending.unsent == len(self.unsent) <= REQUESTS_MAX
        assert self.pending.unsent_bytes == sum(self.unsent.values())
        assert len(self.unsent) <= 1 or self.pending.unsent_bytes <= BYTES_MAX

    # -- what an owner does ----------------------------------------------------------------------

    @rule(seconds=st.none() | seconds, nbytes=st.integers(0, 120))
    def admit(self, seconds: float | None, nbytes: int) -> None:
        deadline = NEVER if seconds is None else self.clock.now + seconds
        request = Request(self.numbers, deadline)
        self.numbers += 1
        has_room = len(self.unsent) < REQUESTS_MAX and (
            not self.unsent or sum(self.unsent.values()) + nbytes <= BYTES_MAX
        )
        assert self.pending.admit(request, deadline, REQUESTS_MAX, nbytes, BYTES_MAX) is has_room
        if has_room:
            self.places[request] = RequestPlace.KEPT
            self.unsent[request] = nbytes

    @rule(seconds=seconds)
    def hold_one_that_was_never_here(self, seconds: float) -> None:
        request = Request(self.numbers, self.clock.now + seconds)
        self.numbers += 1
        assert self.pending.hold(request, request.deadline)
        self.places[request] = RequestPlace.KEPT

    @rule(picked=picked)
    def lose(self, picked: int) -> None:
        request = self.choose(picked)
        if request is not None:
            assert not self.pending.hold(request, request.deadline)
            if self.places[request] is RequestPlace.UNDER_WAY:
                self.places[request] = RequestPlace.KEPT

    @rule(picked=picked, which=which)
    def offer(self, picked: int, which: int) -> None:
        request = self.choose(picked)
        if request is None:
            return
        queue, is_kept = self.queues[which], self.places[request] is RequestPlace.KEPT
        was_up, was_down = queue.state is QueueState.UP, queue.state is QueueState.DOWN
        actions = self.pending.offer(request, queue)
        assert (QueueAction.SEND in actions) is (is_kept and was_up)
        assert (QueueAction.CONNECT in actions) is (is_kept and was_down)
        if is_kept and not was_up:
            self.places[request] = RequestPlace.QUEUED
            self.waiting[which].append(request)

    @rule(picked=picked)
    def send(self, picked: int) -> None:
        request = self.choose(picked)
        if request is not None:
            is_kept = self.places[request] is RequestPlace.KEPT
            assert self.pending.sending(request) is is_kept
            if is_kept:
                self.places[request] = RequestPlace.UNDER_WAY

    @rule(picked=picked)
    def leave(self, picked: int) -> None:
        request = self.choose(picked)
        if request is not None:
            self.pending.left(request)
            self.unsent.pop(request, None)

    @rule(picked=picked, seconds=seconds)
    def pause(self, picked: int, seconds: float) -> None:
        request = self.choose(picked)
        if request is not None:
            is_kept = self.places[request] is RequestPlace.KEPT
            assert self.pending.pause(request, seconds, lambda: self.resumed(request)) is is_kept
            if is_kept:
                self.places[request] = RequestPlace.PAUSED
                self.resumes[request] = self.clock.now + seconds

    def resumed(self, request: Request) -> None:
        assert self.resumes.pop(request) <= self.clock.now
        self.places[request] = RequestPlace.KEPT

    @rule(which=which, event=st.sampled_from(QueueEvent))
    def tell(self, which: int, event: QueueEvent) -> None:
        """Of a destination, what can come there now."""
        queue = self.queues[which]
        if event in QUEUES.events(queue.state) and event not in (
            QueueEvent.OFFERED,
            QueueEvent.DRAINED,
        ):
            left = self.pending.tell(queue, event)
            assert left == (self.waiting[which] if event is QueueEvent.GAVE_UP else [])
            self.take_out(which, left)

    @rule(which=which, most=st.none() | st.integers(1, 3), bytes_most=st.none() | st.just(60))
    def take(self, which: int, most: int | None, bytes_most: int | None) -> None:
        queue, waiting = self.queues[which], self.waiting[which]
        if queue.state is QueueState.DRAINING:
            taken = self.pending.take(queue, most, bytes_most)
            assert taken == waiting[: len(taken)]
            assert bool(taken) is bool(waiting)
            assert (queue.state is QueueState.UP) is not bool(taken)
            self.take_out(which, taken)

    @rule(which=which, rest=st.integers(0, 1))
    def pick(self, which: int, rest: int) -> None:
        wanted = [each for each in self.waiting[which] if each.number % 2 == rest]
        assert self.pending.pick(self.queues[which], lambda each: each.number % 2 == rest) == wanted
        self.take_out(which, wanted)

    def take_out(self, which: int, requests: list[Request]) -> None:
        for request in requests:
            self.waiting[which].remove(request)
            self.places[request] = RequestPlace.KEPT

    @rule(picked=picked, outcome=st.sampled_from(["answered", "cancelled"]))
    def finish(self, picked: int, outcome: str) -> None:
        request = self.choose(picked)
        if request is not None:
            assert self.owner.end(request, outcome)
            assert not self.pending.end(request)

    @rule(picked=picked, seconds=seconds)
    def put_off(self, picked: int, seconds: float) -> None:
        request = self.choose(picked)
        if request is not None:
            request.deadline = self.clock.now + seconds
            self.pending.until(request, request.deadline)

    @rule(seconds=seconds)
    def let_time_pass(self, seconds: float) -> None:
        self.owner.turn()
        self.settle()
        self.clock.advance(seconds)
        self.owner.turn()
        self.settle()
        for request, place in self.places.items():
            assert place is RequestPlace.UNDER_WAY or request.deadline > self.clock.now, (
                "it is late"
            )
        assert all(at > self.clock.now for at in self.resumes.values())

    @precondition(lambda self: self.numbers > 5)
    @rule()
    def close(self) -> None:
        held = list(self.places)
        self.pending.close()
        assert all(each.outcomes == ["closed"] for each in held)
        self.settle()
        self.owner.turn()
        assert len(self.owner.reactor.timers) == 0
        self.owner.reactor.close()
        self.begin()


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)


# -- many threads ----------------------------------------------------------------------------------


def test_of_many_threads_requests_each_ends_once_and_nothing_is_held(
    owner: Owner, clock: ManualClock, seed: int
) -> None:
    """Threads ask, cancel and lose; the reactor drains, answers and sees to deadlines."""
    pending, reactor, queue = owner.pending, owner.reactor, SendQueue[Request]()
    asked: list[list[Request]] = [[] for _ in range(THREADS)]
    sent: list[Request] = []

    def connected() -> None:
        pending.tell(queue, QueueEvent.CONNECTED)
        drain_some()

    def drain_some() -> None:
        some = pending.take(queue, 8)
        for request in some:
            if pending.sending(request):
                pending.left(request)
                sent.append(request)
        if some:
            reactor.call_soon(drain_some)

    def work(thread: int) -> None:
        random = Random(f"{seed} {thread}")
        for number in range(REQUESTS_EACH):
            request = Request(number, clock.now + random.choice([1.0, 50.0, NEVER]))
            asked[thread].append(request)
            pending.admit(request, request.deadline, THREADS * REQUESTS_EACH)
            actions = pending.offer(request, queue)
            if QueueAction.CONNECT in actions:
                reactor.call_soon(connected)
            elif QueueAction.SEND in actions and pending.sending(request):
                pending.left(request)
                sent.append(request)
            fate = random.random()
            other = random.choice(asked[thread])
            if fate < 0.3:
                owner.end(other, "cancelled")
            elif fate < 0.5:
                pending.hold(other, other.deadline)
                if other.outcomes:  # as a done callback of a future that is done
                    pending.end(other)
                elif QueueAction.CONNECT in pending.offer(other, queue):
                    reactor.call_soon(connected)
            elif fate < 0.6:
                with pending.guard:
                    if queue.state is QueueState.UP:
                        pending.tell(queue, QueueEvent.LOST)

    threads = [threading.Thread(target=work, args=(each,)) for each in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reactor.poll(clock())
        clock.advance(0.01)
        while sent:
            owner.end(sent.pop(), "answered")
    for thread in threads:
        thread.join()
    pending.close()
    owner.turn()
    everything: list[Any] = [request for each in asked for request in each]
    assert all(len(request.outcomes) == 1 for request in everything)
    assert (len(pending), pending.unsent, len(queue), len(reactor.timers)) == (0, 0, 0, 0)
