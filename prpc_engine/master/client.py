"""A client of the master: names, ids, locks, barriers, roles and the state of a task, for all
processes of a job.

    with MasterClient("127.0.0.1:7000") as client:
        with client.lock("checkpoint", timeout_s=10.0):
            ...
        client.barrier("epoch", 8, timeout_s=60.0)

Every verb blocks for `timeout_s` seconds at most, goes on over a master that is restarted
meanwhile, and raises the errors of prpc_engine.errors: Rejected and its kin where the master
refuses, DeadlineExceeded with who is missing, MasterUnreachable where nobody answers, MaybeExecuted
where the session expired in the middle. Paths are those of the client's root.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from prpc_engine import errors
from prpc_engine.descriptors import names_shortage
from prpc_engine.master.backend import Backend, SessionBackend, TcpBackend
from prpc_engine.master.namespace import component, name_of
from prpc_engine.master.session import ASK_TIMEOUT_S
from prpc_engine.master.watch import Callback, TreeEvent
from prpc_engine.settings.config import DEFAULT_ROOT, LEASE_S, check_timeout
from shard import Future, Limits

__all__ = [
    "Backend",
    "CommInfo",
    "MasterClient",
    "RpcServiceInfo",
    "ServerInfo",
    "SessionBackend",
    "TcpBackend",
    "TreeEvent",
    "TreeValue",
]

# of addresses that lead nowhere from another process, or another host
LOCAL_SCHEMES = ("memory://", "shm://", "unix://")
CREATE_ATTEMPTS_MAX = 8  # of a read and a write that others keep coming in between


class TreeValue(NamedTuple):
    """A node of the tree: its value, the version to compare with, and whether it goes with a
    session.
    """

    value: str
    version: int
    ephemeral: bool


@dataclass(frozen=True)
class CommInfo:
    """A node of the job: its rank, and the addresses that it is reached at, the preferred one
    first.
    """

    global_rank: int
    addresses: tuple[str, ...]

    @property
    def endpoint(self) -> str:
        """The first address that another host could use; the first where there is none such, and ""
        without any.
        """
        return next(
            (one for one in self.addresses if not one.startswith(LOCAL_SCHEMES)),
            (*self.addresses, "")[0],
        )


class ServerInfo(NamedTuple):
    """A server of a service, as the master knows it: its id, and the rank of its node."""

    server_id: int
    global_rank: int


@dataclass(frozen=True)
class RpcServiceInfo:
    """A service that the master knows: name, number, and its servers in order of server id."""

    rpc_service_name: str
    rpc_id: int
    servers: tuple[ServerInfo, ...]


@dataclass(frozen=True, eq=False)
class _Held:
    """A lock, as it was acquired: it may have been lost, and acquired by another thread since."""

    name: str
    token: int
    thread: int  # its ident


class MasterClient:
    """Asks a job's master for names, ids, locks, barriers, roles, and the state of its tasks.
    Thread-safe; a context manager.

    address      "host:port" of the master
    root         whose tree, a name: jobs with different roots share a master and see nothing of
                 each other
    secret       the job's secret, else PRPC_SECRET_FILE, else PRPC_SECRET, else this user's on this
                 host; or NO_SECRET
    lease_s      how long what this client owns outlives its silence: a host that vanished is
                 noticed after so many seconds. A process that ended on the master's host is noticed
                 at once
    heartbeat_s  between signs of life; None: a fifth of the lease
    label        who this is, in others' errors; None: its pid
    timeout_s    for the master to answer at first
    backend      who answers instead of a master at `address`

    Raises MasterUnreachable, AuthenticationFailed, ConfigError.
    """

    @names_shortage("a MasterClient")
    def __init__(
        self,
        address: str = "",
        root: str = DEFAULT_ROOT,
        secret: bytes | str | None = None,
        limits: Limits | None = None,
        lease_s: float = LEASE_S,
        heartbeat_s: float | None = None,
        label: str | None = None,
        timeout_s: float = 10.0,
        backend: Backend | None = None,
    ) -> None:
        named = label or f"process {os.getpid()}"
        self._backend = backend or TcpBackend(
            address, root, secret, limits, lease_s, heartbeat_s, named, timeout_s
        )
        self._held: dict[_Held, _Held] = {}  # each by itself

    @property
    def endpoint(self) -> str:
        """host:port of the master."""
        return self._backend.address

    @property
    def connected(self) -> bool:
        """Whether there is a connection with a session now; without one, verbs wait for it."""
        return self._backend.connected

    def close(self) -> None:
        """End the session: what it owns goes. A second close does nothing."""
        self._backend.close()

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, timeout_s: float, verb: str, *arguments: Any) -> Any:
        check_timeout(timeout_s)
        return self._backend.ask(verb, *arguments, timeout_s=timeout_s)

    def submit(self, verb: str, *arguments: Any, timeout_s: float = ASK_TIMEOUT_S) -> Future:
        """The future of what the master answers to a verb of its protocol (methods.py): for those
        who may not block. Raises Closed, Backpressure; the future ends with what the verb raises.
        """
        check_timeout(timeout_s)
        return self._backend.submit(verb, *arguments, timeout_s=timeout_s)

    # -- the tree ----------------------------------------------------------------------------------

    def tree_node_gen(
        self, path: str, value: str = "", ephemeral: bool = False, timeout_s: float = ASK_TIMEOUT_S
    ) -> str:
        """Add a child named "_" and the next number of `path` in 10 digits; its name. Raises
        NoSuchNode.
        """
        return str(self._ask(timeout_s, "tree_node_gen", path, value, ephemeral))

    def tree_node_add(
        self, path: str, value: str = "", ephemeral: bool = False, timeout_s: float = ASK_TIMEOUT_S
    ) -> None:
        """Add a node; an ephemeral one goes with this session. Raises NodeExists, and NoSuchNode
        where the parent is missing.
        """
        self._ask(timeout_s, "tree_node_add", path, value, ephemeral)

    def tree_node_set(
        self, path: str, value: str, expected_version: int = -1, timeout_s: float = ASK_TIMEOUT_S
    ) -> int:
        """Give a node another value; its new version. With expected_version >= 0 only if it still
        has that version.

        Raises NoSuchNode, VersionMismatch."""
        return int(self._ask(timeout_s, "tree_node_set", path, value, expected_version))

    def tree_node_get(self, path: str, timeout_s: float = ASK_TIMEOUT_S) -> TreeValue:
        """A node's value and version. Raises NoSuchNode."""
        return TreeValue(*self._ask(timeout_s, "tree_node_get", path))

    def tree_node_del(
        self, path: str, expected_version: int = -1, timeout_s: float = ASK_TIMEOUT_S
    ) -> None:
        """Delete a node without children. Raises NoSuchNode, VersionMismatch, Rejected when it has
        children.
        """
        self._ask(timeout_s, "tree_node_del", path, expected_version)

    def tree_node_sub(self, path: str, timeout_s: float = ASK_TIMEOUT_S) -> list[str]:
        """The names of the children, sorted, numbers by value. Raises NoSuchNode."""
        return list(self._ask(timeout_s, "tree_node_sub", path))

    def tree_clear_path(self, path: str, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """Delete a node and all below it; how many."""
        return int(self._ask(timeout_s, "tree_clear_path", path))

    def clear_master(self, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """Delete everything below this client's root; how many nodes."""
        return self.tree_clear_path("", timeout_s)

    def tree_wait(self, path: str, timeout_s: float = ASK_TIMEOUT_S) -> TreeValue:
        """As tree_node_get(), as soon as there is such a node. Raises DeadlineExceeded."""
        return TreeValue(*self._ask(timeout_s, "tree_wait", path))

    def tree_watch(
        self,
        path: str,
        callback: Callable[[TreeEvent], object],
        existing: bool = False,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> int:
        """Call callback(event) for each change of the node and all below it; the handle for
        cancel_watch().

        Callbacks run one after the other where the handlers of this process run, and may use this
        client; one that blocks otherwise keeps handlers and verbs waiting as a handler does, but no
        heartbeats. Changes come in order and none is missed while the session lasts; over a lost
        connection several of one node may come as one. existing: begin with an event for each node
        there is."""
        check_timeout(timeout_s)
        return self._backend.watch(path, callback, timeout_s, existing)

    def cancel_watch(self, handle: int) -> bool:
        """No callback of that watch begins after this; whether there was one."""
        return self._backend.unwatch(handle)

    def _tree_put(self, path: str, value: str, timeout_s: float) -> None:
        """Add a node, or set it when there is one."""
        for _ in range(CREATE_ATTEMPTS_MAX):
            try:
                self.tree_node_set(path, value, timeout_s=timeout_s)
                return
            except errors.NoSuchNode:
                try:
                    self.tree_node_add(path, value, timeout_s=timeout_s)
                    return
                except errors.NodeExists:
                    continue  # another client was faster
        raise errors.Rejected(
            f"{path!r} was added and deleted {CREATE_ATTEMPTS_MAX} times by others: who owns it?"
        )

    def _get_or_none(self, path: str, timeout_s: float) -> str | None:
        try:
            return self.tree_node_get(path, timeout_s).value
        except errors.NoSuchNode:
            return None

    def _delete_if_there(self, path: str, timeout_s: float) -> bool:
        try:
            self.tree_node_del(path, timeout_s=timeout_s)
        except errors.NoSuchNode:
            return False
        return True

    def _names(self, path: str, timeout_s: float) -> list[str]:
        return [name_of(part) for part in self.tree_node_sub(path, timeout_s)]

    # -- nodes -------------------------------------------------------------------------------------

    def register_node(self, info: CommInfo, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """This session is the node of that rank. Raises NodeExists when another one is."""
        self._ask(timeout_s, "register_node", info.global_rank, list(info.addresses))

    def get_comm_info(self, timeout_s: float = ASK_TIMEOUT_S) -> list[CommInfo]:
        """All nodes, in order of rank."""
        return [
            CommInfo(rank, tuple(addresses))
            for rank, addresses in self._ask(timeout_s, "get_comm_info")
        ]

    def get_comm_info_of(self, rank: int, timeout_s: float = ASK_TIMEOUT_S) -> CommInfo | None:
        """The node of that rank, or None."""
        return next(
            (info for info in self.get_comm_info(timeout_s) if info.global_rank == rank), None
        )

    def watch_node(
        self, callback: Callback, existing: bool = False, timeout_s: float = ASK_TIMEOUT_S
    ) -> int:
        """As tree_watch(), for nodes that come (or change) and go; the last part of an event's path
        is the rank.
        """
        return self.tree_watch("/_node_", callback, existing, timeout_s)

    watch_comm_node = watch_node

    # -- services ----------------------------------------------------------------------------------

    def register_rpc_service(self, api: str, name: str, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """The rpc_id of a service of that api: 0, 1, ..., the same each time."""
        return int(self._ask(timeout_s, "register_rpc_service", api, name))

    def deregister_rpc_service(self, api: str, name: str, timeout_s: float = ASK_TIMEOUT_S) -> bool:
        """Forget a service that has no servers; whether there was one. Raises Rejected while it has
        servers.
        """
        return bool(self._ask(timeout_s, "del_rpc_service_info", api, name))

    del_rpc_service_info = deregister_rpc_service

    def register_server(
        self, api: str, name: str, rank: int, server_id: int = -1, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, int]:
        """(rpc_id, server id) of a server at the node of that rank; -1: the smallest free id. It
        goes with this session.

        Raises Rejected when the id is taken."""
        given, _, rpc_id = self._ask(timeout_s, "register_server", name, server_id, api, rank)
        return rpc_id, given

    def deregister_server(
        self, api: str, name: str, server_id: int, timeout_s: float = ASK_TIMEOUT_S
    ) -> bool:
        """Forget a server; whether there was one."""
        return self._delete_if_there(
            f"/_rpc_/{component(api)}/{component(name)}/{server_id}", timeout_s
        )

    def get_rpc_service_info(
        self, api: str, timeout_s: float = ASK_TIMEOUT_S
    ) -> list[RpcServiceInfo]:
        """All services of that api, sorted by name."""
        return [
            RpcServiceInfo(name, rpc_id, tuple(ServerInfo(*server) for server in servers))
            for name, rpc_id, servers in self._ask(timeout_s, "get_rpc_service_info", api)
        ]

    def get_rpc_service_info_of(
        self, api: str, name: str, timeout_s: float = ASK_TIMEOUT_S
    ) -> RpcServiceInfo | None:
        """One service of that api, or None."""
        return next(
            (
                info
                for info in self.get_rpc_service_info(api, timeout_s)
                if info.rpc_service_name == name
            ),
            None,
        )

    def watch_rpc_service_info(
        self, callback: Callback, existing: bool = False, timeout_s: float = ASK_TIMEOUT_S
    ) -> int:
        """As tree_watch(), for services and servers of every api:
        /_rpc_/<api>/<name>/<server id>.
        """
        return self.tree_watch("/_rpc_", callback, existing, timeout_s)

    # -- ids, locks, barriers, roles ---------------------------------------------------------------

    def generate_id(self, key: str, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """A number larger than any before it of that key, and never the same twice until it is
        reset.

        A master with a journal counts 0, 1, 2, ...; one without begins with the microseconds since
        1970, so that it gives no id again that the master before it gave (as long as the clock of
        its host is not set back)."""
        return int(self._ask(timeout_s, "generate_id", key))

    def count_up(self, key: str, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """0, 1, 2, ... for each key. A master without a journal begins with 0 again when it is
        restarted.
        """
        return int(self._ask(timeout_s, "count_up", key))

    def reset_generate_id(self, key: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Begin anew: with 0, or where the master's ids begin."""
        self._ask(timeout_s, "reset_generate_id", key)

    def acquire_lock(self, name: str, timeout_s: float = ASK_TIMEOUT_S) -> int:
        """Hold a lock until release_lock(), or until this session ends; its token, larger than that
        of any holder before, of this master or of one before it at this address (without a journal:
        as long as the clock of its host is not set back).

        First come, first served. Raises DeadlineExceeded with who holds it, Rejected where this
        thread does already."""
        return self._acquire(name, timeout_s).token

    def _acquire(self, name: str, timeout_s: float) -> _Held:
        here = threading.get_ident()
        held = self._find_held(name)
        if held is not None and held.thread == here:
            raise errors.Rejected(
                f"lock {name!r} is held by this thread already (token {held.token}): "
                "release it first"
            )
        held = _Held(name, int(self._ask(timeout_s, "acquire_lock", name)), here)
        self._held[held] = held
        return held

    def _find_held(self, name: str) -> _Held | None:
        """The lock as this thread acquired it, else as another one did last."""
        here = threading.get_ident()
        latest_first = [held for held in reversed(list(self._held)) if held.name == name]
        return max(latest_first, key=lambda held: held.thread == here, default=None)

    def release_lock(self, name: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Let the next one have it. Raises Rejected when this client does not hold it: never did,
        or lost it.
        """
        self._release(name, self._find_held(name), timeout_s)

    def _release(self, name: str, held: _Held | None, timeout_s: float) -> None:
        check_timeout(timeout_s)
        if held is None or self._held.pop(held, None) is None:
            raise errors.Rejected(f"lock {name!r} is not held by this client: acquire it first")
        try:
            was_held = self._ask(timeout_s, "release_lock", name, held.token)
        except errors.RpcError:
            self._held[held] = held  # for another try: as far as anybody knows we hold it
            raise
        if not was_held:
            raise errors.Rejected(
                f"lock {name!r} was lost before its release (token {held.token}): "
                f"the session at the master at {self.endpoint} "
                "ended meanwhile, and others may have held it; hand the token to what the lock "
                "protects, to fence that off"
            )

    @contextmanager
    def lock(self, name: str, timeout_s: float = ASK_TIMEOUT_S) -> Iterator[int]:
        """with client.lock("name", timeout_s=10.0) as token: see acquire_lock(). The release has
        its own time.
        """
        held = self._acquire(name, timeout_s)
        try:
            yield held.token
        finally:
            self._release(name, held, ASK_TIMEOUT_S)

    def barrier(
        self,
        name: str,
        count: int,
        timeout_s: float = ASK_TIMEOUT_S,
        member: str = "",
        expected: Sequence[str] = (),
    ) -> None:
        """Wait until `count` members have come here. The name can be used again, with another
        count, at once.

        member    who this is, in others' errors; "": its rank if it has one, else its label
        expected  who all should come: then DeadlineExceeded says who is missing. It does so too
                  where all nodes of the job, by their ranks, are to come; else it says who came
        """
        self._ask(timeout_s, "barrier", name, count, member, list(expected))

    def alloc_role_rank(
        self, role: str, count: int, rank: int, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, list[int]]:
        """Wait until `count` nodes took that role; (the place of `rank` among them, all their ranks
        in order of number).
        """
        everyone = list(self._ask(timeout_s, "alloc_role_rank", role, count, rank))
        return everyone.index(rank), everyone

    # -- the state of the task ---------------------------------------------------------------------

    def set_task_ready(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """The task is ready, for all to see."""
        self._tree_put("/_task_state_/ready", "", timeout_s)

    def get_task_ready(self, timeout_s: float = ASK_TIMEOUT_S) -> bool:
        """Whether somebody said so."""
        return self._get_or_none("/_task_state_/ready", timeout_s) is not None

    def wait_task_ready(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Wait until somebody says so. Raises DeadlineExceeded."""
        self.tree_wait("/_task_state_/ready", timeout_s)

    def set_task_failed(self, message: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """The task has failed, and why."""
        self._tree_put("/_task_state_/failed", message, timeout_s)

    def get_task_failed(self, timeout_s: float = ASK_TIMEOUT_S) -> str | None:
        """Why the task has failed; None when it has not."""
        return self._get_or_none("/_task_state_/failed", timeout_s)

    def watch_task_fail(
        self, callback: Callable[[str], object], timeout_s: float = ASK_TIMEOUT_S
    ) -> int:
        """Call callback(message) when the task fails, at once when it has; the handle."""

        def failed(event: TreeEvent) -> None:
            if event.value is not None:
                callback(event.value)

        return self.tree_watch("/_task_state_/failed", failed, True, timeout_s)

    def _role(self, role: str) -> str:
        return f"/_task_state_/role {component(role)}"

    def add_task_node(self, role: str, value: str = "", timeout_s: float = ASK_TIMEOUT_S) -> str:
        """This session does the task in that role, until del_task_node() or its end; the name of
        its node.
        """
        with suppress(errors.NodeExists):  # the role's first one made it
            self.tree_node_add(self._role(role), timeout_s=timeout_s)
        return self.tree_node_gen(self._role(role), value, True, timeout_s)

    def del_task_node(self, role: str, name: str, timeout_s: float = ASK_TIMEOUT_S) -> bool:
        """It does so no longer; whether it did."""
        return self._delete_if_there(f"{self._role(role)}/{name}", timeout_s)

    def get_task_node(self, role: str, timeout_s: float = ASK_TIMEOUT_S) -> list[str]:
        """The names of all in that role, in the order they came."""
        try:
            return self.tree_node_sub(self._role(role), timeout_s)
        except errors.NoSuchNode:
            return []

    def watch_task_node(
        self,
        role: str,
        callback: Callback,
        existing: bool = False,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> int:
        """As tree_watch(), for who takes and leaves that role."""
        return self.tree_watch(self._role(role), callback, existing, timeout_s)

    # -- contexts and models -----------------------------------------------------------------------

    def add_context(self, storage_id: int, context: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Describe a storage. Raises NodeExists."""
        self.tree_node_add(f"/_context_/{storage_id}", context, timeout_s=timeout_s)

    def set_context(self, storage_id: int, context: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Describe it anew. Raises NoSuchNode."""
        self.tree_node_set(f"/_context_/{storage_id}", context, timeout_s=timeout_s)

    def get_context(self, storage_id: int, timeout_s: float = ASK_TIMEOUT_S) -> str | None:
        """Its description, or None."""
        return self._get_or_none(f"/_context_/{storage_id}", timeout_s)

    def delete_storage(self, storage_id: int, timeout_s: float = ASK_TIMEOUT_S) -> bool:
        """Forget it; whether it was known."""
        return self._delete_if_there(f"/_context_/{storage_id}", timeout_s)

    def get_storage_list(self, timeout_s: float = ASK_TIMEOUT_S) -> list[int]:
        """The ids of all, sorted."""
        return [int(name) for name in self.tree_node_sub("/_context_", timeout_s)]

    def add_model(self, name: str, model: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Describe a model. Raises NodeExists."""
        self.tree_node_add(f"/_model_/{component(name)}", model, timeout_s=timeout_s)

    def set_model(self, name: str, model: str, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Describe it anew. Raises NoSuchNode."""
        self.tree_node_set(f"/_model_/{component(name)}", model, timeout_s=timeout_s)

    def get_model(self, name: str, timeout_s: float = ASK_TIMEOUT_S) -> str | None:
        """Its description, or None."""
        return self._get_or_none(f"/_model_/{component(name)}", timeout_s)

    def del_model(self, name: str, timeout_s: float = ASK_TIMEOUT_S) -> bool:
        """Forget it; whether it was known."""
        return self._delete_if_there(f"/_model_/{component(name)}", timeout_s)

    def get_model_names(self, timeout_s: float = ASK_TIMEOUT_S) -> list[str]:
        """Of all models, sorted."""
        return self._names("/_model_", timeout_s)

    def watch_model(
        self,
        name: str,
        callback: Callback,
        existing: bool = False,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> int:
        """As tree_watch(), for one model."""
        return self.tree_watch(f"/_model_/{component(name)}", callback, existing, timeout_s)
