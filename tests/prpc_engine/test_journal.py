"""The master's journal: what is on disk replays to what was, whatever a kill or a power cut left of
it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import resource
import struct
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prpc_engine import Master
from prpc_engine.errors import JournalError
from prpc_engine.idempotency_window import FORGOTTEN, NEW, SEEN
from prpc_engine.master.client import MasterClient, TreeEvent
from prpc_engine.master.journal import (
    COMPACT_BYTES,
    HEADER,
    RECORD,
    Journal,
    decode,
    encode_header,
    encode_record,
    load_snapshot,
    replay,
    snapshot_records,
)
from prpc_engine.master.namespace import VALUE_LENGTH_MAX
from prpc_engine.master.registry import Registry, RegistryError
from prpc_engine.master.tree import ANSWERS_MAX, Change, Kind, NodeTree, SessionRecord
from tests.examples import examples
from tests.prpc_engine.processes import PATIENCE_S, wait_until

State = list[Change]


def state(tree: NodeTree) -> State:
    return list(tree.snapshot())


def restored(data: bytes) -> NodeTree:
    tree = NodeTree()
    replay(decode(data, "file")[0], tree, "file", data)
    return tree


def write(folder: Path, transactions: int) -> list[State]:
    """A journal of some transactions; the state after each."""
    journal, registry = Journal(folder, sync=False), Registry()
    journal.load(registry.tree)
    states = [state(registry.tree)]
    session = registry.open(SessionRecord("t", 5.0, "root", "", ""), 0.0)
    for number in range(transactions):
        registry.tree_node_add(session, f"/{number}", "v" * number, number % 2 == 0)
        journal.append(registry.version, registry.take_changes())
        states.append(state(registry.tree))
    journal.close()
    return states


class AnyHistory(RuleBasedStateMachine):
    """Verbs in any order, journalled; after every step, every prefix of the file is a state that
    was there.
    """

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.data = encode_header()
        self.states = {0: state(self.registry.tree)}

    def _written(self) -> None:
        changes = self.registry.take_changes()
        if changes:
            self.data += encode_record(self.registry.version, changes)
            self.states[self.registry.version] = state(self.registry.tree)

    @rule(target=sessions)
    def opens(self) -> int:
        session = self.registry.open(SessionRecord("t", 5.0, "root", "", ""), 0.0)
        self._written()
        return session

    @rule(session=consumes(sessions))
    def ends(self, session: int) -> None:
        self.registry.end(session)
        self._written()

    @rule(
        session=sessions,
        verb=st.sampled_from(
            ["add", "gen", "set", "del", "clear", "id", "reset", "join", "register", "answer"]
        ),
        name=st.sampled_from(["a", "b", "c"]),
        flag=st.booleans(),
    )
    def changes(self, session: int, verb: str, name: str, flag: bool) -> None:
        registry, path = self.registry, f"/{name}"
        try:
            if verb == "add":
                registry.tree_node_add(session, path, name, flag)
            elif verb == "gen":
                registry.tree_node_gen(session, path, name, flag)
            elif verb == "set":
                registry.tree_node_set(session, path, "new", 0 if flag else -1)
            elif verb == "del":
                registry.tree_node_del(session, path, -1)
            elif verb == "clear":
                registry.tree_clear_path(session, "" if flag else path)
            elif verb == "id":
                registry.generate_id(session, name)
            elif verb == "reset":
                registry.reset_generate_id(session, name)
            elif verb == "join":
                registry.join(session, [name], -1, -1)
            elif verb == "register":
                registry.register_server(session, name, -1)
            else:
                registry.note_answer(session, 1, name)
        except RegistryError:
            assert not registry.has_changes(), "what is refused changes nothing"
        self._written()

    @rule(data=st.data())
    def is_cut(self, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(self.data)))
        transactions, good_bytes = decode(self.data[:cut], "file")
        assert good_bytes <= cut
        tree = NodeTree()
        replay(transactions, tree, "file", self.data)
        assert state(tree) == self.states[tree.version]

    @invariant()
    def the_whole_file_is_the_present(self) -> None:
        tree = restored(self.data)
        assert tree.version == self.registry.version
        assert state(tree) == state(self.registry.tree)

    @invariant()
    def a_snapshot_is_the_present(self) -> None:
        tree = NodeTree()
        load_snapshot(b"".join(snapshot_records(self.registry.tree)), tree, "snapshot")
        assert tree.version == self.registry.version
        assert state(tree) == state(self.registry.tree)


AnyHistory.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=25)
TestAnyHistory = AnyHistory.TestCase


def test_the_answers_in_journals_are_read_as_ever() -> None:
    """By hand: a session opens, and is answered under 2 and 1 in one record, under 7 in another."""

    def record(version: int, *changes: list[Any]) -> bytes:
        body = msgspec.msgpack.encode([version, changes])
        length = struct.pack("<I", len(body))
        return length + struct.pack("<II", zlib.crc32(length), zlib.crc32(body)) + body

    begin = struct.pack("<8sI", b"PRPCJRNL", 1)
    opened = '{"token":"t","lease_s":5.0,"root":"root","label":"","home":""}'
    tree = restored(
        begin
        + struct.pack("<I", zlib.crc32(begin))
        + record(3, [4, "", opened, 0, 1], [6, "", "[]", 2, 1], [6, "", "17", 1, 1])
        + record(4, [6, "", '"/q/0000000000"', 7, 1])
    )
    answers = tree.sessions[1].answers
    assert list(answers.kept.items()) == [(2, "[]"), (1, "17"), (7, '"/q/0000000000"')]
    assert [answers.find(request) for request in (1, 2, 3, 7, 8)] == [SEEN, SEEN, NEW, SEEN, NEW]
    assert [[*map(str, msgspec.to_builtins(change))] for change in tree.snapshot()][1:] == [
        ["6", "", "[]", "2", "1"],
        ["6", "", "17", "1", "1"],
        ["6", "", '"/q/0000000000"', "7", "1"],
    ]


def test_verbs_of_many_threads_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """By which the master tells a first request from one whose answer it has forgotten."""
    with Master(journal=tmp_path) as master, MasterClient(master.address) as client:

        def ask() -> None:
            asked = [client.submit("generate_id", "k") for _ in range(100)]
            for each in asked:
                each.result(PATIENCE_S)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # between a verb's number and its entry, too
        try:
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        finally:
            sys.setswitchinterval(interval_s)
    transactions, _ = decode((tmp_path / "journal-0").read_bytes(), "journal-0")
    changes = [change for _, several in transactions for change in several]
    answered = [change.number for change in changes if change.kind is Kind.ANSWER]
    assert len(answered) == 400
    assert answered == sorted(answered)


def test_which_answers_were_forgotten_outlives_replay_and_snapshot() -> None:
    registry = Registry()
    session = registry.open(SessionRecord("t", 5.0, "root", "", ""), 0.0)
    last = 2 * ANSWERS_MAX
    for request in (*range(2, last), 1):  # that waited meanwhile
        registry.note_answer(session, request, request)
    changes = registry.take_changes()
    by_replay, by_snapshot = NodeTree(), NodeTree()
    replay([(registry.version, changes)], by_replay, "file", b"")
    load_snapshot(b"".join(snapshot_records(registry.tree)), by_snapshot, "snapshot")
    for tree in (by_replay, by_snapshot):
        answers = tree.sessions[session].answers
        told = {request: answers.find(request) for request in range(1, last + 1)}
        assert told == {
            request: SEEN
            if request in (1, *range(last - ANSWERS_MAX + 1, last))
            else FORGOTTEN
            if request < last
            else NEW
            for request in told
        }
        assert state(tree) == state(registry.tree)


def test_a_journal_that_was_closed_goes_on(tmp_path: Path) -> None:
    states = write(tmp_path, 5)
    tree = NodeTree()
    journal = Journal(tmp_path)
    journal.load(tree)
    journal.close()
    assert state(tree) == states[-1]


def test_a_torn_tail_is_cut_off_and_what_follows_is_kept(tmp_path: Path) -> None:
    states = write(tmp_path, 5)
    path = tmp_path / "journal-0"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    journal, tree = Journal(tmp_path), NodeTree()
    journal.load(tree)
    assert state(tree) == states[-2]
    change = Change(Kind.COUNT, "k", number=1)
    tree.apply(change)
    journal.append(tree.version, [change])
    journal.close()
    again = restored(path.read_bytes())
    assert state(again) == state(tree)


@pytest.mark.parametrize("zeros", [1, RECORD.size, 5000])
def test_a_tail_of_zeros_is_torn_too(tmp_path: Path, zeros: int) -> None:
    states = write(tmp_path, 3)
    path = tmp_path / "journal-0"
    assert state(restored(path.read_bytes() + bytes(zeros))) == states[-1]


@pytest.mark.parametrize("zeros", [0, 1, 5000])
def test_a_record_whose_end_the_disk_has_as_zeros_is_torn_wherever_that_begins(
    tmp_path: Path, zeros: int
) -> None:
    states = write(tmp_path, 3)
    data = (tmp_path / "journal-0").read_bytes()
    begins = len(data) - len(encode_record(*decode(data, "file")[0][-1]))
    for kept in range(begins, len(data)):
        torn = data[:kept] + bytes(len(data) - kept + zeros)
        if torn != data + bytes(zeros):  # its last bytes may be zeros themselves
            assert state(restored(torn)) == states[-2]


@pytest.mark.parametrize("cut", range(HEADER.size))
def test_a_header_that_is_not_all_there_is_an_empty_journal(cut: int) -> None:
    assert decode(encode_header()[:cut], "file") == ([], 0)


def test_damage_in_the_middle_is_refused_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, 5)
    path = tmp_path / "journal-0"
    whole = path.read_bytes()
    first = len(encode_header())
    for at in range(first, first + RECORD.size + 20):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        journal = Journal(tmp_path)
        try:
            with pytest.raises(JournalError, match=f"damaged at byte {first} of {len(whole)}"):
                journal.load(NodeTree())
        finally:
            journal.close()


def test_another_format_is_refused_by_its_number() -> None:
    later = encode_header(2)
    with pytest.raises(JournalError, match="format 2, this version reads format 1"):
        decode(later, "file")
    with pytest.raises(JournalError, match="no header of a journal"):
        decode(b"something else entirely", "file")


def test_a_missing_transaction_is_found_out() -> None:
    with pytest.raises(JournalError, match="from version 0 to 5 by 1 changes: one is missing"):
        restored(encode_header() + encode_record(5, [Change(Kind.COUNT, "k", number=1)]))
    with pytest.raises(JournalError, match="does not follow"):
        restored(encode_header() + encode_record(1, [Change(Kind.DELETE, "/nowhere")]))


def test_a_second_master_on_the_folder_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    try:
        with pytest.raises(
            JournalError,
            match=f"another master serves from {tmp_path}: pid {os.getpid()}, started at tick",
        ):
            Journal(tmp_path)
    finally:
        journal.close()
    Journal(tmp_path).close()


def test_a_long_journal_becomes_a_snapshot_and_a_short_one(tmp_path: Path) -> None:
    journal, registry = Journal(tmp_path, sync=False, compact_bytes=2000), Registry()
    journal.load(registry.tree)
    session = registry.open(SessionRecord("t", 5.0, "root", "", ""), 0.0)
    registry.tree_node_add(session, "/x", "", False)
    for number in range(300):
        registry.tree_node_set(session, "/x", str(number), -1)
        journal.append(registry.version, registry.take_changes())
        if journal.long:
            journal.compact(registry.tree)
    journal.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3, names
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8000
    tree = NodeTree()
    journal = Journal(tmp_path)
    journal.load(tree)
    journal.close()
    assert tree.version == registry.version
    assert state(tree) == state(registry.tree)


@pytest.mark.parametrize("left", ["snapshot-1.tmp", "snapshot-1", "all"])
def test_a_kill_in_the_middle_of_compacting_loses_nothing(tmp_path: Path, left: str) -> None:
    """As the folder is before the rename, after it, and before the old pair is removed."""
    states = write(tmp_path, 5)
    tree = NodeTree()
    data = (tmp_path / "journal-0").read_bytes()
    replay(decode(data, "file")[0], tree, "file", data)
    whole = b"".join(snapshot_records(tree))
    if left == "snapshot-1.tmp":
        (tmp_path / left).write_bytes(whole[:-5])
    else:
        (tmp_path / "snapshot-1").write_bytes(whole)
    if left == "all":
        (tmp_path / "journal-1").write_bytes(encode_header())
    again, journal = NodeTree(), Journal(tmp_path)
    journal.load(again)
    journal.close()
    assert state(again) == states[-1]
    assert again.version == tree.version
    assert len(list(tmp_path.iterdir())) == (2 if left == "snapshot-1.tmp" else 3)


def test_old_files_that_cannot_be_removed_do_not_keep_a_change_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    heard: queue.Queue[TreeEvent] = queue.Queue()
    with Master(journal=tmp_path, sync=False) as master, MasterClient(master.address) as client:
        client.tree_watch("/a", heard.put)
        monkeypatch.setattr(Path, "unlink", refuse)
        client.tree_node_add("/b")
        for _ in range(COMPACT_BYTES // VALUE_LENGTH_MAX + 1):
            client.tree_node_set("/b", "x" * VALUE_LENGTH_MAX)
        client.tree_node_add("/a")
        assert heard.get(timeout=PATIENCE_S).path == "/a"
        wait_until(
            lambda: f"old files are left in {tmp_path}" in caplog.text,
            "the line that tells of them",
        )


def test_a_snapshot_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    whole = b"".join(snapshot_records(NodeTree()))
    for cut in range(len(whole)):
        with pytest.raises(JournalError, match="is not whole"):
            load_snapshot(whole[:cut], NodeTree(), "snapshot-1")


def test_a_disk_that_is_full_ends_it_and_what_was_answered_stays(tmp_path: Path) -> None:
    states = write(tmp_path, 3)
    path = tmp_path / "journal-0"
    journal, tree = Journal(tmp_path), NodeTree()
    journal.load(tree)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    change = Change(Kind.PUT, "/root/full", "x" * 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        for _ in range(2):
            with pytest.raises(JournalError, match="cannot be written: File too large; make"):
                journal.append(tree.version + 1, [change])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(JournalError):
        journal.append(tree.version + 1, [change])
    journal.close()
    assert state(restored(path.read_bytes())) == states[-1]


def test_an_empty_journal_is_taken_as_new_and_said_to_be_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 3)
    assert "is empty" not in caplog.text
    path = tmp_path / "journal-0"
    os.truncate(path, 0)
    with contextlib.closing(Journal(tmp_path)) as journal:
        journal.load(NodeTree())
    assert f"{path} is empty" in caplog.text


def test_a_folder_that_cannot_be_used_is_named() -> None:
    with (
        tempfile.NamedTemporaryFile() as file,
        pytest.raises(JournalError, match=re.escape(file.name) + " cannot keep a journal"),
    ):
        Journal(file.name)


@pytest.mark.parametrize("folder", ["", 5, b"journal"])
def test_what_names_no_folder_keeps_no_journal(folder: Any) -> None:
    with pytest.raises(JournalError, match=rf"a journal in {folder!r}: the name of a folder"):
        Journal(folder)
