"""A save looks at all tables that servers have, whether its worker has created them or not: a
checkpoint is of one beginning of each, and lacks nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import (
    Add,
    Constant,
    EpochChanged,
    RowsLost,
    TableServer,
    TableShard,
    TableWorker,
    TooLate,
)
from prpc_engine.kv.checkpoint import latest
from prpc_engine.kv.schema.layout import spread
from prpc_engine.kv.schema.table_spec import SparseSpec
from tests.prpc_engine.kv.test_epochs import KEYS, create_tables, settled, train, trained
from tests.prpc_engine.processes import PATIENCE_S


def worker_reads(worker: TableWorker) -> float:
    """What all rows hold, once it has been told that the table began again."""
    with pytest.raises(EpochChanged):
        worker.pull("clicks", KEYS)
    (value,) = set(worker.pull("clicks", KEYS)[:, 0].tolist())
    return float(value)


def test_a_save_by_a_worker_that_knows_no_table_mixes_no_beginnings(
    master: Master, tmp_path: Path
) -> None:
    with trained(master) as (worker, ours):
        saver = TableWorker(ours, expected_servers=2)
        saver.save(tmp_path, step=1)
        whole = SparseSpec("clicks", 0, 2, Add(), Constant(), 1)
        client = ours.create_client("kv", 2, PATIENCE_S)
        life, epochs = client.submit_to(1, "standing").result()
        spec = spread(whole, 2)[1].to_dict()
        # all that a worker did which was killed as it reset the table
        client.submit_to(1, "create_table", spec, epochs["clicks"] + 1, life).result()
        mixed = r"step 2 was not saved.*'clicks'.*began again on partitions 1 only.*reset\(\)"
        with pytest.raises(TooLate, match=mixed):
            saver.save(tmp_path, step=2, keep=1, timeout_s=0.3)
        assert saver.restore(tmp_path) == 1
        assert worker_reads(worker) == 1


def test_a_save_by_a_worker_that_knows_no_table_notices_that_a_server_lost_its_rows(
    master: Master, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        first, second, third, ours = [
            stack.enter_context(RpcService(master.address)) for _ in range(4)
        ]
        TableServer(first, server_id=0)
        TableServer(second, server_id=1)
        worker, saver = [TableWorker(ours, expected_servers=2) for _ in range(2)]
        create_tables(worker)
        train(worker)
        saver.save(tmp_path, step=1)
        second.close()
        TableServer(third, server_id=1)
        settled(saver)
        lost = r"partitions 1 of table 'clicks' .* restore\(\) or reset\(\) it before"
        with pytest.raises(RowsLost, match=lost):
            saver.save(tmp_path, step=2, keep=1)
        assert saver.restore(tmp_path) == 1
        saver.save(tmp_path, step=2, keep=1)
        assert latest(tmp_path).step == 2


class ResetMeanwhile(TableShard):
    """Just before it holds pushes for a save, the first time, all of `shards` are reset."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: list[ResetMeanwhile] = []
        self.entered = 0

    def checkpoint_enter(self, *arguments: Any) -> dict[str, Any] | None:
        self.entered += 1
        for shard in self.shards if self.entered == 1 else ():
            spec, _ = shard.tables["clicks"]
            _, epochs = shard.standing()
            shard.create_table(spec.to_dict(), epochs["clicks"] + 1, shard.life)
        return super().checkpoint_enter(*arguments)


def test_a_save_begins_again_where_a_table_was_reset_before_pushes_are_held(
    master: Master, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        *services, ours = [stack.enter_context(RpcService(master.address)) for _ in range(3)]
        shards = [ResetMeanwhile() for _ in services]
        for number, (service, shard) in enumerate(zip(services, shards, strict=True)):
            service.create_server("kv", shard, server_id=number, inline=True)
        worker, saver = [TableWorker(ours, expected_servers=2) for _ in range(2)]
        create_tables(worker)
        train(worker)
        shards[0].shards = shards
        saver.save(tmp_path, step=1)
        assert shards[0].entered == 2
        assert saver.restore(tmp_path) == 1
        assert worker_reads(worker) == 0
