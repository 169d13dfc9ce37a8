"""A worker of a paced table is cut off between a push and its answer: the push is in one step, and
the worker in its place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import TableWorker
from prpc_engine.kv.consistency import barrier_scheduler
from tests.faults.zygote import Life
from tests.prpc_engine.kv.test_exactly_once import cut_all, serve_tables
from tests.prpc_engine.processes import wait_until
from tests.prpc_engine.workloads.farm import Farm, end

ADD = {"name": "add"}
STEPS = 30
KEYS = np.array([1, 2, 3])
ONES = np.ones((3, 1), np.float32)


def serve_patiently(life: Life, master: str, transport: str) -> None:
    """As serve_tables(), but a worker that is cut off keeps its place however long it takes to be
    back.
    """
    barrier_scheduler.GRACE_S = 600.0
    serve_tables(life, master, transport)


def cut_until_sent_again(service: RpcService, worker: TableWorker, repeats: int) -> None:
    """Cut what is out until more requests than that were sent again: one is not out yet while its
    connection is made.
    """

    def is_sent_again() -> bool:
        if worker.request_statistics().repeats > repeats:
            return True
        cut_all(service)
        return False

    wait_until(is_sent_again, "a request to be sent again")


@pytest.fixture(params=["shm", "tcp"])
def services(request: pytest.FixtureRequest, farm_of_module: Farm) -> Iterator[list[RpcService]]:
    """Two workers' nodes, and one server's process."""
    with ExitStack() as stack:
        master = stack.enter_context(Master())
        server = farm_of_module.start_ready(serve_patiently, master.address, request.param)
        yield [
            stack.enter_context(RpcService(master.address, transports=[request.param]))
            for _ in range(2)
        ]
        end(server)
    farm_of_module.end_all()


@pytest.mark.slow
def test_a_sync_push_whose_answer_was_cut_off_is_in_one_step(
    services: list[RpcService], seed: int
) -> None:
    chance = random.Random(seed)
    cut, other = (TableWorker(service) for service in services)
    for worker in (cut, other):
        worker.create_sparse(
            "rows", 1, ADD, consistency={"name": "sync", "workers": 2, "reduce": "sum"}
        )
    for step in range(1, STEPS + 1):
        first = chance.random() < 0.5
        repeats = cut.request_statistics().repeats
        theirs = other.submit_push("rows", KEYS, 10 * ONES) if first else None
        mine = cut.submit_push("rows", KEYS, ONES)
        if first:
            cut_all(services[0])
        else:  # the step waits for the other one: so the push has no answer
            cut_until_sent_again(services[0], cut, repeats)
            theirs = other.submit_push("rows", KEYS, 10 * ONES)
        assert theirs is not None
        mine.result()
        theirs.result()
        values, versions = other.pull_versioned("rows", KEYS)
        assert values.ravel().tolist() == [11 * step] * 3
        assert versions == {0: step}


@pytest.mark.slow
def test_an_ssp_push_whose_answer_was_cut_off_ticks_once(services: list[RpcService]) -> None:
    cut, other = (TableWorker(service) for service in services)
    for worker in (cut, other):
        worker.create_sparse("rows", 1, ADD, consistency={"name": "ssp", "workers": 2, "bound": 0})
        worker.submit_push("rows", KEYS, ONES)
    # it is one ahead: so whatever it asks next waits for the other one
    cut.push("rows", KEYS, ONES)
    for step in range(1, STEPS + 1):
        repeats = cut.request_statistics().repeats
        ahead = cut.submit_push_pull("rows", KEYS, ONES)
        cut_until_sent_again(services[0], cut, repeats)
        other.push("rows", KEYS, ONES)
        assert ahead.result().ravel().tolist() == [3 + 2 * step] * 3
        assert other.pull_versioned("rows", KEYS).versions == {0: 3 + 2 * step}
