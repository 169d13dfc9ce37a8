"""The first call of a process that has just started, through a client that was just made: what a
job waits for at its start.

A fresh process for each: it joins the job, makes a client, calls once, and calls again. Imports and
the process's own start are told apart, and so is joining, for they are paid once; what counts is
from create_client() to the first answer, and its parts:

    client     create_client(): a question to the master, over the session that is there
    connect    connect() of every socket: two over tcp (lanes), one over shared memory
    handshake  each side proves the secret: two round trips a socket, the server's reactor woken for
               each
    attach     the memory of the rings made and mapped, the connection entered into the reactor
    call       the rest: the arguments, the thread of the control loop, the request and its answer

Expected, parking: client 0.5 ms; connect 0.03 ms a socket; handshake 0.4 ms a socket; attach 0.8 ms
over shared memory, where 2 MiB are made and touched, 0.02 ms over tcp; call 0.8 ms. 2 to 3 ms in
all, far below the 20 ms that are allowed. Joining 4 ms; the process and its imports, numpy the
greatest, 0.3 s.

    python -m perf.bench_start [--json] [--quick]
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import prpc_engine
import shard.transport.laned
import shard.transport.shm
import shard.transport.tcp
import shard.transport.unix_rendezvous
from shard.transport.shm_connection import ShmConnection
from shard.transport.tcp_connection import TcpConnection

from .child import Announce, Child
from .harness import Candidate, Place, Result, compare
from .peers.face import WAIT_S_MAX
from .peers.prpc import SERVICE, only_core, serve, serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, summary

NAME = "start"
PAYLOAD = bytes(64)
TRANSPORTS = {"shm": "prpc shm", "tcp": "prpc tcp"}

# What is timed in the client's process, by part: each of these runs to its end before the next
# begins.
STEPS: list[tuple[str, object, str]] = [
    ("connect", shard.transport.tcp, "connect_socket"),
    ("connect", shard.transport.unix_rendezvous, "dial"),
    ("handshake", shard.transport.laned, "meet"),
    ("handshake", shard.transport.shm, "meet"),
    ("attach", shard.transport.shm, "make_rings"),
    ("attach", shard.transport.shm, "connection_over"),
    ("attach", ShmConnection, "attach"),
    ("attach", TcpConnection, "attach"),
]
PARTS = ("client", "connect", "handshake", "attach", "call")  # which add up to the time that counts
ASIDE = ("process", "join", "again")


@dataclass(frozen=True, slots=True)
class FirstCall:
    """A payload there and back, as the first thing that a client does."""

    size_bytes: int = len(PAYLOAD)

    def __str__(self) -> str:
        return f"first call, {self.size_bytes} B"


CASES = [FirstCall()]
TARGETS = [Target(str(CASES[0]), name, "p50_ns", "at most", 20e6) for name in TRANSPORTS.values()]


def run(
    case: FirstCall,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure over both transports."""
    candidates = [
        Candidate(name, "ours", partial(measure, transport=transport))
        for transport, name in TRANSPORTS.items()
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


def measure(place: Place, effort: Effort, transport: str) -> Sample:
    """So many processes one after the other as a repeat has operations at least; figures are their
    medians.
    """
    with (
        place.serve_aside(serve_master) as (_, master),
        place.serve(serve, master, transport, False),
    ):
        starts = []
        for _ in range(effort.ops_min):
            born_ns = time.perf_counter_ns()  # one clock for all processes
            with Child(start_and_call, born_ns, master, transport, cores=place.cores) as client:
                starts.append(client.receive())
                client.finish()
    sample = summary(
        np.array([sum(start[part] for part in PARTS) for start in starts], dtype=np.int64)
    )
    for part in (*PARTS, *ASIDE):
        sample.figures[f"{part}_ns"] = float(np.median([start[part] for start in starts]))
    complete = sum(all(start[part] > 0 for part in PARTS) for start in starts)
    return sample.with_work(wrong=sum(start["wrong"] for start in starts), complete=complete)


def start_and_call(announce: Announce, born_ns: int, master: str, transport: str) -> None:
    """Announces the nanoseconds of each part, and how many of the two answers were wrong."""
    clock = time.perf_counter_ns
    running = clock()
    with (
        prpc_engine.RpcService(master=master, transports=[transport], pin=only_core()) as service,
        timed_steps() as took_ns,
    ):
        joined = clock()
        client = service.create_client(SERVICE, expected_servers=1, timeout_s=WAIT_S_MAX)
        made = clock()
        first = client.call("echo", PAYLOAD, timeout_s=WAIT_S_MAX)
        answered = clock()
        steps = dict(took_ns)
        again = client.call("echo", PAYLOAD, timeout_s=WAIT_S_MAX)
        over = clock()
        announce(
            {
                "process": running - born_ns,
                "join": joined - running,
                "client": made - joined,
                **steps,
                "call": answered - made - sum(steps.values()),
                "again": over - answered,
                "wrong": (first != PAYLOAD) + (again != PAYLOAD),
            }
        )


@contextmanager
def timed_steps() -> Iterator[dict[str, int]]:
    """The nanoseconds spent in STEPS so far, by part."""
    took_ns = {part: 0 for part, _, _ in STEPS}
    originals = [(owner, name, getattr(owner, name)) for _, owner, name in STEPS]
    for (part, owner, name), (_, _, step) in zip(STEPS, originals, strict=True):
        setattr(owner, name, _timed(step, part, took_ns))
    try:
        yield took_ns
    finally:
        for owner, name, step in originals:
            setattr(owner, name, step)


def _timed(step: Callable[..., Any], part: str, took_ns: dict[str, int]) -> Callable[..., Any]:
    @contextmanager
    def timing() -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            took_ns[part] += time.perf_counter_ns() - start

    def timed(*args: Any, **options: Any) -> Any:
        with timing():
            return step(*args, **options)

    async def timed_coroutine(*args: Any, **options: Any) -> Any:
        with timing():
            return await step(*args, **options)

    return timed_coroutine if inspect.iscoroutinefunction(step) else timed


# -- the same code on tiny sizes -------------------------------------------------------------------


def test_a_fresh_process_gets_its_answers_and_every_part_took_time() -> None:
    for result in run(CASES[0], replace(TINY, ops_min=1)):
        assert result.state == "ok", result.note
        assert result.work == {"wrong": 0, "complete": 1}


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
