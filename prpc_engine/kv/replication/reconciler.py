"""What keeps an elastic server's partitions where the placement wants them. Two threads of each
server; the reactor waits for neither.

    reconciler  each look: reads the placement and who lives, changes what plan() says (one of all
                servers wins), tells the host, and sees to its own partitions' streams and heirs. It
                looks when the master or the host says that something has happened, and
                LOOKS_PER_LEASE times a lease, which renews the time that the host may serve for
    filler      loads and copies partitions to this server, one after the other

    a partition here that          is
    has to be loaded               loaded by the filler from the newest whole checkpoint, or made
                                   empty, with the tables that the master knows (schema.py); then
                                   said to be loaded, again until the master has heard it
    is joining here                copied by the filler from its primary, again until it has worked
    has a stream that caught up    said to have a replica more
    has a stream that broke        said to have a replica less, which is filled anew
    was restored                   said to have no replicas
    has an heir that is a replica  handed over within HAND_OVER_LEASES of a lease, or kept and tried
                                   again
    is ours without its state      said to be lost: somebody loads it
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import msgspec

from prpc_engine.errors import Closed, RpcError
from prpc_engine.kv.checkpoint.manifest import CheckpointError
from prpc_engine.kv.client.local import run_to_end
from prpc_engine.kv.replication.partition_router import PartitionRouter
from prpc_engine.kv.replication.replica import Replica
from prpc_engine.kv.replication.state_transfer import IncomingCopy
from prpc_engine.kv.schema import placement as places
from prpc_engine.kv.schema.layout import restored
from prpc_engine.kv.schema.placement import NOBODY, Placed, Placement
from prpc_engine.kv.schema.table_spec import TableSpec, from_dict
from prpc_engine.kv.schema.tree import PlacementNode
from prpc_engine.kv.server.server import TableShard
from shard import Future, ShardError, control_loop

LOOKS_PER_LEASE = 5
CHANGE_ATTEMPTS_MAX = 16  # others change the placement at the same time; the next look goes on
COPY_TIMEOUT_S = 30.0  # of one piece, from a primary that may be busy
# pushes wait so long for a replica to answer what is on its way: some ms, unless it is in trouble
HAND_OVER_LEASES = 0.1
RETRY_S = 0.05  # after a copy that failed, mostly because the placement has changed meanwhile
REACTOR_TIMEOUT_S = 30.0  # for a turn of our own reactor
LOAD_ID = "0" * 16
T = TypeVar("T")
logger = logging.getLogger("prpc")


class Calls(Protocol):
    """What a Reconciler needs of the RpcClient of its own service: a call of one server, with a
    deadline in seconds.
    """

    def call_to(
        self, server_id: int, method: str, /, *args: Any, timeout_s: float = ...
    ) -> Any: ...


class Reconciler:
    """A reconciler keeps the partitions of one server where the placement wants them.

    Owned by one ElasticServer; it has two threads, which start() begins and stop() ends. look() may
    be called from any thread. Errors of a look are logged, and the next one goes on. What it does:
    the tables at the file's head.

    first: the placement to begin with, of the servers that live, when there is none; None: it is
    too early. folder: of checkpoints; None: there are none. schema: what a partition has of all
    tables, also of those that are in no checkpoint. lease_s: of the server at the master, in
    seconds.
    """

    def __init__(
        self,
        node: PlacementNode,
        host: PartitionRouter,
        client: Calls,
        in_reactor: Callable[[Callable[[Future], object]], Future],
        lease_s: float,
        first: Callable[[list[int]], Placement | None],
        folder: str | None,
        schema: Callable[[int], Sequence[TableSpec]] = lambda index: (),
    ) -> None:
        self._node, self._host, self._client, self._in_reactor = node, host, client, in_reactor
        self._lease_s, self._first, self._folder, self._schema = lease_s, first, folder, schema
        self._wake = threading.Event()
        self._closed = False
        # whatever the placement says: there may be none yet, or one that took us for dead
        self._is_leaving = False
        self._jobs: queue.SimpleQueue[tuple[int, Placed] | None] = queue.SimpleQueue()
        self._filling: set[tuple[int, int]] = set()  # (partition, epoch) of jobs that are not done
        self._seen = threading.Condition()
        self.placement: Placement | None = None  # the newest read
        self._version = -1  # of it
        self.hand_overs = 0
        names = {"kv-reconciler": self._run, "kv-filler": self._fill_all}
        self._threads = [
            threading.Thread(target=run, name=f"prpc-{name}", daemon=True)
            for name, run in names.items()
        ]

    def start(self) -> None:
        """The host has its id and its client."""
        for thread in self._threads:
            thread.start()

    def look(self, *_: Any) -> None:
        """Something has happened. From any thread."""
        self._wake.set()

    def wait_until(self, holds: Callable[[Placement], bool], timeout_s: float) -> bool:
        """Whether the placement comes to be so in time."""
        with self._seen:
            return self._seen.wait_for(
                lambda: self.placement is not None and holds(self.placement), timeout_s
            )

    def drain(self) -> None:
        """Ask all servers to take over what this one has, or is given later. Raises what the master
        client does.
        """
        self._is_leaving = True
        self._change(self._planned)
        self.look()

    def stop(self) -> None:
        """Both threads end after what they do now, and the host holds nothing more. The master is
        not told.
        """
        self._closed = True
        self._wake.set()
        self._jobs.put(None)
        # all has ended with the service; or it is busy
        with contextlib.suppress(Closed, ShardError, TimeoutError):
            self._now(self._host.close)

    def join(self) -> None:
        """Wait for that."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(REACTOR_TIMEOUT_S)

    # -- the reconciler ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self._look()
            except Closed:
                return
            except (RpcError, ShardError, TimeoutError) as error:
                logger.info(
                    "server %d cannot reconcile its partitions now: %s",
                    self._host.server_id,
                    str(error).partition("\n")[0],
                )
            except Exception:
                # whatever it is: without this thread the lease runs out here, and all its
                # partitions with it
                logger.exception(
                    "server %d: unexpected error while reconciling; the next look goes on",
                    self._host.server_id,
                )
            self._wake.wait(self._lease_s / LOOKS_PER_LEASE)
            self._wake.clear()

    def _look(self) -> None:
        asked = time.monotonic()
        changed = self._change(self._planned)
        if changed is None:
            alive = list(_wait(self._node.servers()))
            begin = self._first(alive)
            if begin is not None:
                _wait(self._node.try_create(begin))
                self.look()
            return
        self._tell_host(*changed, asked)
        for index, placed in enumerate(changed[0].partitions):
            self._see_to(index, placed)
        for index, hosted in self._host.hosted.copy().items():
            if hosted.is_primary and hosted.placed.heir in hosted.placed.replicas:
                self._hand_over(index, hosted.placed, hosted)
            elif hosted.is_handing_over:  # its heir died
                self._now(hosted.keep)

    def _planned(self, placement: Placement) -> Placement:
        """What is to be, by who lives."""
        alive, me = _wait(self._node.servers()), self._host.server_id
        if self._is_leaving and me in alive and me not in placement.draining:
            placement = Placement(
                placement.partitions, placement.replicas, (*placement.draining, me)
            )
        return places.plan(placement, alive)

    def _change(self, decide: Callable[[Placement], Placement]) -> tuple[Placement, int] | None:
        """Set what decide() makes of the placement, which it may return as it is; as it is then,
        and its version. None: there is none."""
        for _ in range(CHANGE_ATTEMPTS_MAX):
            found = _wait(self._node.read())
            if found is None:
                return None
            now, version = found
            wanted = decide(now)
            if wanted is now:
                return now, version
            changed = _wait(self._node.try_change(wanted, version))
            if changed is not None:
                return wanted, changed
        raise RpcError(
            f"the placement at {self._node.path} was changed by others {CHANGE_ATTEMPTS_MAX} "
            "times; the next look goes on"
        )

    def _change_one(self, index: int, before: Placed, after: Callable[[Placed], Placed]) -> Placed:
        """Change one partition, if its epoch and its heir are still what they were, and tell the
        host: as it is then.
        """
        asked = time.monotonic()

        def decide(placement: Placement) -> Placement:
            now = placement.partitions[index]
            if (
                now.epoch != before.epoch
                or now.heir != before.heir
                or now.primary != before.primary
            ):
                return placement
            return placement.replace(index, after(now))

        changed = self._change(decide)
        if changed is None:
            return before
        self._tell_host(*changed, asked)
        return changed[0].partitions[index]

    def _tell_host(self, placement: Placement, version: int, asked: float) -> None:
        self._now(lambda: self._host.learn(placement, version, asked + self._lease_s))
        with self._seen:
            if version >= self._version:  # the two threads may pass each other
                self.placement, self._version = placement, version
                self._seen.notify_all()

    def _now(self, function: Callable[[], Any]) -> Any:
        """function() in the reactor's thread."""
        return self._in_reactor(lambda done: done.set_result(function())).result(REACTOR_TIMEOUT_S)

    def _see_to(self, index: int, placed: Placed) -> None:
        me, hosted = self._host.server_id, self._host.hosted.get(index)
        if placed.primary == me and not placed.loading:
            if hosted is None and self._now(partial(self._host.lacks, index)):
                logger.error(
                    "server %d should serve partition %d and has no state of it: its rows are lost",
                    me,
                    index,
                )
                self._change_one(index, placed, _lost)
            elif hosted is not None and hosted.placed == placed:
                self._see_to_streams(index, placed, hosted)
        elif (placed.primary == me or me in placed.joining) and (
            index,
            placed.epoch,
        ) not in self._filling:
            self._filling.add((index, placed.epoch))
            self._jobs.put((index, placed))

    def _see_to_streams(self, index: int, placed: Placed, hosted: Replica) -> None:
        restored, step = hosted.restored
        if restored:
            self._change_one(index, placed, partial(places.replaced, restored=restored, step=step))
            return  # that is seen by all, and looked at again
        caught_up, broken = self._now(lambda: hosted.look_at_streams(time.monotonic()))
        for server in broken:
            if server in placed.replicas:
                self._change_one(index, placed, partial(_if_replica, places.demoted, server))
        for server in caught_up:
            if server in placed.joining:
                self._now(partial(hosted.promised.add, server))
                self._change_one(index, placed, partial(_if_joining, places.joined, server))
                # not when that raises: the master may have heard
                self._now(partial(hosted.promised.discard, server))

    def _hand_over(self, index: int, placed: Placed, hosted: Replica) -> None:
        try:
            handed = self._in_reactor(hosted.hand_over).result(HAND_OVER_LEASES * self._lease_s)
        except TimeoutError:  # the look ends here, as others may take as long
            self._now(hosted.keep)
            raise
        if handed:
            # When this raises, pushes go on waiting: whether the heir has taken over is not known
            # before the next look.
            after = self._change_one(index, placed, _if_heir)
            self.hand_overs += after.primary == placed.heir  # else it had none any more
        self._now(hosted.keep)

    # -- the filler --------------------------------------------------------------------------------

    def _fill_all(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            index, placed = job
            hosted = self._host.hosted.get(index)
            try:
                if placed.loading:
                    step = self._load(index, placed) if hosted is None else hosted.placed.step
                    self._change_one(index, placed, partial(places.loaded, step=step))
                    self.look()
                elif hosted is None or (
                    not hosted.is_primary and self._does_not_follow(index, placed)
                ):
                    self._copy(index, placed)
            except Closed:
                return
            except (RpcError, ShardError, TimeoutError) as error:
                logger.info(
                    "partition %d is not filled yet: %s", index, str(error).partition("\n")[0]
                )
                time.sleep(RETRY_S)
                self.look()
            except Exception:
                # of whatever is in one partition's checkpoint or copy: the others are to be filled
                # all the same
                logger.exception("partition %d cannot be filled", index)
                time.sleep(RETRY_S)
                self.look()
            self._filling.discard((index, placed.epoch))

    def _load(self, index: int, placed: Placed) -> int:
        """The step of what it holds then."""
        shard, step = self._host.make_shard(), -1
        if self._folder is not None:
            step = self._load_newest(shard, index, self._folder)
        there = shard.tables
        for spec in self._schema(index):
            # the newer ones; or all of them, where there is no checkpoint
            if spec.table not in there:
                shard.create_table(spec.to_dict())
        self._now(lambda: self._host.put(index, placed.epoch, shard, 0, step))
        return step

    def _load_newest(self, shard: TableShard, index: int, folder: str) -> int:
        """The step of the newest whole checkpoint, whose share is in the shard then; -1: there is
        none. Raises CheckpointError where the folder cannot be read."""
        try:
            name, step, saved = run_to_end(shard.checkpoint_find(folder))
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(
                error.__cause__, FileNotFoundError
            ):
                logger.warning("partition %d waits: %s", index, str(error))
                raise  # nobody knows what is there
            logger.warning("partition %d begins empty: %s", index, str(error))
            return -1
        assert self.placement is not None
        parts = len(self.placement.partitions)
        specs = {}
        for table, each in saved.items():
            spec = restored([from_dict(one) for one in each], parts, None).get(index)
            if spec is not None:
                specs[table] = spec.to_dict()
        run_to_end(shard.checkpoint_load(LOAD_ID, folder, name, specs, index, parts))
        shard.checkpoint_swap(LOAD_ID)
        return int(step)

    def _does_not_follow(self, index: int, placed: Placed) -> bool:
        """It was filled, and is not sent what came after."""
        asked = index, placed.epoch, self._host.server_id
        return not self._client.call_to(
            placed.primary, "copy_follows", *asked, timeout_s=COPY_TIMEOUT_S
        )

    def _copy(self, index: int, placed: Placed) -> None:
        me = self._host.server_id
        ask = partial(self._client.call_to, placed.primary, timeout_s=COPY_TIMEOUT_S)
        description = ask("copy_begin", index, placed.epoch, me)
        copy = index, placed.epoch, me, description["copy"]
        incoming = IncomingCopy(self._host.make_shard(), description)
        while (piece := ask("copy_read", *copy)) is not None:
            if self._closed:
                return
            incoming.put(*piece)
        shard = incoming.finish()
        self._now(
            lambda: self._host.put(index, placed.epoch, shard, description["applied"], placed.step)
        )
        ask("copy_end", *copy)


def _wait(asked: Coroutine[Any, Any, T]) -> T:
    return cast(T, control_loop().spawn(asked).result())


def _lost(placed: Placed) -> Placed:
    others = {"replicas": (), "joining": (), "spares": (), "heir": NOBODY, "restored": ""}
    return msgspec.structs.replace(
        placed, epoch=placed.epoch + 1, loading=True, history=placed.history + 1, **others
    )


def _if_replica(change: Callable[[Placed, int], Placed], server: int, placed: Placed) -> Placed:
    return change(placed, server) if server in placed.replicas else placed


def _if_joining(change: Callable[[Placed, int], Placed], server: int, placed: Placed) -> Placed:
    return change(placed, server) if server in placed.joining else placed


def _if_heir(placed: Placed) -> Placed:
    return places.handed_over(placed) if placed.heir in placed.replicas else placed
