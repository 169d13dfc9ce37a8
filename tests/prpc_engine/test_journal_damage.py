"""Whatever happened to the master's folder, what it loads is a state that was there, or a named
error: no loss is silent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from prpc_engine.errors import JournalError
from prpc_engine.master import journal as journal_module
from prpc_engine.master.journal import HEADER, RECORD, Journal, decode, encode_header
from prpc_engine.master.registry import Registry
from prpc_engine.master.tree import Change, Kind, NodeTree, SessionRecord
from tests.prpc_engine.test_journal import State, state, write

COUNTED = Change(Kind.COUNT, "k", number=1)


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[tuple[Journal, NodeTree]]:
    journal, tree = Journal(folder, sync=False), NodeTree()
    try:
        journal.load(tree)
        yield journal, tree
    finally:
        journal.close()


def state_in(folder: Path) -> State:
    with loaded(folder) as (_, tree):
        return state(tree)


def state_or_refusal(folder: Path) -> State | str:
    try:
        return state_in(folder)
    except JournalError as error:
        return str(error)


def append(journal: Journal, tree: NodeTree) -> None:
    """Each makes another state."""
    change = Change(Kind.COUNT, "k", number=tree.counters.get("k", 0) + 1)
    tree.apply(change)
    journal.append(tree.version, [change])


def records(data: bytes) -> list[bytes]:
    found, at = [], HEADER.size
    while at < len(data):
        end = at + RECORD.size + RECORD.unpack_from(data, at)[0]
        found.append(data[at:end])
        at = end
    return found


def compacted(folder: Path, transactions: int, session: str = "t") -> State:
    """A folder with snapshot-1 and a journal-1 of some transactions; its state."""
    registry = Registry()
    with loaded(folder) as (journal, _):
        number = registry.open(SessionRecord(session, 5.0, "root", "", ""), 0.0)
        journal.append(registry.version, registry.take_changes())
        journal.compact(registry.tree)
        for index in range(transactions):
            registry.tree_node_add(number, f"/{session}{index}", "", False)
            journal.append(registry.version, registry.take_changes())
    return state(registry.tree)


@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_a_bit_that_flipped_anywhere_is_named_or_was_in_the_last_record_which_is_cut_off(
    tmp_path: Path, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "prpc")
    states = write(tmp_path, 4)
    path = tmp_path / "journal-0"
    whole = path.read_bytes()
    last = len(whole) - len(records(whole)[-1])
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        caplog.clear()
        found = state_or_refusal(tmp_path)
        if isinstance(found, str):
            assert str(path) in found
        else:
            assert at >= last
            assert found == states[-2]
            assert f"cut off {len(whole) - last} torn bytes" in caplog.text


def test_a_record_that_is_there_twice_missing_or_in_another_place_is_refused(
    tmp_path: Path,
) -> None:
    write(tmp_path, 4)
    path = tmp_path / "journal-0"
    first, second, third, *rest = records(path.read_bytes())
    for order in (
        [first, second, second, third],
        [first, third],
        [second, first, third],
        [second, third],
        [*rest, first],
    ):
        path.write_bytes(encode_header() + b"".join(order))
        with pytest.raises(JournalError, match=r"journal-0 goes from version .* one is missing"):
            state_in(tmp_path)


def test_the_journal_of_another_master_beside_our_snapshot_is_refused(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    compacted(ours, 2)
    write(theirs, 5)
    (ours / "journal-1").write_bytes((theirs / "journal-0").read_bytes())
    with pytest.raises(JournalError, match=r"journal-1 goes from version .* one is missing"):
        state_in(ours)


@pytest.mark.parametrize("lost", ["snapshot-1", "snapshot-1 under another name"])
def test_a_journal_whose_snapshot_is_gone_is_refused_and_left_as_it_is(
    tmp_path: Path, lost: str
) -> None:
    before = compacted(tmp_path, 3)
    snapshot = tmp_path / "snapshot-1"
    content = snapshot.read_bytes()
    if lost == "snapshot-1":
        snapshot.unlink()
    else:
        snapshot.rename(tmp_path / "snapshot-0")
    with pytest.raises(
        JournalError,
        match=r"journal-1 goes on from snapshot-1, which is not there.*Restore the file",
    ):
        state_in(tmp_path)
    snapshot.write_bytes(content)
    assert state_in(tmp_path) == before


@pytest.mark.parametrize("content", [b"hello", b"PRPCJRNX", encode_header()[:8] + b"\x02\x00"])
def test_a_short_file_that_is_no_begin_of_a_journal_is_not_cut_off(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "journal-0"
    path.write_bytes(content)
    with pytest.raises(
        JournalError, match=r"journal-0 is damaged at byte 0: no header of a journal"
    ):
        state_in(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kept", range(HEADER.size))
def test_a_header_whose_end_the_disk_has_as_zeros_is_an_empty_journal(kept: int) -> None:
    torn = encode_header()[:kept] + bytes(HEADER.size - 1 - kept)
    assert decode(torn, "file") == ([], 0)


def test_a_disk_that_takes_half_a_header_loses_nothing_that_is_answered_later(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal, tree = Journal(tmp_path, sync=False), NodeTree()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
        try:
            with pytest.raises(JournalError, match="cannot be read or written: File too large"):
                journal.load(tree)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        journal.close()
    with loaded(tmp_path) as (journal, tree):
        append(journal, tree)
    assert state_in(tmp_path) == [COUNTED]


@pytest.mark.parametrize(
    ("where", "fails"),
    [(journal_module, "sync_folder"), (journal_module.Journal, "_open_journal")],
    ids=["sync_folder", "open_journal"],
)
def test_what_is_answered_after_a_snapshot_that_could_not_be_finished_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, fails: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with loaded(tmp_path) as (journal, tree):
        append(journal, tree)
        before = state(tree)
        with monkeypatch.context() as patch:
            patch.setattr(where, fails, fail)
            journal.compact(tree)
        with contextlib.suppress(JournalError):  # it may refuse, but what it took is there
            append(journal, tree)
            before = state(tree)
    assert state_in(tmp_path) == before


def test_a_snapshot_begins_a_new_journal_whatever_somebody_has_put_there(tmp_path: Path) -> None:
    with loaded(tmp_path) as (journal, tree):
        append(journal, tree)
        (tmp_path / "journal-1").write_bytes((tmp_path / "journal-0").read_bytes())
        journal.compact(tree)
        append(journal, tree)
        now = state(tree)
    assert state_in(tmp_path) == now


def test_a_snapshot_of_large_values_is_written_in_many_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RECORD_BYTES_MAX", 3 << 20)
    with loaded(tmp_path) as (journal, tree):
        for number in range(5):
            change = Change(Kind.PUT, f"/{number}", "x" * (1 << 20))
            tree.apply(change)
            journal.append(tree.version, [change])
        now = state(tree)
        journal.compact(tree)
        assert (tmp_path / "snapshot-1").exists()
    assert state_in(tmp_path) == now


@pytest.mark.parametrize("folder", ["", "a\0b", "/proc/nothing", "/dev/null"])
def test_a_folder_that_can_be_none_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JournalError, match=r"cannot keep a journal|a journal in ''"):
        Journal(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_a_fork_does_not_keep_the_folder_when_its_parent_lets_it_go(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, sync=False)
    journal.load(NodeTree())
    (reading, writing), (is_up, up) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.write(up, b"!")
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    os.close(reading)
    try:
        os.read(is_up, 1)
        journal.close()
        assert state_in(tmp_path) == []
    finally:
        for fd in (writing, is_up, up):
            os.close(fd)
        os.waitpid(child, 0)


def test_a_fork_takes_the_folder_from_nobody(tmp_path: Path) -> None:
    with loaded(tmp_path) as (journal, tree):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(JournalError, match="another master serves from"):
            Journal(tmp_path)
        append(journal, tree)
