"""Push and pull between one worker and one server process, inline on both sides, polling; and
between several of each.

Expected, beside the same table called in this process with no message at all:
    64 keys x 16, pull or push  a call (6 us over shm, 14 over tcp), key arrays wrapped on both
                                sides, the table's lookup of 64 keys (some 20 us with numpy): 40 us.
                                With 16 under way the two processes overlap: the slower one's work,
                                25 us.
    10,000 keys x 16            640 kB of rows, 80 kB of keys: the table's work, 0.5 ms or more,
                                outweighs the transport, some 0.1 ms for the copies. Over tcp, 0.3
                                ms more.
    10,000 keys x 64, of 10 k   the table grows from 2.6 MB, which fits a second-level cache, to 2.6
      to 10 M                   GB, which fits none: a key costs three times as much, and no more,
                                as the index is asked in one pass.
    dense 4 MB                  pull: a copy by the table, sent by reference: 0.5 ms. push: one copy
                                to send, one pass of the optimizer: 1.5 ms. push_pull: both.
    100,000 keys x 64, of 10 M  25.6 MB of rows, each with its cache misses in 2.6 GB: 5 ms to
                                gather, twice that to change. Each candidate makes such a table
                                first: 3.2 GB of memory, some 10 s.
    servers x workers           each worker pulls and pushes 10,000 keys x 16, one after the other,
                                as fast as it goes: 0.8 ms a pair. From two servers on a worker cuts
                                its keys up and puts the rows together, 0.4 ms more of its own core,
                                while each server has less to do. With a core for each process N
                                servers and N workers do N times what two and one do; without, all
                                share the cores there are, marked "oversubscribed": more workers
                                change nothing, more servers cost that and the switches between
                                processes. Polling is off, or pollers would have the cores of those
                                who work.

    python -m perf.bench_kv [--json] [--quick]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine
import shard
from prpc_engine.kv import Constant, Sgd, TableServer, TableShard, TableWorker
from prpc_engine.kv.schema.table_spec import DenseSpec, SparseSpec

from .child import START_S_MAX, STOP_LOOK_S, Announce, Child, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .peers.prpc import only_core, serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each, time_many

NAME = "kv"
TABLE = "t"
# of which each operation takes others: as many rows as do not fit into the second-level cache
KEYS_IN_TABLE = 200_000
FILL_KEYS = 100_000  # pushed at a time while the table is made
CHECKED_KEYS = 30_000  # about so many are looked at in the end
KEY_SETS = 8
LEARNING_RATE = 1.0  # with gradients of 1, each push lowers a value by exactly 1
WINDOW_FIRST = 64
COUNTS = (1, 2, 4, 8)  # of servers, and of workers
GRID_REPEATS_MAX = 2  # of sixteen candidates with up to 18 processes each


@dataclass(frozen=True, slots=True)
class Sparse:
    """`verb` for `keys` random keys of `keys_in_table` rows float32[dim]; `window` > 1: so many
    under way.
    """

    verb: str
    keys: int
    dim: int
    window: int = 1
    keys_in_table: int = KEYS_IN_TABLE

    @property
    def size_bytes(self) -> int:
        """Keys, and rows once or twice."""
        return self.keys * 8 + self.keys * self.dim * 4 * (2 if self.verb == "push_pull" else 1)

    def __str__(self) -> str:
        under_way = f", {self.window} in flight" if self.window > 1 else ""
        of_many = (
            f" of {self.keys_in_table / 1e6:g} M" if self.keys_in_table != KEYS_IN_TABLE else ""
        )
        return f"{self.verb}, {self.keys} keys x {self.dim}{of_many}{under_way}"


@dataclass(frozen=True, slots=True)
class Dense:
    """`verb` for a tensor float32[rows, 1000]."""

    verb: str
    rows: int
    window: int = 1

    @property
    def size_bytes(self) -> int:
        """The tensor, once or twice."""
        return self.rows * 4000 * (2 if self.verb == "push_pull" else 1)

    def __str__(self) -> str:
        return f"{self.verb}, dense {self.rows * 4000 / 1e6:g} MB"


@dataclass(frozen=True, slots=True)
class Grid:
    """Every number of servers with every number of workers, each of which pulls `keys` rows
    float32[dim] and pushes to them.
    """

    keys: int
    dim: int
    counts: tuple[int, ...] = COUNTS

    @property
    def size_bytes(self) -> int:
        """Keys and rows, both ways."""
        return 2 * self.keys * (8 + self.dim * 4)

    def __str__(self) -> str:
        return f"servers x workers, pull and push, {self.keys} keys x {self.dim} a worker"


Case = Sparse | Dense | Grid
LARGE_PULL = Sparse("pull", 100_000, 64, keys_in_table=10_000_000)
LARGE_PUSH = Sparse("push", 100_000, 64, keys_in_table=10_000_000)
CASES: list[Case] = [
    Sparse("pull", 64, 16),
    Sparse("pull", 64, 16, window=16),
    Sparse("push", 64, 16),
    Sparse("pull", 10_000, 16),
    Sparse("push", 10_000, 16),
    Sparse("push_pull", 10_000, 16),
    *(
        Sparse(verb, 10_000, 64, keys_in_table=10**power)
        for power in (4, 5, 6, 7)
        for verb in ("pull", "push")
    ),
    LARGE_PULL,
    LARGE_PUSH,
    Dense("pull", 1000),
    Dense("push", 1000),
    Dense("push_pull", 1000),
    Grid(10_000, 16),
]
ALONE = "the table alone"
TARGETS = [
    Target(str(LARGE_PULL), "prpc kv, shm", "million_keys_per_s", "at least", 3),
    Target(str(LARGE_PUSH), "prpc kv, shm", "million_keys_per_s", "at least", 3),
    Target(str(LARGE_PUSH), ALONE, "memory_over_raw", "at most", 1.3),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case over each transport, and with no transport; of a grid each of its points."""
    if isinstance(case, Grid):
        return run_grid(case, effort, progress, pinned)
    candidates = [
        Candidate("prpc kv, shm", "ours", partial(measure, case=case, transport="shm")),
        Candidate("prpc kv, tcp", "ours", partial(measure, case=case, transport="tcp")),
        Candidate(ALONE, "limit", partial(measure_table, case=case)),
    ]
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def serve(announce: Announce, master: str, transport: str) -> None:
    """A key-value server, until SIGTERM."""
    stop = StopRequest()
    with prpc_engine.RpcService(
        master=master, polling=True, transports=[transport], pin=only_core()
    ) as service:
        TableServer(service)
        announce(service.rank)
        while not stop.asked:
            service.serve_forever(timeout_s=STOP_LOOK_S)


