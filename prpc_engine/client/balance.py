"""Which server gets the next call. Decides only: no clock, no I/O and no threads here; `now` and
the randomness are handed in.

    policy             who gets it, of those that are not ejected
    least_outstanding  the one with fewer calls in flight of two chosen at random; a local one
                       counts as having some less
    random             each as likely as the others
    round_robin        one after the other
    local_first        as least_outstanding among the local ones; where there is none, among all

A server that keeps failing is set aside for a while, then one call at a time tries it:

    state    event                                   next
    well     failure                                 suspect  (weighed by WEIGHTS)
    suspect  ok, and it was not ejected lately       well     (forgotten: nothing is kept of those
                                                              that are well)
    suspect  ok, but it was                          suspect  (its row of failures ends; FORGIVEN_S
                                                              later it is well)
    suspect  failures in a row weigh WEIGHT_EJECTED  ejected  (unless EJECTED_SHARE_MAX of all are:
                                                              then it stays)
    ejected  its time is over, and a pick comes      probing  (that pick gets it, others do not)
    ejected  failure, of a call from before          ejected  (known already)
    probing  failure                                 ejected  (for about twice as long as the last
                                                              time)
    probing  no word for PROBE_S_MAX, a pick comes   probing  (that pick gets it: the first may have
                                                              been cancelled)
    ejected  ok, of whatever call                    suspect
    probing  ok                                      suspect

Invariant: a pick gives an ejected server only when no other is left, and then the one whose time
ends first. So ejection alone never leaves a caller without a server.

`ailing` holds all that are not well. While it is empty, which is the rule, an ok need not be
reported and `now` is not looked at.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from prpc_engine.errors import (
    Backpressure,
    ConfigError,
    DeadlineExceeded,
    MaybeExecuted,
    NotSent,
    RemoteError,
    Stopping,
    UnknownMethod,
    UnknownService,
)
from prpc_engine.rpc.backoff import Backoff

# How much sooner a local server is asked than a remote one, in calls in flight. Shared memory
# answers a small call in a fraction of what tcp takes, so one or two waiting there are still
# overtaken by nobody; more, and the local server is the slower one.
LOCAL_ADVANTAGE = 2

# Failures in a row that eject: 3 that say nobody is there, or 6 that a merely busy server would
# show as well.
WEIGHT_EJECTED = 6
# When half of the servers fail, the fault lies with us, the network or the load: to send all calls
# to the few that are left would end those, too.
EJECTED_SHARE_MAX = 0.5
# For this long after it is back, an ejected server that fails again is ejected for twice as long as
# before.
FORGIVEN_S = 30.0
# A probe without an outcome (its caller gave it up) keeps others from probing for so long.
PROBE_S_MAX = 5.0


class Outcome(enum.Enum):
    """How one attempt at one server ended, as far as it says something about the server's health.
    The balancer is told.
    """

    OK = "ok"  # it answered: with a value, or that its handler raised
    UNSENT = "unsent"  # it could not be reached, or takes on nothing (more)
    LOST = "lost"  # the connection ended before it answered
    DEADLINE = "deadline"  # it did not answer in time
    BACKPRESSURE = "backpressure"  # it, or the queue towards it, is full


WEIGHTS = {Outcome.UNSENT: 2, Outcome.LOST: 2, Outcome.DEADLINE: 1, Outcome.BACKPRESSURE: 1}
_OUTCOMES: tuple[tuple[type[BaseException], Outcome], ...] = (
    (NotSent, Outcome.UNSENT),
    (Stopping, Outcome.UNSENT),
    (UnknownService, Outcome.UNSENT),
    (MaybeExecuted, Outcome.LOST),
    (DeadlineExceeded, Outcome.DEADLINE),
    (Backpressure, Outcome.BACKPRESSURE),
    (RemoteError, Outcome.OK),
    (UnknownMethod, Outcome.OK),
)


def outcome_of(error: BaseException | None) -> Outcome | None:
    """What an attempt's error (None: it has a value) says about its server; None when it says
    nothing, as when we cancelled.
    """
    if error is None:
        return Outcome.OK
    return next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), None)


# How long a server is set aside: not long, because a connection that was merely reset works again
# at once; in the end as long as a server that starts again may take. At least half of it is
# certain: with full jitter some would not be set aside at all.
EJECTION = Backoff(first_s=0.2, max_s=10.0, certain=0.5)


class Routable(Protocol):
    """The way to one server, as far as balancing looks at it. Compared and hashed by identity."""

    @property
    def server_id(self) -> int:
        """Which server of its service it leads to."""
        ...

    @property
    def rank(self) -> int:
        """Of the server's node."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the server is on this host. It does not change."""
        ...

    @property
    def in_flight(self) -> Sized:
        """What waits for its answer: its length counts. A table of calls serves as it is, so that
        counting costs one len().
        """
        ...


R = TypeVar("R", bound=Routable)


