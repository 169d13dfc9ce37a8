"""What tables use of a service: prpc_engine.RpcService, or local.LocalService."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from prpc_engine.client.retry import RetryPolicy
from prpc_engine.errors import ConfigError
from prpc_engine.kv.schema.tree import MasterTree
from shard import Future, runtime


class TableClient(Protocol):
    """What is used of the client that RpcService.create_client returns."""

    @property
    def server_ids(self) -> tuple[int, ...]:
        """The live servers of the service, ascending."""

    def submit_to(
        self, server_id: int, method: str, /, *args: Any, timeout_s: float = ...
    ) -> Future:
        """Call a method of that server."""


class CallingService(Protocol):
    """What a TableWorker needs of its RpcService: a client of the servers, the master's tree, and
    the driver that a waiting thread turns.
    """

    def create_client(
        self,
        name: str,
        /,
        *,
        expected_servers: int = 1,
        timeout_s: float = ...,
        retry: RetryPolicy | None = None,
    ) -> TableClient:
        """Wait until that many servers of the service are there."""

    @property
    def master_client(self) -> MasterTree:
        """The master's tree, which knows tables and their epochs. Raises ConfigError where there is
        none.
        """

    @property
    def driver(self) -> Any:
        """Who makes progress while a thread waits for one."""


class ServingService(Protocol):
    """What a TableServer needs of its RpcService: a server, the number of its shards, and the
    master's tree.
    """

    def take_role(self, role: str, without_shards: str = "") -> None:
        """Let the variables of that role count for the service."""

    @property
    def shards(self) -> int:
        """Shard processes of this service; 0 is inline."""

    @property
    def master_client(self) -> MasterTree:
        """The master's tree; ConfigError: there is none."""

    def create_server(
        self,
        name: str,
        obj: object,
        /,
        *,
        server_id: int = -1,
        sharded: bool = False,
        inline: bool = False,
    ) -> Any:
        """Expose obj's public methods; sharded: obj is a factory, called once in every shard.
        inline: they run in whatever thread turns the reactor. server_id: -1, the smallest that is
        free; NodeExists: another server has it.
        """


_ALONE = runtime.RLock()  # of tables without a master, which are all in this process


def alone(service: CallingService, name: str, timeout_s: float) -> AbstractContextManager[object]:
    """A lock of that name at the master, waited for at most `timeout_s` seconds."""
    try:
        return service.master_client.lock(name, timeout_s)
    except ConfigError:
        return _ALONE
