"""What a server of placed tables answers: requests that name a partition and its epoch, each at the
partition it holds.

    of workers        pull, pull_dense, their _versioned, apply, apply_replicated, create_table,
                      statistics, workers, applied_of, began, checkpoint_...: the primary's
    of other servers  copy_begin, copy_read, copy_end, copy_follows: the primary's; follow: a
                      replica's

Workers that were made without elastic=True name no partition. Before all else they ask `standing`,
or one of create_table, statistics, workers and checkpoint_...: ConfigError tells them.

A request for what this server does not hold, at that epoch and in that role, raises Moved. So does
every request to a primary whose lease at the master may be over: another one may have been promoted
meanwhile, and this one must not acknowledge what that one lacks.

In the reactor's thread, all of it; reconciler.py, in the control loop, changes what is held through
that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NoReturn

import msgspec

from prpc_engine.errors import ConfigError
from prpc_engine.kv.checkpoint.manifest import Busy
from prpc_engine.kv.replication.replica import Beginning, Moved, Replica, Send
from prpc_engine.kv.schema.placement import Placed, Placement
from prpc_engine.kv.server.server import TableShard
from shard import runtime

CHECKPOINT = tuple(name for name in dir(TableShard) if name.startswith("checkpoint_"))
NOT_PLAIN = "these tables are elastic, held by ElasticServers: TableWorker(elastic=True) is needed"


class PartitionRouter:
    """A partition router answers what a server of placed tables is asked, at the partition meant.

    Owned by one ElasticServer; all of it runs in the reactor's thread. Raises Moved for a partition
    that is not held here, at that epoch and in that role, or while the lease at the master may be
    over. make_shard: an empty partition; changed: is called when the reconciler should look; clock:
    gives seconds.
    """

    def __init__(
        self,
        make_shard: Callable[[], TableShard],
        changed: Callable[[], None],
        clock: Callable[[], float] = runtime.now,
    ) -> None:
        self.make_shard = make_shard
        self.server_id = -1  # before it is known who we are, and before anything is held
        self.send: Send | None = None
        self.hosted: dict[int, Replica] = {}
        self.requests_refused = 0  # told to go elsewhere
        self._changed = changed
        self._clock = clock
        self._lease_end = 0.0
        self._placement: Placement | None = None
        self._version = -1
        self._is_closed = False

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What to serve."""
        own: list[Callable[..., Any]] = [
            self.pull,
            self.pull_dense,
            self.pull_versioned,
            self.pull_dense_versioned,
            self.apply,
            self.apply_replicated,
            self.apply_durable,
            self.standing,
            self.applied_of,
            self.began,
            self.copy_begin,
            self.copy_read,
            self.copy_follows,
            self.copy_end,
            self.follow,
        ]
        asked_first = {
            each.__name__: each for each in (self.create_table, self.statistics, self.workers)
        } | {name: partial(self._checkpoint, name) for name in CHECKPOINT}
        return {each.__name__: each for each in own} | {
            name: _of_partition(method) for name, method in asked_first.items()
        }

    # -- of workers --------------------------------------------------------------------------------

    def _served(self, partition: int, epoch: int) -> Replica:
        """As the primary at that epoch."""
        hosted = self.hosted.get(partition)
        if (
            hosted is None
            or hosted.placed.epoch != epoch
            or not hosted.is_primary
            or self._clock() >= self._lease_end
        ):
            self.requests_refused += 1
            raise Moved(self._why(partition, epoch, hosted))
        return hosted

    def _why(self, partition: int, epoch: int, hosted: Replica | None) -> str:
        if hosted is None:
            return f"partition {partition} is not held by server {self.server_id}"
        if self._clock() >= self._lease_end:
            return (
                f"server {self.server_id} has lost the master for its lease, "
                "and serves nothing until it is back"
            )
        role = "primary" if hosted.is_primary else "no primary"
        return (
            f"partition {partition}: server {self.server_id} is {role} of it at epoch "
            f"{hosted.placed.epoch}, asked was {epoch}"
        )

    def pull(self, partition: int, epoch: int, table: str, keys: Any) -> Any:
        """As TableShard's."""
        return self._served(partition, epoch).shard.pull(table, keys)

    def pull_dense(self, partition: int, epoch: int, table: str) -> Any:
        """As TableShard's."""
        return self._served(partition, epoch).shard.pull_dense(table)

    def pull_versioned(self, partition: int, epoch: int, table: str, keys: Any) -> Any:
        """As TableShard's."""
        return self._served(partition, epoch).shard.pull_versioned(table, keys)

    def pull_dense_versioned(self, partition: int, epoch: int, table: str) -> Any:
        """As TableShard's."""
        return self._served(partition, epoch).shard.pull_dense_versioned(table)

    def apply(self, partition: int, epoch: int, *push: Any) -> Any:
        """As TableShard's."""
        return self._served(partition, epoch).apply(*push)

    def apply_replicated(self, partition: int, epoch: int, *push: Any) -> Any:
        """As apply(), answered once a replica has it, and every one that there is."""
        return self._served(partition, epoch).apply_replicated(*push)

    def apply_durable(self, partition: int, epoch: int, *push: Any) -> Any:
        """As TableShard's."""
        return self._served(partition, epoch).apply_durable(*push)

    def standing(self) -> NoReturn:
        """What a worker of plain tables asks before it creates one."""
        raise ConfigError(NOT_PLAIN)

    def create_table(self, partition: int, epoch: int, spec: dict[str, Any]) -> Any:
        """As TableShard's; replicas have the table when it is answered. ConfigError also for a
        consistency.
        """
        return self._served(partition, epoch).create_table(spec)

    def statistics(self, partition: int, epoch: int) -> dict[str, dict[str, int]]:
        """As TableShard's."""
        return self._served(partition, epoch).shard.statistics()

    def workers(self, partition: int, epoch: int) -> list[list[Any]]:
        """As TableShard's."""
        return self._served(partition, epoch).shard.workers()

    def applied_of(self, partition: int, epoch: int, client: int) -> int:
        """The greatest number of a push of that worker which is in."""
        return self._served(partition, epoch).shard.ledger.highest(client)

    def began(self, partition: int, epoch: int, since: int) -> dict[str, int]:
        """The least version of each table with which a primary after the epoch `since` began."""
        return self._served(partition, epoch).began_since(since)

    def _checkpoint(self, method: str, partition: int, epoch: int, *arguments: Any) -> Any:
        hosted = self._served(partition, epoch)
        if method == "checkpoint_enter" and any(
            stream.outgoing is not None for stream in hosted.streams.values()
        ):
            raise Busy(f"partition {partition} is being copied to another server")
        # its heir has what was there before
        if method == "checkpoint_swap" and hosted.is_handing_over:
            raise Moved(f"partition {partition} is being handed over: restore again in a while")
        answer = getattr(hosted.shard, method)(*arguments)
        if method == "checkpoint_swap":
            hosted.replace_all(arguments[0], arguments[2] if len(arguments) > 2 else -1)
        if method == "checkpoint_settled":
            return hosted.is_settled(*arguments)
        return answer

    # -- of other servers --------------------------------------------------------------------------

    def copy_begin(self, partition: int, epoch: int, server: int) -> dict[str, Any]:
        """Cut the partition for a server that is joining: what there is to read."""
        return self._served(partition, epoch).begin_copy(server)

    def copy_read(self, partition: int, epoch: int, server: int, copy: int) -> Any:
        """The next piece of the copy that copy_begin has told the number of: table, first row,
        columns; None: that was all.
        """
        return self._served(partition, epoch).read_copy(server, copy)

    def copy_follows(self, partition: int, epoch: int, server: int) -> bool:
        """Whether that server, which has had it all, is still sent what is applied."""
        stream = self._served(partition, epoch).streams.get(server)
        return stream is not None and stream.is_live

    def copy_end(self, partition: int, epoch: int, server: int, copy: int) -> None:
        """That server has it all, and follows."""
        self._served(partition, epoch).end_copy(server, copy)

    def follow(self, partition: int, epoch: int, number: int, method: str, *arguments: Any) -> Any:
        """One change of a partition, of the primary's at that epoch."""
        hosted = self.hosted.get(partition)
        if hosted is None or hosted.placed.epoch != epoch or hosted.is_primary:
            raise Moved(self._why(partition, epoch, hosted))
        return hosted.follow(number, method, *arguments)

    # -- of the reconciler -------------------------------------------------------------------------

    def learn(self, placement: Placement, version: int, lease_end: float) -> None:
        """What the master says: `version` of its node, as of a moment after which the lease lasts
        until `lease_end` at least, by the clock of this host.
        """
        self._lease_end = max(self._lease_end, lease_end)
        if version < self._version:  # the reconciler's two threads may pass each other
            return
        self._placement, self._version = placement, version
        for index, hosted in list(self.hosted.items()):
            placed = placement.partitions[index]
            if placed.loading and placed.epoch == hosted.placed.epoch:
                continue  # the master has not heard yet that it is loaded
            if (
                placed.loading
                or self.server_id not in placed.holders
                or self._is_to_be_filled(hosted, placed)
            ):
                del self.hosted[index]
                hosted.leave()
            elif placed != hosted.placed:
                hosted.learn(placed)

    def _is_to_be_filled(self, hosted: Replica, placed: Placed) -> bool:
        """Whether what is here does not count any more: the primary may have less, or has not been
        able to send more. That of a spare is kept until it is filled."""
        before, me = hosted.placed, self.server_id
        if me in placed.spares:
            return False
        return me in placed.joining and (placed.epoch != before.epoch or me in before.replicas)

    def lacks(self, index: int) -> bool:
        """Whether this server is to serve that partition, by the newest placement known here, and
        has nothing of it.
        """
        assert self._placement is not None
        placed = self._placement.partitions[index]
        return (
            placed.primary == self.server_id
            and not placed.loading
            and index not in self.hosted
            and not self._is_closed
        )

    def put(
        self,
        index: int,
        epoch: int,
        shard: TableShard,
        applied: int,
        step: int,
        beginnings: Sequence[Beginning] = (),
    ) -> None:
        """Hold a partition that was filled or loaded in that epoch, from the checkpoint of `step`.
        beginnings: of who it was filled by. Moved: there is another.
        """
        assert self.send is not None
        assert self._placement is not None
        placed = self._placement.partitions[index]
        if placed.epoch != epoch or self.server_id not in placed.holders or self._is_closed:
            raise Moved(
                f"partition {index} is not to be held by server {self.server_id} at epoch {epoch} "
                "any more"
            )
        before = self.hosted.get(index)
        if before is not None:
            before.leave()
        placed = msgspec.structs.replace(placed, loading=False, step=step)
        self.hosted[index] = Replica(
            index, self.server_id, placed, shard, applied, self.send, self._changed, beginnings
        )

    def close(self) -> None:
        """Hold nothing more: what waits here, and what still comes, is asked of whoever serves it
        next.
        """
        self._is_closed = True
        while self.hosted:
            self.hosted.popitem()[1].leave("this server closes")


def _of_partition(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that takes (partition, epoch, ...). A request without these comes from a worker
    that was made without elastic=True, and raises ConfigError.
    """

    def answer(*arguments: Any) -> Any:
        if len(arguments) < 2 or not isinstance(arguments[0], int):
            raise ConfigError(NOT_PLAIN)
        return method(*arguments)

    return wraps(method)(answer)
