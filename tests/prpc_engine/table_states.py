"""All that a table has, by name and key: for comparing a primary with its replicas."""

from __future__ import annotations

from typing import Any

from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table.table import DenseTable, SparseTable


def state_of(table: SparseTable | DenseTable) -> dict[str, Any]:
    """All that there is, by name, and rows by key."""
    columns = {column: array.tolist() for column, array in table.columns().items()}
    keys = columns.pop("keys", [])
    found = {
        column: dict(zip(keys, values, strict=True)) if keys else values
        for column, values in columns.items()
    }
    found |= table.scalars() | {what: array.tolist() for what, array in table.singles().items()}
    found.pop("moment", None)  # a clock's goes on; that of steps is the steps
    return found


def states_of(shard: TableShard) -> dict[str, Any]:
    ledger = {name: array.tolist() for name, array in shard.ledger.arrays().items()}
    return {"": ledger} | {name: state_of(table) for name, (_, table) in shard.tables.items()}
