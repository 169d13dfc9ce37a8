"""ps-lite's verbs between a worker and a server process, inline on both sides, polling; the
scheduler aside.

Expected, one key a message:
    push awaited, 64 B to 4 KB  a call (5 us over shm) and on both sides together some 5 us: a head
                                packed and read, arrays copied into it and viewed there, a timestamp
                                kept. 10 us.
    pushes in flight, 64 B      no waiting, only work: the worker's side, some 3.5 us a message, of
                                which up to 32 leave in one call of some 8 us.
    64 KiB to 16 MB over shm    40 messages (4 of 16 MB) of one key each, all issued and then all
                                waited for, as the C++ figures were taken. push: one copy into
                                shared memory; the handle gets a view. pull: the server's copy and
                                the worker's into its own array: half of memcpy's rate. push_pull:
                                both. What is below 128 KiB, both ways together, shares calls once
                                eight are on their way.
    the same over unix, tcp     what one socket within the host carries; nodes without shared memory
                                choose unix over tcp.
    batched keys                100,000 scalars a push, summed by the default handle: its look-up of
                                keys that were pushed together before, a few ns a key.
    barrier                     the first worker holds it: one call of the other to it, which opens
                                it where the first has come: 15 us, and what they come apart.

The C++ figures are of dmlc/ps-lite, zmq over loopback, built natively on a machine of the same kind
(published.py); they are not measured here.

    python -m perf.bench_pslite [--json] [--quick]
"""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prpc_engine import pslite as ps

from . import published
from .child import Announce
from .harness import Candidate, Place, Result, compare
from .limits import measure_copy
from .peers import tcp_raw
from .peers.face import Job
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_calls, time_each, time_many

NAME = "pslite"
SHM, UNIX, TCP = "prpc pslite, shm", "prpc pslite, unix", "prpc pslite, tcp"
COPY, RAW = "np.copyto, one core", "raw tcp"
KIB = 1 << 10
BATCHED_KEYS = 100_000
WINDOW = 128
WINDOW_FIRST = 256
BARRIERS = 3000


@dataclass(frozen=True, slots=True)
class Verb:
    """One key with `size_bytes` of values. `window` > 1: so many under way. `messages` > 1: so many
    issued, then waited for.
    """

    verb: str
    size_bytes: int
    window: int = 1
    messages: int = 1

    def __str__(self) -> str:
        size = f"{self.size_bytes // KIB} KiB" if self.size_bytes >= KIB else f"{self.size_bytes} B"
        in_flight = f", {self.window} in flight" if self.window > 1 else ""
        return (
            f"{self.verb}, "
            f"{size}{in_flight}{f', {self.messages} a round' if self.messages > 1 else ''}"
        )


@dataclass(frozen=True, slots=True)
class Batched:
    """Pushes of many scalars, summed by the default handle."""

    keys: int = BATCHED_KEYS
    size_bytes: int = BATCHED_KEYS * 12

    def __str__(self) -> str:
        return f"push, {self.keys} keys summed"


@dataclass(frozen=True, slots=True)
class Barrier:
    """Of two workers."""

    size_bytes: int = 0

    def __str__(self) -> str:
        return "barrier of 2 workers"


Case = Verb | Batched | Barrier
# messages a round, as in the C++ figures
LARGE_BYTES = {64 * KIB: 40, 1_024_000: 40, 16_384_000: 4}
SMALL = [Verb("push", size) for size in (64, KIB, 4 * KIB)]
IN_FLIGHT = Verb("push", 64, window=WINDOW)
LARGE = [
    Verb(verb, size, messages=count)
    for size, count in LARGE_BYTES.items()
    for verb in ("push", "pull", "push_pull")
]
CASES: list[Case] = [*SMALL, IN_FLIGHT, *LARGE, Batched(), Barrier()]
CPP = published.name_of(published.PSLITE)
TARGETS = [
    *(Target(str(case), SHM, "p50_ns", "at most", 10_000) for case in SMALL),
    *(Target(str(case), SHM, "p50_ns", "at most", 1 / 5, against=CPP) for case in SMALL),
    Target(str(IN_FLIGHT), SHM, "ops_per_s", "at least", 250_000),
    *(Target(str(case), SHM, "gbps", "at least", 1.5, against=CPP) for case in LARGE),
    *(Target(str(case), TCP, "gbps", "at least", 0.9, against=CPP) for case in LARGE),
    Target(str(Batched()), SHM, "million_keys_per_s", "at least", 20),
    Target(str(Barrier()), SHM, "p50_ns", "at most", 30_000),
]