class Policy(Protocol):
    """A balance policy chooses the route of a call from those that may be used. It is given two at
    least.
    """

    def choose(self, routes: Sequence[R]) -> R:
        """Any thread may ask."""
        ...


class LeastOutstanding:
    """The less loaded of two chosen at random: nearly as even as the least loaded of all, at a cost
    that does not grow with them, and clients that see the same loads do not all run to the same
    server."""

    def __init__(self, random: Random, local_advantage: int) -> None:
        self._random = random.random
        self._local_advantage = local_advantage

    def choose(self, routes: Sequence[R]) -> R:
        """The one with fewer calls in flight of two chosen at random. Any thread may ask."""
        count, random = len(routes), self._random
        first = int(random() * count)
        second = int(random() * (count - 1))
        if second >= first:
            second += 1
        one, two = routes[first], routes[second]
        lead = len(two.in_flight) - len(one.in_flight)
        if one.is_local:
            lead += self._local_advantage
        if two.is_local:
            lead -= self._local_advantage
        # on a tie the first: which of the two is first was random already
        return one if lead >= 0 else two


class RandomChoice:
    """The policy "random": each server is as likely as the others."""

    def __init__(self, random: Random, local_advantage: int) -> None:
        self._random = random.random

    def choose(self, routes: Sequence[R]) -> R:
        """Any of them, each as likely as the others. Any thread may ask."""
        return routes[int(self._random() * len(routes))]


class RoundRobin:
    """One after the other, from a random start: many clients that begin together do not all begin
    with the same server.
    """

    def __init__(self, random: Random, local_advantage: int) -> None:
        # one call in C: no thread sees another's turn
        self._turn = itertools.count(random.randrange(1 << 16)).__next__

    def choose(self, routes: Sequence[R]) -> R:
        """The next one in turn. Any thread may ask."""
        return routes[self._turn() % len(routes)]


class LocalFirst:
    """The policy that uses servers of this host alone as long as there are any: least outstanding
    calls among them, and among all where there is none.
    """

    def __init__(self, random: Random, local_advantage: int) -> None:
        self._least = LeastOutstanding(random, 0).choose
        # what was asked last, and the local ones of it or all
        self._known: tuple[Sequence[Any], Sequence[Any]] = ((), ())

    def choose(self, routes: Sequence[R]) -> R:
        """As LeastOutstanding among the local routes; where there is none, among all. Any thread
        may ask.
        """
        asked, preferred = self._known
        if asked is not routes:
            preferred = [route for route in routes if route.is_local] or routes
            self._known = (routes, preferred)
        chosen: R = preferred[0] if len(preferred) == 1 else self._least(preferred)
        return chosen


POLICIES: dict[str, Callable[[Random, int], Policy]] = {
    "least_outstanding": LeastOutstanding,
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "local_first": LocalFirst,
}


class ServerState(enum.Enum):
    """How a server stands that is not well: it gets calls still, or none, or one that tries it.

    Changed by a Balancer alone, under its guard. Events: the table at the file's head.
    """

    SUSPECT = "suspect"
    EJECTED = "ejected"
    PROBING = "probing"


@dataclass(slots=True)
class Health:
    """What the balancer keeps of a server that failed lately. One that is well has none."""

    state: ServerState = ServerState.SUSPECT
    failures: int = 0  # in a row
    weight: int = 0  # of those
    ejections: int = 0  # until it is forgiven
    # ejected: when a probe may go; probing: when another may; suspect: when it is forgiven
    until: float = 0.0


@dataclass(frozen=True)
class RouteStatistics:
    """A snapshot of one server that failed lately: whether it is suspect or ejected, and in how
    many seconds it is probed.
    """

    server_id: int
    rank: int
    state: str  # suspect, ejected, probing
    failures: int  # in a row
    ejections: int  # lately
    probed_in_s: float  # ejected: until a call tries it again; else 0.0


@dataclass(frozen=True)
class BalancerStatistics:
    """A snapshot of a client's balancer: which servers get no calls at present, and why."""

    policy: str
    routes: int
    ailing: tuple[RouteStatistics, ...]  # in order of server id
    ejections: int  # ever
    spared: int  # failures that would have ejected, had not EJECTED_SHARE_MAX been reached
    probes: int  # ever
    last_resorts: int  # picks of an ejected server because no other was left


