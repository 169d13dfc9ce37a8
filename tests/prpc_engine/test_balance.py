"""Who gets a call: by policy, among the servers that work; those that fail are set aside, tried and
taken back.
"""

from __future__ import annotations

import threading
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine import errors
from prpc_engine.client.balance import (
    EJECTED_SHARE_MAX,
    EJECTION,
    FORGIVEN_S,
    LOCAL_ADVANTAGE,
    POLICIES,
    PROBE_S_MAX,
    WEIGHT_EJECTED,
    WEIGHTS,
    Balancer,
    Outcome,
    outcome_of,
)
from tests.helpers import ManualClock


class Route:
    """The way to a server, with a table of calls in flight."""

    def __init__(self, server_id: int, is_local: bool = False, in_flight: int = 0) -> None:
        self.server_id = server_id
        self.rank = 10 + server_id
        self.is_local = is_local
        self.in_flight = dict.fromkeys(range(in_flight))

    def __repr__(self) -> str:
        return f"route {self.server_id}"


def routes_of(*in_flight: int) -> list[Route]:
    return [Route(server_id, in_flight=calls) for server_id, calls in enumerate(in_flight)]


def balancer_of(
    routes: list[Route], seed: int, policy: str = "least_outstanding"
) -> Balancer[Route]:
    return Balancer(routes, Random(seed), policy)


def fail_until_ejected(
    balancer: Balancer[Route], route: Route, now: float, outcome: Outcome = Outcome.UNSENT
) -> int:
    """How many failures in a row it took."""
    for failures in range(1, WEIGHT_EJECTED + 1):
        balancer.report(route, outcome, now)
        if states(balancer, now).get(route.server_id) == "ejected":
            return failures
    raise AssertionError(f"{route} is not ejected")


