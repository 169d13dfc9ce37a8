"""One server's part of a checkpoint onto its disk, and the commit of all parts: every order of
calls that durability needs.

    who                    what                                               killed after it
    each server            tables and extras to unfinished-<id>/part-*,       nothing counts
                           fsync each; fsync of unfinished-<id>
    one server, after all  every file has its size; manifest.json, fsync;     nothing counts
      have answered        fsync of unfinished-<id>
                           what it lies over is the newest, with all files    nothing counts
                           rename to checkpoint-<n>-<step>                    the old one or the
                                                                              new one counts
                           fsync of the folder, and of the one above          the new one counts
                           what neither the newest `keep` are, nor they or    all that are left
                           a save with a manifest lie over, is renamed to     are whole
                           removed-* and removed, the newest first; and what
                           was being removed, or was left by saves of which
                           nothing was written for LEFT_S

Others may save to the same folder at the same time, of these tables or of others, on any machine:
each writes to a folder of its own, and takes the next number that is free. So a folder of another
save is removed only when nobody can be writing to it: locks of files would tell sooner, but not
every shared file system has them.

What a save lies over must not be removed before the save counts. A save writes its manifest, which
names its base, and then looks whether the base is still the newest. A server that removes has
renamed its own checkpoint, lists what is too old, and then looks for manifests of other saves. So
at least one of the two sees the other: the server leaves the base there, or the save is made again.

A safetensors file is 8 bytes of header length, that many of JSON, then the tensors. The package
writes only what is in memory as a whole, so header and offsets are made here; reading is the
package's.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.checkpoint.chain import check_link, layers
from prpc_engine.kv.checkpoint.cut import TableCut
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.manifest import (
    FINAL_NAME,
    FORMAT,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    REMOVED,
    REMOVED_NAME,
    TYPE_BYTES,
    TYPE_CODES,
    UNFINISHED_NAME,
    Base,
    Busy,
    CheckpointError,
    Column,
    Manifest,
    ServerPart,
    StoredFile,
    TableFile,
    encode,
    line_crc32,
    save_order,
)
from prpc_engine.kv.checkpoint.read import check_sizes, read_chain
from prpc_engine.kv.schema.table_spec import DenseSpec, TableSpec
from shard import Future, runtime

# Copied in one step of the shard's thread (some 1.5 ms) and written by the save's: two such buffers
# are all the memory it takes.
PIECE_BYTES = 8 << 20
# Between two writes of a save there is at most an fsync: the writing of the slowest server shows by
# its own files.
LEFT_S = 3600.0
logger = logging.getLogger("prpc")


class Background:
    """One thread that does what a shard's own must not wait for. Owned by one save or load."""

    def __init__(self) -> None:
        self._pool = runtime.Threads(1, thread_name_prefix="prpc-checkpoint")

    def run(self, function: Callable[..., Any], *args: Any) -> Future:
        """Its result, for a task to await. In the order asked."""
        done = Future()

        def work() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:  # whatever it is, a task awaits it, and raises it there
                done.set_error(error)

        self._pool.submit(work)
        return done

    def close(self) -> None:
        """The thread ends after what was asked; nobody waits for it."""
        self._pool.shutdown(wait=False)


