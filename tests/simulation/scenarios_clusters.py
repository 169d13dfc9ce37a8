"""Tasks of a cluster under faults: named tensors, step by step, while tasks are killed and started
again.

    operation         promise                                     how it is checked
    recv, answered    the tensor of that key, step and source     it has that step, that key, and
                                                                   the incarnation of its sender
    recv, again       each tensor is received once                none is answered twice
    recv, otherwise   a named error: DeadlineExceeded, TaskLost,  no other one comes
                       StepAborted (TaskRestarted)
    without kills     a tensor that was on its way when its       no TaskRestarted comes
                       connection was lost is TaskLost, no more
    after the faults  a step that all tasks begin is whole        the last steps, under new numbers
    liveness          all tasks end                               within END_S
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prpc_engine import Server, errors
from prpc_engine.cluster import (
    ServerConfig,
    StepAborted,
    TaskLost,
    TaskRestarted,
    TaskUnreachable,
)
from prpc_engine.simulation import Process, Rates, Simulation
from shard import runtime
from tests.simulation.jobs import SECRET, Deadlines, run_to_the_end

PS, WORKERS, STEPS = "/job:ps/task:0", 2, 12
PORT = 2222
TIMEOUT_S = 4.0
UNTIL_S = 8.0
LAST_STEPS = 2  # after the faults
END_S = UNTIL_S + STEPS * 3 * TIMEOUT_S
ALLOWED = (errors.DeadlineExceeded, TaskLost, TaskUnreachable, StepAborted)


def name_of(worker: int) -> str:
    """As a task."""
    return f"/job:worker/task:{worker}"


class Cluster:
    """One ps and some workers. What is counted here is outside of all processes."""

    def __init__(self, simulation: Simulation, may_end: bool) -> None:
        self.simulation = simulation
        self.may_end = may_end
        # by whom, what, in which step, of which process
        self.received: Counter[tuple[str, str, int, int]] = Counter()
        self.seen: set[tuple[int, int, int]] = set()  # (worker, step, its process)
        self.whole: Counter[tuple[int, int]] = Counter()  # (worker, step): gradients at the ps
        self.deadlines = Deadlines(simulation)
        self.step = 0  # the ps's next, over its restarts
        self.is_over = False
        self.cluster = {
            "ps": [f"{simulation.host('ps').address}:{PORT}"],
            "worker": [
                f"{simulation.host(f'worker{each}').address}:{PORT}" for each in range(WORKERS)
            ],
        }

    def _task(self, process: Process, job: str, index: int) -> Server:
        return Server(self.cluster, job, index, config=ServerConfig(shards=0, secret=SECRET))

    def _receive(self, server: Server, me: str, key: str, source: str, step: int) -> np.ndarray:
        with self.deadlines.watch(f"{key} of step {step}", TIMEOUT_S):
            found = server.recv(key, source=source, step=step, timeout_s=TIMEOUT_S)
        assert found is not None
        got_step, sender = int(found[0]), int(found[1])
        assert got_step == step, f"{me} received {key} of step {got_step}, not {step}"
        self.received[me, f"{key} {source}", step, sender] += 1
        return found

    def ps(self, process: Process) -> None:
        """Sends weights to each worker, and receives a gradient of each, step by step."""
        with self._task(process, "ps", 0) as server:
            while not self.is_over:
                step, self.step = self.step, self.step + 1
                try:
                    for worker in range(WORKERS):
                        weights = np.array([step, process.number, worker], np.float64)
                        server.send("weights", weights, to=name_of(worker), step=step)
                    for worker in range(WORKERS):
                        found = self._receive(server, PS, "gradient", name_of(worker), step)
                        assert int(found[2]) == process.number, "of the weights of another ps"
                        self.whole[worker, step] += 1
                except ALLOWED as error:
                    self._failed(f"step {step} at the ps", error)
                    server.abort(step, "a task was lost")
                server.cleanup(step)
                runtime.sleep(0.3 * process.chance.random())
                if step + 1 >= STEPS and self._is_quiet() and self._last_are_whole(step):
                    self.is_over = True

    def _is_quiet(self) -> bool:
        return self.simulation.nemesis is not None and self.simulation.nemesis.is_over

    def _last_are_whole(self, step: int) -> bool:
        return all(
            self.whole[worker, each] == 1
            for worker in range(WORKERS)
            for each in range(step + 1 - LAST_STEPS, step + 1)
        )

    def worker(self, process: Process) -> None:
        """Answers the weights of each step that it hears of with a gradient."""
        index = int(process.name.removeprefix("worker"))
        me = name_of(index)
        with self._task(process, "worker", index) as server:
            while not self.is_over:
                step = max(0, self.step - 1)
                if (index, step, process.number) in self.seen:
                    runtime.sleep(0.02)
                    continue
                self.seen.add((index, step, process.number))
                try:
                    found = self._receive(server, me, "weights", PS, step)
                    assert int(found[2]) == index, "weights of another worker"
                    gradient = np.array([step, process.number, found[1]], np.float64)
                    server.send("gradient", gradient, to=PS, step=step)
                except ALLOWED as error:
                    self._failed(f"step {step} at worker {index}", error)

    def _failed(self, what: str, error: BaseException) -> None:
        if not self.may_end:
            assert not isinstance(error, TaskRestarted), f"{what}: {error!r}"
        self.simulation.note(f"{what}: {type(error).__name__}")

    def run(self, rates: Rates) -> None:
        simulation = self.simulation
        names = ["ps", *(f"worker{each}" for each in range(WORKERS))]
        processes = [simulation.process("ps", self.ps, host="ps")]
        processes += [simulation.process(name, self.worker, host=name) for name in names[1:]]
        simulation.let_loose(rates, UNTIL_S, names if self.may_end else ())
        ended = simulation.run(lambda: self.is_over, END_S)
        assert ended, f"step {self.step} has come, and none of the last was whole"
        run_to_the_end(simulation, list(simulation.processes.values()), 2 * TIMEOUT_S)
        twice = [what for what, times in self.received.items() if times > 1]
        assert not twice, twice
        assert not self.deadlines.late, self.deadlines.late


def clusters(simulation: Simulation) -> None:
    """Tasks are killed, and started again."""
    rates = Rates(cut=0.2, reset=0.4, kill=0.3, crash=0.03, stop=0.2, slow=0.2, clock=0.1)
    Cluster(simulation, may_end=True).run(rates)


def clusters_without_a_kill(simulation: Simulation) -> None:
    """Connections alone are lost."""
    rates = Rates(cut=0.3, reset=0.6, kill=0.0, crash=0.0, stop=0.2, slow=0.2, clock=0.1)
    Cluster(simulation, may_end=False).run(rates)
