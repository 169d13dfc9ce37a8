"""A snapshot of accumulator servers in a file: written whole, or not at all.

    offset  size  field   meaning
         0     8  magic   MAGIC, with the version in it
         8     4  crc     CRC-32 of all that follows
        12     4  blocks  how many there are
        16     8  body    bytes of the body
        24  8 x n         bytes of each block
         ...              the body, then the blocks: what prpc_engine.archive made of a list, one state for each server

Little-endian. Nothing in it is code: a file that somebody else wrote can give wrong numbers, or be refused.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from prpc_engine.archive import ArchiveError, Decoder, encode
from prpc_engine.errors import ConfigError

MAGIC = b"prpcacc\x01"
HEADER = struct.Struct("<8sI")
SIZES = struct.Struct("<IQ")
LENGTHS_OFFSET = HEADER.size + SIZES.size
assert (HEADER.size, LENGTHS_OFFSET) == (12, 24)  # the table above
LENGTH = struct.Struct("<Q")


def save(path: Path, states: list[dict[str, Any]]) -> None:
    """Put the states in the place of whatever is there. Raises OSError, and then the old file is untouched."""
    body, blocks = encode(states)
    pieces = [*(LENGTH.pack(block.nbytes) for block in blocks), body, *(block.tobytes() for block in blocks)]
    sizes = SIZES.pack(len(blocks), len(body))
    crc = zlib.crc32(sizes)
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(HEADER.pack(MAGIC, crc) + sizes)
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # else the name may point to the old file after a crash of the machine
    finally:
        os.close(folder)


def load(path: Path) -> list[dict[str, Any]]:
    """The states that were saved. Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the snapshot {path} cannot be read: {error.strerror}") from error
    try:
        return _parsed(content)
    except (ArchiveError, ValueError, struct.error) as error:
        raise ConfigError(
            f"{path} is no snapshot of accumulators, or damaged: {error}; move it away to begin without it"
        ) from error


def _parsed(content: bytes) -> list[dict[str, Any]]:
    magic, crc = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
    if zlib.crc32(memoryview(content)[HEADER.size :]) != crc:
        raise ValueError("its checksum is wrong")
    block_count, body_bytes = SIZES.unpack_from(content, HEADER.size)
    lengths = [LENGTH.unpack_from(content, LENGTHS_OFFSET + index * LENGTH.size)[0] for index in range(block_count)]
    at = LENGTHS_OFFSET + block_count * LENGTH.size
    body = content[at : at + body_bytes]
    at += body_bytes
    blocks = []
    for length in lengths:
        blocks.append(np.frombuffer(content, np.uint8, length, at))
        at += length
    states = Decoder().decode(body, blocks)
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise ValueError("it holds something else")
    return states
