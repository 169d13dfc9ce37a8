"""A snapshot of accumulator servers, as bytes in a message or in a file: written whole, or not at
all.

    offset  size  field   meaning
         0     8  magic   MAGIC, with the version in it
         8     4  crc     CRC-32 of all that follows
        12     4  blocks  how many there are
        16     8  body    bytes of the body
        24  8 x n         bytes of each block
         ...              the body, then the blocks: what prpc_engine.archive made of a list, one
                          state for each server

Little-endian. Nothing in it is code: a file that somebody else wrote can give wrong numbers, or be
refused. In a message it is one array, which has room for more counters than a message may have
arrays.

Of a file with the path P, P.lock is held (flock) by the server that saves there as long as it
lives, and says which process that is.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import ArchiveError, Decoder, encode
from prpc_engine.durable import sync_folder
from prpc_engine.errors import ConfigError
from prpc_engine.regular_file import read_regular_file
from shard import runtime

MAGIC = b"prpcacc\x01"
HEADER = struct.Struct("<8sI")
SIZES = struct.Struct("<IQ")
LENGTHS_OFFSET = HEADER.size + SIZES.size
assert (HEADER.size, LENGTHS_OFFSET) == (12, 24)  # the table above
LENGTH = struct.Struct("<Q")
FILE_MODE = 0o600
HOLDER_LENGTH_MAX = 1024


def packed(value: Any) -> NDArray[np.uint8]:
    """The bytes of one value, in one array. Raises ArchiveError and its kin."""
    return np.frombuffer(b"".join(_pieces(value)), np.uint8)


def unpacked(content: NDArray[np.uint8]) -> Any:
    """What packed() was given. Raises ArchiveError, ValueError."""
    return _parsed(content.data)


def _pieces(value: Any) -> list[bytes]:
    body, blocks = encode(value)
    lengths = b"".join(LENGTH.pack(block.nbytes) for block in blocks)
    pieces = [
        SIZES.pack(len(blocks), len(body)),
        lengths,
        bytes(body),
        *(block.tobytes() for block in blocks),
    ]
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return [HEADER.pack(MAGIC, crc), *pieces]


def save(path: Path, states: list[dict[str, Any]]) -> None:
    """Put the states in the place of whatever is there. Raises OSError, and then the old file is
    untouched.
    """
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb", opener=_opened) as file:
        for piece in _pieces(states):
            file.write(piece)
        file.flush()
        runtime.fsync(file.fileno())
    beside.rename(path)
    # else the name may point to the old file after a crash of the machine
    sync_folder(path.parent)


def _opened(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE)


class Lock:
    """Who saves to `path`: one server at a time, until it closes this or its process ends. Owned by
    that server.

    Raises ConfigError with who holds it, and for a path where none can be made.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        if path.is_dir():  # before a file is made beside it
            raise ConfigError(
                f"snapshot_path={str(path)!r} is a folder; give the name of a file, in it perhaps"
            )
        try:
            beside = path.with_name(path.name + ".lock")
            fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        except OSError as error:
            raise ConfigError(
                f"snapshot_path={str(path)!r}: {beside} cannot be made: {error.strerror}"
            ) from error
        except ValueError as error:  # a NUL in it
            raise ConfigError(
                f"snapshot_path={str(path)!r} is not a file's name: {error}"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, HOLDER_LENGTH_MAX, 0).decode(errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"snapshot_path={str(path)!r} is in use by "
                f"{holder or 'a server that has just begun'}: they would overwrite each "
                "other; give each server a path of its own, or close that one first"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(
            fd,
            f"another accumulator server, of process {os.getpid()} on "
            f"{socket.gethostname()}".encode(),
            0,
        )
        self._fd = fd
        _locks.add(self)
        runtime.close_with_process(self.close)

    def close(self) -> None:
        """Let others save there. A second close does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _leave_to_the_parent() -> None:
    """In the child of a fork: the lock is held as long as any process has it open, and it is the
    parent's.
    """
    for lock in list(_locks):
        lock.close()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_the_parent)


def load(path: Path) -> list[dict[str, Any]]:
    """The states that were saved. Raises ConfigError."""
    try:
        content = read_regular_file(path)
    except OSError as error:
        raise ConfigError(f"the snapshot {path} cannot be read: {error.strerror}") from error
    try:
        states = _parsed(memoryview(content))
        if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
            raise ValueError("it holds something else")
    except (ArchiveError, ValueError) as error:
        raise ConfigError(
            f"{path} is no snapshot of accumulators, or damaged: {error}; "
            "move it away to begin without it"
        ) from error
    return states


def _parsed(content: memoryview) -> Any:
    if len(content) < LENGTHS_OFFSET:
        raise ValueError(f"it has {len(content)} bytes, and its header alone has {LENGTHS_OFFSET}")
    magic, crc = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
    if zlib.crc32(content[HEADER.size :]) != crc:
        raise ValueError("its checksum is wrong")
    block_count, body_bytes = SIZES.unpack_from(content, HEADER.size)
    if block_count > (len(content) - LENGTHS_OFFSET) // LENGTH.size:
        raise ValueError(f"it announces {block_count} blocks, more than it has room for")
    lengths = [
        LENGTH.unpack_from(content, LENGTHS_OFFSET + index * LENGTH.size)[0]
        for index in range(block_count)
    ]
    at = LENGTHS_OFFSET + block_count * LENGTH.size
    expected = at + body_bytes + sum(lengths)
    if expected != len(content):
        raise ValueError(f"it announces {expected} bytes, and has {len(content)}")
    body = bytes(content[at : at + body_bytes])
    at += body_bytes
    blocks = []
    for length in lengths:
        blocks.append(np.frombuffer(content, np.uint8, length, at))
        at += length
    return Decoder().decode(body, blocks)
