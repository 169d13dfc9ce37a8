"""Which elastic tables there are: a node each in the master's tree, beside the placement, so that
they outlive all their servers.

    a worker creates a table    notes it before it asks servers, where nothing is noted; and after
                                they have agreed, where something else is
    a worker restores one       notes it after
    a server loads a partition  makes what is noted and in no checkpoint: empty (reconciler.py)

A partition that is lost without a checkpoint so comes back with its tables, and workers read rows
of a new epoch, instead of being told that there is no such table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prpc_engine.errors import MaybeExecuted, NodeExists, NoSuchNode, VersionMismatch
from prpc_engine.kv.schema.beginnings import as_read, left_s
from prpc_engine.kv.schema.layout import sliced, spread
from prpc_engine.kv.schema.table_spec import DenseSpec, TableSpec, from_dict
from prpc_engine.kv.schema.tree import ASK_TIMEOUT_S, MasterTree
from prpc_engine.master.namespace import component
from shard import runtime

FOLDER = "/_schemas_"


class Schema(msgspec.Struct, frozen=True):
    """A table. spec: of any of its partitions; is_cut: of a dense one, whether its rows are spread
    over all.
    """

    spec: dict[str, Any]
    is_cut: bool = True

    def specs(self) -> Mapping[int, TableSpec]:
        """What each partition that has some of it has."""
        first = from_dict(self.spec)
        return (
            sliced(first, first.partitions, self.is_cut)
            if isinstance(first, DenseSpec)
            else spread(first, first.partitions)
        )


def schema_of(specs: Mapping[int, TableSpec]) -> Schema:
    """Of a table of which each partition has what `specs` says."""
    first = specs[min(specs)]
    is_cut = not isinstance(first, DenseSpec) or sliced(first, first.partitions, True) == dict(
        specs
    )
    return Schema(as_read(first.to_dict()), is_cut)


class Schemas:
    """Those of the elastic tables of one service. Verbs raise what the master client does."""

    def __init__(self, tree: MasterTree, name: str) -> None:
        self.path = f"{FOLDER}/{component(name)}"
        self._tree = tree

    def note(self, specs: Mapping[int, TableSpec], until: float, is_agreed: bool) -> None:
        """There is, or is to be, that table. is_agreed: whatever is noted. until: seconds of
        runtime.monotonic(); what may have been done before that is looked at again.
        """
        schema, path = schema_of(specs), self._node(specs[min(specs)].table)
        is_noted = False
        while not is_noted:
            try:
                is_noted = self._try_note(path, schema, is_agreed, until)
            except MaybeExecuted:  # the session was lost meanwhile
                if runtime.monotonic() >= until:
                    raise

    def _try_note(self, path: str, schema: Schema, is_agreed: bool, until: float) -> bool:
        """False: somebody else was faster."""
        text = msgspec.json.encode(schema).decode()
        try:
            found = self._tree.tree_node_get(path, timeout_s=left_s(until))
            if is_agreed and msgspec.json.decode(found.value, type=Schema) != schema:
                self._tree.tree_node_set(path, text, found.version, timeout_s=left_s(until))
        except NoSuchNode:
            try:
                self._add(path, text, until)
            except NodeExists:
                return False
        except VersionMismatch:
            return False
        return True

    def find(self, table: str, timeout_s: float) -> Mapping[int, TableSpec] | None:
        """What is noted of that table; None: nothing."""
        try:
            text = self._tree.tree_node_get(self._node(table), timeout_s=timeout_s).value
        except NoSuchNode:
            return None
        return msgspec.json.decode(text, type=Schema).specs()

    def of(self, partition: int) -> Sequence[TableSpec]:
        """What that partition has of all tables."""
        found = []
        for name in self._names():
            with contextlib.suppress(NoSuchNode):
                text = self._tree.tree_node_get(
                    f"{self.path}/{name}", timeout_s=ASK_TIMEOUT_S
                ).value
                spec = msgspec.json.decode(text, type=Schema).specs().get(partition)
                found += [spec] if spec is not None else []
        return found

    def _names(self) -> Sequence[str]:
        try:
            return self._tree.tree_node_sub(self.path, timeout_s=ASK_TIMEOUT_S)
        except NoSuchNode:
            return ()

    def _node(self, table: str) -> str:
        return f"{self.path}/{component(table)}"

    def _add(self, path: str, text: str, until: float) -> None:
        for folder in (FOLDER, self.path):
            with contextlib.suppress(NodeExists):
                self._tree.tree_node_add(folder, timeout_s=left_s(until))
        self._tree.tree_node_add(path, text, timeout_s=left_s(until))
