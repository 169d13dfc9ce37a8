"""The worker's side of the key-value service: verbs by table name, cut up over the servers and put together again.

    verb       sparse table            dense table       answer
    pull       (table, keys)           (table)           float32[n, dim], or the whole tensor
    push       (table, keys, grads)    (table, grads)    None, once applied on every server concerned
    push_pull  (table, keys, grads)    (table, grads)    the values after the push

keys are int64[n], in any order, repeats allowed; grads float32[n, dim], or of the tensor's shape. Each verb has a
submit_ form that returns a KVFuture at once. Everything is checked before anything is sent: BadArguments says what was
asked and what is allowed. Pulled arrays may be read-only, being what came off the wire; copy one to change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments, ConfigError, RemoteError
from prpc_engine.kv import partition
from prpc_engine.kv.admission import Admission
from prpc_engine.kv.checkpoint.rounds import Rounds
from prpc_engine.kv.checks import check_grads, check_keys
from prpc_engine.kv.compression import Compressor, Feedback
from prpc_engine.kv.duplicates import sum_duplicates, unique
from prpc_engine.kv.eviction import Eviction
from prpc_engine.kv.future import KVFuture, PartFuture
from prpc_engine.kv.initializer import Constant, Initializer
from prpc_engine.kv.optimizer import Optimizer
from prpc_engine.kv.table import TableStatistics
from prpc_engine.kv.table_spec import DenseSpec, SparseSpec, TableSpec

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
SAVE_TIMEOUT_S = 600.0  # of a whole checkpoint: hundreds of GB at 1 GB/s, and a slow disk's fsync
CALL_TIMEOUT_S = 30.0  # as a call of the client itself: long enough for a busy server, short enough to be noticed
DENSE_SPLIT_BYTES_MIN = 65536  # below, one message costs more than the copy that a second server would save


class Client(Protocol):
    """What is used of the client that RpcService.create_client returns."""

    @property
    def server_ids(self) -> tuple[int, ...]:
        """The live servers of the service, ascending."""

    def submit_to(self, server_id: int, method: str, /, *args: Any, timeout_s: float = ...) -> PartFuture:
        """Call a method of that server."""


class CallingService(Protocol):
    """What is used of prpc_engine.RpcService."""

    def create_client(self, name: str, /, *, expected_servers: int = 1, timeout_s: float = ...) -> Client:
        """Wait until that many servers of the service are there."""


@dataclass(frozen=True)
class _Dense:
    """Where a dense tensor lives: (server id, first row, end row) of each slice, in order of rows."""

    shape: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...]
    feedback: tuple[Feedback, ...] | None = field(default=None, compare=False)  # of each slice, where gradients are compressed


@dataclass(frozen=True)
class _Sparse:
    dim: int
    compression: Compressor | None = None


class KVWorker:
    """See the file's head. The service owns the client that this makes, and closes it.

    expected_servers: how many servers hold the tables, shards of a sharded one each counted; every worker must say the
    same. timeout_s: how long to wait for them. call_timeout_s: the deadline of verbs that are given none.
    """

    def __init__(
        self,
        service: CallingService,
        name: str = "kv",
        expected_servers: int = 1,
        timeout_s: float = 10,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.call_timeout_s = call_timeout_s
        self._client = service.create_client(name, expected_servers=expected_servers, timeout_s=timeout_s)
        self.server_ids = self._client.server_ids  # fixed from here on: they decide who owns which key
        if len(self.server_ids) != expected_servers:
            raise ConfigError(
                f"KVWorker of {name!r}: {len(self.server_ids)} servers (ids {list(self.server_ids)}) are there, "
                f"expected_servers is {expected_servers}; say the number there will be, the same in every worker"
            )
        self._tables: dict[str, _Dense | _Sparse] = {}

    # Tables

    def create_sparse(
        self,
        table: str,
        dim: int,
        optimizer: Optimizer | Mapping[str, Any],
        initializer: Initializer | Mapping[str, Any] | None = None,
        *,
        dtype: str = "float32",
        admission: Admission | Mapping[str, Any] | None = None,
        eviction: Eviction | Mapping[str, Any] | None = None,
        compression: Compressor | Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Make int64 key -> row of `dim` numbers on every server, or find it there. Rows start as `initializer` says, else 0.

        dtype: what they are stored as, "float32", "float16" or "bfloat16"; float32 travels. admission: which keys get a row
        (kv.Admission), else all; eviction: which rows go again (kv.Eviction), else none. compression: how gradients travel
        (kv.Cast, kv.Int8), else as they are.
        ConfigError: a value is not allowed, or another table has the name.
        """
        partitions = len(self.server_ids)
        start = initializer or Constant()
        whole = SparseSpec(table, 0, partitions, optimizer, start, dim, dtype, admission, eviction, compression)  # type: ignore[arg-type]
        specs = [replace(whole, partition=i) for i in range(partitions)]
        self._create(dict(zip(self.server_ids, specs, strict=True)), timeout_s)
        self._tables[table] = _Sparse(dim, whole.compression)

    def create_dense(
        self,
        table: str,
        shape: Sequence[int],
        optimizer: Optimizer | Mapping[str, Any],
        initializer: Initializer | Mapping[str, Any] | None = None,
        *,
        dtype: str = "float32",
        compression: Compressor | Mapping[str, Any] | None = None,
        split_bytes_min: int = DENSE_SPLIT_BYTES_MIN,
        timeout_s: float | None = None,
    ) -> None:
        """Make a tensor of `shape`, or find it there. Elements start as `initializer` says, else 0.

        dtype: what they are stored as, "float32", "float16" or "bfloat16"; float32 travels. compression: how gradients travel
        (kv.Cast, kv.Int8, kv.TopK), else as they are; what a push loses by it this worker adds to the next.
        Its rows (axis 0) are spread evenly over the servers; a tensor below `split_bytes_min` bytes lives whole on one.
        """
        start = initializer or Constant()
        partitions = len(self.server_ids)
        whole = DenseSpec(table, 0, partitions, optimizer, start, shape, 0, 0, dtype, compression)  # type: ignore[arg-type]
        specs = self._sliced(whole, 4 * math.prod(whole.shape) >= split_bytes_min)
        self._create(specs, timeout_s)
        self._tables[table] = _layout_of(specs)

    def _create(self, specs: Mapping[int, TableSpec], timeout_s: float | None) -> None:
        parts = [self._submit(each, "create_table", timeout_s, spec.to_dict()) for each, spec in specs.items()]
        try:
            KVFuture(parts, list).result()
        except RemoteError as error:
            if error.type_name.rpartition(".")[2] != ConfigError.__name__:
                raise
            raise ConfigError(f"{self.name!r} refused: {error.remote_message}") from error

    def _sliced(self, whole: DenseSpec, is_cut: bool) -> dict[int, DenseSpec]:
        """What each server that has rows of the tensor has of it."""
        partitions = len(self.server_ids)
        ranges = {partition.dense_home(whole.table, partitions): (0, whole.rows)}
        if is_cut:
            ranges = dict(enumerate(partition.dense_ranges(whole.rows, partitions)))
        return {
            self.server_ids[i]: replace(whole, partition=i, partitions=partitions, begin=begin, end=end)
            for i, (begin, end) in ranges.items()
            if begin < end
        }

    # Checkpoints

    def save(self, folder: str, step: int, *, keep: int | None = None, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Write a checkpoint of all tables while training goes on; it is on the disk when this returns.

        folder: an absolute path on the servers' machines, one that all of them see. keep: that many of the newest are kept, None
        keeps all. What of the pushes under way is in it: checkpoint/methods.py. Raises CheckpointError, and then the checkpoints
        before it are as they were; ConfigError for a folder, step or keep that is not allowed.
        """
        Rounds(self._submit, self.server_ids, timeout_s).save(folder, step, keep)

    def restore(self, folder: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Bring the newest whole checkpoint of `folder` back: the step it was saved with. The servers may be more or fewer now.

        Its tables are made, or take the place of those of the same name and spec; others stay. This worker then knows them all;
        other workers create them as always, and find them. A dense tensor that this worker has created stays cut as it is. Raises
        CheckpointError when none is whole, ConfigError when a table is there with another spec; nothing has changed then.
        """
        found: dict[int, dict[str, TableSpec]] = {}

        def layout(saved: Mapping[str, Sequence[TableSpec]]) -> dict[int, dict[str, TableSpec]]:
            found.update({server_id: {} for server_id in self.server_ids})
            for table, parts in saved.items():
                for server_id, spec in self._restored(table, parts).items():
                    found[server_id][table] = spec
            return found

        step = Rounds(self._submit, self.server_ids, timeout_s).restore(folder, layout)
        for table in {table for specs in found.values() for table in specs}:
            self._tables[table] = _layout_of({server_id: specs[table] for server_id, specs in found.items() if table in specs})
        return step

    def _restored(self, table: str, saved: Sequence[TableSpec]) -> Mapping[int, TableSpec]:
        """What each server is to have of a table of which servers had `saved`."""
        first = saved[0]
        if isinstance(first, DenseSpec):
            known = self._tables.get(table)
            if known is not None:
                is_cut = _layout_of(self._sliced(first, True)) == known
            elif first.partitions > 1 and first.rows > 1:
                is_cut = len(saved) > 1
            else:  # what was saved does not tell
                is_cut = 4 * math.prod(first.shape) >= DENSE_SPLIT_BYTES_MIN
            return self._sliced(first, is_cut)
        partitions = len(self.server_ids)
        return {each: replace(first, partition=i, partitions=partitions) for i, each in enumerate(self.server_ids)}

    # Verbs

    def pull(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> Floats:
        """The present values: pull(table, keys) -> float32[n, dim], row i for keys[i]; pull(table) -> the tensor."""
        return self.submit_pull(table, *arrays, timeout_s=timeout_s).result()

    def push(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> None:
        """Have gradients applied: push(table, keys, grads) or push(table, grads). Those of one key are summed first."""
        self.submit_push(table, *arrays, timeout_s=timeout_s).result()

    def push_pull(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> Floats:
        """push(), then pull() of the same keys, in one message each way."""
        return self.submit_push_pull(table, *arrays, timeout_s=timeout_s).result()

    def submit_pull(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> KVFuture[Floats]:
        """pull() without waiting."""
        layout = self._layout(table)
        if isinstance(layout, _Dense):
            self._expect("pull", table, arrays, ())
            parts = [self._submit(server_id, "pull_dense", timeout_s, table) for server_id, _, _ in layout.slices]
            return KVFuture(parts, lambda answers: _join(answers, layout.shape))
        self._expect("pull", table, arrays, ("keys",))
        keys, which = unique(check_keys(f"pull from table {table!r}", arrays[0]))  # a row travels once
        return self._submit_sparse("pull", table, layout, keys, None, which, timeout_s)

    def submit_push(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> KVFuture[None]:
        """push() without waiting. The arrays may be changed as soon as this returns."""
        layout = self._layout(table)
        if isinstance(layout, _Dense):
            parts = self._submit_dense("push", table, layout, arrays, timeout_s)
        else:
            keys, grads = self._checked("push", table, layout, arrays)
            keys, grads = sum_duplicates(keys, grads)
            parts, _ = self._scatter("push", table, layout, keys, grads, timeout_s)
        return KVFuture(parts, lambda answers: None)

    def submit_push_pull(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> KVFuture[Floats]:
        """push_pull() without waiting. The arrays may be changed as soon as this returns."""
        layout = self._layout(table)
        if isinstance(layout, _Dense):
            parts = self._submit_dense("push_pull", table, layout, arrays, timeout_s)
            return KVFuture(parts, lambda answers: _join(answers, layout.shape))
        asked, grads = self._checked("push_pull", table, layout, arrays)
        keys, grads = sum_duplicates(asked, grads)
        which = None if keys is asked else np.searchsorted(keys, asked)
        return self._submit_sparse("push_pull", table, layout, keys, grads, which, timeout_s)

    def statistics(self, *, timeout_s: float | None = None) -> dict[int, dict[str, TableStatistics]]:
        """{server id: {table: what that server has done with it}}, asked of every server now."""
        parts = [self._submit(server_id, "statistics", timeout_s) for server_id in self.server_ids]
        answers: list[dict[str, dict[str, int]]] = KVFuture(parts, list).result()
        return {
            server_id: {table: TableStatistics(**fields) for table, fields in answer.items()}
            for server_id, answer in zip(self.server_ids, answers, strict=True)
        }

    # Parts

    def _submit(self, server_id: int, method: str, timeout_s: float | None, /, *args: Any) -> PartFuture:
        timeout = self.call_timeout_s if timeout_s is None else timeout_s
        return self._client.submit_to(server_id, method, *args, timeout_s=timeout)

    def _submit_sparse(
        self,
        verb: str,
        table: str,
        layout: _Sparse,
        keys: Keys,
        grads: Floats | None,
        which: npt.NDArray[np.intp] | None,
        timeout_s: float | None,
    ) -> KVFuture[Floats]:
        """A verb that answers with a row for each of `keys` (no repeats); the caller asked for keys[which]."""
        parts, positions = self._scatter(verb, table, layout, keys, grads, timeout_s)
        length = len(keys)

        def assemble(answers: list[Floats]) -> Floats:
            rows = answers[0] if len(answers) == 1 else partition.merge(positions, answers, length, layout.dim)
            return rows if which is None else rows.take(which, axis=0)

        return KVFuture(parts, assemble)

    def _scatter(
        self, verb: str, table: str, layout: _Sparse, keys: Keys, grads: Floats | None, timeout_s: float | None
    ) -> tuple[list[PartFuture], list[npt.NDArray[np.intp]]]:
        """Send each server its keys and gradients; servers that own none of the keys hear nothing.

        Returns the parts and, for each, the positions of its keys. One part means all keys, in their order.
        """
        parts, positions = [], []
        for server_id, owned in zip(self.server_ids, partition.split(keys, len(self.server_ids)), strict=True):
            if len(owned):
                arrays: list[npt.NDArray[Any]] = [keys] if grads is None else [keys, grads]
                if len(owned) < len(keys):
                    arrays = [array[owned] for array in arrays]
                if grads is not None and layout.compression is not None:
                    arrays[1:] = layout.compression.encode(arrays[1])
                parts.append(self._submit(server_id, verb, timeout_s, table, *arrays))
                positions.append(owned)
        return parts, positions

    def _submit_dense(
        self, verb: str, table: str, layout: _Dense, arrays: Sequence[npt.NDArray[Any]], timeout_s: float | None
    ) -> list[PartFuture]:
        self._expect(verb, table, arrays, ("grads",))
        grads = check_grads(f"{verb} to dense table {table!r}", arrays[0], layout.shape)
        if not layout.shape:
            grads = grads.reshape(1)  # one row to the servers
        method = f"{verb}_dense"
        slices: list[tuple[npt.NDArray[Any], ...]] = [(grads[begin:end],) for _, begin, end in layout.slices]
        if layout.feedback is not None:
            slices = [each.encode(*array) for each, array in zip(layout.feedback, slices, strict=True)]
        to = [server_id for server_id, _, _ in layout.slices]
        return [self._submit(each, method, timeout_s, table, *sent) for each, sent in zip(to, slices, strict=True)]

    # Checks

    def _layout(self, table: str) -> _Dense | _Sparse:
        layout = self._tables.get(table)
        if layout is None:
            there = ", ".join(sorted(self._tables)) or "none"
            raise BadArguments(
                f"table {table!r} of {self.name!r} is not known to this worker; it has created: {there}; "
                f"call create_sparse or create_dense first, also when another worker has"
            )
        return layout

    def _expect(self, verb: str, table: str, arrays: Sequence[Any], names: Sequence[str]) -> None:
        if len(arrays) != len(names):
            kind = "dense" if isinstance(self._tables[table], _Dense) else "sparse"
            allowed = ", ".join((repr(table), *names))
            raise BadArguments(f"{verb} of {kind} table {table!r} with {len(arrays)} arrays; {verb}({allowed}) is allowed")

    def _checked(self, verb: str, table: str, layout: _Sparse, arrays: Sequence[Any]) -> tuple[Keys, Floats]:
        self._expect(verb, table, arrays, ("keys", "grads"))
        whose = f"{verb} to sparse table {table!r}"
        keys = check_keys(whose, arrays[0])
        return keys, check_grads(whose, arrays[1], (len(keys), layout.dim))


def _layout_of(specs: Mapping[int, TableSpec]) -> _Dense | _Sparse:
    """Where a table lives of which each server has what `specs` says."""
    first = next(iter(specs.values()))
    if isinstance(first, SparseSpec):
        return _Sparse(first.dim, first.compression)
    assert isinstance(first, DenseSpec)
    slices = [(server_id, spec.begin, spec.end) for server_id, spec in specs.items() if isinstance(spec, DenseSpec)]
    feedback = None
    if first.compression is not None:
        feedback = tuple(Feedback(first.compression, (end - begin, *first.shape[1:])) for _, begin, end in slices)
    return _Dense(tuple(first.shape), tuple(slices), feedback)


def _join(slices: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """Slices of rows, in order, to the tensor."""
    if len(slices) == 1:
        return slices[0].reshape(shape)
    return np.concatenate(slices)
