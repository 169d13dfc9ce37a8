"""A client that hedges: the same is asked of a second server where the answer is slow (hedge.py
decides when).

    event                             in               what is done
    first request                     caller's thread  encoded once, its arrays copied; sent as any
                                                       call on the slow path
    the timer of the next hedge       reactor          not idempotent, or no other server: none;
                                                       else one more Call, sent
    an answer to the first request    reactor          the hedges are cancelled
    an answer to a hedge              reactor          the first request is withdrawn, the call
                                                       completed with that answer
    an attempt fails, others are out  reactor          remembered for the error's text; the call
                                                       waits for the others
    the last attempt fails            reactor          Dispatcher.decide(), as for any call; a retry
                                                       is not hedged

The call that the user holds is the first attempt; hedges are calls of their own. Arrays are copied
(but for those of the slab), because more than one connection may still hold them when the caller
has its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from prpc_engine import errors
from prpc_engine.client.client import SAMPLE_MASK, ClientStatistics, RpcClient
from prpc_engine.client.directory import Directory
from prpc_engine.client.dispatcher import Dispatcher
from prpc_engine.client.hedge import HEDGE_SHARE, HedgePolicy, Hedger, Race
from prpc_engine.client.retry import RetryBudget, is_retriable
from prpc_engine.client.route import Route, Sought
from prpc_engine.node.node import Node
from prpc_engine.rpc.call import NEVER, Call
from shard import VALUE, Future, Timer, runtime


class Hedge(Call):
    """A second attempt of a call that is taking long, at another server. The first answer of the
    two completes the call.
    """

    is_attempt: ClassVar[bool] = True


class Contest:
    """One hedged call: its race, its hedges, and the timer of the next. In the reactor's thread,
    but for begin() and failed().
    """

    def __init__(
        self, hedger: Hedger, dispatcher: Dispatcher, directory: Directory, node: Node
    ) -> None:
        self._hedger = hedger
        self._dispatcher = dispatcher
        self._directory = directory
        self._node = node
        self._reactor = node.reactor
        self._clock = node.reactor.clock
        self._hedges: list[Call] = []  # bounded by HedgePolicy.hedges_max
        self._timer: Timer | None = None

    def begin(self, call: Call, route: Route) -> None:
        """Send the first request, which names this as its client. Raises Backpressure."""
        self._call = call
        self._race: Race[Call, Route] = Race(self._hedger, call.overall)
        self._race.sent(call, route, call.sent)
        if not route.is_connected:
            self._dispatcher.admit(call)
        call.when_done(self._over)
        self._dispatcher.send(call, route)
        if self._race.next_at != NEVER:
            self._reactor.call_soon(self._arm)

    def _arm(self) -> None:
        if not self._call.finished and self._race.next_at != NEVER:
            self._timer = self._reactor.timers.call_at(self._race.next_at, self._hedge)

    def _hedge(self, is_told: bool = False) -> None:
        """It is time to ask another server. `is_told`:
        the servers were asked what is idempotent.
        """
        self._timer = None
        call, race = self._call, self._race
        if call.finished or race.is_over:
            return
        method = call.asked[0]
        is_idempotent = self._dispatcher.is_idempotent(method)
        if is_idempotent is None and not is_told:
            self._dispatcher.describe(partial(self._hedge, True))
        if not is_idempotent or all(
            route in race.routes for route in self._directory.routes.values()
        ):
            return
        now = self._clock()
        avoid = race.hedge(now)
        if avoid is None:
            return
        route = self._directory.pick(avoid)
        if isinstance(route, Sought) or route in avoid:
            return
        hedge = Hedge(
            self._node.waiter,
            asked=(method, route),
            body=call.body,
            blocks=call.blocks,
            sent=now,
            overall=call.overall,
        )
        race.sent(hedge, route, now)
        self._hedges.append(hedge)
        self._dispatcher.hold(hedge)
        hedge.when_done(self._hedge_ended)
        self._dispatcher.send(hedge, route)
        self._arm()

    # -- ends --------------------------------------------------------------------------------------

    def failed(self, call: Call, error: BaseException) -> bool:
        """Told by the first attempt instead of its end; True: the call stays pending. From any
        thread.
        """
        if not is_retriable(error):
            return False
        if isinstance(error, errors.DeadlineExceeded) and self._clock() >= call.overall:
            return self._dispatcher.failed(call, error)
        self._dispatcher.hold(call)  # its deadline is the table's no more
        self._reactor.call_soon(partial(self._lost, call, error, call.asked[1]))
        return True

    def _hedge_ended(self, hedge: Future) -> None:
        """From any thread."""
        assert isinstance(hedge, Call)
        if hedge.finished == VALUE:
            self._won(hedge)
        else:
            self._reactor.call_soon(partial(self._lost, hedge, hedge._outcome, hedge.asked[1]))

    def _won(self, hedge: Call) -> None:
        call = self._call
        if not call.finished and self._race.ended(hedge, None, self._clock()) is not None:
            self._dispatcher.answered(hedge)
            call.withdraw()
            call.set_result(hedge._outcome)

    def _lost(self, attempt: Call, error: BaseException, route: Route) -> None:
        call, race = self._call, self._race
        if call.finished:
            return
        now = self._clock()
        if race.ended(attempt, error, now) is None and not race.is_over:
            self._dispatcher.report(route, error, now)
            self._dispatcher.state_of(call).record(error, route)
        elif is_retriable(error):
            self._dispatcher.decide(call, error, route)
        else:  # that is the answer, of a hedge
            self._dispatcher.report(route, error, now)
            call.withdraw()
            call.end(error)

    def _over(self, call: Future) -> None:
        """The call is complete. From any thread."""
        if call.finished == VALUE:
            self._clear(call)
        else:
            self._reactor.call_soon(partial(self._clear, call))

    def _clear(self, call: Future) -> None:
        error = None if call.finished == VALUE else call._outcome
        # for the latencies, unless a hedge has won
        self._race.ended(self._call, error, self._clock())
        for hedge in self._hedges:
            hedge.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._call.client = None  # else the two hold each other until a collection of garbage


class HedgingClient(RpcClient):
    """An RpcClient with a HedgePolicy. Made by RpcService.create_client(hedge=...)."""

    def __init__(
        self, *settings: Any, hedge: HedgePolicy, on_gone: Callable[[Route], None] | None = None
    ) -> None:
        super().__init__(*settings)
        if on_gone is not None:
            self._directory.on_gone = on_gone
        self._policy = hedge
        # calls of any thread count for it
        self._hedge_budget = RetryBudget(HEDGE_SHARE, guard=runtime.Lock())
        # of methods that are idempotent, or may be for all that is known yet
        self._hedgers: dict[str, Hedger] = {}

    def statistics(self) -> ClientStatistics:
        """A snapshot."""
        hedgers = list(self._hedgers.values())
        return replace(
            super().statistics(),
            hedges=sum(each.hedges for each in hedgers),
            hedges_won=sum(each.won for each in hedgers),
            hedges_refused=sum(each.refused for each in hedgers),
        )

    def _request(
        self, method: str, args: tuple[Any, ...], timeout_s: float | None, stable: bool
    ) -> Call:
        self._check_open()
        self._check_method(method)
        if self._dispatcher.is_idempotent(method) is False:
            return super()._request(method, args, timeout_s, stable)
        hedger = self._hedgers.get(method)
        if hedger is None:
            hedger = self._hedgers.setdefault(method, Hedger(self._policy, self._hedge_budget))
        number = self._count_call()
        self._hedge_budget.count_call()
        contest = Contest(hedger, self._dispatcher, self._directory, self._node)
        route = self._only or self._pick()
        if not route.is_connected:
            self._dispatcher.peer_at_once(route)
        call = self._dispatcher.encoded(route, method, args, timeout_s, False, contest)
        if not number & SAMPLE_MASK:
            self._figures.time(call)
        contest.begin(call, route)
        return call
