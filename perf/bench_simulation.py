"""How fast a whole job runs on virtual time in one process: prpc_engine.simulation.

Expected:
    an event is a wake-up of a thread or a message: a thread hands the baton to the next, two
    switches of threads (10 us each on one core), and what the woken one does: 50 to 100 us.
    calls           clients that call a server one call after the other: some 10,000 events a
                    second.
    tables          1 master, 4 elastic servers that replicate, 8 workers that push and pull
                    four times a second, for 60 s of virtual time: some 140,000 events, which write
                    and read tables as well: 10 s.

    python -m perf.bench_simulation [--json] [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import prpc_engine
from prpc_engine.kv import Add, ElasticServer, TableWorker
from prpc_engine.simulation import Process, Simulation
from shard import runtime

from .harness import Candidate, Place, Result, compare
from .targets import Target
from .timing import FULL, TINY, Effort, Sample

NAME = "simulation"
SECRET = "of a benchmark, which talks to nobody else"
PORT = 7000
SEED = 1
LEASE_S = 2.0
PAUSE_S = 0.25  # of a worker, after each push and pull
KEYS = 64
REPEATS_MAX = 3


@dataclass(frozen=True, slots=True)
class Tables:
    """Elastic servers with replicas, and workers that push and pull, for so long."""

    virtual_s: float = 60.0
    servers: int = 4
    workers: int = 8

    def __str__(self) -> str:
        return (
            f"1 master, {self.servers} elastic servers, {self.workers} workers, "
            f"{self.virtual_s:g} s of virtual time"
        )


@dataclass(frozen=True, slots=True)
class Calls:
    """Clients of one server, which call it one call after the other."""

    virtual_s: float = 2.0
    clients: int = 2

    def __str__(self) -> str:
        return f"1 master, 1 server, {self.clients} clients that call all the time"


Case = Tables | Calls
CASES: list[Case] = [Tables(), Calls()]
JOB = "prpc_engine.simulation"
TARGETS = [
    Target(str(CASES[0]), JOB, "took_s", "at most", 10.0),
    *(Target(str(case), JOB, "events_per_s", "at least", 10_000) for case in CASES),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Run one job, a few times."""
    candidates = [Candidate(JOB, "ours", partial(measure, case=case))]
    effort = replace(effort, repeats=min(effort.repeats, REPEATS_MAX))
    return compare(NAME, str(case), candidates, effort, pinned=pinned, progress=progress)


def measure(place: Place, effort: Effort, case: Case) -> Sample:
    """One run from beginning to end: figures took_s, real seconds, and events_per_s of these."""
    began = time.perf_counter()
    with Simulation(SEED) as simulation:
        simulation.process("master", partial(_serve_master), host="m")
        begin = _begin_tables if isinstance(case, Tables) else _begin_calls
        working = begin(simulation, case)
        ended = simulation.run(
            lambda: all(one.is_dead for one in working), 2.0 * case.virtual_s + 60.0
        )
        took_s = time.perf_counter() - began
        done = sum(one.result or 0 for one in working) if ended else 0
        return Sample(
            ops=simulation.events,
            ops_per_s=simulation.events / took_s,
            figures={
                "took_s": took_s,
                "events_per_s": simulation.events / took_s,
                "events": simulation.events,
                "virtual_s": simulation.now,
            },
            work={"ended": int(ended), "done": done},
        )


def _serve_master(process: Process) -> None:
    with prpc_engine.Master(f"{process.host.address}:{PORT}", secret=SECRET) as master:
        master.serve_forever()


def _service(process: Process) -> prpc_engine.RpcService:
    return prpc_engine.RpcService(
        f"{process.address_of('m')}:{PORT}", secret=SECRET, bind=process.bind, lease_s=LEASE_S
    )


def _begin_tables(simulation: Simulation, case: Any) -> list[Process]:
    def serve(process: Process) -> None:
        with (
            _service(process) as service,
            ElasticServer(service, partitions=case.servers, replicas=1, servers=case.servers),
        ):
            service.serve_forever()

    def work(number: int, process: Process) -> int:
        rounds = 0
        with _service(process) as service:
            table = TableWorker(service, elastic=True, timeout_s=60.0)
            table.create_sparse("sums", 16, Add(), timeout_s=60.0)
            keys = np.arange(number * KEYS, (number + 1) * KEYS, dtype=np.int64)
            grads = np.ones((KEYS, 16), np.float32)
            until = runtime.monotonic() + case.virtual_s
            while not rounds or runtime.monotonic() < until:
                table.push("sums", keys, grads)
                rounds += 1
                if not (table.pull("sums", keys) == rounds).all():
                    raise AssertionError(f"worker {number} does not read what it has pushed")
                runtime.sleep(PAUSE_S)
        return rounds

    for number in range(case.servers):
        simulation.process(f"server{number}", serve, host=f"s{number}")
    return [
        simulation.process(f"worker{number}", partial(work, number), host=f"w{number}")
        for number in range(case.workers)
    ]


def _begin_calls(simulation: Simulation, case: Any) -> list[Process]:
    def serve(process: Process) -> None:
        with _service(process) as service:
            service.create_server(NAME, {"same": lambda value: value})
            service.serve_forever()

    def work(process: Process) -> int:
        calls = 0
        with _service(process) as service:
            client = service.create_client(NAME, timeout_s=60.0)
            until = runtime.monotonic() + case.virtual_s
            while not calls or runtime.monotonic() < until:
                if client.call("same", calls) != calls:
                    raise AssertionError("a call was answered with another one's value")
                calls += 1
        return calls

    simulation.process("server", serve, host="s")
    return [
        simulation.process(f"client{number}", work, host=f"c{number}")
        for number in range(case.clients)
    ]


def test_jobs_end_and_their_workers_read_what_they_wrote() -> None:
    for case in (Tables(0.2, servers=2, workers=2), Calls(0.01)):
        (result,) = run(case, TINY)
        assert result.state == "ok", result.note
        assert result.work["ended"] == 1
        assert result.work["done"] >= 2


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
