"""The demo itself: start a cluster on this machine, train, watch, and hold the result against one
process with plain numpy.

    master, director  this process: the master, the progress, the live AUC, and in the end the
                      baseline
    server 0..        tables, in the process or in its shards
    worker 0..        each trains its share of the batches

A worker that dies is said, and the others go on. A server that dies takes its tables with it: that
ends the demo with ServerLost, unless there are copies of them (recovery.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prpc_engine.demo.baseline import BaselineReport, train_baseline, trivial_auc
from prpc_engine.demo.cluster import Cluster, Role
from prpc_engine.demo.data import Flights, load_flights
from prpc_engine.demo.model import prepare
from prpc_engine.demo.recovery import KILL_AT, DemoServers, Recovery
from prpc_engine.demo.roles import (
    DIRECTOR,
    START_TIMEOUT_S,
    DemoJob,
    connect_tables,
    run_server,
    run_worker,
)
from prpc_engine.demo.settings import DemoSettings
from prpc_engine.demo.training import create_tables, evaluate
from prpc_engine.errors import RpcError
from prpc_engine.kv import TableWorker
from prpc_engine.master.master import Master
from prpc_engine.service.service import RpcService
from shard import Future

EVALUATE_EVERY_S = 0.5  # the live AUC costs the servers some 10 ms each time
LOOK_EVERY_S = 0.05  # at processes that may have died
AUC_TOLERANCE = 0.005  # asynchronous workers against the baseline
# More workers compute from older values, and trail the baseline: 2 by 0.002 after 1 epoch, 3 by
# 0.005 after 4, 4 by 0.016 after 2, 8 by 0.02 after 3, 5 and 9 (2 cores, busy with other things).
COMPARED_WORKERS_MAX = 2
DEATH_S = 5.0  # from the end of a process's connections to its own
DIRECTOR_ITSELF = -1  # among the workers' numbers: training begins when it, too, has its tables


class DemoError(RpcError):
    """The demo cannot go on."""


class ServerLost(DemoError):
    """A server process ended while its tables were needed."""


class AllWorkersLost(DemoError):
    """No worker is left to train."""


@dataclass
class RunState:
    """What the screen shows while it runs."""

    phase: str = "loading the flights"
    examples: int = 0
    examples_total: int = 0
    loss: float = float("nan")
    auc: float = float("nan")
    started: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What came out. Rates are per second, times in seconds, latencies in microseconds."""

    auc: float
    auc_baseline: float
    auc_trivial: float
    auc_tolerance: float | None  # None: not held against the baseline
    workers_lost: int
    recoveries: list[Recovery]
    examples: int
    train_s: float
    examples_per_s: float
    baseline_examples_per_s: float
    messages_per_s: float
    megabytes_per_s: float
    call_us: dict[str, float]  # p50, p99, p99.9
    spent: dict[str, float]  # share of the workers' time, by what it was spent on
    test_examples: int
    rows_dropped: int
    settings: dict[str, Any]

    @property
    def agrees(self) -> bool:
        """Whether the cluster learned what one process learns; without a tolerance, more than
        guessing.
        """
        if self.auc_tolerance is None:
            return self.auc > self.auc_trivial
        return abs(self.auc - self.auc_baseline) <= self.auc_tolerance


class _Desk:
    """What the workers call."""

    def __init__(self, state: RunState, workers: int) -> None:
        self._state = state
        self._missing = {DIRECTOR_ITSELF, *range(workers)}
        self._all_ready = Future()
        self.finished_workers: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, str] = {}

    async def ready(self, worker: int) -> bool:
        """Answered once everybody is ready, or was lost."""
        self.arrived(worker)
        await self._all_ready
        return True

    def arrived(self, worker: int) -> None:
        """Wait for it no longer."""
        self._missing.discard(worker)
        if not self._missing and self._all_ready.set_result(None):
            self._state.phase = "training"
            self._state.started = time.monotonic()

    def progress(self, worker: int, examples: int, loss: float) -> None:
        """So many more examples, with that mean loss."""
        self._state.examples += examples
        self._state.loss = loss

    def finished(self, worker: int, examples: int, summary: dict[str, Any]) -> None:
        """Its last examples, and what it has to say about the whole."""
        self._state.examples += examples
        self.finished_workers[worker] = summary

    def failed(self, worker: int, reason: str) -> None:
        """It gives up."""
        self.failures[worker] = reason


