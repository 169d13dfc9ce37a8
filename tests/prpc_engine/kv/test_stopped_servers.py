"""A server of plain tables that was stopped for longer than its lease has all its rows when it goes
on: who asks it waits.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import DeadlineExceeded
from prpc_engine.kv import TableServer, TableWorker
from prpc_engine.kv.checkpoint import CheckpointError, latest
from shard import Limits
from tests.faults.zygote import Life, Victim
from tests.program import halt
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.prpc_engine.workloads.farm import Farm, end

KEYS = np.arange(8)
ONES = np.ones((8, 1), np.float32)
LEASE_S = 1.0


def serve(life: Life, master: str) -> None:
    """One server until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with RpcService(master, transports=["tcp"], lease_s=LEASE_S) as service:
        TableServer(service)
        life.done = 1
        signal.sigwait({signal.SIGTERM})


@contextmanager
def stopped_server(farm: Farm, master: Master) -> Iterator[tuple[Victim, TableWorker]]:
    """A server that nobody knows any more, which holds a push of this worker; and the worker, which
    finds nobody.
    """
    server = farm.start_ready(serve, master.address)
    soon = Limits(peer_silent_s=0.5)
    with RpcService(master.address, transports=["tcp"], limits=soon) as service:
        worker = TableWorker(service, call_timeout_s=PATIENCE_S)
        worker.create_sparse("t", 1, {"name": "add"})
        worker.push("t", KEYS, ONES)
        halt(server.pid)
        wait_until(
            lambda: service.master_client.tree_node_sub("/_rpc_/RpcService/kv") == [],
            "the end of its session",
        )
        wait_until(lambda: worker._client.server_ids == (), "the worker's news of it")
        try:
            yield server, worker
        finally:
            os.kill(server.pid, signal.SIGCONT)
    end(server)


@pytest.mark.slow
def test_verbs_wait_until_a_server_that_was_stopped_is_back(farm: Farm, master: Master) -> None:
    with stopped_server(farm, master) as (server, worker):
        pushed, pulled = worker.submit_push("t", KEYS, ONES), worker.submit_pull("t", KEYS)
        wait_until(
            lambda: (
                pushed.done()
                or worker.request_statistics().repeats
                or worker.request_statistics().lost
            ),
            "an attempt that finds nobody",
        )
        os.kill(server.pid, signal.SIGCONT)
        pushed.result(PATIENCE_S)
        assert pulled.result(PATIENCE_S).ravel().tolist() == [2] * 8
        assert worker.push_pull("t", KEYS, ONES).ravel().tolist() == [3] * 8


@pytest.mark.slow
def test_verbs_that_wait_for_a_server_in_vain_end_at_their_deadlines_and_say_for_whom(
    farm: Farm, master: Master
) -> None:
    said = r"partition 0 of 'kv' \(server 0\) has no answer at its deadline.*no server 0"
    with stopped_server(farm, master) as (_, worker):
        for verb in (
            lambda: worker.pull("t", KEYS, timeout_s=0.3),
            lambda: worker.push("t", KEYS, ONES, timeout_s=0.3),
        ):
            with pytest.raises(DeadlineExceeded, match=said):
                verb()


@pytest.mark.slow
def test_a_save_waits_until_a_server_that_was_stopped_is_back(
    farm: Farm, master: Master, tmp_path: Path
) -> None:
    with stopped_server(farm, master) as (server, worker):
        worker.call_timeout_s = 0.3
        with pytest.raises(
            CheckpointError, match=f"step 1 was not saved in {tmp_path}: .*no server 0"
        ):
            worker.save(tmp_path, 1, timeout_s=PATIENCE_S)
        worker.call_timeout_s = PATIENCE_S
        saving = threading.Thread(
            target=worker.save, args=(tmp_path, 2), kwargs={"timeout_s": PATIENCE_S}
        )
        saving.start()
        os.kill(server.pid, signal.SIGCONT)
        saving.join(PATIENCE_S)
        assert (latest(tmp_path).step, latest(tmp_path).fault) == (2, "")
