"""Tables that outlive their servers: a service of servers that come and go, whose partitions move,
with copies.

    server:  ElasticServer(service, partitions=8, replicas=1, servers=3)  in each of three
                                                                          processes, or more
    worker:  TableWorker(service, elastic=True, ack="replicated")

The walk of a push: worker -> lane -> host -> hosted -> TableShard, ledger -> stream -> host of a
replica -> hosted. Who holds what is one value in the master's tree (placement.py), and the
reconciler of each server sees to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from prpc_engine.client.retry import AT_ONCE, RetryPolicy
from prpc_engine.errors import ConfigError, DeadlineExceeded
from prpc_engine.kv.checkpoint.files import checked_folder
from prpc_engine.kv.replication.partition_router import PartitionRouter
from prpc_engine.kv.replication.reconciler import Calls, Reconciler
from prpc_engine.kv.replication.replication_log import FORWARD_TIMEOUT_S
from prpc_engine.kv.schema import placement as places
from prpc_engine.kv.schema.placement import Placement
from prpc_engine.kv.schema.schema import Schemas
from prpc_engine.kv.schema.tree import MasterTree, PlacementNode
from prpc_engine.kv.server.server import TableShard
from prpc_engine.kv.table.partition import PARTITIONS_MAX
from prpc_engine.kv.table.spec import checked_count
from prpc_engine.service.service import SERVERS_PATH
from prpc_engine.settings.cluster_spec import PS
from shard import Future, Waiter

REPLICAS_MAX = 8
DRAIN_TIMEOUT_S = 600.0  # for hundreds of GB to move


class ElasticClient(Calls, Protocol):
    """What an ElasticServer needs of the RpcClient of its own service, with which its servers call
    each other.
    """

    def close(self) -> None: ...


class ElasticService(Protocol):
    """What an ElasticServer needs of its RpcService: the master's tree, its lease in seconds, a
    server, a client, a way into the reactor's thread, and who turns that while a thread waits.
    """

    shards: int

    def take_role(self, role: str, without_shards: str = "") -> None: ...

    @property
    def lease_s(self) -> float: ...

    @property
    def master_client(self) -> MasterTree: ...

    @property
    def driver(self) -> Waiter: ...

    def in_reactor(self, function: Callable[[Future], object]) -> Future: ...

    def create_server(
        self, name: str, served: object, server_id: int = -1, *, inline: bool = False
    ) -> Any: ...

    def create_client(
        self,
        name: str,
        expected_servers: int = 1,
        timeout_s: float = 10.0,
        *,
        retry: RetryPolicy | None = None,
    ) -> Any: ...


@dataclass(frozen=True)
class ElasticStatistics:
    """A snapshot of one ElasticServer: which partitions it serves and copies, and how far its
    replicas are behind. The first thing to look at when pushes with ack="replicated" are slow.
    """

    primaries: tuple[int, ...]  # partitions that it serves
    copies: tuple[int, ...]  # partitions that it has, or is getting, a copy of
    # changes that some server which follows it has not answered yet, of the partition where that is
    # most
    lag: int
    unanswered: int  # pushes that wait to be replicated, or to be in a checkpoint
    hand_overs: int  # partitions that it gave to their heirs
    requests_refused: int  # told to go to another server
    # incarnations of workers, for newer ones: what they sent again would be applied again
    clients_forgotten: int


class ElasticServer:
    """Holds its share of the partitions of `name`. A context manager; close() it before the
    service.

    partitions  how many pieces each table is cut into: several for each server that there may be.
                Only the first server's counts
    replicas    copies of each beside the primary's: so many servers may die at once, and nothing
                replicated is lost
    servers     the first placement waits for so many, so that nothing moves while they start
    checkpoint  the absolute path of a folder that all servers see: a partition that no server holds
                any more is loaded from its newest whole checkpoint
    checkpoint_root  workers may save to folders below it only, and `checkpoint` is below it; None:
                     wherever this process may write

    The service has no shards: what keeps the partitions in place stands beside one reactor, that of
    the process (reconciler.py). Start a process for each core instead. One that dies is
    noticed as the service's lease says, on the master's host at once; start another one in its
    place, and it takes its share. Raises ConfigError.
    """

    def __init__(
        self,
        service: ElasticService,
        name: str = "kv",
        *,
        partitions: int = 8,
        replicas: int = 0,
        servers: int = 1,
        checkpoint: str | None = None,
        checkpoint_root: str | None = None,
    ) -> None:
        checked_count(
            f"elastic tables {name!r}: partitions", partitions, at_least=1, at_most=PARTITIONS_MAX
        )
        checked_count(
            f"elastic tables {name!r}: replicas", replicas, at_least=0, at_most=REPLICAS_MAX
        )
        checked_count(
            f"elastic tables {name!r}: servers", servers, at_least=1, at_most=PARTITIONS_MAX
        )
        # here: a server that cannot load a partition would be given some, and never serve them
        if checkpoint_root is not None:
            checked_folder(checkpoint_root, None)
        if checkpoint is not None:
            checked_folder(checkpoint, checkpoint_root)
        service.take_role(PS, "elastic tables have none: start a process for each core instead")
        if service.shards:
            raise ConfigError(
                f"elastic tables {name!r}: the service has {service.shards} shards, "
                "none is allowed: start processes"
            )
        self.name = name
        self._pid = os.getpid()

        def first(alive: list[int]) -> Placement | None:
            return places.first(partitions, replicas, alive) if len(alive) >= servers else None

        node = PlacementNode(service.master_client, name, SERVERS_PATH)
        schemas = Schemas(service.master_client, name)
        self._host = PartitionRouter(lambda: TableShard(checkpoint_root), self._look)
        server_id = service.master_client.count_up(f"tables {name}") + 1
        self._tree = service.master_client
        # a server without its reconciler would be given partitions that it never serves
        with ExitStack() as closing:
            self.server = service.create_server(
                name, self._host.methods(), server_id=server_id, inline=True
            )
            closing.callback(self.server.close)
            self._client = client = service.create_client(name, retry=AT_ONCE)
            closing.callback(client.close)
            self._reconciler = Reconciler(
                node,
                self._host,
                client,
                service.in_reactor,
                service.lease_s,
                first,
                checkpoint,
                schemas.of,
                service.driver,
            )
            self._host.server_id = server_id
            self._host.send = lambda to, method, *args: client.submit_to(
                to, method, *args, timeout_s=FORWARD_TIMEOUT_S
            )
            self._watches = list[int]()
            # what came before is not missed: the reconciler is started later, and looks first
            for path in (node.path, node.servers_path):
                self._watches.append(self._tree.tree_watch(path, self._reconciler.look))
                closing.callback(self._tree.cancel_watch, self._watches[-1])
            closing.pop_all()
        self._reconciler.start()

    @property
    def server_id(self) -> int:
        """Never given to another server of this name, as long as the master remembers."""
        return self._host.server_id

    def _look(self) -> None:
        self._reconciler.look()

    def statistics(self) -> ElasticStatistics:
        """A snapshot."""
        hosted = list(self._host.hosted.values())
        # once: the reactor goes on meanwhile
        roles = [(each.index, each.is_primary) for each in hosted]
        # first: both only grow
        acked = [(stream.acked, each) for each in hosted for stream in list(each.streams.values())]
        return ElasticStatistics(
            primaries=tuple(sorted(index for index, is_primary in roles if is_primary)),
            copies=tuple(sorted(index for index, is_primary in roles if not is_primary)),
            lag=max((each.applied - number for number, each in acked), default=0),
            unanswered=sum(each.unanswered for each in hosted),
            hand_overs=self._reconciler.hand_overs,
            requests_refused=self._host.requests_refused,
            clients_forgotten=sum(each.shard.ledger.senders_forgotten for each in hosted),
        )

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Let the others take over all that is held here; this server can be closed then. Raises
        DeadlineExceeded.

        The only server there is keeps what it has.
        """
        self._reconciler.drain()
        me = self.server_id
        if not self._reconciler.wait_until(
            lambda placement: me in placement.draining and not placement.held_by(me), timeout_s
        ):
            placement = self._reconciler.placement
            left = placement.held_by(me) if placement is not None else []
            raise DeadlineExceeded(
                f"server {me} of {self.name!r} still holds partitions {left} after {timeout_s} s; "
                "are there other servers? "
                "Wait again, or allow a larger timeout_s"
            )

    def close(self) -> None:
        """Serve no more. What is not held by another server comes from a checkpoint then: drain()
        first. Again, and in a fork: does nothing.

        A master that is away is not waited for longer than RpcServer.close() does.
        """
        if self._pid != os.getpid():
            return
        for watch in self._watches:
            self._tree.cancel_watch(watch)
        # what it asks of the master and what close() tells it wait side by side
        self._reconciler.stop()
        self.server.close()
        self._reconciler.join()
        self._client.close()

    def __enter__(self) -> ElasticServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
