"""The service in one process: no transport, no threads; a call runs in its caller, when it is
submitted.

It keeps the contract of prpc_engine.RpcService as far as key-value tables use it: arguments arrive
read-only, results are the caller's, what a handler raises arrives as RemoteError. For trying out
and testing what trains on a TableWorker.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from prpc_engine.client.retry import RetryPolicy
from prpc_engine.errors import ConfigError, NoServer, RemoteError
from prpc_engine.kv.schema.tree import MasterTree
from shard import Future, runtime

HANDLER_S_MAX = 600.0  # of one wait of an `async def` handler: for the disk


def _ran(call: Callable[[], Any]) -> Future:
    """The outcome of a call that runs now."""
    done = Future()
    try:
        done.set_result(_received(call()))
    except Exception as error:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        text = f"the handler raised {name}: {error}"
        done.set_error(
            RemoteError(text, type_name=name, remote_message=str(error), remote_traceback="")
        )
    return done


class LocalService:
    """`servers`: the objects offered under each name. `calls`: what was sent, (server id, method,
    args, timeout_s).
    """

    def __init__(self, shards: int = 0) -> None:
        self.shards = shards
        self.servers: dict[str, list[object]] = {}
        self.calls: list[tuple[int, str, tuple[Any, ...], float]] = []

    def take_role(self, role: str, without_shards: str = "") -> None:
        """No process and no thread of its own: no variable counts here."""

    def create_server(
        self,
        name: str,
        obj: object,
        *,
        server_id: int = -1,
        sharded: bool = False,
        inline: bool = False,
    ) -> object:
        """Offer obj, or with `sharded` what the factory obj makes for each shard, behind those that
        there are.
        """
        if sharded:
            assert callable(obj)
            self.servers.setdefault(name, []).extend(obj() for _ in range(self.shards))
        else:
            self.servers.setdefault(name, []).append(obj)
        return obj

    @property
    def master_client(self) -> MasterTree:
        """There is no master here: elastic tables need an RpcService."""
        raise ConfigError("elastic tables need a master: use prpc_engine.RpcService")

    @property
    def driver(self) -> Any:
        """Nobody waits here."""
        raise ConfigError("elastic tables need a driver: use prpc_engine.RpcService")

    def create_client(
        self,
        name: str,
        *,
        expected_servers: int = 1,
        timeout_s: float = 10.0,
        retry: RetryPolicy | None = None,
    ) -> LocalClient:
        """A client of the servers there are; NoServer when they are too few, as none can come while
        we wait. No call is tried again, whatever `retry` says: it cannot fail to arrive."""
        servers = self.servers.get(name, [])
        if len(servers) < expected_servers:
            raise NoServer(
                f"{len(servers)} of {expected_servers} servers of {name!r} after {timeout_s} s"
            )
        return LocalClient(self, servers)


class LocalClient:
    """The client of a LocalService: calls methods of servers in this process at once, in the
    calling thread, with arguments as they would arrive over the wire.
    """

    FIRST_ID = 11  # ids are names, not positions: nobody may count on 0

    def __init__(self, service: LocalService, servers: list[object]) -> None:
        self._service = service
        self._servers = {self.FIRST_ID + i: server for i, server in enumerate(servers)}

    @property
    def server_ids(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(self._servers))

    def submit_to(self, server_id: int, method: str, *args: Any, timeout_s: float = 30.0) -> Future:
        """Run the method now."""
        self._service.calls.append((server_id, method, args, timeout_s))
        handler = getattr(self._servers[server_id], method)
        return _ran(lambda: handler(*(_received(arg) for arg in args)))


def _received(value: Any) -> Any:
    """A copy, as of something that came over a wire; of an `async def` handler's coroutine, what it
    returns.
    """
    if inspect.iscoroutine(value):
        value = run_to_end(value)
    value = copy.deepcopy(value)
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    return value


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it to its end, blocking where it awaits what another thread completes; TimeoutError when
    that takes HANDLER_S_MAX.
    """
    while True:
        try:
            awaited = coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        done = runtime.Event()  # the thread sleeps: no reactor runs that coroutine's future
        awaited.when_done(lambda _, done=done: done.set())
        if not done.wait(HANDLER_S_MAX):
            coroutine.close()
            raise TimeoutError(
                f"a handler has waited for {HANDLER_S_MAX} s; what it waits for goes on"
            )