def states(balancer: Balancer[Route], now: float) -> dict[int, str]:
    return {one.server_id: one.state for one in balancer.statistics(now).ailing}


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_no_route_is_no_choice_and_one_route_is_the_choice(policy: str, seed: int) -> None:
    balancer = balancer_of([], seed, policy)
    assert balancer.pick(0.0) is None
    only = Route(0)
    balancer.set_routes([only])
    assert balancer.pick(0.0) is only
    assert balancer.pick(0.0, avoid=[only]) is only


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(
        errors.ConfigError,
        match="'fastest' is not known: use one of 'least_outstanding', 'random', 'round_robin'",
    ):
        Balancer([], Random(0), "fastest")
    with pytest.raises(errors.ConfigError, match="local_advantage=-1"):
        Balancer([], Random(0), local_advantage=-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_equal_servers_about_equal_shares(policy: str, seed: int) -> None:
    routes = routes_of(0, 0, 0, 0)
    balancer = balancer_of(routes, seed, policy)
    shares = Counter(balancer.pick(0.0) for _ in range(4000))
    assert min(shares[route] for route in routes) > 800  # 1000 expected, with a deviation of 27


def test_of_two_servers_the_one_with_fewer_calls_in_flight_gets_it(seed: int) -> None:
    routes = routes_of(3, 2)
    balancer = balancer_of(routes, seed)
    assert {balancer.pick(0.0) for _ in range(100)} == {routes[1]}


def test_the_most_loaded_of_several_servers_gets_none(seed: int) -> None:
    routes = routes_of(5, 1, 1, 7, 1)
    balancer = balancer_of(routes, seed)
    assert routes[3] not in {balancer.pick(0.0) for _ in range(1000)}


def test_calls_spread_by_two_choices_end_up_nearly_even(seed: int) -> None:
    routes = routes_of(*[0] * 10)
    balancer = balancer_of(routes, seed)
    for call in range(1000):
        chosen = balancer.pick(0.0)
        assert chosen is not None
        chosen.in_flight[call] = None
    assert (
        max(len(route.in_flight) for route in routes)
        - min(len(route.in_flight) for route in routes)
        <= 20
    )


def test_a_local_server_counts_as_having_some_calls_less(seed: int) -> None:
    remote, local = Route(0), Route(1, is_local=True, in_flight=LOCAL_ADVANTAGE - 1)
    balancer = balancer_of([remote, local], seed)
    assert {balancer.pick(0.0) for _ in range(100)} == {local}
    local.in_flight[98] = None  # as many as its advantage
    assert {balancer.pick(0.0) for _ in range(100)} == {local, remote}
    local.in_flight[99] = None
    assert {balancer.pick(0.0) for _ in range(100)} == {remote}


def test_local_first_leaves_the_host_only_when_no_local_server_is_left(
    seed: int, clock: ManualClock
) -> None:
    routes = [
        Route(0),
        Route(1, is_local=True, in_flight=9),
        Route(2),
        Route(3, is_local=True, in_flight=50),
    ]
    balancer = balancer_of(routes, seed, "local_first")
    assert {balancer.pick(clock()) for _ in range(100)} == {routes[1]}
    fail_until_ejected(balancer, routes[1], clock())
    assert {balancer.pick(clock()) for _ in range(100)} == {routes[3]}
    balancer.set_routes([routes[0], routes[2]])
    assert {balancer.pick(clock()) for _ in range(100)} == {routes[0], routes[2]}


@given(count=st.integers(1, 12), rounds=st.integers(1, 5), start=st.integers(0, 2**32))
def test_round_robin_gives_everyone_exactly_the_same(count: int, rounds: int, start: int) -> None:
    routes = routes_of(*[0] * count)
    balancer = balancer_of(routes, start, "round_robin")
    picks = [balancer.pick(0.0) for _ in range(count * rounds)]
    assert Counter(picks) == dict.fromkeys(routes, rounds)
    assert all(set(picks[at : at + count]) == set(routes) for at in range(count * (rounds - 1) + 1))


def test_round_robin_from_many_threads_gives_everyone_exactly_the_same(seed: int) -> None:
    routes = routes_of(0, 0, 0)
    balancer = Balancer(routes, Random(seed), "round_robin", guard=threading.Lock())
    picks: list[list[Route | None]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(
            target=lambda mine: mine.extend(balancer.pick(0.0) for _ in range(300)), args=(mine,)
        )
        for mine in picks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(route for mine in picks for route in mine) == dict.fromkeys(routes, 400)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_route_to_avoid_is_picked_only_when_there_is_no_other(
    policy: str, seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 9, 9)
    balancer = balancer_of(routes, seed, policy)
    assert {balancer.pick(clock(), avoid=routes[:1]) for _ in range(100)} <= set(routes[1:])
    assert {balancer.pick(clock(), avoid=routes[:2]) for _ in range(100)} == {routes[2]}
    assert balancer.pick(clock(), avoid=routes) in routes
    fail_until_ejected(balancer, routes[2], clock())
    assert {balancer.pick(clock(), avoid=routes[:1]) for _ in range(100)} == {routes[1]}
    # they failed once, the ejected one failed more
    assert balancer.pick(clock(), avoid=routes[:2]) in routes[:2]


# -- ejection --------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", WEIGHTS)
def test_a_server_that_fails_in_a_row_is_ejected(
    outcome: Outcome, seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 5)
    balancer = balancer_of(routes, seed)
    assert (
        fail_until_ejected(balancer, routes[0], clock(), outcome)
        == WEIGHT_EJECTED // WEIGHTS[outcome]
    )
    assert {balancer.pick(clock()) for _ in range(100)} == {routes[1]}


def test_an_answer_ends_the_row_and_nothing_is_kept_of_it(seed: int, clock: ManualClock) -> None:
    routes = routes_of(0, 0)
    balancer = balancer_of(routes, seed)
    for _ in range(20):
        balancer.report(routes[0], Outcome.LOST, clock())
        balancer.report(routes[0], Outcome.LOST, clock())
        assert states(balancer, clock()) == {0: "suspect"}
        balancer.report(routes[0], Outcome.OK, clock())
        assert not balancer.ailing


def test_an_ok_of_a_server_that_is_well_leaves_no_trace(seed: int, clock: ManualClock) -> None:
    routes = routes_of(0, 0)
    balancer = balancer_of(routes, seed)
    balancer.report(routes[0], Outcome.OK, clock())
    assert not balancer.ailing


def test_when_its_time_is_over_one_call_at_a_time_probes_it(seed: int, clock: ManualClock) -> None:
    routes = routes_of(0, 5)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock())
    clock.advance(EJECTION.bound_s(1))
    assert balancer.pick(clock()) is routes[0]
    assert states(balancer, clock()) == {0: "probing"}
    assert {balancer.pick(clock()) for _ in range(100)} == {routes[1]}
    balancer.report(routes[0], Outcome.OK, clock())
    assert balancer.pick(clock()) is routes[0]  # it has fewer calls in flight
    assert balancer.statistics(clock()).probes == 1


def test_a_probe_that_fails_ejects_for_about_twice_as_long_up_to_the_bound(
    seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 0)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock())
    for ejections in range(1, 12):
        (one,) = balancer.statistics(clock()).ailing
        bound_s = min(EJECTION.max_s, EJECTION.first_s * 2 ** (ejections - 1))
        assert (one.state, one.ejections) == ("ejected", ejections)
        assert bound_s / 2 <= one.probed_in_s <= bound_s
        clock.advance(one.probed_in_s / 2)
        assert balancer.pick(clock()) is routes[1]
        clock.advance(one.probed_in_s)
        assert balancer.pick(clock()) is routes[0]
        balancer.report(routes[0], Outcome.UNSENT, clock())


