"""A lane under any sequence of losses: each request ends once and in time, in the order in which it
was asked, and nothing of it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prpc_engine.errors import BadArguments, DeadlineExceeded, MaybeExecuted, NotSent, RpcError
from prpc_engine.kv.client.partition_client import (
    PartitionAddress,
    PartitionClient,
    PartitionRequest,
)
from shard import Future, Reactor
from tests.examples import examples
from tests.helpers import ManualClock

ROUNDS_MAX = 50  # until all is home: each request of an example was lost at most once more a round
MARGIN_S = 0.5  # deadlines are half seconds, time passes in whole ones


class Server:
    """A client whose calls end when the test says so. `refuses`: nothing can be sent to it."""

    server_ids = (0,)

    def __init__(self) -> None:
        self.refuses = False
        self.under_way: list[tuple[Future, tuple[object, ...]]] = []
        self.sent: list[tuple[object, ...]] = []  # since it was looked at

    def submit_to(
        self, server_id: int, method: str, /, *args: object, timeout_s: float = 30.0
    ) -> Future:
        if self.refuses:
            raise NotSent("nobody is there")
        self.under_way.append((Future(), args))
        self.sent.append(args)
        return self.under_way[-1][0]


class Hands:
    """A waiter whose reactor the test turns."""

    closing = False

    def __init__(self) -> None:
        self.clock = ManualClock(time.monotonic())
        self.reactor = Reactor(self.clock)

    def turn(self) -> None:
        while self.reactor.poll(self.clock()):
            pass


class AnyLosses(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.server, self.hands = Server(), Hands()
        self.mended = 0
        self.lane = PartitionClient(
            self.server, "kv", 0, PartitionAddress(0), 7, self.mend, waiter=self.hands
        )
        self.requests: list[PartitionRequest] = []
        self.given_up: set[PartitionRequest] = set()
        self.ended: dict[PartitionRequest, object] = {}

    def mend(self, lane: PartitionClient) -> None:
        assert lane is self.lane
        self.mended += 1

    def timeout_s(self, seconds: int) -> float:
        """So that the deadline is on the clock that the test moves."""
        return self.hands.clock.now + seconds + MARGIN_S - time.monotonic()

    @rule(seconds=st.integers(0, 5), is_push=st.booleans())
    def ask(self, seconds: int, is_push: bool) -> None:
        was_whole, before = self.lane.is_whole, len(self.server.sent)
        number = len(self.requests)
        if is_push:
            request = self.lane.push("push", self.timeout_s(seconds), "t", np.array([number]))
        else:
            request = self.lane.ask("pull", self.timeout_s(seconds), number)
        self.requests.append(request)
        assert len(self.server.sent) - before == (was_whole and not self.server.refuses)

    @rule(
        picked=st.integers(0, 1000),
        error=st.sampled_from(
            [None, MaybeExecuted("lost"), NotSent("lost"), BadArguments("never")]
        ),
    )
    def answer(self, picked: int, error: RpcError | None) -> None:
        under_way = self.server.under_way
        if under_way:
            call, _ = under_way.pop(picked % len(under_way))
            if error is None:
                call.set_result(picked)
            else:
                call.set_error(error)
            for request in self.requests:  # as a caller that waits
                request.done()

    @rule(refuses=st.booleans())
    def come_or_go(self, refuses: bool) -> None:
        self.server.refuses = refuses

    @rule()
    def round(self) -> None:
        """As the recovery has it: what is lost is sent in order, each request once."""
        self.server.sent.clear()
        sent = set[PartitionRequest]()
        while (is_whole := self.lane.repeat_some(sent)) is None:
            pass
        assert is_whole is self.lane.is_whole
        assert not is_whole or not self.server.refuses or not self.server.sent
        numbers = [self.number_of(args) for args in self.server.sent]
        assert numbers == sorted(set(numbers))

    def number_of(self, args: tuple[object, ...]) -> int:
        last = args[-1]
        return int(last[0]) if isinstance(last, np.ndarray) else last  # type: ignore[return-value]

    @rule(picked=st.integers(0, 1000))
    def give_up(self, picked: int) -> None:
        if self.requests:
            request = self.requests[picked % len(self.requests)]
            if not request.done():
                request.give_up()
                self.given_up.add(request)

    @rule(seconds=st.integers(0, 3))
    def let_time_pass(self, seconds: int) -> None:
        self.hands.turn()
        self.hands.clock.advance(seconds)
        self.hands.turn()
        calls = [self.number_of(args) for call, args in self.server.under_way if not call.done()]
        for number, request in enumerate(self.requests):
            if request.settled is not None and number not in calls:
                assert request.done() or request.deadline > self.hands.clock.now

    @invariant()
    def each_ends_once_and_what_has_ended_is_not_kept(self) -> None:
        self.hands.turn()
        for request in self.requests:
            if request.done():
                outcome = request.error() or "answered"
                assert self.ended.setdefault(request, outcome) is outcome
                assert request.args == () or not (request.sequence or request.settled)
            else:
                assert request not in self.ended
        pushes = [each for each in self.requests if each.sequence and not each.done()]
        assert self.lane.unanswered() == len(pushes)

    @invariant()
    def somebody_mends_a_lane_that_is_not_whole(self) -> None:
        assert self.lane.is_whole or self.mended > 0

    def teardown(self) -> None:
        self.server.refuses = False
        for _ in range(ROUNDS_MAX):
            while self.server.under_way:
                self.answer(0, None)
            self.round()
        self.each_ends_once_and_what_has_ended_is_not_kept()
        assert len(self.ended) == len(self.requests)
        assert self.lane.is_whole
        assert not len(self.hands.reactor.timers)
        self.hands.reactor.close()


TestAnyLosses = AnyLosses.TestCase
TestAnyLosses.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("is_push", [False, True])
def test_a_request_that_was_lost_says_so_where_its_deadline_ends_the_next_attempt(
    is_push: bool,
) -> None:
    server, hands = Server(), Hands()
    lane = PartitionClient(server, "kv", 0, PartitionAddress(0), 7, lambda lane: None, waiter=hands)
    request = lane.push("push", 5.0, "t", np.ones(1)) if is_push else lane.ask("pull", 5.0)
    lost = MaybeExecuted("it is gone") if is_push else NotSent("nobody is there")
    late = DeadlineExceeded("it was not sent within 0.005 s")
    for error in (lost, late):
        server.under_way.pop()[0].set_error(error)
        assert request.done() is (error is late)
        lane.repeat_some(set())
    what = "push 1" if is_push else "pull"
    known = "; it may have been applied, once" if is_push else ""
    assert isinstance(request.error(), DeadlineExceeded)
    assert str(request.error()) == (
        f"{what} to partition 0 of 'kv' (server 0) has no answer at its deadline{known}. "
        f"Last: {late}; before that: {lost}. Look at that server, or allow a larger timeout_s"
    )
    hands.turn()
    hands.reactor.close()


class Preceded:
    """A guard that another thread had just before the first one that wants it: it did that."""

    def __init__(self, guard: Any, before: Callable[[], object]) -> None:
        self.guard, self.before = guard, [before]

    def __enter__(self) -> None:
        while self.before:
            self.before.pop()()
        self.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self.guard.__exit__(*error)


def test_a_request_asked_as_the_last_lost_one_is_sent_is_sent_too() -> None:
    server, hands = Server(), Hands()
    lane = PartitionClient(server, "kv", 0, PartitionAddress(0), 7, lambda lane: None, waiter=hands)
    first = lane.ask("pull", 5.0, 1)
    server.under_way.pop()[0].set_error(NotSent("nobody is there"))
    assert not first.done()
    sent = set[PartitionRequest]()
    assert lane.repeat_some(sent) is None
    pending = lane._pending
    assert pending is not None
    # the reactor finds nothing more to send, between two looks of the thread that asks
    pending.guard = Preceded(pending.guard, lambda: lane.repeat_some(sent))  # type: ignore[assignment]
    second = lane.ask("pull", 5.0, 2)
    assert lane.is_whole
    assert [args for _, args in server.under_way] == [(1,), (2,)]
    for call, _ in server.under_way:
        call.set_result(None)
    assert first.done() and second.done()
    hands.turn()
    hands.reactor.close()
