"""A server of elastic tables that is killed while a checkpoint is saved takes the save along to
nobody: it is made again.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import RpcService
from prpc_engine.kv import ElasticServer, TableWorker
from prpc_engine.kv.checkpoint import CheckpointError, TooLate, latest, methods, verify
from tests.faults.zygote import Life
from tests.prpc_engine.kv.checkpoint.jobs import FailingFiles
from tests.prpc_engine.kv.elastic_processes import PUSH_TIMEOUT_S, elastic_world
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, end, kill

KEYS = np.arange(100)
LEASE_S = 5.0
SHORT_S = 1.0


class KilledAt(FailingFiles):
    """This process is killed just before the `number`th call of that name (from 1)."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self._name, self._left = name, number

    def _count(self, name: str) -> None:
        self._left -= name == self._name
        self.at = len(self.calls) if not self._left else -1
        super()._count(name)


def serve(life: Life, master: str, killed_at: tuple[str, int] | None) -> None:
    """One server until SIGTERM, or until that call to the file system."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    methods.HOLD_S_MAX = PATIENCE_S
    if killed_at is not None:
        files = KilledAt(*killed_at)
        methods.Files = lambda: files  # type: ignore[assignment,misc]
    with (
        RpcService(master, lease_s=LEASE_S) as service,
        ElasticServer(service, partitions=4, replicas=1, servers=2) as server,
    ):
        life.done = server.server_id
        signal.sigwait({signal.SIGTERM})


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 2])
@pytest.mark.parametrize(
    "killed_at",
    [("make_folder", 1), ("sync", 2), ("rename", 1), ("sync_folder", 4)],
    ids=[
        "before it writes",
        "while it writes",
        "before the checkpoint counts",
        "once the checkpoint counts",
    ],
)
def test_a_save_goes_on_where_the_partitions_are_then(
    farm: Farm, tmp_path: Path, killed_at: tuple[str, int], full_every: int
) -> None:
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve, master.address, each) for each in (killed_at, None)]
        watcher.wait_whole(2)
        worker = TableWorker(
            watcher.service, elastic=True, ack="replicated", call_timeout_s=PUSH_TIMEOUT_S
        )
        worker.create_sparse("t", 1, {"name": "add"})
        worker.push("t", KEYS, np.ones((len(KEYS), 1), np.float32))
        worker.save(tmp_path / "job", 5, full_every=full_every, timeout_s=PATIENCE_S)
        assert servers[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert [
            (finding.step, finding.fault)
            for finding in verify(tmp_path / "job")
            if finding.step >= 0
        ] == [(5, "")]
        servers.append(farm.start_ready(serve, master.address, None))
        watcher.wait_whole(2)
        worker.push("t", KEYS, np.ones((len(KEYS), 1), np.float32))
        worker.save(tmp_path / "job", 6, full_every=full_every, timeout_s=PATIENCE_S)
        assert worker.restore(tmp_path / "job", timeout_s=PATIENCE_S) == 6
        assert worker.pull("t", KEYS).ravel().tolist() == [2] * len(KEYS)
        for server in servers[1:]:
            end(server)


@pytest.mark.slow
def test_a_save_that_no_server_is_left_for_says_what_was_not_saved(
    farm: Farm, tmp_path: Path
) -> None:
    with elastic_world() as (master, watcher):
        servers = [farm.start_ready(serve, master.address, None) for _ in range(2)]
        watcher.wait_whole(2)
        worker = TableWorker(watcher.service, elastic=True, call_timeout_s=PUSH_TIMEOUT_S)
        worker.create_sparse("t", 1, {"name": "add"})
        worker.save(tmp_path, 5, timeout_s=PATIENCE_S)
        for server in servers:
            kill(server)
        with pytest.raises(
            TooLate,
            match=f"step 6 was not saved in {tmp_path}: .*; the checkpoints before it are as they",
        ):
            worker.save(tmp_path, 6, timeout_s=SHORT_S)
        assert issubclass(TooLate, CheckpointError)
        assert (latest(tmp_path).step, latest(tmp_path).fault) == (5, "")
