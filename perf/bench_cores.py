"""How much more a service answers with more cores: N shards, asked by M processes at once.

Each client has a core's worth of calls in flight, to all shards in turn, as one that splits its
keys over them. Expected, with a core for each process:
    64 B, inline    a shard answers a call in some 3 us, with what a client takes to send and read
                    one (4 us) on another core: one client and one shard 250,000 /s, N and N so
                    many times as much, less what the shared cache and memory take. A client more
                    than shards adds what the shards have left; a shard more than clients nothing.
    work of 100 us  the work is all: N shards N times as many, with N clients or one.
Without a core for each, marked "oversubscribed", they share what there is.

    python -m perf.bench_cores [--json] [--quick]
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import prpc_engine
import shard

from .child import START_S_MAX, STOP_LOOK_S, Announce, Child, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers.prpc import serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample

NAME = "cores"
PAYLOAD = bytes(range(64))
WORK_S = 100e-6
WINDOW = 64  # calls of one client in flight
LOOK_CALLS = 256  # between two looks at the clock
MEETING = "cores"  # the barrier at which all clients begin
COUNTS = (1, 2, 4, 8)
REPEATS_MAX = 3


@dataclass(frozen=True, slots=True)
class Calls:
    """Every number of shards with every number of clients, which call `method`."""

    method: str
    text: str
    counts: tuple[int, ...] = COUNTS

    def __str__(self) -> str:
        return f"shards x clients, {self.text}"


CASES = [Calls("echo", "64 B"), Calls("work", f"work of {WORK_S * 1e6:.0f} us")]


def name_of(shards: int, clients: int) -> str:
    """How a candidate of so many is called."""
    name = f"{shards} shard{'s' * (shards > 1)} x {clients} client{'s' * (clients > 1)}"
    is_crowded = shards + clients > len(shard.usable_cores())
    return name + ", oversubscribed" * is_crowded


TARGETS = [  # of what two cores of work can do where there are cores for all
    Target(str(case), name_of(2, 2), "ops_per_s", "at least", 1.6, against=name_of(1, 1))
    for case in CASES
]


class Echo:
    """One shard's instance."""

    def echo(self, payload: bytes) -> bytes:
        return payload

    def work(self, payload: bytes) -> bytes:
        """As echo, after a while in which it computes."""
        until = time.perf_counter() + WORK_S
        while time.perf_counter() < until:
            pass
        return payload


def run(
    case: Calls,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one method with all numbers of shards and clients."""
    candidates = [
        Candidate(
            name_of(shards, clients),
            "ours",
            partial(measure, case=case, shards=shards, clients=clients),
        )
        for shards in case.counts
        for clients in case.counts
    ]
    effort = replace(effort, repeats=min(effort.repeats, REPEATS_MAX))
    return compare(NAME, str(case), candidates, effort, pinned=pinned, progress=progress)


def measure(place: Place, effort: Effort, case: Calls, shards: int, clients: int) -> Sample:
    """The calls a second of all clients together, who begin at the same time."""
    cores = place.other_cores or tuple(os.sched_getaffinity(0))
    with place.serve_aside(serve_master) as (_, master), ExitStack() as stack:
        server = stack.enter_context(Child(serve, master, shards, cores=cores))
        server.receive()
        working = [
            stack.enter_context(Child(call, master, case, shards, clients, place_of, effort))
            for place_of in _places(cores, shards, clients)
        ]
        done: list[Any] = [child.receive() for child in working]
    calls = sum(count for count, _ in done)
    rate = sum(count / took_s for count, took_s in done)
    return Sample(ops=calls, ops_per_s=rate, work={"calls": calls, "clients": len(done)})


def _places(cores: tuple[int, ...], shards: int, clients: int) -> list[tuple[int, ...]]:
    """The cores of each client: one that no shard has, where there are so many. Shards take theirs
    from the last one on.
    """
    if shards + clients > len(cores):
        return [cores] * clients
    return [(core,) for core in cores[:clients]]


def serve(announce: Announce, master: str, shards: int) -> None:
    """A service whose shards answer, until SIGTERM."""
    stop = StopRequest()
    with prpc_engine.RpcService(
        master, shards=shards, polling=False, transports=["shm"]
    ) as service:
        service.create_server(NAME, Echo, sharded=True, inline=True)
        announce(shards)
        while not stop.asked:
            service.serve_forever(timeout_s=STOP_LOOK_S)


def call(
    announce: Announce,
    master: str,
    case: Calls,
    shards: int,
    clients: int,
    cores: tuple[int, ...],
    effort: Effort,
) -> None:
    """One client: (calls, seconds that they took)."""
    os.sched_setaffinity(0, cores)
    with prpc_engine.RpcService(master, polling=False, transports=["shm"]) as service:
        client = service.create_client(NAME, expected_servers=shards, timeout_s=START_S_MAX)
        submit, method = client.submit_to, case.method
        for each in range(shards):
            client.call_to(each, "echo", PAYLOAD)
        service.master_client.barrier(MEETING, clients, timeout_s=START_S_MAX)
        waiting: deque[Any] = deque()
        began = time.perf_counter()
        done = sent = 0
        while done < effort.ops_min or time.perf_counter() - began < effort.timed_s:
            for _ in range(min(LOOK_CALLS, effort.ops_max)):
                waiting.append(submit(sent % shards, method, PAYLOAD))
                sent += 1
                if len(waiting) >= WINDOW:
                    waiting.popleft().result()
                    done += 1
        took_s = time.perf_counter() - began
        announce((done, took_s))
        for one in waiting:
            one.result()


def test_all_clients_of_all_shards_are_answered() -> None:
    for result in run(replace(CASES[0], counts=(2,)), TINY):
        assert result.state == "ok", result.note
        assert result.work["clients"] == 2
        assert result.work["calls"] >= 2 * TINY.ops_min
        assert result.ops_per_s


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
