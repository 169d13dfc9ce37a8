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
    one primary at a     who is cut off from the master answers    when a primary answered last, and
     time                 nothing any more before another one does   the next one first; with clocks
                                                                     that drift
    no server asks in    what waits is tried now and then          events a second, on the average
     a loop
    liveness             after the faults all workers end, and     within END_S; SETTLED_S
                          all partitions have their copies again
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import RpcService, errors
from prpc_engine.kv import (
    Add,
    Admission,
    ElasticServer,
    EpochChanged,
    Eviction,
    TableWorker,
)
from prpc_engine.kv.schema.placement import Placement
from prpc_engine.kv.table.partition import split
from prpc_engine.simulation import Process, Rates, Simulation
from prpc_engine.simulation.nemesis import DRIFT_MAX
from shard import runtime
from tests.prpc_engine.inside import hosted_by, placement_of
from tests.prpc_engine.table_states import states_of
from tests.simulation.jobs import (
    LEASE_S,
    Deadlines,
    begin,
    begin_master,
    journal_folder,
    run_to_the_end,
)

SERVERS, WORKERS, PARTITIONS = 3, 2, 2
PUSHES = 14
PUSH_TIMEOUT_S = 12.0
UNTIL_S = 5.0
END_S = UNTIL_S + 30.0  # after the faults a push needs a lease, a copy, and its back-off
SETTLED_S = 15.0
NAMES = tuple(f"server{each}" for each in range(SERVERS))
LEAVER, DRAIN_S = "server2", 10.0
EVENTS_PER_S_MAX = 3000  # 1650 at most in 60 seeds; 3300 to 8600 where a server asked in a loop
MOVES_PER_S_MAX = 5000  # where they come and go all the time: 3105 at most in some 300 seeds
LOOK_S = 0.002  # between two looks at who hands over
TOLD_S = 1.0  # replicas hear of pulls with a look of the primary's server, each fifth of a lease
TOLD_BY_ALL_S = 4.0  # where the primary's server may be about to find its master again


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
        self.events_per_s_max = EVENTS_PER_S_MAX
        self.draw = simulation.scheduler.stream("elastic").random

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

    def come_and_go(self, ours: RpcService, process: Process) -> None:
        """A server that leaves and comes again until the faults are over: mostly it hands over what
        it has first.
        """
        chance = process.chance.random
        while True:
            with ElasticServer(ours, partitions=PARTITIONS, replicas=1, servers=2) as server:
                self.servers[process.name] = process, server
                stays_s = UNTIL_S - self.simulation.now
                ours.serve_forever(0.5 + 2.0 * chance() if stays_s > 0 else None)
                if chance() < 0.8:
                    with contextlib.suppress(errors.RpcError):  # in time; the master's
                        server.drain(DRAIN_S * chance() ** 3)
                del self.servers[process.name]
            runtime.sleep(chance())

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

    def cut_off_who_hands_over(self) -> None:
        """Now and then, by the seed: its link to the master, in the middle of that."""
        simulation, draw = self.simulation, self.draw
        for name, (process, server) in self.servers.items():
            hands_over = any(each.is_handing_over for each in hosted_by(server).values())
            if hands_over and not process.is_dead and draw() < 0.3:
                simulation.cut(name, "master")
                simulation.after(3.0 * draw() ** 2, partial(simulation.mend, name, "master"))
        if simulation.now < UNTIL_S:
            simulation.after(LOOK_S * 2 * draw(), self.cut_off_who_hands_over)

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

    def save_and_restore(self, folder: str, ours: RpcService, process: Process) -> None:
        """Bring back what was, now and then: workers are told of it."""
        kv = TableWorker(ours, elastic=True, timeout_s=60.0)
        kv.create_sparse("sums", PUSHES, Add(), timeout_s=60.0)
        step = 0
        while self.simulation.now < UNTIL_S:
            runtime.sleep(1.0 * process.chance.random())
            try:
                if not step or process.chance.random() < 0.4:
                    kv.save(folder, step + 1, timeout_s=PUSH_TIMEOUT_S)
                    step += 1
                else:
                    kv.restore(folder, timeout_s=PUSH_TIMEOUT_S)
            except errors.RpcError:
                self.simulation.note("neither saved nor restored")

    # -- oracles -----------------------------------------------------------------------------------

    def run(
        self,
        rates: Rates,
        lasts_s: float,
        ack: str,
        may_end: Sequence[str],
        serve: Mapping[str, Callable[[RpcService, Process], None]],
        journal: str | None = None,
        restores: str | None = None,
        **loose: Any,
    ) -> None:
        simulation = self.simulation
        begin_master(simulation, journal)
        for name, run in serve.items():
            begin(simulation, name, run)
        workers = [
            begin(
                simulation,
                f"worker{each}",
                lambda ours, process, each=each: self.work(each, ack, ours, process),  # type: ignore[misc]
            )
            for each in range(WORKERS)
        ]
        if restores is not None:
            restore = partial(self.save_and_restore, restores)
            workers.append(begin(simulation, "restorer", restore))
        simulation.let_loose(rates, UNTIL_S, may_end, lasts_s, **loose)
        run_to_the_end(simulation, workers, END_S)
        simulation.run(limit_s=max(0.0, UNTIL_S - simulation.now))
        assert simulation.run(until=self.is_whole, limit_s=SETTLED_S), (
            f"all partitions have their copies: {self.placement()}"
        )
        simulation.run(limit_s=TOLD_S if "master" not in may_end else TOLD_BY_ALL_S)
        events_per_s = simulation.events / simulation.now
        assert events_per_s < self.events_per_s_max, (
            f"{events_per_s:.0f} events a second: who spins?"
        )
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
    rates = Rates(
        cut=0.3, reset=0.5, kill=0.4, crash=0.05, stop=0.2, slow=0.2, clock=0.1, drift=0.3
    )
    job.run(rates, 3.0, "applied", NAMES, dict.fromkeys(NAMES, job.serve))


