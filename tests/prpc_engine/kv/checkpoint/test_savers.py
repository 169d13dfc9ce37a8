"""Savers in one folder, of the same tables or of others: none of them takes away what another one
writes.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prpc_engine.kv import Constant, Sgd, TableShard
from prpc_engine.kv.checkpoint import CheckpointError, latest, verify
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.manifest import Busy
from prpc_engine.kv.checkpoint.save import LEFT_S
from prpc_engine.kv.client.local import run_to_end
from prpc_engine.kv.schema.table_spec import SparseSpec
from tests.prpc_engine.kv.checkpoint.jobs import create_tables, job_and_shards, local_job, train
from tests.prpc_engine.processes import PATIENCE_S

SAVERS, SAVES = 3, 25


class Saver:
    """A server of one table, as a worker's save asks it."""

    def __init__(self, folder: Path, number: int, files: Files | None = None) -> None:
        self.shard, self.folder, self.id = TableShard(None, files), str(folder), f"{number:016x}"
        self.shard.create_table(SparseSpec("t", 0, 1, Sgd(1.0), Constant(), 1).to_dict())

    def write(self, base: object = None) -> None:
        known = self.shard.checkpoint_enter(self.id, self.folder)
        assert base is None or known == base
        self.part = run_to_end(self.shard.checkpoint_save(self.id, self.folder, 7, 0, base, True))
        self.base = base

    def count(self, keep: int | None = None) -> dict[str, object]:
        saved: dict[str, object] = run_to_end(
            self.shard.checkpoint_commit(self.id, self.folder, 7, [self.part], keep, self.base)  # type: ignore[arg-type]
        )
        self.shard.checkpoint_committed(self.id, saved)
        return saved


def test_a_save_that_counts_leaves_what_others_have_written_and_not_counted_yet(
    tmp_path: Path,
) -> None:
    one, other = Saver(tmp_path, 1), Saver(tmp_path, 2)
    one.write()
    other.write()
    one.count(keep=1)
    other.count(keep=2)
    assert [finding.fault for finding in verify(tmp_path)] == ["", ""]


def test_what_a_save_has_left_goes_when_nothing_was_written_there_for_long(tmp_path: Path) -> None:
    left, fresh, one = (Saver(tmp_path, number) for number in (1, 2, 3))
    left.write()
    fresh.write()
    old = time.time() - LEFT_S - 60
    folder = tmp_path / f"unfinished-{left.id}"
    for path in (*folder.iterdir(), folder):
        os.utime(path, (old, old))
    one.write()
    one.count()
    assert not folder.exists()
    fresh.count()
    with pytest.raises(CheckpointError, match="another save removed it; save again"):
        left.count()
    assert [finding.fault for finding in verify(tmp_path)] == ["", ""]


def test_a_save_does_not_count_after_one_of_the_same_tables_that_was_cut_later(
    tmp_path: Path,
) -> None:
    """It would be the newest, without what was acknowledged as durable by the other one."""
    one = Saver(tmp_path, 1)
    first, second = "1" * 16, "2" * 16
    parts = []
    for step, save_id in enumerate((first, second)):
        one.shard.checkpoint_enter(save_id, one.folder)
        saving = one.shard.checkpoint_save(save_id, one.folder, step, 0, None, False)
        parts.append(run_to_end(saving))

    def count(step: int, save_id: str) -> None:
        commit = one.shard.checkpoint_commit
        run_to_end(commit(save_id, one.folder, step, parts[step : step + 1], None, None))

    count(1, second)
    with pytest.raises(Busy, match="another save, which cut these tables later, counts already"):
        count(0, first)
    with pytest.raises(Busy, match="these tables were not cut here for this save"):
        count(0, "3" * 16)
    assert latest(tmp_path).step == 1
    one.write()
    one.count()
    assert latest(tmp_path).step == 7


class Overtaken(Files):
    """Just before a save's rename, `meanwhile` is called once."""

    meanwhile: Callable[[], object] | None = None

    def rename(self, path: Path, to: Path) -> None:
        if self.meanwhile is not None and to.name.startswith("checkpoint-"):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        super().rename(path, to)


def test_of_two_saves_that_take_one_number_at_the_same_moment_both_count(tmp_path: Path) -> None:
    files = Overtaken()
    one, other = Saver(tmp_path, 1, files), Saver(tmp_path, 2)
    one.write()
    other.write()
    files.meanwhile = other.count
    one.count()
    assert [(finding.path.name, finding.fault) for finding in verify(tmp_path)] == [
        ("checkpoint-00000002-000000000007", ""),
        ("checkpoint-00000001-000000000007", ""),
    ]


