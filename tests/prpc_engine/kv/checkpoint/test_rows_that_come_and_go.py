"""Checkpoints of tables that do not keep all keys: what comes back goes on as if nothing had been,
evictions and all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine.kv import Adagrad, SparseTable, TableShard, TableWorker, Uniform
from prpc_engine.kv.checkpoint import load, manifest, save
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.table.eviction import Eviction
from prpc_engine.kv.table.initializer import Constant
from prpc_engine.kv.table.optimizer import Sgd

POLICIES: dict[str, dict[str, Any]] = {
    "rows_max": {"eviction": {"rows_max": 40}},
    "ttl_steps": {"eviction": {"ttl_steps": 6}},
    "ttl_s": {"eviction": {"ttl_s": 3600.0}},
    "both": {"admission": {"min_count": 2, "width_bits": 10}, "eviction": {"rows_max": 40}},
}
KEYS = np.arange(120)


def job(servers: int) -> tuple[TableWorker, list[TableShard]]:
    service = LocalService()
    shards = [TableShard() for _ in range(servers)]
    for shard in shards:
        service.create_server("kv", shard)
    return TableWorker(service, expected_servers=servers), shards  # type: ignore[arg-type]


def train(worker: TableWorker, random: np.random.Generator) -> None:
    for _ in range(6):
        keys = np.unique(random.integers(0, len(KEYS), 12))
        worker.push("t", keys, np.ones((len(keys), 2), np.float32))
        worker.pull("t", KEYS[random.integers(0, len(KEYS), 9)])


def states(shards: list[TableShard]) -> list[Any]:
    found = []
    for shard in shards:
        table = shard.tables["t"][1]
        columns = {name: array.tolist() for name, array in table.columns().items()}
        rows = {
            key: [columns[name][i] for name in sorted(columns)]
            for i, key in enumerate(columns["keys"])
        }
        scalars = {name: value for name, value in table.scalars().items() if name != "moment"}
        found.append(
            (rows, scalars, {name: array.tolist() for name, array in table.singles().items()})
        )
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("saves", [1, 3])
def test_a_restored_table_has_the_stamps_the_sketch_and_the_counters_of_the_saved_one(
    tmp_path: Path, policy: str, saves: int, seed: int
) -> None:
    """With three saves the last holds what changed since the second only; and pulls, which change
    no row.
    """
    random = np.random.default_rng(seed)
    (old, old_shards), (new, new_shards) = job(2), job(2)
    old.create_sparse("t", 2, Adagrad(0.1), Uniform(0.1), **POLICIES[policy])
    for step in range(saves):
        train(old, random)
        old.pull("t", KEYS[::7])
        old.save(str(tmp_path), step, full_every=3)
    assert new.restore(str(tmp_path)) == saves - 1
    assert states(new_shards) == states(old_shards)
    train(new, random)


@pytest.mark.parametrize("after", [1, 3])
def test_other_numbers_of_servers_take_over_ages_and_counts(tmp_path: Path, after: int) -> None:
    (old, _), (new, _) = job(2), job(after)
    settings: dict[str, Any] = {
        "admission": {"min_count": 2, "width_bits": 10},
        "eviction": {"ttl_steps": 50},
    }
    old.create_sparse("t", 1, Sgd(1.0), Constant(), **settings)
    for _ in range(2):
        old.push("t", KEYS, np.ones((len(KEYS), 1), np.float32))
    # 90 keys, of which some are at each partition, are not used for so many steps
    for _ in range(30):
        old.push("t", KEYS[:30], np.ones((30, 1), np.float32))
    old.push("t", KEYS + 1000, np.ones((len(KEYS), 1), np.float32))  # counted once
    old.save(str(tmp_path), 1)
    new.restore(str(tmp_path))
    counted = new.statistics()
    assert sum(each["t"].keys_refused for each in counted.values()) == 2 * len(KEYS)
    assert sum(each["t"].keys_admitted for each in counted.values()) == len(KEYS)
    new.push("t", KEYS + 1000, np.ones((len(KEYS), 1), np.float32))  # and once more
    assert (new.pull("t", KEYS + 1000) == -1).all()
    assert np.count_nonzero(new.pull("t", KEYS[:30])) == 30
    for _ in range(30):
        new.push("t", KEYS[:30], np.ones((30, 1), np.float32))
    assert sum(each["t"].keys_evicted for each in new.statistics().values()) == len(KEYS) - 30


def test_rows_of_a_checkpoint_without_stamps_count_as_just_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, _), (new, shards) = job(1), job(1)
    old.create_sparse("t", 1, Sgd(1.0), Constant(), eviction=Eviction(ttl_steps=8))
    for begin in range(0, 64, 8):
        old.push("t", KEYS[begin : begin + 8], np.ones((8, 1), np.float32))
    columns = SparseTable.columns
    with monkeypatch.context() as before:  # as versions did before stamps were saved
        before.setattr(
            SparseTable,
            "columns",
            lambda self: {n: a for n, a in columns(self).items() if n != "stamps"},
        )
        before.setattr(SparseTable, "scalars", lambda self: {"steps": self.version})
        before.setattr(manifest, "FORMAT", 2)
        before.setattr(save, "FORMAT", 2)
        old.save(str(tmp_path), 1)
    assert load.latest(tmp_path).step == 1
    new.restore(str(tmp_path))
    assert shards[0].tables["t"][1].columns()["stamps"].tolist() == [[8]] * 64
    new.push("t", KEYS[:1], np.ones((1, 1), np.float32))
    assert new.statistics()[11]["t"].rows == 64


def test_time_to_live_stands_still_while_a_table_is_in_a_checkpoint_only() -> None:
    now = 1000.0
    spec = SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1, eviction=Eviction(ttl_s=10.0))
    table = spec.make(lambda: now)
    table.push(np.arange(2), np.ones((2, 1), np.float32))
    now += 6
    table.pull(np.arange(1))
    scalars, columns = (
        table.scalars(),
        {name: array.copy() for name, array in table.columns().items()},
    )
    restored = spec.make(lambda: 5.0 + now - 1000)  # another machine's clock
    restored.load_scalars(scalars)
    now += 1000
    restored = spec.make(lambda: 5.0 + now - 1000)
    restored.load_scalars(scalars)
    restored.load(columns, scalars["moment"])
    now += 5
    restored.push(np.array([7]), np.ones((1, 1), np.float32))
    assert sorted(restored.keys().tolist()) == [0, 7]