async def in_background(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a thread of its own."""
    background = Background()
    try:
        return await background.run(function, *args)
    finally:
        background.close()


class TensorFile:
    """A new safetensors file: create(), write() all of it, finish(). Its maker calls close(), also
    when one of these failed.

    named: (name, shape) of the tensors that a column is for who opens the file, in place of one of
    its own name.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, npt.DTypeLike],
        named: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]] | None = None,
    ) -> None:
        self._files, self._path, self._shapes = files, path, dict(shapes)
        self._fd = -1
        self._offsets, self._crcs = {}, dict.fromkeys(shapes, 0)
        header, at = {}, 0
        self._codes = {name: TYPE_CODES[np.dtype(dtypes[name]).name] for name in shapes}
        for name, shape in shapes.items():
            self._offsets[name] = at
            for tensor, extents in (named or {}).get(name, [(name, shape)]):
                end = at + TYPE_BYTES[self._codes[name]] * math.prod(extents)
                header[tensor] = {
                    "dtype": self._codes[name],
                    "shape": list(extents),
                    "data_offsets": [at, end],
                }
                at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # as the package does: data begins at a multiple of 8
        self._header = len(text).to_bytes(8, "little") + text

    def create(self) -> None:
        """The file, with its header."""
        self._fd = self._files.create(self._path)
        runtime.close_with_process(self.close)
        self._files.write_at(self._fd, memoryview(self._header), 0)

    def write(self, begin: int, piece: Mapping[str, npt.NDArray[Any]]) -> None:
        """The rows (of a dense table: elements) from `begin` on, of these columns; a column's
        pieces come in order.
        """
        for name, array in piece.items():
            data = array.reshape(-1).view(np.uint8).data
            self._crcs[name] = zlib.crc32(data, self._crcs[name])
            row_bytes = array.nbytes // max(1, len(array))
            self._files.write_at(
                self._fd, data, len(self._header) + self._offsets[name] + begin * row_bytes
            )

    def finish(self) -> StoredFile:
        """On the disk."""
        self._files.sync(self._fd)
        columns = tuple(
            Column(name, self._codes[name], shape, self._crcs[name])
            for name, shape in self._shapes.items()
        )
        return StoredFile(self._path.name, len(self._header), zlib.crc32(self._header), columns)

    def close(self) -> None:
        """A second close does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)


async def write_part(
    files: Files,
    folder: Path,
    part: int,
    cuts: Sequence[tuple[TableSpec, TableCut]],
    extras: Mapping[str, npt.NDArray[Any]],
) -> ServerPart:
    """Write the cuts, closing each, and the extras to `folder`. Raises OSError; then what is there
    is worthless.

    A piece is copied while the thread writes the one before it.
    """
    background = Background()
    tables, stored = [], None
    try:
        await background.run(files.make_folder, folder)
        for number, (spec, cut) in enumerate(cuts):
            tables.append(
                await _write_table(
                    background,
                    files,
                    folder / f"part-{part:05d}-table-{number:05d}.safetensors",
                    spec,
                    cut,
                )
            )
        if extras:
            shapes = {name: array.shape for name, array in extras.items()}
            dtypes = {name: array.dtype for name, array in extras.items()}
            async with _Created(
                background,
                TensorFile(files, folder / f"part-{part:05d}-extras.safetensors", shapes, dtypes),
            ) as file:
                await background.run(file.write, 0, extras)
                stored = await background.run(file.finish)
        await background.run(files.sync_folder, folder)
    finally:
        background.close()
        for _, cut in cuts:
            cut.close()
    return ServerPart(part, tuple(tables), stored)


async def _write_table(
    background: Background, files: Files, path: Path, spec: TableSpec, cut: TableCut
) -> TableFile:
    shapes, dtypes = dict(cut.shapes), dict(cut.dtypes)
    beside = cut.singles if cut.removed is None else {REMOVED: cut.removed} | cut.singles
    for name, array in beside.items():
        shapes[name], dtypes[name] = array.shape, array.dtype
    async with _Created(
        background, TensorFile(files, path, shapes, dtypes, _named(spec, shapes))
    ) as file:
        await _write_pieces(background, file, cut)
        await background.run(file.write, 0, beside)
        stored = await background.run(file.finish)
    cut.close()
    columns, others = stored.columns[: len(cut.shapes)], stored.columns[len(cut.shapes) :]
    return TableFile(
        file=stored.file,
        header_bytes=stored.header_bytes,
        header_crc32=stored.header_crc32,
        columns=columns,
        spec=spec.to_dict(),
        scalars=cut.scalars,
        removed=others[0] if cut.removed is not None else None,
        singles=others if cut.removed is None else others[1:],
    )


def _named(
    spec: TableSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """What the file's tensors are called, of columns that are not called as themselves: what a
    model's state_dict has by name.
    """
    if not isinstance(spec, DenseSpec) or not spec.names:
        return {}
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for name, shape, begin, end in spec.stretches():
        first, last = max(begin, spec.begin), min(end, spec.end)
        if (first, last) == (begin, end):
            tensors.append((name, shape))
        elif first < last:
            tensors.append((f"{name}[{first - begin}:{last - begin}]", (last - first,)))
    return {"values": tensors} | {
        column: [(f"optimizer/{column}", shapes[column])] for column in shapes if column != "values"
    }


class _Created:
    """An async context manager: creates the file on entry, and closes it on exit. An OSError is
    raised after the file is closed, because a removed file keeps its disk space while it is open.

    A class and no generator: the garbage collector may end a generator before the suspended task
    that uses it, and the task then ends with an unrelated error.
    """

    def __init__(self, background: Background, file: TensorFile) -> None:
        self._background, self._file = background, file

    async def __aenter__(self) -> TensorFile:
        try:
            await self._background.run(self._file.create)
        except BaseException as error:
            await self._end(error)
            raise
        return self._file

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        closing = self._background.run(self._file.close)
        if isinstance(error, OSError):  # else after what the thread writes now, if this is cut
            await closing


async def _write_pieces(background: Background, file: TensorFile, cut: TableCut) -> None:
    buffers = [cut.empty_piece(PIECE_BYTES) for _ in range(2)]
    writing: Future | None = None
    for number, (begin, end) in enumerate(cut.pieces(PIECE_BYTES)):
        piece = cut.read(begin, end, buffers[number % 2])
        if writing is not None:
            await writing
        writing = background.run(file.write, begin, piece)
    if writing is not None:
        await writing


def commit(
    files: Files,
    folder: Path,
    unfinished: Path,
    step: int,
    parts: Sequence[ServerPart],
    keep: int | None,
    base: Base | None,
) -> Base:
    """Make the parts in `unfinished` a checkpoint, over `base`, and remove what `keep` does not
    want: what the next may lie over.

    Raises CheckpointError, OSError; Busy when `base` is not the newest any more.
    """
    manifest = Manifest(FORMAT, step, tuple(sorted(parts, key=lambda part: part.part)), base)
    data = encode(manifest)
    if len(data) > MANIFEST_BYTES_MAX:
        raise CheckpointError(
            f"a manifest of {len(data)} bytes, {MANIFEST_BYTES_MAX} are allowed: "
            "fewer tables or servers"
        )
    if not unfinished.exists():
        raise CheckpointError(
            f"{unfinished} is not there, or not any more: it was given up meanwhile, "
            "or nothing was written there for "
            f"{LEFT_S:.0f} s and another save removed it; save again (the folder must be one that "
            "all servers see, on a shared file system)"
        )
    check_sizes(
        unfinished, manifest, "the folder must be one that all servers see, on a shared file system"
    )
    fd = files.create(unfinished / MANIFEST)
    try:
        files.write_at(fd, memoryview(data), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    files.sync_folder(unfinished)
    _check_below(files, folder, manifest)  # now that other saves see what it lies over
    now = files.written_at(unfinished / MANIFEST)
    final = _rename_to_next(files, unfinished, step)
    files.sync_folder(folder)
    files.sync_folder(folder.parent)  # the folder may be new
    try:
        _remove_old(files, folder, keep, now)
    except OSError as error:
        logger.warning(
            "%s: old checkpoints cannot be removed: %s; the new one is good", folder, str(error)
        )
    return Base(final.name, line_crc32(data), manifest.links)


def _check_below(files: Files, folder: Path, manifest: Manifest) -> None:
    """Whether what it lies over is still the newest, and has all its files."""
    below = []
    if manifest.base is not None:
        name = manifest.base.name
        finals = filter(FINAL_NAME.fullmatch, files.names(folder))
        if name != max(finals, key=save_order, default=""):
            raise Busy(
                f"{name}, which this save was to lie over, was removed by another save's keep, or "
                "is not the newest any more"
            )
        below = read_chain(folder / name)
        check_link(manifest, below[0].manifest, below[0].crc32)
    layers([manifest, *(link.manifest for link in below)])
    for link in below:
        check_sizes(
            link.path, link.manifest, "this save lies over it: save again with full_every=1"
        )


def _rename_to_next(files: Files, unfinished: Path, step: int) -> Path:
    """Give it the number after the newest: its path then."""
    folder = unfinished.parent
    while True:
        matches = map(FINAL_NAME.fullmatch, files.names(folder))
        numbers = [int(match[1]) for match in matches if match]
        final = folder / f"checkpoint-{max(numbers, default=0) + 1:08d}-{step:012d}"
        try:
            files.rename(unfinished, final)
        except OSError as error:
            # else another save has just taken that number
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return final


def _remove_old(files: Files, folder: Path, keep: int | None, now: float) -> None:
    """Only those count against `keep` whose manifests can be read, down to the full one; what a
    kept one or a save under way lies over stays.

    now: by the clock of the file system, in seconds."""
    good, needed, unwanted = 0, set[str](), list[str]()
    finals = sorted(filter(FINAL_NAME.fullmatch, files.names(folder)), key=save_order, reverse=True)
    for name in finals:
        if name in needed:
            good += 1
        elif keep is not None and good >= keep:
            unwanted.append(name)
        elif below := _names_of_chain(folder / name):
            good += 1
            needed |= below
    if unwanted:  # after that list: a save that begins later sees what made its base too old
        needed |= _names_under_way(files, folder, set(finals))
    for name in unwanted:
        if name not in needed:
            discard(files, folder / name)
    for name in files.names(folder):
        if REMOVED_NAME.fullmatch(name):
            files.remove_tree(folder / name)
        elif UNFINISHED_NAME.fullmatch(name) and _is_left(files, folder / name, now):
            discard(files, folder / name)


def _names_under_way(files: Files, folder: Path, finals: set[str]) -> set[str]:
    """What saves lie over that have a manifest and do not count yet, or that came to count after
    `finals` did.
    """
    found = set[str]()
    for _ in range(2):  # a save that gets its final name during the first look is there at the next
        for name in set(files.names(folder)) - finals:
            if UNFINISHED_NAME.fullmatch(name) or FINAL_NAME.fullmatch(name):
                found |= _names_of_chain(folder / name)
    return found


def _is_left(files: Files, unfinished: Path, now: float) -> bool:
    try:
        return files.written_at(unfinished) < now - LEFT_S
    except FileNotFoundError:  # it has just been renamed, or something in it removed
        return False


def _names_of_chain(path: Path) -> set[str]:
    try:
        return {link.path.name for link in read_chain(path)}
    except CheckpointError:
        return set()


def discard(files: Files, folder: Path) -> None:
    """Free the room of a save that failed, or of a checkpoint; one that is not there is fine.

    Renamed first: of this and a commit() of the same folder, here or on another server, one finds
    it gone, and what is half removed is never taken for a checkpoint, nor kept for long."""
    gone = folder.with_name(f"removed-{runtime.token_hex(8)}")
    try:
        files.rename(folder, gone)
    except FileNotFoundError:
        return
    files.remove_tree(gone)
