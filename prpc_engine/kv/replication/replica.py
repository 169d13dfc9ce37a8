"""One partition at one of the servers that hold it. Its role is a table that runs: replica_role.py.

The primary alone decides which keys get rows and which rows go, and sees pulls. It forwards
`replay`, a push with what was decided for it; `catch_up`, what was decided and used beside; and
`create_table`. A replica does those, and so is equal to it in rows, optimizer state, stamps, counts
and versions (decisions.py). What pulls have left since the primary told last is taken back when it
hands over.

A push is replicated when every stream that is live, and every replica by the placement, has it, and
the placement names a replica: when this server dies, a replica that the master knows of takes over,
and no other copy, however complete. A stream that breaks counts until the placement says that it is
no replica any more: else a server that may be promoted would lack the push. A table that is created
waits for the same copies, but for no first one: who loads the partition creates what the master
knows.

In the reactor's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prpc_engine.errors import BadArguments, ConfigError, RpcError
from prpc_engine.kv.consistency.ledger import nobody
from prpc_engine.kv.replication.replica_role import (
    HOLDS_PUSHES,
    PRIMARIES,
    REPLICA_ROLES,
    ReplicaRole,
    RoleAction,
    RoleEvent,
)
from prpc_engine.kv.replication.replication_log import ReplicationLog
from prpc_engine.kv.replication.state_transfer import OutgoingCopy
from prpc_engine.kv.schema.placement import Placed
from prpc_engine.kv.server.server import TableShard, follow, pushing_node
from prpc_engine.kv.table.table import DenseTable, SparseTable
from prpc_engine.rpc.deferred import Deferred
from shard import Future

# forwards that arrived before one with a smaller number: as many as calls in flight on a connection
EARLY_MAX = 65536
# Primaries whose versions at their beginning are kept: a worker may have missed so many.
BEGINNINGS_MAX = 64
Beginning = tuple[int, dict[str, int]]  # the epoch of a primary; the version of each table then
Send = Callable[..., Future]  # server id, method, arguments
Unanswered = tuple[int, Deferred, Any]  # the number that copies must have; the answer, its value


class Moved(RpcError):
    """This server does not serve that partition at that epoch: ask the master who does, and send it
    there.
    """


class Replica:
    """A Replica is one partition at one of the servers that hold it, as its primary or as a copy.

    Owned by a PartitionRouter; all of it runs in the reactor's thread. applied: how many changes
    are in `shard`, from the partition's beginning. send: calls a method of another server; changed:
    is called when somebody should look at `streams` and what they say. Who asks the wrong server is
    answered by Moved. `role`: what it is for now. beginnings: of the primaries before it, from who
    it has its copy.
    """

    def __init__(
        self,
        index: int,
        server_id: int,
        placed: Placed,
        shard: TableShard,
        applied: int,
        send: Send,
        changed: Callable[[], None],
        beginnings: Sequence[Beginning] = (),
    ) -> None:
        self.index = index
        self.placed = placed
        self.shard = shard
        self.applied = applied  # how many changes, from the partition's beginning
        self.streams: dict[int, ReplicationLog] = {}
        self.beginnings = list(beginnings)
        self.promised: set[int] = set()  # who the master is about to be told of as a replica
        # the id of a restore that the master is to be told of, and the step of its checkpoint
        self.restored = "", -1
        # of who asked for handing it over last: done when it is known whether the heir may
        self._handed: Future = Future()
        self._server_id = server_id
        self._send = send
        self._changed = changed
        # number, answer, value: until it is replicated
        self._waiting: deque[Unanswered] = deque()
        self._creating: deque[Unanswered] = deque()  # tables, until every copy there is has them
        self._held: list[Deferred] = []  # pushes that came while it is handed over
        self._early: dict[int, tuple[Deferred, tuple[Any, ...]]] = {}
        self._tables = tables_of(shard)  # as they are now: asked with each push
        self.role = REPLICA_ROLES.initial
        self._learn_role()

    @property
    def is_primary(self) -> bool:
        """By the placement known here."""
        return self.role in PRIMARIES

    @property
    def unanswered(self) -> int:
        """Pushes that wait to be replicated, to be in a checkpoint, or to be handed over."""
        return len(self._waiting) + len(self.shard.durable) + len(self._held)

    # -- the placement -----------------------------------------------------------------------------

    def learn(self, placed: Placed) -> None:
        """The partition's place has changed, and still names this server."""
        before, self.placed = self.placed, placed
        # `placed` may be from before the master was told
        self.promised.intersection_update(placed.joining)
        if before.epoch != placed.epoch:
            self.promised.clear()
            # else it is of the one before
            if placed.primary != self._server_id or placed.restored == self.restored[0]:
                self.restored = "", -1
            self._learn_role("it has another primary, or was restored from a checkpoint")
        for server, stream in list(self.streams.items()):
            # one that is demoted drops what it has (partition_router.py)
            is_demoted = server in before.replicas and server not in placed.replicas
            if (
                server not in placed.holders
                or is_demoted
                or (stream.failure and server not in placed.replicas)
            ):
                self.streams.pop(server).close()
        if not self.streams:
            for table in self._tables.values():
                table.stop_telling()
        self._look(False)

    def began_since(self, epoch: int) -> dict[str, int]:
        """The least version of each table that a primary after that epoch began with: what a worker
        of then had seen above it is gone, whatever came since.
        """
        last = self.beginnings[-1][1]
        since = [versions for each, versions in self.beginnings if each > epoch] or [last]
        return {table: min(versions.get(table, 0) for versions in since) for table in last}

    def leave(self, why: str = "it is held by others") -> None:
        """The placement does not name this server any more, or it closes."""
        self._become(RoleEvent.LEFT, why)

    def _learn_role(self, why: str = "") -> None:
        """By a placement of another epoch."""
        is_primary = self.placed.primary == self._server_id
        self._become(RoleEvent.NAMED_PRIMARY if is_primary else RoleEvent.NAMED_REPLICA, why)

    def _become(self, event: RoleEvent, why: str = "") -> None:
        """`why`: for those that are told to go elsewhere."""
        self.role, actions = REPLICA_ROLES.after(self.role, event)
        do: dict[RoleAction, Callable[[], object]] = {
            RoleAction.REFUSE_WAITING: partial(self._refuse_waiting, why),
            RoleAction.FOLLOW: self._begin_following,
            RoleAction.SERVE: self._begin_serving,
            RoleAction.TELL_NEWS: self._tell_news,
            RoleAction.LOOK: partial(self._look, False),
            RoleAction.ANSWER_YES: partial(self._handed.set_result, True),
            RoleAction.ANSWER_NO: partial(self._handed.set_result, False),
            RoleAction.SEND_BACK: self._send_back,
        }
        for action in actions:
            do[action]()

    def _begin_following(self) -> None:
        for table in self._tables.values():
            table.take_back()
            table.stop_telling()
        self.shard.on_applied = None
        self.shard.ledger.pusher = nobody  # a replica's caller is the primary

    def _begin_serving(self) -> None:
        for table in self._tables.values():
            table.stop_telling()
        self.shard.on_applied = self._on_applied
        self.shard.ledger.pusher = pushing_node
        versions = {name: table.version for name, (_, table) in self.shard.tables.items()}
        self.beginnings = [*self.beginnings, (self.placed.epoch, versions)][-BEGINNINGS_MAX:]
        # Those that were replicas of the one before have exactly what this one has: it was handed
        # over.
        for server in self.placed.replicas:
            self._open(server, None)

    def _refuse_waiting(self, why: str) -> None:
        self.shard.on_applied = None
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        moved = Moved(f"partition {self.index}: {why}")
        self.shard.durable.fail(moved)
        self.shard.refuse_held(moved)  # whoever serves it would not hear of them
        waiting = [answer for _, answer, _ in (*self._waiting, *self._creating)]
        early = [answer for answer, _ in self._early.values()]
        held, self._held = self._held, []
        self._waiting.clear()
        self._creating.clear()
        self._early.clear()
        for answer in (*waiting, *early, *held):
            answer.fail(moved)

    # -- the primary -------------------------------------------------------------------------------

    def apply(self, client: int, sequence: int, verb: str, table: str, *arrays: Any) -> Any:
        """TableShard.apply(), or later, elsewhere, while the partition is handed over."""
        if self.is_handing_over:
            answer = Deferred()
            self._held.append(answer)
            return answer
        return self.shard.apply(client, sequence, verb, table, *arrays)

    def apply_durable(self, *push: Any) -> Any:
        """TableShard.apply_durable(), or later, elsewhere, while the partition is handed over."""
        if self.is_handing_over:
            answer = Deferred()
            self._held.append(answer)
            return answer
        return self.shard.apply_durable(*push)

    def apply_replicated(self, *push: Any) -> Any:
        """The same, answered when every replica has it."""
        value = self.apply(*push)
        answer = Deferred()
        if type(value) is Deferred:
            value.when_done(lambda done: self._applied_later(done, answer))
        else:
            self._answer_replicated(answer, value)
        return answer

    def _applied_later(self, done: Future, answer: Deferred) -> None:
        error = done.error()
        if error is not None:
            answer.fail(error)
        else:
            self._answer_replicated(answer, done.result())

    def _answer_replicated(self, answer: Deferred, value: Any) -> None:
        if not self.is_primary:
            answer.fail(Moved(f"partition {self.index}: it was handed over meanwhile"))
        else:
            self._waiting.append((self.applied, answer, value))
            self._release()

    def create_table(self, spec: dict[str, Any]) -> Any:
        """TableShard.create_table(), answered when every copy has it that may be promoted."""
        # consistency.py says what is missing for it
        if isinstance(spec, dict) and spec.get("consistency") is not None:
            raise ConfigError(
                f"table {spec.get('table')!r}: consistency {spec['consistency']} is for services "
                "whose partitions stay where "
                "they are; leave it out, or serve the tables from a TableServer"
            )
        if self.is_handing_over:
            answer = Deferred()
            self._held.append(answer)
            return answer
        is_new = self.shard.create_table(spec)
        if is_new:
            if self.streams:
                self._begin_telling()
            self._forward("create_table", spec)
        answer = Deferred()
        self._creating.append((self.applied, answer, is_new))
        self._release()
        return answer

    def _on_applied(
        self, client: int, sequence: int, verb: str, table: str, arrays: tuple[Any, ...]
    ) -> None:
        if verb == "assign_dense":
            self._forward("assign", client, sequence, table, *arrays)
            return
        decision = self._table(table).take_decision(with_push=True) if self.streams else None
        self._forward("replay", client, sequence, table, decision, *arrays)

    def _tell(self, table: str) -> None:
        """Forward what was decided beside pushes, and what pulls have left. Not while it is handed
        over: its heir may have taken over already."""
        if self.role is ReplicaRole.PRIMARY:
            self._catch_up(table)

    def _catch_up(self, table: str) -> None:
        if self.streams:
            self._forward("catch_up", table, self._table(table).take_decision())

    def _tell_news(self) -> None:
        for name, table in self._tables.items():
            if table.has_news:
                self._catch_up(name)

    def _forward(self, *message: Any) -> None:
        self.applied += 1
        for stream in list(self.streams.values()):
            stream.forward(self.applied, message)

    def _copies(self) -> set[int]:
        """Whose answers count."""
        live = {server for server, stream in self.streams.items() if stream.is_live}
        return live | self.promised | set(self.placed.replicas)

    def _release(self) -> None:
        """Answer what is replicated now."""
        if not self._waiting and not self._creating:
            return
        acked = min((self._acked(server) for server in self._copies()), default=self.applied)
        _answer(self._creating, acked)
        if self.placed.replicas:
            _answer(self._waiting, acked)

    def _acked(self, server: int) -> int:
        """Up to which number it is known to have everything: not while it is copied, as it may be
        anew; -1: nothing.
        """
        stream = self.streams.get(server)
        return stream.acked if stream is not None and stream.outgoing is None else -1

    def _look(self, is_notable: bool) -> None:
        """A stream has got further, or broke."""
        self._release()
        if self.role is ReplicaRole.HANDING_OVER and self._can_hand_over():
            self._become(RoleEvent.REPLICAS_HAVE_ALL)
        if is_notable:
            self._changed()

    def _open(self, server: int, outgoing: OutgoingCopy | None) -> ReplicationLog:
        forward = partial(self._send_forward, server)
        stream = self.streams[server] = ReplicationLog(self.applied, forward, self._look, outgoing)
        self._begin_telling()
        return stream

    def _begin_telling(self) -> None:
        self._tables = tables_of(self.shard)
        for name, table in self._tables.items():
            table.begin_telling(partial(self._tell, name))

    def _send_forward(self, server: int, number: int, message: tuple[Any, ...]) -> Future:
        return self._send(server, "follow", self.index, self.placed.epoch, number, *message)

    def look_at_streams(self, now: float) -> tuple[list[int], list[int], bool]:
        """The servers that have caught up, and the replicas that are sent nothing now; whether to
        look again soon. Interrupted streams go on, and what pulls have left is told."""
        if self.role is ReplicaRole.PRIMARY:
            self._tell_news()
        for stream in list(self.streams.values()):
            stream.resume(now)
        caught_up = [server for server, stream in self.streams.items() if stream.has_caught_up]
        live = {server for server, stream in self.streams.items() if stream.is_live}
        lost = [server for server in self.placed.replicas if server not in live]
        return caught_up, lost, any(stream.is_in_doubt for stream in self.streams.values())

    def promise(self, server: int) -> None:
        """The master is about to be told of that server as a replica."""
        self.promised.add(server)

    def take_back_promise(self, server: int) -> None:
        """The placement that was learned since says what that server is."""
        self.promised.discard(server)
        self._release()

    def begin_copy(self, server: int) -> dict[str, Any]:
        """Cut the tables for that server;
        what Incoming takes, and the number of what is in them.
        """
        before = self.streams.pop(server, None)
        if before is not None:
            before.close()
        outgoing = OutgoingCopy(self.shard)
        self._open(server, outgoing)
        beginnings = [list(each) for each in self.beginnings]
        return outgoing.description | {"applied": self.applied, "beginnings": beginnings}

    def read_copy(self, server: int, copy: int) -> tuple[str, int, dict[str, Any]] | None:
        """The next piece of the copy of that number; None: that was all."""
        return self._copying(server, copy)[1].read()

    def end_copy(self, server: int, copy: int) -> None:
        """It has all of it, and follows from now on."""
        self._copying(server, copy)[0].go_live()

    def _copying(self, server: int, copy: int) -> tuple[ReplicationLog, OutgoingCopy]:
        stream = self.streams.get(server)
        if (
            stream is None
            or stream.failure
            or stream.outgoing is None
            or stream.outgoing.number != copy
        ):
            raise Moved(
                f"partition {self.index} is not being copied to server {server}, or anew: "
                "begin again"
            )
        return stream, stream.outgoing

    def is_settled(self, load_id: str) -> bool | None:
        """Whether the master knows of the restore of that id, and every replica has what it
        brought; None: it was lost again.
        """
        if load_id not in (self.restored[0], self.placed.restored):
            return None
        return not self.restored[0] and not self.placed.joining and not self.promised

    def replace_all(self, load_id: str, step: int) -> None:
        """All tables are others now, after the checkpoint of that step was restored: nobody else
        has them.
        """
        self.restored = load_id, step
        self._tables = tables_of(self.shard)
        self._changed()
        for stream in list(self.streams.values()):
            stream.fail("a checkpoint was restored")

    # -- handing over ------------------------------------------------------------------------------

    def hand_over(self, handed: Future) -> None:
        """Take no more pushes. `handed` is done when every replica has everything, so that the heir
        may take over: True then. False: it may not. Asked again, the future before is done, too.
        """
        before, self._handed = self._handed, handed
        before.set_result(False)
        self._become(RoleEvent.HAND_OVER_ASKED)

    @property
    def is_handing_over(self) -> bool:
        """Whether pushes wait for that."""
        return self.role in HOLDS_PUSHES

    def _can_hand_over(self) -> bool:
        if self.shard.is_holding or self.placed.heir not in self.placed.replicas:
            return False
        streams = [self.streams.get(server) for server in self.placed.replicas]
        return all(
            stream is not None and stream.is_live and stream.acked >= self.applied
            for stream in streams
        )

    def keep(self) -> None:
        """It is not handed over after all; what was held comes again."""
        self._become(RoleEvent.KEPT)

    def _send_back(self) -> None:
        held, self._held = self._held, []
        for answer in held:
            answer.fail(Moved(f"partition {self.index} stays here: send it again"))

    # -- a replica ---------------------------------------------------------------------------------

    def follow(self, number: int, method: str, *arguments: Any) -> Deferred | None:
        """What the primary has applied as its change of that number, answered when it is applied
        here.
        """
        if number <= self.applied:
            return None
        if number > self.applied + 1:
            if len(self._early) >= EARLY_MAX:
                raise Moved(
                    f"partition {self.index}: change {self.applied + 1} is missing, "
                    f"{EARLY_MAX} later ones wait for it"
                )
            answer = Deferred()
            if number in self._early:  # sent again meanwhile: both are answered when it is applied
                follow(self._early[number][0], answer)
            else:
                self._early[number] = answer, (method, *arguments)
            return answer
        self._do(method, arguments)
        while self.applied + 1 in self._early:
            answer, (method, *rest) = self._early.pop(self.applied + 1)
            self._do(method, rest)
            answer.reply(None)
        return None

    def _do(self, method: str, arguments: Any) -> None:
        if method == "replay":
            client, sequence, table, decision, *arrays = arguments
            self._table(table).replay(decision, *arrays)
            self.shard.ledger.note(client, sequence)
        elif method == "assign":
            client, sequence, table, values = arguments
            self.shard.assign_dense(table, values)
            self.shard.ledger.note(client, sequence)
        elif method == "catch_up":
            table, decision = arguments
            self._table(table).catch_up(decision)
        elif method == "create_table":
            self.shard.create_table(*arguments)
        else:
            raise BadArguments(
                f"change {method!r}: replay, assign, catch_up, create_table are allowed"
            )
        self.applied += 1

    def _table(self, name: str) -> SparseTable | DenseTable:
        found = self._tables.get(name)
        if found is None:
            self._tables = tables_of(self.shard)
            found = self._tables.get(name)
        if found is None:
            raise BadArguments(
                f"the copy of partition {self.index} has no table {name!r}: copy it again"
            )
        return found


def _answer(waiting: deque[Unanswered], acked: int) -> None:
    """Those up to that number, in order."""
    while waiting and waiting[0][0] <= acked:
        _, answer, value = waiting.popleft()
        answer.reply(value)


def tables_of(shard: TableShard) -> dict[str, SparseTable | DenseTable]:
    """By name."""
    return {name: table for name, (_, table) in shard.tables.items()}
