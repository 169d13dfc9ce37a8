"""The master's memory: which nodes there are, what they serve. No I/O and no clock here.

A node joins with the addresses it can be reached at and gets a rank, the smallest that no living node has. A server registers
under a service's name and gets a server id (the one it asks for, or the smallest free) and a target: its number in requests,
never used twice, so that a request for a server that is gone can never reach another one. What a node registered goes
when its session ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

NAME_LENGTH_MAX = 256
SERVERS_PER_NODE_MAX = 65536


@dataclass(frozen=True)
class ServerEntry:
    """One server of one service."""

    service: str
    server_id: int
    target: int
    rank: int
    addresses: tuple[str, ...]


@dataclass
class NodeEntry:
    """One node and what it serves."""

    rank: int
    addresses: tuple[str, ...]
    targets: set[int] = field(default_factory=set)


class RegistryError(ValueError):
    """A request that the registry refuses; the text says why."""


class Registry:
    """See the file's head. `session` stands for a node's connection and is only compared."""

    def __init__(self) -> None:
        self.version = 0  # grows with every change
        self._nodes: dict[Hashable, NodeEntry] = {}
        self._servers: dict[str, dict[int, ServerEntry]] = {}
        self._by_target: dict[int, ServerEntry] = {}
        self._targets = itertools.count(16)  # below: the master's own
        self._ids: dict[str, int] = {}

    def join(self, session: Hashable, addresses: list[str]) -> int:
        """A node's rank. Joining twice over one session gives the same."""
        node = self._nodes.get(session)
        if node is None:
            taken = {other.rank for other in self._nodes.values()}
            rank = next(rank for rank in itertools.count() if rank not in taken)
            node = self._nodes[session] = NodeEntry(rank, tuple(addresses))
            self.version += 1
        return node.rank

    def join_as_shard(self, session: Hashable, addresses: list[str], rank: int) -> int:
        """A shard of the node of that rank: it has the node's rank and a session of its own."""
        if all(node.rank != rank for node in self._nodes.values()):
            raise RegistryError(f"there is no node of rank {rank}")
        self._nodes[session] = NodeEntry(rank, tuple(addresses))
        self.version += 1
        return rank

    def register(self, session: Hashable, service: str, server_id: int) -> ServerEntry:
        """A server of `service` at that node; server_id -1 takes the smallest free one. Raises RegistryError."""
        node = self._nodes.get(session)
        if node is None:
            raise RegistryError("join before registering a server")
        if not service or len(service) > NAME_LENGTH_MAX:
            raise RegistryError(f"a service's name has 1 to {NAME_LENGTH_MAX} characters, not {len(service)}")
        if len(node.targets) >= SERVERS_PER_NODE_MAX:
            raise RegistryError(f"a node may have at most {SERVERS_PER_NODE_MAX} servers")
        servers = self._servers.setdefault(service, {})
        if server_id < 0:
            server_id = next(free for free in itertools.count() if free not in servers)
        elif server_id in servers:
            raise RegistryError(f"server {server_id} of {service!r} exists already, at rank {servers[server_id].rank}")
        entry = ServerEntry(service, server_id, next(self._targets), node.rank, node.addresses)
        servers[server_id] = self._by_target[entry.target] = entry
        node.targets.add(entry.target)
        self.version += 1
        return entry

    def deregister(self, session: Hashable, target: int) -> str | None:
        """Forget one server of that node; its service, or None when there was none."""
        node = self._nodes.get(session)
        if node is None or target not in node.targets:
            return None
        node.targets.discard(target)
        return self._forget(target)

    def leave(self, session: Hashable) -> list[str]:
        """A session ended: forget its node; the services that lost a server."""
        node = self._nodes.pop(session, None)
        if node is None:
            return []
        self.version += 1
        return sorted({self._forget(target) for target in node.targets})

    def _forget(self, target: int) -> str:
        entry = self._by_target.pop(target)
        servers = self._servers[entry.service]
        del servers[entry.server_id]
        if not servers:
            del self._servers[entry.service]
        self.version += 1
        return entry.service

    def servers(self, service: str) -> list[ServerEntry]:
        """In order of server id."""
        return [entry for _, entry in sorted(self._servers.get(service, {}).items())]

    def services(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._servers)

    def ranks(self) -> list[int]:
        """Of all living nodes, sorted."""
        return sorted({node.rank for node in self._nodes.values()})

    def generate_id(self, key: str) -> int:
        """0, 1, 2, ... for each key."""
        number = self._ids.get(key, 0)
        self._ids[key] = number + 1
        return number
