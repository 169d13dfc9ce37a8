"""What the master remembers when it is killed: a snapshot, and a journal of the transactions since.

    file in the folder  content                                             made
    lock                who serves from this folder: pid and start time     held by flock as long as
                                                                            the master runs
    snapshot-<n>        the changes that make the tree as it was then       whole or not at all:
                                                                            written under another
                                                                            name, fsync, rename,
                                                                            fsync of the folder
    journal-<n>         the transactions after snapshot-<n> (0: from none)  one record appended for
                                                                            each

    snapshot and journal     size  field     meaning
        header     0            8  magic     b"PRPCJRNL"
                   8            4  format    FORMAT
                  12            4  crc       CRC-32 of the 12 bytes before
        record     0            4  length    bytes of body, at most RECORD_BYTES_MAX
                   4            4  crc       CRC-32 of length
                   8            4  crc       CRC-32 of body
                  12       length  body      MessagePack [version of the tree after it, [changes]]

All integers little-endian. A record is one transaction: it is there or not. A kill or a power cut
can tear only the end: a record that is not all there, or whose checksum fails, with nothing or
zeros behind what is there of it. That is cut off: it was never answered. Other damage is refused
with its place, and so is a journal whose snapshot is not there. MessagePack through msgspec:
loading runs no code.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from prpc_engine.durable import make_folder, sync_folder
from prpc_engine.errors import JournalError
from prpc_engine.master.tree import Change, NodeTree
from shard import runtime

MAGIC = b"PRPCJRNL"
FORMAT = 1
HEADER = struct.Struct("<8sII")
RECORD = struct.Struct("<III")
assert (HEADER.size, RECORD.size) == (16, 12)  # the table above
RECORD_BYTES_MAX = 1 << 30  # a session that ends with all it may own
SNAPSHOT_CHANGES = 4096  # in one record of a snapshot: a MiB or so at a time
# characters of their texts after which a record ends: values may have as many each
SNAPSHOT_LENGTH = 1 << 20
# A journal this long, and longer than twice its snapshot, is replaced: replay stays within a second
# or so.
COMPACT_BYTES = 16 << 20
FILE_MODE = 0o600  # it holds the sessions' tokens

_RESTORE = "Restore the file, or start on another folder (the job's nodes then join anew)"
logger = logging.getLogger("prpc")
Transaction = tuple[int, list[Change]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Transaction)


def encode_header(number: int = FORMAT) -> bytes:
    """The first bytes of a file, of that format."""
    begin = HEADER.pack(MAGIC, number, 0)[:12]
    return begin + zlib.crc32(begin).to_bytes(4, "little")


def encode_record(version: int, changes: list[Change]) -> bytes:
    """One transaction. Raises JournalError when it is too long."""
    body = _encoder.encode((version, changes))
    if len(body) > RECORD_BYTES_MAX:
        raise JournalError(
            f"a transaction of {len(body)} bytes, at most {RECORD_BYTES_MAX} allowed"
        )
    length = len(body).to_bytes(4, "little")
    return RECORD.pack(len(body), zlib.crc32(length), zlib.crc32(body)) + body


def decode(data: bytes, name: str) -> tuple[list[Transaction], int]:
    """All whole records, and how many bytes of `data` they take with the header; what follows is a
    torn tail.

    Raises JournalError for another format and for damage that no torn write explains."""
    header = encode_header()
    begun = data.rstrip(b"\0")
    if len(begun) < HEADER.size and header.startswith(begun):
        return [], 0
    if data[: HEADER.size] != header:
        if data[:8] == MAGIC and zlib.crc32(data[:12]).to_bytes(4, "little") == data[12:16]:
            found = int.from_bytes(data[8:12], "little")
            raise JournalError(
                f"{name} has format {found}, this version reads format {FORMAT}: "
                "start the version that wrote it"
            )
        raise JournalError(
            f"{name} is damaged at byte 0: no header of a journal; restore the file, "
            "or start on another folder"
        )
    transactions: list[Transaction] = []
    at = HEADER.size
    while at < len(data):
        if len(data) - at < RECORD.size:
            break
        length, length_crc, body_crc = RECORD.unpack_from(data, at)
        end = at + RECORD.size + length
        length_good = zlib.crc32(data[at : at + 4]) == length_crc and length <= RECORD_BYTES_MAX
        if not length_good:
            # not even its header is whole
            if len(data[at:].rstrip(b"\0")) < RECORD.size:
                break
            raise _damaged(name, at, data)
        if end > len(data):
            break
        body = data[at + RECORD.size : end]
        if zlib.crc32(body) != body_crc:
            if not any(data[end:]):
                break
            raise _damaged(name, at, data)
        try:
            transactions.append(_decoder.decode(body))
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise JournalError(
                f"{name} has a record at byte {at} that is no transaction ({error}): {_RESTORE}"
            ) from error
        at = end
    return transactions, at


def _damaged(name: str, at: int, data: bytes) -> JournalError:
    return JournalError(
        f"{name} is damaged at byte {at} of {len(data)}, with more behind it: "
        f"no torn write does that. {_RESTORE}"
    )


def _place(data: bytes, number: int) -> int:
    """Where a record of those that decode() gave begins."""
    at = HEADER.size
    for _ in range(number):
        at += RECORD.size + RECORD.unpack_from(data, at)[0]
    return at


def _apply(tree: NodeTree, changes: Iterable[Change], name: str, data: bytes, number: int) -> None:
    for change in changes:
        try:
            tree.apply(change)
        except Exception as error:  # whatever a change does that somebody else has made up
            raise JournalError(
                f"{name} has a record at byte {_place(data, number)} with a change that does not "
                "follow from those before: "
                f"{change!r:.200} ({type(error).__name__}: {error!s:.200})"
            ) from error


def _opened(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE)


def _write_all(fd: int, data: bytes) -> None:
    """Raises OSError where a part is all that there is room for; the next write says why: a full
    disk, a quota, RLIMIT_FSIZE."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def replay(transactions: Iterable[Transaction], tree: NodeTree, name: str, data: bytes) -> None:
    """Make the tree go on. Raises JournalError when they do not follow from it."""
    for number, (version, changes) in enumerate(transactions):
        if version != tree.version + len(changes):
            raise JournalError(
                f"{name} goes from version {tree.version} to {version} by {len(changes)} changes: "
                "one is missing"
            )
        _apply(tree, changes, name, data, number)


