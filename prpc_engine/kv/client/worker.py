"""The worker's side of the key-value service: verbs by table name, cut up over the servers and put
together again.

    verb       sparse table          dense table     answer
    pull       (table, keys)         (table)         float32[n, dim], or the whole tensor
    push       (table, keys, grads)  (table, grads)  None, once applied on every server concerned
    push_pull  (table, keys, grads)  (table, grads)  the values after the push

keys are int64[n], in any order, repeats allowed; grads float32[n, dim], or of the tensor's shape.
Each verb has a submit_ form that returns a KVFuture at once. Everything is checked before anything
is sent: BadArguments says what was asked and what is allowed. Pulled arrays may be read-only, being
what came off the wire; copy one to change it.

A push is applied once, whatever happens to connections meanwhile; after the deadline's error it was
applied once or not at all. What a lost connection has left unanswered is asked again
(partition_client.py): pulls too. pull_versioned gives, beside the values, the version of each
partition asked; what versions say, and when EpochChanged is raised, stands in session.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prpc_engine.client.retry import AT_ONCE
from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv.client.catalog import Catalog
from prpc_engine.kv.client.checkpoint_rounds import Folder, Rounds
from prpc_engine.kv.client.future import KVFuture, PartFuture, finish, partitions_of
from prpc_engine.kv.client.locator import Locator
from prpc_engine.kv.client.partition_client import (
    PartitionClient,
    PartitionRequest,
    RequestStatistics,
    fixed,
)
from prpc_engine.kv.client.recovery import Recovery
from prpc_engine.kv.client.session import NOTHING, Floors, Session, Versioned
from prpc_engine.kv.client.snapshot import kept
from prpc_engine.kv.consistency.cache import Cache, CacheStatistics, RowCache
from prpc_engine.kv.consistency.consistency import Consistency
from prpc_engine.kv.consistency.skew import Balance, WorkerLooks, balance_of, share_of
from prpc_engine.kv.schema.beginnings import beginnings_of, left_s
from prpc_engine.kv.schema.layout import (
    DENSE_SPLIT_BYTES_MIN,
    Dense,
    Sparse,
    join,
    restored,
    rows_of,
    spread,
)
from prpc_engine.kv.schema.schema import Schemas
from prpc_engine.kv.schema.services import CallingService, alone
from prpc_engine.kv.schema.table_spec import DenseSpec, SparseSpec, TableSpec, check_new
from prpc_engine.kv.schema.tree import PlacementNode
from prpc_engine.kv.table import partition
from prpc_engine.kv.table.admission import Admission
from prpc_engine.kv.table.checks import check_grads, check_keys
from prpc_engine.kv.table.compression import Compressor
from prpc_engine.kv.table.duplicates import sum_duplicates, unique
from prpc_engine.kv.table.eviction import Eviction
from prpc_engine.kv.table.gradients import check_finite
from prpc_engine.kv.table.initializer import Constant, Initializer
from prpc_engine.kv.table.optimizer import Optimizer
from prpc_engine.kv.table.table import TableStatistics
from prpc_engine.service.service import SERVERS_PATH
from prpc_engine.settings.config import check_seconds, check_timeout
from shard import control_loop, runtime

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Value = TypeVar("Value")
# what pushes are sent to
ACKS = {"applied": "apply", "replicated": "apply_replicated", "durable": "apply_durable"}
SAVE_TIMEOUT_S = 600.0  # of a whole checkpoint: hundreds of GB at 1 GB/s, and a slow disk's fsync
# as a call of the client itself: long enough for a busy server, short enough to be noticed
CALL_TIMEOUT_S = 30.0


class TableWorker:
    """A TableWorker pulls and pushes rows and tensors of tables, by name, at their servers.

    The service owns the client that this makes, and closes it. Verbs and what they answer: the
    table at the file's head.

    expected_servers: how many servers hold the tables, shards of a sharded one each counted; every
    worker must say the same. timeout_s: how many seconds to wait for them. call_timeout_s: the
    deadline of verbs that are given none, in seconds.
    elastic: the tables are held by ElasticServers, however many; a verb then raises EpochChanged,
    once, when something was lost.
    ack: when a push counts as done: "applied" by the server that has the keys; of elastic tables
    "replicated", when another one has it, too; or "durable", when a checkpoint with it is on the
    disk: somebody has to save() within its deadline.
    Tables that are not elastic lose state where a server process ends, by restore() or by reset():
    RowsLost or EpochChanged says so of any verb that asks a server. monotonic: the same of elastic
    ones, where a promoted replica may have less: no pull or push_pull shows less of a partition
    than this worker has seen of it, EpochChanged is raised instead, once. It costs an integer and
    a check a partition, so it is not the default; with ack="replicated" a replica never has less.
    clock: gives the seconds by which rows of a cache grow old.
    There is no ack "received": a push that waits at a server is in no ledger yet and could be lost;
    submit_push() waits for none.
    """

    def __init__(
        self,
        service: CallingService,
        name: str = "kv",
        expected_servers: int = 1,
        timeout_s: float = 10,
        call_timeout_s: float = CALL_TIMEOUT_S,
        elastic: bool = False,
        ack: str = "applied",
        monotonic: bool = False,
        clock: Callable[[], float] = runtime.now,
    ) -> None:
        self.name, self._service = name, service
        self._clock = clock
        check_seconds("call_timeout_s", call_timeout_s)
        self.call_timeout_s = call_timeout_s
        if ack not in ACKS or (ack == "replicated" and not elastic):
            raise ConfigError(
                f"TableWorker of {name!r}: ack={ack!r}; allowed: applied, durable, "
                "of elastic tables replicated"
            )
        self._session, identity = Session(name), runtime.randbits(62)
        servers = 1 if elastic else expected_servers
        # A lane looks for the partition elsewhere as soon as its server cannot be reached, and
        # keeps the deadline itself.
        self._client = service.create_client(
            name, expected_servers=servers, timeout_s=timeout_s, retry=AT_ONCE
        )
        self._is_monotonic = monotonic
        self._locate: Callable[[Sequence[PartitionClient]], Coroutine[Any, Any, None]] = _stay
        self._restoring: Callable[[str], object] = lambda load_id: None
        if elastic:
            node = PlacementNode(service.master_client, name, SERVERS_PATH)
            where = Locator(node, self._client, name, identity, self._session, timeout_s)
            addresses, self._locate, self._restoring = (
                where.addresses(),
                where.locate,
                where.restoring,
            )
            where.has_tables = lambda: self._tables
        else:
            addresses = fixed(self._client, name, expected_servers)
        self._known = (
            Schemas(service.master_client, name) if elastic else beginnings_of(service, name)
        )
        self._catalog = Catalog(name, len(addresses), self._session, self._ask, self._known)
        self._tables = self._catalog.layouts
        self._recovery = Recovery(self._locate)
        waiter = service.driver if elastic else None
        self._lanes = [
            PartitionClient(
                self._client,
                name,
                index,
                address,
                identity,
                self._recovery.add,
                ACKS[ack],
                elastic,
                waiter,
                self._catalog.began_again,
            )
            for index, address in enumerate(addresses)
        ]
        self._looks = WorkerLooks()

    @property
    def server_ids(self) -> tuple[int, ...]:
        """Who holds the tables, ascending; of elastic ones, as far as this worker knows."""
        return tuple(sorted({lane.address.server_id for lane in self._lanes}))

    # Tables

    def create_sparse(
        self,
        table: str,
        dim: int,
        optimizer: Optimizer | Mapping[str, Any],
        initializer: Initializer | Mapping[str, Any] | None = None,
        *,
        dtype: str = "float32",
        admission: Admission | Mapping[str, Any] | None = None,
        eviction: Eviction | Mapping[str, Any] | None = None,
        compression: Compressor | Mapping[str, Any] | None = None,
        consistency: Consistency | Mapping[str, Any] | None = None,
        cache: Cache | Mapping[str, Any] | None = None,
        nonfinite: str = "refuse",
        timeout_s: float | None = None,
    ) -> None:
        """Make int64 key -> row of `dim` numbers on every server, or find it there. Rows start as
        `initializer` says, else 0.

        dtype: what they are stored as, "float32", "float16" or "bfloat16"; float32 travels. A value
        above 65504 is stored as infinite in float16.
        admission: which keys get a row (kv.Admission), else all; eviction: which rows go again
        (kv.Eviction), else none. compression: how gradients travel (kv.Cast, kv.Int8), else as they
        are. consistency: how far workers may run apart (kv.Sync, kv.Ssp), else as they like.
        cache: rows that this worker keeps, and reads for so long (kv.Cache), else none; it does not
        go with a consistency, nor with monotonic. nonfinite: what becomes of a gradient that is NaN
        or infinite: "refuse" fails its push with BadArguments, and nothing changes; "skip" leaves
        its row as it is, and counts (rows_skipped of statistics()); "apply" applies it; these two
        do not go with a compression.
        ConfigError: a value is not allowed, or another table has the name.
        """
        start = initializer or Constant()
        policies: Any = (admission, eviction, compression, consistency, nonfinite)
        whole = SparseSpec(table, 0, len(self._lanes), optimizer, start, dim, dtype, *policies)  # type: ignore[arg-type]
        check_new(whole)
        made = RowCache.made(
            table,
            cache,
            dim,
            "monotonic" if self._is_monotonic else whole.consistency,
            self._clock,
        )
        self._catalog.create(spread(whole, len(self._lanes)), self._timeout(timeout_s), made)

    def create_dense(
        self,
        table: str,
        shape: Sequence[int],
        optimizer: Optimizer | Mapping[str, Any],
        initializer: Initializer | Mapping[str, Any] | None = None,
        *,
        dtype: str = "float32",
        compression: Compressor | Mapping[str, Any] | None = None,
        consistency: Consistency | Mapping[str, Any] | None = None,
        nonfinite: str = "refuse",
        names: Mapping[str, Sequence[int]] | None = None,
        split_bytes_min: int = DENSE_SPLIT_BYTES_MIN,
        timeout_s: float | None = None,
    ) -> None:
        """Make a tensor of `shape`, or find it there. Elements start as `initializer` says, else 0.

        dtype: what they are stored as, "float32", "float16" or "bfloat16"; float32 travels. A value
        above 65504 is stored as infinite in float16.
        compression: how gradients travel (kv.Cast, kv.Int8, kv.TopK), else as they are; what a push
        loses by it this worker adds to the next. consistency: how far workers may run apart
        (kv.Sync, kv.Ssp), else as they like. nonfinite: as of create_sparse().
        names: {name: shape} of what a tensor of one axis is made of, as checkpoints call it; its
        first values come by assign(). Its rows (axis 0) are spread evenly over the servers; a new
        tensor below `split_bytes_min` bytes lives whole on one.
        """
        start = initializer or Constant()
        policies: Any = (compression, consistency, nonfinite, tuple((names or {}).items()))
        described: Any = (optimizer, start, shape, 0, 0, dtype)  # DenseSpec reads mappings too
        whole = DenseSpec(table, 0, len(self._lanes), *described, *policies)
        check_new(whole)
        is_cut = 4 * math.prod(whole.shape) >= split_bytes_min
        self._catalog.create_dense(whole, is_cut, self._timeout(timeout_s))

    def reset(self, *tables: str, timeout_s: float | None = None) -> None:
        """Begin these tables anew, empty, or all that this worker knows: how to go on after
        RowsLost without a checkpoint.

        What servers still hold of them goes, too. Other workers are told by EpochChanged; what they
        pushed meanwhile is refused. Raises BadArguments for a table that this worker has not
        created, ConfigError where tables are elastic, RowsLost when a server ends meanwhile,
        EpochChanged when another worker has reset or restored meanwhile.
        """
        self._catalog.reset(tables, self._timeout(timeout_s))

    # Checkpoints

    def save(
        self,
        folder: Folder,
        step: int,
        *,
        keep: int | None = None,
        full_every: int = 1,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        """Write a checkpoint of all tables while training goes on; it is on the disk when this
        returns.

        folder: an absolute path on the servers' machines, one that all of them see. keep: so many
        of the newest are kept, with what they lie over; None: all. full_every: one of so many is
        full, others hold of sparse tables what changed since the one before (and are full, too,
        after a restart, a restore, or a save elsewhere). Within timeout_s it waits for other saves,
        for partitions that are being copied, and, where a server was lost, for the one in its place
        (of tables that are not elastic for call_timeout_s). Which pushes under way are in it:
        checkpoint/methods.py. Raises CheckpointError, those before it are as they were then; of its
        kind TooLate (a DeadlineExceeded, too) when timeout_s was not enough; RowsLost: a server
        came back without its rows of a table; ConfigError: a folder, step, keep or full_every is
        not allowed.
        """
        self._rounds(timeout_s).save(folder, step, keep, full_every)

    def restore(self, folder: Folder, *, timeout_s: float = SAVE_TIMEOUT_S) -> int:
        """Bring the newest whole checkpoint of `folder` back: the step it was saved with. The
        servers may be more or fewer now.

        Its tables are made, or take the place of those of the same name and spec; others stay. This
        worker then knows them all; other workers create them as always, and find them, or are told
        by EpochChanged that what they knew began again. A dense tensor that this worker has created
        stays cut as it is. Workers restore one after the other. Where tables have replicas, it
        returns when those have it, too, and begins again when a server is lost meanwhile. Raises
        CheckpointError when none is whole, ConfigError when a table is there with another spec;
        nothing has changed then.
        """
        found: dict[int, dict[str, TableSpec]] = {}

        def layout(saved: Mapping[str, Sequence[TableSpec]]) -> dict[int, dict[str, TableSpec]]:
            found.update({index: {} for index in range(len(self._lanes))})
            for table, parts in saved.items():
                for index, spec in restored(
                    parts, len(self._lanes), self._tables.get(table)
                ).items():
                    found[index][table] = spec
            return found

        check_timeout(timeout_s)
        until = runtime.monotonic() + timeout_s
        # of two that come together, the tables would be of both
        with self.alone("restore", timeout_s):
            step = self._rounds(left_s(until)).restore(
                folder,
                layout,
                lambda step: self._catalog.next_epochs(step, found, left_s(until)),
            )
            self._catalog.restored(found, step, left_s(until))
        return step

    def _rounds(self, timeout_s: float) -> Rounds:
        check_timeout(timeout_s)

        def locate() -> None:
            control_loop().spawn(self._locate(self._lanes)).result()

        lost_s = math.inf if isinstance(self._known, Schemas) else self.call_timeout_s
        asked_of, restoring = self._catalog.asked_of, self._restoring

        def began_again(message: str) -> None:  # of this the next verb tells, as a save goes on
            self._session.news.append(self._catalog.began_again(message))

        return Rounds(
            self._submit,
            range(len(self._lanes)),
            timeout_s,
            locate,
            asked_of,
            self._catalog.check_whole,
            lost_s,
            restoring,
            began_again,
        )

    # Verbs

    def pull(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> Floats:
        """The present values: pull(table, keys) -> float32[n, dim], row i for keys[i]; pull(table)
        -> the tensor.
        """
        return self.submit_pull(table, *arrays, timeout_s=timeout_s).result()

    def push(self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None) -> None:
        """Have gradients applied: push(table, keys, grads) or push(table, grads). Those of one key
        are summed first.
        """
        finish(*self._push(table, arrays, timeout_s, ()))

    def assign(
        self, table: str, values: npt.NDArray[Any], *, timeout_s: float | None = None
    ) -> None:
        """Make float32 values of its shape those of a dense tensor, for all workers, once: pushes
        go on from them.

        The state of its optimizer stays. Pushes of others meanwhile come before, or after, on each
        server for itself.
        """
        layout, whose = self._layout(table), f"assign to table {table!r}"
        if not isinstance(layout, Dense):
            raise BadArguments(f"{whose}: it is sparse; dense tables are allowed")
        whole = check_grads(whose, values, layout.shape)
        if layout.nonfinite == "refuse":  # here, so that no server has changed its part
            check_finite(whose, whole, what="value")
        whole = whole.reshape(layout.shape or (1,))
        seen, timeout = self._session.floors(table), self._timeout(timeout_s)
        parts = [
            self._lanes[i].push("assign_dense", timeout, layout.asked, whole[begin:end])
            for i, begin, end in layout.slices
        ]
        versions = finish(KVFuture(parts, list), parts)
        self._session.answered(table, seen, dict(zip(partitions_of(parts), versions, strict=True)))

    def alone(self, what: str, timeout_s: float | None = None) -> AbstractContextManager[object]:
        """A lock of all workers of these tables, at the master."""
        return alone(self._service, f"tables {self.name}: {what}", self._timeout(timeout_s))

    def push_pull(
        self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None
    ) -> Floats:
        """push(), then pull() of the same keys, in one message each way."""
        return finish(*self._push_pull(table, arrays, timeout_s, ()))

    def submit_pull(
        self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None
    ) -> KVFuture[Floats]:
        """pull() without waiting."""
        if self._is_monotonic:
            parts, versioned = self._pull_versioned(table, arrays, timeout_s)
            return KVFuture(parts, lambda answers: versioned(answers).values)
        return KVFuture(*self._pull("", table, arrays, timeout_s))

    def pull_versioned(
        self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None
    ) -> Versioned:
        """pull(), with the versions of the partitions that were asked."""
        return self.submit_pull_versioned(table, *arrays, timeout_s=timeout_s).result()

    def submit_pull_versioned(
        self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None
    ) -> KVFuture[Versioned]:
        """pull_versioned() without waiting. EpochChanged: this worker has seen more of a partition
        before it asked.
        """
        return KVFuture(*self._pull_versioned(table, arrays, timeout_s))

    def _pull_versioned(
        self, table: str, arrays: Sequence[Any], timeout_s: float | None
    ) -> tuple[list[PartitionRequest], Callable[[list[Any]], Versioned]]:
        seen = self._session.floors(table)
        parts, join_values = self._pull("_versioned", table, arrays, timeout_s)
        return parts, self._session.versioned(table, seen, partitions_of(parts), join_values)

    def _pull(
        self, variant: str, table: str, arrays: Sequence[Any], timeout_s: float | None
    ) -> tuple[list[PartitionRequest], Callable[[list[Floats]], Floats]]:
        """The requests, and what makes one of their answers' values."""
        layout = self._layout(table)
        if isinstance(layout, Dense):
            self._expect("pull", table, arrays, ())
            parts = [
                self._ask(index, f"pull_dense{variant}", timeout_s, layout.asked)
                for index, _, _ in layout.slices
            ]
            return parts, lambda answers: join(answers, layout.shape)
        self._expect("pull", table, arrays, ("keys",))
        # a row travels once
        keys, which = unique(check_keys(f"pull from table {table!r}", arrays[0]))
        if layout.cache is None or variant:
            parts, positions = self._ask_rows(f"pull{variant}", layout.asked, keys, timeout_s)
            return parts, rows_of(positions, len(keys), layout.dim, which)
        found = layout.cache.look_up(keys, self._session.losses)
        keys = keys[found.missing]
        parts, positions = self._ask_rows("pull", layout.asked, keys, timeout_s)
        return parts, layout.cache.joined(
            keys, found, rows_of(positions, len(keys), layout.dim, None), which
        )

    def _ask_rows(
        self, method: str, asked: str, keys: Keys, timeout_s: float | None
    ) -> tuple[list[PartitionRequest], list[npt.NDArray[np.intp]]]:
        """Ask each partition for its keys (none twice): as _scatter()."""
        parts, positions = [], []
        for lane, owned in zip(
            self._lanes, partition.split(keys, len(self._lanes)) if len(keys) else (), strict=False
        ):
            if len(owned):
                own = keys if len(owned) == len(keys) else keys[owned]
                parts.append(lane.ask(method, self._timeout(timeout_s), asked, own))
                positions.append(owned)
        return parts, positions

    def submit_push(
        self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None
    ) -> KVFuture[None]:
        """push() without waiting. The arrays may be changed as soon as this returns."""
        return self._push(table, arrays, timeout_s, arrays)[0]

    def submit_push_pull(
        self, table: str, *arrays: npt.NDArray[Any], timeout_s: float | None = None
    ) -> KVFuture[Floats]:
        """push_pull() without waiting. The arrays may be changed as soon as this returns."""
        return self._push_pull(table, arrays, timeout_s, arrays)[0]

    def statistics(
        self, *, timeout_s: float | None = None
    ) -> dict[int, dict[str, TableStatistics]]:
        """{server id: {table: what that server has done with it}}, asked of every server now.

        Of elastic tables it is the sum over the partitions that the server has: one push counts in
        each that it changes.
        """
        parts = [lane.ask("statistics", self._timeout(timeout_s)) for lane in self._lanes]
        merged: dict[int, dict[str, Counter[str]]] = {}
        for lane, answer in zip(self._lanes, KVFuture(parts, list).result(), strict=True):
            # who answered: asking may have told that it moved
            tables = merged.setdefault(lane.address.server_id, {})
            for table, fields in answer.items():
                tables.setdefault(table, Counter()).update(fields)
        return {
            server: {name: TableStatistics(**each) for name, each in tables.items()}
            for server, tables in sorted(merged.items())
        }

    def cache_statistics(self) -> dict[str, CacheStatistics]:
        """{table: what this worker's cache of it has done}, of the tables that have one."""
        layouts = self._tables.copy().items()  # other threads make tables meanwhile
        return {
            table: each.cache.statistics()
            for table, each in layouts
            if isinstance(each, Sparse) and each.cache is not None
        }

    def request_statistics(self) -> RequestStatistics:
        """How many requests of this worker have no answer, and what it does about those that were
        lost: where to look when a verb takes long. It asks no server.
        """
        return RequestStatistics(
            unanswered=sum(lane.unanswered() for lane in self._lanes),
            repeats=sum(lane.repeats for lane in self._lanes),
            lost=sum(not lane.is_whole for lane in self._lanes),
            is_recovering=self._recovery.is_running,
        )

    def balance(self, *, timeout_s: float | None = None) -> Balance:
        """Who has more than its share, and who is late, of servers and workers (skew.py), asked of
        all servers now.
        """
        tables = self.statistics(timeout_s=timeout_s)
        parts = [lane.ask("workers", self._timeout(timeout_s)) for lane in self._lanes]
        workers = self._looks.shares(runtime.monotonic(), KVFuture(parts, list).result())
        lanes: dict[int, list[float]] = {server_id: [] for server_id in tables}
        for lane in self._lanes:
            lanes.setdefault(lane.address.server_id, []).append(lane.answer_s)
        shares = [
            share_of(server_id, answers_s, tables.get(server_id, {}))
            for server_id, answers_s in lanes.items()
        ]
        requests = self.request_statistics()
        return balance_of(shares, workers, requests.repeats, requests.unanswered)

    # Parts

    def _timeout(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.call_timeout_s
        check_timeout(timeout_s)
        return timeout_s

    def _ask(
        self, index: int, method: str, timeout_s: float | None, /, *args: Any
    ) -> PartitionRequest:
        """A method of one partition that may run twice."""
        return self._lanes[index].ask(method, self._timeout(timeout_s), *args)

    def _submit(self, index: int, method: str, timeout_s: float, /, *args: Any) -> PartFuture:
        """A method of one partition that runs at most once."""
        address = self._lanes[index].address
        return self._client.submit_to(
            address.server_id, method, *address.arguments, *args, timeout_s=timeout_s
        )

    def _push(
        self, table: str, arrays: Sequence[Any], timeout_s: float | None, users: Sequence[Any]
    ) -> tuple[KVFuture[None], list[PartitionRequest]]:
        """users: those of the arrays that may be changed once this returns."""
        layout, seen = self._layout(table), self._session.floors(table)
        if isinstance(layout, Dense):
            parts = self._push_dense("push", "", table, layout, seen, arrays, timeout_s, users)
        else:
            keys, grads = self._summed(
                "push", table, layout, *self._checked("push", table, layout, arrays)
            )
            parts, _ = self._scatter("push", layout, keys, grads, timeout_s, users)

        def applied(versions: list[int]) -> None:
            gone_back = self._session.answered(
                table, seen, dict(zip(partitions_of(parts), versions, strict=True)), 1
            )
            if gone_back is not None:  # this push is applied: the next verb says it
                self._session.news.append(gone_back)

        if isinstance(layout, Sparse) and layout.cache is not None:
            return KVFuture(
                parts, layout.cache.forgetting(keys.copy() if users else keys, applied)
            ), parts
        return KVFuture(parts, applied), parts

    def _push_pull(
        self, table: str, arrays: Sequence[Any], timeout_s: float | None, users: Sequence[Any]
    ) -> tuple[KVFuture[Floats], list[PartitionRequest]]:
        layout, seen = self._layout(table), self._session.floors(table)
        variant = "_versioned" if self._is_monotonic else ""
        join_values: Callable[[list[Floats]], Floats]
        if isinstance(layout, Dense):
            parts = self._push_dense(
                "push_pull", variant, table, layout, seen, arrays, timeout_s, users
            )
            join_values = partial(join, shape=layout.shape)
        else:
            asked, grads = self._checked("push_pull", table, layout, arrays)
            keys, grads = self._summed("push_pull", table, layout, asked, grads)
            which = None if keys is asked else np.searchsorted(keys, asked)
            parts, positions = self._scatter(
                f"push_pull{variant}", layout, keys, grads, timeout_s, users
            )
            join_values = rows_of(positions, len(keys), layout.dim, which)
            if layout.cache is not None:
                join_values = layout.cache.forgetting(keys.copy() if users else keys, join_values)
        if self._is_monotonic:
            versioned = self._session.versioned(table, seen, partitions_of(parts), join_values, 1)
            return KVFuture(parts, lambda answers: versioned(answers).values), parts
        return KVFuture(parts, join_values), parts

    def _scatter(
        self,
        verb: str,
        layout: Sparse,
        keys: Keys,
        grads: Floats,
        timeout_s: float | None,
        users: Sequence[Any],
    ) -> tuple[list[PartitionRequest], list[npt.NDArray[np.intp]]]:
        """Send each partition its keys and gradients; those that own none of the keys hear of a
        paced table's pushes only.

        Returns the parts and, for each, the positions of its keys. One part means all keys, in
        their order.
        """
        if layout.cache is not None:
            layout.cache.forget(keys)
        parts, positions = [], []
        timeout = self._timeout(timeout_s)
        for lane, owned in zip(self._lanes, partition.split(keys, len(self._lanes)), strict=True):
            if len(owned) or layout.is_paced:
                arrays: list[npt.NDArray[Any]] = [keys, grads]
                if len(owned) < len(keys):
                    arrays = [array[owned] for array in arrays]
                if layout.compression is not None:
                    arrays[1:] = layout.compression.encode(arrays[1])
                if users:
                    arrays = [
                        kept(each) if any(each is given for given in users) else each
                        for each in arrays
                    ]
                parts.append(lane.push(verb, timeout, layout.asked, *arrays))
                positions.append(owned)
        return parts, positions

    def _push_dense(
        self,
        verb: str,
        variant: str,
        table: str,
        layout: Dense,
        seen: Floors,
        arrays: Sequence[Any],
        timeout_s: float | None,
        users: Sequence[Any],
    ) -> list[PartitionRequest]:
        self._expect(verb, table, arrays, ("grads",))
        whose = f"{verb} to dense table {table!r}"
        grads = check_grads(whose, arrays[0], layout.shape)
        if layout.nonfinite == "refuse":
            check_finite(whose, grads)
        if not layout.shape:
            grads = grads.reshape(1)  # one row to the servers
        method, timeout = f"{verb}_dense{variant}", self._timeout(timeout_s)
        parts = []
        for number, (index, begin, end) in enumerate(layout.slices):
            push, part = (
                partial(self._lanes[index].push, method, timeout, layout.asked),
                grads[begin:end],
            )
            if layout.feedback is not None:
                beginning = seen.get(index, NOTHING).rollbacks
                request, undo = layout.feedback[number].send(part, push, beginning)
                request.undo = undo
                parts.append(request)
            else:
                parts.append(push(kept(part) if users else part))
        return parts

    # Checks

    def _layout(self, table: str) -> Dense | Sparse:
        self._session.tell()
        layout = self._tables.get(table)
        if layout is None:
            there = ", ".join(sorted(self._tables)) or "none"
            raise BadArguments(
                f"table {table!r} of {self.name!r} is not known to this worker; it has created: "
                f"{there}; "
                f"call create_sparse or create_dense first, also when another worker has"
            )
        return layout

    def _expect(self, verb: str, table: str, arrays: Sequence[Any], names: Sequence[str]) -> None:
        if len(arrays) != len(names):
            kind = "dense" if isinstance(self._tables[table], Dense) else "sparse"
            allowed = ", ".join((repr(table), *names))
            raise BadArguments(
                f"{verb} of {kind} table {table!r} with {len(arrays)} arrays; {verb}({allowed}) "
                "is allowed"
            )

    def _checked(
        self, verb: str, table: str, layout: Sparse, arrays: Sequence[Any]
    ) -> tuple[Keys, Floats]:
        self._expect(verb, table, arrays, ("keys", "grads"))
        whose = f"{verb} to sparse table {table!r}"
        keys = check_keys(whose, arrays[0])
        return keys, check_grads(whose, arrays[1], (len(keys), layout.dim))

    def _summed(
        self, verb: str, table: str, layout: Sparse, keys: Keys, grads: Floats
    ) -> tuple[Keys, Floats]:
        keys, grads = sum_duplicates(keys, grads)
        if layout.nonfinite == "refuse":  # here, so that no server has applied its part of the push
            check_finite(f"{verb} to sparse table {table!r}", grads, keys)
        return keys, grads


async def _stay(lanes: Sequence[PartitionClient]) -> None:
    """Partitions of tables that are not elastic are where they were."""
