"""Where a table lives: which partition has what of it, as every worker works it out by itself.

sparse  every partition has the keys that partition.owner_of gives it
dense   rows in even ranges over all partitions, or the whole tensor in one, where a cut is not
        worth a message
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prpc_engine.kv.consistency.cache import RowCache
from prpc_engine.kv.schema.table_spec import DenseSpec, SparseSpec, TableSpec
from prpc_engine.kv.table import partition
from prpc_engine.kv.table.compression import Compressor, Feedback

# below this, one message costs more than the copy that a second server would save
DENSE_SPLIT_BYTES_MIN = 65536
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Dense:
    """(partition, first row, end row) of each slice, in order of rows."""

    shape: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...]
    # of each slice, where gradients are compressed
    feedback: tuple[Feedback, ...] | None = field(default=None, compare=False)
    nonfinite: str = field(default="refuse", compare=False)  # gradients.py
    epoch: int = field(default=0, compare=False)  # epochs.py
    asked: str = field(default="", compare=False)  # what requests call the table


@dataclass(frozen=True)
class Sparse:
    """What a worker knows of a sparse table that it has created: what is needed to cut keys by
    partition and to encode gradients.

    dim: numbers in a row. asked: the table's name and epoch in one text, as requests carry it.
    """

    dim: int
    compression: Compressor | None = None
    cache: RowCache | None = field(default=None, compare=False)  # of this worker
    # by the pushes of each worker, which every server counts: so it gets one also when it owns no
    # key
    is_paced: bool = False
    nonfinite: str = field(default="refuse", compare=False)  # gradients.py
    epoch: int = field(default=0, compare=False)  # epochs.py
    asked: str = field(default="", compare=False)  # what requests call the table


def layout_of(specs: Mapping[int, TableSpec], cache: RowCache | None = None) -> Dense | Sparse:
    """The layout of a table of which each partition has what `specs` says, and a worker these
    rows.
    """
    first = next(iter(specs.values()))
    if isinstance(first, SparseSpec):
        return Sparse(
            first.dim, first.compression, cache, first.consistency is not None, first.nonfinite
        )
    assert isinstance(first, DenseSpec)
    slices = [
        (index, spec.begin, spec.end)
        for index, spec in specs.items()
        if isinstance(spec, DenseSpec)
    ]
    feedback = None
    if first.compression is not None:
        feedback = tuple(Feedback(first.compression) for _ in slices)
    return Dense(tuple(first.shape), tuple(slices), feedback, first.nonfinite)


def spread(whole: TableSpec, partitions: int) -> dict[int, TableSpec]:
    """What each partition has of a sparse table."""
    return {
        index: replace(whole, partition=index, partitions=partitions) for index in range(partitions)
    }


def sliced(whole: DenseSpec, partitions: int, is_cut: bool) -> dict[int, TableSpec]:
    """What each partition that has rows of the tensor has of it."""
    ranges = {partition.dense_home(whole.table, partitions): (0, whole.rows)}
    if is_cut:
        ranges = dict(
            enumerate(_cut_at_names(whole, partition.dense_ranges(whole.rows, partitions)))
        )
    return {
        index: replace(whole, partition=index, partitions=partitions, begin=begin, end=end)
        for index, (begin, end) in ranges.items()
        if begin < end
    }


def _cut_at_names(whole: DenseSpec, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The even ranges, each bound moved to where a name begins, where that is at most half a range
    away.
    """
    begins = np.array([begin for _, _, begin, _ in whole.stretches()])
    if not len(begins):
        return ranges
    bounds = [begin for begin, _ in ranges[1:]]
    nearest = [int(begins[np.abs(begins - bound).argmin()]) for bound in bounds]
    moved = [
        near if 2 * len(ranges) * abs(near - bound) <= whole.rows else bound
        for near, bound in zip(nearest, bounds, strict=True)
    ]
    return list(itertools.pairwise([0, *moved, whole.rows]))


def restored(
    saved: Sequence[TableSpec], partitions: int, known: Dense | Sparse | None
) -> dict[int, TableSpec]:
    """What each partition is to have of a table of which those of before had `saved`; `known`: as
    this worker knows it.
    """
    first = saved[0]
    if not isinstance(first, DenseSpec):
        return spread(first, partitions)
    if known is None and first.partitions == partitions:
        return {spec.partition: spec for spec in saved}
    if known is not None:
        is_cut = layout_of(sliced(first, partitions, True)) == known
    elif first.partitions > 1 and first.rows > 1:
        is_cut = len(saved) > 1
    else:  # what was saved does not tell
        is_cut = 4 * math.prod(first.shape) >= DENSE_SPLIT_BYTES_MIN
    return sliced(first, partitions, is_cut)


def join(slices: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """Slices of rows, in order, to the tensor."""
    if len(slices) == 1:
        return slices[0].reshape(shape)
    return np.concatenate(slices)


def rows_of(
    positions: list[npt.NDArray[np.intp]], length: int, dim: int, which: npt.NDArray[np.intp] | None
) -> Callable[[list[Floats]], Floats]:
    """A row for each of `length` keys (no repeats), each part's at its positions; the caller asked
    for keys[which].
    """

    def assemble(answers: list[Floats]) -> Floats:
        rows = answers[0] if len(answers) == 1 else partition.merge(positions, answers, length, dim)
        return rows if which is None else rows.take(which, axis=0)

    return assemble
