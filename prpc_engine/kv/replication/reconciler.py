"""What keeps an elastic server's partitions where the placement wants them. Two coroutines of the
control loop for each server; the host's reactor waits for neither.

    reconciler  each look: reads the placement and who lives, changes what plan() says (one of all
                servers wins), tells the host, and sees to its own partitions' streams and heirs. It
                looks when the master or the host says that something has happened, and
                LOOKS_PER_LEASE times a lease, which renews the time that the host may serve for
    filler      loads and copies partitions to this server, one after the other; what it puts
                together itself (rows, files) in threads that may compute and block

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

What is held here is changed in the host's reactor. All else is touched in the control loop alone,
between two awaits; the other of the two may have gone on meanwhile, as other servers may.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

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
from shard import (
    ClosedError,
    Future,
    ShardError,
    Task,
    Waiter,
    control_loop,
    run_blocking,
    runtime,
    sleep,
)

LOOKS_PER_LEASE = 5
# Of a lease a primary trusts so much: the master counts by a clock of its own. The rest allows for
# clocks that are 5 % fast there and 5 % slow here.
TRUSTED_LEASE = 0.9
CHANGE_ATTEMPTS_MAX = 16  # others change the placement at the same time; the next look goes on
COPY_TIMEOUT_S = 30.0  # of one piece, from a primary that may be busy
# pushes wait so long for a replica to answer what is on its way: some ms, unless it is in trouble
HAND_OVER_LEASES = 0.1
# After a copy that failed, mostly because the placement has changed meanwhile; and after a replica
# that could not be reached, which may be dead.
RETRY_S = 0.05
REACTOR_TIMEOUT_S = 30.0  # at the end, for a turn of our own reactor
LOAD_ID = "0" * 16
logger = logging.getLogger("prpc")


class Calls(Protocol):
    """What a Reconciler needs of the RpcClient of its own service: the future of a call of one
    server, with a deadline in seconds.
    """

    def submit_to(
        self, server_id: int, method: str, /, *args: Any, timeout_s: float = ...
    ) -> Future: ...


class Reconciler:
    """A reconciler keeps the partitions of one server where the placement wants them.

    Owned by one ElasticServer; start() begins its coroutines and stop() ends them. Methods without
    `async` may be called from any thread but the control loop's; look(), stop() from that, too.
    Errors of a look are logged, and the next one goes on. What it does: the tables at the file's
    head.

    first: the placement to begin with, of the servers that live, when there is none; None: it is
    too early. folder: of checkpoints; None: there are none. schema: what a partition has of all
    tables, also of those that are in no checkpoint; it may block. lease_s: of the server at the
    master, in seconds. waiter: who makes progress while a thread waits here.
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
        waiter: Waiter | None = None,
    ) -> None:
        self._node, self._host, self._client, self._in_reactor = node, host, client, in_reactor
        self._lease_s, self._first, self._folder, self._schema = lease_s, first, folder, schema
        self._waiter = waiter
        self._task: Task | None = None  # the reconciler; the others end with it
        self._wake = Future()  # done: look again. Made anew before each look
        self._soon: Task | None = None  # calls look() in a while
        # whatever the placement says: there may be none yet, or one that took us for dead
        self._is_leaving = False
        self._jobs: deque[tuple[int, Placed]] = deque()
        self._has_jobs = Future()  # done: the filler goes on. Made anew before it waits
        self._filling: set[tuple[int, int]] = set()  # (partition, epoch) of jobs that are not done
        self.placement: Placement | None = None  # the newest read
        self._version = -1  # of it
        self._is_news = Future()  # done: there is a newer one. Made anew with each
        self.hand_overs = 0

    def start(self) -> None:
        """The host has its id and its client."""
        self._task = control_loop().spawn(self._run())

    def look(self, *_: Any) -> None:
        """Something has happened."""
        self._wake.set_result(None)

    def wait_until(self, holds: Callable[[Placement], bool], timeout_s: float) -> bool:
        """Whether the placement comes to be so in time."""
        held = control_loop().spawn(self._until(holds), self._waiter)
        try:
            held.result(timeout_s)
        except TimeoutError:
            held.cancel()
            return False
        return True

    async def _until(self, holds: Callable[[Placement], bool]) -> None:
        while self.placement is None or not holds(self.placement):
            await self._is_news

    def drain(self) -> None:
        """Ask all servers to take over what this one has, or is given later. Raises what the master
        client does.
        """
        control_loop().spawn(self._drain(), self._waiter).result()

    async def _drain(self) -> None:
        self._is_leaving = True
        await self._change(self._planned)
        self.look()

    def stop(self) -> None:
        """What is under way is given up, and the host holds nothing more. The master is not
        told.
        """
        if self._task is not None:
            self._task.cancel()

        def close(done: Future) -> None:
            self._host.close()
            done.set_result(None)

        # all has ended with the service; or it is busy
        with contextlib.suppress(Closed, ShardError, TimeoutError):
            self._in_reactor(close).result(REACTOR_TIMEOUT_S)

    def join(self) -> None:
        """Wait until nothing is under way."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                self._task.error(REACTOR_TIMEOUT_S)

    # -- the reconciler ----------------------------------------------------------------------------

    async def _run(self) -> None:
        others = [control_loop().spawn(each) for each in (self._look_often(), self._fill_all())]
        try:
            while await self._looked():
                await self._wake
        finally:
            for other in (*others, self._soon):
                if other is not None:
                    other.cancel()

    async def _look_often(self) -> None:
        while True:
            await sleep(self._lease_s / LOOKS_PER_LEASE)
            self.look()

    async def _look_soon(self) -> None:
        await sleep(RETRY_S)
        self.look()

    async def _looked(self) -> bool:
        """Whether to look again."""
        # before it: what happens from now on is seen by the next
        self._wake = Future()
        try:
            await self.look_once()
        except (Closed, ClosedError):
            return False
        except (RpcError, ShardError, TimeoutError) as error:
            logger.info(
                "server %d cannot reconcile its partitions now: %s",
                self._host.server_id,
                str(error).partition("\n")[0],
            )
        except Exception:
            # whatever it is: without this coroutine the lease runs out here, and all its
            # partitions with it
            logger.exception(
                "server %d: unexpected error while reconciling; the next look goes on",
                self._host.server_id,
            )
        return True

    async def look_once(self) -> None:
        """One look: what start() has done each time that something has happened. A coroutine of
        the control loop; raises what the master's client does.
        """
        asked = runtime.monotonic()
        changed = await self._change(self._planned)
        if changed is None:
            alive = list(await self._node.servers())
            begin = self._first(alive)
            if begin is not None:
                await self._node.try_create(begin)
                self.look()
            return
        await self._tell_host(*changed, asked)
        for index, placed in enumerate(changed[0].partitions):
            await self._see_to(index, placed)
        for index, hosted in self._host.hosted.copy().items():
            if hosted.is_primary and hosted.placed.heir in hosted.placed.replicas:
                await self._hand_over(index, hosted.placed, hosted)
            elif hosted.is_handing_over:  # its heir died
                await self._now(hosted.keep)

    async def _planned(self, placement: Placement) -> Placement:
        """What is to be, by who lives."""
        alive, me = await self._node.servers(), self._host.server_id
        if self._is_leaving and me in alive and me not in placement.draining:
            placement = Placement(
                placement.partitions, placement.replicas, (*placement.draining, me)
            )
        return places.plan(placement, alive)

    async def _change(
        self, decide: Callable[[Placement], Awaitable[Placement]]
    ) -> tuple[Placement, int] | None:
        """Set what decide() makes of the placement, which it may return as it is; as it is then,
        and its version. None: there is none."""
        for _ in range(CHANGE_ATTEMPTS_MAX):
            found = await self._node.read()
            if found is None:
                return None
            now, version = found
            wanted = await decide(now)
            if wanted is now:
                return now, version
            changed = await self._node.try_change(wanted, version)
            if changed is not None:
                return wanted, changed
        raise RpcError(
            f"the placement at {self._node.path} was changed by others {CHANGE_ATTEMPTS_MAX} "
            "times; the next look goes on"
        )

    async def _change_one(
        self, index: int, before: Placed, after: Callable[[Placed], Placed]
    ) -> Placed:
        """Change one partition, if its epoch and its heir are still what they were, and tell the
        host: as it is then.
        """
        asked = runtime.monotonic()

        async def decide(placement: Placement) -> Placement:
            now = placement.partitions[index]
            if (
                now.epoch != before.epoch
                or now.heir != before.heir
                or now.primary != before.primary
            ):
                return placement
            return placement.replace(index, after(now))

        changed = await self._change(decide)
        if changed is None:
            return before
        await self._tell_host(*changed, asked)
        return changed[0].partitions[index]

    async def _tell_host(self, placement: Placement, version: int, asked: float) -> None:
        trusted_s = asked + TRUSTED_LEASE * self._lease_s
        await self._now(lambda: self._host.learn(placement, version, trusted_s))
        if version >= self._version:  # reconciler and filler may pass each other
            self.placement, self._version = placement, version
            told, self._is_news = self._is_news, Future()
            told.set_result(None)

    async def _now(self, function: Callable[[], Any]) -> Any:
        """function() in the reactor's thread."""
        return await self._in_reactor(lambda done: done.set_result(function()))

    async def _see_to(self, index: int, placed: Placed) -> None:
        me, hosted = self._host.server_id, self._host.hosted.get(index)
        if placed.primary == me and not placed.loading:
            if hosted is None and await self._now(partial(self._host.lacks, index)):
                logger.error(
                    "server %d should serve partition %d and has no state of it: its rows are lost",
                    me,
                    index,
                )
                await self._change_one(index, placed, _lost)
            elif hosted is not None and hosted.placed == placed:
                await self._see_to_streams(index, placed, hosted)
        elif (placed.primary == me or me in placed.joining) and (
            index,
            placed.epoch,
        ) not in self._filling:
            self._filling.add((index, placed.epoch))
            self._jobs.append((index, placed))
            self._has_jobs.set_result(None)

    async def _see_to_streams(self, index: int, placed: Placed, hosted: Replica) -> None:
        restored, step = hosted.restored
        if restored:
            await self._change_one(
                index, placed, partial(places.replaced, restored=restored, step=step)
            )
            return  # that is seen by all, and looked at again
        caught_up, broken, is_in_doubt = await self._now(
            lambda: hosted.look_at_streams(runtime.monotonic())
        )
        if is_in_doubt and (self._soon is None or self._soon.finished):
            self._soon = control_loop().spawn(self._look_soon())
        for server in broken:
            if server in placed.replicas:
                await self._change_one(index, placed, partial(_if_replica, places.demoted, server))
        for server in caught_up:
            if server in placed.joining:
                await self._now(partial(hosted.promise, server))
                await self._change_one(index, placed, partial(_if_joining, places.joined, server))
                # not when that raises: the master may have heard
                await self._now(partial(hosted.take_back_promise, server))

    async def _hand_over(self, index: int, placed: Placed, hosted: Replica) -> None:
        try:
            handed = await _within(
                self._in_reactor(hosted.hand_over), HAND_OVER_LEASES * self._lease_s
            )
        except TimeoutError:  # the look ends here, as others may take as long
            await self._now(hosted.keep)
            raise
        if handed:
            # When this raises, pushes go on waiting: whether the heir has taken over is not known
            # before the next look.
            after = await self._change_one(index, placed, _if_heir)
            self.hand_overs += after.primary == placed.heir  # else it had none any more
        await self._now(hosted.keep)

    # -- the filler --------------------------------------------------------------------------------

    async def _fill_all(self) -> None:
        while True:
            while not self._jobs:
                self._has_jobs = Future()
                await self._has_jobs
            index, placed = self._jobs.popleft()
            try:
                await self._fill(index, placed)
            except (Closed, ClosedError):
                return
            except (RpcError, ShardError, TimeoutError) as error:
                logger.info(
                    "partition %d is not filled yet: %s", index, str(error).partition("\n")[0]
                )
                await sleep(RETRY_S)
                self.look()
            except Exception:
                # of whatever is in one partition's checkpoint or copy: the others are to be filled
                # all the same
                logger.exception("partition %d cannot be filled", index)
                await sleep(RETRY_S)
                self.look()
            self._filling.discard((index, placed.epoch))

    async def _fill(self, index: int, placed: Placed) -> None:
        hosted = self._host.hosted.get(index)
        if placed.loading:
            step = await self._load(index, placed) if hosted is None else hosted.placed.step
            await self._change_one(index, placed, partial(places.loaded, step=step))
            self.look()
        elif hosted is None or (
            not hosted.is_primary and await self._does_not_follow(index, placed)
        ):
            await self._copy(index, placed)

    async def _load(self, index: int, placed: Placed) -> int:
        """The step of what it holds then."""
        assert self.placement is not None
        shard, step = await run_blocking(self._loaded, index, len(self.placement.partitions))
        await self._now(lambda: self._host.put(index, placed.epoch, shard, 0, step))
        return int(step)

    def _loaded(self, index: int, parts: int) -> tuple[TableShard, int]:
        """A new partition and its step. In a thread that may block."""
        shard, step = self._host.make_shard(), -1
        if self._folder is not None:
            step = self._load_newest(shard, index, parts, self._folder)
        there = shard.tables
        for spec in self._schema(index):
            # the newer ones; or all of them, where there is no checkpoint
            if spec.table not in there:
                shard.create_table(spec.to_dict())
        return shard, step

    def _load_newest(self, shard: TableShard, index: int, parts: int, folder: str) -> int:
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
        specs = {}
        for table, each in saved.items():
            spec = restored([from_dict(one) for one in each], parts, None).get(index)
            if spec is not None:
                specs[table] = spec.to_dict()
        run_to_end(shard.checkpoint_load(LOAD_ID, folder, name, specs, index, parts))
        shard.checkpoint_swap(LOAD_ID)
        return int(step)

    async def _does_not_follow(self, index: int, placed: Placed) -> bool:
        """It was filled, and is not sent what came after."""
        asked = index, placed.epoch, self._host.server_id
        return not await self._ask(placed, "copy_follows", *asked)

    async def _copy(self, index: int, placed: Placed) -> None:
        me = self._host.server_id
        description = await self._ask(placed, "copy_begin", index, placed.epoch, me)
        copy = index, placed.epoch, me, description["copy"]
        incoming = await run_blocking(IncomingCopy, self._host.make_shard(), description)
        while (piece := await self._ask(placed, "copy_read", *copy)) is not None:
            await run_blocking(incoming.put, *piece)
        shard = await run_blocking(incoming.finish)
        applied = description["applied"]
        beginnings = [(epoch, versions) for epoch, versions in description["beginnings"]]
        await self._now(
            lambda: self._host.put(index, placed.epoch, shard, applied, placed.step, beginnings)
        )
        await self._ask(placed, "copy_end", *copy)

    def _ask(self, placed: Placed, method: str, *args: Any) -> Future:
        """Its primary."""
        return self._client.submit_to(placed.primary, method, *args, timeout_s=COPY_TIMEOUT_S)


async def _within(future: Future, timeout_s: float) -> Any:
    """Its result; raises TimeoutError when it is not there in time."""

    async def end() -> None:
        await sleep(timeout_s)
        future.set_error(TimeoutError(f"no result within {timeout_s} s"))

    late = control_loop().spawn(end())
    try:
        return await future
    finally:
        late.cancel()


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
