"""Plain tables under faults: servers are killed, or lose their connections, and workers go on.

operation             promise                                  how it is checked
push, answered        applied exactly once, on each server,    its column is 1 at the end, of
                       unless the worker was told by RowsLost   pushes since it was last told
                       or EpochChanged that state is gone
push, with an error   applied once or not at all, on each      its column is 0 or 1
                       server for itself
a server that begins  tells of it before anything is read or   what was answered stays, until
 empty                 changed: RowsLost, until a reset         the worker is told
reset                 all begins anew; other workers are told  no column of before comes back
                       by EpochChanged
Ssp(bound)            a verb begins at most `bound` pushes     as a push ends, no worker has
                       ahead of the slowest worker              begun fewer than that; a pull
                                                                misses at most `bound` of each
Sync                  a push ends when every worker's of that  what a worker pulls between two
                       step is in; nothing of the next is       of its pushes is that step of
                                                                all workers
no push is lost or    sums at the end                          each worker's pushes, exactly
 counted twice
liveness              all workers end                          within END_S
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prpc_engine import RpcService, errors
from prpc_engine.kv import (
    Add,
    Consistency,
    EpochChanged,
    RowsLost,
    Ssp,
    Sync,
    TableServer,
    TableWorker,
)
from prpc_engine.kv.table.partition import split
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import Deadlines, begin, begin_master, run_to_the_end, service

SERVERS, WORKERS = 2, 2
PUSHES = 20
TIMEOUT_S = 5.0
UNTIL_S = 8.0
END_S = UNTIL_S + 40.0
PACED_WORKERS, PACED_PUSHES = 3, 12
PACED_TIMEOUT_S = 20.0
PACED_UNTIL_S = 4.0
PACED_END_S = PACED_UNTIL_S + 40.0
BOUND = 2

Keys = np.ndarray[Any, np.dtype[np.int64]]


def keys_of(worker: int) -> Keys:
    """One of this worker's keys at each server, in the order of their ids."""
    keys = np.arange(worker * 1000, worker * 1000 + 100, dtype=np.int64)
    return np.array([keys[owned[0]] for owned in split(keys, SERVERS)], np.int64)


def id_of(process: Process) -> int:
    """Which server this one is: it takes the place of the one before, which was killed."""
    return int(process.name.removeprefix("server"))


def serve(ours: RpcService, process: Process) -> None:
    """A plain server."""
    TableServer(ours, server_id=id_of(process))
    ours.serve_forever()


