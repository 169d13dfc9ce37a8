"""Checkpoints from a folder: which are whole, and the rows that one server of any number of them owns.

A checkpoint is used only after every byte of it was compared with its checksum; one that is refused is named with the reason
in a warning, and the one before it is tried. Nothing in the files is code. Reads are of PIECE_BYTES at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prpc_engine.kv import partition
from prpc_engine.kv.checkpoint.manifest import (
    FINAL_NAME,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    TYPE_CODES,
    UNFINISHED_NAME,
    CheckpointError,
    Manifest,
    TableFile,
    decode,
)
from prpc_engine.kv.table import DenseTable, SparseTable
from prpc_engine.kv.table_spec import DenseSpec, SparseSpec, TableSpec, from_dict

PIECE_BYTES = 8 << 20
logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class Finding:
    """One checkpoint of a folder. fault: why it is refused, "" when it is whole. step: as its name says, -1 if unfinished."""

    path: Path
    step: int
    fault: str


def verify(folder: str | os.PathLike[str]) -> list[Finding]:
    """Everything in `folder` that is or was to be a checkpoint, the newest first, each read to its last byte.

    Raises CheckpointError when the folder cannot be read.
    """
    return list(_findings(Path(folder)))


def latest(folder: str | os.PathLike[str]) -> Finding:
    """The newest checkpoint that is whole; newer ones are refused in a warning each. Raises CheckpointError: there is none."""
    refused = []
    for finding in _findings(Path(folder)):
        if not finding.fault:
            return finding
        if finding.step >= 0:  # an unfinished one may be somebody's present save
            logger.warning("checkpoint %s is refused: %s", finding.path, finding.fault)
        refused.append(f"{finding.path.name}: {finding.fault}")
    raise CheckpointError(f"no whole checkpoint in {folder}; {'; '.join(refused) or 'there is none at all'}")


def _findings(folder: Path) -> Iterator[Finding]:
    try:
        names = sorted((path.name for path in folder.iterdir()), reverse=True)  # unfinished ones come first, then the newest
    except OSError as error:
        raise CheckpointError(f"the checkpoint folder {folder} cannot be read: {error.strerror}") from error
    for name in names:
        match = FINAL_NAME.fullmatch(name)
        if match:
            yield Finding(folder / name, int(match[2]), _fault(folder / name, int(match[2])))
        elif UNFINISHED_NAME.fullmatch(name):
            yield Finding(folder / name, -1, "it was never finished")


def _fault(path: Path, step: int) -> str:
    try:
        manifest = read_manifest(path)
        if manifest.step != step:
            return f"its manifest is of step {manifest.step}"
        for table in manifest.files():
            _check_bytes(path, table)
    except CheckpointError as error:
        return str(error)
    return ""


def read_manifest(path: Path) -> Manifest:
    """Of the checkpoint at `path`. Raises CheckpointError."""
    try:
        with open(path / MANIFEST, "rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    if len(data) > MANIFEST_BYTES_MAX:
        raise CheckpointError(f"{MANIFEST} has more than {MANIFEST_BYTES_MAX} bytes, which are allowed")
    return decode(data)


def _check_bytes(path: Path, table: TableFile) -> None:
    """Compare size and checksums. Raises CheckpointError."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    regions = [("header", table.header_bytes, table.header_crc32)]
    regions += [(f"column {column.name!r}", column.nbytes, column.crc32) for column in table.columns]
    try:
        with open(path / table.file, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != table.nbytes:
                raise CheckpointError(f"{table.file} has {size} bytes, {table.nbytes} were written")
            for what, left, crc_written in regions:
                crc = 0
                while left:
                    count = file.readinto(buffer[: min(left, PIECE_BYTES)])
                    if not count:
                        raise CheckpointError(f"{table.file} became shorter while it was read")
                    crc = zlib.crc32(buffer[:count], crc)
                    left -= count
                if crc != crc_written:
                    raise CheckpointError(f"{table.file} is damaged: the checksum of its {what} is wrong")
    except OSError as error:
        raise CheckpointError(f"{table.file} cannot be read: {error.strerror}") from error


def load_tables(path: Path, wanted: Mapping[str, TableSpec]) -> dict[str, SparseTable | DenseTable]:
    """New tables as `wanted` cuts them up, with what the checkpoint at `path` (found whole before) has for them."""
    tables = {name: spec.make() for name, spec in wanted.items()}
    for file in read_manifest(path).files():
        saved = from_dict(file.spec)
        table, spec = tables.get(saved.table), wanted.get(saved.table)
        if isinstance(table, SparseTable) and isinstance(spec, SparseSpec):
            _load_sparse(path, file, table, spec)
        elif isinstance(table, DenseTable) and isinstance(spec, DenseSpec) and isinstance(saved, DenseSpec):
            _load_dense(path, file, table, spec, saved)
    return tables


def _load_sparse(path: Path, file: TableFile, table: SparseTable, spec: SparseSpec) -> None:
    with _opened(path, file, table) as slices:
        rows = file.columns[0].shape[0]
        for begin, end in _pieces(rows, file):
            piece = {name: each[begin:end] for name, each in slices.items()}
            mine = np.flatnonzero(partition.owner_of(piece["keys"], spec.partitions) == spec.partition)
            if len(mine):
                table.load({name: array if len(mine) == len(array) else array[mine] for name, array in piece.items()})
        table.load_scalars(file.scalars)


def _load_dense(path: Path, file: TableFile, table: DenseTable, spec: DenseSpec, saved: DenseSpec) -> None:
    first, last = max(spec.begin, saved.begin), min(spec.end, saved.end)
    with _opened(path, file, table) as slices:
        for begin, end in _pieces(max(0, last - first), file):
            at = first + begin - saved.begin
            table.load(first + begin - spec.begin, {name: each[at : at + end - begin] for name, each in slices.items()})
        table.load_scalars(file.scalars)


def _pieces(rows: int, file: TableFile) -> Iterator[tuple[int, int]]:
    row_bytes = max(1, sum(column.nbytes // max(1, column.shape[0]) for column in file.columns))
    step = max(1, PIECE_BYTES // row_bytes)
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


@contextlib.contextmanager
def _opened(path: Path, file: TableFile, table: SparseTable | DenseTable) -> Iterator[dict[str, Any]]:
    """The slices of a file by column, when they are what `table` consists of. Raises CheckpointError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError("reading checkpoints needs the package safetensors: pip install 'prpc[checkpoint]'") from error
    have = {column.name: column.type_code for column in file.columns}
    own = {name: TYPE_CODES[array.dtype.name] for name, array in table.columns().items()}
    if have != own:
        raise CheckpointError(f"{file.file} has the columns {have}, the table has {own}: another version wrote it")
    try:
        with safe_open(str(path / file.file), framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in have}
            for column in file.columns:
                if tuple(slices[column.name].get_shape()) != column.shape:
                    raise CheckpointError(f"{file.file}: column {column.name!r} has another shape than the manifest says")
            yield slices
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.file} cannot be read: {error}") from error
