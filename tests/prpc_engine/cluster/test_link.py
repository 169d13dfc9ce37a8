"""The way to another task: what comes at the moment at which an attempt to reach it is given up."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from prpc_engine import Deferred, Server
from prpc_engine.cluster.link import LEAVE_MAX
from prpc_engine.cluster.receipt import Receipt
from prpc_engine.errors import Closed, DeadlineExceeded
from prpc_engine.rpc.job import Job
from shard import Future
from tests.held import at
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host
from tests.prpc_engine.processes import PATIENCE_S, wait_until


def test_a_request_that_comes_as_nobody_waits_any_more_begins_anew(seed: int) -> None:
    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    late: list[Receipt] = []

    def ask(goes_on: bool) -> None:
        if not goes_on and not late:
            late.append(worker.submit_recv("late", source="/job:ps/task:0", step=0))

    with Server(cluster, "worker", 0) as worker, at("link.attempted", ask):
        worker.submit_recv("given up", source="/job:ps/task:0", step=0).cancel()
        wait_until(lambda: late, "the end of the attempts for it")
        with Server(cluster, "ps", 0) as ps:
            ps.send("late", np.ones(3), to="/job:worker/task:0", step=0)
            assert late[0].result(PATIENCE_S).tolist() == [1, 1, 1]


def test_who_is_asked_gives_up_at_the_askers_deadline_though_its_own_comes_later(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from when the request came: a queue's item that it waits for would go to nobody."""
    monkeypatch.setattr(Job, "late", lambda job: None)
    held: list[Deferred] = []

    def hold() -> Deferred:
        held.append(Deferred())
        return held[-1]

    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    with Server(cluster, "ps", 0, methods={"hold": hold}), Server(cluster, "worker", 0) as worker:

        def waits_there_in_vain() -> bool:
            with pytest.raises(DeadlineExceeded):
                worker.ask("/job:ps/task:0", "hold", "nothing", lambda _: (), 0.3).result(
                    PATIENCE_S
                )
            return bool(held)

        wait_until(waits_there_in_vain, "a request that gets there in time")
        wait_until(held[0].done, "its end")


def test_a_thread_that_could_not_be_started_is_started_for_the_next_request(seed: int) -> None:
    def no_room() -> None:
        raise RuntimeError("can't start new thread")

    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    with Server(cluster, "ps", 0) as ps, Server(cluster, "worker", 0) as worker:
        with (
            at("link.connecting", no_room),
            pytest.raises(RuntimeError, match="can't start new thread"),
        ):
            worker.recv("late", source="/job:ps/task:0", step=0)
        assert worker.statistics().links["/job:ps/task:0"].state == "down"
        ps.send("late", np.ones(3), to="/job:worker/task:0", step=0)
        assert worker.recv(
            "late", source="/job:ps/task:0", step=0, timeout_s=PATIENCE_S
        ).tolist() == [1, 1, 1]


def test_a_request_that_is_about_to_leave_as_its_server_is_stopped_ends_closed(seed: int) -> None:
    def asked_of_ps() -> Any:
        return worker.ask("/job:ps/task:0", "who", "its name", lambda _: (), PATIENCE_S)

    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    with (
        Server(cluster, "ps", 0, methods={"who": lambda: "ps"}),
        Server(cluster, "worker", 0) as worker,
    ):
        assert asked_of_ps().result(PATIENCE_S) == "ps"
        with at("link.sending", lambda: worker.stop()), pytest.raises(Closed):
            asked_of_ps().result(PATIENCE_S)


def test_a_server_that_is_stopped_while_it_connects_gives_that_up(seed: int) -> None:
    begun, given_up = threading.Event(), threading.Event()

    async def never() -> None:
        begun.set()
        try:
            await Future()
        finally:
            given_up.set()

    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    with at("node.reaching", never), Server(cluster, "worker", 0) as worker:
        receipt = worker.submit_recv("weights", source="/job:ps/task:0", step=0)
        assert begun.wait(PATIENCE_S)
        assert not receipt.done()
        worker.stop()
        with pytest.raises(Closed):
            receipt.result(PATIENCE_S)
    assert given_up.wait(PATIENCE_S)


def test_what_waited_for_a_connection_leaves_in_its_order_and_before_what_comes_later(
    seed: int,
) -> None:
    many = 5 * LEAVE_MAX
    told: list[int] = []
    cluster = cluster_at(fresh_host(seed), ps=1, worker=1)
    with Server(cluster, "worker", 0) as worker:

        def tell(number: int) -> Future:
            return worker.ask("/job:ps/task:0", "tell", "an order", lambda _: (number,), PATIENCE_S)

        waiting = [tell(number) for number in range(many)]
        with Server(cluster, "ps", 0, methods={"tell": told.append}):
            wait_until(
                lambda: worker.statistics().links["/job:ps/task:0"].state == "up", "a connection"
            )
            waiting += [tell(number) for number in range(many, 2 * many)]
            for each in waiting:
                each.result(PATIENCE_S)
    assert told == list(range(2 * many))
