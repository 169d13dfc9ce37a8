"""The server side of the key-value service: `TableShard` holds tables, `TableServer` puts it where
it runs.

With shards, each shard process holds a TableShard of its own and is a server of the service by
itself; inline, there is one in the application's process. To a worker both are just servers, and a
partition is one of them.

What is asked arrives as plain scalars, strings, dicts and read-only arrays; what is returned is the
caller's to keep.

A worker pushes by apply(), which looks into the partition's ledger (ledger.py) before and notes the
push in it after:

    the ledger says  and                     the push
    NEW              nothing is known of it  is applied, and noted when it has been: not while a
                                             gate holds it
    NEW              it is held by a gate    is not applied again: both are answered when it has
                                             been
    SEEN                                     is answered as it would be now
    FORGOTTEN                                is refused
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.descriptors import names_shortage
from prpc_engine.errors import BadArguments, ConfigError, Forgotten, NodeExists
from prpc_engine.idempotency_window import FORGOTTEN, SEEN
from prpc_engine.kv.checkpoint.files import Files
from prpc_engine.kv.checkpoint.gate import HeldTable
from prpc_engine.kv.checkpoint.manifest import CheckpointError
from prpc_engine.kv.checkpoint.methods import CheckpointMethods
from prpc_engine.kv.consistency.durable import Durable
from prpc_engine.kv.consistency.epochs import (
    Behind,
    RowsLost,
    Standing,
    asked_as,
    outdated,
    parsed,
)
from prpc_engine.kv.consistency.ledger import WINDOW, Ledger, LedgerNode
from prpc_engine.kv.consistency.paced_table import Paced
from prpc_engine.kv.consistency.versions import with_version
from prpc_engine.kv.schema.beginnings import beginnings_of
from prpc_engine.kv.schema.services import ServingService
from prpc_engine.kv.schema.table_spec import TableSpec, from_dict
from prpc_engine.kv.table.table import DenseTable, SparseTable
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.peer import calling_peer
from prpc_engine.settings.cluster_spec import PS
from prpc_engine.settings.config import check_seconds
from shard import Future, runtime

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
# client, sequence, verb, table, arrays
Applied = Callable[[int, int, str, str, tuple[Array, ...]], object]
TAKEN_AGAIN_S = 0.2  # between two tries to take an id that another server has
THIS_PROCESS = LedgerNode(0, "this process")  # as barrier_scheduler.py has it


class TableServer:
    """Offers key-value tables under `name`. The service owns what this makes, and closes it. It
    takes the role of a ps: NETWORK_PS_CORE_NUMBER, PS_ENABLE_POLLING and PS_DISABLE_PIN_CORES
    count, and a core number above 1 starts that many shards, pinned only where a setting says so.
    Shards that the service has already, by an argument, PRPC_SHARDS or the file, stay as they are,
    and a line in the log names the variables that came too late.

    checkpoint_root: workers may save to and restore from folders below it only; None: wherever this
    process may write.
    server_id: which of the servers this is, from 0 on; with shards its first one. It says which
    keys it holds, so a server in the place of one that ended is given the same, and waits until the
    lease of that one is over, `timeout_s` seconds at most. -1: the smallest that is free, which is
    another one where that lease goes on. Raises NodeExists after that time, and ConfigError.
    """

    @names_shortage("a TableServer")
    def __init__(
        self,
        service: ServingService,
        name: str = "kv",
        *,
        checkpoint_root: str | None = None,
        server_id: int = -1,
        timeout_s: float = 60.0,
    ) -> None:
        check_seconds("timeout_s", timeout_s)
        service.take_role(PS)
        self.name = name
        factory = partial(TableShard, checkpoint_root)
        is_sharded = service.shards > 0
        give_up_at = runtime.monotonic() + timeout_s
        while True:
            try:
                self.server = service.create_server(
                    name,
                    factory if is_sharded else factory(),
                    server_id=server_id,
                    sharded=is_sharded,
                    inline=not is_sharded,
                )
                break
            except NodeExists:  # held by the lease of the one before, or by one that lives
                if runtime.monotonic() >= give_up_at:
                    raise
                runtime.sleep(TAKEN_AGAIN_S)
        beginnings = beginnings_of(service, name)
        if beginnings is not None:
            beginnings.remember()


class TableShard(CheckpointMethods):
    """The tables of one partition. Its public methods are the protocol; calls come one at a time.

    Raises ConfigError for a bad or conflicting spec, BadArguments for an unknown table, or arrays
    that do not fit.
    """

    def __init__(
        self,
        checkpoint_root: str | None = None,
        files: Files | None = None,
        hold_s: float | None = None,
        clock: Callable[[], float] = runtime.now,
    ) -> None:
        super().__init__(checkpoint_root, files, hold_s, clock)
        self.ledger = Ledger(pusher=pushing_node)
        self.durable = Durable()
        self.life = runtime.randbits(62)
        # told of each push that apply() has applied, in that order
        self.on_applied: Applied | None = None
        # (client, sequence) of pushes that a gate holds
        self._held: dict[tuple[int, int], Deferred] = {}
        self._changes: dict[str, Callable[..., Any]] = {
            "push": self.push,
            "push_pull": self.push_pull,
            "push_dense": self.push_dense,
            "push_pull_dense": self.push_pull_dense,
            "push_pull_versioned": self.push_pull_versioned,
            "push_pull_dense_versioned": self.push_pull_dense_versioned,
            "assign_dense": self.assign_dense,
        }

    @property
    def tables(self) -> dict[str, tuple[TableSpec, SparseTable | DenseTable]]:
        """What there is: spec and table by name, also while a gate holds pushes."""
        bare: dict[str, SparseTable | DenseTable] = {**self._bare_sparse(), **self._bare_dense()}
        return {name: (self._specs[name], table) for name, table in bare.items()}

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being made of it."""
        return bool(self._save_id)

    @property
    def is_holding(self) -> bool:
        """Whether pushes wait to be applied."""
        return bool(self._held)

    def refuse_held(self, error: BaseException) -> None:
        """Pushes that wait to be applied are not: they fail with that error. No save holds what
        comes from now on.
        """
        for answer in list(self._held.values()):
            answer.fail(error)
        if self._waiting is not None:
            self._hold_is_over(self._waiting)

    def _extras(self) -> dict[str, Array]:
        """The ledger, for checkpoints."""
        self.durable.cut(self._save_id)
        return self.ledger.arrays() if len(self.ledger) else {}

    def _take_extras(self, saved: Sequence[dict[str, Array]], are_all: bool) -> None:
        self.durable.fail(CheckpointError("a checkpoint was restored before the push was in one"))
        if are_all:
            self.ledger = Ledger(pusher=self.ledger.pusher)
        for arrays in saved:
            self.ledger.load(arrays)

    def create_table(self, spec: dict[str, Any], epoch: int = 0, life: int = 0) -> bool | None:
        """Make the table that `spec` (TableSpec.to_dict()) describes: True when it is new, False
        when it is there.

        epoch, life: see epochs.py. Where this server has no such epoch and another life, the
        table's rows are lost: None, and verbs are answered with RowsLost. An older epoch of the
        table is dropped; Outdated: a newer one is here. ConfigError when another table has its
        name: an epoch of a table is never changed or replaced under its users.
        """
        wanted = from_dict(spec)
        present = self._specs.get(wanted.table)
        held, step = self._epochs.get(wanted.table, (0, -1))
        if present is not None and held == epoch:
            if present != wanted:
                if present.partition != wanted.partition:
                    raise ConfigError(
                        f"table {wanted.table!r}: this server holds partition {present.partition}, "
                        f"and was asked for {wanted.partition}: keys are dealt out by server ids, "
                        "and a server in the place of one that ended has taken another id; end "
                        "that one, and begin it with TableServer(server_id=...)"
                    )
                raise ConfigError(
                    f"table {wanted.table!r} is there with another spec: "
                    f"asked for {wanted.to_dict()}, "
                    f"there is {present.to_dict()}; every worker must use the same spec and "
                    "expected_servers"
                )
            return False
        if held > epoch:
            raise outdated(wanted.table, held, step)
        if epoch and life != self.life:
            return None
        if self._waiting is not None and present is not None:
            raise CheckpointError("a save is about to cut these tables: reset again after it")
        self._put(wanted, epoch)
        return True

    def _put(self, spec: TableSpec, epoch: int) -> None:
        """An empty table, in the place of what is there."""
        table, name = spec.make(self._clock), spec.table
        _, replaced = self.tables.get(name, (None, None))
        held, _ = self._epochs.get(name, (0, -1))
        if replaced is not None:
            self.durable.fail_of(name, _began_again(name))
            self._known = self._cut_at = None
            self._sparse.pop(name, None)
            self._dense.pop(name, None)
        if isinstance(table, SparseTable):
            self._sparse[name] = table
        else:
            self._dense[name] = table
        self._specs[name] = spec
        if epoch:
            self._epochs[name] = epoch, -1
        self._name_tables()
        if replaced is not None:
            self._replaced(name, replaced, held)

    def _replaced(self, name: str, table: SparseTable | DenseTable, epoch: int) -> None:
        if isinstance(table, Paced):
            now, step = self._epochs.get(name, (0, -1))
            table.begin_again(
                outdated(asked_as(name, epoch), now, step)
                if now
                else CheckpointError(f"table {name!r} was restored: this verb has not run")
            )

    def standing(self) -> Standing:
        """(life, {table that it has: the epoch}); see epochs.py."""
        return self.life, {name: self._epochs.get(name, (0, -1))[0] for name in self._specs}

    def apply(self, client: int, sequence: int, verb: str, table: str, *arrays: Array) -> Any:
        """A verb of those that change a table, once for each (client, sequence); see the file's
        head.
        """
        changes = self._changes.get(verb)
        if changes is None:
            raise BadArguments(f"verb {verb!r}: {', '.join(self._changes)} are allowed")
        known = self.ledger.find(client, sequence)
        if known is SEEN:
            self._comes_again(table)
            return self._applied_before(verb, table, arrays)
        if known is FORGOTTEN:
            raise Forgotten(
                f"push {sequence} of worker {client:x} is more than {WINDOW} pushes old: "
                "whether it was applied is not remembered"
            )
        held = self._held.get((client, sequence))
        if held is not None:
            self._comes_again(table)
            again = Deferred()
            follow(held, again)
            return again
        answer = changes(table, *arrays)
        if type(answer) is Deferred:
            self._held[client, sequence] = answer
            answer.when_done(lambda done: self._let_go(done, client, sequence, verb, table, arrays))
            return answer
        self.ledger.note(client, sequence)
        if self.on_applied is not None:
            self.on_applied(client, sequence, verb, table, arrays)
        return answer

    def apply_durable(self, *push: Any) -> Deferred:
        """apply(), answered when a checkpoint that holds the push is on the disk; CheckpointError
        where its table begins again before.
        """
        value, asked = self.apply(*push), push[3]
        if type(value) is not Deferred:
            return self._durable_answer(asked, value)
        answer = Deferred()
        value.when_done(lambda done: self._applied_later(done, asked, answer))
        return answer

    def _applied_later(self, done: Future, asked: str, answer: Deferred) -> None:
        error = done.error()
        if error is None:
            follow(self._durable_answer(asked, done.result()), answer)
        else:
            answer.fail(error)

    def _durable_answer(self, asked: str, value: Any) -> Deferred:
        """That of a push which has been applied, now or before."""
        if asked in self._asked_sparse or asked in self._asked_dense:
            return self.durable.wait(value, self._name_of(asked))
        answer = Deferred()  # of a beginning that is over: no save to come has the push
        answer.fail(_began_again(parsed(asked)[0]))
        return answer

    def checkpoint_durable(self, save_id: str) -> None:
        """The checkpoint that this server has cut for that save is on the disk."""
        self.durable.committed(save_id)

    def _comes_again(self, table: str) -> None:
        bare = self.tables.get(self._name_of(table))
        if bare is not None and isinstance(bare[1], Paced):
            bare[1].worker_is_here()

    def _let_go(
        self,
        done: Future,
        client: int,
        sequence: int,
        verb: str,
        table: str,
        arrays: tuple[Array, ...],
    ) -> None:
        del self._held[client, sequence]
        if done.error() is None:
            self.ledger.note(client, sequence)
            if self.on_applied is not None:
                self.on_applied(client, sequence, verb, table, arrays)

    def _applied_before(self, verb: str, table: str, arrays: tuple[Array, ...]) -> Any:
        found = self.tables.get(self._name_of(table))
        if found is None:
            raise self._absent("such", table)
        _, bare = found
        if "pull" not in verb:
            return bare.version
        # Past its pace: the pull is of a push that has waited for the others already.
        values = (
            SparseTable.pull(bare, arrays[0])
            if isinstance(bare, SparseTable)
            else DenseTable.pull(bare)
        )
        return [bare.version, values] if verb.endswith("_versioned") else values

    def pull(self, table: str, keys: Keys) -> Floats:
        """Rows of a sparse table: int64[n] -> float32[n, dim]."""
        return self._sparse_table(table).pull(keys)

    def push(self, table: str, keys: Keys, *grads: Array) -> Deferred | int:
        """Apply gradients, int64[n] and float32[n, dim] or what its compression makes of that, to a
        sparse table: its version.
        """
        return self._sparse_table(table).push(keys, *grads)

    def push_pull(self, table: str, keys: Keys, *grads: Array) -> Deferred | Floats:
        """push(), then the new rows."""
        return self._sparse_table(table).push_pull(keys, *grads)

    def pull_dense(self, table: str) -> Floats:
        """The whole local slice of a dense tensor."""
        return self._dense_table(table).pull()

    def push_dense(self, table: str, *grads: Array) -> Deferred | int:
        """Apply a gradient of the local slice's shape, or what its compression makes of that: the
        slice's version.
        """
        return self._dense_table(table).push(*grads)

    def push_pull_dense(self, table: str, *grads: Array) -> Deferred | Floats:
        """push_dense(), then the new slice."""
        return self._dense_table(table).push_pull(*grads)

    def assign_dense(self, table: str, values: Floats) -> Deferred | int:
        """Make these the values of the local slice of a dense tensor: its version."""
        return self._dense_table(table).assign(values)

    def pull_versioned(self, table: str, keys: Keys) -> Deferred | list[Any]:
        """[version, pull()]."""
        found = self._sparse_table(table)
        return with_version(found, found.pull(keys))

    def push_pull_versioned(self, table: str, keys: Keys, *grads: Array) -> Deferred | list[Any]:
        """[version, push_pull()]."""
        found = self._sparse_table(table)
        return with_version(found, found.push_pull(keys, *grads))

    def pull_dense_versioned(self, table: str) -> Deferred | list[Any]:
        """[version, pull_dense()]."""
        found = self._dense_table(table)
        return with_version(found, found.pull())

    def push_pull_dense_versioned(self, table: str, *grads: Array) -> Deferred | list[Any]:
        """[version, push_pull_dense()]."""
        found = self._dense_table(table)
        return with_version(found, found.push_pull(*grads))

    def statistics(self) -> dict[str, dict[str, int]]:
        """{table: the fields of its TableStatistics}: a plain dict, as it goes over the wire."""
        tables = [*self._sparse.items(), *self._dense.items()]
        return {name: asdict(table.statistics()) for name, table in tables}

    def workers(self) -> list[list[Any]]:
        """[number, name, pushes applied, {table: its Lag}] of each worker that has pushed: of the
        tables with a consistency.
        """
        found: dict[int, list[Any]] = {}
        for client, node, pushes in self.ledger.pushes():
            number, name = node or LedgerNode(client, f"worker {client:x}")
            found.setdefault(number, [number, name, 0, {}])[2] += pushes
        for name, (_, table) in self.tables.items():
            for number, (worker, lag) in table.lags().items() if isinstance(table, Paced) else ():
                found.setdefault(number, [number, worker, 0, {}])[3][name] = list(lag)
        return list(found.values())

    def _sparse_table(self, asked: str) -> SparseTable | HeldTable[SparseTable]:
        table = self._asked_sparse.get(asked)
        if table is None:
            raise self._absent("sparse", asked)
        return table

    def _dense_table(self, asked: str) -> DenseTable | HeldTable[DenseTable]:
        table = self._asked_dense.get(asked)
        if table is None:
            raise self._absent("dense", asked)
        return table

    def _name_of(self, asked: str) -> str:
        return asked if asked in self._specs else parsed(asked)[0]

    def _absent(self, kind: str, asked: str) -> Exception:
        name, epoch = parsed(asked)
        held, step = self._epochs.get(name, (0, -1))
        if epoch and name not in self._specs:
            return RowsLost(
                f"the rows of table {name!r} were in another process, which ended; "
                "this server began without them. restore() a checkpoint that has this table, or "
                "reset() to begin with an empty one"
            )
        if held > epoch > 0:
            return outdated(asked, held, step)
        if held < epoch:
            return Behind(
                f"table {name!r} began again, but not on this server yet: restore() or reset() "
                "it if this stays so"
            )
        there = (
            [*self._dense]
            if kind == "dense"
            else [*self._sparse]
            if kind == "sparse"
            else [*self._specs]
        )
        return BadArguments(
            f"no {kind} table {name!r} here; there are: {', '.join(sorted(there)) or 'none'}; "
            "create it first"
        )


def _began_again(table: str) -> CheckpointError:
    return CheckpointError(f"table {table!r} began again before the push was in a checkpoint")


def pushing_node() -> LedgerNode:
    """On whose behalf this runs, for the ledger."""
    peer = calling_peer()
    return (
        LedgerNode(peer.connection.peer_incarnation, str(peer.connection.peer))
        if peer is not None
        else THIS_PROCESS
    )


def follow(first: Future, second: Deferred) -> None:
    """Answer the second as the first is answered."""

    def answered(done: Future) -> None:
        error = done.error()
        if error is None:
            second.reply(done.result())
        else:
            second.fail(error)

    first.when_done(answered)
