"""Elastic tables under faults: servers are killed, stopped, cut off and started again, and workers
go on pushing and pulling.

Each worker has a row of its own in every partition, and push number n adds 1 to column n of it: how
often a push was applied, in each partition, is what stands there.

    operation            promise                                   how it is checked
    push, answered       applied exactly once, unless the worker   the column is 1 at the end; in a
                          was told by EpochChanged that state of    partition that it was told of, 0
                          that partition went back                  or 1
    push, with an error  applied once or not at all, in each       the column is 0 or 1
                          partition for itself
    ack="replicated"     nothing that was answered is lost, and    no EpochChanged; the column is 1
                          no EpochChanged comes, while one server
                          at a time dies, with complete copies
    pull, monotonic      never shows less than this worker has     what answered pushes and earlier
                          seen, without EpochChanged in between     pulls showed is still there
    replicas             have what their primary has: rows,        all holders of a partition, by
                          optimizer state, stamps, counters,        column, once all is quiet
                          versions and the ledger of pushes
    admission, eviction  decided by the primary alone              the same of tables that have them
    version              grows by one with each push applied       it is the number of pushes there
    a server that comes  takes its share; one that is drained      the same, as servers are started
     or goes              hands over what it has                    again, and one leaves
    no server asks in    what waits is tried now and then          events a second, on the average
     a loop
    liveness             after the faults all workers end, and     within END_S; SETTLED_S
                          all partitions have their copies again
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from prpc_engine import RpcService, errors
from prpc_engine.kv import Add, Admission, ElasticServer, EpochChanged, Eviction, TableWorker
from prpc_engine.kv.schema.placement import Placement
from prpc_engine.kv.table.partition import split
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.prpc_engine.inside import hosted_by, placement_of
from tests.prpc_engine.table_states import states_of
from tests.simulation.jobs import Deadlines, begin, begin_master, run_to_the_end

SERVERS, WORKERS, PARTITIONS = 3, 2, 2
PUSHES = 14
PUSH_TIMEOUT_S = 12.0
UNTIL_S = 5.0
END_S = UNTIL_S + 30.0  # after the faults a push needs a lease, a copy, and its back-off
SETTLED_S = 15.0
LEAVER, DRAIN_S = "server2", 10.0
EVENTS_PER_S_MAX = 3000  # 1650 at most in 60 seeds; 3300 to 8600 where a server asked in a loop
TOLD_S = 1.0  # replicas hear of pulls with a look of the primary's server, each fifth of a lease


def keys_of(worker: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One of this worker's keys in each partition, in the order of the partitions."""
    keys = np.arange(worker * 1000, worker * 1000 + 100, dtype=np.int64)
    return np.array([keys[owned[0]] for owned in split(keys, PARTITIONS)], np.int64)