class Pushes:
    """Two workers push to two servers, which may be killed."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.outcomes: dict[tuple[int, int], BaseException | None] = {}
        self.told: dict[int, int] = {}  # worker: pushes begun when it was told, or reset, last
        self.final: dict[int, Any] = {}
        self.deadlines = Deadlines(simulation)
        self.done = 0

    def work(self, ours: RpcService, process: Process) -> None:
        worker = int(process.name.removeprefix("worker"))
        kv = TableWorker(ours, expected_servers=SERVERS, timeout_s=60.0)
        kv.create_sparse("sums", PUSHES, Add(), timeout_s=30.0)
        keys, draw = keys_of(worker), process.chance.random
        for number in range(PUSHES):
            grads = np.zeros((SERVERS, PUSHES), np.float32)
            grads[:, number] = 1.0
            _, error = self.ask(kv, worker, number + 1, kv.push, "sums", keys, grads)
            self.outcomes[worker, number] = error
            runtime.sleep(0.6 * draw())
        self.done += 1
        while self.done < WORKERS:  # a reset of the other one's is told here, too
            self.ask(kv, worker, PUSHES, kv.pull, "sums", keys)
            runtime.sleep(0.2)
        shown = None
        while shown is None:
            shown, _ = self.ask(kv, worker, PUSHES, kv.pull, "sums", keys)
        self.final[worker] = shown

    def ask(
        self, kv: TableWorker, worker: int, begun: int, verb: Any, *arguments: Any
    ) -> tuple[Any, BaseException | None]:
        """What it answered, or how it ended. A worker that is told of a loss resets the table, and
        both go on.
        """
        try:
            with self.deadlines.watch(f"a verb of worker {worker}", TIMEOUT_S):
                return verb(*arguments, timeout_s=TIMEOUT_S), None
        except RowsLost as error:
            self.told[worker] = begun
            self.reset(kv)
            return None, error
        except EpochChanged as error:
            self.told[worker] = begun
            return None, error
        except errors.DeadlineExceeded as error:
            return None, error

    def visit(self, ours: RpcService, process: Process) -> None:
        """Workers that come later: each makes the table, or finds it, also where it is lost."""
        while self.done < WORKERS:
            runtime.sleep(2.0 * process.chance.random())
            try:
                kv = TableWorker(ours, expected_servers=SERVERS, timeout_s=TIMEOUT_S)
                kv.create_sparse("sums", PUSHES, Add(), timeout_s=TIMEOUT_S)
                kv.pull("sums", keys_of(0), timeout_s=TIMEOUT_S)
            except (RowsLost, EpochChanged, errors.DeadlineExceeded, errors.NoServer) as error:
                self.simulation.note(f"a visitor: {type(error).__name__}")

    def reset(self, kv: TableWorker) -> None:
        try:
            kv.reset(timeout_s=TIMEOUT_S)
        except (errors.DeadlineExceeded, RowsLost, EpochChanged) as error:
            self.simulation.note(f"no reset: {type(error).__name__}")

    def run(self) -> None:
        simulation = self.simulation
        begin_master(simulation)
        names = [f"server{each}" for each in range(SERVERS)]
        for name in names:
            begin(simulation, name, serve)
        workers = [begin(simulation, f"worker{each}", self.work) for each in range(WORKERS)]
        begin(simulation, "visitor", self.visit)
        rates = Rates(cut=0.2, reset=0.6, kill=0.3, crash=0.03, stop=0.2, slow=0.2, clock=0.1)
        simulation.let_loose(rates, UNTIL_S, names)
        run_to_the_end(simulation, workers, END_S)
        self.check()

    def check(self) -> None:
        """Each was applied as it was answered."""
        assert not self.deadlines.late, self.deadlines.late
        for worker in range(WORKERS):
            for server, number in np.ndindex(SERVERS, PUSHES):
                times = self.final[worker][server, number]
                error = self.outcomes[worker, number]
                told = (
                    f"push {number} of worker {worker} was applied {times} times at server "
                    f"{server}, and ended with {error!r}"
                )
                assert times in (0, 1), told
                if error is None and number >= self.told.get(worker, 0):
                    assert times == 1, told


def plain(simulation: Simulation) -> None:
    """Exactly once; a server that begins empty says so."""
    Pushes(simulation).run()


class Paced:
    """Three workers that may run apart so far."""

    def __init__(self, simulation: Simulation, consistency: Consistency, bound: int) -> None:
        self.simulation = simulation
        self.consistency = consistency
        self.bound = bound
        self.is_sync = isinstance(consistency, Sync)
        self.begun = [0] * PACED_WORKERS  # pushes of each
        self.ended = [0] * PACED_WORKERS
        self.final: dict[int, Any] = {}
        self.deadlines = Deadlines(simulation)

    def work(self, ours: RpcService, process: Process) -> None:
        worker = int(process.name.removeprefix("worker"))
        kv = TableWorker(ours, expected_servers=SERVERS, timeout_s=60.0)
        kv.create_sparse("steps", PACED_WORKERS, Add(), consistency=self.consistency)
        keys = keys_of(0)
        grads = np.zeros((SERVERS, PACED_WORKERS), np.float32)
        grads[:, worker] = 1.0
        draw = process.chance.random
        for number in range(1, PACED_PUSHES + 1):
            self.begun[worker] = number
            kv.push("steps", keys, grads, timeout_s=PACED_TIMEOUT_S)
            self.ended[worker] = number
            ahead = number - min(self.begun)
            assert ahead <= (0 if self.is_sync else self.bound + 1), (
                f"worker {worker} ended push {number}, and others have begun {self.begun}"
            )
            if draw() < 0.5:
                self.look(worker, number, kv.pull("steps", keys, timeout_s=PACED_TIMEOUT_S))
            runtime.sleep((0.3 if worker else 0.1) * draw())
        self.final[worker] = None

    def look(self, worker: int, number: int, shown: Any) -> None:
        """What it pulled after its push `number`."""
        for server, other in np.ndindex(SERVERS, PACED_WORKERS):
            steps = shown[server, other]
            told = f"worker {worker} after push {number} sees {steps} of worker {other}"
            assert steps <= self.begun[other], told
            if other == worker or self.is_sync:
                assert steps == number, told
            else:
                assert steps >= number - self.bound, told

    def run(self) -> None:
        simulation = self.simulation
        begin_master(simulation)
        for each in range(SERVERS):
            begin(simulation, f"server{each}", serve)
        workers = [begin(simulation, f"worker{each}", self.work) for each in range(PACED_WORKERS)]
        rates = Rates(cut=0.0, reset=1.0, kill=0.0, crash=0.0, stop=0.4, slow=0.3, clock=0.1)
        simulation.let_loose(rates, PACED_UNTIL_S, (), lasts_s=0.6)
        run_to_the_end(simulation, workers, PACED_END_S)
        simulation.process("reader", self.read, host="reader")
        reader = simulation.processes["reader"]
        run_to_the_end(simulation, [reader], PACED_END_S)
        assert (reader.result == PACED_PUSHES).all(), reader.result

    def read(self, process: Process) -> Any:
        """All is there, once."""
        with service(self.simulation, process) as ours:
            kv = TableWorker(ours, expected_servers=SERVERS, timeout_s=60.0)
            kv.create_sparse("steps", PACED_WORKERS, Add(), consistency=self.consistency)
            return kv.pull("steps", keys_of(0), timeout_s=PACED_TIMEOUT_S)


def ssp(simulation: Simulation) -> None:
    """No worker runs further ahead than the bound."""
    Paced(simulation, Ssp(PACED_WORKERS, BOUND), BOUND).run()


def sync(simulation: Simulation) -> None:
    """Whole steps of all workers."""
    Paced(simulation, Sync(PACED_WORKERS, reduce="sum"), 0).run()
