"""The placement of a service in the master's tree: read, and changed by compare-and-set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prpc_engine.errors import NodeExists, NoSuchNode, VersionMismatch
from prpc_engine.kv.schema.placement import Placement, decode
from prpc_engine.master.client import TreeValue
from prpc_engine.master.namespace import component
from shard import Future

FOLDER = "/_tables_"
ASK_TIMEOUT_S = 2.0  # for a master that is there; one that is away is asked again later


class MasterTree(Protocol):
    """What tables need of a MasterClient: nodes of the tree, watches, counters and locks. Times are
    in seconds.
    """

    def submit(self, verb: str, /, *arguments: Any, timeout_s: float = ...) -> Future: ...

    def tree_node_add(
        self, path: str, value: str = "", ephemeral: bool = False, timeout_s: float = ...
    ) -> None: ...

    def tree_node_get(self, path: str, timeout_s: float = ...) -> TreeValue: ...

    def tree_node_set(
        self, path: str, value: str, expected_version: int = -1, timeout_s: float = ...
    ) -> int: ...

    def tree_node_sub(self, path: str, timeout_s: float = ...) -> list[str]: ...

    def tree_wait(self, path: str, timeout_s: float = ...) -> TreeValue: ...

    def tree_watch(
        self,
        path: str,
        callback: Callable[..., object],
        existing: bool = False,
        timeout_s: float = ...,
    ) -> int: ...

    def cancel_watch(self, handle: int) -> bool: ...

    def count_up(self, key: str, timeout_s: float = ...) -> int: ...

    def lock(self, name: str, timeout_s: float = ...) -> contextlib.AbstractContextManager[int]: ...


class PlacementNode:
    """A placement node reads and changes the placement of one service in the master's tree.

    name: of the service. servers_path: the node that has the services, and below them their
    servers. Verbs are coroutines of the control loop, but for wait(), which blocks its thread.
    Every verb raises what the master client does; each question to the master, but for wait()'s,
    takes ASK_TIMEOUT_S seconds at most. Changes are by compare-and-set: who comes too late gets
    False or None.
    """

    def __init__(self, tree: MasterTree, name: str, servers_path: str) -> None:
        self.path = f"{FOLDER}/{component(name)}"
        self.servers_path = f"{servers_path}/{component(name)}"
        self._tree = tree

    def _ask(self, verb: str, *arguments: Any) -> Future:
        return self._tree.submit(verb, *arguments, timeout_s=ASK_TIMEOUT_S)

    async def read(self) -> tuple[Placement, int] | None:
        """The placement and the version to compare with; None: there is none yet."""
        try:
            found = TreeValue(*await self._ask("tree_node_get", self.path))
        except NoSuchNode:
            return None
        return decode(found.value), found.version

    def wait(self, timeout_s: float) -> Placement:
        """The placement, as soon as there is one. Raises DeadlineExceeded."""
        return decode(self._tree.tree_wait(self.path, timeout_s=timeout_s).value)

    async def try_create(self, placement: Placement) -> bool:
        """Make it; False when somebody else has."""
        with contextlib.suppress(NodeExists):
            await self._ask("tree_node_add", FOLDER, "", False)
        try:
            await self._ask("tree_node_add", self.path, placement.encode(), False)
        except NodeExists:
            return False
        return True

    async def try_change(self, placement: Placement, version: int) -> int | None:
        """Set it, if it still has that version: the new version, or None."""
        try:
            return int(await self._ask("tree_node_set", self.path, placement.encode(), version))
        except VersionMismatch:
            return None

    async def servers(self) -> Sequence[int]:
        """The ids of the living."""
        try:
            return [int(each) for each in await self._ask("tree_node_sub", self.servers_path)]
        except NoSuchNode:
            return []
