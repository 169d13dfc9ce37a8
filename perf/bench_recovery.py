"""How soon elastic tables answer again after a server was killed, and whether each push counts
once.

Three servers, twelve partitions, ROWS rows; pushes that touch every partition, acknowledged as
replicated, one after the other. An operation is one kill -9: from before the signal to the answer
of a push sent right after it. Then another server is started, and the next kill waits until every
partition has its copy again.

Expected:
    promoted  the kernel takes the process apart in 5 to 20 ms; the master sees its socket end, and
              tells the others; one of them changes the placement (two messages), tells its reactor,
              and the worker, which has tried again after 5, 10, 20 ms, finds it: some 50 ms.
    loaded    without replicas the partition's rows are read from the newest checkpoint: some 10 ms
              for these few rows more, and the backoff of the worker has doubled once more.

    python -m perf.bench_recovery [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import prpc_engine
from prpc_engine.kv import ElasticServer, EpochChanged, TableWorker
from prpc_engine.kv.schema.tree import PlacementNode
from prpc_engine.service.service import SERVERS_PATH
from shard import control_loop

from .child import STOP_LOOK_S, Announce, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .peers.prpc import serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, summary

NAME = "recovery"
TABLE = "t"
SERVERS, PARTITIONS = 3, 12
ROWS, DIM = 100_000, 16
PROBE_KEYS = 256  # a push of so many touches every partition
# of FULL's five: each needs a new server process, which takes 0.5 to 1 s to start
KILLS_PER_REPEAT = 5
# on a machine where starting takes longer there are fewer kills: the harness allows 60 s
KILLING_S_MAX = 40.0
LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of one server; `replicas` of each partition beside the primary's."""

    replicas: int

    def __str__(self) -> str:
        return (
            "kill -9, a replica is promoted" if self.replicas else "kill -9, a checkpoint is loaded"
        )


CASES = [Kill(1), Kill(0)]
OURS = "prpc kv, elastic"
TARGETS = [Target(str(CASES[0]), OURS, "longest_ns", "at most", 1e9)]


def run(
    case: Kill,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case, in one repeat."""
    each = KILLS_PER_REPEAT if effort.timed_s else effort.ops_min
    once = replace(effort, repeats=1, ops_min=each * effort.repeats)
    return compare(
        NAME,
        str(case),
        [Candidate(OURS, "ours", partial(measure, case=case))],
        once,
        pinned=pinned,
        progress=progress,
    )


def serve(announce: Announce, master: str, settings: dict[str, Any]) -> None:
    """One server until SIGTERM, or until killed."""
    stop = StopRequest()
    with prpc_engine.RpcService(master=master) as service, ElasticServer(service, **settings):
        announce(service.rank)
        while not stop.asked:
            time.sleep(STOP_LOOK_S)


def measure(place: Place, effort: Effort, case: Kill) -> Sample:
    """Kill after kill; then look at what the pushes came to."""
    settings = {
        "partitions": PARTITIONS,
        "replicas": case.replicas,
        "servers": SERVERS,
        "checkpoint": place.folder,
    }
    took_ns: list[int] = []
    give_up = time.monotonic() + KILLING_S_MAX
    with contextlib.ExitStack() as living:
        _, master = living.enter_context(place.serve_aside(serve_master))
        start = partial(place.serve, serve, master, settings)
        victims = [living.enter_context(start())[0] for _ in range(SERVERS)]
        service = living.enter_context(prpc_engine.RpcService(master=master))
        _wait_whole(service)
        worker = TableWorker(
            service, elastic=True, ack="replicated" if case.replicas else "applied"
        )
        worker.create_sparse(TABLE, DIM, {"name": "add"})
        worker.push(TABLE, np.arange(ROWS), np.zeros((ROWS, DIM), np.float32))
        worker.save(place.folder, step=0)
        right = 0
        while len(took_ns) < effort.ops_min and time.monotonic() < give_up:
            victim = victims.pop(0)
            probe = np.arange(PROBE_KEYS) + ROWS + PROBE_KEYS * len(took_ns)
            began = time.perf_counter_ns()
            os.kill(victim.pid, signal.SIGKILL)
            worker.push(TABLE, probe, np.ones((PROBE_KEYS, DIM), np.float32), timeout_s=WAIT_S_MAX)
            took_ns.append(time.perf_counter_ns() - began)
            right += int((_pull(worker, probe) == 1).sum())
            victims.append(living.enter_context(start())[0])
            _wait_whole(service)
        if case.replicas:  # none of them was ever lost
            all_probes = np.arange(ROWS, ROWS + PROBE_KEYS * len(took_ns))
            right = int((_pull(worker, all_probes) == 1).sum())
    sample = summary(np.array(took_ns))
    percentiles = {
        f"p{share}_of_kills_ns": float(np.percentile(took_ns, share)) for share in (50, 99)
    }
    sample.figures.update(
        percentiles,
        longest_ns=max(took_ns),
        repeats=sum(lane.repeats for lane in worker._lanes) / len(took_ns),
    )
    return sample.with_work(
        kills=len(took_ns), values_right=right, values=len(took_ns) * PROBE_KEYS * DIM
    )


def _pull(worker: TableWorker, keys: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.float32]:
    """Whatever was lost before."""
    while True:
        try:
            return worker.pull(TABLE, keys)
        except EpochChanged:
            continue  # one for each partition that was loaded


def _wait_whole(service: prpc_engine.RpcService) -> None:
    """Until every partition has its copies, and nothing moves."""
    node = PlacementNode(service.master_client, "kv", SERVERS_PATH)
    until = time.monotonic() + WAIT_S_MAX
    while True:
        found = control_loop().spawn(node.read()).result()
        alive = control_loop().spawn(node.servers()).result()
        if found is not None and len(alive) == SERVERS and found[0].is_settled:
            return
        assert time.monotonic() < until, f"not whole after {WAIT_S_MAX} s: {found}"
        time.sleep(LOOK_S)


def test_after_each_kill_it_goes_on_and_each_push_counts_once() -> None:
    for case in CASES:
        for result in run(case, replace(TINY, ops_min=2)):
            assert result.state == "ok", result.note
            assert result.work["kills"] == 2
            assert result.work["values_right"] == result.work["values"] == 2 * PROBE_KEYS * DIM


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