def measure(place: Place, effort: Effort, case: Sparse | Dense, transport: str) -> Sample:
    """Time each verb, or with a window the rate of its submit_ form; then look at what the pushes
    came to.
    """
    with (
        place.serve_aside(serve_master) as (_, master),
        place.serve(serve, master, transport),
        prpc_engine.RpcService(
            master=master, polling=True, transports=[transport], pin=only_core()
        ) as service,
    ):
        worker: Any = TableWorker(service, timeout_s=WAIT_S_MAX)
        optimizer = Sgd(learning_rate=LEARNING_RATE)
        if isinstance(case, Sparse):
            worker.create_sparse(TABLE, case.dim, optimizer)
        else:
            worker.create_dense(TABLE, (case.rows, 1000), optimizer)
        work = _Work(case, partial(worker.push, TABLE), partial(worker.pull, TABLE))
        verb = partial(getattr(worker, case.verb), TABLE)
        if case.window == 1:
            sample = time_each(lambda: verb(*work.next_arrays()), effort)
        else:
            sample = _under_way(
                partial(getattr(worker, f"submit_{case.verb}"), TABLE), work, case.window, effort
            )
        return work.check(_with_keys(sample, case))


def measure_table(place: Place, effort: Effort, case: Sparse | Dense) -> Sample:
    """The server's object, called as the server would call it, in this process."""
    table = TableShard()
    optimizer = Sgd(learning_rate=LEARNING_RATE)
    if isinstance(case, Sparse):
        table.create_table(SparseSpec(TABLE, 0, 1, optimizer, Constant(), case.dim).to_dict())
        suffix = ""
    else:
        shape = (case.rows, 1000)
        table.create_table(
            DenseSpec(TABLE, 0, 1, optimizer, Constant(), shape, 0, case.rows).to_dict()
        )
        suffix = "_dense"
    work = _Work(
        case,
        partial(getattr(table, f"push{suffix}"), TABLE),
        partial(getattr(table, f"pull{suffix}"), TABLE),
    )
    verb = partial(getattr(table, f"{case.verb}{suffix}"), TABLE)
    sample = work.check(_with_keys(time_each(lambda: verb(*work.next_arrays()), effort), case))
    if isinstance(case, Sparse):
        there = table.statistics()[TABLE]
        sample.figures["memory_over_raw"] = there["bytes"] / (there["rows"] * (8 + 4 * case.dim))
    return sample