def test_a_probe_without_an_outcome_is_followed_by_another(seed: int, clock: ManualClock) -> None:
    routes = routes_of(0, 0)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock())
    clock.advance(EJECTION.max_s)
    assert balancer.pick(clock()) is routes[0]
    clock.advance(PROBE_S_MAX * 0.99)
    assert balancer.pick(clock()) is routes[1]
    clock.advance(PROBE_S_MAX * 0.02)
    assert balancer.pick(clock()) is routes[0]


def test_a_call_from_before_that_fails_late_does_not_lengthen_the_time(
    seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 0)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock())
    before = balancer.statistics(clock()).ailing[0]
    for _ in range(50):
        balancer.report(routes[0], Outcome.LOST, clock())
    after = balancer.statistics(clock()).ailing[0]
    assert (after.ejections, after.probed_in_s) == (before.ejections, before.probed_in_s)
    assert after.failures == before.failures + 50


def test_any_answer_of_an_ejected_server_brings_it_back(seed: int, clock: ManualClock) -> None:
    routes = routes_of(0, 9)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock(), Outcome.DEADLINE)
    balancer.report(routes[0], Outcome.OK, clock())
    assert balancer.pick(clock()) is routes[0]


def test_who_fails_soon_after_coming_back_is_ejected_for_longer_and_who_lasts_is_forgiven(
    seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 0)
    balancer = balancer_of(routes, seed)
    for ejections in (1, 2, 3):
        fail_until_ejected(balancer, routes[0], clock())
        assert balancer.statistics(clock()).ailing[0].ejections == ejections
        balancer.report(routes[0], Outcome.OK, clock())
        clock.advance(FORGIVEN_S * 0.9)
        balancer.report(routes[0], Outcome.OK, clock())
        assert states(balancer, clock()) == {0: "suspect"}
    clock.advance(FORGIVEN_S)
    balancer.report(routes[0], Outcome.OK, clock())
    assert not balancer.ailing


