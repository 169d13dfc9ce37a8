"""How each table of a service of plain servers began last: a node each in the master's tree,
changed by compare-and-set.

A master keeps them over its own restart in its journal. One without a journal comes back without
them: every process with a server of the service has read them, and adds those that are gone again.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Protocol

import msgspec

from prpc_engine.errors import (
    ConfigError,
    MaybeExecuted,
    NodeExists,
    NoSuchNode,
    RpcError,
    VersionMismatch,
)
from prpc_engine.kv.schema.tree import MasterTree
from prpc_engine.master.namespace import component
from prpc_engine.master.watch import TreeEvent
from shard import runtime

FOLDER = "/_epochs_"
# for a master that a whole job asks at once, as it starts, or as the master is back
WATCH_TIMEOUT_S = 30.0
logger = logging.getLogger("prpc")


class Beginning(msgspec.Struct, frozen=True):
    """How an epoch of one table began.

    step   of the checkpoint that it began with; -1: it began empty
    spec   of the table, without what differs between its partitions
    lives  of each partition that has some of it: the life of the server that may begin it empty
           (epochs.py); 0: none may
    """

    epoch: int
    step: int
    spec: dict[str, Any]
    lives: dict[int, int]


def next_epoch(before: int) -> int:
    """One that is greater than that, and than what a master knew that has forgotten it: the clock
    goes on.
    """
    return max(before + 1, runtime.time_ns())


def left_s(until: float) -> float:
    """For one of several questions that all have that time, of runtime.monotonic()."""
    return max(0.001, until - runtime.monotonic())


def as_read(spec: dict[str, Any]) -> dict[str, Any]:
    """A plain spec as it comes back from the master: to be compared with one that did."""
    read: dict[str, Any] = msgspec.json.decode(_json(spec))
    return read


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=lambda number: number.item())  # of numpy's numbers


class HasMaster(Protocol):
    """What beginnings_of() needs of a service: the tree of its master, if it has one."""

    @property
    def master_client(self) -> MasterTree:
        """The master's tree; ConfigError: there is none."""


def beginnings_of(service: HasMaster, name: str) -> Beginnings | None:
    """Those of the tables of that service; None where there is no master."""
    try:
        return Beginnings(service.master_client, name)
    except ConfigError:
        return None


class Beginnings:
    """Beginnings keep at the master how each table of a service of plain servers began last.

    tree: the master's client. name: of the service. Any thread may call. Verbs raise what the
    master client does.
    """

    def __init__(self, tree: MasterTree, name: str) -> None:
        self.path = f"{FOLDER}/{component(name)}"
        self._tree = tree

    def read(self, table: str, timeout_s: float) -> tuple[Beginning, int] | None:
        """How it began, and the version to compare with; None:
        the master does not know that table.
        """
        try:
            found = self._tree.tree_node_get(self._node(table), timeout_s=timeout_s)
        except NoSuchNode:
            return None
        return msgspec.json.decode(found.value, type=Beginning), found.version

    def try_put(
        self, table: str, beginning: Beginning, version: int | None, timeout_s: float
    ) -> bool:
        """Change the node that had that version, or add one (None); False: somebody else was
        faster, or this one was, and the session was lost meanwhile: read().
        """
        text, until = _json(beginning).decode(), runtime.monotonic() + timeout_s
        try:
            if version is not None:
                self._tree.tree_node_set(self._node(table), text, version, timeout_s=timeout_s)
            else:
                self._add(self._node(table), text, until)
        except (NodeExists, NoSuchNode, VersionMismatch):
            return False
        except MaybeExecuted:
            if runtime.monotonic() >= until:
                raise
            return False
        return True

    def _node(self, table: str) -> str:
        return f"{self.path}/{component(table)}"

    def _add(self, path: str, text: str, until: float) -> None:
        try:
            self._tree.tree_node_add(path, text, timeout_s=left_s(until))
        except NoSuchNode:
            for folder in (FOLDER, self.path):
                with contextlib.suppress(NodeExists):
                    self._tree.tree_node_add(folder, timeout_s=left_s(until))
            self._tree.tree_node_add(path, text, timeout_s=left_s(until))

    def remember(self) -> None:
        """Add what the master forgets again, from now on and as long as its client lives."""
        known: dict[str, str] = {}
        missing = set[str]()

        def changed(event: TreeEvent) -> None:  # one after the other
            if event.path == self.path:
                return
            if event.value is not None:
                known[event.path] = event.value
                missing.discard(event.path)
            elif event.path in known:
                missing.add(event.path)
            for path in sorted(missing):
                try:
                    self._add(path, known[path], runtime.monotonic() + WATCH_TIMEOUT_S)
                except NodeExists:  # another process was faster
                    pass
                except RpcError as error:
                    logger.warning(
                        "the master was not told how %s began; it is told with the next change: %s",
                        path,
                        str(error),
                    )
                    return
                missing.discard(path)

        self._tree.tree_watch(self.path, changed, True, timeout_s=WATCH_TIMEOUT_S)
