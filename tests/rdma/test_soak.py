"""Mixed calls while queue pairs fail and a server is killed: each is answered right or ends by
name, none hangs, no push counts twice, and nothing stays lent or under way.

As many calls as PRPC_TEST_RDMA_CALLS says: ten thousand at night.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import prpc_engine
from prpc_engine import Master, RpcClient, RpcService
from prpc_engine.errors import MaybeExecuted, NotSent
from prpc_engine.kv import TableWorker
from tests.program import Program
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.rdma.inside import CALLS, connections_of, fail, under_way

FAILURES = max(2, CALLS // 500)
KILL_EVERY = 10  # of the failures; the last is a kill, too
AT_A_TIME = 12
KEYS, DIM = np.arange(500), 8
SIZES = (64, 1000, 8000, 20_000, 100_000, 300_000, 1 << 20, 4 << 20)
WEIGHTS = (30, 20, 20, 10, 10, 5, 4, 1)


class Soak:
    """A client, what it has under way, and what became of it."""

    def __init__(self, service: RpcService, client: RpcClient, random: random.Random) -> None:
        self.client = client
        self.kv = TableWorker(service)
        self.kv.create_sparse("sums", dim=DIM, optimizer={"name": "sgd", "learning_rate": 1.0})
        self.random = random
        self.under_way: deque[tuple[Any, Any]] = deque()
        self.lost: list[str] = []
        self.pushes = 0

    def submit(self) -> None:
        """One call more, or a push."""
        if self.random.random() < 0.03:
            self.kv.push("sums", KEYS, np.ones((len(KEYS), DIM), np.float32))
            self.pushes += 1
            return
        (nbytes,) = self.random.choices(SIZES, WEIGHTS)
        value: Any = self.random.randbytes(nbytes)
        if self.random.random() < 0.7:
            bytes_in = np.frombuffer(value, np.uint8)
            value = bytes_in
            if self.random.random() < 0.5:  # of the slab: it is lent as it is
                value = prpc_engine.empty(nbytes, np.uint8)
                value[:] = bytes_in
        self.under_way.append((value, self.client.submit("echo", value)))
        while len(self.under_way) >= AT_A_TIME:
            self.settle()

    def settle(self) -> None:
        """The oldest that is under way has ended."""
        value, future = self.under_way.popleft()
        try:
            found = future.result(PATIENCE_S)
        except (MaybeExecuted, NotSent) as error:
            self.lost.append(str(error))
        else:
            assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value

    def answers(self) -> bool:
        """Whether a call is answered now."""
        with contextlib.suppress(MaybeExecuted, NotSent):
            return bool(self.client.call("echo", 1) == 1)
        return False


@pytest.fixture
def master() -> Iterator[Master]:
    with Master("127.0.0.1:0") as master:
        yield master


def started(master: Master) -> Program:
    server = Program("tests.rdma.soak_server", master.address, "soak")
    assert server.read_line() == "ready"
    return server


def test_calls_and_pushes_end_right_or_by_name_whatever_fails(master: Master, seed: int) -> None:
    draw = random.Random(seed)
    places = draw.sample(range(20, CALLS), FAILURES)
    failures = {number: count for count, number in enumerate(sorted(places), 1)}
    with contextlib.ExitStack() as ending:
        tables = ending.enter_context(Program("tests.rdma.table_server", master.address))
        assert tables.read_line() == "ready"
        server = ending.enter_context(started(master))
        service = ending.enter_context(RpcService(master.address, transports=["verbs"]))
        soak = Soak(service, service.create_client("soak", timeout_s=PATIENCE_S), draw)
        for number in range(CALLS):
            soak.submit()
            failure = failures.get(number, 0)
            if failure and (failure % KILL_EVERY == 0 or failure == FAILURES):
                server.kill()
                server = ending.enter_context(started(master))
                wait_until(soak.answers, "an answer of the new server")
            elif failure:
                fail(draw.choice(connections_of(service)))
        while soak.under_way:
            soak.settle()
        assert len(soak.lost) <= AT_A_TIME * FAILURES
        assert all("verbs://" in text for text in soak.lost), soak.lost
        assert (soak.kv.pull("sums", KEYS) == -soak.pushes).all(), "each push counts once"
        # the answer to this goes on its way when nothing else is lent
        wait_until(lambda: soak.client.call("leases") == 0, "the server's leases")
        slab = node_of(service).slab
        wait_until(lambda: slab.statistics().leases == 0, "our leases")
        for connection in connections_of(service):
            wait_until(lambda each=connection: under_way(each) == (0, 0, 0), "an idle queue pair")
