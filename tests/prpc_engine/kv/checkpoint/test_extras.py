"""Arrays that a server has besides its tables: cut with them, and back with them, also when their
number of servers changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prpc_engine.kv import TableShard, TableWorker
from prpc_engine.kv.checkpoint import latest, verify
from prpc_engine.kv.checkpoint.manifest import MANIFEST, decode
from prpc_engine.kv.client.local import LocalService
from tests.prpc_engine.kv.checkpoint.jobs import create_tables, train
from tests.prpc_engine.kv.checkpoint.test_save_and_restore import flip


class CountingShard(TableShard):
    """Counts pushes of each "client", which is the first key of a push, and has an array of another
    shape and type besides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.window = np.zeros((2, 3), np.uint8)

    def push(self, table: str, keys: np.ndarray, *grads: np.ndarray) -> object:
        client = int(keys[0])
        self.counts[client] = self.counts.get(client, 0) + 1
        self.window += 1
        return super().push(table, keys, *grads)

    def _extras(self) -> dict[str, np.ndarray]:
        counted = [
            np.fromiter(each, np.int64, len(self.counts))
            for each in (self.counts, self.counts.values())
        ]
        return {"client": counted[0], "pushes": counted[1], "window": self.window}

    def _take_extras(self, saved: Sequence[dict[str, np.ndarray]], are_all: bool) -> None:
        self.counts, self.window = {}, np.zeros((2, 3), np.uint8)
        for each in saved:
            self.window = np.maximum(self.window, each["window"])
            for client, pushes in zip(
                each["client"].tolist(), each["pushes"].tolist(), strict=True
            ):
                self.counts[client] = max(self.counts.get(client, 0), pushes)


def job(
    servers: int, shard: type[TableShard] = CountingShard
) -> tuple[TableWorker, list[TableShard]]:
    service, shards = LocalService(), [shard() for _ in range(servers)]
    for each in shards:
        service.create_server("kv", each)
    return TableWorker(service, expected_servers=servers), shards


def saved(folder: Path, servers: int, full_every: int = 1) -> list[TableShard]:
    worker, shards = job(servers)
    create_tables(worker)
    for step in (1, 2):
        train(worker, step)
        worker.save(str(folder), step, full_every=full_every)
    train(worker)  # what is counted after the cut is not in
    return shards


@pytest.mark.parametrize("full_every", [1, 2])
def test_as_many_servers_each_get_their_own_back_as_they_were_at_the_cut(
    tmp_path: Path, full_every: int
) -> None:
    old = saved(tmp_path, 2, full_every)
    worker, new = job(2)
    worker.restore(str(tmp_path))
    assert [list(each.counts.values()) for each in new] == [[3], [3]]
    assert [list(each.counts) for each in new] == [list(each.counts) for each in old]
    assert new[0].window.tolist() == [[3] * 3] * 2


@pytest.mark.parametrize("servers", [1, 3])
def test_another_number_of_servers_gets_those_of_all(tmp_path: Path, servers: int) -> None:
    old = saved(tmp_path, 2)
    worker, new = job(servers)
    worker.restore(str(tmp_path))
    everything = {client: 3 for each in old for client in each.counts}
    assert len(everything) == 2
    assert [each.counts for each in new] == [everything] * servers


def test_a_checkpoint_without_any_is_taken_as_that(tmp_path: Path) -> None:
    worker, _ = job(1, TableShard)
    create_tables(worker)
    worker.save(str(tmp_path), 1)
    assert decode((latest(tmp_path).path / MANIFEST).read_bytes()).parts[0].extras is None
    counting, (shard,) = job(1)
    create_tables(counting)
    train(counting)
    counting.restore(str(tmp_path))
    assert shard.counts == {}


def test_a_damaged_one_is_found_and_the_checkpoint_before_is_taken(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    flip(latest(tmp_path).path / "part-00001-extras.safetensors", -1)
    worker, new = job(2)
    assert worker.restore(str(tmp_path)) == 1
    assert [list(each.counts.values()) for each in new] == [[1], [1]]
    assert "checksum of its column 'window' is wrong" in verify(tmp_path)[0].fault
