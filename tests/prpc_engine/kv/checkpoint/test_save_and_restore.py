"""Saving and restoring with all servers in this process: formats, numbers of servers, and what is
refused.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prpc_engine.errors import ConfigError
from prpc_engine.kv import Adagrad, TableShard, Uniform
from prpc_engine.kv.checkpoint import CheckpointError, latest, verify
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.manifest import MANIFEST, decode
from prpc_engine.kv.client.local import run_to_end
from prpc_engine.kv.replication.replica import Moved
from prpc_engine.kv.schema.table_spec import SparseSpec
from prpc_engine.kv.table.initializer import Constant
from prpc_engine.kv.table.optimizer import Adam
from tests.held import at
from tests.prpc_engine.kv.checkpoint.jobs import (
    KEYS,
    assert_same,
    create_tables,
    job_and_shards,
    local_job,
    train,
    values,
)

SPARSE = SparseSpec("t", 0, 1, Adagrad(0.1), Constant(), 1).to_dict()


def saved(
    folder: Path, servers: int = 2, steps: int = 1, keep: int | None = None
) -> list[dict[str, object]]:
    """A job that trains, and saves after each of `steps` rounds: what its tables held then."""
    worker = local_job(servers)
    create_tables(worker)
    held = []
    for step in range(1, steps + 1):
        train(worker)
        worker.save(str(folder), step, keep=keep)
        held.append(values(worker))
    return held


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_any_number_of_servers_takes_over_and_trains_on_alike(
    tmp_path: Path, before: int, after: int
) -> None:
    old, new = local_job(before), local_job(after)
    create_tables(old)
    train(old, 2)
    old.save(str(tmp_path / "job"), 17)
    assert new.restore(str(tmp_path / "job")) == 17
    assert_same(values(new), values(old))
    train(old)
    train(new)  # the optimizer's state came along
    assert_same(values(new), values(old))
    rows = [each["clicks/a"].rows for each in new.statistics().values()]
    assert sum(rows) == len(KEYS)
    assert min(rows) > 0


def test_a_checkpoint_that_a_save_removes_while_it_is_read_gives_way_to_the_one_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving, new = local_job(), local_job()
    create_tables(saving)
    saving.save(str(tmp_path), 1)

    def save() -> None:
        saving.save(str(tmp_path), latest(tmp_path).step + 1, keep=1)

    with at("checkpoint.checking", save, times=1):
        assert new.restore(str(tmp_path)) == 2
    with at("checkpoint.checking", save, times=1):
        assert [(finding.step, finding.fault) for finding in verify(tmp_path)] == [(3, "")]
    assert "is refused" not in caplog.text


def test_what_a_checkpoint_holds_is_told_of_the_one_found_though_it_is_removed_next(
    tmp_path: Path,
) -> None:
    saving = local_job()
    create_tables(saving)
    saving.save(str(tmp_path), 1)

    def save() -> None:
        saving.save(str(tmp_path), latest(tmp_path).step + 1, keep=1)

    with at("checkpoint.found", save, times=1):
        _, step, specs = run_to_end(TableShard().checkpoint_find(str(tmp_path)))
    assert (step, sorted(specs)) == (1, ["bias", "clicks/a", "weights"])
    new = local_job()
    with at("checkpoint.found", save, times=1):
        assert new.restore(str(tmp_path)) == 3  # what was found first cannot be loaded any more
    assert_same(values(new), values(saving))


def test_another_worker_finds_restored_tables_by_creating_them(tmp_path: Path) -> None:
    saved(tmp_path, servers=2)
    worker = local_job(3)
    worker.restore(str(tmp_path))
    create_tables(worker)  # with the specs of the first job: nothing is refused


def test_tables_without_rows_come_back_too(tmp_path: Path) -> None:
    old, new = local_job(3), local_job(2)
    old.create_sparse("empty", 4, Adagrad(0.1), Uniform(0.1))
    old.save(str(tmp_path), 1)
    new.restore(str(tmp_path))
    np.testing.assert_array_equal(new.pull("empty", KEYS), old.pull("empty", KEYS))
    local_job(2).save(str(tmp_path), 2)  # and no tables at all
    assert local_job().restore(str(tmp_path)) == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_storage_types_and_counters_of_rows_come_back(tmp_path: Path, dtype: str) -> None:
    old, new = local_job(2), local_job(3)
    grads = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    for worker in (old, new):
        worker.create_sparse("t", 4, Adam(0.1), Uniform(0.1), dtype=dtype)
    old.push("t", KEYS, grads)
    old.push("t", KEYS[:100], grads[:100])
    old.save(str(tmp_path), 1)
    new.restore(str(tmp_path))
    for worker in (old, new):
        worker.push("t", KEYS, grads)
    np.testing.assert_array_equal(new.pull("t", KEYS), old.pull("t", KEYS))


def test_a_restore_puts_the_tables_of_its_checkpoint_back_and_leaves_others(tmp_path: Path) -> None:
    worker = local_job(2)
    create_tables(worker)
    train(worker)
    worker.save(str(tmp_path), 1)
    held = values(worker)
    train(worker)
    worker.create_sparse("later", 1, Adagrad(0.1))
    worker.push("later", KEYS, np.ones((300, 1), np.float32))
    worker.restore(str(tmp_path))
    assert_same(values(worker), held)
    assert (worker.pull("later", KEYS) != 0).all()


def test_a_table_that_is_there_with_another_spec_is_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    worker = local_job(2)
    worker.create_sparse("clicks/a", 4, Adagrad(0.2), Uniform(0.1))
    worker.push("clicks/a", KEYS, np.ones((300, 4), np.float32))
    before = worker.pull("clicks/a", KEYS)
    with pytest.raises(
        ConfigError,
        match=r"another spec than in the checkpoint: there is .*0\.2.* saved was .*0\.1",
    ):
        worker.restore(str(tmp_path))
    np.testing.assert_array_equal(worker.pull("clicks/a", KEYS), before)


def test_a_table_that_is_created_while_a_checkpoint_is_loaded_is_not_replaced_by_another(
    tmp_path: Path,
) -> None:
    old = TableShard()
    old.create_table({**SPARSE, "dim": 4})
    old.checkpoint_enter("0" * 16, str(tmp_path))
    part = run_to_end(old.checkpoint_save("0" * 16, str(tmp_path), 1, 0, None, False))
    run_to_end(old.checkpoint_commit("0" * 16, str(tmp_path), 1, [part], None, None))
    name, _, specs = run_to_end(old.checkpoint_find(str(tmp_path)))
    new = TableShard()
    run_to_end(
        new.checkpoint_load(
            "1" * 16, str(tmp_path), name, {table: each[0] for table, each in specs.items()}, 0, 1
        )
    )
    new.create_table({**SPARSE, "dim": 8})
    with pytest.raises(ConfigError, match="another spec than in the checkpoint"):
        new.checkpoint_swap("1" * 16)
    assert new.pull("t", KEYS).shape == (300, 8)


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    saved(tmp_path, servers=1)
    manifest = decode((latest(tmp_path).path / MANIFEST).read_bytes())
    tensors = {
        table.spec["table"]: load_file(latest(tmp_path).path / table.file)
        for table in manifest.files()
    }
    assert sorted(tensors["clicks/a"]["keys"]) == KEYS.tolist()
    assert tensors["clicks/a"]["values"].shape == (300, 4)
    assert tensors["weights"]["accumulator"].shape == (7, 3)


def test_the_newest_are_kept_also_after_training_went_back(tmp_path: Path) -> None:
    saved(tmp_path, steps=5, keep=2)
    assert [finding.step for finding in verify(tmp_path)] == [5, 4]
    saved(tmp_path, steps=1, keep=2)  # another run, from an earlier step
    assert [finding.step for finding in verify(tmp_path)] == [1, 5]
    assert latest(tmp_path).step == 1


def test_a_number_of_nine_digits_is_newer_than_those_of_eight(tmp_path: Path) -> None:
    worker = local_job(2)
    create_tables(worker)
    train(worker)
    worker.save(str(tmp_path), 1)
    (tmp_path / "checkpoint-00000001-000000000001").rename(
        tmp_path / "checkpoint-99999998-000000000001"
    )
    for step, keep in ((2, None), (3, None), (4, 3)):
        train(worker)
        worker.save(str(tmp_path), step, keep=keep, full_every=2)
    assert [finding.path.name for finding in verify(tmp_path)] == [
        "checkpoint-100000001-000000000004",
        "checkpoint-100000000-000000000003",
        "checkpoint-99999999-000000000002",
    ]
    held = values(worker)
    train(worker)
    assert worker.restore(str(tmp_path)) == 4
    assert_same(values(worker), held)


# Damage

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a table": (lambda path: flip(next(path.glob("part-00001-*")), -5), "checksum"),
    "a bit of a header": (
        lambda path: flip(next(path.glob("part-00000-*")), 20),
        "checksum of its header",
    ),
    "a bit of the manifest": (lambda path: flip(path / MANIFEST, 40), "torn or damaged"),
    "a file cut short": (lambda path: cut_short(next(path.glob("part-00000-*"))), "were written"),
    "the manifest cut short": (lambda path: cut_short(path / MANIFEST), "torn or damaged"),
    "a file too few": (
        lambda path: next(path.glob("part-00001-*")).unlink(),
        "cannot be read: No such file",
    ),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "cannot be read: No such file"),
    "another format": (
        lambda path: rewrite(path, lambda found: found.update(format=99)),
        "formats (1, 2, 3) are allowed",
    ),
    "a part too few": (
        lambda path: rewrite(path, lambda found: found["parts"].pop()),
        "is on 1 of 2 servers",
    ),
    "another step": (
        lambda path: rewrite(path, lambda found: found.update(step=9)),
        "its manifest is of step 9",
    ),
    "a file elsewhere": (lambda path: rewrite(path, lead_away), "file name '/etc/passwd'"),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """As somebody who knows the format would."""
    found = json.loads((path / MANIFEST).read_bytes().splitlines()[0])
    change(found)
    line = json.dumps(found).encode()
    (path / MANIFEST).write_bytes(line + b"\n%08x\n" % zlib.crc32(line))


def lead_away(found: dict) -> None:
    found["parts"][0]["tables"][0]["file"] = "/etc/passwd"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = saved(tmp_path, servers=2, steps=2)
    spoil, said = DAMAGES[damage]
    spoil(latest(tmp_path).path)
    worker = local_job(2)
    with caplog.at_level(logging.WARNING):
        assert worker.restore(str(tmp_path)) == 1
    assert said in caplog.text
    assert_same(values_of(worker), first)
    assert [bool(finding.fault) for finding in verify(tmp_path)] == [True, False]


def values_of(worker: object) -> dict[str, object]:
    return values(worker)  # type: ignore[arg-type]


def test_nothing_to_restore_is_said_with_all_reasons(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        local_job().restore(str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="there is none at all"):
        local_job().restore(str(tmp_path))
    saved(tmp_path)
    (latest(tmp_path).path / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no whole checkpoint .*checkpoint-00000001-000000000001: manifest.json cannot be",
    ):
        local_job().restore(str(tmp_path))


# What a caller may ask


@pytest.mark.parametrize("folder", ["relative", "/x\0y", "", 3])
def test_only_absolute_paths_are_folders(folder: object) -> None:
    with pytest.raises(ConfigError, match="an absolute path on the servers' disks is allowed"):
        local_job().save(folder, 1)  # type: ignore[arg-type]


def test_a_server_is_confined_to_its_checkpoint_root_links_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    worker = local_job(root=str(root))
    create_tables(worker)
    worker.save(str(root / "job"), 1)
    for folder in (tmp_path / "job", root / ".." / "job", root / "link" / "job"):
        for attempt in (
            lambda folder=folder: worker.save(str(folder), 1),
            lambda folder=folder: worker.restore(str(folder)),
        ):
            with pytest.raises(ConfigError, match="checkpoint_root confines it"):
                attempt()
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("step", "keep"),
    [(-1, None), (10**12, None), (True, None), ("1", None), (1, 0), (1, "2"), (1, 1.5), (1, True)],
)
def test_steps_and_numbers_to_keep_are_checked_before_anything_is_written(
    tmp_path: Path, step: object, keep: object
) -> None:
    worker = local_job()
    create_tables(worker)
    with pytest.raises(ConfigError, match=r"allowed|at least 1"):
        worker.save(tmp_path / "job", step, keep=keep)  # type: ignore[arg-type]
    assert not (tmp_path / "job").exists()


def test_a_folder_that_is_none_is_refused_once_and_without_a_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = local_job()
    create_tables(worker)
    folders: list[object] = ["checkpoints", Path("checkpoints"), "/check\0points", None, 5]
    for folder in folders:
        for attempt in (
            lambda folder=folder: worker.save(folder, 1),
            lambda folder=folder: worker.restore(folder),
        ):
            with pytest.raises(
                ConfigError, match="an absolute path on the servers' disks is allowed"
            ):
                attempt()
    assert not caplog.records


def test_a_folder_is_a_path_too_and_steps_and_extents_may_be_numpys(tmp_path: Path) -> None:
    worker = local_job()
    keys = np.array([3, 7])
    worker.create_sparse("rows", np.int64(2), {"name": "add"})
    worker.create_dense("tensor", (keys.max() + 1, 2), {"name": "add"})
    worker.save(tmp_path, np.int64(4))
    assert worker.restore(tmp_path) == 4


def test_the_names_of_new_folders_are_on_the_disk_before_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    on_the_way = {str(tmp_path / below) for below in ("", "a", "a/b")}
    for _ in range(2):  # who finds them may have to finish what another began
        Files().make_folder(tmp_path / "a" / "b" / "c")
        assert on_the_way <= set(synced)
        synced.clear()


@pytest.mark.parametrize("method", ["checkpoint_enter", "checkpoint_abort", "checkpoint_commit"])
def test_an_id_cannot_name_another_folder(tmp_path: Path, method: str) -> None:
    victim = tmp_path / "unfinished-x" / ".." / "victim"
    arguments = {
        "checkpoint_enter": (str(tmp_path),),
        "checkpoint_abort": (str(tmp_path),),
        "checkpoint_commit": (str(tmp_path), 1, [], None, None),
    }
    called = getattr(TableShard(), method)
    with pytest.raises(ConfigError, match="16 hexadecimal digits"):
        finished = called(f"x/../{victim.name}", *arguments[method])
        finished.send(None)


def test_one_save_at_a_time(tmp_path: Path) -> None:
    shard = TableShard()
    shard.checkpoint_enter("0" * 16, str(tmp_path))
    with pytest.raises(CheckpointError, match="another save of these tables is under way"):
        shard.checkpoint_enter("1" * 16, str(tmp_path))
    shard.checkpoint_release("0" * 16)
    shard.checkpoint_enter("1" * 16, str(tmp_path))


def test_a_table_that_only_some_servers_have_makes_no_checkpoint(tmp_path: Path) -> None:
    worker, shards = job_and_shards(2)
    create_tables(worker)
    spec, _ = shards[0].tables["clicks/a"]
    shards[0].create_table(spec.to_dict() | {"table": "being created"})
    with pytest.raises(
        CheckpointError, match="on 1 of 2 servers: it was just being created; save again"
    ):
        worker.save(str(tmp_path), 1)
    assert verify(tmp_path) == []


@pytest.mark.parametrize(
    "method",
    [
        "checkpoint_enter",
        "checkpoint_save",
        "checkpoint_commit",
        "checkpoint_load",
        "checkpoint_swap",
    ],
)
def test_a_partition_that_moves_meanwhile_is_asked_again_where_it_is_then(
    tmp_path: Path, method: str
) -> None:
    moves, there = list[int](), getattr(TableShard, method)

    def moved(shard: TableShard, *arguments: object) -> object:
        if moves:
            moves.pop()
            raise Moved("partition 1: server 1 is no primary of it at epoch 3, asked was 2")
        return there(shard, *arguments)

    worker, _ = job_and_shards(2, kind=type("Moving", (TableShard,), {method: moved}))
    create_tables(worker)
    train(worker)
    moves += [1, 2, 3]
    worker.save(tmp_path, 1)
    held = values(worker)
    train(worker)
    assert worker.restore(tmp_path) == 1
    assert not moves
    assert_same(values(worker), held)
    assert [finding.fault for finding in verify(tmp_path)] == [""]