def run_grid(
    case: Grid, effort: Effort, progress: Callable[[str], None] | None, pinned: bool
) -> list[Result]:
    """Measure each number of servers with each number of workers."""
    candidates = []
    for servers in case.counts:
        for workers in case.counts:
            name = f"{servers} server{'s' * (servers > 1)} x {workers} worker{'s' * (workers > 1)}"
            if servers + workers > len(shard.usable_cores()):
                name += ", oversubscribed"
            measured = partial(measure_grid, case=case, servers=servers, workers=workers)
            candidates.append(Candidate(name, "ours", measured))
    effort = replace(effort, repeats=min(effort.repeats, GRID_REPEATS_MAX))
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def measure_grid(place: Place, effort: Effort, case: Grid, servers: int, workers: int) -> Sample:
    """The rate of all workers together, who begin at the same time; then look at what their pushes
    came to.
    """
    with place.serve_aside(serve_master) as (_, master), ExitStack() as stack:

        def start(count: int, target: Callable[..., None], *more: object) -> list[Child]:
            return [
                stack.enter_context(Child(target, master, *more, cores=place.other_cores))
                for _ in range(count)
            ]

        start(servers, serve_idle)
        working = start(workers, work_in_grid, case, servers, workers, effort)
        service = stack.enter_context(prpc_engine.RpcService(master=master))
        table = _grid_table(service, case, servers)
        for begin in range(0, KEYS_IN_TABLE, FILL_KEYS):
            some = np.arange(begin, min(begin + FILL_KEYS, KEYS_IN_TABLE))
            table.push(TABLE, some, np.ones((len(some), case.dim), np.float32))
        service.master_client.barrier(TABLE, workers + 1, timeout_s=START_S_MAX)
        done = [child.receive() for child in working]
        pushes = sum(operations for operations, _ in done)
        total = table.pull(TABLE, np.arange(KEYS_IN_TABLE)).sum(dtype=np.float64)
        sample = Sample(
            ops=pushes, ops_per_s=sum(operations / took_s for operations, took_s in done)
        )
        if sample.ops_per_s is not None:
            sample.figures["million_keys_per_s"] = 2 * sample.ops_per_s * case.keys / 1e6
        wanted = (KEYS_IN_TABLE + pushes * case.keys) * case.dim
        return sample.with_work(total=int(-total), wanted=wanted, operations=pushes)


def serve_idle(announce: Announce, master: str) -> None:
    """A key-value server that gives its core to others while nothing comes, until SIGTERM."""
    stop = StopRequest()
    with prpc_engine.RpcService(master=master) as service:
        TableServer(service)
        while not stop.asked:
            service.serve_forever(timeout_s=STOP_LOOK_S)


def work_in_grid(
    announce: Announce, master: str, case: Grid, servers: int, workers: int, effort: Effort
) -> None:
    """One worker: (operations, seconds that they took)."""
    with prpc_engine.RpcService(master=master) as service:
        table = _grid_table(service, case, servers)
        chooser = np.random.default_rng(service.rank)
        sets = [chooser.choice(KEYS_IN_TABLE, case.keys, replace=False) for _ in range(KEY_SETS)]
        grads = np.ones((case.keys, case.dim), np.float32)
        service.master_client.barrier(TABLE, workers + 1, timeout_s=START_S_MAX)
        began = time.perf_counter()
        operations = 0
        while operations < effort.ops_min or time.perf_counter() - began < effort.timed_s:
            keys = sets[operations % KEY_SETS]
            table.pull(TABLE, keys)
            table.push(TABLE, keys, grads)
            operations += 1
        announce((operations, time.perf_counter() - began))