def run(
    case: Case,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case over each transport, beside what bounds it, and what was published of the
    C++ one.
    """
    candidates = [Candidate(SHM, "ours", partial(measure, case=case, van="shm"))]
    if not isinstance(case, Barrier):
        candidates.append(Candidate(UNIX, "ours", partial(measure, case=case, van="unix")))
        candidates.append(Candidate(TCP, "ours", partial(measure, case=case, van="tcp")))
    if isinstance(case, Verb) and case.window == 1:
        candidates += [
            Candidate(COPY, "limit", partial(_measure_copy, size_bytes=case.size_bytes)),
            Candidate(RAW, "limit", partial(_measure_raw, size_bytes=case.size_bytes)),
        ]
    results = compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )
    verb = (
        case.verb if isinstance(case, Verb) else "barrier" if isinstance(case, Barrier) else "keys"
    )
    return results + published.pslite_results(
        NAME, str(case), verb, case.size_bytes, getattr(case, "window", 1)
    )


def _join(role: str, port: int, workers: int, van: str, is_polling: bool) -> None:
    """What `prpc launch` would set."""
    os.environ.update(
        DMLC_ROLE=role,
        DMLC_NUM_SERVER="1",
        DMLC_NUM_WORKER=str(workers),
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(port),
        DMLC_PS_VAN_TYPE=van,
        DMLC_LOCKLESS_QUEUE=str(int(is_polling)),
    )
    os.environ.pop("DMLC_RANK", None)
    ps.start()


def _keep(
    store: dict[int, NDArray[np.uint8]], meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer
) -> None:
    """As bytedance's benchmark: what was pushed last is what is pulled."""
    key = int(pairs.keys[0])
    if meta.push:
        store[key] = pairs.vals
    server.response(meta, ps.KVPairs(pairs.keys, store[key]) if meta.pull else None)


def serve(
    announce: Announce,
    role: str,
    port: int,
    workers: int,
    van: str,
    is_polling: bool,
    is_summing: bool,
    barriers: int = 0,
) -> None:
    """The scheduler, the server, or the other worker of a barrier, until the job ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    announce(os.getpid())
    _join(role, port, workers, van, is_polling)
    if role == "server":
        store: dict[int, NDArray[np.uint8]] = {}
        ps.KVServer(0).set_request_handle(
            ps.KVServerDefaultHandle() if is_summing else partial(_keep, store)
        )
    elif role == "worker":
        for _ in range(barriers):
            ps.get_postoffice().barrier(0, ps.WORKER_GROUP)
    ps.finalize()


def _held_port() -> socket.socket:
    """Bound to a free port, and not listening: a scheduler, whose socket has SO_REUSEADDR, too,
    gets it, and nobody else does.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def measure(place: Place, effort: Effort, case: Case, van: str) -> Sample:
    """One repeat, in the worker."""
    workers = 2 if isinstance(case, Barrier) else 1
    held = _held_port()
    job = held.getsockname()[1], workers, van
    with (
        held,
        place.serve_aside(serve, "scheduler", *job, False, False) as (scheduler, _),
        place.serve(
            serve, "server", *job, not isinstance(case, Barrier), isinstance(case, Batched)
        ) as (server, _),
    ):
        if isinstance(case, Barrier):
            barriers = BARRIERS if effort.timed_s else effort.ops_min
            with place.serve(serve, "worker", *job, True, False, barriers) as (other, _):
                _join("worker", *job, True)
                sample = time_calls(
                    lambda: ps.get_postoffice().barrier(0, ps.WORKER_GROUP), barriers
                )
                ps.finalize()
                other.finish()
        else:
            _join("worker", *job, True)
            kv = ps.KVWorker(0)
            sample = (
                _measure_batched(kv, case, effort)
                if isinstance(case, Batched)
                else _measure_verb(kv, case, effort)
            )
            ps.finalize()
        server.finish()
        scheduler.finish()
    return sample


def _measure_verb(kv: ps.KVWorker, case: Verb, effort: Effort) -> Sample:
    keys = [np.array([number], np.uint64) for number in range(case.messages)]
    vals = [np.full(case.size_bytes, 7, np.uint8) for _ in keys]
    outs = [np.zeros(case.size_bytes, np.uint8) for _ in keys]
    for timestamp in [kv.push(*each) for each in zip(keys, vals, strict=True)]:
        kv.wait(timestamp)
    verbs: dict[str, Callable[[int], int]] = {
        "push": lambda at: kv.zpush(keys[at], vals[at]),
        "pull": lambda at: kv.zpull(keys[at], outs[at]),
        "push_pull": lambda at: kv.zpush_pull(keys[at], vals[at], outs[at]),
    }
    verb, wait = verbs[case.verb], kv.wait

    def take_round() -> None:
        for timestamp in [verb(at) for at in range(case.messages)]:
            wait(timestamp)

    if case.window == 1:
        operate = take_round if case.messages > 1 else lambda: wait(verb(0))
        sample = _with_gbps(time_each(operate, effort, case.messages), case.size_bytes)
    else:

        def send(count: int) -> None:
            under_way: deque[int] = deque()
            for _ in range(count):
                under_way.append(verb(0))
                if len(under_way) >= case.window:
                    wait(under_way.popleft())
            for timestamp in under_way:
                wait(timestamp)

        sample = time_many(send, effort, WINDOW_FIRST, 4 * effort.ops_max)[0]
    for timestamp in [kv.pull(*each) for each in zip(keys, outs, strict=True)]:
        kv.wait(timestamp)
    return sample.with_work(
        bytes_right=sum(int((out == 7).sum()) for out in outs),
        bytes_in_all=case.size_bytes * case.messages,
    )


def _measure_batched(kv: ps.KVWorker, case: Batched, effort: Effort) -> Sample:
    keys, vals, outs = (
        np.arange(case.keys, dtype=np.uint64),
        np.ones(case.keys, np.float32),
        np.zeros(case.keys, np.float32),
    )
    pushes = 0

    def push() -> None:
        nonlocal pushes
        kv.wait(kv.zpush(keys, vals))
        pushes += 1

    sample = time_each(push, effort)
    if sample.p50_ns:
        sample.figures["million_keys_per_s"] = case.keys * 1e3 / sample.p50_ns
    kv.wait(kv.pull(keys, outs))
    return sample.with_work(values_right=int((outs == pushes).sum()), values=case.keys)


def _measure_copy(place: Place, effort: Effort, size_bytes: int) -> Sample:
    return _with_gbps(measure_copy(place, effort, size_bytes), size_bytes)


def _measure_raw(place: Place, effort: Effort, size_bytes: int) -> Sample:
    """The values one way, four bytes back."""
    with tcp_raw.Connected(place, Job("array", size_bytes), spin=True) as peer:
        array = np.ones(size_bytes // 4, np.float32)
        return _with_gbps(time_each(lambda: peer.send_array(array), effort), size_bytes)


def _with_gbps(sample: Sample, size_bytes: int) -> Sample:
    if sample.p50_ns:
        sample.figures["gbps"] = size_bytes * 8 / sample.p50_ns
    return sample


def test_what_was_pushed_is_what_is_pulled() -> None:
    for case in (
        Verb("push", 64),
        Verb("push_pull", 64 * KIB, messages=3),
        Verb("push", 64, window=8),
        Batched(1000),
    ):
        for result in run(case, TINY):
            assert result.state == "ok", result.note
            if result.role == "ours":
                right, in_all = result.work.values()
                assert right == in_all > 0


def test_two_workers_meet_as_often_as_they_are_timed() -> None:
    ours, given = run(Barrier(), TINY)
    assert ours.state == "ok", ours.note
    assert ours.ops == TINY.ops_min
    assert given.p50_ns == 91_000


def test_every_target_against_what_was_published_has_a_figure() -> None:
    given = {
        str(case): published.pslite_results(
            NAME, str(case), case.verb, case.size_bytes, case.window
        )
        for case in SMALL + LARGE
    }
    assert all(len(found) == 1 for found in given.values())
    assert {target.against for target in TARGETS if target.against} == {
        found[0].candidate for found in given.values()
    }


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