def replicated(simulation: Simulation) -> None:
    """One server at a time dies, once its partitions have their copies: nothing is lost."""
    job = Job(simulation)
    rates = Rates(cut=0.0, reset=0.5, kill=0.8, crash=0.0, stop=0.2, slow=0.2, clock=0.1)
    serve = dict.fromkeys(NAMES, job.serve)
    job.run(rates, 0.4, "replicated", NAMES, serve, may_kill=lambda process: job.is_whole())
    assert not job.told, job.told


def moving(simulation: Simulation) -> None:
    """Servers leave and come again, cut off from the master for longer than their leases now and
    then, and the master is killed: partitions move all the time.
    """
    job = Job(simulation)
    rates = Rates(cut=0.5, reset=1.5, kill=0.3, crash=0.0, stop=0.3, slow=0.3, clock=0.1)
    serve = {name: job.come_and_go if name != NAMES[0] else job.serve for name in NAMES}
    job.events_per_s_max = MOVES_PER_S_MAX
    job.cut_off_who_hands_over()
    with journal_folder() as folder:
        job.run(rates, 5.0, "applied", ("master",), serve, folder)


def restored(simulation: Simulation) -> None:
    """The same, while one worker saves the tables, and brings back what it saved."""
    job = Job(simulation)
    rates = Rates(cut=0.3, reset=1.0, kill=0.2, crash=0.0, stop=0.4, slow=0.3, clock=0.1)
    serve = {name: job.come_and_go if name != NAMES[0] else job.serve for name in NAMES}
    job.events_per_s_max = MOVES_PER_S_MAX
    with journal_folder() as folder, journal_folder() as saved:
        job.run(rates, 3.0, "applied", (), serve, folder, saved)


SLOW, FAST = 1.0 - DRIFT_MAX, 1.0 + DRIFT_MAX


@dataclass(frozen=True)
class Answered:
    """A pull that a server answered as the primary at that epoch, at some time in between."""

    epoch: int
    begun_s: float
    ended_s: float


def one_primary(simulation: Simulation) -> None:
    """The primary is cut off from the master: nobody hears from it any more once another server
    answers in its place, though its clocks are slow and the master's are fast.
    """
    servers: dict[str, ElasticServer] = {}
    answered: list[Answered] = []
    key, ones = np.zeros(1, np.int64), np.ones((1, 1), np.float32)

    def serve(ours: RpcService, process: Process) -> None:
        with ElasticServer(ours, partitions=1, replicas=1, servers=2) as server:
            servers[process.name] = server
            ours.serve_forever()

    def make(ours: RpcService, process: Process) -> None:
        kv = TableWorker(ours, elastic=True, timeout_s=60.0)
        kv.create_sparse("sums", 1, Add(), timeout_s=60.0)
        kv.push("sums", key, ones, timeout_s=PUSH_TIMEOUT_S)
        runtime.sleep(3.0 + process.chance.random())  # for the copy, and a phase of the looks

    def ask(ours: RpcService, process: Process) -> None:
        """On the host of a server, as a worker that is cut off with it."""
        client = ours.create_client("kv", 2, timeout_s=60.0)
        while True:
            runtime.sleep(0.002)
            server = servers.get(process.host.name)
            placement = placement_of(server) if server is not None else None
            if server is None or placement is None:
                continue
            epoch, begun_s = placement.partitions[0].epoch, simulation.now
            with contextlib.suppress(errors.RpcError):
                client.call_to(
                    server.server_id, "pull", 0, epoch, "sums", key, timeout_s=PUSH_TIMEOUT_S
                )
                answered.append(Answered(epoch, begun_s, simulation.now))

    def primary() -> str:
        placement = placement_of(next(iter(servers.values())))
        assert placement is not None and placement.partitions[0].replicas, placement
        number = placement.partitions[0].primary
        return next(name for name, server in servers.items() if server.server_id == number)

    begin_master(simulation)
    for name in ("server0", "server1"):
        begin(simulation, name, serve)
    maker = begin(simulation, "maker", make)
    for name in ("server0", "server1"):
        begin(simulation, f"asker of {name}", ask, host=name)
    simulation.drift("master", FAST)
    assert simulation.run(maker, END_S)
    one = primary()
    simulation.drift(one, SLOW)
    simulation.run(limit_s=2 * LEASE_S)
    simulation.cut(one, "master")
    simulation.run(limit_s=4 * LEASE_S)
    epochs = sorted({each.epoch for each in answered})
    assert len(epochs) >= 2, f"only {epochs}: nobody took over"
    last_s = max(each.begun_s for each in answered if each.epoch == epochs[-2])
    first_s = min(each.ended_s for each in answered if each.epoch == epochs[-1])
    assert last_s < first_s, f"two primaries answered for {last_s - first_s:.3f} s"
