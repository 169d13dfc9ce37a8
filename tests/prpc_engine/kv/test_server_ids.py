"""A plain server in the place of one that ended has its id, and so its keys."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import ConfigError, NodeExists
from prpc_engine.kv import RowsLost, TableServer, TableWorker
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.server.server import TableShard
from tests.program import Program

ADD = {"name": "add"}
SECONDS = 20.0


def test_a_server_waits_for_the_id_of_the_one_before(master: Master) -> None:
    with (
        RpcService(master.address) as one,
        RpcService(master.address) as before,
        RpcService(master.address) as after,
        RpcService(master.address) as working,
    ):
        TableServer(one)
        TableServer(before)
        worker = TableWorker(working, expected_servers=2, timeout_s=SECONDS)
        worker.create_sparse("rows", 1, ADD)
        worker.push("rows", np.arange(64), np.ones((64, 1), np.float32))
        with pytest.raises(NodeExists):
            TableServer(after, server_id=1, timeout_s=0.0)
        threading.Timer(0.3, before.close).start()
        server = TableServer(after, server_id=1, timeout_s=SECONDS)
        assert server.server.server_ids == (1,)
        with pytest.raises(RowsLost):  # it is asked for the keys of the one before
            worker.pull("rows", np.arange(64), timeout_s=SECONDS)


@pytest.mark.slow
def test_a_server_of_shards_takes_the_ids_of_all_of_them(master: Master) -> None:
    with RpcService(master.address, shards=2) as service:
        assert TableServer(service, server_id=4).server.server_ids == (4, 5)


def test_an_id_that_a_killed_process_had_is_free_at_once_on_this_host(master: Master) -> None:
    with RpcService(master.address) as service:
        with Program("tests.prpc_engine.kv.table_server", master.address, "0") as program:
            assert program.read_line() == "0"
            program.kill()
            taken = TableServer(service, server_id=0, timeout_s=SECONDS)
        assert taken.server.server_ids == (0,)


def test_a_server_that_holds_another_partition_says_why() -> None:
    shard = TableShard()
    specs = [SparseSpec("rows", each, 2, ADD, {"name": "constant"}, 1) for each in range(2)]
    shard.create_table(specs[1].to_dict())
    with pytest.raises(ConfigError, match=r"holds partition 1, and was asked for 0.*server_id"):
        shard.create_table(specs[0].to_dict())