@pytest.mark.parametrize(("servers", "ejected"), [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_only_a_share_of_all_servers_is_ejected_at_a_time(
    servers: int, ejected: int, seed: int, clock: ManualClock
) -> None:
    routes = routes_of(*[0] * servers)
    balancer = balancer_of(routes, seed)
    for route in routes:
        for _ in range(10):
            balancer.report(route, Outcome.UNSENT, clock())
    statistics = balancer.statistics(clock())
    assert (
        sum(one.state == "ejected" for one in statistics.ailing)
        == ejected
        <= servers * EJECTED_SHARE_MAX
    )
    # the third of each row would have ejected
    assert statistics.spared == (servers - ejected) * (10 - 2)
    assert {balancer.pick(clock()) for _ in range(200)} == set(routes[ejected:])


def test_when_all_that_are_left_are_ejected_the_one_whose_time_ends_first_is_picked(
    seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 0, 0, 0)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock())
    clock.advance(EJECTION.first_s * 0.4)
    fail_until_ejected(balancer, routes[1], clock())
    balancer.set_routes(routes[:2])
    sooner, later = sorted(balancer.statistics(clock()).ailing, key=lambda one: one.probed_in_s)
    assert {balancer.pick(clock()) for _ in range(10)} == {routes[sooner.server_id]}
    assert balancer.pick(clock(), avoid=[routes[sooner.server_id]]) is routes[later.server_id]
    assert balancer.pick(clock(), avoid=routes[:2]) is routes[sooner.server_id]
    assert balancer.statistics(clock()).last_resorts == 12


def test_routes_that_stay_keep_their_state_and_those_that_leave_lose_it(
    seed: int, clock: ManualClock
) -> None:
    routes = routes_of(0, 0, 0, 0)
    balancer = balancer_of(routes, seed)
    fail_until_ejected(balancer, routes[0], clock())
    fail_until_ejected(balancer, routes[1], clock())
    newcomer = Route(9)
    balancer.set_routes([routes[0], routes[2], newcomer])
    assert balancer.routes == (routes[0], routes[2], newcomer)
    assert states(balancer, clock()) == {0: "ejected"}
    assert {balancer.pick(clock()) for _ in range(100)} == {routes[2], newcomer}
    balancer.report(routes[1], Outcome.LOST, clock())  # a call that was in flight when it left
    assert states(balancer, clock()) == {0: "ejected"}
    balancer.set_routes(routes)
    assert routes[1] in {balancer.pick(clock()) for _ in range(100)}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.integers(0, 5), st.sampled_from(Outcome)),
        st.tuples(st.just("advance"), st.floats(0.0, 12.0), st.none()),
        st.tuples(st.just("routes"), st.sets(st.integers(0, 5), min_size=1), st.none()),
        st.tuples(st.just("pick"), st.sets(st.integers(0, 5)), st.none()),
    ),
    max_size=120,
)


@given(policy=st.sampled_from(list(POLICIES)), start=st.integers(0, 2**32), events=EVENTS)
def test_an_ejected_server_is_picked_only_to_probe_it_or_when_no_other_is_there(
    policy: str, start: int, events: list[tuple[str, object, object]]
) -> None:
    everyone = routes_of(0, 0, 0, 0, 0, 0)
    clock = ManualClock()
    balancer = balancer_of(everyone, start, policy)
    for event, what, outcome in events:
        if event == "report":
            before = balancer.statistics(clock()).ejections
            balancer.report(everyone[what], outcome, clock())  # type: ignore[index, arg-type]
            if balancer.statistics(clock()).ejections > before:
                ejected = [
                    one for one in balancer.statistics(clock()).ailing if one.state != "suspect"
                ]
                assert len(ejected) < len(balancer.routes)
                # What left may have made the share larger than allowed; a probe that failed does
                # not change it.
                assert len(ejected) <= max(1, len(everyone) * EJECTED_SHARE_MAX)
        elif event == "advance":
            clock.advance(what)  # type: ignore[arg-type]
        elif event == "routes":
            balancer.set_routes([everyone[number] for number in sorted(what)])  # type: ignore[call-overload]
        else:
            avoid = [everyone[number] for number in what]  # type: ignore[attr-defined]
            unfit = {
                number: state
                for number, state in states(balancer, clock()).items()
                if state != "suspect"
            }
            due = balancer.statistics(clock()).probes
            chosen = balancer.pick(clock(), avoid)
            assert chosen in balancer.routes
            was_probe = balancer.statistics(clock()).probes > due
            others = {route.server_id for route in balancer.routes} - unfit.keys()
            if chosen.server_id in unfit:
                assert was_probe or not others
            elif chosen in avoid:
                assert others <= {route.server_id for route in avoid}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.OK),
        (
            errors.RemoteError("x", type_name="ValueError", remote_message="", remote_traceback=""),
            Outcome.OK,
        ),
        (errors.UnknownMethod("x"), Outcome.OK),
        (errors.NotSent("x"), Outcome.UNSENT),
        (errors.UnknownService("x"), Outcome.UNSENT),
        (errors.Stopping("x"), Outcome.UNSENT),
        (errors.MaybeExecuted("x"), Outcome.LOST),
        (errors.DeadlineExceeded("x"), Outcome.DEADLINE),
        (errors.Backpressure("x"), Outcome.BACKPRESSURE),
        (errors.Cancelled("x"), None),
        (errors.BadArguments("x"), None),
        (errors.Closed("x"), None),
    ],
)
def test_an_error_says_what_it_says_about_the_server(
    error: BaseException | None, outcome: Outcome | None
) -> None:
    assert outcome_of(error) is outcome
