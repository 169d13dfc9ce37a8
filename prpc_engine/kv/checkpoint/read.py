"""Manifests and chains from a folder, and the comparison of files with them. Raises
CheckpointError, whatever the disk says.
"""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import NamedTuple

from prpc_engine.kv.checkpoint.chain import FULL_EVERY_MAX, check_link
from prpc_engine.kv.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    CheckpointError,
    Manifest,
    StoredFile,
    decode,
    line_crc32,
)
from prpc_engine.regular_file import open_regular, read_regular_file

PIECE_BYTES = 1 << 20  # of a comparison: fits a second-level cache, so the checksum reads no memory


class ChainLink(NamedTuple):
    """One checkpoint of a chain, and the CRC-32 by which the one above it knows its manifest."""

    path: Path
    manifest: Manifest
    crc32: int


def open_stored(path: Path) -> int:
    """A descriptor for reading a file of a checkpoint; the caller closes it. Raises OSError, also
    for links.
    """
    _check_no_link(path)
    return open_regular(path)


def _check_no_link(path: Path) -> None:
    """Neither a file of a checkpoint nor the checkpoint itself: a link would lead out of what a
    checkpoint_root allows.
    """
    for each in (path.parent, path):
        if each.is_symlink():
            raise OSError(errno.ELOOP, f"{each.name} is a link, and those are not followed")


def read_manifest(path: Path) -> ChainLink:
    """The checkpoint at `path`, by itself."""
    try:
        _check_no_link(path / MANIFEST)
        data = read_regular_file(path / MANIFEST, MANIFEST_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    return ChainLink(path, decode(data), line_crc32(data))


def read_chain(path: Path) -> list[ChainLink]:
    """The checkpoint at `path`, and what it lies over: the full one comes last."""
    chain = [read_manifest(path)]
    while (base := chain[-1].manifest.base) is not None and len(chain) < FULL_EVERY_MAX:
        try:
            lower = read_manifest(path.parent / base.name)
        except CheckpointError as error:
            raise CheckpointError(f"its base {base.name} cannot be used: {error}") from error
        # numbers of links fall, so no chain is a circle
        check_link(chain[-1].manifest, lower.manifest, lower.crc32)
        chain.append(lower)
    return chain


def check_sizes(path: Path, manifest: Manifest, remedy: str) -> None:
    """Whether all files are at `path`, as large as they were written; `remedy` says what to do when
    not.
    """
    for each in manifest.stored():
        file = path / each.file
        try:
            size = file.lstat().st_size
        except OSError:
            size = -1
        if size != each.nbytes:
            raise CheckpointError(f"{file} is not there as a server wrote it: {remedy}")


def check_bytes(path: Path, stored: StoredFile) -> None:
    """Compare size and checksums of all of a file."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    regions = [("header", stored.header_bytes, stored.header_crc32)]
    regions += [
        (f"column {column.name!r}", column.nbytes, column.crc32) for column in stored.stored()
    ]
    try:
        with open(open_stored(path / stored.file), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != stored.nbytes:
                raise CheckpointError(
                    f"{stored.file} has {size} bytes, {stored.nbytes} were written"
                )
            for what, left, crc_written in regions:
                crc = 0
                while left:
                    count = file.readinto(buffer[: min(left, PIECE_BYTES)])
                    if not count:
                        raise CheckpointError(f"{stored.file} became shorter while it was read")
                    crc = zlib.crc32(buffer[:count], crc)
                    left -= count
                if crc != crc_written:
                    raise CheckpointError(
                        f"{stored.file} is damaged: the checksum of its {what} is wrong"
                    )
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be read: {error.strerror}") from error