def _grid_table(service: prpc_engine.RpcService, case: Grid, servers: int) -> TableWorker:
    table = TableWorker(service, expected_servers=servers, timeout_s=START_S_MAX)
    table.create_sparse(TABLE, case.dim, Sgd(learning_rate=LEARNING_RATE))
    return table


class _Work:
    """The arrays of one run, and what the table must hold after it."""

    def __init__(
        self,
        case: Sparse | Dense,
        push: Callable[..., None],
        pull: Callable[..., NDArray[np.float32]],
    ) -> None:
        self._case = case
        self._pull = pull
        self._turn = 0
        self._sets: list[tuple[NDArray[Any], ...]]
        if isinstance(case, Dense):
            self._sets = [(np.ones((case.rows, 1000), np.float32),)]
        else:
            chooser = np.random.default_rng(20240817)
            # the table grows before anything is timed
            for begin in range(0, case.keys_in_table, FILL_KEYS):
                some = np.arange(begin, min(begin + FILL_KEYS, case.keys_in_table))
                push(some, np.ones((len(some), case.dim), np.float32))
            grads = np.ones((case.keys, case.dim), np.float32)
            self._sets = [
                (chooser.choice(case.keys_in_table, case.keys, replace=False), grads)
                for _ in range(KEY_SETS)
            ]

    def next_arrays(self) -> tuple[NDArray[Any], ...]:
        """What the verb takes: keys, gradients, both or none."""
        arrays = self._sets[self._turn % len(self._sets)]
        self._turn += 1
        if isinstance(self._case, Dense):
            return () if self._case.verb == "pull" else arrays
        return arrays[:1] if self._case.verb == "pull" else arrays

    def check(self, sample: Sample) -> Sample:
        """With the count of values that are what so many pushes of 1 make of 0, and of all that
        were looked at.
        """
        pushes = 0 if self._case.verb == "pull" else self._turn
        if isinstance(self._case, Dense):
            values = self._pull()
            wanted = np.full(values.shape, -float(pushes), np.float32)
        else:
            counts = np.ones(self._case.keys_in_table, np.int64)
            for index, arrays in enumerate(self._sets):
                counts[arrays[0]] += pushes // KEY_SETS + (index < pushes % KEY_SETS)
            keys = np.arange(
                0, self._case.keys_in_table, max(1, self._case.keys_in_table // CHECKED_KEYS)
            )
            values = self._pull(keys)
            wanted = np.repeat(-counts[keys].astype(np.float32)[:, None], values.shape[1], axis=1)
        return sample.with_work(
            values_right=int((values == wanted).sum()),
            values=int(values.size),
            operations=self._turn,
        )


def _under_way(submit: Callable[..., Any], work: _Work, window: int, effort: Effort) -> Sample:
    def send(count: int) -> None:
        waiting: deque[Any] = deque()
        for sent in range(count + window):
            if sent < count:
                waiting.append(submit(*work.next_arrays()))
            if window <= sent:
                waiting.popleft().result()

    return time_many(send, effort, WINDOW_FIRST, effort.ops_max)[0]


def _with_keys(sample: Sample, case: Sparse | Dense) -> Sample:
    if isinstance(case, Sparse) and sample.ops_per_s:
        sample.figures["million_keys_per_s"] = sample.ops_per_s * case.keys / 1e6
    return sample


def test_after_the_pushes_every_value_is_what_they_make_it() -> None:
    for case in (
        Sparse("push", 64, 16),
        Sparse("push_pull", 10_000, 16),
        Sparse("pull", 64, 16, window=16),
        Sparse("push", 5000, 64, keys_in_table=250_000),
        Dense("push_pull", 20),
    ):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            assert result.work["values_right"] == result.work["values"] > 0
            assert result.work["operations"] >= TINY.ops_min


def test_in_a_grid_every_push_of_every_worker_counts() -> None:
    for result in run(Grid(64, 16, counts=(2,)), TINY):
        assert result.state == "ok", result.note
        assert result.work["total"] == result.work["wanted"] > 0
        assert result.ops_per_s


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
