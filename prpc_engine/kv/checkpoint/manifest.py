"""What a checkpoint consists of, and when it is whole: no disk in this file.

    folder/                              one job's checkpoints, on a file system that every server
                                         sees
        unfinished-<save id>/            being written, or left by a save that was killed: never
                                         read
        removed-<random>/                being removed: never read
        checkpoint-<sequence>-<step>/    whole: the rename to this name is the moment that it counts
            part-<p>-table-<t>.safetensors   one table of server p, tensors "keys" (sparse),
                                             "values", the optimizer's state, and "stamps" where
                                             rows are evicted; or of these the rows that changed
                                             since the base, "removed", keys that went, and "used",
                                             [key, stamp] of other rows used since; and "sketch",
                                             what admission has counted
            part-<p>-extras.safetensors      whatever else server p has that belongs to the same
                                             moment, under its own names
            manifest.json                    written last

    Neither the folder of a checkpoint nor what is in it may be a link: what is, is refused.

    manifest.json  one line of JSON (struct Manifest), "\n", CRC-32 of that line as 8 hexadecimal
                   digits, "\n"

The sequence counts saves, so the newest is what was saved last, also when training went back to an
earlier step. CRC-32 finds what disks and torn writes do, at 6 GB/s (blake2b: 1.2) on one 2.x GHz
Xeon core; it is no proof against who forges files.
"""

from __future__ import annotations

import re
import zlib
from math import prod
from numbers import Integral
from typing import Any

import msgspec

from prpc_engine.errors import ConfigError, DeadlineExceeded, RpcError
from prpc_engine.kv.schema.table_spec import DenseSpec, SparseSpec, TableSpec, from_dict
from prpc_engine.prepared import prepare

FORMAT = 3
FORMATS_READ = (1, 2, 3)  # 1 had neither base nor extras, 2 neither stamps nor singles
MANIFEST = "manifest.json"
REMOVED = "removed"
MANIFEST_BYTES_MAX = 256 << 20  # some 500 bytes a table and server
STEP_MAX = 10**12 - 1
FINAL_NAME = re.compile(r"checkpoint-(\d{8}|[1-9]\d{8,})-(\d{12})")  # sequence and step
UNFINISHED_NAME = re.compile(r"unfinished-[0-9a-f]{16}")
REMOVED_NAME = re.compile(r"removed-[0-9a-f]{16}")
FILE_NAME = re.compile(r"part-\d{5}-(table-\d{5}|extras)\.safetensors")
# The names of safetensors for numpy's types; those are what tables hold.
TYPE_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
TYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1} | dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
TYPE_BYTES |= dict.fromkeys(("U32", "I32", "F32"), 4) | dict.fromkeys(("U64", "I64", "F64"), 8)


class CheckpointError(RpcError):
    """A checkpoint cannot be written, is damaged, or does not fit what is there; the text says
    which, and what to do.
    """


class Busy(CheckpointError):
    """Tables cannot be saved, or restored, this moment, as something else is being done with them:
    it is tried again.
    """


class TooLate(CheckpointError, DeadlineExceeded):
    """A save or a restore has not ended by its deadline; the text says what it waited for. It is a
    TimeoutError, too.
    """


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a checkpoint's file, as the manifest describes it. Axis 0 of its shape counts
    the table's rows; crc32 is of its data.
    """

    name: str
    type_code: str
    shape: tuple[int, ...]
    crc32: int

    @property
    def nbytes(self) -> int:
        """Of its data."""
        return TYPE_BYTES[self.type_code] * prod(self.shape)


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header, then the data of stored() in this order without gaps."""

    file: str
    header_bytes: int
    header_crc32: int
    columns: tuple[Column, ...]

    def stored(self) -> tuple[Column, ...]:
        """All tensors."""
        return self.columns

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.header_bytes + sum(column.nbytes for column in self.stored())


class TableFile(StoredFile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of one server. removed: keys to remove from what the base has, before the rows are
    stored; None: it is full.

    singles: tensors whose axis 0 counts no rows of it.
    """

    spec: dict[str, Any]
    scalars: dict[str, float]
    removed: Column | None = None
    singles: tuple[Column, ...] = ()

    def stored(self) -> tuple[Column, ...]:
        return (
            *self.columns,
            *((self.removed,) if self.removed is not None else ()),
            *self.singles,
        )

    def single(self, name: str) -> Column | None:
        """That one of them."""
        return next((column for column in self.singles if column.name == name), None)


class ServerPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one server wrote for a checkpoint: its files, and `extras`, which hold its ledger of
    pushes.
    """

    part: int
    tables: tuple[TableFile, ...]
    extras: StoredFile | None = None


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that another is laid over: its folder's name, the CRC-32 of its manifest's line,
    the links that it is over.
    """

    name: str
    crc32: int
    links: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole checkpoint; check() has been called on every one that encode() and decode()
    return.
    """

    format: int
    step: int
    parts: tuple[ServerPart, ...]
    base: Base | None = None

    @property
    def links(self) -> int:
        """The checkpoints that it lies over."""
        return self.base.links + 1 if self.base is not None else 0

    def files(self) -> list[TableFile]:
        """The tables of all parts."""
        return [table for part in self.parts for table in part.tables]

    def stored(self) -> list[StoredFile]:
        """All files of all parts."""
        return [*self.files(), *(part.extras for part in self.parts if part.extras is not None)]

    def specs(self) -> dict[str, list[TableSpec]]:
        """{table: what each server had of it}."""
        found: dict[str, list[TableSpec]] = {}
        for each in self.files():
            spec = from_dict(each.spec)
            found.setdefault(spec.table, []).append(spec)
        return found


prepare(Manifest)  # and what is in it; a server reads it in a thread for each restore


def save_order(name: str) -> tuple[bool, int, str]:
    """Sorts the names in a folder of checkpoints by when they were saved; other names come last.

    By number: as text, a sequence of nine digits would come before those of eight.
    """
    match = FINAL_NAME.fullmatch(name)
    return (match is None, int(match[1]) if match else 0, name)


def check_step(step: object) -> int:
    """`step`, or ConfigError."""
    number = int(step) if isinstance(step, Integral) and not isinstance(step, bool) else -1
    if 0 <= number <= STEP_MAX:
        return number
    raise ConfigError(
        f"step {step!r} of a checkpoint: a whole number from 0 to {STEP_MAX} is allowed"
    )


def check_keep(keep: object) -> int | None:
    """How many checkpoints to keep, or ConfigError."""
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1):
        return keep
    raise ConfigError(f"keep={keep!r}: how many checkpoints to keep, at least 1, or None for all")


