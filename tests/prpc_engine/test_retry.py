"""What follows a failed or slow attempt: another within the deadline and the budget, or an error
that tells of all attempts.
"""

from __future__ import annotations

import threading
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine import errors
from prpc_engine.client.balance import Balancer
from prpc_engine.client.retry import (
    ATTEMPTS_MAX,
    BUDGET_RESERVE,
    FAILURES_TOLD_MAX,
    RETRY_BACKOFF,
    UNSENT_S_MAX,
    GiveUp,
    Retry,
    RetryBudget,
    RetryPolicy,
    RetryState,
    is_retriable,
)
from prpc_engine.rpc.call import NEVER
from tests.helpers import ManualClock

REMOTE = errors.RemoteError(
    "boom", type_name="ValueError", remote_message="boom", remote_traceback=""
)
UNLIMITED = 1e9


def state_of(
    seed: int,
    clock: ManualClock,
    policy: RetryPolicy | None = None,
    budget: RetryBudget | None = None,
) -> RetryState[str]:
    return RetryState(
        policy or RetryPolicy(), budget or RetryBudget(), Random(seed), "work", clock()
    )


# -- which errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_idempotent", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        errors.NotSent("x"),
        errors.UnknownService("x"),
        errors.Backpressure("x"),
        errors.Stopping("x"),
    ],
)
def test_what_did_not_run_is_tried_again_elsewhere(
    error: errors.RpcError, is_idempotent: bool, seed: int, clock: ManualClock
) -> None:
    decision = state_of(seed, clock).decide(error, "a", clock(), NEVER, is_idempotent)
    assert isinstance(decision, Retry)
    assert decision.avoid == ("a",)


@pytest.mark.parametrize("error", [errors.MaybeExecuted("x"), errors.DeadlineExceeded("x")])
def test_what_may_have_run_is_tried_again_only_where_running_twice_is_harmless(
    error: errors.RpcError, seed: int, clock: ManualClock
) -> None:
    assert isinstance(state_of(seed, clock).decide(error, "a", clock(), NEVER, True), Retry)
    decision = state_of(seed, clock).decide(error, "a", clock(), NEVER, False)
    assert decision == GiveUp(
        "not retried: 'work' may have run, and is not registered as idempotent"
    )


