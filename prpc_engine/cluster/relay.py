"""Communication shards of a task: processes that answer other tasks' receives over tcp, each with its own connections and slab.

    what                                     runs in
    the table, send(), recv(), hello         the application
    a receive that comes over shared memory  the application: a hop would gain nothing
    a receive that comes over tcp            a shard: it accepts, decodes, asks the application over shared memory, and answers
    what this task receives from others      the application, over connections of its own

A shard writes a large tensor to its socket out of the application's slab, which lends it. Other tasks are dealt out at hello, by
a hash of their names, over the shards that live; when none does, the application's own tcp port is offered. One that died is not
started again.

A shard is a spawned process: who asks for some makes the Server under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prpc_engine import slab
from prpc_engine.call import Call
from prpc_engine.cluster.control import ABORT, DATA_TARGET, RECEIVE
from prpc_engine.cluster.errors import typed
from prpc_engine.config import TlsSettings, allow_from
from prpc_engine.context import calling_peer
from prpc_engine.errors import ConfigError, RemoteError
from prpc_engine.master.protocol import FixedRoute
from prpc_engine.message import method_key
from prpc_engine.node import Node
from prpc_engine.peer import Peer
from prpc_engine.server import Server
from shard import CoreLocks, Driver, Limits, ShardGroup, bind_memory, pin, this_shard

OPEN_TIMEOUT_S = 30.0  # for the shards to listen, on a machine that is starting a whole job
CORES_FOLDER = Path(tempfile.gettempdir()) / "prpc-cpuset"  # of the locks that keep two tasks of this host from one core


@dataclass(frozen=True)
class RelaySettings:
    """What a shard must know."""

    task: str
    application: tuple[str, ...]  # addresses of the task's data node
    secret: bytes = field(repr=False)
    limits: Limits
    host: str
    tls: TlsSettings | None
    cores: tuple[int, ...]  # where each shard is bound; none: they are not


class Relays:
    """The communication shards of one task, on the application's side. Owned by its Server. Raises ConfigError, ShardError."""

    def __init__(self, count: int, polling: bool, wants_cores: bool, driver: Driver) -> None:
        self._locks = CoreLocks.take(count, CORES_FOLDER) if wants_cores else CoreLocks((), ())
        self.addresses: list[str] = []
        try:
            self._group = ShardGroup(count, polling=polling, pin=False, driver=driver)
        except ValueError as error:
            self._locks.close()
            raise ConfigError(f"communication shards: {error}") from error
        except BaseException:
            self._locks.close()
            raise

    def listen(
        self, task: str, application: Sequence[str], secret: bytes, limits: Limits, host: str, tls: TlsSettings | None
    ) -> None:
        """Have every shard listen, and connect to the task's data node."""
        settings = RelaySettings(task, tuple(application), secret, limits, host, tls, self._locks.cores)
        self.addresses = self._group.map(open_relay, settings, timeout_s=OPEN_TIMEOUT_S)

    def living(self) -> list[str]:
        """The tcp addresses of the shards that live."""
        shards = self._group.statistics().shards
        return [address for address, one in zip(self.addresses, shards, strict=True) if one.alive]

    def close(self) -> None:
        """End the shards, and let others have their cores."""
        self._group.close()
        self._locks.close()


# -- in a shard ----------------------------------------------------------------------------------------------------------


class _Relay:
    """Asks the application what others ask here. Lives as long as its shard."""

    def __init__(self, settings: RelaySettings) -> None:
        shard = this_shard()
        if settings.cores:
            pin(settings.cores[shard.index])
            bind_memory(settings.cores[shard.index])
        slab.use_slab(shard.slab)
        self.node = Node(
            shard.reactor, None, shard.slab, settings.secret, settings.limits, ("shm", "tcp"), settings.host, 0, settings.tls
        )
        shard.at_stop(self.node.close)
        self._application = self.node.peer_at(settings.application, OPEN_TIMEOUT_S, settings.task)
        self._route = FixedRoute(DATA_TARGET, settings.task)
        self._under_way: defaultdict[Peer | None, set[Call]] = defaultdict(set)
        self.node.on_peer_lost = self._peer_lost
        methods = {RECEIVE: self.receive, ABORT: self.abort}
        self.node.servers[DATA_TARGET] = Server("data", shard.index, DATA_TARGET, methods, allow=allow_from(None))

    async def receive(self, *arguments: Any) -> Any:
        """See Server of the cluster, in whose name this answers."""
        return await self._ask(RECEIVE, arguments)

    async def abort(self, *arguments: Any) -> Any:
        """The same."""
        return await self._ask(ABORT, arguments)

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        asker = calling_peer()
        # Its deadline is that of who asks us (context.py).
        call = self._application.request(self._route, method, method_key(method), arguments, None, True)
        self._under_way[asker].add(call)
        try:
            return await call
        except RemoteError as error:
            raise typed(error) from None
        finally:
            call.cancel()  # when we are cancelled ourselves
            self._under_way[asker].discard(call)

    def _peer_lost(self, peer: Peer) -> None:
        for call in list(self._under_way.pop(peer, ())):
            call.withdraw()
            call.set_result([])  # nobody is there to hear it


_relay: _Relay | None = None


def open_relay(settings: RelaySettings) -> str:
    """Make this shard's relay: the address that it listens at, "tcp://host:port"."""
    global _relay
    _relay = _Relay(settings)
    return f"tcp://{_relay.node.address('tcp')}"
