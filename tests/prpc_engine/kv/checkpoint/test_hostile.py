"""A folder of checkpoints that somebody else has written in: what cannot be used is refused, and
what is whole is found.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prpc_engine.errors import RpcError
from prpc_engine.kv import Adagrad, Eviction, Uniform
from prpc_engine.kv.checkpoint import CheckpointError, latest, verify
from prpc_engine.kv.checkpoint.manifest import MANIFEST, decode
from tests.prpc_engine.kv.checkpoint.jobs import (
    assert_same,
    create_tables,
    local_job,
    train,
    values,
)
from tests.prpc_engine.processes import PATIENCE_S

# Of how many places of a manifest a restore is tried with others, and how many values are tried at
# each place: drawn anew in each run, and more at night.
IS_NIGHT = "PRPC_FUZZ_INPUTS" in os.environ
PLACES, VALUES = (60, 8) if IS_NIGHT else (25, 3)
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**400, 1e308, -0.5,
    "", "x", "../../etc/passwd", "/etc/passwd", "a\x00b", "\u00e9" * 300,
    [], [0], [-1], [2**40, 2**40], [[1, 2]], {}, {"name": "sgd"}, [[[]]],
]  # fmt: skip


def written(path: Path, manifest: object) -> None:
    """The manifest of the checkpoint at `path`, with a checksum that fits."""
    line = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(line + b"\n%08x\n" % zlib.crc32(line))


def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value of it."""
    for key, value in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        yield (*above, key)
        yield from places(value, (*above, key))


def changed(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(node))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of which the newer one lies over the older, of all that manifests can
    have.
    """
    job = local_job(2)
    create_tables(job)
    job.create_sparse(
        "seldom",
        2,
        Adagrad(0.1),
        Uniform(0.1),
        eviction=Eviction(rows_max=50),
        admission={"min_count": 2},
    )
    job.create_dense("model", (6,), Adagrad(0.1), names={"a": (2, 2), "b": (2,)})
    for step in (1, 2):
        train(job)
        job.save(tmp_path / "job", step, full_every=2)
    return tmp_path / "job"


@pytest.mark.slow
def test_a_manifest_with_a_checksum_that_fits_and_anything_in_it_is_read_or_refused(
    folder: Path, seed: int
) -> None:
    chance = random.Random(seed)
    for path in (latest(folder).path, min(folder.iterdir())):
        good = json.loads((path / MANIFEST).read_bytes().partition(b"\n")[0])
        for place in places(good):
            for value in chance.sample(ODD, VALUES):
                line = json.dumps(changed(good, place, value)).encode()
                try:
                    decode(line + b"\n%08x\n" % zlib.crc32(line))
                except CheckpointError:
                    continue
                except Exception as error:
                    raise AssertionError(f"{place} = {value!r}: {error!r}") from error


@pytest.mark.slow
def test_a_restore_of_what_somebody_has_changed_fails_by_name_or_takes_the_one_before(
    folder: Path, seed: int
) -> None:
    chance = random.Random(seed)
    path = latest(folder).path
    text = (path / MANIFEST).read_bytes()
    good = json.loads(text.partition(b"\n")[0])
    for place in chance.sample(list(places(good)), PLACES):
        for value in chance.sample(ODD, VALUES):
            written(path, changed(good, place, value))
            job = local_job(3)
            try:
                assert job.restore(folder, timeout_s=PATIENCE_S) in (1, 2)
            except RpcError:
                pass
            except Exception as error:
                raise AssertionError(f"{place} = {value!r}: {error!r}") from error
    (path / MANIFEST).write_bytes(text)
    assert local_job(3).restore(folder) == 2


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def gone(file: Path) -> None:
    file.unlink()


def another(file: Path) -> None:
    """Of the same folder, and perhaps of the same size."""
    other = next(each for each in sorted(file.parent.iterdir()) if each != file)
    data = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(data)


def linked_out(file: Path) -> None:
    file.unlink()
    file.symlink_to("/etc/passwd")


def linked_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "nothing")


def linked_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


DAMAGES = [
    cut,
    flipped,
    gone,
    another,
    linked_out,
    linked_to_nothing,
    linked_to_itself,
    a_pipe,
    a_folder,
    endless,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_whatever_becomes_of_a_file_the_one_before_is_restored(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    job = local_job(2)
    create_tables(job)
    train(job)
    job.save(tmp_path / "job", 1)
    held = values(job)
    train(job)
    job.save(tmp_path / "job", 2)
    files = sorted(path.name for path in latest(tmp_path / "job").path.iterdir())
    for name in files:
        folder = tmp_path / f"damaged-{name}"
        shutil.copytree(tmp_path / "job", folder)
        damage(latest(folder).path / name)
        assert [bool(finding.fault) for finding in verify(folder)] == [True, False], name
        other = local_job(3)
        assert other.restore(folder, timeout_s=PATIENCE_S) == 1
        assert_same(values(other), held)
        other.save(folder, 3, keep=1, timeout_s=PATIENCE_S)
        assert latest(folder).step == 3


def test_a_checkpoint_that_is_a_link_out_of_the_root_is_none(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder, step in ((root, 1), (outside, 2)):
        job = local_job(1, root=str(root) if folder == root else None)
        create_tables(job)
        job.save(folder / "job", step)
    (root / "job" / f"checkpoint-{9:08d}-{2:012d}").symlink_to(latest(outside / "job").path)
    assert local_job(1, root=str(root)).restore(root / "job") == 1
