"""What is answered is on the disk, files are their user's alone whatever the umask, and what
somebody else put there is named.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.accumulator import AccumulatorServer
from prpc_engine.accumulator.snapshot_file import save
from prpc_engine.cli.endpoint_map import _write
from prpc_engine.errors import JournalError
from prpc_engine.master.journal import RECORD, Journal, encode_header, encode_record
from prpc_engine.master.tree import Change, Kind, NodeTree
from shard.group.core_locks import CoreLocks
from tests.disk import watched_disk
from tests.prpc_engine.kv.checkpoint.jobs import create_tables, local_job, train

GOOD = [Change(Kind.PUT, "/a", "text", 1)]


# -- synced ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_transaction_is_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    journal = Journal(tmp_path / "journal", sync)
    journal.load(NodeTree())
    with watched_disk(monkeypatch) as disk:
        journal.append(1, [])
        assert [call for call, _ in disk.events] == (["write", "fdatasync"] if sync else ["write"])
        assert disk.is_synced(tmp_path / "journal" / "journal-0") == sync
    journal.close()


def test_the_names_of_folders_that_a_journal_made_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_disk(monkeypatch) as disk:
        Journal(tmp_path / "made" / "by it").close()
    assert ("fsync", tmp_path) in disk.events
    assert ("fsync", tmp_path / "made") in disk.events


def test_a_snapshot_is_on_the_disk_before_it_has_its_name_and_named_before_the_old_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.load(NodeTree())
    gone: list[int] = []
    with watched_disk(monkeypatch) as disk:
        remove = Path.unlink

        def unlink(path: Path) -> None:
            gone.append(len(disk.events))
            remove(path)

        monkeypatch.setattr(Path, "unlink", unlink)
        journal.compact(NodeTree())
    ((number, target),) = disk.renames()
    assert target == tmp_path / "snapshot-1"
    assert ("fsync", tmp_path / "snapshot-1.tmp") in disk.events[:number]
    assert gone and ("fsync", tmp_path) in disk.events[number + 1 : min(gone)]
    journal.close()


@pytest.mark.parametrize("servers", [1, 2])
def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts_and_its_name_when_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    worker = local_job(servers)
    create_tables(worker)
    train(worker)
    folder = tmp_path / "job"
    with watched_disk(monkeypatch) as disk:
        worker.save(str(folder), 1)
    ((number, final),) = [
        (number, path) for number, path in disk.renames() if path.name.startswith("checkpoint-")
    ]
    written = {path for call, path in disk.events[:number] if call == "pwrite"}
    assert {path.name for path in written} == set(os.listdir(final))
    assert len(written) > servers
    for path in written:
        assert disk.is_synced(path, number), f"{path} was not synced after its last write"
    (unfinished,) = {path.parent for path in written}
    last_made = max(
        index for index, (call, path) in enumerate(disk.events[:number]) if path in written
    )
    assert ("fsync", unfinished) in disk.events[last_made:number], "the names of its files"
    assert disk.synced_after(number, folder) and disk.synced_after(number, tmp_path)


def test_a_snapshot_of_accumulators_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_disk(monkeypatch) as disk:
        monkeypatch.setattr(Path, "rename", lambda path, to: os.rename(path, to))
        save(tmp_path / "counters", [{}])
    ((number, target),) = disk.renames()
    assert target == tmp_path / "counters"
    assert ("fsync", tmp_path / "counters.new") in disk.events[:number]
    assert disk.synced_after(number, tmp_path)


# -- for their user alone --------------------------------------------------------------------------


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Of all that is below it."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


def test_files_made_without_a_umask_are_for_their_user_alone(
    tmp_path: Path, no_umask: None
) -> None:
    journal = Journal(tmp_path / "a" / "b" / "journal")
    journal.load(NodeTree())
    journal.compact(NodeTree())
    worker = local_job(2)
    create_tables(worker)
    train(worker)
    worker.save(str(tmp_path / "c" / "d" / "job"), 1)
    with Master() as master, RpcService(master.address) as service:
        server = AccumulatorServer(service, snapshot_path=str(tmp_path / "counters"))
        server.close()
    found = modes(tmp_path)
    assert {
        "a",
        "a/b",
        "a/b/journal/snapshot-1",
        "a/b/journal/lock",
        "c/d/job",
        "counters",
    } <= found.keys()
    assert any(name.endswith("manifest.json") for name in found)
    for name, mode in found.items():
        assert mode == (0o700 if (tmp_path / name).is_dir() else 0o600), (
            f"{name} has mode {mode:04o}"
        )
    journal.close()


def test_what_others_may_read_without_a_umask_they_may_not_write(
    tmp_path: Path, no_umask: None
) -> None:
    """Maps are read by all tasks, locks of cores taken by all users."""
    CoreLocks.take(1, tmp_path / "locks").close()
    _write(tmp_path / ".endpoint_map", "a:1=a:2\n")
    found = modes(tmp_path)
    assert len(found) == 3
    assert not any(mode & 0o022 for mode in found.values()), found


# -- made by somebody else -------------------------------------------------------------------------


def load(folder: Path) -> None:
    journal = Journal(folder)
    try:
        journal.load(NodeTree())
    finally:
        journal.close()


@pytest.mark.parametrize("name", ["lock", "journal-0"])
def test_a_journal_follows_no_link(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "journal"
    folder.mkdir(0o700)
    (folder / name).symlink_to(victim)
    with pytest.raises(JournalError, match="Too many levels of symbolic links"):
        load(folder)
    assert victim.read_text() == "precious"


def record(body: bytes) -> bytes:
    """With checksums that fit."""
    length = struct.pack("<I", len(body))
    return RECORD.pack(len(body), zlib.crc32(length), zlib.crc32(body)) + body


BAD = {
    "nil": b"\xc0",
    "no MessagePack": b"\xc1",
    "cut short": b"\x92\x01",
    "more than one value": msgspec.msgpack.encode((1, [])) + b"\xc0",
    "text for a version": msgspec.msgpack.encode(("one", [])),
    "a nest of lists": b"\x91" * 100_000,
    "no changes": msgspec.msgpack.encode((1, [5])),
    "changes of nothing": msgspec.msgpack.encode((1, [[]])),
    "text that is none": b"\x92\x01\x91\xa1\xff",
}


@pytest.mark.parametrize("kind", ["journal-0", "snapshot-1"])
@pytest.mark.parametrize("name", BAD)
def test_a_record_with_a_fitting_checksum_and_other_content_is_named_with_its_place(
    tmp_path: Path, name: str, kind: str
) -> None:
    good = encode_record(1, GOOD)
    data = encode_header() + good + record(BAD[name])
    (tmp_path / kind).write_bytes(data)
    with pytest.raises(
        JournalError, match=rf"{kind} has a record at byte {16 + len(good)} .*[Rr]estore the file"
    ):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["journal-0", "snapshot-1"])
@pytest.mark.parametrize(
    "change",
    [
        Change(Kind.DELETE, "/nobody"),
        Change(Kind.PUT, "/nobody/below", "text", 2),
        Change(Kind.OPEN, text="{", owner=7),
        Change(Kind.OPEN, text="5", owner=7),
        Change(Kind.END, owner=7),
        Change(Kind.ANSWER, text="x", number=1, owner=7),
    ],
    ids=lambda change: f"{change.kind.name} {change.path or change.text}",
)
def test_a_change_that_does_not_follow_is_named_with_its_place(
    tmp_path: Path, kind: str, change: Change
) -> None:
    good = encode_record(1, GOOD)
    tail = encode_record(2, []) if kind == "snapshot-1" else b""
    (tmp_path / kind).write_bytes(encode_header() + good + encode_record(2, [change]) + tail)
    with pytest.raises(
        JournalError,
        match=rf"{kind} has a record at byte {16 + len(good)} with a change that does not follow",
    ):
        load(tmp_path)