def encode(manifest: Manifest) -> bytes:
    """The file's bytes. Raises CheckpointError when it is not whole."""
    check(manifest)
    assert manifest.format == FORMAT
    line = msgspec.json.encode(manifest)
    return line + b"\n%08x\n" % zlib.crc32(line)


def line_crc32(data: bytes) -> int:
    """By which a manifest is known that has these bytes."""
    return zlib.crc32(data.partition(b"\n")[0])


def decode(data: bytes) -> Manifest:
    """The inverse; CheckpointError says what is wrong with it."""
    line, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % zlib.crc32(line):
        raise CheckpointError(
            f"{MANIFEST} is torn or damaged: its checksum does not fit its {len(data)} bytes"
        )
    try:
        found = msgspec.json.decode(line)
        if not isinstance(found, dict) or found.get("format") not in FORMATS_READ:
            raise CheckpointError(
                f"{MANIFEST} is none that this version reads: formats {FORMATS_READ} are allowed"
            )
        manifest = msgspec.convert(found, Manifest, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is no manifest of key-value tables: {error}") from error
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Whether its parts are all there and fit together; raises CheckpointError."""
    numbers = [part.part for part in manifest.parts]
    if not numbers or numbers != list(range(len(numbers))):
        raise CheckpointError(
            f"the parts are {numbers}, 0, 1, 2, ... is allowed: a server's part is missing or "
            "there twice"
        )
    names: set[str] = set()
    if manifest.base is not None and (
        not FINAL_NAME.fullmatch(manifest.base.name) or manifest.base.links < 0
    ):
        raise CheckpointError(
            f"base {manifest.base.name!r}: the name of a checkpoint beside this one is allowed"
        )
    for each in manifest.files():
        _check_table_file(each, manifest.base is not None)
    for stored in manifest.stored():
        _check_file(stored)
        if stored.file in names:
            raise CheckpointError(f"file {stored.file!r} is named twice")
        names.add(stored.file)
    try:
        specs = manifest.specs()
    except ConfigError as error:
        raise CheckpointError(f"a table's spec is not allowed here: {error}") from error
    for table, parts in specs.items():
        _check_table(table, parts)


def _check_file(each: StoredFile) -> None:
    if not FILE_NAME.fullmatch(each.file):
        raise CheckpointError(
            f"file name {each.file!r}: part-00000-table-00000.safetensors is allowed"
        )
    columns = each.stored()
    if (
        each.header_bytes < 8
        or not each.columns
        or len({column.name for column in columns}) != len(columns)
    ):
        raise CheckpointError(f"{each.file}: a header and columns of different names are needed")
    for column in columns:
        if column.type_code not in TYPE_BYTES or not column.shape or min(column.shape) < 0:
            raise CheckpointError(
                f"{each.file}: column {column.name!r} is {column.type_code}{list(column.shape)}"
            )


def _check_table_file(each: TableFile, has_base: bool) -> None:
    rows = {column.shape[0] for column in each.columns if column.shape}
    if len(rows) > 1:
        raise CheckpointError(f"{each.file}: its columns differ in rows, {sorted(rows)}")
    if each.removed is not None and (
        not has_base or each.removed.type_code != "I64" or len(each.removed.shape) != 1
    ):
        raise CheckpointError(f"{each.file}: changes are of sparse tables, and need a base")
    for column in each.singles:
        if (column.name, column.type_code, column.shape[1:]) != (
            "used",
            "I64",
            (2,),
        ) and column.name != "sketch":
            raise CheckpointError(
                f"{each.file}: a tensor {column.name!r} of {column.type_code}{list(column.shape)} "
                "is not known"
            )


def _check_table(table: str, parts: list[TableSpec]) -> None:
    first = parts[0]
    if len({type(each) for each in parts}) != 1 or any(
        each.partitions != first.partitions for each in parts
    ):
        raise CheckpointError(f"table {table!r} is not one table in all parts")
    if isinstance(first, SparseSpec):
        if sorted(each.partition for each in parts) != list(range(first.partitions)):
            raise CheckpointError(
                f"sparse table {table!r} is on {len(parts)} of {first.partitions} servers: "
                "it was just being created; save again"
            )
        return
    assert isinstance(first, DenseSpec)
    reached = 0
    for begin, end in sorted(
        (each.begin, each.end) for each in parts if isinstance(each, DenseSpec)
    ):
        if begin != reached:
            raise CheckpointError(
                f"dense table {table!r} lacks rows {reached} to {begin}: "
                "it was just being created; save again"
            )
        reached = end
    if reached != first.rows:
        raise CheckpointError(
            f"dense table {table!r} lacks rows {reached} to {first.rows}: "
            "it was just being created; save again"
        )