def test_a_save_whose_base_another_one_removes_is_made_again(tmp_path: Path) -> None:
    one, other = Saver(tmp_path, 1), Saver(tmp_path, 2)
    one.write()
    base = one.count()
    one.write(base)
    other.write()
    other.count(keep=1)
    with pytest.raises(Busy, match=f"{base['name']}, which this save was to lie over, was removed"):
        one.count()


class Held(Files):
    """At moment number `at` (from 0) `meanwhile` is called. Moments: before each call that other
    savers can notice, before and after each that notices them. Nothing is synced, as no machine
    fails here.
    """

    def __init__(self) -> None:
        self.calls, self.at = 0, -1
        self.meanwhile: Callable[[], object] = list

    def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.at:
            self.meanwhile()

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self._count()
        super().write_at(fd, data, offset)

    def names(self, path: Path) -> list[str]:
        self._count()
        names = super().names(path)
        self._count()  # between a look at the folder and at what was in it
        return names

    def rename(self, path: Path, to: Path) -> None:
        self._count()
        super().rename(path, to)

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def count_interleaved(folder: Path, order: str, at: int, then_at: int) -> tuple[bool, bool]:
    """Commit a save over a base and a full one, with keep=1 each. The first in `order` comes as far
    as its moment `at`, the other one as far as its moment `then_at`; then the first ends, and then
    the other one. Whether each had so many moments.
    """
    files = {"over": Held(), "full": Held()}
    over, full = Saver(folder, 1, files["over"]), Saver(folder, 2, files["full"])
    over.write()
    base = over.count()
    over.write(base)
    full.write()
    counted = dict.fromkeys(files, "")

    def count(who: str) -> None:
        try:
            counted[who] = str({"over": over, "full": full}[who].count(keep=1)["name"])
        except Busy:
            assert who == "over"

    first, second = order.split()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(PATIENCE_S)

    def count_first() -> None:
        try:
            count(first)
        finally:
            held.set()

    thread = threading.Thread(target=count_first)

    def end_first() -> None:
        go_on.set()
        thread.join(PATIENCE_S)

    for each, moment, meanwhile in ((first, at, hold), (second, then_at, end_first)):
        files[each].calls, files[each].at, files[each].meanwhile = 0, moment, meanwhile
    thread.start()
    try:
        assert held.wait(PATIENCE_S)
        count(second)
    finally:
        end_first()
    found = [finding for finding in verify(folder) if finding.step >= 0]
    assert counted["full"]
    assert [finding.fault for finding in found] == [""] * len(found), (order, at, then_at)
    assert found[0].path.name == max(counted.values()), (order, at, then_at)
    return files[first].calls > at, files[second].calls > then_at


@pytest.mark.slow
@pytest.mark.parametrize("order", ["over full", "full over"])
def test_whatever_two_savers_do_in_turns_what_counts_has_all_that_it_lies_over(
    tmp_path: Path, order: str
) -> None:
    for at in itertools.count():
        for then_at in itertools.count():
            had = count_interleaved(tmp_path / f"{at}-{then_at}", order, at, then_at)
            if not all(had):
                break
        if not had[0]:
            break
    assert at >= 7  # one for each call that a commit makes at least


def test_a_cut_that_comes_too_late_is_made_again(tmp_path: Path) -> None:
    worker, (shard,) = job_and_shards(1)
    create_tables(worker)
    save, late = shard.checkpoint_save, [True]

    def let_go_first(save_id: str, *arguments: object) -> object:
        if late:
            late.pop()
            shard.checkpoint_release(save_id)
        return save(save_id, *arguments)

    shard.checkpoint_save = let_go_first
    worker.save(tmp_path, 1, timeout_s=PATIENCE_S)
    assert latest(tmp_path).step == 1


@pytest.mark.slow
def test_savers_of_several_jobs_that_keep_two_all_save(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def save(first: int) -> None:
        worker = local_job(2)
        create_tables(worker)
        try:
            for step in range(first, first + SAVES):
                train(worker)
                worker.save(tmp_path, step, keep=2, full_every=1 + step % 3, timeout_s=PATIENCE_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(100 * number,)) for number in range(SAVERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []
    found = verify(tmp_path)
    assert [finding.fault for finding in found] == [""] * len(found)
    assert len(found) >= 2
    assert latest(tmp_path).step % 100 == SAVES - 1