def auc_tolerance_of(workers: int) -> float | None:
    """How far the cluster's test AUC may be from the baseline's; None where so many workers trail
    it that the difference tells nothing.
    """
    return AUC_TOLERANCE if workers <= COMPARED_WORKERS_MAX else None


def run_demo(
    servers: int,
    workers: int,
    shards: int,
    polling: bool,
    settings: DemoSettings,
    show: Callable[[RunState], None],
    replicas: int = 0,
    kill_server: bool = False,
) -> Report:
    """Run it; show(state) is called some twenty times a second. Raises DemoError and the errors of
    prpc_engine.

    replicas: copies of the tables at other servers; kill_server: kill -9 of a server in the middle,
    which needs one.
    """
    state = RunState()
    if auc_tolerance_of(workers) is None:
        state.notes.append(
            f"{workers} workers compute from older values than one process, and trail it: the "
            "result is held against guessing alone; with up to "
            f"{COMPARED_WORKERS_MAX} it is held against one process"
        )
    show(state)
    flights = load_flights()
    state.examples_total = len(flights.train) * settings.epochs
    secret = secrets.token_hex(16)
    with Master("127.0.0.1:0", secret=secret) as master, Cluster() as cluster:
        job = DemoJob(master.address, servers, shards, workers, polling, secret, settings, replicas)
        state.phase = f"starting {servers} servers and {workers} workers"
        show(state)
        with RpcService(master.address, secret=secret) as service:
            desk = _Desk(state, workers)
            service.create_server(
                DIRECTOR,
                {name: getattr(desk, name) for name in ("ready", "progress", "finished", "failed")},
            )
            test = prepare(flights.test, flights.vocabulary)
            direction = _Direction(
                service,
                job,
                lambda kv: evaluate(kv, test).auc,
                state,
                desk,
                cluster,
                kill_server,
                show,
            )
            auc = direction.run()
    state.phase = "training the baseline in one process"
    baseline = train_baseline(flights, settings, lambda: show(state))
    return _report(
        auc, flights, settings, desk, workers, baseline, job, direction.servers.recoveries
    )