class Balancer(Generic[R]):
    """Chooses which of one client's routes gets a call, and sets servers aside that keep failing.

    policy           a name in POLICIES
    local_advantage  for least_outstanding: by how many calls in flight a local server counts as
                     less loaded
    guard            held while anything changes: a threading.Lock where several threads call, who
                     else needs none

    Raises ConfigError for a policy that is not there and an advantage below zero. States: the table
    at the file's head.
    """

    def __init__(
        self,
        routes: Iterable[R],
        random: Random,
        policy: str = "least_outstanding",
        local_advantage: int = LOCAL_ADVANTAGE,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(
                f"balance policy {policy!r} is not known: use one of "
                f"{', '.join(map(repr, POLICIES))}"
            )
        if local_advantage < 0:
            raise ConfigError(
                f"local_advantage={local_advantage}: a number of calls in flight, 0 or more"
            )
        self.policy = policy
        self.ailing: dict[R, Health] = {}  # read by who may skip report(ok); changed here only
        self._choose: Callable[[Sequence[R]], R] = POLICIES[policy](random, local_advantage).choose
        self._random = random
        self._guard = guard if guard is not None else nullcontext()
        self._routes: tuple[R, ...] = ()
        # replaced and never changed: pick() reads it without the guard
        self._fit: tuple[R, ...] = ()
        # those of ailing that are ejected or probing; replaced, too
        self._ejected: dict[R, Health] = {}
        self._ejections = self._spared = self._probes = self._last_resorts = 0
        self.set_routes(routes)

    @property
    def routes(self) -> tuple[R, ...]:
        """All, ejected or not."""
        return self._routes

    def set_routes(self, routes: Iterable[R]) -> None:
        """From now on these; what is known of those that stay is kept, and of those that left
        forgotten.
        """
        with self._guard:
            self._routes = tuple(routes)
            staying = set(self._routes)
            for route in [route for route in self.ailing if route not in staying]:
                del self.ailing[route]
            self._sort()

    def pick(self, now: float, avoid: Collection[R] = ()) -> R | None:
        """Who gets the next call; None when there are no routes at all.

        A route in `avoid` is given only when every other is ejected. `now` counts only while
        `ailing` is not empty.
        """
        if self._ejected or avoid:
            return self._pick_with_care(now, avoid)
        fit = self._fit
        if len(fit) > 1:
            return self._choose(fit)
        return fit[0] if fit else None

    def report(self, route: R, outcome: Outcome, now: float) -> None:
        """What became of an attempt. An ok must be reported only while `ailing` is not empty,
        everything else always.
        """
        if outcome is Outcome.OK:
            if route in self.ailing:
                with self._guard:
                    self._answered(route, now)
        else:
            with self._guard:
                self._failed(route, outcome, now)

    def statistics(self, now: float) -> BalancerStatistics:
        """A snapshot."""
        with self._guard:
            ailing = tuple(
                RouteStatistics(
                    server_id=route.server_id,
                    rank=route.rank,
                    state=health.state.value,
                    failures=health.failures,
                    ejections=health.ejections,
                    probed_in_s=max(0.0, health.until - now)
                    if health.state is ServerState.EJECTED
                    else 0.0,
                )
                for route, health in sorted(self.ailing.items(), key=lambda item: item[0].server_id)
            )
            return BalancerStatistics(
                policy=self.policy,
                routes=len(self._routes),
                ailing=ailing,
                ejections=self._ejections,
                spared=self._spared,
                probes=self._probes,
                last_resorts=self._last_resorts,
            )

    # -- with the guard held -----------------------------------------------------------------------

    def _pick_with_care(self, now: float, avoid: Collection[R]) -> R | None:
        with self._guard:
            for route, health in self._ejected.items():
                if now >= health.until and route not in avoid:
                    health.state = ServerState.PROBING
                    health.until = now + PROBE_S_MAX
                    self._probes += 1
                    return route
            # One that just failed this call and is not ejected failed less than those that are:
            # they come last.
            fit = [route for route in self._fit if route not in avoid] or self._fit
            if fit:
                return self._choose(fit) if len(fit) > 1 else fit[0]
            if not self._ejected:
                return None
            self._last_resorts += 1
            return min(
                self._ejected, key=lambda route: (route in avoid, self._ejected[route].until)
            )

    def _answered(self, route: R, now: float) -> None:
        health = self.ailing.get(route)
        if health is None:  # another thread's ok was faster
            return
        health.failures = health.weight = 0
        if health.state is not ServerState.SUSPECT:
            health.state = ServerState.SUSPECT
            health.until = now + FORGIVEN_S
            self._sort()
        elif not health.ejections or now >= health.until:
            del self.ailing[route]

    def _failed(self, route: R, outcome: Outcome, now: float) -> None:
        health = self.ailing.get(route)
        if health is None:
            if route not in self._routes:  # it left while the call was in flight
                return
            health = self.ailing[route] = Health()
        health.failures += 1
        if health.state is ServerState.EJECTED:
            return
        if health.state is ServerState.SUSPECT:
            health.weight += WEIGHTS[outcome]
            if health.weight < WEIGHT_EJECTED:
                return
            if len(self._ejected) >= min(
                int(len(self._routes) * EJECTED_SHARE_MAX), len(self._routes) - 1
            ):
                self._spared += 1
                return
        health.state = ServerState.EJECTED
        health.ejections += 1
        health.until = now + EJECTION.delay_s(health.ejections, self._random.random())
        self._ejections += 1
        self._sort()

    def _sort(self) -> None:
        """Tell those that are fit from those that are not."""
        self._ejected = {
            route: health
            for route, health in self.ailing.items()
            if health.state is not ServerState.SUSPECT
        }
        self._fit = tuple(route for route in self._routes if route not in self._ejected)