@pytest.mark.parametrize(
    "error",
    [
        REMOTE,
        errors.UnknownMethod("x"),
        errors.BadArguments("x"),
        errors.NotAllowed("x"),
        errors.Rejected("the name is taken"),
        errors.Cancelled("x"),
        errors.Closed("x"),
        errors.AuthenticationFailed("x"),
        errors.ShmFull("x"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_answer_and_what_fails_everywhere_is_never_tried_again(
    error: BaseException, seed: int, clock: ManualClock
) -> None:
    assert not is_retriable(error)
    state = state_of(seed, clock)
    decision = state.decide(error, "a", clock(), NEVER, True)
    assert decision == GiveUp("")
    assert state.final_error(error, decision, clock()) is error


# -- when ------------------------------------------------------------------------------------------


def test_what_reached_nobody_goes_on_at_once_at_new_servers_and_then_ever_more_slowly(
    seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock)
    delays = []
    for route, kind in zip(
        "abcabca", [errors.NotSent, errors.Stopping, *[errors.NotSent] * 5], strict=True
    ):
        decision = state.decide(kind("x"), route, clock(), NEVER, False)
        assert isinstance(decision, Retry)
        delays.append(decision.delay_s)
    assert delays[:3] == [0.0, 0.0, 0.0]
    assert all(
        0.0 < delay_s <= RETRY_BACKOFF.bound_s(waits) for waits, delay_s in enumerate(delays[3:], 1)
    )
    assert decision.avoid == ("a", "b", "c")


def test_when_there_is_no_server_at_all_the_call_waits_a_little(
    seed: int, clock: ManualClock
) -> None:
    decision = state_of(seed, clock).decide(errors.NoServer("x"), None, clock(), NEVER, False)
    assert isinstance(decision, Retry)
    assert decision.delay_s > 0.0 and decision.avoid == ()


def test_a_server_that_refuses_is_left_alone_for_a_while_from_the_first_time(
    seed: int, clock: ManualClock
) -> None:
    decision = state_of(seed, clock).decide(errors.Backpressure("x"), "a", clock(), NEVER, False)
    assert isinstance(decision, Retry)
    assert 0.0 < decision.delay_s <= RETRY_BACKOFF.first_s


@pytest.mark.parametrize(
    "error", [errors.NotSent("x"), errors.Backpressure("x"), errors.MaybeExecuted("x")]
)
def test_after_the_deadline_nothing_is_tried(
    error: errors.RpcError, seed: int, clock: ManualClock
) -> None:
    deadline = clock() + 1.0
    clock.advance(1.0)
    assert state_of(seed, clock).decide(error, "a", clock(), deadline, True) == GiveUp(
        "the deadline is over"
    )


def test_what_would_wait_beyond_the_deadline_gives_up_at_once_and_costs_no_budget(
    seed: int, clock: ManualClock
) -> None:
    budget = RetryBudget()
    decision = state_of(seed, clock, budget=budget).decide(
        errors.Backpressure("x"), "a", clock(), clock() + 1e-9, False
    )
    assert isinstance(decision, GiveUp)
    assert decision.reason.startswith(
        "the deadline comes before the next attempt, which was due in 0.0"
    )
    assert budget.taken == 0


def test_attempts_that_reached_a_server_and_those_that_did_not_have_bounds_of_their_own(
    seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock, budget=RetryBudget(reserve=UNLIMITED))
    for attempt in range(1, ATTEMPTS_MAX):
        assert isinstance(
            state.decide(errors.NotSent("x"), f"dead {attempt}", clock(), NEVER, False), Retry
        )
        assert isinstance(
            state.decide(errors.Backpressure("x"), f"full {attempt}", clock(), NEVER, False), Retry
        )
    decision = state.decide(errors.Backpressure("x"), "full", clock(), NEVER, False)
    assert decision == GiveUp(f"given up after attempts_max={ATTEMPTS_MAX} attempts")
    state = state_of(seed, clock, RetryPolicy(unsent_max=8))
    for _ in range(1, 8):
        assert isinstance(state.decide(errors.NotSent("x"), "a", clock(), NEVER, False), Retry)
    decision = state.decide(errors.NotSent("x"), "a", clock(), NEVER, False)
    assert decision == GiveUp("given up after unsent_max=8 attempts that reached nobody")


@pytest.mark.parametrize("timeout_s", [0.5, 20.0, 300.0])
def test_what_reaches_nobody_is_tried_until_its_deadline_with_pauses(
    timeout_s: float, seed: int, clock: ManualClock
) -> None:
    state, started, attempts = state_of(seed, clock), clock(), 0
    while True:
        attempts += 1
        decision = state.decide(errors.NotSent("refused"), "a", clock(), started + timeout_s, False)
        if isinstance(decision, GiveUp):
            break
        clock.advance(decision.delay_s)
    assert decision.reason.startswith("the deadline comes before the next attempt")
    assert clock() - started > timeout_s - 1.0, "no earlier than the longest pause before it"
    assert attempts < 30 + 4 * timeout_s
    final = state.final_error(errors.NotSent("refused"), decision, clock())
    assert f"(tried {attempts} times in" in str(final) and f"NotSent at a {attempts} times;" in str(
        final
    )


def test_a_call_without_a_deadline_is_not_tried_for_ever(seed: int, clock: ManualClock) -> None:
    state, started = state_of(seed, clock), clock()
    while isinstance(
        decision := state.decide(errors.NotSent("refused"), "a", clock(), NEVER, False), Retry
    ):
        clock.advance(decision.delay_s)
    assert decision == GiveUp("given up after 30 s: the call has no deadline of its own")
    assert 0.0 <= clock() - started - UNSENT_S_MAX < 1.0


def test_an_error_names_some_kinds_of_failures_and_counts_the_others(
    seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock)
    for route in [f"server {number}" for number in range(FAILURES_TOLD_MAX + 5)] * 2:
        state.record(errors.NotSent("refused"), route)
    text = str(state.final_error(errors.NotSent("refused"), GiveUp(""), clock()))
    assert "tried 26 times" in text and "NotSent at server 7 2 times, 10 more)" in text


ERRORS = [
    errors.NotSent,
    errors.Backpressure,
    errors.UnknownService,
    errors.MaybeExecuted,
    errors.DeadlineExceeded,
    errors.NoServer,
]


@given(
    failures=st.lists(
        st.tuples(st.sampled_from(ERRORS), st.sampled_from("abc"), st.floats(0.0, 0.2)),
        min_size=11,
        max_size=12,
    ),
    timeout_s=st.floats(0.0, 2.0),
    is_idempotent=st.booleans(),
    start=st.integers(0, 2**32),
)
def test_whatever_fails_a_call_keeps_its_bounds_and_no_attempt_begins_after_its_deadline(
    failures: list[tuple[type[errors.RpcError], str, float]],
    timeout_s: float,
    is_idempotent: bool,
    start: int,
) -> None:
    clock = ManualClock()
    deadline = clock() + timeout_s
    policy = RetryPolicy(attempt_s=0.1, unsent_max=8)
    state = state_of(start, clock, policy)
    sent = unsent = 0
    for kind, route, took_s in failures:
        given_s = policy.timeout_s(clock(), deadline)
        assert given_s is not None and given_s <= min(0.1, deadline - clock())
        clock.advance(min(took_s, given_s))
        error = kind("x")
        decision = state.decide(error, route, clock(), deadline, is_idempotent)
        sent, unsent = (
            (sent, unsent + 1) if isinstance(error, errors.NotSent) else (sent + 1, unsent)
        )
        assert sent <= policy.attempts_max and unsent <= 8
        if isinstance(decision, GiveUp):
            final = state.final_error(error, decision, clock())
            assert f"(tried {sent + unsent} times" in str(final) or sent + unsent == 1
            return
        clock.advance(decision.delay_s)
        assert clock() < deadline
    raise AssertionError(f"still trying after {len(failures)} failures")


def test_an_attempt_gets_its_own_time_or_what_the_call_has_left() -> None:
    assert RetryPolicy().timeout_s(10.0, 12.0) == 2.0
    assert RetryPolicy(attempt_s=0.5).timeout_s(10.0, 12.0) == 0.5
    assert RetryPolicy(attempt_s=5.0).timeout_s(10.0, 12.0) == 2.0
    assert RetryPolicy(attempt_s=5.0).timeout_s(10.0, 9.0) == 0.0
    assert RetryPolicy(attempt_s=5.0).timeout_s(10.0, NEVER) == 5.0
    assert RetryPolicy().timeout_s(10.0, NEVER) is None


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"attempts_max": 0}, "attempts_max=0"),
        ({"unsent_max": 0}, "unsent_max=0"),
        ({"attempt_s": 0.0}, r"attempt_s=0\.0"),
    ],
)
def test_bounds_that_allow_no_attempt_are_refused(bounds: dict[str, float], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        RetryPolicy(**bounds)  # type: ignore[arg-type]


def test_a_call_finds_the_one_server_of_five_that_lives_at_once(
    seed: int, clock: ManualClock
) -> None:
    class Server:
        def __init__(self, server_id: int) -> None:
            self.server_id = self.rank = server_id
            self.is_local = False
            self.in_flight: tuple[()] = ()

    servers = [Server(number) for number in range(5)]
    balancer = Balancer(servers, Random(seed))
    state: RetryState[Server] = RetryState(
        RetryPolicy(), RetryBudget(), Random(seed), "work", clock()
    )
    chosen = balancer.pick(clock())
    attempts = 1
    while chosen is not servers[3]:
        decision = state.decide(errors.NotSent("refused"), chosen, clock(), clock() + 1.0, False)
        assert isinstance(decision, Retry) and decision.delay_s == 0.0
        chosen = balancer.pick(clock(), decision.avoid)
        attempts += 1
    assert attempts <= 5


# -- the budget ------------------------------------------------------------------------------------


def test_in_an_overload_a_client_sends_a_fifth_more_and_not_three_times_as_much(
    seed: int, clock: ManualClock
) -> None:
    budget = RetryBudget(share=0.2, per_s=0.0)
    for _ in range(1000):
        budget.count_call()
        state = state_of(seed, clock, budget=budget)
        while isinstance(
            state.decide(errors.Backpressure("full"), "a", clock(), NEVER, False), Retry
        ):
            pass
    assert budget.calls == 1000
    assert budget.taken == pytest.approx(0.2 * 1000 + BUDGET_RESERVE, abs=1)


def test_what_reached_nobody_costs_no_budget(seed: int, clock: ManualClock) -> None:
    budget = RetryBudget(reserve=0.0)
    assert isinstance(
        state_of(seed, clock, budget=budget).decide(
            errors.NotSent("x"), "a", clock(), NEVER, False
        ),
        Retry,
    )
    refused = state_of(seed, clock, budget=budget).decide(
        errors.Backpressure("x"), "a", clock(), NEVER, False
    )
    assert isinstance(refused, GiveUp)
    assert refused.reason == (
        "not retried: the budget for retries is spent (20% of the calls and 1 a second, "
        "0 taken and 1 refused so far)"
    )


def test_a_client_of_few_calls_gets_its_budget_back_by_time(clock: ManualClock) -> None:
    budget = RetryBudget(share=0.0, reserve=2.0, per_s=0.5)
    assert [budget.try_take(clock()) for _ in range(3)] == [True, True, False]
    clock.advance(2.0)
    assert [budget.try_take(clock()) for _ in range(2)] == [True, False]
    clock.advance(3600.0)
    assert [budget.try_take(clock()) for _ in range(3)] == [True, True, False]


@given(
    events=st.lists(
        st.one_of(st.just("call"), st.just("retry"), st.floats(0.0, 5.0)), max_size=300
    ),
    share=st.floats(0.0, 1.0),
    reserve=st.floats(0.0, 10.0),
    per_s=st.floats(0.0, 3.0),
)
def test_over_any_time_retries_are_within_reserve_share_and_rate(
    events: list[str | float], share: float, reserve: float, per_s: float
) -> None:
    clock = ManualClock(0.0)
    budget = RetryBudget(share, reserve, per_s)
    looks = [(0.0, 0, 0)]  # when, calls, retries granted so far
    calls = retries = 0
    for event in events:
        if isinstance(event, float):
            clock.advance(event)
        elif event == "call":
            budget.count_call()
            calls += 1
        else:
            retries += budget.try_take(clock())
        looks.append((clock(), calls, retries))
    for since, calls_then, retries_then in looks:
        allowed = reserve + share * (calls - calls_then) + per_s * (clock() - since)
        assert retries - retries_then <= allowed + 1e-6


def test_threads_together_get_no_more_than_the_budget_holds() -> None:
    budget = RetryBudget(share=0.0, reserve=100.0, per_s=0.0, guard=threading.Lock())
    taken: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: taken.append(sum(budget.try_take(1.0) for _ in range(1000)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == budget.taken == 100
    assert budget.refused == 3900


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"share=-0\.1"):
        RetryBudget(share=-0.1)


# -- the error at the end --------------------------------------------------------------------------


def test_the_final_error_says_how_often_where_and_for_how_long_it_was_tried(
    seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock, RetryPolicy(unsent_max=4))
    for route in (
        "server 0 of 'sum' (rank 1)",
        "server 1 of 'sum' (rank 2)",
        "server 1 of 'sum' (rank 2)",
    ):
        assert isinstance(state.decide(errors.NotSent("x"), route, clock(), NEVER, False), Retry)
        clock.advance(0.1)
    error = errors.NoServer("'sum' has no live server")
    decision = state.decide(error, None, clock(), NEVER, False)
    assert isinstance(decision, GiveUp)
    final = state.final_error(error, decision, clock())
    assert final is error
    assert str(final) == (
        "'sum' has no live server (tried 4 times in 0.300 s: NotSent at server 0 of 'sum' (rank "
        "1), "
        "NotSent at server 1 of 'sum' (rank 2) 2 times, NoServer at no server; "
        "given up after unsent_max=4 attempts that reached nobody)"
    )


def test_the_traceback_of_a_handler_stays_below_the_first_line(
    seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock)
    state.decide(errors.NotSent("x"), "a", clock(), NEVER, False)
    error = errors.RemoteError(
        "'f' raised\n\nTraceback ...", type_name="E", remote_message="m", remote_traceback="t"
    )
    decision = state.decide(error, "b", clock(), NEVER, False)
    assert isinstance(decision, GiveUp)
    final = state.final_error(error, decision, clock())
    assert final is error
    assert (
        str(final)
        == "'f' raised (tried 2 times in 0.000 s: NotSent at a, RemoteError at b)\n\nTraceback ..."
    )
    assert (error.type_name, error.remote_traceback) == ("E", "t")


@pytest.mark.parametrize("last", [errors.NotSent, errors.NoServer, errors.Backpressure])
def test_a_call_that_may_have_run_never_ends_in_an_error_that_says_it_did_not(
    last: type[errors.RpcError], seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock, RetryPolicy(attempts_max=2, unsent_max=1))
    state.decide(errors.MaybeExecuted("lost"), "a", clock(), NEVER, True)
    error = last("the last")
    decision = state.decide(error, "b", clock(), NEVER, True)
    assert isinstance(decision, GiveUp)
    final = state.final_error(error, decision, clock())
    assert type(final) is errors.MaybeExecuted
    assert final.__cause__ is error
    assert str(final).startswith(
        f"the last (tried 2 times in 0.000 s: MaybeExecuted at a, {last.__name__} at b; "
        "given up after"
    )


def test_a_repeat_that_finds_no_memory_here_does_not_say_that_the_call_did_not_run(
    seed: int, clock: ManualClock
) -> None:
    """Seed 8000059 of calls with arrays, of a `once` method, among faults."""
    state = state_of(seed, clock)
    assert isinstance(
        state.decide(errors.MaybeExecuted("lost"), "a", clock(), NEVER, False, True), Retry
    )
    error = errors.ShmFull("no memory for a copy")
    decision = state.decide(error, "a", clock(), NEVER, False, True)
    assert isinstance(decision, GiveUp)
    final = state.final_error(error, decision, clock())
    assert type(final) is errors.MaybeExecuted
    assert final.__cause__ is error


def test_memory_that_is_refused_at_the_first_attempt_is_told_as_it_is(
    seed: int, clock: ManualClock
) -> None:
    state, error = state_of(seed, clock), errors.ShmFull("no memory for a copy")
    decision = state.decide(error, "a", clock(), NEVER, False, True)
    assert isinstance(decision, GiveUp)
    assert state.final_error(error, decision, clock()) is error
    assert not state.may_have_run


def test_an_error_of_a_single_attempt_is_left_as_it_is_but_for_the_reason(
    seed: int, clock: ManualClock
) -> None:
    state = state_of(seed, clock)
    error = errors.MaybeExecuted("lost")
    decision = state.decide(error, "a", clock(), NEVER, False)
    assert isinstance(decision, GiveUp)
    assert str(state.final_error(error, decision, clock())) == (
        "lost (tried once in 0.000 s: MaybeExecuted at a; not retried: 'work' may have run, "
        "and is not registered as idempotent)"
    )
