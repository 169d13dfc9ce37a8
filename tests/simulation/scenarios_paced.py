"""Tables of a consistency (ssp, sync) that workers save, restore and reset, any of which may be
killed and come again. All that is promised in scenarios_recovery.py, and

    operation            promise                                   how it is checked
    a verb that waits    for workers that are there, and for       it ends within PATIENCE_S, which
                          those that have not come since the        is less than its deadline
                          table began; not for a dead one, nor
                          in a table that began again; but where
                          a worker died as it restored or reset,
                          until the deadline
    Ssp(bound), Sync     no worker gets further ahead of another   of two pushes that one has ended
                          one that is there                         more of than FREE, another one
                                                                    has begun some in between
    liveness             all workers push to, and pull from, the   within END_S
                          table once the faults are over

A worker is there from its first push to a beginning of the table that was answered, to its end or
to the end of that beginning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

from prpc_engine import RpcService
from prpc_engine.kv import Add, Consistency, Ssp, Sync, WorkersBehind
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation import scenarios_recovery as recovery
from tests.simulation.jobs import begin, begin_master, journal_folder
from tests.simulation.scenarios_recovery import SERVERS, SUMS, UNTIL_S, Jobs
from tests.simulation.scenarios_tables import serve

WORKERS, BOUND = 3, 2
TIMEOUT_S, PATIENCE_S = 20.0, 10.0
END_S = UNTIL_S + 60.0
NAMES = tuple(f"worker{each}" for each in range(WORKERS))
RATES = Rates(cut=0.0, reset=1.0, kill=0.6, crash=0.0, stop=0.3, slow=0.2, clock=0.2, drift=0.1)
LASTS_S = 0.6  # a fault: who is silent for longer is taken for gone


class PacedJobs(Jobs):
    """Three workers of one table."""

    def __init__(self, simulation: Simulation, folder: str, consistency: Consistency) -> None:
        super().__init__(simulation, folder)
        self.consistency = consistency
        # One may be behind by bound + 1 as another one begins, and then get ahead of that by as
        # many and one; and an answer may be on its way.
        self.free = 2 * consistency.bound + 4 if isinstance(consistency, Ssp) else 2
        # by epoch, of each that is there: how many pushes of each other one ended since its last
        self.ended_since: dict[int, dict[Process, dict[Process, int]]] = {}
        self.beginning_again: set[Process] = set()  # the table, by a restore or a reset

    @property
    def is_cut_short(self) -> bool:
        """Whether a worker died as it began the table again: servers may differ."""
        return any(process.is_dead for process in self.beginning_again)

    def work(self, ours: RpcService, process: Process) -> None:
        Worker(self, ours, process, (SUMS,)).run()

    def are_done(self) -> bool:
        return self.done.issuperset(NAMES)

    def begun(self, process: Process, epoch: int) -> None:
        """A push of it."""
        since = self.ended_since.get(epoch, {}).get(process)
        if since is not None:
            since.clear()

    def ended(self, process: Process, epoch: int) -> None:
        """A push of it was answered."""
        there = self.ended_since.setdefault(epoch, {})
        there.setdefault(process, {})
        for other, since in there.items():
            if other is not process and not other.is_dead:
                since[process] = since.get(process, 0) + 1
                assert since[process] <= self.free, (
                    f"{process.name} has ended {since[process]} pushes since {other.name} began one"
                )

    def run(self, has_journal: bool = True, disk: str | None = None) -> None:
        simulation = self.simulation
        with journal_folder() as journal:
            begin_master(simulation, journal)
            for each in range(SERVERS):
                begin(simulation, f"server{each}", serve)
            for name in NAMES:
                begin(simulation, name, self.work)
            simulation.let_loose(RATES, UNTIL_S, NAMES, lasts_s=LASTS_S)
            ended = simulation.run(self.are_done, END_S)
            assert ended, f"only {sorted(self.done)} have got on {END_S:g} s after all began"
        assert not self.deadlines.late or self.is_cut_short, self.deadlines.late


class Worker(recovery.Worker):
    """It pushes as long as others may wait for it."""

    jobs: PacedJobs
    timeout_s, patience_s, columns = TIMEOUT_S, PATIENCE_S, 2000

    def make(self, table: str) -> None:
        self.kv.create_sparse(
            table,
            self.columns,
            Add(),
            consistency=self.jobs.consistency,
            timeout_s=recovery.TIMEOUT_S,
        )

    def act(self) -> None:
        chance, table = self.draw(), SUMS
        if chance < 0.75:
            self.write(table)
        elif chance < 0.85:
            self.read(table)
        elif chance < 0.93:
            self.save()
        elif chance < 0.98:
            self.restore()
        else:
            self.reset([table])

    def rest(self) -> None:
        while True:
            self.write(SUMS)
            runtime.sleep(0.1 * self.draw())

    def ask(self, table: str, verb: Any, *arguments: Any) -> Any:
        if verb.__name__ == "pull":
            return super().ask(table, verb, *arguments)
        epoch = self.epoch(table)
        self.jobs.begun(self.process, epoch)
        answer = super().ask(table, verb, *arguments)
        if answer is not None:
            self.jobs.ended(self.process, epoch)
        return answer

    def restore(self) -> bool:
        self.jobs.beginning_again.add(self.process)
        is_done = super().restore()
        self.jobs.beginning_again.discard(self.process)
        return is_done

    def reset(self, tables: Iterable[str]) -> None:
        self.jobs.beginning_again.add(self.process)
        super().reset(tables)
        self.jobs.beginning_again.discard(self.process)

    def may_die(self) -> None:
        if self.process not in self.jobs.beginning_again:
            super().may_die()

    def note(self, what: str, error: BaseException) -> None:
        has_waited = isinstance(error, WorkersBehind)
        assert not has_waited or self.jobs.is_cut_short, f"{what} of {self.name}: {error}"
        super().note(what, error)


def ssp(simulation: Simulation) -> None:
    """A bounded lead."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        PacedJobs(simulation, folder, Ssp(WORKERS, BOUND)).run()


def sync(simulation: Simulation) -> None:
    """Steps of all."""
    with tempfile.TemporaryDirectory(prefix="prpc-simulated-") as folder:
        PacedJobs(simulation, folder, Sync(WORKERS, reduce="sum")).run()
