"""Nodes with ranks, services with servers: what the master knows of a job. No I/O and no clock
here.

    path below /<root>           value                              owner
    _node_/<rank>                a Member                           the node's session
    _shard_/<session>            a Member of its node's rank        the shard's session
    _rpc_/<api>/<service>        its rpc_id                         stays
    _rpc_/<api>/<service>/<id>   a Member, with its target          the server's session

A rank is the smallest that no living node has. A target is a server's number in requests, never
given twice, so that a request for a server that is gone can never reach another one. What a session
registered goes when it ends.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from prpc_engine.master.namespace import (
    OWNED_MAX,
    TREE_BOUNDS,
    Namespace,
    NodeExists,
    RegistryError,
    TreeBounds,
    component,
    encoded,
    name_of,
    natural,
)
from prpc_engine.master.tree import TreeNode
from prpc_engine.rpc.marks import Marks

__all__ = ["SERVERS_PER_NODE_MAX", "Member", "Registry", "RegistryError", "ServerEntry"]

SERVERS_PER_NODE_MAX = OWNED_MAX - 1  # the node itself is one of what its session owns
RANK_MAX = (1 << 31) - 1
FIRST_TARGET = 16  # below: the master's own
DEFAULT_API = "RpcService"


@dataclass(frozen=True)
class ServerEntry:
    """One server of one service. `marks` are None where it did not say: its clients ask it when
    they must know.
    """

    service: str
    server_id: int
    target: int
    rank: int
    addresses: tuple[str, ...]
    marks: Marks | None = None


class Member(msgspec.Struct, frozen=True):
    """What the tree stores of a node, a shard or a server: its rank, where it is reached, and of a
    server its target and what its methods are declared as.
    """

    rank: int
    addresses: tuple[str, ...]
    target: int = 0
    marks: Marks | None = None  # of a server


class Registry(Namespace):
    """Gives nodes their ranks and servers their targets, and says who serves what, on top of the
    tree.

    Where nothing is kept, these differ from start to start, so that no number is given again:

    first_target  of servers
    first_number  of ids and sessions: larger than that of any earlier start
    first_token   of locks: the same, and also where a journal begins

    bounds        of the tree

    Not thread-safe: called in the master's reactor. What is refused raises RegistryError. Paths:
    the table at the file's head.
    """

    def __init__(
        self,
        first_target: int = FIRST_TARGET,
        first_number: int = 0,
        first_token: int = 1,
        bounds: TreeBounds = TREE_BOUNDS,
    ) -> None:
        super().__init__(first_number, bounds)
        self._first_target = first_target
        self.first_token = first_token

    def _directory(self, session: int, name: str) -> tuple[str, TreeNode]:
        full = f"{self.full_path(session, '')}/{name}"
        return full, self.node(full)

    def _member(self, session: int) -> Member | None:
        """What join() made for this session. Nodes are remembered in the order they were made: it
        is among the first.
        """
        for path in self.tree.sessions[session].owned:
            if path.split("/")[2] in ("_node_", "_shard_"):
                return msgspec.json.decode(self.tree.nodes[path].value, type=Member)
        return None

    def title(self, session: int) -> str:
        """Who a session is, for people: its node's rank, else its label."""
        member = self._member(session)
        return (
            f"rank {member.rank}"
            if member is not None
            else self.tree.sessions[session].record.label or f"session {session}"
        )

    def join(self, session: int, addresses: list[str], shard_of: int, wanted: int) -> int:
        """A rank: the smallest free, or `wanted` if that is free; that of its node for a shard,
        which says it in shard_of.

        Joining twice gives the same. Raises RegistryError."""
        nodes, directory = self._directory(session, "_node_")
        known = self._member(session)
        if known is not None:
            return known.rank
        if shard_of >= 0:
            if str(shard_of) not in directory.children:
                raise RegistryError(f"there is no node of rank {shard_of}")
            shard = Member(shard_of, tuple(addresses))
            self.put(f"{self._directory(session, '_shard_')[0]}/{session}", encoded(shard), session)
            return shard_of
        taken = directory.children
        if wanted >= 0 and str(wanted) not in taken:
            rank = wanted
        else:
            rank = next(rank for rank in itertools.count() if str(rank) not in taken)
        self.put(f"{nodes}/{rank}", encoded(Member(rank, tuple(addresses))), session)
        return rank

    def register_node(self, session: int, rank: int, addresses: list[str]) -> None:
        """A node of a rank that its owner chose. Raises NodeExists, RegistryError."""
        if not isinstance(rank, int) or not 0 <= rank <= RANK_MAX:
            raise RegistryError(f"a rank is 0 to {RANK_MAX}, not {rank}")
        self.put(
            f"{self._directory(session, '_node_')[0]}/{rank}",
            encoded(Member(rank, tuple(addresses))),
            session,
        )

    def get_comm_info(self, session: int) -> list[list[Any]]:
        """[rank, addresses] of every node, in order of rank."""
        nodes, directory = self._directory(session, "_node_")
        members = [
            msgspec.json.decode(self.tree.nodes[f"{nodes}/{name}"].value, type=Member)
            for name in directory.children
        ]
        return [
            [member.rank, list(member.addresses)]
            for member in sorted(members, key=lambda member: member.rank)
        ]

    def ranks(self, session: int) -> list[int]:
        """Of all living nodes, sorted."""
        return sorted(int(name) for name in self._directory(session, "_node_")[1].children)

    def _service(self, session: int, api: str, service: str) -> str:
        return f"{self._directory(session, '_rpc_')[0]}/{component(api)}/{component(service)}"

    def register_rpc_service(self, session: int, api: str, service: str) -> int:
        """The service's rpc_id: 0, 1, ... of its api, the same each time it is asked."""
        full = self._service(session, api, service)
        node = self.tree.nodes.get(full)
        if node is None:
            above = full.rpartition("/")[0]
            if above not in self.tree.nodes:
                self.put(above, "", 0)
            self.put(full, str(self.count(f"#rpc{above}")), 0)
            node = self.tree.nodes[full]
        return int(node.value)

    def del_rpc_service_info(self, session: int, api: str, service: str) -> bool:
        """Forget a service; whether there was one. Raises RegistryError while it has servers."""
        full = self._service(session, api, service)
        node = self.tree.nodes.get(full)
        if node is None:
            return False
        if node.children:
            raise RegistryError(f"{service!r} has {len(node.children)} servers: close them first")
        self.delete(full)
        return True

    def prepare_server(self, session: int, service: str, server_id: int) -> list[int]:
        """[server id, target] that register_server() may be asked for next: its node answers to it
        before anybody hears of it.
        """
        _, _, given = self._place(session, DEFAULT_API, service, server_id, -1)
        return [given, self.count("#targets", self._first_target)]

    def register_server(
        self,
        session: int,
        service: str,
        server_id: int,
        api: str = DEFAULT_API,
        rank: int = -1,
        target: int = 0,
        marks: Marks | None = None,
    ) -> list[int]:
        """[server id, target, rpc_id] for a server at this session's node, or at that rank's; -1
        takes the smallest id free. `target`: what prepare_server() gave, or 0."""
        member, full, server_id = self._place(session, api, service, server_id, rank)
        rpc_id = self.register_rpc_service(session, api, service)
        target = target or self.count("#targets", self._first_target)
        self.put(
            f"{full}/{server_id}",
            encoded(Member(member.rank, member.addresses, target, marks)),
            session,
        )
        return [server_id, target, rpc_id]

    def _place(
        self, session: int, api: str, service: str, server_id: int, rank: int
    ) -> tuple[Member, str, int]:
        """Of one more server: its node, the path of its service, and its id. Raises NodeExists
        (that id), RegistryError.
        """
        if rank < 0:
            member = self._member(session)
            if member is None:
                raise RegistryError("join before registering a server")
        else:
            addresses: list[str] = next(
                (addresses for other, addresses in self.get_comm_info(session) if other == rank), []
            )
            member = Member(rank, tuple(addresses))
        full = self._service(session, api, service)
        if len(self.tree.sessions[session].owned) >= self.bounds.owned:
            # the node itself is one of what its session owns
            raise RegistryError(f"a node may have at most {self.bounds.owned - 1} servers")
        taken = self.tree.nodes[full].children if full in self.tree.nodes else {}
        if server_id < 0:
            server_id = next(free for free in itertools.count() if str(free) not in taken)
        elif str(server_id) in taken:
            other = msgspec.json.decode(self.tree.nodes[f"{full}/{server_id}"].value, type=Member)
            raise NodeExists(
                f"server {server_id} of {service!r} exists already, at rank {other.rank}"
            )
        return member, full, server_id

    def deregister_server(self, session: int, target: int) -> bool:
        """Forget one server of this session; whether there was one."""
        for path in self.tree.sessions[session].owned:
            value = self.tree.nodes[path].value
            if (
                path.split("/")[2] == "_rpc_"
                and msgspec.json.decode(value, type=Member).target == target
            ):
                self.delete(path)
                return True
        return False

    def servers(self, session: int, service: str, api: str = DEFAULT_API) -> list[ServerEntry]:
        """In order of server id."""
        full = self._service(session, api, service)
        node = self.tree.nodes.get(full)
        found = []
        for name in sorted(node.children if node is not None else (), key=natural):
            one = msgspec.json.decode(self.tree.nodes[f"{full}/{name}"].value, type=Member)
            found.append(
                ServerEntry(service, int(name), one.target, one.rank, one.addresses, one.marks)
            )
        return found

    def get_rpc_service_info(self, session: int, api: str) -> list[list[Any]]:
        """[service, rpc_id, [[server id, rank], ...]] of every service of that api, sorted by
        name.
        """
        full = f"{self._directory(session, '_rpc_')[0]}/{component(api)}"
        node = self.tree.nodes.get(full)
        found: list[list[Any]] = []
        for part in sorted(node.children if node is not None else ()):
            name = name_of(part)
            servers = [[entry.server_id, entry.rank] for entry in self.servers(session, name, api)]
            found.append([name, int(self.tree.nodes[f"{full}/{part}"].value), servers])
        return found

    def services(self, session: int) -> list[str]:
        """Names of all services of RpcService that have a server, sorted."""
        return [
            name for name, _, servers in self.get_rpc_service_info(session, DEFAULT_API) if servers
        ]