def snapshot_records(tree: NodeTree) -> Iterator[bytes]:
    """A whole snapshot, a record at a time. The last one is empty and has the tree's version:
    without it a snapshot is none.
    """
    yield encode_header()
    changes: list[Change] = []
    length = 0
    for change in tree.snapshot():
        changes.append(change)
        length += len(change.text)
        if len(changes) == SNAPSHOT_CHANGES or length >= SNAPSHOT_LENGTH:
            yield encode_record(0, changes)
            changes, length = [], 0
    if changes:
        yield encode_record(0, changes)
    yield encode_record(tree.version, [])


def load_snapshot(data: bytes, tree: NodeTree, name: str) -> None:
    """Make an empty tree what it was. Raises JournalError."""
    transactions, good_bytes = decode(data, name)
    if good_bytes != len(data) or not transactions or transactions[-1][1]:
        raise JournalError(f"{name} is not whole: restore the file, or start on another folder")
    for number, (_, changes) in enumerate(transactions):
        _apply(tree, changes, name, data, number)
    tree.version = transactions[-1][0]


class Journal:
    """Keeps a master's changes in a folder, and brings its tree back from there after a restart.
    Owned by a Master, which closes it.

    sync  every append reaches the disk before it returns, so that a power cut loses nothing that
          was answered. Without it a kill of the process loses nothing, a power cut the last
          seconds.

    compact_bytes  a journal of so many bytes, and longer than twice its snapshot, is replaced

    Raises JournalError when another master serves from the folder, for damage, and when the folder
    cannot be used.

    Files and records: the tables at the file's head.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sync: bool = True,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        # an empty variable of a script; Path would take it for the working directory
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise JournalError(f"a journal in {folder!r:.100}: the name of a folder is expected")
        self.folder = Path(folder)
        self._sync, self._compact_bytes = sync, compact_bytes
        self._broken: OSError | None = None
        try:
            make_folder(self.folder)
            self._lock_fd = self._lock()
        except OSError as error:
            raise JournalError(
                f"{self.folder} cannot keep a journal: {error.strerror or error}; "
                "give another folder"
            ) from error
        except ValueError as error:  # a NUL in its name
            raise JournalError(
                f"{str(self.folder)!r} cannot keep a journal: {error}; give another folder"
            ) from error
        self._fd = -1
        _journals.add(self)
        runtime.close_with_process(self._leave)

    def _lock(self) -> int:
        path = self.folder / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 1024, 0).decode(errors="replace").strip()
            os.close(fd)
            raise JournalError(
                f"another master serves from {self.folder}: {holder or 'it has just begun'}; "
                "end it first, or give another folder"
            ) from error
        os.ftruncate(fd, 0)
        _, pid, started = runtime.this_process().rsplit("/", 2)
        os.pwrite(fd, f"pid {pid}, started at tick {started}\n".encode(), 0)
        return fd

    def _numbers(self, kind: str) -> list[int]:
        names = [path.name.removeprefix(f"{kind}-") for path in self.folder.glob(f"{kind}-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def load(self, tree: NodeTree) -> None:
        """Bring an empty tree to where the last master left it, and be ready to append. Raises
        JournalError.
        """
        try:
            snapshots, journals = self._numbers("snapshot"), self._numbers("journal")
            self._number = snapshots[-1] if snapshots else 0
            # a snapshot is on the disk before its journal is made
            if journals and journals[-1] > self._number:
                raise JournalError(
                    f"{self.folder}/journal-{journals[-1]} goes on from snapshot-{journals[-1]}, "
                    f"which is not there. {_RESTORE}"
                )
            if snapshots:
                path = self.folder / f"snapshot-{self._number}"
                load_snapshot(path.read_bytes(), tree, str(path))
                self._snapshot_bytes = path.stat().st_size
            else:
                self._snapshot_bytes = 0
            self._open_journal(tree)
            self._remove_old()
        except OSError as error:
            raise JournalError(
                f"{error.filename or self.folder} cannot be read or written: {error.strerror}"
            ) from error

    def _open_journal(self, tree: NodeTree | None) -> None:
        """Of this number: replayed into the tree, or made anew where that is None."""
        path = self.folder / f"journal-{self._number}"
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        is_old = tree is not None and path.exists()
        fd = os.open(path, flags if tree is not None else flags | os.O_TRUNC, FILE_MODE)
        try:
            data = path.read_bytes()
            if is_old and not data:
                logger.warning(
                    "%s is empty: a master that was killed while it made it leaves that; where it "
                    "had records, somebody has cut it off, and they are lost",
                    path,
                )
            transactions, good_bytes = decode(data, str(path))
            if tree is not None:
                replay(transactions, tree, str(path), data)
            if good_bytes < len(data):
                logger.warning("%s: cut off %d torn bytes at its end", path, len(data) - good_bytes)
                os.ftruncate(fd, good_bytes)
            if not good_bytes:
                _write_all(fd, encode_header())
            runtime.fsync(fd)
            sync_folder(self.folder)
        except BaseException:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._bytes = os.fstat(fd).st_size

    def append(self, version: int, changes: list[Change]) -> None:
        """Write one transaction after which the tree has that version. Raises JournalError, and
        from then on for ever: what is in memory and what is on disk differ, and only a restart
        makes them one again."""
        if self._broken is None:
            record = encode_record(version, changes)
            try:
                _write_all(self._fd, record)
                if self._sync:
                    runtime.fdatasync(self._fd)
                self._bytes += len(record)
                return
            except OSError as error:
                self._broken = error
        raise JournalError(
            f"the journal in {self.folder} cannot be written: {self._broken.strerror}; "
            "make room or raise the limit, and start the master again: "
            "it answers nothing until then; nothing that it answered is lost"
        )

    @property
    def long(self) -> bool:
        """Whether it is time for compact()."""
        return self._bytes > max(self._compact_bytes, 2 * self._snapshot_bytes)

    def compact(self, tree: NodeTree) -> None:
        """Write the tree as a snapshot and begin a new journal. A failure leaves the old pair,
        which goes on.
        """
        self._number += 1
        path = self.folder / f"snapshot-{self._number}"
        unfinished = path.with_suffix(".tmp")
        try:
            with open(unfinished, "wb", opener=_opened) as file:
                for record in snapshot_records(tree):
                    file.write(record)
                file.flush()
                runtime.fsync(file.fileno())
                self._snapshot_bytes = file.tell()
            os.rename(unfinished, path)
        except OSError as error:
            self._number -= 1
            with contextlib.suppress(OSError):  # it may never have been made
                unfinished.unlink()
            self._snapshot_bytes = self._bytes  # try again when the journal is twice as long
            logger.warning(
                "no snapshot in %s: %s; the journal goes on growing", self.folder, str(error)
            )
            return
        try:
            sync_folder(self.folder)
            self._open_journal(None)
        except OSError as error:
            # the new snapshot counts already: nothing may go to the old journal any more
            self._broken = error
            return
        try:
            self._remove_old()
        except OSError as error:  # what was written counts all the same, and is to be told
            logger.warning("old files are left in %s: %s", self.folder, str(error))

    def _remove_old(self) -> None:
        for kind in ("snapshot", "journal"):
            for number in self._numbers(kind):
                if number < self._number:
                    (self.folder / f"{kind}-{number}").unlink()
        for path in self.folder.glob("snapshot-*.tmp"):
            path.unlink()

    def close(self) -> None:
        """Let others have the folder. A second close does nothing. Raises JournalError where what
        was written has not reached the disk, and no append has told so.
        """
        if self._lock_fd < 0:
            return
        try:
            if self._fd >= 0:
                runtime.fsync(self._fd)
        except OSError as error:
            if self._broken is None:
                raise JournalError(
                    f"the journal in {self.folder} cannot be written: {error.strerror}; make room: "
                    "a power cut may lose the last seconds"
                ) from error
        finally:
            self._leave()

    def _leave(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1


def _leave_to_the_parent() -> None:
    """In the child of a fork: the lock is held as long as any process has it open, and it is the
    parent's.
    """
    for journal in list(_journals):
        journal._leave()


_journals: weakref.WeakSet[Journal] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_the_parent)