class _Direction:
    """Watching one run from start to end. `auc_of` says what the tables know by now."""

    def __init__(
        self,
        service: RpcService,
        job: DemoJob,
        auc_of: Callable[[TableWorker], float],
        state: RunState,
        desk: _Desk,
        cluster: Cluster,
        kill_server: bool,
        show: Callable[[RunState], None],
    ) -> None:
        self._service = service
        self._job = job
        self._auc_of = auc_of
        self._state = state
        self._desk = desk
        self._kv: TableWorker | None = None
        self._is_to_kill = kill_server
        self._lost: set[int] = set()

        def start(index: int) -> Role:
            return cluster.start(f"server {index}", run_server, job, index)

        self.servers = DemoServers(job.servers, job.replicas, start, self._auc)
        self._workers = [
            cluster.start(f"worker {index}", run_worker, job, index) for index in range(job.workers)
        ]
        self._show = show

    def run(self) -> float:
        """Until every worker finished or was lost; the test AUC then."""
        self._kv = self._connect()
        self._desk.arrived(DIRECTOR_ITSELF)
        next_evaluation = time.monotonic() + EVALUATE_EVERY_S
        while not self.is_over():
            self._service.serve_forever(timeout_s=LOOK_EVERY_S)
            self.look()
            if self._state.phase == "training" and time.monotonic() >= next_evaluation:
                self._state.auc = self._evaluate()
                next_evaluation = time.monotonic() + EVALUATE_EVERY_S
            if self._is_to_kill and self._state.examples >= KILL_AT * self._state.examples_total:
                self._is_to_kill = not self.servers.kill_one()
            self._show(self._state)
        if not self._desk.finished_workers:
            raise AllWorkersLost("all workers were lost: " + "; ".join(self._state.notes))
        if self._is_to_kill:
            self._state.notes.append(
                "training was over before a server was killed: --epochs makes it longer"
            )
        self.servers.join()
        self._state.auc = self._evaluate()
        self._show(self._state)
        return self._state.auc

    def is_over(self) -> bool:
        """Whether every worker finished or was lost. One may be both: its end was seen before its
        last word was heard.
        """
        return len(self._lost | self._desk.finished_workers.keys()) == self._job.workers

    def _connect(self) -> TableWorker:
        """As soon as all servers are there; a look at the processes between tries."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.look()
            self._show(self._state)
            try:
                kv = connect_tables(self._service, self._job, LOOK_EVERY_S)
            except RpcError:
                if time.monotonic() > deadline:
                    raise
                continue
            create_tables(kv, self._job.settings)
            return kv

    def _auc(self) -> float:
        """Of the test set, now. In any thread: it looks at no process."""
        assert self._kv is not None
        return self._auc_of(self._kv)

    def _evaluate(self) -> float:
        try:
            return self._auc()
        except RpcError:
            self.servers.wait_for_death(DEATH_S)
            self.look()  # a lost server is the better explanation
            raise

    def look(self) -> None:
        """At the processes: raise for a lost server, note a lost worker."""
        if self._kv is not None:
            self.servers.replace_dead(self._state.examples, self._state.notes.append)
        role = self.servers.dead()
        if role is not None and self._kv is None:
            raise ServerLost(f"{role.death} before training began: run `prpc demo` again")
        if role is not None and not self._job.replicas:
            raise ServerLost(
                f"{role.death} after {self._state.examples:,} of {self._state.examples_total:,} "
                "examples, and its tables "
                "with it: run `prpc demo` again, with --replicas 1 for copies of the tables at "
                "other servers"
            )
        for index, role in enumerate(self._workers):
            # first: what it said before, has arrived then
            has_ended = role.process.exitcode is not None
            if index in self._lost or index in self._desk.finished_workers:
                continue
            if has_ended:
                self._lost.add(index)
                self._desk.arrived(index)
                reason = self._desk.failures.get(index)
                self._state.notes.append(
                    role.death + (f": {reason}" if reason else "") + "; the others go on"
                )


def _report(
    auc: float,
    flights: Flights,
    settings: DemoSettings,
    desk: _Desk,
    workers: int,
    baseline: BaselineReport,
    job: DemoJob,
    recoveries: list[Recovery],
) -> Report:
    done = list(desk.finished_workers.values())
    seconds = max(summary["seconds"] for summary in done)
    examples = sum(summary["examples"] for summary in done)
    latencies = np.concatenate([summary["latencies_us"] for summary in done])
    spent = {name: sum(summary["spent_s"][name] for summary in done) for name in done[0]["spent_s"]}
    worked = sum(summary["seconds"] for summary in done)
    return Report(
        auc=auc,
        auc_baseline=baseline.auc,
        auc_trivial=trivial_auc(flights),
        auc_tolerance=auc_tolerance_of(workers),
        workers_lost=workers - len(done),
        recoveries=recoveries,
        examples=examples,
        train_s=seconds,
        examples_per_s=examples / seconds,
        baseline_examples_per_s=baseline.examples_per_s,
        messages_per_s=sum(summary["messages"] for summary in done) / seconds,
        megabytes_per_s=sum(summary["bytes"] for summary in done) / seconds / 1e6,
        call_us={
            name: float(np.percentile(latencies, q))
            for name, q in (("p50", 50), ("p99", 99), ("p99.9", 99.9))
        },
        spent={name: value / worked for name, value in spent.items()},
        test_examples=len(flights.test),
        rows_dropped=flights.rows_dropped,
        settings={
            "servers": job.servers,
            "workers": job.workers,
            "shards": job.shards,
            "replicas": job.replicas,
            "polling": job.polling,
            "epochs": settings.epochs,
            "batch_examples": settings.batch_examples,
            "embedding_dim": settings.embedding_dim,
        },
    )
