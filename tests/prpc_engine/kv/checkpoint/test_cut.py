"""A cut shows a table as it was, whatever happens to the table meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from prpc_engine.kv import Adagrad, DenseTable, SparseTable, Uniform
from prpc_engine.kv.checkpoint.cut import TableCut
from prpc_engine.kv.table.eviction import Eviction

Columns = dict[str, np.ndarray]


def sparse(rows: int, eviction: Eviction | None = None) -> SparseTable:
    table = SparseTable(3, Adagrad(0.1), Uniform(0.1), eviction=eviction)
    push(table, np.arange(rows))
    return table


def push(table: SparseTable, keys: np.ndarray) -> None:
    table.push(keys.astype(np.int64), np.ones((len(keys), 3), np.float32))


def frozen(table: SparseTable | DenseTable) -> Columns:
    return {name: array.copy() for name, array in table.columns().items()}


def read_on(cut: TableCut, pieces: list[tuple[int, int]], bytes_max: int) -> list[Columns]:
    return [
        {n: a.copy() for n, a in cut.read(*piece, cut.empty_piece(bytes_max)).items()}
        for piece in pieces
    ]


def together(pieces: list[Columns]) -> Columns:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def assert_same(found: Columns, wanted: Columns) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        if name == "stamps":  # may be of a use after the cut
            assert (found[name] >= array.reshape(found[name].shape)).all()
            continue
        np.testing.assert_array_equal(found[name], array.reshape(found[name].shape), err_msg=name)


@pytest.mark.parametrize("segment_rows", [7, 65536])
def test_pushes_between_the_pieces_of_a_sparse_table_are_not_seen(
    seed: int, segment_rows: int
) -> None:
    random = np.random.default_rng(seed)
    table = sparse(500)
    before = frozen(table)
    cut = TableCut(table, segment_rows=segment_rows)
    found = []
    for piece in cut.pieces(1000):
        push(table, np.unique(random.integers(0, 700, random.integers(0, 60))))
        found += read_on(cut, [piece], 1000)
    assert len(found) > 10
    assert_same(together(found), before)
    assert len(table) > 500


def test_rows_that_are_evicted_and_taken_by_other_keys_are_seen_as_they_were(seed: int) -> None:
    random = np.random.default_rng(seed)
    table = sparse(200, Eviction(rows_max=200))
    before = frozen(table)
    cut = TableCut(table)
    found = []
    for piece in cut.pieces(1000):
        found += read_on(cut, [piece], 1000)
        push(table, np.unique(random.integers(0, 10_000, 80)))
    assert_same(together(found), before)


def test_a_push_to_a_dense_table_is_not_seen_wherever_it_comes() -> None:
    for moment in range(4):
        table = DenseTable((10, 3), Adagrad(0.1), Uniform(0.1))
        before = frozen(table)
        cut = TableCut(table)
        found = []
        for number, piece in enumerate(cut.pieces(80)):
            if number >= moment:
                table.push(np.ones((10, 3), np.float32))
            found += read_on(cut, [piece], 80)
        assert len(found) == 3
        assert_same(together(found), before)


def test_a_closed_cut_costs_pushes_nothing_and_another_one_can_follow() -> None:
    table = sparse(10)
    cut = TableCut(table)
    cut.close()
    assert table.before_change is None
    push(table, np.arange(20))
    second = TableCut(table)
    cut.close()  # again: it must not take the second one's place
    assert table.before_change is not None
    assert len(together(read_on(second, list(second.pieces(10**6)), 10**6))["keys"]) == 20


def test_an_empty_table_has_no_pieces() -> None:
    assert list(TableCut(SparseTable(3, Adagrad(0.1), Uniform(0.1))).pieces(1000)) == []
