"""Checkpoints from a folder: which are whole, and the rows that one server of any number of them
owns.

A checkpoint is used only after every byte of it, and of what it lies over, was compared with its
checksum; one that is refused is named with the reason in a warning, and the one before it is tried.
Nothing in the files is code. Rows are read PIECE_BYTES at a time, at offsets that the manifest
tells; a dense tensor's go to where they belong at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.checkpoint.chain import layers
from prpc_engine.kv.checkpoint.cut import USED
from prpc_engine.kv.checkpoint.manifest import (
    FINAL_NAME,
    REMOVED_NAME,
    TYPE_CODES,
    UNFINISHED_NAME,
    CheckpointError,
    StoredFile,
    TableFile,
    save_order,
)
from prpc_engine.kv.checkpoint.read import (
    ChainLink,
    check_bytes,
    open_stored,
    read_chain,
    read_manifest,
)
from prpc_engine.kv.schema.table_spec import DenseSpec, SparseSpec, TableSpec, from_dict
from prpc_engine.kv.table import partition
from prpc_engine.kv.table.table import DenseTable, SparseTable
from shard import runtime

# read into memory that stays in the second-level cache, from there to the rows
PIECE_BYTES = 2 << 20
# at a folder where others save, and remove what is old, while its checkpoints are read
LOOKS_MAX = 16
NUMPY_NAMES = {code: name for name, code in TYPE_CODES.items()}
Array = npt.NDArray[Any]
logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class FolderFinding:
    """One checkpoint of a folder. fault: why it is refused, "" when it is whole. step: as its name
    says, -1 if unfinished.
    """

    path: Path
    step: int
    fault: str


def verify(folder: str | os.PathLike[str]) -> list[FolderFinding]:
    """Everything in `folder` that is or was to be a checkpoint, the newest first, each read to its
    last byte.

    Raises CheckpointError when the folder cannot be read.
    """
    return sorted(
        (finding for finding, _ in _findings(Path(folder))),
        key=lambda finding: save_order(finding.path.name),
        reverse=True,
    )


def latest(folder: str | os.PathLike[str]) -> FolderFinding:
    """The newest checkpoint that is whole; newer ones are refused in a warning each. Raises
    CheckpointError: there is none.
    """
    link = newest_whole(Path(folder))
    return FolderFinding(link.path, link.manifest.step, "")


def newest_whole(folder: Path) -> ChainLink:
    """latest(), with its manifest: a save may remove it the next moment."""
    refused = []
    for finding, link in _findings(folder):
        if link is not None:
            return link
        if finding.step >= 0:  # an unfinished one may be somebody's present save
            logger.warning("checkpoint %s is refused: %s", finding.path, finding.fault)
        refused.append(f"{finding.path.name}: {finding.fault}")
    raise CheckpointError(
        f"no whole checkpoint in {folder}; {'; '.join(refused) or 'there is none at all'}"
    )


def newest(folder: Path) -> ChainLink | None:
    """The one that was saved last, by its name: for who lays another over it. None: there is none,
    or its manifest is damaged.
    """
    try:
        names = [path.name for path in folder.iterdir() if FINAL_NAME.fullmatch(path.name)]
        return read_manifest(folder / max(names, key=save_order)) if names else None
    except (OSError, CheckpointError):
        return None


def _findings(folder: Path) -> Iterator[tuple[FolderFinding, ChainLink | None]]:
    """Each with its manifest when it is whole. Those of a look the newest first; one that is
    removed meanwhile is none.
    """
    seen: set[str] = set()
    known: dict[str, str] = {}  # bytes are compared once, however many lie over them
    for _ in range(LOOKS_MAX):
        try:
            names = {path.name for path in folder.iterdir()} - seen
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {folder} cannot be read: {error.strerror}"
            ) from error
        for name in sorted(names, key=save_order, reverse=True):  # unfinished ones come first
            match = FINAL_NAME.fullmatch(name)
            if match:
                link, fault = _read_whole(folder / name, int(match[2]), known)
                if link is not None or not _is_gone(folder / name):
                    yield FolderFinding(folder / name, int(match[2]), fault), link
            elif UNFINISHED_NAME.fullmatch(name):
                yield FolderFinding(folder / name, -1, "it was never finished"), None
            elif REMOVED_NAME.fullmatch(name):
                yield FolderFinding(folder / name, -1, "its removal was never finished"), None
        if not names:
            return
        seen |= names


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return error.errno == errno.ENOENT
    return False


def _read_whole(path: Path, step: int, known: dict[str, str]) -> tuple[ChainLink | None, str]:
    """Its manifest, when every byte of it and of what it lies over is good; else why not."""
    try:
        chain = read_chain(path)
        if chain[0].manifest.step != step:
            return None, f"its manifest is of step {chain[0].manifest.step}"
        layers([link.manifest for link in chain])
    except CheckpointError as error:
        return None, str(error)
    for link in chain:
        fault = known.get(link.path.name)
        if fault is None:
            fault = known[link.path.name] = _fault_in_bytes(link)
        if fault:
            return None, fault if link is chain[
                0
            ] else f"its base {link.path.name} cannot be used: {fault}"
    return chain[0], ""


def _fault_in_bytes(link: ChainLink) -> str:
    try:
        for stored in link.manifest.stored():
            # failpoint: checkpoint.checking
            check_bytes(link.path, stored)
    except CheckpointError as error:
        return str(error)
    return ""


def load_tables(
    path: Path, wanted: Mapping[str, TableSpec], clock: Callable[[], float] = runtime.now
) -> dict[str, SparseTable | DenseTable]:
    """New tables as `wanted` cuts them up, with what the checkpoint at `path` (found whole before)
    has for them. clock: gives seconds, to them.
    """
    tables = {name: spec.make(clock) for name, spec in wanted.items()}
    chain = read_chain(path)
    piles = [
        (pile, from_dict(pile[0][1].spec)) for pile in layers([link.manifest for link in chain])
    ]
    piles = [
        (pile, saved)
        for pile, saved in piles
        if saved.table in wanted and _is_for(wanted[saved.table], saved)
    ]
    # first: stamps are told from the latest of the tables that come together
    for pile, saved in piles:
        tables[saved.table].load_scalars(pile[-1][1].scalars)
    for pile, saved in piles:
        table, spec, newest = tables[saved.table], wanted[saved.table], pile[-1][1]
        for number, file in pile:
            if isinstance(table, SparseTable) and isinstance(spec, SparseSpec):
                _load_sparse(
                    chain[number].path, file, table, spec, saved, newest.scalars.get("moment")
                )
            elif (
                isinstance(table, DenseTable)
                and isinstance(spec, DenseSpec)
                and isinstance(saved, DenseSpec)
            ):
                _load_dense(chain[number].path, file, table, spec, saved)
        # each is counted once
        if isinstance(table, DenseTable) or saved.partition % spec.partitions == spec.partition:
            table.load_counters(newest.scalars)
        if isinstance(table, SparseTable):
            _load_sketch(chain[0].path, newest, table)
    return tables


def _is_for(spec: TableSpec, saved: TableSpec) -> bool:
    """Whether a table cut up as `spec` says needs what was `saved`. Of as many partitions a sparse
    one needs its own only.
    """
    return (
        isinstance(spec, DenseSpec)
        or saved.partitions != spec.partitions
        or saved.partition == spec.partition
    )


def load_extras(path: Path, part: int, parts: int) -> list[dict[str, Array]]:
    """What the servers that saved had besides tables: of as many as are now that of the same one,
    else that of all.
    """
    link = read_manifest(path)
    same = len(link.manifest.parts) == parts
    found = []
    for each in link.manifest.parts:
        if each.extras is not None and (each.part == part or not same):
            with _opened(path, each.extras) as read_rows:
                arrays = {
                    column.name: np.empty(column.shape, NUMPY_NAMES[column.type_code])
                    for column in each.extras.columns
                }
                for name, array in arrays.items():
                    read_rows(name, 0, array)
                found.append(arrays)
    return found


def _load_sparse(
    path: Path,
    file: TableFile,
    table: SparseTable,
    spec: SparseSpec,
    saved: TableSpec,
    moment: float | None,
) -> None:
    """Rows of other partitions are left out. moment: the table's time when the newest of these
    files was saved.
    """
    is_alike = saved.partitions == spec.partitions
    own = _columns_of(table, file)
    rows = file.columns[0].shape[0]
    step = max(1, PIECE_BYTES // max(1, sum(array[:1].nbytes for array in own.values())))
    buffers = {
        name: np.empty((min(step, rows), *array.shape[1:]), array.dtype)
        for name, array in own.items()
    }
    del own  # who keeps a view of a table's rows makes them be copied when they grow
    with _opened(path, file) as read_rows:
        if file.removed is not None:
            removed = np.empty(file.removed.shape, np.int64)
            read_rows(file.removed.name, 0, removed)
            table.remove(np.unique(removed))
        for begin in range(0, rows, step):
            piece = {name: buffer[: rows - begin] for name, buffer in buffers.items()}
            for name, array in piece.items():
                read_rows(name, begin, array)
            if not is_alike:
                mine = np.flatnonzero(
                    partition.owner_of(piece["keys"], spec.partitions) == spec.partition
                )
                piece = {name: array[mine] for name, array in piece.items()}
            table.load(piece, moment)
        used = file.single(USED)
        if used is not None:
            stamps = np.empty(used.shape, np.int64)
            read_rows(USED, 0, stamps)
            table.load_stamps(stamps[:, 0], stamps[:, 1], moment)


def _load_sketch(path: Path, file: TableFile, table: SparseTable) -> None:
    column, present = file.single("sketch"), table.singles().get("sketch")
    if column is None or present is None:
        return
    if (column.type_code, column.shape) != ("U8", present.shape):
        raise CheckpointError(
            f"{file.file} has a sketch of {column.type_code}{list(column.shape)}, "
            f"not of U8{list(present.shape)}"
        )
    counters = np.empty(column.shape, np.uint8)
    with _opened(path, file) as read_rows:
        read_rows("sketch", 0, counters)
    table.load_sketch(counters)


def _load_dense(
    path: Path, file: TableFile, table: DenseTable, spec: DenseSpec, saved: DenseSpec
) -> None:
    first, last = max(spec.begin, saved.begin), min(spec.end, saved.end)
    own = _columns_of(table, file)
    with _opened(path, file) as read_rows:
        if first < last:
            for name, array in own.items():
                read_rows(name, first - saved.begin, array[first - spec.begin : last - spec.begin])


def _columns_of(table: SparseTable | DenseTable, file: TableFile) -> dict[str, Array]:
    """The live arrays of `table`, when the file has the same; stamps may be missing. Raises
    CheckpointError.
    """
    own = table.columns()
    if all(column.name != "stamps" for column in file.columns):
        own.pop("stamps", None)
    have = {column.name: (column.type_code, column.shape[1:]) for column in file.columns}
    wanted = {name: (TYPE_CODES[array.dtype.name], array.shape[1:]) for name, array in own.items()}
    if have != wanted:
        raise CheckpointError(
            f"{file.file} has the columns {have}, the table has {wanted}: another version wrote it"
        )
    return own


class ReadRows(Protocol):
    """Reads rows of one column of a saved table into `into`, from row `begin` on, as many as it has
    room for.
    """

    def __call__(self, column: str, begin: int, into: Array) -> None: ...


@contextlib.contextmanager
def _opened(path: Path, stored: StoredFile) -> Iterator[ReadRows]:
    """What reads a file that is as the manifest says. Raises CheckpointError."""
    starts, at = {}, stored.header_bytes
    for column in stored.stored():
        starts[column.name] = at
        at += column.nbytes

    def read_rows(column: str, begin: int, into: Array) -> None:
        left = into.reshape(-1).view(np.uint8).data
        at = starts[column] + begin * (into.nbytes // max(1, len(into)))
        while left:
            count = os.preadv(fd, [left], at)
            if not count:
                raise CheckpointError(f"{stored.file} became shorter while it was read")
            left, at = left[count:], at + count

    try:
        fd = open_stored(path / stored.file)
        try:
            yield read_rows
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be read: {error.strerror}") from error
