"""The server side of the key-value service: `KVShard` holds tables, `KVServer` puts it where it runs.

With shards, each shard process holds a KVShard of its own and is a server of the service by itself; inline, there is
one in the application's process. To a worker both are just servers, and a partition is one of them.

What is asked arrives as plain scalars, strings, dicts and read-only arrays; what is returned is the caller's to keep.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prpc_engine.deferred import Deferred
from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv.checkpoint.gate import HeldTable
from prpc_engine.kv.checkpoint.methods import CheckpointMethods
from prpc_engine.kv.table import DenseTable, SparseTable
from prpc_engine.kv.table_spec import from_dict

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


class ServingService(Protocol):
    """What is used of prpc_engine.RpcService."""

    @property
    def shards(self) -> int:
        """Shard processes of this service; 0 is inline."""

    def create_server(self, name: str, obj: object, /, *, sharded: bool = False) -> Any:
        """Expose obj's public methods; sharded: obj is a factory, called once in every shard."""


class KVServer:
    """Offers key-value tables under `name`. The service owns what this makes, and closes it.

    checkpoint_root: workers may save to and restore from folders below it only; None: wherever this process may write.
    """

    def __init__(self, service: ServingService, name: str = "kv", *, checkpoint_root: str | None = None) -> None:
        self.name = name
        factory = partial(KVShard, checkpoint_root)
        if service.shards > 0:
            self.server = service.create_server(name, factory, sharded=True)
        else:
            self.server = service.create_server(name, factory())


class KVShard(CheckpointMethods):
    """The tables of one partition. Its public methods are the protocol; calls come one at a time.

    Raises ConfigError for a bad or conflicting spec, BadArguments for an unknown table, or arrays that do not fit.
    """

    def create_table(self, spec: dict[str, Any]) -> bool:
        """Make the table that `spec` (TableSpec.to_dict()) describes: True when it is new, False when it is there.

        ConfigError when another table has its name: a table is never changed or replaced under its users.
        """
        wanted = from_dict(spec)
        present = self._specs.get(wanted.table)
        if present is not None:
            if present != wanted:
                raise ConfigError(
                    f"table {wanted.table!r} is there with another spec: asked for {wanted.to_dict()}, "
                    f"there is {present.to_dict()}; every worker must use the same spec and expected_servers"
                )
            return False
        table = wanted.make()
        if isinstance(table, SparseTable):
            self._sparse[wanted.table] = table
        else:
            self._dense[wanted.table] = table
        self._specs[wanted.table] = wanted
        return True

    def pull(self, table: str, keys: Keys) -> Floats:
        """Rows of a sparse table: int64[n] -> float32[n, dim]."""
        return self._sparse_table(table).pull(keys)

    def push(self, table: str, keys: Keys, *grads: Array) -> Deferred | None:
        """Apply gradients, int64[n] and float32[n, dim] or what its compression makes of that, to a sparse table."""
        return self._sparse_table(table).push(keys, *grads)

    def push_pull(self, table: str, keys: Keys, *grads: Array) -> Deferred | Floats:
        """push(), then the new rows."""
        return self._sparse_table(table).push_pull(keys, *grads)

    def pull_dense(self, table: str) -> Floats:
        """The whole local slice of a dense tensor."""
        return self._dense_table(table).pull()

    def push_dense(self, table: str, *grads: Array) -> Deferred | None:
        """Apply a gradient of the local slice's shape, or what its compression makes of that."""
        return self._dense_table(table).push(*grads)

    def push_pull_dense(self, table: str, *grads: Array) -> Deferred | Floats:
        """push_dense(), then the new slice."""
        return self._dense_table(table).push_pull(*grads)

    def statistics(self) -> dict[str, dict[str, int]]:
        """{table: the fields of its TableStatistics}: a plain dict, as it goes over the wire."""
        tables = [*self._sparse.items(), *self._dense.items()]
        return {name: asdict(table.statistics()) for name, table in tables}

    def _sparse_table(self, name: str) -> SparseTable | HeldTable[SparseTable]:
        table = self._sparse.get(name)
        if table is None:
            raise BadArguments(self._absent("sparse", name, list(self._sparse)))
        return table

    def _dense_table(self, name: str) -> DenseTable | HeldTable[DenseTable]:
        table = self._dense.get(name)
        if table is None:
            raise BadArguments(self._absent("dense", name, list(self._dense)))
        return table

    def _absent(self, kind: str, name: str, there: list[str]) -> str:
        return f"no {kind} table {name!r} here; there are: {', '.join(sorted(there)) or 'none'}; create it first"
