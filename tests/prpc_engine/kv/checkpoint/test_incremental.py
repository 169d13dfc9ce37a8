"""Checkpoints that hold what changed since the one before: their chains, what keeps them, and what
breaks them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.kv import Adagrad, SparseTable, TableShard, TableWorker, Uniform
from prpc_engine.kv.checkpoint import CheckpointError, latest, verify
from prpc_engine.kv.checkpoint.chain import base_for
from prpc_engine.kv.checkpoint.cut import TableCut
from prpc_engine.kv.checkpoint.manifest import MANIFEST, Base, Manifest, decode
from prpc_engine.kv.client.local import LocalService, run_to_end
from prpc_engine.kv.table.changes import REMOVED_MIN, Changes
from prpc_engine.kv.table.eviction import Eviction
from tests.prpc_engine.kv.checkpoint.jobs import (
    assert_same,
    create_tables,
    job_and_shards,
    local_job,
    train,
    values,
)
from tests.prpc_engine.kv.checkpoint.test_save_and_restore import cut_short, flip
from tests.prpc_engine.processes import PATIENCE_S

ROWS_MAX = 200  # of each partition: keys come and go


def job(servers: int) -> TableWorker:
    worker = local_job(servers)
    worker.create_sparse(
        "bounded", 3, Adagrad(0.1), Uniform(0.1), eviction=Eviction(rows_max=ROWS_MAX)
    )
    create_tables(worker)
    train(worker)
    return worker


def everything(worker: TableWorker) -> dict[str, np.ndarray]:
    return {"bounded": worker.pull("bounded", np.arange(2000))} | values(worker)


def push_some(worker: TableWorker, random: np.random.Generator) -> None:
    keys = np.unique(random.integers(0, 2000, 60))
    worker.push("bounded", keys, np.ones((len(keys), 3), np.float32))
    worker.push("clicks/a", keys[:5], np.ones((5, 4), np.float32))
    worker.push("weights", np.ones((7, 3), np.float32))


def save_chain(
    worker: TableWorker,
    folder: Path,
    saves: int,
    full_every: int,
    seed: int,
    keep: int | None = None,
) -> list[dict]:
    random = np.random.default_rng(seed)
    held = []
    for step in range(1, saves + 1):
        for _ in range(4):
            push_some(worker, random)
        worker.save(str(folder), step, full_every=full_every, keep=keep)
        held.append(everything(worker))
    return held


def manifest_of(path: Path) -> Manifest:
    return decode((path / MANIFEST).read_bytes())


def links(folder: Path) -> list[int]:
    """Of each checkpoint, the oldest first."""
    return [manifest_of(path).links for path in sorted(folder.glob("checkpoint-*"))]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_link_of_a_chain_comes_back_into_any_number_of_servers(
    tmp_path: Path, after: int, seed: int
) -> None:
    old = job(2)
    held = save_chain(old, tmp_path, 6, 4, seed)
    assert links(tmp_path) == [0, 1, 2, 3, 0, 1]
    for wanted in reversed(held):
        new = local_job(after)
        new.restore(str(tmp_path))
        assert_same(everything(new), wanted)
        shutil.rmtree(latest(tmp_path).path)
    train(new)


def test_a_link_holds_the_changed_rows_only_and_the_state_comes_along(tmp_path: Path) -> None:
    old = local_job(2)
    create_tables(old)
    train(old)
    old.save(str(tmp_path), 1, full_every=9)
    old.push("clicks/a", np.array([3, 1000]), np.ones((2, 4), np.float32))
    old.save(str(tmp_path), 2, full_every=9)
    files = [
        file
        for file in manifest_of(latest(tmp_path).path).files()
        if file.spec["table"] == "clicks/a"
    ]
    assert sum(file.columns[0].shape[0] for file in files) == 2
    new = local_job(1)
    assert new.restore(str(tmp_path)) == 2
    for worker in (old, new):
        train(worker)
    assert_same(values(new), values(old))


def test_a_link_without_changes_is_one(tmp_path: Path) -> None:
    worker = job(1)
    for step in (1, 2):
        worker.save(str(tmp_path), step, full_every=2)
    new = local_job(2)
    assert new.restore(str(tmp_path)) == 2
    assert_same(everything(new), everything(worker))


def test_after_a_failed_save_the_next_one_has_what_that_one_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = job(2)
    worker.save(str(tmp_path), 1, full_every=9)
    push_some(worker, np.random.default_rng(0))
    with monkeypatch.context() as patched:
        patched.setattr("prpc_engine.kv.checkpoint.save.MANIFEST_BYTES_MAX", 1)
        with pytest.raises(CheckpointError, match="a manifest of"):
            worker.save(str(tmp_path), 2, full_every=9)
    push_some(worker, np.random.default_rng(1))
    worker.save(str(tmp_path), 3, full_every=9)
    assert links(tmp_path) == [0, 1]
    new = local_job(3)
    assert new.restore(str(tmp_path)) == 3
    assert_same(everything(new), everything(worker))


def test_what_a_kept_one_lies_over_is_kept_and_goes_with_it(tmp_path: Path, seed: int) -> None:
    worker = job(1)
    kept = []
    for step in range(1, 9):
        push_some(worker, np.random.default_rng(seed + step))
        worker.save(str(tmp_path), step, full_every=3, keep=2)
        kept.append([finding.step for finding in verify(tmp_path)])
        assert not any(finding.fault for finding in verify(tmp_path))
    assert kept == [[1], [2, 1], [3, 2, 1], [4, 3, 2, 1], [5, 4], [6, 5, 4], [7, 6, 5, 4], [8, 7]]


def test_a_restarted_server_another_folder_and_a_restore_begin_a_new_chain(tmp_path: Path) -> None:
    service = LocalService()
    for _ in range(2):
        service.create_server("kv", TableShard())
    worker = TableWorker(service, expected_servers=2)
    create_tables(worker)
    folder = tmp_path / "a"
    save = lambda folder: worker.save(str(folder), 1, full_every=9)  # noqa: E731
    save(folder)
    save(folder)
    save(tmp_path / "b")
    save(folder)  # what changed since is known of b
    save(folder)
    worker.restore(str(folder))
    save(folder)
    save(folder)
    service.servers["kv"][1]._known = None  # as one that missed the end of a save, or was restarted
    save(folder)
    worker.save(str(folder), 1)  # full_every=1 ends all tracking
    save(folder)
    assert links(folder) == [0, 1, 0, 1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("other_folder", ["", "other"])
def test_a_save_that_entered_before_another_one_counted_has_all_that_its_base_lacks(
    tmp_path: Path, other_folder: str
) -> None:
    worker, (shard,) = job_and_shards(1)
    create_tables(worker)
    worker.save(tmp_path, 1, full_every=9)
    one, folder, bases = "1" * 16, str(tmp_path / other_folder), list[object]()
    train(worker)
    base = shard.checkpoint_enter(one, folder)
    part_of_one = run_to_end(shard.checkpoint_save(one, folder, 2, 0, base, True))
    worker.push("clicks/a", np.array([3]), np.ones((1, 4), np.float32))
    save = shard.checkpoint_save

    def let_one_count_first(*arguments: object) -> object:
        bases.append(arguments[4])
        if len(bases) == 1:
            saved = run_to_end(shard.checkpoint_commit(one, folder, 2, [part_of_one], None, base))
            shard.checkpoint_committed(one, saved)
        return save(*arguments)

    shard.checkpoint_save = let_one_count_first
    worker.save(tmp_path, 3, full_every=9, timeout_s=PATIENCE_S)
    assert bases[0] is not None and bases[1:] != bases[:1]
    new = local_job(2)
    assert new.restore(tmp_path) == 3
    assert_same(values(new), values(worker))


def test_only_tables_of_incremental_checkpoints_are_tracked(tmp_path: Path) -> None:
    shard = TableShard()
    service = LocalService()
    service.create_server("kv", shard)
    worker = TableWorker(service)
    create_tables(worker)
    for full_every, is_tracked in ((1, False), (2, True), (2, True), (1, False)):
        worker.save(str(tmp_path), 1, full_every=full_every)
        _, clicks = shard.tables["clicks/a"]
        assert (clicks.changes is not None) == is_tracked


@pytest.mark.parametrize("full_every", [0, 1001, True, "2"])
def test_full_every_is_checked(tmp_path: Path, full_every: object) -> None:
    with pytest.raises(ConfigError, match="1 to 1000"):
        local_job().save(str(tmp_path), 1, full_every=full_every)  # type: ignore[arg-type]


DAMAGES = {
    "a bit of its rows": (
        lambda path: flip(next(path.glob("part-*")), -5),
        r"its base .* cannot be used: .* is damaged",
    ),
    "a file cut short": (
        lambda path: cut_short(next(path.glob("part-*"))),
        "its base .* were written",
    ),
    "its manifest": (
        lambda path: (path / MANIFEST).unlink(),
        "its base .* cannot be used: manifest.json cannot be read",
    ),
    "all of it": (shutil.rmtree, "its base .* cannot be used"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("link", [4, 5])
def test_a_damaged_link_spoils_all_above_it_and_the_newest_whole_one_is_taken(
    tmp_path: Path, damage: str, link: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    held = save_chain(job(2), tmp_path, 6, 3, seed)  # 1 2 3 | 4 5 6
    spoil, said = DAMAGES[damage]
    spoil(next(tmp_path.glob(f"checkpoint-*{link}")))
    new = local_job(2)
    assert new.restore(str(tmp_path)) == link - 1
    assert_same(everything(new), held[link - 2])
    assert caplog.text.count("is refused") >= 6 - link
    assert any(re.search(said, record.getMessage()) for record in caplog.records)


def test_another_checkpoint_in_the_place_of_a_base_is_none(tmp_path: Path, seed: int) -> None:
    save_chain(job(1), tmp_path / "a", 2, 2, seed)
    save_chain(job(1), tmp_path / "b", 1, 2, seed + 1)
    base = next((tmp_path / "a").glob("checkpoint-*1"))
    shutil.rmtree(base)
    shutil.copytree(next((tmp_path / "b").iterdir()), base)
    assert [
        "is another than the one it was laid over" in finding.fault
        for finding in verify(tmp_path / "a")
    ] == [True, False]


def test_a_save_over_a_base_that_lost_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    worker = job(1)
    worker.save(str(tmp_path), 1, full_every=9)
    next(latest(tmp_path).path.glob("part-*")).unlink()
    with pytest.raises(CheckpointError, match="full_every=1"):
        worker.save(str(tmp_path), 2, full_every=9)
    worker.save(str(tmp_path), 3)
    assert latest(tmp_path).step == 3


# Changes, and their cut


def table_with(rows: int) -> SparseTable:
    table = SparseTable(2, Adagrad(0.1), Uniform(0.1), eviction=Eviction(rows_max=rows))
    table.push(np.arange(rows), np.ones((rows, 2), np.float32))
    table.track_changes(True)
    return table


def test_changed_rows_laid_over_the_old_are_the_table_whatever_pushes_come_between(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)

    def push(count: int) -> None:
        keys = np.unique(random.integers(0, 1500, count))
        table.push(keys, np.ones((len(keys), 2), np.float32))

    table = table_with(1000)
    assert table.changes is not None
    model = dict(zip(table.keys().tolist(), table.columns()["values"].tolist(), strict=True))
    since = table.changes.end_epoch()
    for _ in range(10):
        for _ in range(3):
            push(40)
        wanted = dict(zip(table.keys().tolist(), table.columns()["values"].tolist(), strict=True))
        changed = table.changes.since(since)
        since = table.changes.end_epoch()
        table.changes.forget(since)
        assert changed is not None
        assert len(changed.rows) < len(table)
        cut = TableCut(table, changed)
        for key in changed.removed.tolist():
            model.pop(key, None)
        for begin, end in cut.pieces(4000):
            push(40)
            piece = cut.read(begin, end, cut.empty_piece(4000))
            model |= dict(zip(piece["keys"].tolist(), piece["values"].tolist(), strict=True))
        cut.close()
        assert model == wanted


def test_keys_that_went_are_named_within_a_bound_and_beyond_it_changes_are_unknown() -> None:
    changes = Changes(10)
    before = changes.end_epoch()
    for begin in range(0, REMOVED_MIN, 1024):
        changes.remove(np.arange(begin, begin + 1024))
    assert changes.since(before) is not None
    changes.remove(np.array([1]))
    assert changes.since(before) is None
    assert changes.nbytes == 0
    assert changes.since(changes.end_epoch()) is not None


def test_what_the_next_one_lies_over_is_what_all_servers_and_the_folder_agree_on() -> None:
    first, other = (
        Base("checkpoint-00000001-000000000001", 1, 0),
        Base("checkpoint-00000001-000000000001", 2, 0),
    )
    assert base_for([first, first], first, 2) == first
    assert base_for([first, first], first, 1) is None
    assert base_for([first, None], first, 9) is None
    assert base_for([first, other], first, 9) is None
    assert base_for([first], None, 9) is None
    third = Base("checkpoint-00000003-000000000001", 1, 2)
    assert (base_for([third], third, 4), base_for([third], third, 3)) == (third, None)