def column(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What push `number` adds to each of the rows."""
    grads = np.zeros((PARTITIONS, PUSHES), np.float32)
    grads[:, number] = 1.0
    return grads


class Job:
    """What scenarios know: outside of all processes."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.servers: dict[str, tuple[Process, ElasticServer]] = {}
        self.has_left = False  # the server that hands over all that it has, and goes
        self.outcomes: dict[tuple[int, int], BaseException | None] = {}  # of each worker's pushes
        # (worker, partition): how many pushes it had begun when it was told that state went back
        self.told: dict[tuple[int, int], int] = {}
        self.final: dict[int, Any] = {}  # what each worker pulled at its end
        self.deadlines = Deadlines(simulation)

    # -- servers -----------------------------------------------------------------------------------

    def serve(self, ours: RpcService, process: Process) -> None:
        with ElasticServer(ours, partitions=PARTITIONS, replicas=1, servers=2) as server:
            self.servers[process.name] = process, server
            leaves = process.name == LEAVER and not self.has_left and process.chance.random() < 0.4
            ours.serve_forever(process.chance.random() * UNTIL_S if leaves else None)
            try:
                server.drain(DRAIN_S)
            except errors.DeadlineExceeded:
                ours.serve_forever()
            self.has_left = True

    def alive(self) -> list[ElasticServer]:
        """Servers whose processes live, and have begun."""
        now = self.simulation.processes
        return [
            server
            for name, (process, server) in self.servers.items()
            if now[name] is process and not process.is_dead
        ]

    def placement(self) -> Placement | None:
        """The one that all servers which live know; None: they do not agree, or some are not
        mentioned in it.
        """
        seen = {placement_of(each) for each in self.alive()}
        return seen.pop() if len(seen) == 1 else None

    def is_whole(self) -> bool:
        """Every partition has its primary and its copy, at servers that live, and nothing moves."""
        placement = self.placement()
        if placement is None or not placement.is_settled:
            return False
        hosts = {each.server_id: hosted_by(each) for each in self.alive()}
        return all(
            placed.replicas
            and not placed.joining
            and all(
                index in hosts.get(holder, {}) and hosts[holder][index].placed == placed
                for holder in placed.holders
            )
            for index, placed in enumerate(placement.partitions)
        )

    # -- workers -----------------------------------------------------------------------------------

    def note_told(self, worker: int, error: EpochChanged, begun: int) -> None:
        affected = range(PARTITIONS) if error.partition < 0 else (error.partition,)
        for partition in affected:
            self.told[worker, partition] = begun

    def work(self, worker: int, ack: str, ours: RpcService, process: Process) -> None:
        kv = TableWorker(ours, elastic=True, ack=ack, monotonic=True, timeout_s=60.0)
        kv.create_sparse("sums", PUSHES, Add(), timeout_s=60.0)
        kv.create_sparse(
            "clicks",
            1,
            Add(),
            admission=Admission(min_count=2, width_bits=6),
            eviction=Eviction(rows_max=3),
            timeout_s=60.0,
        )
        keys, draw = keys_of(worker), process.chance.random
        seen = np.zeros((PARTITIONS, PUSHES), np.float32)
        for number in range(PUSHES):
            _, error = self.ask(worker, number + 1, kv.push, "sums", keys, column(number))
            self.outcomes[worker, number] = error
            if isinstance(error, EpochChanged):
                seen[:] = 0
            elif error is None:
                seen[:, number] = 1
            clicked = np.array([int(draw() * 30) for _ in range(3)], np.int64)
            ones = np.ones((3, 1), np.float32)
            _, error = self.ask(worker, number + 1, kv.push, "clicks", clicked, ones)
            if isinstance(error, EpochChanged):
                seen[:] = 0
            what = draw()
            if what < 0.3:
                shown, error = self.ask(worker, number + 1, kv.pull, "sums", keys)
                if isinstance(error, EpochChanged):
                    seen[:] = 0
                elif error is None:
                    behind = np.argwhere(shown < seen)
                    assert not len(behind), (
                        f"worker {worker} does not see again (partition, push) {behind.tolist()}"
                    )
                    seen = np.maximum(seen, shown)
            elif what < 0.5:
                _, error = self.ask(worker, number + 1, kv.pull, "clicks", clicked)
                if isinstance(error, EpochChanged):
                    seen[:] = 0
            runtime.sleep(0.4 * draw())
        while True:
            shown, error = self.ask(worker, PUSHES, kv.pull, "sums", keys)
            if error is None:
                break
        self.final[worker] = shown

    def ask(
        self, worker: int, begun: int, verb: Any, *arguments: Any
    ) -> tuple[Any, BaseException | None]:
        """What it answered, or how it ended. What it was told counts for all pushes that were begun
        before.
        """
        try:
            with self.deadlines.watch(f"a verb of worker {worker}", PUSH_TIMEOUT_S):
                return verb(*arguments, timeout_s=PUSH_TIMEOUT_S), None
        except EpochChanged as error:
            self.note_told(worker, error, begun)
            return None, error
        except errors.DeadlineExceeded as error:
            return None, error

    # -- oracles -----------------------------------------------------------------------------------

    def run(self, rates: Rates, lasts_s: float, ack: str, **loose: Any) -> None:
        simulation = self.simulation
        begin_master(simulation)
        names = [f"server{each}" for each in range(SERVERS)]
        for name in names:
            begin(simulation, name, self.serve)
        workers = [
            begin(
                simulation,
                f"worker{each}",
                lambda ours, process, each=each: self.work(each, ack, ours, process),  # type: ignore[misc]
            )
            for each in range(WORKERS)
        ]
        simulation.let_loose(rates, UNTIL_S, names, lasts_s, **loose)
        run_to_the_end(simulation, workers, END_S)
        assert simulation.run(until=self.is_whole, limit_s=SETTLED_S), (
            f"all partitions have their copies: {self.placement()}"
        )
        simulation.run(limit_s=TOLD_S)
        events_per_s = simulation.events / simulation.now
        assert events_per_s < EVENTS_PER_S_MAX, f"{events_per_s:.0f} events a second: who spins?"
        self.check_pushes()
        self.check_replicas()

    def check_pushes(self) -> None:
        """Each was applied as it was answered."""
        assert not self.deadlines.late, self.deadlines.late
        for worker in range(WORKERS):
            for partition, number in np.ndindex(PARTITIONS, PUSHES):
                times = self.final[worker][partition, number]
                error = self.outcomes[worker, number]
                told = (
                    f"push {number} of worker {worker} was applied {times} times in partition "
                    f"{partition}, and ended with {error!r}"
                )
                assert times in (0, 1), told
                if error is None and number >= self.told.get((worker, partition), 0):
                    assert times == 1, told

    def check_replicas(self) -> None:
        """Who holds a partition holds the same."""
        holders: dict[int, list[Any]] = defaultdict(list)
        for server in self.alive():
            for index, hosted in hosted_by(server).items():
                state = states_of(hosted.shard)
                holders[index].append((hosted.is_primary, server.server_id, state))
                _, sums = hosted.shard.tables["sums"]
                applied = sums.columns()["values"].sum()
                assert sums.version == applied, (
                    f"partition {index} at server {server.server_id} is at version {sums.version}, "
                    f"and {applied:g} pushes are in it"
                )
        for index, states in holders.items():
            states.sort(key=lambda each: (not each[0], each[1]))
            _, primary, wanted = states[0]
            for _, server, state in states[1:]:
                assert state == wanted, (
                    f"partition {index} at server {server} is not as at its primary {primary}: "
                    f"{differences(state, wanted)}"
                )


def differences(state: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Which of what there is are not the same."""
    return [
        f"{table}.{name}: {state.get(table, {}).get(name)!s:.200} and not {value!s:.200}"
        for table, columns in wanted.items()
        for name, value in columns.items()
        if state.get(table, {}).get(name) != value
    ]


def elastic(simulation: Simulation) -> None:
    """Any faults: what is lost is told."""
    job = Job(simulation)
    rates = Rates(cut=0.3, reset=0.5, kill=0.4, crash=0.05, stop=0.2, slow=0.2, clock=0.1)
    job.run(rates, 3.0, "applied")


def replicated(simulation: Simulation) -> None:
    """One server at a time dies, once its partitions have their copies: nothing is lost."""
    job = Job(simulation)
    rates = Rates(cut=0.0, reset=0.5, kill=0.8, crash=0.0, stop=0.2, slow=0.2, clock=0.1)
    job.run(rates, 0.4, "replicated", may_kill=lambda process: job.is_whole())
    assert not job.told, job.told
