"""Servers and workers of elastic tables, each a process to be killed, and what is known of their
pushes in the end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import ElasticServer, TableWorker
from prpc_engine.kv.checkpoint import methods
from prpc_engine.kv.schema import tree
from prpc_engine.kv.schema.placement import Placement
from prpc_engine.kv.schema.tree import PlacementNode
from prpc_engine.service.service import SERVERS_PATH
from shard import control_loop
from tests.faults.zygote import Life
from tests.prpc_engine.inside import node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.servers import cut_socket

TABLE = "counts"
KEYS_A_PUSH = 16
KEYS_A_WORKER = 1 << 24
PUSH_TIMEOUT_S = 60.0


def serve_elastic(
    life: Life,
    master: str,
    settings: dict[str, Any],
    lease_s: float | None = None,
    cut_every_s: float = 0.0,
) -> None:
    """One server until SIGTERM; cut_every_s: about so often one of the connections to it or from it
    is cut.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    chance = random.Random(os.getpid())
    methods.HOLD_S_MAX = PATIENCE_S  # a busy machine may take longer from enter to cut
    with RpcService(master, lease_s=lease_s) as service, ElasticServer(service, **settings):
        life.done = 1
        while cut_every_s and not signal.sigtimedwait(
            {signal.SIGTERM}, chance.uniform(0.0, 2 * cut_every_s)
        ):
            service.in_reactor(lambda done: done.set_result(cut_one(service, chance)))
        if not cut_every_s:
            signal.sigwait({signal.SIGTERM})


def cut_one(service: RpcService, chance: random.Random) -> None:
    """Cut the connection of some peer, whoever it is. In the reactor's thread."""
    peers = [
        peer
        for peer in node_of(service).peers()
        if not peer.lost and peer.connection.transport in ("shm", "tcp")
    ]
    if peers:
        cut_socket(chance.choice(peers))


def keys_of(worker: int, push: int) -> Any:
    """Of one push: no other one has them."""
    begin = worker * KEYS_A_WORKER + push * KEYS_A_PUSH
    return np.arange(begin, begin + KEYS_A_PUSH)


def push_for_ever(life: Life, master: str, number: int, ack: str) -> None:
    """Push after push, until SIGTERM; life.done: how many were acknowledged, and one."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with RpcService(master) as service:
        worker = TableWorker(service, elastic=True, ack=ack, timeout_s=PUSH_TIMEOUT_S)
        worker.create_sparse(TABLE, 1, {"name": "add"}, timeout_s=PUSH_TIMEOUT_S)
        life.done = 1
        ones = np.ones((KEYS_A_PUSH, 1), np.float32)
        push = 0
        while not stop.is_set():
            worker.push(TABLE, keys_of(number, push), ones, timeout_s=PUSH_TIMEOUT_S)
            push += 1
            life.done = push + 1


@dataclass
class Watcher:
    """Looks at the placement."""

    service: RpcService

    def _ask(self, verb: Callable[[PlacementNode], Coroutine[Any, Any, Any]]) -> Any:
        node = PlacementNode(self.service.master_client, "kv", SERVERS_PATH)
        return control_loop().spawn(verb(node)).result(PATIENCE_S)

    def servers(self) -> Sequence[int]:
        """The ids of those that live."""
        return self._ask(PlacementNode.servers)  # type: ignore[no-any-return]

    def placement(self) -> Placement | None:
        found = self._ask(PlacementNode.read)
        return found[0] if found is not None else None

    def is_whole(self, servers: int) -> bool:
        """Whether so many servers live, each partition has its copies, and nothing is to move."""
        placement = self.placement()
        alive = self.servers()
        if placement is None or len(alive) != servers:
            return False
        primaries = [placed.primary for placed in placement.partitions]
        is_even = max(map(primaries.count, alive)) - min(map(primaries.count, alive)) <= 1
        held = {server for placed in placement.partitions for server in placed.holders}
        return is_even and placement.is_settled and held == set(alive)

    def wait_whole(self, servers: int) -> None:
        wait_until(
            lambda: self.is_whole(servers), f"{servers} servers with all partitions and copies"
        )


@contextmanager
def elastic_world() -> Iterator[tuple[Master, Watcher]]:
    with (
        pytest.MonkeyPatch.context() as patched,
        Master() as master,
        RpcService(master.address) as service,
    ):
        patched.setattr(tree, "ASK_TIMEOUT_S", PATIENCE_S)  # who watches does not ask again
        yield master, Watcher(service)


def check_ledger(worker: TableWorker, number: int, acknowledged: int) -> None:
    """Each acknowledged push counted once on all its keys, the one after them once or not at all on
    each, and no other.
    """
    keys = np.concatenate([keys_of(number, push) for push in range(acknowledged + 2)])
    counts = worker.pull(TABLE, keys)[:, 0].reshape(-1, KEYS_A_PUSH)
    wrong = np.flatnonzero((counts[:acknowledged] != 1).any(axis=1))
    assert not len(wrong), (
        f"worker {number}: of {acknowledged} acknowledged pushes {wrong[:9]} count "
        f"{counts[wrong[:9]]}"
    )
    assert set(counts[acknowledged].tolist()) <= {0.0, 1.0}
    assert not counts[acknowledged + 1].any()


def timed(function: Callable[[], Any]) -> float:
    """How long it takes, in seconds."""
    began = time.monotonic()
    function()
    return time.monotonic() - began
