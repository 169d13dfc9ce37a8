"""A second request where the answer is slow, with real servers: who answers first wins, and the
other is told to stop.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prpc_engine import (
    Deferred,
    HedgePolicy,
    Master,
    RetryPolicy,
    RpcClient,
    RpcService,
    errors,
    idempotent,
)
from prpc_engine.client.hedge import HEDGE_SHARE
from prpc_engine.client.hedging import HedgingClient
from prpc_engine.client.retry import BUDGET_PER_S, BUDGET_RESERVE
from tests.prpc_engine.blackhole import Blackhole
from tests.prpc_engine.inside import dispatcher_of, entries_of, looks_up, node_of
from tests.prpc_engine.processes import PATIENCE_S, ServerProcess, wait_until

pytestmark = pytest.mark.usefixtures("patient_describe")

AT_ONCE = HedgePolicy(delay_s=0.0)
SHORT_S = 0.1


class Shop:
    """Holds its answers back until the test gives them."""

    def __init__(self) -> None:
        self.held: list[Deferred] = []
        self.ended_early = 0

    @idempotent
    async def look(self, *_: Any) -> Any:
        answer = Deferred()
        self.held.append(answer)
        try:
            return await answer
        finally:
            if not answer.done():
                self.ended_early += 1

    @idempotent
    def last(self, values: NDArray[Any]) -> float:
        return float(values[-1])

    def buy(self) -> Deferred:
        self.held.append(Deferred())
        return self.held[-1]


class World:
    """Some shops, each served by a service of its own, and who asks them."""

    def __init__(self, master: Master, shops: int) -> None:
        self.shops = [Shop() for _ in range(shops)]
        self.services = [RpcService(master.address) for _ in self.shops]
        self.servers = [
            service.create_server("shop", shop)
            for service, shop in zip(self.services, self.shops, strict=True)
        ]
        self.caller = RpcService(master.address)

    def client(self, **settings: Any) -> RpcClient:
        return self.caller.create_client("shop", len(self.shops), **settings)

    def asked(self) -> list[int]:
        """How many requests each shop holds."""
        return [len(shop.held) for shop in self.shops]

    def close(self) -> None:
        for service in [self.caller, *self.services]:
            service.close()


@pytest.fixture
def world(master: Master) -> Iterator[World]:
    made = World(master, 2)
    yield made
    made.close()


def test_where_one_server_hangs_every_call_is_answered_by_the_other(
    master: Master, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with (
        ServerProcess(master.address, "test", "shm") as first,
        ServerProcess(master.address, "test", "shm") as second,
        RpcService(master.address) as service,
        service.create_client(
            "test", 2, PATIENCE_S, "round_robin", idempotent=["pid"], hedge=HedgePolicy(0.01)
        ) as client,
    ):
        assert client.call("pid", timeout_s=PATIENCE_S) in (first.pid, second.pid)
        stuck = client.submit_to(0, "read_fifo", str(fifo), timeout_s=PATIENCE_S)
        before = client.statistics().hedges_won

        def won() -> int:
            assert client.call("pid", timeout_s=PATIENCE_S) == second.pid
            return client.statistics().hedges_won - before

        # Every second call meets the one that hangs, unless a hedge of one that is slow takes its
        # turn.
        wait_until(lambda: won() >= 3, "the hedges of three calls")
        fifo.write_text("go on")
        assert stuck.result(PATIENCE_S) == "go on"


@pytest.mark.parametrize("winner", ["first", "hedge"])
def test_the_first_answer_wins_and_the_other_server_is_told_to_stop(
    world: World, winner: str
) -> None:
    with world.client(hedge=AT_ONCE) as client:
        call = client.submit("look", timeout_s=PATIENCE_S)
        wait_until(lambda: world.asked() == [1, 1], "both are asked")
        asked_first = call.asked[1].server_id
        answering = world.shops[asked_first if winner == "first" else 1 - asked_first]
        other = world.shops[1 - world.shops.index(answering)]
        answering.held[0].reply("here")
        assert call.result(PATIENCE_S) == "here"
        wait_until(lambda: other.ended_early == 1, "the loser's end")
        assert (client.statistics().hedges, client.statistics().hedges_won) == (
            1,
            int(winner == "hedge"),
        )


def test_a_method_that_is_not_idempotent_is_never_asked_twice(world: World) -> None:
    with world.client(hedge=AT_ONCE) as client:
        first = client.submit("buy", timeout_s=PATIENCE_S)
        wait_until(lambda: dispatcher_of(client).is_idempotent("buy") is False, "the servers' word")
        second = client.submit("buy", timeout_s=PATIENCE_S)
        wait_until(lambda: sum(world.asked()) == 2)
        for shop in world.shops:
            for answer in shop.held:
                answer.reply("sold")
        assert [first.result(PATIENCE_S), second.result(PATIENCE_S)] == ["sold"] * 2
        assert sum(world.asked()) == 2
        assert client.statistics().hedges == 0


def test_one_attempt_failing_leaves_the_call_to_the_other(world: World) -> None:
    with world.client(hedge=AT_ONCE) as client:
        call = client.submit("look", timeout_s=PATIENCE_S)
        wait_until(lambda: world.asked() == [1, 1])
        first = call.asked[1].server_id
        world.services[first].close()
        world.shops[1 - first].held[0].reply("still here")
        assert call.result(PATIENCE_S) == "still here"


def test_when_both_fail_the_error_tells_of_both(world: World) -> None:
    with world.client(hedge=AT_ONCE, retry=RetryPolicy(attempts_max=2, unsent_max=2)) as client:
        call = client.submit("look", timeout_s=PATIENCE_S)
        wait_until(lambda: world.asked() == [1, 1])
        for service in world.services:
            service.close()
        with pytest.raises(errors.MaybeExecuted) as raised:
            call.result(PATIENCE_S)
        text = str(raised.value)
        assert "MaybeExecuted at server 0 of 'shop'" in text
        assert "MaybeExecuted at server 1 of 'shop'" in text


def test_an_error_of_the_handler_is_the_answer(world: World) -> None:
    with world.client(hedge=AT_ONCE) as client:
        call = client.submit("look", timeout_s=PATIENCE_S)
        wait_until(lambda: world.asked() == [1, 1])
        world.shops[1 - call.asked[1].server_id].held[0].fail(KeyError("sold out"))
        with pytest.raises(errors.RemoteError, match="sold out"):
            call.result(PATIENCE_S)


def test_the_deadline_ends_both(world: World) -> None:
    with world.client(hedge=AT_ONCE) as client:
        assert client.call("last", np.ones(3)) == 1
        call = client.submit("look", timeout_s=SHORT_S)
        with pytest.raises(errors.DeadlineExceeded):
            call.result(PATIENCE_S)
        wait_until(
            lambda: sum(len(peer.calls.in_flight) for peer in node_of(world.caller).peers()) == 0
        )


def test_a_cancelled_call_is_ended_at_both_servers(world: World) -> None:
    with world.client(hedge=AT_ONCE) as client:
        call = client.submit("look", timeout_s=PATIENCE_S)
        wait_until(lambda: world.asked() == [1, 1])
        assert call.cancel()
        wait_until(lambda: [shop.ended_early for shop in world.shops] == [1, 1])


def test_when_all_servers_are_slow_hedges_are_a_bounded_share(world: World) -> None:
    calls_made = 300
    with world.client(hedge=AT_ONCE) as client:
        calls = [client.submit("look", timeout_s=PATIENCE_S) for _ in range(calls_made)]
        wait_until(
            lambda: client.statistics().hedges + client.statistics().hedges_refused == calls_made
        )
        most = BUDGET_RESERVE + HEDGE_SHARE * calls_made + BUDGET_PER_S * PATIENCE_S
        assert BUDGET_RESERVE <= client.statistics().hedges <= most
        wait_until(lambda: sum(world.asked()) == calls_made + client.statistics().hedges)
        for shop in world.shops:
            for answer in shop.held:
                answer.reply("at last")
        assert {call.result(PATIENCE_S) for call in calls} == {"at last"}


def test_a_lone_server_is_asked_once(master: Master) -> None:
    world = World(master, 1)
    with world.client(hedge=AT_ONCE, idempotent=["look"]) as client:
        call = client.submit("look", timeout_s=PATIENCE_S)
        wait_until(lambda: world.asked() == [1])
        assert client.call("last", np.ones(3)) == 1
        world.shops[0].held[0].reply("here")
        assert call.result(PATIENCE_S) == "here"
        assert (client.statistics().hedges, client.statistics().hedges_refused) == (0, 0)
    world.close()


def test_a_server_that_cannot_be_connected_to_is_hedged_as_a_slow_one(world: World) -> None:
    (entry, _) = entries_of(world.caller, "shop", 2, PATIENCE_S)
    with Blackhole() as hole:
        entries = [hole.entry("shop", 0), replace(entry, server_id=1)]
        client = HedgingClient(
            "shop",
            node_of(world.caller),
            entries,
            looks_up(lambda: entries),
            "round_robin",
            None,
            (),
            hedge=HedgePolicy(0.01),
        )
        with client:
            numbers = itertools.count()

            def won() -> int:
                number = next(numbers)
                assert client.call("last", np.full(3, number), timeout_s=PATIENCE_S) == number
                return client.statistics().hedges_won

            wait_until(lambda: won() >= 1, "the hedge of a call that met it")


def test_the_arrays_of_a_hedged_call_may_be_changed_once_it_was_submitted(world: World) -> None:
    with world.client(hedge=AT_ONCE) as client:
        array = np.ones(100_000)
        calls = [client.submit("last", array, timeout_s=PATIENCE_S) for _ in range(20)]
        array[:] = 2
        assert {call.result(PATIENCE_S) for call in calls} == {1}
